"""Scales in the orders that products read, and of valid rows alone: every bit, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_activation import DTYPES_OUT, inputs, rubbish, valid_rows
from test_activation import same as same_but_nan
from test_quantize import DTYPES, FP8, activations, bits, quantized, same

import tokenway as tw
from tokenway import reference as ref

Array = np.ndarray
pytestmark = pytest.mark.usefixtures("rows_in_place")
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def exponents(scales: Array) -> Array:
    """Powers of two as packed int32 [rows, ceil(blocks / 4)]: their exponents, and 0 behind the last."""
    rows, blocks = scales.shape
    packed = np.zeros((rows, 4 * -(-blocks // 4)), np.uint8)
    packed[:, :blocks] = scales.view(np.uint32) >> 23 & 0xFF
    return packed.view("<i4").reshape(rows, -(-blocks // 4))


def by_row(scales: Array, rows: int, column_major: bool) -> Array:
    """Scales as they lie by row; what is beyond the last column's rows has not been written."""
    if not column_major:
        return scales
    assert (bits(scales)[:, rows:] == 0xA5A5A5A5).all()
    return np.ascontiguousarray(scales[:, :rows].T)


FORMS = ({}, {"power_of_two": True}, {"packed": True})


def check_fp8(made_for: Any, x: Array, counts: Array | None) -> None:
    """In all its forms: valid rows as if there were no others, and nothing else is written."""
    valid = valid_rows(len(x), counts)
    place = made_for.tensor
    for how in FORMS:
        with np.errstate(all="ignore"):
            values, scales = quantized(x, bool(how))
        want = exponents(scales) if "packed" in how else scales
        for column_major in (False, True):
            wide = -(-len(x) // 4) * 4
            shape = (want.shape[1], wide) if column_major else want.shape
            out = place(rubbish(x.shape, FP8)), place(rubbish(shape, want.dtype))
            told = None if counts is None else place(counts)
            got = tw.quantize_fp8(place(x), out=out, counts=told, column_major=column_major, **how)
            assert got[0] is out[0] and got[1] is out[1]
            shown, by = (made_for.array(each) for each in out)
            by = by_row(by, len(x), column_major)
            same((shown[valid], by[valid]), (values[valid], want[valid]))
            assert (bits(shown)[~valid] == 0xA5).all() and (bits(by)[~valid] == 0xA5A5A5A5).all()


COUNTS = [[0], [5], [12], [13], [-3], [3, 0, 4], [0, 0, 0, 0, 0, 3], [1] * 12, [9, 1, -1], []]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_fp8_of_valid_rows(made_for: Any, counts: list[int]) -> None:
    """12 rows in blocks, of which the first ones count: too many count as all, too few as none."""
    x = activations(12 if counts else 0, 300)
    if counts:
        x[1, 3], x[4, 140], x[5, :128] = np.nan, -np.inf, 0
    check_fp8(made_for, x, np.array(counts, np.int32))


@FEW
@given(st.data())
def test_fp8_whatever_the_shape(made_for: Any, data: st.DataObject) -> None:
    draw = data.draw
    groups, each, elements = draw(st.integers(1, 9)), draw(st.integers(0, 7)), draw(st.integers(1, 2311))
    counts = np.array(draw(st.lists(st.integers(-1, 9), min_size=groups, max_size=groups)), np.int32)
    begin = draw(st.integers(0, 3))
    x = activations(groups * each, elements + 9, draw(st.sampled_from(sorted(DTYPES))))[:, begin : begin + elements]
    check_fp8(made_for, x, counts)


def test_fp8_of_many_blocks_of_rows(made_for: Any) -> None:
    """Rows as they are in use, and more blocks of valid rows than a device counts at a time."""
    rng = np.random.default_rng(7)
    check_fp8(made_for, activations(77, 7168), np.array([5, 0, 11, 3, 12, 1, 7], np.int32))
    check_fp8(made_for, activations(5000, 16), rng.integers(0, 3, 2500).astype(np.int32))


def check_activation(made_for: Any, x: Array, counts: Array | None, weights: Array | None) -> None:
    """Packed scales of the activation, by row and by column, of valid rows alone."""
    rows, inner = x.shape[0], x.shape[1] // 2
    valid, place = valid_rows(rows, counts), made_for.tensor
    with np.errstate(all="ignore"):
        values, scales = quantized(ref.swiglu(x, weights), True)
    want = exponents(scales)
    told = {"counts": counts, "weights": weights}
    told = {name: None if value is None else place(value) for name, value in told.items()}
    for column_major in (False, True):
        shape = (want.shape[1], -(-rows // 4) * 4) if column_major else want.shape
        out = place(rubbish((rows, inner), DTYPES_OUT["fp8"])), place(rubbish(shape, np.int32))
        tw.swiglu(place(x), **told, out=out, quantize=True, packed=True, column_major=column_major)
        shown, by = (made_for.array(each) for each in out)
        by = by_row(by, rows, column_major)
        same_but_nan(shown[valid], values[valid])
        same((by[valid],), (want[valid],))
        assert (bits(shown)[~valid] == 0xA5).all() and (bits(by)[~valid] == 0xA5A5A5A5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inner"), [(0, 8), (1, 1), (6, 128), (7, 129), (4, 512), (5, 640), (3, 2311)], ids=str
)
def test_packed_scales_of_activations(made_for: Any, rows: int, inner: int, dtype: str) -> None:
    """Words that end with a row's last block, and words that do not."""
    x, weights, _ = inputs(rows, inner, dtype)
    x = x[:, 1 : 1 + 2 * inner]
    check_activation(made_for, x, None, weights)
    check_activation(made_for, x, np.array([rows // 2], np.int32), None)


@FEW
@given(st.data())
def test_activations_whatever_the_shape(made_for: Any, data: st.DataObject) -> None:
    draw = data.draw
    groups, each, inner = draw(st.integers(1, 9)), draw(st.integers(0, 7)), draw(st.integers(1, 1200))
    counts = np.array(draw(st.lists(st.integers(-1, 9), min_size=groups, max_size=groups)), np.int32)
    x, weights, _ = inputs(groups * each, inner, draw(st.sampled_from(sorted(DTYPES))), inner)
    check_activation(made_for, x[:, : 2 * inner], counts, weights)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"packed": True, "quantize": False},
            "column_major, power_of_two and packed are of scales; they need quantize=True",
        ),
        ({"out": np.zeros((4, 1), np.float32)}, "scales has dtype float32; it must be int32"),
        ({"out": np.zeros((4, 2), np.int32)}, r"scales has shape \[4, 2\]; it must be \[4, 1\]"),
        (
            {"packed": False, "out": np.zeros((4, 2), np.int32)},
            r"scales is int32 \[4, 2\]; it must be float32 \[4, 2\], or packed int32 \[4, 1\]",
        ),
        (
            {"packed": False, "inner": 100, "out": np.zeros((4, 1), np.int32)},
            "scales has dtype int32, of packed powers of two, but power_of_two is 0; it must be 1",
        ),
    ],
)
def test_activations_that_are_refused(change: dict[str, Any], sentence: str) -> None:
    how = {"quantize": True, "packed": True, "inner": 200} | change
    inner = how.pop("inner")
    scales = how.pop("out", None)
    out = None if scales is None else (np.zeros((4, inner), FP8), scales)
    with pytest.raises(tw.InvalidArgument, match=sentence):
        tw.swiglu(np.zeros((4, 2 * inner), np.float32), out=out, **how)


def test_counts_that_are_refused() -> None:
    x = activations(4, 300)
    with pytest.raises(tw.InvalidArgument, match="counts has 3 elements; their number must divide that of the rows, 4"):
        tw.quantize_fp8(x, counts=np.zeros(3, np.int32))
    with pytest.raises(tw.InvalidArgument, match=r"counts has dtype int64 \(7\); it must be int32"):
        tw.quantize_fp8(x, counts=np.zeros(2, np.int64))
    values = np.zeros((4, 300), FP8)
    with pytest.raises(tw.InvalidArgument, match=r"values at 0x\w+ overlaps counts at 0x\w+"):
        tw.quantize_fp8(x, counts=values.view(np.int32).reshape(-1)[:2], out=(values, np.zeros((4, 3), np.float32)))
