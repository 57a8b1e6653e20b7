"""Experts that are trained go where plans from elsewhere have them: at the border where ranks ask for one, bit for bit
as in one process all the while."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
from test_balance_training import EXPERTS, LAYERS, TENSORS, all_alike, first_map, make_group, trained

from tokenway import balance

pytestmark = pytest.mark.needs("memory in common")

Given = dict[int, np.ndarray]  # by the step before which rank 0 is given it


def turned(ranks: int, by: int) -> np.ndarray:
    """A plan [layers, slots in use]: experts in order from another one on."""
    slots = ranks * (-(-EXPERTS // ranks) + 2)
    return np.stack([(np.arange(slots) + by + layer) % EXPERTS for layer in range(LAYERS)])


def held(maps: np.ndarray, ranks: int) -> list[Any]:
    """The experts of each rank, sorted, by layer."""
    return np.sort(maps.reshape(LAYERS, ranks, -1), axis=2).tolist()


def followed(env: Any, steps: int, given: Given, options: dict[str, Any]) -> Any:
    """(what `trained` gives, the experts that ranks have before each step's border)"""
    seen: list[Any] = []

    def beside(balancer: balance.TrainingBalancer, step: int) -> None:
        seen.append(held(balancer.slot_maps().physical_to_logical, env.nranks))
        if step in given:
            balancer.follow(given[step] if env.rank == 0 else "what nobody looks at")

    return trained(env, steps, {}, options, beside), seen


def run(world: Any, steps: int, given: Given, options: dict[str, Any]) -> Any:
    """(statistics, the experts that ranks have before each step's border) of ranks that agree on them."""
    ranks = min(2, world.most)
    found = world(ranks).run(followed, steps, given, options)
    assert all(seen == found[0][1] for _, seen in found)
    return all_alike([each for each, _ in found])[0], found[0][1]


@pytest.mark.parametrize(
    ("options", "given", "taken"),
    [
        ({"every": None}, 0, 0),
        ({"every": None}, 3, 3),
        ({"every": 4, "paused": True}, 1, 4),
        ({"every": 4, "paused": True}, 4, 4),
        ({"every": 4}, 4, 4),  # in place of the plan that was begun behind step 3
    ],
    ids=str,
)
def test_a_plan_that_is_given(world, options, given, taken) -> None:
    """All experts are where it has them behind the first border at which ranks ask, and not before."""
    plan = turned(min(2, world.most), 4)
    statistics, seen = run(world, 7, {given: plan}, options)
    want = held(plan, min(2, world.most))
    assert [each == want for each in seen] == [step > taken for step in range(7)]
    assert statistics.plans == 1 and statistics.voids == 0


def test_plans_that_are_given_meanwhile(world) -> None:
    """Of those that are given while a plan is under way the last comes behind it."""
    if world.most < 2:
        pytest.skip("a plan of many epochs needs two ranks")
    first = np.array([[4, 5, 6, 7, 4, 5, 0, 1, 2, 3, 0, 1]] * LAYERS)  # each rank gets four experts, one at a time
    unseen, last = turned(2, 2), turned(2, 3)
    statistics, seen = run(world, 14, {2: first, 3: unseen, 4: last}, {"every": None, "step_bytes": 1})
    wants = [held(plan, 2) for plan in (first, unseen, last)]
    assert wants[0] in seen and wants[1] not in seen and seen[-1] == wants[2]
    assert statistics.plans == 2 and seen.index(wants[0]) > 4


def refused(env: Any) -> Any:
    """What rank 0 hears of plans that cannot be, and what comes of one that can."""
    heard: list[Any] = []

    def beside(balancer: balance.TrainingBalancer, step: int) -> None:
        if step < 2 and env.rank == 0:
            plan = turned(env.nranks, 4)
            heard.append(harness.caught(balancer.follow, plan[:, :-1] if step else np.zeros_like(plan)))
        if step == 3:
            balancer.follow(turned(env.nranks, 4))

    return trained(env, 5, {}, {"every": None}, beside), heard


def test_plans_that_are_refused(world) -> None:
    """Nothing has changed then, and the next one is taken."""
    found = world(min(2, world.most)).run(refused)
    statistics, _, _ = all_alike([each for each, _ in found])
    assert statistics.plans == 1 and [len(heard) for _, heard in found] == [2] + [0] * (len(found) - 1)
    for heard in found[0][1]:
        harness.said(heard, "twInvalidArgument", "physical_to_logical")


def apart(env: Any) -> Any:
    """What a rank hears that sees no peer's memory."""
    with make_group(env, first_map(env.nranks, 7), TENSORS) as group:
        weights = balance.Weights(group, TENSORS)
        heard = harness.caught(balance.TrainingBalancer, group, weights)
        weights.close()
        return heard


REFUSAL = "some ranks of the group have no memory in common, so experts cannot be trained in replicas"


@pytest.mark.torch
def test_over_a_carrier(torch) -> None:
    """Nobody could sum there."""
    for heard in harness.Threads("torch", 2).run(apart):
        harness.said(heard, "twUnsupported", REFUSAL)


def test_between_hosts(fabric) -> None:
    """Nor there, on none of the ranks, whatever they have in common with some."""
    for heard in harness.Threads("fabric", 3).run(apart):  # of two hosts
        harness.said(heard, "twUnsupported", REFUSAL)
