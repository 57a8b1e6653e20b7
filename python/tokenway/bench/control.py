"""What the ranks of a benchmark tell each other outside of the calls that are measured."""

from __future__ import annotations

import mmap
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tokenway.comm import Comm
from tokenway.group import Group

MAX_RANKS = 64  # one expert per rank and all of them chosen: top_k = N
CHUNK = 32768
PATIENCE = 120  # seconds to wait at the gate for a rank that may have failed
NOTE = 120  # bytes of a rank's note
NAP = 50e-6  # seconds between looks at the gate
LEAD = 300_000, 20_000  # nanoseconds from naming an instant to it: a constant, and per rank


class Telling:
    """What follows from an all-gather of Python objects."""

    rank: int
    nranks: int

    def allgather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank. Collective."""
        raise NotImplementedError

    def agree(self, problem: str | None) -> str | None:
        """The first problem that any rank has, with the rank's name, or None. Collective."""
        for rank, found in enumerate(self.allgather(problem)):
            if found:
                return f"rank {rank}: {found}"
        return None

    def slowest(self, mine: Any) -> np.ndarray:
        """Per iteration the time of the rank that was last: [...] of every rank's [...]."""
        return np.max(np.stack(self.allgather(np.asarray(mine))), axis=0)

    def notes(self) -> list[str]:
        """What every rank has said last, by rank; also where ranks do not answer."""
        return [""] * self.nranks

    def where(self) -> str:
        """Where every rank is, in words."""
        return "; ".join(f"rank {rank} at {note or 'its start'}" for rank, note in enumerate(self.notes()))


class Control(Telling):
    """An all-gather of Python objects, and a gate at which all ranks start together.

    The all-gather is an exchange with the set "every rank". The gate is a page of shared memory:
    ranks arrive and doze until all have; then rank 0 names an instant a little ahead, and everybody
    is awake and yields when it comes. So a rank that arrives early takes no core from those that
    are still in the call before, no measured call pays for being woken at the gate, and because
    the clock is one for all processes of a host, the time of an iteration is the last rank's end
    minus that instant, whoever was late. With more ranks than cores, those that find no core at
    the instant are runnable then, as the ranks of a busy program are.
    """

    def __init__(self, comm: Comm):
        self.comm = comm
        self.rank, self.nranks = comm.rank, comm.nranks
        self.group = Group(
            comm,
            experts=self.nranks,
            top_k=self.nranks,
            hidden=CHUNK,
            max_tokens=1,
            dtype="uint8",
            combine_hidden=1,
        )
        self._everyone = self.group.route(np.arange(self.nranks, dtype=np.int32)[None])
        self._notes_at = 8 * (2 + self.nranks)
        self._page, self._words = self._share_page()
        self._turn = 0
        self._lead = LEAD[0] + LEAD[1] * self.nranks

    def allgather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank. Collective."""
        blob = pickle.dumps(mine)
        blob = len(blob).to_bytes(8, "little") + blob
        parts: list[list[bytes]] = [[] for _ in range(self.nranks)]
        chunk = np.zeros((1, CHUNK), np.uint8)
        at, longest = 0, 1
        while at < longest:
            piece = blob[at : at + CHUNK]
            chunk[0, : len(piece)] = np.frombuffer(piece, np.uint8)
            received = self.group.dispatch(self._everyone, chunk)
            for rank in range(self.nranks):
                parts[rank].append(received.tokens[rank, 0].tobytes())
            self._everyone.release()
            if at == 0:
                longest = max(8 + int.from_bytes(p[0][:8], "little") for p in parts)
            at += CHUNK
        joined = (b"".join(p) for p in parts)
        return [pickle.loads(b[8 : 8 + int.from_bytes(b[:8], "little")]) for b in joined]

    def gate(self) -> int:
        """Waits for all ranks; returns the instant (perf_counter_ns) at which they start."""
        words, self._turn = self._words, self._turn + 1
        turn = self._turn
        words[2 + self.rank] = turn
        if self.rank == 0:
            self._doze_until(lambda: min(words[2:]) >= turn)
            words[1] = time.perf_counter_ns() + self._lead
            words[0] = turn
        else:
            self._doze_until(lambda: words[0] == turn)
        start: int = words[1]
        while time.perf_counter_ns() < start:
            os.sched_yield()
        return start

    def note(self, text: str) -> None:
        """Says where this rank is, to whoever asks. Not collective."""
        written = text.encode()[:NOTE]
        begin = self._notes_at + NOTE * self.rank
        self._page[begin : begin + NOTE] = written.ljust(NOTE, b"\0")

    def notes(self) -> list[str]:
        """What every rank has said last, by rank; also where ranks do not answer."""
        begins = (self._notes_at + NOTE * rank for rank in range(self.nranks))
        return [self._page[at : at + NOTE].rstrip(b"\0").decode(errors="replace") for at in begins]

    def time(self, call: Callable[[], Any]) -> int:
        """Nanoseconds from a common start of all ranks to the end of this rank's call."""
        start = self.gate()
        call()
        return time.perf_counter_ns() - start

    def close(self) -> None:
        """Collective."""
        self._words.release()
        self._page.close()
        self.group.close()

    def _doze_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            time.sleep(NAP)
            if time.monotonic() > end:
                raise TimeoutError(f"a rank did not reach the gate within {PATIENCE} s: {self.where()}")

    def _share_page(self) -> tuple[mmap.mmap, memoryview]:
        size = self._notes_at + NOTE * self.nranks
        fd = os.memfd_create("tokenway-bench") if self.rank == 0 else -1
        if fd >= 0:
            os.ftruncate(fd, size)
        pid, number = self.allgather((os.getpid(), fd))[0]
        if fd < 0:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        page = mmap.mmap(fd, size)
        self.allgather(None)  # everybody has opened it
        os.close(fd)
        return page, memoryview(page).cast("q")[: 2 + self.nranks]
