"""Rows as mxfp8 and nvfp4: floats of 8 and 4 bits whose scales are small too, one for 32 and for 16 elements.

    values, scales = tw.quantize_mxfp8(tokens)                       # [T, H] float8_e4m3fn, [T, H / 32] uint8
    packed, scales, global_scale = tw.quantize_nvfp4(tokens)         # [T, H / 2] uint8, [T, H / 16] float8_e4m3fn, one

Quantising is a kernel of the C library, with the same bits on the CPU and on a device. Values and scales travel as
payloads like any others (`quantize.py`), row by row. Block-scaled products of cuBLAS and CUTLASS read scales in tiles
of 128 rows and 4 scales: `tiled=True` makes them so where rows are quantised for a product, and `tile_scales` orders
those that have arrived.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tokenway import _native, checked, tensors, versions
from tokenway.errors import InvalidArgument
from tokenway.quantize import (
    Tensor,
    as_float32,
    check_dtype,
    check_shape,
    check_together,
    described,
    empty_like,
    of_ue8m0,
    place_of,
    same_kind,
    several,
    spread,
)

MXFP8_BLOCK = 32  # elements that share a scale
NVFP4_BLOCK = 16
_TILE_ROWS, _TILE_SCALES = 128, 4

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def quantize_mxfp8(
    x: Tensor,
    dtype: str = "float8_e4m3fn",
    *,
    counts: Tensor | None = None,
    tiled: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows to mxfp8: (values [T, H] of dtype, scales uint8 [T, H / 32]).

    x: [T, H], H a multiple of 32, float32, bfloat16 or float16, of NumPy or PyTorch; rows may be strided. dtype:
    float8_e4m3fn or float8_e5m2. 32 elements share a scale, 2**(byte - 127) (UE8M0), by the rule of the OCP
    Microscaling specification 1.0: byte = 127 + floor(log2(largest magnitude)) - 8 (e5m2: 15), at least 0, which zeros
    have too. values = x / scale, rounded to nearest even; the floor lets the largest reach twice the largest number of
    the format, and they saturate at 448 (e5m2: 57344). A block that holds a NaN or an infinity becomes NaN: byte 255,
    and values.

    counts: [G] int32, as of `swiglu`: valid rows of each of G equal blocks of rows; others are neither read nor
    written. tiled: scales in the order of `tile_scales`, of all rows, [ceil(T / 128) * 128, ceil(H / 128) * 4], or with
    counts of each block for itself, [G, ceil(T / G / 128) * 128, ceil(H / 128) * 4]; rows that fill a tile are not
    written. out: (values, scales) to write to, C-contiguous; values say the dtype.
    CUDA tensors: enqueued on the current stream of x's device; nothing waits, and a graph can capture it.
    Errors: InvalidArgument; Unsupported for CUDA tensors in a build without CUDA.
    """
    device, stream = place_of("x", x)
    given = out
    if out is None:
        tokens, elements = _rows(x)
        scales = empty_like(_scales_shape(x, counts, MXFP8_BLOCK, tiled), "uint8", x)
        out = empty_like((tokens, elements), _format(dtype), x), scales
    values, scales = several(out, ("values", "scales"))
    check_together("x", x, device, counts=counts)
    check_together("x", x, device, True, values=values, scales=scales)
    by = _in_tiles(scales, x, counts, MXFP8_BLOCK) if tiled else scales
    result = _native.lib.twQuantizeMxfp8(*map(described, (x, counts, values, by)), device, stream)
    versions.written(given)
    _native.check(result)
    return values, scales


def dequantize_mxfp8(values: Tensor, scales: Tensor) -> Tensor:
    """Float32 [..., H] of values [..., H] and scales uint8 [..., H / 32], as quantize_mxfp8 makes them or as they have
    arrived. For convenience: a kernel of experts would multiply on its way."""
    same_kind("values", values, "scales", scales)
    wanted = (*values.shape[:-1], values.shape[-1] // MXFP8_BLOCK) if values.ndim else ()
    if not values.ndim or values.shape[-1] % MXFP8_BLOCK:
        raise InvalidArgument.of(
            "values", f"has shape {list(values.shape)}; its last dimension must be a multiple of {MXFP8_BLOCK}"
        )
    check_shape("scales", scales, wanted)
    check_dtype("scales", scales, "uint8")
    return as_float32(values) * spread(of_ue8m0(scales), MXFP8_BLOCK)


def quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor | float | None = None,
    *,
    counts: Tensor | None = None,
    tiled: bool = False,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to nvfp4: (packed uint8 [T, H / 2], scales float8_e4m3fn [T, H / 16], global_scale float32).

    x: [T, H], H a multiple of 16, float32, bfloat16 or float16, of NumPy or PyTorch; rows may be strided. An element is
    e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign in bit 3), two per byte, the first in the low half:

        global_scale = largest magnitude of x / (6 * 448); 1 if all are 0, at least 2**-116
        scale        = e4m3(min(largest magnitude of the 16 / (6 * global_scale), 448))
        element      = e2m1(x / (scale * global_scale)), to nearest even, at most 6

    in float32, each operation rounded. global_scale may be given instead (calibrated, or the same on all ranks), at
    least 2**-116: a number, or a tensor [T or 1, H / 16 or 1]. Otherwise it is found by a pass of its own before,
    which no host waits for. A block with a NaN or an infinity has the scale NaN, and counts for no other block's; a
    block too small for a scale is 0.

    counts, tiled (ceil(H / 64) * 4 scales a row), streams and errors: as `quantize_mxfp8`; the global scale is that of
    the valid rows. out: what to write to,
    C-contiguous: (packed, scales), with a third, one float32, if no global_scale is given.

    The receiver needs the sender's global_scale: agree on one, or send it along, a payload of one float32 a row.
    """
    device, stream = place_of("x", x)
    given, find = out, global_scale is None
    if out is None:
        tokens, elements = _rows(x)
        packed = empty_like((tokens, elements // 2), "uint8", x)
        out = packed, empty_like(_scales_shape(x, counts, NVFP4_BLOCK, tiled), "float8_e4m3fn", x)
        out += (empty_like((), "float32", x),) if find else ()
    packed, scales, *found = several(out, ("packed", "scales", "global_scale")[: 3 if find else 2])
    scale = found[0] if find else _beside(global_scale, x)
    check_together("x", x, device, counts=counts)
    check_together("x", x, device, True, values=packed, scales=scales)
    check_together("x", x, device, find, global_scale=scale)
    told = scale if scale.ndim != 1 or scale.shape[0] == 1 else scale[None]  # for the blocks of every row
    by = _in_tiles(scales, x, counts, NVFP4_BLOCK) if tiled else scales
    arguments = map(described, (x, counts, packed, by, told))
    result = _native.lib.twQuantizeNvfp4(*arguments, 1 if find else 0, device, stream)
    versions.written(given)
    _native.check(result)
    return packed, scales, scale


def dequantize_nvfp4(packed: Tensor, scales: Tensor, global_scale: Tensor | float) -> Tensor:
    """Float32 [..., H] of what quantize_nvfp4 made: element * (scale * global_scale), each product rounded.

    packed: uint8 [..., H / 2]; scales: float8_e4m3fn [..., H / 16]; global_scale: a number, or a tensor that
    broadcasts to scales. For convenience, as `dequantize_mxfp8`."""
    same_kind("packed", packed, "scales", scales)
    half = NVFP4_BLOCK // 2
    if packed.ndim < 1 or packed.shape[-1] % half or tensors.dtype_of(packed) != "uint8":
        what = f"{tensors.dtype_of(packed)} {list(packed.shape)}"
        raise InvalidArgument.of("packed", f"is {what}; it must be uint8, its last dimension a multiple of {half}")
    check_shape("scales", scales, (*packed.shape[:-1], packed.shape[-1] // half))
    lib = _library(packed)
    codes = lib.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    if lib is np:
        elements = _E2M1[codes]
    else:
        elements = lib.as_tensor(_E2M1, device=packed.device)[codes.long()]
    return elements * spread(as_float32(scales) * _beside(global_scale, packed), NVFP4_BLOCK)


def pack_nvfp4(x: Tensor, global_scale: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_nvfp4` of a tensor of any dimensions and strides: (packed uint8 [..., H / 2], scales float8_e4m3fn
    [..., H / 16], global_scale float32). global_scale: a number, or a tensor that broadcasts to scales."""
    place_of("x", x)
    if x.ndim < 1 or x.shape[-1] % NVFP4_BLOCK:
        raise InvalidArgument.of(
            "x", f"has shape {list(x.shape)}; its last dimension must be a multiple of {NVFP4_BLOCK}"
        )
    if (name := tensors.dtype_of(x)) not in ("float32", "bfloat16", "float16"):
        raise InvalidArgument.of("x", f"has dtype {name}; it must be float32, bfloat16 or float16")
    *lead, elements = x.shape
    rows = x.reshape(int(np.prod(lead, dtype=np.int64)), elements)
    if elements > 1 and tensors.is_torch(x):
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    elif elements > 1 and rows.strides[-1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    if global_scale is None:
        packed, scales, global_scale = quantize_nvfp4(rows)
    else:
        global_scale = _beside(global_scale, x)
        packed, scales, _ = quantize_nvfp4(rows, _by_row(global_scale, (*lead, elements // NVFP4_BLOCK)))
    shown = global_scale if tensors.is_torch(x) else global_scale[()]
    return packed.reshape(*lead, elements // 2), scales.reshape(*lead, elements // NVFP4_BLOCK), shown


# What makes the same, under its older name.
unpack_nvfp4 = dequantize_nvfp4


def tile_scales(scales: Tensor) -> Tensor:
    """Scales of a byte each, [..., R, C] by row, in the order in which block-scaled matrix products of cuBLAS and
    CUTLASS read them: [..., ceil(R / 128) * 128, ceil(C / 4) * 4] of the same dtype, with zeros for what is added.

    A tile is 128 rows by 4 scales, 512 bytes in which row r and scale c lie at r % 32 * 16 + r % 128 // 32 * 4 + c % 4.
    Tiles follow each other along C, then along R, and each leading index has its own. So scales that a dispatch by
    expert brought, [L, N*b, C], come in tiles of each expert. Rows beyond an expert's count are ordered too,
    whatever they hold. On a device all is enqueued on its current stream, and nothing waits."""
    rows, columns = _check_bytes("scales", scales)
    lead = tuple(scales.shape[:-2])
    down, across = -(-rows // _TILE_ROWS), -(-columns // _TILE_SCALES)
    wide = empty_like((*lead, down * _TILE_ROWS, across * _TILE_SCALES), "uint8", scales)
    wide[...] = 0
    wide[..., :rows, :columns] = _as_bytes(scales)
    tiles = wide.reshape(*lead, down, 4, 32, across, _TILE_SCALES)  # r // 128, r % 128 // 32, r % 32, c // 4, c % 4
    order = (*range(len(lead)), *(len(lead) + i for i in (0, 3, 2, 1, 4)))
    return _typed(_permuted(tiles, order).reshape(wide.shape), scales)


def untile_scales(tiled: Tensor, rows: int, columns: int) -> Tensor:
    """The scales [..., rows, columns] by row that `tile_scales`, or a call with `tiled`, has put in tiles."""
    shape = _check_bytes("tiled", tiled)
    for name, size in (("rows", rows), ("columns", columns)):
        if not isinstance(size, int) or size < 0:
            raise InvalidArgument.of(name, f"is {size!r}; it must be an integer from 0")
    lead = tuple(tiled.shape[:-2])
    down, across = -(-rows // _TILE_ROWS), -(-columns // _TILE_SCALES)
    if shape != (wanted := (down * _TILE_ROWS, across * _TILE_SCALES)):
        raise InvalidArgument.of("tiled", f"has shape {list(tiled.shape)}; it must end with {list(wanted)}")
    tiles = _as_bytes(tiled).reshape(*lead, down, across, 32, 4, _TILE_SCALES)
    order = (*range(len(lead)), *(len(lead) + i for i in (0, 3, 2, 1, 4)))
    return _typed(_permuted(tiles, order).reshape(*lead, *wanted)[..., :rows, :columns], tiled)


def _scales_shape(x: Tensor, counts: Tensor | None, block: int, tiled: bool) -> tuple[int, ...]:
    """Of the scales of rows [T, H]; `tiled`: with counts [G], those of each block of rows for itself."""
    tokens, elements = _rows(x)
    if not tiled:
        return tokens, elements // block
    groups = tuple(getattr(counts, "shape", ())[:1])
    each = tokens // max(1, *groups) if groups else tokens
    return *groups, -(-each // _TILE_ROWS) * _TILE_ROWS, -(-(elements // block) // _TILE_SCALES) * _TILE_SCALES


def _in_tiles(scales: Tensor, x: Tensor, counts: Tensor | None, block: int) -> Tensor:
    """The same memory as the C library wants tiles: [G, down, across, 32, 4, 4]."""
    check_shape("scales", scales, _scales_shape(x, counts, block, True))
    contiguous = scales.is_contiguous() if tensors.is_torch(scales) else scales.flags.c_contiguous
    if not contiguous:
        raise InvalidArgument.of("scales", "is not C-contiguous; in tiles it must be")
    groups, down, across = scales.shape[0] if scales.ndim == 3 else 1, *scales.shape[-2:]
    return scales.reshape(groups, down // _TILE_ROWS, across // _TILE_SCALES, 32, 4, 4)


def _check_bytes(name: str, scales: Tensor) -> tuple[int, int]:
    """Rows and columns of scales of a byte each."""
    place_of(name, scales)
    if scales.ndim < 2 or tensors.dtype_of(scales) not in ("uint8", "float8_e4m3fn"):
        what = f"{tensors.dtype_of(scales)} {list(scales.shape)}"
        raise InvalidArgument.of(name, f"is {what}; it must be uint8 or float8_e4m3fn of two dimensions or more")
    rows, columns = scales.shape[-2:]
    return rows, columns


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(_library(x).uint8)


def _typed(x: Tensor, like: Tensor) -> Tensor:
    return x.view(like.dtype)


def _permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(order) if tensors.is_torch(x) else x.transpose(order)


def _rows(x: Tensor) -> tuple[int, int]:
    if x.ndim != 2:
        raise InvalidArgument.of("x", f"has shape {list(x.shape)}; it must be [T, H]")
    tokens, elements = x.shape
    return tokens, elements


def _format(dtype: Any) -> str:
    """One of mxfp8's two, by its name in NumPy or PyTorch, or as their object."""
    name = tensors.dtype_name(dtype)
    if name not in ("float8_e4m3fn", "float8_e5m2"):
        raise InvalidArgument.of("dtype", f"is {name}; it must be float8_e4m3fn or float8_e5m2")
    return name


def _library(x: Tensor) -> Any:
    return sys.modules["torch"] if tensors.is_torch(x) else np


def _beside(scale: Tensor | float, like: Tensor) -> Tensor:
    """A caller's global scale as float32 beside `like`, without waiting for a device."""
    if not tensors.is_torch(like):
        return np.asarray(checked.floats("global_scale", scale))
    torch = sys.modules["torch"]
    if isinstance(scale, torch.Tensor):
        return scale.to(like.device, torch.float32)
    return torch.full((), float(scale), dtype=torch.float32, device=like.device)


def _by_row(scale: Tensor, scales: tuple[int, ...]) -> Tensor:
    """A global scale that broadcasts to scales of any dimensions, for scales [T, H / 16]."""
    if all(n == 1 for n in scale.shape):
        return scale.reshape(())
    columns = scale.shape[-1] if scale.ndim else 1
    try:
        if columns not in (1, scales[-1]):
            raise ValueError
        wide = _library(scale).broadcast_to(scale, (*scales[:-1], columns))
    except (ValueError, RuntimeError):
        what = f"has shape {list(scale.shape)}; it must broadcast to that of scales, {list(scales)}"
        raise InvalidArgument.of("global_scale", what) from None
    return wide.reshape(int(np.prod(scales[:-1], dtype=np.int64)), columns)
