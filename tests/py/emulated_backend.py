"""The harness's backend on emulated GPUs: the CUDA backend with kernels that run on the CPU (tests/emulator), tensors
PyTorch's of the CPU. The library must be the emulator's: TOKENWAY_LIBRARY.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

from device_backend import COMM_TIMEOUT, Cuda
from portable_backend import connect_threads, file_allgather
from pretended import Pretended

import tokenway as tw
from tokenway import _native, cuda, portable, staged
from tokenway.balance import copies, messages

# A call's kernel has ended when the call returns: nothing orders the CPU's allocator by streams.
ENVIRONMENT = {"CUDA_LAUNCH_BLOCKING": "1", "TOKENWAY_BLOCKING": "1"}
DEVICES = 16  # one for each rank that a world of threads can have


def prepare() -> None:
    """Sets the environment of this process and its children, before the library is loaded."""
    os.environ.update(ENVIRONMENT)


def missing() -> str | None:
    """What the tests need and the library has not, as a sentence; None if it has it all."""
    if not hasattr(_native.lib, "cudaStreamCreateWithFlags"):
        return f"{_native.lib._name} has no emulated devices; build it with -DTOKENWAY_EMULATOR=ON"
    return None


class Place(Pretended):
    """Where the tensors of a group are: on the CPU, with a stream for each device."""

    learns_late = False

    def __init__(self, device: int):
        import torch

        super().__init__(torch)
        self.now = stream_of(device)


class Emulated(Cuda):
    """Ranks on emulated devices, one for each."""

    name = "emulated"

    @staticmethod
    @functools.cache
    def device_count() -> int:
        return DEVICES

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> Any:
        cuda.Cuda, copies.DeviceCopies = Place, copies.HostCopies  # there are no streams of PyTorch's
        return super().comm(rank, nranks, address)

    @classmethod
    def local_comms(cls, nranks: int) -> list[Any]:
        cuda.Cuda, copies.DeviceCopies = Place, copies.HostCopies  # there are no streams of PyTorch's
        return super().local_comms(nranks)

    @staticmethod
    def place(comm: Any) -> tuple[Any, Any]:
        return None, stream_of(comm.device)

    @staticmethod
    @contextlib.contextmanager
    def context(device: Any, stream: Any) -> Iterator[None]:
        yield

    @staticmethod
    def wait() -> None:
        """Calls have waited."""

    @staticmethod
    def arrive(comm: tw.Comm) -> bool:
        before = ctypes.c_int()
        _native.lib.cudaGetDevice(ctypes.byref(before))
        _native.lib.cudaSetDevice(comm.device)
        _native.lib.cudaDeviceSynchronize()
        _native.lib.cudaSetDevice(before)
        return True

    @classmethod
    def empty(cls, nbytes: int) -> Any:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)


class Alone(Emulated):
    """Ranks that are processes, each of which sees its own device alone, as with CUDA_VISIBLE_DEVICES."""

    name = "emulated-alone"

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> Any:
        cuda.Cuda, copies.DeviceCopies = Place, copies.HostCopies  # there are no streams of PyTorch's
        os.environ["TOKENWAY_EMULATOR_VISIBLE"] = str(rank)
        return tw.Comm.cuda(rank, nranks, address, device=0, timeout=COMM_TIMEOUT)


class Hosts(Emulated):
    """Ranks that are processes which NVLink joins wherever they are, as the platform grants them fabric handles: they
    meet by an allgather. tests/netns has them on two hosts."""

    name = "emulated-hosts"
    death_seen = 4.0  # a peer's end is told by its connection, and passed on by a thread beside kernels that wait

    @classmethod
    def most_ranks(cls, kind: str) -> int:
        return 8

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> Any:
        cuda.Cuda, copies.DeviceCopies = Place, copies.HostCopies  # there are no streams of PyTorch's
        os.environ.update(TOKENWAY_EMULATOR_FABRIC="granted", TOKENWAY_EMULATOR_CLIQUE="7")
        allgather = file_allgather(rank, nranks, address)
        return tw.Comm.cuda(rank, nranks, device=rank, timeout=COMM_TIMEOUT, allgather=allgather)


class OnHost:
    """As staged.OnCuda, of emulated devices, whose memory gloo reaches. Their kernels have ended when a call returns,
    so collectives begin behind them; the host waits where a stream would."""

    coalesces = False
    waits = True

    def __init__(self, index: int):
        import torch

        self.torch, self.device = torch, torch.device("cpu")

    def tensor(self, address: int, count: int) -> Any:
        memory = (ctypes.c_char * count).from_address(address)
        return self.torch.frombuffer(memory, dtype=self.torch.uint8)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        yield

    def settle(self) -> None:
        """Calls have waited."""


def exportable(tensor: Any) -> bool:
    """Whether other processes could map a tensor's memory."""
    return bool(_native.lib.tokenway_emulated_exportable(ctypes.c_void_p(tensor.data_ptr())))


class Move:
    """An all-to-all of gloo's that begins when all ranks are known to move blocks of one size, and else never ends, as
    NCCL's would not: gloo ends the process."""

    def __init__(self, group: Any, to: Any, source: Any, options: Any):
        self._group, self._arguments = group, (to, source, [], [], options)
        self._over, self._problem = threading.Event(), ""

    def run(self) -> None:
        """By the group's thread."""
        import torch

        to, source, _, _, options = self._arguments
        given = torch.full((self._group.size(),), source.numel(), dtype=torch.int64)
        sizes = torch.zeros_like(given)
        try:
            self._group.alltoall_base(sizes, given, [], [], options).wait(staged.FOREVER)
            if len({*sizes.tolist()}) > 1:
                return
            self._group.alltoall_base(to, source, [], [], options).wait(staged.FOREVER)
        except RuntimeError as error:
            self._problem = str(error)
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: Any) -> None:
        if not self._over.wait(timeout.total_seconds()):
            raise RuntimeError("not in time")
        if self._problem:
            raise RuntimeError(self._problem)


class Group:
    """A process group of such moves, which a thread makes one after the other.

    In a graph, NCCL writes to memory that peers can map without a copy, but each end decides that for itself: blocks
    between memory that is and memory that is not come to nothing, and the next move on the connection never ends. Here
    no move may be like that, as each could be captured.
    """

    def __init__(self, group: Any):
        self._group = group
        self._moves: queue.SimpleQueue[Move] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(self._moves,), daemon=True).start()

    @staticmethod
    def _serve(moves: queue.SimpleQueue[Move]) -> None:
        while True:
            moves.get().run()

    def alltoall_base(self, to: Any, source: Any, _: Any, __: Any, options: Any) -> Move:
        if exportable(to) != exportable(source):
            raise RuntimeError("blocks go between memory that peers could map and memory that they could not")
        move = Move(self._group, to, source, options)
        self._moves.put(move)
        return move


def connect_group(meeting: Any) -> Group:
    """As staged.connect_nccl."""
    return Group(portable.connect_gloo(meeting))


class Staged(Emulated):
    """Ranks on emulated devices that do not reach each other's memory: groups exchange over gloo."""

    name = "torch-emulated"
    knows_calls = False
    parts = False
    lacks = frozenset({"leases", "memory in common"})  # docs/BACKENDS.md
    death_seen = 6.0  # kernels that wait share the CPU with the threads that move blocks and watch

    @classmethod
    def most_ranks(cls, kind: str) -> int:
        """Connections grow with the square of it, and each group has its own."""
        return 8

    @classmethod
    def _comm(cls, rank: int, nranks: int, allgather: Any) -> Any:
        cuda.Cuda, staged.on_device, staged.connect = Place, OnHost, connect_group
        copies.DeviceCopies, messages.DeviceMemory = copies.HostCopies, messages.HostMemory
        return tw.Comm.portable(rank, nranks, allgather, device=rank, timeout=COMM_TIMEOUT)

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> Any:
        return cls._comm(rank, nranks, file_allgather(rank, nranks, address))

    @classmethod
    def local_comms(cls, nranks: int) -> list[Any]:
        return connect_threads(nranks, lambda rank, allgather: cls._comm(rank, nranks, allgather))


@functools.cache
def stream_of(device: int) -> int:
    """A stream of a device, always the same one."""
    library, made = _native.lib, ctypes.c_void_p()
    library.cudaSetDevice(device)
    library.cudaStreamCreateWithFlags(ctypes.byref(made), 1)
    return made.value or 0
