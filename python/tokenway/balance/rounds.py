"""From the map that a layer has to one that a plan wants, in epochs: each brings a few experts into spare slots, and
frees as many slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
NOTHING = -2  # what a rank gives up that gets an expert more


@dataclass(frozen=True)
class Epoch:
    """One layer's next map, and what it needs: pulls (the slot that gets an expert, a slot in force that has it)."""

    layer: int
    table: tuple[int, ...]
    pulls: tuple[tuple[int, int], ...]


def used_map(table: Array, rank_of_slot: Array, ranks: int, slots: int, loads: Array | None) -> Array:
    """[ranks * slots]: the experts of a map [P] by rank, without spare slots, as the planner has them. A rank that has
    fewer than `slots` gets the experts too that are most wanted, by loads [E] a replica, and that it lacks; without
    loads -1."""
    rows = [table[(rank_of_slot == rank) & (table >= 0)].tolist() for rank in range(ranks)]
    held = Counter(expert for row in rows for expert in row)
    for row in rows:
        row += [-1] * (slots - len(row) if loads is None else 0)
        while loads is not None and len(row) < slots:
            expert = min(range(len(loads)), key=lambda e: (e in row, -loads[e] / held[e], e))
            row.append(expert)
            held[expert] += 1
    return np.array(rows, np.int32).ravel()


def epochs(layer: int, table: Array, wanted: Array, rank_of_slot: Array) -> Iterator[Epoch]:
    """Epochs from a map, table [P] with -1 for spare slots, to one in which each rank has the experts that it has in
    wanted [ranks, slots in use], wherever they are. Ends early where spare slots do not suffice to go on.

    In each epoch a rank gets as many experts as it has spare slots, and gives up as many, or fewer where it is to have
    more than it has. Every expert stays in a slot somewhere. All ranks find the same epochs.
    """
    slots = [np.flatnonzero(rank_of_slot == rank).tolist() for rank in range(len(wanted))]
    wants = [Counter(row) for row in wanted.tolist()]
    of = rank_of_slot.tolist()
    now: list[int] = table.tolist()
    while pairs := _pairs(now, wants, slots):
        following, pulls = list(now), []
        sources: Counter[int] = Counter()  # how often a rank is read from
        holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(now):
            holders.setdefault(expert, []).append(slot)
        for rank, expert, gone in pairs:
            spare = next(slot for slot in slots[rank] if now[slot] < 0 and following[slot] < 0)
            source = min((of[slot] != rank, sources[of[slot]], slot) for slot in holders[expert])[2]
            sources[of[source]] += 1
            following[spare] = expert
            if gone != NOTHING:
                following[next(slot for slot in slots[rank] if following[slot] == gone and now[slot] == gone)] = -1
            pulls.append((spare, source))
        yield Epoch(layer, tuple(following), tuple(pulls))
        now = following


def _pairs(now: list[int], wants: list[Counter[int]], slots: list[list[int]]) -> list[tuple[int, int, int]]:
    """(rank, the expert that it gets, the one that it gives up or NOTHING) of the next epoch; none where all is as
    wanted."""
    ranks = range(len(wants))
    held = [Counter(now[slot] for slot in row if now[slot] >= 0) for row in slots]
    staying: Counter[int] = Counter()
    for rank in ranks:
        staying.update(held[rank] & wants[rank])
    # First what no rank keeps, as others cannot give it up before; and what is given up last is what only it has.
    gets = [sorted((wants[r] - held[r]).elements(), key=lambda expert: (staying[expert] > 0, expert)) for r in ranks]
    gives = [sorted((held[r] - wants[r]).elements(), key=lambda expert: (staying[expert] == 0, expert)) for r in ranks]
    gives = [[NOTHING] * (len(more) - len(less)) + less for more, less in zip(gets, gives, strict=True)]
    spare = [sum(now[slot] < 0 for slot in row) for row in slots]
    found = [(r, *pair) for r in ranks for pair in list(zip(gets[r], gives[r], strict=True))[: spare[r]]]
    while lost := _lost(now, found):
        found = [pair for pair in found if pair[2] not in lost]
    return found or _chain(gets, gives, staying)


def _chain(gets: list[list[int]], gives: list[list[int]], staying: Counter[int]) -> list[tuple[int, int, int]]:
    """Pairs that can be made together, a rank in one at most: each but the first gets what the one before gives up. The
    last gives up what stays elsewhere, or what the first gets: there always are such pairs, unless no rank gets any."""
    chain: list[tuple[int, int, int]] = []
    rank = next((rank for rank, row in enumerate(gets) if row), None)
    while rank is not None:
        got = chain[-1][2] if chain else gets[rank][0]
        begun = next((i for i, (other, _, _) in enumerate(chain) if other == rank), None)
        if begun is not None:  # a circle: its first rank gets what its last one gives up
            return [(rank, got, chain[begun][2]), *chain[begun + 1 :]]
        gone = gives[rank][0]
        chain.append((rank, got, gone))
        rank = None if gone == NOTHING or staying[gone] else next(r for r, row in enumerate(gets) if gone in row)
    return chain


def _lost(now: list[int], pairs: list[tuple[int, int, int]]) -> set[int]:
    """Experts that would be in no slot."""
    left = Counter(expert for expert in now if expert >= 0)
    left.subtract(gone for _, _, gone in pairs if gone != NOTHING)
    left.update(expert for _, expert, _ in pairs)
    return {expert for expert, count in left.items() if count <= 0}
