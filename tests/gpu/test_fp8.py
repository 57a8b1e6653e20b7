"""The quantising kernel: the CPU's bits, on any stream and in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import SPECIAL
from gpu_world import Locals, bits_equal, capture

import tokenway as tw
from tokenway.tensors import numpy_dtype


def rows_of(tokens: int, hidden: int, dtype: str, seed: int) -> np.ndarray:
    """Magnitudes over many powers of two, zeros, and blocks with what is no number."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((tokens, hidden), np.float32) * np.exp2(rng.integers(-20, 14, (tokens, hidden)))
    rows[rng.random((tokens, hidden)) < 0.05] = 0
    if tokens > 4:
        rows[1] = 0
        rows[3, : min(hidden, 9)] = SPECIAL[: min(hidden, 9)]
    with np.errstate(over="ignore"):
        return rows.astype(numpy_dtype(dtype))


def quantise(env: Any, cases: list[tuple[int, int, str]], power_of_two: bool) -> list[list[np.ndarray]]:
    results = []
    for seed, (tokens, hidden, dtype) in enumerate(cases):
        rows = rows_of(tokens, hidden + 3, dtype, seed)[:, 2 : 2 + hidden]  # apart, and at an odd place
        values, scales = tw.quantize_fp8(env.backend.tensor(rows), power_of_two)
        results.append([env.backend.array(values), env.backend.array(scales)])
    return results


CASES = [
    (tokens, hidden, dtype)
    for tokens, hidden in ((0, 128), (1, 1), (7, 127), (5, 128), (33, 1000), (300, 7168))
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_bits_of_the_cpu(power_of_two) -> None:
    with Locals(1) as ranks:
        (have,) = ranks.run(quantise, CASES, power_of_two)
    for seed, (tokens, hidden, dtype) in enumerate(CASES):
        rows = rows_of(tokens, hidden + 3, dtype, seed)[:, 2 : 2 + hidden]
        for got, want in zip(have[seed], tw.quantize_fp8(rows, power_of_two), strict=True):
            nan = np.isnan(want.astype(np.float32))
            assert (np.isnan(got.astype(np.float32)) == nan).all(), CASES[seed]
            assert bits_equal(got[~nan], want[~nan]), CASES[seed]


def in_a_graph(env: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    static = torch.zeros(40, 512, dtype=torch.bfloat16, device=env.device)
    tw.quantize_fp8(static)
    graph, (values, _) = capture(env, lambda: tw.quantize_fp8(static))
    results = []
    for seed in range(5):
        rows = np.random.default_rng(seed).standard_normal((40, 512), np.float32).astype(numpy_dtype("bfloat16"))
        static.copy_(env.backend.tensor(rows))
        graph.replay()
        results.append((rows, env.backend.array(values)))
    return results


def test_in_a_graph() -> None:
    with Locals(1) as ranks:
        (results,) = ranks.run(in_a_graph)
    for rows, values in results:
        assert bits_equal(values, tw.quantize_fp8(rows)[0])
