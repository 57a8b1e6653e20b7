"""Behaviour: combines per expert. A row for each (token, k) returns, and its owner weights and sums them: the oracle's
bits in all layouts by expert and both modes, with weights of the handle, of the combine, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import Case, Round, Setup, affine, fewer_ranks, make_ids, one, same, verify_case
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT
from hypothesis import example, given, settings
from player import Player
from strategies import EXAMPLES, SETTINGS
from strategies import cases as any_case
from test_choice_values import Valued, Worlds, judge_round, room
from test_exchange import check
from test_properties import HARD

import tokenway as tw
from tokenway import reference as ref
from tokenway.per_expert_reference import sum_choices
from tokenway.tensors import numpy_dtype

OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=9, combine_rows="per_expert")
LAYOUTS = {"low_latency": "expert_major", "high_throughput": "grouped"}
THREADS = min(5, harness.most_ranks("threads"))


def make(env: Any, setup: Setup, **changes: Any) -> tw.Group:
    return tw.Group(env.comm, timeout=PATIENT, **(setup.settings() | changes))


def per_expert(case: Case) -> Case:
    """The same of a group that combines per expert: in layouts by expert, and here and there with late weights."""

    def turned(round_: Round) -> Round:
        late = round_.seed % 3 == 0
        return replace(
            round_,
            layout="grouped" if round_.exact else "expert_major",
            late_weights=late,
            weighting="none" if late else round_.weighting,
            columns=(),
            chosen=False,
            index_block=0,
        )

    flights = tuple(tuple(turned(r) for r in flight) for flight in case.flights)
    return replace(case, setup=replace(case.setup, combine_rows="per_expert"), flights=flights)


# ---- whatever the shape, the oracle's bits -------------------------------------------------------


@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_modes(world, mode, top_k) -> None:
    """Ids of -1, ranks without tokens, one expert for all, outputs that are given, calls that are sent alone, further
    combines, weights of the handle and of the combine, a slow rank, several exchanges in flight."""
    setup = replace(OWN, mode=mode, top_k=top_k, lanes=2)
    base = Round((9, 0, 4), layout=LAYOUTS[mode])
    rounds = (
        base,
        replace(
            base, seed=1, routing="holes", own=True, send_combine=True, late=True, late_weights=True, weighting="none"
        ),
        replace(base, seed=2, strided=True, rows="bfloat16", out="bfloat16", weighting="none", release=True),
        replace(base, seed=3, routing="one", tokens=(0, 9, 9), late_weights=True, weighting="none", strided=True),
        replace(base, seed=4, identity=True, rows="bfloat16", special=True),
        replace(base, seed=5, routing="none", own=True, tokens=(0, 0, 0)),
        replace(base, seed=6, again=True, weights=False, special=True),
    )
    together = tuple(replace(r, send_dispatch=True) for r in rounds[:2])
    check(world, Case(setup, (*((r,) for r in rounds), together), slow=1))


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_ranks(world, nranks) -> None:
    """More choices than ranks, and than a warp has threads; a row of an odd size."""
    world(nranks)
    setup = replace(OWN, ranks=nranks, experts=70, top_k=40, max_tokens=5, hidden=5, mode="auto", low_latency_tokens=5)
    base = Round((5, 3, 0, 4, 1)[:nranks])
    rounds = [replace(base, layout=name, seed=i) for i, name in enumerate(LAYOUTS.values())]
    late = [replace(r, seed=r.seed + 9, routing="holes", late_weights=True, weighting="none") for r in rounds]
    check(world, one(setup, *rounds, *late))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", LAYOUTS)
def test_types(world, mode, wire) -> None:
    """Rows and results of other types than what travels; sizes that no vector likes."""
    base = Round((9, 5, 7), layout=LAYOUTS[mode], special=True)
    others = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}
    types = [(wire, wire), (others[wire], wire), (wire, others[wire]), (others[wire], others[wire])]
    rounds = [replace(base, seed=i, rows=rows, out=out) for i, (rows, out) in enumerate(types)]
    for hidden in (7, 64):
        check(world, one(replace(OWN, mode=mode, combine_dtype=wire, hidden=hidden), *rounds))


@pytest.fixture
def no_packets(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Comms whose rows are never packets; they read their environment when they are made."""
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "0")
    world(OWN.ranks).forget()
    yield
    world(OWN.ranks).forget()


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.usefixtures("no_packets")
def test_few_rows_that_are_no_packets(world, mode) -> None:
    """What goes in chunks as many rows do: all types, sizes that no vector likes, more choices than a warp has threads,
    ids of -1, ranks without tokens, calls that are sent alone, a slow rank, further combines."""
    base = Round((9, 0, 7), layout=LAYOUTS[mode], special=True)
    rounds = (
        base,
        replace(base, seed=1, routing="holes", send_combine=True, late=True, late_weights=True, weighting="none"),
        replace(base, seed=2, rows="float16", out="bfloat16", strided=True, own=True),
        replace(base, seed=3, routing="one", rows="bfloat16", out="bfloat16", weighting="none"),
        replace(base, seed=4, tokens=(0, 0, 0), routing="none"),
        replace(base, seed=5, tokens=(3, 9, 1), late_weights=True, weighting="none"),
    )
    for hidden, top_k, wire in ((7, 3, "bfloat16"), (64, 5, "bfloat16"), (640, 3, "float32"), (24, 40, "float16")):
        experts = 7 if top_k < 7 else 70
        setup = replace(OWN, mode=mode, hidden=hidden, top_k=top_k, experts=experts, combine_dtype=wire)
        check(world, one(setup, *rounds, slow=1))


@pytest.mark.parametrize("slow", [0, 1])
def test_packets_and_chunks_in_turns(world, slow) -> None:
    """The most tokens that go as packets, and one more, in turns."""
    setup = replace(OWN, ranks=2, experts=6, top_k=4, hidden=8, max_tokens=257)
    base = Round((256, 211), layout="expert_major", rows="bfloat16", out="bfloat16", weighting="none")
    rounds = [replace(base, bound=bound, tokens=(bound, 211), seed=bound + i) for i, bound in enumerate((256, 257) * 3)]
    check(world, one(setup, *rounds, slow=slow))


KINDS = [("low_latency", 0), ("low_latency", 2), ("high_throughput", 0), ("high_throughput", 2)]


@pytest.mark.parametrize(("mode", "limit"), KINDS)
def test_rows_of_all_kernels(world, made_for, mode, limit) -> None:
    """Rows that go as packets and rows as they lie, by many blocks and by few; sizes that change between rounds."""
    setup = replace(OWN, ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=300, mode=mode, sm_limit=limit)
    base = Round((300, 237), weighting="none", rows="bfloat16", out="bfloat16", layout=LAYOUTS[mode])
    rounds = (
        base,
        replace(base, seed=1, out="float32", late_weights=True),
        replace(base, seed=2, tokens=(40, 3), bound=40 if mode == "low_latency" else None),
        replace(
            base, seed=3, tokens=(1, 0), bound=1 if mode == "low_latency" else None, weighting="topk", rows="float32"
        ),
    )
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("inbox", [3, 9, 39])
def test_combines_in_parts(world, inbox) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, inbox_tokens=inbox, lanes=2)
    base = Round((40, 0, 31), layout="grouped")
    rounds = (
        base,
        replace(base, seed=1, tokens=(9, 40, 1), routing="holes", send_combine=True, late=True),
        replace(base, seed=2, identity=True, rows="bfloat16", release=True),
        replace(base, seed=3, tokens=(3, 2, 1), bound=3, own=True, late_weights=True, weighting="none"),
        replace(base, seed=4, routing="one"),
    )
    check(world, one(setup, *rounds, slow=2))


def test_rows_that_were_dropped(world) -> None:
    """They are no terms, whatever the window holds from before."""
    setup = replace(OWN, mode="high_throughput", max_tokens=40, max_recv_tokens=25, overflow="drop")
    base = Round((40, 40, 33), layout="grouped")
    rounds = [replace(base, seed=i, late_weights=i == 2, weighting="none" if i == 2 else "topk") for i in range(4)]
    check(world, one(setup, *rounds, replace(base, seed=9, room=7)))


@pytest.mark.parametrize("policy", ["round_robin", "balanced"])
def test_replicas(world, policy) -> None:
    table = (0, 1, 2, 0, 3, 4, 0, 1, -1, 4)
    setup = replace(OWN, experts=5, top_k=3, slot_expert=table, policy=policy, mode="auto", low_latency_tokens=9)
    base = Round((9, 5, 8))
    check(world, one(setup, *(replace(base, layout=name, seed=i) for i, name in enumerate(LAYOUTS.values()))))


FEWER = settings(SETTINGS, max_examples=max(1, EXAMPLES // 3))


@FEWER
@example(case=HARD)
@given(case=any_case(max_ranks=THREADS))
def test_any_case_of_low_latency(backend: str, case: Case) -> None:
    check(Worlds(backend), per_expert(case))


@FEWER
@given(case=any_case(max_ranks=THREADS, exact=True, max_flights=2))
def test_any_case_of_high_throughput(backend: str, case: Case) -> None:
    check(Worlds(backend), per_expert(case))


@FEWER
@given(case=any_case(max_ranks=THREADS, auto=True, replicas=True, max_flights=2))
def test_any_case_of_both_modes(backend: str, case: Case) -> None:
    check(Worlds(backend), per_expert(case))


# ---- combines of one dispatch --------------------------------------------------------------------


def several(env: Any, mode: str, shown: str) -> list[Any]:
    """Two combines of a dispatch with other weights, the second without a lease; a dispatch that is made anew without a
    combine; and a dispatch that was shown by source."""
    setup = replace(OWN, mode=mode)
    round_ = Round((9, 4, 7)[: env.nranks], routing="holes", seed=3)
    ids, weights = make_ids(setup, round_, env.rank)
    tokens = np.random.default_rng([env.rank, 4]).standard_normal((len(ids), 24)).astype(numpy_dtype("bfloat16"))
    tensor, array = env.backend.tensor, env.backend.array
    found = []
    with make(env, setup) as group:
        handle = group.route(tensor(ids))
        if mode == "high_throughput":
            group.exchange_counts(handle).learn_rows()
        group.dispatch(handle, tensor(np.zeros_like(tokens)), layout=LAYOUTS[mode])
        received = group.dispatch(handle, tensor(tokens), layout=LAYOUTS[mode])
        rows = tensor(array(received.tokens))
        if shown == "by source":  # the rows of before are combined, and found by places that no view has made
            group.dispatch(handle, tensor(tokens))
        for factor in (1, -3):
            late = tensor(weights * np.float32(factor))
            found.append(array(group.combine(handle, rows, layout=LAYOUTS[mode], weights=late, dtype="float32")))
        found.append(array(group.combine(handle, rows, layout=LAYOUTS[mode], dtype="float32")))
    return [ids, weights, tokens, *found]


@pytest.mark.parametrize("shown", ["by expert", "by source"])
@pytest.mark.parametrize("mode", LAYOUTS)
def test_several_combines_of_a_dispatch(world, mode, shown) -> None:
    if world.most < 3:
        pytest.skip("needs three ranks")
    for ids, weights, tokens, *got in world(3).run(several, mode, shown):
        rows = np.repeat(tokens[:, None], ids.shape[1], axis=1)  # experts return what they got
        for out, late in zip(got, (weights, weights * np.float32(-3), None), strict=True):
            want = sum_choices(rows, ids >= 0, late)
            same("result", out, want)


def grown(env: Any, few: Case, many: Case) -> Any:
    """Rounds of a group in another's window, whose combines are per rank; and of one that grows in between."""
    other = replace(few.setup, combine_rows="per_rank", lanes=2).settings()
    within = few.setup.settings() | {"lanes": None}
    with (
        tw.Group(env.comm, timeout=PATIENT, room_for=[few.setup.settings()], **other) as arena,
        tw.Group(env.comm, timeout=PATIENT, arena=arena, **within) as group,
    ):
        shared = Player(env, group, few).flights()
    with make(env, few.setup) as group:
        before = Player(env, group, few).flights()
        group.reserve(max_tokens=many.setup.max_tokens)
        return shared, before, Player(env, group, many).flights()


@pytest.mark.parametrize("mode", LAYOUTS)
def test_windows_that_are_shared_or_grow(world, mode) -> None:
    """More choices than ranks, so inboxes are larger than those of combines per rank."""
    setup = replace(OWN, ranks=2, top_k=6, mode=mode, combine_dtype="float32", dtype="uint8")
    few = one(setup, *(Round((9, 5), layout=LAYOUTS[mode], seed=i, routing="holes") for i in range(3)))
    tokens = (61, 70)
    many = one(replace(setup, max_tokens=70), *(Round(tokens, layout=LAYOUTS[mode], seed=i) for i in range(3)))
    few, many = (fewer_ranks(case, world.most) for case in (few, many))
    by_rank = world(few.setup.ranks).run(grown, few, many)
    for case, got in zip((few, few, many), zip(*by_rank, strict=True), strict=True):
        verify_case(case, list(got))


def play_values(env: Any, case: Case) -> Any:
    with make(env, case.setup, combine_room=room(case.setup)) as group:
        return Valued(env, group, case).flights()


@pytest.mark.parametrize("mode", LAYOUTS)
def test_values_of_choices_beside_rows(world, mode) -> None:
    setup = replace(OWN, mode=mode)
    base = Round((9, 0, 4), layout=LAYOUTS[mode])
    rounds = (base, replace(base, seed=1, routing="holes", tokens=(3, 9, 8)), replace(base, seed=2, routing="one"))
    case = fewer_ranks(one(setup, *rounds), world.most)
    by_rank = world(case.setup.ranks).run(play_values, case)
    for f, flight in enumerate(case.flights):
        judge_round(case.setup, flight[0], [mine[f][0] for mine in by_rank])


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any, mode: str, inbox: int | None) -> list[bool]:
    """A graph with a dispatch, and two combines of it, replayed with other tokens and other weights."""
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
    late = backend.tensor(np.zeros((tokens, 3), np.float32))
    outs = [backend.tensor(np.zeros((tokens, 24), np.float32)) for _ in range(2)]
    with make(env, setup) as group:
        handle = group.route(ids)
        if mode == "high_throughput":
            group.exchange_counts(handle)

        kept = []  # what a graph writes to must stay

        def calls() -> None:
            received = group.dispatch(handle, x, layout=LAYOUTS[mode])
            kept.append(received)
            group.combine(handle, received.tokens, weights=late, out=outs[0])
            group.combine(handle, received.tokens, weighting="topk", out=outs[1])

        calls()
        with graph.capture():
            calls()
        good = []
        for _ in range(3):
            for each in (x, late):
                each[...] = backend.tensor(rng.integers(1, 50, tuple(each.shape)).astype(np.float32))
            for out in outs:
                out[...] = 0
            graph.replay()
            rows = np.repeat(backend.array(x)[:, None], 3, axis=1)
            for out, given in zip(outs, (backend.array(late), np.ones((tokens, 3), np.float32)), strict=True):
                want = sum_choices(rows, np.ones((tokens, 3), bool), given)
                good.append(np.array_equal(backend.array(out), want))
        return good


@emulated_alone
@pytest.mark.parametrize(("mode", "inbox"), [("low_latency", None), ("high_throughput", None), ("high_throughput", 9)])
def test_graphs_hold_combines_per_expert(world, mode, inbox) -> None:
    for good in world(2).run(replay, mode, inbox):
        assert all(good), good


# ---- the oracle itself ---------------------------------------------------------------------------


def test_the_oracle_by_hand() -> None:
    """Two ranks, one expert each; a token with both, and one with the second alone, whose -0 passes through."""
    ids = [np.array([[1, 0], [1, -1]], np.int32), np.zeros((0, 2), np.int32)]
    x = ref.Exchange(ids, None, experts=2, bound=2)
    rows = [np.zeros((1, 4, 1), np.float32) for _ in range(2)]
    rows[0][0, 0] = 3
    rows[1][0, :2, 0] = (5, -0.0)
    weights = [np.array([[2, 10], [1, 7]], np.float32), np.zeros((0, 2), np.float32)]
    weighted, none = ref.combine_per_expert(x, rows, weights=weights)
    assert np.array_equal(weighted, [[40], [0]]) and np.signbit(weighted[1, 0]) and none.shape == (0, 1)
    assert np.array_equal(ref.combine_per_expert(x, rows)[0], [[8], [0]])
    # Rows are rounded when they are sent: to float16, 2049 is 2048.
    rows[0][0, 0] = 2049
    assert ref.combine_per_expert(x, rows, wire=np.float16)[0][0, 0] == 2053
    assert affine(np.float32([1.0]), 3) != affine(np.float32([1.0]), 4)  # or nothing here could see a wrong expert
