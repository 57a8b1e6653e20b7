"""Survivors: the group of the ranks that are left."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_uint64, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np

from tokenway import _header, _native
from tokenway.maps import Maps
from tokenway.native_group import NativeGroup
from tokenway.placement import Placement
from tokenway.settings import Settings, make_config, telling


def shrink(group: Any, maps: Maps, changes: Mapping[str, Any]) -> tuple[int, Settings, NativeGroup | None]:
    """Makes the group of the survivors: (its address, its settings, this one if it has the maps of that)."""
    survivors = c_void_p()
    base = group.pointer
    with telling(lambda nothing: _native.lib.twGroupShrink(base, nothing, byref(survivors))):
        settings = replace(group.settings, **(maps.of_survivors(changes) | changes))
        config, keep = make_config(settings)
    shrunk = _native.lib.twGroupShrink(base, byref(config), byref(survivors))
    _native.check(shrunk, base, settings.payload_names())
    del keep
    pointer = survivors.value or 0
    placement = group.settings.placement
    if placement is None or not placement.moves or "expert_map" in changes:
        return pointer, settings, None
    return pointer, replace(settings, expert_map=_kept(group, pointer, settings.placement)), group.native


def _kept(group: Any, pointer: int, asked: Placement | None) -> Placement:
    """The placement with which the survivors' group at this address has begun. asked: what it was asked for."""
    assert asked is not None
    info = _header.GroupInfo()
    _native.check(_native.lib.twGroupInfo(pointer, byref(info)))
    former = np.bincount(group.settings.placement.places(group.slots, group.nranks)[0], minlength=group.nranks)
    members = [group.comm_ranks.index(rank) for rank in info.comm_ranks[: info.nranks]]
    counts = former[members] + (info.num_local_experts - former[group.rank])
    slots = int(counts.sum())
    tables, shares = np.empty((group.layers, slots), np.int32), np.empty((group.layers, slots), np.float32)
    for layer in range(group.layers):
        _native.check(_native.lib.twGroupMap(pointer, layer, tables[layer].ctypes.data, shares[layer].ctypes.data))
    weights = c_uint64()
    if asked.weight_bytes:
        memory = c_void_p()
        _native.check(_native.lib.twGroupWeights(pointer, info.rank, byref(memory), byref(weights)))
    return replace(
        asked,
        slot_expert=tables,
        slots=slots,
        where=(np.repeat(np.arange(info.nranks), counts), np.concatenate([np.arange(count) for count in counts])),
        shares=shares if asked.policy == "shares" else None,
        weight_bytes=weights.value,
    )
