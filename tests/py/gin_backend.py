"""The harness's backends for devices of several hosts: kernels put rows to other hosts by NCCL's device API (GIN) or,
on emulated devices, into the engine between hosts. Hosts as in fabric_backend.

Where there is no NIC, NCCL needs a network of its own for tests: tests/gin. TOKENWAY_TEST_CROSSING says how rows of a
dispatch cross (Comm.gin); they are few here, so that by themselves they would go to each rank.
"""

from __future__ import annotations

import os
from typing import Any

from device_backend import COMM_TIMEOUT, Cuda
from emulated_backend import Emulated, Place
from fabric_backend import ByAllgather, ranks_per_host

import tokenway as tw
from tokenway import cuda
from tokenway.balance import copies, messages

CROSSING = "TOKENWAY_TEST_CROSSING"


def made_of(base: Any, named: str) -> Any:
    """The harness's class: as `base`, but for how ranks meet."""

    class Gin(ByAllgather, base):  # type: ignore[misc, valid-type]
        name = named
        parts = False
        lacks = base.lacks | {"leases", "memory in common"}  # docs/BACKENDS.md
        death_seen = 6.0  # a peer's end is told by its connection, and passed on by a thread beside kernels that wait

        @classmethod
        def most_ranks(cls, kind: str) -> int:
            """A rank has connections to all others, and threads for them."""
            return min(8, super().most_ranks(kind))

        @classmethod
        def connect(cls, rank: int, nranks: int, allgather: Any) -> tw.Comm:
            if issubclass(base, Emulated):  # there are no streams of PyTorch's
                cuda.Cuda, copies.DeviceCopies, messages.DeviceMemory = Place, copies.HostCopies, messages.HostMemory
            device = rank % cls.device_count()
            each = ranks_per_host() or None
            return tw.Comm.gin(
                rank,
                nranks,
                allgather,
                device=device,
                ranks_per_host=each,
                crossing=os.environ.get(CROSSING, "per_host") or None,
                timeout=COMM_TIMEOUT,
            )

    return Gin


BACKENDS = {"gin": made_of(Cuda, "gin"), "emulated-gin": made_of(Emulated, "emulated-gin")}
