"""Handles: cached routings, and calls under way."""

from __future__ import annotations

import warnings
from ctypes import byref, c_int32, c_int64
from typing import Any, Generic, TypeVar

import numpy as np

from tokenway import _header, _native, callbacks, cuda, tensors, versions
from tokenway.blocks import Blocks
from tokenway.errors import BoundMismatch, InUse, InvalidArgument, InvalidUsage, PeerRefused, TokenwayError
from tokenway.leases import Lease
from tokenway.native_group import NativeGroup
from tokenway.received import Received as Received
from tokenway.received import Tensor as Tensor

_MOST_VIEWS = 256  # that a handle keeps

Result = TypeVar("Result")
Owner = TypeVar("Owner")  # Group, in a module above this one


class Pending(Generic[Result]):
    """A `send_only` call under way: everything is sent, nothing received yet.

    On a CUDA device it may be completed on another stream than it was begun on: that one then waits for what the
    first holds at that moment. The tensors of the call, inputs and outputs, are recorded for it.
    """

    def __init__(
        self,
        handle: Handle[Any],
        result: Result,
        keep: tuple[Any, ...],
        written: Any = None,
        combining: bool = False,
        counting: bool = False,
    ):
        self._handle = handle
        self._counting = counting
        self._sent_on = handle.native.sending_stream()
        # What the handle leases once the call is complete, and when it fails: a combine may be tried again on a lease.
        self._leased_after = handle.leased and not combining and not counting
        self._leased_at_failure = handle.leased
        handle.leased = True  # until then the lane is in use, whoever drops what
        self._result = result
        self._written = written  # what the caller has given to write to
        self._rewrites = not combining and not counting
        # Tensors that the C library reads or writes until the call is complete; None from then on.
        self._keep: tuple[Any, ...] | None = keep
        self._interrupted = False
        self._error: TokenwayError | None = None

    def hook(self) -> None:
        """Receives; does nothing if that is done, but for raising again what it raised then. What a signal's handler
        raises meanwhile (Ctrl-C) comes through, and the call is still to be completed."""
        kept = self._keep
        if kept is not None:
            self._keep = None
            try:
                self._receive(kept)
                self._handle.leased = self._leased_after
            except InUse:  # another thread's call was in the way: this one is still to be completed
                self._keep = kept
                raise
            except TokenwayError as error:
                self._error = error
                refused = isinstance(error, (BoundMismatch, PeerRefused))  # twExchangeCounts says who holds what then
                self._handle.leased = refused if self._counting else self._leased_at_failure
            except BaseException:
                self._keep, self._interrupted = kept, True
                raise
        del kept
        if self._error is not None:
            raise self._error

    def _receive(self, kept: tuple[Any, ...]) -> None:
        try:
            try:
                self._handle.complete(kept, self._sent_on)
            finally:
                versions.written(self._written)
                if self._rewrites and self._handle._shared is not None:
                    self._handle.rewritten()
        except InvalidUsage as error:
            if isinstance(error, InUse) or not self._interrupted:
                raise
            self._handle.native.check()  # the interrupt came behind the C call, which had ended: nobody has told how

    def result(self) -> Result:
        """Receives if that is not done, and returns what the call without `send_only` would have returned."""
        self.hook()
        return self._result


class Handle(Generic[Owner]):
    """One routing, cached: made by `Group.route`, used by any number of dispatches and combines.

    Leases a lane from a dispatch to its combine. Ranks must lease and give back in the same order, so garbage
    collection never does: `combine` or `release` a handle that was dispatched, and complete what was begun with
    `send_only`: a `Pending` that is dropped takes the lane along. On a CUDA device, a handle that is used
    in a graph which was not made in it must live as long as the graph. There peers learn late of a dispatch that was
    refused here: `release` its handle, or `combine` it as they do theirs (InvalidUsage), before the next call.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_blocks",
        "_landed",
        "_landing",
        "_memory",
        "_reusable",
        "_shared",
        "_streams",
        "_unread",
        "_views",
        "bound",
        "counted",
        "default_bound",
        "group",
        "layout",
        "leased",
        "max_recv_tokens",
        "native",
        "pointer",
        "refused",
        "stream",
        "tokens",
    )

    def __init__(self, group: Owner, native: NativeGroup, blocks: Blocks, memory: Tensor | None):
        self.group = group
        self.native = native
        self._blocks = blocks
        self.pointer = 0  # the C library's twHandle_t, once there is one
        self.tokens = 0
        self.layout = "rank_major"
        self.bound = 0
        self.default_bound = 0  # of its dispatches: what it has room for
        self.leased = False
        self.refused = False  # its dispatch was, on this rank, and peers may not know: a lease of nothing
        self.counted = False  # counts were exchanged since it was routed, or that was tried: the same on all ranks
        self.max_recv_tokens: int | None = None  # of the last exchange of counts; None: the group's
        # uint8: the C library's arrays of this handle lie in it.
        self._memory, self._reusable = blocks.take(memory)
        self._base: int = native.place.address(self._memory)
        self._views: dict[Any, Tensor] = {}
        self._shared: Any = None  # the memory as PyTorch's views have it, which share its version
        # CUDA: the stream of the last call, all those that the allocator knows the memory is used on, and the
        # routing's tensors as long as no dispatch has read them.
        self.stream: int = native.place.stream()
        self._streams: tuple[int, ...] = (self.stream,)
        self._unread: tuple[Tensor, ...] | None = None
        # Leases: announced for the next dispatch, by payload, and those that a dispatch writes to, with what it needs.
        self._landing: dict[str, Lease | None] | None = None
        self._landed: list[tuple[Lease, int]] = []

    @property
    def device(self) -> int | None:
        """The CUDA device of its group on this rank, None on the CPU."""
        return self.native.device

    def update(self, ids: Tensor, weights: Tensor | None = None) -> None:
        """Replaces the routing, as `Group.route` would make it. Raises InvalidUsage while a lane is leased, and where
        a CUDA graph has a dispatch or combine of this handle with tensors of as many rows as were known to come: a
        replay might go beyond them."""
        native = self._living()
        routing = native.routings.take()
        result = _native.lib.twHandleUpdate(self.pointer, *routing.describe(ids, weights))
        native.routings.append(routing)
        if result:
            raise native.error(result, ids=ids, weights=weights)
        self.adopt_routing(ids, weights)

    def adopt_routing(self, ids: Tensor, weights: Tensor | None) -> None:
        """After the C library has taken a routing: its size and, on a CUDA device, what the first dispatch reads."""
        self.tokens = int(ids.shape[0])
        self.counted = False
        self._landing = None
        if self.native.device is not None:
            self.follow_stream()
            self._unread = (ids, weights)

    def follow_stream(self) -> int:
        """The current stream of the group's CUDA device, which uses this handle from now on."""
        place = self.native.place
        stream: int = place.stream()
        if stream != self.stream:
            self._move(place, stream)
        return stream

    def _move(self, place: cuda.Cuda, stream: int) -> None:
        """Memory that this object alone keeps must not be reused before a stream that it was not made for is done."""
        if stream not in self._streams:
            self._streams += (stream,)
            place.record((self._memory,))
        place.record(self._unread or ())
        self.stream = stream

    def was_read(self) -> None:
        """After the first dispatch: the routing's tensors need not live longer, but for the replays of a graph."""
        if not self.native.place.capturing():
            self._unread = None

    @cuda.ranged("tokenway.complete")
    def complete(self, kept: tuple[Any, ...], sent_on: Any) -> None:
        """Completes a pending call, which uses the tensors `kept` and was begun on a stream."""
        native, stream = self.native, None
        if native.device is not None:
            native.place.follow(sent_on, kept)
            stream = self.follow_stream()
        result = _native.lib.twComplete(native.pointer, self.pointer, stream)
        error = native.error(result) if result else None
        if self._landed and not isinstance(error, InUse):
            self.trim_leases()
        if error is not None:
            raise error
        callbacks.tell()

    def trim_leases(self) -> None:
        """After a dispatch: of its leases, what rows have come to is enough."""
        for lease, count in self._landed:
            lease.trim(count)
        self._landed.clear()

    def release(self) -> None:
        """Gives the lane of a dispatch back without a combine, at all ranks at the same place in their calls."""
        self._living()
        _native.check(_native.lib.twHandleRelease(self.pointer))
        self.leased = self.refused = False

    def num_recv_tokens(self) -> tuple[np.ndarray, int]:
        """([N] int32 rows received from each rank by the last dispatch, their sum). On a CUDA device it waits for that
        dispatch, which no other call does; InvalidUsage while a graph is captured. `Received.counts` is on the device.
        """
        native = self._living()
        if native.device is not None and native.place.capturing():
            raise InvalidUsage("num_recv_tokens waits for the device, which a stream that is captured cannot")
        counts = (c_int32 * native.nranks)()
        total = c_int32()
        self._check(_native.lib.twHandleNumRecvTokens(self.pointer, counts, byref(total)))
        return np.array(counts, np.int32), total.value

    def counts_ready(self, timeout: float | None = 0.0) -> bool:
        """Whether completing a `send_only` exchange of counts would not wait: all counts have come, or something has
        gone wrong, which completing it then raises. True too once they are known. timeout: seconds to wait for that at
        most (0: only ask; None: as long as completing would). Only the calling thread waits, without Python's lock.
        Sends nothing and gives no lane back, so ranks may ask when and as often as they like. The first question begins
        the group's timeout. InvalidUsage if no exchange of counts is under way."""
        self._living()
        if timeout is not None and not 0 <= timeout <= 2e6:
            raise InvalidArgument.of("timeout", f"is {timeout}; it must be None or from 0 to 2e6 seconds")
        ready = c_int32()
        limit = -1 if timeout is None else round(timeout * 1000)
        self._check(_native.lib.twHandleCountsReady(self.pointer, limit, byref(ready)))
        return bool(ready.value)

    def rows_of(self, layout: str) -> int | None:
        """Rows that the outputs of a dispatch in a layout of high throughput have: as many as come, if the host knows
        that; on a device, before it has asked (`recv_rows`), as many as there is room for. None before the exchange of
        counts. Never waits."""
        rows = c_int64()
        if result := _native.lib.twHandleNumOutputRows(self.pointer, _header.LAYOUTS[layout], byref(rows)):
            error = _native.error_of(result)
            if isinstance(error, InUse):
                raise error
            return None
        return rows.value

    def learn_rows(self) -> None:
        """Has the host know how much comes, if counts were exchanged: where not, a dispatch is refused anyway."""
        if self.rows_of("flat") is not None:
            _ = self.recv_rows

    @property
    def recv_rows(self) -> int:
        """Rows that this rank will receive, after `Group.exchange_counts`: R' of the flat layout. On a CUDA device it
        waits until that exchange has told the host, and for nothing else. Errors: InvalidUsage before the exchange, or
        where it is captured into a graph; RecvOverflow; GroupFinished."""
        self._living()
        rows = c_int64()
        self._check(_native.lib.twHandleNumRecvRows(self.pointer, _header.LAYOUTS["flat"], byref(rows)))
        return rows.value

    @property
    def expert_rows(self) -> np.ndarray:
        """[L] int32: rows that each expert of this rank will receive, after `Group.exchange_counts`; on the host, for
        products that take their sizes there. Without the padding of grouped, whose offsets are the running sums of
        these, each rounded up to row_alignment; with overflow "drop", rows that are dropped are counted, as they have
        places there. Waits as `recv_rows` does, and not at all after it. Errors: those of `recv_rows`."""
        rows = np.empty(self._living().num_local_experts, np.int32)
        self._check(_native.lib.twHandleNumExpertRows(self.pointer, rows.ctypes.data))
        return rows

    def _check(self, result: int) -> None:
        """Raises unless a call succeeded; then `Group.check` need not tell of it any more."""
        if result:
            raise self.native.error(result)
        callbacks.tell()

    def _living(self) -> NativeGroup:
        """The C library's group, or InvalidUsage: handles end with it."""
        _ = self.native.pointer
        return self.native

    def view(self, pointer: int, shape: tuple[int, ...], name: str, torch: bool) -> Tensor:
        """A view of an array of this handle; it keeps the memory alive. Kept, since making one takes longer than a
        small copy."""
        key = (pointer, shape, torch)
        found = self._views.get(key)
        if found is None or (torch and found.requires_grad):  # autograd has taken the old one into a graph
            place, memory = self.native.place, self._memory
            if torch:
                if self._shared is None:
                    self._shared = place.shared(memory)
                memory = self._shared
            if len(self._views) >= _MOST_VIEWS:  # of one that is updated for batches of many sizes
                self._views.clear()
            found = self._views[key] = place.block_view(memory, pointer - self._base, shape, name, torch)
        return found

    def share(self, memory: Tensor) -> None:
        """The caller's memory, to which a routing was written."""
        if tensors.is_torch(memory):
            self._shared = memory.detach().view(-1)
            self.rewritten()

    def rewritten(self) -> None:
        """After a dispatch, which has written to what views of this handle show: autograd learns of it."""
        if not self._shared.is_inference():  # which has no version
            versions.written(self._shared)

    def __reduce__(self) -> Any:
        raise TypeError("a handle cannot be copied or pickled: it is one of the C library's")

    def __del__(self) -> None:
        # Freed by the group's own thread, at its next call. A leased lane stays leased until the group is closed, but
        # for that of a dispatch which was refused here: nothing is there to combine, and peers that combine give theirs
        # back.
        if not self.pointer or self.native.closed:
            return
        leased = self.leased and not self.refused
        kept = self._blocks.leased if leased else self._blocks.finished
        kept.append((self.pointer, self._memory, self._reusable))
        del self._memory  # the list alone has it now; the views go with this object
        record = self.native.record() if leased else None
        if leased and not (record and record.sticky):  # of a finished group, no lane is of use
            text = "a handle that leases a lane was dropped, and the lane with it: combine or release it"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)


def pointer_of(handle: Any) -> int | None:
    """Of a handle; NULL, which the C library refuses, for one of a closed group and for everything else."""
    return handle.pointer if isinstance(handle, Handle) and handle.native.address is not None else None


def unlike(handle: Any) -> str | None:
    """What an argument is instead of a handle of a group that is open; None where it is one."""
    if not isinstance(handle, Handle):
        return f"{handle!r}; it must come from Group.route"
    return "of a group that is closed" if handle.native.closed else None


def stream_of(native: NativeGroup, handle: Any) -> int:
    """The stream of a call on a group; its handle, if it is one of that group, follows the call there."""
    if native.device is None:
        return 0
    ours = isinstance(handle, Handle) and handle.native is native
    stream: int = handle.follow_stream() if ours else native.place.stream()
    return stream
