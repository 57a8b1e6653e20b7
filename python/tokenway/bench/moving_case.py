"""MoE layers of a model on one rank, whose experts can move: their weights in memory that peers read. Needs PyTorch."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch

from tokenway import balance
from tokenway.balance.weights import Weights
from tokenway.bench import runner
from tokenway.bench.case import Case, generator
from tokenway.bench.moving_options import Moving
from tokenway.comm import Comm
from tokenway.group import Group
from tokenway.placement import Placement
from tokenway.pytorch import experts
from tokenway.pytorch.gradients import device_of
from tokenway.shape import BY_BOUND
from tokenway.tensors import to_torch

TIMEOUT = 60.0  # of the group, seconds
ROUTINGS = 64  # of each layer, which steps take in turn

Array = np.ndarray


class MovingLayers:
    """A step of them: of each layer a dispatch, SwiGLU experts by grouped products and a combine per expert, whose sums
    do not depend on where experts are. Each layer has the step's tokens, and ids of its own."""

    def __init__(self, stack: ExitStack, comm: Comm, case: Case, moving: Moving):
        """Collective; the stack closes."""
        profile, ranks = case.profile, comm.nranks
        self.case, self.layers = case, moving.layers
        used = profile.experts // ranks
        table = np.full((moving.layers, ranks, used + moving.spare), -1, np.int32)
        table[:, :, :used] = np.arange(profile.experts).reshape(ranks, used)
        tensors = {
            "gate_up": ((2 * profile.inner, profile.hidden), case.dtype),
            "down": ((profile.hidden, profile.inner), case.dtype),
        }
        room = balance.weight_bytes(tensors, layers=moving.layers, slots=table.shape[2], ranks=ranks)
        placement = Placement(table.reshape(moving.layers, -1), count_loads=True, moves=True, weight_bytes=room)
        keywords = case.group_settings(case.tokens) | {"timeout": TIMEOUT, "combine_rows": "per_expert"}
        self.group = stack.enter_context(runner.open_group(comm, Group, **keywords, expert_map=placement))
        self.weights = Weights(self.group, tensors)
        self._fill(table[0, comm.rank])
        self._allocate()

    def _fill(self, held: Array) -> None:
        """Sets weights, which follow from an expert's number and its layer."""
        drawn = torch.Generator(device_of(self.group))
        for layer in range(self.layers):
            for name in self.weights.layout.tensors:
                tensor = self.tensor(name, layer)
                for slot, expert in enumerate(held.tolist()):
                    if expert >= 0:
                        drawn.manual_seed(1 + layer * self.case.profile.experts + expert)
                        tensor[slot].normal_(std=tensor.shape[-1] ** -0.5, generator=drawn)

    def _allocate(self) -> None:
        case, place = self.case, device_of(self.group)
        draw, dtype = generator(case.routing), getattr(torch, case.dtype)
        sizes = (case.tokens, case.profile.experts, case.profile.top_k)
        drawn = [
            [draw(self.group.rank, *sizes, i * self.layers + layer, ranks=case.ranks) for layer in range(self.layers)]
            for i in range(ROUTINGS)
        ]
        self._routings = torch.from_numpy(np.stack([[ids for ids, _ in step] for step in drawn])).to(place)
        self._ids = self._routings[0].clone()  # [layers, T, K]
        self._scales = torch.from_numpy(drawn[0][0][1]).to(place)
        self._tokens = torch.randn((case.tokens, case.profile.hidden), device=place).to(dtype)
        self._offsets = torch.empty(self.group.num_local_experts + 1, dtype=torch.int32, device=place)
        self._handles = [self.group.route(self._ids[layer], layer=layer) for layer in range(self.layers)]
        self.results = torch.zeros((self.layers, *self._tokens.shape), dtype=dtype, device=place)

    def tensor(self, name: str, layer: int) -> torch.Tensor:
        """A layer's weights on this rank, [local slots, ...]."""
        found = self.weights.tensor(name, layer)
        return found if isinstance(found, torch.Tensor) else to_torch(found)

    def load(self, step: int) -> None:
        """Sets the ids of a step."""
        self._ids.copy_(self._routings[step % ROUTINGS], non_blocking=True)

    @torch.no_grad()
    def step(self) -> None:
        """All layers: results [layers, T, H]. Collective."""
        for layer, handle in enumerate(self._handles):
            handle.update(self._ids[layer])
            came = self.group.dispatch(
                handle, self._tokens, layout=BY_BOUND, bound=self.case.tokens, out={"offsets": self._offsets}
            )
            rows = self.products(came.tokens, self._offsets[1:], layer)
            self.group.combine(handle, rows, weights=self._scales, layout=BY_BOUND, out=self.results[layer])

    def products(self, rows: torch.Tensor, ends: torch.Tensor, layer: int) -> torch.Tensor:
        """What the experts of this rank make of their rows."""
        inside = experts.product(rows, self.tensor("gate_up", layer), ends)
        ones = torch.ones(len(inside), device=inside.device)
        return experts.product(experts.swiglu(inside, ones, ends[-1:]), self.tensor("down", layer), ends)


class Swaps:
    """Plans that change so many slots of each layer: pairs of experts of two ranks change places, drawn anew."""

    def __init__(self, ranks: int, writes: int, seed: int = 0):
        self._ranks, self._pairs = ranks, writes // 2
        self._drawn = np.random.default_rng(seed)

    def following(self, physical_to_logical: Array) -> Array:
        """The next plan, from what is in force: [layers, P] both."""
        wanted = physical_to_logical.copy()
        places = wanted.shape[1]
        for row in wanted:
            free = [self._drawn.permutation(places // self._ranks).tolist() for _ in range(self._ranks)]
            for _ in range(min(self._pairs, len(free[0]) * self._ranks // 2)):
                fullest = sorted(range(self._ranks), key=lambda rank: -len(free[rank]))
                one, other = (rank * (places // self._ranks) + free[rank].pop() for rank in fullest[:2])
                row[[one, other]] = row[[other, one]]
        return wanted
