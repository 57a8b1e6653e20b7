"""The exchange of counts, which high throughput alone has, and the leases that it announces."""

from __future__ import annotations

import logging
from contextlib import suppress
from ctypes import byref
from typing import Any

from tokenway import _header, _native, arguments, callbacks
from tokenway.blocks import Blocks
from tokenway.errors import BoundMismatch, InvalidUsage, OutOfMemory, PeerRefused, RecvOverflow
from tokenway.handle import Handle, Pending, Tensor, pointer_of, stream_of, unlike
from tokenway.leases import Lease, LeaseInfo
from tokenway.native_group import NativeGroup
from tokenway.shape import Shape

_log = logging.getLogger("tokenway")
_REFUSED = -1  # for a flag, which is 0 or 1: the C library refuses it, and tells the peers


class Counting:
    """That of one group."""

    def __init__(self, native: NativeGroup, shape: Shape, blocks: Blocks):
        self._native, self._shape, self._blocks = native, shape, blocks
        self._copies = 0  # outputs that were copied for want of a lease

    def exchange(
        self,
        handle: Handle[Any],
        lane: int | None,
        send_only: bool,
        lease: bool | str,
        max_recv_tokens: int | None,
        row_alignment: int | None,
        sm_limit: int,
    ) -> Any:
        """As `Group.exchange_counts` says."""
        native = self._native
        self._blocks.free()
        if isinstance(handle, Handle):
            handle.counted = True
        given = _header.CountsInput()
        given.lane = arguments.lane_number(lane)
        given.sm_limit = arguments.int32(sm_limit)
        given.max_recv_tokens = arguments.limit(max_recv_tokens)
        given.row_alignment = arguments.limit(row_alignment)
        landing = None
        with arguments.Preparation() as prepared:
            given.stream = stream_of(native, handle)
            given.send_only = 1 if send_only else 0
            landing = self._take_leases(given.max_recv_tokens, zeros=bool(lease == "zeros")) if lease else None
            for q, taken in enumerate((landing or {}).values()):
                given.landing[q] = None if taken is None else taken.pointer
        if prepared.problem is not None:
            given.send_only = _REFUSED
        result = _native.lib.twExchangeCounts(native.pointer, pointer_of(handle), byref(given))
        if result:
            values = {"max_recv_tokens": max_recv_tokens, "row_alignment": row_alignment}
            values |= {"lane": lane, "sm_limit": sm_limit}
            error = native.error(result, prepared.problem, values=values, handle_is=unlike(handle))
            if isinstance(error, (BoundMismatch, PeerRefused, RecvOverflow)):
                handle.leased = False  # what an earlier send_only call may have left
            native.torch_views.after(None, error)
            raise error
        native.torch_views.after()
        handle._landing = landing
        handle.max_recv_tokens = max_recv_tokens
        callbacks.tell()
        if send_only:
            return Pending(handle, handle, (handle,), counting=True)
        handle.leased = False
        return handle

    def refuse(self) -> None:
        """Tells peers, which wait in an exchange of counts, that this rank cannot make the call."""
        native = self._native
        given = _header.CountsInput()
        given.lane, given.stream = -1, native.place.stream()
        _native.lib.twExchangeCounts(native.address, None, byref(given))
        native.torch_views.after()

    def size_outputs(self, handle: Any) -> None:
        """As `Group.size_outputs` says."""
        asks = self._shape.sizes_outputs and isinstance(handle, Handle) and handle.max_recv_tokens is None
        if asks and not self._native.place.capturing():
            handle.learn_rows()

    # ---------------------------------------------------------------------------------------------------- leases

    def lease_info(self) -> LeaseInfo:
        """What is leased of the window."""
        info = _header.LeaseInfo()
        _native.check(_native.lib.twGroupLeaseInfo(self._native.pointer, byref(info)))
        return LeaseInfo(info.bytes, info.used, info.largest, info.leases, self._copies)

    def _fills_outputs(self, limited: bool) -> bool:
        """Whether outputs on a device have more rows than may come, which are to be 0. limited: the exchange of counts
        has a limit of its own."""
        return self._native.device is not None and (limited or not self._shape.sizes_outputs)

    def _take_leases(self, limit: int, zeros: bool) -> dict[str, Lease | None]:
        """Of each payload, for as many rows as may come; None where there is no room. limit: max_recv_tokens of the
        call, 0 for the group's; C refuses what is out of range."""
        native, shape = self._native, self._shape
        rows = limit if 0 < limit <= shape.max_recv_rows else shape.max_recv_rows
        taken: dict[str, Lease | None] = {}
        for name, payload in shape.payloads.items():
            taken[name] = None
            with suppress(OutOfMemory, InvalidUsage):  # the latter without lease_bytes
                count = rows * payload.row_bytes()
                taken[name] = lease = Lease(native.pointer, count)
                if zeros and self._fills_outputs(limit != 0):
                    native.place.window_view(lease.pointer, (count,), "uint8", True, lease).zero_()
        return taken

    def copy_out(self, handle: Handle[Any], given: dict[str, Tensor], like: Tensor) -> None:
        """New tensors for what a dispatch in "flat" has no lease for."""
        shape = self._shape
        rows = handle.rows_of("flat")
        for name, lease in (handle._landing or {}).items():
            if lease is not None or given.get(name) is not None or rows is None:
                continue
            payload = shape.payloads[name]
            given[name] = self._native.place.empty((rows, payload.elements), payload.dtype, like)
            if self._fills_outputs(handle.max_recv_tokens is not None):
                given[name].zero_()  # as a lease would be, if it was asked for
            if self._copies == 0:
                now = self.lease_info()
                _log.warning(
                    "%s: no lease for %s, %d rows of %d bytes: of lease_bytes, %d, the largest gap is %d. They are "
                    "copied out of the window; more lease_bytes, or less max_recv_tokens, avoid that",
                    *(shape, name, handle.max_recv_tokens or shape.max_recv_rows, payload.row_bytes()),
                    *(now.bytes, now.largest),
                )
            self._copies += 1
