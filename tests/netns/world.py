"""Ranks on the hosts of a network: processes that a test starts, cuts off, stops and kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from fabric_backend import EACH
from harness import HANGS, PLACES, SPACES, Workers, settle

from tokenway.bench.namespaces import Network


def places(network: Network) -> dict[str, str]:
    """Where the harness's processes are."""
    return {PLACES: network.places(), SPACES: " ".join(network.spaces), EACH: "0", "OMP_NUM_THREADS": "1"}


class World:
    """Worker processes for all ranks of a network. turns: so many ranks more, which hosts have by turns."""

    def __init__(self, network: Network, backend: str, turns: int = 1, env: dict[str, str] | None = None):
        self.network = network
        self.nranks = turns * len(network.hosts_of_ranks)
        self.everyone = list(range(self.nranks))
        self.workers = Workers(self.nranks, places(network) | (env or {}))
        self.key = ("hosts", 0, backend, f"hosts-{os.getpid()}-{time.monotonic_ns()}")

    def host_of(self, rank: int) -> int:
        """The number of a rank's host."""
        by_rank = self.network.hosts_of_ranks
        return by_rank[rank % len(by_rank)].number

    def ranks_of(self, *hosts: int) -> list[int]:
        """All ranks of these hosts."""
        return [rank for rank in self.everyone if self.host_of(rank) in hosts]

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """function(env, *args) on every rank."""
        self.workers.send(self.everyone, function, *args, key=self.key)

    def collect(self, ranks: Sequence[int] | None = None, timeout: float = HANGS) -> list[Any]:
        """What these ranks answer, all of them if none are named."""
        return settle(self.workers.collect(self.everyone if ranks is None else ranks, timeout))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Both."""
        self.start(function, *args)
        return self.collect()

    def strike(self, number: int, ranks: Sequence[int]) -> None:
        """Kills, stops or continues ranks."""
        for rank in ranks:
            self.workers.signal(rank, number)

    def close(self) -> None:
        """Ends the processes, stopped ones too."""
        self.strike(signal.SIGCONT, [rank for rank in self.everyone if self.workers.processes[rank].poll() is None])
        self.workers.close()
