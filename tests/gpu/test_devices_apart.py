"""GPUs apart, with calls that return at once: graphs, streams, and peers that do not come. Over NCCL's collectives (the
portable backend) and, where NCCL has a network for its device API (TOKENWAY_TEST_GIN=1; tests/gin makes one), over
that. The suite against them is run_all.py's part nccl, and its part gin.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import harness
import pytest
import torch
from cases import Case, Round, Setup, verify
from device_backend import PROCESSES
from gpu_world import TIMEOUT
from harness import Workers, caught, settle
from player import Player
from test_graphs import PLANS, SEQUENCES, SETUP, Captured, check, run

import tokenway as tw

START = 90.0  # seconds until a process has its device and its communicators


@pytest.fixture(scope="module", params=["nccl", "gin"])
def way(request: pytest.FixtureRequest) -> str:
    """The harness's backend."""
    if request.param == "gin" and os.environ.get("TOKENWAY_TEST_GIN") != "1":
        pytest.skip("NCCL is not said to have a network for devices here (TOKENWAY_TEST_GIN=1)")
    if harness.BACKENDS[request.param].most_ranks("processes") < 2:
        pytest.skip(f"two processes need two GPUs, or to take turns on one ({PROCESSES}=2)")
    return request.param


@pytest.fixture(scope="module")
def pair(way: str) -> Any:
    """Two ranks, each a process with a device of its own, that exchange over NCCL."""
    return harness.Processes(way, 2)


@pytest.mark.parametrize("name", SEQUENCES)
def test_replays(pair, name) -> None:
    """Collectives in a graph move blocks of the bound's size in every replay, whatever the ids are then."""
    check(SEQUENCES[name], pair.run(run, SEQUENCES[name], None))


# Blocks of 1.75 MiB for each rank, and smaller ones: NCCL moves more than 16 KB otherwise than less, and in graphs
# otherwise than in eager calls.
LARGE = replace(SETUP, hidden=7168, max_tokens=128)


@pytest.mark.parametrize("name", ["by expert", "between eager rounds", "two lanes"])
def test_replays_of_large_blocks(pair, name) -> None:
    check(SEQUENCES[name], pair.run(run, SEQUENCES[name], None, None, LARGE), LARGE)


def replay_and_close(env: Any) -> float:
    """Closes a group while a graph that holds its collectives lives on; the seconds that it took."""
    group = tw.Group(env.comm, timeout=TIMEOUT, **LARGE.settings())
    captured = Captured(env, group, LARGE, PLANS["p"])
    captured.replay(0)
    env.stream.synchronize()
    begin = time.monotonic()
    group.close()
    took = time.monotonic() - begin
    captured.graph.reset()
    return took


def test_a_graph_that_outlives_its_group(pair) -> None:
    """NCCL ends a communicator when the last graph with its collectives is gone; closing does not wait for that."""
    assert max(pair.run(replay_and_close)) < 15.0


def rounds(env: Any, drawn: tuple[Round, ...], setup: Setup) -> list[Any]:
    with tw.Group(env.comm, timeout=30, **setup.settings()) as group:
        return Player(env, group, Case(setup, (drawn,))).flights()[0]


@pytest.mark.parametrize("sent", [False, True])
def test_rounds_without_waiting(pair, sent) -> None:
    """Several rounds under way at once, on channels of their own, some sent alone."""
    setup = replace(SETUP, lanes=3, hidden=1024, max_tokens=300)
    base = Round((300, 123), send_dispatch=sent, send_combine=sent)
    drawn = (base, replace(base, layout="expert_major", seed=3), replace(base, tokens=(0, 7), bound=9, seed=5))
    by_rank = pair.run(rounds, drawn, setup)
    for i, round_ in enumerate(drawn):
        verify(setup, round_, [got[i] for got in by_rank])


# ---- peers that do not come ----------------------------------------------------------------------


def open_group(env: Any, timeout: float) -> None:
    settings = {"experts": 4, "top_k": 4, "hidden": 64, "max_tokens": 8, "dtype": "float32", "timeout": timeout}
    group = env.kept["group"] = tw.Group(env.comm, **settings)
    dispatch(env, group)
    env.stream.synchronize()


def dispatch(env: Any, group: tw.Group) -> Any:
    ids = torch.arange(4, dtype=torch.int32, device=env.device)[None]
    handle = group.route(ids)
    received = group.dispatch(handle, torch.ones((1, 64), device=env.device))
    return group.combine(handle, received.tokens)


def await_record(env: Any, nap: float) -> dict[str, Any]:
    """What a rank sees of a peer that does not come: its calls return, the stream goes on, the process lives."""
    group = env.kept["group"]
    time.sleep(nap)
    begin = time.monotonic()
    out = caught(lambda: env.kept.__setitem__("out", dispatch(env, group)))
    returned = time.monotonic() - begin
    env.stream.synchronize()
    ended = time.monotonic() - begin
    until = time.monotonic() + 1.0  # a kernel that was stopped is given a moment to say where it was
    while (record := group.error) is None and time.monotonic() < until:
        time.sleep(0.01)
    later = caught(dispatch, env, group)
    alive = float(torch.ones(8, device=env.device).sum())
    result = env.kept.pop("out", None)
    return {
        "first": out[0],
        "returned": returned,
        "ended": ended,
        "record": record,
        "later": later[0],
        "alive": alive,
        "nan": result is None or bool(torch.isnan(result).all()),
    }


def shrink(env: Any) -> list[int]:
    with env.kept.pop("group").shrink(timeout=30) as survivors:
        out = dispatch(env, survivors)
        env.stream.synchronize()
        assert not torch.isnan(out).any()
        return survivors.comm_ranks


@pytest.fixture
def workers(pair: Any) -> Iterator[Any]:
    made = Workers(2, {"TOKENWAY_SHRINK_MS": "3000"})
    yield made
    made.close()


@pytest.fixture
def key(way: str) -> Any:
    """Of a world of its own."""
    return way, 0, way, f"{way}-{os.getpid()}-{time.monotonic_ns()}"


def test_a_late_rank(workers, key) -> None:
    """Its peers end the collective that waits for it, and say who is late; it learns that they went on."""
    workers.send([0, 1], open_group, 2.0, key=key)
    settle(workers.collect([0, 1], START))
    workers.connections[0].send((key, 0, 2, await_record, (0.0,)))
    workers.connections[1].send((key, 1, 2, await_record, (6.0,)))
    waited, late = settle(workers.collect([0, 1], 60))
    assert waited["first"] == "twSuccess" and waited["returned"] < 1.0
    assert 1.9 < waited["ended"] < 3.5
    record = waited["record"]
    assert (record.result, record.peer, record.phase, record.sticky) == ("twTimeout", 1, "dispatch", True), record
    assert waited["later"] == "twTimeout" and waited["alive"] == 8.0 and waited["nan"]
    assert late["first"] == "twExcluded" and late["alive"] == 8.0


# Seconds that groups wait whose ranks come late to a replay. Where NCCL's network is tests/gin's, of sockets, large
# blocks take their time too: once 8 seconds were not enough.
PATIENCE = {"nccl": 3.0, "gin": 25.0}


def capture_large(env: Any, timeout: float) -> None:
    group = env.kept["group"] = tw.Group(env.comm, timeout=timeout, **LARGE.settings())
    env.kept["captured"] = captured = Captured(env, group, LARGE, PLANS["l"])
    captured.replay(0)
    env.stream.synchronize()


def replay_late(env: Any, nap: float) -> tuple[Any, float, float, str]:
    """(the record, seconds until a replay had ended, until the group was closed, what a later call says). The graph
    lives on; after an error nothing is replayed."""
    time.sleep(nap)
    group, captured = env.kept.pop("group"), env.kept["captured"]
    begin = time.monotonic()
    if group.error is None:
        captured.graph.replay()
        env.stream.synchronize()
    ended = time.monotonic() - begin
    until = time.monotonic() + 1.0
    while (record := group.error) is None and time.monotonic() < until:
        time.sleep(0.01)
    later = caught(group.check)[0]
    begin = time.monotonic()
    group.close()
    return record, ended, time.monotonic() - begin, later


def test_a_late_rank_in_a_replay(workers, key, way) -> None:
    """The collectives of a graph are ended like others, on every channel, though the graph keeps the communicators."""
    timeout = PATIENCE[way]
    workers.send([0, 1], capture_large, timeout, key=key)
    settle(workers.collect([0, 1], START))
    workers.connections[0].send((key, 0, 2, replay_late, (0.0,)))
    workers.connections[1].send((key, 1, 2, replay_late, (timeout + 5.0,)))
    (record, ended, closed, later), (_, _, late_closed, late) = settle(workers.collect([0, 1], 90))
    assert (record.result, record.peer) == ("twTimeout", 1), record
    assert timeout - 0.1 < ended < timeout + 3.0
    assert max(closed, late_closed) < 15.0
    assert (later, late) == ("twTimeout", "twExcluded")


def test_a_rank_that_dies(workers, key) -> None:
    """NCCL's own watchdog does not take the survivor down; it goes on alone."""
    workers.send([0, 1], open_group, 60.0, key=key)
    settle(workers.collect([0, 1], START))
    workers.connections[0].send((key, 0, 2, await_record, (0.0,)))
    time.sleep(1.0)
    workers.signal(1, signal.SIGKILL)
    (seen,) = settle(workers.collect([0], 60))
    assert seen["ended"] < 4.0 and seen["alive"] == 8.0 and seen["nan"]
    assert (seen["record"].result, seen["record"].peer) == ("twPeerDied", 1), seen["record"]
    workers.connections[0].send((key, 0, 2, shrink, ()))
    assert settle(workers.collect([0], 60)) == [[0]]
