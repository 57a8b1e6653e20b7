"""Runs of `python -m tokenway.bench.balancing`: what steps see while experts move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from statistics import fmean, median

from tokenway.bench.tables.table import Row, Run, Table, microseconds


def tables(run: Run) -> list[Table]:
    """One: a row for each load and budget, over seeds."""
    settings = run["settings"]
    heads = ["load", "writes", "no moves", "played", "ranks that wait", "ranks", "plans", "moves", "MiB a step"]
    heads += ["steps to the switch", "ms to the switch", "ms a step"]
    cells = [
        [
            kind,
            str(writes),
            *(f"{100 * _mean(rows, name):.2f} %" for name in ("still", "played", "awaited", "free")),
            *(f"{_mean(rows, name):.1f}" for name in ("plans", "moves")),
            f"{_mean(rows, 'bytes_per_step') / (1 << 20):.3f}",
            *(microseconds(median(_all(rows, name))) for name in ("delay_steps", "delay_ms")),
            f"{_mean(rows, 'step_ms'):.1f}",
        ]
        for (kind, writes), rows in _by(run["balancing"], lambda row: (row["kind"], row["writes"]))
    ]
    slots, choices = (
        settings["ranks"] * settings["slots"],
        f"{settings['tokens']} tokens a rank, top {settings['top_k']}",
    )
    what = (
        f"{settings['ranks']} ranks, {settings['layers']} layers of {settings['experts']} experts in {slots} slots, "
        f"{choices}, {settings['windows']} windows of {settings['steps']} steps, {settings['seeds']} seeds: imbalance "
        "of the rows that ranks received"
    )
    return [Table(what, heads, cells, texts=range(1))]


def _by(rows: list[Row], key: Callable[[Row], tuple[str, int]]) -> Iterator[tuple[tuple[str, int], list[Row]]]:
    order = {key(row): i for i, row in reversed(list(enumerate(rows)))}
    ordered = sorted(rows, key=lambda row: order[key(row)])
    return ((name, list(found)) for name, found in groupby(ordered, key))


def _mean(rows: list[Row], name: str) -> float:
    return fmean(row[name] for row in rows)


def _all(rows: list[Row], name: str) -> list[float]:
    return [value for row in rows for value in row[name]] or [0.0]
