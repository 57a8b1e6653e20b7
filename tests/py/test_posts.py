"""What kernels post to ranks of other hosts, counted by the emulated network (tests/emulator/network.cc).

Every row goes to each of its ranks once, and nothing else does but what a rank is told of a step: its note and, last,
one word. Nothing is posted to ranks of the same host.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from fabric_backend import ranks_per_host
from harness import Env, attempt, caught, settle

import tokenway as tw
from tokenway import _native

RANKS, EXPERTS, TOP_K, HIDDEN = 5, 10, 3, 72
TOKENS = (9, 0, 7, 4, 6)
ROW, PARTIAL = 2 * HIDDEN, 4 * HIDDEN  # bytes: bfloat16 there, float32 back
META = 8 * (1 + TOP_K)  # bytes of a row's header, ids and weights
NOTE = 16  # bytes: a note, and the word for rows that come apart from their signal
SILENT = 4  # a rank whose tokens go to no expert
REFUSES = 2  # a rank whose second dispatch is refused


@pytest.fixture(autouse=True)
def posts(backend: str) -> None:
    if backend != "emulated-gin":
        pytest.skip(f"for emulated devices whose kernels post, not the backend {backend}")


def posted() -> np.ndarray:
    """[source, peer] of (puts, bytes, words, puts behind the last word), since it was last asked."""
    found = np.zeros((RANKS, RANKS, 4), np.uint64)
    _native.lib.tokenway_emulated_posts(RANKS, found.ctypes.data_as(ctypes.c_void_p))
    return found.astype(np.int64)


def ids_of(rank: int) -> np.ndarray:
    rng = np.random.default_rng([11, rank])
    tokens = TOKENS[rank]
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)] or [np.zeros(TOP_K)]).astype(np.int32)
    ids = ids[:tokens]
    ids[rng.random(ids.shape) < 0.3] = -1
    return np.full_like(ids, -1) if rank == SILENT else ids


def rows_between() -> np.ndarray:
    """[source, peer]: rows that a rank sends to another."""
    rows = np.zeros((RANKS, RANKS), np.int64)
    for rank in range(RANKS):
        for row in ids_of(rank):
            for peer in {int(e) * RANKS // EXPERTS for e in row if e >= 0}:
                rows[rank, peer] += 1
    return rows


def apart() -> np.ndarray:
    """[source, peer]: 1 where they are on different hosts."""
    hosts = np.arange(RANKS) // ranks_per_host()
    return (hosts[:, None] != hosts[None]).astype(np.int64)


def told(rows: np.ndarray, row_bytes: int, regions: int) -> np.ndarray:
    """What must be posted in a step of such rows, each of so many parts."""
    puts = 1 + regions * (rows > 0)
    return (
        np.stack([puts, NOTE + rows * row_bytes, np.ones_like(rows), np.zeros_like(rows)], axis=-1) * apart()[..., None]
    )


def begin(env: Any, mode: str) -> None:
    group = tw.Group(
        env.comm,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=max(TOKENS),
        combine_dtype="float32",
        mode=mode,
    )
    env.kept["posts"] = group, group.route(env.backend.tensor(ids_of(env.rank)))


def rows_of(env: Any, elements: int = HIDDEN) -> Any:
    rows = np.zeros((TOKENS[env.rank], elements), np.float32)
    return env.backend.tensor(rows.astype(tw.tensors.numpy_dtype("bfloat16")))


def dispatch(env: Any) -> None:
    group, handle = env.kept["posts"]
    env.kept["received"] = group.dispatch(handle, rows_of(env))


def combine(env: Any) -> None:
    group, handle = env.kept["posts"]
    shape = env.kept.pop("received").tokens.shape
    group.combine(handle, env.backend.tensor(np.zeros(tuple(shape), np.float32)))


def exchange_counts(env: Any) -> None:
    group, _ = env.kept["posts"]
    handle = group.route(env.backend.tensor(ids_of(env.rank)))
    env.kept["posts"] = group, group.exchange_counts(handle)


def refuse(env: Any) -> str:
    """Of a dispatch that one rank calls with rows that do not fit."""
    group, handle = env.kept["posts"]
    return caught(group.dispatch, handle, rows_of(env, HIDDEN + (env.rank == REFUSES)))[0]


def end(env: Any) -> None:
    env.kept.pop("posts")[0].close()


@pytest.mark.parametrize("kind", ["threads"])
def test_rows_alone_are_posted(world: Any) -> None:
    ranks, rows = world(RANKS), rows_between()
    assert rows[SILENT].sum() == 0 and (rows * apart()).sum() > 0
    ranks.run(begin, "low_latency")
    posted()
    for step in range(3):  # both banks
        ranks.run(dispatch)
        assert (posted() == told(rows, META + ROW, 2)).all(), step
        ranks.run(combine)
        assert (posted() == told(rows.T, PARTIAL, 1)).all(), step
    results = ranks.run(refuse)
    assert results == ["twInvalidArgument" if rank == REFUSES else "twPeerRefused" for rank in range(RANKS)]
    refused = rows.copy()
    refused[REFUSES] = 0  # it tells of its step, and sends nothing
    assert (posted() == told(refused, META + ROW, 2)).all()
    ranks.run(end)
    assert not posted().any()


@pytest.mark.parametrize("kind", ["threads"])
def test_counts_and_the_rows_that_they_tell_of(world: Any) -> None:
    """An exact layout: counts go to all, and rows to where they arrive, before they are put together."""
    ranks, rows = world(RANKS), rows_between()
    ranks.run(begin, "high_throughput")
    posted()
    left_out = []
    for step in range(4):
        ranks.run(exchange_counts)
        assert (posted() == told(np.ones_like(rows), 4 * (RANKS + EXPERTS // RANKS), 1)).all(), step
        ranks.run(dispatch)
        # Where the step would have the other bank than the caller's view, it is left out, and that is told to all.
        skip = told(np.zeros_like(rows), 0, 0)
        there = posted() - told(rows, META + ROW, 2)
        left_out.append(bool(there.any()))
        assert (there == left_out[-1] * skip).all(), step
        ranks.run(combine)
        assert (posted() == told(rows.T, PARTIAL, 1)).all(), step
    assert any(left_out)
    ranks.run(end)


def combine_behind_a_refusal(env: Any) -> tuple[bool, bool]:
    """(whether sums of a dispatch that a peer refused are NaN, whether the group is finished), of calls that return
    before a device has told of the refusal."""
    begin(env, "low_latency")
    group, handle = env.kept["posts"]
    result = caught(group.dispatch, handle, rows_of(env, HIDDEN + (env.rank == REFUSES)))[0]
    assert result == ("twInvalidArgument" if env.rank == REFUSES else "twSuccess")
    out = env.backend.tensor(np.zeros((TOKENS[env.rank], HIDDEN), np.float32))
    if env.rank != REFUSES:
        group.combine(handle, env.backend.tensor(np.zeros((RANKS, max(TOKENS), HIDDEN), np.float32)), out=out)
    nothing = env.rank == REFUSES or bool(np.isnan(env.backend.array(out)).all())
    finished = group.error is not None and group.error.sticky
    end(env)
    return nothing, finished


def test_a_combine_of_a_dispatch_that_failed(made_for: Any, monkeypatch) -> None:
    """It is no step, on any rank, and nobody waits for it."""
    monkeypatch.setenv("TOKENWAY_BLOCKING", "0")
    comms = made_for.local_comms(RANKS)
    outcomes: list[Any] = [None] * RANKS

    def body(rank: int) -> None:
        outcomes[rank] = attempt(Env(comms[rank], made_for).call, combine_behind_a_refusal)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settle(outcomes) == [(True, False)] * RANKS
    for comm in comms:
        comm.close()
