"""What a plan would give in use: window after window of loads that it was not made for, batches of few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway.balance import planner, workloads
from tokenway.balance.forecast import DECAYS, Forecast
from tokenway.errors import InvalidArgument

Array = np.ndarray

POLICIES = ("none", "static", "update", "replan")
SPLITS = ("even", "random", "best")
_ROUNDS = 50  # of levelling, in the split "best"


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of each window and layer: imbalance float64 [windows, layers], what the hottest rank carries above the mean,
    under the plan that was in force; writes int32 alike, the slots that got another expert just before the window."""

    policy: str
    imbalance: Array
    writes: Array


def replay(
    windows: Array,
    *,
    ranks: int,
    slots: int,
    policy: str = "update",
    writes: int | None = None,
    every: int = 1,
    decay: float | None = None,
    counted: Array | None = None,
    nodes: int = 1,
    groups: int = 0,
    node_tolerance: float = 0.01,
) -> Outcome:
    """Plays windows [windows, layers, E] of loads: before each, the plan may change, by what the windows before it
    showed; then the window is scored, with even splits.

    policy: none (experts in order, no plan), static (a plan from the first window, kept), update (that, and at most
    `writes` slots of a layer changed every `every` windows), replan (made anew then). The first window is what the
    first plan is made from: it is scored as if it had been known, so leave it out of averages. decay: what is left, in
    the loads that are planned for, of all windows before the last one (0: the last alone counts); None: what would have
    foretold the windows so far best (Forecast). counted: what plans are made from, of the shape of windows (None: the
    windows themselves): for windows that are expected loads, say, the counts of some tokens.
    """
    windows = np.asarray(windows, np.float64)
    if windows.ndim != 3:
        raise InvalidArgument.of("windows", f"has shape {list(windows.shape)}; it must be [windows, layers, experts]")
    if policy not in POLICIES:
        raise InvalidArgument.of("policy", f"is {policy!r}; allowed: {', '.join(POLICIES)}")
    if every < 1:
        raise InvalidArgument.of("every", f"is {every}; it must be at least 1", value=every)
    if not 0 <= (decay or 0) < 1:
        raise InvalidArgument.of("decay", f"is {decay}; it must be at least 0 and less than 1", value=decay)
    counted = windows if counted is None else np.asarray(counted, np.float64)
    if counted.shape != windows.shape:
        raise InvalidArgument.of(
            "counted", f"has shape {list(counted.shape)}; it must be that of windows, {list(windows.shape)}"
        )
    count, layers, experts = windows.shape
    shape: dict[str, Any] = {"ranks": ranks, "slots": slots}
    where = {**shape, "nodes": nodes, "groups": groups, "node_tolerance": node_tolerance}
    placed = planner.contiguous(layers, experts, ranks, slots)
    if policy != "none" and count:
        placed = planner.plan(counted[0], **where).physical_to_logical
    seen = Forecast(DECAYS if decay is None else [decay])
    scored, written = np.empty((count, layers)), np.zeros((count, layers), np.int32)
    for i, now in enumerate(windows):
        if policy in ("update", "replan") and i and i % every == 0:
            budget = ranks * slots if policy == "replan" else writes
            after = planner.plan(seen.loads, old=placed, writes=budget, **where).physical_to_logical
            written[i] = (after != placed).sum(axis=1)
            placed = after
        scored[i] = planner.imbalance(planner.rank_loads(now, placed, **shape))
        seen.add(counted[i])
    return Outcome(policy, scored, written)


def sampled_imbalance(
    plan: planner.Plan, *, tokens: int, top_k: int, split: str = "even", draws: int = 20, seed: int = 0
) -> Array:
    """float64 [draws, layers]: the imbalance of rows over ranks in batches of `tokens` per rank, each of top_k choices
    drawn by the loads that were planned for. What remains is noise, which no plan can foresee.

    split of an expert's rows over its replicas: even, as whole numbers go (in turn, each draw from another replica on);
    random, each row for itself; best, by the batch's own counts, levelled in whole rows.
    """
    if split not in SPLITS:
        raise InvalidArgument.of("split", f"is {split!r}; allowed: {', '.join(SPLITS)}")
    if min(tokens, top_k, draws) < 1:
        raise InvalidArgument(f"tokens, top_k and draws are {tokens}, {top_k}, {draws}; they must be at least 1")
    rng = np.random.default_rng(seed)
    layers = len(plan.loads)
    found = np.empty((draws, layers))
    for draw in range(draws):
        counts = workloads.sample(plan.loads, plan.ranks * tokens * top_k, int(rng.integers(1 << 31)))
        for layer in range(layers):
            holders = [[rank for rank, _ in places] for places in plan.expert_map(layer)]
            rows = _rows(counts[layer], holders, plan.ranks, split, rng)
            found[draw, layer] = planner.imbalance(rows)
    return found


def rows_between_nodes(plan: planner.Plan, ids: Array, layer: int = 0) -> float:
    """Rows that a token sends to other nodes, on average: one to each where a slot that it chose lies. ids: int
    [tokens, K], distinct, no -1. Tokens come from the nodes in turn, as many at a time as there are ranks, and token t
    takes an expert's replicas in turn."""
    per_node = plan.slots * plan.ranks // plan.nodes
    tokens = np.arange(len(ids))
    lists, counts = plan.logical_to_physical[layer][ids], plan.replicas[layer][ids]
    slots = np.take_along_axis(lists, (tokens[:, None] % counts)[..., None], axis=2)[..., 0]
    at = np.zeros((len(ids), plan.nodes), bool)
    np.put_along_axis(at, slots // per_node, True, axis=1)
    at[tokens, tokens // plan.ranks % plan.nodes] = False
    return float(at.sum(axis=1).mean())


def _rows(counts: Array, holders: list[list[int]], ranks: int, split: str, rng: np.random.Generator) -> Array:
    """[ranks] rows of a batch."""
    rows = np.zeros(ranks)
    shared: list[tuple[Array, Array]] = []  # of experts with several replicas: ranks, and rows of each
    for count, where in zip(counts.tolist(), holders, strict=True):
        at = np.array(where)
        if len(where) == 1:
            rows[at] += count
            continue
        if split == "random":
            parts = rng.multinomial(count, np.full(len(where), 1 / len(where)))
        else:
            parts = np.full(len(where), count // len(where))
            turn = int(rng.integers(len(where)))
            parts[(turn + np.arange(count % len(where))) % len(where)] += 1
        np.add.at(rows, at, parts)
        shared.append((at, parts))
    if split == "best":
        _level(rows, shared)
    return rows


def _level(rows: Array, shared: list[tuple[Array, Array]]) -> None:
    """Moves single experts' rows from their hottest to their coolest holder, until no move helps."""
    for _ in range(_ROUNDS):
        moved = False
        for at, parts in shared:
            held = np.where(parts > 0, rows[at], -1)
            hot, cool = int(held.argmax()), int(rows[at].argmin())
            n = min(int(parts[hot]), int(rows[at[hot]] - rows[at[cool]]) // 2)
            if n > 0:
                parts[hot] -= n
                parts[cool] += n
                rows[at[hot]] -= n
                rows[at[cool]] += n
                moved = True
        if not moved:
            return
