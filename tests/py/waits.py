"""Waits for a rank that is late, stopped or dead: the table of ways to connect, places where it strikes, and what is
then to come of it. Each row has ranks of its own, forked from a process that has imported what they need.

    outcome = play(Row("torch", "create", "stopped"), store_port)      # raises AssertionError
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import emulated_backend
import harness
import numpy as np
from forks import context

import tokenway as tw
from tokenway import cuda, meeting, portable, staged

SHORT = 1.5  # the timeout, where it is to end a wait
LONG = 300.0  # the timeout, where it must not be what ends a wait
LIMIT = 60.0  # for what takes a timeout of SHORT, or no time
# On a busy machine ranks may come so late to where one of them strikes that others are taken for late too. A row that
# does not come out right is played once more, with so many times the timeout.
AGAIN = 5.0
HOWS = ("late", "stopped", "dead")

# Where the rank strikes. "meet": it never comes to connect. "card": while it waits for others there. "mesh": when all
# have met, and are to be connected. "create": before it creates the group. "open", "gloo", "measure": when the portable
# backend begins to connect, is about to make process groups (a thread is, so that the rank itself is not late), and
# starts its first collective. The others: before the call of this name.
MEETINGS = ("card", "mesh")
CARRIER = ("open", "gloo", "measure")
UNMET = ("meet", *MEETINGS)
CALLS = ("meet", "create", "exchange", "shrink", "close")


@dataclass(frozen=True)
class Way:
    """How ranks connect: connect(rank, nranks, address, timeout)."""

    backend: str  # of the harness
    connect: Callable[[int, int, str, float], tw.Comm]
    distributed: bool = False  # torch.distributed is initialised before
    phases: tuple[str, ...] = CALLS


def _shm(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    return tw.Comm.shm(rank, nranks, address, timeout)


def _auto(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    return tw.connect(timeout=timeout)


def _torch(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    return tw.connect(backend="torch", timeout=timeout)


def _cuda(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    return tw.Comm.cuda(rank, nranks, address, rank, timeout)


def _nccl(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    return tw.connect(device=rank, backend="torch", timeout=timeout)


def _emulated(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    cuda.Cuda = emulated_backend.Place
    return _cuda(rank, nranks, address, timeout)


def _emulated_apart(rank: int, nranks: int, address: str, timeout: float) -> tw.Comm:
    cuda.Cuda, staged.on_device = emulated_backend.Place, emulated_backend.OnHost
    staged.connect = emulated_backend.connect_group
    return _nccl(rank, nranks, address, timeout)


WAYS = {
    "shm": Way("cpu", _shm),
    "auto": Way("cpu", _auto, True, (*CALLS, *MEETINGS)),
    "torch": Way("torch", _torch, True, (*CALLS, *MEETINGS, *CARRIER)),
    "emulated": Way("emulated", _emulated),
    "torch-emulated": Way("torch-emulated", _emulated_apart, True, (*CALLS, *CARRIER)),
    "nvlink": Way("nvlink", _cuda),
    "nccl": Way("nccl", _nccl, True, (*CALLS, *CARRIER)),
}


@dataclass(frozen=True)
class Row:
    way: str
    phase: str
    how: str
    nranks: int = 3
    victim: int = 1
    short: float = SHORT

    @property
    def timeout(self) -> float:
        """Others hear of a dead rank at once, whatever the timeout, unless it has never come."""
        return LONG if self.how == "dead" and self.phase not in UNMET else self.short

    @property
    def of_comm(self) -> float:
        """The comm's timeout, which is a new group's too."""
        return LONG if self.phase in ("exchange", "shrink", "close") else self.timeout

    @property
    def of_group(self) -> float:
        return self.timeout if self.phase in ("exchange", "shrink", "close") else LONG


def rows(way: str, how: str, **more: int) -> list[Row]:
    return [Row(way, phase, how, **more) for phase in WAYS[way].phases if (phase, how) != ("gloo", "late")]


# ---- on a rank -----------------------------------------------------------------------------------


class Victim:
    """Strikes once, at one place."""

    def __init__(self, row: Row, link: Connection):
        self._row, self._link, self._struck = row, link, False

    def at(self, phase: str) -> None:
        if phase != self._row.phase or self._struck:
            return
        self._struck = True
        self._link.send("struck")
        if self._row.how == "late":
            self._link.recv()
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self._row.how == "stopped" else signal.SIGKILL)

    def arm(self) -> None:
        """Puts the places that are within calls into the package."""
        for phase, owner, name in (
            ("card", meeting._Table, "_find_roster"),
            ("mesh", portable, "create"),
            ("mesh", tw.Comm, "shm"),
            ("open", portable.Carrier, "_open"),
            ("gloo", portable, "connect_queues"),
            ("measure", portable.Channel, "start"),
            ("measure", staged.DeviceChannel, "_warm"),
        ):
            if phase == self._row.phase:
                setattr(owner, name, self._before(phase, getattr(owner, name)))

    def _before(self, phase: str, function: Any) -> Any:
        def armed(*arguments: Any, **keywords: Any) -> Any:
            self.at(phase)
            return function(*arguments, **keywords)

        return armed


def serve(row: Row, rank: int, address: str, store_port: int, link: Connection) -> None:
    """A rank: says what became of the phase, and how it got rid of group and comm."""
    os.environ.update(TOKENWAY_SHRINK_MS=str(int(row.timeout * 1000)), TOKENWAY_BLOCKING="1")
    victim = Victim(row, link)
    if rank == row.victim:
        victim.arm()
    way, backend = WAYS[row.way], harness.BACKENDS[WAYS[row.way].backend]
    if way.distributed:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", store_port, None, False, wait_for_workers=False)
        store = dist.PrefixStore(address, store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=row.nranks)
    link.send("ready")
    link.recv()
    strike = victim.at if rank == row.victim else lambda phase: None
    said: tuple[str, Any] = ("nothing", None)
    made: list[Any] = []
    try:
        said = walk(row, rank, address, strike, made, backend)
    except tw.TokenwayError as error:
        said = error.result, str(error)
    for thing in reversed(made):
        thing.close()
    link.send(said)
    link.recv()


def walk(row: Row, rank: int, address: str, strike: Any, made: list[Any], backend: Any) -> tuple[str, Any]:
    """All phases in turn. ("shrunk", ranks that are left), or ("closed", None)."""
    strike("meet")
    comm = WAYS[row.way].connect(rank, row.nranks, address, row.of_comm)
    made.append(comm)
    env = harness.Env(comm, backend)
    with env.context():
        strike("create")
        n = row.nranks
        settings = {"experts": n, "top_k": n, "hidden": 1, "max_tokens": 1, "dtype": "float32"}
        group = tw.Group(comm, timeout=row.of_group, **settings)
        made.append(group)
        strike("exchange")
        handle = group.route(backend.tensor(np.arange(n, dtype=np.int32)[None]))
        received = group.dispatch(handle, backend.tensor(np.ones((1, 1), np.float32)))
        group.combine(handle, received.tokens)
        if row.phase == "shrink":
            strike("shrink")
            survivors = group.shrink(experts=6, top_k=2)
            made.append(survivors)
            return "shrunk", survivors.comm_ranks
        strike("close")
        made.pop().close()
    return "closed", None


# ---- the parent ----------------------------------------------------------------------------------


class Play:
    """The ranks of a row."""

    def __init__(self, row: Row, store_port: int):
        self.row = row
        address = f"waits-{os.getpid()}-{os.urandom(8).hex()}"
        self.links, self.processes = [], []
        for rank in range(row.nranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(row, rank, address, store_port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)

    def hear(self, rank: int, what: str) -> Any:
        """What a rank says next, in time."""
        if not self.links[rank].poll(LIMIT):
            raise AssertionError(f"{self.row}: {what}: rank {rank} says nothing within {LIMIT:g} s")
        return self.links[rank].recv()

    def run(self) -> None:
        row, victim = self.row, self.row.victim
        for rank in range(row.nranks):
            assert self.hear(rank, "before all begin") == "ready", row
        for link in self.links:
            link.send("begin")
        said = self.hear(victim, "before it strikes")
        assert said == "struck", f"{row}: before it strikes, rank {victim} says {said}"
        for rank in range(row.nranks):
            if rank != victim:
                judge(row, rank, self.hear(rank, f"while rank {victim} is {row.how}"))
        if row.how == "dead":
            return
        if row.how == "late":
            self.links[victim].send("come")
        else:
            os.kill(self.processes[victim].pid, signal.SIGCONT)
        result, text = self.hear(victim, "too late")
        if row.phase == "close":
            assert result == "closed", (row, result, text)
        elif result == "shrunk":  # of two that live neither is more: who gives up first leaves the group to the other
            assert text == [row.victim] and row.phase == "shrink" and row.nranks == 2, (row, result, text)
        else:
            assert result.startswith("tw") and result != "twInternalError", f"{row}: who is too late: {result}, {text}"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for link in self.links:
            link.close()


def judge(row: Row, rank: int, said: tuple[str, Any]) -> None:
    """What a rank has to say that goes on without the victim."""
    result, text = said
    if row.phase == "close":
        assert result == "closed", f"{row}: rank {rank}: {said}"
        return
    if row.phase == "shrink":
        left = [r for r in range(row.nranks) if r != row.victim]
        if row.how != "dead" and len(left) <= row.nranks - len(left):  # of two sides that live the larger goes on
            assert result == "twExcluded", f"{row}: rank {rank}: {said}"
        else:
            assert said == ("shrunk", left), f"{row}: rank {rank}: {said}"
        return
    results = {"twTimeout"} if row.how != "dead" or row.phase in UNMET else set()
    results |= {"twPeerDied"} if row.how == "dead" else set()
    assert result in results, f"{row}: rank {rank}: {said}"
    named = re.search(r"\brank (\d+(?:, \d+)*)(?: of \d+)? (?:did not arrive|is gone)", text)
    assert named is not None and named[1] == str(row.victim), f"{row}: rank {rank}: {said}"


def play_all(table: list[Row], store_port: int = 0) -> None:
    """Rows side by side, as they mostly wait; those that fail once more."""
    began = time.monotonic()
    first = _played(table, store_port)
    again = [replace(row, short=AGAIN * row.short) for row in first if row.timeout < LONG]
    problems = [problem for row, problem in first.items() if row.timeout >= LONG]
    problems += _played(again, store_port).values()
    took = f"{time.monotonic() - began:.1f} s"
    assert not problems, f"{len(problems)} of {len(table)} rows in {took}:\n" + "\n".join(problems)


def _played(table: list[Row], store_port: int) -> dict[Row, str]:
    """What is wrong with which rows."""
    plays = [Play(row, store_port) for row in table]
    problems: dict[Row, str] = {}

    def run(play: Play) -> None:
        try:
            play.run()
        except Exception as error:
            problems[play.row] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(play,)) for play in plays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for play in plays:
        play.end()
    return problems
