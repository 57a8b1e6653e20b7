"""The functions of `tokenway.experts`, which says how they are used and what they promise.

PyTorch's grouped product leaves two things to its caller: rows beyond the last group, which it does not write
(https://github.com/pytorch/pytorch/issues/154557), and the gradients of an expert without rows, which on some devices
it leaves as its memory was (https://github.com/pytorch/pytorch/issues/172439).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tokenway import activation
from tokenway.pytorch.gradients import eager

Tensor = torch.Tensor

_GROUPS = 1024  # that PyTorch's kernel takes
_grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def why_not(device: torch.device, dtype: torch.dtype, experts: int, *columns: int) -> str | None:
    """Why `product` cannot be used for matrices of so many columns and rows, as a sentence; None if it can.

    On CUDA devices of compute capability 9 and 10 PyTorch has a kernel for bfloat16. For others its own loop asks the
    device where groups end, which waits: then a loop over sizes that are known is as good, and this is refused."""
    if _grouped_mm is None:
        return f"PyTorch {torch.__version__} has no grouped_mm"
    if device.type == "cuda":
        if dtype != torch.bfloat16:
            return f"the dtype is {dtype}; PyTorch has grouped matrix products on devices for torch.bfloat16 alone"
        capability = torch.cuda.get_device_capability(device)
        if capability[0] not in (9, 10):
            has = ".".join(map(str, capability))
            return f"{device} has compute capability {has}; PyTorch has grouped matrix products for 9 and 10"
        if experts > _GROUPS:
            return f"there are {experts} experts on this rank; PyTorch's grouped matrix products take {_GROUPS}"
    elif not _runs_on_cpu(dtype):
        return f"PyTorch {torch.__version__} has no grouped matrix products of {dtype} on the CPU"
    step = 16 // dtype.itemsize
    if odd := [n for n in columns if n % step]:
        return f"a row has {odd[0]} elements; for grouped matrix products it must be a multiple of {step} (16 bytes)"
    return None


@functools.cache
def _runs_on_cpu(dtype: torch.dtype) -> bool:
    rows, ends = torch.ones(1, 16, dtype=dtype), torch.ones(1, dtype=torch.int32)
    try:
        _grouped_mm(rows, rows[None].transpose(-2, -1), offs=ends)
        _grouped_mm(rows.t(), rows, offs=ends)
    except RuntimeError:  # of which NotImplementedError is one
        return False
    return True


@eager
def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [P, C] -> [P, D]: those of expert e, which end before row ends[e], times weights[e].T. Differentiable.

    weights: [L, D, C] of the dtype of rows, L > 0. ends: [L] int32 on their device, ascending, at most P. Of rows from
    ends[-1] on, here and in the gradient, nothing is read, and what is returned is arbitrary."""
    if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
        return _Product.apply(rows, weights, ends)
    return _grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return _grouped_mm(rows, weights.transpose(-2, -1), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, ends = ctx.saved_tensors
        out, of_rows, of_weights = out.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_rows = _grouped_mm(out, weights, offs=ends)
        if ctx.needs_input_grad[1]:
            of_weights = _grouped_mm(out.t(), rows, offs=ends)
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            of_weights.masked_fill_(empty[:, None, None], 0)
        return of_rows, of_weights, None


@eager
def swiglu(gate_up: Tensor, weights: Tensor, counts: Tensor | None = None) -> Tensor:
    """silu(gate) * up * weight of the valid rows: [P, 2 * I] and [P] float32 -> [P, I]. Differentiable.

    counts: as of `tokenway.swiglu`; of grouped rows the last of the ends, `ends[-1:]`. Beyond, nothing is read, and
    what is returned, here and as a gradient, is arbitrary. Keeps its arguments for the backward pass, and computes
    anew."""
    if torch.is_grad_enabled() and (gate_up.requires_grad or weights.requires_grad):
        return _SwiGlu.apply(gate_up, weights, counts, False)
    return activation.swiglu(gate_up, counts=counts, weights=weights)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, counts: Tensor | None, fill: bool) -> Tensor:
        ctx.save_for_backward(gate_up, weights, counts)
        ctx.fill = fill
        out = gate_up.new_zeros((gate_up.shape[0], gate_up.shape[1] // 2)) if fill else None
        return activation.swiglu(gate_up, counts=counts, weights=weights, out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights, counts = ctx.saved_tensors
        made = (torch.zeros_like(gate_up), torch.empty_like(weights)) if ctx.fill else None
        found = activation.swiglu_backward(gate_up, out.contiguous(), counts=counts, weights=weights, out=made)
        return *found, None, None


def padded(rows: Tensor, weights: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What experts make of rows in expert_major, weighted: [L, C, H] and [L, C] float32 -> [L, C, H]. Differentiable.

    gate_up: [L, 2 * I, H], down: [L, H, I], of the dtype of rows, L > 0. counts: [L] int32 on their device, the rows
    that each expert has; they come first. The products are batched and take all C places of an expert, so without
    gradients what stands beyond the counts is arbitrary, in rows and in what is returned. A gradient of a matrix sums
    over all places: where one is wanted, rows beyond the counts and their gradients must be 0, and what stands there in
    between is 0 too."""
    inside = torch.bmm(rows, gate_up.transpose(1, 2)).flatten(0, 1)
    flat = weights.reshape(-1)
    if torch.is_grad_enabled() and (inside.requires_grad or flat.requires_grad):
        made = _filled_swiglu(inside, flat, counts)
    else:
        made = swiglu(inside, flat, counts)
    return torch.bmm(made.view(*rows.shape[:2], made.shape[1]), down.transpose(1, 2))


@eager
def _filled_swiglu(gate_up: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`swiglu`, 0 beyond the counts, as is the gradient of gate_up."""
    return _SwiGlu.apply(gate_up, weights, counts, True)
