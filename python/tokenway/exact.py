"""What groups of high throughput have of their own: the exchange of counts before a dispatch."""

from __future__ import annotations

from ctypes import byref
from typing import Any

from tokenway import _native, arguments
from tokenway.errors import PeerRefused, RecvOverflow
from tokenway.handle import Handle, Pending


class Exact:
    """Their calls, of a group."""

    # Of the group.
    pointer: int
    device: int | None
    _place: Any
    _sizes_outputs: bool
    _free_finished: Any
    _stream_of: Any
    _error: Any

    def exchange_counts(self, handle: Handle, *, lane: int | None = None, send_only: bool = False) -> Any:
        """In high throughput: ranks tell each other how many rows they will send, before a handle's first dispatch and
        after each `Handle.update`. Returns the handle, whose `recv_rows` is known then, or `Pending` of it. A step of
        all ranks. Errors: RecvOverflow on all ranks alike, InvalidUsage, PeerRefused, GroupFinished. After a send_only
        call that a rank refused the handle holds the lane, there and at the peers, until its counts are exchanged or
        it is released."""
        self._free_finished()
        given = _native.CountsInput()
        given.lane = -1 if lane is None else arguments.int32(lane) if lane != -1 else -2
        given.send_only = 1 if send_only else 0
        if self.device is not None:
            given.stream = self._stream_of(handle)
        result = _native.lib.twExchangeCounts(self.pointer, arguments.pointer_of(handle), byref(given))
        if result:
            error = self._error(result, handle=handle)
            if isinstance(error, (PeerRefused, RecvOverflow)):
                handle.leased = False  # what an earlier send_only call may have left
            raise error
        if send_only:
            return Pending(handle, handle, (handle,), counting=True)
        handle.leased = False
        return handle

    def size_outputs(self, handle: Handle) -> None:
        """In high throughput on a CUDA device: has the host know how much comes, unless outputs have a fixed size
        (`max_recv_tokens`) or a graph is captured. A dispatch does it first, so who allocates its outputs asks too."""
        if self._sizes_outputs and isinstance(handle, Handle) and not self._place.capturing():
            handle.learn_rows()
