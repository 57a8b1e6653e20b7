"""The exchange around experts that take rows with all their choices, and return one sum for each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenway import autograd
from tokenway.integrations.groups import SharedGroup, Sizes, Views, give_back
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertRows:
    """Tokens to the ranks of their experts, and what experts make of them back and summed.

    shared: of settings as `settings` makes them. compute(rows [R, H], ids [R, K] int64, weights [R, K]) -> [R, H]: what
    this rank's experts make of rows, weighted and summed over k. ids are of this rank's experts, from 0, or their
    number L for a choice that is not served here, whose weight is 0. sizes: what ranks know of each other's batches;
    how: in which words a user gives them. trained: whether parameters of the experts require gradients now."""

    def __init__(self, shared: SharedGroup, compute: Compute, sizes: Sizes, how: str, trained: Callable[[], bool]):
        self.shared = shared
        self._views = Views(shared)
        self._compute, self._sizes, self._how, self._trained = compute, sizes, how, trained
        self._replicas: int = shared.settings["token_replicas"]
        self._nowhere: int = shared.settings["invalid_id"]

    @staticmethod
    def settings(experts: int, local_experts: int, top_k: int, replicas: int) -> dict[str, Any]:
        """Of the shared group. replicas: as many neighbouring ranks hold the same tokens."""
        return {
            "experts": experts,
            "top_k": top_k,
            "mode": "auto",
            "id_dtype": "int64",
            "invalid_id": local_experts,
            "token_replicas": replicas,
        }

    @gradients.eager
    def __call__(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H] of float32, bfloat16, or where nothing requires gradients float16 -> the same: for each token the sum
        over its K experts. ids: [T, K] int32 or int64, -1 for none; weights: [T, K] of any floating dtype. Replicas
        give the same tokens, ids and weights, and get the same sums.

        Two steps of all ranks, or three where rows come as many as there are: where gradients are wanted, or where
        sizes are not known alike. On a CUDA device the host waits then for the number of rows; else for nothing, and
        the call can be captured once its group has room. Two steps more in the backward pass. Errors: those of
        `tokenway.autograd` and `SharedGroup.with_room`; InvalidUsage without sizes; InvalidArgument for more tokens
        than were said."""
        wanted = tokens.requires_grad or weights.requires_grad or self._trained()
        tracked = torch.is_grad_enabled() and wanted
        group, bound = self._ready(tokens)
        with gradients.telling(partial(self._refuse, group, tracked, bound)):
            routing = ids, weights.float()
            self._sizes.check(len(tokens), self._how)
        if tracked:
            return self._differentiable(group, tokens, *routing, weights.dtype)
        return self._plain(group, tokens, *routing, weights.dtype, bound)

    def _ready(self, tokens: Tensor) -> tuple[TypedGroup, int | None]:
        """The group, and the bound of a dispatch of low latency, None where sizes are not known alike."""
        count, hidden = tokens.shape
        room = -(-self._sizes.room(count, self._how) // self._replicas)
        bound = max(-(-count // self._replicas), 1) if self._sizes.equal else None
        return self._views.plain(hidden, tokens.dtype, max(room, 1)), bound

    def _low_latency(self, group: TypedGroup, tracked: bool, bound: int | None) -> bool:
        """Whether rows come in slots, of which all ranks know the number, and not as many as there are."""
        return not tracked and bound is not None and group.chooses(bound) == "low_latency"

    def _refuse(self, group: TypedGroup, tracked: bool, bound: int | None) -> None:
        if self._low_latency(group, tracked, bound):
            group.refuse_dispatch("rank_major", bound)
        else:
            group.refuse_routing("flat")

    def _differentiable(
        self, group: TypedGroup, tokens: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> Tensor:
        routed = autograd.dispatch(group, tokens, ids, weights, layout="flat")
        with gradients.telling(partial(gradients.refuse_combine, routed.handle)):
            rows, places, scales = routed.tokens, routed.ids, routed.weights.to(dtype)
            if not len(rows):
                # One of zeros for the first expert: or neither these tensors nor the experts' parameters were in the
                # graph, and this rank would leave out the steps of the backward pass, and a wrapper's reductions.
                rows, scales = (functional.pad(x, (0, 0, 0, 1)) for x in (rows, scales))
                places = places.new_full((1, places.shape[1]), self._nowhere)
                places[0, 0] = 0
            results = self._compute(rows, places, scales)[: len(routed.tokens)]
        return autograd.combine(routed, results)

    def _plain(
        self,
        group: TypedGroup,
        tokens: Tensor,
        ids: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
        bound: int | None,
    ) -> Tensor:
        low = self._low_latency(group, False, bound)
        with gradients.telling(partial(self._refuse, group, False, bound)):
            handle = group.route(ids, weights)
        try:
            if not low:
                group.exchange_counts(handle)
            layout = "rank_major" if low else "flat"
            came = group.dispatch(handle, tokens, layout=layout, bound=bound if low else None)
            with gradients.telling(partial(gradients.refuse_combine, handle)):
                rows = came.tokens.view(-1, group.hidden)
                places = came.ids.view(-1, group.top_k)
                # A token's weights come with it, those of other ranks' experts too.
                scales = came.weights.view(places.shape).masked_fill(places == self._nowhere, 0).to(dtype)
                results = self._compute(rows, places, scales) if len(rows) else rows
                results = results.view(came.tokens.shape)
            return group.combine(handle, results)
        except Exception:
            give_back(handle)
            raise
