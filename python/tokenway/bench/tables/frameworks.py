"""Runs of `tokenway bench --frameworks`: a table for each part, and what integrations add to the host."""

from __future__ import annotations

from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds

DIRECT = "direct: "  # before the name of a way: the group's own operations
OURS = "reduce_scatterv"


def tables(run: Run) -> list[Table]:
    """Those of the parts that were measured."""
    parts, settings = run["frameworks"], run["settings"]
    what = f"{settings['ranks']} ranks, {settings['dtype']}"
    made = []
    if "exchange" in parts:
        rows = parts["exchange"]["rows"]
        head = medians(f"dispatch and combine through integrations, {what}; us", settings)
        made.append(Table(head, *exchange(rows), texts=range(5)))
        if any(row.get("host_added_us") for row in rows):
            head = medians(f"what integrations add to the host, {what}; us a pair", settings)
            made.append(Table(head, *host(rows), texts=range(4)))
    if "scatter" in parts:
        head = medians(f"reduce-scatters of uneven sizes in one line, {what}; us", settings)
        made.append(Table(head, *scatter(parts["scatter"]["rows"]), texts=range(2)))
    if "engine" in parts:
        made.append(Table(medians(_decoder(parts["engine"], what), settings), *engine(parts["engine"]), texts=range(2)))
    return made


def exchange(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells): a line for each of Tokenway's ways beside each own one."""
    heads = ["profile", "routing", "tokenway's", "beside", "as", "tokens"]
    if not any("us" in row for row in rows):
        cells = [
            [row["profile"], row["routing"], way, own, "verified", str(row["tokens"])]
            for row in rows
            for way, rivals in row["rivals"].items()
            for own in rivals or [""]
        ]
        return heads, cells
    cells = []
    for row in rows:
        for way, rivals in row["rivals"].items():
            for own in rivals or [""]:
                cells.append([row["profile"], row["routing"], way, own, *_compared(row, way, own)])
    return [*heads, "us", "bare us", "its us", "times", "its graph us"], cells


def _compared(row: Row, way: str, own: str) -> list[str]:
    """How both were called, and the times: as graphs where both can be. The other's own graph stands beside where
    Tokenway's way has none."""
    us = row["us"]
    none: Row = {}
    ours, theirs, bare = us[way], us.get(own, none), us.get(DIRECT + way, none)
    kind = "graph" if "graph" in ours and ("graph" in theirs or not own) else "eager"
    median = ours[kind]["median"]
    times = f"{theirs[kind]['median'] / median:.2f}x" if own else ""
    alone = _us(theirs, "graph") if kind == "eager" else ""
    return [kind, str(row["tokens"]), microseconds(median), _us(bare, kind), _us(theirs, kind), times, alone]


def host(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells): a pair, its operations called on the group directly, and the difference."""
    cells = []
    for row in rows:
        for way, added in row.get("host_added_us", {}).items():
            ours, direct = row["us"][way], row["us"][DIRECT + way]
            # Older files have no kind, and are of GPUs.
            kind = row["host_timed"][way] if "host_timed" in row else "eager" if row["waits"][way] else "host"
            told = "the host alone" if kind == "host" else "as a whole, with its wait"
            times = [microseconds(each[kind]["median"]) for each in (ours, direct)]
            cells.append([row["profile"], row["routing"], way, told, str(row["tokens"]), *times, f"{added:.1f}"])
    return ["profile", "routing", "tokenway's", "timed", "tokens", "pair", "operations", "added"], cells


def scatter(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells): a size in each line, the others' times of it behind."""
    heads = ["sizes", "as", "hidden"]
    if not any("us" in row for row in rows):
        return heads, [[_sizes(row), "verified", str(row["hidden"])] for row in rows]
    names = [name for name in rows[0]["us"] if name != OURS]
    cells = []
    for row in rows:
        for kind in ("graph", "eager"):
            if kind not in row["us"][OURS]:
                continue
            ours = row["us"][OURS][kind]["median"]
            line = [_sizes(row), kind, str(row["hidden"]), microseconds(ours)]
            for name in names:
                theirs = row["us"][name][kind]["median"]
                line += [microseconds(theirs), f"{theirs / ours:.2f}x"]
            cells.append(line)
    return [*heads, "us", *(head for name in names for head in (f"{name} us", "times"))], cells


def engine(part: Row) -> tuple[list[str], list[list[str]]]:
    """(heads, cells): a way in each line."""
    heads = ["sequences", "way", "same text"]
    cells = []
    for row in part["rows"]:
        for way, same in row["same_text"].items():
            line = [" ".join(map(str, row["batches"])), way, f"{same:.2f}"]
            if "us" in row:
                us = row["us"][way]
                line += [f"{us['first']['median'] / 1e3:.2f}", microseconds(us["between"]["median"])]
                line += [f"{us['tokens_per_s']:,.0f}"]
                line += [
                    f"{us['tokens_per_s'] / row['us'][other]['tokens_per_s']:.2f}x"
                    for other in ("all-reduce", "reduce-scatter")
                ]
            cells.append(line)
    timed = any("us" in row for row in part["rows"])
    if timed:
        heads += ["first token ms", "between tokens us", "tokens/s", "of all-reduce's", "of reduce-scatter's"]
    return heads, cells


def notes(run: Run) -> list[str]:
    """What the tables do not say."""
    parts, told = run["frameworks"], []
    if "exchange" in parts:
        told += ["a pair is what a framework calls around its experts, which answer at once; each has another routing"]
        if any("us" in row for row in parts["exchange"]["rows"]):
            told += [
                "bare us: the same operations, called on the group directly; its graph us: of a way that can be "
                "captured where Tokenway's cannot"
            ]
        told += parts["exchange"]["notes"]
        told += [f"not measured: {why}" for why in parts["exchange"]["missing"].values()]
        refused = {f"{name}: {why}" for row in parts["exchange"]["rows"] for name, why in row["refused"].items()}
        told += [f"not measured: {each}" for each in sorted(refused)]
    if "scatter" in parts:
        told += ["nccl-allreduce and gloo-allreduce: an all-reduce, of which a rank takes its rows"]
    if "engine" in parts:
        told += [
            "routed and gathered: Tokenway's; all-reduce and reduce-scatter: of NCCL, behind its all-gather; "
            "same text: the share of tokens that reduce-scatter's way generates too, before the first that differs"
        ]
    return told


def _decoder(part: Row, what: str) -> str:
    steps = "in graphs" if part["graphs"] else "without graphs"
    return (
        f"a decoder of {part['layers']} layers of {part['profile']} with a shared expert, {what}; prompts of "
        f"{part['prompt']} tokens eagerly, {part['generate'] - 1} steps {steps}"
    )


def _sizes(row: Row) -> str:
    return " ".join(map(str, row["sizes"]))


def _us(times: Row, kind: str) -> str:
    return microseconds(times[kind]["median"]) if kind in times else ""
