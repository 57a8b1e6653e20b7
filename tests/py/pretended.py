"""A CUDA device that is none, for what Python decides about devices: its tensors are the CPU's."""

from __future__ import annotations

from typing import Any

from tokenway import cuda, tensors

# Streams are told apart by their numbers, and all are NULL for C, which sees the lower 64 bits: the CPU's only stream.
FIRST, SECOND, THIRD = 0, 1 << 64, 2 << 64


class Stream:
    """Like torch.cuda.Stream."""

    def __init__(self, number: int, waits: list[tuple[int, int]]):
        self.cuda_stream = number
        self._waits = waits

    def wait_stream(self, other: Stream) -> None:
        self._waits.append((self.cuda_stream, other.cuda_stream))


class Pretended(cuda.Cuda):
    """A device whose number is that which CPU tensors give for theirs."""

    def __init__(self, torch: Any, index: int = -1):
        self.index, self.torch = index, torch
        self.device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
        self._kind, self._strided = torch.Tensor, torch.strided
        self.now = FIRST
        self.stream = lambda: self.now
        self.waits: list[tuple[int, int]] = []
        self.recorded: list[tuple[int, int]] = []  # (address, stream)
        self.captured = False

    def current_stream(self) -> Any:
        return Stream(self.now, self.waits)

    def record(self, things: Any) -> None:
        self.recorded += [(x.data_ptr(), self.now) for x in things if isinstance(x, self._kind)]

    def capturing(self) -> bool:
        return self.captured

    def window_view(self, pointer: int, shape: tuple[int, ...], name: str, torch: bool, keep: Any) -> Any:
        return tensors.Host.window_view(pointer, shape, name, True, keep)
