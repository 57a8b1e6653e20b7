"""Experts that are trained while they have replicas and move: bit for bit as in one process without either.

Experts here scale their rows, and all that is summed are multiples of a half, so that float32 sums them exactly in
whatever order. An optimiser's step is elementwise. So nothing but a mistake makes bits differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

import tokenway as tw
from tokenway import balance
from tokenway.balance import replicas
from tokenway.tensors import numpy_dtype

EXPERTS, TOP_K, HIDDEN, TOKENS, LAYERS = 8, 2, 5, 24, 2
TENSORS = balance.trained({"scale": ((HIDDEN,), "float32"), "unused": (3, "float32")}, ("mean", "square"))

pytestmark = pytest.mark.needs("memory in common")


# ---- one process, no replicas ----------------------------------------------------------------------


def adam(weights: np.ndarray, mean: np.ndarray, square: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, ...]:
    """A step, elementwise: (weights, mean, square)."""
    f = np.float32
    mean = mean * f(0.9) + gradient * f(0.1)
    square = square * f(0.95) + gradient * gradient * f(0.05)
    return weights - f(0.01) * mean / (np.sqrt(square) + f(1e-6)), mean, square


class Whole:
    """All experts in one process: what training must come to. scale, mean, square: [layers, E, H] float32."""

    def __init__(self) -> None:
        at = np.arange(LAYERS * EXPERTS * HIDDEN, dtype=np.float32).reshape(LAYERS, EXPERTS, HIDDEN)
        self.scale, self.mean, self.square = 1 + at / 64, np.zeros_like(at), np.zeros_like(at)

    def gradient(self, step: int, ranks: int, layer: int) -> np.ndarray:
        """[E, H]: the sum over the tokens of all ranks."""
        total = np.zeros((EXPERTS, HIDDEN))
        for rank in range(ranks):
            ids, tokens, towards = batch(step, rank, layer)
            for k in range(TOP_K):
                there = ids[:, k] >= 0
                np.add.at(total, ids[there, k], 0.5 * (tokens * towards)[there])
        return total.astype(np.float32)

    def step(self, step: int, ranks: int) -> None:
        for layer in range(LAYERS):
            of = self.gradient(step, ranks, layer)
            made = adam(self.scale[layer], self.mean[layer], self.square[layer], of)
            self.scale[layer], self.mean[layer], self.square[layer] = made


def batch(step: int, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a rank's tokens choose [T, K], the tokens, and the gradients of their results: [T, H], integers. Some ranks
    have none; which experts are hot changes with time."""
    rng = np.random.default_rng([step, rank, layer])
    count = (TOKENS, TOKENS - 5, 0, 7)[(rank + step) % 4]
    hot = (np.arange(EXPERTS) - step // 6 - layer) % EXPERTS
    ids = np.argsort(rng.random((count, EXPERTS)) ** (1 / np.where(hot < 2, 12.0, 1.0)), axis=1)[:, : -TOP_K - 1 : -1]
    ids = np.where(rng.random(ids.shape) < 0.1, -1, ids)
    tokens, towards = (rng.integers(-4, 5, (count, HIDDEN)).astype(np.float32) for _ in range(2))
    return ids.astype(np.int32), tokens, towards


# ---- on ranks --------------------------------------------------------------------------------------


def first_map(ranks: int, slots: int) -> np.ndarray:
    """[P]: experts in order, replicas of the first ones behind, a spare slot at the end of each rank."""
    table = np.full((ranks, slots), -1)
    table[:, :-1] = np.arange(ranks * (slots - 1)).reshape(ranks, -1) % EXPERTS
    return table.ravel()


def make_group(env: Any, table: np.ndarray, tensors: dict[str, Any], moves: bool = True, **more: Any) -> tw.Group:
    """Of a map [P], for all layers."""
    ranks = env.comm.nranks
    room = balance.weight_bytes(tensors, layers=LAYERS, slots=-(-len(table) // ranks), ranks=ranks)
    tables = np.tile(table, (LAYERS, 1))
    placement = tw.Placement(tables, count_loads=moves, load_decay=0.8, moves=moves, weight_bytes=room)
    shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
    shape |= {"combine_dtype": "float32", "combine_rows": "per_expert"}
    return tw.Group(env.comm, **shape | more, expert_map=placement)


def write(env: Any, tensor: Any, values: np.ndarray) -> None:
    tensor[:] = env.backend.tensor(np.ascontiguousarray(values))


def mine(group: tw.Group, weights: balance.Weights, layer: int) -> np.ndarray:
    """[local slots]: the expert in each of this rank's slots."""
    return group.expert_of_slot(layer)[weights.rank_of_slot == group.rank]


def fill(env: Any, group: tw.Group, weights: balance.Weights, whole: Whole) -> None:
    """Slots with what the maps say, those without an expert with what nobody may use."""
    for layer in range(LAYERS):
        here = mine(group, weights, layer)
        values = np.where(here[:, None] >= 0, whole.scale[layer][here], np.nan)
        write(env, weights.tensor("scale", layer), values.astype(np.float32))


def by_slot(env: Any, came: Any, exact: bool) -> list[slice]:
    """Where each local slot's rows are in what came: of expert_major in its own places, of grouped in the rows."""
    if exact:
        ends = env.backend.array(came.offsets).tolist()
        return [slice(*pair) for pair in pairwise(ends)]
    return [slice(0, count) for count in env.backend.array(came.counts).tolist()]


def learn(env: Any, group: tw.Group, weights: balance.Weights, step: int, layer: int) -> np.ndarray:
    """A layer forward and backward: leaves the gradients of this rank's slots. Gives the results [T, H]."""
    backend = env.backend
    ids, tokens, towards = batch(step, env.rank, layer)
    layout = "grouped" if group.exact else "expert_major"
    handle = group.route(backend.tensor(ids.astype(numpy_dtype(group.id_dtype))), layer=layer)
    if group.exact:
        group.exchange_counts(handle)
    came = group.dispatch(handle, backend.tensor(tokens), layout=layout)
    places, rows = by_slot(env, came, group.exact), backend.array(came.tokens)
    scale = backend.array(weights.tensor("scale", layer))
    made = np.zeros_like(rows)
    for slot, at in enumerate(places):
        into, given = (made, rows) if group.exact else (made[slot], rows[slot])
        into[at] = given[at] * scale[slot]
    halves = backend.tensor(np.full(ids.shape, 0.5, np.float32))
    out: np.ndarray = backend.array(group.combine(handle, backend.tensor(made), weights=halves)).copy()
    if group.exact:
        handle.release()
    back = group.dispatch(handle, backend.tensor(towards), layout=layout, count=False)
    gradients = backend.array(back.tokens)
    handle.release()
    found = np.zeros_like(scale)
    for slot, at in enumerate(places):
        x, g = (rows, gradients) if group.exact else (rows[slot], gradients[slot])
        found[slot] = 0.5 * (x[at] * g[at]).sum(axis=0)
    write(env, weights.tensor("scale.grad", layer), found)
    return out


def optimise(env: Any, weights: balance.Weights, layer: int) -> None:
    """All slots of this rank, as an optimiser that knows nothing of slots."""
    names = ("scale", "scale.mean", "scale.square", "scale.grad")
    kept = [weights.tensor(name, layer) for name in names]
    with np.errstate(all="ignore"):  # of slots without an expert
        made = adam(*(env.backend.array(tensor) for tensor in kept))
    for tensor, values in zip(kept, made, strict=False):
        write(env, tensor, values)


def same(got: Any, want: Any, what: str) -> None:
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32), what)


def check_results(out: np.ndarray, whole: Whole, step: int, rank: int, layer: int) -> None:
    """The sum of the owner, k ascending, in float32."""
    ids, tokens, _ = batch(step, rank, layer)
    want, begun = np.zeros_like(tokens), np.zeros(len(tokens), bool)
    for k in range(TOP_K):
        there = ids[:, k] >= 0
        term = tokens * whole.scale[layer][ids[:, k]] * np.float32(0.5)
        want = np.where(there[:, None], np.where(begun[:, None], want + term, term), want)
        begun |= there
    same(out, want.astype(np.float32), f"results of step {step}")


def check_experts(env: Any, group: tw.Group, weights: balance.Weights, whole: Whole, step: int) -> None:
    """Weights in all slots, states in those that lead."""
    for layer in range(LAYERS):
        table = group.expert_of_slot(layer)
        leading = set(replicas.leads(table).values())
        for slot in np.flatnonzero((weights.rank_of_slot == env.rank) & (table >= 0)):
            place, expert = weights.place_of_slot[slot], table[slot]
            names = ("scale", "mean", "square") if slot in leading else ("scale",)
            for name in names:
                tensor = weights.tensor("scale" if name == "scale" else f"scale.{name}", layer)
                got, want = env.backend.array(tensor)[place], getattr(whole, name)[layer][expert]
                same(got, want, f"{name} of slot {slot} behind step {step}")


def check_gradients(env: Any, group: tw.Group, weights: balance.Weights, whole: Whole, step: int) -> None:
    """The sum of all ranks where a slot leads, else 0."""
    for layer in range(LAYERS):
        table, of = group.expert_of_slot(layer), whole.gradient(step, env.comm.nranks, layer)
        leading = set(replicas.leads(table).values())
        gradients = env.backend.array(weights.tensor("scale.grad", layer))
        for slot in np.flatnonzero(weights.rank_of_slot == env.rank):
            want = of[table[slot]] if slot in leading else np.zeros(HIDDEN, np.float32)
            np.testing.assert_array_equal(gradients[weights.place_of_slot[slot]], want, f"gradient of slot {slot}")


def trained(env: Any, steps: int, more: dict[str, Any], options: dict[str, Any], beside: Any = None) -> Any:
    """Trains with experts that move. Gives (statistics, maps, how often the slot that leads an expert has changed).
    beside: called with the balancer and the number of each step, before it."""
    whole, ranks, changed = Whole(), env.comm.nranks, 0
    with env.context(), make_group(env, first_map(ranks, -(-EXPERTS // ranks) + 3), TENSORS, **more) as group:
        weights = balance.Weights(group, TENSORS)
        fill(env, group, weights, whole)
        with balance.TrainingBalancer(group, weights, **{"every": 5, "gain": 0.0} | options) as balancer:
            before = [group.expert_of_slot(layer) for layer in range(LAYERS)]
            for step in range(steps):
                for layer in range(LAYERS):
                    check_results(learn(env, group, weights, step, layer), whole, step, env.rank, layer)
                balancer.replicas.sum_gradients()
                check_gradients(env, group, weights, whole, step)
                for layer in range(LAYERS):
                    optimise(env, weights, layer)
                if beside is not None:
                    beside(balancer, step)
                balancer.step()
                whole.step(step, ranks)
                check_experts(env, group, weights, whole, step)
                after = [group.expert_of_slot(layer) for layer in range(LAYERS)]
                changed += sum(len(replicas.led_anew(*pair)) for pair in zip(before, after, strict=True))
                before = after
                for layer in range(LAYERS):
                    np.testing.assert_array_equal(after[layer], balancer.table(layer))
            return balancer.statistics, [table.tolist() for table in before], changed


def all_alike(found: list[Any]) -> Any:
    """What all ranks say."""
    statistics, tables, changed = found[0]
    for other, those, times in found:
        assert those == tables and times == changed
        assert (other.plans, other.epochs, other.voids) == (statistics.plans, statistics.epochs, statistics.voids)
    return statistics, tables, changed


@pytest.mark.parametrize("more", [{}, {"lanes": 2, "id_dtype": "int64"}, {"mode": "high_throughput"}], ids=str)
def test_as_in_one_process(world, more) -> None:
    """Results, gradients, weights and states, whatever moves when."""
    found = world(min(3, world.most)).run(trained, 18, more, {"every": 4})
    statistics, _, changed = all_alike(found)
    assert statistics.plans >= 3 and statistics.voids == 0 and changed > 0
    assert sum(each.moves for each, _, _ in found) > 0


@pytest.mark.parametrize("every", [1, 2])
def test_a_plan_in_each_step(world, every) -> None:
    found = world(min(2, world.most)).run(trained, 12, {}, {"every": every})
    assert all_alike(found)[0].plans > 3


def test_few_bytes(world) -> None:
    """A plan of several epochs takes several steps, and each of them leaves all as it should be."""
    found = world(min(3, world.most)).run(trained, 20, {}, {"step_bytes": 1, "writes": 12})
    statistics, _, changed = all_alike(found)
    assert statistics.epochs > statistics.plans and statistics.switch_steps > 0 and changed > 0


def test_paused(world) -> None:
    """On rank 0, which is who plans."""
    found = world(min(2, world.most)).run(trained, 8, {}, {"paused": True})
    statistics, tables, _ = all_alike(found)
    assert statistics.plans == 0 and tables == [first_map(len(found), EXPERTS // len(found) + 3).tolist()] * LAYERS


def broken(env: Any) -> Any:
    """Rank 1's copies for moves fail now and then."""
    if env.rank != 1:
        return trained(env, 24, {}, {"writes": 12})
    with pytest.MonkeyPatch.context() as patch:
        bring, pull, turn = balance.TrainingBalancer._bring, balance.Weights.pull, iter(range(10**6))
        fails: list[bool] = []

        def brings(self: Any, epoch: Any) -> Any:
            fails.append(next(turn) % 3 == 1)
            try:
                return bring(self, epoch)
            finally:
                fails.pop()

        def pulls(self: Any, piece: Any, stream: int) -> None:
            if fails and fails[-1]:
                raise tw.InvalidUsage("a copy that fails")
            pull(self, piece, stream)

        patch.setattr(balance.TrainingBalancer, "_bring", brings)
        patch.setattr(balance.Weights, "pull", pulls)
        return trained(env, 24, {}, {"writes": 12})


@pytest.mark.processes
def test_failed_copies(world) -> None:
    """Layers whose copies fail keep their maps, and all goes on."""
    statistics, _, _ = all_alike(world(min(2, world.most)).run(broken))
    assert statistics.voids > 0 and statistics.epochs > statistics.voids


# ---- sums ------------------------------------------------------------------------------------------


def drawn(layer: int, slot: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A slot's gradient: of which no two sums in different orders are alike."""
    rng = np.random.default_rng([layer, slot, *shape])
    scale = 10.0 ** rng.integers(-3, 4, shape)
    values: np.ndarray = (rng.standard_normal(shape) * scale).astype(numpy_dtype(dtype))
    return values


def maps_of(ranks: int) -> np.ndarray:
    """[P]: expert 0 on one rank three times and on others, 1 in one slot, 2 on all ranks, others somewhere; rank 0 with
    two slots that are empty, in the midst."""
    rows = [[0, -1, 0, 2, -1, 0], [2, 3, 0, 4, 5, -1], [6, 2, -1, 7, 0, 1]]
    if ranks == 2:
        rows = [[0, -1, 0, 2, 0, 6, 7], [2, 3, 0, 4, 5, -1, 1]]
    if ranks == 1:
        rows = [[0, -1, 0, 2, 3, 0, 4, 5, 6, 7, 2, 1]]
    return np.array(rows).ravel()


def summed(env: Any, dtype: str, moves: bool) -> Any:
    """The gradients of this rank's slots before and behind the sum, by name and layer."""
    tensors = balance.trained({"a": ((3, 7), dtype), "b": (1, dtype)})
    shapes = {"a": (3, 7), "b": (1,)}
    with env.context(), make_group(env, maps_of(env.nranks), tensors, moves=moves) as group:
        weights = balance.Weights(group, tensors)
        found = {}
        for name, shape in shapes.items():
            for layer in range(LAYERS):
                own = np.flatnonzero(weights.rank_of_slot == env.rank)
                write(
                    env, weights.tensor(f"{name}.grad", layer), np.stack([drawn(layer, s, shape, dtype) for s in own])
                )
        both = balance.Replicas(weights)
        both.sum_gradients({("a", 0), ("a", 1), ("b", 1)})
        for name in shapes:
            for layer in range(LAYERS):
                found[name, layer] = env.backend.array(weights.tensor(f"{name}.grad", layer)).astype(np.float32)
        return found


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums(world, dtype, moves) -> None:
    """By slot, ascending, in float32, rounded once; what is not asked for stays."""
    ranks = min(3, world.most)
    by_rank = world(ranks).run(summed, dtype, moves)
    table = maps_of(ranks)
    for name, shape in (("a", (3, 7)), ("b", (1,))):
        for layer in range(LAYERS):
            got = np.concatenate([found[name, layer] for found in by_rank])
            for expert in range(EXPERTS):
                slots = np.flatnonzero(table == expert)
                terms = [drawn(layer, slot, shape, dtype) for slot in slots]
                want = terms[0].astype(np.float32)
                for term in terms[1:]:
                    want = want + term.astype(np.float32)
                want = want.astype(numpy_dtype(dtype)).astype(np.float32)
                if (name, layer) == ("b", 0):
                    same(got[slots], np.stack(terms).astype(np.float32), "nobody asked")
                    continue
                same(got[slots[0]], want, f"{name} of expert {expert}")
                assert not got[slots[1:]].any()
    assert len(np.flatnonzero(table == 0)) > 3, "sums of several terms, some of one rank"


def spread(env: Any) -> Any:
    """What the slots of a static map have behind a step, where each slot has become something of its own."""
    tensors = balance.trained({"a": ((3, 7), "bfloat16"), "b": (1, "float32")}, ["kept"])
    with env.context(), make_group(env, maps_of(env.nranks), tensors, moves=False) as group:
        weights = balance.Weights(group, tensors)
        own = np.flatnonzero(weights.rank_of_slot == env.rank)
        for name, (_, dtype) in weights.layout.tensors.items():
            tensor = weights.tensor(name)
            values = np.broadcast_to(own.reshape(-1, *(1,) * (tensor.ndim - 1)), tuple(tensor.shape))
            write(env, tensor, values.astype(numpy_dtype(dtype)))
        balance.Replicas(weights).spread()
        balance.Replicas(weights).meet()
        return {
            name: env.backend.array(weights.tensor(name)).astype(float).reshape(len(own), -1)[:, 0] for name in tensors
        }


def test_weights_of_who_leads(world) -> None:
    """Go to all slots; states and gradients stay, and spare slots are left alone."""
    ranks = min(3, world.most)
    by_rank = world(ranks).run(spread)
    table = maps_of(ranks)
    leading = replicas.leads(table)
    for name in by_rank[0]:
        got = np.concatenate([found[name] for found in by_rank])
        moves = "." not in name
        want = [leading[e] if e >= 0 and moves else slot for slot, e in enumerate(table.tolist())]
        assert got.tolist() == want, name


# ---- what leads ------------------------------------------------------------------------------------


def test_leads() -> None:
    now, following = np.array([2, -1, 0, 1, 0, 2, -1]), np.array([-1, 1, 0, -1, 0, 2, 2])
    assert replicas.leads(now) == {0: 2, 1: 3, 2: 0}
    assert replicas.replicated(now) == [(2, 4), (0, 5)]
    assert sorted(replicas.led_anew(now, following)) == [(1, 3), (5, 0)]
    assert replicas.replicated(np.array([1, 0, -1])) == []


# ---- the guide's loop ------------------------------------------------------------------------------


@pytest.mark.torch
def test_the_guide(torch) -> None:
    """The program of docs/BALANCING.md that trains, as it stands there: losses fall, while experts move."""
    text = (Path(__file__).parents[2] / "docs" / "BALANCING.md").read_text()
    (program,) = (found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import torch" in found)
    names: dict[str, Any] = {"np": np, "tw": tw, "balance": balance}
    exec(program, names)

    def of_rank(comm: tw.Comm) -> Any:
        rng = np.random.default_rng(7)
        leaning, turned = rng.standard_normal(16), rng.standard_normal((16, 16)) / 4

        def batch_of(step: int) -> tuple[Any, Any]:
            x = np.random.default_rng([step, comm.rank]).standard_normal((2, 8, 16)) + leaning
            return torch.from_numpy(x).float(), torch.from_numpy(x @ turned).float()

        return names["fit"](comm, batch_of)

    comms = tw.local_comms(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(of_rank, comms))
    for comm in comms:
        comm.close()
    losses = np.sum([losses for losses, _ in ranks], axis=0)
    assert losses[-10:].mean() < 0.5 * losses[:5].mean(), losses
    assert ranks[0][1].plans > 0 and sum(statistics.moves for _, statistics in ranks) > 0


# ---- what is refused -------------------------------------------------------------------------------


class Raises:
    """Names that cannot be looked into."""

    def __contains__(self, name: object) -> bool:
        raise tw.InvalidArgument("names that raise")


def refused(env: Any) -> list[Any]:
    found: list[Any] = []
    say: Callable[..., None] = lambda *args, **kwargs: found.append(harness.caught(*args, **kwargs))  # noqa: E731
    vector = (2, "float32")
    say(balance.trained, {"a.b": vector})
    say(balance.trained, {"a": vector}, ["grad"])
    say(balance.trained, {"a": vector}, ["m", "m"])
    table = maps_of(env.nranks)
    with env.context(), make_group(env, table, TENSORS) as group:
        for tensors in (
            {"a": vector},
            {"a": vector, "a.grad": (3, "float32")},
            {"a": vector, "a.grad": vector, "b.m": vector},
        ):
            say(balance.Replicas, balance.Weights(group, tensors))
        both = balance.Replicas(balance.Weights(group, TENSORS))
        say(both.sum_gradients, Raises() if env.rank == 0 else None)
        both.sum_gradients()  # the group is as usable as before
        say(balance.TrainingBalancer, group, both.weights, every=0)
    full = np.where(table < 0, 3, table)
    with env.context(), make_group(env, full, TENSORS, moves=False) as group:
        say(balance.Replicas, balance.Weights(group, TENSORS))
    return found


def test_refused(world) -> None:
    for rank, found in enumerate(world(min(2, world.most)).run(refused)):
        outcomes = iter(found)
        for result, pattern in (
            ("twInvalidArgument", r"weights has 'a\.b'; names of weights must be without a dot"),
            ("twInvalidArgument", r"states has 'grad'; names must differ, from 'grad' too"),
            ("twInvalidArgument", r"states has 'm'; names must differ"),
            ("twInvalidArgument", r"weights has no 'a\.grad'; balance\.trained names tensors"),
            ("twInvalidArgument", r"weights has 'a\.grad' .*; a gradient must be of the shape and dtype"),
            ("twInvalidArgument", r"weights has 'b\.m', but no 'b'"),
            ("twInvalidArgument", "names that raise") if rank == 0 else ("twPeerRefused", "rank 0"),
            ("twInvalidArgument", "every is 0; it must be an integer, at least 1"),
            (
                "twInvalidArgument",
                r"group has a map of layer 0 with no slot of rank 0 empty \(-1\)",
            ),
        ):
            harness.said(next(outcomes), result, pattern)
        assert next(outcomes, None) is None
