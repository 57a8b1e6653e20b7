"""SwiGLU's kernels in a graph: each replay is over the rows that counts then say are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_world import Locals, bits_equal, capture

import tokenway as tw
from tokenway.tensors import numpy_dtype

ROWS, INNER, GROUPS = 96, 200, 8
TURNS = ([0] * 8, [12] * 8, [3, 0, 12, 1, 0, 0, 7, 20], [-1, 1, 0, 0, 0, 0, 0, 12])


def in_a_graph(env: Any) -> list[Any]:
    """By turn what replays leave in buffers that were 9 before."""
    rng = np.random.default_rng(3)
    made = [rng.standard_normal(shape).astype(numpy_dtype("bfloat16")) for shape in ((ROWS, 2 * INNER), (ROWS, INNER))]
    x, gradient = (env.backend.tensor(array) for array in made)
    weights = env.backend.tensor(rng.standard_normal(ROWS).astype(np.float32))
    counts = torch.zeros(GROUPS, dtype=torch.int32, device=env.device)
    outs = [torch.empty_like(gradient), torch.empty_like(x), torch.empty_like(weights)]
    values = torch.empty((ROWS, INNER), dtype=torch.float8_e4m3fn, device=env.device)
    scales = torch.empty((2, ROWS), device=env.device)

    def step() -> None:
        tw.swiglu(x, counts=counts, weights=weights, out=outs[0])
        tw.swiglu_backward(x, gradient, counts=counts, weights=weights, out=(outs[1], outs[2]))
        tw.swiglu(x, counts=counts, quantize=True, column_major=True, out=(values, scales))

    step()
    graph, _ = capture(env, step)
    found = []
    for turn in TURNS:
        for out in (*outs, scales):
            out.fill_(9)
        counts.copy_(torch.tensor(turn))
        graph.replay()
        found.append([env.backend.array(out) for out in (*outs, values, scales)])
    graph.reset()
    return [[*made, env.backend.array(weights)], found]


def test_replays_follow_the_counts() -> None:
    """With the bits of the CPU; other rows are left alone."""
    with Locals(1) as ranks:
        ((inputs, found),) = ranks.run(in_a_graph)
    x, gradient, weights = inputs
    for turn, (out, of_x, of_weights, values, scales) in zip(TURNS, found, strict=True):
        valid = (np.arange(ROWS // GROUPS) < np.array(turn)[:, None]).reshape(-1)
        wanted = tw.swiglu(x, weights=weights), *tw.swiglu_backward(x, gradient, weights=weights)
        for got, want in zip((out, of_x, of_weights), wanted, strict=True):
            assert bits_equal(got[valid], want[valid]) and (got[~valid] == 9).all()
        fp8, by = tw.swiglu(x, quantize=True)
        assert bits_equal(values[valid], fp8[valid]) and bits_equal(scales.T[valid], by[valid])
        assert (scales.T[~valid] == 9).all()
