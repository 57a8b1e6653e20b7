"""Decode, prefill and a draft model over one window: mode "auto", growth and groups that share.

    python examples/11_one_window.py
    python examples/11_one_window.py --device cuda

A server makes its group when nothing is known of prompts yet: for batches of 8 tokens. Its draft model has other
experts and another hidden size, and takes no window of its own (`arena`). Then a prompt of 600 tokens comes. The group
grows to it (`reserve`), and its mode "auto" takes high throughput for it: rows are counted first, and no slots are kept
for tokens that are not there. Decoding goes on as before.

Printed are, for each step, the layout that the group took and the window. All values are small whole numbers and
eighths, whose sums are exact. Exit code 0 if every result is what one process without an exchange would compute, the
draft model has taken no memory, and each step had the layout that it was to have.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import starting
from arrays import Array, module_of, place, to_float32, to_numpy

import tokenway as tw
from tokenway import reference

DECODE, PROMPT = 8, 600  # tokens of a rank
FLOATS = {"dtype": "float32", "combine_dtype": "float32"}
MODEL = {"experts": 16, "top_k": 4, "hidden": 256, "max_tokens": DECODE, "mode": "auto", **FLOATS}
DRAFT = {"experts": 8, "top_k": 2, "hidden": 64, "max_tokens": DECODE, **FLOATS}


@dataclass
class Step:
    """A layer's exchange as a rank saw it."""

    name: str
    layout: str
    window: int  # bytes
    good: bool


def batch(rank: int, tokens: int, seed: int, model: dict[str, Any]) -> tuple[Array, Array, Array]:
    """(tokens [T, H], ids, weights [T, K]) of a rank; the higher it is, the fewer."""
    rng = np.random.default_rng([rank, seed])
    count = tokens - rank % tokens
    ids = np.stack([rng.permutation(model["experts"])[: model["top_k"]] for _ in range(count)]).astype(np.int32)
    weights = rng.integers(1, 8, ids.shape).astype(np.float32) / 8
    return rng.integers(-8, 8, (count, model["hidden"])).astype(np.float32), ids, weights


def alone(tokens: Array, ids: Array, weights: Array) -> Array:
    """The layer without an exchange: expert e multiplies by e + 1."""
    return tokens * (weights * (ids + 1)).sum(1, keepdims=True)


def experts(recv: tw.Received, first: int, where: str) -> Any:
    """Those of this rank, the first of which has that number: a weighted sum for each row."""
    here = module_of(where).where(recv.ids >= 0, recv.weights * to_float32(recv.ids + (first + 1)), 0.0)
    return recv.tokens * here.sum(-1)[..., None]


def step(group: tw.Group, name: str, bound: int, seed: int, model: dict[str, Any], where: str) -> Step:
    """One layer. The same code serves all groups and batches."""
    x, ids, weights = batch(group.rank, bound, seed, model)
    handle = group.route(place(ids, where), place(weights, where))
    if model.get("mode") == "auto" and group.chooses(bound) == "high_throughput":
        group.exchange_counts(handle)
    recv = group.dispatch(handle, place(x, where), bound=bound)
    homes = reference.contiguous_placement(model["experts"], group.nranks)[0]
    first = int(np.flatnonzero(homes == group.rank)[0])
    out = to_numpy(group.combine(handle, experts(recv, first, where), dtype="float32"))
    return Step(name, recv.layout, group.window_bytes().window, np.array_equal(out, alone(x, ids, weights)))


def rank_main(device: str) -> list[Step]:
    steps = []
    with (
        tw.connect(device=device) as comm,
        tw.Group(comm, room_for=[DRAFT], **MODEL) as group,
        tw.Group(comm, arena=group, **DRAFT) as draft,
    ):
        steps += [step(draft, "draft", DECODE, 1, DRAFT, device), step(group, "decode", DECODE, 2, MODEL, device)]
        group.reserve(max_tokens=PROMPT)
        steps += [step(group, "prefill", PROMPT, 3, MODEL, device)]
        steps += [step(draft, "draft", DECODE, 4, DRAFT, device), step(group, "decode", DECODE, 5, MODEL, device)]
    return steps


def report(by_rank: list[list[Step]]) -> bool:
    """Prints the steps; whether all was as it should be."""
    print("step     layout        window of its own   results")
    for of_ranks in zip(*by_rank, strict=True):
        one, good = of_ranks[0], all(each.good for each in of_ranks)
        said = "exact on all ranks" if good else "WRONG"
        print(f"{one.name:<9}{one.layout:<14}{one.window / 2**20:>13.2f} MiB   {said}")
    mine = by_rank[0]
    layouts = [one.layout for one in mine]
    shares = all(one.window == 0 for one in mine if one.name == "draft")
    return (
        all(one.good for steps in by_rank for one in steps)
        and layouts == ["rank_major", "rank_major", "flat", "rank_major", "rank_major"]
        and shares
        and mine[1].window < mine[2].window
    )


def main() -> int:
    """Starts the ranks, prints and checks."""
    return starting.run(starting.parse("Decode, prefill and a draft model over one window."), rank_main, report)


if __name__ == "__main__":
    sys.exit(main())
