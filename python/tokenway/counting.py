"""What `Group` has of high throughput alone: the exchange of counts, and leases for rows that outlive their step."""

from __future__ import annotations

import logging
from contextlib import suppress
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenway import _header, _native, arguments
from tokenway.errors import InvalidUsage, OutOfMemory, PeerRefused, RecvOverflow
from tokenway.handle import Handle, Pending, Tensor

if TYPE_CHECKING:
    from tokenway.settings import Payload

_log = logging.getLogger("tokenway")
_REFUSED = -1  # for a flag, which is 0 or 1: the C library refuses it, and tells the peers


class Lease:
    """A part of this rank's window that is the holder's. It goes back with the last tensor that shows it, which may be
    whenever garbage is collected: no other rank has to know (S5)."""

    __slots__ = ("__weakref__", "bytes", "pointer")

    def __init__(self, group: int, count: int):
        """Raises OutOfMemory where there is no gap of `count` bytes."""
        self.pointer = 0
        memory = c_void_p()
        _native.check(_native.lib.twWindowAlloc(group, count, byref(memory)))
        self.pointer: int = memory.value or 0
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


class Counting:
    """The methods that `Group` has from here."""

    pointer: int
    device: int | None
    exact: bool
    max_recv_rows: int  # of a step
    _pointer: int | None
    _place: Any
    _torch_views: Any  # versions.Views
    _payload_specs: dict[str, Payload]
    _sizes_outputs: bool
    _copies: int

    def exchange_counts(
        self, handle: Handle, *, lane: int | None = None, send_only: bool = False, lease: bool | str = False
    ) -> Any:
        """In high throughput: ranks tell each other how many rows they will send, before a handle's first dispatch and
        after each `Handle.update`. Returns the handle, whose `recv_rows` is known then, or `Pending` of it. A step of
        all ranks. Errors: RecvOverflow on all ranks alike, InvalidUsage, PeerRefused, GroupFinished. After a send_only
        call that a rank refused the handle holds the lane, there and at the peers, until its counts are exchanged or
        it is released.

        In a group with `lease_bytes`, counts that are known may be exchanged again while the handle holds no lane, for
        another dispatch by the same routing. lease: the rows of the next dispatch go straight to memory of the window
        that its result in the layout "flat" owns, as long as a tensor shows it, instead of memory that the lane's next
        step overwrites; "zeros": where outputs have a fixed size, rows that none comes to are 0. The peers learn the
        place with the counts. Where there is no room for all rows that may come, that dispatch copies them to new
        tensors: `Received.leased` and `leases.copies` say so, and, the first time, the log. So `lease` need not be the
        same on all ranks. On a CUDA device memory whose tensors are gone is leased again in stream order: other streams
        that use them must be waited for before."""
        self._free_finished()  # type: ignore[attr-defined]
        given = _header.CountsInput()
        given.lane = arguments.lane_number(lane)
        landing = None
        with arguments.Preparation() as prepared:
            if self.device is not None:
                given.stream = self._stream_of(handle)  # type: ignore[attr-defined]
            given.send_only = 1 if send_only else 0
            landing = self._take_leases(zeros=bool(lease == "zeros")) if lease else None
            for q, taken in enumerate((landing or {}).values()):
                given.landing[q] = None if taken is None else taken.pointer
        if prepared.problem is not None:
            given.send_only = _REFUSED
        result = _native.lib.twExchangeCounts(self.pointer, arguments.pointer_of(handle), byref(given))
        if result:
            error = self._error(result, prepared.problem, handle=handle)  # type: ignore[attr-defined]
            if isinstance(error, (PeerRefused, RecvOverflow)):
                handle.leased = False  # what an earlier send_only call may have left
            self._torch_views.after(None, error)
            raise error
        self._torch_views.after()
        handle._landing = landing
        self._tell_interrupt()  # type: ignore[attr-defined]
        if send_only:
            return Pending(handle, handle, (handle,), counting=True)
        handle.leased = False
        return handle

    @property
    def leases(self) -> LeaseInfo:
        """What is leased of the window; all 0 in a group without `lease_bytes`."""
        info = _header.LeaseInfo()
        _native.check(_native.lib.twGroupLeaseInfo(self.pointer, byref(info)))
        return LeaseInfo(info.bytes, info.used, info.largest, info.leases, self._copies)

    def _take_leases(self, zeros: bool) -> dict[str, Lease | None]:
        """Of each payload, for as many rows as may come; None where there is no room."""
        taken: dict[str, Lease | None] = {}
        for name, payload in self._payload_specs.items():
            taken[name] = None
            with suppress(OutOfMemory, InvalidUsage):  # the latter without lease_bytes
                count = self.max_recv_rows * payload.row_bytes()
                taken[name] = lease = Lease(self.pointer, count)
                if zeros and self.device is not None and not self._sizes_outputs:
                    self._place.window_view(lease.pointer, (count,), "uint8", True, lease).zero_()
        return taken

    def _copy_out(self, handle: Handle, given: dict[str, Tensor], like: Tensor) -> None:
        """New tensors for what a dispatch in "flat" has no lease for."""
        rows = handle.rows_of("flat")
        for name, lease in (handle._landing or {}).items():
            if lease is not None or given.get(name) is not None or rows is None:
                continue
            payload = self._payload_specs[name]
            given[name] = self._place.empty((rows, payload.elements), payload.dtype, like)
            if self.device is not None and not self._sizes_outputs:
                given[name].zero_()  # as a lease would be, if it was asked for
            if self._copies == 0:
                now = self.leases
                _log.warning(
                    "%r: no lease for %s, %d rows of %d bytes: of lease_bytes, %d, the largest gap is %d. They are "
                    "copied out of the window; more lease_bytes, or less max_recv_tokens, avoid that",
                    *(self, name, self.max_recv_rows, payload.row_bytes(), now.bytes, now.largest),
                )
            self._copies += 1

    def size_outputs(self, handle: Handle) -> None:
        """In high throughput on a CUDA device: has the host know how much comes, unless outputs have a fixed size
        (`max_recv_tokens`) or a graph is captured. A dispatch does it first, so who allocates its outputs asks too."""
        if self._sizes_outputs and isinstance(handle, Handle) and not self._place.capturing():
            handle.learn_rows()

    def refuse_routing(self) -> None:
        """As refuse_dispatch, where peers are in the first step of a routing: in high throughput the exchange of
        counts."""
        if not self.exact:
            self.refuse_dispatch()  # type: ignore[attr-defined]
        elif self._pointer is not None:
            given = _header.CountsInput()
            given.lane, given.stream = -1, self._place.stream()
            _native.lib.twExchangeCounts(self._pointer, None, byref(given))
            self._torch_views.after()
