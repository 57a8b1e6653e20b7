"""What a balancer plans, and whether it is worth its moves: numbers alone, which no group and no rank needs to be there
for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenway.balance import planner, rounds
from tokenway.balance.forecast import Forecast

Array = np.ndarray
Wanted = tuple[Array | None, tuple[float, float]]  # of Plans.find


class Plans:
    """Of one group. ranks, slots: of each rank, in use. rank_of_slot: [P], spare ones too. decay: what is left of the
    group's loads after one more dispatch. gain, writes: as of the balancer. where: nodes, groups and node_tolerance, as
    `balance.plan` takes them."""

    def __init__(
        self,
        ranks: int,
        slots: int,
        rank_of_slot: Array,
        decay: float,
        gain: float,
        writes: int,
        where: Mapping[str, Any],
    ):
        self._size = {"ranks": ranks, "slots": slots}
        self._rank_of_slot, self._decay = rank_of_slot, decay
        self._gain, self._writes, self._where = gain, writes, where
        self._forecast = Forecast()
        self._last: tuple[Array, Array] | None = None  # loads and dispatches, when they were looked at last

    def refuse(self, experts: int, tables: Array) -> None:
        """Raises what the planner would: InvalidArgument."""
        uniform = np.ones((len(tables), experts))
        planner.plan(uniform, **self._size, old=self.used(tables, uniform), writes=self._writes, **self._where)

    def find(self, loads: Array, dispatches: Array, tables: Array) -> Wanted:
        """(maps [layers, slots in use], None where nothing is gained; the imbalance before and after).

        loads, dispatches: the group's, [layers, E] and [layers]. tables: [layers, P], the maps in force. It is planned
        for what has come since the last call, and before that as far as it foretells it (`Forecast`)."""
        self._forecast.add(self.since_last(loads, dispatches))
        expected = self._forecast.loads
        now = self.used(tables, expected)
        made = planner.plan(expected, **self._size, old=now, writes=self._writes, **self._where)
        before = self._imbalance(expected, now)
        better = before - made.imbalance > self._gain
        wanted = np.where(better[:, None], made.physical_to_logical, now)
        after = np.where(better, made.imbalance, before)
        return self._if_other(tables, wanted), (float(before.mean()), float(after.mean()))

    def look_at(self, wanted: Array, loads: Array, tables: Array) -> Wanted:
        """The same of maps that were given."""
        before, after = (self._imbalance(loads, maps) for maps in (self.used(tables, loads), wanted))
        return self._if_other(tables, wanted), (float(before.mean()), float(after.mean()))

    def epochs(self, tables: Array, wanted: Array) -> list[rounds.Epoch]:
        """From the maps in force to those of a plan. A layer has one open epoch: those of other layers go between."""
        rows = wanted.reshape(len(tables), self._size["ranks"], self._size["slots"])
        of = self._rank_of_slot
        lists = [list(rounds.epochs(layer, table, rows[layer], of)) for layer, table in enumerate(tables)]
        depth = max((len(each) for each in lists), default=0)
        return [each[i] for i in range(depth) for each in lists if i < len(each)]

    def used(self, tables: Array, loads: Array | None = None) -> Array:
        """[layers, slots in use]: maps without spare slots, as the planner has them. loads: [layers, E], by which ranks
        are filled that have fewer experts; None: with -1."""
        of, wanted = self._rank_of_slot, [None] * len(tables) if loads is None else np.asarray(loads)
        pairs = zip(tables, wanted, strict=True)
        return np.stack([rounds.used_map(table, of, **self._size, loads=by) for table, by in pairs])

    def since_last(self, loads: Array, dispatches: Array) -> Array:
        """float64 [layers, E]: the loads of the dispatches since the last call alone, later ones counting for more, as
        in loads. What is left in loads of those before it is known, so it is taken out; a layer without a dispatch
        since keeps what it had."""
        now = loads.astype(np.float64)
        if self._last is None:
            before, count = np.zeros_like(now), dispatches
        else:
            before, count = self._last[0], dispatches - self._last[1]
        self._last = now, dispatches.copy()
        kept = np.power(self._decay, count.astype(np.float64))[:, None]
        alone = np.divide(now - kept * before, 1 - kept, out=now.copy(), where=kept < 1)
        return np.maximum(alone, 0)  # what is left is known but for roundings

    def _imbalance(self, loads: Array, used: Array) -> Array:
        """[layers]"""
        return planner.imbalance(planner.rank_loads(loads, used, **self._size))

    def _if_other(self, tables: Array, wanted: Array) -> Array | None:
        """None where each rank has what it is to have already."""
        ranks, slots = self._size["ranks"], self._size["slots"]
        rows = (maps.reshape(-1, ranks, slots) for maps in (self.used(tables), wanted))
        return None if np.array_equal(*(np.sort(each, axis=2) for each in rows)) else wanted
