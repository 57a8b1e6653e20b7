"""Rows that travel as 8-bit or 4-bit floats, with their block scales as further payloads.

    python examples/05_quantised.py
    python examples/05_quantised.py --device cuda

One mixture-of-experts layer, with rows sent in bf16, in fp8 with a scale per 128 elements (any, or a power of two), in
mxfp8 with a power of two per 32 elements, and in nvfp4 with a scale per 16 elements and one per rank. The experts turn
what they receive into float32 and compute; results return in bf16. Printed are the bytes of a row on the wire and how
far the layer's output is from the same layer in float64 and from the one with bf16 rows. Everything that arrives is
compared, bit for bit, with what NumPy makes of the sender's tokens. Exit code 0 if that is equal and every error is as
large as its format should have it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from arrays import Array, Tensor, place, to_float32, to_numpy
from ml_dtypes import bfloat16

import tokenway as tw
from tokenway import gating, reference

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 16, 4, 1024, 256, 96


# ---- formats -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How rows travel: the group's settings for it, and the way there and back."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]  # rows -> (tokens, payloads)
    unpack: Callable[[Tensor, dict[str, Tensor]], Tensor]  # of what has arrived -> float32 rows
    error: tuple[float, float]  # of the layer's output against float64: from, to


def bf16() -> Format:
    """Rows as they are."""
    return Format({"hidden": HIDDEN}, lambda x: (x, {}), lambda x, _: to_float32(x), (0.001, 0.005))


def fp8(power_of_two: bool) -> Format:
    """e4m3, one float32 per 128 elements beside it."""

    def pack(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, scales = tw.quantize_fp8(x, power_of_two=power_of_two)
        return values, {"scales": scales}

    payloads = {"scales": (-(-HIDDEN // 128), "float32")}
    settings = {"hidden": HIDDEN, "dtype": "float8_e4m3fn", "payloads": payloads}
    return Format(settings, pack, lambda x, more: tw.dequantize_fp8(x, more["scales"]), (0.02, 0.032))


def nvfp4() -> Format:
    """Two elements a byte, one e4m3 per 16 elements beside it, and the sender's global scale, so that no two ranks
    need to agree on one."""

    def pack(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        packed, scales, global_scale = tw.quantize_nvfp4(x)
        return packed, {"scales": scales, "global": filled((len(x), 1), global_scale)}

    payloads = {"scales": (HIDDEN // 16, "float8_e4m3fn"), "global": (1, "float32")}
    settings = {"hidden": HIDDEN // 2, "dtype": "uint8", "payloads": payloads, "combine_hidden": HIDDEN}
    return Format(settings, pack, lambda x, more: tw.dequantize_nvfp4(x, more["scales"], more["global"]), (0.08, 0.11))


def mxfp8() -> Format:
    """e4m3, one byte of exponent per 32 elements beside it."""

    def pack(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, scales = tw.quantize_mxfp8(x)
        return values, {"scales": scales}

    settings = {"hidden": HIDDEN, "dtype": "float8_e4m3fn", "payloads": {"scales": (HIDDEN // 32, "uint8")}}
    return Format(settings, pack, lambda x, more: tw.dequantize_mxfp8(x, more["scales"]), (0.02, 0.032))


FORMATS = {"bf16": bf16(), "fp8": fp8(False), "fp8, powers of two": fp8(True), "mxfp8": mxfp8(), "nvfp4": nvfp4()}


# ---- the layer -----------------------------------------------------------------------------------


def inputs(rank: int) -> tuple[Array, Array, Array]:
    """(tokens bf16 [T, H], ids, weights) of a rank: tokens of different size, and a few large columns, as
    activations have them. The same wherever it is asked for."""
    rng = np.random.default_rng([rank, 1])
    tokens = TOKENS - 13 * rank % TOKENS
    x = rng.standard_normal((tokens, HIDDEN)) * np.exp(0.5 * rng.standard_normal((tokens, 1)))
    x[:, ::97] *= 5
    ids, weights = gating.softmax_topk(rng.standard_normal((tokens, EXPERTS)), TOP_K)
    return x.astype(bfloat16), ids, weights


def expert(number: int) -> tuple[Array, Array]:
    """Weights of an expert, float32: one matrix in, one out."""
    rng = np.random.default_rng([number, 2])
    shapes = (HIDDEN, INNER), (INNER, HIDDEN)
    return tuple(rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes)


def mlp(x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """One expert on rows [n, H], in the precision of x."""
    return (x @ weights[0]).clip(0) @ weights[1]


def experts(recv: tw.Received, form: Format, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Every expert of this rank on the rows that it has received: bf16 [L, N*b, H]."""
    rows = empty_bf16((*recv.tokens.shape[:2], HIDDEN), recv.tokens)
    for slot, n in enumerate(recv.counts.tolist()):
        payloads = {name: payload[slot, :n] for name, payload in recv.payloads.items()}
        rows[slot, :n] = mlp(form.unpack(recv.tokens[slot, :n], payloads), weights[slot])
    return rows


@dataclass
class Result:
    """What a rank has found out about a format."""

    row_bytes: int  # on the wire
    out: Array  # [T, H] float64, what came back
    equal: int  # values that arrived, as they were sent
    arrived: int  # values that arrived


def rank_main(device: str) -> tuple[Array, dict[str, Result]]:
    """What every rank runs. Returns the exact output, and of each format what became of it."""
    comm = tw.connect(device=None if device == "cpu" else device)
    tokens, ids, weights = inputs(comm.rank)
    home, _ = reference.contiguous_placement(EXPERTS, comm.nranks)
    mine = [tuple(place(matrix, device) for matrix in expert(e)) for e in np.flatnonzero(home == comm.rank)]
    results = {}
    with comm:
        for name, form in FORMATS.items():
            with tw.Group(comm, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, **form.settings) as group:
                rows, payloads = form.pack(place(tokens, device))
                handle = group.route(place(ids, device), place(weights, device))
                recv = group.dispatch(handle, rows, payloads, layout="expert_major")
                out = group.combine(handle, experts(recv, form, mine), weighting="topk")
                equal, arrived = compare(recv, form, comm.rank, comm.nranks)
            row_bytes = sum(x.shape[1] * x.itemsize for x in (rows, *payloads.values()))
            results[name] = Result(row_bytes, to_numpy(to_float32(out)).astype(np.float64), equal, arrived)
    return exact(tokens, ids, weights), results


# ---- checks --------------------------------------------------------------------------------------


def compare(recv: tw.Received, form: Format, rank: int, ranks: int) -> tuple[int, int]:
    """(values equal, values compared) of all that has arrived, against what the oracle says of what NumPy packs."""
    all_tokens, ids, weights = zip(*(inputs(source) for source in range(ranks)), strict=True)
    sent = [form.pack(tokens) for tokens in all_tokens]
    names = list(sent[0][1])
    payloads = [[rows for rows, _ in sent], *([more[name] for _, more in sent] for name in names)]
    plan = reference.Exchange(ids, weights, experts=EXPERTS, bound=TOKENS)
    want = reference.dispatch_expert_major(plan, rank, payloads)
    equal, compared = 0, 0
    for q, got in enumerate([recv.tokens, *(recv.payloads[name] for name in names)]):
        for slot, n in enumerate(want.counts):
            a, b = to_bytes(got[slot, :n]), to_bytes(want.payloads[q][slot, :n])
            equal += int((a == b).all(-1).sum()) if a.shape == b.shape else 0
            compared += b.shape[0] * b.shape[1]
    return equal, compared


def exact(tokens: Array, ids: Array, weights: Array) -> Array:
    """The layer without communication, in float64."""
    out = np.zeros(tokens.shape, np.float64)
    for number in range(EXPERTS):
        token, k = np.nonzero(ids == number)
        matrices = tuple(matrix.astype(np.float64) for matrix in expert(number))
        out[token] += weights[token, k, None].astype(np.float64) * mlp(tokens[token].astype(np.float64), matrices)
    return out


def distance(results: list[Array], wanted: list[Array]) -> float:
    """Of two outputs, all ranks', relative to the second."""
    squares = [(np.square(a - b).sum(), np.square(b).sum()) for a, b in zip(results, wanted, strict=True)]
    return float(np.sqrt(np.sum([d for d, _ in squares]) / np.sum([w for _, w in squares])))


# ---- NumPy and PyTorch ---------------------------------------------------------------------------


def to_bytes(x: Tensor) -> Array:
    """[n, elements, bytes of one], on the host."""
    if not isinstance(x, np.ndarray):
        import torch

        return x.contiguous().view(torch.uint8).cpu().numpy().reshape(*x.shape, x.itemsize)
    return np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.itemsize)


def empty_bf16(shape: tuple[int, ...], like: Tensor) -> Tensor:
    if isinstance(like, np.ndarray):
        return np.empty(shape, bfloat16)
    import torch

    return torch.empty(shape, dtype=torch.bfloat16, device=like.device)


def filled(shape: tuple[int, ...], value: Tensor) -> Tensor:
    """Float32 of one value, without waiting for it on a device."""
    return np.full(shape, value) if isinstance(value, np.ndarray | np.generic) else value.expand(shape)


# ---- output --------------------------------------------------------------------------------------


def report(ranks: list[tuple[Array, dict[str, Result]]]) -> bool:
    """Prints a line per format; whether all of them are as they should be."""
    wanted = [exactly for exactly, _ in ranks]
    plain = [results["bf16"].out for _, results in ranks]
    print(
        f"{'rows as':<20}{'bytes a row':>12}{'of bf16':>9}   {'error against float64':<36}{'against bf16':<15}arrived"
    )
    good = True
    for name, form in FORMATS.items():
        results = [of_rank[name] for _, of_rank in ranks]
        outs = [result.out for result in results]
        error, low, high = distance(outs, wanted), *form.error
        equal, arrived = (sum(getattr(result, field) for result in results) for field in ("equal", "arrived"))
        good &= low <= error <= high and equal == arrived > 0
        share = results[0].row_bytes / (2 * HIDDEN)
        expected = f"{error:.3%} (from {low:.1%} to {high:.1%})" + ("" if low <= error <= high else " WRONG")
        bits = "bit for bit" if equal == arrived > 0 else f"{arrived - equal} VALUES DIFFER"
        print(
            f"{name:<20}{results[0].row_bytes:>12}{share:>9.1%}   {expected:<36}{distance(outs, plain):<15.3%}"
            f"{arrived} values, {bits}"
        )
    return good


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="An MoE layer whose rows travel in fewer bytes.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="processes (default 4, with cuda one for each device)")
    return parser.parse_args()


def main() -> int:
    """Starts the ranks, prints and checks."""
    options = parse()
    ranks = options.ranks or 4
    if options.device == "cuda":
        try:
            import torch
        except ImportError:
            print("--device cuda needs PyTorch", file=sys.stderr)
            return 2
        devices = torch.cuda.device_count()
        ranks = options.ranks or devices
        if not 0 < ranks <= devices:
            print(f"--device cuda: {ranks} ranks, {devices} devices; each rank needs one of its own", file=sys.stderr)
            return 2
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of each rank: they share the cores
    print(f"{ranks} ranks, {EXPERTS} experts, {TOP_K} per token, hidden size {HIDDEN}, on {options.device}\n")
    good = report(tw.run(rank_main, ranks, options.device, timeout=300))
    print("\nAll checks hold." if good else "\nA check FAILED.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
