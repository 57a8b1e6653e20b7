"""Baselines that may hang or end their process: on each rank a library runs in a process of its own, beside the rank's.

The processes of a library are ranks of a process group of their own, which may have another NCCL than Tokenway's. They
do nothing until their rank asks: for a case, for a turn of it, whether its results are right. Every answer has a time
limit. Whoever gives none is ended alone, with its library's processes on all ranks; the row then has a sentence instead
of times, and the run goes on.

TOKENWAY_PEER_<NAME>, as TOKENWAY_PEER_NCCL_EP, has variables for such a process, as a shell writes them:
"LD_PRELOAD=/opt/nccl/lib/libnccl.so.2 NCCL_HOME=/opt/nccl PYTHONPATH=/opt/site-packages".
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.libraries import LIBRARIES, Library, check
from tokenway.launch import leave_with_parent

PREPARE = 240.0  # seconds for a case: libraries compile their kernels when they are first called
TURN = 30.0  # seconds for a turn, which takes milliseconds
LOOK = 5.0  # seconds between signs of life of a rank that waits
Told = Callable[[str], None]

# ---- the rank's side -----------------------------------------------------------------------------------------------


class Beside:
    """A library's process beside this rank, which is started with the first case. All calls but `once` and `turn` are
    collective, and give the same on all ranks."""

    def __init__(self, name: str, control: Control, device: int | None, told: Told = lambda _: None):
        """device: the rank's GPU; None: on the CPU. told: a sign of life."""
        self.name = name
        self.phases: tuple[str, ...] = ()
        self._control, self._device, self._told = control, device, told
        self._prepare, self._turn = PREPARE, TURN
        self._process: Any = None
        self._lost: tuple[str, str] | None = None  # how this rank's process went; then there is none any more
        self._gone: str | None = None  # the same as all ranks tell it

    def limit(self, prepare: float, turn: float) -> Beside:
        """Other time limits, in seconds."""
        self._prepare, self._turn = prepare, turn
        return self

    def prepare(self, case: Case) -> tuple[str | None, str | None]:
        """(why the library cannot be timed at this case, or None; why it is not a graph, or None)."""
        if self._gone is not None:
            return self._gone, None
        if self._process is None:
            self._start()
        reply = self._ask(("case", case), self._prepare)
        problem = self._together(reply)
        if problem is not None:
            return problem, None
        self.phases, note = reply[1]
        return None, note

    def once(self, control: Control) -> tuple[float, ...]:
        """A turn: what it took this rank, of each phase; not a number once the library is lost."""
        control.gate()
        reply = self._ask(("turn",), self._turn)
        return reply[1] if reply[0] == "done" else (math.nan,) * len(self.phases)

    def verdict(self) -> str | None:
        """What became of the library in its turns: None if it gives the right results once more."""
        return self._together(self._ask(("check",), self._turn))

    def close(self) -> None:
        """Ends the process, on this rank alone: nothing of it is worth waiting for."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def _start(self) -> None:
        control = self._control
        folder = tempfile.mkdtemp(prefix="tokenway-bench-") if control.rank == 0 else ""
        folder = control.allgather(folder)[0]
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        place = (folder, control.rank, control.nranks, self._device)
        self._process = context.Process(target=_serve, args=(theirs, self.name, place), daemon=True)
        with _environment(self.name):
            self._process.start()
        theirs.close()
        self._together(self._ask(("meet",), self._prepare))  # nobody needs the folder any more
        if control.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, command: tuple[Any, ...], limit: float) -> tuple[str, Any]:
        """("done", value), or why there is none: "failed", "silent" or "died". Not collective."""
        if self._lost is not None:
            return self._lost
        try:
            self._connection.send(command)
            end = time.monotonic() + limit
            while not self._connection.poll(min(LOOK, max(0.0, end - time.monotonic()))):
                if time.monotonic() >= end:
                    return self._lose("silent", f"did not answer within {limit:.0f} s")
                self._told(f"waiting for {self.name}")
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(1.0)
            return self._lose("died", f"its process ended with exit code {self._process.exitcode}")

    def _lose(self, how: str, why: str) -> tuple[str, str]:
        self._lost = how, why
        self.close()
        return self._lost

    def _together(self, reply: tuple[str, Any]) -> str | None:
        """The first problem of any rank, None if there is none. A library that is lost on one rank is so on all."""
        replies = self._control.allgather((reply[0], None if reply[0] == "done" else reply[1]))
        problems = {how: (why, rank) for rank, (how, why) in reversed([*enumerate(replies)]) if why}
        if not problems:
            return None
        # Whoever ended, or failed, says more than those that wait for it.
        how = next(how for how in ("died", "failed", "silent") if how in problems)
        why, rank = problems[how]
        told = why if how == "failed" else f"{why} on rank {rank}"
        if problems.keys() != {"failed"}:
            self.close()
            self._lost, self._gone = self._lost or (how, why), told
        return told


@contextmanager
def _environment(name: str) -> Iterator[None]:
    """What a process that is started now has beside this one's variables."""
    given = os.environ.get(f"TOKENWAY_PEER_{name.replace('-', '_').upper()}", "")
    before = dict(os.environ)
    os.environ.update(dict(word.split("=", 1) for word in shlex.split(given) if "=" in word))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- the library's side --------------------------------------------------------------------------------------------


def _serve(connection: Connection, name: str, place: tuple[str, int, int, int | None]) -> None:
    """Answers commands until the rank hangs up."""
    threading.Thread(target=leave_with_parent, name="tokenway-parent", daemon=True).start()
    os.dup2(2, 1)  # libraries print; stdout is the table's
    # The parent's sys.path has come along, and stands before what the environment says.
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    served = _Served(name, *place)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            command, *arguments = connection.recv()
            try:
                connection.send(("done", getattr(served, command)(*arguments)))
            except Exception as error:
                connection.send(("failed", _sentence(error)))
    os._exit(0)  # what a library does at its end might wait for peers that are gone


def _sentence(error: Exception) -> str:
    """The last line of an error, which says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class _Served:
    """The commands."""

    def __init__(self, name: str, folder: str, rank: int, ranks: int, device: int | None):
        self._name, self._folder, self._rank, self._ranks, self._device = name, folder, rank, ranks, device
        self._library: Library | None = None
        self._subject: Any = None

    def meet(self) -> None:
        """Joins the ranks of this library."""
        import torch

        from tokenway.bench import gloo, nccl

        if self._device is None:
            gloo.join(self._folder, "gloo", self._rank, self._ranks)
            return
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.Stream())
        gloo.join(self._folder, "cpu:gloo,cuda:nccl", self._rank, self._ranks)
        self._barrier = nccl.barrier()  # the communicator too, which libraries may take over

    def case(self, case: Case) -> tuple[tuple[str, ...], str | None]:
        """Makes a case, checks it and captures it: its phases, and why it is no graph."""
        from tokenway.bench.baselines import make_plan

        self._free()
        kind = LIBRARIES[self._name]
        try:
            import_module(kind.module)
            kind = kind.installed()
        except ImportError as error:
            raise RuntimeError(f"cannot be imported: {error}") from None
        if why := kind.refuses(case):
            raise RuntimeError(f"refuses the shape: {why}")
        device = "cpu" if self._device is None else f"cuda:{self._device}"
        self._library = kind(make_plan(case, self._rank), device, case.exact)
        check(self._library)
        self._subject, note = self._timed(self._library)
        return self._subject.phases, note

    def turn(self) -> tuple[float, ...]:
        """One turn of what is timed."""
        return self._subject.once(self)

    def check(self) -> None:
        """Whether results are still right."""
        assert self._library is not None
        check(self._library)

    def gate(self) -> int:
        """Where a turn would wait for other ranks: theirs have waited already."""
        return time.perf_counter_ns()

    def _timed(self, library: Library) -> tuple[Any, str | None]:
        if self._device is None:
            return _Clocked(library), None
        from tokenway.bench import nccl
        from tokenway.bench.graphs import Stretches, Together

        subject, problem = nccl.capture(library, self._agree)
        if problem is not None:
            return subject, problem
        calls = {"dispatch": lambda _: library.dispatch(), "combine": lambda _: library.combine()}
        return Together([subject, Stretches(library.name, self._barrier, calls)]), None

    def _agree(self, problem: str | None) -> str | None:
        import torch.distributed as dist

        found: list[str | None] = [None] * self._ranks
        dist.all_gather_object(found, problem)
        return next((one for one in found if one is not None), None)

    def _free(self) -> None:
        if self._subject is not None:
            self._subject.close()
        if self._library is not None:
            self._library.close()
        self._subject = self._library = None


class _Clocked:
    """Pairs by the clock, where there is no device that could do better."""

    phases = ("pair", "outside")

    def __init__(self, call: Callable[[], None]):
        self._call = call

    def once(self, control: Any) -> tuple[float, ...]:
        """A pair."""
        start = control.gate()
        self._call()
        return (time.perf_counter_ns() - start,) * 2

    def close(self) -> None:
        """Nothing to free."""
