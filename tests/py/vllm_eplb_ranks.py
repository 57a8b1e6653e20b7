"""Ranks of a model of vLLM's whose experts move: its own layers, routers, loader of weights and EplbState, with experts
of PyTorch alone. Rows and weights are small whole numbers, so that results are exact wherever experts are."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import vllm_ranks
from frameworks import attempt, await_moves, here, mutated, steps
from vllm_ranks import HIGH, LOW, begin, connect

import tokenway as tw

EXPERTS, TOP_K, HIDDEN, WIDTH, LAYERS, MOST, REDUNDANT = 6, 2, 32, 8, 2, 16, 4
SLOTS = (EXPERTS + REDUNDANT) // 2  # of a rank
ROOM = 256  # tokens that a group has room for from the start
EVERY, STEPS, LAST = 4, 48, 40  # the steps that are made, and those behind them, in which nothing new is planned
# name: vLLM's backend, whether it knows all sizes, and who plans
CASES: dict[str, dict[str, Any]] = {
    "batched": {"backend": LOW, "known": True, "who": "1"},
    "slots": {"backend": HIGH, "known": True, "who": "1"},
    "as many as come": {"backend": HIGH, "known": False, "who": "1"},
    "batched, vLLM's policy": {"backend": LOW, "known": True, "who": "framework"},
    "slots, vLLM's policy": {"backend": HIGH, "known": True, "who": "framework"},
}
_count = [0]  # of models, whose layers need names of their own


def matrices(layer: int, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gate [I, H], up [I, H], down [H, I]) of an expert, as its checkpoint has them."""
    rng = np.random.default_rng([layer, expert, 3])
    shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    gate, up, down = (rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes)
    return gate, up, down


def batch(step: int, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows [T, H], logits [T, E]) of a rank; which experts are hot changes with time."""
    rng = np.random.default_rng([step, rank, layer])
    tokens = (12, 7, 0, 16)[(rank + step) % 4]
    hot = (np.arange(EXPERTS) - step // 16 - layer) % EXPERTS
    logits = rng.random((tokens, EXPERTS)) + np.where(hot < 2, 0.6, 0)
    return rng.integers(-2, 3, (tokens, HIDDEN)).astype(np.float32), logits.astype(np.float32)


def wanted(step: int, rank: int, layer: int) -> np.ndarray:
    """[T, H]: what one rank with all experts would make of that."""
    rows, logits = batch(step, rank, layer)
    out = np.zeros_like(rows)
    for k, ids in enumerate(np.argsort(-logits, 1)[:, :TOP_K].T):
        for token, expert in enumerate(ids):
            gate, up, down = matrices(layer, expert)
            out[token] += np.float32(1 / (k + 1)) * (down @ ((gate @ rows[token]) * (up @ rows[token])))
    return out


def chosen(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool) -> tuple[Any, Any]:
    """A routing function as models give vLLM one."""
    import torch

    ids = gating_output.topk(topk, -1).indices.int()
    return 1 / torch.arange(1, topk + 1, device=ids.device).float().expand(len(ids), -1).contiguous(), ids


def experts_class(batched: bool) -> Any:
    """vLLM's experts, whose products are PyTorch's, of the weights that they are given."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )

    def product(rows: Any, w1: Any, w2: Any) -> Any:
        gate, up = (rows @ w1.T).chunk(2, -1)
        return (gate * up) @ w2.T

    class Experts(mk.FusedMoEExpertsModular):
        @staticmethod
        def activation_format() -> Any:
            formats = mk.FusedMoEActivationFormat
            return formats.BatchedExperts if batched else formats.Standard

        @staticmethod
        def _yes(*_: Any) -> bool:
            return True

        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = _yes
        _supports_activation = _supports_parallel_config = _yes

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M, N, K, topk, E, L, meta, activation) -> Any:
            return (0,), (0,), (L, M, HIDDEN) if batched else (M, HIDDEN)

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args: Any, **more: Any) -> None:
            for place in range(len(w1)):
                if batched:
                    count = int(more["expert_tokens_meta"].expert_num_tokens[place])
                    output[place] = float("nan")  # of rows that nobody may read
                    output[place, :count] = product(hidden_states[place, :count], w1[place], w2[place])
                    continue
                if place == 0:
                    output.zero_()
                mine = more["expert_map"][topk_ids.long()] == place
                weights = (topk_weights * mine).sum(1, keepdim=True)
                rows = product(hidden_states, w1[place], w2[place]) * weights
                output += torch.where(mine.any(1, keepdim=True), rows, 0)

    return Experts


def physical(topk_ids: Any, logical_to_physical_map: Any, logical_replica_count: Any, **_: Any) -> Any:
    """In the place of vLLM's kernel, by which routers choose physical experts on GPUs: it is not built on CPUs."""
    ids = topk_ids.long()
    return logical_to_physical_map.gather(1, (logical_replica_count > 1).long()[:, None])[ids, 0].to(topk_ids.dtype)


def model_of(case: dict[str, Any], config: Any, rank: int) -> Any:
    """A model as vLLM's balancer knows them, with its weights loaded."""
    import torch
    from vllm.distributed import get_ep_group
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    batched = case["backend"] == LOW
    config.parallel_config.all2all_backend = case["backend"]
    get_ep_group().device_communicator.all2all_manager = vllm_ranks.manager_of(case["backend"])

    class Model(torch.nn.Module, MixtureOfExperts):
        pass

    model = Model()
    model.num_moe_layers, model.num_expert_groups, model.num_shared_experts = LAYERS, 1, 0
    model.num_logical_experts = model.num_routed_experts = EXPERTS
    model.num_physical_experts, model.num_redundant_experts = EXPERTS + REDUNDANT, REDUNDANT
    model.num_local_physical_experts = SLOTS
    kind = method.UnquantizedMoeBackend.TRITON, experts_class(batched)
    layers = []
    for index in range(LAYERS):
        _count[0] += 1
        with patch.object(method, "select_unquantized_moe_backend", lambda moe_config: kind):
            layer = FusedMoEFactory(
                EXPERTS, TOP_K, HIDDEN, WIDTH, params_dtype=torch.float32, tp_size=1, dp_size=2,
                prefix=f"model.layers.{_count[0]}.mlp.experts", custom_routing_function=chosen, enable_eplb=True,
                num_redundant_experts=REDUNDANT,
            )  # fmt: skip
        for expert in range(EXPERTS):
            gate, up, down = (torch.from_numpy(each) for each in matrices(index, expert))
            told = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            list(layer.load_weights((f"{expert}.{name}.weight", each) for name, each in told.items()))
        layer.routed_experts.quant_method.process_weights_after_loading(layer.routed_experts)
        layers.append(layer)
    model.layers = torch.nn.ModuleList(layers)
    model.moe_layers = layers
    return model


def run_steps(
    case: dict[str, Any], config: Any, rank: int, model: Any, state: Any, made: range
) -> tuple[int, list[tuple[int, int]]]:
    """Makes steps. Returns in how many of them vLLM's maps changed, and which layers were not exact: (step, layer)."""
    import torch
    from vllm.forward_context import set_forward_context

    from tokenway.integrations import vllm_layers

    told, changes, wrong = None, 0, []
    for step in made:
        sizes = [len(batch(step, each, 0)[0]) for each in range(2)]
        with ExitStack() as stack:
            across = torch.tensor(sizes, dtype=torch.int32)
            stack.enter_context(set_forward_context(None, config, sizes[rank], num_tokens_across_dp=across))
            if not case["known"]:
                stack.enter_context(patch.object(vllm_layers, "_largest", lambda: None))
            for index, layer in enumerate(model.moe_layers):
                rows, logits = (torch.from_numpy(each).to(here()) for each in batch(step, rank, index))
                out = layer(rows, logits).cpu().numpy()
                if not np.array_equal(out, wanted(step, rank, index)):
                    wrong.append((step, index))
        for moved in state._tokenway_moved.values():
            await_moves(moved)
        state.step(is_dummy=not sizes[rank])
        (known,) = (each.physical_to_logical_map for each in state.model_states.values())
        changes += told is not None and not torch.equal(known, told)
        told = known.clone()
    return changes, wrong


def run_case(case: dict[str, Any], config: Any, rank: int) -> dict[str, Any]:
    """A model whose experts move while it runs, and what vLLM then has of it."""
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.layers.fused_moe.router import base_router

    key, before = SimpleNamespace(compute_hash=lambda: "model", model="model"), steps()
    with (
        patch.dict(os.environ, TOKENWAY_BALANCE=case["who"]),
        patch.object(base_router, "eplb_map_to_physical_and_record", physical),
    ):
        model = model_of(case, config, rank)
        state = EplbState(config.parallel_config, here())
        state.add_model(model, key)
        state.start_async_loop()
        changes, wrong = run_steps(case, config, rank, model, state, range(STEPS // 2))
        moved = state._tokenway_moved["model"]
        moved._shared.with_room(tw.RowType(4 * HIDDEN, "float32"), 2 * ROOM)  # the group grows
        more = run_steps(case, config, rank, model, state, range(STEPS // 2, STEPS))
        moved.balancer.paused = True
        with patch.object(moved, "_follow", lambda: None):
            last = run_steps(case, config, rank, model, state, range(STEPS, STEPS + LAST))
        states = state.model_states["model"]
        held = [
            [_expert_of(layer.routed_experts, index, place) for place in range(SLOTS)]
            for index, layer in enumerate(model.moe_layers)
        ]
        found = {
            "changes": changes + more[0],
            "wrong": wrong + more[1] + last[1],
            "statistics": moved.balancer.statistics,
            "idle": moved.balancer.idle,
            "tables": moved.tables().tolist(),
            "physical": states.physical_to_logical_map.tolist(),
            "logical": states.logical_to_physical_map[..., : REDUNDANT + 1].tolist(),
            "counts": states.logical_replica_count.tolist(),
            "held": held,
            "shared": [_shares(model, index) for index in range(LAYERS)],
            "steps": steps() - before,
        }
        moved._shared.close()
    return found


def _expert_of(experts: Any, layer: int, place: int) -> int:
    """Whose weights a slot of a layer has; -2 for nobody's."""
    gate_up, down = experts.w13_weight[place].cpu().numpy(), experts.w2_weight[place].cpu().numpy()
    for expert in range(EXPERTS):
        gate, up, last = matrices(layer, expert)
        if np.array_equal(gate_up, np.concatenate([gate, up])) and np.array_equal(down, last):
            return expert
    return -2


def _shares(model: Any, layer: int) -> bool:
    """Whether what vLLM holds of a layer's weights elsewhere shows the same memory as its parameters."""
    experts = model.moe_layers[layer].routed_experts
    own = {experts.w13_weight.data_ptr(), experts.w2_weight.data_ptr()}
    return {each.data_ptr() for each in model.expert_weights[layer]} == own


def run_mutant(change: tuple[str, str], case: dict[str, Any], config: Any, rank: int) -> Any:
    """A case by a hook whose source says something else."""
    from tokenway import integrations
    from tokenway.integrations import vllm as adapter
    from tokenway.integrations import vllm_eplb

    adapter.unregister()
    with patch.dict(os.environ, TOKENWAY_BALANCE="1"):
        with patch.object(integrations, "vllm_eplb", mutated(vllm_eplb, *change)):
            adapter.register()
        found = attempt(run_case, case, config, rank)
        adapter.unregister()
        adapter.register()
    return found


def run_refused(config: Any, rank: int) -> dict[str, Any]:
    """What vLLM is told where experts cannot move."""
    from vllm.distributed.eplb.eplb_state import EplbState

    told = {}
    for name, change in (("slots", {"num_redundant_experts": 0}), ("elastic", {})):
        model = model_of(CASES["slots"], config, rank)
        for field, value in change.items():
            setattr(model, field, value)
        if name == "slots":
            model.num_local_physical_experts = EXPERTS // 2
        with patch.object(config.parallel_config, "enable_elastic_ep", name == "elastic"):
            told[name] = attempt(EplbState(config.parallel_config, here()).add_model, model, None)
    with patch.dict(os.environ, TOKENWAY_BALANCE="yes"):
        from tokenway.integrations import moved_experts

        told["variable"] = attempt(moved_experts.asked)
    return told


def rank_main(store: str, cases: list[str], mutations: dict[str, tuple[str, str, str]]) -> dict[str, Any]:
    import torch.distributed as dist

    with patch.dict(os.environ, TOKENWAY_BALANCE="1"):
        rank, config = begin(store)
        from vllm.config import EPLBConfig

        from tokenway.integrations import vllm as adapter

        adapter.register()
    config.scheduler_config.max_num_batched_tokens = MOST
    config.parallel_config.enable_eplb = True  # which vLLM's config refuses on CPUs
    config.parallel_config.eplb_config = EPLBConfig(
        step_interval=EVERY,
        window_size=4 * EVERY,
        num_redundant_experts=REDUNDANT,
        use_async=False,
        communicator="torch_nccl",
    )
    connect(config, rank)
    found = {name: attempt(run_case, CASES[name], config, rank) for name in cases}
    found["refused"] = run_refused(config, rank)
    for name, (old, new, case) in mutations.items():
        found[name] = run_mutant((old, new), CASES[case], config, rank)
    dist.barrier()
    return found
