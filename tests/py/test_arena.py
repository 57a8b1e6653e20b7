"""Behaviour: groups that share a window. Whatever they call, and in whatever order, every rank gets the oracle's bits,
and what one of them does is as if the others were not there."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import harness
import numpy as np
import pytest
from cases import Got, Round, Setup, one, verify
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT
from hypothesis import given, settings
from hypothesis import strategies as st
from player import Player
from sharing import ALL, DRAFT, LAYOUTS, TARGET, Turn, at_once, check, in_turns, keywords, make, of_ranks
from sharing import rounds as rounds_of
from strategies import EXAMPLES, SETTINGS

import tokenway as tw


def play(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    with ExitStack() as stack:
        return in_turns(env, make(env, setups, stack), setups, turns)


def play_at_once(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    with ExitStack() as stack:
        groups = make(env, setups, stack)
        got = []
        for at in range(0, len(turns), setups[0].lanes):
            got += at_once(env, groups, setups, turns[at : at + setups[0].lanes])
        return got


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_groups_take_turns(world, first, lanes) -> None:
    setups = of_ranks(world, ALL[first:] + ALL[:first])
    setups = (replace(setups[0], lanes=lanes), *setups[1:])
    check(world, play, setups, rounds_of(setups, weighting="topk"))


def test_groups_at_once(world) -> None:
    setups = of_ranks(world)
    check(world, play_at_once, setups, rounds_of(setups))


@pytest.mark.parametrize("mode", LAYOUTS)
def test_small_calls_between_large_ones(world, made_for, mode) -> None:
    """Rows of many packets and chunks beside small ones, whose packets lie across theirs."""
    wide = made_for.large
    large = Setup(ranks=2, experts=6, top_k=4, hidden=wide, max_tokens=40, lanes=2, mode=mode)
    small = Setup(ranks=2, experts=5, top_k=2, hidden=12, max_tokens=37, mode=mode)
    tokens = ((40, 37), (37, 3), (1, 40), (0, 37), (40, 40), (37, 37))
    turns = [
        (i % 2, Round(tuple(min(n, (40, 37)[i % 2]) for n in each), seed=i, layout=LAYOUTS[mode][i // 2 % 2]))
        for i, each in enumerate(tokens)
    ]
    check(world, play, (large, small), turns)


@settings(SETTINGS, max_examples=max(EXAMPLES // 5, 1))
@given(data=st.data())
def test_any_order(backend: str, data: Any) -> None:
    setups = tuple(replace(setup, ranks=2, lanes=2) for setup in ALL)
    turns: list[Turn] = []
    for seed in range(data.draw(st.integers(2, 9))):
        which = data.draw(st.sampled_from([0, 1, 2]))
        most = setups[which].max_tokens
        tokens = data.draw(st.tuples(st.integers(0, most), st.integers(0, most)))
        layout = data.draw(st.sampled_from(LAYOUTS[setups[which].mode]))
        again = data.draw(st.sampled_from([{}, {"again": True}, {"late": True}, {"release": True}, {"memory": True}]))
        turns.append((which, Round(tokens, seed=seed, layout=layout, **again)))
    check(partial(harness.Threads, backend), play, setups, turns)


# ---- views and lanes -----------------------------------------------------------------------------


def held(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    """A dispatch of the first group whose view stays while the others make steps on the other lane."""
    with ExitStack() as stack:
        groups = make(env, setups, stack, lanes=2)
        (which, round_), *others = turns
        player = Player(env, groups[which], one(setups[which], round_))
        handle = player.handle(round_)
        received = player.dispatch(round_, handle, player.payloads(round_), False)
        mine = player.snapshot(round_, received)
        got = in_turns(env, groups, setups, others)
        assert np.array_equal(player.array(received.counts), mine.counts)
        mine.out = player.array(player.combine(round_, handle, player.rows(round_, received, mine), False))
        return [mine, *got]


def test_a_lane_is_held_for_all(world) -> None:
    setups = of_ranks(world)
    base = {"rows": "bfloat16", "weighting": "none", "identity": True}
    first = Round((9, 0, 8)[: setups[0].ranks], seed=1, layout="rank_major", **base)
    check(world, held, setups, [(0, first), *(turn for turn in rounds_of(setups) if turn[0] > 0)])


def no_lane(env: Any, setups: tuple[Setup, ...]) -> list[Any]:
    with ExitStack() as stack:
        first, second, _ = make(env, setups, stack, lanes=1)
        player = Player(env, first, one(setups[0]))
        round_ = Round((2, 2, 2))
        handle = player.handle(round_)
        received = player.dispatch(round_, handle, player.payloads(round_), False)
        other = Player(env, second, one(setups[1]))
        taken = harness.caught(other.handle, replace(round_, layout="flat"))
        player.combine(round_, handle, player.rows(round_, received, player.snapshot(round_, received)), False)
        in_turns(env, (first, second), setups, [(1, replace(round_, layout="flat"))])
        return [taken]


def test_no_lane_is_free_for_another(world) -> None:
    for (taken,) in world(min(3, world.most)).run(no_lane, of_ranks(world)):
        harness.said(taken, "twInvalidUsage", r"no free lane: all 1 are held")


# ---- what lies in no bank ------------------------------------------------------------------------


def placed(count: int, slots: tuple[int, ...]) -> dict[str, Any]:
    return {"expert_map": tw.Placement(slots, count_loads=True, load_decay=0.5), "experts": count}


def count_loads(env: Any) -> list[list[Any]]:
    """Two groups that count, and one that does not, in turns: each has its own statistics."""
    given = {"top_k": 1, "hidden": 4, "max_tokens": 8, "dtype": "float32", "timeout": PATIENT}
    counting = (placed(4, (0, 1, 2, 3)), placed(7, (0, 1, 2, 3, 4, 5, 6, 0)))
    got = []
    with tw.Group(env.comm, room_for=[given | c for c in counting], experts=3, lanes=2, **given) as first:
        for again in range(2):  # the place of the statistics is used again
            with ExitStack() as stack:
                groups = [stack.enter_context(tw.Group(env.comm, arena=first, **(given | c))) for c in counting]
                for step in range(5):
                    for group, experts in zip((*groups, first), (4, 7, 3), strict=True):
                        ids = np.full((env.rank + 1, 1), (step + again) % experts, np.int32)
                        handle = group.route(env.backend.tensor(ids))
                        x = env.backend.tensor(np.ones((env.rank + 1, 4), np.float32))
                        received = group.dispatch(handle, x)
                        group.combine(handle, received.tokens)
                got.append([(group.loads.copy(), group.counted_dispatches.copy()) for group in groups])
    return got


def test_each_group_counts_for_itself(world, made_for) -> None:
    if "loads" in made_for.lacks:
        pytest.skip("there are no load statistics here")
    ranks = min(3, world.most)
    by_rank = world(ranks).run(count_loads)
    for again in range(2):
        for which in range(2):
            loads, counted = by_rank[0][again][which]
            assert counted.sum() in (3, 4, 5) and (loads >= 0).all() and loads.sum() > 0
            for other in by_rank[1:]:
                assert np.array_equal(other[again][which][0], loads)
                assert np.array_equal(other[again][which][1], counted)


def gather_and_reduce(env: Any, setups: tuple[Setup, ...]) -> list[Any]:
    with ExitStack() as stack:
        groups = make(env, setups, stack)
        got = []
        for i in range(6):
            group = groups[i % 3]
            rows = np.full((4, 5), env.rank + 1 + i, np.float32)
            pending = group.all_gatherv(env.backend.tensor(rows), bound=4, send_only=i > 2, lane=0)
            other = groups[(i + 1) % 3]  # whose step on that lane finishes the gather
            summed = other.reduce_scatterv(env.backend.tensor(np.ones((group.nranks * 4, 5), np.float32)), lane=0)
            gathered = pending.result() if i > 2 else pending
            got.append((env.backend.array(gathered.rows).sum(), env.backend.array(summed).sum()))
        return got


def test_gathers_of_several_groups(world, made_for) -> None:
    if "collectives" in made_for.lacks:
        pytest.skip("there are no gathers here")
    ranks = min(3, world.most)
    for got in world(ranks).run(gather_and_reduce, of_ranks(world)):
        assert got == [(20 * sum(r + 1 + i for r in range(ranks)), 20 * ranks) for i in range(6)]


def play_leases(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    with ExitStack() as stack:
        groups = make(env, setups, stack)
        return in_turns(env, groups, setups, turns)


def test_leases_are_the_first_groups(world, made_for) -> None:
    if "leases" in made_for.lacks:
        pytest.skip("there are no leases here")
    first = replace(DRAFT, lease_bytes=100_000, lanes=2)
    setups = of_ranks(world, (first, TARGET, replace(DRAFT, experts=4)))
    turns = rounds_of(setups, 1)
    turns = [(which, replace(round_, lease=which == 0)) for which, round_ in turns]
    check(world, play_leases, setups, turns)


# ---- growth --------------------------------------------------------------------------------------


def play_growing(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    """The first group grows between rounds of all; the last one comes into the window that it has then."""
    with ExitStack() as stack:
        first = stack.enter_context(tw.Group(env.comm, timeout=PATIENT, **setups[0].settings()))
        groups = [first]
        got = []
        for i, (which, round_) in enumerate(turns):
            if which >= len(groups):
                first.reserve(max_tokens=40 * len(groups), row_bytes=200)
                groups.append(stack.enter_context(tw.Group(env.comm, arena=first, **keywords(setups[which]))))
            got += in_turns(env, groups, setups, [(which, replace(round_, bound=bound_of(setups[which], round_)))])
            assert groups[-1].window_bytes().window == 0 or i < len(setups)
        return got


def bound_of(setup: Setup, round_: Round) -> int | None:
    return None if setup.exact else round_.bound or setup.max_tokens


def test_the_first_group_grows(world) -> None:
    setups = of_ranks(world)
    check(world, play_growing, setups, rounds_of(setups, 3))


def play_views_across(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    """A combine of the second group is given rows that lie in a view of the first, in banks that this has grown."""
    with ExitStack() as stack:
        first, second = make(env, setups, stack, lanes=2)
        first.reserve(max_tokens=60)
        (_, theirs), (_, ours) = turns
        lender = Player(env, first, one(setups[0], theirs))
        lent = lender.handle(theirs)
        view = lender.dispatch(theirs, lent, lender.payloads(theirs), False)
        seen = lender.snapshot(theirs, view)
        player = Player(env, second, one(setups[1], ours))
        handle = player.handle(ours)
        received = player.dispatch(ours, handle, player.payloads(ours), False)
        mine = player.snapshot(ours, received)
        rows = player.rows(ours, received, mine)
        room = view.tokens[:, : rows.shape[1]]
        room[...] = rows
        mine.out = player.array(player.combine(ours, handle, room, False))
        seen.out = lender.array(lender.combine(theirs, lent, lender.rows(theirs, view, seen), False))
        return [seen, mine]


def test_rows_in_a_view_of_another_group(world) -> None:
    like = replace(TARGET, dtype="float32", combine_dtype="float32")
    setups = of_ranks(world, (like, replace(like, experts=4, top_k=2, lanes=1)))
    first = Round((9, 8, 9)[: setups[0].ranks], seed=1, bound=20)
    check(world, play_views_across, setups, [(0, first), (1, Round((7, 9, 3)[: setups[0].ranks], seed=2))])


# ---- graphs --------------------------------------------------------------------------------------


def replay(env: Any) -> list[bool]:
    """A pair of the first group, captured, and replayed between calls of the second on the same lane."""
    graph = Graph(env)
    make_tensor, array = env.backend.tensor, env.backend.array
    given: dict[str, Any] = {"hidden": 24, "dtype": "float32", "timeout": PATIENT, "top_k": 2}
    second = given | {"experts": 3, "hidden": 40, "max_tokens": 9}
    first = tw.Group(env.comm, experts=5, max_tokens=6, room_for=[second], **given)
    with first, tw.Group(env.comm, arena=first, **second) as other:
        x = make_tensor(np.random.default_rng(env.rank).standard_normal((6, 24)).astype(np.float32))
        y = make_tensor(np.random.default_rng(9 + env.rank).standard_normal((9, 40)).astype(np.float32))
        handle = first.route(make_tensor(np.tile(np.array([[0, 4]], np.int32), (6, 1))))
        out = make_tensor(np.zeros((6, 24), np.float32))

        def pair() -> Any:
            return first.combine(handle, first.dispatch(handle, x).tokens, out=out)

        expected = array(pair()).copy()
        with graph.capture():
            pair()
        good = []
        for _ in range(4):
            out[...] = 0
            graph.replay()
            good.append(np.array_equal(array(out), expected))
            between = other.route(make_tensor(np.tile(np.array([[0, 2]], np.int32), (9, 1))))
            back = array(other.combine(between, other.dispatch(between, y).tokens))
            good.append(np.array_equal(back, 2 * array(y)))
        return good


@emulated_alone
def test_graphs_replay_between_calls_of_another(world) -> None:
    for good in world(2).run(replay):
        assert all(good), good


# ---- the lives of groups -------------------------------------------------------------------------


def come_and_go(env: Any, setups: tuple[Setup, ...], turns: list[Turn], order: tuple[int, ...]) -> list[Got]:
    """Groups are closed in any order; those that are left go on, and new ones come into the window of any of them."""
    with ExitStack() as stack:
        groups = make(env, setups, stack)
        got = in_turns(env, groups, setups, turns[: len(setups)])
        alive = list(range(len(setups)))
        for gone in order:
            groups[gone].close()
            alive.remove(gone)
            which = alive[0]
            got += in_turns(env, groups, setups, [turn for turn in turns[len(setups) :] if turn[0] == which][:1])
        last = groups[alive[0]]
        new = stack.enter_context(tw.Group(env.comm, arena=last, **keywords(setups[order[-1]])))
        return got + in_turns(env, [new], [setups[order[-1]]], [(0, turns[order[-1]][1])])


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0), (1, 2), (2, 1), (0, 2)])
def test_closed_in_any_order(world, order) -> None:
    setups = of_ranks(world)
    turns = rounds_of(setups, 2)
    alive = [0, 1, 2]
    judged = turns[:3]
    for gone in order:
        alive.remove(gone)
        judged = [*judged, next(turn for turn in turns[3:] if turn[0] == alive[0])]
    judged.append(turns[order[-1]])
    by_rank = world(setups[0].ranks).run(come_and_go, setups, turns, order)
    for i, (which, round_) in enumerate(judged):
        verify(setups[which], round_, [mine[i] for mine in by_rank])
