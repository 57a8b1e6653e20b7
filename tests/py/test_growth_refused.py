"""Behaviour: growth that is refused. All ranks hear why, and go on in the group as it was."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

import numpy as np
import pytest
from emulated_graphs import Graph, emulated_alone
from grown import EXACT, OWN, plain, works
from harness import HANGS, PATIENT, Workers, caught, said, settle


def differ(env: Any) -> list[Any]:
    with plain(env) as group:
        heard = [
            caught(group.reserve, max_tokens=8 + (env.rank == 1)),
            caught(group.reserve, row_bytes=1000 + (env.rank == 2)),
            caught(group.reserve, max_tokens=-1 if env.rank == 1 else 8),
            caught(group.reserve, row_bytes="many" if env.rank == 1 else 8),
            caught(group.reserve, max_tokens=2**31 - 1),
        ]
        assert group.max_tokens == 4 and works(env, group, 4)
        group.reserve(max_tokens=2, row_bytes=1)  # there is more
        assert group.max_tokens == 4 and works(env, group, 4)
        group.reserve(max_tokens=8)
        assert works(env, group, 8)
    return heard


def test_sizes_that_differ_are_told_and_change_nothing(world) -> None:
    if world.most < 3:
        pytest.skip("needs three ranks")
    for rank, heard in enumerate(world(3).run(differ)):
        said(heard[0], "twConfigMismatch", r"max_tokens differs: rank 0 has 8, rank 1 has 9")
        said(heard[1], "twConfigMismatch", r"dispatch_room differs: rank 0 has 1000, rank 2 has 1001")
        said(
            heard[2], "twInvalidArgument", r"max_tokens is -1; it must be" if rank == 1 else r"rank 1: max_tokens is -1"
        )
        said(heard[3], "twInvalidArgument", r"row_bytes is 'many'" if rank == 1 else r"rank 1: ")
        said(heard[4], "twInvalidArgument", r"max_tokens is 2147483647")


def in_a_capture(env: Any) -> Any:
    """Rank 0 asks while it captures; then the capture ends, and both ask again."""
    graph = Graph(env)
    with plain(env) as group:
        if env.rank == 0:
            with graph.capture():
                heard = caught(group.reserve, max_tokens=9)
        else:
            heard = caught(group.reserve, max_tokens=9)
        assert group.max_tokens == 4 and works(env, group, 4)
        group.reserve(max_tokens=9)
        assert works(env, group, 9)
    return heard


@emulated_alone
def test_no_growth_inside_a_capture(world) -> None:
    for rank, heard in enumerate(world(2).run(in_a_capture)):
        whose = "" if rank == 0 else "rank 0: "
        said(heard, "twInvalidUsage", whose + r"a CUDA graph is captured; Group\.reserve allocates and waits for")


def beyond(env: Any) -> list[Any]:
    """A handle of before has no room for what only the group has."""
    backend, heard = env.backend, []
    with plain(env) as group:
        ids = backend.tensor(np.zeros((4, 3), np.int32) + np.arange(3, dtype=np.int32))
        more = backend.tensor(np.zeros((9, 3), np.int32) + np.arange(3, dtype=np.int32))
        x = backend.tensor(np.ones((9, OWN.hidden), np.float32))
        handle, late = group.route(ids), group.route(ids)
        group.reserve(max_tokens=9)
        heard.append(caught(group.dispatch, handle, x[:4], bound=9))
        late.update(more)
        heard.append(caught(group.dispatch, late, x))
        late.update(ids)
        assert works(env, group, 9)
    return heard


def test_a_handle_has_the_size_of_its_group_then(world) -> None:
    ranks = min(3, world.most)
    for heard in world(ranks).run(beyond):
        said(heard[0], "twInvalidArgument", r"bound is 9; the handle was made when max_tokens was 4")
        said(heard[1], "twInvalidArgument", r"ids has 9 tokens; it must have from 0 to what max_tokens was when")


def pending(env: Any) -> list[Any]:
    heard = []
    with plain(env) as group:
        ids = env.backend.tensor(np.zeros((4, 3), np.int32) + np.arange(3, dtype=np.int32))
        x = env.backend.tensor(np.ones((4, OWN.hidden), np.float32))
        handle = group.route(ids)
        sent = group.dispatch(handle, x, send_only=True)
        heard.append(caught(group.reserve, max_tokens=9))
        received = sent.result()
        group.reserve(max_tokens=9)
        group.combine(handle, received.tokens)
        assert works(env, group, 9)
    return heard


def test_a_pending_call_is_completed_first(world) -> None:
    for (heard,) in world(min(3, world.most)).run(pending):
        said(heard, "twInvalidUsage", r"a handle has a send_only call pending on lane 0; call Pending.result before")


def elsewhere(env: Any) -> list[Any]:
    """Rank 1 makes another group meanwhile: all hear of it, and both calls meet afterwards."""
    heard = []
    with plain(env) as group:
        if env.rank == 1:
            heard.append(caught(plain, env))
        else:
            heard.append(caught(group.reserve, max_tokens=9))
        assert group.max_tokens == 4 and works(env, group, 4)
        group.reserve(max_tokens=9)
        assert works(env, group, 9)
    return heard


def test_another_call_is_told_at_once(world) -> None:
    if world.most < 3:
        pytest.skip("needs three ranks")
    for (heard,) in world(3).run(elsewhere):
        said(heard, "twCallMismatch", r"rank 1 creates .*grow|grow.*rank 1 creates")


def begin(env: Any) -> None:
    env.kept["group"] = plain(env)


def grow_or_die(env: Any) -> tuple[Any, int, Any]:
    group = env.kept["group"]
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = caught(group.reserve, max_tokens=9)
    return heard, group.max_tokens, caught(works, env, group, 4)


@pytest.mark.processes
def test_a_rank_that_dies_is_told_to_the_others(backend, made_for) -> None:
    if made_for.most_ranks("processes") < 3:
        pytest.skip("there are not three devices")
    workers = Workers(3)
    key = "growth", 0, backend, f"growth-{time.time_ns()}"
    try:
        workers.send(range(3), begin, key=key)
        settle(workers.collect(range(3), HANGS))
        began = time.monotonic()
        workers.send(range(3), grow_or_die, key=key)
        for heard, tokens, after in settle(workers.collect([0, 2], HANGS)):
            said(heard, "twPeerDied", r"rank 1 is gone")
            said(after, "twPeerDied", r"rank 1 is gone")
            assert tokens == 4
        assert time.monotonic() - began < PATIENT / 2
    finally:
        workers.close()


def few_descriptors(env: Any) -> list[Any]:
    """Rank 1 cannot map what its peers add: nobody grows, and later all do."""
    heard = []
    with plain(env) as group:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if env.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
        heard.append(caught(group.reserve, max_tokens=9))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert group.max_tokens == 4 and works(env, group, 4)
        group.reserve(max_tokens=9)
        assert works(env, group, 9)
    return heard


def test_what_fails_on_one_rank_fails_on_all(processes, backend) -> None:
    if backend != "cpu":
        pytest.skip("windows are files on the CPU alone")
    for rank, (heard,) in enumerate(processes(3).run(few_descriptors)):
        said(heard, "twSystemError", "" if rank == 1 else "rank 1: ")


def new_counts(env: Any, overflow: str) -> list[Any]:
    """Of a handle of before: within what came then, unless rows may be dropped, which have places too."""
    heard = []
    x = env.backend.tensor(np.ones((4, OWN.hidden), np.float32))
    ids = env.backend.tensor(np.zeros((4, 3), np.int32) + np.arange(3, dtype=np.int32))
    with plain(env, **EXACT, overflow=overflow) as group:
        before = group.route(ids)
        group.reserve(max_tokens=9)
        heard.append(caught(group.exchange_counts, before))
        fresh = group.exchange_counts(group.route(ids))
        for handle in (before, fresh) if overflow == "refuse" else (fresh,):
            received = group.dispatch(handle, x)
            sums = env.backend.array(group.combine(handle, received.tokens))
            assert np.array_equal(sums, np.full_like(sums, sums[0, 0])) and sums[0, 0] >= 1
        heard.append(caught(group.exchange_counts, group.route(ids), max_recv_tokens=9 * group.nranks))
        late = group.route(ids) if env.rank > 0 else before
        late.update(ids)
        heard.append(caught(group.exchange_counts, late) if overflow == "refuse" else None)
    return heard


@pytest.mark.parametrize("overflow", ["refuse", "drop"])
def test_new_counts_of_a_handle_of_before(world, overflow) -> None:
    ranks = min(3, world.most)
    for first, second, mixed in world(ranks).run(new_counts, overflow):
        if overflow == "drop":
            said(first, "twInvalidUsage", r"the handle was made when max_tokens was 4, .* make a new one by route")
        elif ranks > 1:
            assert first[0] == "twSuccess", first
            said(mixed, "twBoundMismatch", r"")
        assert second[0] == "twSuccess", second


def refused_before(env: Any) -> list[Any]:
    """A step that rank 1 has refused is still to be waited out when the group grows."""
    heard = []
    with plain(env) as group:
        ids = env.backend.tensor(np.zeros((4, 3), np.int32) + np.arange(3, dtype=np.int32))
        x = env.backend.tensor(np.ones((4, OWN.hidden), np.float32))
        handle = group.route(ids)
        heard.append(caught(group.dispatch, handle, x[:2] if env.rank == 1 else x))
        if handle.leased:
            handle.release()
        group.reserve(max_tokens=9)
        assert works(env, group, 9)
    return heard


def test_a_refused_step_does_not_hinder(world) -> None:
    ranks = min(3, world.most)
    for rank, (heard,) in enumerate(world(ranks).run(refused_before)):
        if rank == 1:
            said(heard, "twInvalidArgument", r"tokens")


def survivors_grow(env: Any) -> int:
    with plain(env) as group:
        group.reserve(max_tokens=9)
        with group.shrink() as smaller:
            assert smaller.max_tokens == 9
            smaller.reserve(max_tokens=20)
            assert works(env, smaller, 20)
            return smaller.max_tokens


def test_a_shrunk_group_has_the_size_and_grows(world) -> None:
    assert set(world(min(3, world.most)).run(survivors_grow)) == {20}
