"""The quantising kernels: the CPU's bits, on any stream and in a graph, of the rows that counts say are valid."""

from __future__ import annotations

from collections.abc import Callable
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


# Each: rows -> what they become. Rows are whole blocks of as many elements.
FORMS: dict[str, tuple[int, Callable[..., tuple[Any, ...]]]] = {
    "fp8": (1, tw.quantize_fp8),
    "fp8, powers of two": (1, lambda x: tw.quantize_fp8(x, True)),
    "fp8, packed": (1, lambda x: tw.quantize_fp8(x, packed=True)),
    "mxfp8": (32, tw.quantize_mxfp8),
    "mxfp8, e5m2": (32, lambda x, **how: tw.quantize_mxfp8(x, "float8_e5m2", **how)),
    "nvfp4": (16, tw.quantize_nvfp4),
    "nvfp4, given": (16, lambda x, **how: tw.quantize_nvfp4(x, 0.01, **how)),
}
CASES = [
    (tokens, hidden, dtype)
    for tokens, hidden in ((0, 128), (1, 1), (7, 127), (5, 128), (33, 1000), (300, 7168))
    for dtype in ("float32", "bfloat16", "float16")
]


def quantised_rows(seed: int, case: tuple[int, int, str], form: str) -> np.ndarray:
    tokens, hidden, dtype = case
    block = FORMS[form][0]
    hidden = -(-hidden // block) * block
    return rows_of(tokens, hidden + 3, dtype, seed)[:, 2 : 2 + hidden]  # apart, and at an odd place


def quantise(env: Any, form: str) -> list[list[np.ndarray]]:
    made = (FORMS[form][1](env.backend.tensor(quantised_rows(seed, case, form))) for seed, case in enumerate(CASES))
    return [[env.backend.array(y) for y in results] for results in made]


@pytest.mark.parametrize("form", FORMS)
def test_bits_of_the_cpu(form) -> None:
    with Locals(1) as ranks:
        (have,) = ranks.run(quantise, form)
    for seed, case in enumerate(CASES):
        with np.errstate(all="ignore"):
            wanted = FORMS[form][1](quantised_rows(seed, case, form))
        for got, want in zip(have[seed], wanted, strict=True):
            nan = np.isnan(want.astype(np.float32))
            assert (np.isnan(got.astype(np.float32)) == nan).all(), case
            assert bits_equal(got[~nan], want[~nan]), case


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


def valid_in_a_graph(env: Any, form: str) -> list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]:
    call = FORMS[form][1]
    static = torch.zeros(40, 512, dtype=torch.bfloat16, device=env.device)
    counts = torch.zeros(4, dtype=torch.int32, device=env.device)
    call(static, counts=counts)
    graph, made = capture(env, lambda: call(static, counts=counts))
    results = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((40, 512), np.float32).astype(numpy_dtype("bfloat16"))
        valid = rng.integers(0, 11, 4).astype(np.int32)
        static.copy_(env.backend.tensor(rows))
        counts.copy_(env.backend.tensor(valid))
        graph.replay()
        results.append((rows, valid, [env.backend.array(y) for y in made]))
    return results


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_valid_rows_in_a_graph(form) -> None:
    """Counts, and a global scale that is found, are those of each replay."""
    with Locals(1) as ranks:
        (results,) = ranks.run(valid_in_a_graph, form)
    for rows, counts, made in results:
        valid = (np.arange(10) < counts[:, None]).reshape(-1)
        wanted = FORMS[form][1](rows, counts=counts)
        for got, want in zip(made, wanted, strict=True):
            assert bits_equal(got[valid], want[valid]) if want.ndim else bits_equal(got, want)
