"""Behaviour: settings that a call names in place of its group's. Whatever they are, every rank gets the oracle's bits;
what is out of range is refused, and told to the peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Round, Setup, one
from collected import Call, Plan, group_of, judge
from collected import play as play_calls
from harness import PATIENT, caught, said
from test_exchange import LAYOUTS, check

import tokenway as tw

EXACT = {"mode": "high_throughput"}
BEYOND = 2**31 - 1  # more SMs than there are: as many as there is room for


# ---- sm_limit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(1,), (1, 0, 5), (BEYOND, 2)])
@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_limits_of_calls(world, mode, limits) -> None:
    """Each rank and each call has another one; groups have none, or few SMs."""
    layouts = ("flat", "grouped") if mode == "high_throughput" else LAYOUTS
    setup = Setup(ranks=3, experts=7, top_k=4, hidden=96, max_tokens=70, lanes=2, mode=mode)
    base = Round((70, 0, 61), limits=limits)
    rounds = [
        replace(base, layout=layout, seed=seed, send_dispatch=seed % 2 == 1, send_combine=seed > 1, late=seed == 2)
        for seed, layout in enumerate(layouts * 2)
    ]
    check(world, one(setup, *rounds), one(replace(setup, sm_limit=1), *rounds))


@pytest.mark.parametrize(("tokens", "limits"), [(1024, (1, 0)), (1024, (0, 1)), (1100, (2, BEYOND)), (520, (1,))])
def test_limits_among_packets(world, made_for, tokens, limits) -> None:
    """Ranks agree on how many rows are packets when the group is made, whatever a call's limit is: up to two rounds of
    tokens go so, by one block too, and the last rows of more."""
    setup = Setup(ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=tokens)
    base = Round((tokens, tokens - 37), weighting="none", rows="bfloat16", out="bfloat16", limits=limits)
    check(world, one(setup, base, replace(base, layout="expert_major", seed=1), replace(base, seed=2, limits=())))


@pytest.mark.parametrize("layout", ["flat", "rank_major"])
def test_limits_of_gathers(world, layout) -> None:
    calls = [
        Call((40, 0, 33), reduces, layout=layout, seed=seed, limits=limits, send_only=seed % 2 == 1)
        for seed, (reduces, limits) in enumerate((r, n) for r in (False, True) for n in ((1, 0, 5), (2, BEYOND), (1,)))
    ]
    plan = Plan(group_of(3, 64, 40), tuple((call,) for call in calls))
    judge(plan, world(3).run(play_calls, plan))


def refuse_limits(env: Any) -> list[Any]:
    """What is heard of limits that are none: by the rank that gives them, and by its peers."""
    heard = []
    with tw.Group(env.comm, hidden=8, experts=4, top_k=1, max_tokens=4, timeout=PATIENT) as group:
        ids = env.backend.tensor(np.array([[3], [0]], np.int32))
        tokens = env.backend.tensor(np.ones((2, 8), tw.tensors.numpy_dtype("bfloat16")))
        for bad in (-1, "many", 2**40, 1.5):
            limit = {"sm_limit": bad} if env.rank == 1 else {}
            handle = group.route(ids)
            heard.append(caught(group.dispatch, handle, tokens, **limit))
            if handle.leased:
                handle.release()
            received = group.dispatch(handle, tokens)
            heard.append(caught(group.combine, handle, received.tokens, **limit))
            if handle.leased:
                handle.release()
            heard.append(caught(group.all_gatherv, tokens, **limit))
        received = group.dispatch(group.route(ids), tokens, sm_limit=3)
        out = group.combine(received.handle, received.tokens, sm_limit=1)
        assert env.backend.array(out).astype(np.float32).sum() == 16
    return heard


def test_limits_that_are_refused(world) -> None:
    by_rank = world(2).run(refuse_limits)
    for i, outcome in enumerate(by_rank[1]):
        told = ("-1", "'many'", "1099511627776", "1.5")[i // 3]
        said(outcome, "twInvalidArgument", f"sm_limit is {told}; it must be from 0 to 2147483647")
    for outcome, call in zip(by_rank[0], ("dispatch", "combine", "all_gatherv") * 4, strict=True):
        said(outcome, "twPeerRefused", f"rank 1 refused its arguments of {call}")
