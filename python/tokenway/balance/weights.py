"""Experts' weights in memory that peers read, so that they can move while steps run."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway import _native, tensors
from tokenway.balance import messages
from tokenway.errors import InvalidArgument, InvalidUsage, Unsupported
from tokenway.group import Group
from tokenway.outputs import Keeper
from tokenway.placement import Placement

ALIGNMENT = 256  # of every tensor, in bytes
BOARD = 1 << 12  # bytes for what a rank tells the others of plans (balancer.py), before the weights


@dataclass(frozen=True)
class Layout:
    """Where weights lie in the memory of each rank, alike on all of them.

    tensors: by name (shape of one expert, dtype). layers: of the model. slots: local slots of a rank, spare ones too,
    the most that one has.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    layers: int
    slots: int
    board: int = BOARD

    @classmethod
    def of(cls, weights: Mapping[str, tuple[Any, Any]], layers: int, slots: int, board: int = BOARD) -> Layout:
        """From shapes and dtypes as callers give them. Errors: InvalidArgument."""
        if not weights:
            raise InvalidArgument.of("weights", "is empty; it must name the tensors of an expert")
        known = {}
        for name, given in weights.items():
            try:
                shape, dtype = given
                extents = tuple(int(extent) for extent in ((shape,) if isinstance(shape, int) else shape))
            except (TypeError, ValueError) as error:
                raise InvalidArgument.of(f"weights[{name!r}]", f"is {given!r}; it must be (shape, dtype)") from error
            if any(extent < 1 for extent in extents):
                raise InvalidArgument.of(f"weights[{name!r}]", f"has shape {extents}; its extents must be at least 1")
            known[name] = extents, tensors.dtype_name(dtype)
        return cls(known, layers, slots, board)

    def expert_bytes(self, name: str) -> int:
        """Of one expert's tensor."""
        shape, dtype = self.tensors[name]
        return math.prod(shape) * tensors.numpy_dtype(dtype).itemsize

    def begin(self, name: str, layer: int) -> int:
        """Where a layer's tensor [slots, ...] begins."""
        at = self.board
        for other in self.tensors:
            each = _aligned(self.slots * self.expert_bytes(other))
            if other == name:
                return at + layer * each
            at += self.layers * each
        raise KeyError(name)

    @property
    def bytes(self) -> int:
        """Of all: `Placement.weight_bytes`."""
        each = sum(_aligned(self.slots * self.expert_bytes(name)) for name in self.tensors)
        return self.board + self.layers * each

    @property
    def room(self) -> int:
        """At least `bytes`: so many that with a rank's slots it may grow in proportion (`Group.shrink`). What is filled
        up to ALIGNMENT does not, and may be more then."""
        return self.bytes + ALIGNMENT * (self.layers * len(self.tensors) + 1)

    @property
    def move_bytes(self) -> int:
        """Of one expert of a layer."""
        return sum(map(self.expert_bytes, self.tensors))


def weight_bytes(weights: Mapping[str, tuple[Any, Any]], *, layers: int, slots: int, ranks: int) -> int:
    """What `Placement.weight_bytes` must be for weights as `Weights` takes them. slots: the most that a rank has, spare
    ones too. Errors: InvalidArgument."""
    return Layout.of(weights, layers, slots, board_bytes(layers, slots * ranks)).room


def board_bytes(layers: int, slots: int) -> int:
    """For the maps of all layers, [layers, slots of all ranks], and what goes before them."""
    return BOARD + _aligned(4 * layers * slots)


class Weights:
    """The experts' weights of all layers on one rank, in the group's memory that peers read.

    group: of `Placement(..., moves=True, weight_bytes=weight_bytes(...))`. weights: by name (shape of one expert,
    dtype), alike on all ranks. `tensor` shows a layer's, [local slots, ...], to fill and to multiply with; slot i of
    them is the rank's i-th physical slot. Errors: InvalidArgument; InvalidUsage where the group has no such memory.

    Where not all ranks have memory in common, as over a carrier, or over "fabric" between hosts, making this is
    collective, one of the calls of a comm that ranks make in the same order, between steps. Each rank serves its
    weights to those that cannot read them, over connections beside the group's steps, until `close` or the end of this
    object; ranks of a host read theirs in memory where they have it in common. Errors then also: PeerRefused where
    another rank's arguments are refused, ConfigMismatch, CallMismatch, PeerTimeout, PeerDied, SystemFailure.
    """

    def __init__(self, group: Group, weights: Mapping[str, tuple[Any, Any]]):
        self.group = group
        placement = group.settings.placement or Placement()
        self.rank_of_slot, self.place_of_slot = placement.places(group.slots, group.nranks)
        self._native = group.native
        self._keeper = Keeper(group.native.pointer)
        memory, size = zip(*map(self._memory_of, range(group.nranks)), strict=True)
        self._memory = memory[group.rank]
        self.shown: list[Any] = []  # tensors of this memory that PyTorch's autograd knows
        problem = None
        try:
            self.layout = self._lay_out(weights, size[0])
        except InvalidArgument as error:
            problem = error
        self.messages: messages.Messages | None = None  # where peers' memory is not seen from here
        if not all(memory):
            view = self._bytes(size[0])
            digest = "" if problem else hashlib.sha256(repr(self.layout).encode()).hexdigest()
            self.messages = messages.connect(group, view, digest, problem)
            weakref.finalize(self, self.messages.close)
        elif problem is not None:
            raise problem

    def close(self) -> None:
        """Serves no more, where not all ranks have memory in common. Views stay."""
        if self.messages is not None:
            self.messages.close()

    def _lay_out(self, weights: Mapping[str, tuple[Any, Any]], size: int) -> Layout:
        slots = int(np.bincount(self.rank_of_slot, minlength=self.group.nranks).max())
        layers = self.group.layers
        layout = Layout.of(weights, layers, slots, board_bytes(layers, slots * self.group.nranks))
        if size < layout.bytes:
            what = f"has {size} bytes of weights; these need {layout.bytes} (balance.weight_bytes)"
            raise InvalidArgument.of("group", what)
        return layout

    @classmethod
    def of_survivors(
        cls, group: Group, former: Weights, load: Callable[[int, int], Mapping[str, Any]] | None = None
    ) -> Weights:
        """The weights of a group that `Group.shrink` has made of the one that `former` is of, with its maps.

        Copies what this rank has, from the former group's memory, which must not be closed yet, to this one's; asks no
        other rank for weights; where not all have memory in common it meets all, as making new ones does. On a CUDA
        device the copies are in stream order. load(layer, expert): the tensors of an expert by
        name, [shape of one], called for each of `group.moving.lost_experts` that this rank is to hold. Nothing reads
        them before all ranks have dispatched, so ranks may take their time. Whatever copied to the former weights, as a
        `Balancer`, must have been closed. Errors: InvalidArgument; InvalidUsage on all ranks where experts are lost and
        there is no load; where ranks meet, those of making new ones.
        """
        if group.former is not former._native:
            raise InvalidArgument.of(
                "group", "is not what shrink has made of the group of these weights, with its maps"
            )
        lost = group.moving.lost_experts
        if lost and load is None:
            named = ", ".join(f"{each.expert} of layer {each.layer}" for each in lost[:8])
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise InvalidUsage(f"experts {named}{more} were on ranks that are gone; give load, which reads them anew")
        made = cls(group, former.layout.tensors)
        places = range(made.layout.layers), made.layout.tensors
        for layer, name in itertools.product(*places):
            kept = former.tensor(name, layer)
            made.tensor(name, layer)[: len(kept)] = kept
        for each in lost:
            if each.rank == group.rank and load is not None:
                made.put(each.layer, each.place, load(each.layer, each.expert))
        return made

    def put(self, layer: int, place: int, expert: Mapping[str, Any]) -> None:
        """Writes an expert's tensors, by name, of NumPy or PyTorch, into a local slot of this rank. Errors:
        InvalidArgument."""
        if set(expert) != set(self.layout.tensors):
            what = f"names {sorted(expert)}; it must name {sorted(self.layout.tensors)}"
            raise InvalidArgument.of("expert", what)
        for name, given in expert.items():
            tensor, shape = self.tensor(name, layer), self.layout.tensors[name][0]
            if tuple(given.shape) != shape:
                raise InvalidArgument.of(f"expert[{name!r}]", f"has shape {tuple(given.shape)}; it must be {shape}")
            if tensors.is_torch(given) and not tensors.is_torch(tensor):
                tensor = tensors.to_torch(tensor)
            elif tensors.is_torch(tensor):
                given = sys.modules["torch"].as_tensor(given)
            tensor[place] = given

    def tensor(self, name: str, layer: int = 0) -> Any:
        """A layer's tensor of this rank, [local slots, ...]: a NumPy array, on a CUDA device a tensor of PyTorch. A
        view: what moves comes there, so captured graphs follow it."""
        if name not in self.layout.tensors:
            raise InvalidArgument.of("name", f"is {name!r}; it must be one of {list(self.layout.tensors)}")
        if not 0 <= layer < self.layout.layers:
            raise InvalidArgument.of("layer", f"is {layer}; it must be from 0 to {self.layout.layers - 1}")
        shape, dtype = self.layout.tensors[name]
        local = int(np.count_nonzero(self.rank_of_slot == self.group.rank))
        at = self._memory + self.layout.begin(name, layer)
        torch = self.group.device is not None
        return self._native.place.window_view(at, (local, *shape), dtype, torch, self._keeper)

    def board(self) -> Any:
        """The bytes of this rank with which it tells others of plans."""
        return self._bytes(self.layout.board)

    def _bytes(self, count: int) -> Any:
        torch = self.group.device is not None
        return self._native.place.window_view(self._memory, (count,), "uint8", torch, self._keeper)

    def pull_board(self, rank: int, stream: int) -> None:
        """Copies the board of a rank that this one has memory in common with to this one's."""
        self._pull(rank, 0, 0, self.layout.board, stream)

    def pieces(
        self, layer: int, source: int, target: int, most: int | None = None, names: Collection[str] | None = None
    ) -> list[tuple[int, int, int, int]]:
        """What a move of an expert consists of, from slot `source` to slot `target` of this rank: (rank, from, to,
        bytes), of at most `most` bytes each. names: of the tensors that move (default: all)."""
        found = []
        for name in self.layout.tensors if names is None else names:
            size, begin = self.layout.expert_bytes(name), self.layout.begin(name, layer)
            read = begin + int(self.place_of_slot[source]) * size
            write = begin + int(self.place_of_slot[target]) * size
            step = most or size
            for at in range(0, size, step):
                found.append((int(self.rank_of_slot[source]), read + at, write + at, min(step, size - at)))
        return found

    def pull(self, piece: tuple[int, int, int, int], stream: int) -> None:
        """Copies a piece; on a CUDA device in stream order, by a copy engine. What comes in messages is there when this
        returns."""
        try:
            self._pull(*piece, stream)
        except Unsupported:  # all else is as it should be, but that rank's memory is not seen from here
            if self.messages is None:
                raise
            self.messages.pull(*piece)

    def _pull(self, rank: int, read: int, write: int, size: int, stream: int) -> None:
        _native.check(_native.lib.twGroupPull(self._native.pointer, rank, read, write, size, stream))

    def _memory_of(self, rank: int) -> tuple[int, int]:
        memory, size = c_void_p(), c_uint64()
        _native.check(_native.lib.twGroupWeights(self._native.pointer, rank, byref(memory), byref(size)))
        return memory.value or 0, size.value


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
