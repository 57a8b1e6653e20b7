"""Runs of `python -m tokenway.bench.placement`: how good plans are."""

from __future__ import annotations

from tokenway.bench.tables.table import Row, Run, Table


def tables(run: Run) -> list[Table]:
    """A table of each question."""
    figures, settings = run["placement"], run["settings"]
    loads = f"{settings['layers']} layers, {settings['experts']} experts, lognormal {settings['sigma']}"
    return [
        _full(figures["full"], f"{loads}, {settings['seeds']} seeds"),
        _on_nodes(figures["nodes"]),
        _updates(figures["updates"], loads),
        _drift(figures["drift"]),
        _averages(figures["averages"]),
    ]


def _full(rows: list[Row], loads: str) -> Table:
    heads = ["ranks", "slots", "max/mean", "worst layer", "bound", "furthest from it", "greedy", "its worst", "ms"]
    cells = [
        [
            *(str(row["ranks"]), str(row["ranks"] * row["slots"])),
            *(f"{row[name]:.5f}" for name in ("mean", "worst", "bound")),
            f"{100 * (row['above_bound'] - 1):.2f} %",
            *(f"{row[name]:.5f}" for name in ("greedy", "greedy_worst")),
            f"{row['ms']:.0f}",
        ]
        for row in rows
    ]
    return Table(f"Plans of {loads}; ms: CPU time of one thread for all layers", heads, cells, texts=range(1))


def _on_nodes(rows: list[Row]) -> Table:
    heads = ["plan", "groups differ by", "mean/max", "astray", "rows between nodes, a token"]
    cells = [
        [row["name"], f"{row['group_sigma']}", f"{row['even']:.4f}", _astray(row), f"{row['rows_sent']:.3f}"]
        for row in rows
    ]
    return Table(
        "4 nodes, 32 ranks, 288 slots, 8 groups; a token takes 8 experts of 4 groups", heads, cells, texts=range(1)
    )


def _astray(row: Row) -> str:
    """Without groups there are no homes."""
    return "" if row["name"].endswith("without groups") else f"{100 * row['stray']:.2f} %"


def _updates(rows: list[Row], loads: str) -> Table:
    heads = ["writes allowed", "written", "imbalance", "ms"]
    cells = [
        [str(row["writes"]), f"{row['written']:.1f}", f"{row['imbalance']:.4f}", f"{row['ms']:.0f}"] for row in rows
    ]
    what = f"Updates of a plan that is out of date: 32 ranks, 288 slots, {loads}"
    return Table(what, heads, cells, texts=range(1))


def _drift(rows: list[Row]) -> Table:
    heads = ["policy", "writes", "hot set", "mean", "worst seed", "where the hot set changes", "last 8 windows"]
    names = ("mean", "worst_seed", "changed", "last")
    cells = [
        [row["policy"], str(row["writes"] or ""), str(row["hot"]), *(_four_digits(row[name]) for name in names)]
        for row in rows
    ]
    return Table("Drifting loads, 32 windows: imbalance under the plan made before each", heads, cells, texts=range(1))


def _four_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _averages(rows: list[Row]) -> Table:
    """A column for each decay, by which the rows name their figures."""
    names = [name for name in rows[0] if name not in ("hot", "tokens")]
    heads = ["hot set", "tokens per rank counted", *names]
    cells = [
        [str(row["hot"]), str(row["tokens"] or "all"), *(_four_digits(row[name]) for name in names)] for row in rows
    ]
    return Table(
        "The same with 16 writes, by the decay of the average that is planned for", heads, cells, texts=range(1)
    )
