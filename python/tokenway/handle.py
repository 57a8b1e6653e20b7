"""Handles, and what dispatches bring: cached routings, received rows, calls under way."""

from __future__ import annotations

import warnings
from ctypes import byref, c_int32
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from tokenway import _native, tensors
from tokenway.errors import TokenwayError

if TYPE_CHECKING:
    from tokenway.group import Group

Tensor = Any  # np.ndarray or torch.Tensor
Result = TypeVar("Result")


class Received:
    """What a dispatch brought to this rank.

    N ranks, b the call's bound, K ids per token, L experts of this rank, H elements per row:

    ============  ==================  =======================  =============
    field         rank_major          expert_major             dtype
    ============  ==================  =======================  =============
    tokens        [N, b, H]           [L, N*b, H]              the group's
    payloads[x]   [N, b, elements]    [L, N*b, elements]       the payload's
    ids           [N, b, K]           [L, N*b]                 id_dtype
    weights       [N, b, K]           [L, N*b]                 float32
    counts        [N] per source      [L] per expert           int32
    offsets       [N + 1]             [L + 1]                  int32
    ============  ==================  =======================  =============

    Rows beyond the counts hold nothing of use; ids are invalid_id and weights 0 there. offsets are the running sums
    of counts. In rank_major, tokens and payloads are views of the window, valid until the next step on the lane
    begins: experts may compute in place, and the combine of the same handle may read them; later calls may not, and
    after `Group.close` the memory is gone. The other fields belong to the handle: its next dispatch overwrites them.
    """

    __slots__ = ("counts", "handle", "ids", "layout", "payloads", "tokens", "weights")

    def __init__(
        self,
        handle: Handle,
        layout: str,
        tokens: Tensor,
        payloads: dict[str, Tensor],
        ids: Tensor,
        weights: Tensor,
        counts: Tensor,
    ):
        self.handle = handle
        self.layout = layout
        self.tokens = tokens
        self.payloads = payloads
        self.ids = ids
        self.weights = weights
        self.counts = counts

    @property
    def offsets(self) -> Tensor:
        """[N + 1] or [L + 1] int32: running sums of counts, from 0."""
        offsets = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(np.asarray(self.counts), out=offsets[1:])
        return tensors.to_torch(offsets) if tensors.is_torch(self.counts) else offsets


class Pending(Generic[Result]):
    """A `send_only` call under way: everything is sent, nothing received yet."""

    def __init__(self, handle: Handle, result: Result, keep: tuple[Any, ...], combining: bool = False):
        self._handle = handle
        # What the handle leases once the call is complete, and when it fails: a combine may be tried again on a lease.
        self._leased_after = handle.leased and not combining
        self._leased_at_failure = handle.leased
        handle.leased = True  # until then the lane is in use, whoever drops what
        self._result = result
        # Tensors that the C library reads or writes until the call is complete; None from then on.
        self._keep: tuple[Any, ...] | None = keep
        self._error: TokenwayError | None = None

    def hook(self) -> None:
        """Receives; does nothing if that is done, but for raising again what it raised then."""
        if self._keep is not None:
            self._keep, kept = None, self._keep
            try:
                self._handle.group._complete(self._handle)
                self._handle.leased = self._leased_after
            except TokenwayError as error:
                self._error = error
                self._handle.leased = self._leased_at_failure
            del kept
        if self._error is not None:
            raise self._error

    def result(self) -> Result:
        """Receives if that is not done, and returns what the call without `send_only` would have returned."""
        self.hook()
        return self._result


class Handle:
    """One routing, cached: made by `Group.route`, used by any number of dispatches and combines.

    Leases a lane from a dispatch to its combine. Ranks must lease and give back in the same order, so garbage
    collection never does: `combine` or `release` a handle that was dispatched.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_memory",
        "_reusable",
        "_views",
        "bound",
        "group",
        "layout",
        "leased",
        "pointer",
        "tokens",
    )

    def __init__(self, group: Group, memory: np.ndarray, reusable: bool):
        self.group = group
        self.pointer = 0  # the C library's twHandle_t, once there is one
        self.tokens = 0
        self.layout = "rank_major"
        self.bound = 0
        self.leased = False
        self._memory = memory  # uint8: the C library's arrays of this handle lie in it
        self._reusable = reusable
        self._base = memory.ctypes.data
        self._views: dict[Any, Tensor] = {}

    def update(self, ids: Tensor, weights: Tensor | None = None) -> None:
        """Replaces the routing, as `Group.route` would make it. Refused while a lane is leased."""
        group = self._living_group()
        args = group._routing_args(ids, weights)
        result = _native.lib.twHandleUpdate(self.pointer, *args)
        if result:
            raise group._error(result, ids=ids, weights=weights)
        self.tokens = int(ids.shape[0])

    def release(self) -> None:
        """Gives the lane of a dispatch back without a combine, at all ranks at the same place in their calls."""
        self._living_group()
        _native.check(_native.lib.twHandleRelease(self.pointer))
        self.leased = False

    def num_recv_tokens(self) -> tuple[np.ndarray, int]:
        """([N] int32 rows received from each rank by the last dispatch, their sum)."""
        counts = (c_int32 * self._living_group().nranks)()
        total = c_int32()
        _native.check(_native.lib.twHandleNumRecvTokens(self.pointer, counts, byref(total)))
        return np.array(counts, np.int32), total.value

    def _living_group(self) -> Group:
        """The group, or InvalidUsage: handles end with it."""
        _ = self.group.pointer
        return self.group

    def view(self, pointer: int, shape: tuple[int, ...], name: str, torch: bool) -> Tensor:
        """A view of an array of this handle; it keeps the memory alive. Kept, since making one takes longer than a
        small copy."""
        key = (pointer, shape, torch)
        found = self._views.get(key)
        if found is None:
            dtype = tensors.numpy_dtype(name)
            begin = pointer - self._base
            array = self._memory[begin : begin + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            found = self._views[key] = tensors.to_torch(array) if torch else array
        return found

    def __del__(self) -> None:
        # Freed by the group's own thread, at its next call. A leased lane stays leased until the group is closed.
        group = self.group
        if not self.pointer or group.closed:
            return
        kept = group._leased_forever if self.leased else group._finished_handles
        kept.append((self.pointer, self._memory, self._reusable))
        del self._memory  # the list alone has it now; the views go with this object
        record = group.error if self.leased else None
        if self.leased and not (record and record.sticky):  # of a finished group, no lane is of use
            text = "a handle that leases a lane was dropped, and the lane with it: combine or release it"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)
