"""vLLM's expert-parallel load balancer by Tokenway's: experts of its own layers move while they run, on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from frameworks import assert_caught, check_maps, framework_apart
from harness import HANGS, said
from test_vllm import PINNED
from vllm_eplb_ranks import CASES, EXPERTS, LAST, LAYERS, SLOTS, STEPS, rank_main

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

# name: (text of vllm_eplb.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "routers choose physical experts": ("layer.router.eplb_state = None", "assert layer.router", "batched"),
    "all layers go by one map": ("each.follow(made[0], index)", "each.follow(made[0], 0)", "slots"),
    "vLLM is not told of maps": ("eplb_state._commit_eplb_maps_for_layer(", "(lambda *_: None)(", "batched"),
    "experts stay where they were loaded": (
        "eplb_state.rearrange_expert_weights_inplace(loaded", "(lambda *_: None)(loaded", "slots",
    ),
}  # fmt: skip
RAISES = {"routers choose physical experts"}  # ids that are no expert's

apart = framework_apart({"vllm": PINNED})


@pytest.fixture(scope="module")
def ran(apart: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    store = str(tmp_path_factory.mktemp("vllm_eplb") / "store")
    return tw.run(rank_main, 2, store, list(CASES), MUTATIONS, timeout=6 * HANGS)


def judge(case: dict[str, Any], ranks: list[Any]) -> None:
    """Results are exact in every step, experts have moved, and vLLM knows where they are."""
    for found in ranks:
        assert isinstance(found, dict), found
        assert not found["wrong"]
        assert found["statistics"].voids == 0 and found["statistics"].plans > 0 and found["statistics"].moves > 0
        assert found["statistics"].steps == STEPS + LAST and found["idle"]
        assert found["changes"] > 0 and found["steps"] == 2 * LAYERS * (STEPS + LAST)
        assert found["tables"] == ranks[0]["tables"] == found["physical"]
        assert found["shared"] == [True] * LAYERS
    check_maps(ranks, EXPERTS, SLOTS)


@pytest.mark.parametrize("case", CASES)
def test_experts_move(ran, case) -> None:
    """Through vLLM's layers and EplbState, whoever plans: as one rank that has all experts, bit for bit."""
    judge(CASES[case], [found[case] for found in ran])


def test_plans_are_those_of_the_policy(ran) -> None:
    """vLLM's own, and others than Tokenway's: its policy places all replicas anew."""
    ours, theirs = (ran[0][name] for name in ("batched", "batched, vLLM's policy"))
    assert not np.array_equal(ours["tables"], theirs["tables"])
    assert theirs["statistics"].moves > ours["statistics"].moves


def test_what_is_refused(ran) -> None:
    """On all ranks alike, before anything is asked of the others."""
    for found in ran:
        told = found["refused"]
        said(told["slots"], "Unsupported", r"^num_redundant_experts is 0, for 6 experts on 2 ranks; it must be 2,")
        said(told["elastic"], "Unsupported", "^enable_elastic_ep is True")
        said(told["variable"], "InvalidArgument", "^TOKENWAY_BALANCE is 'yes'; it must be")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """A hook that is wrong fails the test of its case."""
    judged = partial(judge, CASES[MUTATIONS[mutation][2]])
    assert_caught([found[mutation] for found in ran], judged, mutation in RAISES)
