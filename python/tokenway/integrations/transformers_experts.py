"""The experts of one layer of a transformers model. `tokenway.integrations.transformers` says how it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

import tokenway as tw
from tokenway.integrations import groups
from tokenway.integrations.expert_rows import ExpertRows

_HOW = "tokenway.integrations.transformers.register(max_tokens=...) or register(equal=True)"


class Experts:
    """An experts module, whose parameters are this rank's, and the way of tokens to it.

    compute: the module's own forward. ep_mesh: the ranks that experts are spread over, in blocks; tp_mesh: those of
    them that hold the same batch as this one, which are neighbours. Errors: Unsupported where they are not."""

    def __init__(
        self,
        module: Any,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        ep_mesh: Any,
        tp_mesh: Any,
        sizes: groups.Sizes,
        timeout: float | None,
    ):
        self._module, self._compute, self._ep_mesh, self._timeout = module, compute, ep_mesh, timeout
        self._local_experts: int = module.num_experts
        self._replicas: int = tp_mesh.size()
        spread, same = (dist.get_process_group_ranks(mesh.get_group()) for mesh in (ep_mesh, tp_mesh))
        sets = [spread[i : i + len(same)] for i in range(0, len(spread), len(same))]
        if same not in sets:
            raise tw.Unsupported(
                f"ranks {same} hold the same batch, and experts are spread over ranks {spread}: of these, such ranks "
                "must be neighbours"
            )
        self._sizes = groups.Sizes(sizes.max_tokens, equal=True) if same == spread else sizes
        self._rows: ExpertRows | None = None  # until the first call, which knows top_k

    def __call__(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """tokens [T, H], ids [T, K] of all experts, weights [T, K] -> [T, H] of the tokens' dtype, as `ExpertRows`."""
        if self._rows is None:
            total = self._local_experts * self._ep_mesh.size()
            peers = groups.of(self._ep_mesh, device=tokens.device, timeout=self._timeout)
            settings = ExpertRows.settings(total, self._local_experts, ids.shape[-1], self._replicas)
            self._rows = ExpertRows(peers.shared(**settings), self._compute, self._sizes, _HOW, self._trained)
        return self._rows(tokens, ids, weights)

    def _trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self._module.parameters())
