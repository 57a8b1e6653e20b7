"""Runs of dispatch and combine on the CPU: the columns of their table."""

from __future__ import annotations

from collections.abc import Sequence

from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds
from tokenway.tables import mebibytes


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    settings = run["settings"]
    what = f"{settings['ranks']} ranks, {settings['dtype']}, {settings['layout']}, weighting {settings['weighting']}"
    return [Table(medians(what, settings), *columns(run["rows"]))]


def columns(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells)."""
    timed = any("pair_us" in row for row in rows)
    names = list(rows[0].get("baselines", {})) if rows else []
    heads = ["profile", "routing", "tokens"]
    if timed:
        counted = any("counts_us" in row for row in rows)  # of high throughput
        heads += ["route us", *["counts us"] * counted, "dispatch us", "combine us", "pair us", "p10", "p90"]
        heads += ["backward us", "both us"] * any("both_us" in row for row in rows)
        heads += ["formula GB/s", "moved GB/s"]
        heads += ["of memcpy" if name == "memcpy" else f"{name} us" for name in names]
    else:
        heads += ["exchanges verified", "rows moved"]
    heads += ["window MiB", "2*E*B MiB"]
    return heads, [_cells(row, names, timed) for row in rows]


def _cells(row: Row, names: Sequence[str], timed: bool) -> list[str]:
    cells = [row["profile"], row["routing"], str(row["tokens"])]
    if timed:
        phases = ("route", *["counts"] * ("counts_us" in row), "dispatch", "combine", "pair")
        cells += [microseconds(row[f"{phase}_us"]["median"]) for phase in phases]
        cells += [microseconds(row["pair_us"][p]) for p in ("p10", "p90")]
        cells += [microseconds(row[f"{p}_us"]["median"]) for p in ("backward", "both") if f"{p}_us" in row]
        cells += [f"{row['formula_gb_s']['pair']:.2f}", f"{row['moved_gb_s']['pair']:.2f}"]
        cells += [_baseline(name, row["baselines"][name]) for name in names]
    else:
        cells += [str(row["verified_exchanges"]), str(row["rows_moved"])]
    return [*cells, mebibytes(row["window_bytes"]), mebibytes(row["expert_buffers_bytes"])]


def _baseline(name: str, figures: Row) -> str:
    """Its time, and how many times ours that is; of a copy alone what of its speed is reached."""
    if name == "memcpy":
        return f"{100 * figures['times_ours']:.0f} %"
    return f"{microseconds(figures['pair_us']['median'])} ({figures['times_ours']:.1f}x)"
