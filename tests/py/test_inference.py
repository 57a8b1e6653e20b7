"""The layer and its exchange where nothing requires gradients: which way it goes, and that results are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dense import apart, sent
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, Env, caught
from test_nn import HIDDEN, INNER, SEED, SHUFFLED, compare, dense, inputs, make_layer, run_layer, unasked, whole

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]


UNGROUPED = -1  # in place of a limit


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """No gradients, no functions of autograd, and memory that is NaN until it is written."""
    import torch

    def asked(*_: Any) -> Any:
        raise AssertionError("a forward pass without gradients has gone through autograd")

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(torch.autograd.Function, "apply", asked)
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def places(most: int | None) -> Iterator[None]:
    """Another limit for products over empty places; UNGROUPED: there are no grouped products."""
    from tokenway.pytorch import nn

    with pytest.MonkeyPatch.context() as patch:
        if most == UNGROUPED:
            patch.setattr(nn.products, "why_not", lambda *_: "as on other devices")
        elif most is not None:
            patch.setattr(nn, "PADDED_ROWS", most)
            patch.setattr(nn, "GROUPED_ROWS", most)
        yield


def plain_layer(env: Env, settings: dict[str, Any], dtype: str, **more: Any) -> tuple[Any, Any]:
    """A group that was not made for training, and a layer."""
    import torch

    from tokenway import nn

    torch.set_num_threads(1)
    group = tw.Group(env.comm, **settings, hidden=HIDDEN, dtype=dtype, timeout=PATIENT)
    return group, nn.ExpertParallelMoE(group, INNER, seed=SEED, **more)


def infer(
    env: Env, settings: dict[str, Any], sizes: tuple[int, ...], dtype: str, bound: int | None, most: int | None
) -> Any:
    """By rank: output and balance of two forward passes, the second with the ranks' tokens changed about; parameters;
    the layouts that came."""
    import torch

    layouts, found = [], []
    with places(most):
        group, layer = plain_layer(env, settings, dtype, normalize=True)
    assert layer.ungrouped is None or most == UNGROUPED or env.device is not None
    dispatch = group.dispatch
    group.dispatch = lambda *a, **k: layouts.append(k["layout"]) or dispatch(*a, **k)
    with group, places(most):
        xs, _ = inputs(sizes, dtype)
        for turn in range(2):
            x = xs[(env.rank + turn) % len(sizes)].to(env.device or "cpu", getattr(torch, dtype))
            with bare():
                out, balanced = layer(x, bound)
            assert out.dtype == x.dtype and not out.requires_grad
            found.append((sent(out), balanced.item()))
    return found, {name: sent(p) for name, p in layer.named_parameters()}, layer.experts, (layouts, layer.ungrouped)


MODES: list[tuple[dict[str, Any], int | None, int | None, str]] = [
    ({"mode": "low_latency", "row_alignment": 4}, None, None, "grouped_by_bound"),
    ({"mode": "low_latency"}, None, 0, "rank_major"),
    ({"mode": "high_throughput"}, None, None, "grouped"),
    ({"mode": "high_throughput", "max_recv_tokens": 36, "row_alignment": 8}, None, None, "grouped"),
    ({"mode": "auto", "low_latency_tokens": 18}, 18, None, "grouped_by_bound"),
    ({"mode": "auto", "low_latency_tokens": 12}, 18, None, "grouped"),
    ({"mode": "auto", "low_latency_tokens": 12}, None, None, "grouped"),
    ({"mode": "low_latency"}, None, UNGROUPED, "expert_major"),
]
CASES = [
    ({"experts": 7, "top_k": 3, "combine_hidden": HIDDEN + 3}, (3, 0, 2)),
    ({"experts": 7, "top_k": 3, "expert_map": SHUFFLED}, (3, 1, 2)),
    ({"experts": 3, "top_k": 1}, (1, 2, 0, 3)),  # a rank without experts
    ({"experts": 1, "top_k": 1}, (2, 3)),  # one expert for all
    ({"experts": 4, "top_k": 2}, (0, 0)),
]


@pytest.mark.parametrize(("mode", "bound", "most", "layout"), MODES, ids=str)
@pytest.mark.parametrize(("settings", "sizes"), CASES, ids=str)
def test_layer(processes, backend, settings, sizes, mode, bound, most, layout) -> None:
    """In any group: without columns, autograd or filled memory."""
    settings = settings | {"max_tokens": 18} | mode
    found = processes(len(sizes)).run(infer, settings, sizes, "float32", bound, most)
    here = [of[2] for of in found]
    parameters = {name: whole([of[1][name] for of in found], here) for name in ("gate_up", "down")}
    parameters["router"] = found[0][1]["router"]
    by_rank, _ = dense(parameters, sizes, "float32", settings["top_k"], True)
    for rank, (turns, _, _, (layouts, ungrouped)) in enumerate(found):
        assert set(layouts) == {"expert_major" if ungrouped and layout == "grouped_by_bound" else layout}
        for turn, (out, balanced) in enumerate(turns):
            wanted, wanted_balance, _ = by_rank[(rank + turn) % len(sizes)]
            assert apart(out, wanted) < 1e-5 and abs(balanced - wanted_balance) < 1e-5


@pytest.mark.parametrize(("mode", "bound", "most", "layout"), MODES[:4], ids=str)
def test_bfloat16(processes, mode, bound, most, layout) -> None:
    """Of a group whose rows return in another dtype: the layer's output is of its own."""
    settings, sizes = {"experts": 7, "top_k": 3, "max_tokens": 18, "combine_dtype": "float32"} | mode, (3, 0, 2)
    found = processes(3).run(infer, settings, sizes, "bfloat16", bound, most)
    here = [of[2] for of in found]
    parameters = {name: whole([of[1][name] for of in found], here) for name in ("gate_up", "down")}
    parameters["router"] = found[0][1]["router"]
    by_rank, _ = dense(parameters, sizes, "bfloat16", 3, True)
    for rank, (turns, _, _, _) in enumerate(found):
        for turn, (out, _) in enumerate(turns):
            assert apart(out, by_rank[(rank + turn) % 3][0]) < 3e-2


def run_same(env: Env, mode: dict[str, Any], made: bool) -> list[bool]:
    """Whether a forward pass without gradients has the bits of one with them; made: of a group for training."""
    import torch

    settings = {"experts": 7, "top_k": 3, "max_tokens": 18} | mode
    group, layer = (make_layer if made else plain_layer)(env, settings, "float32")
    with group:
        layer.router.requires_grad_(made)
        x = inputs((3, 0, 2), "float32")[0][env.rank].to(env.device or "cpu", torch.float32)
        out, balanced = layer(x)
        assert out.requires_grad
        with bare():
            again = layer(x)
        with torch.inference_mode():
            third = layer(x)
    return [torch.equal(a, b) for pair in (again, third) for a, b in zip(pair, (out, balanced), strict=True)]


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("mode", [{"mode": "low_latency"}, {"mode": "high_throughput"}, MODES[3][0]], ids=str)
def test_bits_are_those_of_training(processes, mode, made) -> None:
    assert processes(3).run(run_same, mode, made) == [[True] * 4] * 3


# ---- gradients in low latency -----------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_gradients(env: Env, settings: dict[str, Any], sizes: tuple[int, ...], dtype: str, most: int | None) -> Any:
    """As run_layer, with another limit for products over empty places, in memory that is NaN."""
    with places(most):
        return run_layer(env, settings, sizes, dtype, True, watch=poisoned if most == 0 else unasked)


@pytest.mark.parametrize("most", [None, 0, UNGROUPED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("settings", "sizes"), CASES[1:4], ids=str)
def test_gradients(processes, settings, sizes, dtype, most) -> None:
    """Over all places, where the host asks nothing, and over the rows that came."""
    settings = {"max_tokens": 18} | settings
    found = processes(len(sizes)).run(run_gradients, settings, sizes, dtype, most)
    apart_by = compare(found, settings, sizes, dtype, True)
    assert max(apart_by.values()) < (1e-5 if dtype == "float32" else 3e-2), apart_by


# ---- groups that were not made for training ---------------------------------------------------------------


def run_frozen(env: Env, settings: dict[str, Any], made: bool) -> Any:
    """Gradients of experts where none reach the router's weights, of either kind of group."""
    import torch

    group, layer = (make_layer if made else plain_layer)(env, settings, "float32")
    with group:
        layer.router.requires_grad_(False)
        xs, towards = inputs((3, 0, 2), "float32")
        x = xs[env.rank].to(env.device or "cpu", torch.float32)
        out, _ = layer(x)
        (out * towards[env.rank].to(x.device)).sum().backward()
        found = {"out": out, "gate_up": layer.gate_up.grad, "down": layer.down.grad}
        layer.router.requires_grad_(True)
        told = caught(layer, x)[:2] if not made else ("", "")
        with torch.no_grad():
            layer(x)  # the group goes on
    return {name: sent(t) for name, t in found.items() if t is not None}, told


@pytest.mark.parametrize("mode", [{}, {"mode": "high_throughput"}], ids=str)
def test_any_group_trains_without_router(processes, mode) -> None:
    """With the bits of a group made for it; and says which group trains the router too."""
    settings = {"experts": 7, "top_k": 3, "max_tokens": 18} | mode
    plain, made = (processes(3).run(run_frozen, settings, made) for made in (False, True))
    for (ours, (result, text)), (theirs, _) in zip(plain, made, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
        assert result == "twInvalidArgument"
        assert "combine_room is 64; for gradients of weights it must be at least 76" in text
        assert "tokenway.autograd.make_group makes such a group" in text


def run_dtypes(env: Env) -> Any:
    from tokenway import nn

    settings = {"experts": 2, "top_k": 1, "hidden": HIDDEN, "max_tokens": 4, "timeout": PATIENT}
    with tw.Group(env.comm, dtype="float8_e4m3fn", **settings) as group:
        return caught(nn.ExpertParallelMoE, group, INNER)[:2]


def test_dtypes(processes) -> None:
    for result, text in processes(2).run(run_dtypes):
        assert result == "twInvalidArgument" and "dtype is float8_e4m3fn; " in text


# ---- mistakes ---------------------------------------------------------------------------------------------


def run_mistaken(env: Env, mode: dict[str, Any]) -> Any:
    """Rank 0 gives a shape that is none; has experts that fail between the steps; and a bound that is none."""
    import torch

    group, layer = plain_layer(env, {"experts": 4, "top_k": 2, "max_tokens": 8} | mode, "float32")
    found = []
    with group, torch.no_grad():
        x = torch.randn(1, 6, HIDDEN, device=env.device or "cpu")
        found.append(caught(layer, x[..., :4] if env.rank == 0 else x)[:2])
        compute = layer.compute
        if env.rank == 0:
            layer.compute = lambda *_: x[..., :4]
        found.append(caught(layer, x)[:2])
        layer.compute = compute
        found.append(caught(layer, x, 99 if env.rank == 0 else 8)[:2])
        out, _ = layer(x)  # with the one lane that there is
        assert out.isfinite().all()
    return found


@pytest.mark.parametrize("mode", [{}, {"mode": "high_throughput"}], ids=str)
def test_mistakes_are_told(processes, made_for, mode) -> None:
    if not made_for.knows_calls:
        pytest.skip("what peers move is not known, so the group ends: test_staged.py")
    mistaken, other = processes(2).run(run_mistaken, mode)
    sentences = ["x has shape [1, 6, 4]; it must be [..., S, 16]", "rows has shape", "bound is 99; it must be"]
    for (result, text), (told, _), sentence in zip(mistaken, other, sentences, strict=True):
        assert (result, told) == ("twInvalidArgument", "twPeerRefused") and sentence in text, text


# ---- the exchange alone -----------------------------------------------------------------------------------

TOKENS = 5


def drawn(env: Env, turn: int) -> tuple[Any, Any]:
    """Tokens of whole numbers, and ids with some of -1."""
    import torch

    rng = np.random.default_rng([turn, env.rank])
    ids = rng.permuted(np.tile(np.arange(7), (TOKENS, 1)), axis=1)[:, :3]
    ids = np.where(rng.random(ids.shape) < 0.3, -1, ids)
    tokens = torch.from_numpy(rng.integers(-8, 8, (TOKENS, HIDDEN)).astype(np.float32))
    on = env.device or "cpu"
    return tokens.to(on), torch.from_numpy(np.ascontiguousarray(ids)).to(on)


def run_exchange(env: Env, mode: str, layout: str, replays: bool) -> list[bool]:
    """Rows go and come: a token once for each of its experts. replays: the launches of one exchange, repeated."""
    import torch

    from tokenway.pytorch import inference

    settings: dict[str, Any] = {"experts": 7, "top_k": 3, "max_tokens": TOKENS, "dtype": "float32", "mode": mode}
    if mode == "high_throughput":
        settings["max_recv_tokens"] = TOKENS * env.nranks
    found = []
    with tw.Group(env.comm, hidden=HIDDEN, timeout=PATIENT, **settings) as group, torch.no_grad():
        tokens, ids = drawn(env, 0)
        weights = torch.ones(ids.shape, device=ids.device)
        graph = Graph(env) if replays else None
        kept: list[Any] = []  # what launches write to, which no pool of PyTorch's keeps here
        dispatch = group.dispatch
        group.dispatch = lambda *a, **k: kept.append(dispatch(*a, **k)) or kept[-1]
        with graph.capture() if graph else contextlib.nullcontext():
            arrived = inference.dispatch(group, tokens, ids, weights, layout, None)
            out = inference.combine(group, arrived, arrived.rows)
        for turn in range(3):
            for to, value in zip((tokens, ids), drawn(env, turn), strict=True):
                to.copy_(value)
            if graph:
                graph.replay()
            else:
                arrived = inference.dispatch(group, tokens, ids, weights, layout, None)
                out = inference.combine(group, arrived, arrived.rows)
            found.append(torch.equal(out, tokens * (ids >= 0).sum(dim=1, keepdim=True)))
        group.check()
    return found


EXCHANGES = [
    ("low_latency", "expert_major"),
    ("low_latency", "grouped_by_bound"),
    ("high_throughput", "grouped"),
]


@pytest.mark.parametrize(("mode", "layout"), EXCHANGES)
def test_exchange(processes, mode, layout) -> None:
    assert processes(3).run(run_exchange, mode, layout, False) == [[True] * 3] * 3


@emulated_alone
@pytest.mark.parametrize(("mode", "layout"), EXCHANGES)
def test_exchange_in_a_graph(processes, mode, layout) -> None:
    assert processes(3).run(run_exchange, mode, layout, True) == [[True] * 3] * 3
