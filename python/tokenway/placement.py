"""Experts in several slots: which hold which, and which of them serves a choice. `Group` takes it as `expert_map`."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway import _header, _native, checked
from tokenway.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Placement:
    """Which physical slots hold which expert, and which of them serves a choice. Give it as a group's `expert_map`; an
    array [P] there is the same with everything else by default.

    slot_expert: [P], or [layers, P], the expert in each slot, -1 for none; each expert in at least one (default: slot i
    holds expert i mod E). slots: P (default: what slot_expert has, else E). layers: maps, for a model whose layers
    share the group (default: what slot_expert has, else 1). where: (rank [P], place there [P]) of each slot; default
    blocks, the first P mod N ranks with one more. policy: which of an expert's R slots serves the choice of
    token t of rank r:
        "round_robin"  the ((r + t) mod R)-th
        "local_first"  those of this rank in turn if it has some, else as above
        "shares"       by `shares`, [P] or [layers, P] float32, spread evenly over tokens (default: all alike)
        "balanced"     as levels the ranks' loads best by the counts of this rank's batch
    count_loads: dispatches count what is chosen (`Group.loads`). load_decay: what is left of older ones after one more.
    moves: layers get new maps while steps run (`Group.moving`); needs count_loads. weight_bytes: of each rank's window
    for experts' weights, which peers may read. `balance.Weights` says how many.
    All ranks must give the same.
    """

    slot_expert: Any = None
    slots: int | None = None
    layers: int | None = None
    where: Sequence[Any] | None = None
    policy: str = "round_robin"
    shares: Any = None
    count_loads: bool = False
    load_decay: float = 0.99
    moves: bool = False
    weight_bytes: int = 0

    @classmethod
    def of(cls, expert_map: Any, experts: int | None) -> Placement | None:
        """A group's expert_map, if it is more than one place for each expert."""
        if expert_map is None or isinstance(expert_map, Placement):
            return expert_map
        parts = list(expert_map)
        dims = [len(checked.shape_of(f"expert_map[{i}]", part)) for i, part in enumerate(parts)]
        if parts and not any(dims):
            return cls(slot_expert=checked.integers("expert_map", expert_map))
        if dims == [2, 2]:
            return cls.of_places(*parts, experts)
        return None

    @classmethod
    def of_places(cls, rank: Any, place: Any, experts: int | None) -> Placement:
        """From where experts are: (rank [E, R], place there [E, R]), -1 where an expert has fewer than R slots."""
        rank, place = checked.integers("expert_map[0]", rank), checked.integers("expert_map[1]", place)
        if rank.shape != place.shape or rank.shape[0] != experts:
            raise InvalidArgument.of(
                "expert_map", f"has shapes {rank.shape} and {place.shape}; they must be ({experts}, slots of an expert)"
            )
        if (rank < -1).any():
            raise InvalidArgument.of("expert_map", f"has {rank.min()}; it must have ranks, and -1 for none", (0,))
        expert, column = np.nonzero(rank >= 0)
        order = np.lexsort((place[expert, column], rank[expert, column]))
        at = expert[order], column[order]
        return cls(slot_expert=at[0].astype(np.int32), where=(rank[at], place[at]))

    def num_slots(self, experts: int | None) -> int:
        """P."""
        if self.slots is not None:
            return _native.fit("slots", self.slots)
        return int(experts or 0) if self.slot_expert is None else checked.shape_of("slot_expert", self.slot_expert)[-1]

    def num_layers(self) -> int:
        """Maps."""
        shape = () if self.slot_expert is None else checked.shape_of("slot_expert", self.slot_expert)
        return _native.fit("layers", self.layers) if self.layers is not None else shape[0] if len(shape) == 2 else 1

    def places(self, slots: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """(the rank of each physical slot, its place there) in a group of so many slots and ranks: [P] each."""
        if self.where is not None:
            return np.asarray(self.where[0], np.int64), np.asarray(self.where[1], np.int64)
        counts = np.full(ranks, slots // ranks)
        counts[: slots % ranks] += 1
        rank = np.repeat(np.arange(ranks), counts)
        return rank, np.arange(slots) - np.repeat(np.cumsum(counts) - counts, counts)

    def native(self, experts: int | None) -> tuple[_header.Placement, Any]:
        """The C struct, and what must outlive it."""
        if self.policy not in _header.POLICIES:
            raise InvalidArgument.of("policy", f"is {self.policy!r}; it must be one of {list(_header.POLICIES)}")
        shape = self.num_layers(), self.num_slots(experts)
        given = _header.Placement()
        given.num_layers = _native.fit_given("layers", shape[0])
        given.num_slots = _native.fit_given("slots", shape[1])
        table = None if self.slot_expert is None else spread("slot_expert", self.slot_expert, shape, np.int32)
        shares = None if self.shares is None else spread("shares", self.shares, shape, np.float32)
        given.slot_expert = None if table is None else table.ctypes.data
        given.slot_shares = None if shares is None else shares.ctypes.data
        given.policy = _header.POLICIES[self.policy]
        given.count_loads = 1 if self.count_loads else 0
        if not isinstance(self.load_decay, numbers.Real):
            raise InvalidArgument.of("load_decay", f"is {self.load_decay!r}; it must be a number from 0 to 1")
        given.load_decay = self.load_decay
        given.moves = 1 if self.moves else 0
        given.weight_bytes = _native.fit("weight_bytes", self.weight_bytes, 62)
        return given, (table, shares)


def spread(name: str, values: Any, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """[P] for every layer, or [layers, P], as C takes it."""
    array = checked.integers(name, values) if dtype is np.int32 else checked.floats(name, values)
    if array.shape not in (shape, shape[1:]):
        raise InvalidArgument.of(name, f"has shape {array.shape}; it must be {shape[1:]} or {shape}")
    return np.ascontiguousarray(np.broadcast_to(array, shape), dtype=dtype)
