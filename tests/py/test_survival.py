"""Deaths in company: beside a slow rank, two at once, with a forked child left behind, and late survivors."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import AT_ONCE, HANGS, PATIENT, Env, Workers, await_flags, caught, raise_flag, settle
from refusals import adapt

import tokenway as tw

pytestmark = pytest.mark.processes


class World:
    """Workers with a group that is made to break."""

    def __init__(self, backend: str, nranks: int, timeout: float = PATIENT, patience: float = 2.0):
        self.workers = Workers(nranks, {"TOKENWAY_SHRINK_MS": str(int(patience * 1000))})
        self.key = ("survival", 0, backend, f"survival-{os.getpid()}-{time.monotonic_ns()}")
        self.nranks = nranks
        self.start(make_group, timeout)
        self.collect(list(range(nranks)))

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self.workers.send(range(self.nranks), function, *args, key=self.key)

    def collect(self, ranks: list[int], timeout: float = HANGS) -> list[Any]:
        return settle(self.workers.collect(ranks, timeout))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(function, *args)
        return self.collect(list(range(self.nranks)))

    def kill(self, *ranks: int) -> float:
        for rank in ranks:
            self.workers.signal(rank, signal.SIGKILL)
        return time.monotonic()


@pytest.fixture
def broken(backend, processes) -> Iterator[Callable[..., World]]:
    """broken(n): a world of n ranks; it ends with the test."""
    made: list[World] = []

    def make(nranks: int, **keywords: Any) -> World:
        processes(nranks)  # where there can be so many
        made.append(World(backend, nranks, **keywords))
        return made[-1]

    yield make
    for world in made:
        world.workers.close()


NEVER = "/nobody/raises/this"


# ---- on the ranks --------------------------------------------------------------------------------


def make_group(env: Env, timeout: float) -> None:
    n = env.nranks
    env.kept["group"] = tw.Group(env.comm, experts=n, top_k=n, hidden=1, max_tokens=1, dtype="float32", timeout=timeout)


def exchange(env: Env, group: tw.Group) -> None:
    """A round in which every rank sends to all."""
    handle = group.route(adapt(env, np.arange(group.experts, dtype=np.int32)[None]))
    received = group.dispatch(handle, adapt(env, np.ones((1, 1), np.float32)))
    group.combine(handle, received.tokens)


def exchange_after(env: Env, flags: dict[int, str]) -> Any:
    """The error of an exchange, for which a rank may await a flag, and when it came."""
    if env.rank in flags:
        await_flags(*os.path.split(flags[env.rank]))
    result, text, record = caught(exchange, env, env.kept["group"])
    return result, text, record, time.monotonic()


def fork_child(env: Env, rank: int) -> int:
    """A child that sleeps, with everything that it inherited; its process number."""
    if env.rank != rank:
        return 0
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def leave(env: Env, rank: int, comms: list[str]) -> Any:
    """`rank` leaves a comm without a group; the others try to make one on it."""
    comm = env.backend.comm(env.rank, env.nranks, comms[0])
    child = fork_child(env, rank)
    exchange_of_two(env, comm)
    if env.rank == rank:
        time.sleep(0.5)
        begin = time.monotonic()
        comm.close()
        return "closed", child, begin
    result, text, _ = caught(tw.Group, comm, experts=1, top_k=1, hidden=1, max_tokens=1)
    at = time.monotonic()
    comm.close()
    return result, text, at


def exchange_of_two(env: Env, comm: tw.Comm) -> None:
    with tw.Group(comm, experts=2, top_k=2, hidden=1, max_tokens=1, dtype="float32") as group:
        exchange(env, group)


def shrink_after(env: Env, naps: dict[int, float]) -> Any:
    """What a late shrink ends with, who is left, and how long the call took."""
    time.sleep(naps.get(env.rank, 0))
    begin, left = time.monotonic(), []

    def shrink() -> None:
        with env.kept["group"].shrink(experts=6, top_k=2, timeout=PATIENT) as group:
            left.extend(group.comm_ranks)

    result, text, _ = caught(shrink)
    return result, left, time.monotonic() - begin, text


def shrink_while(env: Env, how: str) -> Any:
    """The last rank leaves the group while the others shrink it: when it did; or when they had the new group, of whom,
    and how long another one takes them."""
    group = env.kept.pop("group", None)
    if group is None:  # left before
        return None
    if group.rank == group.nranks - 1:
        time.sleep(0.1)
        left = time.monotonic()
        getattr(group, how)()
        return left, time.monotonic()
    with group, group.shrink(experts=12, top_k=2) as survivors:
        at = time.monotonic()
        env.kept["group"] = survivors.shrink()
        return at, survivors.comm_ranks, time.monotonic() - at


def differ(env: Env) -> Any:
    """Rank 0 closes the group that the others have, and these create another one; then all create one."""
    group = env.kept["group"]
    began = time.monotonic()
    told = caught(group.close if env.rank == 0 else lambda: make_group(env, PATIENT))[:2]
    took = time.monotonic() - began
    make_group(env, PATIENT)
    exchange(env, env.kept["group"])
    group.close()  # no call where it is closed; the others do not wait for who has closed it
    return told, took, group.closed


def abort_beside_a_meeting(env: Env) -> Any:
    """Rank 0 gives a group up while a thread of its own creates another, which rank 1 comes to only when it has heard:
    when it was, or was heard."""
    group, others = env.kept["group"], []

    def create() -> None:
        with env.context():
            others.append(tw.Group(env.comm, experts=2, top_k=1, hidden=1, max_tokens=1))

    if env.rank == 0:
        creates = threading.Thread(target=create)
        creates.start()
        time.sleep(0.2)
        at = time.monotonic()
        group.abort()
        creates.join()
        told = "twSuccess"
    else:
        told = caught(exchange, env, group)[0]
        at = time.monotonic()
        create()
    group.close()
    others[0].close()
    return told, at


# ---- the cases -----------------------------------------------------------------------------------


def test_a_death_behind_a_slow_rank(broken, tmp_path) -> None:
    """Rank 0 waits for rank 1, which computes for long, and rank 2 dies: that is seen while rank 1 still computes."""
    world = broken(3)
    world.start(exchange_after, {1: str(tmp_path / "computed"), 2: NEVER})
    time.sleep(0.5)
    struck = world.kill(2)
    ((result, text, record, at),) = world.collect([0])
    raise_flag(tmp_path, "computed")
    (late,) = settle(world.workers.collect([1], HANGS))
    assert result == late[0] == "twPeerDied", (result, text, late)
    assert record.peer == late[2].peer == 2
    assert at - struck < AT_ONCE


def test_two_deaths_at_once(broken) -> None:
    world = broken(4)
    world.start(exchange_after, {2: NEVER, 3: NEVER})
    time.sleep(0.5)
    struck = world.kill(2, 3)
    for result, text, record, at in world.collect([0, 1]):
        assert result == "twPeerDied" and record.peer in (2, 3), (result, text)
        assert at - struck < AT_ONCE
    world.start(shrink_after, {})
    for result, left, _, text in world.collect([0, 1]):
        assert (result, left) == ("twSuccess", [0, 1]), text


def test_one_leaves_while_others_shrink(broken) -> None:
    """Who has left is not waited for, also where the news comes when the others wait already."""
    patience = 40.0
    world = broken(4, timeout=patience, patience=patience)
    for number, how in ((4, "abort"), (3, "close")):
        told = world.run(shrink_while, how)[:number]
        left, gone = told.pop()
        assert gone - left < patience / 2, "the leaver itself waits for nobody"
        for at, members, made in told:
            assert members == list(range(number - 1))
            assert at - left < patience / 2, (how, at - left, made)


def test_ranks_that_close_and_create(broken) -> None:
    """All hear it at once, by what each does, and go on together."""
    for rank, (told, took, closed) in enumerate(broken(3).run(differ)):
        assert told[0] == "twCallMismatch" and "rank 0 destroys a group while rank " in told[1], (rank, told)
        assert took < AT_ONCE and closed


def test_a_rank_gives_up_while_it_creates_another_group(broken) -> None:
    """What it tells passes by the meeting that waits."""
    world = broken(2)
    (_, left), (told, heard) = world.run(abort_beside_a_meeting)
    assert told == "twPeerAborted" and heard - left < AT_ONCE, heard - left


def test_a_killed_rank_with_a_forked_child(broken) -> None:
    world = broken(2)
    child = world.run(fork_child, 1)[1]
    try:
        world.start(exchange_after, {1: NEVER})
        time.sleep(0.5)
        struck = world.kill(1)
        ((result, text, record, at),) = world.collect([0])
        assert result == "twPeerDied" and record.peer == 1, text
        assert at - struck < AT_ONCE
    finally:
        end(child)


def test_a_closed_comm_with_a_forked_child(broken) -> None:
    """The child still has the sockets; peers see that the rank left all the same."""
    world = broken(2)
    (result, text, seen), (_, child, closed) = world.run(leave, 1, [f"leave-{os.getpid()}-{time.monotonic_ns()}"])
    end(child)
    assert result == "twPeerDied" and "rank 1" in text, (result, text)
    assert seen - closed < AT_ONCE


def end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("naps", [{0: 0.0, 1: 0.6, 2: 1.2}, {0: 0.0, 1: 1.0, 2: 2.1}], ids=["in time", "too late"])
def test_late_survivors_of_a_shrink(broken, naps) -> None:
    """Whoever is given up or not: the ranks with a new group are the ranks of that group."""
    patience = 40.0 if naps[2] < 2 else 2.0  # of those who shall wait for all, and of those who may not
    world = broken(4, timeout=patience, patience=patience)
    world.kill(3)
    world.start(exchange_after, {})
    for outcome in world.collect([0, 1, 2]):
        assert outcome[0] == "twPeerDied" or patience < PATIENT / 2, outcome
    world.start(shrink_after, naps)
    told = world.collect([0, 1, 2])
    done = [rank for rank, outcome in enumerate(told) if outcome[0] == "twSuccess"]
    assert done and all(told[rank][1] == done for rank in done), told
    assert {told[rank][0] for rank in range(3) if rank not in done} <= {"twExcluded"}, told
    assert max(outcome[2] for outcome in told) < patience + AT_ONCE, told
    if naps[2] < 2:
        assert done == [0, 1, 2], told
