"""Shared experts of Megatron's that compute beside Tokenway's exchange (`moe_shared_expert_overlap`), over two ranks,
against Megatron's own layer on one."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import assert_caught, attempt, here, steps
from megatron_ranks import (
    MOST,
    Case,
    batch,
    begin_megatron,
    finish,
    judge,
    judge_failure,
    layer_of,
    run_case,
    timed,
    trained,
    two_ranks,
)

pytestmark = [pytest.mark.torch, pytest.mark.processes]

OVERLAPPED = {
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_overlap": True,
    "moe_token_dispatcher_type": "alltoall",
}
AFTER = {"moe_shared_expert_overlap": False}
GATED = OVERLAPPED | {"moe_shared_expert_gate": True}
CASES = {
    "equal": Case(OVERLAPPED),
    "with a gate": Case(GATED),
    "without overlap": Case(OVERLAPPED | AFTER, own=AFTER),
    "against none": Case(OVERLAPPED, own=AFTER),
    "uneven": Case(OVERLAPPED, {"max_tokens": MOST}, ((6, 3), (1, 2))),
    "no tokens on rank 1": Case(GATED, {"max_tokens": MOST}, ((6, 3), (0, 2))),
    "nothing for rank 0": Case(OVERLAPPED, {"max_tokens": MOST}, ((4, 2), (1, 1)), unchosen=True),
    "dropped tokens": Case(OVERLAPPED | {"moe_expert_capacity_factor": 0.5}, sizes=((8, 2), (8, 2))),
}
# Parts of shared experts, each with the steps of Tokenway's that were made before it: the dispatch, and the combine.
ORDER = [
    ("pre_forward_comm", 0),
    ("linear_fc1_forward_and_act", 1),
    ("linear_fc2_forward", 2),
    ("post_forward_comm", 2),
    ("get_output", 2),
]
OUTPUT, SEEN = "+ self.shared_experts.get_output()", "pre_forward_comm(hidden_states)"
# name: (text of megatron_layer.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ("hidden_states[:used], counts", "hidden_states[:used].roll(1, 0), counts", "equal"),
    "shared experts are left out": (OUTPUT, OUTPUT.replace("+", "+ 0 *"), "equal"),
    "shared experts 2 % off": (OUTPUT, OUTPUT.replace("+", "+ 1.02 *"), "uneven"),
    "they see other tokens": (SEEN, SEEN.replace("states)", "states.roll(1, 0))"), "with a gate"),
    "ids off by one rank": ("chosen.masked_fill(", "((chosen + 2) % 4).masked_fill(", "uneven"),
}


def order_of(adapter: Any, rank: int) -> list[tuple[str, int]]:
    """Which parts of shared experts a forward pass calls."""
    layer, told = layer_of(adapter, CASES["equal"], rank), []
    before = steps()

    def noted(name: str, kept: Any) -> Any:
        def call(*args: Any) -> Any:
            told.append((name, steps() - before))
            return kept(*args)

        return call

    for name, _ in ORDER:
        setattr(layer.shared_experts, name, noted(name, getattr(layer.shared_experts, name)))
    layer(batch(CASES["equal"], rank).to(here()))
    return told


def failing(adapter: Any, rank: int, part: str) -> Any:
    """A part of rank 1's shared experts raises: what each rank is told, and how long it took."""
    layer = layer_of(adapter, CASES["uneven"], rank)
    if rank == 1:

        def no_memory(*_: Any) -> None:
            raise RuntimeError("no memory, say")

        setattr(layer.shared_experts, part, no_memory)
    return timed(trained, layer, batch(CASES["uneven"], rank).to(here()))


def rank_main(store: str) -> dict[str, Any]:

    rank, of_one = begin_megatron(store)
    from tokenway.integrations import megatron

    found: dict[str, Any] = {name: attempt(run_case, megatron, of_one, case, rank) for name, case in CASES.items()}
    found["order"] = attempt(order_of, megatron, rank)
    found["failed"] = failing(megatron, rank, "linear_fc1_forward_and_act")
    found["after"] = attempt(run_case, megatron, of_one, CASES["uneven"], rank)
    return finish(found, MUTATIONS, lambda adapter, case: run_case(adapter, of_one, CASES[case], rank))


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return two_ranks(rank_main, tmp_path_factory, "shared")


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(ran, case) -> None:
    """As on one rank: outputs, and gradients of tokens, of the router, and of all experts, shared ones too."""
    judge([found[case] for found in ran])
    assert sum(name.startswith("shared") for name in ran[0][case]["found"]) == (
        3 if CASES[case].settings is GATED else 2
    )


def test_the_order_of_parts(ran) -> None:
    """Beside the exchange, and not before or behind it."""
    assert all(found["order"] == ORDER for found in ran)


def test_a_rank_whose_shared_experts_fail(ran) -> None:
    """It is told, as its peers are at once; the next pass is right."""
    judge_failure(ran, "failed", "RuntimeError", "^no memory, say")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)
