"""NumPy on the CPU, PyTorch elsewhere: what examples need of both, and the time on the clock of either."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

Array = np.ndarray
Tensor = Any  # a NumPy array, or a PyTorch tensor
# Where a rank computes is "cpu" (NumPy), "torch" (PyTorch on the CPU) or "cuda".


def module_of(where: str) -> ModuleType:
    """NumPy or PyTorch: many functions have one name, and understand NumPy's arguments, in both."""
    if where == "cpu":
        return np
    import torch

    return torch


def place(x: Array, where: str) -> Tensor:
    """An array where the rank computes; PyTorch reads bf16 from its float32."""
    if where == "cpu":
        return x
    if x.dtype == bfloat16:
        return to_bf16(place(x.astype(np.float32), where))
    return module_of(where).from_numpy(x).to("cpu" if where == "torch" else where)


def to_float32(x: Tensor) -> Tensor:
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.float()


def to_bf16(x: Tensor) -> Tensor:
    return x.astype(bfloat16) if isinstance(x, np.ndarray) else x.bfloat16()


def to_numpy(x: Tensor) -> Array:
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


def filled(shape: tuple[int, ...], value: float, where: str) -> Tensor:
    """float32 of one value."""
    if where == "cpu":
        return np.full(shape, value, np.float32)
    torch = module_of(where)
    return torch.full(shape, value, dtype=torch.float32, device="cpu" if where == "torch" else where)


class Stopwatch:
    """The seconds of calls, by name: of the host; with "cuda" of the stream, which calls need not wait for."""

    def __init__(self, where: str):
        self._cuda = module_of(where).cuda if where == "cuda" else None
        self._calls: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """What the call returns."""
        begin = self._now()
        result = call(*args, **more)
        self._calls.append((name, begin, self._now()))
        return result

    def wait(self) -> None:
        """Until the device has done what has been enqueued."""
        if self._cuda:
            self._cuda.synchronize()

    def take(self) -> dict[str, list[float]]:
        """The seconds of the calls since the last time, once all is done."""
        self.wait()
        seconds: dict[str, list[float]] = {}
        for name, begin, end in self._calls:
            seconds.setdefault(name, []).append(begin.elapsed_time(end) / 1e3 if self._cuda else end - begin)
        self._calls = []
        return seconds

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event
