"""A whole layer in one CUDA graph: forward and backward with a fixed capacity, over processes with a GPU each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dense import apart, balance, moe, route, sent
from gpu_world import TIMEOUT, capture

import tokenway as tw
from tokenway import autograd, experts, nn

HIDDEN, INNER, EXPERTS, TOP_K, MOST, LAYERS = 64, 48, 8, 3, 96, 2
SIZES = ((5, 16), (0, 16), (3, 7), (1, 1))  # [sequences, S] of a rank, by turn: other ranks have another turn's
REPLAYS = 4
ROOM = {"max_recv_tokens": 2 * MOST, "row_alignment": 8}


@pytest.fixture(autouse=True)
def _needs_grouped_products(devices: int) -> None:
    if why := experts.why_not(torch.device("cuda", 0), torch.bfloat16, EXPERTS, HIDDEN, INNER):
        pytest.skip(why)


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """PyTorch raises where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Trained:
    """Layers over static buffers: a step is forward and backward of all of them."""

    def __init__(self, env: Any, size: tuple[int, int], **settings: Any):
        self.env, self.size = env, size
        made = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST, "mode": "high_throughput"}
        self.group = autograd.make_group(env.comm, timeout=TIMEOUT, **(made | settings))
        self.layers = torch.nn.ModuleList(nn.ExpertParallelMoE(self.group, INNER, seed=i) for i in range(LAYERS))
        self.x = torch.zeros((*size, HIDDEN), dtype=torch.bfloat16, device=env.device, requires_grad=True)
        self.towards = torch.zeros((*size, HIDDEN), device=env.device)

    def load(self, turn: int) -> None:
        """Other tokens, and another way for each."""
        rng = np.random.default_rng([turn, self.env.rank])
        for to in (self.x.detach(), self.towards):
            to.copy_(torch.from_numpy(rng.standard_normal(to.shape)).to(torch.bfloat16))

    def step(self) -> dict[str, Any]:
        for leaf in (self.x, *self.layers.parameters()):
            leaf.grad = None
        x, balances = self.x, 0.0
        for layer in self.layers:
            more, balanced = layer(x)
            x, balances = x + more, balances + balanced
        ((x.float() * self.towards).sum() + 3.0 * balances).backward()
        found = {"out": x, "balance": balances, "x": self.x.grad}
        found |= {f"chosen{i}": layer.chosen for i, layer in enumerate(self.layers)}
        return found | {name: p.grad for name, p in self.layers.named_parameters()}

    def values(self) -> dict[str, Any]:
        return {name: sent(p) for name, p in self.layers.named_parameters()}


def brought(found: dict[str, Any]) -> dict[str, Any]:
    """Copies for the test."""
    return {name: sent(value) for name, value in found.items()}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Bit for bit."""
    for name, value in theirs.items():
        assert np.array_equal(ours[name], value, equal_nan=True), name


def replayed(env: Any, turns: tuple[tuple[int, int], ...], settings: dict[str, Any]) -> Any:
    """By turn the results of replays, each the bits of an eager step on the same inputs; and parameters."""
    trained = Trained(env, turns[env.rank], **settings)
    results = []
    with trained.group:
        assert trained.layers[0].uncapturable is None
        trained.load(0)
        trained.step()  # what is loaded or allocated once
        with without_waiting():
            trained.step()
        graph, found = capture(env, trained.step)
        for turn in range(1, REPLAYS):
            trained.load(turn)
            graph.replay()
            results.append(brought(found))
        kept = {name: p.grad for name, p in trained.layers.named_parameters()}
        for turn in range(1, REPLAYS):
            trained.load(turn)
            same(results[turn - 1], brought(trained.step()))  # eager calls go on
        trained.load(REPLAYS)
        graph.replay()  # and so do replays
        env.stream.synchronize()
        assert trained.group.error is None and all(g is not None for g in kept.values())
        graph.reset()
        return results, trained.values(), trained.layers[0].experts


def dense_turn(parameters: dict[str, Any], sizes: tuple[tuple[int, int], ...], turn: int, got: list[Any]) -> Any:
    """The layers in one process and float64, with the experts that the ranks chose (near ties fall by a rounding): per
    rank (out, x's gradient, balance), and the parameters' gradients."""
    leaf = {name: torch.from_numpy(value).double().requires_grad_() for name, value in parameters.items()}
    found, loss = [], torch.zeros((), dtype=torch.float64)
    for rank, size in enumerate(sizes):
        rng = np.random.default_rng([turn, rank])
        drawn = [torch.from_numpy(rng.standard_normal((*size, HIDDEN))).to(torch.bfloat16).double() for _ in range(2)]
        begin, towards = drawn[0].requires_grad_(), drawn[1]
        x, balances = begin, torch.zeros((), dtype=torch.float64)
        for i in range(LAYERS):
            made, ways = [], []
            for sequence, ids in zip(x, torch.from_numpy(got[rank][f"chosen{i}"]), strict=True):
                _, _, probabilities = route(sequence, leaf[f"{i}.router"], TOP_K)
                weights = probabilities.gather(-1, ids)
                weights = weights / weights.sum(dim=-1, keepdim=True)
                made.append(moe(sequence, ids, weights, leaf[f"{i}.gate_up"], leaf[f"{i}.down"]))
                ways.append(balance(probabilities, ids))
            x = x + (torch.stack(made) if made else x * 0)
            balances = balances + sum(ways) / max(len(ways), 1)
        loss = loss + (x * towards).sum() + 3.0 * balances
        found.append((x, begin, balances))
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaf.items()}
    zeros = [torch.zeros_like(x) if x.grad is None else x.grad for _, x, _ in found]
    return [(out.detach(), x, float(b)) for (out, _, b), x in zip(found, zeros, strict=True)], grads


def whole(by_rank: list[dict[str, Any]], here: list[list[int]], name: str) -> Any:
    """A parameter of all experts, or one that all ranks share."""
    if name.endswith("router"):
        return by_rank[0][name]
    return np.concatenate([of[name] for of in by_rank])[np.argsort(np.concatenate([np.array(h, int) for h in here]))]


@pytest.mark.parametrize("settings", [ROOM, {"mode": "low_latency"}], ids=str)
@pytest.mark.parametrize("first", range(len(SIZES)), ids=lambda i: str(SIZES[i]))
def test_forward_and_backward_in_one_graph(pair: Any, first: int, settings: dict[str, Any]) -> None:
    """Replays are eager steps bit for bit, and the gradients those of a dense layer."""
    sizes = (SIZES[first], SIZES[(first + 1) % len(SIZES)])
    by_rank = pair.run(replayed, sizes, settings)
    here = [of[2] for of in by_rank]
    parameters = {name: whole([of[1] for of in by_rank], here, name) for name in by_rank[0][1]}
    for turn in range(1, REPLAYS):
        got = [of[0][turn - 1] for of in by_rank]
        wanted, grads = dense_turn(parameters, sizes, turn, got)
        for mine, (out, x, balanced) in zip(got, wanted, strict=True):
            assert apart(mine["out"], out) < 4e-2 and apart(mine["x"], x) < 8e-2
            assert abs(float(mine["balance"]) - balanced) < 2e-2
        for name, wanted_grad in grads.items():
            total = sum(of[name] for of in got) if name.endswith("router") else whole(got, here, name)
            assert apart(total, wanted_grad) < 8e-2, name


# ---- too little room ----------------------------------------------------------------------------------------


def crowded(env: Any, overflow: str) -> Any:
    """A graph whose replays bring what there is room for, more, and again less."""
    size = (1, 64)
    trained = Trained(env, size, max_recv_tokens=100, overflow=overflow, row_alignment=1)
    with trained.group:
        group, first = trained.group, trained.layers[0]
        trained.load(0)
        fitting = torch.zeros_like(first.router)
        crowding = torch.zeros_like(first.router)
        # Tokens begin with a 1: which experts are chosen follows from the router's first column alone.
        here, there = range(0, TOP_K), range(EXPERTS // 2, EXPERTS // 2 + TOP_K)
        for router, chosen in ((fitting, there if env.rank else here), (crowding, here)):
            for i, expert in enumerate(chosen):
                router[expert, 0] = 20.0 - i
        trained.x.detach()[..., 0] = 1.0

        def turn(router: torch.Tensor, act: Any) -> Any:
            for layer in trained.layers:
                layer.router.detach().copy_(router)
            return act()

        turn(fitting, trained.step)
        turn(fitting, trained.step)
        graph, found = capture(env, trained.step)
        turn(fitting, graph.replay)
        fits = brought(found)
        assert group.error is None
        turn(crowding, graph.replay)
        crowds = brought(found)
        env.stream.synchronize()
        said = ""
        try:
            group.check()
        except tw.RecvOverflow as error:
            said = str(error)
        if overflow == "drop":
            same(crowds, brought(turn(crowding, trained.step)))
        turn(fitting, graph.replay)
        same(brought(found), fits)  # the group goes on
        graph.reset()
        return fits, crowds, said, sent(trained.x)


def test_overflow_is_refused_in_a_replay(pair: Any) -> None:
    for fits, crowds, said, _ in pair.run(crowded, "refuse"):
        assert np.isfinite(fits["out"]).all() and np.isnan(crowds["out"]).all()
        assert "would receive 128 rows; max_recv_tokens is 100 (nothing was sent)" in said


def test_overflow_is_dropped_in_a_replay(pair: Any) -> None:
    """Rank 0 has room for its own 64 tokens and for 36 of rank 1's: nothing comes back for the others."""
    first, second = pair.run(crowded, "drop")
    for fits, crowds, said, x in (first, second):
        assert not said and np.isfinite(fits["out"]).all() and np.isfinite(crowds["out"]).all()
        for name, value in crowds.items():
            assert np.isfinite(value).all(), name
        lost = (crowds["out"] == x).all(axis=-1)[0]  # the residual alone
        assert lost.sum() == (0 if x is first[3] else 28)
    assert (second[1]["out"] == second[3]).all(axis=-1)[0][36:].all()


# ---- without gradients ----------------------------------------------------------------------------------------


def inferred(env: Any, settings: dict[str, Any], bound: int | None) -> list[bool]:
    """Whether replays of a forward pass without gradients, in a group that was not made for training, are eager ones
    bit for bit; in both the host waits for nothing."""
    made = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST, "timeout": TIMEOUT}
    size = SIZES[env.rank]
    found = []
    with tw.Group(env.comm, **(made | settings)) as group, torch.no_grad():
        layer = nn.ExpertParallelMoE(group, INNER)
        x = torch.zeros((*size, HIDDEN), dtype=torch.bfloat16, device=env.device)

        def load(turn: int) -> None:
            rng = np.random.default_rng([turn, env.rank])
            x.copy_(torch.from_numpy(rng.standard_normal(x.shape)).to(torch.bfloat16))

        load(0)
        layer(x, bound)  # what is loaded or allocated once
        with without_waiting():
            layer(x, bound)
        graph, (out, balanced) = capture(env, lambda: layer(x, bound))
        for turn in range(1, REPLAYS):
            load(turn)
            graph.replay()
            again = [t.clone() for t in (out, balanced)]
            found += [torch.equal(a, b) for a, b in zip(again, layer(x, bound), strict=True)]
        env.stream.synchronize()
        assert group.error is None
        graph.reset()
    return found


INFERRED = [
    ({"mode": "low_latency"}, None),
    ({"mode": "high_throughput", **ROOM}, None),
    ({"mode": "auto", "low_latency_tokens": 80, **ROOM}, 80),
    ({"mode": "auto", "low_latency_tokens": 64, **ROOM}, 80),
]


@pytest.mark.parametrize(("settings", "bound"), INFERRED, ids=str)
def test_a_forward_pass_without_gradients(pair: Any, settings: dict[str, Any], bound: int | None) -> None:
    for found in pair.run(inferred, settings, bound):
        assert len(found) == 2 * (REPLAYS - 1) and all(found), found


# ---- what cannot be captured --------------------------------------------------------------------------------


def refused(env: Any) -> list[str]:
    said = []
    for settings in ({"dtype": "float32", **ROOM},):
        trained = Trained(env, (1, 8), **settings)
        with trained.group:
            x = trained.x.detach().to(getattr(torch, trained.group.dtype))

            def layer(trained: Any = trained, x: Any = x) -> Any:
                with pytest.raises(tw.InvalidUsage) as caught:
                    trained.layers[0](x)
                return str(caught.value)

            graph, sentence = capture(env, lambda: (torch.zeros(1, device=env.device), layer())[1])
            said.append(sentence)
            graph.reset()
            trained.layers[0](x)  # but eagerly
    return said


def test_a_layer_says_why_it_cannot_be_captured(pair: Any) -> None:
    for said in pair.run(refused):
        assert (
            "the dtype is torch.float32; PyTorch has grouped matrix products on devices for torch.bfloat16" in said[0]
        )
