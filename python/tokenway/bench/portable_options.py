"""The options of `tokenway bench --backend torch`, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from tokenway import portable
from tokenway.bench.case import EXACT_LAYOUTS
from tokenway.bench.profiles import PROFILES
from tokenway.usage import UsageError, add_group, listed, number, one_of, refuse_given

BACKEND = "--backend torch"
MOST_TOP_K = 64
WAYS: dict[str, dict[str, str]] = {
    "routed": {"strategy": "routed"},
    "gathered": {"strategy": "gathered"},
    "auto": {},
    "fixed": {"strategy": "routed", "capacity": "fixed"},
    "gathered-exact": {"strategy": "gathered", "capacity": "exact"},
}
CHOSEN = ("routed", "gathered", "auto", "fixed")
TOP_K = (1, 2, 8)
# (option, another that does not go with it, why)
APART = tuple(
    (option, BACKEND, "its ways are measured beside each other")
    for option in ("--backward", "--overhead", "--aux", "--plot", "--baselines")
)


@dataclass(frozen=True)
class Portable:
    """What a run of the portable backend measures beside the other settings."""

    strategies: tuple[str, ...] = CHOSEN
    top_k: tuple[int, ...] = TOP_K


_OPTIONS: dict[str, dict[str, Any]] = {
    "--strategy": {
        **listed(one_of(tuple(WAYS))),
        "metavar": "NAME",
        "help": f"of {', '.join(WAYS)} (default {' '.join(CHOSEN)})",
    },
    "--top-k": {
        **listed(number(1, MOST_TOP_K)),
        "metavar": "K",
        "help": "experts per token, instead of the profile's (default 1 2 8)",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_group(parser, BACKEND, _OPTIONS)


def from_arguments(args: argparse.Namespace) -> Portable | None:
    """What was asked for; None with another backend. Raises UsageError."""
    if args.backend != "torch":
        refuse_given(args, BACKEND, _OPTIONS)
        return None
    if missing := portable.missing():
        raise UsageError(f"{BACKEND}: {missing}")
    return Portable(args.strategy or CHOSEN, args.top_k or TOP_K)


def check(settings: Any) -> None:
    """Whether the other options go with it. Raises UsageError."""
    if settings.layout in EXACT_LAYOUTS:
        raise UsageError(f"--layout: rank_major or expert_major with {BACKEND}")
    for name in settings.profiles:
        most = PROFILES[name].experts
        if max(settings.portable.top_k) > most:
            raise UsageError(f"--top-k: {max(settings.portable.top_k)}; {name} has {most} experts")
