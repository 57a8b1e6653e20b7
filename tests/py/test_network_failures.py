"""A network between hosts of devices that fails, and names nobody, or a rank: who is blamed, when, and who goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import AT_ONCE, PATIENT, Env, await_flags, caught, raise_flag
from test_survival import World, exchange, exchange_after, make_group
from test_usage import hear

import tokenway as tw
from tokenway import _native

RANKS = 4
SHORT = 4.0  # seconds of a timeout that passes


@pytest.fixture(autouse=True)
def emulated(backend: str) -> Iterator[None]:
    if backend != "emulated-gin":
        pytest.skip(f"for a network that fails when a test wants, not the backend {backend}")
    yield
    for rank in range(RANKS):
        _native.lib.tokenway_emulated_break(rank, 0)


@pytest.fixture
def apart(backend: str, processes: Any) -> Iterator[Callable[..., World]]:
    """apart(timeout): a world of processes, of which each fails, and mends, on its own."""
    made: list[World] = []

    def make(timeout: float) -> World:
        processes(RANKS)
        made.append(World(backend, RANKS, timeout))
        return made[-1]

    yield make
    for world in made:
        world.workers.close()


def fail(env: Env, ranks: list[int]) -> None:
    if env.rank in ranks:
        _native.lib.tokenway_emulated_break(env.rank, 1)


def go_on(env: Env) -> tuple[str, list[int]]:
    """How a shrink ends, and who is in the new group, which exchanges."""
    _native.lib.tokenway_emulated_break(env.rank, 0)
    left: list[int] = []

    def shrink() -> None:
        with env.kept["group"].shrink(experts=RANKS - 1, top_k=RANKS - 1, timeout=PATIENT) as group:
            exchange(env, group)
            left.extend(group.comm_ranks)

    return caught(shrink)[0], left


# ---- this rank's own ------------------------------------------------------------------------------


def suffer(env: Env, failing: int, busy: int, flags: str) -> Any:
    """The error of an exchange to which `busy` comes only when all others have theirs."""
    make_group(env, PATIENT)
    exchange(env, env.kept["group"])
    fail(env, [failing])
    if env.rank == busy:
        await_flags(flags, *(rank for rank in range(env.nranks) if rank != busy))
    begin = time.monotonic()
    said = caught(exchange, env, env.kept["group"])
    raise_flag(flags, env.rank)
    return *said, time.monotonic() - begin


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize(("failing", "busy"), [(1, 0), (2, 3)], ids=["of a host of two", "beside a rank that computes"])
def test_a_network_that_fails_alone(world: Any, tmp_path: Any, failing: int, busy: int) -> None:
    """That rank is the one that is excluded, also where another has not come to the step: it answers all the same."""
    ranks = world(RANKS)
    ranks.forget()
    for rank, (result, text, record, took) in enumerate(ranks.run(suffer, failing, busy, str(tmp_path))):
        assert result == ("twExcluded" if rank == failing else "twPeerAborted"), (rank, text)
        assert record.peer == record.reporter == failing, (rank, text)
        assert ("Its network has failed: a test has broken it" in text) == (rank == failing), (rank, text)
        assert took < AT_ONCE, (rank, took)
    others = [rank for rank in range(RANKS) if rank != failing]
    for rank, told in enumerate(ranks.run(go_on)):
        assert told == (("twExcluded", []) if rank == failing else ("twSuccess", others)), (rank, told)
    ranks.forget()


# ---- no network, but a rank -------------------------------------------------------------------------


def wait_on_lanes(env: Env, late: int, waits: int, flags: str) -> Any:
    """The error of a dispatch on lane 1, which one rank never comes to, and another not before that one's of lane 0."""
    others = [rank for rank in range(env.nranks) if rank != late]
    with tw.Group(env.comm, experts=RANKS, top_k=1, hidden=8, max_tokens=1, lanes=2, timeout=SHORT) as group:
        handles = [group.route(env.backend.tensor(np.array([[0]], np.int32))) for _ in range(2)]
        tokens = env.backend.tensor(np.ones((1, 8), tw.tensors.numpy_dtype("bfloat16")))
        if env.rank == late:
            await_flags(flags, *others)
            hear(env, group)
        if env.rank in (late, waits):
            time.sleep(SHORT / 4)  # so that its own time is up behind that of the others
            said = caught(group.dispatch, handles[0], tokens)
        else:
            pending = [group.dispatch(handle, tokens, send_only=True) for handle in handles]
            said = caught(pending[1].result)
        raise_flag(flags, env.rank)
        return said


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize(("late", "waits"), [(3, 0), (2, 1)])
def test_a_rank_that_waits_on_another_lane(world: Any, tmp_path: Any, late: int, waits: int) -> None:
    """Its signal is missing too; but it has sent more than the one that it waits for."""
    ranks = world(RANKS)
    ranks.forget()
    for rank, (result, text, record) in enumerate(ranks.run(wait_on_lanes, late, waits, str(tmp_path))):
        assert result == ("twExcluded" if rank == late else "twTimeout"), (rank, text)
        assert record.peer == late, (rank, text)
    ranks.forget()


# ---- those of all survivors -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["silent", "ended"])
def test_a_network_that_fails_with_a_rank(apart: Any, number: int) -> None:
    """Who does not answer is blamed by all, long before their timeout; a connection that ends tells it too."""
    world, victim = apart(PATIENT), 2
    others = [rank for rank in range(RANKS) if rank != victim]
    struck = time.monotonic()
    world.workers.signal(victim, number)
    world.start(fail, others)
    world.collect(others)
    world.start(exchange_after, {})
    for result, text, record, at in world.collect(others):
        assert result == "twPeerDied" and record.peer == victim, (result, text)
        assert record.reporter in others and at - struck < AT_ONCE, (text, at - struck)
    world.start(go_on)
    assert world.collect(others) == [("twSuccess", others)] * len(others)
    if number == signal.SIGSTOP:
        world.workers.signal(victim, signal.SIGCONT)
        _, (result, text, *_), gone_on = (world.collect([victim])[0] for _ in range(3))
        assert result == "twExcluded" and gone_on == ("twExcluded", []), (text, gone_on)


def test_networks_that_fail_while_all_answer(apart: Any) -> None:
    """A link between two of them, say: the step's timeout tells who is missing, which is one of the two."""
    world, failing = apart(SHORT), [0, 2]
    world.run(fail, failing)
    begin = time.monotonic()
    for rank, (result, text, record, at) in enumerate(world.run(exchange_after, {})):
        assert result in ("twTimeout", "twExcluded") and record.peer in failing, (rank, text)
        assert SHORT <= at - begin < SHORT + AT_ONCE, (rank, at - begin)


def test_a_network_that_fails_where_nobody_exchanges(apart: Any) -> None:
    """The others hear of it in their next call."""
    world, failing = apart(PATIENT), 3
    world.run(fail, [failing])
    time.sleep(SHORT)
    begin = time.monotonic()
    for rank, (result, text, record, at) in enumerate(world.run(exchange_after, {})):
        assert result == ("twExcluded" if rank == failing else "twPeerAborted"), (rank, text)
        assert record.peer == failing and at - begin < AT_ONCE, (rank, text)
