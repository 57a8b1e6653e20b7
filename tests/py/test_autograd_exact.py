"""Gradients through the exact layouts of high throughput and the grouped of low latency, against one process that has
all experts, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_autograd
from dense import apart, sent
from harness import Env, caught
from test_autograd import (
    CASES,
    HIDDEN,
    Case,
    assert_same,
    differences,
    group_of,
    leaves,
    run_weights,
    tensors_of,
    train,
)

from tokenway import reference

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LAYOUTS = ("flat", "grouped")
BLOCKS = (("row_alignment", 4),)


EXACT = [*CASES, Case(5, 3, (0, 0)), Case(6, 3, (7, 2, 5), none=True, room=BLOCKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_gradients(processes, case, layout) -> None:
    """Gradients of tokens, weights and all experts; tokens on no rank, on some, and ids of -1."""
    case = replace(case, layout=layout)
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-6, found


@pytest.mark.parametrize("case", EXACT[2:], ids=str)
def test_gradients_of_rows_per_expert(processes, case) -> None:
    """Rows return unsummed, forward and backward, with gradients of weights beside them."""
    room = (*(case.room or BLOCKS), ("combine_rows", "per_expert"))
    case = replace(case, layout="grouped", room=room)
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-6, found


@pytest.mark.parametrize("rows", [(), (("combine_rows", "per_expert"),)])
@pytest.mark.parametrize("case", EXACT[1:], ids=str)
def test_gradients_in_low_latency(processes, case, rows) -> None:
    """Without counts, in as many rows as could come."""
    case = replace(case, layout="grouped", room=(("mode", "low_latency"), *(case.room or BLOCKS), *rows))
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-6, found


def by_source(env: Env) -> list[Any]:
    import torch

    from tokenway import autograd

    heard = []
    for mode in ("low_latency", "high_throughput"):
        settings = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 8, "dtype": "float32", "mode": mode}
        with autograd.make_group(env.comm, combine_rows="per_expert", **settings) as group:
            tokens = torch.ones(3, 8)
            ids = torch.tensor([[0, 1], [2, 3], [1, 2]])
            weights = torch.ones(3, 2)
            layout = "rank_major" if mode == "low_latency" else "flat"
            heard.append(caught(autograd.dispatch, group, tokens, ids, weights, layout=layout))
    return heard


def test_rows_by_source_do_not_return_per_expert(processes) -> None:
    low, high = processes(1).run(by_source)[0]
    assert low[0] == high[0] == "twInvalidArgument"
    assert "layout is 'rank_major'; to train in the mode 'low_latency' it must be 'grouped'" in low[1]
    assert "layout is 'flat'; to train in the mode 'high_throughput' it must be 'grouped'" in high[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lost_gradients_are_seen(processes, layout) -> None:
    """What the test above would say if the weights' gradients did not come back: theirs are wrong, no others."""
    case = Case(6, 3, (5, 9), layout=layout, room=BLOCKS)
    found = differences(case, processes(case.ranks).run(train, case, "plain", True))
    assert found.pop("weights") > 0.5
    assert max(found.values()) < 3e-6, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16(processes, layout) -> None:
    case = Case(7, 3, (9, 0, 12), "bfloat16", layout=layout, room=BLOCKS)
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-2, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_weights_are_exact(processes, dtype, layout) -> None:
    """Bit for bit, in rows of 8 significant bits too: they are float32 beside those."""
    case = Case(9, 5, (13, 0, 8), dtype, none=True, layout=layout, room=BLOCKS)
    for rank, (weights, grads, _) in enumerate(processes(case.ranks).run(run_weights, case)):
        assert np.array_equal(weights, grads), (rank, weights - grads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_stacked_layers(processes, how, layout) -> None:
    """Three layers forward before any backward, on one channel; checkpointed, the same bits."""
    case = Case(5, 3, (8, 3), layers=3, layout=layout, room=BLOCKS)
    by_rank = processes(case.ranks).run(train, case, how)
    found = differences(case, by_rank)
    assert max(found.values()) < 1e-5, found
    if how == "plain":
        return
    for ours, plain in zip(by_rank, processes(case.ranks).run(train, case), strict=True):
        assert_same(ours, plain)


def run_unlike(env: Env, layout: str, collective: bool) -> list[np.ndarray]:
    """Gradients, plain and checkpointed, where rank 0 alone saves something between the two steps of a layer."""
    from torch.utils.checkpoint import checkpoint

    from tokenway import autograd

    case, sizes = Case(4, 2, (3, 5, 0), layout=layout), [3, 5, 0]
    with group_of(env, case) as group:

        def layer(x: Any) -> Any:
            def compute(rows: Any) -> Any:
                return rows.sin() if env.rank == 0 else rows * 2  # of which the first saves its argument

            if collective:
                return autograd.reduce_scatterv(group, compute(autograd.all_gatherv(group, x, sizes)), sizes)
            routed = autograd.dispatch(group, x, ids[0], weights[0].detach(), layout=layout)
            return autograd.combine(routed, compute(routed.tokens))

        found = []
        for how in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
            x, weights, ids, _, towards = leaves(env, group, case)
            (how(how(x)) * towards).sum().backward()
            found.append(sent(x.grad))
    return found


@pytest.mark.parametrize(
    ("layout", "collective"), [("rank_major", False), ("flat", False), ("grouped", False), ("flat", True)]
)
def test_checkpointed_unlike_others(processes, layout, collective) -> None:
    """Ranks repeat their steps in the same order, whatever they save in between."""
    for plain, again in processes(3).run(run_unlike, layout, collective):
        assert np.array_equal(plain, again)


# ---- what comes ---------------------------------------------------------------------------------------------


def run_received(env: Env, case: Case) -> dict[str, Any]:
    """A dispatch, and the bits of a combine."""
    from tokenway import autograd

    with group_of(env, case) as group:
        x, weights, ids, _, _ = leaves(env, group, case)
        routed = autograd.dispatch(group, x, ids[0], weights[0], layout=case.layout)
        fresh = routed.tokens.detach().clone()
        out = autograd.combine(routed, routed.tokens * 3)
        autograd.dispatch(group, x * 7, ids[0], weights[0], layout=case.layout)
        assert (routed.tokens == fresh).all()  # a later step leaves it alone
        found = {"tokens": fresh, "weights": routed.weights, "ids": routed.ids, "counts": routed.counts}
        return {name: sent(t) for name, t in (found | {"offsets": routed.offsets, "out": out}).items()}


def exchange(case: Case, **more: Any) -> reference.Exchange:
    """The oracle's routing of a case's first layer."""
    made = tensors_of(case)
    ids = [of[0].numpy() for of in made["ids"]]
    weights = [sent(of[0].float()) for of in made["weights"]]
    return reference.Exchange(ids, weights, case.experts, max(1, *case.sizes), **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_the_oracle(processes, layout) -> None:
    case = Case(7, 3, (9, 0, 12), none=True, layout=layout, room=BLOCKS)
    x = exchange(case, alignment=4)
    tokens = [sent(t.float()) for t in tensors_of(case)["x"]]
    view = reference.dispatch_flat if layout == "flat" else reference.dispatch_grouped
    want = [view(x, r, [tokens]) for r in range(case.ranks)]
    outs = reference.combine(x, [w.payloads[0] * np.float32(3) for w in want], layout=layout)
    for rank, found in enumerate(processes(case.ranks).run(run_received, case)):
        w = want[rank]
        mine = w.weights * (w.ids >= 0)  # those of other ranks' experts are left out
        offsets = x.sources(rank) if layout == "flat" else x.blocks(rank)
        for name, value in {"tokens": w.payloads[0], "weights": mine, "ids": w.ids, "counts": w.counts}.items():
            assert np.array_equal(found[name], value), (rank, name)
        assert np.array_equal(found["offsets"], offsets) and np.array_equal(found["out"], outs[rank])


def run_poisoned(env: Env, case: Case) -> Any:
    """Whatever padding holds: NaN in what returns and in gradients, and in the memory that gradients are written to."""
    import torch

    from tokenway import autograd
    from tokenway.pytorch import gradients

    honest = gradients.rows_to_come
    with group_of(env, case) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "rows_to_come", lambda *args: honest(*args).fill_(torch.nan))
        x, weights, ids, _, _ = leaves(env, group, case)
        routed = autograd.dispatch(group, x, ids[0], weights[0], layout="grouped")
        padding = routed.ids < 0
        poison = torch.where(padding, torch.nan, 1.0)[:, None]
        rows = routed.tokens * routed.weights[:, None] * poison
        rows.retain_grad()
        out = autograd.combine(routed, rows)
        (out.sum() + (routed.tokens * poison).sum() + (routed.weights * poison[:, 0]).sum()).backward()
        found = bool(padding.any()), bool((rows.grad == ~padding[:, None]).all())  # 1, and 0 in padding
    return *found, sent(out), sent(x.grad), sent(weights[0].grad)


def test_padding_reaches_nothing(processes) -> None:
    case = Case(7, 3, (9, 0, 12), none=True, layout="grouped", room=BLOCKS)
    made = tensors_of(case)
    for rank, (padded, rows, out, x, weights) in enumerate(processes(case.ranks).run(run_poisoned, case)):
        assert padded and rows
        ids, w = made["ids"][rank][0], made["weights"][rank][0].detach()
        valid = ids >= 0
        tokens = made["x"][rank].detach()
        total = (w * valid).sum(dim=1, keepdim=True)
        assert apart(out, tokens * total) < 1e-6
        assert apart(x, (total + valid.sum(dim=1, keepdim=True)).expand(-1, HIDDEN)) < 1e-6
        assert apart(weights, valid * (tokens.sum(dim=1, keepdim=True) + 1)) < 1e-6


# ---- room ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("room", [1, 4, 9])
def test_dropped_rows_contribute_nothing(processes, monkeypatch, torch, room, layout) -> None:
    """Results and all gradients are those of a routing that has -1 for them."""
    case = Case(7, 3, (9, 0, 12), layout=layout, room=(("max_recv_tokens", room), ("overflow", "drop"), *BLOCKS))
    by_rank = processes(case.ranks).run(train, case)
    kept = exchange(case, max_recv_tokens=room).kept_ids
    made = tensors_of(case)
    assert any((a != b[0].numpy()).any() for a, b in zip(kept, made["ids"], strict=True)), "nothing is dropped"
    made["ids"] = [[torch.from_numpy(of)] for of in kept]
    monkeypatch.setattr(test_autograd, "tensors_of", lambda _: made)
    found = differences(case, by_rank)
    assert max(found.values()) < 3e-6, found


def run_refusals(env: Env, case: Case) -> list[Any]:
    """What is refused, and that the group goes on: rank 1 makes the mistakes, but for those of all."""
    import torch

    from tokenway import autograd

    wrong = env.rank == 1
    tight = replace(case, room=(("max_recv_tokens", 5),))
    with group_of(env, tight) as group:
        x, weights, ids, _, _ = leaves(env, group, case)
        found = [caught(autograd.dispatch, group, x, ids[0], weights[0])]
        fewer = torch.where(torch.arange(len(x))[:, None] < 1, ids[0], -1)
        routed = autograd.dispatch(group, x, fewer, weights[0])
        autograd.combine(routed, routed.tokens).sum().backward()
        assert x.grad is not None
    with group_of(env, case) as group:
        call = (ids[0], weights[0])
        found += [
            caught(autograd.dispatch, group, x, ids[0] + 100 * wrong, weights[0]),
            caught(autograd.dispatch, group, x.double() if wrong else x, *call),
            caught(lambda: autograd.dispatch(group, x, *call, bound=0 if wrong else None)),
            caught(lambda: autograd.dispatch(group, x, *call, layout="rank_major" if wrong else "flat")),
        ]
        for layout in LAYOUTS:
            routed = autograd.dispatch(group, x, *call, layout=layout, bound=group.max_tokens)
            found.append(caught(autograd.combine, routed, routed.tokens[:-1] if wrong else routed.tokens))
            autograd.combine(routed, routed.tokens).sum().backward()  # the group goes on
    return [outcome[:2] for outcome in found]


def test_refusals(processes, made_for) -> None:
    if not made_for.checks_ids_on_host:
        pytest.skip("ids in device memory are not refused")
    others, mistaken = processes(2).run(run_refusals, Case(4, 2, (4, 5), layout="flat"))
    assert [result for result, _ in others] == ["twRecvOverflow", *["twPeerRefused"] * 6], others
    assert others[:1] == mistaken[:1], "all ranks refuse alike"
    sentences = [
        "max_recv_tokens is 5",
        "ids[0, 0] is ",
        "dtype float64",
        "bound is 0; it must be an integer from 1 to ",
        "layout is 'rank_major'; to train in the mode 'high_throughput' it must be 'flat' or 'grouped'",
        "rows has shape [",
        "rows has shape [",
    ]
    for (_, text), sentence in zip(mistaken, sentences, strict=True):
        assert sentence in text, (text, sentence)
