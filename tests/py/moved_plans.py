"""Plans of random rounds in which experts move and ranks die (moved_ranks.py): who dies when, where experts go, and
with which maps survivors must begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HIDDEN, TOKENS = 5, 6
PHASES = ("staged", "copying", "ready", "switched", "dispatch", "combine", "between")


@dataclass(frozen=True)
class Death:
    """rank: of the comm. after: so many dispatches of the generation, or times that the phase is met. absent: ranks
    that look late for what dispatches brought, as the one in which it dies. also: a rank that dies of the error."""

    rank: int
    phase: str
    after: int
    absent: frozenset[int] = frozenset()
    also: int | None = None


@dataclass(frozen=True)
class Plan:
    """deaths: one in each generation of the group but the last. eager: of 8 times that a rank may go on, how often it
    does."""

    seed: int
    ranks: int
    experts: int
    slots: int  # of each rank
    layers: int
    lanes: int
    mode: str
    combine_rows: str
    policy: str
    epochs: int
    dispatches: int
    eager: int
    deaths: tuple[Death, ...]

    @property
    def victims(self) -> set[int]:
        return {rank for death in self.deaths for rank in (death.rank, death.also) if rank is not None}


def drawn(seed: int) -> Plan:
    """A random plan."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 6))
    slots = int(rng.integers(2, 5))
    alive, deaths = list(range(ranks)), []
    for _ in range(int(rng.integers(1, 4))):
        if len(alive) == 1:
            break
        rng.shuffle(alive)
        victim = alive.pop()
        phase = str(rng.choice((*PHASES, "dispatch", "dispatch")))
        also = alive.pop() if len(alive) > 1 and rng.random() < 0.15 else None
        absent = frozenset(alive[1:][: int(rng.integers(0, 4))]) if phase == "dispatch" else frozenset[int]()
        deaths.append(Death(victim, phase, int(rng.integers(0, 12)), absent, also))
    return Plan(
        seed=seed,
        ranks=ranks,
        experts=int(rng.integers(2, ranks * (slots - 1) + 1)),
        slots=slots,
        layers=int(rng.integers(1, 4)),
        lanes=int(rng.integers(1, 4)),
        mode=str(rng.choice(("low_latency", "high_throughput"))),
        combine_rows=str(rng.choice(("per_expert", "per_expert", "per_rank"))),
        policy=str(rng.choice(("round_robin", "local_first", "balanced"))),
        epochs=int(rng.integers(1, 6)),
        dispatches=int(rng.integers(4, 16)),
        eager=int(rng.integers(2, 9)),
        deaths=tuple(deaths),
    )


# ---- maps ----------------------------------------------------------------------------------------


@dataclass
class Maps:
    """The maps of all layers [layers, P], and where slots are [P]."""

    tables: np.ndarray
    rank: np.ndarray
    place: np.ndarray

    @classmethod
    def first(cls, plan: Plan) -> Maps:
        rank = np.repeat(np.arange(plan.ranks), plan.slots)
        place = np.tile(np.arange(plan.slots), plan.ranks)
        tables = np.full((plan.layers, len(rank)), -1)
        used = np.flatnonzero(place < plan.slots - 1)
        for layer in range(plan.layers):
            tables[layer, used] = (np.arange(len(used)) + layer) % plan.experts
        return cls(tables, rank, place)

    def of_survivors(self, members: list[int]) -> tuple[Maps, set[tuple[int, int]]]:
        """Without the slots of all but these ranks, and the lost experts, (layer, slot) each."""
        kept = np.concatenate([np.flatnonzero(self.rank == member)[self._order(member)] for member in members])
        of = np.searchsorted(members, self.rank[kept])
        experts = range(int(self.tables.max()) + 1)
        gone = [[e for e in experts if e not in row[kept]] for row in self.tables]
        more = 0
        while any(
            sum(max(0, int((row[kept][of == r] < 0).sum()) + more - 1) for r in range(len(members))) < len(lost)
            for row, lost in zip(self.tables, gone, strict=True)
        ):
            more += 1
        ranks, places, was = [], [], []
        for r in range(len(members)):
            own = kept[of == r].tolist() + [-1] * more
            ranks += [r] * len(own)
            places += range(len(own))
            was += own
        rank = np.array(ranks)
        found, lost_slots = [], set()
        for layer, row in enumerate(self.tables):
            table = np.where(np.array(was) < 0, -1, row[was])
            for expert in gone[layer]:
                empty = np.bincount(rank[table < 0], minlength=len(members))
                slot = int(np.flatnonzero((rank == int(empty.argmax())) & (table < 0))[0])
                table[slot] = expert
                lost_slots.add((layer, slot))
            found.append(table)
        return Maps(np.stack(found), rank, np.array(places)), lost_slots

    def _order(self, member: int) -> np.ndarray:
        return np.argsort(self.place[self.rank == member])


@dataclass(frozen=True)
class Epoch:
    layer: int
    table: tuple[int, ...]
    pulls: tuple[tuple[int, int], ...]  # (the slot that gets an expert, a slot that has it)
    fails: frozenset[int]  # ranks of the group


def script(plan: Plan, generation: int, maps: Maps) -> list[Epoch]:
    """The epochs of a generation, the same on all ranks."""
    rng = np.random.default_rng([plan.seed, generation])
    tables, ranks, found = maps.tables.copy(), int(maps.rank.max()) + 1, []
    for _ in range(plan.epochs):
        layer = int(rng.integers(plan.layers))
        now = tables[layer]
        table, pulls = now.copy(), []
        for rank in range(ranks):
            spare = np.flatnonzero((maps.rank == rank) & (now < 0))
            if not len(spare) or rng.random() < 0.3:
                continue
            target, source = int(rng.choice(spare)), int(rng.choice(np.flatnonzero(now >= 0)))
            table[target] = now[source]
            pulls.append((target, source))
            own = np.flatnonzero((maps.rank == rank) & (now >= 0) & (np.arange(len(now)) != target))
            free = [q for q in own if (table == table[q]).sum() > 1]
            if free:
                table[int(rng.choice(free))] = -1
            elif len(spare) == 1:  # one stays empty
                table[target] = -1
                pulls.pop()
        fails = frozenset(r for r in range(ranks) if rng.random() < 0.06)
        found.append(Epoch(layer, tuple(table.tolist()), tuple(pulls), fails))
        if not fails:
            tables[layer] = table
    return found


def after(maps: Maps, epochs: list[Epoch], version: int) -> Maps:
    """The maps of a version."""
    tables = maps.tables.copy()
    for epoch in epochs[:version]:
        if not epoch.fails:
            tables[epoch.layer] = epoch.table
    return Maps(tables, maps.rank, maps.place)


def value_of(expert: int, layer: int) -> dict[str, np.ndarray]:
    """An expert's tensors: whole numbers, so that sums over ranks have the same bits in any order."""
    scale = (1 + expert + 16 * layer + np.arange(HIDDEN) % 3).astype(np.float32)
    return {"scale": scale, "shift": np.array([expert, layer, 1], np.int16)}
