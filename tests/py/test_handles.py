"""One rank alone: what becomes of handles and calls under way that are dropped, interrupted, copied or written to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from harness import Env, caught, said
from refusals import adapt

import tokenway as tw


class Alone:
    """One rank, and a group of it for one token."""

    def __init__(self, env: Env, **changes: Any):
        self.env, self.comm = env, env.comm
        settings = {"experts": 1, "top_k": 1, "hidden": 2, "max_tokens": 1, "dtype": "float32"}
        self.group = tw.Group(self.comm, **settings | changes)

    def route(self, **keywords: Any) -> tw.Handle:
        return self.group.route(adapt(self.env, np.zeros((1, 1), np.int32)), **keywords)

    def dispatch(self, handle: tw.Handle) -> tw.Received:
        return self.group.dispatch(handle, adapt(self.env, np.zeros((1, 2), np.float32)))

    def send_combine(self, handle: tw.Handle) -> tw.Pending:
        return self.group.combine(handle, adapt(self.env, np.zeros((1, 1, 2), np.float32)), send_only=True)

    def close(self) -> None:
        self.group.close()
        self.comm.close()


@pytest.fixture
def alone(made_for) -> Iterator[Callable[..., Alone]]:
    """alone(**changes of settings): one rank on this thread."""
    with ExitStack() as contexts:

        def make(**changes: Any) -> Alone:
            env = Env(made_for.local_comms(1)[0], made_for)
            contexts.enter_context(env.context())
            return Alone(env, **changes)

        yield make


def test_a_dropped_lane_warns(alone) -> None:
    one = alone()
    handle = one.route()
    one.dispatch(handle)
    with pytest.warns(ResourceWarning, match="leases a lane was dropped"):
        del handle
    one.close()


def test_a_dropped_combine_without_a_lease(alone) -> None:
    """It takes its channel along; later calls of this rank go on."""
    one = alone(lanes=2)
    handle = one.route()
    received = one.dispatch(handle)
    one.group.combine(handle, received.tokens)
    pending = one.send_combine(handle)
    assert handle.leased
    with pytest.warns(ResourceWarning, match="leases a lane was dropped"):
        del handle, pending, received
    again = one.route()
    one.group.combine(again, one.dispatch(again).tokens)
    pending = one.send_combine(again)
    pending.result()
    assert not again.leased
    one.close()


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_while_completing(alone, monkeypatch, behind: bool) -> None:
    """Ctrl-C comes through, before the C library's call or behind it, and the result is still to be had."""
    one = alone()
    handle = one.route()
    one.dispatch(handle)
    pending = one.send_combine(handle)
    complete = tw.Handle.complete

    def interrupted(*args: Any) -> None:
        if behind:
            complete(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tw.Handle, "complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    assert np.array_equal(one.env.backend.array(pending.result()), np.zeros((1, 2)))
    assert not handle.leased
    one.close()


def test_an_interrupt_hides_no_error(alone, monkeypatch) -> None:
    one = alone()
    handle = one.route()
    one.dispatch(handle)
    pending = one.send_combine(handle)
    one.group.abort()

    def interrupted(*args: Any) -> None:
        with pytest.raises(tw.PeerAborted):
            complete(*args)
        raise KeyboardInterrupt

    complete = tw.Handle.complete
    with monkeypatch.context() as patch:
        patch.setattr(tw.Handle, "complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    for _ in range(2):
        with pytest.raises(tw.PeerAborted):
            pending.result()
    one.close()


def test_counts_are_the_callers(alone) -> None:
    """What a dispatch shows may be written to: the library reads none of it again."""
    one = alone()
    handle = one.route()
    received = one.dispatch(handle)
    want = one.env.backend.array(one.group.combine(handle, received.tokens))
    received = one.dispatch(handle)
    for shown in (received.counts, received.ids, received.weights):
        shown[...] = 2**20
    assert np.array_equal(one.env.backend.array(one.group.combine(handle, received.tokens)), want)
    one.close()


def test_handles_are_not_copied(alone) -> None:
    one = alone()
    handle = one.route()
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="handle cannot be copied"):
            way(handle)
    one.close()


def test_groups_and_comms_are_shared(alone) -> None:
    one = alone()
    for of in (one.group, one.env.comm):
        assert copy.copy(of) is of and copy.deepcopy([of])[0] is of
        with pytest.raises(TypeError, match=f"a {type(of).__name__} cannot be pickled"):
            pickle.dumps(of)
    one.close()


def test_weights_that_are_no_tensor(alone) -> None:
    """Not the same as none, which are all 1."""
    one = alone()
    ids = adapt(one.env, np.zeros((1, 1), np.int32))
    handle = one.route()
    for weights in ([[0.5]], ((0.5,),), 0.5, "no", memoryview(b"1234")):
        for call in (one.group.route, handle.update):
            said(caught(call, ids, weights), "twInvalidArgument", "^weights is of type")
    one.close()


def test_layers_beyond_32_bits(alone) -> None:
    one = alone(expert_map=tw.Placement(layers=2))
    for layer in (2**32, 2**32 + 1, -(2**40), 0.0, "0"):
        said(caught(one.route, layer=layer), "twInvalidArgument", "^layer is .*; it must be an integer of 32 bits")
    one.close()


def test_refused_memory_leaves_no_handle(alone, recwarn) -> None:
    one = alone()
    size = one.group.handle_bytes
    for memory in (memoryview(bytearray(size)), adapt(one.env, np.zeros(9, np.uint8)), [1]):
        said(caught(one.route, memory=memory), "twInvalidArgument", "^memory ")
    assert not one.group._blocks.finished and not recwarn.list
    one.close()


def test_group_not_closed_warns(alone) -> None:
    one = alone()
    with pytest.warns(ResourceWarning, match="was not closed"):
        one.group.__del__()
    one.close()
