"""torchtitan's token dispatcher, of Tokenway's. `tokenway.integrations.torchtitan` says how it is used."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, BaseEPTokenDispatcher

from tokenway.autograd import Routed
from tokenway.integrations import groups
from tokenway.integrations.by_expert import ByExpert
from tokenway.pytorch import gradients

_HOW = 'tokenway.integrations.torchtitan.dispatcher={"max_tokens": ...}'
# Of each group the dispatch whose combine has not been called yet. All layers that route alike share a group.
_open: weakref.WeakKeyDictionary[groups.SharedGroup, Any] = weakref.WeakKeyDictionary()


class TokenwayTokenDispatcher(BaseEPTokenDispatcher):
    """Rows by expert, and sums back. What is between the two is in the metadata, so layers may be repeated, as
    activation checkpoints do. Without expert parallelism it is the dispatcher that it replaces."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """As `tokenway.integrations.torchtitan.dispatcher` says. No AllToAllTokenDispatcher.Config: torchtitan would
        replace that by its own where it quantises experts, and say nothing."""

        replaced: AllToAllTokenDispatcher.Config
        max_tokens: int | None = None
        row_alignment: int | None = None
        timeout: float | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self._config = config
        self._sizes = groups.Sizes(config.max_tokens, equal=True)
        self._alone: AllToAllTokenDispatcher | None = None  # made where there is no expert parallelism
        self._exchange: ByExpert | None = None  # from the first call on, which knows the device

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Tokens [T, D] of float32 or bfloat16, T the same on all ranks of the mesh, their scores [T, K] of any
        floating dtype and ids [T, K] int64; the counts [E] are not read. Returns rows [R, D] by expert of this rank,
        how many each has, [L] int64 on the tokens' device, and what `combine` takes.

        Two steps of the ranks of the mesh, and one in the backward pass, on the current stream; on a CUDA device the
        host waits for R. The first call makes comm and group, one with more tokens than all before makes the group
        larger. Errors: those of `tokenway.autograd.dispatch` and `SharedGroup.with_room`."""
        if self.ep_mesh is None:
            told = topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            return self._without_mesh().dispatch(x_TD, *told)
        exchange = self._exchange or self._on(x_TD.device)
        left = _open.pop(exchange.shared, None)
        if left is not None:  # by experts that raised: peers wait in that combine
            gradients.refuse_combine(left)
        routed = exchange.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        _open[exchange.shared] = routed.handle
        return routed.tokens[: ByExpert.used(routed)], routed.offsets.diff().long(), routed

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """What experts made of the rows, [R, D] -> [T, D] of the tokens' dtype: weighted by their scores, and summed in
        float32. A step of the ranks of the mesh, and one in the backward pass. Errors: those of `ByExpert.combine`."""
        if not isinstance(metadata, Routed):
            return self._without_mesh().combine(routed_output_RD, metadata, x_TD)
        if self._exchange is not None:
            _open.pop(self._exchange.shared, None)
        return ByExpert.combine(metadata, routed_output_RD, weighted=False)

    def _on(self, device: Any) -> ByExpert:
        """The exchange, for tensors on a device. Local."""
        peers = groups.of(self.ep_mesh, device=device, timeout=self._config.timeout)
        settings = {"experts": self.num_experts, "top_k": self.top_k, "mode": "high_throughput"}
        if self._config.row_alignment is not None:
            settings["row_alignment"] = self._config.row_alignment
        self._exchange = ByExpert(peers.shared(**settings), self._sizes, _HOW)
        return self._exchange

    def _without_mesh(self) -> AllToAllTokenDispatcher:
        if self._alone is None:
            self._alone = self._config.replaced.build()
        return self._alone
