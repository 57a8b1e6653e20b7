"""The options of `tokenway bench --frameworks`, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from tokenway.usage import UsageError, add_group, listed, number, one_of, refuse_given

OPTION = "--frameworks"
PARTS = ("exchange", "scatter", "engine")
PROFILES = ("qwen3-30b-a3b", "deepseek-v3")  # unless others are named; of engine the first of those that are
TOKENS = (8, 128, 4096)  # of exchange, on GPUs
_EACH = "its parts choose what they measure"
# (option, another that does not go with it, why)
APART = (
    *((OPTION, other, "each is a run of its own") for other in ("--aux", "--collective", "--overhead", "--layer")),
    *((OPTION, other, "each is a run of its own") for other in ("--returns", "--mode auto", "--backend torch")),
    *((OPTION, other, _EACH) for other in ("--backward", "--baselines", "--plot", "--dtype fp8", "--compare")),
    *((OPTION, other, _EACH) for other in ("--ablation", "--local-ranks", "--over nccl")),
)


@dataclass(frozen=True)
class Frameworks:
    """What a run of integrations measures beside the other settings."""

    parts: tuple[str, ...] = PARTS
    rows: tuple[int, ...] = (8, 32, 128, 1024)  # of scatter: those of the rank that has most
    layers: int = 4  # of engine's decoder
    batch: int = 32  # sequences of a rank
    prompt: int = 128  # tokens of one
    generate: int = 32  # tokens that each is continued by


_USUAL = Frameworks()
_OPTIONS: dict[str, dict[str, Any]] = {
    "--rows": {**listed(number(1)), "metavar": "R", "help": "scatter: of the rank with most (default 8 32 128 1024)"},
    **{
        f"--{name}": {"type": number(1), "metavar": "N", "help": f"engine: {what} (default {getattr(_USUAL, name)})"}
        for name, what in (
            ("layers", "layers of the decoder"),
            ("batch", "sequences of a rank"),
            ("prompt", "tokens of a prompt"),
            ("generate", "tokens that follow it"),
        )
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    of_parts = {**listed(one_of((*PARTS, "all")), PARTS), "nargs": "*"}
    parser.add_argument(
        OPTION,
        **of_parts,
        metavar="PART",
        help=f"integrations beside the frameworks' own ways: some of {', '.join(PARTS)} (default all)",
    )
    add_group(parser, OPTION, _OPTIONS)


def from_arguments(args: argparse.Namespace) -> Frameworks | None:
    """What was asked for; None where nothing was. Raises UsageError."""
    if args.frameworks is None:
        refuse_given(args, OPTION, _OPTIONS)
        return None
    given = {name.lstrip("-"): getattr(args, name.lstrip("-")) for name in _OPTIONS}
    return Frameworks(args.frameworks or PARTS, **{name: value for name, value in given.items() if value is not None})


def check(settings: Any) -> None:
    """Whether the other options go with it. Raises UsageError."""
    if settings.ranks < 2:
        raise UsageError(f"{OPTION}: from 2 ranks on; one has no peer")
    for name in settings.routings:
        if name.endswith(".npz"):
            raise UsageError(f"{OPTION}: --routing of a generator's name; each step is routed anew")
