"""Groups of both modes: each call is of low latency or of high throughput, by its layout or its bound. Every rank gets
the oracle's bits for it, by whatever handle, and ranks that differ in it are told."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
import sharing
from cases import Case, Got, Round, Setup, one, verify
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, caught, said
from hypothesis import example, given
from player import Player
from strategies import SETTINGS
from strategies import cases as any_case
from test_exchange import check
from test_growth import distinct
from test_properties import PROCESSES, THREADS, judge
from test_row_types import exchange

import tokenway as tw

AUTO = {"mode": "auto", "low_latency_tokens": 4}
OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=8, row_alignment=4, **AUTO)
LAYOUTS = ("rank_major", "flat", "expert_major", "grouped", "grouped_by_bound")


def make(env: Any, own: Setup, **changes: Any) -> tw.Group:
    return tw.Group(env.comm, timeout=PATIENT, **(own.settings() | changes))


def own_of(world: Any, **changes: Any) -> Setup:
    return replace(OWN, ranks=min(3, world.most), **changes)


# ---- whatever the shape, the oracle's bits ------------------------------------------------------------------

HARD = Case(
    Setup(
        ranks=4,
        experts=7,
        top_k=5,
        hidden=3,
        payloads=((1, "uint8"), (17, "uint8")),
        lanes=2,
        row_alignment=8,
        **AUTO,
    ),
    (
        (
            Round((0, 4, 1, 0), routing="holes", send_dispatch=True, layout="expert_major"),
            Round((8, 8, 8, 8), seed=1, layout="flat", chosen=True),
        ),
        (Round((0, 0, 0, 0), seed=2), Round((3, 0, 8, 1), seed=3, routing="one", layout="grouped")),
        (
            Round((4, 4, 4, 4), seed=4, bound=4, chosen=True, again=True, reuse=True),
            Round((0, 0, 0, 0), layout="flat"),
        ),
    ),
    slow=1,
)
TIGHT = replace(HARD, setup=replace(HARD.setup, max_recv_tokens=5, overflow="drop"))


@pytest.mark.processes
@SETTINGS
@example(HARD)
@example(TIGHT)
@given(any_case(max_ranks=min(4, PROCESSES), auto=True))
def test_any_case_on_processes(backend: str, case: Case) -> None:
    judge(harness.Processes(backend, case.setup.ranks), case)


@SETTINGS
@example(HARD)
@example(TIGHT)
@given(any_case(max_ranks=THREADS, auto=True))
def test_any_case_on_threads(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


# ---- one routing --------------------------------------------------------------------------------------------


def play_by_one_handle(env: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> list[Got]:
    """All turns by the routing of the first, whose counts are exchanged before its first turn of high throughput."""
    kinds = [setup.row_type() for setup, _ in turns]
    rooms = {
        "dispatch_room": max(kind.dispatch_bytes for kind in kinds),
        "combine_room": max(kind.combine_bytes for kind in kinds),
    }
    with make(env, own, **rooms) as group:
        before, handle, got = group.window_bytes().window, None, []
        for setup, round_ in turns:
            player = Player(env, group, one(setup, round_), None if setup == own else group.rows(setup.row_type()))
            if handle is None:
                handle = player.handle(round_)
            elif round_.exact and handle.rows_of("flat") is None:
                player.count(round_, handle, False)
                handle.learn_rows()
            got.append(exchange(player, round_, handle)[1])
        assert group.window_bytes().window == before
        return got


def check_turns(world: Any, own: Setup, turns: list[tuple[Setup, Round]]) -> None:
    by_rank = world(own.ranks).run(play_by_one_handle, own, turns)
    for i, (setup, round_) in enumerate(turns):
        verify(setup, round_, [mine[i] for mine in by_rank])


def in_turns(order: str, base: Round) -> list[Round]:
    """Rounds by one routing; order: the layouts' first letters."""
    names = {name[0]: name for name in LAYOUTS[:4]} | {"b": "grouped_by_bound"}
    return [replace(base, layout=names[letter]) for letter in order]


@pytest.mark.parametrize("order", ["rfegfrge", "ffrfeggrr", "egrrf", "gbgbefbg", "bbgrbf"])
def test_one_handle_serves_both(world, order) -> None:
    """What high throughput keeps of a routing (marks, metadata, counts) outlives dispatches of low latency."""
    own = own_of(world)
    base = Round((4, 0, 3)[: own.ranks], seed=3, routing="holes", out="bfloat16")
    check_turns(world, own, [(own, round_) for round_ in in_turns(order, base)])


@pytest.mark.parametrize("room", [1, 4, 7])
def test_low_latency_drops_nothing(world, room) -> None:
    """Before and after dispatches by the same handle that drop rows."""
    own = own_of(world, max_recv_tokens=room, overflow="drop")
    base = Round((4, 4, 3)[: own.ranks], seed=1)
    for order in ("rfrgef", "frgre", "bgbfb"):
        check_turns(world, own, [(own, round_) for round_ in in_turns(order, base)])


def test_rows_of_other_types(world) -> None:
    own = own_of(world)
    others = (
        replace(own, dtype="float8_e4m3fn", payloads=((3, "float32"),)),
        replace(own, hidden=33, dtype="float32", combine_dtype="float32"),
    )
    rounds = in_turns("rfegfr", Round((4, 2, 0)[: own.ranks], seed=5))
    turns = [(setup, round_) for round_ in rounds for setup in (own, *others)]
    check_turns(world, own, turns)


def test_two_routings_at_once(world) -> None:
    """Under way together, of each mode and of both."""
    own = own_of(world, lanes=3)
    tokens = (4, 3, 0)[: own.ranks]
    case = Case(
        own,
        tuple(
            tuple(
                Round(tokens, seed=10 * i + j, layout=layout, send_dispatch=True, send_combine=True, late=j == 1)
                for j, layout in enumerate(flight)
            )
            for i, flight in enumerate((("rank_major", "flat", "grouped"), ("grouped", "expert_major", "rank_major")))
        ),
        slow=0,
    )
    check(world, case)


@pytest.mark.parametrize("hidden", [16, 96])
def test_more_than_a_round_of_tokens(world, made_for, hidden) -> None:
    """Of Simple rows and packets, where a device makes the marks of later tokens once."""
    if made_for.most_ranks("threads") < 2:
        pytest.skip("needs two ranks")
    own = Setup(ranks=2, experts=4, top_k=2, hidden=hidden, max_tokens=640, mode="auto", low_latency_tokens=530)
    base = Round((530, 520), seed=2, rows="bfloat16", out="bfloat16")
    check_turns(world, own, [(own, round_) for round_ in in_turns("rfrf", base)])


def replay(env: Any, tokens: tuple[int, int]) -> list[bool]:
    """A pair of low latency that was captured, replayed between calls of high throughput by the same handle."""
    graph = Graph(env)
    array, tensor = env.backend.array, env.backend.tensor
    own = replace(OWN, ranks=2, max_tokens=2 * max(tokens), low_latency_tokens=max(tokens))
    mine = tokens[env.rank]
    x = tensor(np.random.default_rng(env.rank).standard_normal((mine, own.hidden)).astype(np.float32))
    spread = (np.arange(3 * mine, dtype=np.int32).reshape(-1, 3) * 2 + env.rank) % own.experts
    ids = tensor(distinct(spread, own.experts))
    with make(env, replace(own, dtype="float32", combine_dtype="float32")) as group:
        handle = group.route(ids)
        low, high = (tensor(np.zeros((mine, own.hidden), np.float32)) for _ in range(2))

        def pair(out: Any, layout: str) -> Any:
            return group.combine(handle, group.dispatch(handle, x, layout=layout).tokens, out=out)

        first = array(pair(low, "rank_major")).copy()
        with graph.capture():
            pair(low, "rank_major")
        group.exchange_counts(handle)
        good = []
        for _ in range(3):
            for out, call in ((high, lambda: pair(high, "flat")), (low, graph.replay)):
                out[...] = 0
                call()
                good.append(np.array_equal(array(out), first))
        return good


@emulated_alone
@pytest.mark.parametrize("tokens", [(4, 2), (530, 300)])
def test_a_graph_keeps_its_mode(world, tokens) -> None:
    for good in world(2).run(replay, tokens):
        assert all(good), good


# ---- what chooses -------------------------------------------------------------------------------------------


def choose(env: Any) -> list[Any]:
    seen: list[Any] = []
    with make(env, replace(OWN, ranks=env.nranks)) as group:
        ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        x = env.backend.tensor(np.ones((2, OWN.hidden), tw.tensors.numpy_dtype("bfloat16")))
        handle = group.route(ids)
        seen.append([group.chooses(bound) for bound in (None, 1, 4, 5, 8)])
        group.exchange_counts(handle)
        for given in ({}, {"bound": 4}, {"bound": 2}, {"bound": 5}, {"bound": 8}, {"layout": "expert_major"}):
            received = group.dispatch(handle, x, **given)
            seen.append((received.layout, tuple(received.tokens.shape[1:-1])))
            assert env.backend.array(group.combine(handle, received.tokens)).shape == (2, OWN.hidden)
        seen.append([caught(group.chooses, bound) for bound in (0, 9, "many")])
        assert (group.mode, group.low_latency_tokens, group.exact) == ("auto", 4, False)
    for mode in ("low_latency", "high_throughput"):
        with make(env, replace(OWN, ranks=env.nranks, mode=mode, low_latency_tokens=None, row_alignment=None)) as group:
            assert [group.chooses(bound) for bound in (None, 1, 8)] == [mode] * 3
            assert group.low_latency_tokens == 0
    return seen


def test_a_bound_chooses(world) -> None:
    ranks = min(2, world.most)
    low, high = "low_latency", "high_throughput"
    wanted = [
        *(("flat", ()), ("rank_major", (4,)), ("rank_major", (2,)), ("flat", ()), ("flat", ())),
        ("expert_major", (4 * ranks,)),
    ]
    for chosen, *shapes, refused in world(ranks).run(choose):
        assert chosen == [high, low, low, high, high]
        assert shapes == wanted
        for outcome, value in zip(refused, ("0", "9", "'many'"), strict=True):
            said(outcome, "twInvalidArgument", f"bound is {value}; it must be None or an integer from 1 to 8")


# ---- growth and leases --------------------------------------------------------------------------------------


def grow(env: Any, own: Setup, turns: list[Round]) -> list[Got]:
    with make(env, own) as group:
        first, *others = turns
        old = Player(env, group, one(own, first))
        handle = old.handle(first)
        got = [exchange(old, first, handle)[1]]
        for i, round_ in enumerate(others):
            group.reserve(max_tokens=20 * (i + 1))
            assert group.low_latency_tokens == own.low_latency_tokens
            if round_.exact and handle.rows_of("flat") is None:
                old.count(round_, handle, False)
                handle.learn_rows()
            got.append(exchange(old, round_, handle)[1])
            larger = replace(own, max_tokens=group.max_tokens)
            most = group.max_tokens if round_.exact else group.low_latency_tokens
            new = replace(round_, tokens=(most, 0, most - 1)[: own.ranks], seed=round_.seed + 7)
            (flight,) = Player(env, group, one(larger, new)).flights()
            verify_shapes(flight, new, env.rank)
        return got


def verify_shapes(flight: list[Got], round_: Round, rank: int) -> None:
    (mine,) = flight
    assert len(mine.out) == round_.tokens[rank]


def test_low_latency_stays_as_large_when_a_group_grows(world) -> None:
    own = own_of(world)
    turns = in_turns("rfegr", Round((4, 0, 3)[: own.ranks], seed=2))
    by_rank = world(own.ranks).run(grow, own, turns)
    for i, round_ in enumerate(turns):
        verify(own, round_, [mine[i] for mine in by_rank])


def lease(env: Any, own: Setup, turns: list[Round]) -> list[Got]:
    """A dispatch of low latency lets go of what counts have announced; then rows come to the window."""
    with make(env, own) as group:
        got = []
        handle = None
        for round_ in turns:
            player = Player(env, group, one(own, round_))
            if handle is None:
                handle = player.handle(replace(round_, layout="flat", lease=True))
                assert group.leases.used > 0
            received, mine = exchange(player, round_, handle)
            assert not received.leased and group.leases.used == 0
            got.append(mine)
        player.count(replace(turns[0], lease=True), handle, False)
        received, _ = exchange(player, replace(turns[0], layout="flat"), handle)
        assert received.leased
        return got


def test_low_latency_takes_no_lease(world, made_for) -> None:
    if "leases" in made_for.lacks:
        pytest.skip("there are no leases here")
    own = own_of(world, lease_bytes=1 << 16)
    turns = in_turns("rfe", Round((4, 0, 3)[: own.ranks], seed=6))
    by_rank = world(own.ranks).run(lease, own, turns)
    for i, round_ in enumerate(turns):
        verify(own, round_, [mine[i] for mine in by_rank])


def play_sharing(env: Any, setups: tuple[Setup, ...], turns: list[sharing.Turn]) -> list[Got]:
    with ExitStack() as stack:
        return sharing.in_turns(env, sharing.make(env, setups, stack), setups, turns)


@pytest.mark.parametrize("first", [0, 1])
def test_shares_a_window(world, first) -> None:
    """With a group of low latency, in whose window it is, or the other way round."""
    setups = sharing.of_ranks(world, (OWN, sharing.TARGET))
    n = setups[0].ranks
    of_both = [Round((4, 1, 3)[:n], layout=layout) for layout in LAYOUTS] + [Round((8, 0, 5)[:n], layout="flat")]
    of_one = [Round((9, 2, 0)[:n]), Round((1, 9, 9)[:n], layout="expert_major")]
    order = [(first, of_both[i % 6]) if i % 3 else (1 - first, of_one[i % 2]) for i in range(24)]
    turns = [(which, replace(round_, seed=seed)) for seed, (which, round_) in enumerate(order)]
    sharing.check(world, play_sharing, (setups[first], setups[1 - first]), turns)


def count_between(env: Any, own: Setup, round_: Round) -> tuple[Got, Got]:
    """Counts of a handle that holds the lane of a dispatch of low latency take that lane, and give it back."""
    with make(env, own) as group:
        player = Player(env, group, one(own, round_))
        handle = player.handle(round_)
        received = player.dispatch(round_, handle, player.payloads(round_), False)
        first = player.snapshot(round_, received)
        rows = player.rows(round_, received, first)
        group.exchange_counts(handle)
        first.out = player.array(player.combine(round_, handle, rows, False))
        return first, exchange(player, replace(round_, layout="flat"), handle)[1]


def test_counts_between_a_dispatch_and_its_combine(world) -> None:
    own = own_of(world)
    round_ = Round((4, 1, 3)[: own.ranks], seed=8)
    by_rank = world(own.ranks).run(count_between, own, round_)
    verify(own, round_, [mine[0] for mine in by_rank])
    verify(own, replace(round_, layout="flat"), [mine[1] for mine in by_rank])


# ---- what is refused ----------------------------------------------------------------------------------------


def differ(env: Any, most: int) -> list[Any]:
    """One rank's dispatch is of the other mode: each hears of it, and the group goes on."""
    heard = []
    with make(env, replace(OWN, ranks=env.nranks, low_latency_tokens=most)) as group:
        ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        x = env.backend.tensor(np.ones((2, OWN.hidden), tw.tensors.numpy_dtype("bfloat16")))
        for other in (0, 1):
            handle = group.route(ids)
            group.exchange_counts(handle)
            given = {"bound": most} if env.rank == other else {"layout": "flat"}
            heard.append(caught(group.dispatch, handle, x, **given))
            if handle.leased:
                handle.release()
            for given in ({"bound": most}, {"layout": "grouped"}):
                received = group.dispatch(handle, x, **given)
                group.combine(handle, received.tokens)
    return heard


@pytest.mark.parametrize("most", [4, 8])
def test_ranks_that_differ_are_told(world, made_for, most) -> None:
    """Also where a bound of low latency is that of high throughput, max_tokens."""
    if not made_for.knows_calls:
        pytest.skip("blocks of different sizes do not meet, which ends the group: CallMismatch")
    if world.most < 2:
        pytest.skip("needs two ranks")
    what = "its map, the counting, the mode or the types of rows" if most == 8 else "ranks may differ in the mode"
    for heard in world(min(3, world.most)).run(differ, most):
        for outcome in heard:
            said(outcome, "twBoundMismatch", what)


def refuse(env: Any) -> list[Any]:
    knows = env.backend.knows_calls  # else a bad bound ends the group
    bad = {"layout": "rank_major" if knows else "sideways"}
    with make(env, OWN) as group:
        tensor = env.backend.tensor
        x = tensor(np.ones((2, OWN.hidden), tw.tensors.numpy_dtype("bfloat16")))
        many = tensor(np.ones((5, OWN.hidden), tw.tensors.numpy_dtype("bfloat16")))
        handle = group.route(tensor(np.arange(6, dtype=np.int32).reshape(2, 3)))
        large = group.route(tensor(np.arange(3, dtype=np.int32).repeat(5).reshape(3, 5).T.copy()))
        heard = [
            caught(group.dispatch, handle, x),
            caught(group.dispatch, handle, x, bound=5),
            caught(group.dispatch, handle, x, **bad, bound=5),
            caught(group.dispatch, handle, x, **bad, bound=1 if knows else 3),
            caught(group.dispatch, handle, x, layout="flat", bound=4),
            caught(group.dispatch, handle, x, layout="sideways"),
            caught(group.dispatch, large, many, layout="expert_major"),
            caught(group.dispatch, large, many, bound=4),
        ]
        if handle.leased:
            handle.release()
        if large.leased:
            large.release()
        received = group.dispatch(handle, x, bound=4)
        heard.append(caught(group.combine, handle, received.tokens, layout="flat"))
        if handle.leased:
            handle.release()
        group.exchange_counts(handle)
        received = group.dispatch(handle, x)
        heard.append(caught(group.combine, handle, received.tokens, layout="rank_major"))
        if handle.leased:
            handle.release()
        received = group.dispatch(handle, x, bound=3)
        group.combine(handle, received.tokens)
    return heard


def test_what_is_refused(world, made_for) -> None:
    (heard,) = world(1).run(refuse)
    wanted: list[tuple[str, str]] = [
        ("twInvalidUsage", "counts have not been exchanged"),
        ("twInvalidUsage", "counts have not been exchanged"),
        ("twInvalidArgument", r"bound is 5; it must be from the handle's tokens, 2, to low_latency_tokens, 4"),
        ("twInvalidArgument", r"bound is 1; it must be from the handle's tokens, 2, to low_latency_tokens, 4"),
        ("twInvalidUsage", "counts have not been exchanged"),
        ("twInvalidArgument", r"layout is 'sideways'; it must be 'rank_major', 'expert_major', 'grouped_by"),
        ("twInvalidArgument", r"the handle has 5 tokens, and low latency takes up to low_latency_tokens, 4: it"),
        ("twInvalidArgument", r"the handle has 5 tokens, and low latency takes up to low_latency_tokens, 4: it"),
        ("twInvalidArgument", r"layout is 'flat'; after a dispatch of low latency it must be 'rank_major', 'expert"),
        ("twInvalidArgument", r"layout is 'rank_major'; after a dispatch of high throughput it must be 'flat' or"),
    ]
    if not made_for.knows_calls:
        wanted[2:4] = [("twInvalidArgument", "layout is 'sideways'")] * 2
    for outcome, (code, text) in zip(heard, wanted, strict=True):
        said(outcome, code, text)


def settings_refused(env: Any) -> list[Any]:
    own = replace(OWN, ranks=env.nranks)
    heard = [caught(make, env, replace(own, low_latency_tokens=most)) for most in (0, 9)]
    heard.append(caught(make, env, replace(own, mode="high_throughput")))
    heard.append(caught(make, env, replace(own, low_latency_tokens=1 + env.rank)))
    return heard


def test_settings_that_are_refused(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    for heard in world(2).run(settings_refused):
        for outcome, (code, text) in zip(
            heard,
            [
                ("twInvalidArgument", "low_latency_tokens is 0; it must be from 1 to 8"),
                ("twInvalidArgument", "low_latency_tokens is 9; it must be from 1 to 8"),
                ("twInvalidArgument", "low_latency_tokens is 4; only 'auto' has it, elsewhere it must be 0"),
                ("twConfigMismatch", "low_latency_tokens differs: rank 0 has 1, rank 1 has 2"),
            ],
            strict=True,
        ):
            said(outcome, code, text)


def test_slots_lie_in_the_room_for_rows() -> None:
    settings = replace(OWN, low_latency_tokens=None, hidden=4096, combine_hidden=1).settings()

    def window(**changes: Any) -> int:
        return tw.window_bytes(2, **(settings | changes)).window

    plain = window(mode="high_throughput", max_recv_tokens=16)
    assert {window(max_recv_tokens=16, low_latency_tokens=most) for most in (1, 8, None)} == {plain}
    assert window(max_recv_tokens=2, low_latency_tokens=8) == plain > window(mode="high_throughput", max_recv_tokens=2)
