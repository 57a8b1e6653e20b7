"""Behaviour: token replicas. Ranks of a set have the same tokens, send a share each, and all get every result, bit for
bit as the oracle's of ranks that send those shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import harness
import numpy as np
import player
import pytest
from cases import LAYOUTS, Case, Round, Setup, exchange_of, fewer_ranks, one, same
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT
from hypothesis import example, given
from strategies import SETTINGS
from strategies import cases as any_case
from test_choice_values import Valued, Worlds, any_bits, make
from test_exchange import check
from test_properties import PROCESSES, THREADS, judge

import tokenway as tw
from tokenway import reference as ref

OWN = Setup(ranks=4, experts=7, top_k=3, hidden=24, max_tokens=9, token_replicas=2)

# The hard ones together: sets without tokens, fewer tokens than ranks of a set, shares that differ, odd rows, -1.
HARD = Case(
    Setup(ranks=4, experts=7, top_k=5, hidden=3, payloads=((1, "uint8"), (17, "uint8")), lanes=2, token_replicas=2),
    (
        (Round((0, 0, 15, 15), routing="holes", send_dispatch=True), Round((16, 16, 1, 1), seed=1, send_combine=True)),
        (Round((0, 0, 0, 0), seed=2), Round((3, 3, 8, 8), seed=3, routing="one", bound=8)),
    ),
    slow=1,
)
WHOLE = replace(
    HARD,
    setup=replace(HARD.setup, token_replicas=4),
    flights=tuple(tuple(replace(r, tokens=(n,) * 4) for n, r in enumerate(flight, 1)) for flight in HARD.flights),
)


# ---- whatever the shape, the oracle's bits -------------------------------------------------------


@pytest.mark.processes
@SETTINGS
@example(HARD)
@given(any_case(max_ranks=max(2, PROCESSES), token_replicas=True))
def test_any_case_on_processes(backend: str, case: Case) -> None:
    judge(harness.Processes(backend, case.setup.ranks), case)


@SETTINGS
@example(HARD)
@example(WHOLE)
@given(any_case(max_ranks=max(2, min(6, THREADS)), token_replicas=True))
def test_any_case_on_threads(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


@SETTINGS
@given(any_case(max_ranks=max(2, min(6, THREADS)), token_replicas=True, exact=True, max_flights=2))
def test_any_case_of_high_throughput(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


@SETTINGS
@given(any_case(max_ranks=max(2, min(6, THREADS)), token_replicas=True, auto=True, replicas=True, max_flights=2))
def test_any_case_of_both_modes(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (3, 3), (4, 2), (6, 3), (6, 2), (4, 1)])
def test_sets(world, ranks, replicas) -> None:
    """Every number of tokens around the number of replicas, in all layouts."""
    setup = replace(OWN, ranks=ranks, token_replicas=replicas, mode="auto", low_latency_tokens=9)
    each = (replicas + 1, 0, 9 * replicas - 1, 1)
    rounds = []
    for i, layout in enumerate(sum(LAYOUTS.values(), ())):
        tokens = tuple(each[(rank // replicas + i) % 4] for rank in range(ranks))
        rounds.append(
            Round(tokens, seed=i, layout=layout, own=i % 2 == 1, late=i == 2, out=("float32", "bfloat16")[i % 2])
        )
    check(world, fewer_ranks(one(setup, *rounds), world.most))


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("mode", LAYOUTS)
def test_rows_of_all_kernels(world, made_for, mode, limit) -> None:
    """Sums that are shared as packets and in chunks, of one type and of another, in vectors and in bytes."""
    setup = Setup(
        ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=600, mode=mode, sm_limit=limit, token_replicas=2
    )
    first, second = LAYOUTS[mode][:2]
    base = Round((1199, 1199), weighting="none", rows="bfloat16", out="bfloat16", layout=first)
    rounds = (
        replace(base, identity=True),
        replace(base, layout=second, seed=1, out="float32"),
        replace(base, seed=2, tokens=(41, 41), bound=40 if mode == "low_latency" else None),
        replace(base, seed=3, weighting="topk", rows="float32", tokens=(1, 1)),
    )
    check(world, one(setup, *rounds))
    odd = replace(setup, hidden=made_for.large + 3, combine_hidden=made_for.large - 1)
    check(world, one(odd, replace(base, out="float16"), replace(base, seed=1, tokens=(30, 30), out="float16")))


@pytest.mark.parametrize("inbox", [3, 9])
def test_combines_in_parts(world, inbox) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, inbox_tokens=inbox, lanes=2)
    base = Round((79, 79, 0, 0), layout="flat")
    rounds = (
        base,
        replace(base, seed=1, tokens=(9, 9, 80, 80), routing="holes", send_combine=True, late=True),
        replace(base, seed=2, layout="grouped", rows="bfloat16", release=True),
        replace(base, seed=3, tokens=(3, 3, 1, 1), bound=3, own=True),
    )
    check(world, fewer_ranks(one(setup, *rounds, slow=2), world.most))


# ---- values of choices ---------------------------------------------------------------------------


def play_valued(env: Any, case: Case) -> Any:
    case = player.possible(env, case)
    with make(env, case.setup) as group:
        return Valued(env, group, case).flights()


@pytest.mark.parametrize("mode", LAYOUTS)
def test_values_of_choices(world, mode) -> None:
    setup = replace(OWN, mode=mode)
    layouts = LAYOUTS[mode]
    base = Round((17, 17, 4, 4))
    rounds = [
        replace(base, layout=name, seed=i, own=i == 1, routing=("random", "holes")[i % 2])
        for i, name in enumerate(layouts)
    ]
    case = fewer_ranks(one(setup, *rounds, replace(base, layout=layouts[0], tokens=(0, 0, 1, 1), seed=7)), world.most)
    by_rank = world(case.setup.ranks).run(play_valued, case)
    for f, (round_,) in enumerate(case.flights):
        x = exchange_of(case.setup, round_)
        given_values = [any_bits(round_, r, mine[f][0].ids.shape) for r, mine in enumerate(by_rank)]
        wanted = case.setup.of_sets(ref.choice_values(x, given_values, layout=round_.named))
        for rank, mine in enumerate(by_rank):
            same("choice values", mine[f][0].out[1].view(np.uint32), wanted[rank].view(np.uint32), f"rank {rank}")


def test_any_values(backend) -> None:
    """Several lanes, and a slow rank."""
    case = fewer_ranks(HARD, Worlds(backend).most)
    by_rank = Worlds(backend)(case.setup.ranks).run(play_valued, case)
    for f, flight in enumerate(case.flights):
        for i, round_ in enumerate(flight):
            x = exchange_of(case.setup, round_)
            given_values = [any_bits(round_, r, mine[f][i].ids.shape) for r, mine in enumerate(by_rank)]
            wanted = case.setup.of_sets(ref.choice_values(x, given_values, layout=round_.named))
            for rank, mine in enumerate(by_rank):
                same("choice values", mine[f][i].out[1].view(np.uint32), wanted[rank].view(np.uint32), f"rank {rank}")


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any, setup: Setup, tokens: int) -> list[bool]:
    """A graph with a dispatch and a combine, replayed with other tokens and other ids; the identity, summed over k."""
    graph, backend = Graph(env), env.backend
    ids = backend.tensor(np.zeros((tokens, 3), np.int32))
    x = backend.tensor(np.zeros((tokens, 24), np.float32))
    out = backend.tensor(np.zeros((tokens, 24), np.float32))
    good = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = group.route(ids)

        def calls() -> None:
            if setup.exact:
                group.exchange_counts(handle)
            received = group.dispatch(handle, x)
            group.combine(handle, received.tokens, out=out)

        with graph.capture():
            calls()
        for turn in range(4):
            rng = np.random.default_rng(turn)
            chosen = np.array([rng.permutation(7)[:3] for _ in range(tokens)], np.int32).reshape(tokens, 3)
            values = rng.integers(-9, 9, (tokens, 24)).astype(np.float32)
            ids[...], x[...], out[...] = backend.tensor(chosen), backend.tensor(values), -1
            graph.replay()
            backend.array(out)
            group.check()
            home, _ = ref.placement(7, setup.ranks, None)
            reached = np.array([len(set(home[row])) for row in chosen], np.float32)
            good.append(np.array_equal(backend.array(out), values * reached[:, None]))
    return good


@emulated_alone
@pytest.mark.parametrize("mode", LAYOUTS)
def test_replays(world, made_for, mode) -> None:
    if made_for.name != "emulated":
        pytest.skip("a graph cannot hold what a carrier moves")
    setup = replace(OWN, ranks=2, mode=mode, max_tokens=30, dtype="float32", combine_dtype="float32")
    if mode == "high_throughput":
        setup = replace(setup, max_recv_tokens=60)
    for good in world(2).run(replay, setup, 59):
        assert all(good), good
