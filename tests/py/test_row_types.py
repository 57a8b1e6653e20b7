"""Behaviour: rows of several types in one group. Whatever calls name, and in whatever order, every rank gets the
oracle's bits for it, by handles that were routed once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import harness
import numpy as np
import pytest
from cases import LAYOUTS, Got, Round, Setup, one, verify
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, caught, said
from hypothesis import given, settings
from hypothesis import strategies as st
from player import Player
from sharing import together
from strategies import EXAMPLES, SETTINGS

import tokenway as tw

OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=6)
# Smaller and larger rows than the group's own, of odd sizes, with more payloads and with fewer.
TYPES = (
    replace(OWN, hidden=24, dtype="float8_e4m3fn", payloads=((3, "float32"),)),
    replace(OWN, hidden=33, dtype="float32", combine_dtype="float32"),
    replace(OWN, hidden=5, dtype="uint8", payloads=((1, "int64"), (7, "int16")), combine_hidden=9),
    replace(OWN, combine_hidden=1),
)
EXACT = {"mode": "high_throughput", "row_alignment": 4}


def make(env: Any, own: Setup, types: Any, **changes: Any) -> tw.Group:
    """A group with room for all of these rows."""
    kinds = [each.row_type() for each in (own, *types)]
    rooms = {
        "dispatch_room": max(kind.dispatch_bytes for kind in kinds),
        "combine_room": max(kind.combine_bytes for kind in kinds),
    }
    return tw.Group(env.comm, timeout=PATIENT, **(own.settings() | rooms | changes))


def play_in_turns(env: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> list[Got]:
    """Rounds, each by a routing of its own and by rows of its own."""
    with make(env, own, [setup for setup, _ in turns]) as group:
        before = group.window_bytes().window
        got = []
        for setup, round_ in turns:
            calls = None if setup == own else group.rows(setup.row_type())
            (flight,) = Player(env, group, one(setup, round_), calls).flights()
            got += flight
        assert group.window_bytes().window == before
        return got


def exchange(player: Player, round_: Round, handle: tw.Handle) -> tuple[tw.Received, Got]:
    """A dispatch and its combine."""
    received = player.dispatch(round_, handle, player.payloads(round_), False)
    mine = player.snapshot(round_, received)
    mine.out = player.array(player.combine(round_, handle, player.rows(round_, received, mine), False))
    return received, mine


def play_by_one_handle(env: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> list[Got]:
    """The same by one routing: that of the first round, which the others share."""
    with make(env, own, [setup for setup, _ in turns]) as group:
        handle = None
        got = []
        for setup, round_ in turns:
            calls = None if setup == own else group.rows(setup.row_type())
            player = Player(env, group, one(setup, round_), calls)
            handle = handle or player.handle(round_)
            got.append(exchange(player, round_, handle)[1])
        return got


def play_at_once(env: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> list[Got]:
    """All of them under way together, each on a lane."""
    with make(env, own, [setup for setup, _ in turns], lanes=len(turns)) as group:
        players = [Player(env, group, one(setup, round_), group.rows(setup.row_type())) for setup, round_ in turns]
        work = [(player, round_, player.handle(round_)) for player, (_, round_) in zip(players, turns, strict=True)]
        return together(env, work)


def check(world: Any, play: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> None:
    by_rank = world(own.ranks).run(play, own, turns)
    for i, (setup, round_) in enumerate(turns):
        verify(setup, round_, [mine[i] for mine in by_rank])


def rounds(own: Setup, **changes: Any) -> list[tuple[Setup, Round]]:
    """Each type in each layout, with the group's own in between."""
    base = Round((6, 0, 4)[: own.ranks], **changes)
    every = (own, *(replace(own, **{n: getattr(t, n) for n in KIND}) for t in TYPES), own)
    return [
        (setup, replace(base, layout=layout, seed=seed))
        for seed, (setup, layout) in enumerate((s, lay) for lay in LAYOUTS[own.mode] for s in every)
    ]


KIND = ("hidden", "dtype", "payloads", "combine_dtype", "combine_hidden")


@pytest.mark.parametrize("mode", LAYOUTS)
def test_types_take_turns(world, mode) -> None:
    own = replace(OWN, **(EXACT if mode == "high_throughput" else {}), ranks=min(3, world.most))
    check(world, play_in_turns, own, rounds(own, out="bfloat16", weighting="topk"))


@pytest.mark.parametrize("mode", LAYOUTS)
def test_one_handle_serves_all_types(world, mode) -> None:
    own = replace(OWN, **(EXACT if mode == "high_throughput" else {}), ranks=min(3, world.most))
    turns = [(setup, replace(round_, seed=5)) for setup, round_ in rounds(own, routing="holes", weighting="topk")]
    check(world, play_by_one_handle, own, turns)


@pytest.mark.parametrize("mode", LAYOUTS)
def test_types_at_once(world, mode) -> None:
    own = replace(OWN, **(EXACT if mode == "high_throughput" else {}), ranks=min(3, world.most))
    check(world, play_at_once, own, rounds(own)[1:5])


@pytest.mark.parametrize("mode", LAYOUTS)
def test_long_rows(world, made_for, mode) -> None:
    """Rows of many packets and chunks, as bfloat16 forward and back, and as fp8 with scales between."""
    wide = made_for.large
    own = Setup(ranks=2, experts=6, top_k=4, hidden=wide, max_tokens=40, mode=mode)
    quantised = replace(own, dtype="float8_e4m3fn", payloads=((-(-wide // 128), "float32"),))
    narrow = replace(own, hidden=wide // 2, combine_hidden=wide // 2)
    base = Round((40, 37), rows="bfloat16", out="bfloat16")
    turns = [
        (setup, replace(base, layout=layout, seed=seed))
        for seed, (setup, layout) in enumerate(
            (setup, layout) for layout in LAYOUTS[mode] for setup in (own, quantised, narrow, own)
        )
    ]
    check(world, play_in_turns, own, turns)


@st.composite
def kinds(draw: Any) -> Setup:
    """Rows of any type, in the group that `OWN` makes."""
    dtypes = st.sampled_from(["uint8", "int16", "bfloat16", "float32", "float8_e5m2", "int64"])
    floats = st.sampled_from(["float32", "bfloat16", "float16"])
    return replace(
        OWN,
        ranks=2,
        hidden=draw(st.integers(1, 70)),
        dtype=draw(dtypes),
        payloads=tuple(draw(st.lists(st.tuples(st.integers(1, 20), dtypes), max_size=3))),
        combine_dtype=draw(floats),
        combine_hidden=draw(st.integers(1, 70)),
    )


@settings(SETTINGS, max_examples=max(1, EXAMPLES // 5))
@given(data=st.data())
def test_any_types(backend: str, data: Any) -> None:
    mode = data.draw(st.sampled_from(list(LAYOUTS)))
    exact = EXACT if mode == "high_throughput" else {}
    own = replace(OWN, ranks=2, **exact)
    turns = []
    for seed in range(data.draw(st.integers(1, 4))):
        setup = replace(data.draw(kinds()), **exact)
        tokens = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
        layout = data.draw(st.sampled_from(LAYOUTS[mode]))
        turns.append((setup, Round(tokens, seed=seed, layout=layout, own=data.draw(st.booleans()))))
    check(partial(harness.Threads, backend), play_in_turns, own, turns)


# ---- what is refused -----------------------------------------------------------------------------


def differ(env: Any) -> list[Any]:
    """Ranks that name other rows: each hears of it, and the group goes on."""
    heard = []
    with make(env, OWN, TYPES) as group:
        ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        tokens = {t: env.backend.tensor(np.ones((2, t.hidden), np.float32)) for t in TYPES[1:2]}
        own = env.backend.tensor(np.ones((2, OWN.hidden), tw.tensors.numpy_dtype("bfloat16")))
        typed = group.rows(TYPES[1].row_type())
        for _ in range(2):
            handle = group.route(ids)
            if env.rank == 0:
                heard.append(caught(typed.dispatch, handle, tokens[TYPES[1]]))
            else:
                heard.append(caught(group.dispatch, handle, own))
            if handle.leased:
                handle.release()
            received = group.dispatch(group.route(ids), own)
            group.combine(received.handle, received.tokens)
        received = group.dispatch(group.route(ids), own)
        wide = env.backend.tensor(np.ones((OWN.ranks, OWN.max_tokens, 33), np.float32))
        if env.rank == 0:
            heard.append(caught(typed.combine, received.handle, wide))
        else:
            heard.append(caught(group.combine, received.handle, received.tokens))
        received.handle.release()
        received = group.dispatch(group.route(ids), own)
        group.combine(received.handle, received.tokens)
    return heard


def test_types_that_differ_are_told(world, made_for) -> None:
    if not made_for.knows_calls:
        pytest.skip("blocks of different sizes do not meet, which ends the group: CallMismatch")
    if world.most < 3:
        pytest.skip("needs three ranks")
    for heard in world(3).run(differ):
        for outcome in heard[:2]:
            said(outcome, "twBoundMismatch", "its map, the counting or the types of rows of dispatch")
        said(heard[2], "twBoundMismatch", "differ in the group or the rows of combine")


def refuse(env: Any) -> list[Any]:
    with make(env, OWN, ()) as group:
        return [
            caught(group.rows, 25),
            caught(group.rows, tw.RowType(25)),
            caught(group.rows, tw.RowType(24, payloads={"s": (1, "uint8")})),
            caught(group.rows, tw.RowType(0)),
            caught(group.rows, tw.RowType(24, "complex64")),
            caught(group.rows, tw.RowType(2, combine_hidden=25)),
            caught(group.rows, tw.RowType(2, combine_dtype="int32")),
        ]


def test_rows_without_room_are_refused(world) -> None:
    (heard,) = world(1).run(refuse)
    for outcome, pattern in zip(
        heard,
        [
            r"kind is 25; it must be a RowType",
            r"hidden is 25; it must be from 1 to 24",
            r"takes rows of 49 bytes; dispatch_room has room for 48",
            r"hidden is 0; it must be from 1 to 24",
            r"complex64",
            r"combine_hidden is 25; it must be from 1 to 24",
            r"combine_dtype is int32",
        ],
        strict=True,
    ):
        said(outcome, "twInvalidArgument", pattern)


def play_with_leases(env: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> list[Got]:
    """Each handle's counts are exchanged for a lease, which a dispatch of other rows does not use."""
    with make(env, own, [setup for setup, _ in turns]) as group:
        got = []
        for setup, round_ in turns:
            used = group.leases.used
            player = Player(env, group, one(setup, round_), group.rows(setup.row_type()))
            handle = player.handle(round_)
            received, mine = exchange(player, round_, handle)
            sent = (setup.hidden, setup.dtype, setup.payloads)
            assert received.leased == (sent == (own.hidden, own.dtype, own.payloads))
            got.append(mine)
            assert received.leased or group.leases.used <= used, "a lease is kept that nothing came to"
        return got


def test_leases_are_of_the_groups_own_rows(world, made_for) -> None:
    if "leases" in made_for.lacks:
        pytest.skip("there are no leases here")
    own = replace(OWN, **EXACT, lease_bytes=1 << 16, ranks=min(3, world.most))
    turns = [(setup, round_) for setup, round_ in rounds(own, lease=True) if round_.layout == "flat"]
    check(world, play_with_leases, own, turns)


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any, mode: str) -> list[bool]:
    """A graph with pairs of the group's rows and of others by one handle, replayed with other inputs; beside it calls
    that are not captured."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    settings = {"experts": 7, "top_k": 3, "hidden": 24, "max_tokens": 30, "dtype": "float32"}
    settings |= {"mode": mode, "combine_dtype": "float32", "timeout": PATIENT}
    if mode == "high_throughput":
        settings["max_recv_tokens"] = 30 * env.nranks
    tokens = (30, 17)[env.rank]
    ids = backend.tensor((rng.integers(0, 7, (tokens, 1)) + np.arange(3)).astype(np.int32) % 7)
    widths = (24, 33, 7)
    inputs, outputs = ([backend.tensor(np.zeros((tokens, w), np.float32)) for w in widths] for _ in range(2))
    with tw.Group(env.comm, dispatch_room=200, combine_room=200, **settings) as group:
        calls = [group, *(group.rows(tw.RowType(w, "float32", combine_dtype="float32")) for w in widths[1:])]
        handle = group.route(ids)
        if mode == "high_throughput":
            group.exchange_counts(handle)

        def pairs() -> None:
            for rows, x, out in zip(calls, inputs, outputs, strict=True):
                received = rows.dispatch(handle, x)
                rows.combine(handle, received.tokens, out=out)

        pairs()
        with graph.capture():
            pairs()
        good = []
        for _ in range(3):
            for x in inputs:
                x[...] = backend.tensor(rng.integers(-50, 50, tuple(x.shape)).astype(np.float32))
            pairs()
            want = [backend.array(out).copy() for out in outputs]
            for out in outputs:
                out[...] = 0
            graph.replay()
            good += [np.array_equal(backend.array(out), sums) for out, sums in zip(outputs, want, strict=True)]
            good.append(all(bool((sums != 0).any()) for sums in want))
        return good


@emulated_alone
@pytest.mark.parametrize("mode", LAYOUTS)
def test_graphs_hold_calls_of_several_types(world, mode) -> None:
    for good in world(2).run(replay, mode):
        assert all(good), good
