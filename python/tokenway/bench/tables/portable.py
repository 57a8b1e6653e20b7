"""Runs of `tokenway bench --backend torch`: the columns of their table, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tokenway.bench.tables.table import Row, Run, Table, medians

WINS = 1.1  # times as long, from which on a way is said to lose


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    settings = run["settings"]
    what = f"{settings['ranks']} ranks, {settings['dtype']}, {settings['layout']}, weighting {settings['weighting']}"
    count = "" if settings["verify_only"] else iterations(run)
    return [Table(medians(what, settings, count), *columns(run))]


def columns(run: Run) -> tuple[list[str], list[list[str]]]:
    """(heads, cells): medians in us; in brackets times as long as the best. Ratios are those of turns that followed
    each other."""
    ways: Sequence[str] = run["settings"]["portable"]["strategies"]
    heads = ["profile", "top-k", "tokens", "rows moved", *(f"{way} us" for way in ways), *_HEADS]
    cells = [_cells(row, ways) for row in run["rows"]]
    columns = [column for column in zip(heads, *cells, strict=True) if any(column[1:])]
    return [column[0] for column in columns], [list(line) for line in zip(*(c[1:] for c in columns), strict=True)]


_HEADS = ("auto / better", "auto / itself")  # only where there are such


def _cells(row: Row, ways: Sequence[str]) -> list[str]:
    cells = [row["profile"], str(row["top_k"]), str(row["tokens"]), str(row["rows_moved"])]
    medians = {way: times["median"] for way, times in row["ways"].items()}
    best = min(medians.values(), default=0.0)
    cells += [f"{medians[way]:,.0f} ({medians[way] / best:.2f}x)" if way in medians else "-" for way in ways]
    return cells + [f"{ratio:.2f}x" if ratio else "" for ratio in (_to_better(row), _to_itself(row))]


def _ratio(times: dict[str, Any], base: dict[str, Any]) -> float:
    """Times as long as the base: the median of the rounds' ratios, as what disturbs the machine for a while makes a
    whole round slow. A median of all iterations tells of it whose turns were hit more often."""
    pairs = zip(times["rounds"], base["rounds"], strict=False)  # ways that are far behind have fewer rounds
    return statistics.median(one / other for one, other in pairs)


def _to_better(row: Row) -> float:
    """Times as long as the better of routed and gathered auto takes; 0 if one was not measured."""
    if not {"routed", "gathered", "auto"} <= row["ways"].keys():
        return 0.0
    return max(_ratio(row["ways"]["auto"], row["ways"][way]) for way in ("routed", "gathered"))


def _to_itself(row: Row) -> float:
    """Between two groups of auto's, the longer to the shorter; 0 if there was one."""
    if "again" not in row:
        return 0.0
    ratio = _ratio(row["again"], row["ways"]["auto"])
    return max(ratio, 1 / ratio)


def iterations(run: Run) -> str:
    """How many there were, where short ones are more."""
    settings = run["settings"]
    counts = {len(times["rounds"]) for row in run["rows"] for times in row["ways"].values()}
    each = -(-settings["iterations"] // settings["rounds"])
    least, most = min(counts), max(counts)
    if least == most:
        return f"{least * each} iterations in {least} rounds"
    return f"{least * each} to {most * each} iterations in {least} to {most} rounds"


def notes(run: Run) -> list[str]:
    """Whether each of the two strategies wins anywhere, how far auto is from the better one, and from itself."""
    rows = [row["ways"] for row in run["rows"] if {"routed", "gathered"} <= row["ways"].keys()]
    if not rows:
        return []
    median = [{way: times["median"] for way, times in row.items()} for row in rows]
    lines = []
    for way, other in (("routed", "gathered"), ("gathered", "routed")):
        wins = sum(row[other] / row[way] >= WINS for row in median)
        lines.append(f"{way} is over 10 % faster than {other} at {wins} of {len(rows)} points")
    if far := [ratio for row in run["rows"] if (ratio := _to_better(row))]:
        near = sum(ratio <= WINS for ratio in far)
        lines.append(
            f"auto takes at most {max(far):.2f}x the better one, {WINS:.2f}x or less at {near} of {len(far)} points"
        )
    if noise := [ratio for row in run["rows"] if (ratio := _to_itself(row))]:
        near = sum(ratio <= WINS for ratio in noise)
        lines.append(
            f"two groups of auto's, which make the same calls, differ by up to {max(noise):.2f}x, by {WINS:.2f}x or "
            f"less at {near} of {len(noise)} points"
        )
    return lines
