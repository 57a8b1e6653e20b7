"""Runs of dispatch and combine on GPUs: the columns of their table, and what it does not say."""

from __future__ import annotations

from typing import Any

from tokenway.bench.tables.hosts import sizes
from tokenway.bench.tables.table import Row, Run, Table, medians, microseconds
from tokenway.tables import mebibytes


def tables(run: Run) -> list[Table]:
    """The table of a run."""
    return [Table(medians(_what(run), run["settings"]), *columns(run))]


def columns(run: Run) -> tuple[list[str], list[list[str]]]:
    """(heads, cells)."""
    rows: list[Row] = run["rows"]
    makers = [
        ("profile", lambda row: row["profile"]),
        ("routing", lambda row: row["routing"]),
        ("tokens", lambda row: str(row["tokens"])),
        *(_timed(run) if any("pair_us" in row for row in rows) else _untimed()),
        ("window MiB", lambda row: mebibytes(row["window_bytes"])),
        ("2*E*B MiB", lambda row: mebibytes(row["expert_buffers_bytes"])),
    ]
    return [head for head, _ in makers], [[cell(row) for _, cell in makers] for row in rows]


def _untimed() -> list[tuple[str, Any]]:
    return [
        ("exchanges verified", lambda row: str(row["verified_exchanges"])),
        ("rows moved", lambda row: str(row["rows_moved"])),
    ]


def _timed(run: Run) -> list[tuple[str, Any]]:
    rows = run["rows"]
    makers: list[tuple[str, Any]] = []
    has_floor = any("times_floor" in row["floor"]["dispatch"] for row in rows)
    for phase in ("pair", "dispatch", "combine"):
        makers.append((f"{phase} us", _median(phase)))
        if has_floor:
            makers.append(("of floor", _times_floor(phase)))
        if has_floor and phase != "pair":
            makers.append(("of put", _percent(phase)))
        if "hosts" in run and phase != "pair":
            makers.append((f"{phase} GB/s to other hosts", _rate(phase)))
    if "counts_us" in rows[0]:
        makers.append(("counts us", _median("counts")))
    names = list(dict.fromkeys(name for row in rows for name in (*row["baselines"], *row.get("missing", ()))))
    for name in names:
        makers.append((f"{name} us", _baseline(name)))
    if any("behind_barrier" in row for row in rows):
        for phase in ("dispatch", "combine"):
            makers.append((f"{phase} behind a barrier us", _behind(phase)))
            makers += [(f"{name} {phase} us", _apart(name, phase)) for name in names if _has_apart(rows, name)]
    if "both_us" in rows[0]:
        makers += [("backward us", _median("backward")), ("both us", _median("both"))]
        makers += [(f"{name} both us", _baseline(name, "both")) for name in names]
    makers += [("eager us", _host("direct", "eager")), ("host us", _host("direct", "host"))]
    if "two additions" in rows[0]["host"]:
        makers.append(("2 add_ us", _host("two additions", "host")))
    for name in ("update + pair", "route + pair"):
        if name in rows[0]["host"]:
            makers.append((f"{name} host us", _beside_additions(name)))
    if "registered ops" in rows[0]["host"]:
        makers.append(("ops host us", _host("registered ops", "host")))
    if "compare" in rows[0]:
        makers.append(("fp8 dispatch us", _compared))
    if "without_waiting" in rows[0]:
        makers.append(("NOT WAITING, WRONG us", lambda row: microseconds(row["without_waiting"]["pair_us"]["median"])))
    if run["settings"]["nvlink"]["local_ranks"]:
        makers.append(("pair us / rank", lambda row: microseconds(row["pair_us"]["median"] / row["ranks"])))
    return makers


def _median(phase: str) -> Any:
    return lambda row: _short_us(row[f"{phase}_us"]["median"])


def _short_us(value: float) -> str:
    """Two digits after the point where a GPU's exchange has few before it."""
    return f"{value:.2f}" if value < 20 else microseconds(value)


def _times_floor(phase: str) -> Any:
    def cell(row: Row) -> str:
        times = row["floor"].get(phase, {}).get("times_floor")
        return "-" if times is None else f"{times:.2f}x"

    return cell


def _rate(phase: str) -> Any:
    return lambda row: f"{row['floor'][phase]['remote_gb_s']:.2f}"


def _percent(phase: str) -> Any:
    def cell(row: Row) -> str:
        percent = row["floor"][phase].get("percent_of_put")
        return "-" if percent is None else f"{percent:.0f} %"

    return cell


def _baseline(name: str, phase: str = "pair") -> Any:
    def cell(row: Row) -> str:
        base = row["baselines"].get(name)
        if base is None or (phase != "pair" and phase not in base):
            return "-"
        mark = "" if base["timed"] == "graph" else " eager"
        told = base if phase == "pair" else base[phase]
        return f"{microseconds(told[f'{phase}_us']['median'])} ({told['times_ours']:.1f}x{mark})"

    return cell


def _behind(phase: str) -> Any:
    return lambda row: _short_us(row["behind_barrier"][f"{phase}_us"]["median"]) if "behind_barrier" in row else "-"


def _has_apart(rows: list[Row], name: str) -> bool:
    return any("behind_barrier" in row["baselines"].get(name, {}) for row in rows)


def _apart(name: str, phase: str) -> Any:
    def cell(row: Row) -> str:
        apart = row["baselines"].get(name, {}).get("behind_barrier")
        return f"{_short_us(apart[phase]['us']['median'])} ({apart[phase]['times_ours']:.2f}x)" if apart else "-"

    return cell


def _host(name: str, phase: str) -> Any:
    return lambda row: microseconds(row["host"][name][f"{phase}_us"]["median"])


def _beside_additions(name: str) -> Any:
    """What a new routing with its pair takes the host, and how many times as long as two additions that is."""

    def cell(row: Row) -> str:
        spent, base = (row["host"][key]["host_us"]["median"] for key in (name, "two additions"))
        return f"{microseconds(spent)} ({spent / base:.2f}x)"

    return cell


def _compared(row: Row) -> str:
    beside = row["compare"]
    return f"{_short_us(beside['dispatch_us']['median'])} ({beside['dispatch_ratio']:.2f}x)"


def _what(run: Run) -> str:
    """The shape in a line."""
    s = run["settings"]
    gpu = s["nvlink"]
    told = f"{s['ranks']} {'local ranks' if gpu['local_ranks'] else 'ranks'}, {s['dtype']}, {s['layout']}"
    told += f", weighting {s['weighting']}"
    told += ", over NCCL" if gpu.get("over") == "nccl" else ""
    told += f" on hosts of {sizes(run['hosts'])}" if "hosts" in run else ""
    told += f", {gpu['lanes']} lanes" if gpu["lanes"] > 1 else ""
    told += f", an inbox of {gpu['inbox_tokens']} tokens" if gpu.get("inbox_tokens") else ""
    return told + (f", at most {gpu['sm_limit']} SMs" if gpu["sm_limit"] else "")


def notes(run: Run) -> list[str]:
    """What the table does not say."""
    told = []
    document = run["floor"]
    if "missing" in document:
        told.append(f"not measured: {document['missing']}")
    else:
        told.append(_floor_line(document))
    big = run["window_of_a_large_group"]
    told.append(
        f"window of {big['ranks']} ranks, {big['experts']} experts, {big['max_tokens']} tokens (computed, without what "
        f"lines and chunks take): {mebibytes(big['window_bytes'])} MiB; 2*E*B: "
        f"{mebibytes(big['expert_buffers_bytes'])} MiB, {big['times']:.1f} times as much"
    )
    if any("without_waiting" in row for row in run["rows"]):
        told.append("NOT WAITING: pairs whose kernels do not wait for their peers; their results are wrong")
    for row in run["rows"]:
        for name, base in row.get("baselines", {}).items():
            if "no_graph" in base:
                told.append(f"{name}, {row['tokens']} tokens: not captured ({base['no_graph']}), timed by events")
        for name, why in row.get("missing", {}).items():
            told.append(f"{name}, {row['tokens']} tokens: not measured: {why}")
        if "breakdown" in row:
            told += _breakdown(row)
    return told


WAYS = {1: "one way", 2: "both ways"}


def _floor_line(document: dict[str, Any]) -> str:
    ceilings = [
        f"{c['kind']} {WAYS.get(c['ways'], 'from all to all')} {c['median_gb_s']:.0f}"
        for c in document["ceilings"]
        if c["sms"] == document["sms"]
    ]
    flags = f"{document['flag_relaxed_us']['median']:.2f} / {document['flag_release_acquire_us']['median']:.2f}"
    empty = document["empty_kernel_us"]["median"]
    of = f"floor of {document['gpus']} GPUs" if document.get("gpus", 2) > 2 else "floor"
    return f"{of}: GB/s {', '.join(ceilings)}; us: flags relaxed / ordered {flags}, empty kernel {empty:.2f}"


def _breakdown(row: Row) -> list[str]:
    found = row["breakdown"]
    if "missing" in found:
        return [f"kernels at {row['tokens']} tokens: not measured ({found['missing']})"]
    lines = [f"kernels at {row['tokens']} tokens, mean us of eager calls:"]
    return lines + [f"  {k['mean_us']:8.2f}  {k['calls']:4d}x  {k['name']}" for k in found["kernels"]]
