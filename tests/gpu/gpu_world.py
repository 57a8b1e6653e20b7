"""Local ranks for the tests on GPUs: fresh comms, groups, threads, and rounds driven by a single thread.

with Locals(4) as ranks:                              # a thread each, by turns on all devices
    values = ranks.run(function, argument)            # function(env, argument)
    got = ranks.staged(setup, rounds)                 # all send, then all complete: one thread
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import numpy as np
import torch
from cases import Case, Got, Round, Setup
from player import Player

import tokenway as tw

TIMEOUT = 20.0  # of groups: seconds
CAPTURING = threading.Lock()  # PyTorch has one capture at a time in a process


class Locals:
    """Ranks of this process on comms of their own, so that they read the environment as it is now."""

    def __init__(self, nranks: int, backend: str = "nvlink", devices: Sequence[int] | None = None):
        made = harness.BACKENDS[backend]
        if devices is None:
            comms = made.local_comms(nranks)
        else:
            comms = tw.local_comms(nranks, devices=list(devices), timeout=60)
        self.nranks = nranks
        self.envs = [harness.Env(comm, made) for comm in comms]

    def start(self, function: Callable[..., Any], *args: Any) -> Callable[..., list[Any]]:
        """Begins function(env, *args) on a thread per rank; what is returned waits: by rank (ok, value or text)."""
        outcomes: list[Any] = [(False, "no answer in time")] * self.nranks

        def body(rank: int) -> None:
            outcomes[rank] = harness.attempt(self.envs[rank].call, function, *args)

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.nranks)]
        for thread in threads:
            thread.start()

        def finish(timeout: float = 60) -> list[Any]:
            for thread in threads:
                thread.join(timeout)
            return outcomes

        return finish

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """function(env, *args) on every rank: values by rank."""
        return harness.settle(self.start(function, *args)(timeout))

    @contextlib.contextmanager
    def groups(self, setup: Setup, **more: Any) -> Iterator[list[tw.Group]]:
        """A group by rank; made and closed by a thread each, as these are collective."""
        settings = {"timeout": TIMEOUT} | setup.settings() | more
        made = self.run(lambda env: tw.Group(env.comm, **settings))
        try:
            yield made
        except BaseException:
            for group in made:
                with contextlib.suppress(tw.TokenwayError):
                    group.abort()
            raise
        finally:
            self.run(lambda env: made[env.rank].close())

    def staged(self, setup: Setup, rounds: Sequence[Round], **more: Any) -> list[list[Got]]:
        """Got by round and rank. One thread: every rank sends, then every rank completes, which never waits for what
        has not been launched (S2), so that it runs even where kernels run one after the other."""
        with self.groups(setup, **more) as groups:
            players = [
                Player(env, group, Case(setup, ((rounds[0],),))) for env, group in zip(self.envs, groups, strict=True)
            ]
            return [staged_round(players, round_) for round_ in rounds]

    def close(self) -> None:
        for env in self.envs:
            for group in env.kept.values():
                with contextlib.suppress(tw.TokenwayError):
                    group.abort()
        self.start(lambda env: [group.close() for group in env.kept.values()])(10)
        for env in self.envs:
            with contextlib.suppress(tw.TokenwayError):
                env.comm.close()

    def __enter__(self) -> Locals:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def staged_round(players: Sequence[Player], round_: Round) -> list[Got]:
    """A round of all ranks, driven by this thread."""
    ranks = range(len(players))

    def each(step: Callable[[int, Player], Any]) -> list[Any]:
        values = []
        for rank in ranks:
            with players[rank].env.context():
                values.append(step(rank, players[rank]))
        return values

    handles = each(lambda r, p: p.handle(round_))
    inputs = each(lambda r, p: p.payloads(round_))
    pending = each(lambda r, p: p.dispatch(round_, handles[r], inputs[r], True))
    received = each(lambda r, p: pending[r].result())
    got = each(lambda r, p: p.snapshot(round_, received[r]))
    rows = each(lambda r, p: p.rows(round_, received[r], got[r]))
    pending = each(lambda r, p: p.combine(round_, handles[r], rows[r], True))
    results = each(lambda r, p: pending[r].result())
    for rank, out in enumerate(each(lambda r, p: p.array(results[r]))):
        got[rank].out = out
    return got


# ---- on a rank -----------------------------------------------------------------------------------


@contextlib.contextmanager
def line_tokens(most: int | None) -> Iterator[None]:
    """Groups made meanwhile send so many tokens as LL128 packets; 0: none, None: as the library thinks best."""
    before = os.environ.get("TOKENWAY_LINE_TOKENS")
    os.environ["TOKENWAY_LINE_TOKENS"] = "-1" if most is None else str(most)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENWAY_LINE_TOKENS"]
        else:
            os.environ["TOKENWAY_LINE_TOKENS"] = before


def capture(env: Any, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(graph, value) of what a function enqueues. Unlike torch.cuda.graph it synchronises nothing but the rank's own
    stream and keeps the allocator's memory, so that other ranks may use the device."""
    env.stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with CAPTURING:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            value = function()
        finally:
            graph.capture_end()
    return graph, value


def sleep_on_device(seconds: float) -> None:
    """Keeps the current stream busy; clocks differ, so this is about right."""
    torch.cuda._sleep(int(seconds * 1.7e9))


def bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """The same dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
