"""As test_arguments.py, of what is built on a group's calls: autograd, ops, the layer, groups for training."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Env
from test_arguments import AT_ONCE, TIMEOUT, check, no_torch, told

import tokenway as tw

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def prepare(env: Env) -> tuple[tw.Group, Any, Any, Any]:
    """(a group for training, tokens, ids, weights)."""
    import torch

    import tokenway.autograd

    group = tokenway.autograd.make_group(
        env.comm, experts=3, top_k=1, hidden=4, max_tokens=3, dtype="float32", timeout=TIMEOUT
    )
    tokens = torch.ones(3, 4, device=env.device or "cpu").requires_grad_()
    ids = torch.arange(3, device=tokens.device)[:, None]
    return group, tokens, ids, torch.ones(3, 1, device=tokens.device)


def transformed(env: Env) -> Any:
    """A tensor as a function sees it that torch.func transforms."""
    import torch

    found: list[Any] = []
    torch.func.grad(lambda x: found.append(x) or x.sum())(torch.ones(3, 4, device=env.device or "cpu"))
    return found[0]


WRONG = {"angry": no_torch, "transformed": transformed, "no tensor": lambda env: 5}


def autograd_steps(env: Env, kind: str) -> Any:
    import tokenway.autograd

    group, tokens, ids, weights = prepare(env)
    with group:
        wrong = WRONG[kind](env) if env.rank == 0 else None
        first = told(tokenway.autograd.dispatch, group, tokens if wrong is None else wrong, ids, weights)
        routed = tokenway.autograd.dispatch(group, tokens, ids, weights)
        rows = routed.tokens * 2
        second = told(tokenway.autograd.combine, routed, rows if wrong is None else wrong)
        out = tokenway.autograd.combine(routed, rows)
        out.sum().backward()
        return first, second, float(out.detach().sum()), float(tokens.grad.sum())


@pytest.mark.parametrize("kind", WRONG)
def test_autograd(threads, kind) -> None:
    by_rank = threads(3).run(autograd_steps, kind)
    cause = {"angry": "Angry", "transformed": "RuntimeError", "no tensor": "NoneType"}[kind]
    check([first for first, *_ in by_rank], "dispatch", "tokens is of type", cause)
    check([second for _, second, *_ in by_rank], "combine", "rows is of type", cause)
    assert [(out, grad) for _, _, out, grad in by_rank] == [(24.0, 24.0)] * 3


def spoiled_backward(env: Env) -> Any:
    """What a node has saved is changed on one rank: autograd refuses it before the backward step."""
    import tokenway.autograd

    group, tokens, ids, weights = prepare(env)
    with group:
        routed = tokenway.autograd.dispatch(group, tokens, ids, weights)
        out = tokenway.autograd.combine(routed, routed.tokens * 2)
        if env.rank == 0:
            routed.counts.add_(1)
        return told(out.sum().backward)


def test_a_backward_that_cannot_begin(threads) -> None:
    first, *others = threads(3).run(spoiled_backward)
    assert first[0] == "RuntimeError" and "modified by an inplace operation" in first[1]
    for result, said, _, _ in others:
        assert result == "twPeerRefused" and "rank 0 refused its arguments of combine" in said


def gathers(env: Env, kind: str, reduces: bool) -> Any:
    import torch

    import tokenway.autograd

    group, *_ = prepare(env)
    with group:
        call = tokenway.autograd.reduce_scatterv if reduces else tokenway.autograd.all_gatherv
        rows = torch.ones(3 if reduces else 1, 4, device=env.device or "cpu")
        outcome = told(call, group, WRONG[kind](env) if env.rank == 0 else rows, [1, 1, 1])
        return outcome, float(call(group, rows, [1, 1, 1]).sum())


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_gathers(threads, made_for, kind, reduces) -> None:
    if not made_for.knows_calls:
        pytest.skip("what peers move is not known, so the group ends: test_staged.py")
    by_rank = threads(3).run(gathers, kind, reduces)
    cause = {"angry": "Angry", "transformed": "RuntimeError", "no tensor": "NoneType"}[kind]
    check([outcome for outcome, _ in by_rank], "reduce_scatterv" if reduces else "all_gatherv", "rows is", cause)
    assert [total for _, total in by_rank] == [12.0] * 3


def ops_steps(env: Env) -> Any:
    """An order token that names no dispatch, of the only one that is under way."""
    import torch

    import tokenway.ops

    with tw.Group(env.comm, experts=3, top_k=1, hidden=4, max_tokens=3, dtype="float32", timeout=TIMEOUT) as group:
        number = tokenway.ops.register(group)
        tokens = torch.ones(3, 4, device=env.device or "cpu")
        ids, weights = torch.arange(3, device=tokens.device)[:, None], torch.ones(3, 1, device=tokens.device)
        rows, _, _, _, order = torch.ops.tokenway.dispatch(
            tokens, ids, weights, tokenway.ops.start(), number, 3, "rank_major"
        )
        wrong = tokenway.ops.start() if env.rank == 0 else order
        outcome = told(torch.ops.tokenway.combine, rows, wrong, number, 3, "none")
        out, _ = torch.ops.tokenway.combine(rows, order, number, 3, "none")
        return outcome, float(out.sum())


def test_ops(threads) -> None:
    by_rank = threads(3).run(ops_steps)
    check([outcome for outcome, _ in by_rank], "combine", "order is 0; it must come from the dispatch", "NoneType")
    assert [total for _, total in by_rank] == [12.0] * 3


def layer(env: Env) -> Any:
    """Experts that fail on one rank, between two steps."""
    import torch

    import tokenway.nn

    group, *_ = prepare(env)
    with group:
        moe = tokenway.nn.ExpertParallelMoE(group, inner=8)
        x = torch.ones(1, 3, 4, device=env.device or "cpu")
        compute = moe.compute
        if env.rank == 0:
            moe.compute = lambda *_: 1 / 0
        outcome = told(moe, x)
        moe.compute = compute
        out, _ = moe(x)
        return outcome, bool(out.isfinite().all())


def test_layer(threads) -> None:
    (first, good), *others = threads(3).run(layer)
    assert first[0] == "ZeroDivisionError" and good
    for (result, said, _, _), good in others:
        assert result == "twPeerRefused" and "rank 0 refused its arguments of combine" in said and good


def groups(env: Env) -> Any:
    import tokenway.autograd

    changes = {"dtype": "float16"} if env.rank == 0 else {}
    return told(
        tokenway.autograd.make_group, env.comm, experts=3, top_k=1, hidden=4, max_tokens=3, timeout=TIMEOUT, **changes
    )


def test_groups(threads) -> None:
    first, *others = threads(3).run(groups)
    assert first[0] == "twInvalidArgument" and "dtype is float16" in first[1]
    for result, said, _, took in others:
        assert result == "twInvalidArgument" and "rank 0: its settings were refused there" in said
        assert took < AT_ONCE
