"""Behaviour: groups that grow between calls. Whatever was under way goes on, every rank gets the oracle's bits before
and after, and what has no room is refused on all ranks, which go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import harness
import numpy as np
import pytest
from cases import Got, Round, Setup, one, verify
from emulated_graphs import Graph, emulated_alone
from grown import LAYOUTS, MODES, OWN, make, own_of, works
from hypothesis import given, settings
from hypothesis import strategies as st
from player import Player
from strategies import EXAMPLES, SETTINGS

import tokenway as tw

Turn = tuple[Setup, Round]


def calls_of(group: tw.Group, own: Setup, setup: Setup) -> Any:
    """What makes a turn's calls: the group, or its rows of another size."""
    if setup.hidden == own.hidden:
        return group
    return group.rows(tw.RowType(setup.hidden, setup.dtype, combine_dtype=setup.combine_dtype))


def check(world: Any, play: Callable[..., list[Got]], own: Setup, turns: list[Turn]) -> None:
    by_rank = world(own.ranks).run(play, own, turns)
    for i, (setup, round_) in enumerate(turns):
        verify(setup, round_, [mine[i] for mine in by_rank])


# ---- calls before and after ----------------------------------------------------------------------


def play_growing(env: Any, own: Setup, turns: list[Turn]) -> list[Got]:
    """Each turn in a group that has grown to its size."""
    with make(env, own) as group:
        got = []
        for setup, round_ in turns:
            before = group.window_bytes().window
            larger = setup.max_tokens > group.max_tokens
            group.reserve(max_tokens=setup.max_tokens, row_bytes=4 * setup.hidden)
            assert group.max_tokens >= setup.max_tokens
            if own.inbox_tokens is not None and env.backend.parts:
                least = -(-group.max_tokens // 16)
                assert group.settings.inbox_tokens == max(own.inbox_tokens, least), "unlike what was asked for"
            assert not larger or group.window_bytes().window > before
            round_ = replace(round_, bound=round_.bound or (None if own.exact else setup.max_tokens))
            (flight,) = Player(env, group, one(setup, round_), calls_of(group, own, setup)).flights()
            got += flight
        return got


def growing(own: Setup) -> list[Turn]:
    """Each layout at each size: as made, larger, larger again, and small calls in the large group."""
    sizes = ((4, 24), (9, 24), (9, 33), (70, 24), (4, 24))
    return [
        (
            replace(own, max_tokens=tokens, hidden=hidden),
            Round((tokens, 0, tokens - 1)[: own.ranks], seed=seed, layout=layout, out="bfloat16"),
        )
        for seed, (tokens, hidden) in enumerate(sizes)
        for layout in LAYOUTS[own.mode]
    ]


@pytest.mark.parametrize("mode", MODES)
def test_calls_grow_with_the_group(world, mode) -> None:
    own = own_of(world, mode)
    check(world, play_growing, own, growing(own))


def play_by_one_handle(env: Any, own: Setup, turns: list[Turn]) -> list[Got]:
    """The first turn's handle, made before all growth, beside new ones of the others."""
    with make(env, own) as group:
        (first, round_), *others = turns
        old = Player(env, group, one(first, round_))
        handle = old.handle(round_)
        got = [exchange(old, round_, handle)]
        for i, (setup, other) in enumerate(others):
            group.reserve(max_tokens=20 * (i + 1))
            if other.seed == round_.seed:
                got.append(exchange(old, other, handle))
            else:
                (flight,) = Player(env, group, one(setup, other)).flights()
                got += flight
        return got


def exchange(player: Player, round_: Round, handle: tw.Handle) -> Got:
    received = player.dispatch(round_, handle, player.payloads(round_), False)
    mine = player.snapshot(round_, received)
    mine.out = player.array(player.combine(round_, handle, player.rows(round_, received, mine), False))
    return mine


@pytest.mark.parametrize("mode", MODES)
def test_a_handle_outlives_growth(world, mode) -> None:
    own = own_of(world, mode)
    old = Round((4, 0, 3)[: own.ranks], seed=1, routing="holes", layout=LAYOUTS[mode][0])
    larger = replace(own, max_tokens=40)
    new = Round((37, 40, 0)[: own.ranks], seed=2, layout=LAYOUTS[mode][1], bound=None if own.exact else 40)
    check(world, play_by_one_handle, own, [(own, old), (own, old), (larger, new), (own, old)])


def play_in_flight(env: Any, own: Setup, turns: list[Turn]) -> list[Got]:
    """Two dispatched before the group grows and combined after it, from their views, with new ones in between."""
    with make(env, own, lanes=3) as group:
        (own_setup, a), (_, b), (large, c) = turns
        old = Player(env, group, one(own_setup, a))
        started = []
        for round_ in (a, b):
            handle = old.handle(round_)
            received = old.dispatch(round_, handle, old.payloads(round_), True).result()
            started.append((round_, handle, received, old.snapshot(round_, received)))
        group.reserve(max_tokens=large.max_tokens)
        player = Player(env, group, one(large, c))
        handle = player.handle(c)
        pending = player.dispatch(c, handle, player.payloads(c), True)
        got = []
        for round_, before, received, mine in started[::-1]:
            assert np.array_equal(old.array(received.counts), mine.counts)
            mine.out = old.array(old.combine(round_, before, old.rows(round_, received, mine), False))
            got.insert(0, mine)
        received = pending.result()
        mine = player.snapshot(c, received)
        mine.out = player.array(player.combine(c, handle, player.rows(c, received, mine), False))
        return [*got, mine]


@pytest.mark.parametrize("mode", MODES)
def test_lanes_stay_held_and_views_alive(world, mode) -> None:
    own = own_of(world, mode)
    first = LAYOUTS[mode][0]
    base = Round((4, 0, 3)[: own.ranks], layout=first, rows="bfloat16", weighting="none", identity=True)
    large = replace(own, max_tokens=50)
    bound = None if own.exact else 50
    turns = [(own, replace(base, seed=1)), (own, replace(base, seed=2))]
    new = Round((50, 9, 0)[: own.ranks], seed=3, layout=first, bound=bound, weighting="none", rows="bfloat16")
    check(world, play_in_flight, own, [*turns, (large, new)])


def play_unlike(env: Any, own: Setup, turns: list[Turn]) -> list[Got]:
    """Rank 0 goes on with a handle of before; the others make new ones, and give their bound."""
    with make(env, own) as group:
        ((setup, round_),) = turns
        player = Player(env, group, one(setup, round_))
        handle = player.handle(round_)
        group.reserve(max_tokens=33)
        if env.rank > 0:
            handle = player.handle(round_)
        return [exchange(player, replace(round_, bound=own.max_tokens if env.rank > 0 else None), handle)]


def test_handles_of_before_and_after_meet(world) -> None:
    own = own_of(world, "low_latency")
    check(world, play_unlike, own, [(own, Round((3, 4, 0)[: own.ranks], seed=4, bound=own.max_tokens))])


def play_leases(env: Any, own: Setup, turns: list[Turn]) -> list[Got]:
    """Rows in leases stay there while the group grows, and a handle of before may be given leases after."""
    with make(env, own) as group:
        got = []
        kept = []
        for setup, round_ in turns:
            group.reserve(max_tokens=setup.max_tokens)
            player = Player(env, group, one(setup, round_))
            handle = player.handle(round_)
            received = player.dispatch(round_, handle, player.payloads(round_), False)
            mine = player.snapshot(round_, received)
            mine.out = player.array(player.combine(round_, handle, player.rows(round_, received, mine), False))
            got.append(mine)
            assert received.leased
            kept.append((player, round_, handle, received, mine))
        for player, round_, handle, received, mine in kept:
            assert np.array_equal(player.array(received.tokens).view(np.uint8), mine.payloads[0].view(np.uint8))
            player.dispatch_again(round_, handle, player.payloads(round_), mine)
        return got


def test_leases_outlive_growth(world, made_for) -> None:
    if "leases" in made_for.lacks:
        pytest.skip("there are no leases here")
    own = replace(own_of(world, "high_throughput"), lease_bytes=200_000)
    turns = [
        (replace(own, max_tokens=tokens), Round((tokens, 1, 0)[: own.ranks], seed=tokens, layout="flat", lease=True))
        for tokens in (4, 20, 60)
    ]
    check(world, play_leases, own, turns)


def gather_and_reduce(env: Any) -> list[Any]:
    with make(env, replace(OWN, ranks=env.comm.nranks)) as group:
        got = []
        for tokens in (4, 30):
            group.reserve(max_tokens=tokens)
            rows = np.full((tokens, 5), env.rank + 1, np.float32)
            gathered = group.all_gatherv(env.backend.tensor(rows), bound=tokens)
            summed = group.reduce_scatterv(env.backend.tensor(np.ones((group.nranks * tokens, 5), np.float32)))
            got.append((env.backend.array(gathered.rows).sum(), env.backend.array(summed).sum()))
        return got


def test_gathers_grow_too(world, made_for) -> None:
    if "collectives" in made_for.lacks:
        pytest.skip("there are no gathers here")
    ranks = min(3, world.most)
    for got in world(ranks).run(gather_and_reduce):
        assert got == [(t * 5 * ranks * (ranks + 1) / 2, t * 5 * ranks) for t in (4, 30)]


@settings(SETTINGS, max_examples=max(EXAMPLES // 5, 1))
@given(data=st.data())
def test_calls_and_growth_in_any_order(backend: str, data: Any) -> None:
    mode = data.draw(st.sampled_from(list(MODES)))
    own = replace(OWN, **MODES[mode], ranks=2)
    most = own.max_tokens
    turns = []
    for seed in range(data.draw(st.integers(1, 5))):
        size = data.draw(st.sampled_from([1, 3, 4, 5, 17, 40]))
        most = max(most, size)
        setup = replace(own, max_tokens=size, hidden=data.draw(st.sampled_from([24, 24, 31, 50])))
        tokens = data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))
        layout = data.draw(st.sampled_from(LAYOUTS[mode]))
        routing = data.draw(st.sampled_from(["random", "holes", "none", "one"]))
        turns.append((setup, Round(tokens, seed=seed, layout=layout, routing=routing)))
    check(partial(harness.Threads, backend), play_growing, own, turns)


# ---- graphs of before ----------------------------------------------------------------------------


def replay(env: Any, own: Setup, tokens: tuple[int, int]) -> list[bool]:
    """A pair that was captured before the group grew, replayed after it between new calls."""
    graph, backend = Graph(env), env.backend
    x = backend.tensor(
        np.random.default_rng(env.rank).standard_normal((tokens[env.rank], own.hidden)).astype(np.float32)
    )
    ids = backend.tensor((np.arange(tokens[env.rank] * 3, dtype=np.int32).reshape(-1, 3) * 2 + env.rank) % own.experts)
    ids = backend.tensor(distinct(backend.array(ids), own.experts))
    with make(env, replace(own, dtype="float32", combine_dtype="float32")) as group:
        handle = group.route(ids)
        out = backend.tensor(np.zeros_like(backend.array(x)))

        def pair() -> Any:
            if own.exact:
                group.exchange_counts(handle)
            received = group.dispatch(handle, x)
            return group.combine(handle, received.tokens, out=out)

        first = backend.array(pair()).copy()
        handle.update(ids)
        with graph.capture():
            pair()
        good = []
        for more in (9, 300, 301):
            out[...] = 0
            graph.replay()
            good.append(np.array_equal(backend.array(out), first))
            group.reserve(max_tokens=own.max_tokens + more)
            good.append(own.exact or works(env, group, more))
        return good


def distinct(ids: np.ndarray, experts: int) -> np.ndarray:
    """Ids that are all different in a token."""
    start = ids[:, :1]
    return ((start + np.arange(ids.shape[1], dtype=np.int32)) % experts).astype(np.int32)


@emulated_alone
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(4, 2), (70, 33), (700, 650)])
def test_graphs_of_before_replay_right(world, mode, tokens) -> None:
    own = replace(OWN, **MODES[mode], ranks=2, lanes=1, max_tokens=max(tokens))
    if own.exact:  # outputs have a size that does not hang on counts
        own = replace(own, max_recv_tokens=2 * max(tokens))
    if mode == "in parts":
        own = replace(own, inbox_tokens=-(-max(tokens) // 3))
    for good in world(2).run(replay, own, tokens):
        assert all(good), good
