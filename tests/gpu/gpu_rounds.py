"""Random rounds and graph replays on one rank: its part of the soak.

All ranks draw the same rounds and, on their own devices, the same inputs of all ranks from the same
seeds, so that each judges its own results on its device (device_oracle.py) and nobody waits for a judge.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cases
import numpy as np
import torch
from cases import FLOATS, Round, Setup, same
from device_oracle import DeviceOracle, Inputs, differs, rows_differ
from gpu_world import capture, line_tokens, sleep_on_device

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

ORACLE_EVERY = 50  # rounds between two that NumPy judges too
TIMEOUT = 30.0


# ---- what is drawn -------------------------------------------------------------------------------


def random_setup(rng: random.Random, ranks: int) -> Setup:
    experts = rng.randint(ranks, 8 * ranks)
    return Setup(
        ranks=ranks,
        experts=experts,
        top_k=rng.randint(1, min(experts, 8)),
        hidden=rng.choice((1, 3, 17, 64, 127, 256, 1000)),
        max_tokens=rng.choice((1, 5, 16, 24, 64, 130, 300, 700, 1300)),
        dtype=rng.choice((*FLOATS, "uint8")),
        payloads=rng.choice(((), ((1, "uint8"),), ((3, "float32"), (17, "int8")), ((7, "float8_e4m3fn"),))),
        combine_dtype=rng.choice(FLOATS),
        combine_hidden=rng.choice((None, None, 24)),
        lanes=rng.randint(1, 4),
        id_dtype=rng.choice(("int32", "int64")),
        id_space=rng.choice(("local", "global")),
        invalid_id=rng.choice((-1, -1, experts)),
    )


def random_round(rng: random.Random, setup: Setup) -> Round:
    most = rng.choice((0, 1, min(8, setup.max_tokens), setup.max_tokens, setup.max_tokens))
    tokens = tuple(rng.randint(0, most) for _ in range(setup.ranks))
    return Round(
        tokens=tokens,
        routing=rng.choice(("random", "random", "holes", "few", "none")),
        bound=rng.choice((None, max(1, *tokens))),
        layout=rng.choice(("rank_major", "expert_major")),
        weighting=rng.choice(("none", "topk")),
        ids=rng.choice(("int32", "int64")),
        rows=rng.choice(FLOATS),
        out=rng.choice(FLOATS),
        send_dispatch=rng.random() < 0.5,
        send_combine=rng.random() < 0.4,
        again=rng.random() < 0.1,
        late=rng.random() < 0.1,
        strided=rng.random() < 0.2,
    )


HOLES = {"random": 0.0, "holes": 0.4, "few": 0.9, "none": 1.1}


@dataclass
class Flag:
    """Something that was compared: a bool on the device, true if it was wrong."""

    what: str
    round: Round
    setup: Setup
    wrong: torch.Tensor


@dataclass
class Open:
    """A group that is kept open, with its oracle."""

    setup: Setup
    group: tw.Group
    oracle: DeviceOracle


class Soak:
    """A rank's groups, rounds and verdicts."""

    def __init__(self, env: Any, seed: int, groups: int):
        self.env = env
        self.rng = random.Random(seed)  # the same on all ranks
        self.mine = random.Random(seed * 64 + env.rank)
        self.generator = torch.Generator(env.device).manual_seed(seed)
        self.flags: list[Flag] = []
        self.failures: list[str] = []
        self.judged = 0  # rounds that NumPy judged
        self.open = [self.new_group(g) for g in range(groups)]
        self.replays: list[Replay] = []

    def new_group(self, number: int) -> Open:
        setup = random_setup(self.rng, self.env.nranks)
        limit = self.rng.choice((0, 0, 0, 1, 4))
        with line_tokens((None, None, 0, 64)[number % 4]):
            group = tw.Group(self.env.comm, timeout=TIMEOUT, **setup.settings() | {"sm_limit": limit})
        return Open(setup, group, DeviceOracle(setup, self.env.device))

    def settle(self) -> None:
        """Waits for the verdicts on the device, and keeps what was wrong."""
        wrong = torch.stack([flag.wrong for flag in self.flags]).cpu().tolist() if self.flags else []
        for flag, bad in zip(self.flags, wrong, strict=True):
            if bad:
                self.failures.append(f"rank {self.env.rank}: {flag.what} of {flag.round} in {flag.setup}")
        self.flags.clear()
        for one in self.open:
            record = one.group.error
            if record is not None:
                raise RuntimeError(f"rank {self.env.rank}: {record.message}")

    # ---- rounds ----------------------------------------------------------------------------------

    def rounds(self, count: int) -> None:
        done = 0
        while done < count:
            one = self.rng.choice(self.open)
            size = min(self.rng.randint(1, one.setup.lanes), count - done)
            drawn = [random_round(self.rng, one.setup) for _ in range(size)]
            self.flight(one, drawn, judge=done // ORACLE_EVERY != (done + size) // ORACLE_EVERY)
            done += size
            if len(self.flags) > 400:
                self.settle()
        self.settle()

    def draw_inputs(self, one: Open, round_: Round) -> list[Inputs]:
        """Draws the inputs of all ranks."""
        return [one.oracle.inputs(self.generator, t, HOLES[round_.routing]) for t in round_.tokens]

    def flight(self, one: Open, rounds: Sequence[Round], judge: bool) -> None:
        """Rounds under way together: as player.Player has it, but everything stays on the device."""
        everyone = range(len(rounds))
        inputs = [self.draw_inputs(one, r) for r in rounds]
        handles = [self.route(one, r, i[self.env.rank]) for r, i in zip(rounds, inputs, strict=True)]
        pending = {}
        for i in everyone:
            self.nap()
            pending[i] = self.dispatch(one, rounds[i], handles[i], inputs[i], rounds[i].send_dispatch)
        received = self.complete(pending)
        pending = {}
        for i in self.own_order([i for i in everyone if rounds[i].again]):
            pending[i] = self.dispatch(one, rounds[i], handles[i], inputs[i], True)
        received |= self.complete(pending)
        kept = [self.judge_received(one, rounds[i], inputs[i], received[i], judge) for i in everyone]
        rows = [self.answers(one, rounds[i], received[i]) for i in everyone]
        outs = self.combine_all(one, rounds, handles, rows)
        for i in everyone:
            self.judge_result(one, rounds[i], inputs[i], outs[i])
            if rounds[i].late:
                late = self.combine(one, rounds[i], handles[i], rows[i], False)
                self.judge_result(one, rounds[i], inputs[i], late)
            if judge:
                self.judge_with_numpy(one, rounds[i], inputs[i], kept[i], outs[i])

    def nap(self) -> None:
        """One rank is late now and then, on the host or on its device."""
        chance, who, how_long = self.rng.random(), self.rng.randrange(self.env.nranks), self.rng.random()
        if who != self.env.rank:
            return
        if chance < 0.03:
            sleep_on_device(how_long * 3e-4)
        elif chance < 0.05:
            time.sleep(how_long * 1e-3)

    def own_order(self, indices: list[int]) -> list[int]:
        """Another order on every rank: allowed where no channel is leased."""
        return self.mine.sample(indices, len(indices))

    def complete(self, pending: dict[int, Any]) -> dict[int, tw.Received]:
        order = self.own_order(list(pending))
        return {i: pending[i].result() if isinstance(pending[i], tw.Pending) else pending[i] for i in order}

    def combine_all(self, one: Open, rounds: Sequence[Round], handles: Any, rows: Any) -> dict[int, Any]:
        sent = [i for i, r in enumerate(rounds) if r.send_combine]
        pending = {i: self.combine(one, rounds[i], handles[i], rows[i], True) for i in self.own_order(sent)}
        outs = {i: pending[i].result() for i in self.own_order(sent)}
        for i in range(len(rounds)):
            if i not in outs:
                self.nap()
                outs[i] = self.combine(one, rounds[i], handles[i], rows[i], False)
        return outs

    # ---- calls -----------------------------------------------------------------------------------

    def route(self, one: Open, round_: Round, mine: Inputs) -> tw.Handle:
        ids = mine.ids.to(getattr(torch, round_.ids))
        return one.group.route(spread(ids, round_.strided), spread(mine.weights, round_.strided))

    def dispatch(self, one: Open, round_: Round, handle: tw.Handle, inputs: list[Inputs], send_only: bool) -> Any:
        tokens, *extra = (spread(p, round_.strided) for p in inputs[self.env.rank].payloads)
        payloads = {f"p{q}": p for q, p in enumerate(extra)}
        return one.group.dispatch(
            handle, tokens, payloads, layout=round_.layout, bound=round_.bound, send_only=send_only
        )

    def combine(self, one: Open, round_: Round, handle: tw.Handle, rows: Any, send_only: bool) -> Any:
        return one.group.combine(handle, rows, weighting=round_.weighting, dtype=round_.out, send_only=send_only)

    def answers(self, one: Open, round_: Round, received: tw.Received) -> Any:
        return one.oracle.answers(round_, self.env.rank, received.tokens, received.ids, received.weights)

    # ---- verdicts --------------------------------------------------------------------------------

    def judge_received(self, one: Open, round_: Round, inputs: list[Inputs], got: Any, keep: bool) -> dict[str, Any]:
        """Compares what arrived on the device; with `keep`, copies it."""
        bound = one.setup.max_tokens if round_.bound is None else round_.bound
        want = one.oracle.dispatched(inputs, self.env.rank, bound, round_.layout)
        payloads = [got.tokens, *(got.payloads[f"p{q}"] for q in range(len(one.setup.payloads)))]

        def flag(what: str, wrong: torch.Tensor) -> None:
            self.flags.append(Flag(what, round_, one.setup, wrong))

        for q, (have, wanted) in enumerate(zip(payloads, want.payloads, strict=True)):
            flag(f"payload {q}", rows_differ(have, wanted, want.filled))
        flag("counts", differs(got.counts.long(), want.counts))
        flag("ids", differs(got.ids.long(), want.ids))
        flag("weights", differs(got.weights, want.weights))
        if not keep:
            return {}
        return {
            "payloads": [self.env.backend.array(p) for p in payloads],
            "ids": self.env.backend.array(got.ids),
            "weights": self.env.backend.array(got.weights),
            "counts": self.env.backend.array(got.counts),
        }

    def judge_result(self, one: Open, round_: Round, inputs: list[Inputs], out: torch.Tensor) -> None:
        want = one.oracle.combined(round_, inputs[self.env.rank])
        self.flags.append(Flag("result", round_, one.setup, differs(out, want)))

    def judge_with_numpy(self, one: Open, round_: Round, inputs: list[Inputs], kept: Any, out: torch.Tensor) -> None:
        self.judged += 1
        try:
            compare_with_numpy(one.setup, round_, inputs, self.env, kept, out)
        except AssertionError as error:
            self.failures.append(f"by NumPy: {error}")

    # ---- graphs ----------------------------------------------------------------------------------

    def capture_all(self) -> None:
        """A graph or two of every group."""
        for one in self.open:
            for plan in random_plans(self.rng, one.setup):
                self.replays.append(Replay(self, one, plan))

    def replay(self, count: int) -> None:
        if not self.replays:
            self.capture_all()
        for _ in range(count):
            self.rng.choice(self.replays).once()
            if self.rng.random() < 0.1:
                one = self.rng.choice(self.open)
                self.flight(one, [random_round(self.rng, one.setup)], judge=False)
            if len(self.flags) > 400:
                self.settle()
        self.settle()


def random_plans(rng: random.Random, setup: Setup) -> list[tuple[tuple[Round, ...], bool]]:
    """(rounds of a graph, whether the last is a dispatch alone: an odd number of steps)."""
    plans = []
    for odd in (False, rng.random() < 0.5):
        drawn = [random_round(rng, setup) for _ in range(rng.randint(1, 3))]
        plans.append((tuple(replace(r, send_dispatch=False, again=False, late=False) for r in drawn), odd))
    return plans


class Replay:
    """A captured sequence of rounds, replayed with other inputs each time."""

    def __init__(self, soak: Soak, one: Open, plan: tuple[tuple[Round, ...], bool]):
        self.soak, self.one = soak, one
        self.rounds, self.odd = plan
        self.inputs = [soak.draw_inputs(one, r) for r in self.rounds]
        mine = [i[soak.env.rank] for i in self.inputs]
        self.static = [
            Inputs(i.ids.to(getattr(torch, r.ids)), i.weights.clone(), [p.clone() for p in i.payloads])
            for i, r in zip(mine, self.rounds, strict=True)
        ]
        self.steps()  # whatever the first call sets up must not be captured
        self.graph, self.results = capture(soak.env, self.steps)

    def steps(self) -> list[tuple[Any, ...]]:
        """What is captured: rounds one after the other. Copies of what views show, as their life is short."""
        results = []
        for round_, static in zip(self.rounds, self.static, strict=True):
            group, last = self.one.group, len(results) == len(self.rounds) - 1
            handle = group.route(static.ids, static.weights)
            tokens, *extra = static.payloads
            payloads = {f"p{q}": p for q, p in enumerate(extra)}
            got = group.dispatch(handle, tokens, payloads, layout=round_.layout, bound=round_.bound)
            copy = Copy(got, len(self.one.setup.payloads))
            if self.odd and last:
                handle.release()
                results.append((copy, None, handle))
                continue
            rows = self.soak.answers(self.one, round_, got)
            if round_.send_combine:
                out = self.soak.combine(self.one, round_, handle, rows, True).result()
            else:
                out = self.soak.combine(self.one, round_, handle, rows, False)
            results.append((copy, out, handle))
        return results

    def once(self) -> None:
        self.inputs = [self.soak.draw_inputs(self.one, r) for r in self.rounds]
        for static, of in zip(self.static, self.inputs, strict=True):
            mine = of[self.soak.env.rank]
            static.ids.copy_(mine.ids)
            static.weights.copy_(mine.weights)
            for to, payload in zip(static.payloads, mine.payloads, strict=True):
                to.copy_(payload)
        self.soak.nap()
        self.graph.replay()
        for round_, of, (copy, out, _) in zip(self.rounds, self.inputs, self.results, strict=True):
            self.soak.judge_received(self.one, round_, of, copy, False)
            if out is not None:
                self.soak.judge_result(self.one, round_, of, out)


class Copy:
    """What a dispatch brought, copied."""

    def __init__(self, got: tw.Received, extra: int):
        self.tokens = got.tokens.clone()
        self.payloads = {f"p{q}": got.payloads[f"p{q}"].clone() for q in range(extra)}
        self.ids, self.weights, self.counts = got.ids.clone(), got.weights.clone(), got.counts.clone()


def spread(rows: torch.Tensor, apart: bool) -> torch.Tensor:
    """The same values; `apart`: with gaps between rows, and at an odd place."""
    if not apart:
        return rows
    wide = rows.new_empty(rows.shape[0] + 1, rows.shape[1] + 3)
    view = wide[1:, 2 : 2 + rows.shape[1]]
    view.copy_(rows)
    return view


# ---- the judge of some rounds --------------------------------------------------------------------


def compare_with_numpy(
    setup: Setup, round_: Round, inputs: list[Inputs], env: Any, kept: dict[str, Any], out: torch.Tensor
) -> None:
    """This rank's results against the NumPy oracle, and with them the oracle on the device."""
    array = env.backend.array
    x = ref.Exchange(
        [array(i.ids).astype(round_.ids) for i in inputs],
        [array(i.weights) for i in inputs],
        experts=setup.experts,
        bound=setup.max_tokens if round_.bound is None else round_.bound,
        id_space=setup.id_space,
        invalid_id=setup.invalid_id,
    )
    payloads = [list(of) for of in zip(*([array(p) for p in i.payloads] for i in inputs), strict=True)]
    dispatch = ref.dispatch_rank_major if round_.layout == "rank_major" else ref.dispatch_expert_major
    where = f"rank {env.rank} of {round_}\n in {setup}"
    rows = []
    for rank in range(setup.ranks):
        want = dispatch(x, rank, payloads)
        rows.append(cases.answers(setup, round_, rank, want.payloads[0], want.ids, want.weights, want.counts))
        if rank != env.rank:
            continue
        same("counts", kept["counts"], want.counts, where)
        same("ids", kept["ids"], want.ids.astype(setup.id_dtype), where)
        same("weights", kept["weights"], want.weights, where)
        filled = np.arange(want.weights.shape[1]) < want.counts[:, None]
        for q, (have, wanted) in enumerate(zip(kept["payloads"], want.payloads, strict=True)):
            same(f"payload {q}", cases.as_bits(have)[filled], cases.as_bits(wanted)[filled], where)
    wire, kind = numpy_dtype(setup.combine_dtype), numpy_dtype(round_.out)
    layout, weighting = round_.layout, round_.weighting
    wanted = ref.combine(x, rows, layout=layout, weighting=weighting, wire=wire, out=kind, owners=[env.rank])[0]
    same("result", array(out), wanted, where)


# ---- entry points on a rank ----------------------------------------------------------------------


def begin(env: Any, seed: int, groups: int) -> list[float]:
    """Opens the groups. Returns what the device's generator draws first: it must be the same everywhere."""
    env.kept["soak"] = Soak(env, seed, groups)
    probe = torch.Generator(env.device).manual_seed(seed)
    return torch.rand(8, device=env.device, generator=probe).tolist()


def play_rounds(env: Any, count: int) -> list[str]:
    """What was wrong in so many rounds."""
    return _report(env, env.kept["soak"].rounds, count)


def play_replays(env: Any, count: int) -> list[str]:
    """What was wrong in so many replays of graphs."""
    return _report(env, env.kept["soak"].replay, count)


def _report(env: Any, play: Any, count: int) -> list[str]:
    soak = env.kept["soak"]
    soak.failures.clear()
    play(count)
    return list(soak.failures)


def end(env: Any) -> int:
    """Closes the groups. Returns how many rounds NumPy judged."""
    soak = env.kept.pop("soak")
    env.stream.synchronize()
    soak.replays.clear()  # graphs hold memory that the groups' windows are read from
    for one in soak.open:
        one.group.close()
    return soak.judged
