"""Megatron's MoE layer whose experts two ranks share through Tokenway, against its own layer on one rank."""

from __future__ import annotations

import time
import types
from typing import Any

import numpy as np
import pytest
from frameworks import (
    assert_caught,
    attempt,
    begin,
    here,
    mutated,
    need_devices,
    need_version,
    programs_of,
    steps,
    whole,
    within,
)
from harness import AT_ONCE, HANGS, PATIENT, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PINNED = "0.16.1"
EXPERTS, TOP_K, HIDDEN, MOST = 4, 2, 16, 24
# As far as products of other numbers of rows, and sums over experts in another order, differ in float32.
CLOSE = 2e-5
# name: (settings of Megatron, of through_tokenway, sequence length and batch of each rank)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[tuple[int, int], tuple[int, int]]]] = {
    "equal": ({}, {}, ((5, 2), (5, 2))),
    "longer": ({}, {}, ((300, 2), (300, 2))),
    "uneven": ({}, {"max_tokens": MOST}, ((6, 3), (1, 2))),
    "nothing for rank 0": ({}, {"max_tokens": MOST}, ((4, 2), (1, 1))),
    "said to be equal": ({}, {"equal": True}, ((3, 1), (3, 1))),
    "dropped tokens": ({"moe_expert_capacity_factor": 0.5}, {}, ((8, 2), (8, 2))),
    "sigmoid scores": ({"moe_router_score_function": "sigmoid"}, {}, ((5, 2), (5, 2))),
}


def config_of(ranks: int, **settings: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=24,
        moe_ffn_hidden_size=24,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=ranks,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        **settings,
    )


def spec_of(adapter: Any = None, **settings: Any) -> Any:
    """Of an MoELayer: Megatron's, or one that goes through Tokenway."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    return spec if adapter is None else adapter.through_tokenway(spec, timeout=PATIENT, **settings)


def alone() -> Any:
    """Process groups of this rank alone."""
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    mine = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    names = ("ep", "tp", "cp", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
    groups = ProcessGroupCollection()
    for name in names:
        setattr(groups, name, mine)
    return groups


def weigh(layer: Any, first: int, case: str = "") -> None:
    """Sets parameters by an expert's number, so that ranks agree; they are drawn on the CPU."""
    import torch

    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)))
        if case == "nothing for rank 0":  # tokens are positive, so nobody chooses its experts
            layer.router.weight[:2] = -1
            layer.router.weight[2:].abs_()
        for number, expert in enumerate(layer.experts.local_experts, first):
            rng = torch.Generator().manual_seed(10 + number)
            for linear in (expert.linear_fc1, expert.linear_fc2):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=rng) * 0.5)


def batch(case: str, rank: int) -> Any:
    import torch

    length, sequences = CASES[case][2][rank]
    rng = torch.Generator().manual_seed(20 + rank)
    x = torch.randn(length, sequences, HIDDEN, generator=rng)
    return x.abs() if case == "nothing for rank 0" else x


def trained(layer: Any, x: Any) -> dict[str, Any]:
    """Output, gradients of what a rank holds of its own, and how many rows each expert was given."""
    import torch

    x, rows = x.clone().requires_grad_(), []
    layer.zero_grad()
    hook = layer.experts.register_forward_pre_hook(lambda _, args: rows.append(args[1].cpu().numpy().copy()))
    out, bias = layer(x)
    hook.remove()
    assert bias is None
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum().backward()
    (of_experts,) = rows
    return {"out": whole(out), "x": whole(x.grad), "router": whole(layer.router.weight.grad), "rows": of_experts}


def gradients_of(layer: Any) -> list[Any]:
    return [
        np.zeros(tuple(p.shape), np.float32) if p.grad is None else whole(p.grad)
        for expert in layer.experts.local_experts
        for p in (expert.linear_fc1.weight, expert.linear_fc2.weight)
    ]


def run_case(adapter: Any, groups_alone: Any, case: str, rank: int) -> dict[str, Any]:
    """A layer on both ranks, forward and backward, and Megatron's own on this one, which sees both batches."""
    settings, said_sizes, _ = CASES[case]
    layer = spec_of(adapter, **said_sizes)(config=config_of(2, **settings), layer_number=1).to(here())
    weigh(layer, 2 * rank, case)
    before = steps()
    found = trained(layer, batch(case, rank).to(here()))
    found["experts"], found["steps"] = gradients_of(layer), steps() - before
    own = spec_of()(config=config_of(1, **settings), layer_number=1, pg_collection=groups_alone).to(here())
    weigh(own, 0, case)
    every, wanted, rows = [], {}, 0
    for source in range(2):
        each = trained(own, batch(case, source).to(here()))
        every.append(gradients_of(own)[4 * rank : 4 * rank + 4])
        rows = rows + each["rows"][2 * rank : 2 * rank + 2]
        wanted = each if source == rank else wanted
    wanted["rows"] = rows  # of both batches
    wanted["experts"] = [sum(pair) for pair in zip(*every, strict=True)]
    return {"found": found, "wanted": wanted, "dispatcher": type(layer.token_dispatcher).__name__}


def judge(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert isinstance(each, dict), each
        found, wanted = each["found"], each["wanted"]
        assert np.array_equal(found["rows"], wanted["rows"])
        assert found["steps"] == 4 and each["dispatcher"] == "Dispatcher"
        for name in ("out", "x", "router"):
            close(found[name], wanted[name])
        for one, other in zip(found["experts"], wanted["experts"], strict=True):
            close(one, other)


def close(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape and np.isfinite(found).all()
    assert np.abs(found - wanted).max(initial=0) <= within(CLOSE) * max(np.abs(wanted).max(initial=0), 1e-3)


# name: (text of megatron_layer.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ("hidden_states[:used], counts", "hidden_states[:used].roll(1, 0), counts", "equal"),
    "weights 2 % off": ("probs.gather(1, chosen)", "probs.gather(1, chosen) * 1.02", "equal"),
    "ids off by one rank": ("chosen.masked_fill(", "((chosen + 2) % 4).masked_fill(", "uneven"),
    "dropped tokens are kept": (
        "found == 0, -1)",
        "found < 0, -1)",
        "dropped tokens",
    ),
}


def mutant(old: str, new: str) -> Any:
    """What `through_tokenway` is of the adapter whose layer's source says `new` where it says `old`."""
    from tokenway.integrations import megatron, megatron_layer

    made = mutated(megatron_layer, old, new)

    def through_tokenway(spec: Any, **settings: Any) -> Any:
        spec = megatron.through_tokenway(spec, **settings)
        spec.module = made.TokenwayMoELayer
        return spec

    return types.SimpleNamespace(through_tokenway=through_tokenway)


def failing(adapter: Any, rank: int, experts: Any) -> Any:
    """Rank 1's experts do something else: what each is told, and how long it took."""
    layer = spec_of(adapter, max_tokens=MOST)(config=config_of(2), layer_number=1).to(here())
    weigh(layer, 2 * rank)
    kept = layer.experts.forward
    layer.experts.forward = kept if rank == 0 else lambda *args: experts(kept, *args)
    began = time.monotonic()
    told = attempt(trained, layer, batch("uneven", rank).to(here()))
    return told, time.monotonic() - began


def no_memory(*_: Any) -> Any:
    raise RuntimeError("no memory, say")


def a_row_less(kept: Any, *args: Any) -> Any:
    rows, bias = kept(*args)
    return rows[1:], bias


def a_row_more(kept: Any, *args: Any) -> Any:
    rows, bias = kept(*args)
    return rows.repeat(2, 1)[: len(rows) + 1], bias


# name: (what rank 1's experts do, what it is told)
FAILING: dict[str, tuple[Any, str, str]] = {
    "an error": (no_memory, "RuntimeError", "^no memory, say"),
    "a row less": (a_row_less, "InvalidArgument", r"^rows are \d+; they must be \d+, as many as experts were given"),
    "a row more": (a_row_more, "InvalidArgument", r"^rows are \d+; they must be \d+, as many as experts were given"),
}


def unlike(**settings: Any) -> Any:
    """A config with settings that Megatron refuses to combine with what a CPU can build."""
    config = config_of(2)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def built(adapter: Any, config: Any) -> str:
    """The class of a layer."""
    return type(spec_of(adapter)(config=config, layer_number=1)).__name__


def unsupported() -> dict[str, Any]:
    """Configs that a layer refuses, each with the beginning of the sentence."""
    from megatron.core.transformer.enums import CudaGraphScope

    asked, router = "^cuda_graph_impl is 'local', and cuda_graph_scope ", ["moe_router", "moe_preprocess"]
    moe, parts = [CudaGraphScope.attn, CudaGraphScope.moe], [CudaGraphScope[name] for name in router]
    return {
        "padding": (unlike(moe_pad_expert_input_to_capacity=True), "^moe_pad_expert_input_to_capacity must not be set"),
        "overlap": (unlike(overlap_moe_expert_parallel_comm=True), "^overlap_moe_expert_parallel_comm must not be set"),
        "delayed": (unlike(delay_wgrad_compute=True), "^delay_wgrad_compute must not be set"),
        "the layer": (unlike(cuda_graph_impl="local", cuda_graph_scope=[]), asked + r"\[\]; "),
        "its router": (unlike(cuda_graph_impl="local", cuda_graph_scope=parts), asked + rf"\{router}; "),
        "its experts": (unlike(cuda_graph_impl="local", cuda_graph_scope=moe), asked + r"\['attn', 'moe'\]; "),
        "as said before": (
            unlike(external_cuda_graph=True),
            r"^external_cuda_graph is True, and cuda_graph_scope \[\]",
        ),
    }


def rank_main(store: str) -> Any:
    import torch
    import torch.distributed as dist

    rank, device = begin(store, 2)
    if device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # where Megatron's router has its parameters: on the current device
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import CudaGraphScope
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a name that it looks up, and has only with Transformer Engine
    from tokenway.integrations import groups, megatron

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    of_one = alone()
    found: dict[str, Any] = {case: attempt(run_case, megatron, of_one, case, rank) for case in CASES}
    found["groups"] = [len(peers.groups) for peers in groups.living()]
    wrong = unsupported().items()
    found["unsupported"] = {name: (attempt(built, megatron, config), said_of) for name, (config, said_of) in wrong}
    graphed = unlike(cuda_graph_impl="local", cuda_graph_scope=[CudaGraphScope.attn])
    found["graphs of attention"] = attempt(built, megatron, graphed)
    found["refused"] = [attempt(megatron.through_tokenway, spec_of().submodules.experts)]
    unsaid = spec_of(megatron)(config=unlike(variable_seq_lengths=True), layer_number=1).to(device)
    found["refused"].append(attempt(unsaid, batch("uneven", rank).to(device)))
    many = spec_of(megatron, max_tokens=MOST)(config=config_of(2), layer_number=1).to(device)
    found["refused"].append(attempt(many, torch.zeros(MOST + rank, 1, HIDDEN, device=device)))
    for name, (experts, *_) in FAILING.items():
        found[name] = failing(megatron, rank, experts)
    found["after"] = attempt(run_case, megatron, of_one, "uneven", rank)
    for mutation, (old, new, case) in MUTATIONS.items():
        found[mutation] = attempt(run_case, mutant(old, new), of_one, case, rank)
    names: dict[str, Any] = {}
    (program,) = programs_of("Megatron")
    exec(program, names)
    layers = names["layers_of"](names["spec_of"](config_of(2)))
    found["guide"] = [spec.submodules.mlp.module.__name__ for spec in layers]
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    need_version("megatron-core", PINNED)
    need_devices()
    # Many parts, each of which may take its time; those that hang end by the timeouts within.
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("megatron") / "store"), timeout=6 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(ran, case) -> None:
    """As on one rank: outputs, and gradients of tokens, of the router and of all experts."""
    judge([found[case] for found in ran])


def test_one_group_serves_all(ran) -> None:
    assert all(found["groups"] == [1] for found in ran)


def test_what_is_refused(ran) -> None:
    for rank, found in enumerate(ran):
        for told, sentence in found["unsupported"].values():
            said(told, "Unsupported", sentence)
        assert found["graphs of attention"] == "TokenwayMoELayer"
        no_layer, unsaid, many = found["refused"]
        said(no_layer, "InvalidArgument", "^spec has no MoELayer")
        said(unsaid, "InvalidUsage", r"say how many a rank has at most.*through_tokenway\(spec, max_tokens")
        said(many, *(("InvalidArgument", "^tokens are 25; at most 24") if rank == 1 else ("PeerRefused", "rank 1")))


@pytest.mark.parametrize("experts", FAILING)
def test_a_rank_whose_experts_fail(ran, experts) -> None:
    """Or give other rows than they were given: it is told, as its peers are at once; the next pass is right."""
    (first, took), (second, _) = (found[experts] for found in ran)
    said(second, *FAILING[experts][1:])
    said(first, "PeerRefused", "rank 1")
    assert took < AT_ONCE
    judge([found["after"] for found in ran])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)


def test_the_guide(ran) -> None:
    """Its program puts Tokenway into each layer of a block."""
    assert all(found["guide"] == ["TokenwayMoELayer"] for found in ran)
