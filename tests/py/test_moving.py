"""Maps that move: all ranks take over a layer's next map in the same dispatch, whenever each of them stages it and says
that it is ready; a rank that fails keeps the map for all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import Round, Setup, exchange_of, make_ids, make_payloads, same
from hypothesis import given
from hypothesis import strategies as st
from strategies import SETTINGS
from test_properties import THREADS
from test_replicas import OTHER, TABLE, setup_of

import tokenway as tw
from tokenway.reference import dispatch_flat, dispatch_rank_major

pytestmark = pytest.mark.needs("loads")

LAYOUT_OF = {"low_latency": "rank_major", "high_throughput": "flat", "auto": "rank_major"}
ROUTINGS = ("random", "holes", "one", "none", "few")


@dataclass(frozen=True)
class Plan:
    """What a group does: `dispatches` rounds, on lanes and for layers in turn; the epochs that all ranks stage."""

    setup: Setup
    layers: int
    dispatches: int
    epochs: tuple[tuple[int, tuple[int, ...]], ...]  # (layer, table)
    fails: frozenset[tuple[int, int]] = frozenset()  # (rank, epoch)
    refuses: frozenset[tuple[int, int]] = frozenset()  # (rank, dispatch)
    seed: int = 0
    # Of 8 times that a rank may stage or be ready, how often it does: none is so late that epochs end open.
    eager: int = 8

    def round(self, i: int) -> Round:
        tokens = tuple((5 * i + 3 * r) % (self.setup.max_tokens + 1) for r in range(self.setup.ranks))
        return Round(tokens, seed=self.seed + i, routing=ROUTINGS[i % 5])

    def lane(self, i: int) -> int:
        return i % self.setup.lanes

    def layer(self, i: int) -> int:
        return i // self.setup.lanes % self.layers


@dataclass
class Seen:
    """What a rank has seen of one dispatch."""

    ready: int  # the epoch up to which it was ready
    epochs: tw.Epochs  # before it
    failed: str = ""
    ids: Any = None
    rows: Any = None
    output: Any = None


@dataclass
class Told:
    seen: list[Seen] = field(default_factory=list)
    refused: int = 0  # stages that came too early
    arrived: bool = True  # what was told before a dispatch was there in it
    final: Any = None
    maps: Any = None


def progress(env: Any, group: tw.Group, plan: Plan, rng: np.random.Generator, told: Told, hurry: bool) -> None:
    """Stages and makes ready what it may, or, if it does not hurry, some of it; the next dispatch tells it."""
    epochs = group.moving.epochs()
    while epochs.staged < len(plan.epochs) and (hurry or rng.integers(8) < plan.eager):
        layer, table = plan.epochs[epochs.staged]
        try:
            assert group.moving.stage(table, layer) == epochs.staged + 1
        except tw.InvalidUsage as error:
            assert "open" in str(error)
            told.refused += 1
            break
        epochs = group.moving.epochs()
    while epochs.ready < epochs.staged and (hurry or rng.integers(8) < plan.eager):
        group.moving.ready(epochs.ready + 1, failed=(env.rank, epochs.ready + 1) in plan.fails)
        epochs = group.moving.epochs()
    told.arrived &= env.backend.arrive(env.comm)  # a device is told by copies, which no dispatch waits for


def play(env: Any, plan: Plan) -> Told:
    setup = plan.setup
    made: dict[str, Any] = setup.settings()
    tables = np.stack([TABLE] * plan.layers)
    made["expert_map"] = tw.Placement(tables, policy=setup.policy, count_loads=True, moves=True)
    rng = np.random.default_rng([plan.seed, env.rank])
    told = Told()
    with env.context(), tw.Group(env.comm, **made) as group:
        for i in range(plan.dispatches):
            progress(env, group, plan, rng, told, hurry=False)
            told.seen.append(pair(env, group, plan, i))
        # What is still open comes to its end: each lane has dispatches until it has all epochs.
        for i in range(plan.dispatches, plan.dispatches + 4 * (len(plan.epochs) + 1) * setup.lanes):
            progress(env, group, plan, rng, told, hurry=True)
            told.seen.append(pair(env, group, plan, i))
        told.final = group.moving.epochs()
        told.maps = [group.expert_of_slot(layer) for layer in range(plan.layers)]
    return told


def pair(env: Any, group: tw.Group, plan: Plan, i: int) -> Seen:
    """Routes, dispatches and combines as the plan says."""
    setup, backend, round_ = plan.setup, env.backend, plan.round(i)
    epochs = group.moving.epochs()
    seen = Seen(epochs.ready, epochs)
    ids, weights = make_ids(setup, round_, env.rank)
    handle = group.route(backend.tensor(ids), backend.tensor(weights), layer=plan.layer(i))
    tokens = make_payloads(setup, round_, env.rank)[0]
    bad = (env.rank, i) in plan.refuses
    try:
        if setup.exact:
            group.exchange_counts(handle, lane=plan.lane(i))
        given = np.zeros((len(tokens) + 1, setup.hidden), tokens.dtype) if bad else tokens
        received = group.dispatch(handle, backend.tensor(given), lane=plan.lane(i), layout=LAYOUT_OF[setup.mode])
        seen.ids, seen.rows = backend.array(received.ids), backend.array(received.tokens)
        seen.output = backend.array(group.combine(handle, backend.tensor(seen.rows)))
    except (tw.InvalidArgument, tw.PeerRefused) as error:
        seen.failed = type(error).__name__
    handle.release()
    return seen


def versions(plan: Plan, ranks: list[Told], lag: int) -> list[int]:
    """The version of each dispatch, by the rule: of what all ranks have told in the lane's dispatch `lag` before."""
    found: list[int] = []
    for i in range(len(ranks[0].seen)):
        earlier = [j for j in range(i) if plan.lane(j) == plan.lane(i)]
        if lag == 1:  # a host takes what was told where the dispatch went well
            earlier = [j for j in earlier if not any(told.seen[j].failed for told in ranks)]
        old = earlier[: len(earlier) + 1 - lag]
        found.append(min(told.seen[old[-1]].ready for told in ranks) if old else 0)
    return found


def judge(plan: Plan, ranks: list[Told], lag: int) -> None:
    void = {epoch for _, epoch in plan.fails}
    in_force = versions(plan, ranks, lag)
    if not all(told.arrived for told in ranks):  # then later ones may come into force, alike on all ranks
        latest, in_force = in_force, [told.epochs.lanes[plan.lane(i)] for i, told in enumerate(ranks[0].seen)]
        assert all(version <= most for version, most in zip(in_force, latest, strict=True))
    for i, version in enumerate(in_force):
        table = TABLE
        for epoch, (layer, new) in enumerate(plan.epochs[:version], 1):
            table = new if layer == plan.layer(i) and epoch not in void else table
        setup, round_ = replace(plan.setup, slot_expert=table), plan.round(i)
        refused = any((rank, i) in plan.refuses for rank in range(setup.ranks))
        if refused:
            assert {told.seen[i].failed for told in ranks} <= {"InvalidArgument", "PeerRefused"}
            continue
        exchange = exchange_of(setup, round_)
        payloads = [[make_payloads(setup, round_, r)[0] for r in range(setup.ranks)]]
        for rank, told in enumerate(ranks):
            seen = told.seen[i]
            assert not seen.failed, (i, rank, seen.failed)
            assert seen.epochs.lanes[plan.lane(i)] == version, (i, rank, seen.epochs, version)
            wanted = (dispatch_flat if setup.exact else dispatch_rank_major)(exchange, rank, payloads)
            same(f"ids of dispatch {i}", seen.ids, wanted.ids)
            rows = seen.rows if setup.exact else np.concatenate([seen.rows[s, :n] for s, n in enumerate(wanted.counts)])
            same(f"rows of dispatch {i}", rows, sent_to(exchange, rank, payloads[0]))
            # Each rank has returned its rows as they came, so a token's sum is itself times its ranks.
            fan = exchange.routing[rank].goes.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(seen.output, payloads[0][rank] * fan, rtol=1e-6)
    for told in ranks:
        assert told.final.agreed == told.final.ready == len(plan.epochs), told.final
        for epoch in range(max(1, len(plan.epochs) - 31), len(plan.epochs) + 1):
            assert told.final.is_void(epoch) == (epoch in void)
        for layer in range(plan.layers):
            last = [new for epoch, (of, new) in enumerate(plan.epochs, 1) if of == layer and epoch not in void]
            assert told.maps[layer].tolist() == list(last[-1] if last else TABLE)


def sent_to(exchange: Any, rank: int, tokens: list[np.ndarray]) -> np.ndarray:
    """The rows that go to a rank, by source."""
    return np.concatenate([of[exchange.routing[s].goes[:, rank]] for s, of in enumerate(tokens)])


def lag_of(backend: str) -> int:
    return 1 if harness.BACKENDS[backend].checks_ids_on_host else 2


def run(world: Any, backend: str, plan: Plan) -> list[Told]:
    ranks = world(plan.setup.ranks).run(play, plan)
    judge(plan, ranks, lag_of(backend))
    return ranks


def moving_setup(policy: str = "round_robin", **more: Any) -> Setup:
    return setup_of(policy, dtype="float32", combine_dtype="float32", id_space="global", **more)


THIRD = (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, -1)
EPOCHS = ((0, OTHER), (1, OTHER), (0, THIRD), (1, TABLE), (1, THIRD), (0, TABLE))


@pytest.mark.parametrize("policy", ["round_robin", "balanced"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_maps_move(world, backend, policy, lanes) -> None:
    setup = moving_setup(policy, ranks=min(4, world.most), lanes=lanes)
    plan = Plan(setup, 2, 12, EPOCHS, fails=frozenset({(1, 2), (0, 6)}), eager=4)
    run(world, backend, plan)


def test_refusals_do_not_split(world, backend) -> None:
    """A rank that refuses a dispatch tells how far it is all the same, or nobody takes what was told."""
    setup = moving_setup(ranks=min(3, world.most), lanes=2)
    run(
        world,
        backend,
        Plan(setup, 1, 16, ((0, OTHER), (0, THIRD)), refuses=frozenset({(0, 3), (1, 4), (0, 9)}), eager=3),
    )


@pytest.mark.parametrize("refused_in", [1, 3])
def test_a_refusal_behind_the_words_that_decide(world, backend, refused_in) -> None:
    """A rank that refuses a dispatch takes what was told in the one before all the same."""
    setup = moving_setup(ranks=min(2, world.most), lanes=1)
    refuses = frozenset({(0, refused_in)})
    run(world, backend, Plan(setup, 1, 8, ((0, OTHER), (0, THIRD)), refuses=refuses))


def test_a_late_rank_delays_all(world, backend) -> None:
    """Nobody goes by an epoch that one rank is not ready for, however long."""
    setup = moving_setup(ranks=min(3, world.most), lanes=1)
    for rank, told in enumerate(world(setup.ranks).run(late, setup)):
        assert told == [0] * 6 + [1], (rank, told)


def late(env: Any, setup: Setup) -> list[int]:
    """The version after each dispatch; rank 1 is ready after six of them."""
    plan = Plan(setup, 1, 0, ((0, OTHER),))
    made: dict[str, Any] = setup.settings()
    made["expert_map"] = tw.Placement(TABLE, count_loads=True, moves=True)
    found = []
    with env.context(), tw.Group(env.comm, **made) as group:
        group.moving.stage(OTHER)
        if env.rank != 1:
            group.moving.ready(1)
        for i in range(6):
            pair(env, group, plan, i)
            found.append(group.moving.epochs().agreed)
        if env.rank == 1:
            group.moving.ready(1)
        for i in range(6, 8):
            pair(env, group, plan, i)
        return [*found, group.moving.epochs().agreed]


def kept(env: Any, setup: Setup) -> list[Any]:
    """A handle keeps its map: what it receives before and after the epoch, and the oldest version while it lives."""
    plan, backend = Plan(setup, 1, 0, ((0, OTHER),)), env.backend
    made: dict[str, Any] = setup.settings()
    made["expert_map"] = tw.Placement(TABLE, count_loads=True, moves=True)
    with env.context(), tw.Group(env.comm, **made) as group:
        ids, weights = (backend.tensor(part) for part in make_ids(setup, Round((9,) * setup.ranks), env.rank))
        tokens = backend.tensor(make_payloads(setup, Round((9,) * setup.ranks), env.rank)[0])

        def received(handle: Any) -> np.ndarray:
            if setup.exact and not again:
                group.exchange_counts(handle)
            found = backend.array(group.dispatch(handle, tokens).ids)
            handle.release()
            return found

        again = False
        handle = group.route(ids, weights)
        found: list[Any] = [received(handle)]
        group.moving.stage(OTHER)
        group.moving.ready(1)
        for i in range(3):
            pair(env, group, plan, i)
        epochs = group.moving.epochs()
        found.append((epochs.agreed, epochs.oldest))
        again = True
        found.append(received(handle))
        again = False
        handle.update(ids, weights)
        found.append(received(handle))
        epochs = group.moving.epochs()
        found.append((epochs.agreed, epochs.oldest))
        return found


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_a_handle_keeps_its_map(world, mode) -> None:
    setup = moving_setup(mode=mode, ranks=min(3, world.most), lanes=1)
    for before, held, still, after, freed in world(setup.ranks).run(kept, setup):
        assert held == (1, 0) and freed == (1, 1)
        same("a handle's rows", still, before)
        assert before.shape != after.shape or (before != after).any()


@pytest.mark.parametrize("mode", ["high_throughput", "auto"])
def test_other_modes(world, backend, mode) -> None:
    setup = moving_setup(mode=mode, ranks=min(3, world.most), lanes=2)
    run(world, backend, Plan(setup, 2, 10, EPOCHS[:3], fails=frozenset({(0, 3)}), eager=4))


@st.composite
def plans(draw: Any) -> Plan:
    ranks = draw(st.integers(1, min(4, THREADS)))
    layers = draw(st.integers(1, 3))
    setup = moving_setup(
        draw(st.sampled_from(("round_robin", "local_first", "balanced"))),
        mode=draw(st.sampled_from(("low_latency", "high_throughput"))),
        ranks=ranks,
        lanes=draw(st.integers(1, 3)),
        hidden=3,
        max_tokens=9,
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    count = draw(st.integers(0, 9))
    epochs = [(int(rng.integers(layers)), tuple(int(e) for e in rng.permutation(TABLE))) for _ in range(count)]
    chance = draw(st.sampled_from((0.0, 0.1, 0.4)))
    pairs = [(r, e) for r in range(ranks) for e in range(1, count + 1)]
    dispatches = draw(st.integers(0, 20))
    steps = [(r, i) for i in range(dispatches) for r in range(ranks)]
    refuses = draw(st.sampled_from((0.0, 0.05)))
    return Plan(
        setup,
        layers,
        dispatches,
        tuple(epochs),
        frozenset(at for at in pairs if rng.random() < chance),
        frozenset(at for at in steps if rng.random() < refuses),
        int(rng.integers(1000)),
        draw(st.integers(1, 8)),
    )


@SETTINGS
@given(plans())
def test_any_plan(backend: str, plan: Plan) -> None:
    judge(plan, harness.Threads(backend, plan.setup.ranks).run(play, plan), lag_of(backend))


# ---- what is refused -----------------------------------------------------------------------------


def refused(env: Any) -> list[Any]:
    made = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 4, "dtype": "float32", "combine_dtype": "float32"}
    found = []
    with env.context():
        found.append(harness.caught(tw.Group, env.comm, **made, expert_map=tw.Placement([0, 1, 2, 3], moves=True)))
        still = tw.Placement([0, 1, 2, 3], count_loads=True)
        with tw.Group(env.comm, **made, expert_map=still) as group:
            found.append(harness.caught(group.moving.stage, [3, 2, 1, 0]))
            found.append(harness.caught(group.moving.epochs))
        with tw.Group(env.comm, **made, expert_map=replace(still, moves=True), lanes=2) as group:
            stage, ready = group.moving.stage, group.moving.ready
            found.append(harness.caught(stage, [0, 1, 2, 2]))
            found.append(harness.caught(stage, [3, 2, 1, 0], layer=1))
            found.append(harness.caught(stage, [3, 2, 1, 0], shares=[1, 1, 1, 1]))
            found.append(harness.caught(ready, 1))
            assert stage([3, 2, 1, 0]) == 1
            found.append(harness.caught(stage, [0, 1, 2, 3]))
            found.append(harness.caught(ready, 2))
            found.append(harness.caught(group.replace_map, [3, 2, 1, 0]))
            ids = env.backend.tensor(np.zeros((1, 2), np.int32))
            found.append(harness.caught(group.routing_layout, ids))
        many = tw.Placement(np.tile(np.arange(4), (20, 1)), count_loads=True, moves=True)
        with tw.Group(env.comm, **made, expert_map=many) as group:
            assert [group.moving.stage([3, 2, 1, 0], layer) for layer in range(15)] == list(range(1, 16))
            found.append(harness.caught(group.moving.stage, [3, 2, 1, 0], layer=15))
    return found


def test_refused(world) -> None:
    for found in world(min(2, world.most)).run(refused):
        outcomes = iter(found)
        for result, pattern in (
            ("twInvalidArgument", r"placement.moves is 1; that needs placement.count_loads 1"),
            ("twInvalidUsage", r"the group was created with placement.moves 0, so its maps do not move"),
            ("twInvalidUsage", r"the group was created with placement.moves 0"),
            ("twInvalidArgument", r"slot_expert has no slot of expert 3; each of 0 to 3 must have one"),
            ("twInvalidArgument", r"layer is 1; it must be from 0 to 0"),
            ("twInvalidArgument", r"shares is given; only policy 'shares' has them"),
            ("twInvalidUsage", r"no epoch is staged that is not ready: the last is 0"),
            ("twInvalidUsage", r"layer 0 has epoch 1 open, and the lanes of this rank have come to epoch 0"),
            ("twInvalidArgument", r"epoch is 2; it must be 1, the next that is staged"),
            ("twInvalidUsage", r"created with placement.moves 1: its maps are staged, by moving.stage"),
            ("twUnsupported", r"placement.moves is 1; a routing gets its map in its first step"),
            ("twInvalidUsage", r"15 epochs are open, 1 to 15, and no more can be"),
        ):
            harness.said(next(outcomes), result, pattern)
        assert next(outcomes, None) is None


def shrunk(env: Any) -> tuple[Any, list[int]]:
    made = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 4, "dtype": "float32", "combine_dtype": "float32"}
    moves = tw.Placement([0, 1, 2, 3], count_loads=True, moves=True)
    with env.context(), tw.Group(env.comm, **made, expert_map=moves) as group:
        said = harness.caught(group.shrink, experts=5)
        with group.shrink(expert_map=replace(moves, slot_expert=[3, 2, 1, 0])) as smaller:
            return said, smaller.expert_of_slot().tolist()


def test_survivors_may_be_told_their_maps(world) -> None:
    """Whoever shrinks such a group may give maps; those in force are of as many experts."""
    for said, table in world(min(2, world.most)).run(shrunk):
        harness.said(said, "twInvalidArgument", "experts is 5; survivors keep the maps of the group, so it must be 4")
        assert table == [3, 2, 1, 0]
