"""Ranks that meet by a communicator of NCCL's which a program already has: what they tell each other goes through
device memory, by ncclAllGather.

The library is the one that made the communicator, so it is loaded already, and is found by its name. Nothing bounds
how long a collective of NCCL's waits for a rank that does not come.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

from tokenway import cuda
from tokenway.errors import InvalidArgument, SystemFailure, Unsupported

_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t
_UINT8 = 1  # of ncclDataType_t
_LOOK = 0.001  # seconds between two looks at a communicator that does not block
LIBRARY = "libnccl.so.2"


def load() -> Any:
    """NCCL, as the process has it. Raises Unsupported where there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Unsupported(f"nccl_comm is given, and {LIBRARY} cannot be loaded: {error}") from error


class Device:
    """Memory and the current stream of a CUDA device, by PyTorch."""

    def __init__(self, index: int):
        self._torch = torch = cuda.import_torch("nccl_comm")
        if not torch.cuda.is_available():
            raise Unsupported(f"nccl_comm is of device {index}; PyTorch {torch.__version__} has none here")
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.current_stream(self._device)
        self.stream: int = self._stream.cuda_stream

    def put(self, mine: bytes) -> Any:
        return self._torch.frombuffer(bytearray(mine), dtype=self._torch.uint8).to(self._device)

    def room(self, count: int) -> Any:
        return self._torch.empty(count, dtype=self._torch.uint8, device=self._device)

    def get(self, tensor: Any) -> bytes:
        """What the stream has brought."""
        self._stream.synchronize()
        return bytes(tensor.cpu().numpy())


class Communicator:
    """A communicator by its address, an ncclComm_t. rank, nranks: as NCCL says."""

    def __init__(self, address: Any):
        if isinstance(address, c_void_p):
            address = address.value
        if not isinstance(address, int) or isinstance(address, bool) or address == 0:
            raise InvalidArgument.of("nccl_comm", f"is {address!r}; it must be the address of an ncclComm_t")
        self._address, self._nccl = c_void_p(address), load()
        self.rank, self.nranks = self._ask("ncclCommUserRank"), self._ask("ncclCommCount")
        self.device = self._ask("ncclCommCuDevice")

    def allgather(self, mine: bytes) -> list[bytes]:
        """What every rank gives, in rank order; collective, on the device's current stream."""
        device = Device(self.device)
        sent, got = device.put(mine), device.room(self.nranks * len(mine))
        pointers = c_void_p(sent.data_ptr()), c_void_p(got.data_ptr())
        stream = c_void_p(device.stream)
        self._call("ncclAllGather", *pointers, c_size_t(len(mine)), c_int(_UINT8), self._address, stream)
        whole = device.get(got)
        return [whole[at : at + len(mine)] for at in range(0, len(whole), len(mine))]

    def _ask(self, name: str) -> int:
        value = c_int()
        self._call(name, self._address, byref(value))
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._nccl, name)(*arguments)
        while result == _IN_PROGRESS:  # a communicator that does not block, and has not begun yet
            state = c_int()
            time.sleep(_LOOK)
            result = self._nccl.ncclCommGetAsyncError(self._address, byref(state)) or state.value
        if result != _SUCCESS:
            raise SystemFailure(f"{name} of nccl_comm failed with ncclResult_t {result}")
