"""Megatron's ways, for `tokenway bench --frameworks exchange`: token dispatchers as its MoE layer calls them. Needs
PyTorch, and megatron-core in the calls.

Megatron waits on the host for the number of rows in each of them, so none is captured. Without Transformer Engine,
which is not needed, its permutations are its own of PyTorch, and not fused.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenway as tw
from tokenway.bench.framework_place import Place
from tokenway.bench.framework_ways import Ones, Shape, Step, Way, operations
from tokenway.integrations import groups, megatron, supported

_NOTE = "Megatron's own dispatchers without Transformer Engine's fused permutations"


def missing() -> str | None:
    """Why there is no Megatron here, or None."""
    return supported.missing("megatron-core", megatron.LEAST, megatron.BELOW, "megatron")


def begin(place: Place) -> None:
    """Puts Tokenway in the place of deep_ep, before Megatron looks for it, and makes Megatron's buffer. Once."""
    from tokenway.compat import deep_ep

    deep_ep.install()
    from megatron.core import parallel_state

    parallel_state._set_global_memory_buffer()
    _groups()  # while all ranks are here


@cache
def _groups() -> Any:
    """Megatron's process groups: all ranks share experts, and nothing else is shared. Collective, once."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    everyone, rank = dist.group.WORLD, dist.get_rank()
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    made = ProcessGroupCollection()
    for name in ("ep", "tp_ep"):
        setattr(made, name, everyone)
    for name in ("tp", "cp", "expt_tp", "expt_dp", "tp_cp", "tp_dp_cp"):
        setattr(made, name, alone)
    return made


def _config(shape: Shape, dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    p = shape.profile
    config = TransformerConfig(
        num_layers=1,
        hidden_size=p.hidden,
        num_attention_heads=1,
        num_moe_experts=p.experts,
        moe_ffn_hidden_size=p.inner,
        moe_router_topk=p.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=shape.ranks,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    config.moe_flex_dispatcher_backend = "deepep"
    return config


class _Megatron(Way):
    framework = "megatron"
    kind = ""  # Megatron's class
    probabilities = "rounded"  # which of a step's: Megatron sums in their dtype, which is that of rows as a rule

    def __init__(self, place: Place, shape: Shape):
        super().__init__(place, shape)
        self._config = _config(shape, place.dtype)
        self._dispatcher = self._made()

    def _made(self) -> Any:
        from megatron.core.transformer.moe import token_dispatcher

        local = list(range(self.shape.first, self.shape.first + self.shape.local))
        kind = getattr(token_dispatcher, self.kind)
        return kind(len(local), local, config=self._config, pg_collection=_groups())

    @torch.no_grad()
    def pair(self, step: Step, experts: Ones) -> Tensor:
        """The calls of a layer around its experts."""
        made = self._dispatcher
        probabilities = getattr(step, self.probabilities)
        rows, probabilities = made.dispatch_preprocess(step.x[:, None], step.chosen, probabilities)
        rows, probabilities = made.token_dispatch(rows, probabilities)
        rows, counts, probabilities = made.dispatch_postprocess(rows, probabilities)
        rows = made.combine_preprocess(experts.by_expert(rows, counts, probabilities))
        return made.combine_postprocess(made.token_combine(rows))[:, 0]

    def answers(self, step: Step) -> Tensor:
        """A row from each expert."""
        return torch.full_like(step.weights[:, 0], self.shape.profile.top_k)


class Dispatcher(_Megatron):
    """Tokenway's dispatcher."""

    name, steps, rivals = "Megatron", 2, ("megatron",)

    def _made(self) -> Any:
        from tokenway.integrations.megatron_layer import Dispatcher

        p, ranks = self.shape.profile, _groups().ep
        peers = groups.of(ranks, device=self.place.device)
        shared = peers.shared(experts=p.experts, top_k=p.top_k, mode="high_throughput")
        self._view = shared.with_room(tw.RowType(p.hidden, self.place.dtype), self.shape.tokens)
        return Dispatcher(self._config, _groups(), groups.Sizes(equal=True), None)

    def direct(self, step: Step, experts: Ones) -> Any:
        """In the same layout."""

        def by_expert(came: Any) -> Tensor:
            return experts.by_expert(came.tokens, came.counts, came.weights)

        return operations(self._view, step, by_expert, "grouped", None)


class Flex(_Megatron):
    """Megatron's own dispatcher for deep_ep, which is Tokenway's; it wants probabilities of float32."""

    name, steps, kind, note = "Megatron flex, compat deep_ep", 2, "MoEFlexTokenDispatcher", _NOTE
    rivals, probabilities = ("megatron",), "probabilities"


class _Own(_Megatron):
    note = _NOTE

    @classmethod
    def refuses(cls, place: Place, shape: Shape) -> str | None:
        """Megatron moves tensors to CUDA's current device there."""
        return None if torch.cuda.is_available() else "needs CUDA"


class AllGather(_Own):
    """Megatron's own."""

    name, kind = "Megatron all-gather", "MoEAllGatherTokenDispatcher"


class AllToAll(_Own):
    """Megatron's own."""

    name, kind = "Megatron all-to-all", "MoEAlltoAllTokenDispatcher"


WAYS = (Dispatcher, Flex, AllGather, AllToAll)
