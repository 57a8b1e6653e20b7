"""Runs of `tokenway bench --collective`: the columns of their table."""

from __future__ import annotations

from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    settings, rows = run["settings"], run["collectives"]
    what = f"{settings['ranks']} ranks, rows of {rows[0]['hidden']} {settings['dtype']}"
    return [Table(medians(what, settings), *columns(rows))]


def columns(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells)."""
    if not any("us" in row for row in rows):
        return ["collective", "sizes", "verified"], [[row["collective"], _sizes(row), "yes"] for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    with_floor = any("floor_us" in row for row in rows)
    heads = ["collective", "sizes", "us", "p10", "p90", "GB/s", *["floor us", "times floor"] * with_floor]
    heads += [f"{name} {what}" for name in names for what in ("us", "times")]
    cells = []
    for row in rows:
        line = [row["collective"], _sizes(row)]
        line += [microseconds(row["us"][key]) for key in ("median", "p10", "p90")] + [f"{row['remote_gb_s']:.1f}"]
        if with_floor:
            found = row.get("floor_us")
            line += [microseconds(found), f"{row['times_floor']:.2f}"] if found else ["", ""]
        for name in names:
            other = row["baselines"].get(name)
            line += [microseconds(other["us"]["median"]), f"{other['times_ours']:.2f}"] if other else ["", ""]
        cells.append(line)
    return heads, cells


def _sizes(row: Row) -> str:
    """Rows of each rank."""
    sizes = row["sizes"]
    return f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " ".join(map(str, sizes))
