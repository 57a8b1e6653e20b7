"""Rounds whose calls only enqueue: sequences, dtypes, channels, groups side by side, ranks that are late.

The suite of tests/py runs with TOKENWAY_BLOCKING=1; what stands here is that calls that return at once
are ordered by their streams alone.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import player
import pytest
import torch
from cases import FLOATS, Case, Got, Round, Setup, one, verify
from gpu_world import TIMEOUT, Locals, line_tokens, sleep_on_device
from player import Player

import tokenway as tw

LAYOUTS = ("rank_major", "expert_major")


def cases_of(ranks: int) -> dict[str, Case]:
    """What may go wrong if something is not in order of the stream."""
    tokens = (8, 3, 6, 0, 7)[:ranks]
    base = Round(tokens)
    setup = Setup(ranks=ranks, experts=2 * ranks + 1, top_k=3, lanes=3, max_tokens=8)
    odd = ((1, "uint8"), (3, "uint8"), (17, "uint8"), (5, "int16"), (1, "float8_e4m3fn"), (3, "int64"))
    both = [replace(base, layout=layout, seed=i) for i, layout in enumerate(LAYOUTS)]
    flight = tuple(
        replace(base, seed=20 + i, layout=LAYOUTS[i % 2], send_dispatch=True, send_combine=i != 1, again=i == 2)
        for i in range(3)
    )
    ways = ("again", "late", "release", "reuse", "memory", "identity", "fortran", "strided", "own")
    return {
        "dtypes": one(
            replace(setup, dtype="float16", combine_dtype="float32", payloads=odd),
            *(replace(r, rows=a, out=b, special=True) for r in both for a, b in itertools.pairwise(FLOATS)),
        ),
        "odd rows": one(replace(setup, hidden=17, dtype="uint8", payloads=odd[:3], combine_hidden=3), *both),
        "unaligned": one(
            replace(setup, hidden=129, payloads=odd[:3]),
            *(replace(r, strided=True, own=own, seed=5) for r in both for own in (False, True)),
        ),
        "lanes": Case(setup, (flight,) * 4, order=5, slow=1),
        "ways to call": one(
            setup, *(replace(r, **{way: True}, seed=40 + i) for i, way in enumerate(ways) for r in both)
        ),
        "ids": one(
            replace(setup, id_dtype="int64", id_space="global", invalid_id=99),
            *(replace(r, ids="int64", routing="holes") for r in both),
        ),
        "many tokens": one(
            replace(setup, experts=64, top_k=8, max_tokens=700, hidden=72),
            *(replace(r, tokens=(700, 411, 0, 5, 256)[:ranks]) for r in both),
        ),
        "more rounds": one(
            replace(setup, experts=64, top_k=8, max_tokens=1700, hidden=72),
            *(replace(r, tokens=(1700, 1411, 0, 5, 256)[:ranks]) for r in both),
        ),
        "64 ids": one(replace(setup, experts=70, top_k=64), *both),
        "slow": one(setup, *(replace(r, seed=s) for s in range(6) for r in both), slow=ranks - 1),
    }


def play(env: Any, case: Case, most: int | None) -> Any:
    with line_tokens(most):
        return player.play(env, case)


def check(case: Case, by_rank: Any) -> None:
    for f, flight in enumerate(case.flights):
        for i, round_ in enumerate(flight):
            verify(case.setup, round_, [mine[f][i] for mine in by_rank])


@pytest.mark.parametrize("name", cases_of(3))
def test_threads(lines, name) -> None:
    case = cases_of(3)[name]
    with Locals(3) as ranks:
        check(case, ranks.run(player.play, case))


@pytest.mark.parametrize("most", [None, 0])
@pytest.mark.parametrize("name", cases_of(2))
def test_processes(pair, name, most) -> None:
    case = cases_of(2)[name]
    check(case, pair.run(play, case, most))


# ---- groups side by side -------------------------------------------------------------------------

SIDE_BY_SIDE = (
    Setup(ranks=2, experts=6, top_k=3, hidden=48),
    Setup(ranks=2, experts=5, top_k=2, hidden=7, dtype="float32", lanes=2),
    Setup(ranks=2, experts=8, top_k=8, hidden=300, max_tokens=90),
)


def round_of(setup: Setup, seed: int) -> Round:
    tokens = (setup.max_tokens, setup.max_tokens - seed % 4)
    return Round(tokens, seed=seed, layout=LAYOUTS[seed % 2], send_dispatch=seed % 3 == 0)


def interleaved(env: Any) -> list[list[Got]]:
    """Three groups of one comm: dispatches of all, then combines in another order."""
    groups = [tw.Group(env.comm, timeout=TIMEOUT, **s.settings()) for s in SIDE_BY_SIDE]
    players = [Player(env, g, Case(s, ())) for g, s in zip(groups, SIDE_BY_SIDE, strict=True)]
    results = []
    for seed in range(6):
        rounds = [round_of(s, seed) for s in SIDE_BY_SIDE]
        handles = [p.handle(r) for p, r in zip(players, rounds, strict=True)]
        pending = [
            p.dispatch(r, h, p.payloads(r), r.send_dispatch) for p, r, h in zip(players, rounds, handles, strict=True)
        ]
        received = [p.result() if isinstance(p, tw.Pending) else p for p in pending]
        got = [p.snapshot(r, x) for p, r, x in zip(players, rounds, received, strict=True)]
        for g in (2, 0, 1):
            rows = players[g].rows(rounds[g], received[g], got[g])
            got[g].out = players[g].array(players[g].combine(rounds[g], handles[g], rows, False))
        results.append(got)
    for group in groups:
        group.close()
    return results


def check_interleaved(by_rank: list[list[list[Got]]]) -> None:
    for seed in range(6):
        for g, setup in enumerate(SIDE_BY_SIDE):
            verify(setup, round_of(setup, seed), [mine[seed][g] for mine in by_rank])


def test_groups_side_by_side(pair) -> None:
    check_interleaved(pair.run(interleaved))


def test_groups_side_by_side_on_threads() -> None:
    with Locals(2) as ranks:
        check_interleaved(ranks.run(interleaved))


# ---- late ranks ----------------------------------------------------------------------------------

SKEW = Setup(ranks=2, experts=6, top_k=3, hidden=64, max_tokens=70, lanes=2)
SKEWED = tuple(Round((70, 33), seed=s, layout=LAYOUTS[s % 2]) for s in range(4))


def skewed(env: Any, late: int, how: str) -> list[Got]:
    """One rank is late by a tenth of a second before its dispatch and before its combine, on host or device."""

    def nap() -> None:
        if env.rank != late:
            return
        if how == "host":
            time.sleep(0.1)
        else:
            sleep_on_device(0.1)

    results = []
    with tw.Group(env.comm, timeout=TIMEOUT, **SKEW.settings()) as group:
        player = Player(env, group, Case(SKEW, ()))
        for round_ in SKEWED:
            handle, inputs = player.handle(round_), player.payloads(round_)
            nap()
            received = player.dispatch(round_, handle, inputs, False)
            got = player.snapshot(round_, received)
            rows = player.rows(round_, received, got)
            nap()
            got.out = player.array(player.combine(round_, handle, rows, False))
            results.append(got)
    return results


def check_skewed(by_rank: list[list[Got]]) -> None:
    for s, round_ in enumerate(SKEWED):
        verify(SKEW, round_, [mine[s] for mine in by_rank])


@pytest.mark.parametrize("how", ["host", "device"])
@pytest.mark.parametrize("late", [0, 1])
def test_skew(pair, late, how) -> None:
    check_skewed(pair.run(skewed, late, how))


@pytest.mark.parametrize("how", ["host", "device"])
@pytest.mark.parametrize("late", [0, 1])
def test_skew_on_one_device(lines, late, how) -> None:
    with Locals(2, devices=[0, 0]) as ranks:
        check_skewed(ranks.run(skewed, late, how))


def returns_at_once(env: Any) -> tuple[float, float]:
    """Seconds that the host spends in a dispatch and a combine whose peer is half a second late."""
    with tw.Group(env.comm, timeout=TIMEOUT, **SKEW.settings()) as group:
        player = Player(env, group, Case(SKEW, ()))
        round_ = SKEWED[0]
        for _ in range(2):  # the first calls set things up
            handle, inputs = player.handle(round_), player.payloads(round_)
            rows = torch.zeros(2, 70, 64, device=env.device)
            env.stream.synchronize()
            if env.rank == 1:
                time.sleep(0.5)
            begin = time.monotonic()
            player.dispatch(round_, handle, inputs, False)
            player.combine(round_, handle, rows, False)
            took = time.monotonic() - begin
            env.stream.synchronize()
            ended = time.monotonic() - begin
    return took, ended


def test_calls_do_not_wait(pair) -> None:
    (took, ended), _ = pair.run(returns_at_once)
    assert took < 0.2 < 0.35 < ended, (took, ended)
