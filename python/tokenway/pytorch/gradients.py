"""The steps of a layer that is trained, on plain tensors: what `autograd` and `ops` give to PyTorch's autograd.

A combine returns rows, and its backward, `send_gradients`, is a dispatch by the same routing. A dispatch sends tokens,
and its backward, `return_gradients`, is a combine, in which gradients of weights travel beside those of the tokens.
Layouts are "rank_major", "expert_major" and "grouped_by_bound", which is the grouped of low latency, or "flat" and
"grouped" of a group of high throughput.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from tokenway import tensors
from tokenway.arguments import telling
from tokenway.calls import Calls
from tokenway.errors import InvalidArgument, TokenwayError
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.settings import RowType
from tokenway.shape import BY_BOUND, GROUPED, Field

Tensor = torch.Tensor
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_uncompiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def eager(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that `torch.compile` leaves alone, with all that it calls: the way of a tensor to the C library is
    nothing that it could trace. PyTorch's own decorator loads the compiler, which takes seconds, at once; here only
    where somebody else has."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        dynamo = sys.modules.get("torch._dynamo")
        if not hasattr(dynamo, "eval_frame"):  # nobody compiles, nor could: another thread may be about to load it
            return function(*args, **kwargs)
        if function not in _uncompiled:
            # Nor this frame, of which there is one for all functions: it would be compiled for each of them anew, up to
            # PyTorch's limit.
            dynamo.eval_frame.skip_code(call.__code__)
            _uncompiled[function] = torch.compiler.disable(function)
        return _uncompiled[function](*args, **kwargs)

    return call


def keep_for_order(ctx: Any, tensor: Tensor) -> None:
    """In the forward pass of a step that brings rows: saves a tensor, to be asked for before their gradients return.

    A checkpoint that is not reentrant repeats the forward pass when the first tensor saved in it is asked for. In
    between a rank without experts may have saved none: it would repeat its steps after one that other ranks repeat
    theirs before."""
    ctx.save_for_backward(tensor)


def kept_for_order(ctx: Any) -> Tensor:
    """In its backward pass, first of all: that tensor."""
    (tensor,) = ctx.saved_tensors
    return tensor


_BYTES = {"float32": 4, "bfloat16": 2}  # of an element


def weight_columns(top_k: int, dtype: Any = "bfloat16") -> int:
    """Elements by which a returned row may be longer than H so that there is room for the gradients of `top_k` weights:
    a group with a combine_hidden of H + so many can be trained with, as one of `make_group` can. dtype: of the rows,
    float32 or bfloat16. Raises InvalidArgument for others."""
    name = tensors.dtype_name(dtype)
    if name not in _BYTES:
        raise InvalidArgument.of("dtype", f"is {name}; to train with it must be float32 or bfloat16")
    return top_k * (1 if name == "float32" else 3)


def room_for(hidden: int, dtype: str, top_k: int) -> int:
    """Bytes of `combine_room` for rows of gradients and those of `top_k` weights beside each. dtype: one that can be
    trained with."""
    return hidden * _BYTES[dtype] + 4 * top_k


def room_of(group: Group) -> int:
    """Bytes that the group has room for in a row that returns."""
    return max(group.combine_hidden * _BYTES.get(group.combine_dtype, 2), group.settings.combine_room)


def returns_weights(group: Group) -> bool:
    """Whether gradients of weights have room beside a group's rows, as `make_group` makes it."""
    return group.dtype in _BYTES and room_of(group) >= room_for(group.hidden, group.dtype, group.top_k)


def check_group(group: Group, weights_too: bool) -> None:
    """Raises InvalidArgument unless rows of this group can carry gradients both ways: dtype float32 or bfloat16, the
    same for combine_dtype, and room for a row of gradients, and for those of weights beside it, if there are to be
    any."""
    dtype = group.dtype
    weight_columns(group.top_k, dtype)
    if group.combine_dtype != dtype:
        raise InvalidArgument(
            f"the group's combine_dtype is {group.combine_dtype}; to train it must be its dtype, {dtype}"
        )
    if group.combine_hidden == group.hidden and not weights_too:
        return
    needed = room_for(group.hidden, dtype, group.top_k if weights_too else 0)
    if (room := room_of(group)) < needed:
        raise InvalidArgument(
            f"the group's combine_room is {room}; for gradients{' of weights' * weights_too} it must be at least "
            f"{needed} (tokenway.autograd.make_group makes such a group)"
        )


_typed: weakref.WeakKeyDictionary[Group, Calls] = weakref.WeakKeyDictionary()


def returning(group: Group) -> Calls:
    """What combines rows of H elements: the group, or, where its own returned rows are longer, its rows of another
    type, which are made once. Raises InvalidArgument without room for them."""
    if group.combine_hidden == group.hidden:
        return group
    made = _typed.get(group)
    if made is None:
        rows = RowType(group.hidden, group.dtype, payloads=group.settings.payloads, combine_dtype=group.dtype)
        made = _typed[group] = group.rows(rows)
    return made


def check_layout(group: Group, layout: str | None) -> str:
    """The layout of a dispatch, None being the first one that the group has. Raises InvalidArgument for others, and for
    "grouped" where gradients of weights could not find their way: that takes all rows, by local expert."""
    allowed = ("flat", "grouped") if group.exact else ("rank_major", "grouped")
    if group.low_latency_tokens:
        allowed = ("rank_major", "flat", "grouped", BY_BOUND)
    if returns_choices(group):  # by expert alone
        allowed = tuple(name for name in allowed if name in GROUPED)
    layout = allowed[0] if layout is None else layout
    if layout == BY_BOUND and BY_BOUND in group.shape.layouts:
        check_local(group, "the layout 'grouped'")
        return layout
    if layout not in allowed:
        names = " or ".join(map(repr, allowed))
        raise InvalidArgument.of(
            "layout", f"is {layout!r}; to train in the mode {group.settings.mode!r} it must be {names}"
        )
    if layout == "grouped":
        check_local(group, "the layout 'grouped'")
    return str(group.shape.choose(layout, None))


def returns_choices(group: Group) -> bool:
    """Whether combines return rows per expert, so that they take layouts by expert alone."""
    return group.settings.combine_rows == "per_expert"


def check_local(group: Group, what: str) -> None:
    """Raises InvalidArgument unless ids say which expert of this rank a row is for."""
    if group.settings.id_space != "local":
        raise InvalidArgument(f"the group's id_space is {group.settings.id_space!r}; {what} needs 'local'")


# ---- what peers learn ------------------------------------------------------------------------------


def refuse_combine(handle: Handle[Group], back: Calls | None = None) -> None:
    """As Group.refuse_dispatch: no rows are refused, and the peers told. back: what would have combined, by default as
    `returning` says: a refusal of rows of another type moves other sizes than the peers' call."""
    calls = back or _calls_back(handle.group)
    refuse(lambda rows: calls.combine(handle, rows))


def _calls_back(group: Group) -> Calls:
    try:
        return returning(group)
    except TokenwayError:  # nobody has room for such rows
        return group


def refuse(call: Callable[[None], object]) -> None:
    """The same of any step that takes rows first."""
    with suppress(TokenwayError):
        call(None)


def check_memory(name: str, x: Any) -> None:
    """Raises InvalidArgument for what is no tensor with elements in memory, as in a transform of torch.func: an
    autograd function would raise there before it has made its step."""
    if not isinstance(x, Tensor):
        raise InvalidArgument.of(name, f"is of type {type(x).__name__}; it must be a PyTorch tensor")
    if (what := tensors.legible(tensors.without_memory, x)) is not None:
        raise tensors.refusal(name, what, tensors.obstacle(tensors.describe_torch, x))


# ---- steps -----------------------------------------------------------------------------------------


def capturing(group: Group) -> bool:
    """Whether calls are captured into a graph."""
    return group.device is not None and group.native.place.capturing()


def device_of(group: Group) -> torch.device:
    """Where the group's tensors are."""
    return torch.device("cpu") if group.device is None else group.native.place.device


def lead_of(handle: Handle[Group], layout: str, bound: int | None = None) -> tuple[int, ...]:
    """The dimensions before a row's: N and b, or in the exact layouts R' or P. bound: b of a dispatch to come; None: of
    the last one."""
    rows = handle.rows_of(layout) if handle.group.shape.is_exact(layout) else 0
    assert rows is not None, "counts are exchanged before the dispatch"
    return handle.group.shape.lead(layout, handle.bound if bound is None else bound, rows)


def empty(group: Group, field: Field) -> Tensor:
    """A new tensor where the group's are."""
    return torch.empty(field.shape, dtype=getattr(torch, field.dtype), device=device_of(group))


def no_rows(group: Group, lead: tuple[int, ...], elements: int) -> Tensor:
    """[*lead, elements] of 0. A dispatch writes the rows that come, and what it leaves must not be a NaN by chance."""
    return torch.zeros((*lead, elements), dtype=getattr(torch, group.dtype), device=device_of(group))


def rows_to_come(group: Group, lead: tuple[int, ...], elements: int, layout: str, fill: bool = True) -> Tensor:
    """[*lead, elements] for a dispatch to write to: the exact layouts write all of it, padding too, unless there are
    more rows than come. fill: those that nothing is written to are 0; else they are what the memory held, for who reads
    no further than the counts say."""
    fixed = group.device is not None and not group.shape.sizes_outputs
    if fill and (not group.shape.layouts[layout].exact or fixed or capturing(group)):
        return no_rows(group, lead, elements)
    return torch.empty((*lead, elements), dtype=getattr(torch, group.dtype), device=device_of(group))


def leases(group: Group, layout: str) -> bool:
    """Whether rows of a dispatch are to stay where they arrive, in a lease. By the group's settings alone, as all ranks
    exchange counts for it: where a graph is captured a rank leases nothing, since memory that is given back would be
    written to by replays, but it makes the same steps."""
    return group.settings.lease_bytes > 0 and layout == "flat"


def exchange_counts(handle: Handle[Group], layout: str) -> None:
    """Before a dispatch: where its counts are not known, or its rows need a place of their own."""
    group = handle.group
    lease = leases(group, layout)
    if lease or not handle.counted or handle.rows_of(layout) is None:  # the last asks C, which takes longer to say no
        group.exchange_counts(handle, lease="zeros" if lease and not capturing(group) else False)
    group.size_outputs(handle)


def outputs_to_come(
    handle: Handle[Group], layout: str, lead: tuple[int, ...] | None = None, fill: bool = True
) -> dict[str, Tensor]:
    """`out` of a dispatch for its tokens: none where they have a lease, or are copied for want of one. fill: as of
    `rows_to_come`."""
    group = handle.group
    if leases(group, layout) and not capturing(group):
        return {}
    return {"tokens": rows_to_come(group, lead or lead_of(handle, layout), group.hidden, layout, fill)}


@contextmanager
def lane_given_back(handle: Handle[Group]) -> Iterator[None]:
    """Around a dispatch and what is read of the window: a combine of the handle leases a lane for itself, so no lane is
    lost where a backward pass never comes."""
    try:
        yield
    finally:
        if handle.leased:  # not after a refusal, where that is known at once
            handle.release()


def send(
    handle: Handle[Group], tokens: Tensor, bound: int | None, out: Mapping[str, Tensor], layout: str, count: bool = True
) -> Any:
    """A dispatch into tensors of the caller's, or leases, that holds no lane afterwards: nothing of a window's bank is
    needed then. Returns Received."""
    with lane_given_back(handle):
        return handle.group.dispatch(handle, tokens, bound=bound, out=out, layout=layout, count=count)


def return_gradients(
    handle: Handle[Group], tokens: Tensor | None, weights: Tensor | None, weights_too: bool, layout: str
) -> tuple[Tensor, Tensor | None]:
    """The backward of a dispatch: from gradients of what came, None being 0, those of the T tokens and, if there are to
    be any, of their weights, on all ranks or on none. A step, whatever gradients there are: those may differ from rank
    to rank, steps may not.

    tokens: [..., H], weights: [..., K] float32, by layout; in "grouped" [P], as a row has one k.
    """
    group = handle.group
    with telling(lambda: _refuse_gradients(handle, weights_too)):
        lead = lead_of(handle, layout)
        rows = no_rows(group, lead, group.hidden) if tokens is None else readable(tokens)
        values = gradients_of_weights(group, weights, lead, layout) if weights_too else None
        back = returning(group)
    returned = back.combine(handle, rows, layout=layout, choice_values=values)
    return returned if weights_too else (returned, None)


def gradients_of_weights(group: Group, weights: Tensor | None, lead: tuple[int, ...], layout: str) -> Tensor:
    """Those of what came, as a combine takes them beside its rows."""
    if weights is not None:
        return readable(weights)
    shape = lead if group.shape.layouts[layout].by_expert else (*lead, group.top_k)
    return torch.zeros(shape, dtype=torch.float32, device=device_of(group))


def readable(x: Tensor) -> Tensor:
    """A gradient as memory that can be read: what autograd hands on may be expanded, or stand for its negative."""
    return x.resolve_neg().contiguous()


def _refuse_gradients(handle: Handle[Group], weights_too: bool) -> None:
    """As `refuse_combine`, of one with values beside its rows where the peers' has some."""
    calls = _calls_back(handle.group)
    refuse(lambda rows: calls.combine(handle, rows, choice_values=() if weights_too else None))


def return_rows(handle: Handle[Group], rows: Tensor, layout: str, bias: Tensor | None = None) -> Tensor:
    """A combine of rows as they were dispatched, in elements: [T, H]."""
    group = handle.group
    with telling(lambda: refuse_combine(handle)):
        wanted = (*lead_of(handle, layout), group.hidden)
        if rows.shape != wanted:
            raise InvalidArgument.of("rows", f"has shape {list(rows.shape)}; it must be {list(wanted)}")
        back = returning(group)
    return back.combine(handle, rows, layout=layout, dtype=group.dtype, bias=bias)


def send_gradients(handle: Handle[Group], out: Tensor, layout: str, fill: bool = True) -> Tensor:
    """The backward of a combine: from gradients of the T sums those of the rows. fill: 0 where there is none, else what
    the memory held."""
    group = handle.group
    lands = leases(group, layout)
    if lands:
        with telling(lambda: group.refuse_routing(layout)):
            out = out.contiguous()
        exchange_counts(handle, layout)
    with telling(lambda: group.refuse_dispatch(layout, handle.bound or None)):
        given = outputs_to_come(handle, layout, fill=fill)
        out = out.contiguous()
    # The forward pass was counted.
    return send(handle, out, handle.bound or None, given, layout, count=False).tokens
