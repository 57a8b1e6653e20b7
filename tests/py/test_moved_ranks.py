"""Ranks die while experts move: survivors go on with the latest maps and their own weights (moved_ranks.py)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import moved_ranks
import numpy as np
import pytest
from moved_plans import PHASES, Maps
from test_balancer import EXPERTS, LAYERS, WEIGHTS, fill, layer_of, make, value_of

import tokenway as tw
from tokenway import balance

SEED = int(os.environ.get("SEED", "20"))

pytestmark = pytest.mark.needs("loads")


def rounds_of(backend: str, cpu: int, device: int) -> int:
    """So many on the CPU, and so many on devices."""
    return cpu if harness.BACKENDS[backend].checks_ids_on_host else device


def test_random_rounds(threads, backend) -> None:
    threads(5)  # where there can be so many
    moved_ranks.play(rounds_of(backend, 20, 2), SEED, backend)


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.slow
def test_many_random_rounds(threads, backend) -> None:
    threads(5)
    rounds = rounds_of(backend, 2000, 60)
    seen = moved_ranks.play(rounds, 1000 + SEED, backend)
    assert seen.phases == set(PHASES) - {"dispatch"} and seen.lost > seen.shrinks > rounds
    assert seen.splits > 0 or rounds < 2000, "survivors with unlike versions"


@pytest.mark.processes
@pytest.mark.slow
def test_killed_ranks(processes, backend) -> None:
    processes(5)
    moved_ranks.play(rounds_of(backend, 3, 1), SEED, backend, "processes")


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.slow
def test_many_killed_ranks(processes, backend) -> None:
    processes(5)
    moved_ranks.play(rounds_of(backend, 100, 10), 1000 + SEED, backend, "processes")


# ---- a model that goes on ------------------------------------------------------------------------


def serve(env: Any, steps: int) -> Any:
    """As served. Where something is wrong, others hear of it at once."""
    try:
        return served(env, steps)
    except BaseException:
        env.kept["groups"][-1].abort()
        raise


def served(env: Any, steps: int) -> Any:
    """Serves with a balancer until rank 1 dies; the others shrink, load what is lost, and serve on."""
    slots = -(-EXPERTS // env.nranks) + 1
    placement, made = make(env, slots)
    group = tw.Group(env.comm, **made, expert_map=placement)
    weights = balance.Weights(group, WEIGHTS)
    fill(env, group, weights)
    env.kept["groups"] = [group]
    loaded: list[tuple[int, int]] = []

    def load(layer: int, expert: int) -> dict[str, Any]:
        loaded.append((layer, expert))
        return {"scale": value_of(expert, layer), "shift": np.array([expert, layer, 7], np.int16)}

    try:
        with balance.Balancer(group, weights, every=4, gain=0.0) as balancer:
            run(env, group, weights, balancer, steps, dies=env.rank == 1)
    except tw.GroupFinished:
        if env.rank == 1:
            return None
    smaller = group.shrink()
    env.kept["groups"].append(smaller)
    lost = smaller.moving.lost_experts
    refused = harness.caught(balance.Weights.of_survivors, smaller, weights) if lost else None
    survived = balance.Weights.of_survivors(smaller, weights, load)
    group.close()
    before = [smaller.expert_of_slot(layer) for layer in range(LAYERS)]
    with balance.Balancer(smaller, survived, every=4, gain=0.0) as balancer:
        run(env, smaller, survived, balancer, 4 * steps)
        found = balancer.statistics, [balancer.table(layer) for layer in range(LAYERS)], smaller.comm_ranks
    shifts = [env.backend.array(survived.tensor("shift", layer)) for layer in range(LAYERS)]
    smaller.close()
    return *found, lost, loaded, refused, before, survived.rank_of_slot, shifts


def run(env: Any, group: Any, weights: Any, balancer: Any, steps: int, dies: bool = False) -> None:
    for step in range(steps):
        for layer in range(LAYERS):
            layer_of(env, group, weights, step, layer)
        balancer.wait()
        balancer.step()
    if dies:
        group.abort()
        raise tw.GroupFinished("it has died")
    while group.nranks == env.nranks:  # until it is known
        layer_of(env, group, weights, 0, 0)


def test_a_model_goes_on(threads, backend) -> None:
    """With what survivors have, and what is loaded anew; a fresh balancer goes on from there, and gives each rank as
    many experts as the others."""
    ranks = min(3, harness.BACKENDS[backend].most_ranks("threads"))
    if ranks < 3:
        pytest.skip("two must survive")
    world = threads(ranks)
    first, dead, other = world.run(serve, 8)
    world.forget()
    assert dead is None
    statistics, tables, members, lost, loaded, refused, before, rank_of_slot, _ = first
    assert members == other[2] == [0, 2]
    assert lost == other[3] and len(lost) >= LAYERS  # it had experts without a replica
    assert sorted(loaded + other[4]) == sorted((each.layer, each.expert) for each in lost)
    for each in lost:
        assert before[each.layer][each.slot] == each.expert and rank_of_slot[each.slot] == each.rank
        assert each.place == (rank_of_slot[: each.slot] == each.rank).sum()
    harness.said(refused, "twInvalidUsage", r"experts \d of layer 0.* were on ranks that are gone; give load")
    assert statistics.plans >= 1 and statistics.epochs > 0
    for layer in range(LAYERS):
        np.testing.assert_array_equal(tables[layer], other[1][layer])
        used = np.bincount(rank_of_slot[tables[layer] >= 0], minlength=2)
        assert used[0] == used[1] and set(tables[layer]) >= set(range(EXPERTS))
    for each in lost:  # tensors that no expert here multiplies with came as well
        holder = first if each.rank == 0 else other
        assert holder[8][each.layer].shape[1:] == (3,)


# ---- weights that are brought over ---------------------------------------------------------------


def brought(env: Any) -> list[Any]:
    """All live; what is refused, and what is there afterwards."""
    placement, made = make(env, -(-EXPERTS // env.nranks) + 2)
    found = []
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        weights = balance.Weights(group, WEIGHTS)
        fill(env, group, weights)
        weights.put(0, 0, {"scale": value_of(3, 1), "shift": np.array([1, -2, 3], np.int16)})
        found.append(harness.caught(weights.put, 0, 0, {"scale": value_of(0, 0)}))
        found.append(harness.caught(weights.put, 0, 0, {"scale": np.zeros(2), "shift": np.zeros(3)}))
        found.append(harness.caught(balance.Weights.of_survivors, group, weights))
        with group.shrink(max_tokens=made["max_tokens"] + 1) as smaller:
            assert smaller.moving.lost_experts == ()
            again = balance.Weights.of_survivors(smaller, weights)
            for name in WEIGHTS:
                for layer in range(LAYERS):
                    mine, its = (env.backend.array(each.tensor(name, layer)) for each in (weights, again))
                    np.testing.assert_array_equal(mine, its)
            assert [smaller.expert_of_slot(layer).tolist() for layer in range(LAYERS)] == placement.slot_expert.tolist()
            layer_of(env, smaller, again, 1, 1)
    return found


def test_all_live(world) -> None:
    for found in world(min(3, world.most)).run(brought):
        harness.said(found[0], "twInvalidArgument", r"expert names \['scale'\]; it must name \['scale', 'shift'\]")
        harness.said(found[1], "twInvalidArgument", r"expert\['scale'\] has shape \(2,\); it must be \(6,\)")
        harness.said(found[2], "twInvalidArgument", "group is not what shrink has made of the group of these weights")


def test_room_grows_in_proportion() -> None:
    """So many bytes for so many slots, as core/survivors.cc raises them, are enough for what the layout needs then."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        sizes = {f"t{i}": (int(rng.integers(1, 700)), "uint8") for i in range(int(rng.integers(1, 4)))}
        layers, slots, ranks = (int(rng.integers(1, 9)) for _ in range(3))
        room = -(-balance.weight_bytes(sizes, layers=layers, slots=slots, ranks=ranks) // 4096) * 4096
        more, fewer = slots + int(rng.integers(1, 9)), int(rng.integers(1, ranks + 1))
        grown = -(-room // slots) * more
        made = balance.weights.Layout.of(sizes, layers, more, balance.weights.board_bytes(layers, more * fewer))
        assert grown >= made.bytes, (sizes, layers, slots, ranks, more, fewer)


def test_the_oracle_of_survivors() -> None:
    """An example by hand, as in tests/cc/survivors_test.cc."""
    maps = Maps(
        np.array([[0, 1, -1, 2, 3, -1, 0, 2, -1], [-1, 0, 1, 3, -1, 2, 1, 0, -1]]),
        np.repeat(np.arange(3), 3),
        np.tile(np.arange(3), 3),
    )
    found, lost = maps.of_survivors([0, 2])
    assert found.tables.tolist() == [[0, 1, 3, -1, 0, 2, -1, -1], [2, 0, 1, -1, 1, 0, 3, -1]]
    assert lost == {(0, 2), (1, 0), (1, 6)} and found.rank.tolist() == [0] * 4 + [1] * 4


# ---- lanes that are idle -------------------------------------------------------------------------


def idle(env: Any, told: bool) -> Any:
    """A model on lane 0 of two. What the balancer has done, and the versions of both lanes."""
    placement, made = make(env, -(-EXPERTS // env.nranks) + 2, lanes=2)
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        weights = balance.Weights(group, WEIGHTS)
        fill(env, group, weights)
        with balance.Balancer(group, weights, every=4, gain=0.0) as balancer:
            for step in range(48):
                layer_of(env, group, weights, step, 0, lane=0)
                balancer.wait()
                balancer.step(idle=(1,) if told else ())
        counted = group.counted_dispatches.tolist()
        return balancer.statistics.epochs, group.moving.epochs().lanes, counted


def test_an_idle_lane(world) -> None:
    """It holds all epochs open, unless step is told; what step does there counts for nobody's load."""
    ranks = min(2, world.most)
    for epochs, (used, unused), _ in world(ranks).run(idle, False):
        assert epochs == 0 < used and unused == 0
    for epochs, (used, unused), counted in world(ranks).run(idle, True):
        assert epochs > 0 and used > 0 and unused > 0 and 46 <= sum(counted) <= 48


# ---- the guide's program -------------------------------------------------------------------------


def survive_in_threads(survive: Any) -> None:
    """Two of three ranks go on, as the guide says."""

    def of_rank(comm: tw.Comm) -> Any:
        size = balance.weight_bytes({"down": (4, "float32")}, layers=1, slots=2, ranks=3)
        placement = tw.Placement([0, -1, 1, -1, 2, -1], count_loads=True, moves=True, weight_bytes=size)
        shape = {"experts": 3, "top_k": 1, "hidden": 4, "max_tokens": 2, "dtype": "float32"}
        group = tw.Group(comm, **shape, expert_map=placement)  # type: ignore[arg-type]
        weights = balance.Weights(group, {"down": (4, "float32")})
        weights.tensor("down")[0] = comm.rank
        if comm.rank == 2:
            group.abort()
            group.close()
            return None
        smaller, weights, lost = survive(group, weights, lambda layer, expert: {"down": np.full(4, 10.0 * expert)})
        found = weights.tensor("down").tolist()
        smaller.close()
        return found, [(each.layer, each.expert, each.rank, each.place) for each in lost]

    comms = tw.local_comms(3)
    with ThreadPoolExecutor(3) as pool:
        first, second, _ = pool.map(of_rank, comms)
    for comm in comms:
        comm.close()
    assert first[1] == second[1] == [(0, 2, 0, 1)]
    assert [row[0] for row in first[0]] == [0.0, 20.0, 0.0] and [row[0] for row in second[0]] == [1.0, 0.0, 0.0]
