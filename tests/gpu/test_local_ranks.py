"""Ranks that share devices: the CPU's bits, staged and unstaged, with few blocks too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, Got, Round, Setup, verify
from gpu_world import TIMEOUT, Locals, bits_equal
from player import Player

import tokenway as tw


def setup_of(nranks: int, **changes: Any) -> Setup:
    return Setup(
        **{
            "ranks": nranks,
            "experts": 2 * nranks + 1,
            "top_k": min(4, 2 * nranks + 1),
            "hidden": 256,
            "max_tokens": 40,
            "payloads": ((3, "uint8"),),
            "lanes": 2,
        }
        | changes
    )


def rounds_of(setup: Setup) -> list[Round]:
    most, ranks = setup.max_tokens, range(setup.ranks)
    first = Round(tuple(most - 3 * r for r in ranks))
    few = Round(tuple(r % 3 for r in ranks), seed=1, routing="holes", bound=5)
    rounds = [first, few, replace(first, seed=2, weighting="none", rows="bfloat16", out="bfloat16")]
    return [replace(r, layout=layout) for layout in ("rank_major", "expert_major") for r in rounds]


def play(env: Any, setup: Setup, rounds: Sequence[Round], more: Any = None) -> list[Got]:
    with tw.Group(env.comm, **{"timeout": TIMEOUT} | setup.settings() | (more or {})) as group:
        case = Case(setup, tuple((r,) for r in rounds))
        return [got for (got,) in Player(env, group, case).flights()]


def by_round(by_rank: list[list[Got]]) -> list[list[Got]]:
    return [list(of) for of in zip(*by_rank, strict=True)]


def check(setup: Setup, rounds: Sequence[Round], got: list[list[Got]]) -> None:
    """Got by round and rank against the oracle."""
    for round_, of in zip(rounds, got, strict=True):
        verify(setup, round_, of)


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 8])
def test_as_on_the_cpu(lines, nranks) -> None:
    setup = setup_of(nranks)
    rounds = rounds_of(setup)
    with Locals(nranks, "cpu") as on_cpu:
        want = by_round(on_cpu.run(play, setup, rounds))
    with Locals(nranks) as ranks:
        unstaged = by_round(ranks.run(play, setup, rounds))
        staged = ranks.staged(setup, rounds)
    for got in (unstaged, staged):
        check(setup, rounds, got)
        for of, wanted in zip(got, want, strict=True):
            assert all(bits_equal(a.out, b.out) for a, b in zip(of, wanted, strict=True))


@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_all_on_one_device(lines, nranks) -> None:
    setup = setup_of(nranks)
    rounds = rounds_of(setup)
    with Locals(nranks, devices=[0] * nranks) as ranks:
        check(setup, rounds, by_round(ranks.run(play, setup, rounds)))
        check(setup, rounds, ranks.staged(setup, rounds))


@pytest.mark.parametrize("where", ["one device", "all devices"])
@pytest.mark.parametrize("nranks", [2, 8])
def test_one_block_a_rank(lines, where, nranks) -> None:
    """S7: a rank whose only block waits has sent everything before."""
    setup = setup_of(nranks, hidden=512, max_tokens=200)
    big = Round(tuple(200 - 7 * r for r in range(nranks)), seed=3)
    rounds = [big, replace(big, tokens=(64,) * nranks, bound=64), *rounds_of(setup)[1::3]]
    with Locals(nranks, devices=[0] * nranks if where == "one device" else None) as ranks:
        check(setup, rounds, by_round(ranks.run(play, setup, rounds, {"sm_limit": 1})))
        check(setup, rounds, ranks.staged(setup, rounds, sm_limit=1))


@pytest.mark.parametrize("top_k", [4, 8])
def test_ids_by_column(lines, top_k) -> None:
    """Staged: sent from the caller's ids, which lie apart, and received when the handle has them side by side, so by
    kernels of different kinds. Slots that hold nothing of a rank's own are somebody's to empty all the same."""
    setup = setup_of(2, experts=9, top_k=top_k, payloads=(), max_tokens=64)
    rounds = [Round((11, 0), seed=s, fortran=True, bound=b, routing="holes") for s, b in enumerate((64, 24, 11))]
    with Locals(2) as ranks:
        check(setup, rounds, ranks.staged(setup, rounds))
        check(setup, rounds, by_round(ranks.run(play, setup, rounds)))


def test_limits_that_differ() -> None:
    """sm_limit is a rank's own."""
    setup = setup_of(3)
    rounds = rounds_of(setup)

    def mine(env: Any) -> list[Got]:
        return play(env, setup, rounds, {"sm_limit": (1, 0, 5)[env.rank]})

    with Locals(3) as ranks:
        check(setup, rounds, by_round(ranks.run(mine)))


def test_lanes_in_flight() -> None:
    """S8: kernels of several channels and ranks wait on one device at once."""
    setup = setup_of(4, lanes=4, max_tokens=24)
    flights = []
    for f in range(4):
        base = Round((24, 0, 5, 24), send_dispatch=True, send_combine=f % 2 == 0)
        flights.append(tuple(replace(base, seed=10 * f + i, again=i == 1) for i in range(4)))
    case = Case(setup, tuple(flights), order=3, slow=1)

    def run(env: Any) -> Any:
        with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
            return Player(env, group, case).flights()

    for devices in (None, [0] * 4):
        with Locals(4, devices=devices) as ranks:
            by_rank = ranks.run(run)
        for f, flight in enumerate(flights):
            for i, round_ in enumerate(flight):
                verify(setup, round_, [mine[f][i] for mine in by_rank])


def on_a_stream_of_pytorch(env: Any, setup: Setup, rounds: Sequence[Round], streams: Any) -> list[Got]:
    with torch.cuda.stream(streams[env.rank]):
        return play(env, setup, rounds)


def test_streams_of_pytorch() -> None:
    """The streams of PyTorch's pool, as users have them."""
    setup = setup_of(2)
    rounds = rounds_of(setup)
    with Locals(2) as ranks:
        streams = [torch.cuda.Stream(env.device) for env in ranks.envs]
        check(setup, rounds, by_round(ranks.run(on_a_stream_of_pytorch, setup, rounds, streams)))


def test_the_default_stream_is_refused() -> None:
    """Work on it waits for all other streams of the device, and they for it."""

    def on_default(env: Any) -> str:
        with tw.Group(env.comm, experts=2, top_k=1, hidden=4, max_tokens=2) as group:
            ids = torch.zeros(1, 1, dtype=torch.int32, device=env.device)
            tokens = torch.zeros(1, 4, dtype=torch.bfloat16, device=env.device)
            env.stream.synchronize()
            with torch.cuda.stream(torch.cuda.default_stream(env.device)):
                try:
                    handle = group.route(ids)
                    group.dispatch(handle, tokens)
                except tw.InvalidArgument as error:
                    return str(error)
        return "no error"

    with Locals(1) as ranks:
        (text,) = ranks.run(on_default)
    assert "stream" in text, text
