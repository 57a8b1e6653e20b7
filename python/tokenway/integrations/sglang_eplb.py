"""SGLang's expert-parallel load balancer (EPLB) by Tokenway's: `tokenway.integrations.sglang` puts it in place.

SGLang's EPLBManager keeps its name and its metadata. What changes: the weights of experts lie in Tokenway's window;
ids that leave a router stay those of logical experts, as each dispatch chooses physical ones by the map in force; and
the end of a forward pass is a step of the balancer, which moves experts beside the passes, where SGLang stops for them.
One slot of each rank is spare, -1 in the metadata.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
from sglang.srt.eplb import eplb_algorithms, expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPDispatcher
from sglang.srt.runtime_context import get_exec, get_parallel

import tokenway as tw
from tokenway.compat import deep_ep
from tokenway.compat.deep_ep import ranks
from tokenway.compat.deep_ep.normal import Normal
from tokenway.integrations import moved_experts
from tokenway.integrations.groups import SharedGroup
from tokenway.integrations.low_latency import LowLatency
from tokenway.integrations.moved_experts import MovedExperts, Settings

LOG = logging.getLogger(__name__)
_MOVED = "_tokenway_moved"  # of an EPLBManager: (its model's experts, the number of each of their layers in the model)
_active: list[Any] = []  # managers of this process whose experts move

# Where SGLang's hooks go, as `HookRegistry.register` takes it; each is AROUND.
HOOKS = {
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": "load_model",
    "sglang.srt.eplb.eplb_manager.EPLBManager.on_forward_pass_end": "on_forward_pass_end",
    "sglang.srt.eplb.expert_location_dispatch.ExpertLocationDispatchInfo.init_new": "init_new",
}


def load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of ModelRunner.load_model: behind it, and before graphs are captured, experts go to a window."""
    result = original(runner, *args, **kwargs)
    if getattr(runner, "eplb_manager", None) is not None and not runner.is_draft_worker:
        begin(runner.eplb_manager, runner.model, runner.expert_location_updater)
    return result


def on_forward_pass_end(original: Any, manager: Any) -> None:
    """In the place of that of EPLBManager: a step of the balancer, and SGLang's metadata as they are then."""
    found = getattr(manager, _MOVED, None)
    if found is None:
        return original(manager)
    moved, numbers = found
    metadata = expert_location.get_global_expert_location_metadata()
    for layer, table in moved.step().items():
        tell(metadata, numbers[layer], table)
    return None


def init_new(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of that of ExpertLocationDispatchInfo: None, with which routers leave ids as they are."""
    return None if _active else original(cls, *args, **kwargs)


def begin(manager: Any, model: Any, updater: Any) -> None:
    """Moves a model's experts to a window, from where they follow their load. manager: SGLang's; updater: its
    ExpertLocationUpdater. Collective. Errors: Unsupported, on all ranks alike; those of `MovedExperts`."""
    metadata = expert_location.get_global_expert_location_metadata()
    weights = {layer: list(each) for layer, each in model.routed_experts_weights_of_layer.items()}
    numbers = sorted(weights)
    dispatchers = _dispatchers_of(model, numbers)
    impl, kind = _kind_of(dispatchers[numbers[0]][0])
    if ElasticEPStateManager.instance() is not None:
        raise tw.Unsupported(f"elastic expert parallelism is on; with {moved_experts.VARIABLE} it must be off")
    size, local = metadata.ep_size, metadata.num_local_physical_experts
    every = get_exec().moe.eplb_rebalance_num_iterations
    settings = Settings(metadata.num_logical_experts, size, local, every, every, _policy_of(metadata))
    first = moved_experts.first_map(settings.experts, size * local, size, "ep_num_redundant_experts")
    _place(updater, metadata, first, weights)
    made: list[Any] = []

    def make(placement: tw.Placement) -> SharedGroup:
        _, peers = ranks.of(impl.group, weights[numbers[0]][0].device)
        exchange = kind(peers, settings.experts, impl.router_topk, expert_map=placement)
        if kind is LowLatency:
            exchange.view(impl.hidden_size, torch.bfloat16, None, impl.num_max_dispatch_tokens_per_rank)
        else:
            exchange.view((impl.hidden_size, torch.bfloat16, ()))
        made.append(exchange)
        shared: SharedGroup = exchange.shared
        return shared

    layers = [{str(i): each for i, each in enumerate(weights[number])} for number in numbers]
    moved = MovedExperts(layers, [model, weights], settings, make)
    for layer, number in enumerate(numbers):
        for dispatcher in dispatchers[number]:
            buffer = _LayersBuffer(impl.group, made[0], layer)
            _kind_of(dispatcher)[0]._get_buffer = partial(_given, buffer)
        tell(metadata, number, moved.tables()[layer])
    setattr(manager, _MOVED, (moved, numbers))
    _active.append(manager)
    LOG.info("experts of %d layers move by Tokenway, %s decides", len(numbers), settings.policy or "its balancer")


def tell(metadata: ExpertLocationMetadata, number: int, table: np.ndarray) -> None:
    """Writes a layer's map [slots], -1 for spare slots, to SGLang's metadata."""
    experts, slots = metadata.num_logical_experts, len(table)
    held = [np.flatnonzero(table == expert) for expert in range(experts)]
    all_slots = np.full((experts, slots), -1, np.int64)
    for expert, places in enumerate(held):
        all_slots[expert, : len(places)] = places
    told = {
        "physical_to_logical_map": table,
        "physical_to_logical_map_cpu": table,
        "logical_to_all_physical_map": all_slots,
        "logical_to_all_physical_map_cpu": all_slots,
        "logical_to_all_physical_map_num_valid": np.array([len(places) for places in held]),
    }
    if metadata.logical_to_rank_dispatch_physical_map is not None:
        own = torch.distributed.get_rank() % metadata.ep_size * metadata.num_local_physical_experts
        mine = [places[(places >= own) & (places < own + metadata.num_local_physical_experts)] for places in held]
        nearest = [(near if len(near) else places)[0] for near, places in zip(mine, held, strict=True)]
        told["logical_to_rank_dispatch_physical_map"] = np.array(nearest)
    for name, values in told.items():
        row = getattr(metadata, name)[number]
        row.copy_(torch.from_numpy(values.astype(np.int64)).to(row.dtype), non_blocking=True)


class _LayersBuffer(deep_ep.Buffer):
    """What one layer's dispatchers call: dispatches go by the map of the layer, and ids are those of logical experts.

    exchange: of all layers; layer: among those whose experts move."""

    def __init__(self, group: Any, exchange: Any, layer: int):
        super().__init__(group, low_latency_mode=isinstance(exchange, LowLatency))
        self._exchange = _OfLayer(exchange, layer)

    def _low_latency(self, *_: Any) -> Any:
        return self._exchange

    def _normal(self, *_: Any) -> Any:
        return self._exchange


class _OfLayer:
    """An exchange whose routings are of one layer."""

    def __init__(self, exchange: Any, layer: int):
        self._exchange = exchange
        name = "dispatch" if isinstance(exchange, LowLatency) else "route"
        setattr(self, name, partial(getattr(exchange, name), layer=layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)


def _given(buffer: Any) -> Any:
    return buffer


def _dispatchers_of(model: Any, numbers: list[int]) -> dict[int, list[DeepEPDispatcher]]:
    """Of each of these layers, two for two batches in turns. Errors: Unsupported where one is no DeepEP's."""
    found: dict[int, list[Any]] = {}
    for module in model.modules():
        dispatcher = getattr(module, "dispatcher", None)
        if dispatcher is not None and getattr(module, "layer_id", None) in numbers:
            found[module.layer_id] = list(getattr(dispatcher, "_inners", [dispatcher]))
    for number in numbers:
        each = found.get(number, [])
        if not each or not all(isinstance(dispatcher, DeepEPDispatcher) for dispatcher in each):
            told = f"layer {number} has {', '.join(sorted({type(x).__name__ for x in each})) or 'no dispatcher'}"
            raise tw.Unsupported(f"{told}; with {moved_experts.VARIABLE} it must be moe_a2a_backend deepep's")
    return found


def _kind_of(dispatcher: Any) -> tuple[Any, Any]:
    """(that which does a dispatcher's work, its exchange). Errors: Unsupported."""
    mode = dispatcher.deepep_mode
    if mode.enable_normal() and mode.enable_low_latency():
        wanted = f"with {moved_experts.VARIABLE} it must be normal or low_latency"
        why = "maps switch by what dispatches of one group tell, and each mode has a group"
        raise tw.Unsupported(f"deepep_mode is auto; {wanted}: {why}")
    if mode.enable_low_latency():
        return dispatcher._low_latency_dispatcher, LowLatency
    return dispatcher._normal_dispatcher, Normal


def _policy_of(metadata: ExpertLocationMetadata) -> moved_experts.Policy | None:
    """SGLang's, of the slots that are in use, or None if Tokenway plans."""
    if moved_experts.asked() != moved_experts.THEIRS:
        return None
    nodes = get_parallel().nnodes
    algorithm = eplb_algorithms.compute_algorithm(get_exec().moe.eplb_algorithm, None, nodes)
    return partial(_policy, algorithm, metadata.ep_size, nodes)


def _policy(algorithm: Any, size: int, nodes: int, loads: np.ndarray, now: np.ndarray) -> np.ndarray:
    slots = now.shape[1]
    asked = {"num_physical_experts": slots, "num_local_physical_experts": slots // size, "num_nodes": nodes}
    counts = torch.from_numpy(loads)[None]  # of one step
    planned, *_ = eplb_algorithms.rebalance_experts(counts, num_groups=None, algorithm=algorithm, **asked)
    wanted: np.ndarray = planned.cpu().numpy()
    return wanted


def _place(updater: Any, metadata: ExpertLocationMetadata, first: np.ndarray, weights: dict[int, Any]) -> None:
    """Has SGLang bring experts from where it has loaded them to where they begin: as many on each rank, and a slot
    over. Collective, and the last time that all wait for it."""
    table = torch.from_numpy(first).to(metadata.physical_to_logical_map)
    places = torch.full((metadata.num_logical_experts, len(first)), -1, dtype=table.dtype)
    for expert in range(metadata.num_logical_experts):
        held = np.flatnonzero(first == expert)
        places[expert, : len(held)] = torch.from_numpy(held)
    layers = metadata.num_layers
    placed = ExpertLocationMetadata._init_raw(
        metadata.ep_size, table.repeat(layers, 1), places.repeat(layers, 1, 1).to(table.device)
    )
    parallel = get_parallel()
    numbers = sorted(weights)
    updater.update(weights, placed, numbers, nnodes=parallel.nnodes, rank=parallel.tp_rank)
