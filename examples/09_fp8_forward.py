"""A layer that is trained with fp8 rows forward and bf16 gradients back, in one group.

    python examples/09_fp8_forward.py
    python examples/09_fp8_forward.py --device cuda

The forward pass dispatches tokens as e4m3 with a scale per 128 elements, and combines the experts' results in bf16. The
backward pass dispatches the gradients of those results in bf16, by the same handle, and combines the gradients of the
tokens. The group is made for bf16 rows; `Group.rows` names the fp8 ones, which fit into the same window. The lane is
given back between the passes, so that what a layer keeps until its backward pass is a handle and its rows.

Printed are the bytes that each step sends per row, the window beside those of a group for each type, and how far the
output and all gradients are from the same layer in float64. Exit code 0 if the fp8 rows have left the window as it was,
everything that arrived is, bit for bit, what NumPy makes of what was sent, and every error is as large as its format
should have it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import starting
from arrays import Array, Tensor, place, to_bf16, to_float32, to_numpy
from ml_dtypes import bfloat16

import tokenway as tw
from tokenway import gating, reference

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 16, 4, 1024, 128, 80
FP8 = tw.RowType(HIDDEN, "float8_e4m3fn", {"scales": (HIDDEN // 128, "float32")})
ERRORS = {
    "output": (0.02, 0.035),
    "tokens' gradients": (0.015, 0.032),
    "weights' gradients": (0.025, 0.045),
}  # from, to

Matrices = tuple[Array, Array]


# ---- the layer -----------------------------------------------------------------------------------


def inputs(rank: int) -> tuple[Array, Array, Array, Array]:
    """(tokens bf16 [T, H], ids, weights, gradients of the output bf16 [T, H]) of a rank, which has fewer tokens the
    higher it is."""
    rng = np.random.default_rng([rank, 1])
    shape = (TOKENS - 17 * rank % TOKENS, HIDDEN)
    ids, weights = gating.softmax_topk(rng.standard_normal((shape[0], EXPERTS)), TOP_K)
    tokens, gradients = (rng.standard_normal(shape).astype(bfloat16) for _ in range(2))
    return tokens, ids, weights, gradients


def expert(number: int) -> Matrices:
    """Weights of an expert, float32: one matrix in, one out."""
    rng = np.random.default_rng([number, 2])
    shapes = (HIDDEN, INNER), (INNER, HIDDEN)
    return tuple(rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes)


def forward(x: Tensor, matrices: tuple[Tensor, Tensor]) -> Tensor:
    """An expert's result for rows [n, H]: two matrices, squared ReLU between them."""
    return (x @ matrices[0]).clip(0) ** 2 @ matrices[1]


def backward(x: Tensor, dy: Tensor, matrices: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of an expert's rows and of its two matrices, from those of its results, both [n, H]."""
    inner = (x @ matrices[0]).clip(0)
    dinner = 2 * inner * (dy @ matrices[1].T)
    return dinner @ matrices[0].T, x.T @ dinner, (inner**2).T @ dy


@dataclass
class Result:
    """What a rank has computed, in float64, and whether what arrived is what was sent."""

    output: Array  # [T, H]
    tokens: Array  # [T, H]: gradients of the tokens
    weights: dict[int, Matrices]  # gradients of the matrices of this rank's experts
    equal: bool
    windows: tuple[int, int]  # bytes before and after the group had fp8 rows


def rank_main(device: str) -> Result:
    """What every rank runs: one layer forward and backward."""
    with tw.connect(device=None if device == "cpu" else device) as comm:
        tokens, ids, weights, gradients = (place(x, device) for x in inputs(comm.rank))
        home, _ = reference.contiguous_placement(EXPERTS, comm.nranks)
        mine = np.flatnonzero(home == comm.rank)
        matrices = [tuple(place(matrix, device) for matrix in expert(e)) for e in mine]
        with tw.Group(comm, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS) as group:
            before = group.window_bytes().window
            fp8 = group.rows(FP8)
            handle = group.route(ids, weights)

            # Forward: fp8 to the experts, bf16 back. Rows are copied, since they outlive the step that brought them.
            values, scales = tw.quantize_fp8(tokens)
            recv = fp8.dispatch(handle, values, {"scales": scales}, layout="expert_major")
            counts, scale = recv.counts.tolist(), recv.payloads["scales"]
            x = [tw.dequantize_fp8(recv.tokens[e, :n], scale[e, :n]) for e, n in enumerate(counts)]
            gate = [to_float32(recv.weights[e, :n]) for e, n in enumerate(counts)]
            equal = arrived(comm.rank, comm.nranks, recv, fp8=True)
            rows = to_bf16(0 * to_float32(recv.tokens))
            for e, n in enumerate(counts):
                rows[e, :n] = to_bf16(forward(x[e], matrices[e]))
            output = group.combine(handle, rows, layout="expert_major", weighting="topk")

            # Backward: bf16 both ways, by the routing that the forward pass has left in the handle.
            recv = group.dispatch(handle, gradients, layout="expert_major")
            equal &= arrived(comm.rank, comm.nranks, recv, fp8=False)
            of_weights = {}
            for e, n in enumerate(counts):
                dy = to_float32(recv.tokens[e, :n]) * gate[e][:, None]
                dx, *of_matrices = backward(x[e], dy, matrices[e])
                rows[e, :n] = to_bf16(dx)
                of_weights[int(mine[e])] = tuple(to_numpy(m).astype(np.float64) for m in of_matrices)
            of_tokens = group.combine(handle, rows, layout="expert_major")
            out, dtokens = (to_numpy(to_float32(t)).astype(np.float64) for t in (output, of_tokens))
            return Result(out, dtokens, of_weights, equal, (before, group.window_bytes().window))


# ---- checks --------------------------------------------------------------------------------------


def arrived(rank: int, ranks: int, recv: tw.Received, fp8: bool) -> bool:
    """Whether a rank received, bit for bit, what NumPy makes of what all ranks have sent."""
    tokens, ids, weights, gradients = zip(*(inputs(source) for source in range(ranks)), strict=True)
    sent = [tw.quantize_fp8(rows) for rows in tokens] if fp8 else [(rows,) for rows in gradients]
    plan = reference.Exchange(ids, weights, experts=EXPERTS, bound=TOKENS)
    want = reference.dispatch_expert_major(plan, rank, list(zip(*sent, strict=True)))
    got = [recv.tokens, *recv.payloads.values()]
    return all(
        np.array_equal(to_numpy(to_float32(a[e, :n])), b[e, :n].astype(np.float32))
        for a, b in zip(got, want.payloads, strict=True)
        for e, n in enumerate(want.counts)
    )


def exact(ranks: int) -> tuple[list[Array], list[Array], dict[int, Matrices]]:
    """Outputs, tokens' gradients and weights' gradients of the layer without communication, in float64."""
    every = [inputs(rank) for rank in range(ranks)]
    outputs = [np.zeros(tokens.shape) for tokens, *_ in every]
    of_tokens = [np.zeros(tokens.shape) for tokens, *_ in every]
    of_weights = {}
    for number in range(EXPERTS):
        matrices = tuple(matrix.astype(np.float64) for matrix in expert(number))
        total = [np.zeros(matrix.shape) for matrix in matrices]
        for rank, (tokens, ids, weights, gradients) in enumerate(every):
            token, k = np.nonzero(ids == number)
            gate = weights[token, k, None].astype(np.float64)
            x, dy = tokens[token].astype(np.float64), gate * gradients[token].astype(np.float64)
            outputs[rank][token] += gate * forward(x, matrices)
            dx, *of_matrices = backward(x, dy, matrices)
            of_tokens[rank][token] += dx
            total = [a + b for a, b in zip(total, of_matrices, strict=True)]
        of_weights[number] = tuple(total)
    return outputs, of_tokens, of_weights


def distance(results: list[Array], wanted: list[Array]) -> float:
    """Relative to what is wanted, over all arrays."""
    squares = [(np.square(a - b).sum(), np.square(b).sum()) for a, b in zip(results, wanted, strict=True)]
    return float(np.sqrt(sum(d for d, _ in squares) / sum(w for _, w in squares)))


def report(results: list[Result]) -> bool:
    """Prints what was found; whether all of it is as it should be."""
    outputs, of_tokens, of_weights = exact(len(results))
    numbers = [number for result in results for number in result.weights]
    errors = {
        "output": distance([r.output for r in results], outputs),
        "tokens' gradients": distance([r.tokens for r in results], of_tokens),
        "weights' gradients": distance(
            [m for r in results for both in r.weights.values() for m in both],
            [m for number in numbers for m in of_weights[number]],
        ),
    }
    sent = FP8.dispatch_bytes
    print(f"bytes a row: forward {sent} to the experts and {2 * HIDDEN} back, backward {2 * HIDDEN} and {2 * HIDDEN}")
    good = True
    for name, error in errors.items():
        low, high = ERRORS[name]
        good &= low <= error <= high
        wrong = "" if low <= error <= high else " WRONG"
        print(f"{name:<19} {error:.3%} from those in float64 ({low:.1%} to {high:.1%}){wrong}")
    settings = {"experts": EXPERTS, "top_k": TOP_K, "max_tokens": TOKENS, "hidden": HIDDEN}
    each = ({}, {"dtype": FP8.dtype, "payloads": FP8.payloads})
    window, other = (tw.window_bytes(len(results), **settings, **rows).window for rows in each)
    same = all(before == after for before, after in (result.windows for result in results))
    equal = all(result.equal for result in results)
    print(f"one window of {window / 2**20:.1f} MiB, for a group of each type {(window + other) / 2**20:.1f}")
    if not same:
        print("THE WINDOW HAS CHANGED")
    print("what arrived is " + ("bit for bit what was sent" if equal else "NOT WHAT WAS SENT"))
    return good and same and equal


def main() -> int:
    """Starts the ranks, prints and checks."""
    return starting.run(starting.parse("fp8 rows forward and bf16 gradients back, in one group."), rank_main, report)


if __name__ == "__main__":
    sys.exit(main())
