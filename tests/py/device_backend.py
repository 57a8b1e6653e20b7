"""The harness's backend on GPUs: ranks on CUDA devices, tensors PyTorch's.

Ranks that share a device wait for each other on it, so each has a non-blocking stream of its own, and
nothing here synchronises more than the stream of one rank. What CUDA reads from the environment must
be there before the first CUDA call: `prepare`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

import tokenway as tw
from tokenway import tensors

COMM_TIMEOUT = 60.0
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
# So many processes may be ranks where there are fewer devices. They take turns there: the driver gives each process a
# slice of time, whatever its kernels wait for. That tells what is right, and nothing of how long anything takes.
PROCESSES = "TOKENWAY_TEST_PROCESSES"
# The devices that each worker of pytest-xdist sees, by turns: "0,1;2,3". CUDA_VISIBLE_DEVICES says it to CUDA.
SHARES = "TOKENWAY_TEST_SHARES"
BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def prepare(blocking: bool) -> None:
    """Sets the environment of this process and its children. `blocking`: calls return their own errors."""
    worker, shares = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get(SHARES)
    if worker and shares:
        of_each = shares.split(";")
        os.environ["CUDA_VISIBLE_DEVICES"] = of_each[int(worker.removeprefix("gw")) % len(of_each)]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["TOKENWAY_BLOCKING"] = "1" if blocking else "0"


def missing() -> str | None:
    """What GPU tests need and this machine has not, as a sentence; None if it has it all."""
    try:
        import torch
    except ImportError:
        return "PyTorch is missing"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    return None


class Cuda:
    """Ranks on CUDA devices, by turns."""

    name = "nvlink"
    checks_ids_on_host = False  # bad ids act as -1, and the record tells of them
    copies_routing = False  # ids and weights are read by a handle's first dispatch
    death_seen = 2.0  # seconds until a dead peer is known of
    knows_calls = True  # peers of a refused call need not know what it would have moved
    parts = True  # combines may take parts
    lacks: frozenset[str] = frozenset()  # what tests say they need, by the mark `needs`
    large = 2048  # elements of rows that kernels move as large ones

    @staticmethod
    @functools.cache
    def device_count() -> int:
        import torch

        return torch.cuda.device_count()

    @classmethod
    def most_ranks(cls, kind: str) -> int:
        """Ranks that a world of this kind can have: a process has a device of its own, or takes turns."""
        return max(cls.device_count(), int(os.environ.get(PROCESSES, "0"))) if kind == "processes" else 16

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> tw.Comm:
        return tw.Comm.cuda(rank, nranks, address, device=rank % cls.device_count(), timeout=COMM_TIMEOUT)

    @classmethod
    def local_comms(cls, nranks: int) -> list[tw.Comm]:
        devices = [rank % cls.device_count() for rank in range(nranks)]
        return tw.local_comms(nranks, devices=devices, timeout=COMM_TIMEOUT)

    @staticmethod
    def place(comm: tw.Comm) -> tuple[Any, Any]:
        """(torch.device, stream) of a rank."""
        import torch

        return torch.device("cuda", comm.device), stream_of(comm.device, comm.rank)

    @staticmethod
    @contextlib.contextmanager
    def context(device: Any, stream: Any) -> Iterator[None]:
        """Makes the calling thread work on a rank's device and stream: both are a thread's own."""
        import torch

        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            yield

    # ---- tensors ---------------------------------------------------------------------------------

    @classmethod
    def empty(cls, nbytes: int) -> Any:
        """uint8[nbytes] on the thread's device."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    @classmethod
    def tensor(cls, array: np.ndarray) -> Any:
        """A CUDA tensor of the same values and strides; a view also lies as far from a multiple of 64 bytes. What
        PyTorch has no tensors for (objects, backward strides) stays what it is, to be refused."""
        import torch

        dtype = getattr(torch, array.dtype.name, None)
        size = array.itemsize
        fits = all(s >= 0 and s % size == 0 for s in array.strides) if size else False
        if not isinstance(dtype, torch.dtype) or not array.dtype.isnative or not fits:
            return array
        strides = [s // size for s in array.strides]
        span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) if array.size else 0
        bits = array.view(f"u{size}")
        flat = np.array(np.lib.stride_tricks.as_strided(bits, (span,), (size,))).view(np.uint8)
        block = cls.empty(flat.nbytes + 64)
        address = 0 if array.base is None else array.__array_interface__["data"][0]
        begin = (address - block.data_ptr()) % 64
        place = block[begin : begin + flat.nbytes]
        place.copy_(torch.from_numpy(flat))
        return place.view(dtype).as_strided(array.shape, strides)

    @staticmethod
    def wait() -> None:
        """Until the work of the thread's stream is done."""
        import torch

        torch.cuda.current_stream().synchronize()

    @classmethod
    def arrive(cls, comm: tw.Comm) -> bool:
        """Until all that a rank's device was given is done, on whatever stream. False where nobody can wait for that,
        as other ranks' kernels on the device wait for this rank."""
        import torch

        if cls.device_count() < comm.nranks:
            return False
        torch.cuda.synchronize(comm.device)
        return True

    @classmethod
    def array(cls, tensor: Any) -> np.ndarray:
        """A copy as a NumPy array; waits for the thread's stream, and only then copies: a copy that is queued behind a
        call which waits for another rank holds up the copies of all ranks on that device."""
        import torch

        cls.wait()
        assert isinstance(tensor, torch.Tensor), f"{type(tensor)} came back, not a PyTorch tensor"
        name = str(tensor.dtype).removeprefix("torch.")
        bits = tensor.detach().view(getattr(torch, BITS[tensor.itemsize])).cpu().numpy()
        return np.array(bits, order="C").view(tensors.numpy_dtype(name))


class OwnDevice(Cuda):
    """Ranks that are processes, each of which sees its own device alone; their processes have called no CUDA before."""

    name = "nvlink-alone"

    @classmethod
    def comm(cls, rank: int, nranks: int, address: str) -> tw.Comm:
        named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        os.environ["CUDA_VISIBLE_DEVICES"] = named[rank] if named else str(rank)
        return tw.Comm.cuda(rank, nranks, address, device=0, timeout=COMM_TIMEOUT)


# ---- streams -------------------------------------------------------------------------------------

_streams: dict[Any, Any] = {}


def stream_of(device: int, rank: int, name: str = "") -> Any:
    """The stream that a rank works on, always the same one; `name`: a further one of that rank."""
    key = device, rank, name
    if key not in _streams:
        _streams[key] = new_stream(device)
        fill_cache(device, _streams[key])
    return _streams[key]


def new_stream(device: int) -> Any:
    """A non-blocking stream. Not one of torch.cuda.Stream's: there are 32, handed out by turns, and two ranks on one
    stream wait for each other for ever."""
    import torch

    with torch.cuda.device(device):
        torch.zeros(1, device="cuda")  # the device's context is there, and this thread's
        made = ctypes.c_void_p()
        non_blocking = 1
        code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(made), non_blocking)
        if code:
            raise RuntimeError(f"cuStreamCreate on device {device} failed with {code}")
        return torch.cuda.ExternalStream(made.value, device=device)


def fill_cache(device: int, stream: Any) -> None:
    """Lets PyTorch's allocator take now what a stream's tests need: asking the driver for more while one rank's kernel
    waits for another's may wait for that kernel."""
    import torch

    with torch.cuda.device(device), torch.cuda.stream(stream):
        blocks = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
        blocks.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
        stream.synchronize()
