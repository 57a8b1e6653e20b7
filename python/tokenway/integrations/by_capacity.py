"""The exchange around experts that take equally many rows each, whatever comes, forward and backward.

Nothing on the host depends on what the router chose: no shape, and no wait. So a CUDA graph can capture it, and replays
follow other choices."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tokenway as tw
from tokenway import autograd
from tokenway.integrations.fp8_rows import bring, wire_of
from tokenway.integrations.groups import SharedGroup, Sizes, Views
from tokenway.pytorch import autograd as steps
from tokenway.pytorch import gradients


class Places(NamedTuple):
    """Which row is whose. M rows came from N ranks, min(K, L) of whose choices may be this rank's; L experts have C
    rows each."""

    sources: Tensor  # [L * C] int64: the row of [M] that each is; arbitrary where it is padding
    padding: Tensor  # [L * C, 1] bool
    rows: Tensor  # [M, min(K, L)] int64: where a row's choices are, by expert; arbitrary where there is none
    missing: Tensor  # [M, min(K, L), 1] bool: where there is none


class Padded(NamedTuple):
    """What experts are given, by expert: an expert's rows first, then padding."""

    rows: Tensor  # [L * C, H] of the tokens' dtype, differentiable; padding is 0
    weights: Tensor  # [L * C] float32, differentiable; of padding 0
    places: Places


class ByCapacity:
    """Tokens to their experts, of which each takes at most so many from a rank, and what experts make of them back and
    summed, in two calls.

    shared: of the mode "low_latency". sizes: what ranks know of each other's batches; how: in which words a user gives
    them. fp8_rows: rows travel to their experts as fp8, and back as they are."""

    def __init__(self, shared: SharedGroup, sizes: Sizes, how: str, fp8_rows: bool = False):
        self.shared = shared
        self._views, self._sizes, self._how, self._fp8_rows = Views(shared), sizes, how, fp8_rows

    def dispatch(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> autograd.Routed:
        """tokens [T, H] of float32 or bfloat16, ids [T, K] int64, -1 for none, weights [T, K] of any floating dtype: in
        the layout rank_major, [N, b, H]; what no row came to is what the memory held. b is T where ranks have equally
        many tokens, else the most that were said. A step of all ranks, and one in the
        backward pass. Errors: those of `tokenway.autograd` and `SharedGroup.with_room`; InvalidUsage without sizes;
        InvalidArgument for more tokens than were said."""
        room = max(self._sizes.room(len(tokens), self._how), 1)
        group = self._views.plain(tokens.shape[1], tokens.dtype, room)
        bound = max(len(tokens), 1) if self._sizes.equal else room
        wire = wire_of(self._views, tokens.shape[1], room) if self._fp8_rows else None
        with gradients.telling(partial((wire or group).refuse_routing, "rank_major", bound)):
            self._sizes.check(len(tokens), self._how)
            weights = weights.float()
        if wire is not None:
            return bring(group, wire, tokens, ids, weights, "rank_major", bound)
        return steps.bring(group, tokens, ids, weights, "rank_major", bound, fill=False)

    @staticmethod
    def padded(routed: autograd.Routed, tokens: Tensor, weights: Tensor, capacity: int) -> Padded:
        """tokens, weights: those of `routed`. capacity: most rows of an expert from one rank; from N ranks it is given
        C = N * capacity. What is beyond is dropped, the last of the last rank first. Local."""
        group = routed.handle.group
        most = tokens.shape[0] * capacity
        places, choices = _placed(routed.ids, group.num_local_experts, most)
        tokens = tokens.view(-1, tokens.shape[-1])
        rows = _Take.apply(tokens, *places)
        chosen = weights.reshape(-1).index_select(0, choices)
        return Padded(rows, chosen.masked_fill(places.padding[:, 0], 0), places)

    @staticmethod
    def combine(routed: autograd.Routed, padded: Padded, rows: Tensor) -> Tensor:
        """rows: what experts made of `padded.rows`, [L * C, H], weighted -> [T, H], summed over a token's experts in
        float32, by expert and then by rank. A step of all ranks, and one in the backward pass. Errors: as
        `autograd.combine`; InvalidArgument for more or fewer rows than experts were given."""
        with gradients.telling(partial(gradients.refuse_combine, routed.handle)):
            if len(rows) != len(padded.rows):
                told = f"are {len(rows)}; they must be {len(padded.rows)}, as many as experts were given"
                raise tw.InvalidArgument.of("rows", told)
            total = _Sum.apply(rows, *padded.places).view(routed.tokens.shape)
        return steps.give_back(routed, total, fill=False)


def _placed(ids: Tensor, experts: int, most: int) -> tuple[Places, Tensor]:
    """Of ids [N, b, K] in which another rank's experts, and none, are below 0: the places of rows if experts have
    `most` each, and the choice in [M * K] that each place is, arbitrary where it is padding. In an expert by source and
    slot, as a stable sort leaves them; all shapes follow from those of ids."""
    k = ids.shape[-1]
    keys = ids.reshape(-1).long()
    keys = keys.masked_fill(keys < 0, experts)
    by_expert = keys.argsort(stable=True)
    sorted_keys = keys[by_expert]
    numbers = torch.arange(experts + 1, device=ids.device)
    begins = torch.searchsorted(sorted_keys, numbers)
    places = begins[:-1, None] + torch.arange(most, device=ids.device)  # [L, C], in the sorted choices
    padding = (places >= begins[1:, None]).view(-1, 1)
    choices = by_expert[places.view(-1).clamp(max=len(keys) - 1)]
    within = torch.arange(len(keys), device=ids.device) - begins[sorted_keys]
    nowhere = (sorted_keys == experts) | (within >= most)
    found = (sorted_keys * most + within).masked_fill(nowhere, experts * most)
    rows = torch.empty_like(found).scatter_(0, by_expert, found).view(-1, k)
    rows = rows.sort(dim=1).values[:, : min(k, experts)]  # a row's places first, and by expert
    missing = rows >= experts * most
    return Places(choices // k, padding, rows.masked_fill(missing, 0), missing[:, :, None]), choices


def _spread(rows: Tensor, sources: Tensor, padding: Tensor) -> Tensor:
    """[M, H] -> [L * C, H], 0 for padding: what no row came to may be NaN, which no factor of 0 would undo."""
    return rows.index_select(0, sources).masked_fill_(padding, 0)


def _summed(rows: Tensor, places: Tensor, missing: Tensor) -> Tensor:
    """[L * C, H] -> [M, H] float32. By reading, not by adding to places: that has no fixed order on a GPU."""
    total = torch.zeros((len(places), rows.shape[1]), device=rows.device)
    if len(rows):
        for k in range(places.shape[1]):
            total += rows.index_select(0, places[:, k]).masked_fill_(missing[:, k], 0)
    return total


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, padding: Tensor, places: Tensor, missing: Tensor) -> Tensor:
        ctx.save_for_backward(places, missing)
        ctx.dtype = tokens.dtype
        return _spread(tokens, sources, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
        return _summed(rows, *ctx.saved_tensors).to(ctx.dtype), None, None, None, None


class _Sum(torch.autograd.Function):
    """The adjoint of `_Take`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, padding: Tensor, places: Tensor, missing: Tensor) -> Tensor:
        ctx.save_for_backward(sources, padding)
        ctx.dtype = rows.dtype
        return _summed(rows, places, missing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: Tensor) -> tuple[Any, ...]:
        return _spread(total, *ctx.saved_tensors).to(ctx.dtype), None, None, None, None
