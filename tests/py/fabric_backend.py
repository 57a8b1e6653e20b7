"""The harness's backend for CPU ranks on several hosts: memory in common within a host, libfabric's tcp between hosts.

Ranks are on the hosts that tests/netns makes; where there are none, ranks of this host are split into hosts of two, of
which the last may be one alone. TOKENWAY_TEST_RANKS_PER_HOST says another number; 0: hosts are found.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device_backend import COMM_TIMEOUT
from portable_backend import connect_threads

import tokenway as tw

EACH = "TOKENWAY_TEST_RANKS_PER_HOST"


def ranks_per_host() -> int:
    """0: hosts are what they are."""
    return int(os.environ.get(EACH, "2"))


def folder_allgather(rank: int, nranks: int, address: str) -> Callable[[bytes], list[bytes]]:
    """An allgather between processes that know a common name, and have no PyTorch to import."""
    folder = Path(tempfile.gettempdir(), f"tokenway-{os.getuid()}-{address.replace('/', '-')}")
    folder.mkdir(exist_ok=True)
    calls = 0

    def read(name: str, until: float) -> bytes:
        while time.monotonic() < until:
            try:
                return (folder / name).read_bytes()
            except FileNotFoundError:
                time.sleep(0.002)
        raise TimeoutError(f"nobody has written {name}")

    def allgather(mine: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        written = folder / f"writing-{calls}-{rank}"
        written.write_bytes(mine)
        written.rename(folder / f"{calls}-{rank}")  # whoever finds it finds all of it
        until = time.monotonic() + COMM_TIMEOUT
        return [read(f"{calls}-{other}", until) for other in range(nranks)]

    return allgather


class ByAllgather:
    """How the harness's ranks on several hosts meet: by `connect(rank, nranks, allgather)` of the class."""

    connect: Callable[..., tw.Comm]

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> tw.Comm:
        return cls.connect(rank, nranks, folder_allgather(rank, nranks, address))

    @classmethod
    def local_comms(cls, nranks: int) -> list[tw.Comm]:
        return connect_threads(nranks, lambda rank, allgather: cls.connect(rank, nranks, allgather))


def made_of(base: Any) -> Any:
    """The harness's class: as the CPU's, but for how ranks meet."""

    class Fabric(ByAllgather, base):  # type: ignore[misc, valid-type]
        name = "fabric"
        lacks = base.lacks | {"memory in common"}  # docs/BACKENDS.md
        death_seen = 4.0  # a peer's end is told by its connection, and passed on

        @staticmethod
        def most_ranks(kind: str) -> int:
            """An engine takes tens of megabytes, and a thread."""
            return 8

        @staticmethod
        def connect(rank: int, nranks: int, allgather: Any) -> tw.Comm:
            each = ranks_per_host()
            return tw.Comm.fabric(rank, nranks, allgather, ranks_per_host=each or None, timeout=COMM_TIMEOUT)

    return Fabric
