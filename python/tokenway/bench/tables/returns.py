"""Runs of `tokenway bench --returns`: ways back, and what each takes of the one that sums per rank."""

from __future__ import annotations

from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds
from tokenway.tables import mebibytes

# way, phase, head: with its ratio to the same phase of `sums`, where it is another way's
COLUMNS = (
    ("sums", "pair", "pair us"),
    ("sums", "dispatch", "dispatch us"),
    ("sums", "combine", "combine us"),
    ("per expert", "pair", "per expert pair us"),
    ("per expert", "combine", "combine us"),
    ("fp8", "pair", "fp8 back pair us"),
    ("fp8", "combine", "combine us"),
    ("shares", "pair", "shares pair us"),
    ("shares", "dispatch", "dispatch us"),
)


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    settings = run["settings"]
    what = f"{settings['ranks']} ranks, {settings['dtype']}, rank_major (per expert: expert_major)"
    return [Table(medians(what, settings), *columns(run["returns"]))]


def columns(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells)."""
    heads = ["profile", "routing", "tokens"]
    if "ways" not in rows[0]:
        heads.append("exchanges verified")
        return heads, [[*_names(row), str(row["verified_exchanges"])] for row in rows]
    shown = [column for column in COLUMNS if column[0] in rows[0]["ways"]]
    heads += [head for *_, head in shown]
    heads += ["shares link bytes"] * ("shares" in rows[0]["ways"]) + ["window MiB"]
    return heads, [[*_names(row), *(_time(row, way, phase) for way, phase, _ in shown), *_sizes(row)] for row in rows]


def _names(row: Row) -> list[str]:
    return [row["profile"], row["routing"], str(row["tokens"])]


def _time(row: Row, way: str, phase: str) -> str:
    median = row["ways"][way][phase]["median"]
    if way == "sums":
        return microseconds(median)
    return f"{microseconds(median)} ({median / row['ways']['sums'][phase]['median']:.2f}x)"


def _sizes(row: Row) -> list[str]:
    size = row["link_bytes"]
    shares = [f"{size['shares'] / size['sums']:.2f}x"] if "shares" in size else []
    return [*shares, mebibytes(row["window_bytes"])]
