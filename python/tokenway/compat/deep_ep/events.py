"""Events and streams as DeepEP has them: calls on a stream of their own, which the caller's waits for when it wants to.

On the CPU calls are done when they return, and events have nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


class EventHandle:
    """What the current CUDA stream holds at this moment; without CUDA, nothing."""

    def __init__(self) -> None:
        self.event: Any = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Has the current stream wait for that. Never waits on the host."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event, and tensors that live until it is waited for. As a `with` block, it is waited for at the block's end.

    event: an EventHandle, or None where there is nothing to wait for. extra_tensors: what shall live as long."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Has the current stream wait for the event, and returns what the hook returns, the first time, or None.
        release_handle: the event is let go of then. Errors: the hook's, which is called again by the next wait."""
        assert self.event is not None, "a call without async_finish has no event: its results are there"
        self.event.current_stream_wait()
        result = None
        if self.hook_after_wait is not None:
            result = self.hook_after_wait()
            self.hook_after_wait = None
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """As `current_stream_wait`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """A function to be called once, when the event has been waited for."""
        assert self.hook_after_wait is None, "this event has a hook already"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False


def used_here(*tensors: Any) -> None:
    """Notes that the current stream uses this memory of the stream of calls, where a caller takes it later than in its
    call. What is no tensor is passed over."""
    for x in tensors:
        if isinstance(x, Tensor) and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            x.record_stream(torch.cuda.current_stream(x.device))


def handle_of(event: Any) -> EventHandle | None:
    """The EventHandle of an argument `previous_event`: that itself, or what an EventOverlap has."""
    return event.event if isinstance(event, EventOverlap) else event


class Streams:
    """The streams of the calls of one process group on one device, which are ordered, whatever streams they are on."""

    def __init__(self, device: torch.device):
        self.device = device
        self._own: Any = None
        self.last: Any = None  # of the last call

    @property
    def own(self) -> Any:
        """The stream of asynchronous calls."""
        if self._own is None:
            self._own = torch.cuda.Stream(self.device)
        return self._own

    def call(
        self, previous: Any, asynchronous: bool, inputs: Iterable[Any] = ()
    ) -> AbstractContextManager[Call | CallHere]:
        """Around a call: what runs in it runs on the stream of calls if it is asynchronous, else on the current one,
        after the event `previous`, or without one after all that the current stream holds. inputs: what an
        asynchronous call reads."""
        if self.device.type == "cpu":
            return CallHere(None, EventHandle() if asynchronous else None)
        previous = handle_of(previous)
        if not asynchronous and previous is None and self.last is not None:
            current = torch.cuda.current_stream(self.device)
            if current == self.last:  # behind the call before as it is: a guard would take longer than that call
                return CallHere(current, None)
        return Call(self, previous, asynchronous, inputs)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Runs what is in it on the stream of a call that was made before (`Call.stream`), for which the current one
        waits then."""
        current = None if stream is None else torch.cuda.current_stream(self.device)
        if current == stream:
            yield
            return
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            if _capturing(current) == _capturing(stream):
                current.wait_stream(stream)


class CallHere:
    """One that needs nothing: on the CPU, where it is done when it returns, or on the stream that the caller is on and
    the last call was. stream, event: as `Call` has them."""

    def __init__(self, stream: Any, event: EventHandle | None):
        self.stream = stream
        self.event = EventOverlap(event)

    def __enter__(self) -> CallHere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gives(self, *tensors: Any) -> None:
        """What it returns."""


class Call:
    """One on a CUDA device. `event` is there once the block is left. stream: that it runs on."""

    def __init__(self, streams: Streams, previous: EventHandle | None, asynchronous: bool, inputs: Iterable[Any]):
        self._streams, self._previous, self._asynchronous = streams, previous, asynchronous
        self._inputs = [x for x in inputs if isinstance(x, Tensor)]
        self._given: list[Tensor] = []
        self.event = EventOverlap(None)

    def __enter__(self) -> Call:
        streams = self._streams
        self._current = torch.cuda.current_stream(streams.device)
        self.stream = streams.own if self._asynchronous else self._current
        event = None if self._previous is None else self._previous.event
        if event is not None:
            self.stream.wait_event(event)
        elif self._asynchronous:
            self.stream.wait_stream(self._current)
        self._guard = torch.cuda.stream(self.stream)
        self._guard.__enter__()
        self._captured = torch.cuda.is_current_stream_capturing()
        # A graph cannot wait for what is no part of it: who replays orders these.
        if streams.last not in (None, self.stream) and _capturing(streams.last) == self._captured:
            self.stream.wait_stream(streams.last)
        return self

    def gives(self, *tensors: Any) -> None:
        """What it returns: memory of the stream of calls, which the caller's stream uses from now on."""
        self._given += [x for x in tensors if isinstance(x, Tensor)]

    def __exit__(self, *error: Any) -> None:
        self._streams.last = self.stream
        try:
            if self._asynchronous:
                self.event = EventOverlap(EventHandle(), self._held())
        finally:
            self._guard.__exit__(*error)

    def _held(self) -> tuple[Tensor, ...] | None:
        """Notes which streams use which memory: those tensors, if the event is to keep them instead."""
        if self._captured:  # the allocator cannot note it in a capture
            return (*self._inputs, *self._given)
        for tensors, stream in ((self._inputs, self.stream), (self._given, self._current)):
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return None


def _capturing(stream: Any) -> bool:
    """Whether a stream is captured now."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
