"""Experts that move between hosts, also while a rank is killed: survivors go on with their own weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moved_ranks
import pytest
from harness import HANGS, settle
from moved_plans import Death, Plan
from test_balancer import balanced

LONG = pytest.mark.long  # left out of run_all.py --quick
PLAN = Plan(
    seed=5,
    ranks=4,
    experts=9,
    slots=4,
    layers=2,
    lanes=2,
    mode="low_latency",
    combine_rows="per_expert",
    policy="balanced",
    epochs=6,
    dispatches=12,
    eager=6,
    deaths=(),
)


def asked(env: Any) -> tuple[str, set[int]]:
    """How ranks move experts here: the address at which this one serves, and whom it sees the memory of."""
    group, weights = moved_ranks.begun(env, PLAN)
    with group:
        near = {rank for rank in range(group.nranks) if weights._memory_of(rank)[0]}
        address = "" if weights.messages is None else weights.messages.server.door.host
        weights.close()
        return address, near


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 2, 1), marks=LONG)])
def test_where_ranks_serve(world, sizes) -> None:
    """At addresses of their hosts, which those of others reach; ranks of a host see each other's memory."""
    made = world(sizes, "fabric")
    for rank, (address, near) in enumerate(made.run(asked)):
        assert address == made.network.hosts_of_ranks[rank].address and near == set(made.ranks_of(made.host_of(rank)))


@pytest.mark.parametrize(
    ("victim", "phase"),
    [(3, "copying"), (0, "switched"), *(pytest.param(*each, marks=LONG) for each in ((0, "copying"), (3, "switched")))],
)
def test_a_rank_is_killed_while_experts_move(world, victim, phase) -> None:
    """In the middle of its copies, or while its lanes have unlike maps; and in the middle of others the last one of its
    host, so that those that are left ask nobody."""
    made = world((2, 2), "fabric")
    (mate,) = set(made.ranks_of(made.host_of(victim))) - {victim}
    plan = replace(PLAN, seed=PLAN.seed + victim, deaths=(Death(victim, phase, 3), Death(mate, "copying", 0)))
    survivors = [rank for rank in made.everyone if rank not in plan.victims]
    made.start(moved_ranks.lived, plan)
    told = dict(zip(survivors, settle(made.workers.collect(survivors, HANGS)), strict=True))
    seen = moved_ranks.Seen()
    moved_ranks.judge(plan, told, seen)
    assert seen.shrinks == 2 and seen.exchanges > 0


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2, 3), marks=LONG)])
def test_a_balancer_between_hosts(world, sizes) -> None:
    """Bits as without moves, on hosts of unlike sizes, and the same maps."""
    found = world(sizes, "fabric").run(balanced, 60, 2, 1)
    assert all(tables == found[0][1] and told.plans == found[0][0].plans for told, tables, _ in found)
    assert found[0][0].plans >= 2 and found[0][0].voids == 0
    assert sum(told.moves for told, _, _ in found) > 0
