"""Leases: parts of this rank's window that belong to tensors, for rows that outlive their step."""

from __future__ import annotations

from ctypes import byref, c_void_p
from dataclasses import dataclass

from tokenway import _native


class Lease:
    """A part of this rank's window that is the holder's. It goes back with the last tensor that shows it, which may be
    whenever garbage is collected: no other rank has to know (S5)."""

    __slots__ = ("__weakref__", "bytes", "pointer")

    def __init__(self, group: int, count: int):
        """Raises OutOfMemory where there is no gap of `count` bytes."""
        self.pointer: int = 0
        memory = c_void_p()
        _native.check(_native.lib.twWindowAlloc(group, count, byref(memory)))
        self.pointer = memory.value or 0
        self.bytes = count

    def trim(self, count: int) -> None:
        """Gives back what lies beyond `count` bytes, at least one of which stays."""
        if count < self.bytes:
            _native.check(_native.lib.twWindowTrim(self.pointer, max(1, count)))
            self.bytes = count

    def __del__(self) -> None:
        if self.pointer:
            _native.lib.twWindowFree(self.pointer)


@dataclass(frozen=True)
class LeaseInfo:
    """The leases of a rank, in bytes. `largest`: that could be leased now. `copies`: outputs that were copied out of
    the window instead, for want of a lease."""

    bytes: int
    used: int
    largest: int
    leases: int
    copies: int
