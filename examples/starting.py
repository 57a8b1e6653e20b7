"""How examples start their ranks: the command line that they have in common, and the exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from arrays import module_of

import tokenway as tw


def parse(
    description: str, devices: Sequence[str] = ("cpu", "cuda"), processes: str = "processes", picture: str = ""
) -> Any:
    """device, and how many ranks: 4 unless given, on CUDA devices one for each. picture: what `plot` names a file for,
    of examples that draw."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=devices, default="cpu", help="cpu: NumPy; torch: PyTorch on the CPU")
    parser.add_argument("--ranks", type=int, help=f"{processes} (default 4, with cuda one for each device)")
    if picture:
        parser.add_argument("--plot", metavar="FILE.png", help=f"{picture} (needs matplotlib)")
    options = parser.parse_args()
    options.ranks = options.ranks or (module_of("cuda").cuda.device_count() if options.device == "cuda" else 4)
    return options


def run(options: Any, rank_main: Callable[..., Any], report: Callable[[list[Any]], bool]) -> int:
    """Runs rank_main(device) on all ranks and reports what they return; the exit code."""
    good = report(tw.run(rank_main, options.ranks, options.device, timeout=300))
    print("\nAll checks hold." if good else "\nA check FAILED.")
    return 0 if good else 1
