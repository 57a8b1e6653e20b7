"""The NumPy oracle of rows on their way back: a partial as the dtype that travels, or as fp8 with scales.

`reference.combine` uses it. Rows of float8_e4m3fn are quantised where they are made and multiplied with their scales at
the token's owner, in float32.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = 128  # elements that share a scale
LARGEST = np.float32(448)
LEAST_SCALE = np.float32(2.0**-116)


@np.errstate(all="ignore")
def travelled(rows: Array, wire: Any, scale: float | None) -> Array:
    """Partials [n, H], float32, as their owner takes them, float32: rounded to `wire` on the way.

    wire: float32, bfloat16 or float16, or float8_e4m3fn with `scale` for all elements, None for one of each block."""
    if np.dtype(wire) != FP8:
        return rows.astype(wire).astype(np.float32)
    values, scales = quantised(rows) if scale is None else (scaled(rows, np.float32(scale)), np.float32(scale))
    if scale is None:
        scales = np.repeat(scales, BLOCK, axis=1)[:, : rows.shape[1]]
    return values.astype(np.float32) * scales


def quantised(rows: Array) -> tuple[Array, Array]:
    """Values [n, H] float8_e4m3fn and scales [n, ceil(H / 128)] float32 of rows [n, H], float32.

    A scale is the block's largest magnitude / 448, and at least 2**-116; 1 for a block of zeros. A block with a NaN or
    an infinity becomes NaN, scale and values."""
    count, elements = rows.shape
    blocks = -(-elements // BLOCK)
    wide = np.zeros((count, blocks * BLOCK), np.float32)
    wide[:, :elements] = rows
    wide = wide.reshape(count, blocks, BLOCK)
    largest = np.abs(wide).max(-1)  # NaN if there is one
    scales = np.maximum(largest / LARGEST, LEAST_SCALE)
    scales[largest == 0] = 1
    scales[~np.isfinite(largest)] = np.nan
    values = (wide / scales[..., None]).astype(FP8)
    values.view(np.uint8)[~np.isfinite(largest)] = 0x7F
    return values.reshape(count, blocks * BLOCK)[:, :elements], scales


def scaled(rows: Array, scale: np.float32) -> Array:
    """Values [n, H] float8_e4m3fn of rows [n, H], float32, by one scale: what is beyond 448 saturates, and a NaN or an
    infinity becomes NaN."""
    values = np.clip(rows / scale, -LARGEST, LARGEST).astype(FP8)
    values.view(np.uint8)[~np.isfinite(rows)] = 0x7F
    return values
