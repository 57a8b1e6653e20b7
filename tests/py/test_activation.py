"""SwiGLU over valid rows: every bit against the oracle, whatever is valid, and the same on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import SPECIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_quantize import DTYPES, activations, quantized

import tokenway as tw
from tokenway import _native
from tokenway import reference as ref
from tokenway.quantize import described

Array = np.ndarray
SHAPES = [(0, 8), (1, 1), (5, 3), (6, 128), (7, 129), (4, 300), (3, 2311), (2, 4096)]


pytestmark = pytest.mark.usefixtures("rows_in_place")


def inputs(rows: int, inner: int, dtype: str, seed: int = 0) -> tuple[Array, Array, Array]:
    """gate_up, weights and a gradient: some numbers that are none."""
    x = activations(rows, 2 * inner + 3, dtype, seed)
    x[:, ::7] *= DTYPES[dtype](4)
    if rows > 3 and inner > 3:
        some = SPECIAL[: min(len(SPECIAL), inner)]
        with np.errstate(all="ignore"):
            x[2, 1 : 1 + len(some)] = some
            x[3, 1 + inner : 1 + inner + len(some)] = some
    weights = np.random.default_rng([seed, rows]).standard_normal(rows).astype(np.float32)
    return x, weights, activations(rows, inner, dtype, seed + 1)


def same(got: Array, want: Array) -> None:
    """The same bits; a NaN equals any."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    nan = np.isnan(want.astype(np.float32))
    assert (np.isnan(got.astype(np.float32)) == nan).all()
    kind = f"u{got.itemsize}"
    np.testing.assert_array_equal(np.where(nan, 0, got.view(kind)), np.where(nan, 0, want.view(kind)))


def valid_rows(rows: int, counts: Array | None) -> Array:
    """[rows] bool."""
    if counts is None:
        return np.ones(rows, bool)
    if rows == 0:
        return np.zeros(0, bool)
    each = rows // len(counts)
    return (np.arange(each) < np.clip(counts, 0, each)[:, None]).reshape(-1)


def forward(made_for: Any, x: Array, counts: Array | None, weights: Array | None, **how: Any) -> list[Array]:
    """Outputs that began as bytes of 0xA5."""
    place = made_for.tensor
    rows, inner = x.shape[0], x.shape[1] // 2
    blocks = -(-inner // 128)
    shapes = [((rows, inner), DTYPES_OUT["fp8"] if how.get("quantize") else x.dtype)]
    if how.get("quantize"):
        shapes.append(((blocks, -(-rows // 4) * 4) if how.get("column_major") else (rows, blocks), np.float32))
    outs = [place(rubbish(*shape)) for shape in shapes]
    given = {"counts": counts, "weights": weights}
    given = {name: None if value is None else place(value) for name, value in given.items()}
    tw.swiglu(place(x), **given, out=tuple(outs) if len(outs) == 2 else outs[0], **how)
    return [made_for.array(out) for out in outs]


def rubbish(shape: tuple[int, ...], dtype: Any) -> Array:
    kind = np.dtype(dtype)
    return np.full(int(np.prod(shape)) * kind.itemsize, 0xA5, np.uint8).view(kind).reshape(shape)


DTYPES_OUT = {"fp8": quantized(np.zeros((1, 1), np.float32), False)[0].dtype}


def check(made_for: Any, x: Array, counts: Array | None, weights: Array | None) -> None:
    """Forward in all its forms, and that nothing but valid rows is written."""
    valid = valid_rows(len(x), counts)
    wide = ref.swiglu(x, weights)
    (out,) = forward(made_for, x, counts, weights)
    with np.errstate(all="ignore"):
        same(out[valid], wide.astype(x.dtype)[valid])
    assert (out.view(np.uint8)[~valid] == 0xA5).all()
    for power_of_two in (False, True):
        with np.errstate(all="ignore"):
            values, scales = quantized(wide, power_of_two)
        for column_major in (False, True):
            how = {"quantize": True, "power_of_two": power_of_two, "column_major": column_major}
            got, by = forward(made_for, x, counts, weights, **how)
            if column_major:
                assert (by.view(np.uint32)[:, len(x) :] == 0xA5A5A5A5).all()
                by = np.ascontiguousarray(by[:, : len(x)].T)
            same(got[valid], values[valid])
            same(by[valid], scales[valid])
            assert (got.view(np.uint8)[~valid] == 0xA5).all() and (by.view(np.uint32)[~valid] == 0xA5A5A5A5).all()


def check_backward(made_for: Any, x: Array, gradient: Array, counts: Array | None, weights: Array | None) -> None:
    place, valid = made_for.tensor, valid_rows(len(x), counts)
    outs = place(rubbish(x.shape, x.dtype)), place(rubbish((len(x),), np.float32))
    given = {"counts": counts, "weights": weights}
    given = {name: None if value is None else place(value) for name, value in given.items()}
    tw.swiglu_backward(place(x), place(gradient), **given, out=outs)
    of_x, of_weights = (made_for.array(out) for out in outs)
    with np.errstate(all="ignore"):
        wanted = ref.swiglu_backward(x, gradient, weights)
    same(of_x[valid], wanted[0][valid])
    same(of_weights[valid], wanted[1][valid])
    assert (of_x.view(np.uint8)[~valid] == 0xA5).all() and (of_weights.view(np.uint32)[~valid] == 0xA5A5A5A5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), SHAPES, ids=str)
def test_bits(made_for: Any, rows: int, inner: int, dtype: str) -> None:
    """Rows of any size that begin anywhere, with weights and without."""
    x, weights, gradient = inputs(rows, inner, dtype)
    for view in (np.ascontiguousarray(x[:, : 2 * inner]), x[:, 1 : 1 + 2 * inner]):
        check(made_for, view, None, weights)
        check(made_for, view, None, None)
        check_backward(made_for, view, gradient, None, weights)
        check_backward(made_for, view, gradient, None, None)


COUNTS = [[0], [5], [12], [13], [-3], [3, 0, 4], [0, 0, 0, 0, 0, 3], [1] * 12, [9, 1, -1]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_valid_rows(made_for: Any, counts: list[int]) -> None:
    """12 rows in blocks, of which the first ones count: too many count as all, too few as none."""
    x, weights, gradient = inputs(12, 40, "bfloat16", 3)
    count, x = np.array(counts, np.int32), x[:, :80]
    check(made_for, x, count, weights)
    check_backward(made_for, x, gradient, count, weights)


def test_many_blocks(made_for: Any) -> None:
    """More than a device counts at a time."""
    count = np.random.default_rng(7).integers(0, 3, 2500).astype(np.int32)
    x, weights, gradient = inputs(5000, 8, "float32", 5)
    x = np.ascontiguousarray(x[:, :16])
    check(made_for, x, count, weights)
    check_backward(made_for, x, gradient, count, weights)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_shape(made_for: Any, data: st.DataObject) -> None:
    draw = data.draw
    groups, each, inner = draw(st.integers(1, 9)), draw(st.integers(0, 7)), draw(st.integers(1, 700))
    count = np.array(draw(st.lists(st.integers(-1, 9), min_size=groups, max_size=groups)), np.int32)
    x, weights, gradient = inputs(groups * each, inner, draw(st.sampled_from(sorted(DTYPES))), inner)
    begin = draw(st.integers(0, 3))
    x, weights = x[:, begin : begin + 2 * inner], draw(st.sampled_from([None, weights]))
    check(made_for, x, count, weights)
    check_backward(made_for, x, gradient, count, weights)


def test_accuracy() -> None:
    """The definition against float64, and gradients against differences of it."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-90, 88, 500_000), rng.standard_normal(500_000)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(ref.exponential(x) - exact) / np.spacing(exact.astype(np.float32))).max() < 1
    gate, up = rng.uniform(-20, 20, (2, 500_000)).astype(np.float32)
    rows = np.stack([gate, up], axis=1)
    wanted = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    assert (np.abs(ref.swiglu(rows)[:, 0] - wanted) / np.spacing(np.abs(wanted).astype(np.float32))).max() < 4
    ends = np.array([-np.inf, -200, -88, 0, 88, 200, np.inf], np.float32)
    np.testing.assert_array_equal(ref.exponential(ends)[[0, 1, 3]], [0, 0, 1])
    assert np.isinf(ref.exponential(ends)[-2:]).all() and np.isnan(ref.exponential(np.float32([np.nan]))).all()

    def value(gate: Array, up: Array, w: Array) -> Array:
        return gate / (1 + np.exp(-gate)) * up * w

    w, towards = rng.standard_normal((2, len(rows))).astype(np.float32)
    of_rows, of_w = ref.swiglu_backward(rows, towards[:, None], w)
    point = [part.astype(np.float64) for part in (gate, up, w)]
    for k, got in enumerate((of_rows[:, 0], of_rows[:, 1], of_w)):
        step = [1e-6 * (i == k) for i in range(3)]
        slope = value(*(p + s for p, s in zip(point, step, strict=True)))
        slope = (slope - value(*(p - s for p, s in zip(point, step, strict=True)))) / 2e-6 * towards
        np.testing.assert_allclose(got, slope, rtol=1e-4, atol=1e-4)


def test_what_is_allocated(made_for: Any, torch: Any) -> None:
    """Without `out`: shapes and dtypes, of the caller's kind."""
    x = made_for.tensor(inputs(5, 130, "bfloat16")[0][:, :260])
    out = tw.swiglu(x)
    assert tuple(out.shape) == (5, 130) and type(out) is type(x) and "bfloat16" in str(out.dtype)
    values, scales = tw.swiglu(x, quantize=True)
    assert tuple(values.shape) == (5, 130) and "float8_e4m3fn" in str(values.dtype) and tuple(scales.shape) == (5, 2)
    assert tuple(tw.swiglu(x, quantize=True, column_major=True)[1].shape) == (2, 8)
    assert tw.swiglu_backward(x, out)[1] is None


REFUSED = {
    "an odd row": ({"gate_up": np.zeros((4, 5), np.float32)}, "gate_up has shape [4, 5]; a row is gate and up"),
    "a cube": ({"gate_up": np.zeros((4, 5, 2), np.float32)}, "gate_up has shape [4, 5, 2]; it must be [M, 2 * I]"),
    "a type": ({"gate_up": np.zeros((4, 6), np.int32)}, "gate_up has dtype int32 (5); it must be float32, bfloat16"),
    "no tensor": ({"gate_up": [1.0]}, "gate_up is of type list; it must be a NumPy array or a PyTorch tensor"),
    "counts that do not divide": ({"counts": np.zeros(3, np.int32)}, "counts has 3 elements; their number must divide"),
    "counts of int64": ({"counts": np.zeros(2, np.int64)}, "counts has dtype int64 (7); it must be int32"),
    "counts of two dimensions": ({"counts": np.zeros((2, 1), np.int32)}, "counts has 2 dimensions; it must have 1"),
    "too few weights": ({"weights": np.zeros(3, np.float32)}, "weights has 3 elements; it must have one for each of"),
    "another out": ({"out": np.zeros((4, 2), np.float32)}, "out has shape [4, 2]; it must be [4, 3], as gate_up has"),
    "another out's type": ({"out": np.zeros((4, 3), np.float16)}, "out has dtype float16 (9); it must be float32"),
    "scales alone": (
        {"column_major": True},
        "column_major, power_of_two and packed are of scales; they need quantize=True",
    ),
    "one out of two": ({"quantize": True, "out": np.zeros((4, 3), np.float32)}, "out is of type ndarray; it must be a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, sentence = REFUSED[name]
    given = {"gate_up": np.zeros((4, 6), np.float32)} | changes
    with pytest.raises(tw.InvalidArgument) as caught:
        tw.swiglu(given.pop("gate_up"), **given)
    assert sentence in str(caught.value)


def test_memory_of_its_own() -> None:
    memory = np.zeros((4, 9), np.float32)
    with pytest.raises(tw.InvalidArgument, match=r"out at .* overlaps gate_up at"):
        tw.swiglu(memory[:, :6], out=memory[:, 3:6])
    with pytest.raises(tw.InvalidArgument, match=r"of_gate_up at .* overlaps gradient at"):
        tw.swiglu_backward(np.zeros((4, 6), np.float32), memory[:, :3], out=(memory[:, 2:8], None))
    fixed = np.zeros((4, 3), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(tw.InvalidArgument, match="out is read-only"):
        tw.swiglu(np.zeros((4, 6), np.float32), out=fixed)
    if not hasattr(_native.lib, "cudaStreamCreateWithFlags"):
        with pytest.raises(tw.InvalidArgument, match="stream is 0x1; it must be NULL"):
            x, y = (described(np.zeros(shape, np.float32)) for shape in ((4, 6), (4, 3)))
            _native.check(_native.lib.twSwiGlu(x, None, None, y, None, 0, -1, 1))
