"""Runs of `tokenway bench --backend fabric`: pairs between hosts, by each backend."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds

STANDS_ON = {"floor": "fabric", "floor by domain": "fabric by domain"}  # whose floor each is


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    settings = run["settings"]
    what = f"{settings['ranks']} ranks on hosts of {sizes(run['hosts'])}, {settings['dtype']}, {settings['layout']}"
    what += f", weighting {settings['weighting']}"
    heads = ["profile", "top-k", "tokens", "rows to ranks of other hosts", "to other hosts"]
    timed = list(run["rows"][0]["pairs"])
    heads += [head for name in timed for head in (f"{name} us", f"{name} p99")]
    heads += [f"{other} / {name}" for name, other in _compared(timed)]
    floors = list(run["rows"][0].get("floor", {}))
    heads += [f"{name} us" for name in floors]
    return [Table(medians(what, settings), heads, [_cells(row, timed, floors) for row in run["rows"]], range(1))]


def _compared(timed: list[str]) -> list[tuple[str, str]]:
    """(fabric, torch), and so on: what was timed beside the portable backend."""
    return [(name, other) for name in timed for other in timed if name.startswith("fabric") and other == "torch"]


def sizes(hosts: list[int]) -> str:
    """ "2 and 2": of how many ranks each is."""
    few = (
        [str(size) for size in hosts] if len(hosts) < 5 else [f"{n} times {size}" for size, n in Counter(hosts).items()]
    )
    return few[0] if len(few) == 1 else f"{', '.join(few[:-1])} and {few[-1]}"


def _cells(row: Row, timed: list[str], floors: list[str]) -> list[str]:
    between, pairs = row["rows_between_hosts"], row["pairs"]
    cells = [row["profile"], str(row["top_k"]), str(row["tokens"])]
    cells += [f"{between['to_ranks']:,}", f"{between['to_hosts']:,}"]
    for name in timed:
        cells += [microseconds(pairs[name]["median"]), microseconds(pairs[name]["p99"])]
    cells += [f"{pairs[other]['median'] / pairs[name]['median']:.2f}x" for name, other in _compared(timed)]
    return cells + [_floor(row["floor"][name]["median"], pairs.get(STANDS_ON[name])) for name in floors]


def _floor(us: float, pair: dict[str, Any] | None) -> str:
    """ "7,268 (2.26x)": and how many times as long the pair takes that moves those bytes."""
    return microseconds(us) + (f" ({pair['median'] / us:.2f}x)" if pair else "")


def notes(run: Run) -> list[str]:
    """What a time is."""
    if run["settings"]["verify_only"]:
        return []
    told = ["a pair has a new routing; its time is that of the slowest rank, from the end of the pair before"]
    if run["rows"][0].get("floor"):
        told.append(
            "floor: the bytes of the pair's rows alone, over plain sockets between rail peers, in the same turns; in "
            "brackets how many times as long fabric takes, or by domain fabric by domain"
        )
    return told
