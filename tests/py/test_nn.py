"""The layer as a module, against a dense one in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dense import apart, balance, moe, route, sent
from harness import PATIENT, Env, caught

pytestmark = [pytest.mark.torch, pytest.mark.processes]

HIDDEN, INNER, SEED = 16, 24, 5


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def inputs(sizes: tuple[int, ...], dtype: str) -> tuple[list[Any], list[Any]]:
    """Per rank: x [sequences, S, H], and the gradient of the output; float64 of values that the dtype has."""
    import torch

    rng = np.random.default_rng([17, *sizes])

    def draw(n: int) -> Any:
        return torch.from_numpy(rng.standard_normal((n, 6, HIDDEN))).to(getattr(torch, dtype)).double()

    return [draw(n) for n in sizes], [draw(n) for n in sizes]


def make_layer(env: Env, settings: dict[str, Any], dtype: str, **more: Any) -> tuple[Any, Any]:
    """(group, layer) of a rank."""
    import torch

    from tokenway import autograd, nn

    torch.set_num_threads(1)  # ranks share the cores, and threads that wait for work would take them
    group = autograd.make_group(env.comm, **settings, hidden=HIDDEN, dtype=dtype, timeout=PATIENT)
    return group, nn.ExpertParallelMoE(group, INNER, seed=SEED, **more)


def run_layer(
    env: Env,
    settings: dict[str, Any],
    sizes: tuple[int, ...],
    dtype: str,
    normalize: bool,
    watch: Any = None,
    bound: int | None = None,
) -> Any:
    """Output, balance loss and all gradients of a rank; the parameters that it began with. watch: a context for the
    forward and the backward pass. bound: of the forward pass."""
    import torch

    group, layer = make_layer(env, settings, dtype, normalize=normalize)
    with group:
        xs, towards = inputs(sizes, dtype)
        x = xs[env.rank].to(env.device or "cpu", getattr(torch, dtype)).requires_grad_()
        wanted = towards[env.rank].to(x.device)
        with watch() if watch else contextlib.nullcontext():
            out, balanced = layer(x, bound)
            ((out.float() * wanted).sum() + 3.0 * balanced).backward()
        assert out.shape == x.shape and out.dtype == x.dtype
        grads = {name: sent(p if p.grad is None else p.grad) for name, p in layer.named_parameters()}
        values = {name: sent(p) for name, p in layer.named_parameters()}
    return {"out": sent(out), "balance": balanced.item(), "x": sent(x.grad), "here": layer.experts}, grads, values


def whole(parts: list[Any], here: list[list[int]]) -> Any:
    """Experts' tensors of all ranks, in the order of their numbers."""
    return np.concatenate(parts)[np.argsort(np.concatenate([np.array(h, int) for h in here]))]


def dense(parameters: dict[str, Any], sizes: tuple[int, ...], dtype: str, top_k: int, normalize: bool) -> Any:
    """The same in one process: per rank (out, balance, x's gradient), and the gradients of all parameters."""
    import torch

    leaf = {name: torch.from_numpy(value).double().requires_grad_() for name, value in parameters.items()}
    xs, towards = inputs(sizes, dtype)
    found, loss = [], torch.zeros((), dtype=torch.float64)
    for x, g in zip(xs, towards, strict=True):
        x.requires_grad_()
        outs, balances = [], []
        for sequence in x:
            ids, weights, probabilities = route(sequence, leaf["router"], top_k, normalize)
            outs.append(moe(sequence, ids, weights, leaf["gate_up"], leaf["down"]))
            balances.append(balance(probabilities, ids))
        out = torch.stack(outs) if outs else x * 0
        balanced = sum(balances) / max(len(balances), 1)
        loss = loss + (out * g).sum() + 3.0 * balanced
        found.append((out.detach(), float(torch.as_tensor(balanced).detach()), x))
    loss.backward()
    by_rank = [(out, balanced, torch.zeros_like(x) if x.grad is None else x.grad) for out, balanced, x in found]
    return by_rank, {name: p.grad for name, p in leaf.items()}


def compare(found: list[Any], settings: dict[str, Any], sizes: tuple[int, ...], dtype: str, normalize: bool) -> Any:
    """The largest difference of each kind."""
    here = [outcome["here"] for outcome, _, _ in found]
    parameters = {name: whole([v[name] for _, _, v in found], here) for name in ("gate_up", "down")}
    parameters["router"] = found[0][2]["router"]
    assert all(np.array_equal(v["router"], parameters["router"]) for _, _, v in found)
    by_rank, grads = dense(parameters, sizes, dtype, settings["top_k"], normalize)
    apart_by = {"out": 0.0, "x": 0.0, "balance": 0.0}
    for (outcome, _, _), (out, balanced, x) in zip(found, by_rank, strict=True):
        apart_by["out"] = max(apart_by["out"], apart(outcome["out"], out))
        apart_by["x"] = max(apart_by["x"], apart(outcome["x"], x))
        apart_by["balance"] = max(apart_by["balance"], abs(outcome["balance"] - balanced))
    for name in ("gate_up", "down"):
        apart_by[name] = apart(whole([g[name] for _, g, _ in found], here), grads[name])
    apart_by["router"] = apart(sum(g["router"] for _, g, _ in found), grads["router"])
    return apart_by


SHUFFLED = ([1, 0, 1, 1, 0, 2, 1], [0, 1, 3, 1, 0, 0, 2])
CASES = [
    ({"experts": 4, "top_k": 2}, (2,), True),
    ({"experts": 7, "top_k": 3}, (3, 0, 2), True),
    ({"experts": 7, "top_k": 3, "expert_map": SHUFFLED}, (3, 1, 2), False),
    ({"experts": 3, "top_k": 1}, (1, 2, 0, 3), False),
    ({"experts": 16, "top_k": 5}, (2, 1, 0, 3), True),
]


@pytest.mark.parametrize(("settings", "sizes", "normalize"), CASES, ids=str)
def test_layer(processes, settings, sizes, normalize) -> None:
    """Output, balance loss, and gradients of activations, router and all experts."""
    settings = settings | {"max_tokens": 18}
    found = processes(len(sizes)).run(run_layer, settings, sizes, "float32", normalize)
    apart_by = compare(found, settings, sizes, "float32", normalize)
    assert max(apart_by.values()) < 1e-5, apart_by


EXACT = {"mode": "high_throughput"}


ROOMS = [{}, {"row_alignment": 8}, {"overflow": "drop"}, {"max_recv_tokens": 40, "row_alignment": 4}]


@pytest.mark.parametrize("room", ROOMS, ids=str)
@pytest.mark.parametrize(("settings", "sizes", "normalize"), CASES[1:4], ids=str)
def test_layer_of_high_throughput(processes, backend, settings, sizes, normalize, room) -> None:
    """The same layer, in the layout grouped."""
    settings = settings | {"max_tokens": 18} | EXACT | room
    found = processes(len(sizes)).run(run_layer, settings, sizes, "float32", normalize)
    apart_by = compare(found, settings, sizes, "float32", normalize)
    assert max(apart_by.values()) < 1e-5, apart_by


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Where nobody may ask how much comes, nor for any other value of a tensor, and memory is NaN until written."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from tokenway import handle

    waits = {"_local_scalar_dense", "nonzero", "bincount", "_unique2", "masked_select", "equal", "is_nonzero"}

    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host asks what only the device knows")

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket.__name__ in waits:
                asked()
            return function(*args, **(kwargs or {}))

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.MonkeyPatch.context() as patch, Mode():
            for name in ("num_recv_tokens", "learn_rows"):
                patch.setattr(handle.Handle, name, asked)
            patch.setattr(handle.Handle, "recv_rows", property(asked))
            for name in ("tolist", "numpy"):
                patch.setattr(torch.Tensor, name, asked)
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_unasked(env: Env, *args: Any) -> Any:
    return run_layer(env, *args, watch=unasked)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("settings", "sizes", "normalize"), CASES[:4], ids=str)
def test_with_room_the_host_asks_nothing(processes, backend, settings, sizes, normalize, dtype) -> None:
    """With a fixed capacity, in no step forward or backward; and what nobody wrote reaches no result."""
    if (backend, dtype) == ("nvlink", "float32"):
        pytest.skip("PyTorch has grouped matrix products on devices for bfloat16 alone")
    settings = settings | {"max_tokens": 18, "max_recv_tokens": 18 * len(sizes), "row_alignment": 8} | EXACT
    found = processes(len(sizes)).run(run_unasked, settings, sizes, dtype, normalize)
    apart_by = compare(found, settings, sizes, dtype, normalize)
    assert max(apart_by.values()) < (1e-5 if dtype == "float32" else 3e-2), apart_by


def run_both_ways(env: Env, settings: dict[str, Any]) -> tuple[Any, Any, str]:
    """A layer's results by offsets and by sizes, as where PyTorch has no grouped products."""
    from tokenway.pytorch import experts

    args = settings, (3, 1), "float32", True
    by_offsets = run_layer(env, *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_grouped_mm", None)
        by_sizes = run_layer(env, *args)
        group, layer = make_layer(env, settings, "float32")
        group.close()
    return by_offsets, by_sizes, layer.uncapturable


def test_both_ways(processes, backend) -> None:
    settings = {"experts": 6, "top_k": 2, "max_tokens": 18, "max_recv_tokens": 36, "row_alignment": 4} | EXACT
    for offsets, sizes, why in processes(2).run(run_both_ways, settings):
        assert "has no grouped_mm" in why
        for ours, theirs in zip(offsets[:2], sizes[:2], strict=True):
            for name in ("out", "x", "router", "gate_up", "down"):
                assert name not in ours or apart(ours[name], theirs[name]) < 1e-6, name


def run_captured(env: Env, settings: dict[str, Any]) -> Any:
    """What a layer says in a capture that it cannot be part of."""
    from tokenway.pytorch import experts, gradients

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_grouped_mm", None)
        group, layer = make_layer(env, settings, "float32")
    with group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "capturing", lambda _: True)
        xs, _ = inputs((1, 1), "float32")
        return caught(layer, xs[env.rank].float())[:2]


def test_a_layer_says_why_it_cannot_be_captured(processes) -> None:
    for result, text in processes(1).run(run_captured, {"experts": 4, "top_k": 2, "max_tokens": 8} | EXACT):
        assert result == "twInvalidUsage"
        assert "cannot be captured into a graph: " in text and "has no grouped_mm" in text


@pytest.mark.parametrize("more", [{}, EXACT], ids=str)
def test_bfloat16(processes, backend, more) -> None:
    """Rows of 8 significant bits: 2^-8 a rounding, and the router decides in float32 as ever."""
    settings, sizes = {"experts": 7, "top_k": 3, "max_tokens": 18} | more, (3, 0, 2)
    found = processes(3).run(run_layer, settings, sizes, "bfloat16", True)
    apart_by = compare(found, settings, sizes, "bfloat16", True)
    assert max(apart_by.values()) < 3e-2, apart_by


def run_values(env: Env, experts: int) -> Any:
    """Initial values by expert, and the layer's names for its parameters."""
    import torch

    from tokenway import nn

    group, layer = make_layer(env, {"experts": experts, "top_k": 2, "max_tokens": 4}, "float32")
    with group:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), layer)
        named = {id(p): name for name, p in model.named_parameters()}
        shared, own = ([named[id(p)] for p in which(model)] for which in (nn.shared_parameters, nn.expert_parameters))
        values = {e: sent(layer.gate_up[slot]) for slot, e in enumerate(layer.experts)}
    return values, sent(layer.router), shared, own


def test_initial_values(processes) -> None:
    """They do not depend on the number of ranks, and no two experts have the same."""
    alone, split = processes(1).run(run_values, 7), processes(3).run(run_values, 7)
    merged = {e: v for values, _, _, _ in split for e, v in values.items()}
    assert sorted(merged) == list(range(7))
    for expert, value in alone[0][0].items():
        assert np.array_equal(merged[expert], value)
        assert 0 < np.abs(value).max() <= HIDDEN**-0.5
        assert not any(np.array_equal(value, other) for e, other in merged.items() if e != expert)
    for _, router, shared, own in [*alone, *split]:
        assert np.array_equal(router, alone[0][1])
        assert shared == ["0.weight", "0.bias", "1.router"] and own == ["1.gate_up", "1.down"]


def run_autocast(env: Env, mode: str) -> Any:
    """Whether routing and output are the bits of those without, for x of either dtype."""
    import torch

    settings = {"experts": 4, "top_k": 2, "max_tokens": 8, "mode": mode}
    group, layer = make_layer(env, settings, "float32")
    with group:
        x = torch.randn(1, 6, HIDDEN, device=env.device or "cpu").bfloat16()
        want = [*layer.route(x), *layer(x.float())]
        with torch.autocast(x.device.type, torch.bfloat16):
            found = [[*layer.route(given), *layer(given)] for given in (x, x.float())]
    return [torch.equal(a, b) and a.dtype == b.dtype for f in found for a, b in zip(f, want, strict=True)]


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_autocast(processes, mode) -> None:
    assert processes(1).run(run_autocast, mode) == [[True] * 10]


def run_compiled(env: Env) -> None:
    """PyTorch's limit of compilations of one function is an error here."""
    import torch

    group, layer = make_layer(env, {"experts": 4, "top_k": 2, "max_tokens": 32}, "float32")
    with group:
        compiled = torch.compile(layer, backend="eager")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for count in (2, 3, 1):
                compiled(torch.randn(count, 8, HIDDEN))[0].sum().backward()
                with torch.no_grad():
                    compiled(torch.randn(count, 8, HIDDEN))


@pytest.mark.long
def test_compiled(processes) -> None:
    """What is around the exchange is compiled, and of the exchange nothing."""
    assert processes(2).run(run_compiled, timeout=900) == [None, None]


def run_copied(env: Env) -> bool:
    """Whether an average of a model computes what the model does."""
    import torch

    group, layer = make_layer(env, {"experts": 4, "top_k": 2, "max_tokens": 32}, "float32")
    with group:
        x = torch.randn(2, 8, HIDDEN)
        return torch.equal(torch.optim.swa_utils.AveragedModel(layer)(x)[0], layer(x)[0])


def test_copied(processes) -> None:
    assert processes(2).run(run_copied) == [True, True]


def run_wrong(env: Env) -> list[Any]:
    """Rank 0 gives shapes that the layer does not take; then both go on."""
    import torch

    from tokenway import nn

    group, layer = make_layer(env, {"experts": 4, "top_k": 2, "max_tokens": 8}, "float32")
    with group:
        on = env.device or "cpu"
        x = torch.randn(1, 6, HIDDEN, device=on)
        wrong = [x[..., :4], x[0, 0], x.repeat(2, 1, 1), None]
        found = [caught(layer, bad if env.rank == 0 else x)[:2] for bad in wrong]
        found.append(caught(nn.ExpertParallelMoE, group, 0)[:2])
        layer(x)[0].sum().backward()
        assert layer.router.grad is not None
    return found


def test_wrong_shapes(processes) -> None:
    mistaken, other = processes(2).run(run_wrong)
    assert [result for result, _ in other] == ["twPeerRefused"] * 4 + ["twInvalidArgument"]
    sentences = [
        "x has shape [1, 6, 4]; it must be [..., S, 16]",
        "x has shape [16]; it must be",
        "12",
        "x is of type NoneType",
        "inner is 0",
    ]
    for (result, text), sentence in zip(mistaken, sentences, strict=True):
        assert result == "twInvalidArgument" and sentence in text, (text, sentence)


def test_balance_loss(torch) -> None:
    """1 where tokens are spread evenly, E where one expert has all, and the mean of the sequences."""
    from tokenway import nn

    even = torch.full((1, 4, 4), 0.25), torch.tensor([[[0, 1], [2, 3], [1, 2], [3, 0]]])
    assert nn.balance_loss(*even).item() == 1.0
    one = torch.zeros(1, 4, 4).index_fill_(2, torch.tensor([2]), 1.0), torch.full((1, 4, 1), 2)
    assert nn.balance_loss(*one).item() == 4.0
    both = torch.cat([even[0], one[0]]), torch.cat([even[1][..., :1], one[1]])
    assert nn.balance_loss(*both).item() == pytest.approx(2.5, abs=1e-6)
    assert nn.balance_loss(torch.zeros(0, 4, 4), torch.zeros(0, 4, 2, dtype=torch.int64)).item() == 0.0


def run_training(env: Env) -> list[float]:
    """Some steps of gradient descent towards a fixed target, on this rank's tokens: the losses of the whole."""
    import torch

    group, layer = make_layer(env, {"experts": 6, "top_k": 2, "max_tokens": 16}, "float32")
    losses = []
    with group:
        rng = np.random.default_rng(env.rank)
        x, y = (torch.from_numpy(rng.standard_normal((2, 6, HIDDEN)).astype(np.float32)) for _ in range(2))
        x, y = x.to(env.device or "cpu"), y.to(env.device or "cpu")
        for _ in range(25):
            loss = ((layer(x)[0] - y) ** 2).sum()
            loss.backward()
            for p in (layer.gate_up, layer.down):
                p.data.sub_(p.grad, alpha=0.005)
                p.grad = None
            losses.append(loss.item())
    return losses


def test_training_learns(processes) -> None:
    by_rank = np.array(processes(2).run(run_training)).sum(axis=0)
    assert by_rank[-1] < 0.7 * by_rank[0], by_rank
