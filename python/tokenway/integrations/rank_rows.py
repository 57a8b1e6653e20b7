"""The exchange in two calls of two parts each, for inference engines: what is sent is received by a hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tokenway as tw
from tokenway.integrations.groups import Peers, SharedGroup, Views, complete, give_back
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

SCALES = "scales"  # the payload beside a row's values
SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # dtypes that rows may have before they are quantised


class Arriving:
    """A dispatch: rows that are on their way, or have come, and what their combine needs.

    experts: how many rows each expert of this rank gets, on the host; None in slots, where nothing waits for it."""

    def __init__(self, shared: SharedGroup, view: TypedGroup, handle: Any):
        self.view = view
        self.experts: list[int] | None = None
        self.sent: Any = None  # what the dispatch has returned: Pending or Received
        self._shared, self._handle = shared, handle
        self._room = view.max_tokens  # as `SharedGroup.keep` takes it

    def receive(self) -> None:
        """Waits for the rows; does nothing once they have come. Errors: those of `Group.dispatch`."""
        if isinstance(self.sent, tw.Pending):
            complete(self.sent, self._handle)
            self.sent = self.sent.result()

    def rows(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(values [R, C], scales [R, S] or None, ids [R, K], -1 where there is none, weights [R, K] float32): views of
        the window and of the handle, until the combine; in slots R is N * b."""
        self.receive()
        came = self.sent
        scales = came.merged(SCALES) if SCALES in came.payloads else None
        return came.merged("tokens"), scales, came.merged("ids"), came.merged("weights")

    def combine(self, results: Tensor, out: Tensor, send_only: bool, sm_limit: int = 0) -> Callable[[], None]:
        """Returns rows [R, H], weighted and summed over the experts of this rank, which are summed over ranks where
        they came from: out [T, H], of their dtype. Returns what receives them: done already, unless send_only. A step
        of all ranks. Errors: as `Group.combine`."""
        handle, view = self._handle, self.view
        with gradients.telling(self.refuse):
            if not results.numel():  # vLLM gives it the shape of what was sent, packed or not
                results = out.new_empty(0, out.shape[-1])
            if results.dtype != out.dtype or results.shape[-1] != out.shape[-1]:
                told = f"is {str(results.dtype)[6:]} {list(results.shape)}"
                wanted = f"{str(out.dtype)[6:]} [R, {out.shape[-1]}]"
                raise tw.InvalidArgument.of("fused_expert_output", f"{told}; it must be {wanted}")
            rows = (results if results.dim() == 2 else results.flatten(0, -2)).contiguous()
            if _overlap(rows, out):
                rows = rows.clone()  # which experts may share with the output, and a combine in parts may not
        try:
            pending = view.combine(handle, rows, dtype=out.dtype, out=out, send_only=send_only, sm_limit=sm_limit)
        except Exception:
            give_back(handle)
            raise
        if send_only:
            return partial(self._complete, pending)
        self._shared.keep(handle, self._room)
        return _nothing

    def _complete(self, pending: Any) -> None:
        complete(pending, self._handle)
        self._shared.keep(self._handle, self._room)

    def refuse(self) -> None:
        """Tells peers, who wait in the combine, that this rank makes none."""
        gradients.refuse_combine(self._handle, self.view)
        give_back(self._handle)


class RankRows:
    """Rows once to each rank of their experts, with all their choices, and sums back. Two may be under way at once,
    from a dispatch to its combine; ranks make their calls in one order.

    In slots, of which all ranks know the number, a dispatch is one step, never waits for the device, and can be
    captured; else it is two, and the host waits for the number of rows. peers: of the process group. experts, top_k: of
    the routings. settings: further ones of the group."""

    def __init__(self, peers: Peers, experts: int, top_k: int, **settings: Any):
        self.top_k = top_k
        settings = {"mode": "auto", "id_space": "global", "lanes": 2} | settings
        self.shared: SharedGroup = peers.shared(experts=experts, top_k=top_k, **settings)
        self._views = Views(self.shared)
        self._last: TypedGroup | None = None

    def dispatch(
        self,
        rows: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        results: tuple[torch.dtype, int],
        bound: int | None,
        room: int,
        send_only: bool,
        sm_limit: int = 0,
        layer: int = 0,
    ) -> Arriving:
        """Sends rows [T, C] of any dtype, with scales [T, S] of any dtype beside them. ids: [T, K] int32 or int64, -1
        for none; weights: [T, K] of any floating dtype. results: dtype and H of what experts return. bound: the largest
        T of all ranks, where all know it, else None. room: no rank has more tokens, alike on all; the group is made,
        and grows, for so many, which is collective. send_only: rows are received by what is returned, else they
        have come. layer: whose map ids go by, in a group that has maps; received ids are places in it.

        A step of all ranks, or two. Errors: as `Group.route` and `Group.dispatch`, of which peers hear at once."""
        with gradients.telling(partial(self.refuse, bound)):
            # What a row consists of; shapes without their first dimension, so that of two dimensions one is left.
            key = rows.shape[1:], rows.dtype, None if scales is None else (scales.shape[1:], scales.dtype), results
            view = self._views.find(key, room)
            kind = _kind(rows, scales, results) if view is None else None
        if kind is not None:
            view = self._views.make(key, kind, max(room, 1))
        assert view is not None
        self._last = view
        low = _is_low(view, bound)
        with gradients.telling(partial(_refuse, view, bound if low else None)):
            most = room if bound is None else bound
            if len(rows) > most:
                raise tw.InvalidArgument.of("a1", f"has {len(rows)} rows; it must have at most {most}, as ranks know")
            handle = self.shared.route(view, ids, weights.float(), layer)
        arriving = Arriving(self.shared, view, handle)
        try:
            if not low:
                view.exchange_counts(handle, sm_limit=sm_limit)
                arriving.experts = handle.expert_rows.tolist()
            arriving.sent = view.dispatch(
                handle,
                rows,
                None if scales is None else {SCALES: scales},
                layout="rank_major" if low else "flat",
                bound=bound if low else None,
                send_only=send_only,
                sm_limit=sm_limit,
            )
        except Exception:
            give_back(handle)
            raise
        return arriving

    def refuse(self, bound: int | None) -> None:
        """Tells peers, who are in a dispatch with that bound, that this rank cannot make the call; but not before there
        is a group."""
        if self._last is not None and self._last.group is self.shared.group:
            _refuse(self._last, bound if _is_low(self._last, bound) else None)


def _nothing() -> None:
    pass


def _overlap(rows: Tensor, out: Tensor) -> bool:
    """Whether rows, which are contiguous, lie in memory that out spans."""
    begin, start = rows.data_ptr(), out.data_ptr()
    return (
        start < begin + rows.numel() * rows.element_size()
        and begin < start + (len(out) - 1) * out.stride(0) * out.element_size() + out.shape[-1] * out.element_size()
    )


def _is_low(view: TypedGroup, bound: int | None) -> bool:
    """Whether rows go in slots, which the bound alone decides."""
    return bound is not None and view.chooses(bound) == "low_latency"


def _kind(rows: Tensor, scales: Tensor | None, results: tuple[torch.dtype, int]) -> tw.RowType:
    """What a row consists of. Errors: InvalidArgument, Unsupported."""
    for name, given in (("a1", rows), ("scales", scales)):
        if given is not None and given.dim() != 2:
            raise tw.InvalidArgument.of(name, f"has shape {list(given.shape)}; it must have two dimensions")
    payloads = None if scales is None else {SCALES: (scales.shape[1], scales.dtype)}
    kind = tw.RowType(rows.shape[1], rows.dtype, payloads, *results)
    kind.all_payloads()  # which refuses dtypes that no rows have
    if results[0] not in SUMMED:
        wanted = " or ".join(str(dtype)[6:] for dtype in SUMMED)
        raise tw.InvalidArgument.of("a1", f"is {str(results[0])[6:]}; it must be {wanted}, which can be summed")
    return kind


def _refuse(view: TypedGroup, bound: int | None) -> None:
    """Tells peers, who are in a dispatch, in slots if there is a bound, that this rank cannot make the call."""
    if bound is None:
        view.refuse_routing("flat")
    else:
        view.refuse_dispatch("rank_major", bound)
