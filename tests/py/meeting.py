"""Processes that meet: what each of them heard, and when. Some are killed, stopped or short of descriptors."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from forks import context

_LIMIT = 120.0  # for a process to start, or to say what it heard


class Meeting:
    """A process that connects as a rank. Killed at the end of a `with` block.

    spare: so many descriptors may be opened more than are, soft and hard. group: it makes one too.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        address: str,
        timeout: float,
        spare: int | None = None,
        group: bool = False,
    ):
        self._said, theirs = context.Pipe()
        args = (theirs, rank, nranks, address, timeout, spare, group)
        self.process = context.Process(target=_meet, args=args, daemon=True)
        self.process.start()
        theirs.close()
        assert self._next() == "begins"
        self.pid: int = self.process.pid or 0

    def _next(self) -> Any:
        assert self._said.poll(_LIMIT), "the process says nothing"
        return self._said.recv()

    def heard(self) -> tuple[str, str, float]:
        """(result, sentence, seconds that the call took). Without an error the sentence is the number of descriptors
        that stay open."""
        return self._next()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.join()
        self._said.close()


def address_of(what: str) -> str:
    return f"{what}-{os.getpid()}-{time.monotonic_ns()}"


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def _meet(
    said: Connection, rank: int, nranks: int, address: str, timeout: float, spare: int | None, group: bool
) -> None:
    import resource

    import tokenway as tw

    before = _descriptors()
    said.send("begins")
    if spare is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare,) * 2)
    result, text, begin = "twSuccess", "", time.monotonic()
    kept: list[Any] = []
    try:
        kept.append(tw.Comm.shm(rank, nranks, address, timeout=timeout))
        if group:
            kept.append(tw.Group(kept[0], experts=nranks, top_k=1, hidden=8, max_tokens=1))
        text = str(_descriptors() - before) if spare is None else ""
    except tw.TokenwayError as error:
        result, text = error.result, str(error)
    said.send((result, text, time.monotonic() - begin))
    said.poll(None)  # lives until it is killed
