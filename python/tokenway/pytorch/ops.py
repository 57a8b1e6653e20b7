"""The ops of `tokenway.ops`, which says how they are used and what they promise."""

from __future__ import annotations

import struct
import weakref
from typing import Any

import numpy as np
import torch
import torch.fx

from tokenway import tensors
from tokenway.arguments import telling
from tokenway.calls import Calls
from tokenway.errors import InvalidArgument
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.pytorch import gradients

_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
_last_group = 0
_last_handle = 0
_NUMBER, _FLOAT = struct.Struct("=q"), struct.Struct("=d")

_library = torch.library.Library("tokenway", "DEF")
_library.define(
    "dispatch(Tensor tokens, Tensor ids, Tensor weights, Tensor order, int group, SymInt bound, str layout)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "combine(Tensor rows, Tensor order, int group, SymInt tokens, str weighting, Tensor? bias=None) -> (Tensor, Tensor)"
)
# Their backward: of gradients of what came, and of the sums. routed: the order token that the dispatch returned.
_library.define(
    "return_gradients(Tensor received, Tensor weights, Tensor routed, Tensor order, int group, SymInt tokens)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("send_gradients(Tensor out, Tensor routed, Tensor order, int group, SymInt bound) -> (Tensor, Tensor)")
# Each is the other's backward. sizes: the rows of each rank.
_library.define("all_gatherv(Tensor rows, Tensor order, int group, SymInt[] sizes) -> (Tensor, Tensor)")
_library.define("reduce_scatterv(Tensor rows, Tensor order, int group, SymInt[] sizes) -> (Tensor, Tensor)")


def register(group: Group) -> int:
    """The number that names a group in the ops, for as long as the group lives. It does not keep the group alive."""
    global _last_group
    _last_group += 1
    _groups[_last_group] = group
    return _last_group


def start() -> torch.Tensor:
    """The order token of a first step: on the CPU, whatever the group's device and the default one."""
    return torch.zeros(1, dtype=torch.float64, device="cpu")


def _group(number: int) -> Group:
    group = _groups.get(number)
    if group is None:
        raise InvalidArgument.of(
            "group", f"is {number}; it must be a number from tokenway.ops.register of a living group"
        )
    return group


def _check_order(order: torch.Tensor) -> None:
    if not order.is_cpu:
        raise InvalidArgument.of(
            "order", f"is a {order.device} tensor; it must be on the CPU, as tokenway.ops.start makes it"
        )


def _trains(group: Group) -> bool:
    """Whether a group may have been made for training: its rows have room for gradients of weights."""
    return group.combine_hidden > group.hidden or gradients.returns_weights(group)


def _keep(group: Group, handle: Handle[Group]) -> torch.Tensor:
    """The order token of a dispatch: its bits are the number of the handle, which a combine finds by it.

    A float, since others have no gradient, and practically 0, whatever is added up. In training no call is the last
    one of a handle: it lives as long as the token's memory, which PyTorch's graph keeps.
    """
    global _last_handle
    _last_handle += 1
    memory = np.array([_last_handle], np.int64).view(np.float64)
    group.op_handles[_last_handle] = handle
    if _trains(group):
        weakref.finalize(memory, group.op_handles.pop, _last_handle, None).atexit = False
    return torch.from_numpy(memory)


def _kept(group: Group, order: torch.Tensor) -> tuple[int, Handle[Group]]:
    """(number, handle) of the dispatch that an order token came from."""
    _check_order(order)
    (number,) = _NUMBER.unpack(_FLOAT.pack(order.item()))
    handle = group.op_handles.get(number)
    if handle is None:
        raise InvalidArgument.of("order", f"is {number}; it must come from the dispatch that this combine answers")
    return number, handle


# ---- forward -------------------------------------------------------------------------------------


def _received(
    group: Group, like: torch.Tensor, bound: int, layout: str, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """New (tokens, ids, weights, counts) of a dispatch: the shapes that Received documents."""
    fields = group.shape.fields(layout, group.shape.lead(layout, bound, 0))
    made = []
    for name in ("tokens", "ids", "weights", "counts"):
        # Nobody may multiply a gradient with a NaN by chance.
        make = like.new_zeros if name == "tokens" and _trains(group) else like.new_empty
        made.append(make(fields[name].shape, dtype=getattr(torch, fields[name].dtype), device=device))
    return tuple(made)


def _dispatch(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    group: int,
    bound: int,
    layout: str,
) -> tuple[torch.Tensor, ...]:
    on = _group(group)
    with telling(on.refuse_dispatch):
        _check_order(order)
        handle = on.route(ids, weights)
        device = torch.device("cpu") if on.device is None else torch.device("cuda", on.device)
        made = _received(on, tokens, bound, layout, device)  # tokens may be elsewhere, which the dispatch refuses
        out = dict(zip(("tokens", "ids", "weights", "counts"), made, strict=True))
    if _trains(on):
        gradients.send(handle, tokens, bound, out, layout)
    else:
        on.dispatch(handle, tokens, layout=layout, bound=bound, out=out)
    return (*made, _keep(on, handle))


def _combine(
    rows: torch.Tensor,
    order: torch.Tensor,
    group: int,
    tokens: int,
    weighting: str,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    on = _group(group)
    with telling(lambda: _refuse_only_combine(on)):
        number, handle = _kept(on, order)
    back: Calls = on
    with telling(lambda: gradients.refuse_combine(handle, back)):
        # Rows of a token's elements come back as such, where the group returns longer ones too.
        if _narrow(on, rows):
            back = gradients.returning(on)
        if tokens != handle.tokens:
            raise InvalidArgument.of("tokens", f"is {tokens}; it must be those of the dispatch, {handle.tokens}")
    out = back.combine(handle, rows, weighting=weighting, bias=bias)
    if not _trains(on):
        del on.op_handles[number]
    return out, torch.zeros_like(order)


def _refuse_only_combine(group: Group) -> None:
    """Of a combine by an order token that names no dispatch: it can be of one alone, if that is the only one."""
    waiting = [handle for handle in group.op_handles.values() if handle.leased]
    if len(waiting) == 1:
        gradients.refuse_combine(waiting[0])


def _narrow(group: Group, rows: torch.Tensor) -> bool:
    """Whether rows have the elements of a token in a group that returns more of them."""
    return group.combine_hidden > group.hidden and rows.dim() > 0 and rows.shape[-1] == group.hidden


# ---- backward ------------------------------------------------------------------------------------


def _return_gradients(
    received: torch.Tensor, weights: torch.Tensor, routed: torch.Tensor, order: torch.Tensor, group: int, tokens: int
) -> tuple[torch.Tensor, ...]:
    _, handle = _kept(_group(group), routed)
    of_tokens, of_weights = gradients.return_gradients(handle, received, weights, True, "rank_major")
    assert of_weights is not None
    return of_tokens, of_weights, torch.zeros_like(order)


def _send_gradients(
    out: torch.Tensor, routed: torch.Tensor, order: torch.Tensor, group: int, bound: int
) -> tuple[torch.Tensor, torch.Tensor]:
    on = _group(group)
    with telling(on.refuse_dispatch):
        _, handle = _kept(on, routed)
        _check_layout(handle.layout)
    return gradients.send_gradients(handle, out, "rank_major"), torch.zeros_like(order)


def _check_layout(layout: str) -> None:
    if layout != "rank_major":
        raise InvalidArgument.of("layout", f"is {layout!r}; for gradients it must be 'rank_major'")


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    tokens, _, _, _, ctx.group, _, ctx.layout = inputs
    ctx.tokens = tokens.shape[0]
    ctx.save_for_backward(output[4])


def _dispatch_backward(ctx: Any, received: Any, _ids: Any, weights: Any, _counts: Any, order: Any) -> tuple[Any, ...]:
    gradients.check_group(_group(ctx.group), True)
    _check_layout(ctx.layout)
    (routed,) = ctx.saved_tensors
    step = torch.ops.tokenway.return_gradients
    of_tokens, of_weights, order = step(received, weights, routed, order, ctx.group, ctx.tokens)
    return of_tokens, None, of_weights, order, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    rows, routed, ctx.group, _, ctx.weighting, *last = inputs
    ctx.shape, ctx.dtype = rows.shape, rows.dtype
    ctx.given = len(inputs)
    ctx.bias = last[0].dtype if last and last[0] is not None else None
    ctx.save_for_backward(routed)


def _combine_backward(ctx: Any, out: Any, order: Any) -> tuple[Any, ...]:
    on = _group(ctx.group)
    with telling(on.refuse_dispatch):
        gradients.check_group(on, True)
        if ctx.weighting != "none":
            raise InvalidArgument.of("weighting", f"is {ctx.weighting!r}; for gradients it must be 'none'")
        if ctx.shape[-1] != on.hidden:
            raise InvalidArgument.of(
                "rows", f"has shape {list(ctx.shape)}; for gradients it must be [..., {on.hidden}]"
            )
        (routed,) = ctx.saved_tensors
        bound = ctx.shape[:-1].numel() // on.nranks
    rows, order = torch.ops.tokenway.send_gradients(out, routed, order, ctx.group, bound)
    of_bias = None if ctx.bias is None else out.to(ctx.bias)
    return (rows.view(ctx.shape).to(ctx.dtype), order, None, None, None, of_bias)[: ctx.given]


# ---- gathers and reduces -----------------------------------------------------------------------------


def _all_gatherv(rows: torch.Tensor, order: torch.Tensor, group: int, sizes: list[int]) -> tuple[Any, ...]:
    on = _group(group)
    with telling(lambda: gradients.refuse(on.all_gatherv)):
        _check_order(order)
    return on.all_gatherv(rows, list(sizes)).rows, torch.zeros_like(order)


def _reduce_scatterv(rows: torch.Tensor, order: torch.Tensor, group: int, sizes: list[int]) -> tuple[Any, ...]:
    on = _group(group)
    with telling(lambda: gradients.refuse(on.reduce_scatterv)):
        _check_order(order)
    return on.reduce_scatterv(rows, list(sizes)), torch.zeros_like(order)


def _collective_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, _, ctx.group, ctx.sizes = inputs


def _all_gatherv_backward(ctx: Any, rows: Any, order: Any) -> tuple[Any, ...]:
    return (*torch.ops.tokenway.reduce_scatterv(rows.contiguous(), order, ctx.group, ctx.sizes), None, None)


def _reduce_scatterv_backward(ctx: Any, rows: Any, order: Any) -> tuple[Any, ...]:
    return (*torch.ops.tokenway.all_gatherv(rows.contiguous(), order, ctx.group, ctx.sizes), None, None)


def _fake_all_gatherv(
    rows: torch.Tensor, order: torch.Tensor, group: int, sizes: list[int]
) -> tuple[torch.Tensor, ...]:
    return rows.new_empty((sum(sizes), *rows.shape[1:])), torch.empty_like(order)


def _fake_reduce_scatterv(
    rows: torch.Tensor, order: torch.Tensor, group: int, sizes: list[int]
) -> tuple[torch.Tensor, ...]:
    return rows.new_empty((sizes[_group(group).rank], *rows.shape[1:])), torch.empty_like(order)


# ---- registration --------------------------------------------------------------------------------


def _fake_dispatch(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    group: int,
    bound: int,
    layout: str,
) -> tuple[torch.Tensor, ...]:
    return (*_received(_group(group), tokens, bound, layout), torch.empty_like(order))


def _fake_combine(
    rows: torch.Tensor,
    order: torch.Tensor,
    group: int,
    tokens: int,
    weighting: str,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    on = _group(group)
    dtype = getattr(torch, tensors.dtype_name(on.combine_dtype))
    elements = on.hidden if _narrow(on, rows) else on.combine_hidden
    return rows.new_empty((tokens, elements), dtype=dtype), torch.empty_like(order)


def _fake_return_gradients(
    received: torch.Tensor, weights: torch.Tensor, routed: torch.Tensor, order: torch.Tensor, group: int, tokens: int
) -> tuple[torch.Tensor, ...]:
    on = _group(group)
    of_tokens = received.new_empty((tokens, on.hidden), dtype=getattr(torch, on.dtype))
    return of_tokens, weights.new_empty((tokens, on.top_k)), torch.empty_like(order)


def _fake_send_gradients(
    out: torch.Tensor, routed: torch.Tensor, order: torch.Tensor, group: int, bound: int
) -> tuple[torch.Tensor, ...]:
    on = _group(group)
    dtype = getattr(torch, on.dtype)
    return out.new_empty((on.nranks, bound, on.hidden), dtype=dtype), torch.empty_like(order)


for _name, _implementation, _fake in (
    ("dispatch", _dispatch, _fake_dispatch),
    ("combine", _combine, _fake_combine),
    ("return_gradients", _return_gradients, _fake_return_gradients),
    ("send_gradients", _send_gradients, _fake_send_gradients),
    ("all_gatherv", _all_gatherv, _fake_all_gatherv),
    ("reduce_scatterv", _reduce_scatterv, _fake_reduce_scatterv),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"tokenway::{_name}", _fake, lib=_library)
    torch.fx.node.has_side_effect(getattr(torch.ops.tokenway, _name).default)
torch.library.register_autograd("tokenway::dispatch", _dispatch_backward, setup_context=_dispatch_context, lib=_library)
torch.library.register_autograd("tokenway::combine", _combine_backward, setup_context=_combine_context, lib=_library)
for _name, _backward in (("all_gatherv", _all_gatherv_backward), ("reduce_scatterv", _reduce_scatterv_backward)):
    torch.library.register_autograd(f"tokenway::{_name}", _backward, setup_context=_collective_context, lib=_library)
