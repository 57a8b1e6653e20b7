"""The options of `tokenway bench --backend torch`, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from tokenway import portable, usage
from tokenway.bench.profiles import PROFILES
from tokenway.usage import UsageError

WAYS: dict[str, dict[str, str]] = {
    "routed": {"strategy": "routed"},
    "gathered": {"strategy": "gathered"},
    "auto": {},
    "fixed": {"strategy": "routed", "capacity": "fixed"},
    "gathered-exact": {"strategy": "gathered", "capacity": "exact"},
}
CHOSEN = ("routed", "gathered", "auto", "fixed")
TOP_K = (1, 2, 8)


@dataclass(frozen=True)
class Portable:
    """What a run of the portable backend measures beside the other settings."""

    strategies: tuple[str, ...] = CHOSEN
    top_k: tuple[int, ...] = TOP_K


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument_group("with --backend torch").add_argument
    add("--strategy", nargs="+", metavar="NAME", help=f"of {', '.join(WAYS)} (default {' '.join(CHOSEN)})")
    add("--top-k", nargs="+", metavar="K", help="experts per token, instead of the profile's (default 1 2 8)")


def from_arguments(args: argparse.Namespace) -> Portable | None:
    """What was asked for; None with another backend. Raises UsageError."""
    if args.backend != "torch":
        for name in ("strategy", "top_k"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')}: only with --backend torch")
        return None
    missing = portable.missing()
    if missing:
        raise UsageError(f"--backend torch: {missing}")
    names = [name for item in args.strategy or CHOSEN for name in item.split(",") if name]
    chosen = tuple(usage.choice("--strategy", name, tuple(WAYS), "") for name in dict.fromkeys(names))
    given = [k for item in args.top_k or () for k in item.split(",") if k]
    for k in given:
        if not k.isdecimal() or not 1 <= int(k) <= 64:
            raise UsageError(f"--top-k: {k!r}; allowed 1..64")
    return Portable(chosen, tuple(dict.fromkeys(int(k) for k in given)) or TOP_K)


def check(settings: Any) -> None:
    """Whether the other options go with it. Raises UsageError."""
    for name in ("backward", "overhead", "aux", "plot", "baselines"):
        if getattr(settings, name):
            raise UsageError(f"--{name}: not with --backend torch, whose ways are measured beside each other")
    if settings.layout in ("flat", "grouped"):
        raise UsageError("--layout: rank_major or expert_major with --backend torch")
    for name in settings.profiles:
        most = PROFILES[name].experts
        if max(settings.portable.top_k) > most:
            raise UsageError(f"--top-k: {max(settings.portable.top_k)}; {name} has {most} experts")
