"""Megatron's MoE layer with a dispatcher of Tokenway's. `tokenway.integrations.megatron` says how it is used."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity, get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

import tokenway as tw
from tokenway.integrations import groups
from tokenway.integrations.by_capacity import ByCapacity, Padded
from tokenway.integrations.by_expert import ByExpert

_HOW = "tokenway.integrations.megatron.through_tokenway(spec, max_tokens=...) or (equal=True)"
# What Megatron has its dispatchers do, and this one does not.
_REFUSED = (
    "moe_router_padding_for_quantization",
    "overlap_moe_expert_parallel_comm",  # and what Megatron has only with it
    "delay_wgrad_compute",
    "ep_overlap_early_attn_memory_release",
)
# Parts of a model whose graph holds the exchange. That of the router, and of what precedes the exchange, gives ids.
_GRAPHED = ("full", "full_iteration", "moe")


class TokenwayMoELayer(MoELayer):
    """An MoELayer whose `token_dispatcher` is Tokenway's. sizes: what ranks know of each other's batches, None: as the
    config says; timeout: in seconds; fp8_rows: rows travel to their experts as fp8. Errors: Unsupported for settings
    that it does not follow."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        sizes: groups.Sizes | None = None,
        timeout: float | None = None,
        fp8_rows: bool = False,
    ):
        pg_collection = get_default_pg_collection() if pg_collection is None else pg_collection
        given = [name for name in _REFUSED if getattr(config, name, None)]
        if given:
            raise tw.Unsupported(f"{' and '.join(given)} must not be set: Tokenway's dispatcher does not do it")
        _refuse_graphs(config)
        if pg_collection.expt_tp.size() > 1:
            told = f"expert_tensor_parallel_size is {pg_collection.expt_tp.size()}; it must be 1: experts stay whole"
            raise tw.Unsupported(told)
        super().__init__(config, submodules, layer_number, pg_collection)
        sizes = groups.Sizes(equal=not config.variable_seq_lengths) if sizes is None else sizes
        self.token_dispatcher = Dispatcher(config, pg_collection, sizes, timeout, fp8_rows)
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """As Megatron's, but that peers hear of it where experts raise."""
        with ByExpert.telling(self.token_dispatcher.routed):
            return super().routed_experts_compute(hidden_states, probs)


def _refuse_graphs(config: Any) -> None:
    """Raises Unsupported for CUDA graphs of Megatron's that the exchange would be in, unless all sizes in it are fixed:
    a replay would have room for what was captured, and not for what comes."""
    if config.moe_pad_expert_input_to_capacity:
        return
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    given = {name: getattr(config, name, None) for name in names}
    asked = [f"{name} is {value!r}" for name, value in given.items() if value not in (None, False, "none")]
    scope = getattr(config, "cuda_graph_scope", None) or []
    scope = scope.split(",") if isinstance(scope, str) else scope
    parts = [getattr(part, "name", part) for part in (scope if isinstance(scope, (list, tuple)) else [scope])]
    if asked and (not parts or not set(parts).isdisjoint(_GRAPHED)):
        told = f"{' and '.join(asked)}, and cuda_graph_scope {parts}"
        raise tw.Unsupported(
            f"{told}; the scope must name other parts than {', '.join(_GRAPHED)}, moe_pad_expert_input_to_capacity be "
            "set, or cuda_graph_impl be 'none': as many rows come as routers choose, which a graph cannot follow"
        )


class Dispatcher(MoETokenDispatcher):
    """Rows by expert, each with its probability, and sums back. Keeps what is between its calls, as Megatron's do: a
    layer calls them in turn.

    Shared experts that it was given (`set_shared_experts`) compute on a stream of their own: their first product beside
    the dispatch, their second beside the combine. It calls their parts where Megatron's all-to-all dispatcher does."""

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        sizes: groups.Sizes,
        timeout: float | None,
        fp8_rows: bool = False,
    ):
        super().__init__(config, pg_collection)
        self._sizes, self._timeout, self._fp8_rows = sizes, timeout, fp8_rows
        self._padding: bool = config.moe_pad_expert_input_to_capacity
        self._exchange: Any = None  # until the first call, which knows the device
        self._shape: torch.Size | None = None
        self.ids: Tensor | None = None  # [T, K] int64, -1 for none
        # What Megatron's graphs give beside the results of `dispatch_preprocess`, which a replay does not call.
        self.cudagraph_attrs = ["ids"]
        self._order: Tensor | None = None  # [E] int32: E down to 1
        self._padded: Padded | None = None
        self.routed: Any = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[S, B, H], [T, E] bool, [T, E] -> tokens [T, H], probs [T, K]. Local."""
        self._shape = hidden_states.shape
        if self._order is None or len(self._order) != routing_map.shape[1]:
            self._order = torch.arange(routing_map.shape[1], 0, -1, dtype=torch.int32, device=routing_map.device)
        if self._padding:
            # A router that pads marks tokens that did not choose an expert, with a probability of 0: more than K of a
            # token, and rows of nothing in results and gradients alike. They stay where they are.
            routing_map = routing_map & (probs != 0)
        # The first expert has the largest number, and what was not chosen 0, so that experts come in their order.
        found, chosen = (routing_map * self._order).topk(self.config.moe_router_topk, dim=1)
        self.ids = chosen.masked_fill(found == 0, -1)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.reshape(-1, self._shape[-1]), probs.gather(1, chosen)

    def set_shared_experts(self, shared_experts: Any) -> None:
        """As of Megatron's dispatchers."""
        super().set_shared_experts(shared_experts)
        gate = ["shared_experts.gate_score"] * shared_experts.use_shared_expert_gate
        self.cudagraph_attrs += [*gate, "shared_experts.cached_fc1_input"]

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """To the experts' ranks: two steps of the expert-parallel group, or one where rows are padded."""
        if self._exchange is None:
            peers = groups.of(self.ep_group, device=hidden_states.device, timeout=self._timeout)
            mode, way = ("low_latency", ByCapacity) if self._padding else ("high_throughput", ByExpert)
            experts, top_k = self.config.num_moe_experts, self.config.moe_router_topk
            shared = peers.shared(experts=experts, top_k=top_k, mode=mode)
            self._exchange = way(shared, self._sizes, _HOW, self._fp8_rows)
        self.routed = self._exchange.dispatch(hidden_states, self.ids, probs)
        return self.routed.tokens, self.routed.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [R, H] by expert, how many each has, [L] int64 on the host, and their probabilities [R]."""
        if self.shared_experts is not None:
            # With what the dispatch brought: in the backward pass that returns before the product's gradients are made.
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        if self._padding:
            capacity = self._capacity(hidden_states.shape[1])
            self._padded = ByCapacity.padded(self.routed, hidden_states, probs, capacity)
            experts = self.routed.handle.group.num_local_experts
            counts = torch.full((experts,), hidden_states.shape[0] * capacity)
            return self._padded.rows, counts, self._padded.weights
        counts = torch.from_numpy(self.routed.handle.expert_rows).long()  # the host has waited for them before
        used = ByExpert.used(self.routed)
        return hidden_states[:used], counts, probs[:used]

    def _capacity(self, tokens: int) -> int:
        """Most rows of an expert from a rank with so many tokens: as the router has it, and a token is one row."""
        choices, factor = tokens * self.config.moe_router_topk, self.config.moe_expert_capacity_factor
        return min(get_capacity(choices, self.config.num_moe_experts, factor), tokens)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows go back as experts returned them."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[R, H] -> [T, H], summed where tokens came from: a step of the expert-parallel group."""
        routed, self.routed = self.routed, None
        padded, self._padded = self._padded, None
        if padded is not None:
            return ByCapacity.combine(routed, padded, hidden_states)
        return ByExpert.combine(routed, hidden_states)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [S, B, H], with what shared experts made of the tokens."""
        if self.shared_experts is None:
            return hidden_states.view(self._shape)
        self.shared_experts.linear_fc2_forward(hidden_states)
        self.shared_experts.post_forward_comm()
        return hidden_states.view(self._shape) + self.shared_experts.get_output()
