"""Runs of `tokenway bench --layer`: the columns of their tables."""

from __future__ import annotations

from tokenway.bench import timeline
from tokenway.bench.tables.hosts import sizes
from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds

PARTS = ("experts", "router", "exchange")
WAYS = ("captured", "eager", "captured_both", "eager_both")


def tables(run: Run) -> list[Table]:
    """A table of inference, and one of training where gradients were measured."""
    settings, rows = run["settings"], run["layers"]
    where = f" on hosts of {sizes(run['hosts'])}" if "hosts" in run else ""
    what = f"MoE layers, {settings['ranks']} ranks{where}, {settings['dtype']}"
    if not any("us" in row for row in rows):
        cells = [[row["profile"], row["routing"], str(row["tokens"]), "yes"] for row in rows]
        return [Table(what, ["profile", "routing", "tokens", "compared"], cells)]
    made = [Table(medians(f"{what}, forward passes; us", settings), *_columns(rows, ("captured", "eager"), True))]
    if any("fixed-layer" in row["us"] for row in rows):
        head = f"{what}, the exchange within a layer whose experts are a kernel of {settings['fixed_experts']} us; us"
        made.append(Table(medians(head, settings), *_within(rows)))
    if any("eager_both" in row["us"]["tokenway"] for row in rows):
        both = _columns(rows, ("captured_both", "eager_both"), False)
        made.append(Table(medians(f"{what}, forward and backward passes; us", settings), *both))
    return made


def _columns(rows: list[Row], ways: tuple[str, ...], parts: bool) -> tuple[list[str], list[list[str]]]:
    """(heads, cells)."""
    heads = ["profile", "routing", "tokens"]
    for way in ways:
        word = way.split("_")[0]
        heads += [f"{word}: tokenway", "nccl", "times"]
    if parts:
        heads += [*PARTS, "beside experts and router", "host"]
    return heads, [_cells(row, ways, parts) for row in rows]


def _cells(row: Row, ways: tuple[str, ...], parts: bool) -> list[str]:
    us = row["us"]
    cells = [row["profile"], row["routing"], str(row["tokens"])]
    for way in ways:
        ours, theirs = (_median(us[name], way) for name in ("tokenway", "nccl"))
        told = (
            []
            if ours is None or theirs is None
            else [microseconds(ours), microseconds(theirs), f"{theirs / ours:.2f}x"]
        )
        cells += told or [""] * 3
    if parts:
        alone = [_median(us.get(name, {}), "captured") for name in PARTS]
        cells += ["" if part is None else microseconds(part) for part in alone]
        whole = _median(us["tokenway"], "captured")
        known = None not in (whole, *alone[:2])
        cells.append(microseconds(whole - alone[0] - alone[1]) if known else "")
        cells.append(microseconds(us["tokenway"]["host"]["median"]))
    return cells


def _within(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A layer beyond its experts and router, beside a bare exchange of the same rows: all from graphs of one run."""
    heads = ["profile", "routing", "tokens", "layer", "experts", "router", "beyond them", "bare exchange"]
    cells = []
    for row in rows:
        us = [_median(row["us"].get(name, {}), "captured") for name in ("fixed-layer", "fixed-experts", *PARTS[1:])]
        told = [row["profile"], row["routing"], str(row["tokens"])]
        if None in us:
            cells.append(told + [""] * 7)
            continue
        layer, experts, router, bare = us
        within = layer - experts - router
        cells.append([*told, *map(microseconds, (layer, experts, router, within, bare, within - bare))])
        cells[-1].append(f"{within / bare:.2f}x")
    return [*heads, "more", "times"], cells


def _median(phases: Row, way: str) -> float | None:
    return phases[way]["median"] if way in phases else None


def notes(run: Run) -> list[str]:
    """What the tables do not say."""
    modes = {row.get("mode", "high_throughput") for row in run["layers"]}
    mode = " in high throughput" if modes == {"high_throughput"} else ""
    told = [
        f"tokenway: ExpertParallelMoE{mode}, outputs of a fixed size; nccl: all-gather, index_select, the same "
        "products, index_add, reduce-scatter, told how many rows will come",
        "exchange: dispatch and combine of the same tokens, rank_major, a new routing in each; host: of an eager call",
    ]
    told += _ways(run["layers"])
    empty = {row.get("empty_ranks", 0) for row in run["layers"]} - {0}
    told += [f"the last {number} ranks have no tokens; NCCL's way fills theirs up" for number in sorted(empty)]
    for row in run["layers"]:
        told += timeline.lines(row)
    for why in dict.fromkeys(row["us"].get("not_captured") for row in run["layers"] if "us" in row):
        told += [f"not captured: {why}"] if why else []
    return told


def _ways(rows: list[Row]) -> list[str]:
    """In which mode and layout tokenway's rows came, by tokens; runs of before this was told were all of one."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if "mode" in row:
            told.setdefault(f"{row['mode'].replace('_', ' ')}, rows in {row['layout']}", []).append(str(row["tokens"]))
    return [f"tokenway at {', '.join(dict.fromkeys(tokens))} tokens: {way}" for way, tokens in told.items()]
