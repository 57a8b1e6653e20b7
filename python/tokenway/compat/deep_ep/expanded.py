"""The exchange of DeepEP's second API: rows by source or by expert, up to a bound that all ranks know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tokenway as tw
from tokenway.compat.deep_ep.normal import (
    SCALES,
    Exchange,
    Rows,
    check_choices,
    refuse_combine,
    refuse_dispatch,
    sum_of,
)
from tokenway.integrations.groups import complete, give_back
from tokenway.integrations.low_latency import Once
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

NUMBER, WEIGHTS = "number", "later_weights"  # payloads: a row's number among those of all ranks; of a later pass


class Plan:
    """A routing and what its dispatches bring: by expert (`expand`), or by source.

    bound: most tokens of a rank, alike on all. alignment: of experts' rows. waits: whether the host knows what comes;
    otherwise outputs are as large as can come. Once rows were sent: numbers, of the rows of `flat` or `grouped`, source
    * bound + token; ids [R, K], by source alone; counts: [N] of sources, or by expert [L] of experts; offsets [L + 1]
    and origins [P] by expert alone."""

    def __init__(self, handle: Any, expand: bool, bound: int, alignment: int, waits: bool):
        self.handle, self.expand, self.bound, self.alignment, self.waits = handle, expand, bound, alignment, waits
        self.layout = "grouped" if expand else "flat"
        self.rows = 0  # that outputs have, as the exchange sees them
        self.size = 0  # ... and as a caller does
        self.tokens = 0  # that come, or can come
        self.experts: list[int] | None = None  # rows of each expert, if the host knows
        self.numbers: Any = None
        self.ids: Any = None
        self.counts: Any = None
        self.offsets: Any = None
        self.origins: Any = None

    def kept(self) -> tuple[Any, ...]:
        """What it keeps on the device, each a tensor or None."""
        return self.numbers, self.ids, self.counts, self.offsets, self.origins


class Expanded(Exchange):
    """Of ElasticBuffers, over the group that Buffers have too. A dispatch is two steps of all ranks, one with a routing
    that is known, and a combine one."""

    _later: Any = None  # the handle of a combine that was last left to be received later, and has the lane until then

    def _lane(self) -> None:
        """Raises InvalidUsage while there is such a combine, of the group that there is now."""
        later = self._later
        if later is not None and later.leased and later.group.group is self.shared.group:
            raise tw.InvalidUsage(
                "a combine with defer_epilogue and a bias is under way, and other calls of this process group that "
                "route alike must follow it: wait for its event first"
            )

    def route(self, rows: Rows, ids: Tensor, weights: Tensor | None, plan: Plan, sm_limit: int) -> None:
        """Ranks tell each other how many rows will come. A step of all ranks; the host waits for what it brings if the
        plan does. Errors: InvalidArgument, on the other ranks PeerRefused: at once on the CPU or if the plan waits."""
        bound = plan.bound
        self._lane()
        with gradients.telling(partial(self.refuse, plan)):
            if bound < 1:
                told = "is 0; it must be at least 1, here or in the constructor, alike on all ranks"
                raise tw.InvalidArgument.of("num_max_tokens_per_rank", told)
            kind = rows.kind
        view = self.view(kind, bound)
        group = view.group
        with gradients.telling(partial(self.refuse, plan, view)):
            if len(rows.values) > bound:
                told = f"has {len(rows.values)} rows; it must have at most num_max_tokens_per_rank, {bound}"
                raise tw.InvalidArgument.of("x", told)
            check_choices(ids, weights, len(rows.values), self.top_k)
            handle = plan.handle = view.route(ids, weights)
        try:
            most = None if plan.waits else group.nranks * bound
            group.exchange_counts(handle, max_recv_tokens=most, row_alignment=plan.alignment, sm_limit=sm_limit)
            plan.tokens = group.nranks * bound
            if plan.waits:
                plan.tokens, plan.experts = handle.recv_rows, handle.expert_rows.tolist()
            plan.rows = handle.rows_of(plan.layout)
        except Exception as error:
            give_back(handle)
            if isinstance(error, tw.InvalidArgument):  # of which it has told the peers
                _refuse_second(plan, view)
            raise
        plan.size = plan.rows
        if not plan.waits:  # and be it that the host knows how many come, as in blocking mode
            plan.size = max(plan.rows, self.expanded(plan) if plan.expand else plan.tokens)

    def expanded(self, plan: Plan) -> int:
        """Rows by expert, each expert's rounded up to the alignment: as many as come, or can come."""
        if plan.experts is not None:
            return sum(-(-count // plan.alignment) * plan.alignment for count in plan.experts)
        local = self.group.num_local_experts
        places = plan.tokens * min(self.top_k, local) + local * (plan.alignment - 1)
        return places + -places % plan.alignment

    def refuse(self, plan: Plan, view: TypedGroup | None = None) -> None:
        """Tells peers, who are in `route`, of a call that this rank cannot make. view: of its rows, if it is known."""
        group = self.shared.group
        if group is not None:
            group.refuse_routing(plan.layout)
            _refuse_second(plan, view or (self._views.there() or [group])[0])

    def send(self, plan: Plan, rows: Rows, sm_limit: int, columns: bool, first: bool) -> dict[str, Tensor]:
        """Sends rows by a routing: "tokens", and what is beside; "ids" and "weights" if it is the first time. Scales by
        column, if `columns`: [S, M]. A step of all ranks; nothing waits. Errors: as `Group.dispatch`."""
        handle, view = plan.handle, plan.handle.group
        self._lane()
        columns = columns and rows.scales is not None
        direct = columns and plan.expand and plan.rows == plan.size
        with gradients.telling(lambda: refuse_dispatch(view, handle, plan.layout)):
            view = self.view(rows.kind)
            if len(rows.values) != handle.tokens:
                told = f"has {len(rows.values)} rows; it must have {handle.tokens}, as when it was routed"
                raise tw.InvalidArgument.of("x", told)
            whole, used = self._made(plan, rows, direct, first)
            payloads = rows.payloads()
        try:
            asked: dict[str, Any] = {"layout": plan.layout, "count": first, "sm_limit": sm_limit}
            by_column = [SCALES] if direct else None
            came = view.dispatch(handle, rows.values, payloads, out=used, column_major=by_column, **asked)
            if first and plan.expand:
                plan.offsets = came.offsets.clone()
        finally:
            give_back(handle)
        if first:
            plan.counts, plan.origins = used["counts"], used.get("origins")
            plan.numbers = whole.pop(NUMBER)
            plan.ids = None if plan.expand else whole["ids"].clone()  # a caller may write to those that it gets
        if columns and not direct:  # rows by source are not brought by column, nor are those in a part of an output
            scales = whole[SCALES]
            aligned = scales.new_empty(scales.shape[1], len(scales) + -len(scales) % (16 // scales.itemsize))
            aligned[:, : len(scales)] = scales.t()
            whole[SCALES] = aligned
        return whole

    def _made(self, plan: Plan, rows: Rows, columns: bool, first: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what a caller gets, what a dispatch writes to): the second are the first rows of it."""
        device, count, group = rows.values.device, plan.size, self.group
        whole = {"tokens": rows.values.new_empty(count, rows.values.shape[1])}
        for name, elements, dtype in rows.kind[2]:
            if not (name == SCALES and columns):
                whole[name] = torch.empty(count, elements, dtype=dtype, device=device)
        if first:
            each = () if plan.expand else (self.top_k,)
            whole["weights"] = torch.zeros((count, *each), dtype=torch.float32, device=device)
        if first and not plan.expand:
            whole["ids"] = torch.full((count, self.top_k), -1, dtype=torch.int64, device=device)
        used = {name: tensor[: plan.rows] for name, tensor in whole.items()}
        if first:
            counts = group.num_local_experts if plan.expand else group.nranks
            used["counts"] = torch.empty(counts, dtype=torch.int32, device=device)
        if first and plan.expand:
            used["origins"] = torch.empty(plan.rows, dtype=torch.int64, device=device)
        for name, elements, dtype in rows.kind[2]:
            if name == SCALES and columns:
                places = plan.rows + -plan.rows % (16 // dtype.itemsize)
                whole[name] = used[name] = torch.empty(elements, places, dtype=dtype, device=device)
        return whole, used

    def gather(
        self,
        plan: Plan,
        rows: Tensor,
        weights: Tensor | None,
        biases: Any,
        sm_limit: int,
        later: bool,
        checks: Callable[[], None],
    ) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
        """Sums rows [R, H] over this rank's experts, by expert, and over ranks, where they came from: [T, H] of their
        dtype, from `biases` on; and brings weights back, [R, K] float32, or [P] by expert, each from the rank of its
        expert: [T, K]; and what receives them, which is done already, unless `later`: then biases are read there, and
        the handle has the lane until then. checks: raises InvalidArgument for what else is wrong of the call. A step of
        all ranks. Errors: as `Group.combine`."""
        handle, view = plan.handle, plan.handle.group
        self._lane()
        row = () if plan.expand else (self.top_k,)
        with gradients.telling(lambda: refuse_combine(handle, view, None, () if weights is not None else None)):
            checks()
            bias = sum_of(biases)
            values = _used("x", rows, plan, (rows.shape[-1],), rows.dtype)
            if weights is not None:
                weights = _used("topk_weights", weights, plan, row, torch.float32)
            view = self.view((rows.shape[-1], rows.dtype, ()))
        asked: dict[str, Any] = {"layout": plan.layout, "dtype": rows.dtype, "sm_limit": sm_limit}
        out = rows.new_empty(handle.tokens, rows.shape[1]), None
        if weights is not None:
            out = out[0], weights.new_empty(handle.tokens, self.top_k)
        asked["out"] = out[0] if weights is None else out
        try:
            pending = view.combine(handle, values, bias=bias, choice_values=weights, send_only=later, **asked)
        except Exception:
            give_back(handle)
            raise
        if not later:
            give_back(handle)
            return *out, nothing
        self._later = handle
        return *out, Once(partial(_received, pending, handle, bias, biases))


def _received(pending: Any, handle: Any, bias: Any, biases: Any) -> None:
    """Receives a combine. Of two biases the sum is made here, as they may be written to until now."""
    told = sum_of(biases)
    if told is not None and told is not bias:
        bias.copy_(told)
    complete(pending, handle)
    give_back(handle)


def nothing() -> None:
    """What is left to do of a call that is complete, and to check of one that is right."""


def _refuse_second(plan: Plan, calls: Any) -> None:
    """Refuses the dispatch that peers have enqueued behind their exchange of counts, if they learn only later that this
    was refused. calls: the group, by rows of the peers' type where it is known."""
    if not plan.waits and calls.native.place.learns_late:
        calls.refuse_dispatch(plan.layout)


def _used(name: str, rows: Tensor, plan: Plan, row: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The rows of a combine that the exchange sees; InvalidArgument for others than were received."""
    wanted = plan.size, *row
    if tuple(rows.shape) != wanted or rows.dtype != dtype:
        told = f"is {str(rows.dtype)[6:]} {list(rows.shape)}; it must be {str(dtype)[6:]} {list(wanted)}, as received"
        raise tw.InvalidArgument.of(name, told)
    return rows[: plan.rows].contiguous()
