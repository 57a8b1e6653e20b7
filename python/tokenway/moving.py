"""Maps that move: layers that get new maps while steps run, which all ranks take over in the same dispatch without a
wait. `Group.moving` has them, in a group of `Placement(..., moves=True)`."""

from __future__ import annotations

from ctypes import byref, c_uint32
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway import _header, _native
from tokenway.blocks import Blocks
from tokenway.maps import Maps
from tokenway.native_group import NativeGroup


@dataclass(frozen=True)
class Epochs:
    """How far epochs have come on a rank. They are numbered from 1, by `Moving.stage`.

    staged, ready: the last ones of `Moving.stage` and `Moving.ready`. agreed: those up to it are decided on all lanes
    of this rank. oldest: the version that some handle may still have which is not gone, at least; `agreed` if there is
    none. lanes: the version of each lane. voids: bit i says that epoch agreed - i was void.
    """

    staged: int
    ready: int
    agreed: int
    oldest: int
    lanes: tuple[int, ...]
    voids: int

    def is_void(self, epoch: int) -> bool:
        """Whether an epoch that was decided has left its layer as it was, because a rank had failed. To be asked for
        the last 32 of them."""
        return bool(self.voids >> (self.agreed - epoch) & 1)


@dataclass(frozen=True)
class LostExpert:
    """An expert whose weights were on ranks alone that are gone, and the slot that it has got: `slot` of all, `place`
    among those of `rank`."""

    layer: int
    expert: int
    slot: int
    rank: int
    place: int


class Moving:
    """Those of one group. Without `Placement.moves` its methods raise InvalidUsage.

    A rank stages a layer's next map, brings the weights that it needs there, and says so; each dispatch tells all ranks
    how far its rank is. As soon as all have told in one dispatch that they have an epoch, the lane goes by its map, on
    all ranks from the same dispatch on. Nobody waits: a rank that is late with its weights delays the epoch for all.
    """

    def __init__(self, native: NativeGroup, maps: Maps, lanes: int, blocks: Blocks):
        self._native, self._maps, self._lanes, self._blocks = native, maps, lanes, blocks

    def stage(self, slot_expert: Any, layer: int = 0, shares: Any = None) -> int:
        """Stages a layer's next map, slot_expert [P], shares [P] (of policy "shares"; default alike): returns its
        epoch.

        All ranks stage the same maps in the same order; when they do is their own affair. Errors: InvalidArgument;
        InvalidUsage while the layer's epoch before is open on a lane of this rank, or while 15 epochs are.
        """
        table, of = self._maps.given(slot_expert, shares)
        epoch = c_uint32()
        places = table.ctypes.data, None if of is None else of.ctypes.data
        layer = _native.fit("layer", layer)
        _native.check(_native.lib.twGroupStageMap(self._native.pointer, layer, *places, byref(epoch)))
        return epoch.value

    def ready(self, epoch: int, failed: bool = False) -> None:
        """Says that this rank has what an epoch needs, or that it will never have it (failed: the epoch is void on all
        ranks, and the layer keeps its map). In the order of epochs, each once."""
        epoch = _native.fit("epoch", epoch)
        _native.check(_native.lib.twGroupReady(self._native.pointer, epoch, 1 if failed else 0))

    def epochs(self) -> Epochs:
        """How far epochs have come here, without waiting: on a CUDA device as far as the device has told.

        The slots that an epoch has freed may be filled again when `agreed` and `oldest` have come to it: in stream
        order, behind what was launched before this was seen.
        """
        self._blocks.free()  # handles that nobody holds any more need no map
        known = _header.Epochs()
        lanes = np.zeros(self._lanes, np.uint32)
        _native.check(_native.lib.twGroupEpochs(self._native.pointer, byref(known), lanes.ctypes.data))
        versions = tuple(int(lane) for lane in lanes)
        return Epochs(known.staged, known.ready, known.agreed, known.oldest, versions, known.voids)

    @property
    def lost_experts(self) -> tuple[LostExpert, ...]:
        """Of a group that `Group.shrink` has made with the maps in force: experts that no survivor had, by layer
        and slot, the same on all ranks. Their weights are to be loaded before the first dispatch
        (`balance.Weights.of_survivors`). They stay named."""
        placement = self._maps.placement
        if placement is None or not placement.moves:
            return ()
        rank, place = placement.places(self._maps.slots, self._native.nranks)
        found = []
        for layer in range(self._maps.layers):
            lost = np.zeros(self._maps.slots, np.int32)
            _native.check(_native.lib.twGroupLost(self._native.pointer, layer, lost.ctypes.data))
            if lost.any():
                table = self._maps.read(layer)[0]
                slots = np.flatnonzero(lost).tolist()
                found += [LostExpert(layer, int(table[p]), p, int(rank[p]), int(place[p])) for p in slots]
        return tuple(found)
