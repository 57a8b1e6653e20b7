"""The registered PyTorch ops: fake shapes, schemas, order, compiled graphs."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from cases import Round, Setup, make_ids, make_payloads, same
from harness import AT_ONCE, PATIENT, Env, caught
from test_torch import with_torch

import tokenway as tw
from tokenway import reference as ref

pytestmark = pytest.mark.torch

SETUP = Setup(ranks=2, experts=6, top_k=3, hidden=8, dtype="float32", combine_dtype="float32")
ROUND = Round((5, 8), weighting="topk")
LAYOUTS = ("rank_major", "expert_major")


@pytest.fixture(autouse=True)
def ops(torch) -> Any:
    """The module that registers them; all of this file needs it."""
    from tokenway import ops

    return ops


def arguments(env: Env) -> tuple[Any, Any, Any]:
    """(tokens, ids, weights) of a rank."""
    ids, weights = make_ids(SETUP, ROUND, env.rank)
    tensor = with_torch(env).backend.tensor
    return tensor(make_payloads(SETUP, ROUND, env.rank)[0]), tensor(ids), tensor(weights)


def to_numpy(env: Env, tensor: Any) -> np.ndarray:
    """A copy."""
    return with_torch(env).backend.array(tensor)


def layer(torch: Any, number: int, tokens: Any, ids: Any, weights: Any, order: Any, layout: str) -> Any:
    """What a compiled model holds: a dispatch, experts, a combine, and work before and after."""
    recv, _, _, counts, order = torch.ops.tokenway.dispatch(
        tokens * 2, ids, weights, order, number, SETUP.max_tokens, layout
    )
    rows = recv * 0.5 + counts.sum() * 0
    out, order = torch.ops.tokenway.combine(rows, order, number, tokens.shape[0], "topk")
    return out + 1, order


def wanted(layout: str) -> list[np.ndarray]:
    """The oracle's result of `layer`, by rank."""
    made = [make_ids(SETUP, ROUND, r) for r in range(SETUP.ranks)]
    x = ref.Exchange([i for i, _ in made], [w for _, w in made], SETUP.experts, SETUP.max_tokens)
    tokens = [make_payloads(SETUP, ROUND, r)[0] * np.float32(2) for r in range(SETUP.ranks)]
    view = ref.dispatch_rank_major if layout == "rank_major" else ref.dispatch_expert_major
    rows = [view(x, r, [tokens]).payloads[0] * np.float32(0.5) for r in range(SETUP.ranks)]
    outs = ref.combine(x, rows, layout=layout, weighting="topk")
    return [out + np.float32(1) for out in outs]


def run_layers(env: Env, how: str, layout: str) -> Any:
    """Two layers, the second fed by the first's order: eager or compiled."""
    import torch

    from tokenway import ops

    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        number = ops.register(group)

        def model(tokens: Any, ids: Any, weights: Any, order: Any) -> Any:
            first, order = layer(torch, number, tokens, ids, weights, order, layout)
            second, order = layer(torch, number, tokens, ids, weights, order, layout)
            return first, second, order

        if how != "eager":
            model = torch.compile(model, fullgraph=True, backend=how)
        with torch.no_grad():
            for _ in range(2):
                first, second, order = model(*arguments(env), ops.start())
        assert order.shape == (1,) and order.dtype == torch.float64
    return to_numpy(env, first), to_numpy(env, second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager(threads, layout) -> None:
    for rank, outs in enumerate(threads(2).run(run_layers, "eager", layout)):
        for out in outs:
            same("out", out, wanted(layout)[rank], f"rank {rank}, {layout}")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(processes, how) -> None:
    """In one graph, without breaks, and in the same order on every rank."""
    for layout in LAYOUTS:
        by_rank = processes(2).run(run_layers, how, layout, timeout=900)
        for rank, outs in enumerate(by_rank):
            for out in outs:
                same("out", out, wanted(layout)[rank], f"rank {rank}, {layout}, {how}")


def alone(env: Env, check: Any) -> Any:
    """check(group, its number, three tokens' inputs) on a group of one rank."""
    import torch

    from tokenway import ops

    with tw.Group(env.comm, experts=4, top_k=2, hidden=8, max_tokens=8, lanes=64) as group:
        ids = torch.tensor([[0, 1], [2, -1], [3, 0]], dtype=torch.int32)
        inputs = torch.randn(3, 8).bfloat16(), ids, torch.rand(3, 2)
        return check(group, ops.register(group), [t.to(env.device or "cpu") for t in inputs])


@pytest.fixture
def on_one(threads) -> Any:
    """on_one(check): `alone` on a rank."""
    return lambda check: threads(1).run(alone, check)[0]


def test_opcheck(on_one, torch, ops) -> None:
    """Schema and fake implementation, as PyTorch itself checks them. Its other checks compare outputs of
    two calls, and here every call is another step."""

    def check(group: tw.Group, number: int, inputs: Any) -> None:
        for layout in LAYOUTS:
            call = (*inputs, ops.start(), number, 8, layout)
            torch.library.opcheck(
                torch.ops.tokenway.dispatch.default,
                call,
                test_utils=("test_schema", "test_faketensor"),
            )

    on_one(check)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_shapes(on_one, torch, ops, layout) -> None:
    """The fake implementations say what the real ones return."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def check(group: tw.Group, number: int, inputs: Any) -> None:
        real = torch.ops.tokenway.dispatch(*inputs, ops.start(), number, 8, layout)
        rows = real[0].float()
        out, order = torch.ops.tokenway.combine(rows, real[4], number, 3, "none")
        mode = FakeTensorMode()
        with mode:
            fakes = [mode.from_tensor(t) for t in (*inputs, ops.start())]
            fake = torch.ops.tokenway.dispatch(*fakes, number, 8, layout)
            fake_out, _ = torch.ops.tokenway.combine(fake[0].float(), fake[4], number, 3, "none")
        for a, b in zip((*real, out), (*fake, fake_out), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert order.shape == (1,)

    on_one(check)


def test_outputs_are_fresh(on_one, torch, ops) -> None:
    """A later step leaves what an earlier one returned."""

    def check(group: tw.Group, number: int, inputs: Any) -> None:
        kept, order = [], ops.start()
        for factor in (1, 2, 3):
            recv, ids, weights, counts, order = torch.ops.tokenway.dispatch(
                inputs[0] * factor, *inputs[1:], order, number, 8, "rank_major"
            )
            kept.append((recv, recv.clone(), counts, counts.clone(), ids, ids.clone()))
            out, order = torch.ops.tokenway.combine(recv, order, number, 3, "none")
            kept.append((out, out.clone(), weights, weights.clone()))
        for one in kept:
            for now, then in zip(one[::2], one[1::2], strict=True):
                assert torch.equal(now.view(-1), then.view(-1)) or now.is_floating_point()

    on_one(check)


def test_wrong_numbers(on_one, torch, ops) -> None:
    def check(group: tw.Group, number: int, inputs: Any) -> None:
        with pytest.raises(tw.InvalidArgument, match=r"group is 999999; it must be a number"):
            torch.ops.tokenway.dispatch(*inputs, ops.start(), 999999, 8, "rank_major")
        recv, *_, order = torch.ops.tokenway.dispatch(*inputs, ops.start(), number, SETUP.max_tokens, "rank_major")
        count = len(inputs[0])
        with pytest.raises(
            tw.InvalidArgument, match=rf"tokens is {count + 1}; it must be those of the dispatch, {count}"
        ):
            torch.ops.tokenway.combine(recv, order, number, count + 1, "none")
        with pytest.raises(tw.InvalidArgument, match=r"order is 0; it must come from the dispatch"):
            torch.ops.tokenway.combine(inputs[0].new_zeros(1, 8, 8), ops.start(), number, 3, "none")
        with pytest.raises(tw.InvalidArgument, match=r"bound is 9"):
            torch.ops.tokenway.dispatch(*inputs, ops.start(), number, 9, "rank_major")

    on_one(check)


def run_unused(env: Env, how: str) -> Any:
    """A compiled function that uses nothing of its dispatch and combine; then a round that all see."""
    import torch

    from tokenway import ops

    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        number = ops.register(group)
        steps = []

        def count(call: Any) -> Any:
            return lambda *args, **keywords: (steps.append(call.__name__), call(*args, **keywords))[1]

        group.dispatch, group.combine = count(group.dispatch), count(group.combine)

        def model(tokens: Any, ids: Any, weights: Any, order: Any) -> Any:
            layer(torch, number, tokens, ids, weights, order, "rank_major")
            return tokens + 1

        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend=how)
            compiled(*arguments(env), ops.start())
    return steps


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("how", ["aot_eager", "inductor"])
def test_unused_outputs_are_steps_all_the_same(processes, how) -> None:
    assert processes(2).run(run_unused, how, timeout=900) == [["dispatch", "combine"]] * 2


def bad_ids(env: Env) -> Any:
    """Rank 1's ids are refused before its step; the others are in theirs."""
    import torch

    from tokenway import ops

    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        number = ops.register(group)
        tokens, ids, weights = arguments(env)
        call = (tokens, ids if env.rank != 1 else ids + 100, weights, ops.start(), number, 8, "rank_major")
        begin = time.monotonic()
        outcome = caught(torch.ops.tokenway.dispatch, *call)
        took = time.monotonic() - begin
        out, _ = layer(torch, number, tokens, ids, weights, ops.start(), "rank_major")
    return outcome[:2], took, to_numpy(env, out)


def test_bad_ids_reach_the_peers(world, made_for) -> None:
    if not made_for.checks_ids_on_host:
        pytest.skip("ids in device memory are not refused; tests/gpu/test_bad_ids.py has what becomes of them")
    by_rank = world(2).run(bad_ids)
    assert [outcome[0] for outcome, _, _ in by_rank] == ["twPeerRefused", "twInvalidArgument"]
    assert max(took for _, took, _ in by_rank) < AT_ONCE
    for rank, (_, _, out) in enumerate(by_rank):
        same("out", out, wanted("rank_major")[rank], f"rank {rank}")


def test_handles_end_with_their_group(on_one, torch, ops) -> None:
    """A dispatch that no combine answers keeps neither its handle nor the group alive."""

    def check(group: tw.Group, number: int, inputs: Any) -> Any:
        torch.ops.tokenway.dispatch(*inputs, ops.start(), number, 8, "rank_major")
        (handle,) = group.op_handles.values()
        return weakref.ref(handle), weakref.ref(group)

    refs = on_one(check)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
