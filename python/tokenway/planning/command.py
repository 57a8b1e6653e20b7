"""`tokenway plan`: predicts, prints and draws."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenway.bench.case import Case
from tokenway.bench.profiles import PROFILES
from tokenway.bench.tables import planning
from tokenway.planning import memory, model, rows, simulation
from tokenway.planning.model import Prediction, Work
from tokenway.planning.options import Options
from tokenway.planning.rows import Layer
from tokenway.tables import show_columns


def run(options: Options) -> int:
    """Predicts all; returns the exit code."""
    found = figures(options)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.plot:
        draw(found, options.plot)
    show(found)
    return 0


def figures(options: Options) -> dict[str, Any]:
    """All that was predicted, as plain data."""
    machine = options.machine
    constants = {name: asdict(constant) for name, constant in machine.constants().items()}
    return {
        "machine": machine.name,
        "card": machine.card.name,
        "domain": machine.domain,
        "constants": constants,
        "settings": {
            name: getattr(options, name)
            for name in (
                "profile",
                "dtype",
                "mode",
                "placement",
                "routing",
                "seed",
                "simulate",
                "late_share",
                "late_us",
            )
        },
        "predictions": [cell(options, gpus, tokens) for gpus in options.gpus for tokens in options.tokens],
    }


def work_of(options: Options, gpus: int, tokens: int) -> Work:
    """What is exchanged between so many GPUs."""
    profile = PROFILES[options.profile]
    placement = options.placement
    if placement == "auto":
        placement = "replicated" if gpus > profile.experts else "contiguous"
    layer = Layer(profile.experts, profile.top_k, gpus, min(options.machine.domain, gpus), placement)
    case = Case(profile, options.routing, tokens, gpus, options.dtype, "rank_major", "none")
    return Work(layer, tokens, case.dispatch_row, case.combine_row)


def cell(options: Options, gpus: int, tokens: int) -> dict[str, Any]:
    """One row: all choices, the fastest of them, and what it needs."""
    work = work_of(options, gpus, tokens)
    layer = work.layer
    counted = {
        "routed": rows.routed(layer, tokens, options.routing, options.seed),
        "gathered": rows.gathered(layer, tokens),
    }
    made = [
        model.predict(options.machine, work, choice, counted[choice.route])
        for choice in model.choices(layer)
        if options.mode in ("auto", choice.mode)
    ]
    best = min(made, key=lambda prediction: prediction.pair_us)
    held = memory.of(
        gpus,
        layer.domain,
        experts=max(layer.experts, gpus) if layer.placement == "replicated" else layer.experts,
        top_k=layer.top_k,
        hidden=PROFILES[options.profile].hidden,
        tokens=tokens,
        dispatch_row=work.dispatch_row,
        combine_row=work.combine_row,
    )
    found: dict[str, Any] = {
        "gpus": gpus,
        "domains": layer.domains,
        "tokens": tokens,
        "placement": layer.placement,
        "rows": asdict(counted["routed"]),
        "choices": [asdict(prediction) for prediction in made],
        "best": asdict(best),
        "memory": asdict(held),
        "against": _against(made),
    }
    if options.simulate:
        late = {"share": options.late_share, "late_us": options.late_us}
        seen = simulation.tails(options.machine, work, options.routing, options.simulate, seed=options.seed, **late)
        found["tails"] = asdict(seen)
    return found


def _against(made: list[Prediction]) -> dict[str, float | None]:
    """How many times as long the fastest pair takes with one side of each alternative as with the other."""

    def least(**wanted: str) -> float | None:
        times = [p.pair_us for p in made if all(getattr(p.choice, name) == value for name, value in wanted.items())]
        return min(times, default=None)

    pairs = {
        "gathered": (least(route="gathered"), least(route="routed")),
        "high_throughput": (least(mode="high_throughput"), least(mode="low_latency", route="routed")),
        "by_domain": (least(sums="by_domain"), least(sums="flat", route="routed")),
        "direct": (least(way="direct", route="routed"), least(way="pull", route="routed")),
    }
    return {name: a / b if a and b else None for name, (a, b) in pairs.items()}


def show(found: dict[str, Any]) -> None:
    """Prints all."""
    for table in planning.tables(found):
        show_columns(table.what, table.heads, table.cells, table.texts)
        print()
    print("\n".join(planning.notes(found)))


def draw(found: dict[str, Any], path: str) -> None:
    """A panel of the fastest choice against GPUs for each number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tokens = sorted({row["tokens"] for row in found["predictions"]})
    figure, axes = plt.subplots(1, len(tokens), figsize=(5.5 * len(tokens), 4), squeeze=False, layout="constrained")
    for panel, count in zip(axes[0], tokens, strict=True):
        of = sorted((row for row in found["predictions"] if row["tokens"] == count), key=lambda row: row["gpus"])
        for name in ("dispatch", "combine", "pair"):
            panel.plot([r["gpus"] for r in of], [r["best"][f"{name}_us"] for r in of], marker="o", label=name)
        gpus = [row["gpus"] for row in of]
        panel.set(title=f"{count} tokens a rank", xlabel="GPUs", ylabel="us, predicted", yscale="log")
        panel.set_xscale("log", base=2)
        panel.set_xticks(gpus, [str(value) for value in gpus])
        panel.grid(True, which="both", alpha=0.25)
        panel.legend(fontsize=8)
    figure.suptitle(planning.tables(found)[0].what, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
