"""The maps of a group's layers, from slots to experts, and how often experts are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tokenway import _native
from tokenway.native_group import NativeGroup
from tokenway.placement import Placement, spread


class Maps:
    """Those of one group. placement: None where each expert has one place."""

    def __init__(self, native: NativeGroup, placement: Placement | None, experts: int):
        self._native, self.placement, self._experts = native, placement, experts

    @property
    def layers(self) -> int:
        """Maps, 1 without a placement."""
        return 1 if self.placement is None else self.placement.num_layers()

    @property
    def slots(self) -> int:
        """P: physical slots of all ranks; E without a placement."""
        return self._experts if self.placement is None else self.placement.num_slots(self._experts)

    def read(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """(the expert in each slot, the shares of slots) of a layer: [P] int32 and float32."""
        table, shares = np.empty(self.slots, np.int32), np.empty(self.slots, np.float32)
        layer = _native.fit("layer", layer)
        _native.check(_native.lib.twGroupMap(self._native.pointer, layer, table.ctypes.data, shares.ctypes.data))
        return table, shares

    def given(self, slot_expert: Any, shares: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """A layer's next map and its shares, [P] each, as C takes them."""
        shape = 1, self.slots
        table = spread("slot_expert", slot_expert, shape, np.int32)
        return table, None if shares is None else spread("shares", shares, shape, np.float32)

    def replace(self, slot_expert: Any, layer: int, shares: Any) -> None:
        """As `Group.replace_map` says."""
        table, of = self.given(slot_expert, shares)
        given = table.ctypes.data, None if of is None else of.ctypes.data
        layer = _native.fit("layer", layer)
        stream = self._native.place.stream()
        _native.check(_native.lib.twGroupReplaceMap(self._native.pointer, layer, *given, stream))

    def loads(self) -> tuple[np.ndarray, np.ndarray]:
        """(how often each expert is chosen, [layers, E] float32, over how many dispatches, [layers] int64)."""
        loads, counted = np.empty((self.layers, self._experts), np.float32), np.empty(self.layers, np.int64)
        _native.check(_native.lib.twGroupLoads(self._native.pointer, loads.ctypes.data, counted.ctypes.data))
        return loads, counted

    def of_survivors(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The expert_map of a group of fewer ranks, unless changes have one: the maps as they are, slots in blocks.
        Where maps move, survivors may have different ones: then none, for which C puts those that they agree on."""
        if "expert_map" in changes:
            return {}
        if self.placement is None:
            return {"expert_map": None}
        if self.placement.moves:
            none = {"slot_expert": None, "slots": None, "shares": None, "where": None}
            return {"expert_map": replace(self.placement, **none, layers=self.layers)}
        tables, shares = (np.stack(parts) for parts in zip(*map(self.read, range(self.layers)), strict=True))
        used = shares if self.placement.policy == "shares" else None
        return {"expert_map": replace(self.placement, slot_expert=tables, shares=used, where=None)}
