"""Experts' weights in memory that peers read, so that they can move while steps run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway import _native, tensors
from tokenway.errors import InvalidArgument, Unsupported
from tokenway.group import Group
from tokenway.outputs import Keeper

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
        for name, (shape, dtype) in weights.items():
            extents = tuple(int(extent) for extent in ((shape,) if isinstance(shape, int) else shape))
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
    def move_bytes(self) -> int:
        """Of one expert of a layer."""
        return sum(map(self.expert_bytes, self.tensors))


def weight_bytes(weights: Mapping[str, tuple[Any, Any]], *, layers: int, slots: int, ranks: int) -> int:
    """What `Placement.weight_bytes` must be for weights as `Weights` takes them. slots: the most that a rank has, spare
    ones too. Errors: InvalidArgument."""
    return Layout.of(weights, layers, slots, board_bytes(layers, slots * ranks)).bytes


def board_bytes(layers: int, slots: int) -> int:
    """For the maps of all layers, [layers, slots of all ranks], and what goes before them."""
    return BOARD + _aligned(4 * layers * slots)


class Weights:
    """The experts' weights of all layers on one rank, in the group's memory that peers read.

    group: of `Placement(..., moves=True, weight_bytes=weight_bytes(...))`. weights: by name (shape of one expert,
    dtype), alike on all ranks. `tensor` shows a layer's, [local slots, ...], to fill and to multiply with; slot i of
    them is the rank's i-th physical slot. Errors: InvalidArgument; InvalidUsage where the group has no such memory;
    Unsupported where ranks have no memory in common.
    """

    def __init__(self, group: Group, weights: Mapping[str, tuple[Any, Any]]):
        self.group = group
        self.rank_of_slot, self.place_of_slot = _places(group)
        slots = int(np.bincount(self.rank_of_slot, minlength=group.nranks).max())
        self.layout = Layout.of(weights, group.layers, slots, board_bytes(group.layers, slots * group.nranks))
        self._native = group.native
        self._keeper = Keeper(group.native.pointer)
        memory, size = zip(*map(self._memory_of, range(group.nranks)), strict=True)
        if size[0] < self.layout.bytes:
            what = f"has {size[0]} bytes of weights; these need {self.layout.bytes} (balance.weight_bytes)"
            raise InvalidArgument.of("group", what)
        if not all(memory):
            raise Unsupported("ranks of the group have no memory in common, so weights cannot be read by peers")
        self._memory = memory[group.rank]
        self.shown: list[Any] = []  # tensors of this memory that PyTorch's autograd knows

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
        torch = self.group.device is not None
        return self._native.place.window_view(self._memory, (self.layout.board,), "uint8", torch, self._keeper)

    def pull_board(self, rank: int, stream: int) -> None:
        """Copies a rank's board to this one's."""
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
        """Copies a piece; on a CUDA device in stream order, by a copy engine."""
        self._pull(*piece, stream)

    def _pull(self, rank: int, read: int, write: int, size: int, stream: int) -> None:
        _native.check(_native.lib.twGroupPull(self._native.pointer, rank, read, write, size, stream))

    def _memory_of(self, rank: int) -> tuple[int, int]:
        memory, size = c_void_p(), c_uint64()
        _native.check(_native.lib.twGroupWeights(self._native.pointer, rank, byref(memory), byref(size)))
        return memory.value or 0, size.value


def _places(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """(the rank of each physical slot, its place there): [P] each."""
    placement = group.settings.placement
    where = None if placement is None else placement.where
    if where is not None:
        return np.asarray(where[0], np.int64), np.asarray(where[1], np.int64)
    counts = np.full(group.nranks, group.slots // group.nranks)
    counts[: group.slots % group.nranks] += 1
    rank = np.repeat(np.arange(group.nranks), counts)
    return rank, np.arange(group.slots) - np.repeat(np.cumsum(counts) - counts, counts)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
