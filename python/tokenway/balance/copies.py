"""Copies of experts' weights beside the steps of a model: in a thread on the CPU, by a copy engine on a CUDA device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from tokenway.balance.weights import Weights

Piece = tuple[int, int, int, int]  # of Weights.pieces


class HostCopies:
    """On the CPU. One thread makes all copies, in order."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._thread = ThreadPoolExecutor(1, "tokenway-move")
        self._begun: dict[int, list[Future[None]]] = defaultdict(list)

    def begin(self, epoch: int, piece: Piece) -> None:
        """Begins a copy that an epoch needs."""
        self._begun[epoch].append(self._thread.submit(self._weights.pull, piece, 0))

    def ended(self, epoch: int) -> bool:
        """Whether all copies that were begun for an epoch have ended."""
        return all(each.done() for each in self._begun[epoch])

    def failed(self, epoch: int) -> bool:
        """Whether one of them has ended in an error."""
        return any(each.done() and each.exception() is not None for each in self._begun[epoch])

    def forget(self, epoch: int) -> None:
        """The epoch is decided."""
        self._begun.pop(epoch, None)

    def freed(self, streams: Iterable[Any] = ()) -> None:
        """Slots may be written to that steps which were launched before may read: those have ended."""

    def write_board(self, told: bytes) -> bool:
        """Tells other ranks."""
        np.asarray(self._weights.board())[: len(told)] = memoryview(told)
        return True

    def read_board(self, rank: int) -> bytes | None:
        """What a rank tells; None while that is on its way."""
        if rank != self._weights.group.rank:
            self._weights.pull_board(rank, 0)
        return np.asarray(self._weights.board()).tobytes()

    def close(self) -> None:
        """Waits for the copies that were begun."""
        self._thread.shutdown()


class DeviceCopies:
    """On a CUDA device, on a stream of its own. It waits for streams of steps, and none of them for it (M8)."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._torch = weights.group.native.place.torch
        self._device = weights.group.device
        self._stream = self._torch.cuda.Stream(self._device)
        self._last: dict[int, Any] = {}
        size = weights.layout.board
        self._told = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        self._read = self._torch.zeros(size, dtype=self._torch.uint8, pin_memory=True)
        self._reading: Any = None
        self._wrote: Any = None

    def begin(self, epoch: int, piece: Piece) -> None:
        """Begins a copy that an epoch needs, behind what the current stream has now: a host that is ahead of the device
        would else spend what several steps may copy in one."""
        self._stream.wait_event(self._torch.cuda.current_stream(self._device).record_event())
        self._weights.pull(piece, self._stream.cuda_stream)
        self._last[epoch] = self._stream.record_event()

    def ended(self, epoch: int) -> bool:
        """Whether all copies that were begun for an epoch have ended."""
        return epoch not in self._last or bool(self._last[epoch].query())

    def failed(self, epoch: int) -> bool:
        """Whether one of them has ended in an error: a device's error is its process's."""
        del epoch
        return False

    def forget(self, epoch: int) -> None:
        """The epoch is decided."""
        self._last.pop(epoch, None)

    def freed(self, streams: Iterable[Any] = ()) -> None:
        """Lets copies wait for what the current stream has now, and these: steps of before, which may read slots that
        are free."""
        for stream in (self._torch.cuda.current_stream(self._device), *streams):
            self._stream.wait_event(stream.record_event())

    def write_board(self, told: bytes) -> bool:
        """Tells other ranks; False while what was told before is on its way there, and nothing was done."""
        if self._wrote is not None and not self._wrote.query():
            return False
        self._told[: len(told)].numpy()[:] = memoryview(told)
        with self._torch.cuda.stream(self._stream):
            self._weights.board()[: len(told)].copy_(self._told[: len(told)], non_blocking=True)
        self._wrote = self._stream.record_event()
        return True

    def read_board(self, rank: int) -> bytes | None:
        """What a rank tells; None while that is on its way."""
        found = None
        if self._reading is not None:
            if not self._reading.query():
                return None
            found = self._read.numpy().tobytes()
        with self._torch.cuda.stream(self._stream):
            if rank != self._weights.group.rank:
                self._weights.pull_board(rank, self._stream.cuda_stream)
            self._read.copy_(self._weights.board(), non_blocking=True)
        self._reading = self._stream.record_event()
        return found

    def close(self) -> None:
        """Waits for the copies that were begun."""
        self._stream.synchronize()


def copies_of(weights: Weights) -> HostCopies | DeviceCopies:
    """Of a rank."""
    return HostCopies(weights) if weights.group.device is None else DeviceCopies(weights)
