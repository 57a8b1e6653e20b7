"""As many ranks as there are: a process for each device, and two for each, which take turns on it. Bits, not times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import collected
import harness
import pytest
import test_graphs
from cases import Round, Setup
from gpu_world import line_tokens
from test_local_ranks import check, play, rounds_of, setup_of

pytestmark = pytest.mark.every_device

LATE = {"timeout": 90.0}  # who waits for a turn waits for others' turns first
EXACT = {"mode": "high_throughput", "row_alignment": 4}


@pytest.fixture(params=[1, 2], ids=["one to a device", "two to a device"])
def world(request: pytest.FixtureRequest, devices: int) -> harness.Processes:
    """Ranks that are processes, up to 16."""
    return harness.Processes("nvlink", min(16, request.param * devices))


def play_with(env: Any, most: int | None, setup: Setup, rounds: list[Round]) -> list[Any]:
    with line_tokens(most):
        return play(env, setup, rounds, LATE)


def judge(world: harness.Processes, most: int | None, setup: Setup, rounds: list[Round]) -> None:
    by_rank = world.run(play_with, most, setup, rounds)
    check(setup, rounds, [list(of) for of in zip(*by_rank, strict=True)])


@pytest.mark.parametrize("most", [None, 0])
def test_low_latency(world, most) -> None:
    setup = setup_of(world.nranks)
    judge(world, most, setup, rounds_of(setup))
    wide = setup_of(world.nranks, hidden=7168, top_k=min(8, 2 * world.nranks + 1), max_tokens=160)
    tokens = tuple(160 - 17 * (rank % 9) for rank in range(world.nranks))
    judge(world, most, wide, [Round(tokens, seed=1), Round(tokens, seed=2, weighting="none", out="bfloat16")])


@pytest.mark.parametrize("most", [None, 0])
def test_high_throughput(world, most) -> None:
    setup = replace(setup_of(world.nranks, hidden=640, max_tokens=300), **EXACT)
    tokens = tuple(300 - 41 * (rank % 8) for rank in range(world.nranks))
    rounds = [Round(tokens, seed=s, layout=layout) for layout in ("flat", "grouped") for s in range(2)]
    judge(world, most, setup, rounds)


def test_gathers_and_reduces(world) -> None:
    setup = collected.group_of(world.nranks, 512, 200)
    sizes = tuple((200 - 41 * rank) % 201 for rank in range(world.nranks))
    calls = [collected.Call(sizes, reduces, ((512, "bfloat16"),), seed=3) for reduces in (False, True)]
    plan = collected.Plan(setup, tuple((call,) for call in calls))
    collected.judge(plan, world.run(collected.play, plan))


@pytest.mark.parametrize("name", ["between eager rounds", "row types"])
def test_graphs_with_all(world, name) -> None:
    sequence, setup = test_graphs.SEQUENCES[name], replace(test_graphs.SETUP, ranks=world.nranks)
    test_graphs.check(sequence, world.run(test_graphs.run, sequence, None, None, setup), setup)
