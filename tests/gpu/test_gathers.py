"""Gathers and reduces as only a GPU has them: in graphs whose sizes change, asynchronous, of real sizes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from cases import as_bits, same
from collected import Call, Plan, group_of, judge, play, rows_of
from device_backend import stream_of
from gpu_world import TIMEOUT, Locals, capture
from harness import caught

import tokenway as tw
from tokenway import reference as ref

HIDDEN, MOST = 96, 40
SIZES = [(40, 17), (0, 0), (1, 40), (40, 40), (3, 0), (12, 31)]
CALLS = 10  # in a graph: gathers and reduces by turns


def inputs(turn: int, call: int, rank: int, count: int) -> np.ndarray:
    """Rows of a call in a turn; every one is another."""
    made = Call((count,), rows=((HIDDEN, "bfloat16"),), seed=100 * turn + call)
    return rows_of(made, 0)[0] * np.asarray(rank + 1, "bfloat16")


def replays(env: Any, barrier: threading.Barrier) -> list[Any]:
    """What each of ten calls in one graph gives, by turn; sizes and rows are written to static buffers in between."""
    array, tensor = env.backend.array, env.backend.tensor
    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=TIMEOUT) as group:
        sizes = tensor(np.zeros(env.nranks, np.int32))
        whole = MOST * env.nranks
        static = [tensor(np.zeros((whole if i % 2 else MOST, HIDDEN), "bfloat16")) for i in range(CALLS)]

        def steps() -> list[Any]:
            return [
                group.reduce_scatterv(rows, sizes) if i % 2 else group.all_gatherv(rows, sizes)
                for i, rows in enumerate(static)
            ]

        steps()  # once, before: what it allocates may synchronise
        env.stream.synchronize()
        barrier.wait(30)
        graph, results = capture(env, steps)
        barrier.wait(30)
        found = []
        for turn, now in enumerate(SIZES):
            sizes.copy_(tensor(np.array(now, np.int32)))
            for i, rows in enumerate(static):
                count = sum(now) if i % 2 else now[env.rank]
                rows[:count].copy_(tensor(inputs(turn, i, env.rank, count)))
            env.stream.synchronize()
            barrier.wait(30)
            graph.replay()
            env.stream.synchronize()
            group.check()
            found.append([[array(x) for x in (r if isinstance(r, tuple) else (r,))] for r in results])
        return found


def test_ten_calls_in_a_graph(lines) -> None:
    barrier = threading.Barrier(2)
    with Locals(2) as ranks:
        by_rank = ranks.run(replays, barrier, timeout=120)
    for turn, now in enumerate(SIZES):
        offsets = np.append(0, np.cumsum(now)).astype(np.int32)
        for i in range(CALLS):
            counts = [sum(now)] * 2 if i % 2 else list(now)
            rows = [inputs(turn, i, rank, counts[rank]) for rank in range(2)]
            for rank in range(2):
                got = by_rank[rank][turn][i]
                where = f"call {i} of turn {turn} on rank {rank}"
                if i % 2:
                    want = ref.reduce_scatterv(rows, now, rank)
                    same(where, got[0][: len(want)], want)
                    continue
                want = ref.all_gatherv(rows)
                same(where, as_bits(got[0][: len(want)]), as_bits(want))
                same(f"counts of {where}", got[1], np.array(now, np.int32))
                same(f"offsets of {where}", got[2], offsets)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_real_rows(ranks, lines) -> None:
    """Rows of 7168 bfloat16: some chunks and packets of each rank, sizes apart, calls that return at once."""
    setup = group_of(ranks, 7168, 300)
    sizes = tuple((300 - 41 * r) % 301 for r in range(ranks))
    few = tuple((9 + 5 * r) % 33 for r in range(ranks))
    rows = ((7168, "bfloat16"),)
    flights = []
    for s, (of, layout) in enumerate([(sizes, "flat"), (few, "flat"), (few, "rank_major"), (sizes, "rank_major")]):
        flights += [(Call(of, reduces, rows, layout=layout, seed=s),) for reduces in (False, True)]
    flights.append((Call(few, chained=True, rows=rows, seed=9),))
    plan = Plan(setup, tuple(flights))
    with Locals(ranks) as locals_:
        judge(plan, locals_.run(play, plan, timeout=120))


def bad_sizes(env: Any) -> Any:
    """Sizes out of range in device memory are taken for the nearest, on all ranks alike, and reported."""
    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=TIMEOUT) as group:
        rows = env.backend.tensor(inputs(0, 0, env.rank, MOST))
        got = group.all_gatherv(rows, env.backend.tensor(np.array([MOST + 7, -3], np.int32)))
        env.stream.synchronize()
        record = group.error
        return env.backend.array(got.rows)[:MOST], env.backend.array(got.counts), record, caught(group.check)


def test_bad_sizes() -> None:
    with Locals(2) as ranks:
        for rows, counts, record, told in ranks.run(bad_sizes):
            same("rows", as_bits(rows), as_bits(inputs(0, 0, 0, MOST)))
            assert counts.tolist() == [MOST, 0]
            assert not record.sticky and record.token in (0, 1) and record.value in (MOST + 7, -3) and record.k == -1
            assert told[0] == "twInvalidArgument" and "in device memory" in told[1]


def refusals(env: Any) -> Any:
    """Rank 0 refuses; its peer learns of it when the step has run; both go on."""
    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=TIMEOUT, lanes=2) as group:
        said, found = [], []
        for turn, layout in enumerate(["flat", "rank_major", "flat"]):
            rows = env.backend.tensor(inputs(turn, 0, env.rank, 5 + (env.rank == 0)))
            said.append(caught(group.all_gatherv, rows, [5, 5], layout=layout)[0])
            env.stream.synchronize()
            told = caught(group.check)
            good = group.all_gatherv(env.backend.tensor(inputs(turn, 1, env.rank, 5)), [5, 5])
            found.append((told[0], env.backend.array(good.rows)))
        return said, found


def test_refused() -> None:
    with Locals(2) as ranks:
        (first, of_first), (second, of_second) = ranks.run(refusals)
    assert first == ["twInvalidArgument"] * 3 and second == ["twSuccess"] * 3
    for turn, ((_, mine), (told, theirs)) in enumerate(zip(of_first, of_second, strict=True)):
        assert told == "twPeerRefused"
        want = ref.all_gatherv([inputs(turn, 1, rank, 5) for rank in range(2)])
        for rows in (mine, theirs):
            same("rows", as_bits(rows), as_bits(want))


def late(env: Any) -> Any:
    group = env.kept["group"] = tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=1.0)
    if env.rank == 1:
        time.sleep(2.5)
        return None
    partials = env.backend.tensor(inputs(0, 1, env.rank, 10))
    begin = time.monotonic()
    out = group.reduce_scatterv(partials, [5, 5])
    took = time.monotonic() - begin
    env.stream.synchronize()
    return took, env.backend.array(out), caught(group.check)


def test_a_late_rank() -> None:
    """The call returns at once; the record tells, and the sums are NaN."""
    with Locals(2) as ranks:
        took, out, told = ranks.run(late)[0]
        assert took < 0.5 and told[0] == "twTimeout" and "rank 1" in told[1]
        assert np.isnan(out.astype(np.float32)).all()


def streams_in_turn(env: Any) -> Any:
    """A call that is sent on one stream and completed on another."""
    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=TIMEOUT, lanes=2) as group:
        rows = env.backend.tensor(inputs(0, 0, env.rank, 7 + env.rank))
        side = stream_of(env.comm.device, env.rank, "side")
        pending = group.all_gatherv(rows, [7, 8], send_only=True)
        with torch.cuda.stream(side):
            got = pending.result()
        env.stream.wait_stream(side)
        return env.backend.array(got.rows)


def test_completed_elsewhere() -> None:
    with Locals(2) as ranks:
        want = ref.all_gatherv([inputs(0, 0, rank, 7 + rank) for rank in range(2)])
        for rows in ranks.run(streams_in_turn):
            same("rows", as_bits(rows), as_bits(want))
