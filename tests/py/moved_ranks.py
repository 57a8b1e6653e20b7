"""Ranks that move experts and die: random rounds, in which survivors must go on as if nothing had been.

A round is a plan. All ranks bring experts to where scripts say, each when it likes, and exchange meanwhile. Ranks die
as the plan says, while they stage, copy, switch, dispatch or combine; the others shrink the group, bring what they have
over, load what is lost, and go on with another script. Each checks what it gets against sums that it makes by itself;
`judge` checks the maps with which survivors begin.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import harness
import numpy as np
from moved_plans import HIDDEN, TOKENS, Maps, Plan, after, drawn, script, value_of

import tokenway as tw
from tokenway import balance
from tokenway.balance.copies import copies_of

WEIGHTS = {"scale": ((HIDDEN,), "float32"), "shift": ((3,), "int16")}
EMPTY = np.full(HIDDEN, np.nan, np.float32)


# ---- on the ranks --------------------------------------------------------------------------------


class Died(Exception):
    """Of a rank that is a thread."""


@dataclass
class Report:
    """What a rank has to tell of a generation. lanes, ready: the last that it knows."""

    members: list[int]
    maps: Maps
    lost: set[tuple[int, int]]
    lanes: tuple[int, ...] = ()
    ready: int = 0
    exchanges: int = 0
    phases: set[str] = field(default_factory=set)


class Life:
    """A rank in one generation of the group."""

    def __init__(self, env: Any, plan: Plan, generation: int, group: tw.Group, weights: balance.Weights):
        self.env, self.plan, self.generation, self.group, self.weights = env, plan, generation, group, weights
        self.copies = copies_of(weights)
        tables = np.stack([group.expert_of_slot(layer) for layer in range(group.layers)])
        self.maps = Maps(tables, weights.rank_of_slot, weights.place_of_slot)
        self.script = script(plan, generation, self.maps)
        lost = {(each.layer, each.slot) for each in group.moving.lost_experts}
        self.report = Report(group.comm_ranks, self.maps, lost)
        self.rng = np.random.default_rng([plan.seed, generation, env.rank])
        self.death = plan.deaths[generation] if generation < len(plan.deaths) else None
        self.dies = self.death is not None and self.death.rank == env.rank
        self.met = 0
        # What ranks know that are threads too, by rank of the comm.
        self.seen: dict[int, tw.Epochs] = env.kept.get("threads", {}).setdefault(generation, {})
        self.pieces: dict[int, list[Any]] = {}

    def run(self) -> None:
        for i in itertools.count():
            if i >= self.plan.dispatches:
                if self.dies:
                    die(self.env, self.group)
                if self.death is None:
                    break
            self.go_on(hurry=False)
            self.exchange(i)
        for j in range(3 * self.plan.lanes * (len(self.script) + 1)):  # what is open comes to its end
            self.go_on(hurry=True)
            self.exchange(self.plan.dispatches + j)
        epochs = self.group.moving.epochs()
        assert epochs.agreed == epochs.ready == len(self.script), epochs
        last = after(self.maps, self.script, len(self.script)).tables
        for layer in range(self.group.layers):
            np.testing.assert_array_equal(self.group.expert_of_slot(layer), last[layer])

    def meets(self, phase: str) -> None:
        """A phase in which this rank may be about to die."""
        self.report.phases.add(phase)
        if self.dies and self.death is not None and self.death.phase == phase:
            self.met += 1
            if self.met > self.death.after // 4:
                die(self.env, self.group)

    def note(self) -> tw.Epochs:
        epochs = self.group.moving.epochs()
        self.report.lanes, self.report.ready = epochs.lanes, epochs.ready
        if "threads" in self.env.kept:
            self.seen[self.env.rank] = epochs
        return epochs

    def may(self, hurry: bool) -> bool:
        return hurry or bool(self.rng.integers(8) < self.plan.eager)

    def go_on(self, hurry: bool) -> None:
        """Stages, copies and says so, or some of it."""
        epochs = self.note()
        while epochs.staged < len(self.script) and self.may(hurry):
            epoch = self.script[epochs.staged]
            if epoch.layer in {other.layer for other in self.script[epochs.agreed : epochs.staged]}:
                break
            number = self.group.moving.stage(epoch.table, epoch.layer)
            assert number == epochs.staged + 1
            epochs = self.note()
            self.meets("staged")
        while epochs.ready < epochs.staged and self.copy(epochs.ready + 1, epochs, hurry):
            failed = self.group.rank in self.script[epochs.ready].fails
            self.group.moving.ready(epochs.ready + 1, failed=failed)
            epochs = self.note()
            self.meets("ready")

    def copy(self, number: int, epochs: tw.Epochs, hurry: bool) -> bool:
        """Whether all is there that an epoch needs. The slots that it fills may have been freed by the layer's last."""
        epoch = self.script[number - 1]
        before = [n for n, other in enumerate(self.script[: number - 1], 1) if other.layer == epoch.layer]
        if not self.report.exchanges or (before and epochs.oldest < before[-1]):
            return False  # peers may not have filled theirs; or some handle still needs the slots
        if number not in self.pieces:
            mine = [pull for pull in epoch.pulls if self.maps.rank[pull[0]] == self.group.rank]
            for target, _ in mine:  # nobody reads what is there, whatever it is
                empty = self.env.backend.tensor(EMPTY)
                self.weights.tensor("scale", epoch.layer)[int(self.maps.place[target])] = empty
            self.copies.freed()
            self.pieces[number] = [p for t, s in mine for p in self.weights.pieces(epoch.layer, s, t, 8)]
        pieces = self.pieces[number]
        if self.group.rank in epoch.fails:
            del pieces[len(pieces) // 2 :]
        while pieces and self.may(hurry):
            self.copies.begin(number, pieces.pop(0))
            self.meets("copying")
        while hurry and not self.copies.ended(number):
            time.sleep(0.0002)
        return not pieces and self.copies.ended(number)

    # ------------------------------------------------------------------------------------------------- an exchange

    def exchange(self, i: int) -> None:
        plan, group, backend = self.plan, self.group, self.env.backend
        lane, layer = i % plan.lanes, i // plan.lanes % plan.layers
        rng = np.random.default_rng([plan.seed, self.generation, i, self.env.rank])
        count = int(rng.choice((0, 1, TOKENS - 1, TOKENS)))
        k = group.top_k
        ids = np.argsort(rng.random((count, plan.experts)), axis=1)[:, :k].astype(np.int32)
        ids = np.where(rng.random(ids.shape) < 0.15, -1, ids).astype(np.int32)
        tokens = rng.integers(-8, 9, (count, HIDDEN)).astype(np.float32)
        if plan.combine_rows == "per_expert":
            tokens = rng.standard_normal((count, HIDDEN)).astype(np.float32)
        handle = group.route(backend.tensor(ids), layer=layer)
        if group.exact:
            group.exchange_counts(handle, lane=lane)
        apart = self.is_apart(i, lane)
        layout = "grouped" if group.exact else "expert_major"
        received = group.dispatch(handle, backend.tensor(tokens), lane=lane, layout=layout, send_only=apart)
        if apart:
            self.leave(lane)
            received = received.result()
        lanes = self.note().lanes
        if len(set(lanes)) > 1:
            self.meets("switched")
        rows = self.computed(received, layer)
        if i >= (self.death.after if self.death else 0):
            self.meets("combine")
        weights = np.full(ids.shape, 0.5, np.float32) if plan.combine_rows == "per_expert" else None
        out = group.combine(handle, backend.tensor(rows), weights=None if weights is None else backend.tensor(weights))
        found = backend.array(out).copy()
        handle.release()
        self.check(found, ids, tokens, layer, i)
        self.report.exchanges += 1
        if i >= (self.death.after if self.death else 0):
            self.meets("between")

    def is_apart(self, i: int, lane: int) -> bool:
        """Whether this rank sends the dispatch and does something else then: it dies, if it may be the one by which the
        lane switches; or it is absent, so that others may be ahead."""
        death = self.death
        if death is None or death.phase != "dispatch" or i < death.after:
            return False
        epochs = self.note()
        if not self.dies:
            return self.env.rank in death.absent
        ready = [self.seen[rank].ready for rank in self.group.comm_ranks if rank in self.seen]
        return min(ready, default=epochs.ready) > epochs.lanes[lane]

    def leave(self, lane: int) -> None:
        """A dispatch is sent. This rank dies, when others may have received it; or it does not look for a while, unless
        it hears that somebody has died."""
        before = self.note().lanes[lane]
        until = time.monotonic() + (0.02 if self.seen else 0.1)
        while time.monotonic() < until:
            self.group.moving.epochs()  # raises when it is known
            if self.dies and any(epochs.lanes[lane] > before for epochs in self.seen.values()):
                break
            time.sleep(0.0005)
        if self.dies:
            die(self.env, self.group)

    def computed(self, received: Any, layer: int) -> np.ndarray:
        """What this rank's experts make of the rows that came, by the weights that are in its slots."""
        backend = self.env.backend
        rows, scale = backend.array(received.tokens), backend.array(self.weights.tensor("scale", layer))
        if rows.ndim == 3:
            with np.errstate(all="ignore"):  # of rows that nobody sent
                return np.ascontiguousarray(rows * scale[:, None, :])
        counts, offsets = backend.array(received.counts), backend.array(received.offsets)
        made = np.zeros_like(rows)
        for expert, number in enumerate(counts):
            begin = int(offsets[expert])
            made[begin : begin + number] = rows[begin : begin + number] * scale[expert]
        return made

    def check(self, found: np.ndarray, ids: np.ndarray, tokens: np.ndarray, layer: int, i: int) -> None:
        """The sum of an owner, k ascending, in float32: the same bits wherever experts are."""
        weight = np.float32(0.5 if self.plan.combine_rows == "per_expert" else 1.0)
        wanted, begun = np.zeros_like(tokens), np.zeros(len(tokens), bool)
        for k in range(ids.shape[1]):
            there = ids[:, k] >= 0
            scale = np.array([value_of(int(e), layer)["scale"] for e in ids[:, k]], np.float32).reshape(-1, HIDDEN)
            term = (tokens * scale) * weight
            wanted = np.where(there[:, None], np.where(begun[:, None], wanted + term, term), wanted)
            begun |= there
        said = f"rank {self.env.rank}, generation {self.generation}, exchange {i}, layer {layer}"
        if self.plan.combine_rows == "per_expert":
            np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32), said)
        else:
            np.testing.assert_array_equal(found, wanted, said)


def die(env: Any, group: tw.Group) -> None:
    """The end of this rank."""
    if "threads" in env.kept:
        group.abort()
        raise Died
    os.kill(os.getpid(), signal.SIGKILL)


def begun(env: Any, plan: Plan) -> tuple[tw.Group, balance.Weights]:
    """The first group, and its weights."""
    maps = Maps.first(plan)
    size = balance.weight_bytes(WEIGHTS, layers=plan.layers, slots=plan.slots, ranks=plan.ranks)
    placement = tw.Placement(maps.tables, policy=plan.policy, count_loads=True, moves=True, weight_bytes=size)
    group = tw.Group(
        env.comm,
        experts=plan.experts,
        top_k=min(2, plan.experts),
        hidden=HIDDEN,
        max_tokens=TOKENS,
        dtype="float32",
        combine_dtype="float32",
        combine_rows=plan.combine_rows,
        mode=plan.mode,
        lanes=plan.lanes,
        expert_map=placement,
        timeout=harness.PATIENT,
    )
    weights = balance.Weights(group, WEIGHTS)
    for layer, place in itertools.product(range(plan.layers), range(plan.slots)):
        expert = int(maps.tables[layer, (maps.rank == env.rank) & (maps.place == place)][0])
        given = value_of(expert, layer) if expert >= 0 else {"scale": EMPTY, "shift": np.zeros(3, np.int16)}
        weights.put(layer, place, given)
    return group, weights


def live(env: Any, plan: Plan) -> list[Report]:
    """A rank's part. Tells of each generation."""
    group, weights = begun(env, plan)
    reports = []
    env.kept["groups"] = [group]
    for generation in itertools.count():
        life = Life(env, plan, generation, group, weights)
        reports.append(life.report)
        try:
            life.run()
            life.copies.close()
            group.close()
            return reports
        except tw.TokenwayError:
            record = group.error
            if record is None or not record.sticky or life.death is None:
                raise
        life.copies.close()  # this rank's own pulls end first
        if life.death.also == env.rank:
            die(env, group)
        time.sleep(float(life.rng.random()) * 0.004)  # some are late
        smaller = group.shrink()
        former, group = group, smaller
        env.kept["groups"].append(group)
        weights = balance.Weights.of_survivors(group, weights, lambda layer, expert: value_of(expert, layer))
        former.close()
    raise AssertionError


def lived(env: Any, plan: Plan) -> list[Report]:
    """As live, of a rank that may be a thread. Where something is wrong, others hear of it at once."""
    try:
        return live(env, plan)
    except Died:
        return []
    except BaseException:
        env.kept["groups"][-1].abort()
        raise


# ---- whole rounds --------------------------------------------------------------------------------


def in_threads(backend: str, plan: Plan) -> dict[int, list[Report]]:
    """Plays a round whose ranks are threads; one that dies gives the group up, and does nothing more."""
    chosen = harness.BACKENDS[backend]
    shared: dict[int, dict[int, tw.Epochs]] = {generation: {} for generation in range(len(plan.deaths) + 1)}
    envs = [harness.Env(comm, chosen) for comm in chosen.local_comms(plan.ranks)]
    outcomes: list[Any] = [(False, "it hangs")] * plan.ranks

    def body(env: harness.Env) -> None:
        env.kept["threads"] = shared
        outcomes[env.rank] = harness.attempt(env.call, lived, plan)

    threads = [threading.Thread(target=body, args=(env,), daemon=True) for env in envs]
    for thread in threads:
        thread.start()
    until = time.monotonic() + harness.HANGS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    reports = harness.settle(outcomes)
    for env in envs:
        for group in env.kept["groups"]:
            group.close()
        env.comm.close()
    return {rank: told for rank, told in enumerate(reports) if rank not in plan.victims}


def in_processes(backend: str, plan: Plan) -> dict[int, list[Report]]:
    """Plays a round whose ranks are processes, of which some are killed."""
    workers = harness.Workers(plan.ranks)
    everyone = range(plan.ranks)
    survivors = [rank for rank in everyone if rank not in plan.victims]
    key = ("moved", 0, backend, f"moved-{os.getpid()}-{time.monotonic_ns()}")
    try:
        workers.send(everyone, lived, plan, key=key)
        return dict(zip(survivors, harness.settle(workers.collect(survivors, harness.HANGS)), strict=True))
    finally:
        workers.close()


@dataclass
class Seen:
    """What rounds have come to. splits: shrinks in which survivors had different versions; lost: experts."""

    rounds: int = 0
    shrinks: int = 0
    splits: int = 0
    lost: int = 0
    exchanges: int = 0
    phases: set[str] = field(default_factory=set)


def judge(plan: Plan, told: dict[int, list[Report]], seen: Seen) -> None:
    """All survivors must have begun each generation alike, with the maps of a version that no survivor was beyond."""
    seen.rounds += 1
    first = next(iter(told.values()))
    assert len(first) == len(plan.deaths) + 1 and {len(each) for each in told.values()} == {len(first)}
    for generation, begun_with in enumerate(first):
        reports = [each[generation] for each in told.values()]
        seen.exchanges += reports[0].exchanges
        seen.phases |= set().union(*(report.phases for report in reports))
        for report in reports:
            assert report.members == begun_with.members and report.lost == begun_with.lost
            np.testing.assert_array_equal(report.maps.tables, begun_with.maps.tables)
        if generation == 0:
            continue
        before, former = [each[generation - 1] for each in told.values()], first[generation - 1]
        dead = {plan.deaths[generation - 1].rank, plan.deaths[generation - 1].also}
        assert begun_with.members == [rank for rank in former.members if rank not in dead]
        members = [former.members.index(rank) for rank in begun_with.members]
        epochs = script(plan, generation - 1, former.maps)
        versions = [max(report.lanes, default=0) for report in before]
        allowed = range(max(versions), min(report.ready for report in before) + 1)
        wanted = [after(former.maps, epochs, version).of_survivors(members) for version in allowed]
        assert any(
            np.array_equal(maps.tables, begun_with.maps.tables) and lost == begun_with.lost for maps, lost in wanted
        ), (plan, generation, versions, allowed, begun_with, wanted)
        seen.shrinks += 1
        seen.splits += len(set(versions)) > 1
        seen.lost += len(begun_with.lost)


def play(rounds: int, seed: int, backend: str = "cpu", kind: str = "threads", say: Any = None) -> Seen:
    """Plays so many rounds, and judges each."""
    seen = Seen()
    for number in range(seed, seed + rounds):
        plan = drawn(number)
        try:
            judge(plan, (in_threads if kind == "threads" else in_processes)(backend, plan), seen)
        except BaseException:
            print(f"round of seed {number} in {kind}: {plan}", file=sys.stderr)
            raise
        if say and (number - seed) % 100 == 99:
            say(f"{number - seed + 1} of {rounds} rounds in {kind}: {seen}")
    return seen
