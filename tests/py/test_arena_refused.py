"""Behaviour: groups that cannot share a window, and what ends those that do. All ranks hear why, and go on as far as
that goes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from grown import plain, works
from harness import HANGS, PATIENT, Workers, caught, said, settle

import tokenway as tw

LIKE = {"experts": 5, "top_k": 3, "hidden": 24, "max_tokens": 4, "dtype": "float32", "timeout": PATIENT}


def too_large(env: Any) -> list[Any]:
    heard = []
    with plain(env) as group:
        like = LIKE | {"arena": group}
        heard.append(caught(tw.Group, env.comm, **like | {"max_tokens": 100}))
        heard.append(caught(tw.Group, env.comm, **like | {"hidden": 600}))
        counting = tw.Placement(tuple(range(400)), count_loads=True)
        heard.append(caught(tw.Group, env.comm, **like | {"experts": 400, "expert_map": counting}))
        heard.append(caught(tw.Group, env.comm, **like, lanes=3))
        heard.append(caught(tw.Group, env.comm, **like, lanes=0))
        heard.append(caught(tw.Group, env.comm, **like, mode="high_throughput", lease_bytes=4096))
        assert works(env, group, 4)
        with tw.Group(env.comm, **like) as second:
            heard.append(caught(second.reserve, max_tokens=40))
            assert works(env, group, 4)
            group.reserve(max_tokens=40)
            with tw.Group(env.comm, **like | {"max_tokens": 40}) as third:
                assert [works_like(env, g, n) for g, n in ((second, 4), (third, 40), (second, 4))] == [True] * 3
                assert works(env, group, 40)
            assert second.window_bytes().window == 0
    return heard


def works_like(env: Any, group: tw.Group, tokens: int) -> bool:
    """Whether an exchange of a group like the above goes well: every token goes to the ranks of two experts."""
    ids = np.tile(np.array([[0, 4, -1]], np.int32), (tokens, 1))
    x = np.random.default_rng(env.rank).standard_normal((tokens, LIKE["hidden"])).astype(np.float32)
    handle = group.route(env.backend.tensor(ids))
    received = group.dispatch(handle, env.backend.tensor(x))
    times = np.float32(min(2, group.nranks))
    return np.array_equal(env.backend.array(group.combine(handle, received.tokens)), times * x)


def test_what_does_not_fit_is_told_in_bytes(world, made_for) -> None:
    if "loads" in made_for.lacks or "leases" in made_for.lacks:
        pytest.skip("there are no load statistics or leases here")
    missing = r"this group needs \d+ bytes {} on each lane, and the window of arena has \d+( in one piece)?: "
    missing += r"[1-9]\d* bytes are missing"
    for heard in world(min(3, world.most)).run(too_large):
        said(heard[0], "twOutOfMemory", missing.format("for a bank of rows") + r".* in room_for of .*Group.reserve")
        said(heard[1], "twOutOfMemory", missing.format("for a bank of rows"))
        said(heard[2], "twOutOfMemory", missing.format("for load statistics"))
        said(heard[3], "twInvalidArgument", r"lanes is 3; in the window of arena it must be 2, or 0")
        said(heard[4], "twInvalidArgument", r"lanes is 0")
        said(heard[5], "twInvalidArgument", r"lease_bytes is 4096; in the window of arena it must be 0")
        said(heard[6], "twInvalidUsage", r"in the window of another and does not grow; grow that one")


def differ(env: Any) -> list[Any]:
    heard = []
    with plain(env) as first, plain(env) as other:
        one, two = (first, other) if env.rank == 1 else (other, first)
        heard.append(caught(tw.Group, env.comm, **LIKE, arena=one))
        heard.append(caught(tw.Group, env.comm, **LIKE, arena=None if env.rank == 1 else two))
        heard.append(caught(tw.Group, env.comm, **LIKE, arena="first" if env.rank == 1 else first))
        heard.append(caught(tw.Group, env.comm, **LIKE, room_for=[LIKE] if env.rank == 1 else [LIKE | {"top_k": 2}]))
        heard.append(caught(tw.Group, env.comm, **LIKE, room_for=[LIKE | {"top_k": 99}]))
        heard.append(caught(tw.Group, env.comm, **LIKE, room_for=[LIKE | {"arena": first}]))
        with tw.Group(env.comm, **LIKE, arena=first) as second:
            # A group of the same window names the same one.
            with tw.Group(env.comm, **LIKE, arena=second if env.rank == 1 else first) as third:
                assert works_like(env, third, 4) and works_like(env, second, 3)
            heard.append(caught(tw.Group, env.comm, **LIKE, arena=third))
        assert works(env, first, 4) and works(env, other, 4)
    return heard


def test_ranks_that_name_other_windows(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    for rank, heard in enumerate(world(2).run(differ)):
        said(heard[0], "twConfigMismatch", r"arena \(the call of the comm .*\) differs: rank 0 has \d+, rank 1 has \d+")
        said(heard[1], "twConfigMismatch", r"arena \(the call of the comm .*\) differs: rank 0 has \d+, rank 1 has 0")
        said(heard[2], "twInvalidArgument", r"arena is 'first'; it must be a Group" if rank == 1 else r"rank 1: ")
        said(heard[4], "twInvalidArgument", r"room_for\[0\]: top_k is 99; it must be from 1 to 5")
        said(heard[5], "twInvalidArgument", r"room_for\[0\] is .*; it must be a dict of keywords of Group")
        said(heard[6], "twInvalidUsage", r"the group is closed")


def crossed(env: Any) -> list[Any]:
    """Rank 1 calls the second group where the others call the first; both have one shape."""
    heard = []
    with plain(env, lanes=1) as first:
        like = {"experts": 7, "top_k": 3, "hidden": 24, "max_tokens": 4, "dtype": "float32", "timeout": PATIENT}
        with tw.Group(env.comm, **like, arena=first) as second:
            mine = second if env.rank == 1 else first
            ids = env.backend.tensor(np.zeros((4, 3), np.int32) + np.arange(3, dtype=np.int32))
            x = env.backend.tensor(np.ones((4, 24), np.float32))
            handle = mine.route(ids)
            heard.append(caught(mine.dispatch, handle, x))
            heard.append(caught(mine.all_gatherv, x, bound=4) if env.nranks > 1 else None)
            assert works(env, first, 4) and works(env, second, 4)
    return heard


def test_calls_of_different_groups_do_not_meet(world, made_for) -> None:
    if world.most < 2 or not made_for.knows_calls:
        pytest.skip("needs two ranks, whose blocks are alike")
    for heard in world(2).run(crossed):
        said(heard[0], "twBoundMismatch", r"differ in the group,")
        said(heard[1], "twBoundMismatch", r"")


def one_thread(env: Any) -> list[Any]:
    """Rank 0 waits in a call of the first group; a call of the second is refused meanwhile, on its own."""
    with plain(env) as first, tw.Group(env.comm, **LIKE, arena=first) as second:
        if env.rank == 0:
            begun = threading.Event()

            def late() -> None:
                begun.wait()
                time.sleep(0.2)
                heard.append(caught(second.route, env.backend.tensor(np.zeros((0, 3), np.int32))))

            heard: list[Any] = []
            thread = threading.Thread(target=late)
            thread.start()
            begun.set()
            good = works(env, first, 4)
            thread.join()
        else:
            time.sleep(1)
            heard, good = [], works(env, first, 4)
        return [*heard, good and works_like(env, second, 4)]


def test_one_thread_for_all(world, backend) -> None:
    if backend != "cpu":
        pytest.skip("calls wait on the CPU alone")
    heard, good = world(2).run(one_thread)[0]
    assert good
    if heard is not None:
        said(heard, "twInvalidUsage", r"with all groups of its window")


# ---- what is under way when a group ends ---------------------------------------------------------


def closed_in_flight(env: Any, what: str) -> bool:
    """The second group is closed while it has a send_only call on a lane, which the first then uses."""
    exact: dict[str, Any] = {"mode": "high_throughput"} if what in ("counts", "part") else {}
    if what == "part":
        exact["inbox_tokens"] = 1
    with plain(env, lanes=1, room_for=[LIKE | exact]) as first:
        second = tw.Group(env.comm, **LIKE, **exact, arena=first)
        ids = env.backend.tensor(np.tile(np.array([[0, 4, -1]], np.int32), (3, 1)))
        x = env.backend.tensor(np.ones((3, 24), np.float32))
        assert works(env, first, 4)
        handle = second.route(ids)
        kept: list[Any] = []
        if what == "gather":
            kept.append(second.all_gatherv(x, bound=4, send_only=True))
        elif what == "counts":
            kept.append(second.exchange_counts(handle, send_only=True))
        elif what == "part":
            second.exchange_counts(handle)
            rows = second.dispatch(handle, x).tokens
            kept.append(second.combine(handle, env.backend.tensor(env.backend.array(rows)), send_only=True))
        elif what == "dispatch":
            kept.append(second.dispatch(handle, x, send_only=True))
        elif what == "combine":
            kept.append(second.combine(handle, second.dispatch(handle, x).tokens, send_only=True))
        else:  # dispatched, and not combined
            kept.append(second.dispatch(handle, x))
        second.close()
        return all(works(env, first, tokens) for tokens in (4, 1, 3))


@pytest.mark.parametrize("what", ["gather", "counts", "dispatch", "combine", "part", "held"])
def test_a_call_under_way_ends_with_its_group(world, made_for, what) -> None:
    if what == "gather" and "collectives" in made_for.lacks:
        pytest.skip("there are no gathers here")
    assert all(world(min(3, world.most)).run(closed_in_flight, what))


# ---- errors --------------------------------------------------------------------------------------


def given_up(env: Any) -> list[Any]:
    """The rank that gives up has no part in what follows."""
    first = plain(env)
    second = tw.Group(env.comm, **LIKE, arena=first)
    assert works(env, first, 4)
    third = tw.Group(env.comm, **LIKE, arena=first)  # a meeting: the steps before it have ended everywhere
    if env.rank == 1:
        second.abort()
    heard = [caught(works_like, env, third, 4), caught(works, env, first, 4), caught(works_like, env, second, 4)]
    records = [group.error for group in (first, second, third)]
    assert records[0] == records[1] == records[2] and records[0] is not None and records[0].sticky
    heard.append(caught(tw.Group, env.comm, **LIKE, arena=first))
    first.close()
    if env.rank == 1:
        assert caught(second.shrink)[0] == "twExcluded"
        second.close()
        third.close()
        return heard
    new = second.shrink()
    heard.append(caught(third.shrink))
    other = tw.Group(env.comm, **LIKE | {"max_tokens": 3}, arena=new)
    assert works_like(env, new, 4) and works_like(env, other, 3) and new.nranks == other.nranks == 2
    for group in (new, second, other, third):
        group.close()
    return heard


@pytest.fixture
def three(backend, made_for) -> Iterator[Callable[..., list[Any]]]:
    """three(function): runs it on three ranks of their own, whose comm ends with the test."""
    if made_for.most_ranks("processes") < 3:
        pytest.skip("there are not three devices")
    workers = Workers(3)
    key = "arena", 0, backend, f"arena-{os.getpid()}-{time.monotonic_ns()}"

    def run(function: Callable[..., Any], ranks: Sequence[int] = range(3)) -> list[Any]:
        workers.send(range(3), function, key=key)
        return settle(workers.collect(list(ranks), HANGS))

    yield run
    workers.close()


@pytest.mark.processes
def test_who_gives_one_up_gives_up_all(three) -> None:
    for rank, heard in enumerate(three(given_up)):
        for each in heard[:4]:
            said(each, "twPeerAborted", r"rank 1 gave the group up")
        if rank != 1:
            said(heard[4], "twInvalidUsage", r"another group of this window was shrunk; .* with arena")


def refused(env: Any) -> list[Any]:
    """Rank 1 is refused a call of the second group; the first's lane and record are as before."""
    heard = []
    with plain(env, lanes=1) as first, tw.Group(env.comm, **LIKE, arena=first) as second:
        ids = env.backend.tensor(np.tile(np.array([[0, 4, -1]], np.int32), (3, 1)))
        x = env.backend.tensor(np.ones((3, 24 + (env.rank == 1)), np.float32))
        for _ in range(3):
            heard.append(caught(second.dispatch, second.route(ids), x))
            assert works(env, first, 4)
            assert works_like(env, second, 4)
        heard.append(first.error)
    return heard


def test_a_refusal_is_of_one_group(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    for rank, heard in enumerate(world(2).run(refused)):
        for each in heard[:3]:
            said(each, "twInvalidArgument" if rank == 1 else "twPeerRefused", r"")
        assert heard[3] is None


def begin(env: Any) -> None:
    first = plain(env)
    env.kept["groups"] = first, tw.Group(env.comm, **LIKE, arena=first)
    assert works(env, first, 4)


def use_or_die(env: Any) -> list[Any]:
    first, second = env.kept["groups"]
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = [caught(works_like, env, second, 4), caught(works, env, first, 4)]
    new = second.shrink()
    with new, tw.Group(env.comm, **LIKE, arena=new) as other:
        heard.append(works_like(env, new, 4) and works_like(env, other, 4))
        first.close()
        second.close()
    return heard


@pytest.mark.processes
def test_a_death_finishes_all(three) -> None:
    three(begin)
    began = time.monotonic()
    for second, first, good in three(use_or_die, [0, 2]):
        said(second, "twPeerDied", r"rank 1 is gone")
        said(first, "twPeerDied", r"rank 1 is gone")
        assert good
    assert time.monotonic() - began < PATIENT / 2
