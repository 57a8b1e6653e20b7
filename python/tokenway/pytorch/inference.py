"""A layer's exchange where nothing requires gradients: rows come by expert, and go back as they came.

`autograd` has the same for gradients. Here no step is part of PyTorch's graph, and nothing is copied, masked or filled
for a backward pass. Rows come in the layout grouped, [P, H] with offsets, or in a dispatch of low latency also in
expert_major, [L, N * b, H] with counts; both say on the device how much of them there is, so nothing waits for it.

Memory beyond what came is what the allocator had, NaN perhaps, and that is no harm as long as who computes keeps rows
apart: a matrix product makes a row of its result from that row alone, `experts.product` and `experts.swiglu` read no
further than the offsets or counts say, and a combine reads the rows that came, by the handle's metadata, and no others.
Padding inside of grouped is 0, as a dispatch writes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenway.calls import Calls
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.pytorch.gradients import device_of, eager, refuse_combine
from tokenway.shape import GROUPED

Tensor = torch.Tensor


class Arrived(NamedTuple):
    """Rows by expert."""

    rows: Tensor  # [P, H] or [L, N * b, H] of the group's dtype
    weights: Tensor  # [P] or [L, N * b] float32: the router's for that token and expert
    sizes: Tensor  # int32: [L + 1], where each expert's rows begin and at last all; or [L], how many come first
    handle: Handle[Group]  # the routing, dispatched, without a lane
    layout: str


@eager
def dispatch(
    group: Group, tokens: Tensor, ids: Tensor, weights: Tensor, layout: str, bound: int | None, layer: int = 0
) -> Arrived:
    """Sends every token to the ranks of its experts: a step of all ranks, in the grouped of high throughput two. As
    `tokenway.autograd.dispatch`, but for layout: "grouped" of high throughput, or of low latency "grouped_by_bound" or
    "expert_major"."""
    try:
        handle = group.route(ids, weights, layer=layer)
    except Exception:
        group.refuse_routing(layout, bound)
        raise
    name, length = "counts", group.num_local_experts
    if layout == "grouped":
        group.exchange_counts(handle)
    if layout in GROUPED:
        name, length = "offsets", length + 1
    # In memory of its own: a view of the handle's takes longer to make.
    sizes = torch.empty(length, dtype=torch.int32, device=device_of(group))
    try:
        came = group.dispatch(handle, tokens, layout=layout, bound=bound, out={name: sizes})
    finally:
        if handle.leased:  # rows by expert are copies, and an error between the steps costs no lane
            handle.release()
    return Arrived(came.tokens, came.weights, sizes, handle, layout)


@eager
def combine(back: Calls, arrived: Arrived, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns rows to their owners and sums them: [T, H] of the group's dtype. A step of all ranks. back:
    `gradients.returning(group)`. rows: as `arrived.rows`, of that dtype or float32, weighted already; those beyond
    what came are not read. bias: as of `Group.combine`."""
    return back.combine(arrived.handle, rows, layout=arrived.layout, dtype=arrived.handle.group.dtype, bias=bias)


@eager
def refuse(arrived: Arrived) -> None:
    """Tells peers, which are in the combine, that this rank cannot make it."""
    refuse_combine(arrived.handle)
