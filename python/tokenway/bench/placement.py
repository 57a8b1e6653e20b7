"""How good the planner's plans are, and how long it takes: python -m tokenway.bench.placement [--json FILE] [--seeds N]

58 layers of 256 experts with lognormal loads of sigma 0.75, as public statistics of DeepSeek's models have them; a plan
is scored on the loads that it was made for. Times are CPU milliseconds of one thread for all layers, the median over
seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenway import balance, machine
from tokenway.bench import eplb, report

Array = np.ndarray
LAYERS, EXPERTS, SIGMA = 58, 256, 0.75
SHAPES = ((32, 9), (72, 4), (32, 8), (144, 2))  # ranks, slots of a rank
NODES = {"ranks": 32, "slots": 9, "nodes": 4, "groups": 8}
BUDGETS = (0, 4, 8, 16, 64, 288)
MEMORY = 0.94  # leaves a plan of the loads before with an imbalance of 0.22
STAY = 8  # windows of a hot set
DECAYS = (0.0, 0.25, 0.5, 0.75, 0.9, None)  # None: chosen by what foretold the last windows best


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    made = call()
    return made, 1e3 * (time.process_time() - start)


def _max_by_mean(loads: Array, placed: Any, shape: dict[str, int]) -> Array:
    return 1 + balance.imbalance(balance.rank_loads(loads, placed, ranks=shape["ranks"], slots=shape["slots"]))


def full(seeds: int) -> list[dict[str, Any]]:
    """Plans from nothing, beside greedy ones and the bound."""
    rows = []
    for ranks, slots in SHAPES:
        shape = {"ranks": ranks, "slots": slots}
        ours, theirs, bounds, times = [], [], [], []
        for seed in range(seeds):
            loads = balance.lognormal(LAYERS, EXPERTS, SIGMA, seed=seed)
            plan, took = _timed(lambda loads=loads, shape=shape: balance.plan(loads, **shape))
            ours.append(1 + plan.imbalance)
            bounds.append(1 + plan.bound_imbalance)
            theirs.append(_max_by_mean(loads, eplb.greedy(loads, ranks * slots, 1, 1, ranks), shape))
            times.append(took)
        rows.append(
            {
                **shape,
                "mean": float(np.mean(ours)),
                "worst": float(np.max(ours)),
                "bound": float(np.mean(bounds)),
                "above_bound": float(np.max(np.array(ours) / np.array(bounds))),
                "greedy": float(np.mean(theirs)),
                "greedy_worst": float(np.max(theirs)),
                "layers_worse": int(np.sum(np.array(ours) > np.array(theirs) * (1 + 1e-12))),
                "ms": float(np.median(times)),
            }
        )
    return rows


def on_nodes(seeds: int) -> list[dict[str, Any]]:
    """Four nodes: how even ranks are, and what it costs between nodes."""
    rows = []
    for group_sigma in (0.0, 0.6):
        plans: dict[str, list[tuple[float, float, float]]] = {}
        for seed in range(seeds):
            loads, ids = _routed(group_sigma, seed)
            made = {"greedy by group": _as_plan(loads, eplb.greedy(loads, 288, 8, 4, 32))}
            for tolerance in (1, 0.03, 0.01, 0):
                made[f"plan, tolerance {tolerance}"] = balance.plan(loads, node_tolerance=tolerance, **NODES)
            made["plan without groups"] = balance.plan(loads, **{**NODES, "groups": 0})
            for name, plan in made.items():
                sent = np.mean([balance.rows_between_nodes(plan, ids[i], i) for i in range(len(ids))])
                even = 1 / _max_by_mean(loads, plan, NODES)
                plans.setdefault(name, []).append((float(even.mean()), float(plan.stray.mean()), float(sent)))
        for name, found in plans.items():
            even, stray, sent = np.mean(found, axis=0).tolist()
            rows.append({"group_sigma": group_sigma, "name": name, "even": even, "stray": stray, "rows_sent": sent})
    return rows


def _routed(group_sigma: float, seed: int) -> tuple[Array, Array]:
    """(loads [layers, E], ids [layers, tokens, K]) of a router that takes 8 experts of 4 groups of 8; 8 layers."""
    wanted = balance.lognormal(8, EXPERTS, SIGMA, seed=seed, groups=8, group_sigma=group_sigma)
    router = {"groups": 8, "top_groups": 4}
    ids = np.stack([balance.group_limited(w, 8192, 8, seed=seed * 100 + i, **router) for i, w in enumerate(wanted)])
    return np.stack([np.bincount(i.ravel(), minlength=EXPERTS) for i in ids]).astype(np.float64), ids


def _as_plan(loads: Array, placed: Array) -> balance.Plan:
    """A map as a plan that is in use and stays."""
    return balance.plan(loads, old=placed, writes=0, **NODES)


def updates(seeds: int) -> list[dict[str, Any]]:
    """A plan that is out of date, and how few writes mend it."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for seed in range(seeds):
        before, after = balance.drifting(2, LAYERS, EXPERTS, SIGMA, memory=MEMORY, seed=seed)
        old = balance.plan(before, ranks=32, slots=9)
        for budget in BUDGETS:
            asked = {"ranks": 32, "slots": 9, "old": old, "writes": budget}
            plan, took = _timed(lambda asked=asked, after=after: balance.plan(after, **asked))
            written = (plan.physical_to_logical != old.physical_to_logical).sum(axis=1).mean()
            found.setdefault(budget, []).append((float(plan.imbalance.mean()), float(written), took))
    return [
        {"writes": b, **dict(zip(("imbalance", "written", "ms"), np.median(f, axis=0).tolist(), strict=True))}
        for b, f in found.items()
    ]


def drift(seeds: int) -> list[dict[str, Any]]:
    """Windows that drift and hot sets that change, each scored under the plan made before it."""
    rows = []
    for hot in (0, 2):
        for policy, writes in (("static", None), ("update", 4), ("update", 16), ("replan", None)):
            later = []
            for seed in range(min(seeds, 4)):
                played = balance.replay(_windows(hot, seed), ranks=32, slots=9, policy=policy, writes=writes)
                later.append(played.imbalance[1:].mean(axis=1))
            found = np.array(later)
            rows.append(
                {
                    "hot": hot,
                    "policy": policy,
                    "writes": writes,
                    "mean": float(found.mean()),
                    "worst_seed": float(found.mean(axis=1).max()),
                    "changed": float(found[:, STAY - 1 :: STAY].mean()) if hot else None,
                    "last": float(found[:, -8:].mean()),
                }
            )
    return rows


def _windows(hot: int, seed: int) -> Array:
    return balance.drifting(32, 8, EXPERTS, SIGMA, memory=0.998, hot=hot, boost=2.0, stay=STAY, seed=seed)


def averages(seeds: int) -> list[dict[str, Any]]:
    """The same with 16 writes, by how long the average of what was counted reaches back, and how much that was."""
    rows = []
    for hot in (0, 2):
        for tokens in (None, 128, 16):
            row: dict[str, Any] = {"hot": hot, "tokens": tokens}
            for decay in DECAYS:
                found = []
                for seed in range(min(seeds, 4)):
                    windows = _windows(hot, seed)
                    counted = None if tokens is None else balance.sample(windows, 32 * tokens * 8, seed)
                    asked = {"ranks": 32, "slots": 9, "writes": 16, "decay": decay, "counted": counted}
                    found.append(balance.replay(windows, **asked).imbalance[1:].mean())
                row["chosen" if decay is None else str(decay)] = float(np.mean(found))
            rows.append(row)
    return rows


def measure(seeds: int) -> dict[str, Any]:
    """Everything, with where it was measured."""
    figures = {"full": full(seeds), "nodes": on_nodes(seeds), "updates": updates(seeds)}
    figures |= {"drift": drift(seeds), "averages": averages(seeds)}
    return {
        "placement": figures,
        "settings": {"layers": LAYERS, "experts": EXPERTS, "sigma": SIGMA, "seeds": seeds},
        **machine.measured(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    run = measure(options.seeds)
    report.show(run)
    if options.json:
        Path(options.json).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
