"""Plans: which expert is in which slot of which rank, by the C library (include/tokenway/balance.h)."""

from __future__ import annotations

import sys
from ctypes import byref, c_int64
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tokenway import _header, _native, checked, tensors
from tokenway._balance import PlanConfig, PlanMove, PlanOutput
from tokenway.errors import InvalidArgument

Array = np.ndarray
MOST_SLOTS = 1 << 20  # of all ranks: TW_MAX_EXPERTS
MOVE = np.dtype([(name, np.int32) for name, _ in PlanMove._fields_])


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the experts of all layers go. E experts, N ranks, P = N * slots slots; slot p is local slot p % slots of
    rank p // slots.

    physical_to_logical: int32 [layers, P], the expert in each slot.
    rank_loads: float64 [layers, N], what each rank carries of the loads that were planned for, an expert's load split
    evenly over its replicas. bounds: float64 [layers], no plan's hottest rank carries less. stray: float64 [layers],
    share of the load on another node than its group's home. old: the map that was updated, or None.
    """

    loads: Array
    ranks: int
    slots: int
    nodes: int
    physical_to_logical: Array
    replicas: Array  # int32 [layers, E]
    rank_loads: Array
    bounds: Array
    stray: Array
    old: Array | None = None

    @property
    def imbalance(self) -> Array:
        """[layers] how much the hottest rank carries above the mean, of the mean: 0 is perfect, also for no load."""
        return imbalance(self.rank_loads)

    @property
    def bound_imbalance(self) -> Array:
        """[layers] the same of `bounds`: what no plan is below."""
        means = self.rank_loads.mean(axis=1)
        above = np.divide(self.bounds, means, out=np.ones_like(means), where=means > 0) - 1
        return np.maximum(above, 0)  # the mean is a bound itself, but rounded

    @cached_property
    def logical_to_physical(self) -> Array:
        """int32 [layers, E, most replicas]: the slots of each expert, ascending, filled up with -1."""
        width = int(self.replicas.max(initial=0))
        slots = np.empty((*self.replicas.shape, width), np.int32)
        config = _config(*self.replicas.shape, self.ranks, self.slots, self.nodes)
        _native.check(
            _native.lib.twPlanSlots(byref(config), self.physical_to_logical.ctypes.data, None, slots.ctypes.data, width)
        )
        return slots

    @cached_property
    def moves(self) -> Array:
        """What changes from `old`, by layer and slot: a record array of layer, slot, expert, before (what the slot
        held) and source (a slot that held the expert: on the same rank, else the same node, else elsewhere). Sources
        are slots of `old`, also such that get another expert themselves: read all before any is written."""
        if self.old is None:
            return np.empty(0, MOVE)
        return moves_between(self.old, self.physical_to_logical, *self.shape, nodes=self.nodes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, ranks, slots of a rank)."""
        return self.replicas.shape[1], self.ranks, self.slots

    def expert_map(self, layer: int = 0) -> list[list[tuple[int, int]]]:
        """Of each expert of a layer its places, (rank, local slot)."""
        places: list[list[tuple[int, int]]] = [[] for _ in range(self.replicas.shape[1])]
        for slot, expert in enumerate(self.physical_to_logical[layer].tolist()):
            places[expert].append(divmod(slot, self.slots))
        return places


def plan(
    loads: Any,
    *,
    ranks: int,
    slots: int,
    nodes: int = 1,
    groups: int = 0,
    node_tolerance: float = 0.01,
    old: Plan | Any = None,
    writes: int | None = None,
) -> Plan:
    """Plans the placement of all layers' experts, so that ranks carry as nearly the same as can be.

    loads: [layers, E] or [E], tokens per expert or anything proportional, at least 0: NumPy or PyTorch, float32,
    float64, int32 or int64 (others are converted to float64). slots: of each rank, ranks * slots >= E. No rank holds an
    expert twice unless slots > E, or `old` has it so and `writes` are too few to mend that.

    groups: of consecutive experts that a router limits tokens to (DeepSeek's group-limited gating). Each then has a
    home node, and load leaves it only so far that no node carries more than 1 + node_tolerance times the mean; a
    tolerance of 1 keeps all at home. 0: nodes are not looked at.

    old: a Plan or a map [layers, ranks * slots] that is in use. It is then updated: at most `writes` slots of a layer
    get another expert; None: half a slot per rank, at least 4. With ranks * slots or more the plan is made anew, and
    its ranks renamed so that most slots stay. With up to half of that, groups keep the homes that `old` gives them.

    The same arguments give the same plan everywhere, so every rank may plan for itself. Errors: InvalidArgument.
    """
    given = _loads(loads)
    layers, experts = given.shape
    config = _config(layers, experts, ranks, slots, nodes)
    config.num_groups = _int(groups, "groups")
    try:
        config.node_tolerance = float(node_tolerance)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument.of("node_tolerance", f"is {node_tolerance!r}; it must be a number from 0") from None
    before = None
    if old is not None:
        before = _map("old", old, layers, config)
        config.old_map = before.ctypes.data
        config.max_writes = -1 if writes is None else _budget(writes)
    elif writes is not None:
        raise InvalidArgument.of("writes", f"is {writes}, and old is None; writes belongs to an update of `old`")
    # So that what is too large is refused before there is memory for it.
    places = max(0, min(config.num_ranks * config.slots_per_rank, MOST_SLOTS))
    made = Plan(
        loads=given,
        ranks=config.num_ranks,
        slots=config.slots_per_rank,
        nodes=config.num_nodes,
        physical_to_logical=np.empty((layers, places), np.int32),
        replicas=np.empty((layers, experts), np.int32),
        rank_loads=np.empty((layers, max(0, min(config.num_ranks, _header.MAX_RANKS)))),
        bounds=np.empty(layers),
        stray=np.empty(layers),
        old=before,
    )
    output = PlanOutput()
    for name, _ in PlanOutput._fields_:
        setattr(output, name, getattr(made, name).ctypes.data)
    tensor = tensors.tensor_of(given)
    _native.check(_native.lib.twPlan(byref(config), byref(tensor), byref(output)))
    return made


def rank_loads(loads: Any, placed: Plan | Any, *, ranks: int, slots: int) -> Array:
    """float64 [layers, ranks]: what ranks carry of loads [layers, E] under a plan, or a map [layers, ranks * slots], an
    expert's load split evenly over its replicas."""
    given = _loads(loads)
    config = _config(*given.shape, ranks, slots, 1)
    placed = _map("placed", placed, given.shape[0], config)
    out = np.empty((given.shape[0], config.num_ranks))
    tensor = tensors.tensor_of(given)
    _native.check(_native.lib.twPlanLoads(byref(config), byref(tensor), placed.ctypes.data, out.ctypes.data))
    return out


def imbalance(carried: Array) -> Array:
    """[...] of what ranks carry, [..., ranks]: largest / mean - 1; 0 where there is nothing."""
    means = carried.mean(axis=-1)
    return np.divide(carried.max(axis=-1), means, out=np.ones_like(means), where=means > 0) - 1


def moves_between(old: Any, new: Any, experts: int, ranks: int, slots: int, *, nodes: int = 1) -> Array:
    """As Plan.moves, of two maps [layers, ranks * slots]."""
    layers = len(new)
    config = _config(layers, experts, ranks, slots, nodes)
    before, after = _map("old", old, layers, config), _map("new", new, layers, config)
    moves = np.empty(after.size, MOVE)
    count = c_int64()
    data = moves.ctypes.data if moves.size else None
    given = (byref(config), before.ctypes.data, after.ctypes.data, data, moves.size, byref(count))
    _native.check(_native.lib.twPlanMoves(*given))
    return moves[: count.value].copy()


def contiguous(layers: int, experts: int, ranks: int, slots: int) -> Array:
    """int32 [layers, ranks * slots]: where nobody has planned. Slot p holds expert p; those beyond, 0 and on again."""
    return np.tile(np.arange(ranks * slots, dtype=np.int32) % experts, (layers, 1))


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """The face of DeepSeek's expert-parallel load balancer (https://github.com/deepseek-ai/EPLB), over this planner.

    weight: [layers, num_logical_experts] load statistics. num_replicas: physical experts, a multiple of num_gpus.
    num_groups: expert groups; where num_nodes divides it, each group keeps to a node (here as far as that does not cost
    balance, see plan's node_tolerance), else placement is global.

    Returns (physical_to_logical_map [layers, num_replicas], logical_to_physical_map [layers, num_logical_experts,
    most replicas], -1 where an expert has fewer, logical_count [layers, num_logical_experts]), int64: PyTorch tensors
    on the CPU for a PyTorch weight, else NumPy arrays.
    """
    replicas, gpus = _int(num_replicas, "num_replicas"), _int(num_gpus, "num_gpus")
    groups, nodes = _int(num_groups, "num_groups"), _int(num_nodes, "num_nodes")
    if gpus < 1 or replicas < 1 or replicas % gpus:
        raise InvalidArgument.of("num_replicas", f"is {num_replicas}; it must be a multiple of num_gpus, {num_gpus}")
    for name, value in (("num_groups", groups), ("num_nodes", nodes)):
        if value < 1:
            raise InvalidArgument.of(name, f"is {value}; it must be at least 1", value=value)
    if groups % nodes:
        groups, nodes = 0, 1
    made = plan(weight, ranks=gpus, slots=replicas // gpus, nodes=nodes, groups=groups)
    adapt = sys.modules["torch"].from_numpy if tensors.is_torch(weight) else np.asarray
    found = (made.physical_to_logical, made.logical_to_physical, made.replicas)
    placed, replicated, counts = (adapt(array.astype(np.int64)) for array in found)
    return placed, replicated, counts


def _config(layers: int, experts: int, ranks: Any, slots: Any, nodes: Any) -> PlanConfig:
    config = PlanConfig()
    config.num_layers, config.num_experts = layers, experts
    config.num_ranks = _int(ranks, "ranks")
    config.slots_per_rank = _int(slots, "slots")
    config.num_nodes = _int(nodes, "nodes")
    return config


def _int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -(2**31) <= value < 2**31:
        raise InvalidArgument.of(name, f"is {value!r}; it must be an integer of 32 bits")
    return int(value)


def _budget(writes: Any) -> int:
    if isinstance(writes, (int, np.integer)) and writes < 0:
        raise InvalidArgument.of("writes", f"is {writes}; it must be at least 0, or None")
    return _int(writes, "writes")


def _loads(loads: Any) -> Array:
    array = checked.host_array("loads", loads)
    if array.dtype.kind not in "iuf":
        raise InvalidArgument.of("loads", f"has dtype {array.dtype}; it must be a type of numbers")
    if array.dtype.newbyteorder("=") not in (np.float32, np.float64, np.int32, np.int64):
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise InvalidArgument.of("loads", f"has shape {list(array.shape)}; it must be [layers, experts] or [experts]")
    return array


def _map(name: str, placed: Any, layers: int, config: PlanConfig) -> Array:
    given = placed.physical_to_logical if isinstance(placed, Plan) else placed
    array = checked.host_array(name, given)
    wanted = (layers, config.num_ranks * config.slots_per_rank)
    if array.dtype.kind not in "iu" or array.shape != wanted:
        what = f"{array.dtype} {list(array.shape)}"
        raise InvalidArgument.of(name, f"is {what}; it must be integers [layers, ranks * slots], {list(wanted)}")
    return checked.integers(name, array)
