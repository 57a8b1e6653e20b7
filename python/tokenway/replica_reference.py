"""The oracle of experts in several slots: which slot serves a choice, and how often experts were chosen.

What the library must do, bit for bit, written a second time and to be read: `slots_of` turns the expert ids of one
rank's batch into physical slots, as tokenway/placement.h says. An exchange of experts with replicas is then the
exchange of `tokenway.reference` over slots:

    slots = [slots_of(ids[r], table, r, "round_robin", slot_rank) for r in range(ranks)]
    x = Exchange(slots, weights, experts=len(table), bound=bound, expert_map=(slot_rank, slot_place))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray

POLICIES = ("round_robin", "local_first", "shares", "balanced")
LEVEL_ROUNDS = 2
GOLDEN, OF_RANK, OF_EXPERT = 2654435769, 2246822519, 3266489917


def slots_of(
    ids: Array, slot_expert: Array, rank: int, policy: str, slot_rank: Array, shares: Array | None = None
) -> Array:
    """Slots [T, K] int32 that serve the choices of a rank's tokens; -1 where there is no expert.

    ids: [T, K] experts. slot_expert: [P] the expert in each slot, -1 for none. slot_rank: [P] where it is. shares: [P]
    float32, of "shares" (None: alike).
    """
    table = _table(slot_expert, rank, policy, slot_rank, shares)
    if policy == "balanced":
        return _balanced(ids, table, rank, slot_rank)
    out = np.full(ids.shape, -1, np.int32)
    for t, k in np.argwhere(ids >= 0):
        e = int(ids[t, k])
        slots = table[e]
        if policy == "shares":
            point = (int(t) * GOLDEN + rank * OF_RANK + e * OF_EXPERT) % 2**32
            lower = _lower(slots, shares)
            out[t, k] = slots[max(i for i, at in enumerate(lower) if at <= point)]
        else:
            out[t, k] = slots[(rank + int(t)) % len(slots)]
    return out


def _table(slot_expert: Array, rank: int, policy: str, slot_rank: Array, shares: Array | None) -> dict[int, list[int]]:
    """Of each expert, the slots that `rank` may choose, ascending."""
    table: dict[int, list[int]] = {}
    for slot, expert in enumerate(slot_expert):
        if expert >= 0 and not (policy == "shares" and shares is not None and shares[slot] == 0):
            table.setdefault(int(expert), []).append(slot)
    if policy == "local_first":
        for expert, slots in table.items():
            table[expert] = [slot for slot in slots if slot_rank[slot] == rank] or slots
    return table


def _lower(slots: list[int], shares: Array | None) -> list[int]:
    """Where each slot's interval of [0, 2**32) begins."""
    of = [1.0 if shares is None else float(shares[slot]) for slot in slots]
    total, before, lower = 0.0, 0.0, []
    for share in of:
        total += share
    for share in of:
        lower.append(min(int(np.floor(before / total * 2.0**32)), 2**32 - 1))
        before += share
    return lower


def _balanced(ids: Array, table: dict[int, list[int]], rank: int, slot_rank: Array) -> Array:
    """Quotas by the batch's counts, then each expert's choices to its slots in order."""
    chosen = ids[ids >= 0]
    counts = {e: int(np.count_nonzero(chosen == e)) for e in table}
    load = np.zeros(int(np.max(slot_rank)) + 1, np.int64)
    several = sorted(e for e, slots in table.items() if len(slots) > 1 and counts[e])
    for e, slots in table.items():
        if len(slots) == 1:
            load[slot_rank[slots[0]]] += counts[e]
    quota = {e: [0] * len(table[e]) for e in several}
    for _ in range(LEVEL_ROUNDS):
        for e in several:
            for slot, n in zip(table[e], quota[e], strict=True):
                load[slot_rank[slot]] -= n
            quota[e] = _fill([int(load[slot_rank[slot]]) for slot in table[e]], counts[e], rank + e)
            for slot, n in zip(table[e], quota[e], strict=True):
                load[slot_rank[slot]] += n
    order = {e: [s for s, n in zip(table[e], quota[e], strict=True) for _ in range(n)] for e in several}
    out = np.full(ids.shape, -1, np.int32)
    seen = dict.fromkeys(table, 0)
    for t, k in np.argwhere(ids >= 0):
        e = int(ids[t, k])
        out[t, k] = order[e][seen[e]] if e in order else table[e][0]
        seen[e] += 1
    return out


def _fill(load: list[int], count: int, turn: int) -> list[int]:
    """Shares `count` out up to the least level that holds it; what that is too much is taken off in turn."""
    level = min(load)
    while sum(max(0, level - at) for at in load) < count:
        level += 1
    quota = [max(0, level - at) for at in load]
    left = sum(quota) - count
    i = turn % len(load)
    while left:
        if quota[i]:
            quota[i] -= 1
            left -= 1
        i = (i + 1) % len(load)
    return quota


def loads_of(dispatches: Sequence[tuple[int, Array]], decay: float) -> Array:
    """Float32 [E] of a layer: the decaying average of the experts' counts, (lane, int [E]) of each dispatch in the
    order of calls. Each lane has an average of its own, aged by the layer's dispatches on the others."""
    keep = np.float32(decay)
    take = np.float32(1) - keep
    loads: dict[int, Array] = {}
    last: dict[int, int] = {}
    for number, (lane, counts) in enumerate(dispatches):
        load = loads.get(lane, np.zeros(counts.shape, np.float32))
        load = _aged(load, keep, max(0, number - last.get(lane, -1) - 1))
        loads[lane], last[lane] = load * keep + take * counts.astype(np.float32), number
    total = np.float32(0)
    for lane in sorted(loads):
        total = total + _aged(loads[lane], keep, len(dispatches) - 1 - last[lane])
    return total


def _aged(load: Array, keep: np.float32, dispatches: int) -> Array:
    """load * keep ** dispatches, by squares."""
    power, left = keep, np.float32(1)
    while dispatches:
        if dispatches & 1:
            left = left * power
        power, dispatches = power * power, dispatches >> 1
    return load * left
