"""Tensor-parallel attention before expert-parallel experts: ranks of a set hold the same tokens.

    python examples/13_token_replicas.py
    python examples/13_token_replicas.py --device cuda

Two ranks of tensor-parallel attention have the same hidden states. If each dispatched all of them, every row would
cross the link twice, and experts would compute twice what they need to. With `token_replicas=2` each sends its share,
and both get every result.

Printed is, for both ways, how many rows all ranks received together, and what the ranks of a set got. All values are
small whole numbers, whose sums are exact. Exit code 0 if every result is what one process would compute, the ranks of
a set agree, and shares brought half as many rows as all tokens from each rank.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import starting
from arrays import Array, module_of, place, to_float32, to_numpy

import tokenway as tw
from tokenway import reference

EXPERTS, TOP_K, HIDDEN, TOKENS, REPLICAS = 8, 2, 64, 33, 2


def batch(of_set: int) -> tuple[Array, Array, Array]:
    """(tokens [T, H], ids, weights [T, K]) of the ranks of a set."""
    rng = np.random.default_rng(of_set)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    weights = rng.integers(1, 8, ids.shape).astype(np.float32)
    return rng.integers(-8, 8, (TOKENS, HIDDEN)).astype(np.float32), ids, weights


def experts(recv: tw.Received, first: int, where: str) -> Any:
    """Expert e multiplies by e + 1; the first of this rank has that number. A weighted sum for each row."""
    here = module_of(where).where(recv.ids >= 0, recv.weights * to_float32(recv.ids + (first + 1)), 0.0)
    return recv.tokens * here.sum(-1)[..., None]


def rank_main(device: str) -> list[tuple[int, Array, bool]]:
    """(rows received, results, whether these are right) of the layer without replicas and with them."""
    found = []
    with tw.connect(device=device) as comm:
        x, ids, weights = batch(comm.rank // REPLICAS)
        right = x * (weights * (ids + 1)).sum(1, keepdims=True)
        homes = reference.contiguous_placement(EXPERTS, comm.nranks)[0]
        first = int(np.flatnonzero(homes == comm.rank)[0])
        for replicas in (1, REPLICAS):
            with tw.Group(
                comm,
                experts=EXPERTS,
                top_k=TOP_K,
                hidden=HIDDEN,
                max_tokens=-(-TOKENS // replicas),  # of a share
                dtype="float32",
                token_replicas=replicas,
            ) as group:
                handle = group.route(place(ids, device), place(weights, device))  # all tokens, on every rank of a set
                recv = group.dispatch(handle, place(x, device))
                rows = int(to_numpy(recv.counts).sum())
                out = to_numpy(group.combine(handle, experts(recv, first, device)))
                found.append((rows, out, np.array_equal(out, right)))
    return found


def report(by_rank: list[list[tuple[int, Array, bool]]]) -> bool:
    """Prints what was found; whether all was as it should be."""
    print("each rank sends     rows received   results")
    received = []
    good = True
    for way, name in enumerate(("all tokens", f"1 / {REPLICAS} of them")):
        rows = sum(found[way][0] for found in by_rank)
        outs = [found[way][1] for found in by_rank]
        alike = all(np.array_equal(out, outs[rank // REPLICAS * REPLICAS]) for rank, out in enumerate(outs))
        exact = all(found[way][2] for found in by_rank) and alike
        good &= exact
        received.append(rows)
        print(f"{name:<20}{rows:>13}   {'exact on all ranks' if exact else 'WRONG'}")
    return good and received[0] == REPLICAS * received[1]


def main() -> int:
    """Starts the ranks, prints and checks."""
    return starting.run(starting.parse("Ranks that hold the same tokens send a share each."), rank_main, report)


if __name__ == "__main__":
    sys.exit(main())
