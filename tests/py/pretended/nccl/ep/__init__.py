"""As far as the benchmark uses it: rows by source, or one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch.distributed as dist
from pretended_exchange import gathered, here, plain, summed

Algorithm = IntEnum("Algorithm", ["LOW_LATENCY", "HIGH_THROUGHPUT"], start=0)
Layout = IntEnum("Layout", ["UNSET", "EXPERT_MAJOR", "RANK_MAJOR", "FLAT"], start=0)
DispatchQuantizationRecipe = IntEnum("DispatchQuantizationRecipe", ["NONE", "FWD"], start=0)


@dataclass
class Tensor:
    """Of a tensor."""

    buffer: Any


@dataclass
class GroupConfig:
    """Sizes."""

    algorithm: Algorithm
    num_experts: int
    max_dispatch_tokens_per_rank: int
    max_recv_tokens_per_rank: int
    max_token_bytes: int
    num_topk: int


@dataclass
class DispatchInputs:
    """What goes out."""

    tokens: Tensor
    topk_weights: Tensor
    scales: Tensor | None = None


@dataclass
class DispatchOutputs:
    """What comes."""

    tokens: Tensor
    topk_weights: Tensor
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass
class DispatchConfig:
    """How."""

    quantization_recipe: DispatchQuantizationRecipe


@dataclass
class CombineInputs:
    """What goes back."""

    tokens: Tensor


@dataclass
class CombineOutputs:
    """What comes back."""

    tokens: Tensor


class Handle:
    """A routing."""

    def __init__(self, config: GroupConfig, layout: Layout, ids: Tensor):
        self._config, self._flat, self._ids = config, layout == Layout.FLAT, ids
        assert self._flat == (config.algorithm == Algorithm.HIGH_THROUGHPUT)
        assert bool(config.max_recv_tokens_per_rank) == self._flat

    def update(self, ids: Tensor, stream: int) -> None:
        """Another."""
        self._ids = ids

    def dispatch(self, sent: DispatchInputs, got: DispatchOutputs, config: DispatchConfig, stream: int) -> None:
        """Into the outputs."""
        forwards = config.quantization_recipe == DispatchQuantizationRecipe.FWD
        assert forwards == (sent.scales is not None) == (got.scales is not None)
        pairs = [(sent.tokens, got.tokens), (sent.scales, got.scales)][: 1 + forwards]
        self._of: list[tuple[int, int, Any]] = []
        mine = (self._ids.buffer, [plain(out.buffer) for out, _ in pairs])
        for source, (ids, theirs) in enumerate(gathered(mine)):
            for slot, token in enumerate(here(ids, self._config.num_experts)):
                at = (len(self._of),) if self._flat else (source, slot)
                for (_, into), rows in zip(pairs, theirs, strict=True):
                    plain(into.buffer)[at] = rows[token]
                self._of.append((source, token, at))

    def combine(self, back: CombineInputs, out: CombineOutputs, stream: int) -> None:
        """Into the output."""
        pieces = []
        for rows, of in gathered((back.tokens.buffer, self._of)):
            mine = [(token, at) for source, token, at in of if source == dist.get_rank()]
            pieces.append((rows[tuple(zip(*(at for _, at in mine), strict=True))], [token for token, _ in mine]))
        out.tokens.buffer.copy_(summed(pieces, len(self._ids.buffer)))

    def destroy(self) -> None:
        """Nothing."""


class Group:
    """Handles."""

    def __init__(self, config: GroupConfig):
        self._config = config

    @classmethod
    def create(cls, comm: int, config: GroupConfig) -> Group:
        """One."""
        return cls(config)

    def create_handle(self, layout: Layout, ids: Tensor, stream: int) -> Handle:
        """One."""
        return Handle(self._config, layout, ids)

    def destroy(self) -> None:
        """Nothing."""
