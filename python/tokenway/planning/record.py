"""Makes the files that docs/PLANNING.md shows: python -m tokenway.planning.record bench/results

Nothing is measured: what is written follows from the measured files in that folder, and from this package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenway.bench.case import Case
from tokenway.bench.profiles import PROFILES
from tokenway.planning import command, fitting, model, options, rows
from tokenway.planning.fitted import CARDS
from tokenway.planning.machines import MACHINES
from tokenway.planning.model import Choice, Work
from tokenway.planning.published import FIGURES, Figure
from tokenway.planning.rows import Layer

DIGITS = 6
WITHIN = 0.15  # what a held-out deviation is wanted to be below
GPUS = {
    "h100-cx7": (8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    "gb200-nvl72": (8, 16, 32, 64, 72, 144, 288, 576, 1152, 2016),
}


def plan(name: str) -> dict[str, Any]:
    """Predictions for a machine, the fastest choices alone."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    gpus = [str(count) for count in GPUS[name]]
    asked = parser.parse_args(["--machine", name, "--dtype", "fp8", "--tokens", "8", "128", "4096", "--gpus", *gpus])
    found = command.figures(options.from_arguments(asked))
    for row in found["predictions"]:
        del row["choices"]
    return found


def fit(folder: Path) -> dict[str, Any]:
    """Constants and the files that they are from, and what they say of four GPUs."""
    runs = fitting.read(folder)
    made: dict[str, Any] = {}
    for name, card in CARDS.items():
        own = fitting.fitted_points(runs, name)
        lent = fitting.fitted_points(runs, "H200")
        told = asdict(card)
        for key, rate in told["rates"].items():
            from_own = sorted({point.file for point in own if fitting.key_of(point) == key})
            rate["files"] = from_own or sorted({point.file for point in lent if fitting.key_of(point) == key})
        made[name] = told
    return {"within": WITHIN, "cards": made, "held_out": fitting.held_out(folder, CARDS)}


def _beside(figure: Figure) -> dict[str, Any]:
    machine, profile = MACHINES[figure.machine], PROFILES["deepseek-v3"]
    layer = Layer(profile.experts, profile.top_k, figure.gpus, min(machine.domain, figure.gpus))
    case = Case(profile, "uniform", figure.tokens, figure.gpus, "float8_e4m3fn", "rank_major", "none")
    work = Work(layer, figure.tokens, case.dispatch_row, case.combine_row)
    counted = rows.routed(layer, figure.tokens)
    flat = model.predict(machine, work, Choice(), counted)
    folded = None if layer.domains == 1 else model.predict(machine, work, Choice(sums="by_domain"), counted).combine_us
    ours = {"dispatch": flat.dispatch_us, "combine": flat.combine_us, "combine by_domain": folded}
    told = {name: getattr(figure, name) for name in ("library", "machine", "gpus", "tokens", "source")}
    return told | {"us": {"dispatch": figure.dispatch_us, "combine": figure.combine_us}, "predicted_us": ours}


def published() -> dict[str, Any]:
    """Others' figures, each beside what is predicted for the same shapes."""
    return {"published": [_beside(figure) for figure in FIGURES]}


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """All files by name."""
    plans = {f"plan-{name}.json": plan(name) for name in GPUS}
    made = plans | {"plan-fit.json": fit(folder), "plan-published.json": published()}
    # So that another machine's last bits change no file.
    return {name: fitting.rounded(found, DIGITS) for name, found in made.items()}


def main(argv: Sequence[str]) -> int:
    """Writes them."""
    folder = Path(argv[0])
    for name, found in files(folder).items():
        (folder / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
