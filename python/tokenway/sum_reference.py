"""The NumPy oracle of a sum: float32, in order, from its first term on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Array = np.ndarray


def ordered_sum(shape: tuple[int, int], terms: Iterable[tuple[Array, Array]], bias: Array | None = None) -> Array:
    """Add terms in order, float32, each row from its first term on: float32 `shape`.

    terms: (at, term): int [n] distinct rows and float32 [n, shape[1]]. bias: `shape`, the first term of every row. Rows
    with no term are zero.
    """
    total, started = begin(shape, bias)
    for at, term in terms:
        total[at] = np.where(started[at], total[at] + term, term)
        started[at] = True
    return total


def begin(shape: tuple[int, int], bias: Array | None) -> tuple[Array, Array]:
    """Sums before their terms, float32 `shape`, and whether each row has begun, bool [shape[0], 1]."""
    if bias is None:
        return np.zeros(shape, np.float32), np.zeros((shape[0], 1), bool)
    if bias.shape != shape:
        raise ValueError(f"bias: shape {bias.shape}; it must be {shape}")
    return bias.astype(np.float32), np.ones((shape[0], 1), bool)
