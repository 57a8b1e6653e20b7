"""Runs of `tokenway bench --aux`: what is done on a rank between dispatch and combine."""

from __future__ import annotations

from tokenway.bench.tables.table import Run, Table, microseconds

# The phases, in their order, and what is measured on a device alone.
PHASES = ("expand", "activation", "quantised", "finalize", "all_rows")


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    m = run["auxiliary"]
    rows = m["rows"]
    what = (
        f"A rank of {m['experts']} experts, {m['hidden']} x bfloat16, {m['inner']} inside, {2 * m['tokens']} tokens "
        f"received at every size, {m['tokens']} sent by each rank"
    )
    names = [name for name in PHASES if f"{name}_us" in rows[0]]
    heads = ["group of", "rows that come", "room for", *(f"{name.replace('_', ' ')} us" for name in names)]
    cells = [
        [
            *(str(row["size"]), f"{row['valid']:,}", f"{row['rows']:,}"),
            *(microseconds(row[f"{name}_us"]["median"]) for name in names),
        ]
        for row in rows
    ]
    return [Table(what, heads, cells, texts=range(0))]
