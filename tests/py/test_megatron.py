"""Megatron's MoE layer whose experts two ranks share through Tokenway, against its own layer on one rank."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import assert_caught, attempt, here, programs_of
from harness import said
from megatron_ranks import (
    HIDDEN,
    MOST,
    Case,
    batch,
    begin_megatron,
    config_of,
    failing,
    finish,
    judge,
    judge_failure,
    run_case,
    spec_of,
    two_ranks,
)

pytestmark = [pytest.mark.torch, pytest.mark.processes]

CASES = {
    "equal": Case(),
    "longer": Case(sizes=((300, 2), (300, 2))),
    "uneven": Case(said={"max_tokens": MOST}, sizes=((6, 3), (1, 2))),
    "no tokens on rank 1": Case(said={"max_tokens": MOST}, sizes=((6, 3), (0, 2))),
    "nothing for rank 0": Case(said={"max_tokens": MOST}, sizes=((4, 2), (1, 1)), unchosen=True),
    "said to be equal": Case(said={"equal": True}, sizes=((3, 1), (3, 1))),
    "dropped tokens": Case({"moe_expert_capacity_factor": 0.5}, sizes=((8, 2), (8, 2))),
    "sigmoid scores": Case({"moe_router_score_function": "sigmoid"}),
}


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

    asked, moe = "^cuda_graph_impl is 'local', and cuda_graph_scope ", [CudaGraphScope.attn, CudaGraphScope.moe]
    quantised = "moe_router_padding_for_quantization"
    whole = [CudaGraphScope.full_iteration]
    return {
        "padding": (unlike(**{quantised: True}), f"^{quantised} must not be set"),
        "overlap": (unlike(overlap_moe_expert_parallel_comm=True), "^overlap_moe_expert_parallel_comm must not be set"),
        "delayed": (unlike(delay_wgrad_compute=True), "^delay_wgrad_compute must not be set"),
        "the layer": (unlike(cuda_graph_impl="local", cuda_graph_scope=[]), asked + r"\[\]; "),
        "all": (unlike(cuda_graph_impl="local", cuda_graph_scope=whole), asked + r"\['full_iteration'\]; "),
        "its experts": (unlike(cuda_graph_impl="local", cuda_graph_scope=moe), asked + r"\['attn', 'moe'\]; "),
        "as said before": (
            unlike(external_cuda_graph=True),
            r"^external_cuda_graph is True, and cuda_graph_scope \[\]",
        ),
    }


def graphed() -> dict[str, Any]:
    """Configs with CUDA graphs that a layer does not refuse."""
    from megatron.core.transformer.enums import CudaGraphScope

    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    parts = {
        "attention": [CudaGraphScope.attn],
        "its router": [CudaGraphScope.moe_router, CudaGraphScope.moe_preprocess],
    }
    fixed = {"the layer": [], "its experts": [CudaGraphScope.moe], "all": [CudaGraphScope.full_iteration]}
    found = {name: unlike(cuda_graph_impl="local", cuda_graph_scope=scope) for name, scope in parts.items()}
    for name, scope in fixed.items():
        found[name] = unlike(cuda_graph_impl="local", cuda_graph_scope=scope, **padded)
    return found


def rank_main(store: str) -> Any:
    import torch

    rank, of_one = begin_megatron(store)
    device = here()
    from tokenway.integrations import groups, megatron

    found: dict[str, Any] = {name: attempt(run_case, megatron, of_one, case, rank) for name, case in CASES.items()}
    found["groups"] = [len(peers.groups) for peers in groups.living()]
    wrong = unsupported().items()
    found["unsupported"] = {name: (attempt(built, megatron, config), said_of) for name, (config, said_of) in wrong}
    found["graphed"] = {name: attempt(built, megatron, config) for name, config in graphed().items()}
    found["refused"] = [attempt(megatron.through_tokenway, spec_of().submodules.experts)]
    unsaid = spec_of(megatron)(config=unlike(variable_seq_lengths=True), layer_number=1).to(device)
    found["refused"].append(attempt(unsaid, batch(CASES["uneven"], rank).to(device)))
    many = spec_of(megatron, max_tokens=MOST)(config=config_of(2), layer_number=1).to(device)
    found["refused"].append(attempt(many, torch.zeros(MOST + rank, 1, HIDDEN, device=device)))
    for name, (experts, *_) in FAILING.items():
        found[name] = failing(megatron, CASES["uneven"], rank, experts)
    found["after"] = attempt(run_case, megatron, of_one, CASES["uneven"], rank)
    names: dict[str, Any] = {}
    (program,) = programs_of("Megatron")
    exec(program, names)
    layers = names["layers_of"](names["spec_of"](config_of(2)))
    found["guide"] = [spec.submodules.mlp.module.__name__ for spec in layers]
    return finish(found, MUTATIONS, lambda adapter, case: run_case(adapter, of_one, CASES[case], rank))


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return two_ranks(rank_main, tmp_path_factory, "megatron")


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
        assert found["graphed"] == dict.fromkeys(found["graphed"], "TokenwayMoELayer") and len(found["graphed"]) == 5
        no_layer, unsaid, many = found["refused"]
        said(no_layer, "InvalidArgument", "^spec has no MoELayer")
        said(unsaid, "InvalidUsage", r"say how many a rank has at most.*through_tokenway\(spec, max_tokens")
        said(many, *(("InvalidArgument", "^tokens are 25; at most 24") if rank == 1 else ("PeerRefused", "rank 1")))


@pytest.mark.parametrize("experts", FAILING)
def test_a_rank_whose_experts_fail(ran, experts) -> None:
    """Or give other rows than they were given: it is told, as its peers are at once; the next pass is right."""
    judge_failure(ran, experts, *FAILING[experts][1:])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)


def test_the_guide(ran) -> None:
    """Its program puts Tokenway into each layer of a block."""
    assert all(found["guide"] == ["TokenwayMoELayer"] for found in ran)
