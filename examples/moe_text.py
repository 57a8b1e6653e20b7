"""Text to tokens, and a small MoE layer: what examples/01_moe_layer.py needs besides Tokenway, and 07_dp_attention.py.

All weights are random and fixed: they follow from an expert's number, a word's from its letters.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

from tokenway import gating

Array = np.ndarray
BF16 = ml_dtypes.bfloat16


def words_of(path: str) -> list[str]:
    """The words and punctuation marks of a text file, in lower case."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return re.findall(r"\w+|[^\w\s]", text.lower())


def shard(count: int, rank: int, ranks: int) -> slice:
    """The part of `count` tokens that a rank owns: contiguous, and larger on higher ranks."""
    shares = np.cumsum([0, *(3 + r for r in range(ranks))])
    ends = count * shares // shares[-1]
    return slice(int(ends[rank]), int(ends[rank + 1]))


@cache
def _word_vector(word: str, hidden: int) -> Array:
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(hidden, np.float32)


def embed(words: list[str], first: int, hidden: int) -> Array:
    """Words -> bfloat16 [T, hidden]: a vector per word, and a little of its place in the text."""
    place = (first + np.arange(len(words)))[:, None] / 1000 ** np.linspace(0, 1, hidden)
    vectors = [_word_vector(word, hidden) for word in words]
    return (np.reshape(vectors, (-1, hidden)) + 0.3 * np.sin(place)).astype(BF16)


@dataclass(frozen=True)
class Layer:
    """An MoE layer: a router and `experts` SwiGLU experts of `inner` columns."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    gate: str  # "softmax" (Mixtral, Qwen3) or "deepseek" (DeepSeek-V3: sigmoid, limited groups)
    groups: int
    topk_groups: int

    @cached_property
    def router(self) -> Array:
        """float32 [hidden, experts]."""
        return _matrix([0], self.hidden, self.experts)

    def route(self, x: Array) -> tuple[Array, Array]:
        """Tokens [T, hidden] -> (expert ids int32 [T, K], weights float32 [T, K])."""
        logits = x.astype(np.float32) @ self.router
        if self.gate == "softmax":
            return gating.softmax_topk(logits, self.top_k)
        limit = {"groups": self.groups, "topk_groups": self.topk_groups}
        return gating.sigmoid_group_topk(logits, self.top_k, scale=2.5, **limit)

    def expert(self, number: int) -> tuple[Array, Array, Array]:
        """The weights of an expert: two matrices in, one out."""
        shapes = ((self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden))
        return tuple(_matrix([1, number, i], *shape) for i, shape in enumerate(shapes))


def _matrix(seed: list[int], rows: int, columns: int) -> Array:
    rng = np.random.default_rng([*seed, 1])  # NumPy pads seeds with zeros: end with something else
    return rng.standard_normal((rows, columns), np.float32) / np.float32(rows**0.5)


def swiglu(x: Array, weights: tuple[Array, Array, Array], exp: Callable[[Array], Array] = np.exp) -> Array:
    """One expert on tokens [n, hidden], in the precision of x; exp: that of other tensors than NumPy's."""
    gate, up, down = weights
    inside = x @ gate
    return (inside / (1 + exp(-inside)) * (x @ up)) @ down


def dense(layer: Layer, x: Array, ids: Array, weights: Array) -> tuple[Array, Array]:
    """The layer without communication, in float64, and how far the real one may be from it.

    x: [T, hidden], ids and weights: [T, K]. Returns (result, bound), float64 [T, hidden].

    An expert's float32 result y is within `error` of the exact one (see _expert_error) and then
    rounded to bfloat16; the weighted sum over a rank's experts (the partial) is rounded to
    bfloat16; the sum over ranks is rounded to bfloat16. Each of these three changes a value by at
    most 2**-8 of itself, each of the at most 2 K float32 operations in between by 2**-24 of itself.
    Sums may cancel, errors do not: they are carried with absolute values. So

        |result - exact| <= A * ((1 + 2**-8)**3 * (1 + 2**-24)**(2 K) - 1) + sum of weight * error

    with A = sum of weight * (|y| + error), both sums over the token's K experts.
    """
    result, size, error = (np.zeros(x.shape, np.float64) for _ in range(3))
    for number in range(layer.experts):
        token, k = np.nonzero(ids == number)
        expert = tuple(matrix.astype(np.float64) for matrix in layer.expert(number))
        rows = x[token].astype(np.float64)
        y, y_error = swiglu(rows, expert), _expert_error(rows, expert)
        weight = weights[token, k, None].astype(np.float64)
        result[token] += weight * y
        size[token] += weight * (np.abs(y) + y_error)
        error[token] += weight * y_error
    growth = (1 + 2.0**-8) ** 3 * (1 + 2.0**-24) ** (2 * layer.top_k) - 1
    return result, size * growth + error + 2.0**-130  # the last for values below the normal range


def _expert_error(x: Array, weights: tuple[Array, Array, Array]) -> Array:
    """How far swiglu in float32 may be from the exact value, whatever the order of its sums.

    A dot product of n terms is off by at most n * 2**-24 times the one of absolute values (2 n to
    be on the safe side of second-order terms); silu's slope is at most 1.1; silu and the product
    are a dozen operations of 2**-24 each.
    """
    gate, up, down = weights
    inside, beside = x @ gate, x @ up
    dot = 2 * len(gate) * 2.0**-24
    inside_error, beside_error = (dot * (np.abs(x) @ np.abs(m)) for m in (gate, up))
    silu = np.abs(inside / (1 + np.exp(-inside)))
    silu_error = 1.1 * inside_error + 12 * 2.0**-24 * (silu + 1.1 * inside_error)
    product = (silu + silu_error) * (np.abs(beside) + beside_error) * (1 + 2.0**-23)
    product_error = product - silu * np.abs(beside)
    dot = 2 * len(down) * 2.0**-24
    return (product_error + dot * product) @ np.abs(down)
