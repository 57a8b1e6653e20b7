"""Gradients through the exchange of token replicas: each rank of a set gets those of all tokens of the set, exactly
those of one process, as numbers are whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import PATIENT

from tokenway import reference as ref

# Ranks are processes: PyTorch has one thread for the backward passes of a device.
pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, TOP_K, HIDDEN = 5, 2, 8


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def trained(env: Any, tokens: tuple[int, ...], replicas: int, settings: dict[str, Any]) -> Any:
    """A dispatch and a combine, forward and backward: (what came, what is right)."""
    import torch

    from tokenway import autograd

    of_set = env.rank // replicas
    rng = np.random.default_rng(of_set)
    n = tokens[of_set]
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(n)], np.int64).reshape(n, TOP_K)
    x, towards = (rng.integers(-4, 5, (n, HIDDEN)).astype(np.float32) for _ in range(2))
    weights = rng.integers(1, 4, (n, TOP_K)).astype(np.float32)
    sent = -(-max(tokens) // replicas)
    with autograd.make_group(
        env.comm,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=sent,
        dtype="float32",
        token_replicas=replicas,
        timeout=PATIENT,
        **settings,
    ) as group:
        place = group.native.place
        device = "cpu" if group.device is None else place.device
        given = [torch.tensor(of, device=device, requires_grad=True) for of in (x, weights)]
        routed = autograd.dispatch(group, given[0], torch.tensor(ids, device=device), given[1])
        grouped = autograd.by_expert(routed)
        home, _ = ref.placement(EXPERTS, group.nranks, None)
        factors = np.repeat(np.flatnonzero(home == group.rank) + 1, grouped.sizes).astype(np.float32)
        rows = grouped.rows * grouped.weights[:, None] * torch.tensor(factors, device=device)[:, None]
        out = autograd.combine(routed, grouped.sum(rows))
        (out * torch.tensor(towards, device=device)).sum().backward()
        got = [t.detach().cpu().numpy() for t in (out, given[0].grad, given[1].grad)]
    factor = (weights * (ids + 1)).sum(axis=1, keepdims=True)
    of_weights = (ids + 1) * (x * towards).sum(axis=1, keepdims=True)
    return got, [factor * x, factor * towards, of_weights.astype(np.float32)]


@pytest.mark.parametrize("settings", [{}, {"mode": "high_throughput"}], ids=["low_latency", "high_throughput"])
@pytest.mark.parametrize(("replicas", "tokens"), [(2, (7,)), (2, (5, 0)), (3, (4,)), (4, (3,))])
def test_gradients(processes, settings, replicas, tokens) -> None:
    world = processes(replicas * len(tokens))
    for got, wanted in world.run(trained, tokens, replicas, settings):
        for one, want in zip(got, wanted, strict=True):
            assert one.shape == want.shape and np.array_equal(one, want), (one, want)


def layered(env: Any, replicas: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The layer of tokenway.nn, with and without replicas: its results and gradients, and those of its experts."""
    import torch

    from tokenway import autograd
    from tokenway.nn import ExpertParallelMoE

    rng = np.random.default_rng(1)
    x = torch.tensor(rng.standard_normal((10, HIDDEN)).astype(np.float32))
    first = env.rank // replicas
    mine = x if replicas > 1 else x[env.rank * 5 : env.rank * 5 + 5]
    assert first == (0 if replicas > 1 else env.rank)
    with autograd.make_group(
        env.comm,
        experts=4,
        top_k=2,
        hidden=HIDDEN,
        max_tokens=5,
        dtype="float32",
        token_replicas=replicas,
        timeout=PATIENT,
    ) as group:
        layer = ExpertParallelMoE(group, 6, seed=3)
        given = mine.clone().requires_grad_()
        out, _ = layer(given)
        out.square().sum().backward()
        return [t.detach().numpy() for t in (out, given.grad, layer.router.grad)], layer.down.grad.numpy()


def test_the_layer(processes, made_for) -> None:
    """Two replicas of ten tokens are as two ranks of five each: every token meets its experts once."""
    if made_for.name != "cpu":
        pytest.skip("the layer itself is the same on devices")
    whole = processes(2).run(layered, 2)
    halves = processes(2).run(layered, 1)
    for rank in range(2):
        (out, of_x, of_router), of_down = whole[rank]
        assert np.array_equal(out, np.concatenate([half[0][0] for half in halves]))
        assert np.array_equal(of_x, np.concatenate([half[0][1] for half in halves]))
        assert np.allclose(of_router, sum(half[0][2] for half in halves), rtol=1e-5, atol=1e-6)
        assert np.array_equal(of_down, halves[rank][1])
