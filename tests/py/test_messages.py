"""Weights that move in messages, where not all ranks have memory in common. What a balancer does there test_balancer.py
tells, with --backend torch and --backend fabric; here are a few of its cases in each run, and what only messages can
meet: peers that are late, stopped or gone, calls that are cut, and strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import numpy as np
import pytest
import test_balancer
from fabric_backend import EACH
from harness import HANGS, await_flags, raise_flag
from test_balancer import WEIGHTS, balanced, fill, make

import tokenway as tw
from tokenway import balance
from tokenway.balance import copies, messages

pytestmark = pytest.mark.usefixtures("torch")

SIZE = 1000  # bytes of weights, where there is no group


# ---- a balancer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "late"), [("threads", 3, 1), pytest.param("processes", 2, None, marks=pytest.mark.processes)]
)
def test_experts_move(kind: str, ranks: int, late: int | None) -> None:
    """Bits as without moves, on all ranks, and the same maps."""
    found = harness.WORLDS[kind]("torch", ranks).run(balanced, 60, 2, late)
    assert all(tables == found[0][1] and told.plans == found[0][0].plans for told, tables, _ in found)
    assert found[0][0].plans >= 2 and found[0][0].voids == 0
    assert sum(told.moves for told, _, _ in found) > 0


def test_one_rank() -> None:
    """Has no peer that it could ask."""
    ((told, _, _),) = harness.Threads("torch", 1).run(balanced, 30, 1, None)
    assert told.steps > 0 and told.moves == 0


def dropping(env: harness.Env) -> Any:
    """Rank 0 ends its peers' connections now and then, in the midst of an answer."""
    give = messages.HostMemory.give
    count = iter(range(10**6))

    def half(self: Any, at: int, size: int, send: Any) -> None:
        if env.rank == 0 and size == np.dtype(np.float32).itemsize * test_balancer.HIDDEN and next(count) % 3 == 1:
            send(self._bytes[at : at + size // 2])
            raise ConnectionError("a connection that breaks")
        give(self, at, size, send)

    messages.HostMemory.give = half  # type: ignore[method-assign]
    try:
        return balanced(env, 60, 1, None, more={"writes": 8})
    finally:
        messages.HostMemory.give = give  # type: ignore[method-assign]


@pytest.mark.processes
def test_answers_that_break_off() -> None:
    """Void on all ranks, and the rest moves on: by a new connection."""
    found = harness.Processes("torch", 2).run(dropping)
    assert found[0][0].voids == found[1][0].voids > 0 and found[0][1] == found[1][1]
    assert found[0][0].epochs > found[0][0].voids


# ---- peers that are late, or gone ----------------------------------------------------------------


def begin_pull(env: harness.Env, folder: str, timeout: float) -> Any:
    """Rank 0 begins answers and never ends them; others get half of theirs. What becomes of that: see the tests."""
    placement, settings = make(env, 10)
    group = tw.Group(env.comm, **settings, expert_map=placement, timeout=timeout)
    weights = balance.Weights(group, WEIGHTS)
    fill(env, group, weights)
    env.kept.update(group=group, weights=weights, mover=copies.copies_of(weights))
    others = range(1, env.nranks)
    if env.rank == 0:
        asked = iter(others)

        def stuck(at: int, size: int, send: Any) -> None:
            send(weights.messages.memory._bytes[at : at + size // 2])  # type: ignore[union-attr]
            raise_flag(folder, f"asked by {next(asked)} ranks")
            time.sleep(10 * HANGS)

        weights.messages.memory.give = stuck  # type: ignore[union-attr]
    else:
        begin(env)
        await_flags(folder, f"asked by {len(others)} ranks")  # this one among them: it waits for an answer


def begin(env: harness.Env) -> tuple[int, int, int, int]:
    weights = env.kept["weights"]
    spare = int(np.flatnonzero(weights.rank_of_slot == env.rank)[-1])
    piece: tuple[int, int, int, int] = weights.pieces(0, 0, spare, 1 << 20)[0]
    env.kept["mover"].begin(1, piece)
    return piece


def problem_of(env: harness.Env) -> str:
    """What became of the copy, once that is known."""
    mover = env.kept["mover"]
    until = time.monotonic() + HANGS / 2
    while not mover.ended(1):
        assert time.monotonic() < until
        time.sleep(0.01)
    found = repr(mover.problem(1))
    mover.close()
    return found


def close_at_once(env: harness.Env) -> Any:
    """A balancer's end does not wait for the peer."""
    mover = env.kept["mover"]
    mover.close()
    lines = [mover._thread, mover._follower]
    return mover.ended(1), repr(mover.problem(1)), [line is None or line.ended(0) for line in lines]


@pytest.mark.processes
@pytest.mark.parametrize("between", ["torch", "fabric"])
def test_a_peer_that_is_stopped_and_dies(tmp_path, between, request) -> None:
    """While it is stopped, a balancer's end waits for nothing; when it has died, a copy from it has failed."""
    if between == "fabric":
        request.getfixturevalue("fabric")
    workers = harness.Workers(3, {EACH: "1"})
    try:
        key = ("messages", 0, between, f"messages-{os.getpid()}-{time.monotonic_ns()}")
        workers.send(range(3), begin_pull, str(tmp_path), 10 * HANGS, key=key)
        harness.settle(workers.collect(range(3), HANGS))

        def ask(rank: int, function: Any) -> Any:
            workers.connections[rank].send((key, rank, 3, function, ()))
            return harness.settle(workers.collect([rank], HANGS))[0]

        workers.signal(0, signal.SIGSTOP)
        ended, problem, lines = ask(1, close_at_once)
        assert ended and "weights of rank 0 did not come" in problem and all(lines)
        workers.signal(0, signal.SIGKILL)
        assert "weights of rank 0 did not come" in ask(2, problem_of)
    finally:
        workers.close()


def closed_and_anew(env: harness.Env, folder: str) -> Any:
    """Rank 1 closes beside a copy whose second half comes late; then another balancer's copy takes its place."""
    placement, settings = make(env, 10)
    with (
        tw.Group(env.comm, **settings, expert_map=placement) as group,
        closing(balance.Weights(group, WEIGHTS)) as weights,
    ):
        fill(env, group, weights)
        env.kept.update(weights=weights, mover=copies.copies_of(weights))
        mine = np.asarray(weights.tensor("scale"))
        late = True
        memory = weights.messages.memory  # type: ignore[union-attr]

        def give(at: int, size: int, send: Any) -> None:
            nonlocal late
            if not late:
                return send(memory._bytes[at : at + size])
            late = False
            send(memory._bytes[at : at + size // 2])
            raise_flag(folder, "asked")
            await_flags(folder, "closed")
            try:
                send(memory._bytes[at + size // 2 : at + size])
            finally:
                raise_flag(folder, "sent")

        memory.give = give
        if env.rank == 0:
            await_flags(folder, "compared")
            return True
        begin(env)
        await_flags(folder, "asked")
        env.kept["mover"].close()
        before = mine.copy()
        raise_flag(folder, "closed")
        await_flags(folder, "sent")
        np.testing.assert_array_equal(mine, before)
        env.kept["mover"] = copies.copies_of(weights)
        begin(env)
        assert problem_of(env) == "None"
        found = np.array_equal(mine[-1], test_balancer.value_of(0, 0))
        raise_flag(folder, "compared")
        return found


def test_what_comes_late_comes_to_no_slot(tmp_path) -> None:
    """And the same weights serve the next balancer."""
    assert harness.Threads("torch", 2).run(closed_and_anew, str(tmp_path)) == [True, True]


ABANDONED = """
import sys, threading, time
sys.path.insert(0, {tests!r})
import harness, test_messages
from tokenway.balance import messages
world = harness.Threads("torch", 2)
world.run(test_messages.begin_pull, {folder!r}, 1000.0)
print("begun", flush=True)
"""


def test_a_process_that_closes_nothing_ends(tmp_path) -> None:
    """A copy that is under way holds up no process's end."""
    code = ABANDONED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS, env=environment)
    assert done.returncode == 0 and "begun" in done.stdout, done.stderr


# ---- who meets -----------------------------------------------------------------------------------


def given_apart(env: harness.Env, folder: str, late: bool) -> Any:
    """Other weights on rank 1; weights that are refused there; none at all until rank 0 has given up. late: then rank 1
    comes."""
    placement, settings = make(env, 10)
    with tw.Group(env.comm, **settings, expert_map=placement) as group:
        other = WEIGHTS if env.rank == 0 else {"scale": ((5,), "float32")}
        found = [harness.caught(balance.Weights, group, other)]
        found.append(harness.caught(balance.Weights, group, WEIGHTS if env.rank == 0 else {}))
        if env.rank == 0:
            messages.usual_timeout, usual = lambda: 0.5, messages.usual_timeout
            try:
                found.append(harness.caught(balance.Weights, group, WEIGHTS))
            finally:
                messages.usual_timeout = usual
            raise_flag(folder, "given up")
        await_flags(folder, "given up")
        if late and env.rank == 1:
            found.append(harness.caught(balance.Weights, group, WEIGHTS))
        with closing(balance.Weights(group, WEIGHTS)) as weights:
            fill(env, group, weights)  # they go on
            if env.rank == 1:
                weights.pull((0, 4096, 4096, 8), 0)
                raise_flag(folder, "pulled")
            await_flags(folder, "pulled")
        return found


def judge_apart(first: list[Any], second: list[Any]) -> None:
    for found in (first, second):
        harness.said(found[0], "twConfigMismatch", "were given weights of other names, shapes or dtypes")
    harness.said(first[1], "twPeerRefused", "rank 1 has refused its weights: weights is empty")
    harness.said(second[1], "twInvalidArgument", "weights is empty")


def test_ranks_that_differ(tmp_path) -> None:
    """All hear of it, and the next try is as the first."""
    first, second = harness.Threads("torch", 2).run(given_apart, str(tmp_path), False)
    judge_apart(first, second)
    harness.said(first[2], "twTimeout", "rank 1 of 2 did not arrive within 0.5 s")


# ---- without a group -----------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[messages.Messages, messages.Messages]]:
    """Two ranks that have met, with bytes that tell them apart."""
    memories = [messages.HostMemory(None, np.full(SIZE, rank, np.uint8)) for rank in range(2)]  # type: ignore[arg-type]
    servers = [messages.Server(memory, "127.0.0.1") for memory in memories]
    doors = [server.door for server in servers]
    made = [messages.Messages(*both, doors, harness.PATIENT) for both in zip(servers, memories, strict=True)]
    yield made[0], made[1]
    for each in made:
        each.close()


def test_pulls(ends) -> None:
    one, other = ends
    other.pull(0, 100, 7, 20)
    found = np.asarray(other.memory._bytes)
    assert (found[7:27] == 0).all() and (found[:7] == 1).all() and (found[27:] == 1).all()
    one.pull(1, 0, 0, SIZE)
    assert (np.asarray(one.memory._bytes)[27:] == 1).all()


@pytest.mark.parametrize(("at", "size"), [(SIZE - 3, 4), (0, SIZE + 1), (-2, 4), (4, -2), (2**62, 2**62)])
def test_what_is_not_there_is_refused(ends, at, size) -> None:
    """And the peer goes on."""
    with pytest.raises(tw.SystemFailure, match="has refused"):
        ends[1].pull(0, at, 0, size)
    ends[1].pull(0, 0, 0, 8)


def test_half_an_answer(ends) -> None:
    """Is none, also where no question follows it."""

    def half(at: int, size: int, send: Any) -> None:
        send(bytes(size // 2))
        raise ConnectionError("a connection that breaks")

    ends[0].memory.give = half
    with pytest.raises(tw.SystemFailure, match="weights of rank 0 did not come: the connection is closed"):
        ends[1].pull(0, 0, 0, 100)


def test_a_peer_that_brings_nothing(ends) -> None:
    """Is given up after so many seconds; what it sends later comes nowhere."""
    gate = threading.Event()
    one, other = ends
    give = one.memory.give
    one.memory.give = lambda at, size, send: (send(one.memory._bytes[:4]), gate.wait(), send(one.memory._bytes[4:size]))
    late = messages.Messages(other.server, other.memory, [one.server.door], 0.05)
    end = threading.Timer(harness.AT_ONCE, gate.set)  # who waits longer than the limit gets it all
    end.start()
    with pytest.raises(tw.SystemFailure, match="weights of rank 0 did not come: timed out"):
        late.pull(0, 0, 0, 100)
    end.cancel()
    gate.set()
    one.memory.give = give
    late.pull(0, 0, 200, 8)  # by another connection
    found = np.asarray(other.memory._bytes)
    assert (found[:4] == 0).all() and (found[4:200] == 1).all() and (found[200:208] == 0).all()
    late.cut()


@pytest.mark.parametrize("said", [bytes(16), b"", b"GET / HTTP/1.1\r\nHost: me\r\n\r\n"])
def test_strangers_get_nothing(ends, said) -> None:
    door = ends[0].server.door
    with socket.create_connection((door.host, door.port), harness.PATIENT) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(said)
            stranger.sendall(messages._ASKED.pack(0, 8) * bool(said))
        with suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert stranger.recv(8) == b""
    ends[1].pull(0, 0, 0, 8)


def test_boards(ends) -> None:
    """Who follows gets the last board, and each that comes then, until it cuts the connection or the other ends."""
    one, other = ends
    one.server.tell(b"lost")
    one.server.tell(b"first")
    seen: list[bytes] = []
    arrived = threading.Condition()

    def taken(board: bytes) -> None:
        with arrived:
            seen.append(board)
            arrived.notify()

    def followed() -> threading.Thread:
        line = threading.Thread(target=other.follow, args=(0, taken), daemon=True)
        line.start()
        return line

    first = followed()
    with arrived:
        assert arrived.wait_for(lambda: seen == [b"first"], harness.PATIENT)
    one.server.tell(b"second")
    with arrived:
        assert arrived.wait_for(lambda: seen == [b"first", b"second"], harness.PATIENT)
    other.cut()
    first.join(harness.PATIENT)
    second = followed()
    with arrived:
        assert arrived.wait_for(lambda: len(seen) == 3, harness.PATIENT)
    one.close()
    second.join(harness.PATIENT)
    assert seen[2] == b"second" and not first.is_alive() and not second.is_alive()


class Stream:
    """Like torch.cuda.Stream, of a device whose copies are done at once. done: what has been asked of all of them."""

    def __init__(self, name: str, done: list[str]):
        self.name, self.done, self.cuda_stream = name, done, 0

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.done.append(f"{self.name} behind {event}")

    def synchronize(self) -> None:
        self.done.append(f"{self.name} ended")


def device_of(torch: Any, done: list[str]) -> Any:
    """What a group says of a device that is the CPU."""
    names = iter(["moves", "pieces", "more"])
    cuda = SimpleNamespace(
        Stream=lambda _: Stream(next(names), done),
        current_stream=lambda _: Stream("steps", done),
        stream=lambda stream: nullcontext(done.append(f"on {stream.name}")),
        device=lambda _: nullcontext(),
    )
    fake = SimpleNamespace(
        cuda=cuda, uint8=torch.uint8, empty=lambda size, dtype, pin_memory: torch.empty(size, dtype=dtype)
    )
    return SimpleNamespace(device=0, native=SimpleNamespace(place=SimpleNamespace(torch=fake)))


def test_a_devices_memory(torch, monkeypatch) -> None:
    """Goes through the host's a piece at a time, each of which has come before the next is used; what is taken comes
    behind the streams of steps."""
    monkeypatch.setattr(messages, "_PIECE", 64)
    done: list[str] = []
    view = torch.arange(200, dtype=torch.uint8)
    memory = messages.DeviceMemory(device_of(torch, done), view)
    given: list[bytes] = []
    memory.give(10, 150, lambda part: given.append(bytes(part)))
    assert [len(part) for part in given] == [64, 64, 22] and b"".join(given) == bytes(range(10, 160))
    assert done == ["on pieces", "pieces ended"] * 3
    done.clear()
    memory.behind([Stream("lane", done)])
    rest = memoryview(bytes(range(100, 250)))

    def fill(part: memoryview) -> None:
        nonlocal rest
        part[:], rest = rest[: len(part)], rest[len(part) :]

    memory.take(20, 150, fill)
    assert bytes(view.numpy()) == bytes([*range(20), *range(100, 250), *range(170, 200)])
    assert done == ["moves behind steps", "moves behind lane", *["on moves", "moves ended"] * 3]


def test_a_line() -> None:
    """Calls in order, errors with theirs, and none begins behind the end."""
    line, gate, seen = copies.Line("line"), threading.Event(), []
    calls = [line.submit(seen.append, 1), line.submit(int, "x"), line.submit(gate.wait), line.submit(seen.append, 2)]
    assert isinstance(calls[1].exception(harness.PATIENT), ValueError)
    assert not line.ended(0)
    line.end()
    gate.set()
    assert line.ended(harness.PATIENT) and seen == [1] and calls[3].cancelled()
