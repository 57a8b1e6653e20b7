"""Loads played step by step through the balancer itself, by which experts would move while these steps run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway.balance import planner
from tokenway.balance.balancer import Balancer, Statistics
from tokenway.balance.world import PlayedBeside, PlayedRank, World
from tokenway.errors import InvalidArgument

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Played:
    """imbalance: float64 [steps, layers], hottest over mean - 1 of what ranks serve in a step, by the maps that were in
    force in it. statistics: of each rank. delays: of each plan that came to its end, the steps from the loads that it
    was made from to its last switch."""

    imbalance: Array
    statistics: tuple[Statistics, ...]
    delays: tuple[int, ...]

    @property
    def moves(self) -> int:
        """Experts that came to a rank, of all ranks and layers."""
        return sum(each.moves for each in self.statistics)

    @property
    def bytes_per_step(self) -> float:
        """Copied to a rank in a step, on average."""
        return sum(each.bytes for each in self.statistics) / max(1, len(self.imbalance)) / len(self.statistics)


class Watch:
    """Looks at a balancer after each of its steps: how long plans take."""

    def __init__(self, balancer: Balancer):
        self._balancer, self._seen = balancer, balancer.statistics.plans
        self.delays: list[int] = []

    def look(self) -> int | None:
        """The steps from the loads of a plan to its last switch, if that was seen in this step; on rank 0."""
        now = self._balancer.statistics
        if now.plans == self._seen or not self._balancer.idle:
            return None
        self._seen = now.plans
        self.delays.append(now.plan_steps + now.switch_steps)
        return self.delays[-1]


def spare_maps(plan: Any, ranks: int, spare: int) -> Array:
    """int32 [layers, P]: maps of a plan (or [layers, slots in use]) with so many spare slots, -1, at the end of each
    rank."""
    used = np.asarray(plan.physical_to_logical if isinstance(plan, planner.Plan) else plan)
    rows = used.reshape(len(used), ranks, -1)
    spares = np.full((len(used), ranks, spare), -1)
    return np.concatenate([rows, spares], axis=2).reshape(len(used), -1).astype(np.int32)


def play(
    loads: Any,
    *,
    ranks: int,
    first: Any,
    steps: int = 1,
    spare: int = 1,
    load_decay: float = 0.99,
    expert_bytes: int | Sequence[int] = 1,
    plan_steps: int = 1,
    copy_steps: int = 1,
    **options: Any,
) -> Played:
    """Plays loads [windows, layers, E], what all ranks choose in each of the `steps` steps of a window, through a
    `Balancer` of each rank.

    first: the maps to begin with, a Plan or [layers, slots in use]; each rank has `spare` slots more. load_decay: of
    the group. expert_bytes: of one expert in a layer, or of each of its tensors. plan_steps, copy_steps: steps that a
    plan takes, and a copy, each at least 1. options: of `Balancer`: every, writes, gain, step_bytes, nodes, groups,
    node_tolerance. Errors: InvalidArgument.

    A group of ranks on CPUs that makes these choices, with one lane, does the same in the same steps if plans and
    copies take that long (`Balancer.wait`).
    """
    windows = np.asarray(loads, np.float64)
    if windows.ndim != 3:
        raise InvalidArgument.of("loads", f"has shape {list(windows.shape)}; it must be [windows, layers, experts]")
    sizes = (expert_bytes,) if isinstance(expert_bytes, int) else tuple(expert_bytes)
    took = {"plan_steps": plan_steps, "copy_steps": copy_steps}
    given = {"steps": steps, "spare": spare, "expert_bytes": min(sizes, default=0)}
    for name, value in (given | took).items():
        if value < 1:
            raise InvalidArgument.of(name, f"is {value}; it must be at least 1", value=value)
    tables = spare_maps(first, ranks, spare)
    rank_of_slot = np.repeat(np.arange(ranks), tables.shape[1] // ranks)
    world = World(tables, rank_of_slot, windows.shape[2], decay=load_decay, expert_bytes=sizes, **took)
    faces = [PlayedRank(world, rank) for rank in range(ranks)]
    balancers = [Balancer(face, face, beside=PlayedBeside(world), **options) for face in faces]
    watch = Watch(balancers[0])
    seen = []
    for now in windows:
        known: dict[int, Array] = {}
        for _ in range(steps):
            seen.append([_dispatch(world, layer, now, known) for layer in range(world.layers)])
            world.step += 1
            for balancer in balancers:
                balancer.step()
            watch.look()
    imbalance = np.array(seen).reshape(-1, windows.shape[1])
    return Played(imbalance, tuple(balancer.statistics for balancer in balancers), tuple(watch.delays))


def _dispatch(world: World, layer: int, choices: Array, known: dict[int, Array]) -> float:
    """A layer's imbalance by the map that its dispatch goes by. known: of these choices, by version of the maps."""
    if world.version not in known:
        known[world.version] = world.imbalance(choices)
    found = float(known[world.version][layer])
    world.dispatch(layer, choices[layer])
    return found
