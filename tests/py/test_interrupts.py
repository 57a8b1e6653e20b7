"""Signals that come while a rank waits: what their handlers raise ends the wait, soon, and the peers hear that the rank
has given up, whether they wait already or come later."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Env, Workers, caught, settle
from refusals import adapt

import tokenway as tw

pytestmark = pytest.mark.processes
START = 90.0  # seconds until a process has its device, and its group
PATIENCE = 300.0  # of a group: what waits as long has not been interrupted
SOON = 4.0  # seconds from a signal to the end of a wait; 0.2 are wanted, on a machine that is not busy
EARLY = "no wait had begun"
# An emulated kernel is waited for where any other is, not in its launch.
ENVIRONMENT = {"CUDA_LAUNCH_BLOCKING": "0", "TOKENWAY_BLOCKING": "1"}


def make_group(env: Env, mode: str = "low_latency") -> tw.Group:
    shape = {"experts": env.nranks, "top_k": env.nranks, "hidden": 1, "max_tokens": 1, "dtype": "float32"}
    return tw.Group(env.comm, timeout=PATIENCE, mode=mode, **shape)


def prepare(env: Env, what: str) -> None:
    """Before the call that waits."""
    if what in ("create", "connect"):
        return
    group = env.kept["group"] = make_group(env, "high_throughput" if what == "counts" else "low_latency")
    env.kept["handle"] = group.route(adapt(env, np.arange(env.nranks, dtype=np.int32)[None]))
    if what == "combine":
        env.kept["rows"] = group.dispatch(env.kept["handle"], adapt(env, np.ones((1, 1), np.float32)))
    if what == "shrink" and env.rank == env.nranks - 1:
        group.abort()


def wait(env: Env, what: str) -> None:
    """The call that waits for all ranks."""
    group, handle = env.kept.get("group"), env.kept.get("handle")
    if what == "create":
        env.kept["group"] = make_group(env)
    elif what == "dispatch":
        group.dispatch(handle, adapt(env, np.ones((1, 1), np.float32)))
    elif what == "combine":
        group.combine(handle, env.kept["rows"].tokens)
    elif what == "counts":
        group.exchange_counts(handle)
    elif what == "gather":
        group.all_gatherv(adapt(env, np.ones((1, 1), np.float32)), sizes=[1] * env.nranks)
    elif what == "close":
        group.close()
    else:
        group.shrink(timeout=PATIENCE, experts=env.nranks, top_k=1)


def connect(env: Env, address: str) -> None:
    """With ranks that do not come."""
    if env.comm.backend == "torch":
        tw.Comm.portable(env.rank, env.nranks, lambda mine: threading.Event().wait(PATIENCE), device=env.comm.device)
    else:
        env.backend.comm(env.rank, env.nranks, address)


def be_interrupted(env: Env, begun: Path, call: Callable[..., Any], *args: Any) -> tuple[str, str, float]:
    """What ends the wait of this rank, why, and when."""
    begun.touch()
    try:
        call(env, *args)
    except BaseException as error:
        return type(error).__name__, getattr(error.__cause__, "result", EARLY), time.monotonic()
    return "", "", time.monotonic()


def exit_on(env: Env, number: int) -> None:
    """As many programs do."""
    signal.signal(number, lambda number, frame: sys.exit(0))


def touch_on(env: Env, number: int, path: Path) -> None:
    signal.signal(number, lambda number, frame: path.touch())


def hear(env: Env, what: str) -> tuple[str, str]:
    return caught(wait, env, what)[:2]


def until(path: Path) -> None:
    limit = time.monotonic() + START
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


class World:
    def __init__(self, backend: str, nranks: int):
        self.workers = Workers(nranks, {"TOKENWAY_SHRINK_MS": str(int(PATIENCE * 1000)), **ENVIRONMENT})
        self.key = ("interrupts", 0, backend, f"interrupts-{os.getpid()}-{time.monotonic_ns()}")
        self.nranks = nranks

    def send(self, ranks: list[int], function: Callable[..., Any], *args: Any) -> None:
        """To some ranks of the world."""
        for rank in ranks:
            self.workers.connections[rank].send((self.key, rank, self.nranks, function, args))

    def collect(self, ranks: list[int], timeout: float = START) -> list[Any]:
        return settle(self.workers.collect(ranks, timeout))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        everyone = list(range(self.nranks))
        self.send(everyone, function, *args)
        return self.collect(everyone)


@pytest.fixture
def world(backend, processes) -> Iterator[Callable[[int], World]]:
    made: list[World] = []

    def make(nranks: int) -> World:
        processes(nranks)
        made.append(World(backend, nranks))
        return made[-1]

    yield make
    for each in made:
        each.workers.close()


CALLS = ("create", "dispatch", "combine", "counts", "gather", "close", "shrink")


def interrupt(world: World, number: int, begun: Path, call: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """Sends rank 0 a signal while it waits, and asserts that this ends soon; by what, and why. Nobody can tell from
    outside when it waits: where the signal came before, the call is made again, and it is given longer."""
    for seconds in (0.3, 3, 30):
        world.send([0], be_interrupted, begun, call, *args)
        until(begun)
        time.sleep(seconds)
        struck = time.monotonic()
        world.workers.signal(0, number)
        name, why, ended = world.collect([0])[0]
        begun.unlink()
        if why != EARLY:
            break
    print(f"{call.__name__}{args}: {ended - struck:.3f} s")
    assert ended - struck < SOON, (name, why)
    return name, why


@pytest.mark.parametrize("what", CALLS)
def test_a_call_of_a_group(world, what: str, tmp_path: Path) -> None:
    """Rank 0 is interrupted, rank 1 comes later, and the others wait all the time."""
    ranks = world(4 if what == "shrink" else 3)
    ranks.run(prepare, what)
    ranks.send([2], hear, what)
    found = interrupt(ranks, signal.SIGINT, tmp_path / "begun", wait, what)
    assert found == ("KeyboardInterrupt", "twInterrupted")
    ranks.send([1], hear, what)
    for result, text in ranks.collect([1, 2]):
        assert result == ("twSuccess" if what in ("close", "shrink") else "twPeerAborted"), text


def test_connecting(world, tmp_path: Path) -> None:
    ranks = world(2)
    ranks.run(prepare, "connect")
    found = interrupt(ranks, signal.SIGINT, tmp_path / "begun", connect, f"{ranks.key[-1]}-again")
    assert found == ("KeyboardInterrupt", "twInterrupted")


def test_a_handler_that_exits(world, tmp_path: Path) -> None:
    ranks = world(3)
    ranks.run(prepare, "dispatch")
    ranks.run(exit_on, signal.SIGTERM)
    assert interrupt(ranks, signal.SIGTERM, tmp_path / "begun", wait, "dispatch") == ("SystemExit", "twInterrupted")
    ranks.send([1, 2], hear, "dispatch")
    assert [result for result, _ in ranks.collect([1, 2])] == ["twPeerAborted"] * 2


def test_a_handler_that_raises_nothing(world, tmp_path: Path) -> None:
    """It runs during the wait, which goes on to its end."""
    ranks = world(3)
    ranks.run(prepare, "dispatch")
    ranks.run(touch_on, signal.SIGTERM, tmp_path / "handled")
    ranks.send([0], be_interrupted, tmp_path / "begun", wait, "dispatch")
    until(tmp_path / "begun")
    time.sleep(0.3)
    ranks.workers.signal(0, signal.SIGTERM)
    until(tmp_path / "handled")
    ranks.send([1, 2], hear, "dispatch")
    assert [result for result, _ in ranks.collect([1, 2])] == ["twSuccess"] * 2
    assert ranks.collect([0])[0][0] == ""
