"""SGLang's expert-parallel load balancer by Tokenway's: experts behind its own dispatchers move between forward passes,
on two ranks. Rows and weights are small whole numbers, so that results are exact wherever experts are."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from deep_ep_ranks import begin, end
from frameworks import (
    SGLANG_APART,
    assert_caught,
    attempt,
    await_moves,
    check_maps,
    framework_apart,
    here,
    mutated,
    steps,
)
from harness import HANGS, said
from sglang_parts import PINNED, as_with_kernels, put_stand_ins

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, TOP_K, HIDDEN, MOST, REDUNDANT = 6, 2, 128, 16, 4
SLOTS = (EXPERTS + REDUNDANT) // 2  # of a rank
NUMBERS = (1, 3)  # layers of the model that have experts, of four
EVERY, STEPS, LAST = 4, 48, 40  # the passes that are made, and those behind them, in which nothing new is planned
# name: (SGLang's mode, by hooks or asynchronous, who plans)
CASES: dict[str, tuple[str, bool, str]] = {
    "low latency": ("low_latency", True, "1"),
    "normal": ("normal", False, "1"),
    "low latency, SGLang's algorithm": ("low_latency", False, "framework"),
    "normal, SGLang's algorithm": ("normal", True, "framework"),
}
# name: (text of sglang_eplb.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "all layers go by one map": ("_LayersBuffer(impl.group, made[0], layer)", "_LayersBuffer(impl.group, made[0], 0)",
                                 "low latency"),
    "SGLang is not told of maps": ("    for layer, table in moved.step().items():\n", "    for layer, table in "
                                   "moved.step() and ():\n", "normal"),
    "experts stay where they were loaded": ("    updater.update(weights, placed",
                                            "    (lambda *_, **__: None)(weights, placed", "low latency"),
}  # fmt: skip


def factor(number: int, expert: int) -> np.ndarray:
    """[H]: by what an expert multiplies rows."""
    return np.random.default_rng([number, expert, 3]).integers(-2, 3, HIDDEN).astype(np.float32)


def batch(step: int, rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows [T, H], ids [T, K], some -1) of a rank; which experts are hot changes with time."""
    rng = np.random.default_rng([step, rank, number])
    tokens = (12, 7, 0, 16)[(rank + step) % 4]
    hot = (np.arange(EXPERTS) - step // 16 - number) % EXPERTS
    ids = np.argsort(-(rng.random((tokens, EXPERTS)) + np.where(hot < 2, 0.6, 0)), 1)[:, :TOP_K]
    return rng.integers(-2, 3, (tokens, HIDDEN)), np.where(rng.random(ids.shape) < 0.1, -1, ids)


def wanted(step: int, rank: int, number: int) -> np.ndarray:
    """[T, H]: what one rank with all experts would make of that."""
    rows, ids = batch(step, rank, number)
    out = np.zeros(rows.shape, np.float32)
    for k, column in enumerate(ids.T):
        for token, expert in enumerate(column):
            if expert >= 0:
                out[token] += (k + 1) * factor(number, expert) * rows[token]
    return out


def trivial_map() -> Any:
    """[layers, slots]: where SGLang loads experts, unless it is told otherwise."""
    import torch

    return torch.arange(2 * SLOTS).repeat(4, 1) % EXPERTS


def as_loaded() -> Any:
    """SGLang's metadata of that, which are in force from then on."""
    from sglang.srt.eplb import expert_location

    table = trivial_map()
    places = expert_location._compute_logical_to_all_physical_map(table, EXPERTS, 2, None)
    metadata = expert_location.ExpertLocationMetadata._init_raw(2, table, places)
    expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
    return metadata


def model_of(mode: str, told: bool) -> Any:
    """A model as SGLang's balancer knows them: its layers' dispatchers are SGLang's, and its weights are where SGLang's
    metadata say."""
    import torch
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.utils import DeepEPMode

    rank = torch.distributed.get_rank()
    held = get_global_expert_location_metadata().physical_to_logical_map_cpu

    class Experts(torch.nn.Module):
        def __init__(self, number: int):
            super().__init__()
            self.layer_id = number
            self.dispatcher = MaybeTboDeepEPDispatcher(
                group=torch.distributed.group.WORLD, router_topk=TOP_K, permute_fusion=True,
                num_experts=2 * SLOTS, num_local_experts=SLOTS, hidden_size=HIDDEN, params_dtype=torch.bfloat16,
                deepep_mode=DeepEPMode(mode), async_finish=told, return_recv_hook=told,
            )  # fmt: skip
            self.dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
            mine = held[number, rank * SLOTS : (rank + 1) * SLOTS].tolist()
            rows = torch.from_numpy(np.stack([factor(number, expert) for expert in mine]))
            self.factor = torch.nn.Parameter(rows.bfloat16().to(here()), requires_grad=False)
            self.name = torch.nn.Parameter(torch.tensor(mine, device=here()).int(), requires_grad=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(Experts(number) for number in NUMBERS)
            # As models of SGLang's give it: tensors of their own over the parameters' memory.
            self.routed_experts_weights_of_layer = {
                each.layer_id: [parameter.data for parameter in each.parameters()] for each in self.experts
            }

    return Model()


def forward(experts: Any, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """A layer as SGLang runs it."""
    import torch
    from sglang.srt.eplb import expert_location_dispatch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    info = expert_location_dispatch.ExpertLocationDispatchInfo.init_new(experts.layer_id)
    # Routers let SGLang's function choose physical experts; -1 is put where there is padding, behind it.
    chosen = torch.from_numpy(np.where(ids < 0, 0, ids)).int().to(here())
    chosen = expert_location_dispatch.topk_ids_logical_to_physical(chosen, info)
    chosen[torch.from_numpy(ids < 0).to(here())] = -1
    weights = torch.arange(1, TOP_K + 1, device=here()).float().expand(len(ids), -1).contiguous()
    x = torch.from_numpy(rows).bfloat16().to(here())
    came = experts.dispatcher.dispatch(hidden_states=x, topk_output=StandardTopKOutput(weights, chosen, None))
    sent, scale = came.hidden_states.float(), experts.factor.float()
    if came.format.name == "DEEPEP_LL":
        out = torch.full_like(sent, float("nan"))
        for place, count in enumerate(came.masked_m.tolist()):
            out[place, :count] = sent[place, :count] * scale[place]
    else:
        share = torch.where(came.topk_ids < 0, 0, came.topk_weights)[..., None]
        out = sent * (scale[came.topk_ids.clamp(min=0)] * share).sum(1)
    rest = came.topk_ids, came.topk_weights
    made: np.ndarray = experts.dispatcher.combine(combine_input=(out.bfloat16(), *rest)).float().cpu().numpy()
    return made


def run_case(case: tuple[str, bool, str], hooks: Any, rank: int) -> dict[str, Any]:
    """A model whose experts move while it runs, and what SGLang then has of it. hooks: the module that is hooked in."""
    import torch
    from sglang.srt.eplb import eplb_manager
    from sglang.srt.runtime_context import get_forward

    mode, told, who = case
    before = steps()
    trivial, metadata, wrong, changes = trivial_map(), as_loaded(), [], 0
    with patch.dict(os.environ, TOKENWAY_BALANCE=who), get_forward().scoped(is_extend_in_batch=mode == "normal"):
        updater = eplb_manager.ExpertLocationUpdater()
        updater._first_execution = False  # which empties a cache that only devices have
        manager = eplb_manager.EPLBManager.__new__(eplb_manager.EPLBManager)
        model, runner = model_of(mode, told), SimpleNamespace(eplb_manager=manager, is_draft_worker=False)

        def load(runner: Any) -> str:
            runner.model, runner.expert_location_updater = model, updater
            return "loaded"

        assert hooks.load_model(load, runner) == "loaded"
        moved, _ = manager._tokenway_moved
        known = metadata.physical_to_logical_map_cpu.clone()
        for step in range(STEPS + LAST):
            for experts in model.experts:
                number = experts.layer_id
                if not np.array_equal(forward(experts, *batch(step, rank, number)), wanted(step, rank, number)):
                    wrong.append((step, number))
            await_moves(moved)
            if step == STEPS:
                moved.balancer.paused, moved.settings = True, SimpleNamespace(policy=None)
            hooks.on_forward_pass_end(None, manager)
            changes += not torch.equal(known, metadata.physical_to_logical_map_cpu)
            known = metadata.physical_to_logical_map_cpu.clone()
    found = {
        "wrong": wrong,
        "changes": changes,
        "statistics": moved.balancer.statistics,
        "idle": moved.balancer.idle,
        "tables": moved.tables().tolist(),
        "physical": metadata.physical_to_logical_map[list(NUMBERS)].tolist(),
        "on the host": metadata.physical_to_logical_map_cpu[list(NUMBERS)].tolist(),
        "others": metadata.physical_to_logical_map[[0, 2]].tolist() == trivial[:2].tolist(),
        "logical": metadata.logical_to_all_physical_map[list(NUMBERS)].tolist(),
        "counts": metadata.logical_to_all_physical_map_num_valid[list(NUMBERS)].tolist(),
        "held": [each.name.tolist() for each in model.experts],
        "factors": all(holds_what_it_says(each) for each in model.experts),
        "shared": all(
            [x.data_ptr() for x in model.routed_experts_weights_of_layer[each.layer_id]]
            == [x.data_ptr() for x in each.parameters()]
            for each in model.experts
        ),
        "steps": steps() - before,
    }
    hooks._active.clear()
    moved._shared.close()
    return found


def holds_what_it_says(experts: Any) -> bool:
    """Whether in each slot both tensors are of one expert."""
    rows, names = experts.factor.float().numpy(force=True), experts.name.tolist()
    number = experts.layer_id
    return all(np.array_equal(row, factor(number, expert)) for row, expert in zip(rows, names, strict=True))


def run_refused(hooks: Any) -> dict[str, Any]:
    """What SGLang is told where experts cannot move."""
    told = {}
    as_loaded()
    model = model_of("auto", False)
    told["auto"] = attempt(hooks.begin, None, model, None)
    model = model_of("low_latency", False)
    model.experts[1].dispatcher = None
    told["another"] = attempt(hooks.begin, None, model, None)
    model = model_of("low_latency", False)
    few = SimpleNamespace(ep_size=2, num_local_physical_experts=3, num_logical_experts=6, num_layers=4)
    with patch.object(hooks.expert_location, "get_global_expert_location_metadata", lambda: few):
        told["slots"] = attempt(hooks.begin, None, model, None)
    return told


def rank_main(store: str, cases: list[str], mutations: list[str]) -> dict[str, Any]:
    put_stand_ins()
    rank, _ = begin(store, 2)
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_context, get_flags, get_parallel

    from tokenway.integrations import sglang

    with patch.dict(os.environ, TOKENWAY_BALANCE="1"):
        sglang.register()
    as_with_kernels()
    options = {"moe_a2a_backend": "deepep", "enable_eplb": True, "eplb_rebalance_num_iterations": EVERY, "tp_size": 2}
    options |= {"ep_num_redundant_experts": REDUNDANT, "ep_dispatch_algorithm": "dynamic", "ep_size": 2}
    get_context().override_server_args(**options).install()
    get_flags().moe.a2a_backend = MoeA2ABackend.DEEPEP
    from sglang.srt.environ import envs

    from tokenway.integrations import sglang_eplb

    found: dict[str, Any] = {"hooked": hooked()}
    most = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.override(MOST)
    with most, get_parallel().override(tp_rank=rank, nnodes=1):
        for name in cases:
            found[name] = attempt(run_case, CASES[name], sglang_eplb, rank)
        found["refused"] = attempt(run_refused, sglang_eplb)
        for name in mutations:
            old, new, case_name = MUTATIONS[name]
            mutant = mutated(sglang_eplb, old, new)
            with patch.object(sglang_eplb, "_active", mutant._active):  # where the hook of routers looks
                found[name] = attempt(run_case, CASES[case_name], mutant, rank)
    end()
    return found


def hooked() -> dict[str, str]:
    """In which class of SGLang's sources each hook finds its function."""
    from tokenway.integrations import sglang_eplb

    found = {}
    for target in sglang_eplb.HOOKS:
        module, kind, name = target.rsplit(".", 2)
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        (body,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind]
        (made,) = [each for each in body.body if isinstance(each, ast.FunctionDef) and each.name == name]
        found[target] = ", ".join(argument.arg for argument in made.args.args)
    return found


apart = framework_apart({"sglang": PINNED}, SGLANG_APART)


@pytest.fixture(scope="module")
def ran(apart: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    store = str(tmp_path_factory.mktemp("sglang_eplb") / "store")
    return tw.run(rank_main, 2, store, list(CASES), list(MUTATIONS), timeout=6 * HANGS)


def judge(ranks: list[Any]) -> None:
    """Results are exact in every pass, experts have moved, and SGLang knows where they are."""
    for found in ranks:
        assert isinstance(found, dict), found
        assert not found["wrong"]
        assert found["statistics"].voids == 0 and found["statistics"].plans > 0 and found["statistics"].moves > 0
        assert found["idle"] and found["changes"] > 0 and found["shared"] and found["others"]
        assert found["steps"] == 2 * len(NUMBERS) * (STEPS + LAST)
        assert found["tables"] == ranks[0]["tables"] == found["physical"] == found["on the host"]
        assert found["factors"]
    check_maps(ranks, EXPERTS, SLOTS)


@pytest.mark.parametrize("case", CASES)
def test_experts_move(ran, case) -> None:
    """Behind SGLang's dispatchers, whoever plans: as one rank that has all experts, bit for bit."""
    judge([found[case] for found in ran])


def test_plans_are_those_of_the_algorithm(ran) -> None:
    """SGLang's own, and others than Tokenway's."""
    ours, theirs = (ran[0][name] for name in ("low latency", "low latency, SGLang's algorithm"))
    assert not np.array_equal(ours["tables"], theirs["tables"])


def test_where_hooks_go(ran) -> None:
    """To methods of SGLang's, whose arguments are those of the hooks."""
    for found in ran:
        assert list(found["hooked"].values()) == ["self", "self", "cls, layer_id"]


def test_what_is_refused(ran) -> None:
    """On all ranks alike, before anything is asked of the others."""
    for found in ran:
        told = found["refused"]
        said(told["auto"], "Unsupported", "^deepep_mode is auto; .* it must be normal or low_latency")
        said(told["another"], "Unsupported", "^layer 3 has NoneType|^layer 3 has no dispatcher")
        said(told["slots"], "Unsupported", "^ep_num_redundant_experts is 0, for 6 experts on 2 ranks; it must be 2")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """A hook that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)
