"""What steps see while experts move: python -m tokenway.bench.balancing [--json FILE] [--seeds N]

A group of four ranks in this process, on the CPU, whose tokens choose experts by loads that drift or turn to another
domain. Ranks serve them without moves, and while a `Balancer` moves experts, whose copies and plans are waited for
before each step or not; and `balance.play` plays the same choices. Imbalance is that of the rows which each rank really
received in a step, hottest over mean less 1, averaged over layers and over all steps but those of the first window,
which the first maps are planned for. Every result is compared, bit for bit, with what it is without moves.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import tokenway as tw
from tokenway import balance, machine
from tokenway.balance.playing import Watch
from tokenway.bench import report

Array = np.ndarray
WEIGHT = np.float32(0.5)  # of each choice
DECAY = 0.9  # of the group's loads


@dataclass(frozen=True)
class Load:
    """What tokens choose, and how ranks are: slots of a rank without its spare one; windows of so many steps; `rest`
    bytes of weights of an expert and layer, beside a factor for each column; `step_bytes` may be copied in a step."""

    kind: str
    policy: str = "balanced"
    ranks: int = 4
    layers: int = 2
    experts: int = 64
    slots: int = 17
    top_k: int = 4
    tokens: int = 256
    hidden: int = 32
    windows: int = 12
    steps: int = 32
    rest: int = 1 << 18
    step_bytes: int = 1 << 20
    seed: int = 0

    @cached_property
    def loads(self) -> Array:
        """[windows, layers, E]: what is expected."""
        shape = self.windows, self.layers, self.experts
        if self.kind == "drifting":
            return balance.drifting(*shape, memory=0.97, seed=self.seed)
        return balance.domains(*shape, stay=5, seed=self.seed)

    @cached_property
    def first(self) -> balance.Plan:
        """Planned for the first window."""
        return balance.plan(self.loads[0], ranks=self.ranks, slots=self.slots)

    @property
    def every(self) -> int:
        """Steps between two plans: a window."""
        return self.steps

    def ids(self, step: int, layer: int) -> Array:
        """int32 [ranks, tokens, K]: what tokens choose in a step, distinct experts by their loads."""
        rng = np.random.default_rng([self.seed, step, layer])
        noise = rng.gumbel(size=(self.ranks, self.tokens, self.experts))
        scores = np.log(self.loads[step // self.steps, layer]) + noise
        return np.argpartition(-scores, self.top_k, axis=2)[..., : self.top_k].astype(np.int32)


@dataclass(frozen=True, eq=False)
class Choices:
    """ids: int32 [steps, layers, ranks, tokens, K] of a load. counts: int64 [steps, layers, E] of them."""

    load: Load
    ids: Array
    counts: Array

    @classmethod
    def of(cls, load: Load) -> Choices:
        """All of a load."""
        steps = range(load.windows * load.steps)
        ids = np.stack([np.stack([load.ids(step, layer) for layer in range(load.layers)]) for step in steps])
        flat = ids.reshape(-1, load.ranks * load.tokens * load.top_k)
        counts = np.stack([np.bincount(row, minlength=load.experts) for row in flat])
        return cls(load, ids, counts.reshape(*ids.shape[:2], load.experts))


@dataclass(frozen=True, eq=False)
class Served:
    """Of a rank. rows: int64 [steps, layers], that it received. statistics, delays: of its balancer; delay_ms: the same
    delays in time, and step_ms the median step."""

    rows: Array
    statistics: balance.Statistics
    delays: tuple[int, ...]
    delay_ms: tuple[float, ...]
    step_ms: float


def serve(comm: tw.Comm, choices: Choices, wait: bool, **options: Any) -> Served:
    """Runs all steps on a rank. wait: for plans and copies before each step. options: of the balancer."""
    load = choices.load
    table = balance.spare_maps(load.first, load.ranks, 1)
    tensors = {"scale": ((load.hidden,), "float32"), "rest": ((load.rest,), "uint8")}
    room = balance.weight_bytes(tensors, layers=load.layers, slots=load.slots + 1, ranks=load.ranks)
    counted = {"count_loads": True, "load_decay": DECAY}
    placement = tw.Placement(table, policy=load.policy, **counted, moves=True, weight_bytes=room)
    shape = {"experts": load.experts, "top_k": load.top_k, "hidden": load.hidden, "max_tokens": load.tokens}
    rows = np.zeros(choices.ids.shape[:2], np.int64)
    with tw.Group(comm, **shape, dtype="float32", combine_rows="per_expert", expert_map=placement) as group:
        weights = balance.Weights(group, tensors)
        for layer in range(load.layers):
            for place, expert in enumerate(table[layer].reshape(load.ranks, -1)[comm.rank]):
                weights.tensor("scale", layer)[place] = scale_of(layer, expert, load.hidden)
        given = {"every": load.every, "step_bytes": load.step_bytes} | options
        with balance.Balancer(group, weights, **given) as balancer:
            watch, ends = Watch(balancer), [time.perf_counter()]
            delay_ms = []
            for step, ids in enumerate(choices.ids):
                for layer in range(load.layers):
                    rows[step, layer] = _layer(group, weights, ids[layer, comm.rank], step, layer)
                if wait:
                    balancer.wait()
                balancer.step()
                ends.append(time.perf_counter())
                if (delay := watch.look()) is not None:
                    delay_ms.append(1e3 * (ends[-1] - ends[-1 - delay]))
            step_ms = 1e3 * float(np.median(np.diff(ends)))
            return Served(rows, balancer.statistics, tuple(watch.delays), tuple(delay_ms), step_ms)


def scale_of(layer: int, expert: int, hidden: int) -> Array:
    """[H] float32: an expert's weights."""
    return (1 + expert + 64 * layer + np.arange(hidden) / 8).astype(np.float32)


def _layer(group: tw.Group, weights: balance.Weights, ids: Array, step: int, layer: int) -> int:
    """Returns how many rows this rank received: one for each (token, k)."""
    tokens = np.random.default_rng([step, group.rank, layer]).standard_normal((len(ids), group.hidden))
    tokens = tokens.astype(np.float32)
    handle = group.route(ids, layer=layer)
    received = group.dispatch(handle, tokens, layout="expert_major")
    counts = np.array(received.counts)
    made = np.zeros_like(received.tokens)
    for slot, count in enumerate(counts):
        made[slot, :count] = received.tokens[slot, :count] * weights.tensor("scale", layer)[slot]
    out = group.combine(handle, made, weights=np.full(ids.shape, WEIGHT))
    handle.release()
    want = np.zeros_like(tokens)
    for k in range(ids.shape[1]):  # ascending, wherever experts are
        term = tokens * scale_of(layer, ids[:, k, None], group.hidden) * WEIGHT
        want = want + term if k else term
    if not np.array_equal(out.view(np.uint32), want.view(np.uint32)):
        raise AssertionError(f"step {step}, layer {layer}: results are not those without moves")
    return int(counts.sum())


def together(choices: Choices, wait: bool = False, **options: Any) -> list[Served]:
    """`serve` on all ranks."""
    comms = tw.local_comms(choices.load.ranks)
    try:
        with ThreadPoolExecutor(len(comms)) as pool:
            return list(pool.map(lambda comm: serve(comm, choices, wait, **options), comms))
    finally:
        for comm in comms:
            comm.close()


def played(choices: Choices, **options: Any) -> balance.Played:
    """The same by `balance.play`."""
    load = choices.load
    given = {"every": load.every, "step_bytes": load.step_bytes} | options
    return balance.play(
        choices.counts,
        ranks=load.ranks,
        first=load.first,
        load_decay=DECAY,
        expert_bytes=(4 * load.hidden, load.rest),
        **given,
    )


def imbalance(ranks: Sequence[Served]) -> Array:
    """float64 [steps, layers], of the rows that ranks received."""
    return balance.imbalance(np.stack([served.rows for served in ranks], axis=2).astype(np.float64))


# ---- what is measured ----------------------------------------------------------------------------

KINDS, BUDGETS = ("drifting", "domains"), (4, 16)


def measure_load(choices: Choices) -> list[dict[str, Any]]:
    """A row for each budget of writes."""
    load = choices.load
    later = slice(load.steps, None)
    still = float(imbalance(together(choices, every=None))[later].mean())
    rows = []
    for writes in BUDGETS:
        wanted = played(choices, writes=writes)
        awaited, free = (together(choices, wait, writes=writes) for wait in (True, False))
        if tuple(served.statistics for served in awaited) != wanted.statistics:
            raise AssertionError("ranks that wait have done something else than was played")
        rows.append(
            {
                "kind": load.kind,
                "writes": writes,
                "seed": load.seed,
                "still": still,
                "played": float(wanted.imbalance[later].mean()),
                "awaited": float(imbalance(awaited)[later].mean()),
                "free": float(imbalance(free)[later].mean()),
                "plans": free[0].statistics.plans,
                "moves": sum(served.statistics.moves for served in free),
                "bytes_per_step": float(np.mean([served.statistics.bytes for served in free]) / len(choices.ids)),
                "played_steps": list(wanted.delays),
                "delay_steps": list(free[0].delays),
                "delay_ms": list(free[0].delay_ms),
                "step_ms": free[0].step_ms,
            }
        )
    return rows


def measure(seeds: int, **sizes: int) -> dict[str, Any]:
    """Everything, with where it was measured."""
    loads = [Load(kind, seed=seed, **sizes) for kind in KINDS for seed in range(seeds)]
    return {
        "balancing": [row for load in loads for row in measure_load(Choices.of(load))],
        "settings": {**asdict(loads[0]), "seeds": seeds},
        **machine.measured(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--windows", type=int, default=Load.windows)
    parser.add_argument("--tokens", type=int, default=Load.tokens)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    run = measure(options.seeds, windows=options.windows, tokens=options.tokens)
    report.show(run)
    if options.json:
        Path(options.json).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
