"""What cannot be done together is refused, and nothing else is harmed: threads in one group, and calls within calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tokenway as tw

IDS = np.array([[0, 3], [1, 2]], np.int32)
PATIENT = 100  # seconds: nothing here is late


class Pair:
    """Two ranks in this process, driven by the test: 0 by itself, 1 by `peer`."""

    def __init__(self, **settings: Any):
        given = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4, "dtype": "float32", "lanes": 2}
        self.comms = tw.local_comms(2)
        self.groups: list[Any] = [None, None]
        self.both(lambda r: tw.Group(self.comms[r], timeout=PATIENT, **given | settings), self.groups)
        self.group = self.groups[0]
        self.handles = [group.route(IDS) for group in self.groups]

    def both(self, call: Callable[[int], Any], results: list[Any] | None = None) -> list[Any]:
        """The call in a thread for each rank."""
        found: list[Any] = [None, None] if results is None else results
        threads = [Started(call, rank, found) for rank in (0, 1)]
        for thread in threads:
            thread.result()
        return found

    def close(self) -> None:
        self.both(lambda rank: self.groups[rank].close())
        for comm in self.comms:
            comm.close()


class Started(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], rank: int = 0, results: list[Any] | None = None):
        super().__init__(daemon=True)
        self._call, self._rank, self._results = call, rank, results
        self._error: BaseException | None = None
        self.value: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._call(self._rank)
            if self._results is not None:
                self._results[self._rank] = self.value
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(PATIENT)
        assert not self.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self.value


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def tokens(value: float) -> np.ndarray:
    return np.full((2, 8), value, np.float32)


def waiting_dispatch(pair: Pair) -> Started:
    """Rank 0 in a dispatch, which waits for rank 1."""
    started = Started(lambda _: until_taken(pair.group.dispatch, pair.handles[0], tokens(1)))
    while True:  # calls that change nothing, until one finds the other under way
        try:
            pair.handles[0].num_recv_tokens()
        except tw.InvalidUsage as error:
            if "under way" in str(error):
                return started


CALLS: dict[str, Callable[[Pair, Any], Any]] = {
    "route": lambda pair, _: pair.group.route(IDS),
    "dispatch": lambda pair, other: pair.group.dispatch(other, tokens(2)),
    "a wrong dispatch": lambda pair, other: pair.group.dispatch(other, "no tensor"),
    "combine": lambda pair, other: pair.group.combine(other, tokens(2)),
    "all_gatherv": lambda pair, _: pair.group.all_gatherv(tokens(2), [2, 2]),
    "reduce_scatterv": lambda pair, _: pair.group.reduce_scatterv(tokens(2), [1, 1]),
    "update": lambda _, other: other.update(IDS),
    "release": lambda _, other: other.release(),
    "shrink": lambda pair, _: pair.group.shrink(),
    "expert_of_slot": lambda pair, _: pair.group.expert_of_slot(),
    "close": lambda pair, _: pair.group.close(),
}


def test_calls_beside_a_call(pair: Pair) -> None:
    other = pair.group.route(IDS)
    waiting = waiting_dispatch(pair)
    for name, call in CALLS.items():
        with pytest.raises(tw.InvalidUsage, match="dispatch is under way on the group, in another thread"):
            call(pair, other)
            pytest.fail(f"{name} was not refused")
    assert pair.group.error is None and not pair.group.closed
    assert repr(pair.group)
    # Nobody was told: the peer's step goes well, and all the refused calls can be made.
    theirs = Started(lambda _: pair.groups[1].dispatch(pair.handles[1], tokens(1)))
    assert (np.asarray(waiting.result().tokens)[:, :2] == 1).all()
    theirs.result()
    pair.both(lambda rank: pair.groups[rank].combine(pair.handles[rank], tokens_of(pair.groups[rank])))
    pair.both(lambda rank: pair.groups[rank].all_gatherv(tokens(2), [2, 2]))


def tokens_of(group: Any) -> np.ndarray:
    return np.ones((group.nranks, group.max_tokens, group.hidden), np.float32)


def test_abort_ends_a_call_and_then_close_comes(pair: Pair) -> None:
    waiting = waiting_dispatch(pair)
    with pytest.raises(tw.InvalidUsage, match=r"Group.abort, from any thread, ends one that waits"):
        pair.group.close()
    pair.group.abort()
    with pytest.raises(tw.PeerAborted):
        waiting.result()
    pair.group.close()


def test_a_pending_call_that_could_not_be_completed_still_can(pair: Pair) -> None:
    other = pair.group.route(IDS)
    pending = pair.group.dispatch(other, tokens(3), send_only=True)
    request = pair.group.all_gatherv(tokens(4), [2, 2], send_only=True, lane=1)
    started = Started(lambda _: until_taken(pair.groups[0].shrink))  # waits for rank 1, and begins no step
    while True:
        try:
            pair.group.route(IDS)
        except tw.InvalidUsage:
            break
    for call in (pending, request):
        with pytest.raises(tw.InvalidUsage, match=r"Group.shrink is under way"):
            call.result()
    survivors = [Started(lambda _: pair.groups[1].shrink()), started]
    groups = [one.result() for one in survivors]
    # The group has ended meanwhile, which completing them tells: as it would have told without the refusals.
    for call in (pending, request):
        with pytest.raises(tw.TokenwayError, match="shrunk"):
            call.result()
    pair.both(lambda rank: groups[rank].close())


def test_threads_without_a_lock() -> None:
    """Each call is right or refused: no call's arguments are another's."""
    with (
        tw.local_comms(1)[0] as comm,
        tw.Group(comm, experts=4, top_k=2, hidden=8, max_tokens=4, dtype="float32", lanes=4, timeout=PATIENT) as group,
    ):
        done = [0, 0, 0]

        def work(rank: int) -> None:
            value = float(rank + 1)
            out = np.zeros((2, 8), np.float32)
            for _ in range(300):
                handle = until_taken(group.route, IDS)
                rows = np.array(until_taken(group.dispatch, handle, tokens(value)).tokens)
                assert (rows[0, :2] == value).all()
                rows[0, 2:] = 0
                until_taken(group.combine, handle, rows, out=out)
                assert (out == value).all()
                assert (until_taken(group.all_gatherv, tokens(value), [2]).rows == value).all()
                done[rank] += 1

        for thread in [Started(work, rank) for rank in range(3)]:
            thread.result()
        assert done == [300] * 3


def until_taken(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Made again while a call of another thread is in its way."""
    while True:
        try:
            return call(*args, **kwargs)
        except tw.InvalidUsage as error:
            assert "under way" in str(error), error


def test_a_call_while_another_ones_arguments_are_read() -> None:
    """As a signal's handler does it, between two bytecodes of the first: both are right."""
    with (
        tw.local_comms(1)[0] as comm,
        tw.Group(comm, experts=4, top_k=2, hidden=8, max_tokens=4, dtype="float32", lanes=2, timeout=PATIENT) as group,
    ):
        first, second = group.route(IDS), group.route(IDS)
        inner: list[Any] = []

        class Interrupting(dict):  # type: ignore[type-arg]
            def keys(self) -> Any:
                inner.append(np.array(group.dispatch(second, tokens(5), lane=1).tokens))
                return super().keys()

        outer = group.dispatch(first, tokens(7), Interrupting(), lane=0)
        assert (np.asarray(outer.tokens)[0, :2] == 7).all() and (inner[0][0, :2] == 5).all()
        for handle in (first, second):
            handle.release()


def test_handles_dropped_by_another_thread(pair: Pair) -> None:
    """A finalizer is no call: it only tells the group's own thread, whatever that is doing."""
    handles = [pair.group.route(IDS) for _ in range(5)]
    waiting = waiting_dispatch(pair)
    Started(lambda _: handles.clear()).result()
    assert len(pair.group._blocks.finished) == 5
    with pytest.raises(tw.InvalidUsage, match="under way"):
        pair.group.route(IDS)
    assert len(pair.group._blocks.finished) == 5, "none is lost where it cannot be freed yet"
    Started(lambda _: pair.groups[1].dispatch(pair.handles[1], tokens(1))).result()
    waiting.result()
    handles.append(pair.group.route(IDS))
    assert len(pair.group._blocks.finished) == 0


def test_groups_of_one_comm_in_two_threads(pair: Pair) -> None:
    settings = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4, "timeout": PATIENT}
    creating = Started(lambda _: tw.Group(pair.comms[0], **settings))
    while True:
        with pytest.raises(tw.InvalidUsage) as caught:
            pair.comms[0].close()
        if "Group() is under way on the comm, in another thread" in str(caught.value):
            break
        if creating.is_alive():
            continue
        creating = Started(lambda _: tw.Group(pair.comms[0], **settings))  # the question was in its way
    with pytest.raises(tw.InvalidUsage, match=r"Group\(\) is under way on the comm"):
        tw.Group(pair.comms[0], **settings)
    with pytest.raises(tw.InvalidUsage, match=r"Group\(\) is under way on the comm"):
        pair.group.close()
    theirs = tw.Group(pair.comms[1], **settings)
    groups = [creating.result(), theirs]
    pair.both(lambda rank: groups[rank].close())
