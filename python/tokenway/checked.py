"""Arrays of numbers that callers give for the C library: converted where that changes no number, else refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tokenway import tensors
from tokenway.errors import InvalidArgument


def host_array(name: str, values: Any) -> np.ndarray:
    """A tensor, an array or a list as an array of NumPy's own types; floats that it does not have become float32, which
    holds them all. Raises InvalidArgument for what has no numbers to read."""
    if tensors.is_torch(values):
        what = "a meta tensor, which has no numbers" if values.is_meta else None
        what = what or tensors.legible(tensors.without_memory, values)
        if what is not None:
            raise tensors.refusal(name, what)
        values = values.detach().cpu().resolve_conj().resolve_neg()
        if values.is_floating_point() and str(values.dtype) not in ("torch.float16", "torch.float32", "torch.float64"):
            values = values.float()
        return values.numpy()
    if isinstance(values, np.ndarray) and (what := tensors.unlike_array(values)) is not None:
        raise InvalidArgument.of(name, f"is {what}")
    try:
        array = np.asarray(values)
    except Exception as error:  # rows of different lengths, or the values' own code
        raise InvalidArgument.of(name, f"cannot be read as an array: {type(error).__name__}: {error}") from error
    kind = array.dtype.type
    return array.astype(np.float32) if kind.__module__ == "ml_dtypes" and _is_float(kind) else array


def shape_of(name: str, values: Any) -> tuple[int, ...]:
    """Of what `host_array` takes."""
    known = getattr(values, "shape", None)
    return host_array(name, values).shape if known is None else tuple(known)


def _is_float(kind: Any) -> bool:
    try:
        ml_dtypes.finfo(kind)
    except ValueError:
        return False
    return True


def integers(name: str, values: Any) -> np.ndarray:
    """int32, contiguous, of integers that fit. An empty list is one of integers too."""
    array = host_array(name, values)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidArgument.of(name, f"has dtype {array.dtype}; it must hold 32-bit integers")
    beyond = np.flatnonzero((array < -(2**31)) | (array >= 2**31))
    if beyond.size:
        at = tuple(map(int, np.unravel_index(beyond[0], array.shape)))
        raise InvalidArgument.of(name, f"is {array.flat[beyond[0]]}; it must hold 32-bit integers", at)
    return np.asarray(array, np.int32, order="C")


def floats(name: str, values: Any, dtype: Any = np.float32) -> np.ndarray:
    """float32 or another type, contiguous, of integers or floats, rounded."""
    array = host_array(name, values)
    if array.dtype.kind not in "iuf":
        raise InvalidArgument.of(name, f"has dtype {array.dtype}; it must hold numbers")
    with np.errstate(over="ignore"):  # an infinity, which C refuses where it must
        return np.asarray(array, dtype, order="C")
