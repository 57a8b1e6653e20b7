"""Gathers and reduce-scatters of uneven sizes, in one line, for any process group, and registered as PyTorch ops.

    everyone = collectives.all_gatherv(tokens, sizes, process_group)
    mine = collectives.reduce_scatterv(layer(everyone), sizes, process_group)  # for all_reduce and a slice

Both can be compiled and captured, and are differentiable, each the other's backward. They need no group: one for each
process group and device is made in the first call, and grows with the largest rows and sizes. For code that keeps a
group, or wants an order of steps that no compiler may change, there are the ops of `tokenway.ops`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import tokenway as tw
from tokenway.integrations import groups
from tokenway.party import party_of
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

_PIECE = 16  # rows of a tensor lie in the window at multiples of it, in bytes


def all_gatherv(rows: Tensor, sizes: Sequence[int], process_group: Any = None) -> Tensor:
    """The rows of all ranks, those of rank 0 first: [sum of sizes, ...]. A step of all ranks.

    rows: [sizes[rank], ...] of any dtype, the same on all ranks but for their number; float32, bfloat16 or float16
    where gradients are wanted. sizes: N integers from 0 on, the same on all ranks. process_group: of torch.distributed,
    or its name (`ProcessGroup.group_name`), None: the default one; the backend does not matter.

    With CUDA tensors it is enqueued on the current stream, and waits for nothing; calls of a process group on several
    streams are the caller's to order, as with NCCL. Collective, on the host too and so not in a capture, are the first
    call and those with larger rows or a larger size than all before: make the largest call once before a capture.
    Errors: InvalidArgument, of which peers get PeerRefused; BoundMismatch where ranks give different sizes; those of
    `SharedGroup.with_room`."""
    if _is_plain(rows):
        return _gather(rows, sizes, process_group)
    return torch.ops.tokenway.all_gatherv_among(rows, sizes, _name(process_group))


def reduce_scatterv(rows: Tensor, sizes: Sequence[int], process_group: Any = None) -> Tensor:
    """What all ranks have for this one, summed: [sizes[rank], ...]. A step of all ranks: in one step what an all-reduce
    and a slice do, whose other rows nobody wants.

    rows: [sum of sizes, ...], float32, bfloat16 or float16, those for rank 0 first. The rest is as for `all_gatherv`.
    Sums are float32 over ranks ascending, rounded once: the same bits every time."""
    if _is_plain(rows):
        return _reduce(rows, sizes, process_group)
    return torch.ops.tokenway.reduce_scatterv_among(rows, sizes, _name(process_group))


class Collectives:
    """Those of a process group on a device. `of` makes it, without asking anybody. Several tensors travel together in
    one step; gradients do not flow. What is documented of `all_gatherv` and `reduce_scatterv` holds."""

    def __init__(self, peers: groups.Peers, rank: int, size: int):
        self.rank, self.size = rank, size
        self.shared = peers.shared(experts=size, top_k=1)
        self._views = groups.Views(self.shared)

    def all_gatherv(
        self, rows: Sequence[Tensor], sizes: Sequence[int] | None = None, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """rows: [sizes[rank], ...] each. sizes: None: as many of each rank as of this one. out: as many tensors, to
        write to."""
        with gradients.telling(lambda: self.refuse("all_gatherv")):
            sizes = [len(rows[0])] * self.size if sizes is None else self._checked(sizes)
            _check_rows("rows", rows, sizes[self.rank])
        return tuple(self._with_room(rows, sizes).all_gatherv(list(rows), sizes, out=_listed(out)).rows)

    def reduce_scatterv(
        self, rows: Sequence[Tensor], sizes: Sequence[int] | None = None, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """rows: [sum of sizes, ...] each. sizes: None: an equal share of the rows for each rank. out: as
        `all_gatherv`."""
        with gradients.telling(lambda: self.refuse("reduce_scatterv")):
            if sizes is None:
                share, over = divmod(len(rows[0]), self.size)
                if over:
                    told = f"has {len(rows[0])} rows; without sizes it must have a multiple of the {self.size} ranks"
                    raise tw.InvalidArgument.of("rows", told)
                sizes = [share] * self.size
            sizes = self._checked(sizes)
            _check_rows("rows", rows, sum(sizes))
        return tuple(self._with_room(rows, sizes).reduce_scatterv(list(rows), sizes, out=_listed(out)))

    def _with_room(self, rows: Sequence[Tensor], sizes: Sequence[int]) -> TypedGroup:
        """The group, with room for such rows."""
        row, most = max(_PIECE, sum(map(_row_bytes, rows))), max(1, *sizes)
        return self._views.plain(row // 2, torch.bfloat16, most)

    def _checked(self, sizes: Sequence[int]) -> list[int]:
        sizes = [int(size) for size in sizes]
        if len(sizes) != self.size or min(sizes) < 0:
            told = f"is {sizes}; it must be {self.size} integers from 0 on, one for each rank"
            raise tw.InvalidArgument.of("sizes", told)
        return sizes

    def refuse(self, name: str) -> None:
        """Tells peers that this rank cannot make a call of that name. If there is no group yet, they are not told."""
        if self.shared.group is not None:
            gradients.refuse(getattr(self.shared.group, name))


_known: weakref.WeakKeyDictionary[groups.Peers, Collectives] = weakref.WeakKeyDictionary()


def of(process_group: Any, device: torch.device) -> Collectives:
    """Of a process group, as `groups.of` takes it, on the device of a tensor. Not collective."""
    peers = groups.of(process_group, device=device)
    found = _known.get(peers)
    if found is None:
        party = party_of(groups.resolved(process_group), None, None, None, None)
        found = _known[peers] = Collectives(peers, party.rank, party.nranks)
    return found


def _row_bytes(x: Tensor) -> int:
    """Of a row of a tensor, filled up."""
    return -(-x.shape[1:].numel() * x.itemsize // _PIECE) * _PIECE


def _check_rows(name: str, rows: Sequence[Tensor], count: int) -> None:
    for x in rows:
        if not isinstance(x, Tensor) or x.dim() < 1 or len(x) != count:
            found = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
            raise tw.InvalidArgument.of(name, f"{found}; by sizes it must be a tensor of {count} rows, [{count}, ...]")


def _listed(out: Sequence[Tensor] | None) -> list[Tensor] | None:
    return None if out is None else list(out)


# ---- ops -----------------------------------------------------------------------------------------------


def _is_plain(rows: Any) -> bool:
    """Whether nothing has to see an op: a tensor that lies somewhere, and no compiler, no gradient backward or forward,
    no transform, and no mode that records or replaces what is called. PyTorch's dispatch of an op that is written in
    Python takes longer than all else here."""
    if type(rows) is not Tensor or rows.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return False
    transformed = forward_ad._current_level >= 0 or _functorch.maybe_current_level() is not None
    return not (transformed or is_in_torch_dispatch_mode() or (rows.requires_grad and torch.is_grad_enabled()))


def _name(process_group: Any) -> str:
    """Of a process group in the ops; "": the default one, as it is when the op runs."""
    if process_group is None:
        return ""
    return process_group if isinstance(process_group, str) else process_group.group_name


def _group(name: Any) -> Any:
    """The process group of a name, or what is one. Errors: InvalidArgument; InvalidUsage without a default one."""
    if not name:
        return groups.resolved(None)
    if not isinstance(name, str):
        return name
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise tw.InvalidArgument.of("process_group", f"is {name!r}; no process group has that name") from error


def _gather(rows: Tensor, sizes: Sequence[int], process_group: Any) -> Tensor:
    return of(_group(process_group), rows.device).all_gatherv([rows], sizes)[0]


def _reduce(rows: Tensor, sizes: Sequence[int], process_group: Any) -> Tensor:
    return of(_group(process_group), rows.device).reduce_scatterv([rows], sizes)[0]


def _fake_gather(rows: Tensor, sizes: list[int], process_group: str) -> Tensor:
    return rows.new_empty((sum(sizes), *rows.shape[1:]))


def _fake_reduce(rows: Tensor, sizes: list[int], process_group: str) -> Tensor:
    return rows.new_empty((sizes[_group(process_group).rank()], *rows.shape[1:]))


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.sizes, ctx.process_group = inputs


def _gather_backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
    return torch.ops.tokenway.reduce_scatterv_among(rows.contiguous(), ctx.sizes, ctx.process_group), None, None


def _reduce_backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
    return torch.ops.tokenway.all_gatherv_among(rows.contiguous(), ctx.sizes, ctx.process_group), None, None


_library = torch.library.Library("tokenway", "FRAGMENT")
for _op, _call, _fake, _backward in (
    ("all_gatherv_among", _gather, _fake_gather, _gather_backward),
    ("reduce_scatterv_among", _reduce, _fake_reduce, _reduce_backward),
):
    _library.define(f"{_op}(Tensor rows, SymInt[] sizes, str process_group) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _library.impl(_op, _call, _key)
    torch.library.register_fake(f"tokenway::{_op}", _fake, lib=_library)
    torch.library.register_autograd(f"tokenway::{_op}", _backward, setup_context=_context, lib=_library)
    torch.fx.node.has_side_effect(getattr(torch.ops.tokenway, _op).default)
