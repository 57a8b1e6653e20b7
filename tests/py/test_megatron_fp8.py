"""Megatron's layers whose rows travel as fp8 (`through_tokenway(spec, fp8_rows=True)`), over two ranks, against
Megatron's own layer on one, whose experts are given rows that were quantised once."""

from __future__ import annotations

from typing import Any

import megatron_ranks
import numpy as np
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
    timed,
    trained,
    two_ranks,
)
from test_megatron import FAILING
from test_megatron_capacity import SAID, padded
from test_megatron_shared import GATED

pytestmark = [pytest.mark.torch, pytest.mark.processes]

FP8 = {"fp8_rows": True}
WIDE = {"hidden_size": 160}  # a block of 128 elements, and one of 32
CASES = {
    "equal": Case(said=FP8),
    "two blocks": Case(WIDE, FP8),
    "longer": Case(said=FP8, sizes=((300, 2), (300, 2))),
    "uneven": Case(WIDE, FP8 | SAID, ((6, 3), (1, 2))),
    "no tokens on rank 1": Case(said=FP8 | SAID, sizes=((6, 3), (0, 2))),
    "nothing for rank 0": Case(said=FP8 | SAID, sizes=((4, 2), (1, 1)), unchosen=True),
    "dropped tokens": Case({"moe_expert_capacity_factor": 0.5}, FP8, ((8, 2), (8, 2))),
    "a fixed capacity": Case(padded(0.5, **WIDE), FP8, ((8, 2), (8, 2))),
    "a fixed capacity, uneven": Case(padded(1.0), FP8 | SAID, ((6, 3), (1, 2)), rows=MOST),
    "with shared experts": Case(GATED, FP8),
}
ROWS = "return hidden_states[:used], counts"
# name: (text of megatron_layer.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": (ROWS, ROWS.replace("used]", "used].roll(1, 0)"), "equal"),
    "weights 2 % off": ("probs.gather(1, chosen)", "probs.gather(1, chosen) * 1.02", "uneven"),
    "ids off by one rank": ("chosen.masked_fill(", "((chosen + 2) % 4).masked_fill(", "equal"),
    "rows travel as they are": ("self._sizes, _HOW, self._fp8_rows)", "self._sizes, _HOW)", "two blocks"),
    "so do those of a fixed capacity": (
        "self._sizes, _HOW, self._fp8_rows)",
        "self._sizes, _HOW)",
        "a fixed capacity",
    ),
}


def made() -> dict[str, int]:
    """Steps of Tokenway's so far, by the dtype of their rows."""
    from tokenway.integrations import groups

    found: dict[str, int] = {}
    for shared in (each for peers in groups.living() for each in peers.groups.values()):
        for view in shared._views.values():
            found[view.dtype] = found.get(view.dtype, 0) + view.steps
    return found


def run_case(adapter: Any, of_one: Any, case: Case, rank: int) -> dict[str, Any]:
    """As that of `megatron_ranks`; and how many steps had rows of which dtype."""
    before = made()
    found = megatron_ranks.run_case(adapter, of_one, case, rank)
    counts = {dtype: count - before.get(dtype, 0) for dtype, count in made().items()}
    return found | {"made": {dtype: count for dtype, count in counts.items() if count}}


def too_many(adapter: Any, case: Case, rank: int) -> Any:
    """Rank 1 has more tokens than were said."""
    layer = layer_of(adapter, case, rank)
    return timed(trained, layer, batch(Case(case.settings, sizes=((MOST, 1), (MOST + 1, 1))), rank).to(here()))


def rank_main(store: str) -> dict[str, Any]:

    rank, of_one = begin_megatron(store)
    from tokenway.integrations import megatron

    found: dict[str, Any] = {name: attempt(run_case, megatron, of_one, case, rank) for name, case in CASES.items()}
    found["exact"] = megatron_ranks.run_case(megatron, of_one, Case(), rank)["found"]["out"]
    for name, (experts, *_) in FAILING.items():
        found[name] = failing(megatron, CASES["uneven"], rank, experts)
    found["many"] = [too_many(megatron, CASES[name], rank) for name in ("uneven", "a fixed capacity, uneven")]
    found["after"] = attempt(run_case, megatron, of_one, CASES["uneven"], rank)
    found["unknown"] = attempt(layer_of, megatron, Case(said={"fp8_rows": "e4m3"}), rank)
    return finish(found, MUTATIONS, lambda adapter, case: run_case(adapter, of_one, CASES[case], rank))


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return two_ranks(rank_main, tmp_path_factory, "megatron_fp8")


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(ran, case) -> None:
    """As on one rank whose experts are given quantised rows. The dispatches of both forward passes are of fp8 rows;
    what returns, and the steps of the backward pass, are of the dtype that is trained in."""
    judge([found[case] for found in ran])
    assert all(found[case]["made"] == {"float8_e4m3fn": 2, "float32": 4} for found in ran)


@pytest.mark.parametrize("experts", FAILING)
def test_a_rank_whose_experts_fail(ran, experts) -> None:
    """Or give other rows than they were given: it is told, as its peers are at once; the next pass is right."""
    judge_failure(ran, experts, *FAILING[experts][1:])


def test_more_tokens_than_were_said(ran) -> None:
    """The rank is told, and its peers at once, though rows are of another type than the group's own."""
    for (first, took), (second, _) in zip(*(found["many"] for found in ran), strict=True):
        said(second, "InvalidArgument", "^tokens are 25; at most 24")
        said(first, "PeerRefused", "rank 1")
        assert took < AT_ONCE


def test_what_is_no_answer(ran) -> None:
    for found in ran:
        said(found["unknown"], "InvalidArgument", "^fp8_rows is 'e4m3'; it must be True or False")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)


def test_fp8_is_not_far_from_what_it_rounds(ran) -> None:
    """Rows lose some of their bits, and no more."""
    exact, rounded = ran[0]["exact"], ran[0]["equal"]["found"]["out"]
    assert 1e-3 < np.linalg.norm(exact - rounded) / np.linalg.norm(exact) < 0.1
