"""What dispatches count: the same on all ranks, as the oracle counts, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Round, Setup, make_ids, make_payloads, same
from marks import heavy_but
from test_replicas import OTHER, TABLE, setup_of

import tokenway as tw
from tokenway.replica_reference import POLICIES, loads_of

pytestmark = pytest.mark.needs("loads")

DECAY = 0.75
LAYERS = 3
# For each dispatch: tokens of the ranks, its layer and channel, whether it counts.
STEPS = (
    ((9, 0, 4, 1), 0, 0, True),
    ((24, 24, 24, 24), 2, 1, True),
    ((3, 5, 7, 9), 0, 1, True),
    ((3, 5, 7, 9), 0, 1, False),
    ((0, 0, 0, 0), 2, 0, True),
    ((17, 1, 0, 24), 0, 0, True),
    ((17, 1, 0, 24), 0, 0, True),
    # A channel that serves a layer no longer.
    *[((17, 1, 0, 24), 2, 1, True)] * 3,
)


def rounds_of(ranks: int) -> list[tuple[Round, int, int, bool]]:
    routings = ("random", "holes", "one", "none", "few")
    return [
        (Round(tokens[:ranks], seed=i, routing=routings[i % 5]), layer, lane, count)
        for i, (tokens, layer, lane, count) in enumerate(STEPS)
    ]


def expected(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    """(loads [layers, E], dispatches [layers])."""
    loads = np.zeros((LAYERS, setup.experts), np.float32)
    dispatches = np.zeros(LAYERS, np.int64)
    for layer in range(LAYERS):
        counts = []
        for round_, at, lane, count in rounds_of(setup.ranks):
            if (at, count) != (layer, True):
                continue
            ids = np.concatenate([make_ids(setup, round_, r)[0].ravel() for r in range(setup.ranks)])
            counts.append((lane, np.bincount(ids[ids >= 0], minlength=setup.experts)))
        dispatches[layer] = len(counts)
        if counts:
            loads[layer] = loads_of(counts, DECAY)
    return loads, dispatches


def count(env: Any, setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    made: dict[str, Any] = setup.settings()
    table = np.stack([TABLE, OTHER, TABLE])
    made["expert_map"] = tw.Placement(table, policy=setup.policy, count_loads=True, load_decay=DECAY)
    backend = env.backend
    with env.context(), tw.Group(env.comm, **made) as group:
        assert not group.loads.any() and not group.counted_dispatches.any()
        for round_, layer, lane, counted in rounds_of(setup.ranks):
            ids, weights = make_ids(setup, round_, env.rank)
            handle = group.route(backend.tensor(ids), backend.tensor(weights), layer=layer)
            tokens = backend.tensor(make_payloads(setup, round_, env.rank)[0])
            if setup.exact:
                group.exchange_counts(handle)
            received = group.dispatch(handle, tokens, lane=lane, count=counted)
            group.combine(handle, backend.tensor(backend.array(received.tokens)), weighting="topk")
        # What the last dispatch of each channel has told is taken by the next one.
        nothing = backend.tensor(np.zeros((0, setup.top_k), np.int32))
        rows = backend.tensor(np.zeros((0, setup.hidden), tokens_dtype(setup)))
        for lane in range(setup.lanes):
            handle = group.route(nothing)
            if setup.exact:
                group.exchange_counts(handle)
            group.dispatch(handle, rows, lane=lane, count=False)
            handle.release()
        return group.loads, group.counted_dispatches


def tokens_dtype(setup: Setup) -> Any:
    return np.dtype(setup.dtype)


MODES = ("low_latency", "high_throughput")
# Values of top-k: on a device, ids that are no whole vectors, and ids that are.
SOME = [(policy, MODES[i % 2], 5 - i // 2 % 2) for i, policy in enumerate(POLICIES)]


@pytest.mark.parametrize(("policy", "mode", "top_k"), heavy_but(SOME, POLICIES, MODES, (5, 4)))
def test_loads(world, policy, mode, top_k) -> None:
    ranks = min(4, world.most)
    setup = setup_of(policy, mode, ranks=ranks, top_k=top_k, dtype="float32", combine_dtype="float32")
    loads, dispatches = expected(setup)
    for found, counted in world(ranks).run(count, setup):
        same("loads", found, loads)
        same("dispatches", counted, dispatches)


def again(env: Any, refuses: bool) -> np.ndarray:
    """A handle is dispatched twice; one dispatch is refused by a rank."""
    made = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 4, "dtype": "float32", "combine_dtype": "float32"}
    placement = tw.Placement([0, 1, 2, 3, 1, 0], count_loads=True, load_decay=0.5)
    backend = env.backend
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        handle = group.route(backend.tensor(np.array([[0, 1], [1, -1]], np.int32)))
        rows = backend.tensor(np.zeros((2, 4), np.float32))
        group.dispatch(handle, rows)
        group.replace_map([3, 2, 1, 0, 3, 2])  # the handle's slots stay
        try:
            if refuses:
                bad = backend.tensor(np.zeros((2, 4), np.int32)) if env.rank == 0 else rows
                group.dispatch(handle, bad)
        except (tw.InvalidArgument, tw.PeerRefused):
            pass
        handle.release()
        group.dispatch(handle, rows)
        handle.release()
        empty = group.route(backend.tensor(np.zeros((0, 2), np.int32)))
        group.dispatch(empty, backend.tensor(np.zeros((0, 4), np.float32)), count=False)
        empty.release()
        return group.loads[0]


def dropped(env: Any, overflow: str) -> tuple[np.ndarray, np.ndarray]:
    """Too many rows for rank 0: what is dropped was chosen all the same, what is refused was not dispatched."""
    made = {"experts": 4, "top_k": 1, "hidden": 4, "max_tokens": 4, "dtype": "float32", "mode": "high_throughput"}
    made |= {"overflow": overflow, "max_recv_tokens": 3}
    placement = tw.Placement([0, 1, 2, 3], count_loads=True, load_decay=0.5)
    backend = env.backend
    with env.context(), tw.Group(env.comm, **made, expert_map=placement) as group:
        rows = backend.tensor(np.zeros((4, 4), np.float32))
        for expert in (0, 0, 3):
            handle = group.route(backend.tensor(np.full((4, 1), expert if env.rank == 0 else 3 - expert, np.int32)))
            try:
                group.exchange_counts(handle)
                group.dispatch(handle, rows, count=expert == 0)
            except tw.RecvOverflow:
                assert overflow == "refuse"
            handle.release()
        return group.loads[0], group.counted_dispatches


@pytest.mark.parametrize("overflow", ["drop", "refuse"])
def test_rows_without_room(threads, overflow) -> None:
    for loads, counted in threads(2).run(dropped, overflow):
        both = overflow == "drop"
        assert counted.tolist() == [2 if both else 0] and loads.tolist() == ([3.0, 0, 0, 3.0] if both else [0] * 4)


@pytest.mark.parametrize("refuses", [False, True])
def test_handles_dispatched_again(threads, refuses) -> None:
    for loads in threads(2).run(again, refuses):
        assert loads.tolist() == [1.5, 3.0, 0.0, 0.0]


def train(env: Any) -> np.ndarray:
    """A forward and a backward pass through experts with replicas, of which the first is counted."""
    import torch

    from tokenway import autograd

    placement = tw.Placement([[0, 1, 2, 3, 1, 0]] * 2, count_loads=True, load_decay=0.5)
    made = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4, "dtype": "float32", "expert_map": placement}
    with autograd.make_group(env.comm, **made) as group:
        ids = torch.tensor([[0, 1], [1, 2]])
        x = torch.ones(2, 8, requires_grad=True)
        weights = torch.full((2, 2), 0.5, requires_grad=True)
        routed = autograd.dispatch(group, x, ids, weights, layer=1)
        rows = routed.tokens * routed.weights.sum(-1, keepdim=True)
        autograd.combine(routed, rows).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.ones(2, 8))
        return group.loads


def test_backward_is_not_counted(threads, torch, backend) -> None:
    if backend != "cpu":
        pytest.skip("of gradients the tests on the CPU tell")
    for loads in threads(2).run(train):
        assert loads.tolist() == [[0, 0, 0, 0], [1, 2, 1, 0]]
