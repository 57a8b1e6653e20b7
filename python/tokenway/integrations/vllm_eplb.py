"""vLLM's expert-parallel load balancer (EPLB) by Tokenway's balancer: `tokenway.integrations.vllm` puts it in place.

vLLM's EplbState keeps its name, its calls and its maps. What changes in it: experts of layers whose exchange is
Tokenway's lie in Tokenway's window; routers leave the ids of logical experts as they are, as each dispatch chooses
physical ones by the map in force; and a step of the state is a step of the balancer, which moves experts beside the
model's steps, where vLLM stops for them or exchanges whole layers. One slot of each rank is spare, -1 in vLLM's maps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.distributed.eplb import eplb_communicator, eplb_state
from vllm.distributed.parallel_state import get_node_count

import tokenway as tw
from tokenway.integrations import moved_experts
from tokenway.integrations.groups import SharedGroup
from tokenway.integrations.moved_experts import MovedExperts, Settings
from tokenway.integrations.vllm_layers import _Tokenway

LOG = logging.getLogger(__name__)
_EplbState = eplb_state.EplbState
_MOVED = "_tokenway_moved"  # of an EplbState: its models' experts, by the key that vLLM has for a model


def places() -> Iterator[tuple[Any, str, Any]]:
    """What `register` puts where: (class, name, function)."""
    functions = {"add_model": _add_model, "step": _step, "rearrange": _rearrange, "start_async_loop": _start_async_loop}
    for name, function in functions.items():
        yield _EplbState, name, _method(function, getattr(_EplbState, name))


def _method(function: Any, own: Any) -> Any:
    """A method that calls function(own, self, ...): own is vLLM's."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(own, self, *args, **kwargs)

    return method


def _add_model(own: Any, self: Any, model: Any, model_config: Any, model_name: str | None = None) -> None:
    """vLLM's, whose state it makes; then the model's experts go to a window. Collective among the ranks of experts."""
    layers = list(model.moe_layers)
    prepare = [_prepare_of(layer) for layer in layers]
    if not all(isinstance(each, _Tokenway) for each in prepare):
        told = sorted({type(each).__name__ for each in prepare})
        raise tw.Unsupported(f"layers have {', '.join(told)}; with {moved_experts.VARIABLE} all must be Tokenway's")
    if self.parallel_config.enable_elastic_ep:
        raise tw.Unsupported(f"enable_elastic_ep is True; with {moved_experts.VARIABLE} it must be False")
    settings = _settings(self, model)
    slots = settings.slots * settings.ranks
    first = moved_experts.first_map(settings.experts, slots, settings.ranks, "num_redundant_experts")
    with patch.object(eplb_state, "create_eplb_communicator", _communicator):
        own(self, model, model_config, model_name)
    state = self.model_states[model_config.compute_hash()]
    _place(state, first)
    tensors = [_tensors_of(layer, weights) for layer, weights in zip(layers, model.expert_weights, strict=True)]
    made: list[Any] = []

    def make(placement: tw.Placement) -> SharedGroup:
        lanes = max(1, self.parallel_config.num_ubatches)  # each of which must make dispatches
        row = torch.empty(layers[0].moe_config.hidden_dim, dtype=layers[0].moe_config.in_dtype, device=self.device)
        top_k = layers[0].moe_config.experts_per_token
        made.append(prepare[0].make_exchange(model.num_logical_experts, top_k, row, expert_map=placement, lanes=lanes))
        shared: SharedGroup = made[0].shared
        return shared

    moved = MovedExperts(tensors, model, settings, make)
    for index, (layer, each) in enumerate(zip(layers, prepare, strict=True)):
        layer.router.eplb_state = None  # ids stay those of logical experts
        each.follow(made[0], index)
    self.__dict__.setdefault(_MOVED, {})[model_config.compute_hash()] = moved
    self.update_mapping(model_config, torch.from_numpy(moved.tables().astype(np.int64)))
    LOG.info("experts of %d layers move by Tokenway, %s decides", len(layers), settings.policy or "its balancer")


def _settings(self: Any, model: Any) -> Settings:
    ranks = get_ep_group().world_size
    policy = None
    if moved_experts.asked() == moved_experts.THEIRS:
        nodes = get_node_count()
        nodes = nodes if ranks % nodes == 0 else 1  # as vLLM does
        policy = partial(_policy, self.policy, model.num_expert_groups, nodes, ranks)
    asked = self.parallel_config.eplb_config
    times = asked.step_interval, asked.window_size
    return Settings(model.num_logical_experts, ranks, model.num_local_physical_experts, *times, policy)


def _policy(policy: Any, groups: int, nodes: int, ranks: int, loads: np.ndarray, now: np.ndarray) -> np.ndarray:
    """vLLM's, of the slots that are in use."""
    asked = torch.from_numpy(loads), now.shape[1], groups, nodes, ranks, torch.from_numpy(now.astype(np.int64))
    wanted: np.ndarray = policy.rebalance_experts(*asked).numpy()
    return wanted


def _step(own: Any, self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:
    """A step of the balancer, and vLLM's maps as they are then. A profile run has no memory to find out of."""
    models = getattr(self, _MOVED, {})
    if not models:
        return own(self, is_dummy, is_profile, log_stats)
    for key, moved in models.items():
        for layer, table in ({} if is_profile else moved.step()).items():
            told = torch.from_numpy(table.astype(np.int64))
            eplb_state._commit_eplb_maps_for_layer(self.model_states[key], told, layer)
    return None


def _rearrange(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's own is called by its step, which is another one here, and where ranks come and go."""
    if getattr(self, _MOVED, {}):
        raise tw.Unsupported(f"experts move by themselves with {moved_experts.VARIABLE}; rearrange is not to be called")
    return own(self, *args, **kwargs)


def _start_async_loop(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if not getattr(self, _MOVED, {}):
        own(self, *args, **kwargs)


def _prepare_of(layer: Any) -> Any:
    kernel = getattr(layer.routed_experts.quant_method, "moe_kernel", None)
    return getattr(kernel, "prepare_finalize", None)


def _tensors_of(layer: Any, weights: list[Tensor]) -> dict[str, Tensor]:
    """Those of a layer's parameters that vLLM's own balancer moves, by name."""
    moved = {each.data_ptr() for each in weights}
    return {name: each.data for name, each in layer.routed_experts.named_parameters() if each.data.data_ptr() in moved}


def _communicator(*args: Any, backend: str, **kwargs: Any) -> Any:
    """vLLM's, for `_place` alone, which is over before weights go elsewhere: NIXL would keep their old memory."""
    backend = "torch_gloo" if backend == "nixl" else backend
    return eplb_communicator.create_eplb_communicator(*args, backend=backend, **kwargs)


def _place(state: Any, first: np.ndarray) -> None:
    """Has vLLM bring experts from where it has loaded them, the redundant ones all on the last ranks, to where they
    begin: as many on each rank, and a slot over. Collective, and the last time that all wait for it."""
    loaded = state.physical_to_logical_map
    placed = torch.from_numpy(first).expand(len(loaded), -1)
    moving = state.model.expert_weights, state.expert_buffer, get_ep_group().device_group, state.communicator
    eplb_state.rearrange_expert_weights_inplace(loaded, placed, *moving)
    state.expert_buffer, state.communicator = [], None
