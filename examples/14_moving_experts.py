"""Experts that move while the model runs, to where the tokens of now want them.

    python examples/14_moving_experts.py
    python examples/14_moving_experts.py --plot moving.png
    python examples/14_moving_experts.py --device cuda

Tokens are of one kind of text, then of another, and of the first again; each kind has experts of its own that it likes
best. The ranks that hold these have most to do, and all others wait for them. A `Balancer` sees that, and brings
experts and replicas of them to where they are wanted: beside the steps, which never wait for it.

The steps run twice, first without moves. Printed is how much more than the mean the busiest rank receives, in periods
of steps, and what has moved. Exit code 0 if all results are bit for bit those without moves, and at the end of each
kind of text ranks receive more even shares than without.
"""

from __future__ import annotations

import sys

import numpy as np
import starting
from arrays import Array, place, to_numpy

import tokenway as tw
from tokenway import balance

EXPERTS, TOP_K, HIDDEN, TOKENS, LAYERS = 16, 2, 32, 256, 2
KINDS = (0, 1, 0)  # of text
STEPS, PERIOD = 64, 16  # steps of a kind of text, and of a line of the table
TENSORS = {"scale": ((HIDDEN,), "float32")}  # an expert's weights, by name: shape and dtype


def batch(step: int, layer: int, rank: int) -> tuple[Array, Array]:
    """(tokens [T, H], ids [T, K]) of a rank in a step."""
    rng = np.random.default_rng([step, layer, rank])
    liked = balance.lognormal(2 * LAYERS, EXPERTS, 0.9, seed=7)[2 * layer + KINDS[step // STEPS]]
    scores = np.log(liked) + rng.gumbel(size=(TOKENS, EXPERTS))
    tokens = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    return tokens, np.argsort(-scores)[:, :TOP_K].astype(np.int32)


def first_maps(ranks: int) -> Array:
    """[layers, ranks * slots]: experts in order with some replicas, and a spare slot on each rank, where experts that
    come are copied to."""
    slots = -(-EXPERTS // ranks) + 1
    return balance.spare_maps(balance.contiguous(LAYERS, EXPERTS, ranks, slots), ranks, 1)


def fill(weights: balance.Weights, maps: Array, rank: int, device: str) -> None:
    """Each slot with the weights of the expert that the maps have there; a spare one with nothing that counts."""
    for layer, table in enumerate(maps):
        mine = table[weights.rank_of_slot == rank]
        rows = (1 + mine[:, None] + 16 * layer + np.arange(HIDDEN) / 8).astype(np.float32)
        weights.tensor("scale", layer)[:] = place(np.where(mine[:, None] < 0, np.float32(0), rows), device)


def layer_of(group: tw.Group, weights: balance.Weights, step: int, layer: int, device: str) -> tuple[int, Array]:
    """(rows that this rank received, results [T, H]) of a layer, in which an expert multiplies by its weights."""
    tokens, ids = batch(step, layer, group.rank)
    handle = group.route(place(ids, device), layer=layer)
    recv = group.dispatch(handle, place(tokens, device), layout="expert_major")
    rows = int(to_numpy(recv.counts).sum())
    with np.errstate(all="ignore"):  # of places that no row came to
        made = recv.tokens * weights.tensor("scale", layer)[:, None, :]
    shares = place(np.full(ids.shape, 0.5, np.float32), device)
    out = to_numpy(group.combine(handle, made, weights=shares)).copy()
    handle.release()
    return rows, out


def run(comm: tw.Comm, device: str, moving: bool) -> tuple[Array, list[Array], balance.Statistics]:
    """(rows received [steps, layers], results of all layers and steps, what has moved) of a rank."""
    maps = first_maps(comm.nranks)
    slots = maps.shape[1] // comm.nranks
    room = balance.weight_bytes(TENSORS, layers=LAYERS, slots=slots, ranks=comm.nranks)
    placement = tw.Placement(maps, policy="balanced", count_loads=True, load_decay=0.9, moves=True, weight_bytes=room)
    shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
    received = np.zeros((len(KINDS) * STEPS, LAYERS), np.int64)
    results = []
    # With rows per expert the order of a sum does not depend on where experts are.
    with tw.Group(comm, **shape, combine_rows="per_expert", expert_map=placement) as group:
        weights = balance.Weights(group, TENSORS)
        fill(weights, maps, comm.rank, device)
        with balance.Balancer(group, weights, every=8 if moving else None, writes=8) as balancer:
            for step in range(len(received)):
                for layer in range(LAYERS):
                    received[step, layer], out = layer_of(group, weights, step, layer, device)
                    results.append(out)
                balancer.wait()  # so that this prints the same each time; a model would not
                balancer.step()
            return received, results, balancer.statistics


def rank_main(device: str) -> tuple[list[Array], bool, balance.Statistics]:
    """(rows received without moves and with them, whether results are the same bits, what has moved)."""
    with tw.connect(device=device) as comm:
        still, wanted, _ = run(comm, device, moving=False)
        moved, found, statistics = run(comm, device, moving=True)
        same = all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(wanted, found, strict=True))
        return [still, moved], same, statistics


def report(by_rank: list[tuple[list[Array], bool, balance.Statistics]], plot: str | None) -> bool:
    """Prints what was found; whether all was as it should be."""
    rows = np.array([found[0] for found in by_rank], np.float64)  # [ranks, ways, steps, layers]
    uneven = balance.imbalance(np.moveaxis(rows, 0, -1)).mean(axis=2)  # [ways, steps]
    periods = uneven.reshape(2, -1, PERIOD).mean(axis=2)
    print("steps       text   without moves   experts move")
    for i, (still, moved) in enumerate(periods.T.tolist()):
        steps = f"{i * PERIOD} to {i * PERIOD + PERIOD - 1}"
        print(f"{steps:<12}{KINDS[i * PERIOD // STEPS]:>4}{100 * still:>14.1f} %{100 * moved:>13.1f} %")
    planner, moves = by_rank[0][2], sum(found[2].moves for found in by_rank)
    print(f"\n{planner.plans} plans, {moves} experts came to another slot, in {planner.epochs} epochs")
    print(
        f"the last plan was in force {planner.plan_steps + planner.switch_steps} steps after the loads it was made of"
    )
    same = all(found[1] for found in by_rank)
    print(f"results: {'bit for bit those without moves' if same else 'WRONG'}")
    if plot:
        draw(uneven, plot)
    ends = periods[:, STEPS // PERIOD - 1 :: STEPS // PERIOD]  # of each kind of text
    return same and moves > 0 and bool((ends[1] < ends[0]).all())


def draw(uneven: Array, file: str) -> None:
    """Both ways, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for values, label, color in zip(uneven, ("without moves", "experts move"), ("tab:gray", "tab:blue"), strict=True):
        axes.plot(100 * values, label=label, color=color, linewidth=1.2)
    for turn in range(STEPS, len(KINDS) * STEPS, STEPS):
        axes.axvline(turn, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step (dotted: another kind of text)", ylabel="busiest rank above the mean, %", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(True, alpha=0.25)
    figure.savefig(file, dpi=90)
    plt.close(figure)


def main() -> int:
    """Starts the ranks, prints and checks."""
    options = starting.parse("Experts that move while the model runs.", picture="imbalance, step by step")
    return starting.run(options, rank_main, lambda found: report(found, options.plot))


if __name__ == "__main__":
    sys.exit(main())
