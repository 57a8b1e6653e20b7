"""Weights that move over `fabric`: by memory within a host, and in messages between hosts. What a balancer does there
test_balancer.py tells, with --backend fabric, and between namespaces tests/netns/test_moves.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing
from typing import Any

import harness
import numpy as np
import pytest
from fabric_backend import EACH
from test_balancer import WEIGHTS, balanced, make
from test_messages import given_apart, judge_apart

import tokenway as tw
from tokenway import balance
from tokenway.balance import messages


@pytest.fixture
def on_hosts(fabric, monkeypatch) -> Any:
    """on_hosts(ranks, each, function, ...): on ranks that are threads, so many of each host."""

    def run(ranks: int, each: int, function: Any, *args: Any) -> list[Any]:
        monkeypatch.setenv(EACH, str(each))
        world = harness.Threads("fabric", ranks)
        world.forget()  # whose hosts are others
        try:
            return world.run(function, *args)
        finally:
            world.forget()

    return run


@pytest.mark.parametrize(("ranks", "each"), [(4, 2), (3, 2), (3, 1)], ids=["2+2", "2+1", "1+1+1"])
def test_between_hosts_experts_move(on_hosts, monkeypatch, ranks, each) -> None:
    """Bits as without moves, whatever hosts have: from a rank of the same one out of its memory, from others in
    messages."""
    ways: set[tuple[int, int, bool]] = set()  # (to, from, whether in a message)
    own = threading.local()
    pull, ask = balance.Weights.pull, messages.Messages.pull

    def pulled(self: Any, piece: Any, stream: int) -> None:
        own.asked = False
        pull(self, piece, stream)
        ways.add((self.group.rank, piece[0], own.asked))

    def asked(self: Any, rank: int, read: int, write: int, size: int) -> None:
        own.asked = True
        ask(self, rank, read, write, size)

    monkeypatch.setattr(balance.Weights, "pull", pulled)
    monkeypatch.setattr(messages.Messages, "pull", asked)
    found = on_hosts(ranks, each, balanced, 60, 1, None, 0, {"writes": 8})
    assert all(tables == found[0][1] and told.plans == found[0][0].plans for told, tables, _ in found)
    assert found[0][0].plans >= 2 and found[0][0].voids == 0
    assert {message for _, _, message in ways} == ({True} if each == 1 else {True, False})
    for to, source, message in ways - {(rank, rank, False) for rank in range(ranks)}:
        assert message == (to // each != source // each), (to, source)


def unasked(env: Any) -> Any:
    """Whether ranks need to ask, and what a balancer does."""
    placement, made = make(env, 6)
    with tw.Group(env.comm, **made, expert_map=placement) as group:
        alone = balance.Weights(group, WEIGHTS).messages is None
    return alone, balanced(env, 30, 1, None)


def test_all_on_one_host(on_hosts) -> None:
    """Then all have memory in common, and nobody serves."""
    found = on_hosts(3, 3, unasked)
    assert [alone for alone, _ in found] == [True] * 3
    assert sum(told.moves for _, (told, _, _) in found) > 0


# ---- who meets -----------------------------------------------------------------------------------


def test_ranks_that_differ_between_hosts(on_hosts, tmp_path) -> None:
    """As over a carrier; a rank that comes late hears that it has been given up, so that the next try is of all."""
    first, second = on_hosts(2, 1, given_apart, str(tmp_path), True)
    judge_apart(first, second)
    harness.said(first[2], "twTimeout", "meeting in a group: rank 1 did not arrive in time")
    harness.said(second[2], "twTimeout", "rank 0: meeting in a group: rank 1 did not arrive in time")


def another_call(env: harness.Env) -> Any:
    """Rank 1 makes a group, where the other meets in one."""
    placement, settings = make(env, 10)
    with tw.Group(env.comm, **settings, expert_map=placement) as group:
        if env.rank == 0:
            found = harness.caught(balance.Weights, group, WEIGHTS)
        else:
            found = harness.caught(tw.Group, env.comm, **settings, expert_map=placement)
        with closing(balance.Weights(group, WEIGHTS)):  # they go on
            return found


def test_ranks_that_make_another_call(on_hosts) -> None:
    """They hear at once."""
    for found in on_hosts(2, 1, another_call):
        harness.said(found, "twCallMismatch", "rank 0 meets in a group while rank 1 creates one")


def long_words(env: harness.Env) -> Any:
    """Rank 1 has a refusal of many characters, each of which takes many bytes where ranks meet."""
    placement, settings = make(env, 10)
    with tw.Group(env.comm, **settings, expert_map=placement) as group:
        name = "\U0001f511" * 2000
        return harness.caught(balance.Weights, group, WEIGHTS if env.rank == 0 else {name: ((0,), "float32")})


def test_a_refusal_of_many_words(on_hosts) -> None:
    """What peers hear of it is cut."""
    first, second = on_hosts(2, 1, long_words)
    harness.said(first, "twPeerRefused", "rank 1 has refused its weights: weights")
    harness.said(second, "twInvalidArgument", "its extents must be at least 1")


def dies_instead(env: harness.Env) -> Any:
    """Rank 2 is killed where the others meet it; they go on without it, and ask each other."""
    placement, settings = make(env, 6)
    group = tw.Group(env.comm, **settings, expert_map=placement)
    if env.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    found = harness.caught(balance.Weights, group, WEIGHTS)
    with group.shrink() as smaller, closing(balance.Weights(smaller, WEIGHTS)) as weights:
        weights.tensor("scale")[:] = env.rank
        smaller.all_gatherv(np.zeros((1, 1), np.uint8), [1, 1])  # both have filled theirs
        for piece in weights.pieces(0, 0, int(np.flatnonzero(weights.rank_of_slot == env.rank)[1])):
            weights.pull(piece, 0)
        smaller.all_gatherv(np.zeros((1, 1), np.uint8), [1, 1])
        return found, smaller.comm_ranks, np.array(weights.tensor("scale"))[1]


@pytest.mark.processes
def test_a_rank_that_dies_instead(fabric) -> None:
    workers = harness.Workers(3, {EACH: "1"})
    try:
        key = ("meeting", 0, "fabric", f"meeting-{os.getpid()}-{time.monotonic_ns()}")
        workers.send(range(3), dies_instead, key=key)
        for found, members, pulled in harness.settle(workers.collect([0, 1], harness.HANGS)):
            harness.said(found, "twPeerDied", "meeting in a group: rank 2 is gone")
            assert members == [0, 1] and (pulled == 0).all()  # of rank 0
    finally:
        workers.close()
