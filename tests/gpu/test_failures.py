"""Ranks that are late, die or give up: records in time, memory-safe outputs, survivors that go on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import mishaps
import numpy as np
import pytest
import test_refused_late
import torch
from cases import Case, Round, Setup
from gpu_world import Locals
from harness import Workers, caught, settle
from player import Player

import tokenway as tw

LIMIT = 1.5  # seconds that a group waits
SETUP = Setup(ranks=2, experts=6, top_k=6, hidden=32, max_tokens=20)  # every token goes to every rank
ROUND = Round((20, 20))


def wait_until(true: Callable[[], Any], seconds: float) -> float:
    """Polls without touching the device; seconds until it was true, infinity if never."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if true():
            return time.monotonic() - begin
        time.sleep(0.001)
    return float("inf")


class Calls:
    """A group, and one round's calls on it."""

    def __init__(self, env: Any, setup: Setup, timeout: float = LIMIT):
        self.env, self.setup = env, setup
        self.group = env.kept["group"] = tw.Group(env.comm, timeout=timeout, **setup.settings())
        self.player = Player(env, self.group, Case(setup, ()))
        self.round = Round((setup.max_tokens,) * setup.ranks)

    def dispatch(self) -> tuple[tw.Handle, tw.Received]:
        handle = self.player.handle(self.round)
        return handle, self.player.dispatch(self.round, handle, self.player.payloads(self.round), False)

    def combine(self, handle: tw.Handle, received: tw.Received) -> Any:
        return self.group.combine(handle, received.tokens, dtype="float32")

    def settle(self) -> None:
        self.env.stream.synchronize()


# ---- timeouts ------------------------------------------------------------------------------------


def waits(env: Any, setup: Setup, phase: str, late: int, nap: float) -> dict[str, Any]:
    """All but one rank call; what they see. The late rank's own call comes after they have given it up."""
    calls = Calls(env, setup)
    handle, received = calls.dispatch() if phase == "combine" else (None, None)
    calls.settle()
    if env.rank == late:
        time.sleep(nap)
        outcome = caught(late_call, calls, phase, handle, received)
        return {"late": outcome, "alive": alive(env)}
    begin = time.monotonic()
    if phase == "dispatch":
        handle, received = calls.dispatch()
    out = calls.combine(handle, received)  # after a dispatch that will fail: queued all the same
    returned = time.monotonic() - begin
    seen = wait_until(lambda: calls.group.error is not None, 2 * LIMIT + 2)
    calls.settle()
    array = env.backend.array
    return {
        "returned": returned,
        "seen": seen,
        "ended": time.monotonic() - begin,
        "record": calls.group.error,
        "counts": array(received.counts),
        "ids": array(received.ids),
        "out": array(out),
        "again": caught(calls.dispatch),
        "checked": caught(calls.group.check),
        "alive": alive(env),
    }


def late_call(calls: Calls, phase: str, handle: Any, received: Any) -> None:
    """A call, and another that finds what the first could not raise."""
    if phase == "dispatch":
        calls.dispatch()
    else:
        calls.combine(handle, received)
    calls.settle()
    wait_until(lambda: calls.group.error is not None, LIMIT + 1)
    calls.group.check()


def alive(env: Any) -> bool:
    """The CUDA context can still be used."""
    return bool(torch.ones(1000, device=env.device).sum().item() == 1000)


def judge_wait(report: dict[str, Any], phase: str, rank: int, late: int, nranks: int) -> None:
    assert report["returned"] < 0.5, report
    assert LIMIT - 0.3 < report["seen"] < LIMIT + 1 and report["ended"] < LIMIT + 1.5, report
    record = report["record"]
    assert record.result == "twTimeout" and record.sticky and record.peer == late, record
    assert record.phase == phase and record.lane == 0, record
    assert record.reporter != late and 0 <= record.reporter < nranks, record
    assert record.seen < record.expected == record.step, record
    assert f"rank {late}" in record.message, record
    if phase == "dispatch":
        assert report["counts"][late] == 0 and (report["ids"][late] == -1).all(), report
    assert np.isnan(report["out"]).all(), report
    for outcome in (report["again"], report["checked"]):
        assert outcome[0] == "twTimeout" and outcome[2].peer == late, outcome
    assert report["alive"], report


@pytest.fixture
def broken_pair(pair) -> Iterator[Any]:
    """Two processes whose comm is not used again."""
    pair.forget()
    yield pair
    pair.forget()


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_peer_that_never_calls(broken_pair, late, phase) -> None:
    by_rank = broken_pair.run(waits, SETUP, phase, late, LIMIT + 2)
    judge_wait(by_rank[1 - late], phase, 1 - late, late, 2)
    assert by_rank[late]["late"][0] == "twExcluded" and by_rank[late]["alive"], by_rank[late]
    survivors = Setup(ranks=1, experts=5, top_k=3, max_tokens=20)
    played = broken_pair.run(shrink_unless, late, survivors)
    mishaps.verify_survivors(survivors, [1 - late], [p for p in played if p is not None])


def shrink_unless(env: Any, left_out: int, setup: Setup) -> Any:
    """Survivors shrink and play; the rank that was given up cannot."""
    if env.rank == left_out:
        outcome = caught(lambda: env.kept["group"].shrink(timeout=5).close())
        assert outcome[0] != "twSuccess", outcome
        env.kept.pop("group").close()
        return None
    played = mishaps.shrink_and_play(env, setup, 5)
    env.kept.pop("group")
    return played


@pytest.mark.parametrize(("late", "where"), [(0, "one device"), (2, "one device"), (1, "all devices")])
def test_local_ranks_go_on_without_one(late, where) -> None:
    setup = Setup(ranks=3, experts=6, top_k=6, hidden=32, max_tokens=20)
    survivors = Setup(ranks=2, experts=5, top_k=3, max_tokens=20)
    left = [r for r in range(3) if r != late]
    with Locals(3, devices=[0] * 3 if where == "one device" else None) as ranks:
        by_rank = ranks.run(waits, setup, "dispatch", late, LIMIT + 2)
        for rank in left:
            judge_wait(by_rank[rank], "dispatch", rank, late, 3)
        assert by_rank[late]["late"][0] == "twExcluded", by_rank[late]
        played = ranks.run(shrink_unless, late, survivors)
    mishaps.verify_survivors(survivors, left, [p for p in played if p is not None])


# ---- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process(pair, victim) -> None:
    """In the middle of rounds, with a timeout that is far away; the survivor goes on alone."""
    setup = Setup(ranks=2, experts=7, top_k=3, hidden=200, max_tokens=64, lanes=2)
    workers = Workers(2, {"TOKENWAY_SHRINK_MS": "2000"})
    key = ("killed", 0, "nvlink", f"killed-{os.getpid()}-{time.monotonic_ns()}")
    try:
        workers.send(range(2), mishaps.begin, setup, 60.0, key=key)
        settle(workers.collect(range(2), 90))
        workers.send(range(2), mishaps.work_until_error, setup, 11, key=key)
        time.sleep(1.0)
        struck = time.monotonic()
        workers.signal(victim, signal.SIGKILL)
        (report,) = settle(workers.collect([1 - victim], 30))
        mishaps.judge(report, 1 - victim, victim, signal.SIGKILL, struck, 2.0)
        again = Setup(ranks=1, experts=3, top_k=2, lanes=2)
        workers.send(range(2), mishaps.shrink_and_play, again, 13, key=key)
        played = settle(workers.collect([1 - victim], 60))
        mishaps.verify_survivors(again, [1 - victim], played)
    finally:
        workers.close()


# ---- ranks that give up --------------------------------------------------------------------------


def gives_up(env: Any, how: str, culprit: int) -> tuple[str, int | None, float]:
    """(what ended it, whom the record blames, when): one rank leaves while the others wait for it on the device."""
    peer, at = None, 0.0
    try:
        with tw.Group(env.comm, timeout=60, **SETUP.settings()) as group:
            player = Player(env, group, Case(SETUP, ()))
            handle, inputs = player.handle(ROUND), player.payloads(ROUND)
            if env.rank == culprit:
                time.sleep(0.3)
                at = time.monotonic()
                if how == "abort":
                    group.abort()
                    return "aborted", None, at
                raise KeyError("not Tokenway's business")
            player.dispatch(ROUND, handle, inputs, False)
            wait_until(lambda: group.error is not None, 10)
            at, peer = time.monotonic(), group.error.peer if group.error else None
            env.stream.synchronize()
            group.check()
            return "nothing", peer, at
    except KeyError:
        return "KeyError", None, at
    except tw.TokenwayError as error:
        return error.result, peer, at


@pytest.mark.parametrize("how", ["abort", "exception"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_gives_up(pair, how, culprit) -> None:
    by_rank = pair.run(gives_up, how, culprit)
    assert by_rank[culprit][0] == ("aborted" if how == "abort" else "KeyError"), by_rank
    result, peer, at = by_rank[1 - culprit]
    assert (result, peer) == ("twPeerAborted", culprit), by_rank
    assert at - by_rank[culprit][2] < 1.0, by_rank


def test_a_local_rank_that_gives_up() -> None:
    with Locals(2, devices=[0, 0]) as ranks:
        by_rank = ranks.run(gives_up, "abort", 1)
    assert by_rank[0][:2] == ("twPeerAborted", 1), by_rank
    assert by_rank[0][2] - by_rank[1][2] < 1.0, by_rank


# ---- refusals ------------------------------------------------------------------------------------


def refuses(env: Any) -> tuple[Any, Any]:
    """Rank 0's tensor is of another dtype: it raises, the other's step ends in a record, and the group goes on."""
    with tw.Group(env.comm, timeout=30, **SETUP.settings()) as group:
        player = Player(env, group, Case(SETUP, ()))
        handle, (tokens,) = player.handle(ROUND), player.payloads(ROUND)
        begin = time.monotonic()
        if env.rank == 0:
            outcome = caught(group.dispatch, handle, tokens.float())
        else:
            group.dispatch(handle, tokens)
            took = wait_until(lambda: group.error is not None, 10)
            outcome = (*caught(group.check), took)
        assert time.monotonic() - begin < 5
        with contextlib.suppress(tw.InvalidUsage):  # a rank that knows of the failure has its channel back already
            handle.release()
        return outcome, player.flight((Round((7, 20), seed=5),))[0]


def check_refusal(by_rank: Any) -> None:
    from cases import verify

    (first, _), (second, _) = by_rank
    assert first[0] == "twInvalidArgument" and "dtype float32" in first[1], first
    assert second[0] == "twPeerRefused" and second[2].peer == 0 and not second[2].sticky, second
    assert second[3] < 2, second
    verify(SETUP, Round((7, 20), seed=5), [good for _, good in by_rank])


def test_a_refused_call(pair) -> None:
    check_refusal(pair.run(refuses))


def test_a_refused_call_of_local_ranks(lines) -> None:
    with Locals(2) as ranks:
        check_refusal(ranks.run(refuses))


@pytest.mark.parametrize("there", ["combine", "release"])
@pytest.mark.parametrize("here", ["combine", "release", "drop"])
def test_going_on_behind_a_refused_call(pair, here, there) -> None:
    """On the same lanes and banks, whatever the rank that was refused and its peer do with their handles."""
    from cases import verify

    for mode in ("low_latency", "high_throughput"):
        setup, round_ = test_refused_late.setup_of(mode, 2, 2)
        by_rank = pair.run(test_refused_late.goes_on, setup, round_, here, there, here != "drop", True)
        for got in zip(*by_rank, strict=True):
            verify(setup, round_, list(got))


def test_environment_of_local_ranks(monkeypatch) -> None:
    """Too few hardware queues for the ranks of a device would let them wait for each other for ever."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    outcome = caught(harness.BACKENDS["nvlink"].local_comms, 1 + harness.BACKENDS["nvlink"].device_count())
    assert outcome[0] != "twSuccess" and "CUDA_DEVICE_MAX_CONNECTIONS" in outcome[1], outcome
