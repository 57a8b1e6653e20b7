"""mxfp8, nvfp4 and packed scales of fp8: every bit against ml_dtypes and the definitions, on every device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import SPECIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_activation import rubbish, valid_rows
from test_quantize import DTYPES, FP8, activations, as_numpy, as_torch, bits, quantized, same

import tokenway as tw
from tokenway.quantize import dequantize_fp8, quantize_fp8

Array = np.ndarray
FORMATS = {"float8_e4m3fn": (FP8, 8, 448.0), "float8_e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0)}
E2M1 = ml_dtypes.float4_e2m1fn
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
pytestmark = pytest.mark.usefixtures("rows_in_place")
both_formats = pytest.mark.parametrize("name", FORMATS)


def mxfp8(x: Array, name: str) -> tuple[Array, Array]:
    """What the C header promises, written down in NumPy, in float64, where all of it is exact until it is rounded."""
    kind, largest_exponent, most = FORMATS[name]
    tokens, elements = x.shape
    with np.errstate(all="ignore"):  # NaN
        wide = x.astype(np.float64).reshape(tokens, elements // 32, 32)
    largest = np.abs(wide).max(-1)
    finite = np.isfinite(largest)
    _, exponent = np.frexp(np.where(finite, largest, 1))  # largest is in [2 ** (exponent - 1), 2 ** exponent)
    scales = np.clip(exponent - 1 - largest_exponent + 127, 0, 254)
    scales = np.where(finite, np.where(largest == 0, 0, scales), 255).astype(np.uint8)
    with np.errstate(all="ignore"):
        quotient = wide / np.exp2(scales.astype(np.float64) - 127)[..., None]
        values = np.clip(quotient, -most, most).astype(kind)
    values.view(np.uint8)[~finite] = 0x7F
    return values.reshape(tokens, elements), scales


def nearest_e2m1(x: Array) -> Array:
    """Codes, by ml_dtypes; NaN has none."""
    return np.clip(np.where(np.isnan(x), 0, x), -6, 6).astype(E2M1).view(np.uint8) & 7 | 8 * np.signbit(x)


def nvfp4(x: Array, global_scale: Array | float | None = None, valid: Array | None = None) -> tuple[Array, ...]:
    """What the C header promises, written down in NumPy."""
    f32 = np.float32
    tokens, elements = x.shape
    blocks = x.astype(f32).reshape(tokens, elements // 16, 16)
    largest = np.abs(blocks).max(-1)
    finite = np.isfinite(largest)
    if global_scale is None:
        counted = largest[finite if valid is None else finite & valid[:, None]]
        most = counted.max(initial=0)
        global_scale = max(most / f32(6 * 448), f32(2.0**-116)) if most else f32(1)
    g = np.broadcast_to(np.asarray(global_scale, f32), largest.shape)
    with np.errstate(all="ignore"):
        scales = np.minimum(largest / (f32(6) * g), f32(448)).astype(FP8)
        scales.view(np.uint8)[~finite] = 0x7F
        step = (scales.astype(f32) * g)[..., None]
        quotient = np.where(step == 0, 0, blocks / step)
    codes = nearest_e2m1(np.copysign(quotient, blocks)).astype(np.uint8).reshape(x.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, np.asarray(global_scale, f32)


def made(made_for: Any, x: Array, form: Any, counts: Array | None = None, **how: Any) -> tuple[Array, ...]:
    """What a call makes of outputs that began as bytes of 0xA5."""
    tokens, elements = x.shape
    place = made_for.tensor
    if form in FORMATS:
        shapes = [((tokens, elements), FORMATS[form][0]), ((tokens, elements // 32), np.uint8)]
        call = tw.quantize_mxfp8
    else:
        shapes = [((tokens, elements // 2), np.uint8), ((tokens, elements // 16), FP8)]
        call = tw.quantize_nvfp4
        if "global_scale" not in how:
            shapes.append(((), np.float32))
    out = tuple(place(rubbish(*shape)) for shape in shapes)
    with np.errstate(all="ignore"):
        got = call(place(x), counts=None if counts is None else place(counts), out=out, **how)
    assert all(a is b for a, b in zip(got, out, strict=False))
    return tuple(np.asarray(made_for.array(y)) for y in got)


def ended(x: Array) -> Array:
    """Rows of whole blocks: some of what is no number, or hardly one."""
    rng = np.random.default_rng(x.shape)
    put = rng.random(x.shape) < 0.01
    with np.errstate(all="ignore"):
        x[put] = rng.choice(SPECIAL, put.sum()).astype(x.dtype)
        x[rng.random(len(x)) < 0.2] *= x.dtype.type(2.0**-126 if x.dtype != np.float16 else 2.0**-14)
    return x


# ---- mxfp8 ---------------------------------------------------------------------------------------


@both_formats
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_patterns(made_for: Any, dtype: str, name: str) -> None:
    """Every 16-bit float, NaN and infinities too, beside its neighbours, and (the finite ones) beside all others."""
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    finite = np.random.default_rng(1).permutation(x[np.isfinite(x.astype(np.float32))])
    for rows in (x.reshape(512, 128), finite.reshape(-1, 64)):
        same(made(made_for, rows, name), mxfp8(rows, name))


@both_formats
def test_every_exponent(made_for: Any, name: str) -> None:
    """Of blocks from the least subnormal number to the largest: where the floor turns, where values saturate, and where
    they lie half way between two."""
    kind, _, most = FORMATS[name]
    ends = np.array([0x000000, 0x000001, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000, 0x7FFFFF], np.uint32)
    largest = (np.arange(255, dtype=np.uint32)[:, None] << 23 | ends).reshape(-1).view(np.float32)
    values = np.arange(256, dtype=np.uint8).view(kind).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    rows = np.zeros((len(largest), 32))
    rng = np.random.default_rng(3)
    for row, size in zip(rows, largest.astype(np.float64), strict=True):
        chosen = np.concatenate([rng.choice(values, 15), rng.choice(middles, 16)]) / most
        row[0], row[1:] = size, np.where(np.abs(chosen) <= 1, chosen, 1) * 2.0 ** np.floor(np.log2(size or 1))
    x = rows.astype(np.float32)
    want = mxfp8(x, name)
    same(made(made_for, x, name), want)
    same(made(made_for, -x, name), mxfp8(-x, name))
    assert set(want[1][:, 0]) == set(range(255 - FORMATS[name][1]))
    assert np.abs(want[0].astype(np.float32)).max() == most


@both_formats
def test_ties(made_for: Any, name: str) -> None:
    """Beside a largest magnitude whose scale is 1: every value, half way to the next, and a step to either side."""
    kind, largest_exponent, _ = FORMATS[name]
    values = np.arange(128, dtype=np.uint8).view(kind).astype(np.float32)
    values = values[np.isfinite(values)]
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = x[x < 2.0 ** (largest_exponent + 1)]
    rows = np.full((-(-len(x) // 31), 32), 2.0**largest_exponent, np.float32)
    rows[:, 1:] = np.resize(x, rows[:, 1:].shape)
    got = made(made_for, rows, name)
    assert (got[1] == 127).all()
    same(got, mxfp8(rows, name))


@both_formats
def test_special_blocks(made_for: Any, name: str) -> None:
    """Zeros keep their sign and have the least scale; what is not finite spoils its block and no other."""
    x = np.full((1, 6 * 32), 0.5, np.float32)
    x[0, :32] = 0
    x[0, 1] = -0.0
    x[0, 32 + 5] = np.nan
    x[0, 64 + 31] = -np.inf
    x[0, 96:128] = 1e-45
    x[0, 128:160] = np.float32(3.4028235e38)
    values, scales = made(made_for, x, name)
    same((values, scales), mxfp8(x, name))
    _, largest_exponent, most = FORMATS[name]
    assert list(scales[0]) == [0, 255, 255, 0, 254 - largest_exponent, 126 - largest_exponent]
    assert list(bits(values)[0, :3]) == [0, 0x80, 0] and (bits(values)[0, 32:96] == 0x7F).all()
    assert (values[0, 128:160].astype(np.float32) == most).all()
    back = made_for.array(tw.dequantize_mxfp8(made_for.tensor(values), made_for.tensor(scales)))
    assert np.isnan(back[0, 32:96]).all() and (back[0, 160:] == 0.5).all() and not back[0, :32].any()


@both_formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_there_and_back(made_for: Any, dtype: str, name: str) -> None:
    """No element is off by more than half a step of its value, or an eighth where it saturates."""
    kind, _, most = FORMATS[name]
    x = activations(9, 416, dtype)
    values, scales = tw.quantize_mxfp8(made_for.tensor(x), name)
    got = made_for.array(tw.dequantize_mxfp8(values, scales))
    want, scale = x.astype(np.float64), np.exp2(np.repeat(made_for.array(scales), 32, -1).astype(np.float64) - 127)
    step = np.maximum(np.abs(want), scale * float(ml_dtypes.finfo(kind).smallest_normal)) * float(
        ml_dtypes.finfo(kind).eps
    )
    error = np.abs(got - want)
    beyond = np.abs(want) > most * scale
    assert got.dtype == np.float32 and (error[~beyond] <= step[~beyond] / 2).all()
    assert beyond.any() and (error[beyond] <= np.abs(want[beyond]) / 8).all()
    three = tw.dequantize_mxfp8(values.reshape(3, 3, 416), scales.reshape(3, 3, 13))
    same((made_for.array(three),), (got.reshape(3, 3, 416),))


# ---- nvfp4 ---------------------------------------------------------------------------------------


def codes_of(packed: Array) -> Array:
    """Two per byte, the first in the low half."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    return codes


def pack(made_for: Any, x: Array, *args: Any) -> tuple[Array, Array, Array]:
    packed, scales, global_scale = tw.pack_nvfp4(made_for.tensor(x), *args)
    if isinstance(global_scale, np.ndarray | np.floating):
        return made_for.array(packed), made_for.array(scales), np.asarray(global_scale)
    return made_for.array(packed), made_for.array(scales), made_for.array(global_scale)


def test_e2m1(made_for: Any) -> None:
    """With scales of 1 an element is its nearest code: of all bfloat16 from -6 to 6, and just beside ties."""
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES["bfloat16"]).astype(np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    near = [np.nextafter(ties, np.float32(end)) for end in (0, 6)]
    x = np.concatenate([x[np.abs(x) <= 6], *near, *(-y for y in near)])
    rows = np.full((len(x) // 15, 16), 6, np.float32)
    rows[:, :15] = x[: len(rows) * 15].reshape(-1, 15)
    packed, scales, global_scale = pack(made_for, rows, 1.0)
    assert global_scale == 1 and (scales.astype(np.float32) == 1).all()
    codes = codes_of(packed)
    np.testing.assert_array_equal(codes, nearest_e2m1(rows))
    distance = np.abs(np.abs(rows)[..., None] - E2M1_VALUES)
    assert (np.abs(E2M1_VALUES[codes & 7] - np.abs(rows)) == distance.min(-1)).all()
    assert packed.shape == (len(rows), 8) and packed.dtype == np.uint8


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4(made_for: Any, dtype: str) -> None:
    """Both scales and every code as documented, and what unpacks is their product."""
    x = activations(24, 192, dtype)
    packed, scales, global_scale = got = pack(made_for, x)
    same(got, nvfp4(x))
    same(made(made_for, x, "nvfp4"), got)
    assert scales.astype(np.float32).max() == 448
    back = tw.dequantize_nvfp4(made_for.tensor(packed), made_for.tensor(scales), float(global_scale))
    codes = codes_of(packed)
    value = np.where(codes & 8, -1, 1) * E2M1_VALUES[codes & 7]
    step = np.repeat(scales.astype(np.float32) * global_scale, 16, -1)
    same((made_for.array(back),), (value.astype(np.float32) * step,))
    assert np.linalg.norm(made_for.array(back) - x.astype(np.float32)) < 0.12 * np.linalg.norm(x.astype(np.float32))


def test_nvfp4_shapes(made_for: Any) -> None:
    """Any leading dimensions and strides, a global scale per row or otherwise, nothing at all."""
    x = activations(6, 64)
    scale = np.geomspace(0.02, 0.1, 6, dtype=np.float32)[:, None]
    packed, scales, found = pack(made_for, x, made_for.tensor(scale))
    np.testing.assert_array_equal(found, scale)
    same((packed, scales), nvfp4(x, scale)[:2])
    for row in range(6):
        alone = pack(made_for, x[row], float(scale[row, 0]))
        same(alone[:2], (packed[row], scales[row]))
    for other in (scale, scale.T[:, :4], scale[:4, 0], scale * scale[:4].T * 20):
        want = nvfp4(x, other)[:2]
        g = np.ascontiguousarray(other)
        same(pack(made_for, x, made_for.tensor(g))[:2], want)
        if len(g) == 6:
            g = g.reshape(2, 3, -1)
        three = pack(made_for, x.reshape(2, 3, 64), made_for.tensor(g))[:2]
        same(three, tuple(y.reshape(2, 3, -1) for y in want))
    arrived = [made_for.tensor(np.ascontiguousarray(y.reshape(2, 3, -1))) for y in (packed, scales, scale)]
    three = made_for.array(tw.unpack_nvfp4(*arrived))
    flat = made_for.array(tw.unpack_nvfp4(*(made_for.tensor(y) for y in (packed, scales, scale))))
    same((three,), (flat.reshape(2, 3, 64),))
    nothing = pack(made_for, np.zeros((0, 32), np.float32))
    assert nothing[0].shape == (0, 16) and nothing[1].shape == (0, 2) and nothing[2] == 1
    assert pack(made_for, np.zeros((3, 0), np.float32))[2] == 1
    assert tw.unpack_nvfp4(made_for.tensor(nothing[0]), made_for.tensor(nothing[1]), 1.0).shape == (0, 32)
    same(pack(made_for, np.asfortranarray(x)), pack(made_for, x))


def test_nvfp4_special_blocks(made_for: Any) -> None:
    """What is not finite spoils its block alone; zeros and what is too small for a scale are 0."""
    x = np.ones((1, 80), np.float32)
    x[0, 3] = np.nan
    x[0, 20] = -np.inf
    x[0, 32:48] = 0
    x[0, 48:64] = -1e-6
    got = packed, scales, global_scale = pack(made_for, x)
    same(got, nvfp4(x))
    assert global_scale == np.float32(1) / np.float32(6 * 448)
    got = made_for.array(tw.unpack_nvfp4(made_for.tensor(packed), made_for.tensor(scales), float(global_scale)))
    assert np.isnan(got[0, :32]).all() and (got[0, 32:64] == 0).all() and np.allclose(got[0, 64:], 1)
    zeros = pack(made_for, np.zeros((2, 16), np.float32))
    assert zeros[2] == 1 and not bits(zeros[0]).any() and not bits(zeros[1]).any()


@pytest.mark.parametrize("least", [2.0**-149, 2.0**-126, 2.0**-120, 2.0**-100, 1.0, 2.0**100, 3e38])
def test_nvfp4_of_any_size(made_for: Any, least: float) -> None:
    """Tensors of tiny and of huge numbers, subnormal elements beside larger ones, and global scales that do not fit."""
    rng = np.random.default_rng(5)
    x = np.full((8, 64), least, np.float64) * np.exp2(-rng.integers(0, 30, (8, 64))) * rng.choice([-1, 1], (8, 64))
    x = x.astype(np.float32)
    same(made(made_for, x, "nvfp4"), nvfp4(x))
    for given_scale in (2.0**-116, 1.0, 2.0**100):
        g = made_for.tensor(np.array(given_scale, np.float32))
        same(made(made_for, x, "nvfp4", global_scale=g), nvfp4(x, given_scale))


# ---- any shape, valid rows, packed scales ----------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_shape(made_for: Any, data: st.DataObject) -> None:
    draw = data.draw
    form, dtype = draw(st.sampled_from([*FORMATS, "nvfp4"])), draw(st.sampled_from(sorted(DTYPES)))
    block = 16 if form == "nvfp4" else 32
    groups, each, elements = draw(st.integers(1, 9)), draw(st.integers(0, 7)), block * draw(st.integers(0, 25))
    counts = np.array(draw(st.lists(st.integers(-1, 9), min_size=groups, max_size=groups)), np.int32)
    begin = draw(st.integers(0, 3))
    x = ended(activations(groups * each, elements + 9, dtype, draw(st.integers(0, 9))))[:, begin : begin + elements]
    for given_counts in (counts, None):
        valid = valid_rows(len(x), given_counts)
        got = made(made_for, x, form, given_counts)
        with np.errstate(all="ignore"):
            want = nvfp4(x, valid=valid) if form == "nvfp4" else mxfp8(x, form)
        same(tuple(y[valid] for y in got[:2]), tuple(y[valid] for y in want[:2]))
        same(got[2:], want[2:])
        for y in got[:2]:
            assert (bits(y)[~valid] == 0xA5).all()


@pytest.mark.parametrize("form", [*FORMATS, "nvfp4"])
def test_model_shape(made_for: Any, form: str) -> None:
    """Rows as they are in use, many blocks of valid rows, and more rows than a grid has blocks."""
    for tokens, elements, groups in ((77, 7168, 7), (4096, 32, 2048)):
        x = activations(tokens, elements)
        counts = np.random.default_rng(7).integers(0, 3, groups).astype(np.int32)
        valid = valid_rows(tokens, counts)
        got = made(made_for, x, form, counts)
        want = nvfp4(x, valid=valid) if form == "nvfp4" else mxfp8(x, form)
        same(tuple(y[valid] for y in got[:2]), tuple(y[valid] for y in want[:2]))
        same(got[2:], want[2:])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 9), st.integers(0, 2311), st.sampled_from(sorted(DTYPES)))
def test_packed_scales(made_for: Any, tokens: int, elements: int, dtype: str) -> None:
    """The bytes of an int32 are the exponents of the scales that are powers of two; and scales by column."""
    x = activations(tokens, elements, dtype)
    if tokens > 2 and elements > 130:
        x[1, 2], x[2, :128] = np.inf, 0
    with np.errstate(all="ignore"):
        values, scales = quantized(x, True)
    blocks, words, wide = -(-elements // 128), -(-elements // 512), -(-tokens // 4) * 4
    exponents = np.zeros((tokens, 4 * words), np.uint8)
    exponents[:, :blocks] = scales.view(np.uint32) >> 23 & 0xFF
    packed = exponents.view("<i4").reshape(tokens, words)
    place = made_for.tensor
    got = quantize_fp8(place(x), packed=True)
    same(tuple(made_for.array(y) for y in got), (values, packed))
    with np.errstate(all="ignore"):
        back = [made_for.array(dequantize_fp8(place(values), place(by))) for by in (packed, scales)]
    nan = np.isnan(back[1])
    assert (np.isnan(back[0]) == nan).all()
    same((np.where(nan, 0, back[0]),), (np.where(nan, 0, back[1]),))
    for how, want in (({"packed": True}, packed), ({"power_of_two": True}, scales)):
        out = place(rubbish((tokens, elements), FP8)), place(rubbish((want.shape[1], wide), want.dtype))
        got = tuple(made_for.array(y) for y in quantize_fp8(place(x), out=out, column_major=True, **how))
        same((got[0], np.ascontiguousarray(got[1][:, :tokens].T)), (values, want))
        assert (bits(got[1])[:, tokens:] == 0xA5A5A5A5).all()


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "change", "sentence"),
    [
        (
            "mx",
            {"x": np.zeros((2, 48), np.float32)},
            r"rows has shape \[2, 48\]; 32 elements share a scale, so a row must",
        ),
        (
            "nv",
            {"x": np.zeros((2, 24), np.float32)},
            r"rows has shape \[2, 24\]; 16 elements share a scale, so a row must",
        ),
        ("mx", {"x": np.zeros((2, 3, 32), np.float32)}, r"x has shape \[2, 3, 32\]; it must be \[T, H\]"),
        ("mx", {"x": np.zeros((4, 64))}, r"rows has dtype float64 \(12\); it must be float32, bfloat16 or float16"),
        ("mx", {"dtype": "float8_e4m3b11"}, "dtype is 'float8_e4m3b11'; it must be one of"),
        ("mx", {"dtype": "uint8"}, "dtype is uint8; it must be float8_e4m3fn or float8_e5m2"),
        (
            "mx",
            {"counts": np.zeros(3, np.int32)},
            "counts has 3 elements; their number must divide that of the rows, 4",
        ),
        ("nv", {"counts": np.zeros(2, np.int64)}, r"counts has dtype int64 \(7\); it must be int32"),
        ("mx", {"out": np.zeros((4, 64), FP8)}, r"out is of type ndarray; it must be \(values, scales\)"),
        (
            "nv",
            {"out": (np.zeros((4, 32), np.uint8),) * 2},
            r"out has 2 tensors; it must be \(packed, scales, global_sc",
        ),
        ("mx", {"out": (np.zeros((4, 64), np.uint8), np.zeros((4, 2), np.uint8))}, "values has dtype uint8"),
        ("mx", {"out": (np.zeros((4, 64), FP8), np.zeros((4, 3), np.uint8))}, r"scales has shape \[4, 3\]; it must be"),
        (
            "mx",
            {"out": (np.zeros((4, 64), FP8), np.zeros((4, 4), np.uint8)[:, ::2])},
            "scales has stride 2 in dimension",
        ),
        (
            "nv",
            {"global_scale": np.ones((4, 3), np.float32)},
            r"global_scale has size 3 in dimension 1 of 2; it must be",
        ),
        (
            "nv",
            {"global_scale": np.ones((1, 1, 2), np.float32)},
            "global_scale has 3 dimensions; it must have at most 2",
        ),
    ],
)
def test_refusals(call: str, change: dict[str, Any], sentence: str, made_for: Any) -> None:
    """Sentences that name the argument, its value and what is allowed."""
    given = {"x": activations(4, 64)} | change
    x = given.pop("x")
    with pytest.raises(tw.InvalidArgument, match=sentence):
        (tw.quantize_mxfp8 if call == "mx" else tw.quantize_nvfp4)(x, **given)


def test_refusals_of_packing() -> None:
    with pytest.raises(tw.InvalidArgument, match=r"x has shape \[2, 24\]; its last dimension must be a multiple of 16"):
        tw.pack_nvfp4(np.zeros((2, 24), np.float32))
    with pytest.raises(tw.InvalidArgument, match="x has dtype float64; it must be float32, bfloat16 or float16"):
        tw.pack_nvfp4(np.zeros((2, 16)))
    with pytest.raises(tw.InvalidArgument, match=r"global_scale has shape \[5\]; it must broadcast to that of scales"):
        tw.pack_nvfp4(np.zeros((2, 3, 32), np.float32), np.ones(5))
    packed, scales, global_scale = tw.pack_nvfp4(activations(2, 32))
    with pytest.raises(tw.InvalidArgument, match=r"packed is int8 \[2, 16\]; it must be uint8"):
        tw.unpack_nvfp4(packed.view(np.int8), scales, global_scale)
    with pytest.raises(tw.InvalidArgument, match=r"scales has shape \[2, 1\]; it must be \[2, 2\]"):
        tw.unpack_nvfp4(packed, scales[:, :1], global_scale)
    values, scales = tw.quantize_mxfp8(activations(2, 64))
    with pytest.raises(
        tw.InvalidArgument, match=r"values has shape \[2, 33\]; its last dimension must be a multiple of 32"
    ):
        tw.dequantize_mxfp8(values[:, :33], scales)
    with pytest.raises(tw.InvalidArgument, match="scales has dtype int8; it must be uint8"):
        tw.dequantize_mxfp8(values, scales.view(np.int8))


# ---- PyTorch -------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_on_the_cpu(torch: Any) -> None:
    """The bits that NumPy's arrays have."""
    x = ended(activations(24, 448))
    with np.errstate(all="ignore"):
        got, want = tw.pack_nvfp4(as_torch(torch, x)), tw.pack_nvfp4(x)
        same(tuple(as_numpy(torch, y) for y in got[:2]), want[:2])
        assert got[2].numpy() == want[2]
        same_numbers(tw.unpack_nvfp4(*got).numpy(), tw.unpack_nvfp4(*want))
        got, want = tw.quantize_mxfp8(as_torch(torch, x)), tw.quantize_mxfp8(x)
        same(tuple(as_numpy(torch, y) for y in got), want)
        same_numbers(tw.dequantize_mxfp8(*got).numpy(), tw.dequantize_mxfp8(*want))
        got = tw.quantize_mxfp8(as_torch(torch, x), torch.float8_e5m2)
        same_numbers(tw.dequantize_mxfp8(*got).numpy(), tw.dequantize_mxfp8(*tw.quantize_mxfp8(x, "float8_e5m2")))
        got, want = tw.quantize_fp8(as_torch(torch, x), packed=True), tw.quantize_fp8(x, packed=True)
        same(tuple(as_numpy(torch, y) for y in got), want)
        same_numbers(tw.dequantize_fp8(*got).numpy(), tw.dequantize_fp8(*want))


def same_numbers(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got, want)  # a NaN equals any
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()
