"""Ids that are wrong in device memory: they act as -1, the record says which and where, and the group goes on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cases import Case, Got, Round, Setup, answers, make_ids, make_payloads, same
from gpu_world import TIMEOUT, Locals
from player import Player

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

SETUP = Setup(ranks=2, experts=6, top_k=3, hidden=16, max_tokens=40)
CULPRIT = 1

# name: (token, k, value); the value None is that of k - 1: an id twice.
BAD: dict[str, tuple[int, int, int | None]] = {
    "above E": (3, 1, 6),
    "far above E": (0, 0, 2**31 - 1),
    "below -1": (30, 2, -2),
    "far below": (32, 0, -(2**31)),
    "of 64 bits": (1, 2, 2**32 + 1),
    "twice": (7, 2, None),
}


def round_of(name: str, layout: str) -> Round:
    return Round((40, 33), layout=layout, ids="int64" if name == "of 64 bits" else "int32")


def spoiled(name: str, round_: Round) -> tuple[np.ndarray, np.ndarray, int]:
    """(ids as the culprit gives them, as they act, the bad value)."""
    token, k, value = BAD[name]
    ids, _ = make_ids(SETUP, round_, CULPRIT)
    acting, given = ids.copy(), ids
    if value is None:
        value = int(given[token, k - 1])
    given[token, k], acting[token, k] = value, -1
    return given, acting, value


def play(env: Any, name: str, layout: str) -> tuple[Got, Any, list[str], Got]:
    """A round with a bad id on one rank, its record, what check() said twice, and a good round."""
    round_ = round_of(name, layout)
    with tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
        player = Player(env, group, Case(SETUP, ()))
        ids, weights = make_ids(SETUP, round_, env.rank)
        if env.rank == CULPRIT:
            ids = spoiled(name, round_)[0]
        tensor = env.backend.tensor
        handle = group.route(tensor(ids), tensor(weights))
        received = player.dispatch(round_, handle, player.payloads(round_), False)
        got = player.snapshot(round_, received)
        rows = player.rows(round_, received, got)
        got.out = player.array(player.combine(round_, handle, rows, False))
        record, said = record_of(group, 1.0 if env.rank == CULPRIT else 0.0), []
        for _ in range(2):
            try:
                group.check()
                said.append("")
            except tw.TokenwayError as error:
                said.append(f"{error.result}: {error}")
        good = player.flight((Round((5, 40), seed=77),))[0]
        return got, record, said, good


def record_of(group: tw.Group, seconds: float) -> Any:
    """The record, once there is one, for so long."""
    end = time.monotonic() + seconds
    while group.error is None and time.monotonic() < end:
        time.sleep(0.001)
    return group.error


def check(name: str, layout: str, by_rank: list[Any]) -> None:
    round_ = round_of(name, layout)
    _, acting, value = spoiled(name, round_)
    made = [make_ids(SETUP, round_, rank) for rank in range(SETUP.ranks)]
    ids = [acting if rank == CULPRIT else made[rank][0] for rank in range(SETUP.ranks)]
    x = ref.Exchange(ids, [w for _, w in made], SETUP.experts, SETUP.max_tokens)
    payloads = [[make_payloads(SETUP, round_, rank)[0] for rank in range(SETUP.ranks)]]
    view = ref.dispatch_rank_major if layout == "rank_major" else ref.dispatch_expert_major
    rows = []
    for rank, (got, _, _, _) in enumerate(by_rank):
        want = view(x, rank, payloads)
        same("counts", got.counts, want.counts, name)
        same("ids", got.ids, want.ids.astype(np.int32), name)
        same("weights", got.weights, want.weights, name)
        rows.append(answers(SETUP, round_, rank, want.payloads[0], want.ids, want.weights, want.counts))
    wire, out = numpy_dtype(SETUP.combine_dtype), numpy_dtype(round_.out)
    wanted = ref.combine(x, rows, layout=layout, weighting=round_.weighting, wire=wire, out=out)
    for rank, (got, _, _, _) in enumerate(by_rank):
        same("result", got.out, wanted[rank], f"{name}, rank {rank}")
    token, k, _ = BAD[name]
    _, record, said, _ = by_rank[CULPRIT]
    assert record is not None and record.result == "twInvalidArgument" and not record.sticky, record
    assert (record.token, record.k, record.value) == (token, k, value), record
    assert said[0].startswith("twInvalidArgument") and f"[{token}, {k}]" in said[0] and str(value) in said[0], said
    assert said[1] == "", said
    assert by_rank[1 - CULPRIT][1] is None and by_rank[1 - CULPRIT][2] == ["", ""], by_rank[1 - CULPRIT]


def check_good(by_rank: list[Any]) -> None:
    from cases import verify

    verify(SETUP, Round((5, 40), seed=77), [good for _, _, _, good in by_rank])


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("name", BAD)
def test_bad_ids(lines, name, layout) -> None:
    with Locals(2) as ranks:
        by_rank = ranks.run(play, name, layout)
    check(name, layout, by_rank)
    check_good(by_rank)


def test_bad_ids_of_processes(pair) -> None:
    by_rank = pair.run(play, "above E", "rank_major")
    check("above E", "rank_major", by_rank)
    check_good(by_rank)
