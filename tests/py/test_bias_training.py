"""Gradients of the rows from which sums start: that of the result, in their own type, and without a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense import sent
from harness import Env, caught
from test_autograd import HIDDEN, Case, group_of, leaves

pytestmark = [pytest.mark.torch, pytest.mark.processes]

CASE = Case(7, 3, (4, 0, 7), none=True)
PAIR = Case(5, 3, (4, 7), none=True)


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def made_bias(env: Env, tokens: int, dtype: Any) -> Any:
    import torch

    values = np.random.default_rng([env.rank, 4]).standard_normal((tokens, HIDDEN)).astype(np.float32)
    return torch.from_numpy(values).to(dtype).to(env.device or "cpu")


def train(env: Env, case: Case) -> list[dict[str, Any]]:
    """What comes of a combine without a bias, and with one of each kind; the first rank's has gradients alone then."""
    import torch

    from tokenway import autograd

    found = []
    with group_of(env, case) as group:
        x, weights, ids, _, towards = leaves(env, group, case)
        for kind in (None, torch.float32, torch.bfloat16, "constant"):
            for leaf in (x, weights[0]):
                leaf.grad = None
            dtype = kind if isinstance(kind, torch.dtype) and kind != torch.bfloat16 else getattr(torch, case.dtype)
            bias = None if kind is None else made_bias(env, len(x), dtype)
            if bias is not None and kind != "constant":
                bias.requires_grad_(env.rank == 0 or kind == torch.float32)
            routed = autograd.dispatch(group, x, ids[0], weights[0])
            rows = routed.tokens.float() * routed.weights.sum(-1, keepdim=True)
            out = autograd.combine(routed, rows, bias)
            (out * towards).sum().backward()
            of_bias = None if bias is None or not bias.requires_grad else bias.grad
            found.append({"out": sent(out), "x": sent(x.grad), "bias": None if of_bias is None else sent(of_bias)})
            found[-1]["given"] = None if bias is None else sent(bias)
            found[-1]["towards"] = sent(towards)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients(processes, dtype) -> None:
    """Those of the rows are as without it."""
    case = Case(7, 3, (4, 0, 7), dtype, none=True)
    for rank, (plain, *biased) in enumerate(processes(case.ranks).run(train, case)):
        for given in biased:
            close = 1e-6 if dtype == "float32" else 0.1
            np.testing.assert_allclose(given["out"], plain["out"] + given["given"], atol=close)
            assert np.array_equal(given["x"], plain["x"])
        assert np.array_equal(biased[0]["bias"], plain["towards"])
        assert (biased[1]["bias"] is not None) == (rank == 0) and biased[2]["bias"] is None


def only_bias(env: Env, case: Case) -> Any:
    """Rows without gradients: the backward pass is this rank's own, and on the first alone."""
    import torch

    from tokenway import autograd

    with group_of(env, case) as group:
        x, weights, ids, _, towards = leaves(env, group, case)
        routed = autograd.dispatch(group, x.detach(), ids[0], weights[0].detach())
        bias = made_bias(env, len(x), torch.float32).requires_grad_(env.rank == 0)
        out = autograd.combine(routed, routed.tokens, bias)
        if env.rank == 0:
            (out * towards).sum().backward()
        refused = caught(autograd.combine, routed, routed.tokens, bias[:, 1:] if env.rank == 0 else bias)
        odd = caught(autograd.combine, routed, routed.tokens, "bias" if env.rank == 0 else bias)
        return out.requires_grad, env.rank != 0 or torch.equal(bias.grad, towards), refused[:2], odd[:2]


def test_a_bias_alone_takes_no_step(processes) -> None:
    first, second = processes(2).run(only_bias, PAIR)
    assert first[:2] == (True, True) and second[:2] == (False, True)
    assert [outcome[0] for outcome in first[2:]] == 2 * ["twInvalidArgument"]
    assert "bias has shape [4, 11]; it must be [4, 12]" in first[2][1] and "bias is of type str" in first[3][1]
    assert [outcome[0] for outcome in second[2:]] == 2 * ["twPeerRefused"]


def with_ops(env: Env, case: Case, how: str) -> Any:
    """The op's result and gradients beside those of the function."""
    import torch

    from tokenway import autograd, ops

    with group_of(env, case) as group:
        number = ops.register(group)
        x, weights, ids, _, towards = leaves(env, group, case)
        bias = made_bias(env, len(x), torch.float32).requires_grad_()
        routed = autograd.dispatch(group, x, ids[0], weights[0])
        (autograd.combine(routed, routed.tokens, bias) * towards).sum().backward()
        wanted = [x.grad, bias.grad]
        x.grad = bias.grad = None

        def model(x: Any, bias: Any, order: Any) -> Any:
            call = x, ids[0], weights[0], order, number, group.max_tokens, "rank_major"
            tokens, _, _, _, order = torch.ops.tokenway.dispatch(*call)
            return torch.ops.tokenway.combine(tokens, order, number, x.shape[0], "none", bias)

        call = torch.compile(model, fullgraph=True, backend=how) if how != "eager" else model
        out, _ = call(x, bias, ops.start())
        (out * towards).sum().backward()
        return [torch.equal(got, want) for got, want in zip((x.grad, bias.grad), wanted, strict=True)]


@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_the_op(processes, how) -> None:
    assert processes(2).run(with_ops, PAIR, how) == [[True, True], [True, True]]


def layer(env: Env, case: Case) -> Any:
    """The layer's output and its bias's gradient, with and without gradients."""
    import torch

    from tokenway import nn

    with group_of(env, case) as group:
        x, _, _, _, towards = leaves(env, group, case)
        moe = nn.ExpertParallelMoE(group, 8)
        with torch.no_grad():
            plain, _ = moe(x[None])
        bias = made_bias(env, len(x), torch.float32)[None].requires_grad_()
        found = []
        for tracked in (False, True):
            with torch.set_grad_enabled(tracked):
                out, _ = moe(x[None], bias=bias)
            found.append(torch.allclose(out, plain + bias, atol=1e-6))
        (out * towards).sum().backward()
        refused = caught(moe, x[None], bias=bias[0] if env.rank == 0 else bias)
        return [*found, torch.equal(bias.grad[0], towards)], refused[:2]


def test_the_layer(processes) -> None:
    (first, refused), (second, told) = processes(2).run(layer, PAIR)
    assert all(first) and all(second), (first, second)
    assert (
        refused[0] == "twInvalidArgument" and "bias has shape [4, 12]; it must be [1, 4, 12], that of x" in refused[1]
    )
    assert told[0] == "twPeerRefused"
