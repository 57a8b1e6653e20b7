"""How rows cross between hosts of devices: messages that come late, and a network whose writes mates do not see.

What a message has, and how many there are, test_posts.py counts.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gin_backend import CROSSING
from harness import caught
from test_posts import (
    EXPERTS,
    RANKS,
    TOP_K,
    check,
    hosts,
    ids_of,
    planned,
    posted,
    rows_between,
    rows_to_hosts,
    tokens_of,
)

import tokenway as tw
from tokenway import _native
from tokenway.planning import posts

LATE = 0.3  # seconds
SMALL, LARGE = 72, 1 << 18  # elements of a row: 9 of the large are more than the half MiB from which they go once
TURN = 0


@pytest.fixture(autouse=True)
def emulated(backend: str) -> None:
    if backend != "emulated-gin":
        pytest.skip(f"for a network that does what a test wants, not the backend {backend}")


def begin(env: Any, hidden: int) -> None:
    group = tw.Group(env.comm, experts=EXPERTS, top_k=TOP_K, hidden=hidden, max_tokens=max(map(len, all_ids())))
    env.kept["crossing"] = group, group.route(env.backend.tensor(ids_of(env.rank, TURN)))


def all_ids() -> list[np.ndarray]:
    return [ids_of(rank, TURN) for rank in range(RANKS)]


def end(env: Any) -> None:
    env.kept.pop("crossing")[0].close()


def value(rank: int, token: int, step: int) -> int:
    """Of all elements of a token's row; bfloat16 has it exactly."""
    return 64 * (step % 3) + 10 * rank + token + 1


def exchange(env: Any, step: int) -> bool:
    """Whether a dispatch brings the rows of all sources, each in its place."""
    group, handle = env.kept["crossing"]
    hidden, tokens = group.hidden, tokens_of(env.rank, TURN)
    values = np.array([value(env.rank, token, step) for token in range(tokens)], np.float32).reshape(-1, 1)
    rows = np.repeat(values, hidden, axis=1).astype(tw.tensors.numpy_dtype("bfloat16"))
    received = group.dispatch(handle, env.backend.tensor(rows))
    found = np.asarray(env.backend.array(received.tokens), np.float32)
    right = True
    for source, ids in enumerate(all_ids()):
        mine = [t for t, row in enumerate(ids) if env.rank in {int(e) * RANKS // EXPERTS for e in row if e >= 0}]
        wanted = np.array([value(source, token, step) for token in mine], np.float32)
        right = right and bool((found[source, : len(mine)] == wanted.reshape(-1, 1)).all())
    group.combine(handle, env.backend.tensor(np.zeros(tuple(received.tokens.shape), np.float32)))
    return right


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("crossing", ["per_host", "per_rank"])
def test_puts_to_one_rank_that_come_late(world: Any, crossing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank beside the one that keeps a message has its own signal long before that is there."""
    monkeypatch.setenv(CROSSING, crossing)
    ranks = world(RANKS)
    ranks.forget()
    source, keeper, mate = 0, 2, 3
    assert rows_between(TURN)[source, mate] > 0
    assert hosts()[keeper] == hosts()[mate] != hosts()[source]
    ranks.run(begin, SMALL)
    for step in range(4):  # both banks, twice
        _native.lib.tokenway_emulated_hold(source, keeper, 1)
        release = threading.Timer(LATE, _native.lib.tokenway_emulated_hold, (source, keeper, 0))
        release.start()
        assert all(ranks.run(exchange, step)), step
        release.join()
    ranks.run(end)
    ranks.forget()


def alone(mine: bytes) -> list[bytes]:
    return [mine]


def test_what_is_no_crossing() -> None:
    with pytest.raises(
        tw.InvalidArgument, match="crossing is 'sideways'; it must be one of None, 'per_host', 'per_rank'"
    ):
        tw.Comm.gin(0, 1, alone, device=0, crossing="sideways")
    with pytest.raises(tw.InvalidArgument, match="crossing is given, which is for backend 'fabric' or 'gin' alone"):
        tw.connect(rank=0, nranks=1, allgather=alone, backend="shm", crossing="per_host")
    with pytest.raises(tw.InvalidArgument, match="crossing is given, which is for backend 'gin' alone"):
        tw.connect(rank=0, nranks=1, allgather=alone, backend="fabric", crossing="per_host")
    tw.Comm.gin(0, 1, alone, device=0, crossing="per_rank").close()


def test_ranks_that_cross_otherwise(made_for: Any) -> None:
    """A rank that is told to cross in another way than its peers is refused, and they are."""
    gathered: dict[int, list[bytes]] = {}
    meet = threading.Barrier(2)
    said: list[str] = ["", ""]

    def meeting(rank: int) -> Any:
        call = 0

        def allgather(mine: bytes) -> list[bytes]:
            nonlocal call
            gathered.setdefault(call, [b"", b""])[rank] = mine
            meet.wait(30)
            call += 1
            return gathered[call - 1]

        return allgather

    def body(rank: int) -> None:
        said[rank] = caught(
            tw.Comm.gin, rank, 2, meeting(rank), device=rank, crossing=("per_host", "per_rank")[rank], timeout=30.0
        )[0]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["twConfigMismatch"] * 2


def begin_where_puts_are_lost(ranks: Any, hidden: int) -> list[Any]:
    """(result, sentence) of making a group, for which the network loses puts and not the words behind them."""
    _native.lib.tokenway_emulated_lose_puts(1)
    try:
        return [said[:2] for said in ranks.run(attempt, hidden)]
    finally:
        _native.lib.tokenway_emulated_lose_puts(0)


def attempt(env: Any, hidden: int) -> tuple[str, str, Any]:
    return caught(begin, env, hidden)


@pytest.mark.parametrize("kind", ["threads"])
def test_a_network_whose_writes_mates_do_not_see(world: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go straight to each rank, and who asks for another way is told so; where mates see them, they go once."""
    ranks = world(RANKS)
    rows, meta = rows_between(TURN), (2 * LARGE,)
    tokens = np.array([len(ids) for ids in all_ids()])
    to_hosts = rows_to_hosts(TURN)
    straight = planned(posts.dispatch(rows, hosts(), meta, TOP_K) + posts.combine(rows, hosts(), 2 * LARGE))
    once = planned(
        posts.dispatch_once(rows, to_hosts, tokens, hosts(), meta, TOP_K) + posts.combine(rows, hosts(), 2 * LARGE)
    )
    for crossing, hidden, wanted in ("per_host", SMALL, None), ("", LARGE, straight):
        monkeypatch.setenv(CROSSING, crossing)
        ranks.forget()
        said = begin_where_puts_are_lost(ranks, hidden)
        if wanted is None:
            assert {result for result, _ in said} == {"twUnsupported"}, said
            assert all("crossing is per host, and rank" in text for _, text in said), said
            continue
        assert {result for result, _ in said} == {"twSuccess"}, said
        posted(backend)
        assert all(ranks.run(exchange, 0))
        check(posted(backend), wanted, crossing)
        ranks.run(end)
    ranks.run(begin, LARGE)
    posted(backend)
    assert all(ranks.run(exchange, 0))
    check(posted(backend), once, "mates see")
    ranks.run(end)
    ranks.forget()
