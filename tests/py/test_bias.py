"""Behaviour: sums that start from rows of the caller. Each token's is its bias, then its partials in their order: the
oracle's bits in all layouts, modes and types, whichever ranks give one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import LAYOUTS, Case, Round, Setup, make_bias, make_ids, one, same, verify_case
from emulated_graphs import Graph, emulated_alone
from harness import caught, said
from hypothesis import given, settings
from hypothesis import strategies as st
from player import play
from strategies import EXAMPLES, SETTINGS
from strategies import cases as any_case
from test_choice_values import check as check_values
from test_exchange import check
from test_fp8_combine import FP8, mode_of
from test_per_expert import make, per_expert

import tokenway as tw
from tokenway import reference as ref
from tokenway.sum_reference import ordered_sum
from tokenway.tensors import numpy_dtype

OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=9)
KINDS = ("float32", "", "place")
THREADS = min(5, harness.most_ranks("threads"))


def rounds_of(layout: str) -> tuple[Round, ...]:
    """Ids of -1, ranks without tokens, one expert for all, no expert for anybody; outputs that are given, or are the
    bias; ranks that give none; calls that are sent alone, further combines."""
    base = Round((9, 0, 4), layout=layout, bias=KINDS)
    return (
        replace(base, special=True),
        replace(base, seed=1, routing="holes", own=True, send_combine=True, late=True, bias=KINDS[::-1]),
        replace(base, seed=2, strided=True, rows="bfloat16", out="bfloat16", bias=("bfloat16", "place"), release=True),
        replace(base, seed=3, routing="one", tokens=(0, 9, 9), out="float16", bias=("float16", "float32", "")),
        replace(base, seed=4, routing="none", own=True, bias=("place", "float32"), special=True),
        replace(base, seed=5, tokens=(0, 0, 0)),
        replace(base, seed=6, bias=()),
    )


@pytest.mark.parametrize(
    ("layout", "top_k"),
    [("rank_major", 1), ("rank_major", 6), ("expert_major", 3), ("grouped_by_bound", 6), ("flat", 3), ("grouped", 1)],
)
def test_layouts(world, layout, top_k) -> None:
    rounds = rounds_of(layout)
    together = tuple(replace(r, send_dispatch=True, send_combine=True) for r in rounds[:2])
    setup = replace(OWN, mode=mode_of(layout), top_k=top_k, lanes=2)
    check(world, Case(setup, (*((r,) for r in rounds), together), slow=1))


@pytest.mark.parametrize("layout", ["expert_major", "grouped"])
def test_rows_per_expert(world, layout) -> None:
    rounds = rounds_of(layout)
    setup = replace(OWN, mode=mode_of(layout), top_k=5, combine_rows="per_expert")
    late = [replace(r, seed=r.seed + 9, late_weights=True, weighting="none") for r in rounds[:3]]
    check(world, one(setup, *rounds, *late, slow=1))


@pytest.mark.parametrize(("layout", "scale"), [("rank_major", None), ("grouped", 0.03)])
def test_rows_of_fp8(world, layout, scale) -> None:
    for width in (17, 1032):
        setup = replace(OWN, mode=mode_of(layout), combine_hidden=width, wire=FP8, wire_scale=scale)
        check(world, one(setup, *rounds_of(layout)))


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_ranks(world, nranks) -> None:
    """More choices than a warp has threads, more ranks than one of a token's choices goes to; a row of an odd size."""
    world(nranks)
    setup = replace(OWN, ranks=nranks, experts=70, top_k=40, max_tokens=5, hidden=5, mode="auto", low_latency_tokens=5)
    base = Round((5, 3, 0, 4, 1)[:nranks], bias=KINDS)
    rounds = [replace(base, layout=name, seed=i) for i, name in enumerate(("rank_major", "flat", "grouped"))]
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_types(world, wire) -> None:
    """Rows, results and biases of other types than what travels; sizes that no vector likes."""
    base = Round((9, 5, 7), special=True)
    others = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}
    types = [(wire, wire), (others[wire], wire), (wire, others[wire])]
    rounds = [
        replace(base, seed=i, rows=rows, out=out, bias=(out, "float32", "place")) for i, (rows, out) in enumerate(types)
    ]
    for hidden in (7, 64):
        check(world, one(replace(OWN, combine_dtype=wire, hidden=hidden), *rounds))


@pytest.mark.parametrize(("mode", "limit"), [("low_latency", 0), ("low_latency", 2), ("high_throughput", 2)])
def test_rows_of_all_kernels(world, made_for, mode, limit) -> None:
    """Rows that come as packets, as they lie, and both; by many blocks and by few; sizes that change between rounds."""
    setup = replace(OWN, ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=300, mode=mode, sm_limit=limit)
    layout, low = LAYOUTS[mode][0], mode == "low_latency"
    base = Round((300, 237), weighting="none", rows="bfloat16", out="bfloat16", layout=layout, bias=("bfloat16", ""))
    rounds = (
        base,
        replace(base, seed=1, out="float32", bias=("", "place")),
        replace(base, seed=2, tokens=(40, 3), bound=40 if low else None, bias=("float32", "place")),
        replace(base, seed=3, tokens=(1, 0), bound=1 if low else None, weighting="topk", rows="float32"),
    )
    check(world, one(setup, *rounds))


def test_rows_where_they_came(world) -> None:
    """Experts that return the view itself, which lies where peers will write."""
    base = Round(
        (9, 5, 7), identity=True, rows="bfloat16", out="bfloat16", weighting="none", bias=("place", "", "float32")
    )
    check(
        world, one(OWN, *(replace(base, seed=i, weighting=w) for i, w in enumerate(("none", "topk", "none"))), slow=0)
    )


@pytest.mark.parametrize("inbox", [13, pytest.param(3, marks=pytest.mark.heavy)])
def test_parts(world, inbox) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, inbox_tokens=inbox, lanes=2)
    base = Round((40, 0, 31), layout="flat", bias=KINDS)
    rounds = (
        base,
        replace(base, seed=1, tokens=(9, 40, 1), routing="holes", send_combine=True, late=True, bias=KINDS[::-1]),
        replace(base, seed=2, layout="grouped", strided=True),
        replace(base, seed=3, layout="grouped", own=True, routing="one", bias=("place",)),
    )
    check(world, one(setup, *rounds, slow=2))
    check(world, one(replace(setup, combine_rows="per_expert"), *rounds[2:]))
    check(world, one(replace(setup, wire=FP8, combine_hidden=200), *rounds[1:3]))


def test_rows_that_were_dropped(world) -> None:
    """They are no terms, so that a token of which none is left gets its bias."""
    setup = replace(OWN, mode="high_throughput", max_tokens=40, max_recv_tokens=12, overflow="drop")
    base = Round((40, 40, 33), bias=KINDS)
    check(world, one(setup, *(replace(base, layout=name, seed=i) for i, name in enumerate(2 * LAYOUTS[setup.mode]))))


@pytest.mark.parametrize("mode", LAYOUTS)
def test_values_of_choices_beside_rows(world, mode) -> None:
    base = Round((9, 0, 4), layout=LAYOUTS[mode][-1], bias=KINDS)
    rounds = (base, replace(base, seed=1, routing="holes", tokens=(3, 9, 8), own=True, bias=KINDS[::-1]))
    check_values(world, one(replace(OWN, mode=mode), *rounds))


def test_token_replicas(world) -> None:
    """Each rank starts the sums of its share; uneven shares, and sets without tokens."""
    if world.most < 4:
        pytest.skip("needs four ranks")
    setup = replace(OWN, ranks=4, token_replicas=2)
    base = Round((9, 9, 4, 4), out="float32", bias=("float32",))
    rounds = (
        base,
        replace(base, seed=1, tokens=(1, 1, 0, 0), bias=("place",), send_combine=True),
        replace(base, seed=2, tokens=(7, 7, 9, 9), layout="expert_major", routing="holes", out="bfloat16"),
        replace(base, seed=3, bias=("float32", "float32", "", "")),
    )
    check(world, one(setup, *rounds))


FEWER = settings(SETTINGS, max_examples=max(2, EXAMPLES // 4))


@FEWER
@given(data=st.data())
def test_any(backend: str, data: Any) -> None:
    exact, by_choice = data.draw(st.booleans()), data.draw(st.booleans())
    case = data.draw(any_case(THREADS, 2, exact))
    kinds = st.lists(st.sampled_from(("float32", "", "place")), min_size=1, max_size=3).map(tuple)
    flights = tuple(tuple(replace(r, bias=data.draw(kinds)) for r in flight) for flight in case.flights)
    if case.setup.token_replicas > 1:
        flights = tuple(tuple(replace(r, bias=r.bias[:1]) for r in flight) for flight in flights)
    case = replace(case, flights=flights)
    case = per_expert(case) if by_choice else case
    verify_case(case, harness.Threads(backend, case.setup.ranks).run(play, case))


# ---- what is wrong -------------------------------------------------------------------------------


def exchange(env: Any, group: tw.Group) -> tuple[tw.Handle, Any, Any]:
    """A dispatch of two tokens, rows of 1 for its combine, and what came."""
    ids = env.backend.tensor(np.array([[0, 3, 6], [-1, -1, -1]], np.int32))
    tokens = env.backend.tensor(np.ones((2, 24), numpy_dtype("bfloat16")))
    received = group.dispatch(group.route(ids), tokens)
    rows = env.backend.tensor(np.ones((group.nranks, 9, 24), numpy_dtype("bfloat16")))
    return received.handle, rows, received.tokens


def refuse(env: Any) -> list[Any]:
    """Rank 0 gives what is wrong, and the others hear of it at once; the group goes on."""
    tensor, array = env.backend.tensor, env.backend.array
    heard = []
    with make(env, replace(OWN, ranks=2)) as group:
        shared = tensor(np.zeros(100, np.float32))
        good = tensor(np.full((2, 24), 7, np.float32))
        halves = shared[:48].reshape(2, 24)
        wrong: list[dict[str, Any]] = [
            {"bias": "nothing"},
            {"bias": tensor(np.ones((2, 23), np.float32))},
            {"bias": tensor(np.ones((3, 24), np.float32))},
            {"bias": tensor(np.ones(24, np.float32))},
            {"bias": tensor(np.ones((2, 24), np.float16))},
            {"bias": tensor(np.ones((2, 24), np.int32)), "dtype": "float32"},
            {"bias": shared[24:72].reshape(2, 24), "out": halves},
            {"bias": shared[1:97].reshape(2, 48)[:, :24], "out": halves},
            {"bias": None},
        ]
        for each in wrong:
            handle, rows, came = exchange(env, group)
            each = each if each["bias"] is not None else {"bias": came[0, :2]}
            heard.append(caught(group.combine, handle, rows, **(each if env.rank == 0 else {"bias": good})))
            if handle.leased:
                handle.release()
            handle, rows, _ = exchange(env, group)
            out = array(group.combine(handle, rows, bias=good, dtype="float32"))
            assert (out == [[9], [7]]).all(), out
            handle, rows, _ = exchange(env, group)
            out = array(group.combine(handle, rows, dtype="float32"))
            assert (out == [[2], [0]]).all(), "a bias has stayed"
    return heard


def test_what_is_wrong_is_told(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    first, second = world(2).run(refuse)
    patterns = [
        r"bias is of type str",
        r"bias has shape \[2, 23\]; it must be \[2, 24\]",
        r"bias has shape \[3, 24\]; it must be \[2, 24\]",
        r"bias has shape \[24\]; it must be \[2, 24\]",
        r"bias has dtype float16 .*; it must be float32, or bfloat16 as out has",
        r"bias has dtype int32 .*; it must be float32, as out has",
        r"out at .* overlaps bias at .*; each must have memory of its own",
        r"out at .* overlaps bias at .*; each must have memory of its own",
        r"bias lies among the received rows of the window, where peers write; give other memory",
    ]
    for outcome, pattern in zip(first, patterns, strict=True):
        said(outcome, "twInvalidArgument", pattern)
    for outcome in second:
        assert outcome[0] == "twPeerRefused", outcome


def peer_is_wrong(env: Any) -> Any:
    """Rank 1's bias, which is where its sums go, before and after a combine that rank 0 refuses."""
    with make(env, replace(OWN, ranks=2)) as group:
        handle, rows, _ = exchange(env, group)
        place = env.backend.tensor(np.full((2, 24), 5, np.float32))
        heard = caught(group.combine, handle, rows if env.rank else None, bias=place, out=place)
        return heard, env.backend.array(place)


def test_a_bias_in_place_of_the_result_is_lost_where_the_step_fails(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    (_, untouched), (heard, place) = world(2).run(peer_is_wrong)
    assert heard[0] == "twPeerRefused"
    assert (untouched == 5).all() and np.isnan(place).all()


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any, rows: str) -> list[bool]:
    """A graph with a dispatch and two combines of it, the second of which adds to the first's result; replayed with
    other tokens and other biases."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    setup = replace(OWN, ranks=2, max_tokens=30, dtype="float32", combine_dtype="float32", combine_rows=rows)
    ids, _ = make_ids(setup, Round((30, 17), routing="holes"), env.rank)
    x, bias, out = (backend.tensor(np.zeros((len(ids), 24), np.float32)) for _ in range(3))
    with make(env, setup) as group:
        handle = group.route(backend.tensor(ids))
        kept = []  # what a graph writes to must stay

        def calls() -> None:
            received = group.dispatch(handle, x, layout="expert_major")
            kept.append(received)
            group.combine(handle, received.tokens, bias=bias, out=out)
            group.combine(handle, received.tokens, bias=out, out=out)

        calls()
        with graph.capture():
            calls()
        good = []
        for _ in range(3):
            for each in (x, bias):
                each[...] = backend.tensor(rng.integers(1, 50, tuple(each.shape)).astype(np.float32))
            graph.replay()
            sums = (ids >= 0).sum(1, keepdims=True).astype(np.float32) * backend.array(x)  # whole numbers, so exact
            good.append(np.array_equal(backend.array(out), backend.array(bias) + 2 * sums))
        return good


@emulated_alone
@pytest.mark.parametrize("rows", ["per_rank", "per_expert"])
def test_graphs_hold_combines_with_a_bias(world, rows) -> None:
    for good in world(2).run(replay, rows):
        assert all(good), good


# ---- the oracle itself ---------------------------------------------------------------------------


def test_the_oracle_by_hand() -> None:
    """A token with two ranks, one with none and one whose partial is -0; the bias is the first term, never 0."""
    ids = [np.array([[1, 0], [-1, -1], [1, -1]], np.int32), np.zeros((0, 2), np.int32)]
    x = ref.Exchange(ids, None, experts=2, bound=3)
    rows = [np.zeros((2, 3, 1), np.float32) for _ in range(2)]
    rows[0][0, 0], rows[1][0, :2, 0] = 2.0**-24, (1, -0.0)
    bias = np.array([[2.0**-24], [-0.0], [-0.0]], np.float32)
    out, none = ref.combine(x, rows, bias=[bias, None])  # the first of them is 1 where the bias is added last
    assert np.array_equal(out, [[1 + 2.0**-23], [0], [0]]) and np.signbit(out[1:]).all() and none.shape == (0, 1)
    same("sum", ordered_sum((3, 1), [], bias), bias)
    made = make_bias(OWN, Round((9,), bias=("place",), out="bfloat16"), 0)
    assert made is not None and made.shape == (9, 24) and made.dtype == numpy_dtype("bfloat16")
