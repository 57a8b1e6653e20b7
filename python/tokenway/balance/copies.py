"""What goes on beside the steps of a model: plans, in a thread; and copies of experts' weights, in another thread on
the CPU, by a copy engine on a CUDA device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import numpy as np

from tokenway.balance.weights import Weights

Piece = tuple[int, int, int, int]  # of Weights.pieces
T = TypeVar("T")
Made = TypeVar("Made", covariant=True)


class Thought(Protocol[Made]):
    """What a function will return."""

    def done(self) -> bool:
        """Whether it has returned, or raised."""

    def result(self) -> Made:
        """What it has returned; raises what it has raised."""


class Beside(Protocol):
    """What a balancer has done beside the steps of its rank, and asks later how far it is."""

    def think(self, function: Callable[..., T], *args: Any) -> Thought[T]:
        """Has a function of numbers called, in order."""

    def begin(self, epoch: int, piece: Piece) -> None:
        """Begins a copy that an epoch needs."""

    def ended(self, epoch: int) -> bool:
        """Whether all copies that were begun for an epoch have ended."""

    def failed(self, epoch: int) -> bool:
        """Whether one of them has ended in an error."""

    def forget(self, epoch: int) -> None:
        """The epoch is decided."""

    def freed(self, streams: Iterable[Any] = ()) -> None:
        """Slots may be written to that steps which were launched before may read. streams: where those run, beside the
        current one."""

    def write_board(self, told: bytes) -> bool:
        """Tells other ranks; False while what was told before is on its way there, and nothing was done."""

    def read_board(self, rank: int) -> bytes | None:
        """What a rank tells; None while that is on its way."""

    def wait(self) -> None:
        """Until all that was begun has ended."""

    def close(self) -> None:
        """The same, and nothing more can begin."""


class Thinking:
    """A thread for what a balancer thinks about."""

    def __init__(self) -> None:
        self._thinker = ThreadPoolExecutor(1, "tokenway-plan")
        self._thoughts: list[Future[Any]] = []

    def think(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """As `Beside` says."""
        self._thoughts = [each for each in self._thoughts if not each.done()]
        made = self._thinker.submit(function, *args)
        self._thoughts.append(made)
        return made

    def wait(self) -> None:
        """As `Beside` says."""
        wait(self._thoughts)

    def close(self) -> None:
        """As `Beside` says."""
        self._thinker.shutdown()


class HostCopies(Thinking):
    """On the CPU. One thread makes all copies, in order."""

    def __init__(self, weights: Weights):
        super().__init__()
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

    def wait(self) -> None:
        """As `Beside` says."""
        super().wait()
        wait([each for begun in self._begun.values() for each in begun])

    def close(self) -> None:
        """As `Beside` says."""
        super().close()
        self._thread.shutdown()


class DeviceCopies(Thinking):
    """On a CUDA device, on a stream of its own. It waits for streams of steps, and none of them for it (M8)."""

    def __init__(self, weights: Weights):
        super().__init__()
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

    def wait(self) -> None:
        """As `Beside` says."""
        super().wait()
        self._stream.synchronize()

    def close(self) -> None:
        """As `Beside` says."""
        super().close()
        self._stream.synchronize()


def copies_of(weights: Weights) -> HostCopies | DeviceCopies:
    """Of a rank."""
    return HostCopies(weights) if weights.group.device is None else DeviceCopies(weights)
