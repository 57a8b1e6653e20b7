"""Megatron's own flex dispatcher, unchanged, whose deep_ep is Tokenway: two ranks against Megatron on one."""

from __future__ import annotations

import sys
from typing import Any

import megatron_ranks
import pytest
from deep_ep_ranks import attempt, begin, end
from frameworks import assert_caught, mutated, need_devices, need_version, steps
from harness import HANGS
from megatron_ranks import PINNED, Case, alone, batch, config_of, gradients_of, spec_of, trained, wanted_of, weigh

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

# A dispatch and a combine, their backward passes, and the sum of the weights' gradients.
STEPS = 5
CASES = {
    "equal": Case(),
    "uneven": Case(sizes=((6, 3), (1, 2))),
    "more than there is room for": Case(sizes=((4, 1), (400, 2))),
    "nothing for rank 0": Case(sizes=((4, 2), (1, 1)), unchosen=True),
    "dropped tokens": Case({"moe_expert_capacity_factor": 0.5}, sizes=((8, 2), (8, 2))),
    "sigmoid scores": Case({"moe_router_score_function": "sigmoid"}),
}


def run_case(of_one: Any, device: Any, case: str, rank: int) -> dict[str, Any]:
    """A layer on both ranks, forward and backward, and Megatron's own on this one, which sees both batches."""
    config = config_of(2, **CASES[case].settings)
    config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", "deepep"
    layer = spec_of()(config=config, layer_number=1).to(device)
    weigh(layer, 2 * rank, CASES[case].unchosen)
    before = steps()
    found = trained(layer, batch(CASES[case], rank).to(device))
    found["experts"], found["steps"] = gradients_of(layer), steps() - before
    wanted = wanted_of(of_one, CASES[case], rank) | {"steps": STEPS}
    return {"found": found, "wanted": wanted, "dispatcher": type(layer.token_dispatcher).__name__}


def judge(ranks: list[dict[str, Any]]) -> None:
    megatron_ranks.judge(ranks, "MoEFlexTokenDispatcher")


# name: (text of normal.py, what a later hand may make of it)
MUTATIONS = {
    "a row off by one": ('return whole["tokens"], ', 'return whole["tokens"].roll(1, 0), '),
    "weights 2 % off": ('whole["ids"] < 0, 0)', 'whole["ids"] < 0, 0).mul_(1.02)'),
    "ids off by one rank": ("view.route(ids, weights,", "view.route((ids + 2) % 4, weights,"),
    "gradients of weights 2 % off": ("return out, beside.combine(", "return out, 1.02 * beside.combine("),
}


def mutant(of_one: Any, device: Any, name: str, rank: int) -> Any:
    """A case through an exchange whose source says something else."""
    from tokenway.compat.deep_ep import normal, ranks

    kept, ranks.Normal = ranks.Normal, mutated(normal, *MUTATIONS[name]).Normal
    try:
        return attempt(run_case, of_one, device, "equal", rank)
    finally:
        ranks.Normal = kept


def rank_main(store: str) -> dict[str, Any]:
    import torch

    rank, device = begin(store, 2)
    if device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # where Megatron's router has its parameters: on the current device
    from tokenway.compat import deep_ep

    deep_ep.install()  # before Megatron, which asks for it once
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a name that it looks up, and has only with Transformer Engine
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    of_one = alone()
    found: dict[str, Any] = {case: attempt(run_case, of_one, device, case, rank) for case in CASES}
    for name in MUTATIONS:
        found[name] = mutant(of_one, device, name, rank)
    found["module"] = sys.modules["megatron.core.transformer.moe.fused_a2a"].Buffer.__module__
    end()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    need_version("megatron-core", PINNED)
    need_devices()
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("flex") / "store"), timeout=4 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(ran, case) -> None:
    """As on one rank: outputs, and gradients of tokens, of the router and of all experts; by Tokenway's steps."""
    judge([found[case] for found in ran])
    assert all(found["module"] == "tokenway.compat.deep_ep.buffer" for found in ran)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An exchange that is wrong fails the tests."""
    assert_caught([found[mutation] for found in ran], judge)
