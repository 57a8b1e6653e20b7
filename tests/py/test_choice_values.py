"""Behaviour: a value of each choice that a combine returns beside its rows. Each is the one of the rank that served
the choice, bit for bit, whatever the layout, the mode and the rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import harness
import numpy as np
import player
import pytest
from cases import (
    DISPATCHES,
    LAYOUTS,
    Case,
    Round,
    Setup,
    exchange_of,
    fewer_ranks,
    make_ids,
    make_payloads,
    one,
    same,
    verify,
)
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, caught
from hypothesis import example, given, settings
from player import Player, spread
from strategies import EXAMPLES, SETTINGS
from strategies import cases as any_case
from test_properties import HARD

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=9)
THREADS = min(5, harness.most_ranks("threads"))


def room(setup: Setup) -> int:
    """combine_room for rows with values beside them."""
    return setup.width * numpy_dtype(setup.combine_dtype).itemsize + 4 * setup.top_k


def make(env: Any, setup: Setup, **changes: Any) -> tw.Group:
    return tw.Group(env.comm, timeout=PATIENT, **({"combine_room": room(setup)} | setup.settings() | changes))


def any_bits(round_: Round, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a rank: any float32, no two alike but by chance. What is no choice of this rank has some too."""
    rng = np.random.default_rng([round_.seed, rank, 7])
    return np.frombuffer(rng.bytes(4 * int(np.prod(shape))), np.float32).reshape(shape)


class Valued(Player):
    """A player whose combines have values of choices: its rows are pairs, and so is what it gets."""

    def rows(self, round_: Round, received: tw.Received, got: Any) -> Any:
        values = any_bits(round_, self.env.rank, got.ids.shape)
        return super().rows(round_, received, got), self.tensor(spread(values, round_.strided))

    def combine(self, round_: Round, handle: tw.Handle, rows: Any, send_only: bool) -> Any:
        out = None
        if round_.own:
            tokens = round_.tokens[self.env.rank]
            out = (
                self.rubbish((tokens, self.setup.width), round_.out),
                self.rubbish((tokens, self.setup.top_k), "float32"),
            )
        bias, in_place = self.bias(round_)
        if in_place:
            out = bias, None if out is None else out[1]
        return self.calls.combine(
            handle,
            rows[0],
            choice_values=rows[1],
            bias=bias,
            weighting=round_.weighting,
            dtype=round_.out,
            out=out,
            send_only=send_only,
            sm_limit=self.limit(round_, 2),
        )

    def array(self, tensor: Any) -> Any:
        return tuple(map(super().array, tensor)) if type(tensor) is tuple else super().array(tensor)


def play(env: Any, case: Case) -> Any:
    case = player.possible(env, case)
    with make(env, case.setup) as group:
        return Valued(env, group, case).flights()


def judge_round(setup: Setup, round_: Round, got: list[Any]) -> None:
    """Rows as ever, and each value."""
    rows = [replace(g, out=g.out[0], late=None if g.late is None else g.late[0]) for g in got]
    verify(setup, round_, rows)
    x = exchange_of(setup, round_)
    payloads = [list(of) for of in zip(*(make_payloads(setup, round_, r) for r in range(setup.ranks)), strict=True)]
    shapes = [DISPATCHES[round_.layout](x, r, payloads).ids.shape for r in range(setup.ranks)]
    given = [any_bits(round_, r, shape) for r, shape in enumerate(shapes)]
    wanted = ref.choice_values(x, given, layout=round_.named)
    for rank, (mine, want) in enumerate(zip(got, wanted, strict=True)):
        where = f"rank {rank} of {round_}\n in {setup}"
        for values in (mine.out[1], *([] if mine.late is None else [mine.late[1]])):
            assert values.dtype == np.float32
            same("choice values", values.view(np.uint32), want.view(np.uint32), where)


def check(world: Any, *cases: Case) -> None:
    for case in (fewer_ranks(case, world.most) for case in cases):
        by_rank = world(case.setup.ranks).run(play, case)
        for f, flight in enumerate(case.flights):
            for i, round_ in enumerate(flight):
                judge_round(case.setup, round_, [mine[f][i] for mine in by_rank])


# ---- whatever the shape, the oracle's bits -------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS["low_latency"], *LAYOUTS["high_throughput"]])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_layouts(world, layout, top_k) -> None:
    """Ids of -1, ranks without tokens, outputs that are given, calls that are sent alone, further combines."""
    mode = "high_throughput" if layout in LAYOUTS["high_throughput"] else "low_latency"
    setup = replace(OWN, mode=mode, top_k=top_k, lanes=2)
    base = Round((9, 0, 4), layout=layout)
    rounds = (
        base,
        replace(base, seed=1, routing="holes", own=True, send_combine=True, late=True),
        replace(base, seed=2, strided=True, rows="bfloat16", out="bfloat16", weighting="none", release=True),
        replace(base, seed=3, routing="one", tokens=(0, 9, 9)),
        replace(base, seed=4, identity=True, rows="bfloat16"),
        replace(base, seed=5, routing="none", own=True),
    )
    together = tuple(replace(r, send_dispatch=True) for r in rounds[:2])
    check(world, Case(setup, (*((r,) for r in rounds), together), slow=1))


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_ranks(world, nranks) -> None:
    """More choices than ranks, and than a warp has threads."""
    world(nranks)
    setup = Setup(ranks=nranks, experts=70, top_k=40, max_tokens=5, hidden=5, mode="auto", low_latency_tokens=5)
    base = Round((5, 3, 0, 4, 1)[:nranks])
    rounds = [replace(base, layout=name, seed=i) for i, name in enumerate(sum(LAYOUTS.values(), ()))]
    check(world, one(setup, *rounds, *(replace(r, seed=r.seed + 9, routing="holes") for r in rounds)))


KINDS = [("low_latency", 0), ("low_latency", 2), ("high_throughput", 0), ("high_throughput", 2)]


@pytest.mark.parametrize(("mode", "limit"), KINDS)
def test_rows_of_all_kernels(world, made_for, mode, limit) -> None:
    """Rows that go as packets and in chunks, by many blocks and by few, of the usual kind and of others."""
    setup = Setup(ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=600, mode=mode, sm_limit=limit)
    base = Round((600, 537), weighting="none", rows="bfloat16", out="bfloat16")
    first, second = LAYOUTS[mode][:2]
    rounds = (
        replace(base, layout=first, identity=True),
        replace(base, layout=second, seed=1, out="float32"),
        replace(base, layout=first, seed=2, tokens=(40, 3), bound=40 if mode == "low_latency" else None),
        replace(base, layout=first, seed=3, weighting="topk", rows="float32"),
    )
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("layout", LAYOUTS["high_throughput"])
@pytest.mark.parametrize("inbox", [3, 9, 39])
def test_combines_in_parts(world, layout, inbox) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, inbox_tokens=inbox, lanes=2)
    base = Round((40, 0, 31), layout=layout)
    rounds = (
        base,
        replace(base, seed=1, tokens=(9, 40, 1), routing="holes", send_combine=True, late=True),
        replace(base, seed=2, identity=True, rows="bfloat16", release=True),
        replace(base, seed=3, tokens=(3, 2, 1), bound=3, own=True),
        replace(base, seed=4, routing="one"),
    )
    check(world, one(setup, *rounds, slow=2))


def test_rows_that_were_dropped(world) -> None:
    """Their choices have no value: 0, whatever the window holds from before."""
    setup = replace(OWN, mode="high_throughput", max_tokens=40, max_recv_tokens=25, overflow="drop")
    base = Round((40, 40, 33))
    rounds = [replace(base, layout=layout, seed=i) for i, layout in enumerate(2 * LAYOUTS["high_throughput"])]
    check(world, one(setup, *rounds, replace(base, layout="flat", seed=9, room=7)))


@pytest.mark.parametrize("policy", ["round_robin", "balanced"])
def test_replicas(world, policy) -> None:
    """Experts in several slots: the value is of the rank whose slot served the choice."""
    table = (0, 1, 2, 0, 3, 4, 0, 1, -1, 4)
    setup = replace(OWN, experts=5, top_k=3, slot_expert=table, policy=policy, mode="auto", low_latency_tokens=9)
    base = Round((9, 5, 8))
    check(world, one(setup, *(replace(base, layout=name, seed=i) for i, name in enumerate(sum(LAYOUTS.values(), ())))))


class Worlds:
    """Threads of a backend, as the fixture `world` gives them."""

    def __init__(self, backend: str):
        self.most = harness.BACKENDS[backend].most_ranks("threads")
        self._of = partial(harness.Threads, backend)

    def __call__(self, ranks: int) -> Any:
        return self._of(ranks)


FEWER = settings(SETTINGS, max_examples=max(1, EXAMPLES // 3))


@FEWER
@example(case=HARD)
@given(case=any_case(max_ranks=THREADS))
def test_any_case_of_low_latency(backend: str, case: Case) -> None:
    check(Worlds(backend), case)


@FEWER
@given(case=any_case(max_ranks=THREADS, exact=True, max_flights=2))
def test_any_case_of_high_throughput(backend: str, case: Case) -> None:
    check(Worlds(backend), case)


@FEWER
@given(case=any_case(max_ranks=THREADS, auto=True, replicas=True, max_flights=2))
def test_any_case_of_both_modes(backend: str, case: Case) -> None:
    check(Worlds(backend), case)


# ---- where values lie ----------------------------------------------------------------------------


def in_place(env: Any, mode: str) -> list[bool]:
    """Values that are what has come: a payload's view of the window, of which no peer may have overwritten any."""
    setup = replace(OWN, mode=mode, payloads=((OWN.top_k, "float32"),))
    good = []
    with make(env, setup) as group:
        tensor, array = env.backend.tensor, env.backend.array
        for seed in range(4):
            round_ = Round((9, 4, 7), seed=seed, routing="holes")
            tokens, _ = make_payloads(setup, round_, env.rank)
            ids, _ = make_ids(setup, round_, env.rank)
            mine = any_bits(round_, env.rank, ids.shape)
            handle = group.route(tensor(ids))
            if mode == "high_throughput":
                group.exchange_counts(handle)
            received = group.dispatch(handle, tensor(tokens), {"p0": tensor(mine)})
            _, values = group.combine(handle, received.tokens, choice_values=received.payloads["p0"])
            want = np.where(ids >= 0, mine, np.float32(0))
            good.append(np.array_equal(array(values).view(np.uint32), want.view(np.uint32)))
    return good


@pytest.mark.parametrize("mode", LAYOUTS)
def test_values_that_lie_in_the_window(world, mode) -> None:
    if world.most < 3:
        pytest.skip("needs three ranks")
    for good in world(3).run(in_place, mode):
        assert all(good), good


def by_column(env: Any) -> list[np.ndarray]:
    """Values of rows that are choices, apart from each other: a column of a larger tensor; and what combines return."""
    setup = replace(OWN, ranks=1, mode="auto", low_latency_tokens=9)
    got = []
    with make(env, setup) as group:
        tensor, array = env.backend.tensor, env.backend.array
        ids = np.arange(27, dtype=np.int32).reshape(9, 3) % 7
        tokens = np.ones((9, 24), numpy_dtype("bfloat16"))
        for layout, shape in (("expert_major", (7, 9)), ("grouped", (27,))):
            handle = group.route(tensor(ids))
            if layout == "grouped":
                group.exchange_counts(handle).learn_rows()
            received = group.dispatch(handle, tensor(tokens), layout=layout)
            wide = tensor(np.zeros((*shape, 3), np.float32))
            # Each choice's value is its expert and the token's place there.
            places = np.arange(shape[-1], dtype=np.float32)
            local = places + 100 * np.arange(7, dtype=np.float32)[:, None] if layout == "expert_major" else places
            wide[..., 1] = tensor(np.ascontiguousarray(local))
            out = group.combine(handle, received.tokens, choice_values=wide[..., 1], out=(None, None))
            assert type(out) is tuple and out[0].shape == (9, 24)
            got.append(array(out[1]))
    return [ids, *got]


def test_values_that_are_apart(world) -> None:
    ((ids, slots, rows),) = world(1).run(by_column)
    place = ref.expert_rows([ids], 7)[0]
    assert np.array_equal(slots, place + 100 * ids)
    assert np.array_equal(rows, np.append(0, np.bincount(ids.ravel()).cumsum())[ids] + place)


def repeated(env: Any) -> np.ndarray:
    with make(env, replace(OWN, ranks=1)) as group:
        tensor, array = env.backend.tensor, env.backend.array
        handle = group.route(tensor(np.array([[2, 2, 5], [9, 1, -1]], np.int32)))
        received = group.dispatch(handle, tensor(np.ones((2, 24), numpy_dtype("bfloat16"))))
        values = tensor(np.arange(27, dtype=np.float32).reshape(1, 9, 3) + 1)
        got = array(group.combine(handle, received.tokens, choice_values=values)[1])
        caught(group.check)
        return got


def test_bad_ids_have_no_value(world, made_for) -> None:
    """On a device they act as -1."""
    if made_for.copies_routing:
        pytest.skip("they are refused")
    (got,) = world(1).run(repeated)
    assert np.array_equal(got, [[1, 0, 3], [0, 5, 0]])


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any, mode: str, inbox: int | None) -> list[bool]:
    """A graph with a dispatch, and combines with values and without, replayed with other inputs."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    setup = replace(
        OWN, ranks=2, mode=mode, max_tokens=30, dtype="float32", combine_dtype="float32", inbox_tokens=inbox
    )
    if mode == "high_throughput":
        setup = replace(setup, max_recv_tokens=60)
    tokens = (30, 17)[env.rank]
    ids = backend.tensor((rng.integers(0, 7, (tokens, 1)) + np.arange(3)).astype(np.int32) % 7)
    x = backend.tensor(np.zeros((tokens, 24), np.float32))
    outs = [backend.tensor(np.zeros((tokens, n), np.float32)) for n in (24, 3, 24)]
    with make(env, setup) as group:
        handle = group.route(ids)
        if mode == "high_throughput":
            group.exchange_counts(handle)
        given = backend.tensor(np.zeros((60, 3), np.float32))

        def calls() -> None:
            received = group.dispatch(handle, x)
            values = given if mode == "low_latency" else given[: len(received.tokens)]
            group.combine(handle, received.tokens, choice_values=values, out=tuple(outs[:2]))
            received = group.dispatch(handle, x)
            group.combine(handle, received.tokens, out=outs[2])

        calls()
        with graph.capture():
            calls()
        good = []
        for _ in range(3):
            for each in (x, given):
                each[...] = backend.tensor(rng.integers(1, 50, tuple(each.shape)).astype(np.float32))
            calls()
            want = [backend.array(out).copy() for out in outs]
            for out in outs:
                out[...] = 0
            graph.replay()
            good += [np.array_equal(backend.array(out), of) for out, of in zip(outs, want, strict=True)]
            good.append(bool((want[1] > 0).all()))
        return good


@emulated_alone
@pytest.mark.parametrize(("mode", "inbox"), [("low_latency", None), ("high_throughput", None), ("high_throughput", 9)])
def test_graphs_hold_combines_with_values(world, mode, inbox) -> None:
    for good in world(2).run(replay, mode, inbox):
        assert all(good), good
