"""The options of `tokenway bench --moving`, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from tokenway.bench.profiles import PROFILES
from tokenway.usage import UsageError, add_group, number, refuse_given

OPTION = "--moving"
TOKENS = (64,)
_LAYERS = "its layers choose how they are measured"
# (option, another that does not go with it, why)
APART = (
    *((OPTION, other, "each is a run of its own") for other in ("--aux", "--collective", "--overhead", "--layer")),
    *((OPTION, other, "each is a run of its own") for other in ("--returns", "--mode auto", "--frameworks")),
    *((OPTION, other, _LAYERS) for other in ("--backward", "--baselines", "--plot", "--dtype fp8", "--compare")),
    *((OPTION, other, _LAYERS) for other in ("--ablation", "--local-ranks", "--over nccl", "--verify-only")),
)


@dataclass(frozen=True)
class Moving:
    """What a run of experts that move measures beside the other settings."""

    layers: int = 8  # of a step
    spare: int = 2  # slots of each rank and layer
    writes: int = 16  # slots of a layer that a plan changes
    steps: int = 5000  # in all, a third of them with moves
    step_mib: int = 64  # copied to a rank in a step, at most


_USUAL = Moving()
_OPTIONS: dict[str, dict[str, Any]] = {
    f"--moving-{name.replace('_', '-')}": {
        "type": number(1),
        "metavar": "N",
        "help": f"{what} (default {getattr(_USUAL, name)})",
    }
    for name, what in (
        ("layers", "layers of a step"),
        ("spare", "spare slots of each rank and layer"),
        ("writes", "slots of a layer that a plan changes"),
        ("steps", "steps in all, a third of them with moves"),
        ("step_mib", "MiB copied to a rank in a step at most"),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(OPTION, action="store_true", help="steps of MoE layers while experts move (on GPUs)")
    add_group(parser, OPTION, _OPTIONS)


def from_arguments(args: argparse.Namespace) -> Moving | None:
    """What was asked for; None where nothing was. Raises UsageError."""
    if not args.moving:
        refuse_given(args, OPTION, _OPTIONS)
        return None
    names = [name.lstrip("-").replace("-", "_") for name in _OPTIONS]
    given = {name.removeprefix("moving_"): getattr(args, name) for name in names}
    return Moving(**{name: value for name, value in given.items() if value is not None})


def check(settings: Any) -> None:
    """Whether the other options go with it. Raises UsageError."""
    if settings.nvlink is None:
        raise UsageError(f"{OPTION}: with --backend nvlink alone; it measures what copy engines and graphs do")
    if settings.ranks < 2:
        raise UsageError(f"{OPTION}: from 2 ranks on; experts move between ranks")
    for name in settings.profiles:
        if PROFILES[name].experts % settings.ranks:
            raise UsageError(f"{OPTION}: --ranks {settings.ranks}; it must divide the {PROFILES[name].experts} experts")
    if settings.moving.writes < 2:
        raise UsageError(f"--moving-writes: {settings.moving.writes}; from 2 on, as experts change places in pairs")
    if settings.moving.steps < 3 * settings.rounds:
        raise UsageError(f"--moving-steps: {settings.moving.steps}; from {3 * settings.rounds} on, three a round")
