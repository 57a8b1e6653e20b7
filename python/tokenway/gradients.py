"""The steps of a layer that is trained, on plain tensors: what `autograd` and `ops` give to PyTorch's autograd.

A combine returns rows, and its backward, `send_gradients`, is a dispatch by the same routing. A dispatch sends tokens,
and its backward, `return_gradients`, is a combine. Gradients of weights travel in columns behind those of the tokens:
K of float32, or three times K of bfloat16, whose sums have the 24 bits of a float32 (below 2^-110 the last of them are
lost).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tokenway import tensors
from tokenway.errors import InvalidArgument, TokenwayError
from tokenway.group import Group
from tokenway.handle import Handle

Tensor = torch.Tensor

# bfloat16 has 8 significant bits, float32 has 24.
_PARTS = {"float32": 1, "bfloat16": 3}


def weight_columns(top_k: int, dtype: Any = "bfloat16") -> int:
    """Elements that a returned row needs beyond H for the gradients of `top_k` weights. dtype: of the rows, float32 or
    bfloat16. Raises InvalidArgument for others."""
    name = tensors.dtype_name(dtype)
    if name not in _PARTS:
        raise InvalidArgument(f"dtype is {name}; to train with it must be float32 or bfloat16")
    return top_k * _PARTS[name]


def check_group(group: Group, weights_too: bool) -> None:
    """Raises InvalidArgument unless rows of this group can carry gradients both ways: dtype float32 or bfloat16, the
    same for combine_dtype, and combine_hidden with room for gradients of weights, if there are to be any."""
    if group.exact:
        raise InvalidArgument("the group's mode is 'high_throughput'; to train it must be 'low_latency'")
    dtype, hidden, returned = group.dtype, group.hidden, group.combine_hidden
    columns = weight_columns(group.top_k, dtype)
    if group.combine_dtype != dtype:
        raise InvalidArgument(
            f"the group's combine_dtype is {group.combine_dtype}; to train it must be its dtype, {dtype}"
        )
    if returned < hidden + columns and (returned != hidden or weights_too):
        raise InvalidArgument(
            f"the group's combine_hidden is {returned}; for gradients of weights it must be at least "
            f"{hidden + columns} (tokenway.autograd.make_group makes such a group)"
        )


# ---- what peers learn ------------------------------------------------------------------------------


@contextmanager
def telling(refuse: Callable[[], None]) -> Iterator[None]:
    """Around what can fail before a step that the peers are in already: they learn of it at once."""
    try:
        yield
    except Exception:
        refuse()
        raise


def refuse_combine(handle: Handle) -> None:
    """As Group.refuse_dispatch: no rows are refused, and the peers told."""
    with suppress(TokenwayError):
        handle.group.combine(handle, None)


# ---- steps -----------------------------------------------------------------------------------------


def device_of(group: Group) -> torch.device:
    """Where the group's tensors are."""
    return torch.device("cpu") if group.device is None else torch.device("cuda", group.device)


def no_rows(group: Group, bound: int, elements: int) -> Tensor:
    """[N, b, elements] of 0. A dispatch writes the rows that come, and what it leaves must not be a NaN by chance."""
    shape, dtype = (group.nranks, bound, elements), getattr(torch, group.dtype)
    return torch.zeros(shape, dtype=dtype, device=device_of(group))


def send(handle: Handle, tokens: Tensor, bound: int | None, out: Mapping[str, Tensor]) -> None:
    """A dispatch into tensors of the caller's, that holds no lane afterwards: nothing of the window is needed then, and
    a combine of the handle leases a lane for itself. So no lane is lost where a backward pass never comes."""
    try:
        handle.group.dispatch(handle, tokens, bound=bound, out=out)
    finally:
        if handle.leased:  # not after a refusal, where that is known at once
            handle.release()


def return_gradients(
    handle: Handle, tokens: Tensor | None, weights: Tensor | None, weights_too: bool
) -> tuple[Tensor, Tensor | None]:
    """The backward of a dispatch: from gradients of what came, None being 0, those of the T tokens and, if there are to
    be any, of their weights. A step, whatever gradients there are: those may differ from rank to rank, steps may not.
    """
    group = handle.group
    h, columns = group.hidden, weight_columns(group.top_k, group.dtype)
    with telling(lambda: refuse_combine(handle)):
        rows = no_rows(group, handle.bound, group.combine_hidden)
        if tokens is not None:
            rows[..., :h] = tokens
        if weights is not None and weights_too:
            rows[..., h : h + columns] = in_parts(weights, rows.dtype)
    out = group.combine(handle, rows, layout="rank_major", dtype="float32")
    of_weights = whole(out[:, h : h + columns], group.top_k) if weights_too else None
    return out[:, :h].to(rows.dtype), of_weights


def return_rows(handle: Handle, rows: Tensor) -> Tensor:
    """A combine, of rows without columns: [T, H]."""
    group, h = handle.group, handle.group.hidden
    with telling(lambda: refuse_combine(handle)):
        if rows.shape != (group.nranks, handle.bound, h):
            wanted = [group.nranks, handle.bound, h]
            raise InvalidArgument(f"rows has shape {list(rows.shape)}; it must be {wanted}")
        if group.combine_hidden > h:
            rows = torch.cat([rows, rows.new_zeros(*rows.shape[:2], group.combine_hidden - h)], dim=-1)
    return group.combine(handle, rows, layout="rank_major")[:, :h].contiguous()


def send_gradients(handle: Handle, out: Tensor) -> Tensor:
    """The backward of a combine: from gradients of the T sums those of the rows, 0 where there is none."""
    group = handle.group
    with telling(group.refuse_dispatch):
        rows, out = no_rows(group, handle.bound, group.hidden), out.contiguous()
    send(handle, out, handle.bound, {"tokens": rows})
    return rows


# ---- columns ---------------------------------------------------------------------------------------


def in_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [..., K] -> [..., K * parts] of dtype, whose sum is x: each the rounded rest of those before."""
    if dtype == torch.float32:
        return x
    parts = []
    for _ in range(_PARTS["bfloat16"]):
        parts.append(x.to(dtype))
        x = x - parts[-1].float()
    return torch.cat(parts, dim=-1)


def whole(parts: Tensor, k: int) -> Tensor:
    """The inverse of `in_parts` in float32: from the smallest up, so that each sum is exact."""
    first, *rest = parts.split(k, dim=-1)
    if not rest:
        return first.contiguous()
    middle, last = rest
    # An infinity or NaN leaves NaN as its rest.
    return torch.where(first.isfinite(), first + (middle + last), first)
