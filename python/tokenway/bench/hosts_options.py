"""The options of `tokenway bench --backend fabric`, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from tokenway import portable
from tokenway.bench.case import EXACT_LAYOUTS
from tokenway.usage import UsageError, add_group, number, refuse_given

BACKEND = "--backend fabric"
BESIDE = ("torch", "none")
TOKENS = (1, 8, 32, 128, 512)
TURNS = {"iterations": 200, "rounds": 10, "warmup": 2}
QUICK = {"iterations": 10, "rounds": 2, "warmup": 1}
# (option, another that does not go with it, why)
APART = tuple(
    (option, BACKEND, "which times pairs alone, beside those of another backend")
    for option in ("--backward", "--overhead", "--aux", "--plot", "--baselines", "--collective", "--dtype fp8")
)


@dataclass(frozen=True)
class Hosts:
    """What a run between hosts measures beside the other settings."""

    backends: tuple[str, ...] = ("fabric", "torch")  # by turns
    ranks_per_host: int | None = None  # None: hosts are what they are


_OPTIONS: dict[str, dict[str, Any]] = {
    "--beside": {
        "choices": BESIDE,
        "metavar": "NAME",
        "help": "torch (default): the portable backend over gloo, by turns; or none",
    },
    "--ranks-per-host": {
        "type": number(1),
        "metavar": "N",
        "help": "so many ranks each stand for a host (default: where processes are started here, half of them)",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_group(parser, f"{BACKEND} (--ranks-per-host also with --backend gin)", _OPTIONS)


def from_arguments(args: argparse.Namespace) -> Hosts | None:
    """What was asked for; None with another backend. Raises UsageError."""
    if args.backend != "fabric":
        refuse_given(args, BACKEND, _OPTIONS if args.backend != "gin" else _OPTIONS.keys() - {"--ranks-per-host"})
        return None
    if missing := portable.missing():  # ranks tell each other what they measure over gloo
        raise UsageError(f"{BACKEND}: {missing}")
    backends = ("fabric",) if args.beside == "none" else Hosts.backends
    return Hosts(backends, args.ranks_per_host)


def check(settings: Any) -> None:
    """Whether the other options go with it. Raises UsageError."""
    if settings.layout in EXACT_LAYOUTS:
        raise UsageError(f"--layout: rank_major, expert_major or grouped_by_bound with {BACKEND}")
