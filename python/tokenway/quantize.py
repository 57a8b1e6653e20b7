"""Rows as 8-bit floats with block scales, so that they travel as payloads like any others.

    values, scales = tw.quantize_fp8(tokens)                         # [T, H] float8_e4m3fn, [T, ceil(H / 128)] float32
    with tw.Group(comm, ..., dtype="float8_e4m3fn", payloads={"scales": (scales.shape[1], "float32")}) as group:
        recv = group.dispatch(group.route(ids, weights), values, {"scales": scales})
        rows = tw.dequantize_fp8(recv.tokens, recv.payloads["scales"])

The exchange copies bytes and does not know what they mean: whoever packs decides. examples/05_quantised.py is a whole
layer in fp8 and in the formats of `microscaling.py`. Quantising is a kernel of the C library; the rest is NumPy or
PyTorch.
"""

from __future__ import annotations

import sys
from ctypes import byref
from typing import Any

import numpy as np

from tokenway import _native, tensors, versions
from tokenway.errors import InvalidArgument

Tensor = Any  # np.ndarray or torch.Tensor

FP8_BLOCK = 128  # elements that share a scale
_ALIGNED = 16 // 4  # scales of a column: whole 16 bytes
_PACKED = 4  # UE8M0 in an int32


def quantize_fp8(
    x: Tensor,
    power_of_two: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    counts: Tensor | None = None,
    packed: bool = False,
    column_major: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows to e4m3 with one float32 scale per block of 128 elements: (values [T, H], scales [T, ceil(H / 128)]).

    x: [T, H] float32, bfloat16 or float16, of NumPy or PyTorch; rows may be strided. A scale is the block's largest
    magnitude / 448, or with power_of_two that rounded up to a power of two, and at least 2**-116; 1 for a block of
    zeros. values = x / scale, rounded to nearest even. A block that holds a NaN or an infinity becomes NaN, scale and
    values. The same bits on the CPU and on a device.
    packed: powers of two as UE8M0, four to an int32 as DeepGEMM on Blackwell reads them, [T, ceil(H / 512)]; the first
    in the low byte, 0 behind a row's last. column_major: scales [ceil(H / 128), T'], or [ceil(H / 512), T'] packed, T'
    being T rounded up to a multiple of 4 (16 bytes), as grouped GEMMs read them; what is beyond T is arbitrary.
    counts: [G] int32, as of `swiglu`: valid rows of each of G equal blocks of rows; others are neither read nor
    written.
    out: (values, scales) to write to, values C-contiguous, scales of these shapes.
    CUDA tensors: enqueued on the current stream of x's device; nothing waits, and a graph can capture it.
    Errors: InvalidArgument; Unsupported for CUDA tensors in a build without CUDA.
    """
    device, stream = place_of("x", x)
    given = out
    if x.ndim != 2:
        raise InvalidArgument.of("x", f"has shape {list(x.shape)}; it must be [T, H]")
    tokens, elements = x.shape
    shape = fp8_scales_shape(tokens, elements, packed=packed, column_major=column_major)
    if out is None:
        scales = empty_like(shape, "int32" if packed else "float32", x)
        out = empty_like((tokens, elements), "float8_e4m3fn", x), scales
    values, scales = several(out, ("values", "scales"))
    check_together("x", x, device, counts=counts)
    check_together("x", x, device, True, values=values, scales=scales)
    if packed:
        check_dtype("scales", scales, "int32")
    if column_major:
        check_shape("scales", scales, shape)
    told = (x, counts, values, scales.T[:tokens] if column_major else scales)
    flag = 1 if power_of_two or packed else 0
    result = _native.lib.twQuantizeFp8(*map(described, told), flag, device, stream)
    versions.written(given)
    _native.check(result)
    return values, scales


def dequantize_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Float32 [..., H] of values [..., H] and scales [..., ceil(H / 128)], or packed int32 [..., ceil(H / 512)], as
    quantize_fp8 makes them by row or as they have arrived. For convenience: a kernel of experts would multiply on its
    way."""
    same_kind("values", values, "scales", scales)
    packed = tensors.dtype_of(scales) == "int32"
    blocks = -(-values.shape[-1] // FP8_BLOCK) if values.ndim else 0
    wanted = (*values.shape[:-1], -(-blocks // _PACKED) if packed else blocks) if values.ndim else ()
    check_shape("scales", scales, wanted)
    if packed:
        scales = of_ue8m0(_bytes(scales))[..., :blocks]
    return as_float32(values) * spread(scales, FP8_BLOCK)[..., : values.shape[-1]]


def fp8_scales_shape(rows: int, elements: int, *, packed: bool = False, column_major: bool = False) -> tuple[int, int]:
    """Of the scales of rows by quantize_fp8."""
    columns = -(-elements // FP8_BLOCK)
    if packed:
        columns = -(-columns // _PACKED)
    return (columns, -(-rows // _ALIGNED) * _ALIGNED) if column_major else (rows, columns)


# --------------------------------------------------------------------------------------- what callers give and get back


def several(out: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The tensors that a caller gave to write to."""
    if not isinstance(out, tuple | list):
        raise InvalidArgument.of("out", f"is of type {type(out).__name__}; it must be ({', '.join(names)})")
    if len(out) != len(names):
        raise InvalidArgument.of("out", f"has {len(out)} tensors; it must be ({', '.join(names)})")
    for name, x in zip(names, out, strict=True):
        place_of(name, x)  # a tensor, not None
    return tuple(out)


def check_together(name: str, first: Tensor, device: int, written: bool = False, **others: Tensor | None) -> None:
    """Checks that all are on the device of the first, and writable if they are to be written."""
    for other, x in others.items():
        if x is None:
            continue
        if place_of(other, x)[0] != device:
            where = f"is on {device_text(x)}, {name} on {device_text(first)}; they must be together"
            raise InvalidArgument.of(other, where)
        if written and (problem := tensors.unwritable(other, x)) is not None:
            raise problem


def described(x: Tensor | None) -> Any:
    """A tensor, or none, for a call of the C library."""
    return None if x is None else byref(tensors.tensor_of(x, describe_anywhere))


def same_kind(name: str, x: Any, other_name: str, other: Any) -> None:
    """Checks that two tensors are of one library and in one place."""
    if place_of(name, x)[0] != place_of(other_name, other)[0] or tensors.is_torch(x) != tensors.is_torch(other):
        raise InvalidArgument.of(name, f"is a {type(x).__name__} on {device_text(x)}, {other_name} is not")


def check_shape(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    """Checks a shape."""
    if tuple(x.shape) != wanted:
        raise InvalidArgument.of(name, f"has shape {list(x.shape)}; it must be {list(wanted)}")


def check_dtype(name: str, x: Tensor, wanted: str) -> None:
    """Checks a dtype."""
    if (found := tensors.dtype_of(x)) != wanted:
        raise InvalidArgument.of(name, f"has dtype {found}; it must be {wanted}")


# ------------------------------------------------------------------------------------------------ NumPy and PyTorch


def place_of(name: str, x: Any) -> tuple[int, int]:
    """(device, stream) for the C library: (-1, 0) for host memory."""
    if tensors.is_torch(x):
        torch = sys.modules["torch"]
        if (what := tensors.legible(tensors.without_memory, x)) is not None:
            raise tensors.refusal(name, what, tensors.obstacle(tensors.describe_torch, x))
        if x.is_cuda:
            return x.device.index, torch.cuda.current_stream(x.device).cuda_stream
        if not x.is_cpu:
            raise InvalidArgument.of(name, f"is a {x.device.type} tensor; it must be on the CPU or a CUDA device")
    elif not isinstance(x, np.ndarray):
        what = type(x).__name__
        raise InvalidArgument.of(name, f"is of type {what}; it must be a NumPy array or a PyTorch tensor")
    elif (what := tensors.unlike_array(x)) is not None:
        raise InvalidArgument.of(name, f"is {what}")
    return -1, 0


def device_text(x: Tensor) -> str:
    return str(x.device) if tensors.is_torch(x) and x.is_cuda else "the CPU"


def describe_anywhere(x: Tensor) -> tuple[int, bytes]:
    """As tensors.describe, on any device. The C library says whether it is right."""
    if not tensors.is_torch(x):
        return tensors.describe(x)
    return tensors.describe_torch(x)


def empty_like(shape: tuple[int, ...], name: str, like: Tensor) -> Tensor:
    if not tensors.is_torch(like):
        return np.empty(shape, tensors.numpy_dtype(name))
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, name), device=like.device)


def as_float32(x: Tensor) -> Tensor:
    """The numbers of x as float32."""
    return x.to(sys.modules["torch"].float32) if tensors.is_torch(x) else x.astype(np.float32)


def spread(scales: Tensor, block: int) -> Tensor:
    """Each scale for every element of its block."""
    if tensors.is_torch(scales):
        return scales.repeat_interleave(block, -1)
    return np.repeat(scales, block, -1)


def of_ue8m0(scales: Tensor) -> Tensor:
    """Float32 of bytes of UE8M0: 2**(byte - 127), NaN for 255."""
    if tensors.is_torch(scales):
        torch = sys.modules["torch"]
        bits = scales.int() << 23
        bits = torch.where(scales == 0, 0x00400000, torch.where(scales == 255, 0x7FC00000, bits))
        return bits.int().view(torch.float32)
    bits = scales.astype(np.uint32) << 23
    bits = np.where(scales == 0, 0x00400000, np.where(scales == 255, 0x7FC00000, bits))
    return bits.astype(np.uint32).view(np.float32)


def _bytes(words: Tensor) -> Tensor:
    """The bytes of int32 [..., n], [..., 4 * n], the lowest first."""
    if tensors.is_torch(words):
        return words.contiguous().view(sys.modules["torch"].uint8)
    return np.ascontiguousarray(words).view(np.uint8)
