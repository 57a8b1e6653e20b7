"""A run of `tokenway bench --backend torch` as a table, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WINS = 1.1  # times as long, from which on a way is said to lose


def columns(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells) of the table that shows a run: medians in us; in brackets times as long as the best."""
    ways: Sequence[str] = run["settings"]["portable"]["strategies"]
    heads = ["profile", "top-k", "tokens", "rows moved", *(f"{way} us" for way in ways)]
    return heads, [_cells(row, ways) for row in run["rows"]]


def _cells(row: dict[str, Any], ways: Sequence[str]) -> list[str]:
    cells = [row["profile"], str(row["top_k"]), str(row["tokens"]), str(row["rows_moved"])]
    medians = {way: times["median"] for way, times in row["ways"].items()}
    best = min(medians.values(), default=0.0)
    return cells + [f"{medians[way]:,.0f} ({medians[way] / best:.2f}x)" if way in medians else "-" for way in ways]


def notes(run: dict[str, Any]) -> list[str]:
    """Whether each of the two strategies wins anywhere, and how far auto is from the better one."""
    rows = [row["ways"] for row in run["rows"] if {"routed", "gathered"} <= row["ways"].keys()]
    if not rows:
        return []
    median = [{way: times["median"] for way, times in row.items()} for row in rows]
    lines = []
    for way, other in (("routed", "gathered"), ("gathered", "routed")):
        wins = sum(row[other] / row[way] >= WINS for row in median)
        lines.append(f"{way} is over 10 % faster than {other} at {wins} of {len(rows)} points")
    far = [row["auto"] / min(row["routed"], row["gathered"]) for row in median if "auto" in row]
    if far:
        lines.append(f"auto takes at most {max(far):.2f}x the better one")
    return lines
