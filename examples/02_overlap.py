"""Two micro-batches in flight: the experts of one run while the rows of the other travel.

    python examples/02_overlap.py

A dispatch or combine with `send_only` returns when its rows are on their way; `.result()` waits for
those of the others. Each of the two micro-batches has a lane of its own. The experts' compute is
played by sleeping: even ranks have much to do in the first micro-batch, odd ranks in the second.
One after the other, every exchange waits for the slower rank. Overlapped, only the sums count.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from ml_dtypes import bfloat16

import tokenway as tw
from tokenway import gating

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 2, 64, 1024, 16, 4
LONG, SHORT = 0.06, 0.01  # seconds of work


def experts(recv: tw.Received, seconds: float) -> np.ndarray:
    """Expert e of a rank multiplies by e + 1, slowly."""
    time.sleep(seconds)
    scale = np.where(recv.ids >= 0, recv.weights * (recv.ids + 1), 0).sum(axis=-1, keepdims=True)
    return (recv.tokens.astype(np.float32) * scale).astype(bfloat16)


def in_turn(group: tw.Group, handles: list, batches: list, work: list) -> list:
    """One micro-batch after the other."""
    outs = []
    for handle, tokens, seconds in zip(handles, batches, work, strict=True):
        recv = group.dispatch(handle, tokens)
        outs.append(group.combine(handle, experts(recv, seconds)))
    return outs


def overlapped(group: tw.Group, handles: list, batches: list, work: list) -> list:
    """Both dispatches are sent first; each combine is sent before the next experts begin."""
    arriving = [group.dispatch(h, x, send_only=True) for h, x in zip(handles, batches, strict=True)]
    returning = []
    for handle, recv, seconds in zip(handles, arriving, work, strict=True):
        rows = experts(recv.result(), seconds)
        returning.append(group.combine(handle, rows, send_only=True))
    return [out.result() for out in returning]


def rank_main() -> tuple[bool, float, float]:
    """Both orders on the same input: whether the bits are the same, and the seconds of each."""
    comm = tw.connect()
    rng = np.random.default_rng(comm.rank)
    batches = [rng.standard_normal((TOKENS, HIDDEN)).astype(bfloat16) for _ in range(2)]
    routings = [gating.softmax_topk(rng.standard_normal((TOKENS, EXPERTS)), TOP_K) for _ in "ab"]
    work = [LONG, SHORT] if comm.rank % 2 == 0 else [SHORT, LONG]

    settings = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS}
    with comm, tw.Group(comm, lanes=2, **settings) as group:
        handles = [group.route(ids, weights) for ids, weights in routings]
        in_turn(group, handles, batches, [0, 0])  # once for practice
        outs, seconds = [], []
        for order in (in_turn, overlapped):
            start = time.monotonic()
            outs.append(order(group, handles, batches, work))
            seconds.append(time.monotonic() - start)
    same = all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in zip(*outs, strict=True))
    return same, *seconds


def main() -> int:
    """Starts the ranks and prints what they found."""
    results = tw.run(rank_main, RANKS, timeout=60)
    for rank, (same, plain, overlap) in enumerate(results):
        bits = "the same bits" if same else "DIFFERENT BITS"
        print(f"rank {rank}: in turn {1e3 * plain:.0f} ms, overlapped {1e3 * overlap:.0f} ms, {bits}")
    return 0 if all(same for same, _, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
