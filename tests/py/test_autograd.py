"""Gradients through dispatch and combine, against one process that has all experts, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from dense import apart, experts_of, moe, sent
from harness import PATIENT, Env, caught

import tokenway as tw

# Ranks are processes: PyTorch has one thread for the backward passes of a device, and ranks that wait for each other
# cannot share it.
pytestmark = [pytest.mark.torch, pytest.mark.processes]

HIDDEN, INNER = 12, 10


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


@dataclass(frozen=True)
class Case:
    """A layer, and how many tokens each rank has."""

    experts: int
    top_k: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    layers: int = 1
    none: bool = False  # some ids are -1
    layout: str = "rank_major"
    room: tuple[tuple[str, Any], ...] = ()  # further settings of a group of high throughput, or its mode

    @property
    def ranks(self) -> int:
        return len(self.sizes)


CASES = [
    Case(4, 2, (5,)),
    Case(6, 3, (5, 9)),
    Case(7, 3, (4, 0, 7), none=True),
    Case(3, 1, (6, 2, 0, 1)),  # a rank without experts
    Case(18, 5, (11, 3, 0, 16), none=True),
]


def tensors_of(case: Case) -> dict[str, Any]:
    """All ranks' inputs and parameters as leaves in float64, of values that the case's dtype has."""
    import torch

    rng = np.random.default_rng([case.experts, case.top_k, *case.sizes])

    def draw(*shape: int, dtype: str = case.dtype) -> Any:
        values = torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, dtype))
        return values.double().requires_grad_()

    made: dict[str, Any] = {"x": [], "weights": [], "ids": [], "towards": []}
    for size in case.sizes:
        made["x"].append(draw(size, HIDDEN))
        made["weights"].append([draw(size, case.top_k, dtype="float32") for _ in range(case.layers)])
        made["towards"].append(draw(size, HIDDEN).detach())
        ids = [rng.permuted(np.tile(np.arange(case.experts), (size, 1)), axis=1) for _ in range(case.layers)]
        ids = [i[:, : case.top_k] for i in ids]
        if case.none:
            ids = [np.where(rng.random(i.shape) < 0.3, -1, i) for i in ids]
        made["ids"].append([torch.from_numpy(np.ascontiguousarray(i)) for i in ids])
    made["gate_up"] = [draw(case.experts, 2 * INNER, HIDDEN) for _ in range(case.layers)]
    made["down"] = [draw(case.experts, HIDDEN, INNER) for _ in range(case.layers)]
    return made


def expected(case: Case) -> dict[str, Any]:
    """Results and gradients in one process: by rank x, weights and out; whole gate_up and down."""
    made = tensors_of(case)
    outs = []
    for rank in range(case.ranks):
        x = made["x"][rank]
        for layer in range(case.layers):
            params = made["gate_up"][layer], made["down"][layer]
            x = x + moe(x, made["ids"][rank][layer], made["weights"][rank][layer], *params) / HIDDEN
        outs.append(x)
    sum((out * g).sum() for out, g in zip(outs, made["towards"], strict=True)).backward()
    return {
        "out": [out.detach() for out in outs],
        "x": [x.grad for x in made["x"]],
        "weights": [[w.grad for w in of_rank] for of_rank in made["weights"]],
        "gate_up": [p.grad for p in made["gate_up"]],
        "down": [p.grad for p in made["down"]],
    }


def group_of(env: Env, case: Case, **more: Any) -> tw.Group:
    from tokenway import autograd

    most = max(1, *case.sizes)
    if case.layout != "rank_major" or case.room:
        more |= {"mode": "high_throughput"} | dict(case.room)
    return autograd.make_group(
        env.comm,
        experts=case.experts,
        top_k=case.top_k,
        hidden=HIDDEN,
        max_tokens=most + 1,
        dtype=case.dtype,
        timeout=PATIENT,
        **more,
    )


def layer_of(group: tw.Group, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, layout: Any = None) -> Any:
    """One layer, as a user writes it."""
    import torch

    from tokenway import autograd

    routed = autograd.dispatch(group, x, ids, weights, layout=layout)
    grouped = autograd.by_expert(routed)
    parts = grouped.rows.split(grouped.sizes)
    made = [experts_of(rows, gate_up[slot], down[slot]) for slot, rows in enumerate(parts)]
    results = torch.cat(made) if made else grouped.rows
    return x + autograd.combine(routed, grouped.sum(results.float() * grouped.weights[:, None])) / HIDDEN


def leaves(env: Env, group: tw.Group, case: Case) -> tuple[Any, ...]:
    """This rank's x, weights, ids, its experts' parameters, and the loss's gradient."""
    import torch

    from tokenway import reference

    torch.set_num_threads(1)  # ranks share the cores, and threads that wait for work would take them
    made, dtype = tensors_of(case), getattr(torch, case.dtype)
    home, _ = reference.contiguous_placement(case.experts, case.ranks)
    mine = torch.from_numpy(home == env.rank)

    def own(t: Any, kind: Any = dtype) -> Any:
        return t.detach().to(kind).to(env.device or "cpu").requires_grad_()

    x = own(made["x"][env.rank])
    weights = [own(w, torch.float32) for w in made["weights"][env.rank]]
    ids = [i.to(env.device or "cpu") for i in made["ids"][env.rank]]
    params = [(own(made["gate_up"][n][mine]), own(made["down"][n][mine])) for n in range(case.layers)]
    return x, weights, ids, params, own(made["towards"][env.rank]).detach()


def train(env: Env, case: Case, how: str = "plain", lost: bool = False) -> dict[str, Any]:
    """One forward and backward pass of a rank: results and gradients. how: plain, or how layers are checkpointed.
    lost: the gradients of weights do not travel."""
    from torch.utils.checkpoint import checkpoint

    from tokenway.pytorch import gradients

    honest = gradients.gradients_of_weights
    if lost:
        gradients.gradients_of_weights = lambda group, weights, lead, layout: honest(group, None, lead, layout)
    try:
        with group_of(env, case) as group:
            first, weights, ids, params, towards = leaves(env, group, case)
            x = first
            for layer in range(case.layers):
                call = (group, x, ids[layer], weights[layer], *params[layer], case.layout)
                if how == "plain":
                    x = layer_of(*call)
                else:
                    x = checkpoint(layer_of, *call, use_reentrant=how == "reentrant")
            (x * towards).sum().backward()
            found = {
                "out": x.detach(),
                "x": first.grad,
                "weights": [w.grad for w in weights],
                # Without experts there is nothing to have a gradient.
                "gate_up": [g.detach() if g.grad is None else g.grad for g, _ in params],
                "down": [d.detach() if d.grad is None else d.grad for _, d in params],
            }
    finally:
        gradients.gradients_of_weights = honest
    return {name: [sent(t) for t in v] if isinstance(v, list) else sent(v) for name, v in found.items()}


def differences(case: Case, by_rank: list[dict[str, Any]]) -> dict[str, float]:
    """How far each result is from one process, over all ranks and layers."""
    want = expected(case)
    found = {name: max(apart(g[name], want[name][r]) for r, g in enumerate(by_rank)) for name in ("out", "x")}
    for name in ("gate_up", "down"):
        whole = [np.concatenate([g[name][n] for g in by_rank]) for n in range(case.layers)]
        found[name] = max(apart(whole[n], want[name][n]) for n in range(case.layers))
    pairs = [(g["weights"], want["weights"][r]) for r, g in enumerate(by_rank)]
    found["weights"] = max(apart(a, b) for got, wanted in pairs for a, b in zip(got, wanted, strict=True))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(processes, case) -> None:
    """Gradients of tokens, weights and all experts; every token and expert has values of its own."""
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-6, found


def test_lost_gradients_are_seen(processes) -> None:
    """What the test above would say if the weights' gradients did not come back: theirs are wrong, no others."""
    case = CASES[1]
    found = differences(case, processes(case.ranks).run(train, case, "plain", True))
    assert found.pop("weights") > 0.5
    assert max(found.values()) < 3e-6, found


def test_bfloat16(processes) -> None:
    case = Case(7, 3, (9, 0, 12), "bfloat16")
    found = differences(case, processes(case.ranks).run(train, case))
    assert max(found.values()) < 3e-2, found


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_stacked_layers(processes, how) -> None:
    """Three layers forward before any backward, on one channel; checkpointed, the same bits."""
    case = Case(5, 3, (8, 3), layers=3)
    by_rank = processes(case.ranks).run(train, case, how)
    found = differences(case, by_rank)
    assert max(found.values()) < 1e-5, found
    if how == "plain":
        return
    for ours, plain in zip(by_rank, processes(case.ranks).run(train, case), strict=True):
        assert_same(ours, plain)


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    for name, value in a.items():
        pairs = zip(value, b[name], strict=True) if isinstance(value, list) else [(value, b[name])]
        for one, other in pairs:
            assert np.array_equal(one, other), name


def test_repeated_bits(processes) -> None:
    case = CASES[-1]
    first, second = (processes(case.ranks).run(train, case) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)


def run_weights(env: Env, case: Case) -> tuple[Any, Any, Any]:
    """Weights whose gradients are the weights themselves, some of them tiny, and tokens whose gradients are small
    integers."""
    import torch

    from tokenway import autograd

    with group_of(env, case) as group:
        x, weights, ids, _, _ = leaves(env, group, case)
        weights[0].data[::2] *= 2.0**-118  # the last bits are of no normal number
        routed = autograd.dispatch(group, x, ids[0], weights[0], layout=case.layout)
        assert routed.weights.requires_grad and not routed.ids.requires_grad
        ((routed.weights**2).sum() / 2 + routed.tokens.float().sum()).backward()
        valid = torch.where(ids[0] >= 0, weights[0].detach(), torch.zeros_like(weights[0]))
    return sent(valid), sent(weights[0].grad), sent(x.grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_weights_are_exact(processes, dtype) -> None:
    """Bit for bit, in rows of 8 significant bits too."""
    case = Case(9, 4, (13, 0, 8), dtype, none=True)
    want = [{int(e) * case.ranks // case.experts for e in row if e >= 0} for row in tensors_of(case)["ids"][0][0]]
    for rank, (weights, grads, tokens) in enumerate(processes(case.ranks).run(run_weights, case)):
        assert np.array_equal(weights, grads), (rank, weights - grads)
        if rank == 0:  # one from each rank that a token goes to
            assert tokens[:, 0].tolist() == [len(ranks) for ranks in want]


def run_partly(env: Env, case: Case) -> Any:
    """Ranks whose loss leaves different things out make the same steps: gradients of 0 travel too."""
    import torch

    from tokenway import autograd

    with group_of(env, case) as group:
        x, weights, ids, _, _ = leaves(env, group, case)
        routed = autograd.dispatch(group, x, ids[0], weights[0], bound=max(case.sizes))
        out = autograd.combine(routed, routed.tokens.float())
        used = routed.weights if env.rank == 0 else routed.tokens
        (out.sum() + used.float().sum()).backward()
        with torch.no_grad():
            again = autograd.combine(
                autograd.dispatch(group, x, ids[0], weights[0]),
                routed.tokens.new_zeros(group.nranks, group.max_tokens, HIDDEN),
            )
        assert not again.requires_grad and not again.any()
        lanes_are_free(group, x, ids[0])
    return sent(x.grad), sent(weights[0].grad)


def lanes_are_free(group: tw.Group, x: Any, ids: Any) -> None:
    """Every channel can be leased: a step on each, all at once."""
    import torch

    handles = [group.route(ids) for _ in range(group.settings.lanes)]
    for handle in handles:
        group.dispatch(handle, x.detach())
    for handle in handles:
        rows = torch.zeros(group.nranks, group.max_tokens, group.combine_hidden, dtype=x.dtype, device=x.device)
        group.combine(handle, rows)


def test_parts_of_the_graph(processes) -> None:
    case = Case(4, 2, (3, 5))
    ids = tensors_of(case)["ids"]
    for rank, (x, weights) in enumerate(processes(2).run(run_partly, case)):
        to = ids[rank][0].numpy() // 2  # the rank of each expert
        hops = np.array([len(set(row)) for row in to.tolist()])
        assert np.array_equal(x[:, 0], hops + (to == 1).any(axis=1))
        assert np.array_equal(weights, (to == 0))


def run_never_backward(env: Env, case: Case) -> int:
    """Forward passes that no backward follows, and dispatches that no combine follows, take no channel for good."""
    from tokenway import autograd

    with group_of(env, case, lanes=2) as group:
        x, weights, ids, params, _ = leaves(env, group, case)
        for _ in range(5):
            layer_of(group, x, ids[0], weights[0], *params[0])
            autograd.dispatch(group, x, ids[0], weights[0])
        lanes_are_free(group, x, ids[0])
        return group.settings.lanes


def test_never_backward(processes) -> None:
    assert processes(2).run(run_never_backward, Case(4, 2, (3, 5))) == [2, 2]


def run_refusals(env: Env, case: Case) -> list[Any]:
    """Rank 1 makes mistakes; the other one learns of them."""
    import torch

    from tokenway import autograd

    wrong = env.rank == 1
    with group_of(env, case) as group:
        x, weights, ids, _, _ = leaves(env, group, case)
        call = (ids[0], weights[0])
        found = [
            caught(autograd.dispatch, group, x, ids[0] + 100 * wrong, weights[0]),
            caught(autograd.dispatch, group, x.double() if wrong else x, *call),
            caught(lambda: autograd.dispatch(group, x, *call, bound=99 if wrong else None)),
        ]
        routed = autograd.dispatch(group, x, *call)
        found.append(caught(autograd.combine, routed, routed.tokens[:, :2] if wrong else routed.tokens))
        routed = autograd.dispatch(group, x, *call)
        found.append(caught(autograd.combine, routed, None if wrong else routed.tokens))
        routed = autograd.dispatch(group, x, *call)
        out = autograd.combine(routed, routed.tokens)  # the group goes on
        assert torch.isfinite(out).all()
    settings: dict[str, Any] = {"experts": case.experts, "top_k": case.top_k, "hidden": HIDDEN, "max_tokens": 16}
    with tw.Group(env.comm, dtype="float32", **settings) as narrow:
        found.append(caught(autograd.dispatch, narrow, x, *call))
        routed = autograd.dispatch(narrow, x, ids[0], weights[0].detach())  # tokens alone can be trained
        autograd.combine(routed, routed.tokens).sum().backward()
        assert x.grad is not None
    with tw.Group(env.comm, dtype="float32", combine_dtype="bfloat16", **settings) as mixed:
        found.append(caught(autograd.dispatch, mixed, x, *call))
    with tw.Group(env.comm, dtype="float32", id_space="global", **settings) as world:
        routed = autograd.dispatch(world, x, ids[0], weights[0].detach())
        found.append(caught(autograd.by_expert, routed))
    found.append(caught(autograd.weight_columns, 2, "float16"))
    return [outcome[:2] for outcome in found]


def test_refusals(processes, made_for) -> None:
    if not made_for.checks_ids_on_host:
        pytest.skip("ids in device memory are not refused; tests/gpu/test_bad_ids.py has what becomes of them")
    others, mistaken = processes(2).run(run_refusals, Case(4, 2, (3, 5)))
    assert [result for result, _ in mistaken] == ["twInvalidArgument"] * 9, mistaken
    assert [result for result, _ in others] == ["twPeerRefused"] * 5 + ["twInvalidArgument"] * 4, others
    sentences = [
        r"ids[0, 0] is ",
        "dtype float64",
        "bound is 99; it must be an integer from 1 to 6",
        "rows has shape [2, 2, 12]; it must be [2, 6, 12]",
        "rows is of type NoneType",
        "combine_room is 48; for gradients of weights it must be at least 56",
        "combine_dtype is bfloat16; to train it must be its dtype, float32",
        "id_space is 'global'; by_expert needs 'local'",
        "dtype is float16; to train with it must be float32 or bfloat16",
    ]
    for (_, text), sentence in zip(mistaken, sentences, strict=True):
        assert sentence in text, (text, sentence)


def run_compiled(env: Env, case: Case) -> list[Any]:
    """The same layer, with and without torch.compile around it."""
    import torch

    found = []
    with group_of(env, case) as group:
        for model in (layer_of, torch.compile(layer_of, backend="aot_eager")):
            x, weights, ids, params, towards = leaves(env, group, case)
            (model(group, x, ids[0], weights[0], *params[0]) * towards).sum().backward()
            found.append({"x": sent(x.grad), "weights": sent(weights[0].grad), "down": sent(params[0][1].grad)})
        torch._dynamo.reset()
        try:
            torch.compile(layer_of, backend="aot_eager", fullgraph=True)(group, x, ids[0], weights[0], *params[0])
        except torch._dynamo.exc.Unsupported as error:
            found.append(f"fullgraph: {error}")
        else:
            found.append("compiled")
    return found


@pytest.mark.long
def test_compiled(processes) -> None:
    """torch.compile goes around the steps, in the same order on every rank."""
    for plain, compiled, refused in processes(2).run(run_compiled, Case(4, 2, (3, 5)), timeout=900):
        assert "fullgraph" in refused, refused
        for name, value in plain.items():
            assert apart(compiled[name], value) < 1e-6, name
