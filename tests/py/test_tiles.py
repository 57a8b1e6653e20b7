"""Scales in tiles of 128 rows by 4, as block-scaled products read them: every byte, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_activation import rubbish, valid_rows
from test_microscaling import FORMATS, ended, mxfp8, nvfp4
from test_quantize import DTYPES, FP8, activations, bits, same

import tokenway as tw

Array = np.ndarray
pytestmark = pytest.mark.usefixtures("rows_in_place")
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def up(n: int, by: int) -> int:
    return -(-n // by) * by


def in_tiles(scales: Array, valid: Array, groups: int, before: int) -> Array:
    """Bytes of scales [rows, columns] as the header describes tiles, one scale after the other; `before` where nothing
    is written."""
    rows, columns = scales.shape
    each = rows // groups if groups else 0
    down, across = up(each, 128) // 128, up(columns, 4) // 4
    tiles = np.full(groups * down * across * 512, before, np.uint8)
    for row in np.flatnonzero(valid):
        group, r = divmod(int(row), each)
        for c in range(up(columns, 4)):
            tile = (group * down + r // 128) * across + c // 4
            inside = r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            tiles[tile * 512 + inside] = bits(scales)[row, c] if c < columns else 0
    return tiles


def made(made_for: Any, x: Array, form: str, counts: Array | None) -> tuple[Array, Array]:
    """Values and scales, in tiles, of outputs that began as bytes of 0xA5."""
    tokens, elements = x.shape
    block, kind = (16, FP8) if form == "nvfp4" else (32, np.uint8)
    groups = () if counts is None else (len(counts),)
    each = tokens // max(1, *groups) if groups else tokens
    shape = (*groups, up(each, 128), up(elements // block, 4))
    place = made_for.tensor
    out: tuple[Any, ...] = place(rubbish(shape, kind))
    told = None if counts is None else place(counts)
    if form == "nvfp4":
        packed = place(rubbish((tokens, elements // 2), np.uint8))
        found = place(rubbish((), np.float32))
        got = tw.quantize_nvfp4(place(x), counts=told, tiled=True, out=(packed, out, found))
    else:
        values = place(rubbish((tokens, elements), FORMATS[form][0]))
        got = tw.quantize_mxfp8(place(x), counts=told, tiled=True, out=(values, out))
    assert got[1] is out and tuple(out.shape) == shape
    return made_for.array(got[0]), made_for.array(out)


def check(made_for: Any, x: Array, form: str, counts: Array | None) -> None:
    valid = valid_rows(len(x), counts)
    with np.errstate(all="ignore"):
        values, scales = nvfp4(x, valid=valid)[:2] if form == "nvfp4" else mxfp8(x, form)
        got, tiles = made(made_for, x, form, counts)
    same((got[valid],), (values[valid],))
    assert (bits(got)[~valid] == 0xA5).all()
    want = in_tiles(scales, valid, 1 if counts is None else len(counts), 0xA5)
    np.testing.assert_array_equal(bits(tiles).reshape(-1), want)


@pytest.mark.parametrize("form", [*FORMATS, "nvfp4"])
@pytest.mark.parametrize("tokens", [0, 1, 33, 128, 300])
def test_tiles_of_all_rows(made_for: Any, form: str, tokens: int) -> None:
    """Tiles that end with the rows and tiles that do not; rows whose last tile has one scale to four."""
    for elements in (32, 128, 160, 224):
        check(made_for, ended(activations(tokens, elements)), form, None)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "nvfp4"])
@pytest.mark.parametrize("counts", [[0], [390], [3, 0, 131], [400, -2, 129], [1] * 5, []], ids=str)
def test_tiles_of_valid_rows(made_for: Any, form: str, counts: list[int]) -> None:
    """Each block of rows has tiles of its own, and rows that are not valid are not written."""
    check(made_for, activations(390 if counts else 0, 96), form, np.array(counts, np.int32))


@FEW
@given(st.data())
def test_whatever_the_shape(made_for: Any, data: st.DataObject) -> None:
    draw = data.draw
    form, dtype = draw(st.sampled_from([*FORMATS, "nvfp4"])), draw(st.sampled_from(sorted(DTYPES)))
    block = 16 if form == "nvfp4" else 32
    groups, each, elements = draw(st.integers(1, 5)), draw(st.integers(0, 140)), block * draw(st.integers(0, 9))
    most = st.integers(-1, each + 1)
    counts = np.array(draw(st.lists(most, min_size=groups, max_size=groups)), np.int32)
    x = activations(groups * each, elements, dtype, draw(st.integers(0, 9)))
    check(made_for, x, form, counts)


@pytest.mark.parametrize("kind", [np.uint8, FP8], ids=["uint8", "fp8"])
def test_tiling_what_has_arrived(made_for: Any, torch: Any, kind: Any) -> None:
    """The bytes that a call would have written, of scales of any leading dimensions, and back."""
    rng = np.random.default_rng(3)
    for lead, rows, columns in [((), 1, 1), ((), 300, 6), ((3,), 130, 4), ((2, 2), 128, 7), ((0,), 5, 3), ((2,), 0, 3)]:
        scales = rng.integers(1, 255, (*lead, rows, columns), np.uint8).view(kind)
        tiled = tw.tile_scales(made_for.tensor(scales))
        assert tuple(tiled.shape) == (*lead, up(rows, 128), up(columns, 4))
        got = made_for.array(tiled)
        assert got.dtype == scales.dtype
        several = int(np.prod(lead))
        flat, shown = scales.reshape(several, rows, columns), bits(got).reshape(several, up(rows, 128) * up(columns, 4))
        for one, mine in zip(flat, shown, strict=True):
            np.testing.assert_array_equal(mine, in_tiles(one, np.ones(rows, bool), 1, 0) if rows else mine[:0])
        back = made_for.array(tw.untile_scales(tiled, rows, columns))
        assert back.dtype == scales.dtype
        np.testing.assert_array_equal(bits(back), bits(scales))


def test_a_call_s_tiles_and_those_of_its_rows(made_for: Any) -> None:
    x = activations(200, 224)
    for call in (tw.quantize_mxfp8, tw.quantize_nvfp4):
        by_row, tiled = call(made_for.tensor(x)), call(made_for.tensor(x), tiled=True)
        rows, columns = by_row[1].shape
        back = made_for.array(tw.untile_scales(tiled[1], rows, columns))
        np.testing.assert_array_equal(bits(back), bits(made_for.array(by_row[1])))
        want = made_for.array(tw.tile_scales(by_row[1]))
        valid = made_for.array(tw.tile_scales(made_for.tensor(np.ones((rows, columns), np.uint8)))).astype(bool)
        np.testing.assert_array_equal(bits(made_for.array(tiled[1]))[valid], bits(want)[valid])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scales": np.zeros((4, 4), np.uint8)}, r"scales has shape \[4, 4\]; it must be \[128, 4\]"),
        ({"scales": np.zeros((128, 8), np.uint8)[:, ::2]}, "scales is not C-contiguous; in tiles it must be"),
        ({"scales": np.zeros((128, 4), np.int8)}, r"scales has dtype int8 \(2\); it must be uint8"),
        (
            {"scales": np.zeros((128, 4), np.uint8), "counts": np.zeros(2, np.int32)},
            r"scales has shape \[128, 4\]; it must be \[2, 128, 4\]",
        ),
        (
            {"scales": np.zeros((3, 128, 4), np.uint8), "counts": np.zeros(3, np.int32)},
            "counts has 3 elements; their number must divide that of the rows, 4",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], sentence: str) -> None:
    values = np.zeros((4, 64), FP8)
    with pytest.raises(tw.InvalidArgument, match=sentence):
        tw.quantize_mxfp8(activations(4, 64), counts=change.get("counts"), tiled=True, out=(values, change["scales"]))


def test_scales_that_have_no_tiles() -> None:
    with pytest.raises(
        tw.InvalidArgument, match=r"scales is float32 \[4, 2\]; it must be uint8 or float8_e4m3fn of two"
    ):
        tw.tile_scales(np.zeros((4, 2), np.float32))
    with pytest.raises(tw.InvalidArgument, match=r"scales is uint8 \[4\]; it must be"):
        tw.tile_scales(np.zeros(4, np.uint8))
    tiled = tw.tile_scales(np.zeros((4, 2), np.uint8))
    with pytest.raises(tw.InvalidArgument, match=r"tiled has shape \[128, 4\]; it must end with \[128, 8\]"):
        tw.untile_scales(tiled, 4, 5)
    with pytest.raises(tw.InvalidArgument, match="rows is -1; it must be an integer from 0"):
        tw.untile_scales(tiled, -1, 2)
