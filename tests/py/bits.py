"""Equal bits: what the judges of cases and of tensors have in common."""

from __future__ import annotations

import numpy as np

from tokenway.view_reference import columns, columns_by_expert

FLOATS = ("float32", "bfloat16", "float16")


def same_columns(what: str, layout: str, got: np.ndarray, rows: np.ndarray, valid: np.ndarray, where: str) -> None:
    """Columns of these rows. What is not valid is not written, so it may be anything; grouped has zeros behind."""
    if layout == "expert_major":
        want, valid = columns_by_expert(rows), valid[:, None]
        here = np.zeros((len(rows), 1, want.shape[-1]), bool)
    else:
        want = columns(rows)
        here = np.ones((1, want.shape[-1]), bool)
    here[..., : valid.shape[-1]] = valid
    assert got.shape == want.shape, (what, got.shape, want.shape, where)
    return same(what, *(np.where(here, as_bits(each), 0) for each in (got, want)), where)


def as_bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same(what: str, got: np.ndarray, want: np.ndarray, where: str = "") -> None:
    """Equal dtype, shape and bits; a NaN equals any NaN in sums."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {got.shape}, not {want.dtype} {want.shape}; {where}"
    )
    bad = as_bits(got) != as_bits(want)
    if bad.any() and got.dtype.name in FLOATS:
        bad &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} differ, first at {at}: {got[at]!r}, not {want[at]!r}; {where}"
        )
