"""What kernels post to ranks of other hosts, counted by the network beneath them, is what planning.posts says, exactly.

The network is the emulated one (tests/emulator/network.cc) or, on GPUs, that which tests/gin/plugin.cc gives NCCL.
Every row goes to each of its ranks once, or to each of their hosts, with a list for each of its ranks; and nothing else
does but what a rank is told of a step: its note and, last, one word. Nothing is posted to ranks of the same host.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fabric_backend import ranks_per_host
from gin_backend import CROSSING
from harness import Env, attempt, caught, settle

import tokenway as tw
from tokenway import _native
from tokenway.planning import posts
from tokenway.planning.posts import Posts
from tokenway.planning.rows import Layer, counts

RANKS, EXPERTS, TOP_K, HIDDEN = 5, 10, 3, 71
TOKENS = (9, 0, 7, 4, 6)
ROW, SCALES, PARTIAL = 2 * HIDDEN, 3 * 4, 4 * HIDDEN  # bytes: bfloat16 there, float32 back
SILENT = 4  # a rank whose tokens go to no expert
REFUSES = 2  # a rank whose second dispatch is refused
NETWORKS = {"emulated-gin": lambda: _native.lib, "gin": lambda: ctypes.CDLL(os.environ["NCCL_RMA_PLUGIN"])}


@pytest.fixture(params=["per_rank", "per_host"])
def crossing(request: pytest.FixtureRequest, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How rows of a dispatch or gather cross, in comms of this test."""
    monkeypatch.setenv(CROSSING, request.param)
    world(RANKS).forget()
    yield request.param
    world(RANKS).forget()


@pytest.fixture(autouse=True)
def counted(backend: str) -> None:
    if backend not in NETWORKS or (backend == "gin" and "NCCL_RMA_PLUGIN" not in os.environ):
        pytest.skip(f"for a network that counts, not the backend {backend}")


def posted(backend: str, ranks: int = RANKS) -> np.ndarray:
    """[source, peer] of (puts, bytes, words, puts behind the last word), since it was last asked."""
    found = np.zeros((ranks, ranks, 4), np.uint64)
    NETWORKS[backend]().tokenway_posts(ranks, found.ctypes.data_as(ctypes.c_void_p))
    return found.astype(np.int64)


def planned(step: Posts) -> np.ndarray:
    """The same as it must be."""
    return np.stack([step.puts, step.bytes, step.adds, np.zeros_like(step.adds)], axis=-1)


def tokens_of(rank: int, turn: int) -> int:
    return TOKENS[(rank + turn) % RANKS]


def ids_of(rank: int, turn: int) -> np.ndarray:
    """Of turn 0 and 3 drawn, with gaps; of turn 1 all of one rank's experts; of turn 2 none."""
    rng = np.random.default_rng([11, rank, turn])
    drawn = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens_of(rank, turn))]
    ids = np.array(drawn, np.int32).reshape(-1, TOP_K)
    ids[rng.random(ids.shape) < 0.3] = -1
    if turn == 1:
        ids[:] = [EXPERTS - 1, -1, EXPERTS - 2]
    return np.full_like(ids, -1) if rank == SILENT or turn == 2 else ids


def rows_between(turn: int) -> np.ndarray:
    """[source, peer]: rows that a rank sends to another, itself included."""
    layer = Layer(EXPERTS, TOP_K, RANKS, 1)
    return np.stack([counts(ids_of(rank, turn), layer)[0] for rank in range(RANKS)])


def rows_to_hosts(turn: int) -> np.ndarray:
    """[source, host]: rows that a rank sends to any of a host's ranks."""
    homes = np.array(hosts())[np.arange(EXPERTS) * RANKS // EXPERTS]
    return np.array(
        [
            [sum(host in homes[row[row >= 0]] for row in ids_of(rank, turn)) for host in range(max(hosts()) + 1)]
            for rank in range(RANKS)
        ]
    )


def hosts() -> list[int]:
    """Of each rank the number of its host."""
    return [rank // ranks_per_host() for rank in range(RANKS)]


def begin(env: Any, mode: str) -> None:
    group = tw.Group(
        env.comm,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=max(TOKENS),
        combine_dtype="float32",
        payloads={"scales": (SCALES // 4, "float32")},
        mode=mode,
    )
    env.kept["posts"] = group, None


def route(env: Any, turn: int) -> None:
    group, _ = env.kept["posts"]
    env.kept["posts"] = group, group.route(env.backend.tensor(ids_of(env.rank, turn)))
    env.kept["tokens"] = tokens_of(env.rank, turn)


def sent(env: Any, elements: int = HIDDEN) -> tuple[Any, dict[str, Any]]:
    rows = np.zeros((env.kept["tokens"], elements), np.float32).astype(tw.tensors.numpy_dtype("bfloat16"))
    scales = np.zeros((env.kept["tokens"], SCALES // 4), np.float32)
    return env.backend.tensor(rows), {"scales": env.backend.tensor(scales)}


def dispatch(env: Any) -> None:
    group, handle = env.kept["posts"]
    env.kept["received"] = group.dispatch(handle, *sent(env))


def combine(env: Any) -> None:
    group, handle = env.kept["posts"]
    shape = env.kept.pop("received").tokens.shape
    group.combine(handle, env.backend.tensor(np.zeros(tuple(shape), np.float32)))


def exchange_counts(env: Any) -> None:
    group, handle = env.kept["posts"]
    group.exchange_counts(handle)


def refuse(env: Any) -> str:
    """Of a dispatch that one rank calls with rows that do not fit."""
    group, handle = env.kept["posts"]
    return caught(group.dispatch, handle, *sent(env, HIDDEN + (env.rank == REFUSES)))[0]


def end(env: Any) -> None:
    env.kept.pop("posts")[0].close()


def dispatched(rows: np.ndarray, turn: int, crossing: str) -> np.ndarray:
    """rows: of that turn, 0 of who refuses."""
    if crossing == "per_rank":
        return planned(posts.dispatch(rows, hosts(), (ROW, SCALES), TOP_K))
    to_hosts = rows_to_hosts(turn) * (rows.sum(axis=1, keepdims=True) > 0)
    tokens = np.array([tokens_of(rank, turn) for rank in range(RANKS)])
    return planned(posts.dispatch_once(rows, to_hosts, tokens, hosts(), (ROW, SCALES), TOP_K))


def combined(rows: np.ndarray) -> np.ndarray:
    return planned(posts.combine(rows, hosts(), PARTIAL))


def check(found: np.ndarray, wanted: np.ndarray, what: Any) -> None:
    assert found.tolist() == wanted.tolist(), what


def check_dispatch(found: np.ndarray, rows: np.ndarray, turn: int, crossing: str, what: Any = "") -> bool:
    """Whether a step was left out, which is told to all: where a dispatch would have the other bank than its view."""
    more = found - dispatched(rows, turn, crossing)
    left_out = bool(more.any())
    check(more, left_out * planned(posts.nothing(hosts())), ("dispatch", turn, what))
    return left_out


@pytest.mark.parametrize("kind", ["threads"])
def test_rows_alone_are_posted(world: Any, backend: str, crossing: str) -> None:
    ranks = world(RANKS)
    routings = [rows_between(turn) for turn in range(4)]
    assert (routings[0] == 0).any() and routings[0].max() > 1 and not any(each[SILENT].any() for each in routings)
    assert routings[1].any() and not routings[1][:, : RANKS - 1].any() and not routings[2].any()
    assert all(0 in [tokens_of(rank, turn) for rank in range(RANKS)] for turn in range(4))
    ranks.run(begin, "low_latency")
    posted(backend)
    for turn in range(4):  # in both banks
        rows = rows_between(turn)
        ranks.run(route, turn)
        for again in range(1 + turn % 2):
            ranks.run(dispatch)
            check_dispatch(posted(backend), rows, turn, crossing, again)
        ranks.run(combine)
        check(posted(backend), combined(rows), ("combine", turn))
    results = ranks.run(refuse)
    assert results == ["twInvalidArgument" if rank == REFUSES else "twPeerRefused" for rank in range(RANKS)]
    refused = rows.copy()
    refused[REFUSES] = 0  # it tells of its step, and sends nothing
    assert rows[REFUSES].any()
    check_dispatch(posted(backend), refused, turn, crossing, "refused")
    ranks.run(end)
    assert not posted(backend).any()


@pytest.mark.parametrize("kind", ["threads"])
def test_counts_and_the_rows_that_they_tell_of(world: Any, backend: str, crossing: str) -> None:
    """An exact layout: counts go to all, and rows to where they arrive, before they are put together."""
    ranks = world(RANKS)
    ranks.run(begin, "high_throughput")
    posted(backend)
    left_out = []
    for turn in range(4):
        rows = rows_between(turn)
        ranks.run(route, turn)
        ranks.run(exchange_counts)
        check(posted(backend), planned(posts.counts(hosts(), EXPERTS // RANKS)), ("counts", turn))
        for again in range(1 + turn % 2):
            ranks.run(dispatch)
            left_out.append(check_dispatch(posted(backend), rows, turn, crossing, again))
        ranks.run(combine)
        check(posted(backend), combined(rows), ("combine", turn))
    assert any(left_out)
    ranks.run(end)


def gather(env: Any) -> bool:
    """Whether this rank has the rows of all."""
    group, _ = env.kept["posts"]
    each = [np.full((tokens, HIDDEN), 16 * rank + np.arange(tokens)[:, None]) for rank, tokens in enumerate(TOKENS)]
    mine = env.backend.tensor(each[env.rank].astype(tw.tensors.numpy_dtype("bfloat16")))
    rows = np.asarray(env.backend.array(group.all_gatherv(mine, list(TOKENS)).rows), np.float32)
    return bool((rows == np.concatenate(each)).all())


@pytest.mark.parametrize("kind", ["threads"])
def test_a_gather(world: Any, backend: str, crossing: str) -> None:
    """All rows go to all ranks, so to a host once where its ranks copy them from the one that keeps them."""
    ranks = world(RANKS)
    wanted = planned(posts.gather(np.array(TOKENS), hosts(), (ROW,), crossing == "per_host"))
    ranks.run(begin, "low_latency")
    posted(backend)
    for step in range(3):
        assert all(ranks.run(gather)), step
        check(posted(backend), wanted, step)
    ranks.run(end)


def combine_behind_a_refusal(env: Any) -> tuple[bool, bool]:
    """(whether sums of a dispatch that a peer refused are NaN, whether the group is finished), of calls that return
    before a device has told of the refusal."""
    begin(env, "low_latency")
    route(env, 0)
    group, handle = env.kept["posts"]
    result = refuse(env)
    assert result == ("twInvalidArgument" if env.rank == REFUSES else "twSuccess")
    out = env.backend.tensor(np.zeros((env.kept["tokens"], HIDDEN), np.float32))
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
