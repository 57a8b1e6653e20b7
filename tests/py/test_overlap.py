"""Outputs in one memory are refused, and told to the peers; those that may lie over inputs give the right results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_turns import IDS, Pair, Started, tokens

import tokenway as tw

N, B, K, H = 2, 4, 2, 8


def pairs_of(memory: np.ndarray, begin: int = 0) -> np.ndarray:
    return memory[begin : begin + N * B * K].reshape(N, B, K)


def shared(*, ids: int = 0, weights: int | None = None, counts: int | None = None) -> dict[str, np.ndarray]:
    """Outputs in one memory, from these elements on."""
    memory = np.zeros(4 * N * B * K, np.int32)
    out = {"ids": pairs_of(memory, ids)}
    if weights is not None:
        out["weights"] = pairs_of(memory.view(np.float32), weights)
    if counts is not None:
        out["counts"] = memory[counts : counts + N]
    return out


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(payloads={"scales": (3, "float32")})
    yield made
    made.close()


@pytest.fixture
def exact() -> Iterator[Pair]:
    made = Pair(mode="high_throughput")
    yield made
    made.close()


SCALES = {"scales": np.ones((2, 3), np.float32)}
OVERLAPS: dict[str, tuple[dict[str, Any], str]] = {
    "the same": (shared(weights=0), r"out\['weights'\] at 0x\w+ overlaps out\['ids'\] at 0x\w+"),
    "the last element": (shared(weights=N * B * K - 1), r"out\['weights'\] at 0x\w+ overlaps out\['ids'\]"),
    "the first element": (shared(ids=N * B * K - 1, weights=0), r"out\['weights'\] at 0x\w+ overlaps out\['ids'\]"),
    "inside": (shared(counts=3), r"out\['counts'\] at 0x\w+ overlaps out\['ids'\]"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_outputs_of_a_dispatch(pair: Pair, name: str) -> None:
    out, pattern = OVERLAPS[name]
    refused(pair, pattern, out)


def test_payloads_of_a_dispatch(pair: Pair) -> None:
    memory = np.zeros(N * B * H * 2, np.float32)
    out = {"tokens": memory[: N * B * H].reshape(N, B, H), "scales": memory[5 : 5 + N * B * 3].reshape(N, B, 3)}
    refused(pair, r"out\['scales'\] at 0x\w+ overlaps out\['tokens'\] at 0x\w+; each must have memory of its own", out)


def refused(pair: Pair, pattern: str, out: dict[str, np.ndarray]) -> None:
    theirs = Started(lambda _: pair.groups[1].dispatch(pair.handles[1], tokens(1), SCALES))
    with pytest.raises(tw.InvalidArgument, match=pattern):
        pair.group.dispatch(pair.handles[0], tokens(1), SCALES, out=out)
    assert not any(tensor.any() for tensor in out.values()), "nothing may be written"
    with pytest.raises(tw.PeerRefused):
        theirs.result()
    # Side by side is apart, and the group goes on.
    apart = shared(weights=N * B * K, counts=2 * N * B * K)
    mine = Started(lambda _: pair.group.dispatch(pair.handles[0], tokens(1), SCALES, out=apart))
    pair.groups[1].dispatch(pair.handles[1], tokens(1), SCALES)
    assert (mine.result().weights[0, :2] == 1).all()


def test_outputs_of_a_grouped_dispatch(exact: Pair) -> None:
    pair = exact
    pair.both(lambda rank: pair.groups[rank].exchange_counts(pair.handles[rank]))
    rows = pair.handles[0].rows_of("grouped") or 0
    memory = np.zeros(8 * rows, np.int64)
    for name in ("origins", "offsets"):
        theirs = Started(lambda _: pair.groups[1].dispatch(pair.handles[1], tokens(1), layout="grouped"))
        out = {"ids": memory.view(np.int32)[:rows]}
        out[name] = (
            memory[:rows] if name == "origins" else memory.view(np.int32)[2 : 2 + pair.group.num_local_experts + 1]
        )
        with pytest.raises(tw.InvalidArgument, match=rf"out\['{name}'\] at 0x\w+ overlaps out\['ids'\]"):
            pair.group.dispatch(pair.handles[0], tokens(1), layout="grouped", out=out)
        with pytest.raises(tw.PeerRefused):
            theirs.result()


def test_outputs_of_a_gather(pair: Pair) -> None:
    memory = np.zeros((8, H), np.float32)
    rows = [tokens(1), tokens(2)]
    for given, out, pattern in (
        (rows, [memory[:4], memory[3:7]], r"out\[1\] at 0x\w+ overlaps out\[0\] at 0x\w+"),
        ([rows[0], memory[2:4]], [memory[:4], memory[4:]], r"out\[0\] at 0x\w+ overlaps rows\[1\] at 0x\w+"),
    ):
        theirs = Started(lambda _: pair.groups[1].all_gatherv(rows, [2, 2]))
        with pytest.raises(tw.InvalidArgument, match=pattern):
            pair.group.all_gatherv(given, [2, 2], out=out)
        with pytest.raises(tw.PeerRefused):
            theirs.result()


def test_outputs_of_a_reduce(pair: Pair) -> None:
    rows = [np.ones((4, H), np.float32), np.ones((4, H), np.float32)]
    memory = np.zeros((4, H), np.float32)
    for out, pattern in (
        ([memory[:2], memory[1:3]], r"out\[1\] at 0x\w+ overlaps out\[0\] at 0x\w+"),
        ([rows[0][:2], rows[0][2:]], r"out\[1\] at 0x\w+ overlaps rows\[0\] at 0x\w+"),
    ):
        theirs = Started(lambda _: pair.groups[1].reduce_scatterv(rows, [2, 2]))
        with pytest.raises(tw.InvalidArgument, match=pattern):
            pair.group.reduce_scatterv(rows, [2, 2], out=out)
        with pytest.raises(tw.PeerRefused):
            theirs.result()


def test_over_inputs_where_it_is_right() -> None:
    """On the CPU a dispatch has sent its tokens before it writes; a combine may write over its rows anywhere."""
    pair = Pair()

    def around(rank: int) -> None:
        group, handle = pair.groups[rank], pair.handles[rank]
        memory = np.full((N * B, H), np.float32(np.nan))
        memory[1:3] = [[rank + 1]] * 2
        received = group.dispatch(handle, memory[1:3], out=memory.reshape(N, B, H))
        for source in range(N):
            assert (received.tokens[source, :2] == source + 1).all()
        rows = np.array(received.tokens)
        out = rows.reshape(-1, H)[3:5]
        assert (group.combine(handle, rows, out=out) == 2 * (rank + 1)).all()
        rows = np.array(received.tokens)
        assert (group.combine(handle, rows, out=memory[:2]) == 2 * (rank + 1)).all()

    pair.both(around)
    pair.close()
    assert len(IDS) == 2
