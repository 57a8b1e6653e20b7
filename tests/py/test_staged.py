"""Portable groups on devices: what sets them apart from those whose devices write into each other's memory. Everything
else is the suite's, run with --backend torch-emulated or nccl.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import refusals
from cases import Case, Round, verify
from harness import AT_ONCE, PATIENT, await_flags, caught, raise_flag
from player import Player
from refusals import ROUND, SETUP, Calls
from test_errors import said

import tokenway as tw
from tokenway import portable

NAP = 1.0
LATE = 5.0  # seconds, in which the ranks that shall meet do


@pytest.fixture
def staged(made_for) -> Any:
    """The backend, if its groups are portable ones on devices."""
    if made_for.knows_calls:
        pytest.skip("devices reach each other's memory, or there are none")
    return made_for


def refuse(env: Any, changes: dict[str, Any]) -> tuple[Any, float]:
    """Rank 0 makes a dispatch of which it is not known what its peers move."""
    calls = Calls(env)
    calls.good_round()
    begin = time.monotonic()
    if env.rank == 0:
        time.sleep(NAP)  # all have ended the good round
    outcome = caught(calls.dispatch, **(changes if env.rank == 0 else {}))
    took = time.monotonic() - begin
    calls.group.close()
    return outcome, took


@pytest.mark.parametrize("name", [name for name in refusals.DISPATCHES if "bound" in name])
def test_unknown_moves_end_the_group(staged, world, name) -> None:
    """Its peers wait in a collective that it cannot join: they are told that it gives the group up."""
    changes, pattern = refusals.DISPATCHES[name]
    (outcome, _), (told, took) = world(2).run(refuse, changes)
    said(outcome, "twInvalidArgument", pattern)
    said(told, "twPeerAborted", "rank 0 gave the group up")
    assert took < AT_ONCE


def bounded(env: Any, rounds: tuple[Round, ...]) -> list[Any]:
    case = Case(SETUP, (rounds,))
    with tw.Group(env.comm, **SETUP.settings() | {"timeout": PATIENT}) as group:
        return Player(env, group, case).flights()[0]


def test_blocks_follow_the_bound(staged, world) -> None:
    """The bound is that of blocks: rows come whatever it is, also after larger and smaller ones, and all the way from
    the last place of the last block."""
    few = [replace(ROUND, tokens=(3, 3, 2), bound=bound, seed=bound) for bound in (8, 3, 5, 3, 8)]
    for round_ in few:
        verify(SETUP, round_, [got[0] for got in world(SETUP.ranks).run(bounded, (round_,))])


def test_different_bounds_end_the_group(staged, world) -> None:
    """A collective of blocks of different sizes never ends: ranks learn of it from what they tell of their calls."""
    for outcome, took in world(3).run(other_bound):
        said(outcome, "twCallMismatch", r"rank \d made a different call in dispatch of step \d+ on lane 0")
        assert outcome[2].sticky and took < AT_ONCE


def other_bound(env: Any) -> tuple[Any, float]:
    calls = Calls(env)
    begin = time.monotonic()
    outcome = caught(calls.dispatch, bound=7 if env.rank == 2 else 8)
    took = time.monotonic() - begin
    calls.group.close()
    return outcome, took


def described(env: Any) -> tuple[str, Any, Any]:
    with tw.Group(env.comm, experts=4, top_k=2, hidden=8, max_tokens=4) as group:
        assert group.device is not None or env.device is None
        return env.comm.backend, env.comm.device, portable.describe(group.pointer)


def test_what_a_comm_says(staged, world, made_for) -> None:
    for rank, (backend, device, how) in enumerate(world(2).run(described)):
        assert (backend, device) == ("torch", rank % made_for.device_count())
        rows = 4 * (8 * 2 + 8 + 2 * 8)  # of 8 bfloat16, a header and two ids and weights
        assert how == portable.PortableInfo("routed", rows, 0.0, 0.0, 0.0, 0.0)


def refused_options(env: Any) -> list[Any]:
    def make(**options: Any) -> Any:
        return tw.Comm.portable(0, 1, lambda mine: [mine], device=env.comm.device, **options)

    return [caught(make, strategy="gathered"), caught(make, capacity="exact"), caught(make, capacity=4096)]


def test_what_devices_do_not_offer(staged, world) -> None:
    (gathered, exact, some), *_ = world(1).run(refused_options)
    said(gathered, "twUnsupported", r"strategy is 'gathered'; on CUDA devices dispatches are routed")
    said(exact, "twUnsupported", r"capacity is 'exact'; on CUDA devices it must be 'fixed' or 'auto'")
    said(some, "twUnsupported", r"capacity is 4096; ")


def late(env: Any, flags: str) -> tuple[Any, float]:
    """Rank 1 comes to a dispatch when the others have given it up."""
    calls = Calls(env, timeout=LATE)
    calls.good_round()
    if env.rank == 1:
        await_flags(flags, *(rank for rank in range(env.nranks) if rank != 1))
        outcome = caught(calls.dispatch)
        # Where the peers' blocks had come before they gave up, it ends well: word of that counts a little later.
        begin = time.monotonic()
        while outcome[0] == "twSuccess" and time.monotonic() - begin < PATIENT:
            time.sleep(0.001)
            outcome = caught(calls.group.check)
        calls.group.close()
        return outcome, 0.0
    begin = time.monotonic()
    outcome = caught(calls.dispatch)
    took = time.monotonic() - begin
    raise_flag(flags, env.rank)
    calls.group.close()
    return outcome, took


def test_a_collective_that_does_not_end(staged, world, tmp_path) -> None:
    """No kernel of this rank runs then: its host ends the step, and says who is late and in which."""
    outcomes = world(SETUP.ranks).run(late, str(tmp_path))
    said(outcomes[1][0], "twExcluded", "rank 1 did not arrive in time")
    for rank, (outcome, took) in enumerate(outcomes):
        if rank == 1:
            continue
        said(outcome, "twTimeout", r"rank 1 did not arrive in time in dispatch of step \d+ on lane 0")
        assert took > LATE * 0.9 or outcome[2].reporter != rank, "it was not given up before its time"
        assert took < LATE + AT_ONCE, took
