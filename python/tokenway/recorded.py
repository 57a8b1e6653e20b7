"""Recorded routings: what `tokenway bench --routing` replays, and `tokenway balance` plans for."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray


@contextmanager
def arrays(path: str | Path) -> Iterator[Any]:
    """An .npz file's arrays by name. Errors: ValueError where it is none, or damaged; OSError."""
    name = Path(path).name
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("a single array")
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{name}: no .npz file, or a damaged one") from None
    with file:
        try:
            yield file
        except (EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{name}: damaged: {error}") from None


def routing(path: str | Path) -> tuple[Array, Array | None]:
    """Reads a recorded routing from an .npz file: (ids int32 [steps, tokens, K], weights float32 alike, or None).

    The file holds an array `ids`, integers [steps, tokens, K] or [tokens, K], -1 for no expert, each expert once per
    token at most; where weights were recorded, also an array `weights`, floats of that shape. Errors: ValueError, which
    names what is wrong; OSError.
    """
    name = Path(path).name
    with arrays(path) as file:
        if "ids" not in file:
            raise ValueError(f"{name}: arrays: {sorted(file)}; must have 'ids'")
        ids = file["ids"]
        weights = file.get("weights")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name}: ids: dtype {ids.dtype}; must be an integer type")
    if ids.ndim not in (2, 3):
        raise ValueError(f"{name}: ids: shape {ids.shape}; must be [steps, tokens, K] or [tokens, K]")
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        raise ValueError(f"{name}: weights: {weights.dtype} {weights.shape}; must be floats {ids.shape}")
    if ids.ndim == 2:
        ids, weights = ids[None], None if weights is None else weights[None]
    if not ids.shape[0] or not ids.shape[2]:
        raise ValueError(f"{name}: ids: shape {ids.shape}; steps and K must be at least 1")
    top = np.iinfo(np.int32).max
    for at in np.argwhere((ids < -1) | (ids > top))[:1]:
        raise ValueError(f"{name}: ids{at.tolist()}: {ids[tuple(at)]}; allowed -1..{top}")
    ids = ids.astype(np.int32)
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    for step, token, k in np.argwhere(twice)[:1]:
        raise ValueError(f"{name}: ids[{step}, {token}]: {ordered[step, token, k]} stands twice; allowed once")
    return ids, None if weights is None else weights.astype(np.float32)
