"""CUDA graphs: every replay is a sequence of steps like any other, with the inputs that lie in its buffers then."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import LISTS, Case, Got, Round, Setup, exchange_of, make_ids, make_payloads, same, verify
from device_oracle import DeviceOracle
from gpu_world import TIMEOUT, Locals, capture, line_tokens
from player import Player

import tokenway as tw
from tokenway import reference as ref

SETUP = Setup(ranks=2, experts=9, top_k=4, hidden=96, max_tokens=40, payloads=((3, "uint8"),), lanes=2)
BASE = Round((40, 23))
BY_EXPERT = replace(BASE, layout="expert_major", seed=500)
FEW = replace(BASE, tokens=(3, 1), bound=4, routing="holes", seed=700)
HIGH = (replace(BASE, layout="flat", seed=900), replace(BASE, layout="grouped", seed=901))


# Rows of other types than the group's own: larger elements, and a width that is no multiple of anything.
TYPES = (
    {"hidden": 33, "dtype": "float32", "payloads": ((5, "int16"),), "combine_dtype": "float32"},
    {"hidden": 70, "dtype": "float8_e4m3fn", "payloads": ((1, "float32"),), "combine_hidden": 9},
)


@dataclass(frozen=True)
class Plan:
    """What a graph holds: rounds, one after the other or all under way at once; the last may stay a dispatch. types:
    changes of the group's setup for the rows of each round; {} for its own."""

    rounds: tuple[Round, ...]
    together: bool = False
    odd: bool = False
    types: tuple[dict[str, Any], ...] = ({},)

    def setups(self, setup: Setup) -> list[Setup]:
        """Of its rounds, in a group of this setup."""
        return [replace(setup, **self.types[i % len(self.types)]) for i in range(len(self.rounds))]


PLANS = {
    "p": Plan((BASE,)),
    "x": Plan((BY_EXPERT,)),
    "f": Plan((replace(FEW, index_block=16),)),
    "t": Plan(tuple(replace((BASE, FEW, BY_EXPERT)[i % 3], seed=i) for i in range(10))),
    "l": Plan((replace(BASE, index_block=64), replace(FEW, send_dispatch=True)), together=True),
    "o": Plan((BASE,), odd=True),
    "q": Plan((FEW, BASE), odd=True),
    "r": Plan(tuple(replace((BASE, FEW, BY_EXPERT)[i % 3], seed=40 + i) for i in range(6)), types=({}, *TYPES)),
    "v": Plan((BASE, replace(FEW, send_dispatch=True)), together=True, types=TYPES),
    "u": Plan((replace(BASE, tokens=(64, 7), seed=900),)),  # of a group in the first one's window
}
# That group: "u" is its graph, and "s" a round of it without one.
SECOND = Setup(ranks=2, experts=5, top_k=2, hidden=40, max_tokens=64, dtype="float32", payloads=((1, "int64"),))


def setup_of(letter: str, first: Setup) -> Setup:
    return replace(SECOND, ranks=first.ranks) if letter in "us" else first


def plan_of(letter: str) -> Plan:
    return {"e": Plan((BASE, FEW)), "h": Plan(HIGH), "s": PLANS["u"]}.get(letter) or PLANS[letter]


def on_ranks(round_: Round, ranks: int) -> Round:
    """The round, whose tokens are those of two ranks, on so many."""
    return replace(round_, tokens=tuple(round_.tokens[rank % 2] for rank in range(ranks)))


def now(round_: Round, turn: int) -> Round:
    """The round with the inputs of a turn."""
    return replace(round_, seed=round_.seed + 10000 * (turn + 1))


# ---- on a rank -----------------------------------------------------------------------------------


class Captured:
    """A plan as a graph, its inputs in static buffers."""

    def __init__(self, env: Any, group: tw.Group, setup: Setup, plan: Plan, before: Any = None):
        self.env, self.group, self.plan = env, group, plan
        self.rounds = [on_ranks(r, setup.ranks) for r in plan.rounds]
        self.setups = plan.setups(setup)
        self.oracles = [DeviceOracle(of, env.device) for of in self.setups]
        self.calls = [group if of == setup else group.rows(of.row_type()) for of in self.setups]
        self.static = [[env.backend.tensor(a) for a in self.arrays(i, r)] for i, r in enumerate(self.rounds)]
        self.handles: list[tw.Handle] = []  # their memory is written by every replay
        self.steps()
        env.stream.synchronize()
        if before is not None:
            before.wait(30)
        self.graph, self.results = capture(env, self.steps)
        if before is not None:
            self.upload()
            before.wait(30)

    def arrays(self, i: int, round_: Round) -> list[np.ndarray]:
        setup, rank = self.setups[i], self.env.rank
        return [*make_ids(setup, round_, rank), *make_payloads(setup, round_, rank)]

    def upload(self) -> None:
        """What the first launch would do, and would synchronise for."""
        launch = ctypes.c_void_p(self.graph.raw_cuda_graph_exec())
        code = ctypes.CDLL("libcuda.so.1").cuGraphUpload(launch, ctypes.c_void_p(self.env.stream.cuda_stream))
        assert code == 0, f"cuGraphUpload failed with {code}"
        self.env.stream.synchronize()

    def steps(self) -> list[dict[str, Any]]:
        each = range(len(self.rounds))
        if self.plan.together:
            sent = [self.send(i) for i in each]
            received = [self.receive(*one) for one in sent]
            return [self.back(i, received[i], last=False) for i in each]
        return [self.back(i, self.receive(*self.send(i)), i == each[-1]) for i in each]

    def send(self, i: int) -> tuple[tw.Handle, Any]:
        round_ = self.rounds[i]
        ids, weights, tokens, extra = self.static[i]
        handle = self.group.route(ids, weights)
        self.handles.append(handle)
        more = {"layout": round_.layout, "bound": round_.bound, "send_only": round_.send_dispatch}
        more["index_block"] = round_.index_block
        return handle, self.calls[i].dispatch(handle, tokens, {"p0": extra}, **more)

    def receive(self, handle: tw.Handle, pending: Any) -> tuple[tw.Handle, tw.Received, dict[str, Any]]:
        got = pending.result() if isinstance(pending, tw.Pending) else pending
        lists = LISTS if got.sorted_rows is not None else ()
        fields = {name: getattr(got, name) for name in ("tokens", "ids", "weights", "counts", "offsets", *lists)}
        return handle, got, {name: t.clone() for name, t in (fields | {"p0": got.payloads["p0"]}).items()}

    def back(self, i: int, received: tuple[tw.Handle, tw.Received, dict[str, Any]], last: bool) -> Any:
        round_, (handle, got, kept) = self.rounds[i], received
        if self.plan.odd and last:
            handle.release()
            return kept
        rows = self.oracles[i].answers(round_, self.env.rank, got.tokens, got.ids, got.weights)
        kept["out"] = self.calls[i].combine(
            handle, rows, weighting=round_.weighting, dtype=round_.out, send_only=round_.send_dispatch
        )
        if round_.send_dispatch:
            kept["out"] = kept["out"].result()
        return kept

    def replay(self, turn: int) -> list[Got]:
        """With the inputs of a turn: ids, weights and rows."""
        for i, (round_, static) in enumerate(zip(self.rounds, self.static, strict=True)):
            for to, array in zip(static, self.arrays(i, now(round_, turn)), strict=True):
                to.copy_(self.env.backend.tensor(array))
        self.graph.replay()
        array = self.env.backend.array
        results = []
        for kept in self.results:
            of = {name: array(tensor) for name, tensor in kept.items()}
            beside = [of[name] for name in ("ids", "weights", "counts", "offsets")]
            lists = tuple(of[name] for name in LISTS if name in of)
            results.append(Got([of["tokens"], of["p0"]], *beside, of.get("out"), lists=lists))
        return results


def run(env: Any, sequence: str, most: int | None, barriers: Any = None, setup: Setup = SETUP) -> list[Any]:
    """Replays graphs in a sequence, by the letters of PLANS; "e" and "s" are rounds without a graph, "h" such of high
    throughput, and "g" lets the first group grow. What came by turn."""
    other = setup_of("s", setup).settings()
    del other["lanes"]
    with ExitStack() as stack:
        stack.enter_context(line_tokens(most))
        shares = {"room_for": [other]} if set("us") & set(sequence) else {}
        group = stack.enter_context(tw.Group(env.comm, timeout=TIMEOUT, **setup.settings(), **shares))
        groups = dict.fromkeys((*PLANS, "e", "h"), group)
        if shares:
            second = stack.enter_context(tw.Group(env.comm, arena=group, timeout=TIMEOUT, **other))
            groups |= dict.fromkeys("us", second)
        graphs = {
            letter: Captured(env, groups[letter], setup_of(letter, setup), PLANS[letter], barriers)
            for letter in dict.fromkeys(sequence)
            if letter in PLANS
        }
        turns = []
        for turn, letter in enumerate(sequence):
            if letter in "ehs":
                of = setup_of(letter, setup)
                most_tokens = None if letter == "h" else of.max_tokens
                rounds = (on_ranks(r, of.ranks) for r in plan_of(letter).rounds)
                flight = tuple(now(replace(r, bound=r.bound or most_tokens), turn) for r in rounds)
                turns.append(Player(env, groups[letter], Case(of, ())).flight(flight))
            elif letter == "g":
                group.reserve(max_tokens=2 * group.max_tokens)
                turns.append([])
            else:
                turns.append(graphs[letter].replay(turn))
        env.stream.synchronize()
        graphs.clear()
    return turns


# ---- the judge -----------------------------------------------------------------------------------


def verify_received(setup: Setup, round_: Round, got: Sequence[Got]) -> None:
    """A dispatch alone against the oracle: every row where the view was, when the copy was made."""
    x = exchange_of(setup, round_)
    by_rank = [make_payloads(setup, round_, r) for r in range(setup.ranks)]
    payloads = [list(of) for of in zip(*by_rank, strict=True)]
    for rank, mine in enumerate(got):
        want = ref.dispatch_rank_major(x, rank, payloads)
        where = f"rank {rank} of {round_}"
        same("counts", mine.counts, want.counts, where)
        same("ids", mine.ids, want.ids.astype(setup.id_dtype), where)
        same("weights", mine.weights, want.weights, where)
        filled = np.arange(want.weights.shape[1]) < want.counts[:, None]
        for q, (one, wanted) in enumerate(zip(mine.payloads, want.payloads, strict=True)):
            size = wanted.itemsize
            same(f"payload {q}", one.view(f"u{size}")[filled], wanted.view(f"u{size}")[filled], where)


def check(sequence: str, by_rank: list[list[list[Got]]], setup: Setup = SETUP) -> None:
    for turn, letter in enumerate(sequence):
        if letter == "g":
            continue
        plan = plan_of(letter)
        for i, (round_, of) in enumerate(zip(plan.rounds, plan.setups(setup_of(letter, setup)), strict=True)):
            got = [mine[turn][i] for mine in by_rank]
            judged = now(on_ranks(round_, of.ranks), turn)
            verify_received(of, judged, got) if got[0].out is None else verify(of, judged, got)


# ---- the tests -----------------------------------------------------------------------------------

SEQUENCES = {
    "fifty replays": "p" * 50,
    "by expert": "x" * 12,
    "few tokens": "f" * 12,
    "between eager rounds": "pepeeppepxefepe",
    "ten pairs": "tttett",
    "two lanes": "lllelplell",
    # A dispatch alone moves its channel by one step: the next is in the other bank, its view in the same place.
    "odd": "opoeoopoooepqoepqqeqoepoetoqp",
    # Graphs of before the group grows, between new calls and further growth.
    "growth": "pegpegxefpgotlegpeqofxtl",
    # Graphs and rounds of two groups that share a window, on the same lanes, also after the first has grown.
    "two groups": "pusepuuppsoquseoxufuslutugpusegxu",
    # Calls of several row types in one graph, and in flight at once, between calls of the group's own rows.
    "row types": "rrprverxvvfrogrvep",
}


@pytest.mark.parametrize("most", [None, 0])
@pytest.mark.parametrize("name", SEQUENCES)
def test_replays(pair, name, most) -> None:
    sequence = SEQUENCES[name]
    check(sequence, pair.run(run, sequence, most))


@pytest.mark.parametrize("most", [None, 0])
def test_replays_in_a_group_of_both_modes(pair, most) -> None:
    setup = replace(SETUP, mode="auto", low_latency_tokens=40)
    sequence = "phepfhoxheqhptlhgpfh"
    check(sequence, pair.run(run, sequence, most, None, setup), setup)


@pytest.mark.parametrize("name", ["between eager rounds", "odd", "two lanes", "row types"])
def test_replays_of_one_rank(lines, name) -> None:
    sequence, alone = SEQUENCES[name], replace(SETUP, ranks=1)
    with Locals(1) as ranks:
        check(sequence, ranks.run(run, sequence, None if lines == "lines" else 0, None, alone), alone)


@pytest.mark.parametrize("where", ["one device", "all devices"])
@pytest.mark.parametrize("name", ["between eager rounds", "odd"])
def test_replays_of_local_ranks(name, where) -> None:
    """Every rank's graph is its own, uploaded before any rank launches."""
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        pytest.skip("this PyTorch does not show a graph that could be uploaded")
    sequence = SEQUENCES[name]
    with Locals(2, devices=[0, 0] if where == "one device" else None) as ranks:
        check(sequence, ranks.run(run, sequence, None, threading.Barrier(2)))


# ---- registered ops ------------------------------------------------------------------------------


def run_ops(env: Any, layout: str, turns: int) -> list[np.ndarray]:
    """Two layers of registered ops in a graph."""
    from tokenway import ops

    results = []
    with tw.Group(env.comm, timeout=TIMEOUT, **OPS_SETUP.settings()) as group:
        number = ops.register(group)
        static = [env.backend.tensor(a) for a in ops_inputs(env.rank, 0)]

        def steps() -> list[Any]:
            order, outs = ops.start(), []
            for factor in (1, 2):
                received, _, _, _, order = torch.ops.tokenway.dispatch(
                    static[2] * factor, static[0], static[1], order, number, OPS_SETUP.max_tokens, layout
                )
                out, order = torch.ops.tokenway.combine(received * 0.5, order, number, len(static[0]), "topk")
                outs.append(out)
            return outs

        steps()
        graph, outs = capture(env, steps)
        for turn in range(turns):
            for to, array in zip(static, ops_inputs(env.rank, turn), strict=True):
                to.copy_(env.backend.tensor(array))
            graph.replay()
            results.append(np.stack([env.backend.array(out) for out in outs]))
        env.stream.synchronize()
        del graph
    return results


OPS_SETUP = Setup(ranks=2, experts=6, top_k=3, hidden=8, dtype="float32", combine_dtype="float32")
OPS_ROUND = Round((5, 8))


def ops_inputs(rank: int, turn: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    round_ = now(OPS_ROUND, turn)
    return (*make_ids(OPS_SETUP, round_, rank), make_payloads(OPS_SETUP, round_, rank)[0])


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_registered_ops(pair, layout) -> None:
    by_rank = pair.run(run_ops, layout, 6)
    view = ref.dispatch_rank_major if layout == "rank_major" else ref.dispatch_expert_major
    for turn in range(6):
        inputs = [ops_inputs(rank, turn) for rank in range(2)]
        ids, weights = [i for i, _, _ in inputs], [w for _, w, _ in inputs]
        x = ref.Exchange(ids, weights, OPS_SETUP.experts, OPS_SETUP.max_tokens)
        for layer, factor in enumerate((1, 2)):
            tokens = [t * np.float32(factor) for _, _, t in inputs]
            rows = [view(x, r, [tokens]).payloads[0] * np.float32(0.5) for r in range(2)]
            wanted = ref.combine(x, rows, layout=layout, weighting="topk")
            for rank in range(2):
                same("out", by_rank[rank][turn][layer], wanted[rank], f"rank {rank}, turn {turn}, layer {layer}")
