"""Runs of `tokenway bench --moving`: what moves cost steps, and what they are made of."""

from __future__ import annotations

from tokenway.bench.tables.table import Row, Run, Table, microseconds
from tokenway.tables import mebibytes


def tables(run: Run) -> list[Table]:
    """Steps; and beside them what a product and the host take."""
    settings = run["settings"]
    moving = settings["moving"]
    what = f"Steps while experts move, {settings['ranks']} ranks, {settings['dtype']}, per expert, "
    what += f"{moving['layers']} layers, a plan of {moving['writes']} slots of each layer after the other; us of the "
    what += f"slowest rank, {settings['rounds']} rounds in turns"
    heads = ["profile", "tokens", "steps"]
    for name in ("p50", "p99"):
        heads += [f"{name} without", "with moves", "times", "two without"]
    heads += ["MiB an expert", "MiB a step", "moves of a rank", "steps to the switch"]
    rows = run["moving"]
    steps = Table(what, heads, [_steps(row) for row in rows], range(1))
    heads = [
        "profile",
        "tokens",
        "product, window us",
        "allocator us",
        "times",
        "host: balancer us a step",
        "when idle us",
    ]
    beside = "The first grouped product behind a copy, worst rank; and what a balancer's step takes the host of rank 0"
    return [steps, Table(beside, heads, [_beside(row) for row in rows], range(1))]


def notes(run: Run) -> list[str]:
    """What the profile saw."""
    return [_profile(row) for row in run["moving"]]


def _steps(row: Row) -> list[str]:
    cells = [row["profile"], str(row["tokens"]), str(sum(turn["steps"] for turn in row["us"].values()))]
    for name in ("p50", "p99"):
        before, moving, after = (row["us"][turn][name] for turn in ("before", "moving", "after"))
        without = (before + after) / 2
        cells += [microseconds(without), microseconds(moving), f"{moving / without:.4f}x"]
        cells.append(f"{max(before, after) / min(before, after):.4f}x")
    moves = max(row["moves"])
    return [
        *cells,
        mebibytes(row["expert_bytes"]),
        mebibytes(row["moved_bytes_a_step"]),
        str(moves),
        str(row["switch_steps"]),
    ]


def _beside(row: Row) -> list[str]:
    worst = max(row["product_us"], key=lambda us: us["window"] / us["allocator"])
    times = [*map(microseconds, worst.values()), f"{worst['window'] / worst['allocator']:.4f}x"]
    host = [microseconds(row["host_us"][kind]) if kind in row["host_us"] else "" for kind in ("moving", "idle")]
    return [row["profile"], str(row["tokens"]), *times, *host]


def _profile(row: Row) -> str:
    found, name = row["profile_of_steps"], f"{row['profile']}, {row['tokens']} tokens"
    if "missing" in found:
        return f"{name}: no profile ({found['missing']})"
    waits = ", ".join(found["waits"]) or "none"
    calls = ", ".join(f"{call} {count}" for call, count in sorted(found["calls"].items()))
    return f"{name}: calls of CUDA that wait, in {found['steps']} steps with moves: {waits}; all: {calls}"
