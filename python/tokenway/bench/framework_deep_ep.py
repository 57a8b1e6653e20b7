"""Code that calls deep_ep, for `tokenway bench --frameworks exchange`: Tokenway's Buffer in both of its modes, as
frameworks call it. Needs PyTorch.

It stands beside the own ways of all frameworks that are here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenway as tw
from tokenway.bench.framework_place import Place
from tokenway.bench.framework_ways import Ones, Shape, Step, Way, by_row, operations, ranks_of
from tokenway.compat.deep_ep import Buffer, ranks
from tokenway.integrations.low_latency import TOKEN

_ALL = ("vllm", "megatron")
FEW = 1024  # tokens up to which deep_ep is called in low-latency mode


def missing() -> str | None:
    """It is here."""
    return None


def begin(place: Place) -> None:
    """Nothing is needed."""


class LowLatency(Way):
    """Its calls of low latency, bfloat16 both ways."""

    name, framework, rivals, steps = "compat deep_ep, low latency", "deep_ep", _ALL, 2
    waits = False

    def __init__(self, place: Place, shape: Shape):
        super().__init__(place, shape)
        p, tokens = shape.profile, shape.tokens
        self._buffer = Buffer(dist.group.WORLD)
        here, peers = ranks.of(dist.group.WORLD, place.device)
        exchange = here.low_latency(peers, p.experts, p.top_k)
        self._view = exchange.view(p.hidden, place.dtype, None, tokens)
        self._told = {TOKEN: exchange.told(tokens, self._view)}

    @classmethod
    def refuses(cls, place: Place, shape: Shape) -> str | None:
        """Blocks for many tokens would take most of a device."""
        if place.dtype != torch.bfloat16:
            return "needs --dtype bfloat16"
        return None if shape.tokens <= FEW else f"for at most {FEW} tokens"

    def pair(self, step: Step, experts: Ones) -> Tensor:
        """Dispatch and combine."""
        buffer, count = self._buffer, self.shape.profile.experts
        rows, _, handle, _, _ = buffer.low_latency_dispatch(step.x, step.ids, self.shape.tokens, count, use_fp8=False)
        return buffer.low_latency_combine(experts.blocks(rows), step.ids, step.weights, handle)[0]

    def answers(self, step: Step) -> Tensor:
        """Weighted."""
        return step.weights.sum(1)

    def direct(self, step: Step, experts: Ones) -> Any:
        """In the same layout, with the payload that tells rows' numbers and sources."""

        def by_expert(came: Any) -> Tensor:
            return experts.blocks(came.tokens)

        many = {"late": True, "payloads": self._told}
        return operations(self._view, step, by_expert, "expert_major", self.shape.tokens, **many)


class Normal(Way):
    """Its calls of normal mode."""

    name, framework, rivals, steps = "compat deep_ep, normal", "deep_ep", _ALL, 2

    def __init__(self, place: Place, shape: Shape):
        super().__init__(place, shape)
        p = shape.profile
        self._buffer = Buffer(dist.group.WORLD)
        here, peers = ranks.of(dist.group.WORLD, place.device)
        kind = tw.RowType(p.hidden, place.dtype)
        self._view = here.normal(peers, p.experts, p.top_k).shared.with_room(kind, shape.tokens)

    def pair(self, step: Step, experts: Ones) -> Tensor:
        """Layout, dispatch and combine."""
        buffer = self._buffer
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(step.ids, self.shape.profile.experts)
        rows, ids, weights, _, handle, _ = buffer.dispatch(
            step.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=step.ids,
            topk_weights=step.weights,
        )
        return buffer.combine(experts.local(rows, ids, weights), handle)[0]

    def answers(self, step: Step) -> Tensor:
        """A sum from each rank."""
        return ranks_of(self.shape, step)

    def direct(self, step: Step, experts: Ones) -> Any:
        """In the same layout."""
        return operations(self._view, step, by_row(experts.local), "flat", None)


WAYS = (LowLatency, Normal)
