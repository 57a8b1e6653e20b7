"""Gradients of the registered ops: those of tokenway.autograd, eager and compiled into one graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from dense import apart, experts_of, sent
from harness import Env, caught
from test_autograd import HIDDEN, Case, assert_same, differences, group_of, leaves

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

# Ids of -1, an odd K, a rank without tokens, experts that the ranks do not divide.
CASE = Case(7, 3, (4, 0, 7), none=True)
DEEP = Case(5, 3, (8, 3), layers=3)


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def computed(tokens: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """What this rank's experts make of rows in rank_major: each sees all, as shapes must not depend on the routing."""
    import torch

    total = torch.zeros_like(tokens, dtype=torch.float32)
    for slot in range(gate_up.shape[0]):
        share = torch.where(ids == slot, weights, torch.zeros_like(weights)).sum(dim=-1, keepdim=True)
        total = total + share * experts_of(tokens, gate_up[slot], down[slot]).float()
    return total + 0 * tokens.float()  # without experts too, rows are of the graph


def with_ops(number: int, bound: int, around: Any = None) -> Any:
    """All layers as a function of the ops. around(layer, its arguments): instead of the call."""
    import torch

    dispatch, combine = torch.ops.tokenway.dispatch, torch.ops.tokenway.combine

    def one(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, order: Any) -> Any:
        tokens, places, shares, _, order = dispatch(x, ids, weights, order, number, bound, "rank_major")
        rows = computed(tokens, places, shares, gate_up, down)
        out, order = combine(rows, order, number, x.shape[0], "none")
        return x + out / HIDDEN, order

    def model(x: Any, weights: Any, ids: Any, params: Any, order: Any) -> Any:
        for layer, pair in enumerate(params):
            call = (x, ids[layer], weights[layer], *pair, order)
            x, order = one(*call) if around is None else around(one, *call)
        return x, order

    return model


def with_autograd(group: tw.Group) -> Any:
    """Does the same with tokenway.autograd."""
    from tokenway import autograd

    def model(x: Any, weights: Any, ids: Any, params: Any, order: Any) -> Any:
        for layer, (gate_up, down) in enumerate(params):
            routed = autograd.dispatch(group, x, ids[layer], weights[layer])
            rows = computed(routed.tokens, routed.ids, routed.weights, gate_up, down)
            x = x + autograd.combine(routed, rows) / HIDDEN
        return x, order

    return model


def run(env: Env, case: Case, how: str) -> Any:
    """Results and gradients of a rank, the steps that it made, and the handles that it keeps in the end."""
    import torch

    from tokenway import ops

    steps: list[str] = []

    def noted(call: Any) -> Any:
        return lambda *args, **keywords: (steps.append(call.__name__), call(*args, **keywords))[1]

    with group_of(env, case) as group:
        group.dispatch, group.combine = noted(group.dispatch), noted(group.combine)
        number = ops.register(group)
        x, weights, ids, params, towards = leaves(env, group, case)
        model = with_autograd(group) if how == "autograd" else with_ops(number, group.max_tokens)
        if how not in ("autograd", "eager"):
            model = torch.compile(model, fullgraph=True, backend=how)
        for _ in range(2):
            for leaf in (x, *weights, *[p for pair in params for p in pair]):
                leaf.grad = None
            steps.clear()
            out, order = model(x, weights, ids, params, ops.start())
            (out.float() * towards.float()).sum().backward()
        del order
        found = {
            "out": sent(out),
            "x": sent(x.grad),
            "weights": [sent(w.grad) for w in weights],
            "gate_up": [sent(g if g.grad is None else g.grad) for g, _ in params],
            "down": [sent(d if d.grad is None else d.grad) for _, d in params],
        }
        del out
        kept = len(group.op_handles)
    return found, steps, kept


def run_checkpointed(env: Env, case: Case, reentrant: bool) -> Any:
    """Gradients of a rank, each layer's forward steps being repeated in the backward pass; and the handles kept."""
    from torch.utils.checkpoint import checkpoint

    from tokenway import ops

    with group_of(env, case) as group:
        x, weights, ids, params, towards = leaves(env, group, case)
        around = partial(checkpoint, use_reentrant=reentrant)
        model = with_ops(ops.register(group), group.max_tokens, around)
        out, order = model(x, weights, ids, params, ops.start())
        (out * towards).sum().backward()
        del out, order
        return {"x": sent(x.grad), "weights": [sent(w.grad) for w in weights]}, len(group.op_handles)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(processes, reentrant) -> None:
    """The same bits."""
    world = processes(DEEP.ranks)
    for (found, kept), (want, _, _) in zip(
        world.run(run_checkpointed, DEEP, reentrant), world.run(run, DEEP, "autograd"), strict=True
    ):
        assert_same(found, want)
        assert kept == 0


def check(case: Case, found: list[Any], bits: bool, want: list[Any]) -> None:
    """Against the dense layer, and against tokenway.autograd, all bits of it or nearly."""
    nearly = 3e-2 if case.dtype == "bfloat16" else 1e-5
    dense = differences(case, [results for results, _, _ in found])
    assert max(dense.values()) < nearly, dense
    for (results, steps, kept), (wanted, _, _) in zip(found, want, strict=True):
        assert steps == ["dispatch", "combine"] * (2 * case.layers) and kept == 0, (steps, kept)
        if bits:
            assert_same(results, wanted)
        else:
            for name, value in results.items():
                pairs = zip(value, wanted[name], strict=True) if isinstance(value, list) else [(value, wanted[name])]
                assert max(apart(a, b) for a, b in pairs) < nearly, name


@pytest.mark.parametrize("case", [CASE, DEEP, Case(7, 3, (9, 0, 12), "bfloat16"), Case(3, 1, (6, 2, 0, 1))], ids=str)
def test_eager(processes, case) -> None:
    """The bits of tokenway.autograd, in as many steps, and nothing kept afterwards."""
    world = processes(case.ranks)
    check(case, world.run(run, case, "eager"), True, world.run(run, case, "autograd"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [CASE, pytest.param(DEEP, marks=pytest.mark.long)], ids=str)
def test_compiled(processes, case, how) -> None:
    """Forward and backward, each in one graph without breaks."""
    world = processes(case.ranks)
    check(case, world.run(run, case, how, timeout=900), how != "inductor", world.run(run, case, "autograd"))


def run_branches(env: Env) -> Any:
    """Two layers side by side, of which rank 0's loss leaves out the first."""
    import torch

    from tokenway import ops

    with group_of(env, Case(4, 2, (3, 5))) as group:
        number, order = ops.register(group), ops.start()
        x, weights, ids, _, _ = leaves(env, group, Case(4, 2, (3, 5)))
        made = []
        for _ in range(2):
            tokens, _, _, _, order = torch.ops.tokenway.dispatch(
                x, ids[0], weights[0], order, number, group.max_tokens, "rank_major"
            )
            out, order = torch.ops.tokenway.combine(tokens, order, number, len(x), "none")
            made.append(out.sum())
        (made[1] if env.rank == 0 else made[0] + 10 * made[1]).backward()
    ranks = [len({int(e) // 2 for e in row}) for row in ids[0]]
    return sent(x.grad)[:, 0].tolist(), ranks


def test_the_chain_is_reversed(processes) -> None:
    """The gradient of the order token reaches layers that no other does, so that all ranks make the same steps."""
    first, second = processes(2).run(run_branches)
    assert first[0] == first[1]  # a token gets one for each rank that it goes to
    assert second[0] == [11 * n for n in second[1]]


def run_opcheck(env: Env) -> None:
    """PyTorch's own checks, all of them: of the schema, the fake implementation, the gradients and AOTAutograd's."""
    import torch

    from tokenway import ops

    case = Case(4, 2, (5,), none=True)
    with group_of(env, case) as group:
        number, all_of = ops.register(group), torch.ops.tokenway
        x, weights, ids, _, _ = leaves(env, group, case)
        b = group.max_tokens
        for plain in (True, False):
            call = (
                [x.detach(), ids[0], weights[0].detach(), ops.start()]
                if plain
                else [x, ids[0], weights[0], ops.start()]
            )
            torch.library.opcheck(all_of.dispatch.default, (*call, number, b, "rank_major"))
            received, _, shares, _, routed = all_of.dispatch(*call, number, b, "rank_major")
            rows = received.detach().requires_grad_(not plain)
            torch.library.opcheck(all_of.combine.default, (rows, routed.detach(), number, len(x), "none"))
            last = number, b
            torch.library.opcheck(all_of.send_gradients.default, (x.detach(), routed.detach(), ops.start(), *last))
            last = number, len(x)
            grads = received.detach(), shares.detach(), routed.detach(), ops.start()
            torch.library.opcheck(all_of.return_gradients.default, (*grads, *last))


@pytest.mark.long
def test_opcheck(processes) -> None:
    processes(1).run(run_opcheck, timeout=900)


def run_refusals(env: Env, case: Case) -> list[Any]:
    """What has no gradient says so, in the backward pass; and forward passes without one go on as ever."""
    import torch

    from tokenway import autograd, ops

    found = []
    settings = {"experts": 4, "top_k": 2, "hidden": HIDDEN, "max_tokens": 6, "dtype": "float32", "lanes": 2}

    def backward(group: tw.Group, layout: str = "rank_major", weighting: str = "none", elements: int = HIDDEN) -> None:
        number = ops.register(group)
        x, weights, ids, _, _ = leaves(env, group, case)
        tokens, _, _, _, order = torch.ops.tokenway.dispatch(
            x, ids[0], weights[0], ops.start(), number, group.max_tokens, layout
        )
        rows = torch.nn.functional.pad(tokens, (0, elements - HIDDEN))
        out, _ = torch.ops.tokenway.combine(rows, order, number, len(x), weighting)
        assert out.shape == (len(x), elements) and out.isfinite().all()
        found.append(caught(lambda: out.sum().backward()))

    with group_of(env, case) as group:
        backward(group, weighting="topk")
        backward(group, layout="expert_major")
    with tw.Group(env.comm, combine_hidden=HIDDEN + autograd.weight_columns(2, "float32"), **settings) as wide:
        backward(wide, elements=wide.combine_hidden)
    with tw.Group(env.comm, **settings) as narrow:
        backward(narrow)
    return [outcome[:2] for outcome in found]


def test_refusals(processes) -> None:
    sentences = [
        "weighting is 'topk'; for gradients it must be 'none'",
        "layout is 'expert_major'; for gradients it must be 'rank_major'",
        "rows has shape [2, 6, 14]; for gradients it must be [..., 12]",
        "the group's combine_room is 48; for gradients of weights it must be at least 56",
    ]
    for found in processes(2).run(run_refusals, Case(4, 2, (3, 5))):
        for (result, text), sentence in zip(found, sentences, strict=True):
            assert result == "twInvalidArgument" and sentence in text, (text, sentence)


def run_stale(env: Env) -> Any:
    """Rows that no token came to: memory that held NaN before must not show through."""
    import torch

    from tokenway import ops

    case = Case(4, 2, (3,))
    with group_of(env, case) as group:
        number = ops.register(group)
        x, weights, ids, _, _ = leaves(env, group, case)
        for _ in range(3):
            torch.full((group.nranks, group.max_tokens, HIDDEN), torch.nan)
            call = x, ids[0], weights[0], ops.start(), number, group.max_tokens, "rank_major"
            tokens, _, _, counts, _ = torch.ops.tokenway.dispatch(*call)
        return sent(tokens), sent(counts)


def test_rows_without_a_token_are_zero(processes) -> None:
    ((tokens, counts),) = processes(1).run(run_stale)
    assert counts.tolist() == [3] and np.abs(tokens[0, :3]).min() > 0
    assert not tokens[0, 3:].any()
