"""The harness's portable backends: groups over gloo, tensors NumPy's, a class for each way to exchange; and over NCCL.

torch           auto                           torch-exact      routed, sizes first
torch-gathered  gathered, as measured          torch-fixed      routed, one collective however much a step brings
torch-split     gathered, of messages longer   torch-ring       gathered, by an all-gather whatever its size
                than 128 bytes the rest apart
"""

from __future__ import annotations

import os
import tempfile
import threading
from datetime import timedelta
from typing import Any

from device_backend import COMM_TIMEOUT, Cuda

import tokenway as tw

WAYS = {
    "torch": {},
    "torch-exact": {"strategy": "routed"},
    "torch-fixed": {"strategy": "routed", "capacity": "fixed"},
    "torch-gathered": {"strategy": "gathered"},
    "torch-ring": {"strategy": "gathered", "capacity": "exact"},
    "torch-split": {"strategy": "gathered", "capacity": 128},
}


class Meeting:
    """An allgather between threads."""

    def __init__(self, nranks: int):
        self._barrier = threading.Barrier(nranks)
        self._parts: list[bytes] = [b""] * nranks

    def allgather(self, rank: int, mine: bytes) -> list[bytes]:
        self._parts[rank] = mine
        self._barrier.wait(COMM_TIMEOUT)
        parts = list(self._parts)
        self._barrier.wait(COMM_TIMEOUT)  # or the next call's would be among them
        return parts


def connect_threads(nranks: int, connect: Any) -> list[tw.Comm]:
    """connect(rank, allgather) of all ranks, each on a thread."""
    meeting = Meeting(nranks)
    comms: list[Any] = [None] * nranks

    def body(rank: int) -> None:
        comms[rank] = connect(rank, lambda mine: meeting.allgather(rank, mine))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return comms


def file_allgather(rank: int, nranks: int, address: str) -> Any:
    """An allgather between processes that know a common name."""
    import torch.distributed as dist

    path = os.path.join(tempfile.gettempdir(), f"tokenway-{os.getuid()}-{address.replace('/', '-')}")
    store = dist.FileStore(path, nranks)
    store.set_timeout(timedelta(seconds=COMM_TIMEOUT))
    calls = 0

    def allgather(mine: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        store.set(f"{calls}-{rank}", mine)
        return [store.get(f"{calls}-{r}") for r in range(nranks)]

    return allgather


class Nccl(Cuda):
    """Ranks on CUDA devices whose groups exchange over NCCL, each with a device of its own, or processes by turns."""

    name = "nccl"
    knows_calls = False
    parts = False
    lacks = frozenset({"leases", "memory in common"})  # docs/BACKENDS.md

    @classmethod
    def most_ranks(cls, kind: str) -> int:
        return super().most_ranks(kind) if kind == "processes" else cls.device_count()

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> tw.Comm:
        if nranks > cls.device_count():  # NCCL takes processes of one device only for those of different hosts
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        device = rank % cls.device_count()
        return tw.Comm.portable(
            rank, nranks, file_allgather(rank, nranks, address), device=device, timeout=COMM_TIMEOUT
        )

    @classmethod
    def local_comms(cls, nranks: int) -> list[tw.Comm]:
        return connect_threads(
            nranks,
            lambda rank, allgather: tw.Comm.portable(rank, nranks, allgather, device=rank, timeout=COMM_TIMEOUT),
        )


def variants(base: Any) -> dict[str, Any]:
    """A class of the harness for each way: as the CPU's, but for how ranks meet."""

    def make(way: str, options: dict[str, Any]) -> Any:
        class Portable(base):  # type: ignore[misc, valid-type]
            name = way
            lacks = base.lacks | {"memory in common"}

            @staticmethod
            def most_ranks(kind: str) -> int:
                """Connections grow with the square of it, and each group has its own."""
                return 8

            @staticmethod
            def comm(rank: int, nranks: int, address: str) -> tw.Comm:
                allgather = file_allgather(rank, nranks, address)
                return tw.Comm.portable(rank, nranks, allgather, timeout=COMM_TIMEOUT, **options)

            @staticmethod
            def local_comms(nranks: int) -> list[tw.Comm]:
                return connect_threads(
                    nranks,
                    lambda rank, allgather: tw.Comm.portable(rank, nranks, allgather, timeout=COMM_TIMEOUT, **options),
                )

        return Portable

    return {way: make(way, options) for way, options in WAYS.items()}
