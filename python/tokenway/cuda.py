"""Tensors, memory and streams of groups on CUDA devices. All of it is PyTorch's, imported by the first such group.

With TOKENWAY_NVTX=1 in the environment when the package is imported, the calls of groups on CUDA devices are NVTX
ranges: tokenway.dispatch, tokenway.combine, tokenway.complete. So are the collections of Python's garbage collector
from the first such group on: "python gc 2" is one of generation 2, which stops a process with many objects for
milliseconds.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import numpy as np

from tokenway import tensors
from tokenway.errors import InternalError, InvalidArgument, Unsupported

NVTX = "TOKENWAY_NVTX"
LOCAL_RANK = "LOCAL_RANK"


def import_torch(why: str) -> Any:
    """PyTorch, or Unsupported: `why` needs it."""
    try:
        import torch
    except ImportError as error:
        raise Unsupported(f"{why} needs PyTorch, which cannot be imported: {error}") from error
    return torch


def index_of(device: Any) -> int | None:
    """The number of a CUDA device from an int, "cuda:1" or a torch.device; None for "cuda", the current one."""
    if isinstance(device, (int, np.integer)) and not isinstance(device, bool):
        if 0 <= device < 2**31:
            return int(device)
    elif found := re.fullmatch(r"cuda(?::(\d+))?", str(device)):
        return None if found[1] is None else int(found[1])
    raise InvalidArgument.of(
        "device",
        f"is {device!r}; it must be the number of a CUDA device, 'cuda', 'cuda:<number>' or a torch.device of these",
    )


def current_device() -> int:
    """PyTorch's current device; -1, which is the thread's current one for the C library, where PyTorch has not been
    imported and so cannot have another."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else -1


def choose_local_device() -> int:
    """What "cuda" means to `connect`: the current device if another than the first has been chosen, else the one of
    LOCAL_RANK, modulo their number, which becomes the current one."""
    torch = import_torch("device='cuda'")
    count = torch.cuda.device_count()
    if count == 0:
        raise Unsupported(f"device is 'cuda', but PyTorch {torch.__version__} finds no CUDA device")
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    local = os.environ.get(LOCAL_RANK)
    if chosen or local is None:
        return chosen
    if not local.isdecimal():
        raise InvalidArgument(f"environment variable {LOCAL_RANK} is {local!r}; it must be an integer")
    torch.cuda.set_device(int(local) % count)
    return int(local) % count


class DeviceMemory:
    """Device memory of the C library, as `torch.as_tensor` takes it."""

    def __init__(self, pointer: int, count: int, keep: Any = None):
        self.keep = keep  # as long as the tensor, which holds this object
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class Cuda:
    """Where the tensors of a group are: on one CUDA device. Has what `tensors.Host` has for the CPU, and streams."""

    reusable = False  # blocks for handles: PyTorch's caching allocator reuses memory, in stream order
    learns_late = True  # of a peer's refusal: after the call has returned

    def __init__(self, index: int):
        self.index = index
        # Asked here, as the C library asks for each comm: the package may be imported before the variable is set, and
        # then the two would differ about who holds a lane.
        self.learns_late = os.environ.get("TOKENWAY_BLOCKING", "0") != "1"
        self.torch = torch = import_torch(f"a group on cuda:{index}")
        if not torch.cuda.is_available():
            raise Unsupported(f"a group on cuda:{index} takes CUDA tensors; PyTorch {torch.__version__} has none here")
        self.device = torch.device("cuda", index)
        if os.environ.get(NVTX) == "1" and mark_collection not in gc.callbacks:
            gc.callbacks.append(mark_collection)
        # The current stream of this device, a cudaStream_t.
        self.stream: Callable[[], int] = partial(_raw_stream_getter(torch), index)
        self._kind = torch.Tensor
        self._capturing, self._current = _raw_capture_state(torch)

    # ------------------------------------------------------------------------------------------------------- tensors

    def describe(self, x: Any) -> tuple[int, bytes]:
        """As `tensors.describe`, of a tensor on this device."""
        # get_device is -1 on the host, and beside CUDA no other accelerator has numbers: faster than comparing devices.
        if isinstance(x, self._kind) and x.get_device() == self.index:
            return tensors.describe_torch(x)
        return tensors.NOTHING

    def unlike(self, x: Any) -> str | None:
        """What x is, if it is no tensor on this device, whatever its dtype and shape. Raises nothing."""
        return tensors.legible(self._unlike, x)

    def _unlike(self, x: Any) -> str | None:
        if isinstance(x, self._kind):
            if x.get_device() != self.index:
                return f"a {x.device} tensor; this group is on {self.device}"
            return tensors.unlike_torch(x)
        what = "a NumPy array" if type(x).__module__ == "numpy" else f"of type {type(x).__name__}"
        return f"{what}; it must be a PyTorch tensor on {self.device}"

    unwritable = staticmethod(tensors.unwritable)

    def problem_of_output(self, name: str, x: Any) -> InvalidArgument | None:
        """Why nothing can be written to x, as far as a descriptor does not tell it."""
        if type(x) is self._kind and x.get_device() == self.index and tensors.is_plain(x):
            return None
        what = self.unlike(x)
        return (
            self.unwritable(name, x)
            if what is None
            else tensors.refusal(name, what, tensors.obstacle(self.describe, x))
        )

    def empty(self, shape: tuple[int, ...], name: str, like: Any) -> Any:
        """A new tensor."""
        return self.torch.empty(shape, dtype=getattr(self.torch, name), device=self.device)

    # -------------------------------------------------------------------------------------------------------- memory

    def new_block(self, count: int) -> Any:
        """uint8[count], aligned as all that PyTorch allocates."""
        return self.torch.empty(count, dtype=self.torch.uint8, device=self.device)

    def block_of(self, memory: Any) -> Any:
        """A caller's block of bytes as uint8[n], without a copy; InvalidArgument for what is none."""
        what = self.unlike(memory)
        if what is None and (problem := self.unwritable("memory", memory)) is not None:
            raise problem
        if what is None:
            if memory.dtype is not self.torch.uint8:
                what = f"of dtype {tensors.dtype_of(memory)}"
            elif not memory.is_contiguous():
                what = "not contiguous"
            else:
                return memory.detach().view(-1)
        raise InvalidArgument.of("memory", f"is {what}; it must be a contiguous tensor of uint8")

    @staticmethod
    def address(block: Any) -> int:
        """Of a block for a handle."""
        return block.data_ptr()

    @staticmethod
    def shared(block: Any) -> Any:
        """A block whose views have one version: they are of PyTorch."""
        return block

    def block_view(self, block: Any, begin: int, shape: tuple[int, ...], name: str, torch: bool) -> Any:
        """A view of a part of a block, which it keeps alive."""
        dtype = getattr(self.torch, name)
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        return block[begin : begin + count].view(dtype).view(shape)

    def window_view(self, pointer: int, shape: tuple[int, ...], name: str, torch: bool, keep: Any) -> Any:
        """A view of memory that the C library owns: the allocator of PyTorch knows nothing of it. keep: what keeps that
        memory; lives as long as the view, and views of it."""
        dtype = getattr(self.torch, name)
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        with tensors.to_keep(self.torch):
            if count == 0 or pointer == 0:
                return self.torch.empty(shape, dtype=dtype, device=self.device)
            raw = self.torch.as_tensor(DeviceMemory(pointer, count, keep), device=self.device)
            if raw.data_ptr() != pointer:
                raise InternalError("PyTorch has copied window memory that it was to view")
            return raw.view(dtype).view(shape)

    # ------------------------------------------------------------------------------------------------------- streams

    def current_stream(self) -> Any:
        """The same as PyTorch's object: for what is not on the way of every token."""
        return self.torch.cuda.current_stream(self.device)

    def record(self, things: Iterable[Any]) -> None:
        """Tells the allocator that the current stream uses tensors of another one's. Window views and what is no
        tensor are nothing to it."""
        stream = self.current_stream()
        for x in things:
            if isinstance(x, self._kind) and x.get_device() == self.index:
                x.record_stream(stream)

    def follow(self, sent: Any, things: Iterable[Any]) -> None:
        """Before a call is completed on the current stream that stream `sent` has begun: orders the one after the
        other, and keeps the memory of the call's tensors."""
        if sent.cuda_stream != self.stream():
            self.current_stream().wait_stream(sent)
            self.record(things)

    def capturing(self) -> bool:
        """Whether this device's current stream is being captured into a graph."""
        if self._current() == self.index:  # nearly always: making it so takes longer than the question
            return bool(self._capturing())
        with self.torch.cuda.device(self.index):
            return bool(self._capturing())


def _raw_stream_getter(torch: Any) -> Callable[[int], int]:
    """How to ask for a device's current stream: in 0.1 us where PyTorch has what its own compiler uses for that, else
    in over 1 us."""
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return fast or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def _raw_capture_state(torch: Any) -> tuple[Callable[[], bool], Callable[[], int]]:
    """How to ask whether the current device's current stream is captured, and which device that is: without PyTorch's
    wrappers, which first see to it that there is a CUDA context, as there is one here."""
    cuda, raw = torch.cuda, torch._C
    capturing = getattr(raw, "_cuda_isCurrentStreamCapturing", None)
    return capturing or cuda.is_current_stream_capturing, getattr(raw, "_cuda_getDevice", None) or cuda.current_device


def offsets(counts: Any) -> Any:
    """[n + 1] running sums of counts [n] int32, from 0, on their device: enqueued, and of fixed shape."""
    torch = sys.modules["torch"]
    sums = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=sums[1:])
    return sums


def ranged(name: str) -> Callable[[Any], Any]:
    """A method as an NVTX range, where the environment asks for it and its object has a `device`: the decorator costs
    nothing elsewhere."""
    if os.environ.get(NVTX) != "1":
        return lambda method: method

    def decorate(method: Any) -> Any:
        @wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.device is None:
                return method(group, *args, **kwargs)
            nvtx = sys.modules["torch"].cuda.nvtx
            nvtx.range_push(name)
            try:
                return method(group, *args, **kwargs)
            finally:
                nvtx.range_pop()

        return call

    return decorate


def mark_collection(phase: str, about: dict[str, int]) -> None:
    """A collection of Python's garbage collector as an NVTX range of its thread; for `gc.callbacks`."""
    nvtx = sys.modules["torch"].cuda.nvtx
    if phase == "start":
        nvtx.range_push(f"python gc {about['generation']}")
    else:
        nvtx.range_pop()
