"""Who takes part: comms, and the ways to find the other ranks."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from ctypes import byref, c_int32, c_void_p
from typing import Any

from tokenway import _native
from tokenway.errors import InvalidArgument, TokenwayError, Unsupported
from tokenway.settings import milliseconds

# What the package's own launcher tells its processes.
RANK, NRANKS, ADDRESS = "TOKENWAY_RANK", "TOKENWAY_NRANKS", "TOKENWAY_ADDRESS"


class Comm:
    """One rank's part in a set of ranks on which groups are created.

    Use `connect()`, `Comm.shm(...)` or `local_comms(n)` to make one. Closing frees it; groups must be closed before.
    """

    def __init__(self, pointer: int):
        self._pointer: int | None = pointer
        rank, nranks = c_int32(), c_int32()
        _native.check(_native.lib.twCommRank(pointer, byref(rank), byref(nranks)))
        self.rank: int = rank.value
        self.nranks: int = nranks.value

    @classmethod
    def shm(cls, rank: int, nranks: int, address: str, timeout: float | None = None) -> Comm:
        """Connects processes of one host. Collective.

        address: the same on all ranks, unique to this comm on the host (at most 80 bytes); a name, or a path prefix
        for socket files if it begins with "/". timeout: seconds to wait for the others (default 100).
        """
        config = _config(timeout)
        config.address = address.encode()
        pointer = c_void_p()
        _native.check(_native.lib.twCommCreateShm(byref(pointer), rank, nranks, byref(config)))
        return cls(pointer.value or 0)

    @property
    def pointer(self) -> int:
        """The C library's twComm_t."""
        if self._pointer is None:
            raise InvalidArgument("the comm is closed")
        return self._pointer

    def close(self) -> None:
        """Frees the comm; peers see this rank as gone."""
        if self._pointer is not None:
            _native.check(_native.lib.twCommDestroy(self._pointer))
            self._pointer = None

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except TokenwayError:
            if kind is None:  # else the exception under way is the one to tell
                raise

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, nranks={self.nranks})"


def _config(timeout: float | None) -> _native.CommConfig:
    config = _native.CommConfig()
    if timeout is not None:
        config.timeout_ms = milliseconds(timeout)
    return config


def local_comms(nranks: int, timeout: float | None = None) -> list[Comm]:
    """All ranks of a comm inside this process, to be driven by a thread each."""
    pointers = (c_void_p * max(nranks, 1))()
    config = _config(timeout)
    first = ctypes.cast(pointers, ctypes.POINTER(c_void_p))
    _native.check(_native.lib.twCommCreateLocal(first, nranks, byref(config)))
    return [Comm(pointer) for pointer in pointers if pointer is not None]


def connect(process_group: Any = None, *, timeout: float | None = None) -> Comm:
    """Connects this process with its peers on this host, however it was started. Collective.

    In this order: `process_group`, or the default one if torch.distributed is initialised; the package's own launcher
    (`tokenway launch`, `tokenway.run`); torchrun's environment; else one rank alone. May be called again, by all
    ranks in the same order, for further comms. timeout: seconds to wait for the others (default 100).
    """
    distributed = sys.modules.get("torch.distributed")
    if process_group is not None or (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    ):
        return _connect_torch(process_group, timeout)
    if RANK in os.environ:
        rank, nranks = _from_environment(RANK, NRANKS)
        return Comm.shm(rank, nranks, _unique(os.environ[ADDRESS]), timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _connect_torchrun(timeout)
    return Comm.shm(0, 1, _unique(f"alone-{os.getpid()}"), timeout)


_connected = 0


def _unique(*parts: str) -> str:
    """A short address from what ranks have in common, another one for each comm of a process."""
    global _connected
    _connected += 1
    return hashlib.sha256("/".join([*parts, str(_connected)]).encode()).hexdigest()[:32]


def _from_environment(*names: str) -> tuple[int, ...]:
    values = []
    for name in names:
        try:
            values.append(int(os.environ[name]))
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"environment variable {name} is {os.environ.get(name)!r}; it must be an integer"
            ) from None
    return tuple(values)


def _connect_torchrun(timeout: float | None) -> Comm:
    rank, nranks, local = _from_environment("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if local != nranks:
        raise Unsupported(
            f"WORLD_SIZE is {nranks} and LOCAL_WORLD_SIZE {local}: the CPU backend connects ranks of one host only"
        )
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return Comm.shm(rank, nranks, _unique("torchrun", *(os.environ.get(name, "") for name in names)), timeout)


def _host() -> str:
    """Names this boot of this host: what shared memory needs ranks to have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _connect_torch(process_group: Any, timeout: float | None) -> Comm:
    import torch.distributed as dist

    rank, nranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    mine = (os.uname().nodename, _host(), os.urandom(16).hex())
    all_ranks: list[Any] = [None] * nranks
    dist.all_gather_object(all_ranks, mine, group=process_group)
    apart = [r for r in range(nranks) if all_ranks[r][1] != all_ranks[0][1]]
    if apart:
        raise Unsupported(
            f"rank 0 runs on {all_ranks[0][0]}, rank {apart[0]} on {all_ranks[apart[0]][0]}: the CPU backend connects "
            "ranks of one host only"
        )
    return Comm.shm(rank, nranks, all_ranks[0][2], timeout)
