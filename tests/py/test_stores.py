"""What kernels store at peers, counted by a transport that is added in its room alone (tests/emulator/counted).

Whatever the way of rows, every row goes to each of its ranks once, and nothing else does. Run by
`tests/emulator/run.py --counted`, whose library has that transport.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenway as tw
from tokenway import _native

pytestmark = pytest.mark.skipif(
    not hasattr(_native.lib, "tokenway_counted_stores"), reason="this library's transport does not count"
)
RANKS, EXPERTS, TOP_K, HIDDEN = 3, 6, 3, 72
ROW, PARTIAL = 2 * HIDDEN, 4 * HIDDEN  # bytes: bfloat16 there, float32 back
META = 8 * (1 + TOP_K)  # bytes of a row's header, ids and weights
PACKET, DATA = 128, 120  # bytes, and of them data (PROTOCOL.md, LL128 packets)


class Stores(NamedTuple):
    """At peers, over all ranks: bytes of rows, signals of one word, packets' parts or signals of two."""

    bytes: int
    words: int
    pairs: int


def counted() -> Stores:
    """Since it was last asked."""
    found = (ctypes.c_uint64 * 3)()
    _native.lib.tokenway_counted_stores(found)
    return Stores(*found)


def ids_of(rank: int, tokens: int) -> np.ndarray:
    rng = np.random.default_rng([7, rank])
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32).reshape(tokens, TOP_K)
    ids[rng.random(ids.shape) < 0.2] = -1
    return ids


def begin(env: Any, tokens: tuple[int, ...]) -> None:
    group = tw.Group(
        env.comm, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=max(tokens), combine_dtype="float32"
    )
    handle = group.route(env.backend.tensor(ids_of(env.rank, tokens[env.rank])))
    env.kept["stores"] = group, handle


def dispatch(env: Any, tokens: tuple[int, ...]) -> None:
    group, handle = env.kept["stores"]
    rows = np.zeros((tokens[env.rank], HIDDEN), np.float32).astype(tw.tensors.numpy_dtype("bfloat16"))
    group.dispatch(handle, env.backend.tensor(rows))


def combine(env: Any, tokens: tuple[int, ...]) -> None:
    group, handle = env.kept["stores"]
    group.combine(handle, env.backend.tensor(np.zeros((RANKS, max(tokens), HIDDEN), np.float32)))


def end(env: Any) -> None:
    env.kept.pop("stores")[0].close()


def rows_between(tokens: tuple[int, ...]) -> np.ndarray:
    """[source, peer]: rows that a rank sends to another."""
    rows = np.zeros((RANKS, RANKS), int)
    for rank in range(RANKS):
        for row in ids_of(rank, tokens[rank]):
            for peer in {int(e) * RANKS // EXPERTS for e in row if e >= 0} - {rank}:
                rows[rank, peer] += 1
    return rows


def packets(count: int) -> int:
    """Parts of 16 bytes of the packets of so many bytes of data."""
    return -(-count // DATA) * PACKET // 16


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("way", ["packets", "simple"])
def test_every_row_once(world: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (9, 4, 7)
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "0" if way == "simple" else "64")
    ranks = world(RANKS)
    ranks.forget()  # a comm reads its environment when it is made
    ranks.run(begin, tokens)
    rows, links = rows_between(tokens), RANKS * (RANKS - 1)
    counted()
    ranks.run(dispatch, tokens)
    there = counted()
    ranks.run(combine, tokens)
    back = counted()
    ranks.run(end)
    ranks.forget()
    if way == "packets":  # a signal is a pair, and rows need no other
        assert there == Stores(0, 0, rows.sum() * packets(META + ROW) + links)
        assert back == Stores(0, 0, rows.sum() * packets(PARTIAL) + links)
    else:  # a note and a signal for each step; and where partials come, a signal for their chunk
        assert there == Stores(rows.sum() * (META + ROW), 2 * links, 0)
        assert back == Stores(rows.sum() * PARTIAL, 2 * links + (rows > 0).sum(), 0)
