"""Captures and replays of the emulator, for tests on emulated devices alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tokenway as tw

# For emulated devices that reach each other: captures hold kernels alone, not what a carrier moves between others.
emulated_alone = pytest.mark.usefixtures("emulated_devices")


class Graph:
    """Launches of a rank that were captured."""

    def __init__(self, env: Any):
        self._lib = tw._native.lib
        self._lib.tokenway_emulated_end_capture.restype = ctypes.c_void_p
        self._stream = ctypes.c_void_p(env.backend.place(env.comm)[1])
        self._captured: ctypes.c_void_p | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """What is launched inside becomes the graph, and does not run."""
        self._lib.tokenway_emulated_capture()
        try:
            yield
        finally:
            self._captured = ctypes.c_void_p(self._lib.tokenway_emulated_end_capture())

    def replay(self) -> None:
        """Makes the launches, in stream order."""
        self._lib.tokenway_emulated_replay(self._captured, self._stream)
