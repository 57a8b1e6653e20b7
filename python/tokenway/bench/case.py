"""One row of a benchmark: a model's layer, a routing and a number of tokens, on N ranks.

Everything here follows from the settings and a seed, so each rank can work out what any other rank
sends, and what its experts answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tokenway import tensors
from tokenway.bench import routing
from tokenway.bench.profiles import Profile
from tokenway.reference import Exchange

Array = np.ndarray

LAYOUTS = ("rank_major", "expert_major", "flat", "grouped", "grouped_by_bound")
BY_EXPERT = ("expert_major", "grouped", "grouped_by_bound")
EXACT_LAYOUTS = ("flat", "grouped")  # of high throughput
FP8 = "float8_e4m3fn"
SCALE_BLOCK = 128  # elements of a float8 row that share a scale
CHUNK_ROWS = 128  # rows that the expert function widens at a time

# Random bits to finite values of moderate size, every mantissa bit used: (bits kept, exponent).
_VALUES = {
    "bfloat16": (np.uint16, 0x83FF, 0x3C00),
    "float16": (np.uint16, 0x8FFF, 0x3000),
    "float32": (np.uint32, 0x81FFFFFF, 0x3E000000),
    FP8: (np.uint8, 0xBF, 0),
}
DTYPES = tuple(_VALUES)


@dataclass(frozen=True)
class Case:
    """Which exchange: T tokens on each of N ranks."""

    profile: Profile
    routing: str
    tokens: int
    ranks: int
    dtype: str
    layout: str
    weighting: str
    seed: int = 0
    gradients: bool = False  # of the backward pass: other values, by the same routing
    domain: int = 0  # ranks whose partials are folded; 0: none

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return f"{self.profile.name}, {self.routing}, {self.tokens} tokens"

    @property
    def exact(self) -> bool:
        """Whether the layout is one of high throughput."""
        return self.layout in EXACT_LAYOUTS

    @property
    def combine_dtype(self) -> str:
        """Of the experts' answers: float8 comes back as bfloat16."""
        return "bfloat16" if self.dtype == FP8 else self.dtype

    @property
    def scales(self) -> int:
        """Scales per row, 0 without float8."""
        return -(-self.profile.hidden // SCALE_BLOCK) if self.dtype == FP8 else 0

    @property
    def dispatch_row(self) -> int:
        """Payload bytes of a dispatched row."""
        return self.profile.hidden * tensors.numpy_dtype(self.dtype).itemsize + 4 * self.scales

    @property
    def combine_row(self) -> int:
        """Bytes of a combined row."""
        return self.profile.hidden * tensors.numpy_dtype(self.combine_dtype).itemsize

    def group_settings(self, max_tokens: int) -> dict[str, Any]:
        """Keywords of Group."""
        return (
            {
                "experts": self.profile.experts,
                "top_k": self.profile.top_k,
                "hidden": self.profile.hidden,
                "max_tokens": max_tokens,
                "dtype": self.dtype,
                "combine_dtype": self.combine_dtype,
                "payloads": {"scales": (self.scales, "float32")} if self.scales else None,
            }
            | ({"mode": "high_throughput"} if self.exact else {})
            | ({"domain": self.domain} if self.domain else {})
        )

    @cached_property
    def exchange(self) -> Exchange:
        """The routing of all ranks, for the oracle."""
        generate = generator(self.routing)
        p = self.profile
        drawn = [generate(r, self.tokens, p.experts, p.top_k, self.seed, ranks=self.ranks) for r in range(self.ranks)]
        return Exchange([d[0] for d in drawn], [d[1] for d in drawn], p.experts, self.tokens, domain=self.domain)

    @property
    def backward(self) -> Case:
        """What goes back over the same routing: a dispatch of the gradients of combine's results, and a combine of
        those of dispatch's rows. Their weights are applied where the experts are."""
        return replace(self, gradients=True, weighting="none")

    def inputs(self, rank: int) -> tuple[Array, Array | None]:
        """(tokens [T, H], scales float32 [T, S] or None) of a rank; every row is different."""
        rng = np.random.default_rng([3, rank, self.seed, self.tokens, *[1] * self.gradients])
        unsigned, kept, exponent = _VALUES[self.dtype]
        shape = (self.tokens, self.profile.hidden)
        raw = rng.bytes(int(np.prod(shape)) * np.dtype(unsigned).itemsize)
        bits = np.frombuffer(bytearray(raw), unsigned).reshape(shape)
        bits &= unsigned(kept)
        bits += unsigned(exponent)
        scales = None
        if self.scales:
            scales = rng.uniform(0.5, 2.0, (self.tokens, self.scales)).astype(np.float32)
        return bits.view(tensors.numpy_dtype(self.dtype)), scales

    def moved_rows(self) -> tuple[int, Array, Array]:
        """(rows of all ranks together, sent [N] and received [N] by each), own rows included."""
        counts = np.stack([r.counts for r in self.exchange.routing])
        return int(counts.sum()), counts.sum(axis=1), counts.sum(axis=0)

    # ------------------------------------------------------------------------------- the experts

    @cached_property
    def _tables(self) -> tuple[Array, Array]:
        """(a [E + 1], c [E + 1]): expert e answers a[e] * row + c[e]; entry -1 is "no expert"."""
        e = np.arange(self.profile.experts, dtype=np.float32)
        a = np.float32(0.5) + e / np.float32(self.profile.experts)
        c = (e + 1) / np.float32(64)
        return np.append(a, np.float32(0)), np.append(c, np.float32(0))

    def answers(self, tokens: Array, scales: Array | None, experts: Array, weights: Array, out: Array) -> None:
        """What a rank returns for n rows, to `out` [n, H].

        experts: int [n, k] of this rank, -1 where there is none; weights: float32 [n, k]. The sum
        over the row's experts of w * (a * row + c), without w under topk weighting, where the
        library multiplies. It is computed as (sum of w * a) * row + (sum of w * c) in float32 and
        rounded once: the same function makes the rows and the oracle's rows, and what matters is
        that each (token, expert, weight) gives another answer.
        """
        a, c = (table[experts] for table in self._tables)
        if self.weighting == "none":
            a, c = a * weights, c * weights
        scale, shift = (np.zeros((len(tokens), 1), np.float32) for _ in range(2))
        for k in range(experts.shape[1]):
            scale[:, 0] += a[:, k]
            shift[:, 0] += c[:, k]
        for at in range(0, len(tokens), CHUNK_ROWS):
            rows = slice(at, at + CHUNK_ROWS)
            values = tokens[rows].astype(np.float32)
            if scales is not None:
                values *= np.repeat(scales[rows], SCALE_BLOCK, axis=1)[:, : values.shape[1]]
            values *= scale[rows]
            values += shift[rows]
            out[rows] = values.astype(out.dtype)


def short_routing(name: str) -> str:
    """A routing's name; of a file the last part, as the rest is nobody's business."""
    return name.rsplit("/", 1)[-1]


_traces: dict[str, Callable[..., Any]] = {}


def generator(name: str) -> Callable[..., Any]:
    """The generator of that name, or the trace in a file whose name ends in .npz."""
    if name in routing.GENERATORS:
        return routing.GENERATORS[name]
    if name not in _traces:
        _traces[name] = routing.from_npz(name)
    return _traces[name]
