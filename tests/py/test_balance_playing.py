"""Loads that are played through balancers: what a real group of ranks does by the same choices, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokenway import balance
from tokenway.balance import world
from tokenway.bench import balancing
from tokenway.errors import InvalidArgument

Array = np.ndarray
SMALL = balancing.Load("drifting", windows=6, steps=16, layers=2, tokens=128, seed=1)


@pytest.mark.parametrize(
    ("load", "options"),
    [
        (SMALL, {"writes": 4}),
        (replace(SMALL, policy="round_robin", seed=2), {"writes": 8, "gain": 0.0}),
        # A move takes three steps, and plans follow each other without a pause.
        (replace(SMALL, kind="domains", step_bytes=100_000, windows=8), {"every": 1, "writes": 16}),
        (replace(SMALL, ranks=3, experts=12, slots=5, top_k=1, layers=1, windows=8), {"every": 5}),
    ],
)
def test_a_group_does_what_was_played(load: balancing.Load, options: dict[str, Any]) -> None:
    """Plans, epochs, copies and switches in the same steps on every rank; results bit for bit those without moves; and
    ranks receive rows no less evenly than was played, with the steps that a plan takes until it is in force."""
    choices = balancing.Choices.of(load)
    ranks, played = balancing.together(choices, wait=True, **options), balancing.played(choices, **options)
    assert tuple(served.statistics for served in ranks) == played.statistics
    assert ranks[0].delays == played.delays and len(played.delays) >= 2
    assert played.moves > 0 and played.statistics[0].voids == 0
    later = slice(load.steps, None)
    assert balancing.imbalance(ranks)[later].mean() <= played.imbalance[later].mean() + 0.01
    still = balancing.played(choices, every=None)
    assert still.moves == 0 and played.imbalance[later].mean() < still.imbalance[later].mean()


def test_rows_are_as_even_as_maps_say() -> None:
    """Of a group without moves: by even splits, but for what batches leave."""
    choices = balancing.Choices.of(replace(SMALL, windows=1, tokens=512))
    ranks = balancing.together(choices, wait=True, every=None)
    total = balancing.imbalance(ranks).mean()
    assert abs(total - balancing.played(choices, every=None).imbalance.mean()) < 0.05
    assert sum(int(served.rows.sum()) for served in ranks) == choices.counts.sum()


# ---- what is played ------------------------------------------------------------------------------

WINDOWS = balance.drifting(6, 3, 64, memory=0.98, seed=4)
RANKS, SLOTS, STEPS = 8, 9, 16


def play(**more: Any) -> balance.Played:
    first = balance.plan(WINDOWS[0], ranks=RANKS, slots=SLOTS)
    asked = {"ranks": RANKS, "first": first, "steps": STEPS, "every": STEPS, "writes": 8, "load_decay": 0.9}
    return balance.play(WINDOWS, **(asked | more))


def test_a_delay_costs() -> None:
    """What a plan gives comes only when copies have ended: the longer that takes, the less even are ranks."""
    found = [play(copy_steps=steps) for steps in (1, 4, 12)]
    delays = [float(np.mean(played.delays)) for played in found]
    means = [played.imbalance[STEPS:].mean() for played in found]
    assert delays == sorted(delays) and delays[0] < delays[-1] and means == sorted(means) and means[0] < means[-1]
    assert np.mean(play(plan_steps=9).delays) >= delays[0] + 8
    # Each plan can be in force for no window before the one behind that which it was made from.
    scored = balance.replay(WINDOWS, ranks=RANKS, slots=SLOTS, policy="update", writes=8).imbalance[1:].mean()
    static = balance.replay(WINDOWS, ranks=RANKS, slots=SLOTS, policy="static").imbalance[1:].mean()
    assert scored < means[0] < static


def test_a_copy_is_over_a_step_later_at_the_soonest(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is: else it would be up to luck in which step a rank tells of an epoch."""
    usual = play()
    monkeypatch.setattr(world.PlayedBeside, "ended", lambda self, epoch: True)
    at_once = play()
    assert at_once.delays == usual.delays and (at_once.imbalance == usual.imbalance).all()


def test_bytes_are_spent_as_allowed() -> None:
    """An expert's weights take as many steps as pieces of step_bytes that they have; nothing is copied twice."""
    whole, pieces = play(expert_bytes=1000, step_bytes=10_000), play(expert_bytes=1000, step_bytes=300)
    assert np.mean(pieces.delays) > np.mean(whole.delays)
    for played in (whole, pieces):
        assert sum(each.bytes for each in played.statistics) == 1000 * played.moves
        assert played.bytes_per_step == pytest.approx(1000 * played.moves / (6 * STEPS) / RANKS)
    assert all(each.bytes <= 300 * 6 * STEPS for each in pieces.statistics)


def test_no_plan_without_a_reason() -> None:
    """Loads that stay are never moved for, nor are loads that nobody has; gain is what a plan must bring."""
    assert play(gain=10.0).moves == 0
    first = balance.plan(WINDOWS[0], ranks=RANKS, slots=SLOTS)
    still = balance.play(np.repeat(WINDOWS[:1], 6, axis=0), ranks=RANKS, first=first, steps=STEPS, every=STEPS)
    assert still.moves == 0 and still.imbalance.max() < 0.02
    nothing = balance.play(np.zeros((2, 3, 64)), ranks=RANKS, first=first, steps=STEPS, every=4)
    assert nothing.moves == 0 and not nothing.imbalance.any()


def test_old_loads_are_taken_out() -> None:
    """What a group's average remembers from before the last plan is no reason for the next one: a long memory plans
    as a short one does."""
    short, long = play(load_decay=0.5), play(load_decay=0.99)
    assert long.imbalance[STEPS:].mean() < short.imbalance[STEPS:].mean() + 0.005


def test_maps_with_spare_slots() -> None:
    plan = balance.plan(np.ones(6), ranks=3, slots=2)
    table = balance.spare_maps(plan, 3, 2).reshape(1, 3, 4)
    assert (table[:, :, 2:] == -1).all() and table[:, :, :2].ravel().tolist() == plan.physical_to_logical[0].tolist()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"spare": 0}, "spare is 0; it must be at least 1"),
        ({"copy_steps": 0}, "copy_steps is 0"),
        ({"every": 0}, "every is 0; it must be an integer, at least 1"),
        ({"writes": -1}, "writes is -1"),
        ({"nodes": 3}, "nodes is 3"),
    ],
)
def test_refusals(more: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        play(**more)
    with pytest.raises(InvalidArgument, match=r"loads has shape \[6, 64\]"):
        balance.play(WINDOWS[:, 0], ranks=RANKS, first=WINDOWS[:, 0])
