"""Experts that write where the rows came: a combine reads a view of the window while peers may be a step ahead.

Rows come as packets or as Simple rows, by the bound, and bounds change from step to step on one lane: so the next step
writes into what this one reads, wherever that lies in a bank.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import player
import pytest
from cases import Case, Round, Setup, fewer_ranks, one, verify_case
from emulated_graphs import Graph, emulated_alone

import tokenway as tw
from tokenway import reference

SETUP = Setup(ranks=3, experts=7, top_k=3, hidden=64, max_tokens=40, dtype="float32", combine_dtype="float32")
FEW, MANY = (5, 6, 3), (40, 31, 37)


def check(world: Any, *cases: Case) -> None:
    """Plays cases with few packets, so that the larger rounds have Simple rows on devices."""
    ranks = world(min(case.setup.ranks for case in cases))
    ranks.forget()  # a comm reads its environment when it is made
    try:
        for case in (fewer_ranks(case, world.most) for case in cases):
            verify_case(case, world(case.setup.ranks).run(player.play, case))
    finally:
        ranks.forget()


def rounds(layout: str, **more: Any) -> list[Round]:
    """In place all of them: few tokens, many, and both again, so that each kind follows each."""
    base = Round(FEW, bound=6, layout=layout, identity=True, weighting="none", **more)
    many = replace(base, tokens=MANY, bound=40)
    return [replace(r, seed=s) for s, r in enumerate((base, many, base, base, many, many, base))]


def setup(layout: str, **more: Any) -> Setup:
    return replace(SETUP, mode="high_throughput" if layout == "flat" else "low_latency", **more)


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("layout", ["rank_major", "flat"])
def test_bounds_in_turns(world: Any, layout: str, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "8")
    check(world, one(setup(layout), *rounds(layout) * 6, slow=slow, order=slow))


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("layout", ["rank_major", "flat"])
def test_without_packets(world: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All views lie in the bank."""
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "0")
    check(world, one(setup(layout), *rounds(layout) * 6, slow=1))


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("layout", ["rank_major", "flat"])
def test_calls_that_only_send(world: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once, which complete in any order; and by few SMs."""
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "8")
    sent = [replace(r, send_dispatch=True, send_combine=True) for r in rounds(layout)]
    few = [replace(r, limits=(2, 5)) for r in rounds(layout)]
    lanes = setup(layout, lanes=3)
    check(world, Case(lanes, tuple(tuple(sent[i : i + 3]) for i in (0, 3, 4)) + tuple((r,) for r in few), slow=1))


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("payloads", [(), ((3, "uint8"), (5, "int64"))])
def test_several_payloads(world: Any, payloads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "8")
    for layout in ("rank_major", "flat"):
        check(world, one(setup(layout, payloads=payloads), *rounds(layout), slow=2))


@emulated_alone
@pytest.mark.parametrize("kind", ["threads"])
def test_a_view_of_a_fixed_size(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has more rows than can come by a small bound, and experts write over all of it."""
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "8")
    ranks = world(3)
    ranks.forget()
    try:
        assert (
            ranks.run(write_over_all, SETUP.settings() | {"mode": "high_throughput", "max_recv_tokens": 120})
            == [True] * 3
        )
    finally:
        ranks.forget()


def write_over_all(env: Any, settings: dict[str, Any]) -> bool:
    tensor, array = env.backend.tensor, env.backend.array
    with tw.Group(env.comm, **settings) as group:
        rng = np.random.default_rng(group.rank)
        ids = np.stack([rng.permutation(group.experts)[: group.top_k] for _ in range(5)]).astype(np.int32)
        x = rng.standard_normal((5, group.hidden)).astype(np.float32)
        given, sent, out = tensor(ids), tensor(x), tensor(np.zeros_like(x))
        ranks = reference.placement(group.experts, group.nranks)[0][ids]
        wanted = 2 * x * np.array([len(set(row)) for row in ranks.tolist()], np.float32)[:, None]
        handle = group.route(given)
        first, second = Graph(env), Graph(env)
        with first.capture():  # so the host knows no counts, and the view is as long as it can be
            group.exchange_counts(handle)
            rows = group.dispatch(handle, sent, bound=6).tokens
        with second.capture():
            group.combine(handle, rows, weighting="none", out=out)
        assert len(rows) == settings["max_recv_tokens"]
        same = True
        for step in range(12):
            first.replay()
            if group.rank == step % 3:
                time.sleep(0.02)  # peers' partials are here before this rank writes
            rows *= 2
            second.replay()
            same &= np.array_equal(array(out), wanted)
        return same


@pytest.mark.parametrize("kind", ["threads"])
def test_both_modes(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "8")
    both = replace(SETUP, mode="auto", low_latency_tokens=12, payloads=((3, "uint8"),))
    few = [replace(r, bound=6, tokens=FEW) for r in rounds("rank_major")]
    turns = [r for pair in zip(few, rounds("flat"), strict=True) for r in pair]
    check(world, one(both, *turns, slow=0))
