"""Experts in several slots: how evenly each policy loads the ranks, and what counting costs.

    python -m tokenway.bench.replicas [--json FILE] [--ranks 32] [--slots 288] [--tokens 8 128] [--batches 16]
                                      [--cost-only] [--device cuda]

Imbalance: all ranks of a group in this process, real dispatches. Experts have lognormal popularity (`skewed` of
bench/routing.py) and each seed its own; slots are planned by that popularity (tokenway.balance), so what is left is
what a batch differs from it by, and what the policy makes of that. A load is the choices that a rank's slots serve,
imbalance the largest over the mean less 1, averaged over batches. Beside the policies: each expert in one slot, and,
for all ranks' counts together, the level that no rank can know.

Cost: two groups in two processes, of which one counts, with 128 tokens of 7168 bfloat16; route and dispatch, in turns.
On the CPU it is the time that the calling thread has had a core, as what counting adds is work, and waits for a peer
that has lost its core would hide it. On GPUs it is the time of dispatches in CUDA graphs of 50.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tokenway as tw
from tokenway import machine
from tokenway.balance import plan, planner
from tokenway.bench import gpu_machine, routing
from tokenway.replica_reference import POLICIES, slots_of

EXPERTS, TOP_K = 256, 8
COST_TOKENS, COST_HIDDEN, GRAPH_CALLS = 128, 7168, 50


# ---- a placement to measure with -----------------------------------------------------------------


def planned_shares(table: np.ndarray, popularity: np.ndarray, ranks: int) -> np.ndarray:
    """[P] float32: how the popularity is best shared out to slots, by filling experts up to a level in turns."""
    home = np.arange(len(table)) // (len(table) // ranks)
    share = popularity[table] / np.bincount(table, minlength=len(popularity))[table]
    load = np.bincount(home, weights=share, minlength=ranks)
    several = [e for e in range(len(popularity)) if np.count_nonzero(table == e) > 1]
    for _ in range(100):
        for e in several:
            at = np.flatnonzero(table == e)
            np.subtract.at(load, home[at], share[at])
            order = at[np.argsort(load[home[at]], kind="stable")]
            for n in range(1, len(order) + 1):
                level = (popularity[e] + load[home[order[:n]]].sum()) / n
                if n == len(order) or level <= load[home[order[n]]]:
                    break
            share[at] = 0
            share[order[:n]] = level - load[home[order[:n]]]
            np.add.at(load, home[at], share[at])
    return share.astype(np.float32)


# ---- imbalance -----------------------------------------------------------------------------------


def on_all(ranks: int, make: Callable[[int], Any]) -> list[Any]:
    """make(rank) in a thread for each rank: what is collective."""
    made: list[Any] = [None] * ranks
    threads = [threading.Thread(target=lambda r=r: made.__setitem__(r, make(r))) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def received(groups: list[tw.Group], ids: list[np.ndarray], layer: int) -> np.ndarray:
    """Choices that each rank's slots serve in a dispatch of all ranks, one after the other in this thread."""
    handles = [group.route(of, layer=layer) for group, of in zip(groups, ids, strict=True)]
    sent = [
        group.dispatch(handle, np.zeros((len(of), 1), np.float32), send_only=True)
        for group, handle, of in zip(groups, handles, ids, strict=True)
    ]
    loads = [int(np.count_nonzero(pending.result().ids >= 0)) for pending in sent]
    for handle in handles:
        handle.release()
    return np.array(loads)


def imbalance(ranks: int, slots: int, tokens: Sequence[int], batches: int, seeds: int) -> list[dict[str, Any]]:
    """A row for each number of tokens: the mean imbalance by policy."""
    popularity = [np.exp(routing.log_popularity(EXPERTS, seed)) for seed in range(seeds)]
    tables = plan(popularity, ranks=ranks, slots=slots // ranks).physical_to_logical
    shares = np.stack([planned_shares(t, of, ranks) for t, of in zip(tables, popularity, strict=True)])
    placements: dict[str, Any] = {
        policy: tw.Placement(tables, policy=policy, shares=shares if policy == "shares" else None)
        for policy in POLICIES
    }
    placements["one slot each"] = tw.Placement(layers=seeds)
    rows = [{"tokens": n, "ranks": ranks, "slots": slots} for n in tokens]
    whole: dict[str, list[list[float]]] = {name: [[] for _ in tokens] for name in (*placements, "all counts known")}
    for name, placement in placements.items():
        comms = tw.local_comms(ranks)
        shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": 1, "max_tokens": max(tokens), "dtype": "float32"}
        groups = on_all(ranks, lambda r: tw.Group(comms[r], **shape, expert_map=placement))  # noqa: B023
        for i, n in enumerate(tokens):
            for seed in range(seeds):
                for batch in range(batches):
                    ids = _batch(ranks, n, seed, batch)
                    whole[name][i].append(planner.imbalance(received(groups, ids, seed)))
                    if name == "balanced":
                        whole["all counts known"][i].append(planner.imbalance(_known(ids, tables[seed], ranks)))
        on_all(ranks, lambda r: groups[r].close())  # noqa: B023
    for name, found in whole.items():
        for row, values in zip(rows, found, strict=True):
            row[name] = round(statistics.fmean(values), 4)
    return rows


def _batch(ranks: int, tokens: int, seed: int, batch: int) -> list[np.ndarray]:
    """Of one popularity, other tokens in each batch."""
    drawn = [
        routing.gumbel_top_k(
            np.random.default_rng([seed, batch, rank, 5]), routing.log_popularity(EXPERTS, seed), tokens, TOP_K
        )
        for rank in range(ranks)
    ]
    return [np.ascontiguousarray(ids, np.int32) for ids in drawn]


def _known(ids: list[np.ndarray], table: np.ndarray, ranks: int) -> np.ndarray:
    """Loads if all ranks' choices were one rank's batch."""
    home = (np.arange(len(table)) // (len(table) // ranks)).astype(np.int32)
    slots = slots_of(np.concatenate(ids), table, 0, "balanced", home)
    return np.bincount(home[slots[slots >= 0]], minlength=ranks)


# ---- cost ----------------------------------------------------------------------------------------


def cost(device: str | None, rounds: int) -> dict[str, float]:
    """Median us of a dispatch without and with counting, on one of two ranks."""
    with tw.connect(device=device) as comm:
        shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": COST_HIDDEN, "max_tokens": COST_TOKENS}
        placements = {"not counting": tw.Placement(), "counting": tw.Placement(count_loads=True)}
        groups = {name: tw.Group(comm, **shape, expert_map=placement) for name, placement in placements.items()}
        ids, weights = routing.uniform(comm.rank, COST_TOKENS, EXPERTS, TOP_K, 0)
        timers = {name: _timer(group, ids, weights, device) for name, group in groups.items()}
        found: dict[str, list[float]] = {name: [] for name in timers}
        for i in range(rounds):
            for name in sorted(timers, reverse=i % 2 == 0):  # in turns, each first as often as second
                found[name].append(timers[name]())
        for group in groups.values():
            group.close()
        medians = {name: round(statistics.median(times), 3) for name, times in found.items()}
        # What machines that are shared do to one they do to the other: the differences of neighbours say most.
        apart = [b - a for a, b in zip(found["not counting"], found["counting"], strict=True)]
        least = {f"least {name}": round(min(times), 3) for name, times in found.items()}
        return medians | {"difference": round(statistics.median(apart), 3)} | least


def _timer(group: tw.Group, ids: np.ndarray, weights: np.ndarray, device: str | None) -> Callable[[], float]:
    if device is not None:
        return _graph_timer(group, ids, weights)
    tokens = np.zeros((COST_TOKENS, COST_HIDDEN), np.uint16).view(tw.tensors.numpy_dtype("bfloat16"))

    def once() -> float:
        start = time.thread_time_ns()
        handle = group.route(ids, weights)
        group.dispatch(handle, tokens)
        end = time.thread_time_ns()
        handle.release()
        return (end - start) / 1e3

    return once


def _graph_timer(group: tw.Group, ids: np.ndarray, weights: np.ndarray) -> Callable[[], float]:
    import torch

    torch.cuda.set_device(group.device)
    on = {"device": f"cuda:{group.device}"}
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    given = torch.from_numpy(ids).to(**on), torch.from_numpy(weights).to(**on)
    tokens = torch.zeros((COST_TOKENS, COST_HIDDEN), dtype=torch.bfloat16, **on)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        handle = group.route(*given)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(GRAPH_CALLS):
                group.dispatch(handle, tokens)

    def once() -> float:
        with torch.cuda.stream(stream):
            graph.replay()  # brings the ranks together
            begin.record(stream)
            graph.replay()
            end.record(stream)
        stream.synchronize()
        keep = handle, graph
        del keep
        return float(begin.elapsed_time(end)) * 1e3 / GRAPH_CALLS

    return once


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenway.bench.replicas", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write everything measured, with machine and versions")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--slots", type=int, default=288, help="a multiple of the ranks, at least 256")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 128], help="per rank")
    parser.add_argument("--batches", type=int, default=8, help="of each seed")
    parser.add_argument("--seeds", type=int, default=6, help="popularities")
    parser.add_argument("--rounds", type=int, default=200, help="of the measurement of the cost")
    parser.add_argument("--cost-only", action="store_true")
    parser.add_argument("--device", help="cuda: what counting costs on GPUs (default: on the CPU)")
    args = parser.parse_args(argv)
    if args.slots % args.ranks or args.slots < EXPERTS:
        parser.error(f"--slots: {args.slots}; must be a multiple of the ranks, {args.ranks}, and at least {EXPERTS}")
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
    if not args.cost_only:
        rows = imbalance(args.ranks, args.slots, args.tokens, args.batches, args.seeds)
        results["imbalance"] = rows
        for row in rows:
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    by_rank = tw.run(cost, 2, args.device, args.rounds)
    results["cost_us"] = {"ranks": 2, "tokens": COST_TOKENS, "device": args.device or "cpu", "by_rank": by_rank}
    for rank, found in enumerate(by_rank):
        share = found["difference"] / found["not counting"]
        print(f"rank {rank}: {found}; counting takes {share:.2%} of a dispatch", flush=True)
    if args.device:
        results |= {"gpu": gpu_machine.describe(), "versions": gpu_machine.versions()}
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
