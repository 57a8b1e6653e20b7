"""Routings to measure with: synthetic ones, deterministic by seed, and recorded ones.

Every generator is called alike,

    ids, weights = uniform(rank, tokens, experts, top_k, seed, ranks=ranks)

and gives one rank's ids int32 [T, K], distinct within a token, and weights float32 [T, K] that sum
to 1 per token. The same arguments give the same arrays (with the same NumPy). `ranks` is the size
of the group, where it is known; only `balanced` needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenway import recorded
from tokenway.reference import contiguous_placement

Array = np.ndarray
Generator = Callable[..., tuple[Array, Array]]

SIGMA = 0.75  # of the log of the popularity of experts, in `skewed`


def uniform(
    rank: int, tokens: int, experts: int, top_k: int, seed: int, *, ranks: int | None = None
) -> tuple[Array, Array]:
    """Every set of K experts is equally likely, per token and independently."""
    _check(rank, tokens, experts, top_k, seed, ranks)
    rng = _rng(seed, rank)
    return gumbel_top_k(rng, np.zeros(experts), tokens, top_k), _weights(rng, tokens, top_k)


def skewed(
    rank: int, tokens: int, experts: int, top_k: int, seed: int, *, ranks: int | None = None
) -> tuple[Array, Array]:
    """Experts have lognormal popularity (sigma 0.75), the same on all ranks of one seed.

    Each token draws K experts without replacement, each draw in proportion to the popularity of
    the experts not drawn yet: the Gumbel top-k trick.
    """
    _check(rank, tokens, experts, top_k, seed, ranks)
    rng = _rng(seed, rank)
    popularity = log_popularity(experts, seed)
    return gumbel_top_k(rng, popularity, tokens, top_k), _weights(rng, tokens, top_k)


def log_popularity(experts: int, seed: int) -> Array:
    """Log of the popularity that `skewed` gives each expert, up to a constant: float64 [E]."""
    return SIGMA * _rng(seed).standard_normal(experts)


def balanced(
    rank: int, tokens: int, experts: int, top_k: int, seed: int, *, ranks: int | None = None
) -> tuple[Array, Array]:
    """Loads as equal as they can be, with contiguous placement on `ranks` ranks.

    All (token, k) pairs of all ranks, in order, walk in a circle over the experts, which are
    ordered so that each step goes to the next rank. So, provided that all ranks have the same
    number of tokens, experts' loads differ by at most one in all, and also from any one rank; if N
    divides E, so do ranks' loads, and every token goes to min(K, N) ranks. The seed permutes the
    experts within their rank, the ranks, and the order within a token. Without `ranks` only the
    experts' loads are balanced.
    """
    _check(rank, tokens, experts, top_k, seed, ranks)
    common = _rng(seed)
    home, slot = contiguous_placement(experts, ranks or 1)
    turn = np.lexsort((common.random(experts), home))  # by home, shuffled within it
    circle = turn[np.lexsort((common.permutation(ranks or 1)[home], slot))]
    pairs = rank * tokens * top_k + np.arange(tokens * top_k).reshape(tokens, top_k)

    rng = _rng(seed, rank)
    ids = rng.permuted(circle[pairs % experts], axis=1).astype(np.int32)
    return ids, _weights(rng, tokens, top_k)


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded routing; calling it is calling a generator.

    ids: int32 [steps, tokens, K], -1 = no expert; weights: float32 alike, or None.

    The call takes step `seed` modulo the number of steps, and there the tokens rank*tokens ..
    (rank+1)*tokens - 1. Recorded weights are returned as they are; without them a token's experts
    weigh the same and sum to 1.
    """

    name: str
    ids: Array
    weights: Array | None

    def __call__(
        self,
        rank: int,
        tokens: int,
        experts: int,
        top_k: int,
        seed: int = 0,
        *,
        ranks: int | None = None,
    ) -> tuple[Array, Array]:
        """(ids int32 [T, K], weights float32 [T, K]) of one rank; copies."""
        _check(rank, tokens, experts, top_k, seed, ranks)
        steps, recorded, k = self.ids.shape
        if top_k != k:
            raise ValueError(f"{self.name}: top_k: {top_k}; the recording has {k}")
        if (rank + 1) * tokens > recorded:
            raise ValueError(
                f"{self.name}: tokens: {tokens} on rank {rank} need {(rank + 1) * tokens} recorded"
                f" tokens; the recording has {recorded} per step"
            )
        step, part = seed % steps, slice(rank * tokens, (rank + 1) * tokens)
        ids = self.ids[step, part].copy()
        if ids.size and ids.max() >= experts:
            raise ValueError(f"{self.name}: ids: {ids.max()}; allowed -1..{experts - 1} (experts)")
        if self.weights is not None:
            return ids, self.weights[step, part].copy()
        chosen = ids >= 0
        return ids, (chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1)).astype(np.float32)


def from_npz(path: str | Path) -> Trace:
    """Reads a recorded routing from an .npz file, as `recorded.routing` describes it."""
    return Trace(Path(path).name, *recorded.routing(path))


GENERATORS: dict[str, Generator] = {"uniform": uniform, "balanced": balanced, "skewed": skewed}


def _check(rank: int, tokens: int, experts: int, top_k: int, seed: int, ranks: int | None) -> None:
    """Raise ValueError that names the value and the allowed range."""
    for name, value, least, most in (
        ("experts", experts, 1, None),
        ("top_k", top_k, 1, experts),
        ("tokens", tokens, 0, None),
        ("ranks", 1 if ranks is None else ranks, 1, None),
        ("rank", rank, 0, None if ranks is None else ranks - 1),
        ("seed", seed, 0, None),
    ):
        if value < least or (most is not None and value > most):
            allowed = f"{least}..{most}" if most is not None else f"at least {least}"
            raise ValueError(f"{name}: {value}; allowed {allowed}")


def _rng(seed: int, rank: int | None = None) -> np.random.Generator:
    """The random stream of one rank, or the one that all ranks share.

    The seed comes last: NumPy pads with zeros, so [seed] and [seed, 0] would be one stream.
    """
    return np.random.default_rng([1, 0, seed] if rank is None else [2, rank, seed])


def gumbel_top_k(rng: np.random.Generator, log_weight: Array, tokens: int, top_k: int) -> Array:
    """K distinct indices per token, drawn in proportion to exp(log_weight): int32 [T, K]."""
    keys = log_weight + rng.gumbel(size=(tokens, len(log_weight)))
    return np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def _weights(rng: np.random.Generator, tokens: int, top_k: int) -> Array:
    """Positive weights, uniform on the simplex: float32 [T, K], summing to 1 per token."""
    draw = rng.standard_exponential((tokens, top_k))
    return (draw / draw.sum(axis=1, keepdims=True)).astype(np.float32)
