"""High throughput with calls that return at once: counts on the device, outputs of a fixed size, graphs, questions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import player
import pytest
import torch
from cases import Case, Round, Setup, make_ids, one, verify
from gpu_world import TIMEOUT, Locals, capture, line_tokens, sleep_on_device

import tokenway as tw
from tokenway.tensors import numpy_dtype

LAYOUTS = ("flat", "grouped")
EXACT = {"mode": "high_throughput"}


def cases_of(ranks: int) -> dict[str, Case]:
    """What may go wrong if something is not in order of the stream."""
    setup = Setup(ranks=ranks, experts=2 * ranks + 1, top_k=3, lanes=3, max_tokens=8, row_alignment=4, **EXACT)
    base = Round((8, 3, 6, 0, 7)[:ranks])
    both = [replace(base, layout=layout, seed=i) for i, layout in enumerate(LAYOUTS)]
    many = replace(setup, experts=64, top_k=8, max_tokens=700, hidden=72)
    rounds = [replace(r, tokens=(700, 411, 0, 5, 256)[:ranks]) for r in both]
    flight = tuple(
        replace(base, seed=20 + i, layout=LAYOUTS[i % 2], send_dispatch=True, send_combine=i != 1, again=i == 2)
        for i in range(3)
    )
    return {
        "many tokens": one(many, *rounds),
        "in parts": one(replace(many, inbox_tokens=150), *rounds, replace(rounds[0], bound=700, seed=7, again=True)),
        "few have room": one(replace(many, max_recv_tokens=500, overflow="drop"), *rounds),
        "lanes": Case(setup, (flight,) * 3, order=5, slow=1),
        "ids": one(replace(setup, id_dtype="int64"), *(replace(r, ids="int64", routing="holes") for r in both)),
    }


@pytest.mark.parametrize("most", [None, 0])
@pytest.mark.parametrize("nranks", [1, 2, 3])
@pytest.mark.parametrize("name", cases_of(2))
def test_rounds(name: str, nranks: int, most: int | None) -> None:
    case = cases_of(nranks)[name]
    with line_tokens(most), Locals(nranks) as ranks:
        by_rank = ranks.run(player.play, case)
    for f, flight in enumerate(case.flights):
        for i, round_ in enumerate(flight):
            verify(case.setup, round_, [mine[f][i] for mine in by_rank])


# ---- outputs of a fixed size --------------------------------------------------------------------------------

TOKENS = (90, 41, 64)
REPLAYS = 5


class Layer:
    """Counts, dispatch, identity experts and combine over static buffers; sums of whole numbers are exact. limits: of
    its counts, in place of the group's."""

    def __init__(self, env: Any, group: tw.Group, setup: Setup, layout: str, limits: dict[str, int]):
        self.env, self.group, self.setup, self.layout, self.limits = env, group, setup, layout, limits
        self.tokens = torch.zeros((TOKENS[env.rank], setup.hidden), dtype=torch.float32, device=env.device)
        ids, weights = make_ids(setup, Round(TOKENS[: setup.ranks]), env.rank)
        self.ids, self.weights = env.backend.tensor(ids), env.backend.tensor(weights)
        self.handle = group.route(self.ids, self.weights)

    def load(self, turn: int) -> None:
        """Other tokens and ids."""
        round_ = Round(TOKENS[: self.setup.ranks], seed=turn, routing=("holes", "uniform")[turn % 2])
        self.ids.copy_(self.env.backend.tensor(make_ids(self.setup, round_, self.env.rank)[0]))
        values = torch.arange(self.tokens.numel(), device=self.env.device).view_as(self.tokens) * (turn + 1)
        self.tokens.copy_(values % 251 - 125)

    def step(self) -> Any:
        self.handle.update(self.ids, self.weights)
        few = {"sm_limit": 2 + self.env.rank} if self.limits else {}
        self.group.exchange_counts(self.handle, **self.limits, **few)
        received = self.group.dispatch(self.handle, self.tokens, layout=self.layout, **few)
        out = self.group.combine(self.handle, received.tokens.clone(), **few)
        return received, received.ids, received.counts, out

    def check(self, results: Any) -> None:
        """Each token comes back once from each rank that it went to, or from each expert."""
        received, ids, counts, out = results
        experts = self.setup.experts
        here = -(-experts // self.setup.ranks)  # the default placement, of experts that ranks divide
        valid = self.ids >= 0
        if self.layout == "flat":
            homes = torch.where(valid, self.ids // here, torch.full_like(self.ids, -1))
            times = sum((homes == rank).any(dim=1).float() for rank in range(self.setup.ranks))
        else:
            times = valid.sum(dim=1).float()
        assert torch.equal(out, self.tokens * times[:, None]), f"turn of {self.layout}"
        used = int(counts.sum())
        assert len(received.tokens) >= used and (self.layout == "grouped" or bool((ids[used:] == -1).all()))
        assert int((ids >= 0).any(dim=1).sum() if self.layout == "flat" else (ids >= 0).sum()) == used


def captured_layers(env: Any, layout: str, of_calls: bool, inbox: int | None = None) -> None:
    ranks = env.nranks
    setup = Setup(ranks=ranks, experts=4 * ranks, top_k=4, hidden=24, max_tokens=90, dtype="float32", **EXACT)
    setup = replace(setup, inbox_tokens=inbox)
    limits = {"max_recv_tokens": sum(TOKENS[:ranks]) if of_calls else 90 * ranks, "row_alignment": 8}
    settings = setup.settings() | {"combine_dtype": "float32"} | ({} if of_calls else limits)
    with tw.Group(env.comm, timeout=TIMEOUT, **settings) as group:
        layer = Layer(env, group, setup, layout, limits if of_calls else {})
        layer.load(0)
        layer.check(layer.step())  # as large as there is room for, though nothing is captured
        assert len(layer.step()[0].tokens) == layer.handle.rows_of(layout)
        graph, results = capture(env, layer.step)
        for turn in range(1, REPLAYS):
            layer.load(turn)
            graph.replay()
            layer.check(results)
        with pytest.raises(tw.InvalidUsage, match="captured into a graph"):
            _ = layer.handle.recv_rows
        with pytest.raises(tw.InvalidUsage, match="captured into a graph"):
            _ = layer.handle.expert_rows
        layer.load(7)
        layer.check(layer.step())  # eager calls go on
        layer.handle.update(layer.ids, layer.weights)
        for other in ({"row_alignment": 16}, {"max_recv_tokens": limits["max_recv_tokens"] - 1}):
            with pytest.raises(tw.InvalidUsage, match=r"but was \d+ in the handle's last exchange of counts"):
                group.exchange_counts(layer.handle, **layer.limits | other)
        assert group.error is None
        graph.reset()


@pytest.mark.parametrize("of_calls", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_layer_in_a_graph(pair: Any, layout: str, of_calls: bool) -> None:
    """By limits of the group, or of the calls, which a graph keeps."""
    pair.run(captured_layers, layout, of_calls)


@pytest.mark.parametrize("of_calls", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_layer_in_a_graph_alone(layout: str, of_calls: bool) -> None:
    with Locals(1) as ranks:
        ranks.run(captured_layers, layout, of_calls)


@pytest.mark.parametrize("inbox", [7, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_combines_in_parts(pair: Any, layout: str, inbox: int) -> None:
    """Replays find anew what each part has."""
    pair.run(captured_layers, layout, False, inbox)


def sized_in_a_graph(env: Any, layout: str) -> None:
    settings = {"experts": 4 * env.nranks, "top_k": 2, "hidden": 16, "max_tokens": 9, "dtype": "float32", **EXACT}
    ids = torch.tensor([[0, 1]] * 5, dtype=torch.int32, device=env.device)
    tokens = torch.arange(80, dtype=torch.float32, device=env.device).reshape(5, 16)
    with tw.Group(env.comm, timeout=TIMEOUT, **settings) as group:
        handle = group.route(ids)
        group.exchange_counts(handle)
        handle.learn_rows()
        rows = handle.rows_of(layout)

        def step() -> Any:
            received = group.dispatch(handle, tokens, layout=layout)
            return received.tokens, group.combine(handle, received.tokens, layout=layout)

        graph, (received, out) = capture(env, step)
        assert len(received) == rows
        with pytest.raises(tw.InvalidUsage, match="a captured dispatch or combine of this handle"):
            handle.update(ids.flip(1))
        graph.replay()
        env.stream.synchronize()
        copies = 1 if layout == "flat" else 2  # of a row at its rank
        assert torch.equal(out, tokens * copies)
        other = group.route(ids[:3])
        group.exchange_counts(other)
        other.update(ids)  # no graph has it
        assert group.error is None
        graph.reset()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_that_a_graph_relies_on(layout: str) -> None:
    with Locals(1) as ranks:
        ranks.run(sized_in_a_graph, layout)


def with_room_to_spare(env: Any, layout: str) -> list[Any]:
    """Outputs with a fixed number of rows: their ids and weights, the rows that come, and those beyond."""
    setup = Setup(
        ranks=env.comm.nranks, experts=4, top_k=2, hidden=6, max_tokens=9, payloads=((3, "float32"),), **EXACT
    )
    settings = setup.settings() | {"max_recv_tokens": 18, "row_alignment": 4}
    with tw.Group(env.comm, timeout=TIMEOUT, **settings) as group:
        tensor, array = env.backend.tensor, env.backend.array
        tokens = tensor(np.ones((2, 6), numpy_dtype("bfloat16")))
        scales = {"p0": tensor(np.ones((2, 3), np.float32))}
        handle = group.route(tensor(np.array([[3, 0], [0, -1]], np.int32)))
        group.exchange_counts(handle)
        rows = handle.rows_of(layout) or 0
        out = {
            "tokens": tensor(np.full((rows, 6), 9, numpy_dtype("bfloat16"))),
            "p0": tensor(np.full((rows, 3), 9, np.float32)),
        }
        received = group.dispatch(handle, tokens, scales, layout=layout, out=out)
        used = int(array(received.offsets)[-1])
        found = [array(out["tokens"]).astype(np.float32), array(out["p0"])]
        group.combine(handle, received.tokens)
        return [rows, used, *found, array(received.ids), array(received.weights)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_written_where_nothing_comes(layout: str) -> None:
    """Rows beyond those that come stay as they are: a dispatch costs a device what comes, not the room for it."""
    with Locals(2) as ranks:
        by_rank = ranks.run(with_room_to_spare, layout)
    for rank, (rows, used, tokens, scales, ids, weights) in enumerate(by_rank):
        came = (4, 2)[rank]  # rank 0 has expert 0, with both tokens of both, rank 1 expert 3
        padded = came if layout == "flat" else 4
        assert used == padded and rows == (18 if layout == "flat" else 40), (rows, used)
        for values in (tokens, scales):
            assert (values[:came] == 1).all() and (values[came:used] == 0).all() and (values[used:] == 9).all()
        assert (ids[used:] == -1).all() and not weights[used:].any()


# ---- what the host asks -------------------------------------------------------------------------------------


def asking(env: Any) -> list[Any]:
    setup = Setup(ranks=env.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, lanes=2, **EXACT)
    with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
        handle = group.route(torch.full((2, 1), 3, dtype=torch.int32, device=env.device))
        with pytest.raises(tw.InvalidUsage, match="no exchange of counts is under way"):
            handle.counts_ready()
        if env.rank == 1:
            sleep_on_device(0.3)
        group.exchange_counts(handle)
        found = [handle.counts_ready(), handle.counts_ready(0.01)] if env.rank == 0 else []
        found += [handle.counts_ready(None), handle.expert_rows.tolist(), handle.counts_ready(), handle.recv_rows]
        pending = group.exchange_counts(
            group.route(torch.zeros((1, 1), dtype=torch.int32, device=env.device)), send_only=True
        )
        other = pending.result()
        return [*found, other.expert_rows.tolist()]


def test_asking_for_counts() -> None:
    with Locals(2) as ranks:
        assert ranks.run(asking) == [[False, False, True, [0, 0], True, 0, [2, 0]], [True, [0, 4], True, 4, [0, 0]]]


def overflow(env: Any) -> list[str]:
    setup = Setup(ranks=env.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, max_recv_tokens=7, **EXACT)
    with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
        tokens = torch.ones((6, 4), dtype=torch.bfloat16, device=env.device)
        handle = group.route(torch.full((6, 1), 3, dtype=torch.int32, device=env.device))
        group.exchange_counts(handle)
        # Nobody has asked, so the dispatch is made: nothing is sent, and what it brings says so.
        received = group.dispatch(handle, tokens)
        out = group.combine(handle, torch.zeros_like(received.tokens))
        assert not bool(received.counts.any()) and bool(out.isnan().all())
        env.stream.synchronize()
        with pytest.raises(tw.RecvOverflow) as late:
            group.check()
        with pytest.raises(tw.RecvOverflow) as asked:
            _ = handle.recv_rows
        group.check()  # told already
        handle.update(torch.full((6, 1), 3, dtype=torch.int32, device=env.device))
        group.exchange_counts(handle)
        with pytest.raises(tw.RecvOverflow):
            _ = handle.recv_rows
        env.stream.synchronize()
        group.check()
        handle.update(torch.tensor([[3], [-1], [0], [-1], [-1], [-1]], dtype=torch.int32, device=env.device))
        group.exchange_counts(handle)
        received = group.dispatch(handle, tokens)
        out = group.combine(handle, received.tokens.clone())
        assert out.sum(dim=1).tolist() == [4, 0, 4, 0, 0, 0]
        return [str(late.value), str(asked.value)]


def test_overflow_is_learnt_late() -> None:
    with Locals(2) as ranks:
        said = ranks.run(overflow)
    wanted = "rank 1 would receive 12 rows; max_recv_tokens is 7 (nothing was sent)"
    assert all(wanted in sentence for mine in said for sentence in mine)


def late_rank(env: Any) -> str:
    setup = Setup(ranks=env.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, **EXACT)
    group = tw.Group(env.comm, timeout=0.5, **setup.settings())
    try:
        if env.rank == 0:
            return "silent"
        handle = group.route(torch.zeros((2, 1), dtype=torch.int32, device=env.device))
        group.exchange_counts(handle)
        with pytest.raises(tw.PeerTimeout) as caught:
            _ = handle.recv_rows
        return str(caught.value)
    finally:
        if env.rank == 0:
            time.sleep(1.5)
        group.abort()
        group.close()


def test_a_rank_that_does_not_count() -> None:
    with Locals(2) as ranks:
        said = ranks.run(late_rank)
    assert said[0] == "silent" and "rank 0 did not arrive in time in the exchange of counts" in said[1]
