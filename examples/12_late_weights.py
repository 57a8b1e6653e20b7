"""A decode step whose router weights are known only when experts are done, and whose results no placement changes.

    python examples/12_late_weights.py
    python examples/12_late_weights.py --device torch
    python examples/12_late_weights.py --device cuda

A group of `combine_rows="per_expert"` returns the experts' rows as they are, one for each (token, k). The token's owner
multiplies them by weights that come with the combine, and sums over k. So weights need not travel with the tokens; here
they are calibrated while experts work, and one dispatch is combined twice: with the router's weights and with the
calibrated ones, as a speculative step may want them.

The same step then runs on other ranks: all tokens on one rank, on two, and on all of them, with experts in blocks,
dealt out in turns, and with replicas of some. Printed is a checksum of the bits of all results. Exit code 0 if they are
the same everywhere, and as near to float64 as float32 sums of bfloat16 rows can be.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import starting
from arrays import Array, Tensor, place, to_numpy

import tokenway as tw
from tokenway import gating

EXPERTS, TOP_K, HIDDEN, TOKENS = 16, 4, 256, 48
PLACEMENTS = ("blocks", "in turns", "replicas")
ERROR = 0.005  # relative; a row is rounded to 8 bits on its way


def inputs() -> tuple[Array, Array, Array, Array]:
    """(tokens [T, H], ids, the router's weights, calibrated weights [T, K]) of all ranks together."""
    rng = np.random.default_rng(3)
    tokens = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    ids, weights = gating.softmax_topk(rng.standard_normal((TOKENS, EXPERTS)), TOP_K)
    late = weights * rng.uniform(0.5, 1.5, weights.shape).astype(np.float32)
    return tokens, ids, weights, late / late.sum(axis=1, keepdims=True)


def gains() -> Array:
    """What makes an expert: [E, H]. Its answer to a row is the row times its gain, element by element."""
    return np.random.default_rng(4).standard_normal((EXPERTS, HIDDEN), np.float32)


def placed(name: str, ranks: int) -> tuple[Any, Array]:
    """(expert_map of a group, [slots] the expert in each slot)."""
    experts = np.arange(EXPERTS)
    if name == "replicas":
        table = np.concatenate([experts, experts[: 2 * ranks]])
        return tw.Placement(table), table
    if name == "in turns":
        return (experts % ranks, experts // ranks), experts
    return None, experts


def step(comm: tw.Comm, name: str, device: str) -> list[Array]:
    """The step by one placement, on the ranks of a comm: this rank's results, with the router's weights and later."""
    mine = slice(TOKENS * comm.rank // comm.nranks, TOKENS * (comm.rank + 1) // comm.nranks)
    tokens, ids, weights, late = (place(np.ascontiguousarray(of[mine]), device) for of in inputs())
    expert_map, table = placed(name, comm.nranks)
    settings = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
    with tw.Group(
        comm,
        expert_map=expert_map,
        id_space="global",
        combine_dtype="bfloat16",
        combine_rows="per_expert",
        **settings,
    ) as group:
        handle = group.route(ids)  # without weights: none travel
        recv = group.dispatch(handle, tokens, layout="expert_major")
        rows = experts(recv, table, device)
        first = group.combine(handle, rows, weights=weights, dtype="float32")
        second = group.combine(handle, rows, weights=late, dtype="float32")
        return [to_numpy(first), to_numpy(second)]


def experts(recv: tw.Received, table: Array, device: str) -> Tensor:
    """What this rank's experts answer, [L, N*b, H]: unweighted."""
    slots = to_numpy(recv.ids)
    rows = np.where(slots[..., None] >= 0, to_numpy(recv.tokens), np.float32(0))  # nobody has written the others
    return place(rows * gains()[table[np.maximum(slots, 0)]], device)


def rank_main(device: str) -> list[list[Array]]:
    """What every rank runs: the step by each placement."""
    with tw.connect(device=device if device == "cuda" else None) as comm:
        return [step(comm, name, device) for name in PLACEMENTS]


# ---- checks --------------------------------------------------------------------------------------


def exact(weights: Array) -> Array:
    """The step in float64."""
    tokens, ids, _, _ = inputs()
    answers = tokens[:, None].astype(np.float64) * gains()[ids]
    return (weights[..., None].astype(np.float64) * answers).sum(axis=1)


def report(counts: list[int], device: str) -> bool:
    """Runs the step on each number of ranks and prints a line for each placement; whether all is as it should be."""
    print(f"{'ranks':>5}  {'placement':<10}{'router weights':<18}{'late weights':<18}error against float64")
    _, _, weights, late = inputs()
    wanted = [exact(weights), exact(late)]
    seen, good = set(), True
    for ranks in counts:
        by_rank = tw.run(rank_main, ranks, device, timeout=300)
        for i, name in enumerate(PLACEMENTS):
            results = [np.concatenate([mine[i][turn] for mine in by_rank]) for turn in range(2)]
            sums = [hashlib.sha256(result.tobytes()).hexdigest()[:12] for result in results]
            pairs = zip(results, wanted, strict=True)
            error = max(float(np.linalg.norm(got - want) / np.linalg.norm(want)) for got, want in pairs)
            seen.add(tuple(sums))
            good &= 0 < error < ERROR
            print(f"{ranks:>5}  {name:<10}{sums[0]:<18}{sums[1]:<18}{error:.1e}")
    if len(seen) != 1:
        print("results are NOT the same everywhere")
    return good and len(seen) == 1


def main() -> int:
    """Starts the ranks, prints and checks."""
    options = starting.parse(
        "A decode step with weights that come with the combine.", ("cpu", "torch", "cuda"), "the most processes"
    )
    print(f"{TOKENS} tokens, {EXPERTS} experts, {TOP_K} per token, hidden size {HIDDEN}, on {options.device}\n")
    good = report(sorted({1, min(2, options.ranks), options.ranks}), options.device)
    print("\nAll results have the same bits." if good else "\nA check FAILED.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
