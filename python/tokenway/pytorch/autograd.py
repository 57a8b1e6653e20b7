"""The functions of `tokenway.autograd`, which says how they are used and what they promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tokenway import tensors
from tokenway.arguments import telling
from tokenway.comm import Comm
from tokenway.errors import InvalidArgument, InvalidUsage
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.pytorch.gradients import (
    capturing,
    check_group,
    check_layout,
    check_local,
    check_memory,
    eager,
    empty,
    exchange_counts,
    keep_for_order,
    kept_for_order,
    lead_of,
    outputs_to_come,
    refuse_combine,
    return_gradients,
    return_rows,
    room_for,
    send,
    send_gradients,
    weight_columns,
)
from tokenway.settings import telling_comm
from tokenway.shape import GROUPED

Tensor = torch.Tensor


class Routed(NamedTuple):
    """What `dispatch` brought: fresh tensors of the shapes that Received documents. In rank_major, of N ranks, b the
    bound, K ids per token, H elements a token; in flat [R', ...] for [N, b, ...]; in grouped [P, H], and [P] for the
    others, a row being one of its token's K."""

    tokens: Tensor  # [N, b, H] of the group's dtype, differentiable; 0 in rows that no token came to
    weights: Tensor  # [N, b, K] float32, differentiable; 0 where ids has no expert of this rank
    ids: Tensor  # [N, b, K] of the group's id_dtype: as Received.ids
    counts: Tensor  # [N] int32: rows from each rank; in grouped [L], of each expert
    offsets: Tensor  # [N + 1] or [L + 1] int32: where the rows of each begin in flat and grouped, and at last all
    handle: Handle[Group]  # the routing, dispatched, without a lane
    layout: str


def make_group(
    comm: Comm, *, experts: int, top_k: int, hidden: int, max_tokens: int, dtype: Any = "bfloat16", **settings: Any
) -> Group:
    """A `Group` that can be trained with: rows return in the dtype in which they are sent, with room for the gradients
    of the weights beside them (`combine_room`). Collective.

    dtype: of tokens and gradients, float32 or bfloat16. settings: further keywords of Group, but for combine_dtype and
    combine_hidden. One group serves all layers of the same shape; it needs one lane.
    """
    with telling_comm(comm):
        weight_columns(top_k, dtype)  # which refuses what cannot be trained with
        room = room_for(hidden, tensors.dtype_name(dtype), top_k)
        asked = settings.pop("combine_room", 0)
    return Group(
        comm,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens=max_tokens,
        dtype=dtype,
        combine_dtype=dtype,
        combine_hidden=hidden,
        combine_room=room if isinstance(asked, int) and 0 <= asked < room else asked,
        **settings,
    )


@eager
def dispatch(
    group: Group,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    layout: str | None = None,
    bound: int | None = None,
    layer: int = 0,
) -> Routed:
    """Sends every token to the ranks of its experts. A step of all ranks, and one in the backward pass if tokens or
    weights require gradients, which must be so of each of the two on all ranks or on none.

    tokens: [T, H] of the group's dtype, differentiable. ids: [T, K] int32 or int64, -1 for "no expert", each id at most
    once per token. weights: [T, K] float32, differentiable. layout: "rank_major", or of a group of high throughput
    "flat" (the default there) or "grouped"; these take a step more, the exchange of counts, in the forward pass alone.
    "grouped" of a group of low latency takes none, and a group of both modes has that as "grouped_by_bound".
    bound: b, equal on all ranks, T <= b <= max_tokens (default max_tokens); in high throughput it sizes no tensor, see
    Group.dispatch. In a group of the mode "auto" a layout, or else bound, chooses as there. layer: as Group.route.

    Gradients: tokens' are summed over the ranks that received the token, ascending, in float32 and rounded once;
    weights' are exact. What was dropped for want of room contributes to neither. Errors: as Group.route,
    Group.exchange_counts and Group.dispatch; InvalidArgument for a group whose rows cannot return gradients (see
    `make_group`).
    """
    if layout == "expert_major":
        with telling(lambda: group.refuse_routing(layout, bound)):
            check_layout(group, layout)
    return bring(group, tokens, ids, weights, layout, bound, layer)


@eager
def bring(
    group: Group,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    layout: str | None,
    bound: int | None,
    layer: int = 0,
    fill: bool = True,
) -> Routed:
    """`dispatch`, or with the layout "expert_major" of low latency the same: tokens are [L, N * b, H] there, weights
    and ids [L, N * b], counts [L] the rows of each expert, which come first. fill: False for a caller that reads no
    further than counts and ids say, forward and backward: tokens and weights beyond are what the memory held."""
    if group.low_latency_tokens and layout is None:
        layout = group.shape.choose(layout, bound)
    tracked = torch.is_grad_enabled()
    with telling(lambda: group.refuse_routing(layout, bound)):
        if tracked:
            check_group(group, weights.requires_grad)
        layout = layout if layout == "expert_major" else check_layout(group, layout)
        bound = _checked_bound(group, layout, bound)
        check_memory("tokens", tokens)
        handle = group.route(ids, weights.detach(), layer=layer)
    if tracked and (tokens.requires_grad or weights.requires_grad):
        received, kept, places, counts, offsets = _Dispatch.apply(tokens, weights, handle, layout, bound, fill)
    else:
        out = _receive(handle, tokens, layout, bound, fill)
        received, kept, places, counts, offsets = (out[name] for name in _BROUGHT)
    if fill and not group.shape.layouts[layout].by_expert:  # where a row has no weight but its own
        # All weights of a token come with it. Those of other ranks' experts would give it gradients from several ranks.
        kept = kept.masked_fill(places == group.settings.invalid_id, 0.0)
    return Routed(received, kept, places, counts, offsets, handle, layout)


@eager
def combine(routed: Routed, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns rows to their owners and sums them: [T, H] of the group's dtype. A step of all ranks, and one in the
    backward pass if rows require gradients, which must be so on all ranks or on none.

    rows: as `routed.tokens`, of the group's dtype or float32, differentiable, weighted already: each is the sum of what
    this rank's experts made of that token, in the layout grouped what the row's expert did. Rows beyond the counts, and
    padding, are not read, and their gradients are 0.

    Sums are float32: in grouped over k, ascending, then in every layout over ranks, ascending. What a rank returns for
    a token is rounded to the group's dtype before the latter, and the result after. Errors: as Group.combine.

    bias: [T, H] of the group's dtype or float32, differentiable: the first term of each sum, as of Group.combine. Its
    gradient is that of the result, in its own dtype; that takes no step, so ranks may differ in it.
    """
    return give_back(routed, rows, bias)


@eager
def give_back(routed: Routed, rows: Tensor, bias: Tensor | None = None, fill: bool = True) -> Tensor:
    """`combine`. fill: False for rows whose gradients are not read beyond what came; there they are what the memory
    held."""
    with telling(lambda: refuse_combine(routed.handle)):
        check_memory("rows", rows)
        if bias is not None:
            check_memory("bias", bias)
    if torch.is_grad_enabled() and (rows.requires_grad or (bias is not None and bias.requires_grad)):
        return _Combine.apply(rows, bias, routed.handle, routed.layout, fill)
    return return_rows(routed.handle, rows, routed.layout, bias)


@dataclass(frozen=True)
class Grouped:
    """Rows by expert: what a grouped GEMM, or a loop over experts, works on. R rows, L experts of this rank."""

    rows: Tensor  # [R, H]: a token's row once for each of its experts here; by expert, then by (source, slot)
    weights: Tensor  # [R] float32, differentiable: the router's weight for that token and expert
    sizes: list[int]  # [L]: rows of each expert, on the host; of the layout grouped with its padding, rows of 0
    _sources: Tensor | None  # [R] int64: the row of [M] that each row was taken from; None: the rows are as they came
    _places: Tensor | None  # [M, K] int64: where (row, k) went; R for those without an expert here
    _lead: tuple[int, ...]  # of M rows: N, b or R'

    @eager
    def sum(self, rows: Tensor) -> Tensor:
        """[R, H'] in this order, differentiable -> what `combine` takes, once rows are weighted: [N, b, H'] or [R', H']
        float32, summed over k ascending by the row that each was taken from; 0 where there is none. In the layout
        grouped the rows as they are: the combine sums."""
        if self._sources is None:
            missing = self._lead[0] - len(rows)  # of a fixed number, those beyond what came
            return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        if torch.is_grad_enabled() and rows.requires_grad:
            total = _Sum.apply(rows, self._sources, self._places)
        else:
            total = _sum_over_k(rows, self._places)
        return total.view(*self._lead, rows.shape[-1])


@eager
def by_expert(routed: Routed) -> Grouped:
    """Groups what came by expert. Local; on a CUDA device it waits for the dispatch, since shapes depend on it.

    The order is that of the layouts expert_major and grouped, without their padding; what came in grouped is left as it
    is. The gradients of rows are summed over k, ascending, in float32: the same bits every time, on CUDA devices too.
    Raises InvalidArgument for groups with id_space="global", InvalidUsage while a graph is captured: there, experts
    take the layout grouped by `Routed.offsets`, as `tokenway.experts` does.
    """
    group = routed.handle.group
    check_local(group, "by_expert")
    if capturing(group):
        raise InvalidUsage("by_expert waits for the device, to learn how many rows there are; a captured stream cannot")
    if routed.layout in GROUPED:
        sizes = routed.offsets.diff().tolist()
        used = sum(sizes)
        return Grouped(routed.tokens[:used], routed.weights[:used], sizes, None, None, routed.ids.shape)
    chosen, counts = _chosen(group, routed.ids)
    places = torch.full((routed.ids.numel(),), len(chosen), device=chosen.device)
    places[chosen] = torch.arange(len(chosen), device=chosen.device)
    lead, k = routed.ids.shape[:-1], group.top_k
    sources, places = chosen // k, places.view(-1, k)
    rows = routed.tokens.view(-1, group.hidden)
    tracked = torch.is_grad_enabled() and rows.requires_grad
    rows = _Take.apply(rows, sources, places) if tracked else rows[sources]
    weights = routed.weights.reshape(-1).index_select(0, chosen)
    return Grouped(rows, weights, counts.tolist(), sources, places, lead)


def _chosen(group: Group, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of ids [..., K]: the places in [M * K] that have an expert of this rank, by expert and then ascending, so by
    (source, slot), as a token has an expert at most once; and how many each expert has, [L]. Both int64."""
    experts, flat = group.num_local_experts, ids.reshape(-1).long()
    here = (flat >= 0) & (flat < experts) & (flat != group.settings.invalid_id)
    keys = torch.where(here, flat, experts)
    counts = torch.bincount(keys, minlength=experts + 1)[:experts]
    return torch.sort(keys, stable=True).indices[: int(counts.sum())], counts


# ---- steps ---------------------------------------------------------------------------------------


def _checked_bound(group: Group, layout: str, bound: int | None) -> int | None:
    """The b of a dispatch; None in the exact layouts where none is named."""
    exact = group.shape.is_exact(layout)
    if exact and bound is None:
        return None
    b = group.shape.default_bound if bound is None else bound
    most = group.max_tokens if exact else group.low_latency_tokens or group.max_tokens
    if not isinstance(b, int) or not 1 <= b <= most:
        raise InvalidArgument.of("bound", f"is {b!r}; it must be an integer from 1 to {most}")
    return b


_BROUGHT = ("tokens", "weights", "ids", "counts", "offsets")  # Routed's tensors, in order


def _receive(handle: Handle[Group], tokens: Tensor, layout: str, bound: int | None, fill: bool) -> dict[str, Tensor]:
    """A dispatch into new tensors, Routed's; in the exact layouts the exchange of counts comes first."""
    group, grouped = handle.group, layout in GROUPED
    if group.shape.is_exact(layout):
        exchange_counts(handle, layout)
    with telling(lambda: group.refuse_dispatch(layout, bound)):
        lead = lead_of(handle, layout, bound)
        fields = group.shape.fields(layout, lead)
        names = ("weights", "ids", "counts", *("offsets",) * grouped)
        given = outputs_to_come(handle, layout, lead, fill)
        out = given | {name: empty(group, fields[name]) for name in names}
    out["tokens"] = send(handle, tokens, bound, out, layout).tokens
    if not grouped:
        out["offsets"] = functional.pad(out["counts"].cumsum(0, dtype=torch.int32), (1, 0))
    return out


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, handle: Handle[Group], layout: str, bound: int | None, fill: bool
    ) -> tuple[Tensor, ...]:
        out = _receive(handle, tokens, layout, bound, fill)
        keep_for_order(ctx, out["counts"])
        ctx.handle, ctx.layout = handle, layout
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out["ids"], out["counts"], out["offsets"])
        return tuple(out[name] for name in _BROUGHT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tokens: Tensor | None, weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
        handle: Handle[Group] = ctx.handle
        with telling(lambda: refuse_combine(handle)):
            kept_for_order(ctx)
        of_tokens, of_weights = return_gradients(handle, tokens, weights, ctx.needs_input_grad[1], ctx.layout)
        return of_tokens if ctx.needs_input_grad[0] else None, of_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor | None, handle: Handle[Group], layout: str, fill: bool) -> Tensor:
        ctx.handle, ctx.layout, ctx.dtype, ctx.fill = handle, layout, rows.dtype, fill
        ctx.bias_dtype = None if bias is None else bias.dtype
        return return_rows(handle, rows, layout, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Any, ...]:
        of_rows = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = send_gradients(ctx.handle, out, ctx.layout, ctx.fill).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = out.to(ctx.bias_dtype)
        return of_rows, of_bias, None, None, None


# ---- rows by expert --------------------------------------------------------------------------------


def _sum_over_k(rows: Tensor, places: Tensor) -> Tensor:
    """[R, H], [M, K] -> [M, H] float32. By reading, not by adding to places: that has no fixed order on a GPU."""
    padded = torch.cat([rows.float(), rows.new_zeros((1, rows.shape[1]), dtype=torch.float32)])
    total = padded[places[:, 0]]
    for k in range(1, places.shape[1]):
        total += padded[places[:, k]]
    return total


class _Take(torch.autograd.Function):
    """tokens[sources]; its backward, unlike PyTorch's own, sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.dtype = tokens.dtype
        return tokens[sources]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        return _sum_over_k(rows, places).to(ctx.dtype), None, None


class _Sum(torch.autograd.Function):
    """The adjoint of `_Take`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.dtype = rows.dtype
        return _sum_over_k(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tokens: Tensor) -> tuple[Any, ...]:
        (sources,) = ctx.saved_tensors
        return tokens[sources].to(ctx.dtype), None, None
