"""How rows get to their experts and back in the decoder of `tokenway bench --frameworks engine`, by four ways. Needs
PyTorch.

    routed          Tokenway: to the ranks of a token's experts, by `tokenway.nn`; the shared expert is added in the
                    combine
    gathered        Tokenway: all rows to all ranks, whose experts' sums are reduced and scattered, sizes being uneven
    all-reduce      NCCL: all-gather; an all-reduce of all sums, of which a rank takes its own
    reduce-scatter  NCCL: all-gather; reduce-scatter

The last two fill up to the largest rank. The last three gather rows, ids and weights in one call, and have the same
products as the first, after index_select and before index_add. In a graph they hold as many rows as may come, else the
host waits for how many do, as it does in the first where there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenway.bench.framework_place import gathered
from tokenway.bench.layer_case import Layer
from tokenway.integrations import collectives
from tokenway.pytorch.nn import balance_loss


class Mixing:
    """What a `decoder.Mixing` is. sizes: rows of each rank in the calls that come. Calls are collective."""

    steps: ClassVar[int] = 0  # of Tokenway's groups, in a call

    def __init__(self, layers: Sequence[Layer], rank: int):
        self.layers, self.rank = layers, rank
        self.sizes: list[int] = []

    def __call__(self, layer: int, rows: Tensor, shared: Tensor) -> Tensor:
        raise NotImplementedError


class Routed(Mixing):
    """By dispatch and combine."""

    steps = 2

    def __call__(self, layer: int, rows: Tensor, shared: Tensor) -> Tensor:
        out, _ = self.layers[layer](rows[None], max(self.sizes), shared[None])
        return out[0]


class _Gathering(Mixing):
    def __init__(self, layers: Sequence[Layer], rank: int):
        super().__init__(layers, rank)
        group, device = layers[0].group, layers[0].router.device
        self._local = len(layers[0].experts)
        # The place behind the last is of no expert of this rank, and of what fills up.
        self._place = torch.full((group.experts + 1,), self._local, device=device)
        self._place[layers[0].experts] = torch.arange(self._local, device=device)
        self._bounds = torch.arange(self._local + 1, device=device)

    def __call__(self, layer: int, rows: Tensor, shared: Tensor) -> Tensor:
        made = self.layers[layer]
        ids, weights, probabilities = made.route(rows)
        balance_loss(probabilities, ids)  # as the layer of `tokenway.nn` has it, so that all ways do the same
        sums = self._computed(made, *self._gather(rows, ids.int(), weights))
        return self._scatter(sums)[: len(rows)] + shared

    def _gather(self, rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of all ranks, in one call. ids are int32."""
        raise NotImplementedError

    def _scatter(self, sums: Tensor) -> Tensor:
        """Of what all ranks have for all rows, this rank's, summed."""
        raise NotImplementedError

    def _computed(self, made: Layer, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What this rank's experts make of rows [S, H], summed over those of each."""
        top_k = ids.shape[1]
        places, order = self._place[ids.flatten()].sort(stable=True)
        offsets = torch.searchsorted(places, self._bounds).to(torch.int32)
        most = len(rows) * min(top_k, self._local)
        if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            most = int(offsets[-1])
        places, order = places[:most], order[:most]
        sizes: Any = offsets if made.ungrouped is None else offsets.diff().tolist()
        answers = made.compute(rows.index_select(0, order // top_k), weights.flatten()[order], sizes)
        # Rows beyond those that came hold anything, and are added where nobody looks.
        targets = torch.where(places < self._local, order // top_k, len(rows))
        return rows.new_zeros(len(rows) + 1, rows.shape[1]).index_add_(0, targets, answers)[:-1]


class Gathered(_Gathering):
    """By Tokenway's gathers and reduce-scatters of uneven sizes."""

    steps = 2

    def _gather(self, rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, two, three = collectives.of(None, rows.device).all_gatherv([rows, ids, weights], self.sizes)
        return one, two, three

    def _scatter(self, sums: Tensor) -> Tensor:
        return collectives.of(None, sums.device).reduce_scatterv([sums], self.sizes)[0]


class ReduceScatter(_Gathering):
    """By PyTorch's calls of NCCL (gloo on the CPU)."""

    def _gather(self, rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        most, nobody = max(self.sizes), len(self._place) - 1
        parts = [_filled(rows, most, 0), _filled(ids, most, nobody), _filled(weights, most, 0)]
        one, two, three = gathered(parts, len(self.sizes))
        return one, two, three

    def _scatter(self, sums: Tensor) -> Tensor:
        out = sums.new_empty(max(self.sizes), sums.shape[1])
        dist.reduce_scatter_tensor(out, sums)
        return out


class AllReduce(ReduceScatter):
    """The same, but that all ranks get all sums."""

    def _scatter(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums)
        most = max(self.sizes)
        return sums[self.rank * most : (self.rank + 1) * most]


def _filled(rows: Tensor, most: int, value: float) -> Tensor:
    """Filled up with a value."""
    if len(rows) == most:
        return rows
    return torch.cat([rows, rows.new_full((most - len(rows), *rows.shape[1:]), value)])


MIXINGS: dict[str, type[Mixing]] = {
    "routed": Routed,
    "gathered": Gathered,
    "all-reduce": AllReduce,
    "reduce-scatter": ReduceScatter,
}
