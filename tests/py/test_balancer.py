"""Online balancing: experts move while steps run, and results stay what they are without."""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenway as tw
from tokenway import balance
from tokenway.balance import board, rounds
from tokenway.balance.copies import Thinking
from tokenway.balance.given import slot_maps

EXPERTS, TOP_K, HIDDEN, TOKENS, LAYERS = 8, 2, 6, 24, 2
WEIGHTS = {"scale": ((HIDDEN,), "float32"), "shift": (3, "int16")}

pytestmark = [pytest.mark.needs("loads"), pytest.mark.needs("moving weights")]


# ---- from one map to another ---------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_rounds_come_to_an_end(seed: int) -> None:
    """Whatever maps, in which ranks may have fewer experts than wanted: each epoch fills spare slots alone, from slots
    in force, leaves each expert somewhere and enough slots spare, and the last one is what was wanted."""
    rng = np.random.default_rng(seed)
    ranks, used, spare = int(rng.integers(1, 7)), int(rng.integers(1, 6)), int(rng.integers(1, 3))
    experts = int(rng.integers(max(1, ranks * used // 3), ranks * used + 1))

    def drawn() -> np.ndarray:
        row = np.concatenate([np.arange(experts), rng.integers(0, experts, ranks * used - experts)])
        return rng.permutation(row).reshape(ranks, used)

    rank_of_slot = np.repeat(np.arange(ranks), used + spare)
    now = np.full(ranks * (used + spare), -1)
    now[np.tile(np.arange(used + spare) < used, ranks)] = drawn().ravel()
    for slot in rng.permutation(len(now)):
        if rng.random() < 0.3 and now[slot] >= 0 and (now == now[slot]).sum() > 1:
            now[slot] = -1
    wanted = drawn()
    for epoch in rounds.epochs(0, now, wanted, rank_of_slot):
        table = np.array(epoch.table)
        assert set(table[table >= 0]) == set(range(experts))
        left = [np.bincount(rank_of_slot[each < 0], minlength=ranks) for each in (now, table)]
        assert (left[1] >= spare).all() and (left[1] <= left[0]).all()
        for target, source in epoch.pulls:
            assert now[target] < 0 and now[source] == table[target]
        assert {p for p in range(len(now)) if table[p] not in (now[p], -1)} == {target for target, _ in epoch.pulls}
        now = table
    for rank in range(ranks):
        assert Counter(now[(rank_of_slot == rank) & (now >= 0)].tolist()) == Counter(wanted[rank].tolist())


def test_ranks_with_fewer_experts_are_filled() -> None:
    """With what is wanted most, a replica, and they lack; all if they have all."""
    table, of = np.array([3, -1, -1, 0, 1, 2, -1, -1, 3]), np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    used = rounds.used_map(table, of, 3, 3, np.array([5.0, 4.0, 1.0, 12.0]))
    assert used.tolist() == [3, 0, 1, 0, 1, 2, 3, 0, 1]
    assert rounds.used_map(np.array([0, -1, 1]), np.array([0, 0, 0]), 1, 3, np.ones(2)).tolist() == [0, 1, 0]
    without = rounds.used_map(table, of, 3, 3, None)
    assert without.tolist() == [3, -1, -1, 0, 1, 2, 3, -1, -1]
    maps = slot_maps(without[None], 4)
    assert maps.logical_to_physical.tolist() == [[[3, -1], [4, -1], [5, -1], [0, 6]]]
    assert maps.logical_count.tolist() == [[1, 1, 1, 2]]


# ---- in a group ----------------------------------------------------------------------------------


def first_map(ranks: int, slots: int) -> np.ndarray:
    """[P]: experts in order, replicas of the first ones behind, a spare slot at the end of each rank."""
    table = np.full((ranks, slots), -1)
    table[:, :-1] = np.arange(ranks * (slots - 1)).reshape(ranks, -1) % EXPERTS
    return table.ravel()


def value_of(expert: int, layer: int) -> np.ndarray:
    """[H] float32: an expert's scale."""
    return (1.0 + expert + 16.0 * layer + np.arange(HIDDEN) / 8).astype(np.float32)


def choices(step: int, rank: int, layer: int) -> np.ndarray:
    """[T, K]: what tokens choose; which experts are hot changes with time."""
    rng = np.random.default_rng([step, rank, layer])
    tokens = (TOKENS, TOKENS - 5, 0, 7)[(rank + step) % 4]
    hot = (np.arange(EXPERTS) - step // 40 - layer) % EXPERTS
    odds = np.where(hot < 2, 12.0, 1.0)
    ids = np.argsort(rng.random((tokens, EXPERTS)) ** (1 / odds), axis=1)[:, : -TOP_K - 1 : -1].astype(np.int32)
    return np.where(rng.random(ids.shape) < 0.1, -1, ids).astype(np.int32)


def layer_of(
    env: Any,
    group: tw.Group,
    weights: balance.Weights,
    step: int,
    layer: int,
    kept: Any = None,
    keep: bool = False,
    lane: int | None = None,
) -> Any:
    """A layer: each expert scales its rows by its own weights, read where they are. kept: a handle of the same step,
    to be used again. Gives the handle, which lives if it is to be kept."""
    backend = env.backend
    ids = choices(step, env.rank, layer)
    rng = np.random.default_rng([step, env.rank, 9])
    tokens = rng.standard_normal((len(ids), HIDDEN)).astype(np.float32)
    chosen = np.full(ids.shape, 0.5, np.float32)
    handle = kept or group.route(backend.tensor(ids), layer=layer)
    received = group.dispatch(handle, backend.tensor(tokens), layout="expert_major", lane=lane)
    rows, scale = backend.array(received.tokens), backend.array(weights.tensor("scale", layer))
    with np.errstate(all="ignore"):  # of rows that nobody sent
        made = rows * scale[:, None, :]
    out = group.combine(handle, backend.tensor(np.ascontiguousarray(made)), weights=backend.tensor(chosen))
    found: np.ndarray = backend.array(out).copy()
    if not keep:
        handle.release()
    # The sum of an owner, k ascending, in float32: the same bits wherever experts are.
    want = np.zeros_like(tokens)
    begun = np.zeros(len(tokens), bool)
    for k in range(TOP_K):
        there = ids[:, k] >= 0
        each = np.stack([value_of(e, layer) for e in ids[:, k]]) if len(ids) else np.zeros((0, HIDDEN), np.float32)
        term = (tokens * each) * np.float32(0.5)
        want = np.where(there[:, None], np.where(begun[:, None], want + term, term), want)
        begun |= there
    np.testing.assert_array_equal(found.view(np.uint32), want.astype(np.float32).view(np.uint32), f"step {step}")
    return handle


def make(env: Any, slots: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    ranks = env.comm.nranks
    size = balance.weight_bytes(WEIGHTS, layers=LAYERS, slots=slots, ranks=ranks)
    table = np.tile(first_map(ranks, slots), (LAYERS, 1))
    placement = tw.Placement(table, count_loads=True, load_decay=0.9, moves=True, weight_bytes=size)
    shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
    return placement, shape | {"combine_dtype": "float32", "combine_rows": "per_expert"} | more


def fill(env: Any, group: tw.Group, weights: balance.Weights) -> None:
    """Each rank's slots with what the maps say, spare ones with what nobody may use."""
    for layer in range(LAYERS):
        mine = group.expert_of_slot(layer)[weights.rank_of_slot == env.rank]
        rows = np.stack([value_of(e, layer) if e >= 0 else np.full(HIDDEN, np.nan, np.float32) for e in mine])
        weights.tensor("scale", layer)[:] = env.backend.tensor(rows.astype(np.float32))


def await_thoughts(env: Any, balancer: balance.Balancer) -> None:
    """However busy the machine is: what is planned is there in the next step, and where a plan travels in a message,
    that is. Copies may still be under way. Collective."""
    Thinking.wait(balancer._beside)  # type: ignore[arg-type]
    if balancer.weights.messages is None:
        return
    told = env.backend.tensor(np.array([[balancer._told]], np.float32))
    number = env.backend.array(balancer.group.all_gatherv(told, bound=1).rows)[0, 0]
    while env.rank != 0 and number > 0:
        board = balancer._beside.read_board(0)
        if board is not None and np.frombuffer(board, np.int64, 2)[1] >= number:
            return
        time.sleep(0.001)


def balanced(
    env: Any, steps: int, lanes: int, late: int | None, hold: int = 0, more: dict[str, int] | None = None
) -> Any:
    """Runs a model whose experts move. Gives what it came to. hold: so many steps use a handle of the first one too."""
    slots = -(-EXPERTS // env.comm.nranks) + 2
    placement, made = make(env, slots, lanes=lanes)
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        weights = balance.Weights(group, WEIGHTS)
        fill(env, group, weights)
        imbalances = []
        kept = None
        with balance.Balancer(group, weights, **({"every": 12, "gain": 0.0} | (more or {}))) as balancer:
            for step in range(steps):
                if step < hold:
                    kept = layer_of(env, group, weights, 0, 0, kept, keep=True)
                else:
                    kept = None  # its end: what it used may be filled again
                for layer in range(LAYERS):
                    layer_of(env, group, weights, step, layer)
                await_thoughts(env, balancer)
                if late != env.rank or step % 3 == 0:
                    balancer.step()
                imbalances.append(imbalance(group, balancer, step))
            for step in range(steps, steps + 48):  # what is open comes to its end
                balancer.paused = True
                await_thoughts(env, balancer)
                balancer.wait()
                balancer.step()
                for layer in range(LAYERS):
                    layer_of(env, group, weights, step, layer)
            assert balancer.idle
            tables = [balancer.table(layer).tolist() for layer in range(LAYERS)]
            return balancer.statistics, tables, imbalances


def imbalance(group: tw.Group, balancer: balance.Balancer, step: int) -> float:
    """Of layer 0 under the map that this rank goes by, of what all ranks choose in a step."""
    ranks = group.nranks
    ids = np.concatenate([choices(step, rank, 0).ravel() for rank in range(ranks)])
    counts = np.bincount(ids[ids >= 0], minlength=EXPERTS)
    table = balancer.table(0)
    held = np.bincount(table[table >= 0], minlength=EXPERTS)
    carried = np.zeros(ranks)
    for slot, expert in enumerate(table):
        if expert >= 0:
            carried[balancer.weights.rank_of_slot[slot]] += counts[expert] / held[expert]
    return float(carried.max() / max(carried.mean(), 1e-9) - 1)


@pytest.mark.parametrize(("lanes", "late"), [(1, None), (2, 1)])
def test_experts_move(world, lanes, late) -> None:
    """Bits as without moves, whatever moves when; all ranks end with the same maps."""
    found = world(min(3, world.most)).run(balanced, 72, lanes, late)
    statistics, tables, _ = found[0]
    for other, those, _ in found:
        assert those == tables and other.plans == statistics.plans and other.epochs == statistics.epochs
    assert statistics.plans >= 2 and statistics.voids == 0
    assert sum(each.moves for each, _, _ in found) > 0


def test_small_pieces(world) -> None:
    """A move takes several steps where few bytes may be copied in one."""
    found = world(min(2, world.most)).run(balanced, 36, 1, None, 0, {"step_bytes": 8})
    assert sum(each.moves for each, _, _ in found) > 0


def broken(env: Any) -> Any:
    """Rank 1's copies fail now and then."""
    if env.rank == 1:
        count = iter(range(10**6))
        pull = balance.Weights.pull

        def fails(self: Any, piece: Any, stream: int) -> None:
            if self.group.rank == 1 and next(count) % 3 == 1:
                raise tw.InvalidUsage("a copy that fails")
            pull(self, piece, stream)

        balance.Weights.pull, kept = fails, pull  # type: ignore[method-assign]
        try:
            return balanced(env, 72, 1, None, 0, {"writes": 8})
        finally:
            balance.Weights.pull = kept  # type: ignore[method-assign]
    return balanced(env, 72, 1, None, 0, {"writes": 8})


def slow(env: Any) -> Any:
    """Rank 1's copies take longer than a step."""
    if env.rank != 1:
        return balanced(env, 72, 1, None)
    pull = balance.Weights.pull

    def slowly(self: Any, piece: Any, stream: int) -> None:
        if self.group.rank == 1:
            time.sleep(0.004)
        pull(self, piece, stream)

    balance.Weights.pull = slowly  # type: ignore[method-assign]
    try:
        return balanced(env, 72, 1, None)
    finally:
        balance.Weights.pull = pull  # type: ignore[method-assign]


def test_slow_copies(world) -> None:
    """Nobody goes by a map whose weights are still on their way."""
    found = world(min(2, world.most)).run(slow)
    assert found[0][0].plans > 0 and found[0][1] == found[1][1]


def test_a_handle_of_an_older_map(world) -> None:
    """Its slots stay as they are while it lives."""
    found = world(min(3, world.most)).run(balanced, 72, 1, None, 48)
    assert found[0][0].plans >= 2 and sum(each.moves for each, _, _ in found) > 0


def test_a_board_that_is_half_written() -> None:
    wanted, shape = np.arange(12).reshape(2, 6), (2, -1)
    whole = board.written(3, wanted) + bytes(64)
    np.testing.assert_array_equal(board.read(whole, 3, shape), wanted)
    assert board.read(whole, 2, shape) is None and board.read(bytes(256), 0, shape) is None
    other = board.written(3, wanted[::-1]) + bytes(64)
    for cut in range(1, len(whole) - 64):
        torn = other[:cut] + whole[cut:]
        if torn not in (whole, other):
            assert board.read(torn, 3, shape) is None, cut


@pytest.mark.parametrize("every", [1, 2])
def test_a_plan_whenever_there_may_be_one(world, every) -> None:
    """No plan is told before all follow the last one, however often rank 0 plans."""
    found = world(min(2, world.most)).run(eager, every)
    assert found[0][0].plans == found[1][0].plans > 2 and found[0][1] == found[1][1]


def eager(env: Any, every: int) -> Any:
    return balanced(env, 60, 1, None, more={"every": every})


@pytest.mark.processes
def test_failed_copies(world) -> None:
    """A copy that fails leaves the layer as it was, on all ranks; the rest moves on."""
    found = world(min(2, world.most)).run(broken)
    assert found[0][0].voids == found[1][0].voids > 0
    assert found[0][1] == found[1][1]


def test_the_log(world, caplog) -> None:
    with caplog.at_level(logging.INFO, "tokenway.balance"):
        world(min(2, world.most)).run(balanced, 40, 1, None)
    said = [record.getMessage() for record in caplog.records]
    assert not said or any("experts move" in line for line in said)


def plans_from_elsewhere(ranks: int) -> list[np.ndarray]:
    """[layers, slots in use] each: as DeepSeek's function gives them, and one with all experts elsewhere."""
    loads = balance.lognormal(LAYERS, EXPERTS, 0.9, seed=3)
    places = ranks * (-(-EXPERTS // ranks) + 1)
    made, _, _ = balance.rebalance_experts(loads, places, 1, 1, ranks)
    return [made, made[::-1], np.roll(made, places // 2, axis=1)]


def followed(env: Any) -> Any:
    """Gives the maps after each plan, what was counted, and what was refused."""
    ranks = env.comm.nranks
    placement, made = make(env, -(-EXPERTS // ranks) + 2)
    found: list[Any] = []
    plans = plans_from_elsewhere(ranks)
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        weights = balance.Weights(group, WEIGHTS)
        fill(env, group, weights)
        with balance.Balancer(group, weights, every=None) as balancer:
            found.append(balancer.slot_maps())
            for turn, plan in enumerate(plans):
                balancer.follow(plans[0])  # which none has been told yet: the next one takes its place
                balancer.follow(plan)
                for step in range(turn * 72, turn * 72 + 72):
                    for layer in range(LAYERS):
                        layer_of(env, group, weights, step, layer)
                    balancer.wait()
                    balancer.step()
                assert balancer.idle
                found.append(balancer.slot_maps())
            missing = np.where(plan == 3, 4, plan)
            lacking = [harness.caught(balancer.follow, each) for each in (plan[:, 1:], plan - 1, missing, plan * 0.5)]
            return found, balancer.statistics, lacking


def test_plans_from_elsewhere(world) -> None:
    """Ranks come to have what rank 0 was given, without a plan of their own, and results stay what they are."""
    size = min(3, world.most)
    ranks = world(size).run(followed)
    plans = [first_map(size, -(-EXPERTS // size) + 2).tolist()] * LAYERS
    wanted = [np.array([[e for e in row if e >= 0] for row in plans]), *plans_from_elsewhere(size)]
    for maps, statistics, _ in ranks:
        assert statistics.plans == 3 and statistics.voids == 0
        for want, (placed, slots, counts) in zip(wanted, maps, strict=True):
            by_rank = (np.sort(each.reshape(LAYERS, size, -1)) for each in (placed, want))
            np.testing.assert_array_equal(*by_rank)
            for layer in range(LAYERS):
                for expert in range(EXPERTS):
                    held = np.flatnonzero(placed[layer] == expert).tolist()
                    assert slots[layer, expert, : counts[layer, expert]].tolist() == held
                    assert (slots[layer, expert, counts[layer, expert] :] == -1).all()
    first, *others = [refusals for _, _, refusals in ranks]
    for outcome, pattern in zip(
        first,
        (
            r"physical_to_logical has shape \[2, \d+\]; it must be \[layers, slots in use of all ranks\], \[2, \d+\]",
            r"physical_to_logical\[\d, \d+\] is -1; it must be from 0 to 7",
            r"physical_to_logical\[0\] has no slot for expert 3; it must have one for each",
            "physical_to_logical has dtype float64; it must hold 32-bit integers",
        ),
        strict=True,
    ):
        harness.said(outcome, "twInvalidArgument", pattern)
    assert all(outcome == ("twSuccess", "", None) for refusals in others for outcome in refusals), others


def refused(env: Any) -> list[Any]:
    placement, made = make(env, -(-EXPERTS // env.comm.nranks) + 2)
    found = []
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        found.append(harness.caught(balance.Weights, group, {}))
        found.append(harness.caught(balance.Weights, group, {"a": ((1 << 20,), "float32")}))
        weights = balance.Weights(group, WEIGHTS)
        found.append(harness.caught(weights.tensor, "none"))
        found.append(harness.caught(weights.tensor, "scale", 2))
        found.append(harness.caught(balance.Balancer, group, weights, every=0))
        found.append(harness.caught(weights.pull, (0, 1 << 40, 0, 8), 0))
        found.append(harness.caught(weights.pull, (group.nranks, 0, 0, 8), 0))
    full = tw.Placement(np.arange(EXPERTS), count_loads=True, moves=True, weight_bytes=placement.weight_bytes)
    with env.context(), tw.Group(env.comm, **made, expert_map=full) as group:
        weights = balance.Weights(group, {"scale": (2, "float32")})
        found.append(harness.caught(balance.Balancer, group, weights))
    without = tw.Placement(np.arange(EXPERTS), count_loads=True, moves=True)
    with env.context(), tw.Group(env.comm, **made, expert_map=without) as group:
        found.append(harness.caught(balance.Weights, group, WEIGHTS))
    return found


@pytest.mark.parametrize("told", [((4, "a"), "float32"), ("float32",), 3, (None, "float32")])
def test_shapes_that_are_none(told) -> None:
    """What cannot be read is refused as what is wrong, so that ranks which meet for weights tell each other of it."""
    with pytest.raises(tw.InvalidArgument, match=r"weights\['w'\] is .*; it must be \(shape, dtype\)"):
        balance.weight_bytes({"w": told}, layers=1, slots=2, ranks=2)


def test_refused(world) -> None:
    for found in world(min(2, world.most)).run(refused):
        outcomes = iter(found)
        for result, pattern in (
            ("twInvalidArgument", "weights is empty; it must name the tensors of an expert"),
            ("twInvalidArgument", r"group has \d+ bytes of weights; these need \d+"),
            ("twInvalidArgument", r"name is 'none'; it must be one of \['scale', 'shift'\]"),
            ("twInvalidArgument", "layer is 2; it must be from 0 to 1"),
            ("twInvalidArgument", "every is 0; it must be an integer, at least 1"),
            ("twInvalidArgument", r"from is \d+, and bytes 8; both together must be from 0 to \d+"),
            ("twInvalidArgument", r"rank is 2; it must be from 0 to 1"),
            ("twInvalidArgument", "group has maps that use"),
            ("twInvalidUsage", "the group has no memory for weights: placement.weight_bytes is 0"),
        ):
            harness.said(next(outcomes), result, pattern)
        assert next(outcomes, None) is None


# ---- the guide's loop ----------------------------------------------------------------------------


def serve_in_threads(serve: Any) -> None:
    """The guide's other loop: experts move while it runs."""
    hot = balance.lognormal(4, 16, 0.75, 0)

    def of_rank(comm: tw.Comm) -> Any:
        rng = np.random.default_rng(comm.rank)

        def choose(step: int, layer: int) -> tuple[Any, Any]:
            scores = rng.gumbel(size=(32, 16)) + np.log(hot[layer + 2 * (step >= 32)])
            return np.ones((32, 64), np.float32), np.argsort(-scores)[:, :2].astype(np.int32)

        return serve(comm, choose, lambda layer, expert: np.full(64, layer + expert, np.float32))

    comms = tw.local_comms(4)
    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(of_rank, comms))
    for comm in comms:
        comm.close()
    assert ranks[0][0].plans > 0 and sum(statistics.moves for statistics, _ in ranks) > 0
