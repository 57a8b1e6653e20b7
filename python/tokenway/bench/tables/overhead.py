"""Runs of `tokenway bench --overhead`: what Python adds to a dispatch and a combine."""

from __future__ import annotations

from tokenway.bench.tables.table import Run, Table


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    m = run["overhead"]
    what = (
        f"1 rank, 1 token of {m['profile']} ({m['hidden']} x {m['dtype']}): us per dispatch and combine, median of "
        f"{m['rounds']} rounds of {m['pairs_per_round']}"
    )
    cells = [[name, f"{path['us']:.2f}", _added(name, path["added_us"])] for name, path in m["paths"].items()]
    return [Table(what, ["path", "us", "added to C"], cells, texts=range(1))]


def _added(name: str, us: float | None) -> str:
    return "" if name == "C" or us is None else f"{us:.2f}"


def notes(run: Run) -> list[str]:
    """What is aimed at, and which paths could not be measured."""
    m = run["overhead"]
    return [f"aim: less than {m['target_us']:.0f} us added where out= is given", *m["notes"]]
