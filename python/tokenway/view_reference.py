"""The oracle of what views by expert have beside rows: payloads by column, and counts by source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def columns(rows: Array) -> Array:
    """Rows [P, elements] by column: [elements, M], where M is P rounded up to whole 16 bytes; zeros beyond P."""
    step = 16 // rows.itemsize
    by_column = np.zeros((rows.shape[1], -(-len(rows) // step) * step), rows.dtype)
    by_column[:, : len(rows)] = rows.T
    return by_column


def columns_by_expert(rows: Array) -> Array:
    """Rows [L, P, elements] by column, each expert's for itself: [L, elements, M], as `columns` has them."""
    if not len(rows):
        return np.zeros((0, *columns(np.zeros(rows.shape[1:], rows.dtype)).shape), rows.dtype)
    return np.stack([columns(of_expert) for of_expert in rows])


def source_counts(ids: Sequence[Array], here: Array) -> Array:
    """[L, N] int32: how many tokens of each source chose each of a rank's experts. ids[s]: [T_s, K], -1 = none or
    dropped; here: [L], the ids of the rank's experts."""
    chosen = [(of_source[..., None] == here).sum(axis=(0, 1)) for of_source in ids]
    return np.stack(chosen, axis=1).astype(np.int32)
