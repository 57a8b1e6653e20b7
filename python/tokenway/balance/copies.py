"""What goes on beside the steps of a model: plans, in a thread; and copies of experts' weights, in another thread on
the CPU, by a copy engine on a CUDA device, in messages from ranks with which there is no memory in common."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import numpy as np

from tokenway.balance.messages import Messages
from tokenway.balance.weights import Weights

Piece = tuple[int, int, int, int]  # of Weights.pieces
T = TypeVar("T")
Made = TypeVar("Made", covariant=True)
CLOSING = 10.0  # seconds that threads which wait for peers may take to notice that they need not


class Line:
    """A thread that makes calls in order. Unlike an executor's, a process that ends does not wait for it."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Has a call made behind those of before."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def end(self) -> None:
        """Makes no more calls than the one that is under way."""
        self._over = True
        self._calls.put(None)

    def ended(self, timeout: float) -> bool:
        """Whether that has ended, in so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            if self._over:
                future.cancel()
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)


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

    def problem(self, epoch: int) -> BaseException | None:
        """The error that one of them has ended in."""

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
        self._thread: Any = self._make_thread()
        self._begun: dict[int, list[Future[None]]] = defaultdict(list)

    def _make_thread(self) -> Any:
        return ThreadPoolExecutor(1, "tokenway-move")

    def begin(self, epoch: int, piece: Piece) -> None:
        """Begins a copy that an epoch needs."""
        self._begun[epoch].append(self._thread.submit(self._move, piece))

    def _move(self, piece: Piece) -> None:
        self._weights.pull(piece, 0)

    def ended(self, epoch: int) -> bool:
        """Whether all copies that were begun for an epoch have ended."""
        return all(each.done() for each in self._begun[epoch])

    def problem(self, epoch: int) -> BaseException | None:
        """The error that one of them has ended in."""
        return next((each.exception() for each in self._begun[epoch] if each.done() and each.exception()), None)

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

    def problem(self, epoch: int) -> BaseException | None:
        """The error that one of them has ended in: none, as a device's error is its process's."""
        del epoch
        return None

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


class MessageCopies(HostCopies):
    """Where not all ranks have memory in common, on the CPU and on a CUDA device. One thread brings what this rank
    needs, in order, from memory that it sees and else by asking, and another takes what the planner tells, also a
    planner of this host."""

    def __init__(self, weights: Weights, messages: Messages):
        super().__init__(weights)
        self._messages = messages
        self._told: bytes | None = None
        self._follower: Line | None = None
        self._following: Future[None] | None = None

    def _make_thread(self) -> Line:
        return Line("tokenway-move")

    def begin(self, epoch: int, piece: Piece) -> None:
        """Begins a copy that an epoch needs; nothing more is asked for where one of it has failed, as a peer that is
        stopped would be waited for again and again."""
        self._begun[epoch].append(self._thread.submit(self._unless_failed, epoch, piece))

    def _unless_failed(self, epoch: int, piece: Piece) -> None:
        if not any(each.done() and each.exception() for each in list(self._begun.get(epoch, ()))):
            self._move(piece)

    def _move(self, piece: Piece) -> None:
        self._weights.pull(piece, self._messages.memory.stream)
        self._messages.memory.settle()

    def freed(self, streams: Iterable[Any] = ()) -> None:
        """Lets copies wait for what the current stream has now, and these: steps of before, which may read slots that
        are free."""
        self._messages.memory.behind(streams)

    def write_board(self, told: bytes) -> bool:
        """Tells other ranks."""
        self._messages.server.tell(told)
        self._told = told
        return True

    def read_board(self, rank: int) -> bytes | None:
        """What a rank tells; None while that is on its way."""
        if rank == self._weights.group.rank:
            return self._told
        if self._follower is None:
            self._follower = Line("tokenway-follow")
        if self._following is None or self._following.done():  # a connection that has ended is made anew
            self._following = self._follower.submit(self._messages.follow, rank, self._take)
        return self._told

    def _take(self, board: bytes) -> None:
        self._told = board

    def close(self) -> None:
        """Gives up copies that were begun: a peer that serves nothing must hold nobody up."""
        Thinking.close(self)
        lines = [line for line in (self._thread, self._follower) if line is not None]
        for line in lines:
            line.end()
        until = time.monotonic() + CLOSING
        while not all([line.ended(0.02) for line in lines]) and time.monotonic() < until:
            self._messages.cut()  # again, as a call may have connected since


def copies_of(weights: Weights) -> Beside:
    """Of a rank."""
    if weights.messages is not None:
        return MessageCopies(weights, weights.messages)
    return HostCopies(weights) if weights.group.device is None else DeviceCopies(weights)
