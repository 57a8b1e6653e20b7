"""Behaviour: sums by domain where domains are hosts, whose partials are folded before they travel. The oracle's bits,
as wherever domains end; nobody but who is late is blamed for folds that do not come; and what crosses is counted.

Over `fabric` hosts fold too (docs/PROTOCOL.md, "Between hosts"); on other backends there are no hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import LAYOUTS, Case, Round, Setup, make_ids, one, verify_case
from fabric_backend import EACH
from gin_backend import CROSSING
from harness import PATIENT, await_flags, caught, raise_flag, said
from hypothesis import given
from hypothesis import strategies as st
from player import play
from sharing import check as check_shared
from sharing import rounds as rounds_of_all
from strategies import cases as any_case
from test_choice_values import check as check_values
from test_domain import FEWER, play_shared
from test_exchange import check
from test_fp8_combine import mode_of
from test_growth import check as check_growth
from test_growth import growing, play_growing
from test_posts import NETWORKS, planned, posted
from test_posts import check as check_posts
from test_usage import AT_ONCE, LATE, hear

import tokenway as tw
from tokenway import reference as ref
from tokenway.planning import posts

TOKENS = (9, 0, 4, 9, 7, 1, 8, 3)
HOSTS = [(4, 2), (6, 3), (6, 2), (8, 4)]  # ranks, and those of a host
ALL_LAYOUTS = (*LAYOUTS["low_latency"], *LAYOUTS["high_throughput"])


@pytest.fixture
def between(backend: str, threads: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """between(ranks, each, crossing): a world of hosts of `each` ranks, which are threads."""
    if backend not in ("gin", "emulated-gin", "fabric"):
        pytest.skip(f"for ranks on several hosts, not the backend {backend}")
    worlds = []

    def make(ranks: int, each: int, crossing: str = "per_host") -> Any:
        monkeypatch.setenv(EACH, str(each))
        monkeypatch.setenv(CROSSING, crossing)
        worlds.append(threads(ranks))
        worlds[-1].forget()
        return worlds[-1]

    yield make
    for world in worlds:
        world.forget()


def fixed(world: Any) -> Any:
    """As the checks of other files want a world: for whatever number of ranks."""

    def same(nranks: int) -> Any:
        assert nranks == world.nranks, "other ranks would be on other hosts"
        return world

    same.most = world.nranks  # type: ignore[attr-defined]
    return same


def setup_of(ranks: int, each: int, **changes: Any) -> Setup:
    own = Setup(ranks=ranks, experts=2 * ranks + 1, top_k=6, hidden=24, max_tokens=9, domain=each)
    return replace(own, **changes)


def rounds_of(layout: str, ranks: int) -> tuple[Round, ...]:
    """Ids of -1, ranks without tokens, one expert for all, no expert for anybody; calls that are sent alone, further
    combines; other types of rows and results."""
    base = Round(TOKENS[:ranks], layout=layout)
    turned = (TOKENS[3:] + TOKENS[:3])[:ranks]
    return (
        replace(base, special=True),
        replace(base, seed=1, routing="holes", own=True, send_combine=True, late=True),
        replace(base, seed=2, tokens=turned, strided=True, rows="bfloat16", out="bfloat16", release=True),
        replace(base, seed=3, routing="one", tokens=turned, out="float16"),
        replace(base, seed=4, routing="none", own=True),
        replace(base, seed=5, tokens=(0,) * ranks),
        replace(base, seed=6, again=True, weighting="none", bias=("float32", "")),
    )


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("ranks", "each"), HOSTS)
def test_layouts(between, layout, ranks, each) -> None:
    rounds = rounds_of(layout, ranks)
    together = tuple(replace(r, send_dispatch=True, send_combine=True) for r in rounds[:2])
    setup = setup_of(ranks, each, mode=mode_of(layout), lanes=2)
    case = Case(setup, (*((r,) for r in rounds), together), slow=1)
    check(fixed(between(ranks, each)), case)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_wrap_of_the_step(between, monkeypatch, before) -> None:
    """Tags are of one step also where its number's lower half is 0, as new memory is."""
    monkeypatch.setenv("TOKENWAY_FIRST_STEP", str(2**32 - before))
    rounds = tuple(replace(r, tokens=(9, 0, 4, 9)) for r in rounds_of("rank_major", 4)[:3])
    check(fixed(between(4, 2)), one(setup_of(4, 2), *rounds))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_types(between, wire) -> None:
    """Folds are rounded to what travels; rows of sizes that no vector likes, and more choices than a warp has threads,
    of which the last begin in the middle of a host."""
    base = Round(TOKENS[:4], special=True)
    others = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}
    rounds = [replace(base, seed=i, rows=r, out=o) for i, (r, o) in enumerate([(wire, wire), (others[wire], wire)])]
    world = fixed(between(4, 2))
    for hidden in (7, 64):
        check(world, one(setup_of(4, 2, combine_dtype=wire, hidden=hidden), *rounds))
    many = setup_of(4, 2, experts=70, top_k=40, combine_dtype=wire, mode="auto", low_latency_tokens=9)
    check(world, one(many, *rounds, replace(base, layout="grouped", seed=8)))


def test_rows_of_another_type(between) -> None:
    """A call's rows may be larger than the group's own, and then have no room in a message."""
    setup = setup_of(4, 2, wire="float16", combine_hidden=19)
    rounds = (*rounds_of("rank_major", 4)[:3], *rounds_of("expert_major", 4)[1:3])
    check(fixed(between(4, 2)), one(setup, *rounds))


def test_rows_that_were_dropped(between) -> None:
    """They are no terms: a fold lies where the first row lies that is left of its host."""
    setup = setup_of(4, 2, mode="high_throughput", max_tokens=40, max_recv_tokens=23, overflow="drop")
    base = Round((40, 40, 33, 0))
    check(
        fixed(between(4, 2)),
        one(setup, *(replace(base, layout=name, seed=i) for i, name in enumerate(2 * LAYOUTS[setup.mode]))),
    )


@pytest.mark.parametrize("mode", LAYOUTS)
def test_values_of_choices_beside_rows(between, mode) -> None:
    base = Round(TOKENS[:4], layout=LAYOUTS[mode][-1])
    rounds = (base, replace(base, seed=1, routing="holes", tokens=(3, 9, 8, 0), own=True))
    check_values(fixed(between(4, 2)), one(setup_of(4, 2, mode=mode), *rounds))


@pytest.mark.parametrize("each", [2, 4])
def test_token_replicas(between, each) -> None:
    setup = setup_of(8, each, token_replicas=2)
    base = Round((9, 9, 4, 4, 0, 0, 7, 7))
    rounds = (base, replace(base, seed=1, tokens=(1, 1, 0, 0, 9, 9, 3, 3), bias=("place",), send_combine=True))
    check(fixed(between(8, each)), one(setup, *rounds))


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_growth(between, mode) -> None:
    """What mates read is made anew, and tags of before are of other steps."""
    world = fixed(between(4, 2))
    own = setup_of(4, 2, mode=mode, max_tokens=4, top_k=3, lanes=2)
    turns = [(each, replace(turn, tokens=(*turn.tokens, turn.tokens[0]))) for each, turn in growing(own)]
    check_growth(world, play_growing, own, turns)


def test_groups_that_share_a_window(between) -> None:
    """Only groups whose domains are hosts fold, and these if the maker of the window does, and has room for their
    tokens: the fourth has more of them, in shorter rows, so that they fit into its window."""
    setups = tuple(setup_of(4, 2, domain=domain, lanes=2, mode="low_latency") for domain in (2, 0, 2, 2, 3))
    setups = (replace(setups[0], hidden=160), *setups[1:3], replace(setups[3], max_tokens=30), setups[4])
    turns = [(each, replace(turn, tokens=(*turn.tokens, 7))) for each, turn in rounds_of_all(setups, weighting="topk")]
    check_shared(fixed(between(4, 2)), play_shared, setups, turns)


def test_any(between, threads) -> None:
    between(4, 2)

    @FEWER
    @given(data=st.data())
    def draw(data: Any) -> None:
        kind = data.draw(st.sampled_from(({}, {"exact": True}, {"auto": True}, {"replicas": True})))
        case = data.draw(any_case(4, 4, **kind))
        case = replace(case, setup=replace(case.setup, domain=2))
        verify_case(case, threads(case.setup.ranks).run(play, case))  # an odd number folds at owners

    draw()


# ---- what crosses --------------------------------------------------------------------------------


LARGE = 1 << 16  # elements of a row: 9 of them are more than the 2 MiB from which partials are folded


def ids_of(setup: Setup, turn: int) -> list[np.ndarray]:
    tokens = TOKENS[turn:] + TOKENS[:turn]
    given = Round(tokens[: setup.ranks], seed=turn, routing="holes" if turn % 2 else "random")
    return [make_ids(setup, given, rank)[0] for rank in range(setup.ranks)]


def homes(setup: Setup) -> list[int]:
    return ref.placement(setup.experts, setup.ranks)[0].tolist()


def fans(setup: Setup, turn: int) -> list[np.ndarray]:
    """Of each rank [T, 1]: the ranks that a token goes to."""
    home = homes(setup)
    return [
        np.array([len({home[e] for e in row if e >= 0}) for row in ids], np.float32).reshape(-1, 1)
        for ids in ids_of(setup, turn)
    ]


def dispatched(env: Any, group: tw.Group, turn: int, value: float = 0.0) -> tuple[Any, Any]:
    """What came, and rows to be combined, of float32."""
    ids = ids_of(setup_of(env.nranks, group.domain, top_k=group.top_k), turn)[env.rank]
    tokens = np.ones((len(ids), group.hidden), tw.tensors.numpy_dtype("bfloat16"))
    received = group.dispatch(group.route(env.backend.tensor(ids)), env.backend.tensor(tokens))
    return received, env.backend.tensor(np.full(tuple(received.tokens.shape), value, np.float32))


def combine_once(env: Any, setup: Setup, turn: int, part: str) -> None:
    if part == "begin":
        env.kept["folds"] = tw.Group(env.comm, timeout=PATIENT, **setup.settings())
        return
    group = env.kept["folds"]
    if part == "end":
        env.kept.pop("folds").close()
    elif part == "dispatch":
        env.kept["received"] = dispatched(env, group, turn)
    else:
        received, rows = env.kept.pop("received")
        group.combine(received.handle, rows)


CROSSINGS = [("per_host", 24, True), ("per_rank", 24, False), ("", 24, False), ("", LARGE, True)]


@pytest.mark.parametrize(("crossing", "hidden", "folds"), CROSSINGS, ids=["per_host", "per_rank", "few", "many"])
@pytest.mark.parametrize(("ranks", "each"), [(4, 2), (6, 3), (6, 2)])
def test_folds_alone_are_posted(between, backend, ranks, each, crossing, hidden, folds) -> None:
    """One for each token and host that has a partial of it, of those for whom a rank folds; and lists of them. By
    itself the library folds where partials are large."""
    if backend not in NETWORKS:
        pytest.skip(f"for a network that counts, not the backend {backend}")
    world = between(ranks, each, crossing)
    setup = setup_of(ranks, each, combine_dtype="float32", top_k=3, hidden=hidden)
    hosts = [rank // each for rank in range(ranks)]
    world.run(combine_once, setup, 0, "begin")
    for turn in range(3):
        world.run(combine_once, setup, turn, "dispatch")
        posted(backend, ranks)
        world.run(combine_once, setup, turn, "combine")
        wants = [[{homes(setup)[e] for e in row if e >= 0} for row in ids] for ids in ids_of(setup, turn)]
        to_hosts = [[{rank // each for rank in to} for to in rows] for rows in wants]
        if folds:
            plan = posts.combine_folded(counted(to_hosts, ranks // each), hosts, 4 * hidden, setup.max_tokens)
        else:
            plan = posts.combine(counted(wants, ranks), hosts, 4 * hidden)
        check_posts(posted(backend, ranks), planned(plan), (turn, crossing))
    world.run(combine_once, setup, 0, "end")


def counted(wants: list[list[set[int]]], among: int) -> np.ndarray:
    """[rank, of those]: how many of its tokens want each."""
    return np.array([[sum(each in to for to in rows) for each in range(among)] for rows in wants])


# ---- who is to blame -----------------------------------------------------------------------------


def late_at_combine(env: Any, late: int, flags: str) -> Any:
    """A rank comes to a combine when the others have given it up."""
    group = tw.Group(env.comm, timeout=LATE, **setup_of(4, 2, combine_dtype="float32").settings())
    received, rows = dispatched(env, group, 0)
    if env.rank == late:
        await_flags(flags, *(rank for rank in range(env.nranks) if rank != late))
        hear(env, group)
    begin = time.monotonic()
    outcome = caught(group.combine, received.handle, rows)
    took = time.monotonic() - begin
    raise_flag(flags, env.rank)
    shrunk = caught(lambda: group.shrink(timeout=PATIENT).close())
    group.close()
    return outcome, took, shrunk


@pytest.mark.parametrize("late", [0, 3])
def test_who_is_late_is_blamed(between, late, tmp_path) -> None:
    """Not its mate, which waits for it before it folds, nor by the owner for whom that one folds."""
    world = between(4, 2)
    for rank, (outcome, took, shrunk) in enumerate(world.run(late_at_combine, late, str(tmp_path))):
        if rank == late:
            said(outcome, "twExcluded", "its peers go on without it")
            assert shrunk[0] == "twExcluded"
            continue
        said(outcome, "twTimeout", rf"rank {late} did not arrive in time in combine of step \d on lane 0")
        assert took < LATE + AT_ONCE and shrunk[0] == "twSuccess", rank


def slow_combine(env: Any, slow: int) -> list[bool]:
    """Whether sums are right of combines to which one rank comes later than its mate; the sums of the step before are
    others."""
    setup = setup_of(4, 2, combine_dtype="float32")
    good = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        for turn in range(4):
            received, rows = dispatched(env, group, 0, 2.0 + turn)
            if env.rank == slow:
                time.sleep(0.2)
            out = env.backend.array(group.combine(received.handle, rows, dtype="float32"))
            good.append(bool((out == (2.0 + turn) * fans(setup, 0)[env.rank]).all()))
    return good


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_mate(between, slow) -> None:
    assert between(4, 2).run(slow_combine, slow) == [[True] * 4] * 4


def refused_combine(env: Any, refuses: int) -> Any:
    """Combines of which one rank refuses every second, and the same again."""
    setup = setup_of(4, 2, combine_dtype="float32")
    heard = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        for turn in range(4):
            received, rows = dispatched(env, group, turn, 2.0)
            if turn % 2 == 0:
                given = rows[..., 1:] if env.rank == refuses else rows
                heard.append(caught(group.combine, received.handle, given)[0])
            out = env.backend.array(group.combine(received.handle, rows, dtype="float32"))
            heard.append(bool((out == 2.0 * fans(setup, turn)[env.rank]).all()))
    return heard


@pytest.mark.parametrize("refuses", [0, 3])
def test_a_combine_that_one_rank_refuses(between, refuses) -> None:
    """It folds nothing and waits for nobody; the next steps are whole."""
    for rank, heard in enumerate(between(4, 2).run(refused_combine, refuses)):
        first = "twInvalidArgument" if rank == refuses else "twPeerRefused"
        assert heard == [first, True, True] * 2, (rank, heard)
