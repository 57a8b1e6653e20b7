"""Megatron's layers whose experts are given a fixed number of rows (`moe_pad_expert_input_to_capacity`), over two ranks
through Tokenway, against Megatron's own layer on one."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import assert_caught, attempt, here
from harness import AT_ONCE, said
from megatron_ranks import (
    MOST,
    Case,
    batch,
    begin_megatron,
    failing,
    finish,
    judge,
    judge_failure,
    layer_of,
    run_case,
    timed,
    trained,
    two_ranks,
)
from test_megatron import FAILING
from test_megatron_shared import GATED

pytestmark = [pytest.mark.torch, pytest.mark.processes]

ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
SAID = {"max_tokens": MOST}


def padded(factor: float, **settings: Any) -> dict[str, Any]:
    """Of Megatron: with 4 experts and 2 choices a token, an expert takes factor / 2 of a rank's tokens."""
    return {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": True} | settings


CASES = {
    "equal": Case(padded(1.0)),
    "room for half": Case(padded(0.5), sizes=((8, 2), (8, 2))),
    "room for more": Case(padded(1.5)),
    "room for all": Case(padded(2.0)),
    "room for more than all": Case(padded(3.0)),
    "against its all-to-all": Case(padded(0.75, **ALL_TO_ALL), sizes=((8, 2), (8, 2))),
    "by position": Case(padded(0.5, moe_token_drop_policy="position"), sizes=((8, 2), (8, 2))),
    "by position, its all-to-all": Case(padded(0.75, moe_token_drop_policy="position", **ALL_TO_ALL)),
    "sigmoid scores": Case(padded(1.0, moe_router_score_function="sigmoid")),
    "longer": Case(padded(1.25), sizes=((300, 2), (300, 2))),
    "equal and said": Case(padded(1.0), {"max_tokens": MOST, "equal": True}),
    # Megatron's capacity follows from a rank's own tokens; where these differ, from the most that were said.
    "uneven": Case(padded(1.0), SAID, ((6, 3), (1, 2)), rows=MOST),
    "no tokens on rank 1": Case(padded(1.0), SAID, ((6, 3), (0, 2)), rows=MOST),
    "nothing for rank 0": Case(padded(1.0), SAID, ((4, 2), (1, 1)), rows=MOST, unchosen=True),
    "with shared experts": Case(padded(1.0, **GATED)),
}
ROWS = "return self._padded.rows, counts, self._padded.weights"
# name: (text of megatron_layer.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": (ROWS, ROWS.replace(".rows", ".rows.roll(1, 0)"), "equal"),
    "weights 2 % off": ("probs.gather(1, chosen)", "probs.gather(1, chosen) * 1.02", "uneven"),
    "ids off by one rank": ("chosen.masked_fill(", "((chosen + 2) % 4).masked_fill(", "equal"),
    "rows of nothing go out": ("routing_map & (probs != 0)", "routing_map", "room for all"),
    "a place less": ("self.config.num_moe_experts, factor), tokens)", "8, factor), tokens)", "room for more"),
}


def rank_main(store: str) -> dict[str, Any]:

    rank, of_one = begin_megatron(store)
    from tokenway.integrations import groups, megatron

    found: dict[str, Any] = {name: attempt(run_case, megatron, of_one, case, rank) for name, case in CASES.items()}
    found["modes"] = [each.settings["mode"] for peers in groups.living() for each in peers.groups.values()]
    unlike = Case(padded(1.0), {"equal": True}, ((3, 1), (4, 1)))  # both fit, so nobody must grow
    found["unlike"] = timed(trained, layer_of(megatron, unlike, rank), batch(unlike, rank).to(here()))
    for name, (experts, *_) in FAILING.items():
        found[name] = failing(megatron, CASES["uneven"], rank, experts)
    found["after"] = attempt(run_case, megatron, of_one, CASES["uneven"], rank)
    return finish(found, MUTATIONS, lambda adapter, case: run_case(adapter, of_one, CASES[case], rank))


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return two_ranks(rank_main, tmp_path_factory, "capacity")


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(ran, case) -> None:
    """As on one rank: how many rows experts are given, outputs, and gradients of tokens, router and experts."""
    judge([found[case] for found in ran])


def test_no_counts_are_exchanged(ran) -> None:
    """A group of low latency has no exchange of counts, on which the host would wait."""
    assert all(found["modes"] == ["low_latency"] for found in ran)


def test_ranks_said_to_be_equal_that_are_not(ran) -> None:
    for told, took in (found["unlike"] for found in ran):
        said(told, "BoundMismatch", "bound")
        assert took < AT_ONCE


@pytest.mark.parametrize("experts", FAILING)
def test_a_rank_whose_experts_fail(ran, experts) -> None:
    """Or give other rows than they were given: it is told, as its peers are at once; the next pass is right."""
    judge_failure(ran, experts, *FAILING[experts][1:])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)
