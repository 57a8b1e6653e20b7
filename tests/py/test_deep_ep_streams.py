"""In which order calls in DeepEP's place have streams wait for each other: with CUDA's streams pretended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch


class Stream:
    """One that writes down what it is told."""

    def __init__(self, name: str, told: list[str]):
        self.name, self._told, self.captured = name, told, False

    def wait_stream(self, other: Any) -> None:
        self._told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self._told.append(f"{self.name} waits for what {event.stream.name} held")


class Pretended:
    """What the module asks of torch.cuda."""

    def __init__(self, patch: pytest.MonkeyPatch, torch: Any):
        self.told: list[str] = []
        self.current = self.main = Stream("main", self.told)
        self.own = Stream("own", self.told)
        outer = self

        class Event:
            def record(self) -> None:
                self.stream = outer.current

        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", lambda device: self.own)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.captured)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.dim() > 0), raising=False)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.told.append(f"noted for {stream.name}"))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def since(self) -> list[str]:
        """What streams were told since this was asked last."""
        told, self.told[:] = list(self.told), []
        return told


@pytest.fixture
def pretended(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    return Pretended(monkeypatch, torch)


@pytest.fixture
def streams(torch: Any, pretended: Pretended) -> Any:
    from tokenway.compat.deep_ep.events import Streams

    return Streams(torch.device("cuda", 0))


def test_a_call_on_the_current_stream(pretended, streams) -> None:
    with streams.call(None, False) as call:
        assert pretended.current is pretended.main
    assert call.event.event is None and pretended.since() == []


def test_an_asynchronous_call(torch, pretended, streams) -> None:
    """It runs behind the current stream on its own, and memory is noted for both; the next call waits for it."""
    x = torch.ones(2)
    with streams.call(None, True, (x, None, torch.tensor(2.0))) as call:  # the last is on the host
        assert pretended.current is pretended.own
        call.gives(x, None)
    assert pretended.current is pretended.main
    assert pretended.since() == ["own waits for main", "noted for own", "noted for main"]
    call.event.current_stream_wait()
    assert pretended.since() == ["main waits for what own held"]
    with streams.call(None, False):
        pass
    assert pretended.since() == ["main waits for own"]


def test_an_event_before_it(torch, pretended, streams) -> None:
    """In place of the current stream."""
    from tokenway.compat.deep_ep import EventHandle, EventOverlap

    for event in (EventHandle(), EventOverlap(EventHandle())):
        with streams.call(event, True):
            pass
        assert pretended.since() == ["own waits for what main held"]
    with streams.call(EventOverlap(None), True):
        pass
    assert pretended.since() == ["own waits for main"]


def test_an_error_within(pretended, streams) -> None:
    """The stream is left, and what was enqueued is waited for."""
    with pytest.raises(ValueError), streams.call(None, True):
        raise ValueError
    assert pretended.current is pretended.main
    with streams.call(None, False):
        pass
    assert pretended.since() == ["own waits for main", "main waits for own"]


def test_what_a_hook_does(torch, pretended, streams) -> None:
    """It is on the stream of its call, for which the current one waits then."""
    other = Stream("other", pretended.told)
    with streams.call(None, False) as call:
        pass
    with streams.on(call.stream):
        assert pretended.current is pretended.main
    assert pretended.since() == []
    with pretended.on(other), streams.on(call.stream), streams.call(None, False):
        assert pretended.current is pretended.main
    assert pretended.since() == ["other waits for main"]
    pretended.main.captured = True  # who replays orders these
    with pretended.on(other), streams.on(call.stream):
        pass
    assert pretended.since() == []


def test_captures(torch, pretended, streams) -> None:
    """A graph waits for nothing outside it; the event keeps what the allocator cannot note."""
    with streams.call(None, True):
        pass
    pretended.since()
    pretended.main.captured = True
    with streams.call(None, False):
        pass
    assert pretended.since() == []
    pretended.own.captured = True
    x = torch.ones(2)
    with streams.call(None, True, (x,)) as call:
        call.gives(x)
    assert pretended.since() == ["own waits for main", "own waits for main"]
    assert len(call.event.extra_tensors) == 2
    pretended.own.captured = False
    with streams.call(None, False):  # of the next graph
        pass
    assert pretended.since() == []


def test_events_as_blocks(pretended, streams) -> None:
    from tokenway.compat.deep_ep import EventHandle, EventOverlap

    event, called = EventOverlap(EventHandle()), []
    event.register_hook_after_wait(lambda: called.append(1))
    with event(release_handle=True):
        assert pretended.since() == []
    assert pretended.since() == ["main waits for what main held"] and called == [1] and event.event is None
    with pytest.raises(AssertionError, match="has no event"):
        event.current_stream_wait()


def test_who_waits_for_what_a_buffer_gives_later(torch, pretended, streams, monkeypatch) -> None:
    """The memory of an EPBuffer's deferred calls is noted for the stream that waits, whichever it is: of a dispatch
    rows, scales, ids, weights and what the handle keeps; of a combine sums and weights."""
    from tokenway.compat.deep_ep import EPBuffer, ranks

    other, x, none = Stream("other", pretended.told), torch.ones(2, 4), None
    kept = SimpleNamespace(plan=SimpleNamespace(kept=lambda: (x, none, x)))
    deferred = {"async_with_compute_stream": True, "defer_epilogue": True}

    def called(*results: Any) -> Any:
        with streams.call(None, True) as call:
            call.gives(*results[:2])
        return (*results, call.event)

    def noted(event: Any) -> Any:
        pretended.since()
        with pretended.on(other):
            found = event.wait()
        return found, pretended.since()

    buffer = object.__new__(EPBuffer)
    buffer.group = None
    monkeypatch.setattr(ranks, "of", lambda *_: (SimpleNamespace(streams=streams), None))
    monkeypatch.setattr(buffer, "_dispatch", lambda *_: called((x, x), x, x, kept), raising=False)
    monkeypatch.setattr(buffer, "_combine", lambda *_: (*called(x, none), lambda: None), raising=False)
    found, told = noted(buffer.dispatch(x, x, num_experts=8, **deferred))
    assert found == ((x, x), x, x, kept)
    assert told == ["other waits for what own held"] + ["noted for other"] * 6
    found, told = noted(buffer.combine(x, kept, **deferred))
    assert found == (x, none) and told == ["other waits for what own held", "noted for other"]
    pretended.own.captured = other.captured = True  # the allocator cannot note it
    assert noted(buffer.combine(x, kept, **deferred))[1] == ["other waits for what own held"]
