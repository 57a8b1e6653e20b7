"""What experts do between their two matrices, over the rows that are there.

    recv = group.dispatch(handle, tokens, layout="grouped")
    inside = grouped_gemm(recv.tokens, gate_up, recv.offsets)          # [P, 2 * I]
    act = tw.swiglu(inside, counts=recv.offsets[-1:])                  # [P, I]
    act, scales = tw.swiglu(inside, counts=recv.offsets[-1:], quantize=True, column_major=True)

How many rows are valid is read where the rows are, when the kernel runs: no call waits for it, a CUDA graph can hold
the calls, and they cost what came, not what there is room for. NumPy, and PyTorch on the CPU and on CUDA devices; for
gradients see `tokenway.experts`.
"""

from __future__ import annotations

from typing import Any

from tokenway import _native, tensors, versions
from tokenway.errors import InvalidArgument
from tokenway.quantize import (
    Tensor,
    check_dtype,
    check_shape,
    check_together,
    described,
    empty_like,
    fp8_scales_shape,
    place_of,
)


def swiglu(
    gate_up: Tensor,
    *,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
    quantize: bool = False,
    power_of_two: bool = False,
    packed: bool = False,
    column_major: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Any:
    """silu(gate) * up [* weights] of every valid row: [M, I], or with quantize (values, scales).

    gate_up: [M, 2 * I], gate beside up, float32, bfloat16 or float16; rows may be strided. Rows of a layout with
    leading dimensions are flattened by the caller. counts: [G] int32, valid rows of each of G equal blocks of rows, its
    first ones (default: all rows): `Received.counts` of rank_major and expert_major, `Received.offsets[-1:]` of flat
    and grouped, whose padding counts as valid. Rows beyond are neither read nor written. weights: [M] float32.

    quantize: to e4m3 with a float32 scale for 128 elements, as `quantize_fp8` (power_of_two and packed too) makes them
    of the float32 results: values [M, I], scales [M, ceil(I / 128)], packed int32 [M, ceil(I / 512)]; or with
    column_major [ceil(I / 128), M'] and [ceil(I / 512), M'], M' being M rounded up to a multiple of 4 (16 bytes), as
    grouped GEMMs read them.
    out: [M, I], or (values, scales) of these shapes, to write to; else new memory, arbitrary beyond the valid rows.

    Sums and products are float32 in a fixed order with an exp of their own (src/activation/swiglu.h), rounded once: the
    same bits on the CPU and on a device, within 4 units in the last place of the true value before that. CUDA tensors:
    enqueued on the current stream of their device; nothing waits. Errors: InvalidArgument; Unsupported for CUDA tensors
    in a build without CUDA.
    """
    device, stream = place_of("gate_up", gate_up)
    if gate_up.ndim != 2:
        raise InvalidArgument.of("gate_up", f"has shape {list(gate_up.shape)}; it must be [M, 2 * I]")
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if (column_major or power_of_two or packed) and not quantize:
        raise InvalidArgument("column_major, power_of_two and packed are of scales; they need quantize=True")
    scales_shape = fp8_scales_shape(rows, inner, packed=packed, column_major=column_major)
    if out is None:
        out = empty_like((rows, inner), "float8_e4m3fn" if quantize else tensors.dtype_of(gate_up), gate_up)
        if quantize:
            out = out, empty_like(scales_shape, "int32" if packed else "float32", gate_up)
    values, scales = _pair(out) if quantize else (out, None)
    check_together("gate_up", gate_up, device, counts=counts, weights=weights)
    check_together("gate_up", gate_up, device, True, out=values, scales=scales)
    if scales is not None:
        check_shape("scales", scales, scales_shape)
        if packed:
            check_dtype("scales", scales, "int32")
    if quantize and tensors.dtype_of(values) != "float8_e4m3fn":
        raise InvalidArgument.of("out", f"has dtype {tensors.dtype_of(values)}; with quantize it must be float8_e4m3fn")
    told = scales.T[:rows] if column_major and scales is not None else scales
    given = [described(t) for t in (gate_up, counts, weights, values, told)]
    result = _native.lib.twSwiGlu(*given, 1 if power_of_two or packed else 0, device, stream)
    versions.written(out)
    _native.check(result)
    return out


def swiglu_backward(
    gate_up: Tensor,
    gradient: Tensor,
    *,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """From the gradient of `swiglu`'s result, [M, I] of the dtype of gate_up, those of gate_up, [M, 2 * I], and of
    weights, [M] float32 (None without weights). Of the valid rows, as there: nothing is kept from the forward call but
    its arguments, and the rest is computed again. A weight's gradient is summed in a fixed order, so its bits are the
    same everywhere too. out: the two to write to. Errors as `swiglu`."""
    device, stream = place_of("gate_up", gate_up)
    if out is None:
        of_weights = None if weights is None else empty_like(tuple(weights.shape), "float32", gate_up)
        out = empty_like(tuple(gate_up.shape), tensors.dtype_of(gate_up), gate_up), of_weights
    of_gate_up, of_weights = _pair(out)
    check_together("gate_up", gate_up, device, gradient=gradient, counts=counts, weights=weights)
    check_together("gate_up", gate_up, device, True, of_gate_up=of_gate_up, of_weights=of_weights)
    given = [described(t) for t in (gate_up, counts, weights, gradient, of_gate_up, of_weights)]
    result = _native.lib.twSwiGluBackward(*given, device, stream)
    versions.written(out)
    _native.check(result)
    return of_gate_up, of_weights


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise InvalidArgument.of("out", f"is of type {type(out).__name__}; it must be a tuple of two tensors")
    return out[0], out[1]
