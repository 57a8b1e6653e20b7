"""Dispatch and combine as registered PyTorch ops, for `torch.compile` and other graph capture. Needs PyTorch.

    group_id = tokenway.ops.register(group)
    order = tokenway.ops.start()
    recv, ids, weights, counts, order = torch.ops.tokenway.dispatch(
        tokens, topk_ids, topk_weights, order, group_id, bound, "rank_major"
    )
    out, order = torch.ops.tokenway.combine(experts(recv), order, group_id, tokens.shape[0], "none")

Every rank must issue its steps in the same order, which a compiler cannot know: so each op takes and returns an order
token, and a chain of tokens is a chain of steps. The token also says which dispatch a combine answers. Use each token
once: compilers merge calls whose inputs are the same. Return the last one from a compiled function: the ops are
registered as having side effects, so that FX keeps one whose outputs are unused, but not every compiler asks.

A handle, and the lane that it leases, is kept from a dispatch to its combine, and at the longest until the group is
closed: a dispatch that is never combined (a forward pass that stops there) takes a lane of the group for good.

The order token is a CPU tensor, on CUDA devices too: it says in which order the host makes calls, and a token on the
device would have to be waited for. `torch.cuda.graph` captures the ops as it captures the calls of a group: each replay
repeats the steps of the capture. Inductor's own graphs (mode="reduce-overhead") leave out what has inputs on the CPU,
and so compiled functions that take a token.

The ops have no gradients: `tokenway.autograd` has dispatch and combine for training.

Outputs are fresh tensors, never views of the window, so that a compiler may keep or move them. Ops go through
`torch.library.Library.impl`, which costs a third of what `torch.library.custom_op` costs per call.
"""

from __future__ import annotations

import weakref

import torch
import torch.fx

from tokenway import tensors
from tokenway.errors import InvalidArgument
from tokenway.group import Group

_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_last_group = 0
_last_handle = 0

_library = torch.library.Library("tokenway", "DEF")
_library.define(
    "dispatch(Tensor tokens, Tensor ids, Tensor weights, Tensor order, int group, SymInt bound, str layout)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define("combine(Tensor rows, Tensor order, int group, SymInt tokens, str weighting) -> (Tensor, Tensor)")


def register(group: Group) -> int:
    """The number that names a group in the ops, for as long as the group lives. It does not keep the group alive."""
    global _last_group
    _last_group += 1
    _groups[_last_group] = group
    return _last_group


def start() -> torch.Tensor:
    """The order token of a first step: on the CPU, whatever the group's device and the default one."""
    return torch.zeros(1, dtype=torch.int64, device="cpu")


def _group(number: int) -> Group:
    group = _groups.get(number)
    if group is None:
        raise InvalidArgument(f"group is {number}; it must be a number from tokenway.ops.register of a living group")
    return group


def _check_order(order: torch.Tensor) -> None:
    if not order.is_cpu:
        raise InvalidArgument(
            f"order is a {order.device} tensor; it must be on the CPU, as tokenway.ops.start makes it"
        )


def _received(
    group: Group, like: torch.Tensor, bound: int, layout: str, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """New (tokens, ids, weights, counts) of a dispatch: the shapes that Received documents."""
    rank_major = layout == "rank_major"
    lead = (group.nranks, bound) if rank_major else (group.num_local_experts, group.nranks * bound)
    per_row = (group.top_k,) if rank_major else ()
    return (
        like.new_empty((*lead, group.hidden), device=device),
        like.new_empty((*lead, *per_row), dtype=getattr(torch, group.id_dtype), device=device),
        like.new_empty((*lead, *per_row), dtype=torch.float32, device=device),
        like.new_empty((lead[0],), dtype=torch.int32, device=device),
    )


def _dispatch(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    group: int,
    bound: int,
    layout: str,
) -> tuple[torch.Tensor, ...]:
    global _last_handle
    on = _group(group)
    try:
        _check_order(order)
        handle = on.route(ids, weights)
        device = torch.device("cpu") if on.device is None else torch.device("cuda", on.device)
        made = _received(on, tokens, bound, layout, device)  # tokens may be elsewhere, which the dispatch refuses
    except Exception:
        on.refuse_dispatch()  # peers are in the dispatch already
        raise
    out = dict(zip(("tokens", "ids", "weights", "counts"), made, strict=True))
    on.dispatch(handle, tokens, layout=layout, bound=bound, out=out)
    _last_handle += 1
    on.op_handles[_last_handle] = handle
    return (*made, torch.full_like(order, _last_handle))


def _combine(
    rows: torch.Tensor, order: torch.Tensor, group: int, tokens: int, weighting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    on = _group(group)
    _check_order(order)
    number = int(order.item())
    handle = on.op_handles.get(number)
    if handle is None:
        raise InvalidArgument(f"order is {number}; it must come from the dispatch that this combine answers")
    out = on.combine(handle, rows, weighting=weighting)
    del on.op_handles[number]
    return out, torch.zeros_like(order)


for _key in ("CPU", "CUDA"):
    _library.impl("dispatch", _dispatch, _key)
    _library.impl("combine", _combine, _key)
for _op in (torch.ops.tokenway.dispatch.default, torch.ops.tokenway.combine.default):
    torch.fx.node.has_side_effect(_op)


@torch.library.register_fake("tokenway::dispatch", lib=_library)
def _fake_dispatch(tokens, ids, weights, order, group, bound, layout):  # type: ignore[no-untyped-def]
    return (*_received(_group(group), tokens, bound, layout), torch.empty_like(order))


@torch.library.register_fake("tokenway::combine", lib=_library)
def _fake_combine(rows, order, group, tokens, weighting):  # type: ignore[no-untyped-def]
    on = _group(group)
    dtype = getattr(torch, tensors.dtype_name(on.combine_dtype))
    return rows.new_empty((tokens, on.combine_hidden), dtype=dtype), torch.empty_like(order)
