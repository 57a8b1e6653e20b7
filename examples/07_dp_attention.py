"""Decoder layers with data-parallel attention and experts in parallel, in both ways of communicating.

    python examples/07_dp_attention.py
    python examples/07_dp_attention.py --device cuda                 # a process for each GPU
    python examples/07_dp_attention.py --backend torch --ranks 2     # over torch.distributed, as between hosts

Every rank runs the attention of its own sequences: prompts, then a token at a time. So batches change with every step,
and in most steps one rank has none. The experts of the MoE blocks are spread over all ranks. Tokens come to them
routed (dispatch, combine), or gathered: every token to every rank (all_gatherv), which runs its own experts on those
that chose them, and sums to the tokens' owners (reduce_scatterv). Both ways give the same bits: experts get the same
rows in the same order; a rank's part of a sum is added in float32 over k and rounded to bf16, then the parts over
ranks; and where a rank has no part it gives -0, to which every x adds as x, signed zeros included. Printed is what both
cost, step by step and collective by collective. Exit code 1 if a bit differs, or a value is not float64's but for
rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import numpy as np
from arrays import Array, Stopwatch, Tensor, filled, module_of, place, to_bf16, to_float32, to_numpy
from moe_decoder import Batch, attend, decoders, distances, embed, norm, schedule
from moe_text import swiglu

import tokenway as tw
from tokenway import gating, reference

SIZES = "all_gatherv of sizes"
COLLECTIVES = {"routed": (SIZES, "dispatch", "combine"), "gathered": (SIZES, "all_gatherv", "reduce_scatterv")}


# ---- what a rank does ----------------------------------------------------------------------------


class Rank:
    """A rank's weights, and its part of every step."""

    def __init__(self, options: argparse.Namespace, group: tw.Group):
        self.group, self.where, self.layers = group, where(options), decoders(options)
        self.xp, self.timed = module_of(self.where), Stopwatch(self.where)
        home, _ = reference.contiguous_placement(options.experts, group.nranks)
        self.mine = np.flatnonzero(home == group.rank).tolist()
        self.experts = [[tuple(map(self.place, layer.expert(e))) for e in self.mine] for layer in self.layers]
        self.attention = [list(map(self.place, layer.attention)) for layer in self.layers]
        self.routers = [self.place(layer.router) for layer in self.layers]

    def place(self, x: Array) -> Tensor:
        return place(x, self.where)

    def routed(self, number: int, y: Tensor, ids: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
        """The MoE block, each token to the ranks of its experts."""
        handle, bound = self.group.route(ids, weights), max(1, *sizes)
        recv = self.timed("dispatch", self.group.dispatch, handle, y, layout="expert_major", bound=bound)
        rows = self.xp.empty_like(recv.tokens)
        for slot, n in enumerate(recv.counts.tolist()):
            rows[slot, :n] = self.expert(number, slot, recv.tokens[slot, :n])
        return self.timed("combine", self.group.combine, handle, rows, weighting="topk")

    def gathered(self, number: int, y: Tensor, ids: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
        """The MoE block, every token to every rank."""
        y, ids, weights = self.timed("all_gatherv", self.group.all_gatherv, [y, ids, weights], sizes).rows
        terms = filled((*ids.shape, y.shape[1]), -0.0, self.where)
        for slot, expert in enumerate(self.mine):
            token, k = self.xp.where(ids == expert)
            terms[token, k] = weights[token, k][:, None] * to_float32(self.expert(number, slot, y[token]))
        part = terms[:, 0]
        for k in range(1, ids.shape[1]):
            part = part + terms[:, k]
        return self.timed("reduce_scatterv", self.group.reduce_scatterv, to_bf16(part), sizes)

    def expert(self, number: int, slot: int, rows: Tensor) -> Tensor:
        """An expert of this rank: bf16 [n, hidden] -> the same, float32 inside."""
        return to_bf16(swiglu(to_float32(rows), self.experts[number][slot], self.xp.exp))

    def attended(self, number: int, x: Tensor, batch: Batch, cache: dict) -> Tensor:
        """x and what attention adds to it, [T, hidden]. cache: keys and values so far, of (layer, sequence)."""
        *projections, out = self.attention[number]
        x = to_float32(x)
        heads = len(x), self.layers[number].heads, x.shape[1] // self.layers[number].heads
        q, k, v = ((norm(self.xp, x) @ matrix).reshape(heads) for matrix in projections)
        mixed, first = self.xp.empty_like(x), 0
        for sequence, begin, end in batch:
            rows = slice(first, first + end - begin)
            kv = k[rows], v[rows]
            if begin:
                kv = tuple(map(self.xp.concatenate, zip(cache[number, sequence], kv, strict=True)))
            cache[number, sequence] = kv
            mixed[rows] = attend(self.xp, q[rows], *kv)
            first = rows.stop
        return to_bf16(x + mixed @ out)

    def step(self, way: str, batch: Batch, x: Tensor, cache: dict) -> list[dict[str, Tensor]]:
        """All layers on the tokens of a batch: of each layer what went in, in between, and out."""
        own = self.place(np.full((1, 1), len(x), np.int32))
        sizes = self.timed(SIZES, self.group.all_gatherv, own, [1] * self.group.nranks).rows.flatten().tolist()
        seen = []
        for number in range(len(self.layers)):
            h = self.attended(number, x, batch, cache)
            y = to_bf16(norm(self.xp, to_float32(h)))
            ids, weights = self.gate(to_float32(y) @ self.routers[number])
            moe = getattr(self, way)(number, y, ids, weights, sizes)
            out = to_bf16(to_float32(h) + to_float32(moe))
            seen.append({"x": x, "h": h, "y": y, "ids": ids, "weights": weights, "moe": moe, "out": out})
            x = out
        return seen

    def gate(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        top_k = self.layers[0].top_k
        if self.xp is np:
            return gating.softmax_topk(logits, top_k)
        weights, ids = logits.softmax(-1).topk(top_k)
        return ids.int(), weights / weights.sum(-1, keepdim=True)

    def run(self, way: str, batch: Batch, x: Array, cache: dict) -> tuple[list[dict[str, Array]], dict[str, list]]:
        """A step from a common start: what was seen, and the seconds of each call, by name."""
        x = self.place(x)
        self.group.all_gatherv(self.place(np.zeros((1, 1), np.int32)), [1] * self.group.nranks)
        self.timed.wait()
        seen = self.timed("step", self.step, way, batch, x, cache)
        seconds = self.timed.take()
        self.group.check()
        return [{name: to_numpy(bits_of(tensor)) for name, tensor in layer.items()} for layer in seen], seconds


def bits_of(x: Tensor) -> Tensor:
    """In 32 bits an element: bf16 as float32, which loses nothing."""
    return to_float32(x) if "bfloat16" in str(x.dtype) else x


def where(options: argparse.Namespace) -> str:
    """NumPy where it does, else PyTorch."""
    return "torch" if options.backend == "torch" else options.device


def rank_main(options: argparse.Namespace, meeting: str) -> tuple[list, list, list[int], str]:
    """What every rank runs. Returns what it saw in each step and layer; the seconds of each call, of each round and
    step, by way; how many values both ways gave with the same bits, of how many; and the backend."""
    if options.backend == "torch":
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
        rank = int(os.environ["TOKENWAY_RANK"])
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks)
    if where(options) == "torch":
        module_of("torch").set_num_threads(1)  # ranks share the cores
    device = None if options.device == "cpu" else options.device
    sizes = {"experts": options.experts, "top_k": options.top_k, "hidden": options.hidden}
    with (
        tw.connect(device=device, backend=options.backend) as comm,
        tw.Group(comm, max_tokens=options.max_tokens, **sizes) as group,
    ):
        worker, batches = Rank(options, group), schedule(comm.rank, options)
        seen, times, bits = [], [], [0, 0]
        for _ in range(options.rounds + 1):  # the first one warms up
            caches: dict[str, dict] = {way: {} for way in COLLECTIVES}
            seen, times = [], [*times, []]
            for batch in batches:
                x = embed(comm.rank, batch, options.hidden)
                both = {way: worker.run(way, batch, x, caches[way]) for way in COLLECTIVES}
                routed, gathered = (both[way][0] for way in COLLECTIVES)
                for layer, other in zip(routed, gathered, strict=True):
                    for name, a in layer.items():
                        bits[0] += int((a.view(np.int32) == other[name].view(np.int32)).sum())
                        bits[1] += a.size
                seen.append(routed)
                times[-1].append({way: seconds for way, (_, seconds) in both.items()})
        backend = comm.backend
    if options.backend == "torch":
        dist.destroy_process_group()
    return seen, times[1:], bits, backend


# ---- output --------------------------------------------------------------------------------------


def seconds_of(ranks: list, way: str, name: str) -> Array:
    """[ranks, rounds, steps, calls]"""
    return np.array([[[step[way][name] for step in steps] for steps in times] for _, times, *_ in ranks])


def print_profile(ranks: list) -> None:
    """A line for each collective, as in a profile of a model's steps."""
    print(f"{'':<10}{'in a step':<24}{'calls':>6}{'ms':>9}{'last rank':>11}{'of the step':>13}")
    for way, names in COLLECTIVES.items():
        whole, rest = 1e3 * seconds_of(ranks, way, "step").mean(0).sum(-1), 0.0
        whole = np.median(whole, axis=0).mean()
        for name in names:
            calls = 1e3 * seconds_of(ranks, way, name)
            mean, last = (np.median(over_ranks.sum(-1), axis=0).mean() for over_ranks in (calls.mean(0), calls.min(0)))
            print(f"{way:<10}{name:<24}{calls.shape[-1]:>6}{mean:>9.3f}{last:>11.3f}{mean / whole:>13.1%}")
            rest += mean
        print(f"{way:<10}{'computation':<24}{'':>6}{whole - rest:>9.3f}{'':>11}{1 - rest / whole:>13.1%}")
        print(f"{way:<10}{'step':<24}{'':>6}{whole:>9.3f}")
    print("ms: mean of ranks and steps, median of rounds; with it goes waiting for other ranks, of which the rank that")
    print("comes last does none (last rank).\n")


def compared(routed: float, gathered: float) -> str:
    """Two times, and which is less."""
    better = "routed" if routed < gathered else "gathered"
    return f"{routed:>10.2f}{gathered:>9.2f}    {better}, by {max(routed, gathered) / min(routed, gathered) - 1:.0%}"


def print_steps(ranks: list, options: argparse.Namespace) -> None:
    """A line for each step: how many tokens, how many rows cross, how long it takes."""
    print(f"step  {'tokens of each rank':<26}{'rows that cross':>18}{'ms':>19}    faster")
    print(f"{'':<32}{'routed':>9}{'gathered':>9}{'routed':>10}{'gathered':>9}")
    home, _ = reference.contiguous_placement(options.experts, options.ranks)
    all_ms = [np.median(1e3 * seconds_of(ranks, way, "step")[..., 0].max(0), axis=0) for way in COLLECTIVES]
    for step, ms in enumerate(zip(*all_ms, strict=True)):
        sizes = [len(steps[step][0]["x"]) for steps, *_ in ranks]
        routed = 0
        for r, layer in ((r, layer) for r, (steps, *_) in enumerate(ranks) for layer in steps[step]):
            peers = np.delete(np.arange(options.ranks), r)
            routed += int((home[layer["ids"]][:, :, None] == peers).any(1).sum())
        gathered = options.layers * (options.ranks - 1) * sum(sizes)
        print(f"{step:>4}  {sizes!s:<26}{routed:>9}{gathered:>9}{compared(*ms)}")
    print(f"all   {'':<44}{compared(*(ms.sum() for ms in all_ms))}")
    print("rows: over all layers, one way; ms: of the slowest rank, median of rounds. On other machines, other sizes:")
    print("other results.\n")


def check(ranks: list, options: argparse.Namespace) -> bool:
    """Prints whether both ways gave the same, and the right, values; whether they did."""
    equal, values = np.sum([bits for _, _, bits, _ in ranks], axis=0)
    print(f"Both ways the same, bit for bit: {equal} of {values} values")
    worst: dict[str, list] = {}
    for rank, (steps, *_) in enumerate(ranks):
        for number, layer in enumerate(decoders(options)):
            seen = {name: np.concatenate([step[number][name] for step in steps]) for name in steps[0][number]}
            for what, difference, allowed in distances(layer, seen, schedule(rank, options)):
                found = worst.setdefault(what, [0, 0, 0.0])
                found[0] += int((difference <= allowed).sum())  # not where there is a NaN
                found[1] += difference.size
                found[2] = max(found[2], np.max(difference / (allowed + 1e-300), initial=0))
    for what, (within, of, most) in worst.items():
        print(f"Within rounding of float64, {what:<10} {within} of {of} values, at most {most:.0%} of what it allows")
    good = equal == values > 0 and all(within == of > 0 for within, of, _ in worst.values())
    print("All checks hold." if good else "A check FAILED.")
    return good


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Data-parallel attention and experts in parallel, two ways.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("auto", "torch"), default="auto", help="torch: over gloo, on the CPU")
    parser.add_argument("--ranks", type=int, help="processes (default 4, with cuda one for each device)")
    sizes = {"steps": 8, "layers": 2, "max-tokens": 64, "hidden": 256, "heads": 4, "experts": 16, "top-k": 4}
    for name, default in (sizes | {"inner": 128, "rounds": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    options = parser.parse_args()
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if where(options) != "cpu":
        try:
            import torch
        except ImportError:
            parser.error("--device cuda and --backend torch need PyTorch")
        if options.device == "cuda":
            if options.backend == "torch":
                parser.error("--backend torch is for the CPU")
            options.ranks = options.ranks or torch.cuda.device_count()
            if not 0 < options.ranks <= torch.cuda.device_count():
                parser.error(f"{options.ranks} ranks, {torch.cuda.device_count()} devices; each rank needs its own")
    options.ranks = options.ranks or 4
    if options.hidden % options.heads:
        parser.error(f"--hidden {options.hidden} is no multiple of --heads {options.heads}")
    return options


def main() -> int:
    """Starts the ranks, prints and checks."""
    options = parse()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of each rank: they share the cores
    with tempfile.TemporaryDirectory() as folder:
        ranks = tw.run(rank_main, options.ranks, options, os.path.join(folder, "meeting"), timeout=300)
    print(
        f"{options.ranks} ranks, {options.layers} layers, {options.experts} experts, {options.top_k} per token, ",
        end="",
    )
    print(f"hidden size {options.hidden}, on {options.device}, backend {ranks[0][3]}\n")
    print_steps(ranks, options)
    print_profile(ranks)
    return 0 if check(ranks, options) else 1


if __name__ == "__main__":
    sys.exit(main())
