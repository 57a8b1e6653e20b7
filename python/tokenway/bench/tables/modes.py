"""Runs of `tokenway bench --mode auto`: pairs of both modes beside each other, and where they cross."""

from __future__ import annotations

from collections.abc import Sequence

from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds
from tokenway.tables import mebibytes

PAIRS = {
    "low_latency_us": "low latency us",
    "high_throughput_us": "high throughput us",
    "counts_us": "of it counts us",
    "known_counts_us": "known counts us",
}


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    settings = run["settings"]
    what = f"{settings['ranks']} ranks, {settings['dtype']}, rank_major and flat, weighting {settings['weighting']}"
    return [Table(medians(f"{what}; pairs", settings), *columns(run["modes"]))]


def columns(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells)."""
    heads = ["profile", "routing", "tokens"]
    timed = "low_latency_us" in rows[0]
    heads += [*PAIRS.values(), "low / high"] if timed else ["exchanges verified"]
    return [*heads, "window MiB"], [_cells(row, timed) for row in rows]


def _cells(row: Row, timed: bool) -> list[str]:
    cells = [row["profile"], row["routing"], str(row["tokens"])]
    if timed:
        cells += [microseconds(row[name]["median"]) for name in PAIRS]
        cells.append(f"{row['low_latency_us']['median'] / row['high_throughput_us']['median']:.2f}")
    else:
        cells.append(str(row["verified_exchanges"]))
    return [*cells, mebibytes(row["window_bytes"])]


def crossing(rows: Sequence[Row], high: str = "high_throughput_us") -> tuple[int | None, int | None]:
    """(the largest size up to which a pair of low latency takes no longer than one of high throughput, the next size,
    at which it does); None where there is no such size. rows: of one profile and routing."""
    up_to = None
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if row["low_latency_us"]["median"] > row[high]["median"]:
            return up_to, row["tokens"]
        up_to = row["tokens"]
    return up_to, None


def notes(run: Run) -> list[str]:
    """Where the two cross."""
    rows = run["modes"]
    if "low_latency_us" not in rows[0]:
        return []
    told = []
    for name in dict.fromkeys((row["profile"], row["routing"]) for row in rows):
        of = [row for row in rows if (row["profile"], row["routing"]) == name]
        with_counts, known = (_words(*crossing(of, high)) for high in ("high_throughput_us", "known_counts_us"))
        told.append(f"{', '.join(name)}: low latency is faster {with_counts}; where counts are known, {known}")
    return told


def _words(up_to: int | None, above: int | None) -> str:
    if up_to is None:
        return "at no size"
    return "at all sizes" if above is None else f"up to {up_to} token{'s' * (up_to > 1)}, slower at {above}"
