"""Memory for handles, and handles of the C library that nobody holds any more."""

from __future__ import annotations

from functools import partial
from typing import Any

from tokenway import _native, tensors
from tokenway.errors import InUse, InvalidArgument
from tokenway.spare import Spare


class Blocks:
    """Those of one group. place: tensors.Host or cuda.Cuda. handle_bytes: of memory for one handle's arrays."""

    def __init__(self, place: Any, handle_bytes: int):
        self._place = place
        self.handle_bytes = handle_bytes
        self.spare = Spare(partial(place.new_block, handle_bytes))
        # (the C library's handle, its block, whether the block may serve another one). Whichever thread drops a handle
        # appends here, and the group's own thread frees it at its next call.
        self.finished: list[tuple[int, Any, bool]] = []
        self.leased: list[tuple[int, Any, bool]] = []  # with a lane: kept until the group is closed

    def grow(self, handle_bytes: int) -> None:
        """Handles that are made from now on are larger; blocks that there are no longer fit them."""
        if handle_bytes != self.handle_bytes:
            self.handle_bytes = handle_bytes
            self.spare = Spare(partial(self._place.new_block, handle_bytes))

    def take(self, memory: Any) -> tuple[Any, bool]:
        """(a block for a handle, whether it may serve another one later). memory: the caller's; None: one of ours."""
        if memory is None:
            return self.spare.take(), self._place.reusable
        block = self._place.block_of(memory)
        if block.nbytes < self.handle_bytes:
            raise InvalidArgument.of("memory", f"has {block.nbytes} bytes; it must have {self.handle_bytes}")
        return block, False

    def free(self) -> None:
        """Destroys the finished handles. Raises InUse, and keeps them, while another thread's call is under way."""
        while self.finished:
            try:
                pointer, block, reusable = self.finished.pop()
            except IndexError:  # another thread was faster
                return
            try:
                _native.check(_native.lib.twHandleDestroy(pointer))
            except InUse:
                self.finished.append((pointer, block, reusable))
                raise
            # A new block costs page faults, more than the rest of a route. A block that the caller still views is his.
            if reusable and block.nbytes >= self.handle_bytes and not tensors.is_viewed(block):
                self.spare.append(block)

    def clear(self) -> None:
        """After the group is closed, which has destroyed its handles."""
        for kept in (self.finished, self.leased, self.spare):
            kept.clear()
