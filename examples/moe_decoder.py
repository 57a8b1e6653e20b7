"""Decoder layers for examples/07_dp_attention.py: weights, attention, batches, and all of it once more in float64.

All weights and tokens are random and fixed: they follow from their numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np
from arrays import Array, Tensor
from moe_text import BF16, Layer, dense

Batch = list[tuple[int, int, int]]  # (sequence, its first position, the one after its last) of a rank in a step


@dataclass(frozen=True)
class Decoder(Layer):
    """A decoder layer: attention of some heads, then an MoE block; norms before both. Weights follow from `number`."""

    heads: int
    number: int

    @cached_property
    def attention(self) -> list[Array]:
        """float32 [hidden, hidden] for queries, keys, values, and the way out."""
        rng = np.random.default_rng([self.number, 3])
        return list(rng.standard_normal((4, self.hidden, self.hidden), np.float32) / np.float32(self.hidden**0.5))

    def expert(self, number: int) -> tuple[Array, Array, Array]:
        """Its own experts, not those of another layer."""
        return super().expert(self.number * self.experts + number)


def decoders(options: argparse.Namespace) -> list[Decoder]:
    sizes = options.hidden, options.inner, options.experts, options.top_k
    return [Decoder(*sizes, "softmax", 1, 1, options.heads, number) for number in range(options.layers)]


def schedule(rank: int, options: argparse.Namespace) -> list[Batch]:
    """What a rank's scheduler decides, for each step: new prompts now and then, a token of each sequence otherwise,
    and nothing on one rank (of two ranks, in two of three steps)."""
    rng = np.random.default_rng([rank, 4])
    lengths: list[int] = []
    batches = []
    for step in range(options.steps):
        room, batch = options.max_tokens, []
        if options.ranks == 1 or step % max(options.ranks, 3) != rank:
            batch = [(number, length, length + 1) for number, length in enumerate(lengths)][:room]
            room -= len(batch)
            for _ in range(int(rng.integers(1, 4)) if step % 3 == 0 or not lengths else 0):
                prompt = min(room, int(rng.integers(1, options.max_tokens + 1)))
                batch += [(len(lengths) + i, 0, prompt) for i in range(prompt > 0)]
                lengths += [0] * (prompt > 0)
                room -= prompt
            for number, _, end in batch:
                lengths[number] = end
        batches.append(batch)
    return batches


def embed(rank: int, batch: Batch, hidden: int) -> Array:
    """bf16 [T, hidden]: any vector for each position of each sequence."""
    places = [(number, place) for number, begin, end in batch for place in range(begin, end)]
    rows = [np.random.default_rng([rank, *place, 5]).standard_normal(hidden) for place in places]
    return np.reshape(rows, (-1, hidden)).astype(BF16)


def norm(xp: ModuleType, x: Tensor) -> Tensor:
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attend(xp: ModuleType, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last n positions of a sequence of m: [n, heads, d], [m, heads, d] twice -> [n, heads * d]."""
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    earlier = xp.tril(xp.ones_like(scores), k.shape[1] - q.shape[1])
    scores = xp.where(earlier > 0, scores, -float("inf"))
    likely = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    mixed = (likely / xp.sum(likely, axis=-1, keepdims=True)) @ v
    return mixed.swapaxes(0, 1).reshape(q.shape[1], -1)


# ---- in float64 ----------------------------------------------------------------------------------


def exact_attention(layer: Decoder, x: Array) -> tuple[Array, Array]:
    """What attention adds to a whole sequence [n, hidden], and the same with absolute values in its sums."""
    *projections, way_out = (matrix.astype(np.float64) for matrix in layer.attention)
    shape = len(x), layer.heads, -1
    q, k, v = ((norm(np, x) @ matrix).reshape(shape) for matrix in projections)
    scores = np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(q.shape[-1])
    likely = np.exp(scores) * np.tri(len(x))
    likely /= likely.sum(axis=-1, keepdims=True)
    mixed, size = (np.einsum("hnm,mhd->nhd", likely, part).reshape(x.shape) for part in (v, np.abs(v)))
    return mixed @ way_out, size @ np.abs(way_out)


def distances(layer: Decoder, seen: dict[str, Array], batches: list[Batch]) -> Iterator[tuple[str, Array, Array]]:
    """What a layer on a rank made of all its steps' tokens, against one process in float64: (of what, |difference|,
    what the roundings allow).

    seen: x, what went in; h, with attention's part; y, what the MoE block got, with ids and weights; moe, what it
    gave; out, both. Each part is computed from what the one before it has given. Each ends in a rounding to bf16, which
    changes a value by at most 2**-8 of itself; float32 in between is given 2**-16, of sums that of their absolute
    values, and that of the MoE block is bounded in `dense`.
    """
    x, h, y, moe, out = (seen[name].astype(np.float64) for name in ("x", "h", "y", "moe", "out"))
    rows: dict[int, list[int]] = {}
    for i, number in enumerate(number for batch in batches for number, begin, end in batch for _ in range(begin, end)):
        rows.setdefault(number, []).append(i)
    added, size = np.zeros_like(x), np.abs(x)
    for sequence in rows.values():
        added[sequence], more = exact_attention(layer, x[sequence])
        size[sequence] += more
    yield "attention", np.abs(h - (x + added)), 2.0**-8 * np.abs(x + added) + 2.0**-16 * size
    yield "norm", np.abs(y - norm(np, h)), (2.0**-8 + 2.0**-16) * np.abs(norm(np, h))
    exact, bound = dense(layer, y, seen["ids"], seen["weights"])
    yield "MoE block", np.abs(moe - exact), bound
    yield "output", np.abs(out - (h + moe)), (2.0**-8 + 2.0**-16) * np.abs(h + moe)
