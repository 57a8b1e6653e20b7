"""Behaviour: sums by domain. The partials of neighbouring ranks are folded and rounded before an owner sums them: the
oracle's bits in all layouts, modes and types, whatever the domain and however many ranks the last one has."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import LAYOUTS, Case, Got, Round, Setup, make_ids, one, same, verify_case
from emulated_graphs import Graph, emulated_alone
from grown import MODES, own_of
from harness import PATIENT, caught, said
from hypothesis import given, settings
from hypothesis import strategies as st
from player import play
from sharing import Turn, in_turns, of_ranks
from sharing import check as check_shared
from sharing import make as make_shared
from sharing import rounds as rounds_of_all
from strategies import EXAMPLES, SETTINGS
from strategies import cases as any_case
from test_choice_values import check as check_values
from test_exchange import check
from test_fp8_combine import FP8, mode_of
from test_growth import check as check_growth
from test_growth import growing, play_growing

import tokenway as tw
from tokenway import reference as ref
from tokenway.domain_reference import folds
from tokenway.sum_reference import ordered_sum
from tokenway.tensors import numpy_dtype

# Most tokens go to four of the five ranks. The last domain of two has one, and that of three has two.
OWN = Setup(ranks=5, experts=11, top_k=6, hidden=24, max_tokens=9, domain=2)
THREADS = min(5, harness.most_ranks("threads"))
TOKENS = (9, 0, 4, 9, 7)


def rounds_of(layout: str) -> tuple[Round, ...]:
    """Ids of -1, ranks without tokens, one expert for all, no expert for anybody; outputs that are given; calls that
    are sent alone, further combines; other types of rows and results."""
    base = Round(TOKENS, layout=layout)
    return (
        replace(base, special=True),
        replace(base, seed=1, routing="holes", own=True, send_combine=True, late=True),
        replace(base, seed=2, strided=True, rows="bfloat16", out="bfloat16", release=True),
        replace(base, seed=3, routing="one", tokens=(0, 9, 9, 1, 0), out="float16"),
        replace(base, seed=4, routing="none", own=True),
        replace(base, seed=5, tokens=(0, 0, 0, 0, 0)),
        replace(base, seed=6, again=True, weighting="none", tokens=(1, 9, 9, 9, 9)),
    )


ALL_LAYOUTS = (*LAYOUTS["low_latency"], *LAYOUTS["high_throughput"])


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("domain", [2, 3])
def test_layouts(world, layout, domain) -> None:
    rounds = rounds_of(layout)
    together = tuple(replace(r, send_dispatch=True, send_combine=True) for r in rounds[:2])
    setup = replace(OWN, mode=mode_of(layout), lanes=2, domain=domain)
    check(world, Case(setup, (*((r,) for r in rounds), together), slow=1))


@pytest.mark.parametrize("domain", [0, 1, 4, 5, 6, 1024])
def test_sizes(world, domain) -> None:
    """None, of one rank, all but one, all, and more than there are."""
    base = Round(TOKENS, special=True)
    rounds = (base, replace(base, seed=1, layout="expert_major", routing="holes", out="bfloat16"))
    check(world, one(replace(OWN, domain=domain), *rounds))


@pytest.mark.parametrize("nranks", [1, 2, 3, 8])
def test_ranks(world, nranks) -> None:
    """More choices than a warp has threads; a row of an odd size; both modes by one group."""
    world(nranks)
    setup = replace(OWN, ranks=nranks, experts=70, top_k=40, max_tokens=5, hidden=5, mode="auto", low_latency_tokens=5)
    base = Round((5, 3, 0, 4, 1, 5, 2, 0)[:nranks])
    rounds = [replace(base, layout=name, seed=i) for i, name in enumerate(("rank_major", "flat", "grouped"))]
    check(world, one(replace(setup, domain=3 if nranks > 3 else 2), *rounds))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_types(world, wire) -> None:
    """Folds are rounded to what travels, whatever the rows, the results and the bias are; sizes that no vector
    likes."""
    base = Round((9, 5, 7, 0, 3), special=True)
    others = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}
    types = [(wire, wire), (others[wire], wire), (wire, others[wire])]
    rounds = [replace(base, seed=i, rows=rows, out=out) for i, (rows, out) in enumerate(types)]
    rounds += [replace(r, seed=r.seed + 5, bias=(r.out, "float32", "place", "")) for r in rounds]
    for hidden in (7, 64):
        check(world, one(replace(OWN, combine_dtype=wire, hidden=hidden), *rounds))


def test_calls_of_another_type(world) -> None:
    """Of what their own rows travel as."""
    setup = replace(OWN, wire="float16", combine_hidden=19)
    check(world, one(setup, *rounds_of("rank_major")[:3], *rounds_of("expert_major")[1:3]))


@pytest.mark.parametrize(("mode", "limit"), [("low_latency", 0), ("low_latency", 2), ("high_throughput", 2)])
def test_rows_of_all_kernels(world, made_for, mode, limit) -> None:
    """Rows that come as packets, as they lie, and both; by many blocks and by few; sizes that change between rounds."""
    setup = replace(OWN, ranks=3, experts=6, top_k=4, hidden=made_for.large, max_tokens=300, mode=mode, sm_limit=limit)
    layout, low = LAYOUTS[mode][0], mode == "low_latency"
    base = Round((300, 237, 30), weighting="none", rows="bfloat16", out="bfloat16", layout=layout)
    rounds = (
        base,
        replace(base, seed=1, out="float32", bias=("", "place")),
        replace(base, seed=2, tokens=(40, 3, 0), bound=40 if low else None),
        replace(base, seed=3, tokens=(1, 0, 1), bound=1 if low else None, weighting="topk", rows="float32"),
    )
    check(world, one(setup, *rounds))


def test_rows_where_they_came(world) -> None:
    """Experts that return the view itself, which lies where peers will write."""
    base = Round(TOKENS, identity=True, rows="bfloat16", out="bfloat16", weighting="none")
    rounds = [replace(base, seed=i, weighting=w) for i, w in enumerate(("none", "topk", "none"))]
    check(world, one(OWN, *rounds, replace(base, seed=7, layout="expert_major"), slow=0))


@pytest.mark.parametrize("inbox", [13, pytest.param(3, marks=pytest.mark.heavy)])
def test_parts(world, inbox) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, inbox_tokens=inbox, lanes=2)
    base = Round((40, 0, 31, 40, 12), layout="flat")
    rounds = (
        base,
        replace(base, seed=1, tokens=(9, 40, 1, 0, 14), routing="holes", send_combine=True, late=True),
        replace(base, seed=2, layout="grouped", strided=True, bias=("float32", "")),
        replace(base, seed=3, layout="grouped", own=True, routing="one", bias=("place",)),
    )
    check(world, one(setup, *rounds, slow=2))


def test_rows_that_were_dropped(world) -> None:
    """They are no terms, so that a fold has those that are left, and a domain none of which is left has no fold."""
    setup = replace(OWN, mode="high_throughput", max_tokens=40, max_recv_tokens=23, overflow="drop")
    base = Round((40, 40, 33, 0, 17))
    check(world, one(setup, *(replace(base, layout=name, seed=i) for i, name in enumerate(2 * LAYOUTS[setup.mode]))))


@pytest.mark.parametrize("mode", LAYOUTS)
def test_values_of_choices_beside_rows(world, mode) -> None:
    """They are taken from the rank that holds the expert, as ever."""
    base = Round(TOKENS, layout=LAYOUTS[mode][-1])
    rounds = (base, replace(base, seed=1, routing="holes", tokens=(3, 9, 8, 0, 9), own=True))
    check_values(world, one(replace(OWN, mode=mode), *rounds))


@pytest.mark.parametrize("layout", ["rank_major", "grouped"])
def test_bias(world, layout) -> None:
    """The first term, before the first fold; ranks that give none."""
    kinds = ("float32", "", "place")
    turned = [replace(r, bias=kinds[i % 3 :] + kinds[: i % 3]) for i, r in enumerate(rounds_of(layout))]
    check(world, one(replace(OWN, mode=mode_of(layout)), *turned))


@pytest.mark.parametrize("domain", [2, 3])
def test_token_replicas(world, domain) -> None:
    """Domains of ranks of one set, and of several; uneven shares, and sets without tokens."""
    if world.most < 4:
        pytest.skip("needs four ranks")
    setup = replace(OWN, ranks=4, token_replicas=2, domain=domain)
    base = Round((9, 9, 4, 4))
    rounds = (
        base,
        replace(base, seed=1, tokens=(1, 1, 0, 0), bias=("place",), send_combine=True),
        replace(base, seed=2, tokens=(7, 7, 9, 9), layout="expert_major", routing="holes", out="bfloat16"),
    )
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("mode", MODES)
def test_growth(world, mode) -> None:
    own = replace(own_of(world, mode), domain=2)
    check_growth(world, play_growing, own, growing(own))


def play_shared(env: Any, setups: tuple[Setup, ...], turns: list[Turn]) -> list[Got]:
    with ExitStack() as stack:
        return in_turns(env, make_shared(env, setups, stack), setups, turns)


def test_groups_that_share_a_window(world) -> None:
    """Each has its own domain."""
    setups = tuple(replace(s, domain=d) for s, d in zip(of_ranks(world), (2, 0, 3), strict=True))
    check_shared(world, play_shared, setups, rounds_of_all(setups, weighting="topk"))


FEWER = settings(SETTINGS, max_examples=max(2, EXAMPLES // 2))


@FEWER
@given(data=st.data())
def test_any(backend: str, data: Any) -> None:
    kind = data.draw(st.sampled_from(({}, {"exact": True}, {"auto": True}, {"replicas": True})))
    case = data.draw(any_case(THREADS, 2, **kind))
    kinds = st.lists(st.sampled_from(("float32", "", "", "place")), min_size=1, max_size=3).map(tuple)
    flights = tuple(tuple(replace(r, bias=data.draw(kinds)) for r in flight) for flight in case.flights)
    case = replace(case, setup=replace(case.setup, domain=data.draw(st.integers(1, 5))), flights=flights)
    verify_case(case, harness.Threads(backend, case.setup.ranks).run(play, case))


def make(env: Any, **changes: Any) -> tw.Group:
    return tw.Group(env.comm, timeout=PATIENT, **(OWN.settings() | changes))


# ---- what a group is, and what is wrong ----------------------------------------------------------


def sums(env: Any, group: tw.Group) -> tuple[np.ndarray, np.ndarray]:
    """Of a combine of ones and, of ranks that are not the last of their domain, 256; and what a reduce sums."""
    ids = env.backend.tensor(np.arange(group.experts, dtype=np.int32)[None, ::2][:, : group.top_k])
    tokens = env.backend.tensor(np.ones((1, 24), numpy_dtype("bfloat16")))
    received = group.dispatch(group.route(ids), tokens)
    mine = 256.0 if env.rank % 2 == 0 else 1.0
    rows = np.full((group.nranks, 9, 24), mine, numpy_dtype("bfloat16"))
    out = env.backend.array(group.combine(received.handle, env.backend.tensor(rows), dtype="float32"))
    of_reduce = group.reduce_scatterv(env.backend.tensor(rows[:, 0].copy()), dtype="float32")
    return out, env.backend.array(of_reduce)


def described(env: Any) -> Any:
    four = {"experts": 8, "top_k": 4, "combine_dtype": "bfloat16"}
    found = []
    for domain in (0, 2):
        with make(env, **four, domain=domain) as group:
            found.append((group.domain, group.settings.domain, *sums(env, group)))
    return found


def test_a_group_tells_its_domain_and_reduces_by_rank(world) -> None:
    """257 is no bfloat16, so a fold of 256 and 1 is 256. What `reduce_scatterv` sums has no folds."""
    if world.most < 4:
        pytest.skip("needs four ranks")
    for usual, by_domain in world(4).run(described):
        assert usual[:2] == (0, 0) and by_domain[:2] == (2, 2)
        assert (usual[2] == 514).all() and (by_domain[2] == 512).all()
        assert (usual[3] == 514).all() and (by_domain[3] == 514).all()


def refuse(env: Any) -> list[Any]:
    """What no group is made of, and what it does not combine; the comm and the group stay usable."""
    fp8 = tw.RowType(24, combine_dtype=FP8)
    heard = [caught(make, env, domain=domain) for domain in (-1, 1025, 2**31, 2.5)]
    heard.append(caught(make, env, combine_rows="per_expert"))
    heard.append(caught(make, env, domain=2 if env.rank else 3))
    with make(env, combine_room=fp8.combine_bytes) as group:
        heard.append(caught(group.rows, fp8))
        good = group.rows(tw.RowType(24, combine_dtype="float16"))
        ids = env.backend.tensor(np.array([[0, 3, 6, 9, 1, -1]], np.int32))
        received = good.dispatch(group.route(ids), env.backend.tensor(np.ones((1, 24), numpy_dtype("bfloat16"))))
        rows = env.backend.tensor(np.ones((group.nranks, 9, 24), np.float32))
        out = env.backend.array(good.combine(received.handle, rows, dtype="float32"))
        home, _ = ref.placement(OWN.experts, group.nranks)
        assert (out == len({int(home[e]) for e in (0, 3, 6, 9, 1)})).all()
    return heard


def test_what_is_wrong_is_told(world) -> None:
    for heard in world(min(3, world.most)).run(refuse):
        patterns = [
            r"domain is -1; it must be from 0 to 1024",
            r"domain is 1025; it must be from 0 to 1024",
            r"domain is 2147483648; it must be an integer",
            r"domain is 2.5; it must be an integer",
            r"domain is 2; with combine_rows of 'per_expert' it must be 0, as there rows return and no partials",
        ]
        for outcome, pattern in zip(heard[:5], patterns, strict=True):
            said(outcome, "twInvalidArgument", pattern)
        if world.most > 1:
            said(heard[5], "twConfigMismatch", "domain differs: rank 0 has 3, rank 1 has 2")
        pattern = (
            r"combine_dtype is float8_e4m3.*; in a group whose domain is 2 it must be float32, bfloat16 or float16"
        )
        said(heard[6], "twInvalidArgument", pattern)


def shrunk(env: Any) -> Any:
    """Rank 2 leaves; the others go on with the same settings, and then with others."""
    group = make(env, experts=6, domain=3)
    if env.rank == 2:
        group.abort()
        group.close()
        return None
    found = []
    for changes in ({}, {"domain": 2}):
        survivors = group.shrink(**changes)
        group.close()
        group = survivors
        ids = env.backend.tensor(np.array([[0, 1, 2, 3, 4, 5]], np.int32))
        received = group.dispatch(group.route(ids), env.backend.tensor(np.ones((1, 24), numpy_dtype("bfloat16"))))
        rows = env.backend.tensor(np.full((group.nranks, 9, 24), 1.0 + 255 * env.rank, np.float32))
        out = env.backend.array(group.combine(received.handle, rows, dtype="float32"))
        found.append((group.nranks, group.domain, set(out.ravel().tolist())))
    group.close()
    return found


def test_survivors_keep_it(threads) -> None:
    """As many ranks as a domain has, or fewer, have the usual sum: 1 + 256 = 257."""
    world = threads(3)
    try:
        first, second, _ = world.run(shrunk)
    finally:
        world.forget()
    assert first == second == [(2, 3, {257.0}), (2, 2, {257.0})]


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any) -> list[bool]:
    """A graph with a dispatch and two combines of it, the second of which adds to the first's result; replayed with
    other tokens."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    setup = replace(OWN, ranks=3, max_tokens=30, dtype="float32", combine_dtype="float32")
    ids, _ = make_ids(setup, Round((30, 17, 4), routing="holes"), env.rank)
    x, out = (backend.tensor(np.zeros((len(ids), 24), np.float32)) for _ in range(2))
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = group.route(backend.tensor(ids))
        kept = []  # what a graph writes to must stay

        def calls() -> None:
            received = group.dispatch(handle, x, layout="expert_major")
            kept.append(received)
            group.combine(handle, received.tokens, out=out)
            group.combine(handle, received.tokens, bias=out, out=out)

        calls()
        with graph.capture():
            calls()
        good = []
        for _ in range(3):
            x[...] = backend.tensor(rng.integers(1, 50, tuple(x.shape)).astype(np.float32))
            graph.replay()
            sums_of = (ids >= 0).sum(1, keepdims=True).astype(np.float32) * backend.array(x)  # whole numbers, so exact
            good.append(np.array_equal(backend.array(out), 2 * sums_of))
        return good


@emulated_alone
def test_graphs_hold_combines_by_domain(world) -> None:
    for good in world(3).run(replay):
        assert all(good), good


# ---- the oracle itself ---------------------------------------------------------------------------


def combined_by(domain: int, partials: list[float], wire: Any = "bfloat16") -> list[float]:
    """Sums of one token of each rank that has an expert on all of them."""
    ranks = len(partials)
    ids = [np.arange(ranks, dtype=np.int32)[None] for _ in range(ranks)]
    x = ref.Exchange(ids, None, experts=ranks, bound=1, domain=domain)
    rows = [np.full((ranks, 1, 1), value, np.float32) for value in partials]
    return [float(out[0, 0]) for out in ref.combine(x, rows, wire=numpy_dtype(wire))]


def test_the_oracle_by_hand() -> None:
    """The same for every owner; folds are rounded, of several terms alone; domains ascending; a smaller last one."""
    big = 2.0**24
    for domain, partials, want in [
        (0, [256, 1, 256, 1], 514),
        (2, [256, 1, 256, 1], 512),
        (3, [256, 1, 1, 1], 259),
        (2, [256, 1, 1], 257),
        (1, [256, 1, 256, 1], 514),
        (4, [256, 1, 256, 1], 514),
        (9, [256, 1, 256, 1], 514),
        (2, [big, 0, 1, 0, 1, 0], big),
        (2, [1, 0, 1, 0, big, 0], big + 2),
    ]:
        assert combined_by(domain, partials) == [want] * len(partials), (domain, partials)
    assert combined_by(2, [256, 1, 256, 1], "float32") == [514] * 4
    assert combined_by(2, [1, 1, big, 1], "float32") == [big + 2] * 4  # 2^24 + 1 is no float32
    assert combined_by(0, [1, 1, big, 1], "float32") == [big + 4] * 4  # big + 2, and 1 more, to the even one


def test_folds_of_one_term_are_that_term() -> None:
    """So domains of one rank, and of all ranks with a wire of float32, are the usual sum; tokens without a partial of
    a domain have no fold there, and -0 passes through."""
    rng = np.random.default_rng(3)
    terms = []
    for rank in range(5):
        at = np.flatnonzero(rng.random(20) < 0.6)
        rows = rng.standard_normal((len(at), 3)).astype(numpy_dtype("bfloat16")).astype(np.float32)
        rows[: rank + 1] = -0.0
        terms.append((at, rows))
    usual = ordered_sum((20, 3), terms)
    for domain, wire in ((1, "bfloat16"), (1, "float16"), (5, "float32"), (9, "float32")):
        same("sum", ordered_sum((20, 3), folds((20, 3), terms, domain, numpy_dtype(wire))), usual)
    for (at, _), expected in zip(folds((20, 3), terms, 2, np.float32), ((0, 1), (2, 3), (4,)), strict=True):
        assert np.array_equal(at, np.unique(np.concatenate([terms[r][0] for r in expected])))
