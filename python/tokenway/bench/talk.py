"""What ranks of several hosts tell each other, over a process group of gloo's, as hosts have no memory in common; and
which of them are of one host."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tokenway.bench import gloo
from tokenway.bench.control import Telling
from tokenway.comm import ADDRESS, NRANKS, RANK


class Talk(Telling):
    """A process group of gloo's: the launcher's, or one that meets in a folder of this machine. Collective.

    collectives: what moves the tensors of torch.distributed's default process group, "gloo" or "nccl". What ranks tell
    each other goes over gloo in any case.
    """

    def __init__(self, collectives: str = "gloo") -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)  # ranks share the cores
        self._dist = dist
        self._folder = self._note = ""
        if RANK in os.environ:
            self._folder = os.path.join(tempfile.gettempdir(), f"tokenway-bench-{os.environ[ADDRESS]}")
            os.makedirs(self._folder, exist_ok=True)
            gloo.join(self._folder, collectives, int(os.environ[RANK]), int(os.environ[NRANKS]))
        else:
            dist.init_process_group(collectives)
        self._group = None if collectives == "gloo" else dist.new_group(backend="gloo")
        self.rank, self.nranks = dist.get_rank(), dist.get_world_size()

    def allgather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank. Collective."""
        found: list[Any] = [None] * self.nranks
        self._dist.all_gather_object(found, mine, group=self._group)
        return found

    def gate(self) -> int:
        """Waits for all ranks; this rank's perf_counter_ns when they go on. Hosts have no clock in common: ranks leave
        as far apart as gloo's barrier lets them. Collective."""
        self._dist.barrier(group=self._group)
        return time.perf_counter_ns()

    def note(self, text: str) -> None:
        """Says where this rank is: to itself alone."""
        self._note = text

    def notes(self) -> list[str]:
        """This rank's, at its place."""
        return [self._note if rank == self.rank else "" for rank in range(self.nranks)]

    def where(self) -> str:
        """Where this rank is, in words."""
        return f"rank {self.rank} at {self._note or 'its start'}"

    def close(self) -> None:
        """Collective."""
        self._dist.barrier(group=self._group)
        self._dist.destroy_process_group()
        if self._folder and self.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def on_several_hosts() -> bool:
    """Whether torchrun says that it has started ranks on other hosts."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local is not None and local != os.environ.get("WORLD_SIZE")


def ranks_per_host(given: int | None, ranks: int, launched: bool) -> int | None:
    """None: hosts are found. Ranks that were not launched are started here, and would all be of one."""
    return max(1, ranks // 2) if given is None and not launched else given


def hosts_of(names: Sequence[str], each: int | None) -> list[int]:
    """The number of every rank's host."""
    if each is not None:
        return [rank // each for rank in range(len(names))]
    known = list(dict.fromkeys(names))
    return [known.index(name) for name in names]
