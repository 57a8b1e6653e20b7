"""How the CUDA backend would run a step: what `tokenway info --plan` prints. Needs no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import Any

from tokenway import _header, _native
from tokenway.errors import InvalidArgument
from tokenway.settings import Settings, make_config

# DeepSeek-V3's layer, at a step of decoding.
DEFAULTS: dict[str, Any] = {"ranks": 2, "tokens": 128, "experts": 256, "top_k": 8, "hidden": 7168}
_NUMBERS = {
    *("ranks", "tokens", "sms", "experts", "top_k", "hidden", "max_tokens", "combine_hidden"),
    *("lanes", "sm_limit", "max_recv_tokens", "row_alignment", "lease_bytes", "low_latency_tokens"),
}
_NAMES = {"dtype", "combine_dtype", "mode", "overflow"}


def describe(ranks: int, tokens: int, sms: int = 0, **settings: Any) -> dict[str, str]:
    """The plan of a dispatch and a combine of `tokens` tokens a rank, name to value. settings: as of `Group`, where
    max_tokens is `tokens` unless it is given. sms: of each device; 0: 132, as H100 and H200 SXM have."""
    asked = Settings(**{"max_tokens": max(tokens, 1)} | settings)
    config, keep = make_config(asked)
    query = _header.PlanQuery()
    query.tokens = _native.fit("tokens", tokens)
    query.device_sms = _native.fit("sms", sms)
    text = ctypes.create_string_buffer(1 << 16)
    needed = ctypes.c_size_t()
    _native.check(
        _native.lib.twDescribePlan(
            byref(config), _native.fit("ranks", ranks), byref(query), text, len(text), byref(needed)
        ),
        tensors=asked.payload_names(),
    )
    del keep
    return dict(line.split("\t") for line in text.value.decode().splitlines())


def from_words(words: Sequence[str]) -> dict[str, str]:
    """The same for words like "tokens=128", as on a command line; DEFAULTS for what is not there."""
    given: dict[str, Any] = dict(DEFAULTS)
    known = _NUMBERS | _NAMES
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise InvalidArgument(f"--plan has {word!r}; it must be NAME=VALUE with one of {', '.join(sorted(known))}")
        try:
            given[name] = int(value) if name in _NUMBERS else value
        except ValueError:
            raise InvalidArgument(f"--plan has {word!r}; {name} must be an integer") from None
    return describe(**given)


def text(plan: dict[str, str]) -> str:
    """A plan in columns, a step after another."""
    lines, step = [], ""
    for key, value in plan.items():
        before, colon, name = key.rpartition(": ")
        if before != step:
            lines += ["", before]
            step = before
        lines.append(f"  {name:<24}{value}" if colon else f"{name:<26}{value}")
    return "\n".join(lines)
