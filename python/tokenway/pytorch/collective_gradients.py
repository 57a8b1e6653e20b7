"""Gathers and reduce-scatters that gradients flow through, each the other's backward. `tokenway.autograd` has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from tokenway.arguments import telling
from tokenway.collectives import Sizes, gather_bound, reduce_bound
from tokenway.group import Group
from tokenway.pytorch.gradients import check_memory, eager, keep_for_order, kept_for_order, refuse

Tensor = torch.Tensor


@eager
def all_gatherv(group: Group, rows: Tensor, sizes: Any = None, *, bound: int | None = None) -> Tensor:
    """`Group.all_gatherv` in the layout flat, differentiable: [R, ...]. A step of all ranks, and one in the backward
    pass if rows require gradients, which must be so on all ranks or on none.

    rows: [n, ...], float32, bfloat16 or float16. sizes, bound: as there. Where sizes are not known here R is N*b, and
    rows beyond those that came are 0. Gradients: summed over ranks ascending, in float32, rounded once. Errors: as
    there."""
    with telling(lambda: refuse(group.all_gatherv)):
        check_memory("rows", rows)
        sizes = _kept(sizes)
    return _Gather.apply(rows, group, sizes, bound)


@eager
def reduce_scatterv(group: Group, rows: Tensor, sizes: Any = None, *, bound: int | None = None) -> Tensor:
    """`Group.reduce_scatterv` in the layout flat, differentiable: [n, ...] of the dtype of rows. A step of all ranks,
    and one in the backward pass if rows require gradients, which must be so on all ranks or on none.

    rows: [R, ...], float32, bfloat16 or float16. sizes, bound: as there. With a tensor of sizes there are b rows, 0
    beyond this rank's own. Gradients: those of all ranks' sums, bit for bit. Errors as there."""
    with telling(lambda: refuse(group.reduce_scatterv)):
        check_memory("rows", rows)
        sizes = _kept(sizes)
    return _Reduce.apply(rows, group, sizes, bound)


def _is_known(sizes: Any) -> bool:
    return isinstance(sizes, (list, tuple))


def _zeros(group: Group, like: Tensor, ranks: int, bound: int) -> Tensor | None:
    """Where rows of so many ranks are written to; None for a bound that the group will refuse."""
    return like.new_zeros((ranks * bound, *like.shape[1:])) if 1 <= bound <= group.max_tokens else None


def _gather(group: Group, rows: Tensor, sizes: Any, bound: int | None) -> tuple[Tensor, Any]:
    """(rows of all ranks, 0 beyond them; sizes for the way back)."""
    with telling(lambda: refuse(group.all_gatherv)):
        check_memory("rows", rows)
        rows = rows.contiguous()
        if not _is_known(sizes):
            out = _zeros(group, rows, group.nranks, gather_bound(group.shape, Sizes.of(sizes), (rows,), bound))
    if _is_known(sizes):
        return group.all_gatherv(rows, sizes, bound=bound).rows, sizes
    gathered = group.all_gatherv(rows, sizes, bound=bound, out=out)
    return gathered.rows, gathered.counts


def _reduce(group: Group, rows: Tensor, sizes: Any, bound: int | None) -> Tensor:
    out = None
    with telling(lambda: refuse(group.reduce_scatterv)):
        check_memory("rows", rows)
        rows = rows.contiguous()
        if sizes is not None and not _is_known(sizes):
            out = _zeros(group, rows, 1, reduce_bound(group.shape, Sizes.of(sizes), (rows,), True, bound))
    return group.reduce_scatterv(rows, sizes, bound=bound, out=out)


def _kept(sizes: Any) -> Any:
    """Sizes as they are now, for the backward pass: the caller may write the next step's into the same place."""
    if isinstance(sizes, Tensor):
        return sizes.clone()
    if isinstance(sizes, np.ndarray):
        return sizes.copy()
    return list(sizes) if isinstance(sizes, (list, tuple)) else sizes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sizes: Any, bound: int | None) -> Tensor:
        out, ctx.sizes = _gather(group, rows, sizes, bound)
        ctx.group, ctx.count = group, rows.shape[0]
        keep_for_order(ctx, rows.new_empty(0))
        ctx.bound = bound if _is_known(sizes) else out.shape[0] // group.nranks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Any, ...]:
        with telling(lambda: refuse(ctx.group.reduce_scatterv)):
            kept_for_order(ctx)
        return _reduce(ctx.group, out, ctx.sizes, ctx.bound)[: ctx.count], None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sizes: Any, bound: int | None) -> Tensor:
        out = _reduce(group, rows, sizes, bound)
        ctx.group, ctx.bound = group, bound
        ctx.sizes = [out.shape[0]] * group.nranks if sizes is None else sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Any, ...]:
        return _gather(ctx.group, out, ctx.sizes, ctx.bound)[0], None, None, None
