"""Gradients and the layer in groups of both modes: what chooses, and that each way gives what one process gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness import Env, caught, said
from test_autograd import CASES, Case, differences, group_of, leaves, train
from test_nn import CASES as LAYERS
from test_nn import compare, run_layer

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LAYOUTS = ("rank_major", "flat", "grouped", "grouped_by_bound")


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def auto(most: int) -> tuple[tuple[str, Any], ...]:
    return (("mode", "auto"), ("low_latency_tokens", most))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_gradients(processes, case, layout) -> None:
    case = replace(case, layout=layout, room=auto(max(case.sizes)))
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-6, found


@pytest.mark.parametrize("bound", [None, 12, 18])
@pytest.mark.parametrize(("settings", "sizes", "normalize"), LAYERS[1:3], ids=str)
def test_layer(processes, settings, sizes, normalize, bound) -> None:
    """With a bound that is large enough, and small enough for low latency, or not."""
    most = 6 * max(sizes)
    settings = settings | {"max_tokens": 18, "mode": "auto", "low_latency_tokens": most}
    bound = bound and max(bound, most)
    found = processes(len(sizes)).run(run_layer, settings, sizes, "float32", normalize, None, bound)
    apart_by = compare(found, settings, sizes, "float32", normalize)
    assert max(apart_by.values()) < 1e-5, apart_by


def choose(env: Env, case: Case) -> list[Any]:
    """The layouts that bounds have chosen; then what a mistake of rank 1 tells, in each mode."""
    from tokenway import autograd

    found: list[Any] = []
    wrong = env.rank == 1
    with group_of(env, case) as group:
        x, weights, ids, _, _ = leaves(env, group, case)
        call = (ids[0], weights[0])
        for bound in (4, 5, None):
            routed = autograd.dispatch(group, x, *call, bound=bound)
            autograd.combine(routed, routed.tokens).sum().backward()
            found.append(routed.layout)
        rows = x.double() if wrong else x
        for given in ({"bound": 4}, {"bound": 5}, {"layout": "grouped"}):
            found.append(caught(autograd.dispatch, group, rows, *call, **given))
            routed = autograd.dispatch(group, x, *call, **given)
            autograd.combine(routed, routed.tokens).sum().backward()  # the group goes on
    return found


def test_a_bound_chooses(processes) -> None:
    others, mistaken = processes(2).run(choose, Case(4, 2, (4, 3), room=auto(4)))
    assert others[:3] == mistaken[:3] == ["rank_major", "flat", "flat"]
    for told, own in zip(others[3:], mistaken[3:], strict=True):
        said(own, "twInvalidArgument", "dtype float64")
        said(told, "twPeerRefused", "rank 1 refused its arguments")
