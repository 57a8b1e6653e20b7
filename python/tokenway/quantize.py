"""Rows as 8-bit and 4-bit floats with block scales, so that they travel as payloads like any others.

    values, scales = tw.quantize_fp8(tokens)                         # [T, H] float8_e4m3fn, [T, ceil(H / 128)] float32
    with tw.Group(comm, ..., dtype="float8_e4m3fn", payloads={"scales": (scales.shape[1], "float32")}) as group:
        recv = group.dispatch(group.route(ids, weights), values, {"scales": scales})
        rows = tw.dequantize_fp8(recv.tokens, recv.payloads["scales"])

The exchange copies bytes and does not know what they mean: whoever packs decides. examples/05_quantised.py is a whole
layer with each format of this page. Quantising to fp8 is a kernel of the C library; the rest is NumPy or PyTorch.
"""

from __future__ import annotations

import sys
from ctypes import byref
from typing import Any

import numpy as np

from tokenway import _native, checked, tensors, versions
from tokenway.errors import InvalidArgument

Tensor = Any  # np.ndarray or torch.Tensor

FP8_BLOCK = 128  # elements that share a scale
NVFP4_BLOCK = 16

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_LARGEST_E2M1, _LARGEST_E4M3 = 6.0, 448.0
_LEAST_SCALE = 2.0**-116  # as in src/quantize/fp8.h


def quantize_fp8(
    x: Tensor, power_of_two: bool = False, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Rows to e4m3 with one float32 scale per block of 128 elements: (values [T, H], scales [T, ceil(H / 128)]).

    x: [T, H] float32, bfloat16 or float16, of NumPy or PyTorch; rows may be strided. A scale is the block's largest
    magnitude / 448, or with power_of_two that rounded up to a power of two, and at least 2**-116; 1 for a block of
    zeros. values = x / scale, rounded to nearest even. A block that holds a NaN or an infinity becomes NaN, scale and
    values. The same bits on the CPU and on a device. out: (values, scales) to write to, C-contiguous.
    CUDA tensors: enqueued on the current stream of x's device; nothing waits, and a graph can capture it.
    Errors: InvalidArgument; Unsupported for CUDA tensors in a build without CUDA.
    """
    device, stream = place_of("x", x)
    given = out
    if out is None:
        if x.ndim != 2:
            raise InvalidArgument.of("x", f"has shape {list(x.shape)}; it must be [T, H]")
        tokens, elements = x.shape
        out = (
            empty_like((tokens, elements), "float8_e4m3fn", x),
            empty_like((tokens, -(-elements // FP8_BLOCK)), "float32", x),
        )
    elif not isinstance(out, tuple | list) or len(out) != 2:
        raise InvalidArgument.of("out", f"is of type {type(out).__name__}; it must be (values, scales)")
    for name, tensor in zip(("values", "scales"), out, strict=True):
        if place_of(name, tensor)[0] != device:
            raise InvalidArgument.of(name, f"is on {device_text(tensor)}, x on {device_text(x)}; they must be together")
        if (problem := tensors.unwritable(name, tensor)) is not None:
            raise problem
    rows, values, scales = (tensors.tensor_of(tensor, describe_anywhere) for tensor in (x, *out))
    flag = 1 if power_of_two else 0
    result = _native.lib.twQuantizeFp8(byref(rows), byref(values), byref(scales), flag, device, stream)
    versions.written(given)
    _native.check(result)
    return out[0], out[1]


def dequantize_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Float32 [..., H] of values [..., H] and scales [..., ceil(H / 128)], as quantize_fp8 makes them or as they have
    arrived. For convenience: a kernel of experts would multiply on its way."""
    _same_kind("values", values, "scales", scales)
    wanted = (*values.shape[:-1], -(-values.shape[-1] // FP8_BLOCK)) if values.ndim else ()
    _check_shape("scales", scales, wanted)
    return _cast(values, "float32") * _spread(scales, FP8_BLOCK)[..., : values.shape[-1]]


def pack_nvfp4(x: Tensor, global_scale: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to nvfp4: (packed uint8 [..., H / 2], scales float8_e4m3fn [..., H / 16], global_scale float32).

    A reference implementation in NumPy or PyTorch, made to be read, not to be fast; no step of it waits for a device.
    x: [..., H], H a multiple of 16, float32, bfloat16 or float16. An element is e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a
    sign in bit 3), two per byte, the first in the low half:

        global_scale = largest magnitude of x / (6 * 448); 1 if all are 0, at least 2**-116
        scale        = e4m3(min(largest magnitude of the 16 / (6 * global_scale), 448))
        element      = e2m1(x / (scale * global_scale)), to nearest even, at most 6

    in float32, each operation rounded. global_scale may be given instead (calibrated, or the same on all ranks): a
    number, or a tensor that broadcasts to scales, as [T, 1]. A block with a NaN or an infinity has the scale NaN, and
    counts for no other block's; a block too small for a scale is 0.

    The receiver needs the sender's global_scale: agree on one, or send it along, a payload of one float32 a row.
    """
    place_of("x", x)
    if x.ndim < 1 or x.shape[-1] % NVFP4_BLOCK:
        raise InvalidArgument.of(
            "x", f"has shape {list(x.shape)}; its last dimension must be a multiple of {NVFP4_BLOCK}"
        )
    if (name := tensors.dtype_of(x)) not in ("float32", "bfloat16", "float16"):
        raise InvalidArgument.of("x", f"has dtype {name}; it must be float32, bfloat16 or float16")
    lib = sys.modules["torch"] if tensors.is_torch(x) else np
    with np.errstate(all="ignore"):  # NaN and infinity are dealt with below
        blocks = _cast(x, "float32").reshape(*x.shape[:-1], x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK)
        largest = lib.amax(lib.abs(blocks), -1)
        finite = lib.isfinite(largest)
        if global_scale is None:
            global_scale = _global_scale(lib, lib.where(finite, largest, _number(0, x)))
        else:
            global_scale = _as_scale(global_scale, x)
        scale = lib.minimum(largest / (global_scale * _LARGEST_E2M1), _number(_LARGEST_E4M3, x))
        scales = _cast(lib.where(finite, scale, _number(np.nan, x)), "float8_e4m3fn")
        step = (_cast(scales, "float32") * global_scale)[..., None]
        codes = _e2m1(lib, lib.where(step == 0, _number(0, x), blocks / step), lib.signbit(blocks)).reshape(x.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales, global_scale


def unpack_nvfp4(packed: Tensor, scales: Tensor, global_scale: Tensor | float) -> Tensor:
    """Float32 [..., H] of what pack_nvfp4 made: element * (scale * global_scale), each product rounded.

    packed: uint8 [..., H / 2]; scales: float8_e4m3fn [..., H / 16]; global_scale: a number, or a tensor that
    broadcasts to scales. A reference implementation."""
    _same_kind("packed", packed, "scales", scales)
    half = NVFP4_BLOCK // 2
    if packed.ndim < 1 or packed.shape[-1] % half or tensors.dtype_of(packed) != "uint8":
        what = f"{tensors.dtype_of(packed)} {list(packed.shape)}"
        raise InvalidArgument.of("packed", f"is {what}; it must be uint8, its last dimension a multiple of {half}")
    _check_shape("scales", scales, (*packed.shape[:-1], packed.shape[-1] // half))
    lib = sys.modules["torch"] if tensors.is_torch(packed) else np
    codes = lib.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    if lib is np:
        elements = _E2M1[codes]
    else:
        elements = lib.as_tensor(_E2M1, device=packed.device)[codes.long()]
    return elements * _spread(_cast(scales, "float32") * _as_scale(global_scale, packed), NVFP4_BLOCK)


# ---------------------------------------------------------------------------------------------------- nvfp4's steps


def _global_scale(lib: Any, largest: Tensor) -> Tensor:
    """Of the blocks' largest magnitudes."""
    if 0 in largest.shape:
        return _number(1, largest)
    most = lib.amax(largest)
    # By a tensor: PyTorch divides by a number on a CUDA device by multiplying with its reciprocal, which rounds twice.
    scale = lib.maximum(most / _number(_LARGEST_E2M1 * _LARGEST_E4M3, largest), _number(_LEAST_SCALE, largest))
    scale = lib.where(most == 0, _number(1, largest), scale)
    return np.float32(scale) if lib is np else scale


def _e2m1(lib: Any, x: Tensor, negative: Tensor) -> Tensor:
    """uint8 codes. Each comparison is with the middle of two neighbours, and a middle goes to the even code."""
    size = lib.abs(x)
    code = _cast(negative, "uint8") * 8
    for middle, up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5, False)):
        code = code + _cast(size >= middle if up else size > middle, "uint8")
    return code


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


def _cast(x: Tensor, name: str) -> Tensor:
    if tensors.is_torch(x):
        return x.to(getattr(sys.modules["torch"], name))
    return x.astype(tensors.numpy_dtype(name))


def _number(value: float, like: Tensor) -> Tensor:
    """A float32 beside `like`, made without waiting for the device."""
    if not tensors.is_torch(like):
        return np.float32(value)
    torch = sys.modules["torch"]
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _as_scale(scale: Tensor | float, like: Tensor) -> Tensor:
    """A caller's global scale beside `like`."""
    if not tensors.is_torch(like):
        return checked.floats("global_scale", scale)[()]
    torch = sys.modules["torch"]
    if isinstance(scale, torch.Tensor):
        return scale.to(like.device, torch.float32)
    return _number(float(scale), like)


def _spread(scales: Tensor, block: int) -> Tensor:
    """Each scale for every element of its block."""
    if tensors.is_torch(scales):
        return scales.repeat_interleave(block, -1)
    return np.repeat(scales, block, -1)


def _same_kind(name: str, x: Any, other_name: str, other: Any) -> None:
    if place_of(name, x)[0] != place_of(other_name, other)[0] or tensors.is_torch(x) != tensors.is_torch(other):
        raise InvalidArgument.of(name, f"is a {type(x).__name__} on {device_text(x)}, {other_name} is not")


def _check_shape(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(x.shape) != wanted:
        raise InvalidArgument.of(name, f"has shape {list(x.shape)}; it must be {list(wanted)}")
