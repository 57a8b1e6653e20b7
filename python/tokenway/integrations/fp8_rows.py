"""A dispatch whose rows travel as fp8 and return their gradients as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tokenway as tw
from tokenway import autograd
from tokenway.integrations.groups import Views
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

_BLOCK = 128  # elements that share a scale, as `tokenway.quantize_fp8` makes them


def wire_of(views: Views, hidden: int, max_tokens: int) -> TypedGroup:
    """The shared group as dispatches see it whose rows are [H] e4m3 with a float32 scale for each 128 elements. As
    `SharedGroup.with_room`; a group with room for plain rows has room for these."""
    key = "fp8", hidden
    if (found := views.find(key, max_tokens)) is not None:
        return found
    scales = {"scales": (-(-hidden // _BLOCK), "float32")}
    return views.make(key, tw.RowType(hidden, "float8_e4m3fn", scales), max_tokens)


@gradients.eager
def bring(
    group: TypedGroup, wire: TypedGroup, tokens: Tensor, ids: Tensor, weights: Tensor, layout: str, bound: int | None
) -> autograd.Routed:
    """`tokenway.autograd.dispatch` of tokens [T, H] of the group's dtype, each quantised once (`tokenway.quantize_fp8`)
    for the way to its experts, who are given what that is in the group's dtype. Rows that no token came to are
    arbitrary in rank_major. A step of all ranks, in "grouped" of high throughput two, and one in the backward pass,
    whose rows are of the group's dtype: gradients pass straight through the quantising. wire: `wire_of` the same
    group; bound: None in "grouped"."""
    tracked = torch.is_grad_enabled()
    with gradients.telling(lambda: wire.refuse_routing(layout, bound)):
        if tracked:
            gradients.check_group(group, weights.requires_grad)
        gradients.check_memory("tokens", tokens)
        handle = group.route(ids, weights.detach())
    if tracked and (tokens.requires_grad or weights.requires_grad):
        return autograd.Routed(*_Dispatch.apply(tokens, weights, handle, wire, layout, bound), handle, layout)
    return autograd.Routed(*_received(handle, wire, tokens, layout, bound), handle, layout)


def _received(
    handle: Any, wire: TypedGroup, tokens: Tensor, layout: str, bound: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What Routed has first: tokens, weights, ids, counts, offsets."""
    grouped = layout == "grouped"
    if wire.shape.is_exact(layout):
        gradients.exchange_counts(handle, layout)
    with gradients.telling(lambda: wire.refuse_dispatch(layout, bound)):
        fields = wire.shape.fields(layout, gradients.lead_of(handle, layout, bound))
        names = ("tokens", "scales", "weights", "ids", "counts", *("offsets",) * grouped)
        out = {name: gradients.empty(wire, fields[name]) for name in names}
        values, scales = tw.quantize_fp8(tokens.detach())
    with gradients.lane_given_back(handle):
        wire.dispatch(handle, values, {"scales": scales}, bound=bound, out=out, layout=layout)
    rows = tw.dequantize_fp8(out["tokens"], out["scales"]).to(tokens.dtype)
    offsets = out["offsets"] if grouped else out["counts"].cumsum(0, dtype=torch.int32)
    if not grouped:
        offsets = torch.nn.functional.pad(offsets, (1, 0))
    return rows, out["weights"], out["ids"], out["counts"], offsets


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        handle: Any,
        wire: TypedGroup,
        layout: str,
        bound: int | None,
    ) -> tuple[Tensor, ...]:
        out = _received(handle, wire, tokens, layout, bound)
        gradients.keep_for_order(ctx, out[3])
        ctx.handle, ctx.layout = handle, layout
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[2:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tokens: Tensor | None, weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
        handle: Any = ctx.handle
        with gradients.telling(lambda: gradients.refuse_combine(handle)):
            gradients.kept_for_order(ctx)
        returned = gradients.return_gradients(handle, tokens, weights, ctx.needs_input_grad[1], ctx.layout)
        return returned[0] if ctx.needs_input_grad[0] else None, returned[1], None, None, None, None
