"""fp8: every bit against ml_dtypes and the definitions, whatever the shape, and the same on every device."""

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
        (
            {"scales": np.zeros((4, 6), np.float32)[:, ::2]},
            r"scales has strides \[6, 2\]; rows or columns must be contig",
        ),
        (
            {"scales": np.zeros((4, 1), np.int32)},
            "scales has dtype int32, of packed .* but power_of_two is 0; it must be 1",
        ),
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
