"""fp8 and nvfp4: every bit against ml_dtypes and the definitions, whatever the shape, and the same on every device."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tokenway as tw

Array = np.ndarray
FP8 = ml_dtypes.float8_e4m3fn
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LEAST = np.float32(2.0**-116)


def quantized(x: Array, power_of_two: bool) -> tuple[Array, Array]:
    """What the C header promises, written down in NumPy."""
    tokens, elements = x.shape
    blocks = -(-elements // 128)
    wide = np.zeros((tokens, blocks * 128), np.float32)
    wide[:, :elements] = x
    wide = wide.reshape(tokens, blocks, 128)
    largest = np.abs(wide).max(-1)  # NaN if there is one
    if power_of_two:
        exact = largest.astype(np.float64) / 448
        fraction, exponent = np.frexp(np.where(np.isfinite(exact), exact, 1))
        scales = np.ldexp(1.0, exponent - (fraction == 0.5)).astype(np.float32)
    else:
        scales = largest / np.float32(448)
    scales = np.maximum(scales, LEAST)
    scales[largest == 0] = 1
    scales[~np.isfinite(largest)] = np.nan
    values = (wide / scales[..., None]).astype(FP8)
    values.view(np.uint8)[~np.isfinite(largest)] = 0x7F
    return np.ascontiguousarray(values.reshape(tokens, blocks * 128)[:, :elements]), scales


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def same(got: tuple[Array, ...], want: tuple[Array, ...]) -> None:
    """Equal dtypes, shapes and bits."""
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        np.testing.assert_array_equal(bits(g), bits(w))


def activations(tokens: int, elements: int, dtype: str = "bfloat16", seed: int = 0) -> Array:
    """Rows of a size of their own, with a few columns that are much larger."""
    rng = np.random.default_rng([seed, tokens, elements, 1])
    x = rng.standard_normal((tokens, elements)) * np.exp(rng.standard_normal((tokens, 1)))
    return (x * np.where(rng.random(elements) < 0.01, 30, 1)).astype(DTYPES[dtype])


def quantize(made_for: Any, x: Array, power_of_two: bool) -> tuple[Array, ...]:
    """tw.quantize_fp8 on the backend's kind of tensors."""
    with np.errstate(all="ignore"):
        return tuple(made_for.array(y) for y in tw.quantize_fp8(made_for.tensor(x), power_of_two))


both_modes = pytest.mark.parametrize("power_of_two", [False, True], ids=["plain", "power of two"])


# ---- fp8 -----------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_patterns(made_for: Any, dtype: str, power_of_two: bool) -> None:
    """Every 16-bit float, NaN and infinities too, beside its neighbours, and (the finite ones) beside all others."""
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    finite = np.random.default_rng(1).permutation(x[np.isfinite(x.astype(np.float32))])
    with np.errstate(all="ignore"):
        for rows in (x.reshape(512, 128), finite.reshape(-1, 256)):
            same(quantize(made_for, rows, power_of_two), quantized(rows, power_of_two))


def test_cast_is_ml_dtypes(made_for: Any) -> None:
    """Beside a 448 the scale is 1, so values are the cast alone: of all 16-bit floats, and of many others."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    many = np.random.default_rng(2).integers(0, 1 << 32, 1 << 21, np.uint32).view(np.float32)
    # As many with exponents at which e4m3 has values.
    near = (many.view(np.uint32) & 0x807FFFFF | (115 + (many.view(np.uint32) >> 23 & 0xFF) % 21) << 23).view(np.float32)
    inputs = [halves.view(DTYPES[name]).astype(np.float32) for name in ("bfloat16", "float16")] + [many, near]
    x = np.concatenate([part[np.abs(part) <= 448] for part in inputs])
    assert len(x) > 2_000_000
    rows = np.full((len(x) // 127, 128), 448, np.float32)
    rows[:, :127] = x[: len(rows) * 127].reshape(-1, 127)
    for power_of_two in (False, True):
        values, scales = quantize(made_for, rows, power_of_two)
        assert (scales == 1).all()
        same((values,), (rows.astype(FP8),))


@both_modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(made_for: Any, dtype: str, power_of_two: bool) -> None:
    """Any number of rows and elements, rows with gaps between them, rows that begin anywhere."""
    for tokens, elements in itertools.product((0, 1, 5), (1, 8, 127, 128, 129, 200, 1024, 2311)):
        x = activations(tokens, elements + 9, dtype)
        for rows in (np.ascontiguousarray(x[:, :elements]), x[:, 1 : 1 + elements], x[::2, 8 : 8 + elements]):
            same(quantize(made_for, rows, power_of_two), quantized(rows, power_of_two))
    empty = quantize(made_for, np.zeros((3, 0), DTYPES[dtype]), power_of_two)
    assert [y.shape for y in empty] == [(3, 0), (3, 0)]


@both_modes
def test_model_shape(made_for: Any, power_of_two: bool) -> None:
    """Rows as they are in use; a kernel takes more than 65535 rows in turn."""
    x = activations(77, 7168)
    same(quantize(made_for, x, power_of_two), quantized(x, power_of_two))
    x = activations(70_001, 16)
    same(quantize(made_for, x, power_of_two), quantized(x, power_of_two))


@both_modes
def test_special_blocks(made_for: Any, power_of_two: bool) -> None:
    """Zeros keep their sign; what is not finite spoils its block and no other; tiny blocks have a normal scale."""
    x = np.full((1, 6 * 128), 0.5, np.float32)
    x[0, :128] = 0
    x[0, 1] = -0.0
    x[0, 128 + 5] = np.float32("nan")
    x[0, 256 + 127] = -np.float32("inf")
    x[0, 384:512] = 1e-45
    x[0, 512:640] = 1e-36
    values, scales = quantize(made_for, x, power_of_two)
    same((values, scales), quantized(x, power_of_two))
    assert scales[0, 0] == 1 and list(bits(values)[0, :3]) == [0, 0x80, 0]
    assert np.isnan(scales[0, 1:3]).all() and (bits(values)[0, 128:384] == 0x7F).all()
    assert (scales[0, 3:5] == LEAST).all() and (bits(values)[0, 384:512] == 0).all()
    assert (values[0, 640:].astype(np.float32) * scales[0, 5] == 0.5).all()


@both_modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(made_for: Any, dtype: str, power_of_two: bool) -> None:
    """No element is off by more than half a step of its value: 1/16 of it, or of the smallest normal e4m3."""
    x = activations(9, 391, dtype)
    values, scales = tw.quantize_fp8(made_for.tensor(x), power_of_two)
    got = made_for.array(tw.dequantize_fp8(values, scales))
    assert got.dtype == np.float32
    scale = np.repeat(made_for.array(scales), 128, -1)[:, :391]
    want = x.astype(np.float32)
    assert (np.abs(got - want) <= np.maximum(np.abs(want), scale * 2.0**-6) * 1.001 / 16).all()
    # As it arrives, with two leading dimensions.
    three = tw.dequantize_fp8(values.reshape(3, 3, 391), scales.reshape(3, 3, 4))
    same((made_for.array(three),), (got.reshape(3, 3, 391),))


def test_out(made_for: Any) -> None:
    """Tensors of the caller are written to, and are what is returned."""
    x = activations(4, 300)
    out = (made_for.tensor(np.zeros((4, 300), FP8)), made_for.tensor(np.zeros((4, 3), np.float32)))
    values, scales = tw.quantize_fp8(made_for.tensor(x), out=out)
    assert values is out[0] and scales is out[1]
    same((made_for.array(values), made_for.array(scales)), quantized(x, False))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": np.zeros((2, 3, 4), np.float32)}, r"x has shape \[2, 3, 4\]; it must be \[T, H\]"),
        ({"x": np.zeros((4, 300))}, r"rows has dtype float64 \(12\); it must be float32, bfloat16 or float16"),
        ({"x": np.zeros((300, 4), np.float32).T}, "rows has stride 4 in dimension 1"),
        ({"x": [[1.0]]}, "x is of type list; it must be a NumPy array or a PyTorch tensor"),
        ({"out": np.zeros((4, 300), FP8)}, r"out is of type ndarray; it must be \(values, scales\)"),
        ({"values": np.zeros((4, 299), FP8)}, r"values has shape \[4, 299\]; it must be \[4, 300\]"),
        ({"values": np.zeros((4, 300), np.uint8)}, r"values has dtype uint8 \(1\); it must be float8_e4m3"),
        ({"values": np.zeros((4, 600), FP8)[:, ::2]}, "values has stride 2 in dimension 1"),
        ({"scales": np.zeros((4, 2), np.float32)}, r"scales has shape \[4, 2\]; it must be \[4, 3\]"),
        ({"scales": None}, "scales is of type NoneType"),
        ({"scales": np.broadcast_to(np.float32(0), (4, 3))}, "scales is read-only"),
    ],
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    """Sentences that name the argument, its value and what is allowed."""
    values, scales = np.zeros((4, 300), FP8), np.zeros((4, 3), np.float32)
    given = {"x": activations(4, 300), "values": values, "scales": scales} | change
    out = None if "x" in change else given.get("out", (given["values"], given["scales"]))
    with pytest.raises(tw.InvalidArgument, match=sentence):
        tw.quantize_fp8(given["x"], out=out)


def test_dequantize_refusals() -> None:
    """Scales that do not belong to the values."""
    values, scales = tw.quantize_fp8(activations(4, 300))
    with pytest.raises(tw.InvalidArgument, match=r"scales has shape \[4, 2\]; it must be \[4, 3\]"):
        tw.dequantize_fp8(values, scales[:, :2])
    with pytest.raises(tw.InvalidArgument, match="scales is of type list"):
        tw.dequantize_fp8(values, [1.0])


# ---- nvfp4 ---------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_e2m1(x: Array) -> Array:
    """Codes, by distance; of two that are as near the even one; beyond 6 the last."""
    distance = np.abs(np.abs(x.astype(np.float64))[..., None] - E2M1)
    even_first = np.argsort(np.arange(8) % 2, kind="stable")
    code = even_first[np.argmin(distance[..., even_first], axis=-1)]
    return (code + 8 * np.signbit(x)).astype(np.uint8)


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
    """With scales of 1 an element is its nearest code: of all bfloat16 from -6 to 6."""
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES["bfloat16"]).astype(np.float32)
    x = x[np.abs(x) <= 6]
    rows = np.full((len(x) // 15, 16), 6, np.float32)
    rows[:, :15] = x[: len(rows) * 15].reshape(-1, 15)
    packed, scales, global_scale = pack(made_for, rows, 1.0)
    assert global_scale == 1 and (scales.astype(np.float32) == 1).all()
    np.testing.assert_array_equal(codes_of(packed), nearest_e2m1(rows))
    assert packed.shape == (len(rows), 8) and packed.dtype == np.uint8


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4(made_for: Any, dtype: str) -> None:
    """Both scales and every code as documented, and what unpacks is their product."""
    x = activations(24, 192, dtype)
    packed, scales, global_scale = pack(made_for, x)
    blocks = x.astype(np.float32).reshape(24, 12, 16)
    largest = np.abs(blocks).max(-1)
    assert global_scale == largest.max() / np.float32(6 * 448)
    six = np.float32(6)
    same((scales,), (np.minimum(largest / (global_scale * six), np.float32(448)).astype(FP8),))
    step = scales.astype(np.float32) * global_scale
    want = nearest_e2m1(blocks / step[..., None])
    np.testing.assert_array_equal(codes_of(packed), want.reshape(24, 192))
    assert scales.astype(np.float32).max() == 448

    got = tw.unpack_nvfp4(made_for.tensor(packed), made_for.tensor(scales), float(global_scale))
    value = np.where(want & 8, -1, 1) * E2M1[want & 7].astype(np.float32)
    same((made_for.array(got),), ((value.astype(np.float32) * step[..., None]).reshape(24, 192),))


def test_nvfp4_shapes(made_for: Any) -> None:
    """Any leading dimensions, a global scale per row, nothing at all."""
    x = activations(6, 64)
    scale = np.geomspace(0.02, 0.1, 6, dtype=np.float32)[:, None]
    packed, scales, given = pack(made_for, x, made_for.tensor(scale))
    np.testing.assert_array_equal(given, scale)
    for row in range(6):
        alone = pack(made_for, x[row], float(scale[row, 0]))
        same(alone[:2], (packed[row], scales[row]))
    arrived = [made_for.tensor(np.ascontiguousarray(y.reshape(2, 3, -1))) for y in (packed, scales, scale)]
    three = made_for.array(tw.unpack_nvfp4(*arrived))
    flat = made_for.array(tw.unpack_nvfp4(*(made_for.tensor(y) for y in (packed, scales, scale))))
    same((three,), (flat.reshape(2, 3, 64),))
    assert np.linalg.norm(flat - x.astype(np.float32)) < 0.2 * np.linalg.norm(x.astype(np.float32))
    nothing = pack(made_for, np.zeros((0, 32), np.float32))
    assert nothing[0].shape == (0, 16) and nothing[1].shape == (0, 2) and nothing[2] == 1
    assert tw.unpack_nvfp4(made_for.tensor(nothing[0]), made_for.tensor(nothing[1]), 1.0).shape == (0, 32)


def test_nvfp4_special_blocks(made_for: Any) -> None:
    """What is not finite spoils its block alone; zeros and what is too small for a scale are 0."""
    x = np.ones((1, 80), np.float32)
    x[0, 3] = np.nan
    x[0, 20] = np.inf
    x[0, 32:48] = 0
    x[0, 48:64] = 1e-6
    packed, scales, global_scale = pack(made_for, x)
    assert global_scale == np.float32(1) / np.float32(6 * 448)
    got = made_for.array(tw.unpack_nvfp4(made_for.tensor(packed), made_for.tensor(scales), float(global_scale)))
    assert np.isnan(got[0, :32]).all() and (got[0, 32:64] == 0).all() and np.allclose(got[0, 64:], 1)
    zeros = pack(made_for, np.zeros((2, 16), np.float32))
    assert zeros[2] == 1 and not bits(zeros[0]).any() and not bits(zeros[1]).any()


def test_nvfp4_refusals() -> None:
    """Sentences that name the argument, its value and what is allowed."""
    with pytest.raises(tw.InvalidArgument, match=r"x has shape \[2, 24\]; its last dimension must be a multiple of 16"):
        tw.pack_nvfp4(np.zeros((2, 24), np.float32))
    with pytest.raises(tw.InvalidArgument, match="x has dtype float64; it must be float32, bfloat16 or float16"):
        tw.pack_nvfp4(np.zeros((2, 16)))
    packed, scales, global_scale = tw.pack_nvfp4(activations(2, 32))
    with pytest.raises(tw.InvalidArgument, match=r"packed is int8 \[2, 16\]; it must be uint8"):
        tw.unpack_nvfp4(packed.view(np.int8), scales, global_scale)
    with pytest.raises(tw.InvalidArgument, match=r"scales has shape \[2, 1\]; it must be \[2, 2\]"):
        tw.unpack_nvfp4(packed, scales[:, :1], global_scale)


# ---- PyTorch -------------------------------------------------------------------------------------


def as_torch(torch: Any, x: Array) -> Any:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def as_numpy(torch: Any, x: Any) -> Array:
    return x.view(torch.uint8).numpy().view(FP8) if x.dtype == torch.float8_e4m3fn else x.numpy()


@pytest.mark.torch
def test_torch_on_the_cpu(torch: Any) -> None:
    """The bits that NumPy's arrays have."""
    x = activations(24, 400)
    for power_of_two in (False, True):
        got = tw.quantize_fp8(as_torch(torch, x), power_of_two)
        want = tw.quantize_fp8(x, power_of_two)
        same(tuple(as_numpy(torch, y) for y in got), want)
        same((tw.dequantize_fp8(*got).numpy(),), (tw.dequantize_fp8(*want),))
    got = tw.pack_nvfp4(as_torch(torch, x))
    want = tw.pack_nvfp4(x)
    same(tuple(as_numpy(torch, y) for y in got[:2]), want[:2])
    assert got[2].numpy() == want[2]
    same((tw.unpack_nvfp4(*got).numpy(),), (tw.unpack_nvfp4(*want),))
    special = torch.tensor([[1.0, torch.nan, 3.0, -0.0] * 4 + [0.25] * 16])
    same((as_numpy(torch, tw.pack_nvfp4(special)[1]),), (tw.pack_nvfp4(special.numpy())[1],))


@pytest.mark.torch
def test_torch_refusals(torch: Any) -> None:
    """Tensors that have no memory to read, and tensors that are apart."""
    with pytest.raises(tw.InvalidArgument, match="x is a meta tensor; it must be on the CPU or a CUDA device"):
        tw.quantize_fp8(torch.zeros(2, 128, device="meta"))
    with pytest.raises(tw.InvalidArgument, match=r"x is a tensor of layout torch.sparse_coo; it must be strided"):
        tw.quantize_fp8(torch.zeros(2, 128).to_sparse())
    with pytest.raises(tw.InvalidArgument, match="values is a Tensor on the CPU"):
        values, scales = tw.quantize_fp8(torch.zeros(2, 128))
        tw.dequantize_fp8(values, scales.numpy())


@pytest.mark.torch
@pytest.mark.gpu
def test_cuda_streams_and_graphs(backend: str) -> None:
    """On the current stream, into a graph, and on a device that is not the current one."""
    if backend != "nvlink":
        pytest.skip("is about CUDA tensors")
    import torch

    x = activations(64, 7168)
    static = as_torch(torch, x).cuda()
    tw.quantize_fp8(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = tw.quantize_fp8(static)
    for seed in range(3):
        x = activations(64, 7168, seed=seed)
        static.copy_(as_torch(torch, x))
        graph.replay()
        same(tuple(as_numpy(torch, y.cpu()) for y in (values, scales)), quantized(x, False))
    with pytest.raises(tw.InvalidArgument, match="values is on the CPU, x on cuda:"):
        tw.quantize_fp8(static, out=(values.cpu(), scales))
    current = torch.cuda.current_device()
    for device in range(torch.cuda.device_count()):
        there = tw.quantize_fp8(static.to(f"cuda:{device}"))
        assert torch.cuda.current_device() == current and there[0].device.index == device
        same(tuple(as_numpy(torch, y.cpu()) for y in there), quantized(x, False))
