"""A layer whose products gather their rows, as the fused MoE kernels of Triton and CUTLASS do.

    python examples/10_index_lists.py
    python examples/10_index_lists.py --device torch
    python examples/10_index_lists.py --device cuda

Rows stay where they came (rank_major, a view of the window): no row is copied to its experts. The dispatch tells by
which of them each expert works, in blocks of one expert each (`index_block`). The product here takes block after block,
as a kernel's programs do: it reads the expert and the rows of its block, multiplies, and writes each choice's result,
weighted, to a place of its own. A row's results are then summed over k, and combined as rows of rank_major are.

Printed are, for some sizes of blocks, the choices of this rank's experts, the places that they take in blocks, and the
most that there could be; and how far the layer's output is from the same layer in float64. Exit code 0 if the lists of
every rank are the oracle's and every error is as small as float32's.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import starting
from arrays import Array, Tensor, filled, place, to_numpy

import tokenway as tw
from tokenway import gating, reference

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 16, 4, 256, 128, 96
BLOCKS = (1, 16, 64)
LISTS = ("sorted_rows", "block_experts", "num_sorted")
ERROR = 1e-6  # of float32 products and sums, relative


class Result(NamedTuple):
    """Of one size of blocks, on one rank."""

    choices: int  # of this rank's experts
    places: int  # that they take in blocks
    capacity: int  # places that there could be
    equal: bool  # the lists are the oracle's
    out: Array  # the layer's output


# ---- the layer -----------------------------------------------------------------------------------


def inputs(rank: int) -> tuple[Array, Array, Array]:
    """(tokens [T, H], ids, weights) of a rank, which has fewer tokens the higher it is."""
    rng = np.random.default_rng([rank, 1])
    tokens = rng.standard_normal((TOKENS - 17 * rank % TOKENS, HIDDEN), np.float32)
    return tokens, *gating.softmax_topk(rng.standard_normal((len(tokens), EXPERTS)), TOP_K)


def expert(number: int) -> tuple[Array, Array]:
    """Weights of an expert: one matrix in, one out."""
    rng = np.random.default_rng([number, 2])
    shapes = (HIDDEN, INNER), (INNER, HIDDEN)
    return tuple(rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes)


def mlp(rows: Tensor, matrices: tuple[Tensor, Tensor]) -> Tensor:
    """What an expert makes of rows."""
    return (rows @ matrices[0]).clip(0) @ matrices[1]


def gathered(recv: tw.Received, matrices: list[tuple[Tensor, Tensor]], block: int, device: str) -> Tensor:
    """What this rank's experts make of the rows that came, [N, b, H], by the index lists."""
    rows = recv.tokens.reshape(-1, HIDDEN)
    weights = recv.weights.reshape(-1)
    results = filled((len(rows) * TOP_K, HIDDEN), 0.0, device)  # choices of other ranks' experts stay 0
    for i in range(int(recv.num_sorted[0]) // block):
        choices = recv.sorted_rows[i * block : (i + 1) * block]
        choices = choices[choices < len(results)]  # the rest fills the block
        product = mlp(rows[choices // TOP_K], matrices[int(recv.block_experts[i])])
        results[choices] = weights[choices][:, None] * product
    return results.reshape(len(rows), TOP_K, HIDDEN).sum(1).reshape(recv.tokens.shape)


def rank_main(device: str) -> tuple[Array, list[Result]]:
    """What every rank runs: the layer in float64, and by each size of blocks."""
    comm = tw.connect(device=device if device == "cuda" else None)
    tokens, ids, weights = inputs(comm.rank)
    settings = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS}
    results = []
    with comm, tw.Group(comm, dtype="float32", combine_dtype="float32", **settings) as group:
        mine = np.flatnonzero(reference.contiguous_placement(EXPERTS, comm.nranks)[0] == comm.rank)
        matrices = [tuple(place(matrix, device) for matrix in expert(e)) for e in mine]
        handle = group.route(place(ids, device), place(weights, device))
        for block in BLOCKS:
            recv = group.dispatch(handle, place(tokens, device), index_block=block)
            lists = [to_numpy(getattr(recv, name)) for name in LISTS]
            wanted = reference.index_lists(to_numpy(recv.ids), len(mine), block)
            choices = int((to_numpy(recv.ids) >= 0).sum())
            out = group.combine(handle, gathered(recv, matrices, block, device))
            equal = all(np.array_equal(one, other) for one, other in zip(lists, wanted, strict=True))
            results.append(Result(choices, int(lists[2][0]), len(lists[0]), equal, to_numpy(out)))
    return exact(tokens, ids, weights), results


# ---- checks --------------------------------------------------------------------------------------


def exact(tokens: Array, ids: Array, weights: Array) -> Array:
    """The layer without communication, in float64."""
    out = np.zeros(tokens.shape, np.float64)
    for number in range(EXPERTS):
        token, k = np.nonzero(ids == number)
        matrices = tuple(matrix.astype(np.float64) for matrix in expert(number))
        out[token] += weights[token, k, None].astype(np.float64) * mlp(tokens[token].astype(np.float64), matrices)
    return out


def report(ranks: list[tuple[Array, list[Result]]]) -> bool:
    """Prints a line per size of blocks; whether all is as it should be."""
    print(f"{'block':>5}{'choices':>9}{'places':>8}{'at most':>9}   error against float64   lists")
    good = True
    for i, block in enumerate(BLOCKS):
        results = [of_rank[i] for _, of_rank in ranks]
        wanted = [exactly for exactly, _ in ranks]
        squares = [(np.square(r.out - w).sum(), np.square(w).sum()) for r, w in zip(results, wanted, strict=True)]
        error = float(np.sqrt(sum(d for d, _ in squares) / sum(w for _, w in squares)))
        equal = all(result.equal for result in results)
        good &= equal and 0 < error < ERROR
        sums = [sum(getattr(result, name) for result in results) for name in ("choices", "places", "capacity")]
        print(
            f"{block:>5}{sums[0]:>9}{sums[1]:>8}{sums[2]:>9}   {error:<24.2e}"
            f"{'as the oracle has them' if equal else 'WRONG'}{'' if 0 < error < ERROR else '; the error is WRONG'}"
        )
    return good


def main() -> int:
    """Starts the ranks, prints and checks."""
    options = starting.parse("An MoE layer whose products gather their rows by index lists.", ("cpu", "torch", "cuda"))
    print(f"{options.ranks} ranks, {EXPERTS} experts, {TOP_K} per token, hidden size {HIDDEN}, on {options.device}\n")
    return starting.run(options, rank_main, report)


if __name__ == "__main__":
    sys.exit(main())
