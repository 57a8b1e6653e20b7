"""Layers of PyTorch whose experts have replicas and move between an optimiser's steps, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense import apart, moe, route, sent
from harness import PATIENT, Env, caught, said

import tokenway as tw
from tokenway import balance
from tokenway.balance import replicas

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.needs("memory in common")]

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, MOST = 8, 8, 6, 2, 2, 24
SHAPES = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


def load_optimisers(env: Env) -> None:
    """PyTorch's load its compiler."""
    import torch

    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    torch.optim.AdamW([p]).step()


def ready(world: Any) -> Any:
    """A world whose ranks have loaded what takes long on a busy machine, before they wait for each other."""
    world.run(load_optimisers, timeout=900)
    return world


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def first_map(ranks: int) -> np.ndarray:
    """[P]: experts in order and the first ones again, a slot of each rank empty: expert 0 is twice on rank 0."""
    slots = -(-EXPERTS // ranks) + 3
    table = np.full((ranks, slots), -1)
    table[:, 1:] = (np.arange(ranks * (slots - 1)) % EXPERTS).reshape(ranks, -1)
    table[0, 2] = table[0, 1]
    missing = sorted(set(range(EXPERTS)) - set(table.ravel().tolist()))
    table[-1, slots - len(missing) :] = missing
    return table.ravel()


def make_optimiser(kind: str, parameters: list[Any]) -> Any:
    import torch

    if kind == "SGD":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.6)
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, weight_decay=0.05)


def make_group(env: Env, tensors: dict[str, Any], dtype: str, **settings: Any) -> tw.Group:
    import torch

    from tokenway import autograd

    torch.set_num_threads(1)  # ranks share the cores, and threads that wait for work would take them
    table = first_map(env.nranks)
    room = balance.weight_bytes(tensors, layers=LAYERS, slots=len(table) // env.nranks, ranks=env.nranks)
    tables = np.tile(table, (LAYERS, 1))
    placement = tw.Placement(tables, count_loads=True, load_decay=0.8, moves=True, weight_bytes=room)
    shape = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST, "dtype": dtype}
    return autograd.make_group(env.comm, **shape, expert_map=placement, timeout=PATIENT, **settings)


def batches(sizes: tuple[int, ...], step: int, dtype: str) -> tuple[list[Any], list[Any]]:
    """Per rank: x [sequences, 6, H] and what the output should be; float64 of values that the dtype has."""
    import torch

    rng = np.random.default_rng([step, *sizes])
    leaning = rng.standard_normal(HIDDEN)  # so that some experts are hot

    def draw(count: int) -> Any:
        values = rng.standard_normal((count, 6, HIDDEN)) + leaning
        return torch.from_numpy(values).to(getattr(torch, dtype)).double()

    return [draw(n) for n in sizes], [draw(n) for n in sizes]


def whole_gradient(group: tw.Group, gradient: Any) -> Any:
    """[E, H] float32: the sum over ranks, ascending."""
    rows = group.all_gatherv(gradient, [EXPERTS] * group.nranks).rows
    return rows.view(group.nranks, EXPERTS, HIDDEN).sum(dim=0)


def train(env: Env, sizes: tuple[int, ...], steps: int, kind: str, dtype: str, settings: dict[str, Any]) -> Any:
    """Gives the losses of this rank, the parameters by layer (router, and of experts that it leads), and statistics."""
    from tokenway import nn, training

    on, found = env.device or "cpu", {}
    tensors = balance.trained({name: (shape, dtype) for name, shape in SHAPES.items()}, STATES[kind])
    with make_group(env, tensors, dtype, **settings) as group:
        weights = balance.Weights(group, tensors)
        experts = training.Experts(weights)
        layers = [nn.ExpertParallelMoE(group, INNER, seed=n, experts=experts, layer=n) for n in range(LAYERS)]
        optimiser = make_optimiser(kind, [p for layer in layers for p in layer.parameters()])
        experts.keep(optimiser)
        losses = []
        with balance.TrainingBalancer(group, weights, every=3, gain=0.0) as balancer:
            for step in range(steps):
                xs, ys = batches(sizes, step, dtype)
                x, y = (each[env.rank].to(on, layers[0].gate_up.dtype) for each in (xs, ys))
                h = x
                for layer in layers:
                    h = h + layer(h)[0]
                loss = (h.float() - y.float()).square().sum() / (6 * sum(sizes))
                loss.backward()
                for layer in layers:
                    layer.router.grad = whole_gradient(group, layer.router.grad)
                experts.sum_gradients()
                optimiser.step()
                optimiser.zero_grad(set_to_none=step % 2 == 0)
                balancer.step()
                losses.append(loss.item())
                check_where_states_are(optimiser, experts, layers, kind)
        for n, layer in enumerate(layers):
            found[n, "router"] = sent(layer.router)
            leading = replicas.leads(group.expert_of_slot(n))
            own = np.flatnonzero(weights.rank_of_slot == env.rank)
            assert layer.experts == group.expert_of_slot(n)[own].tolist()
            for name in SHAPES:
                values = sent(getattr(layer, name))
                by_slot = {int(own[place]): value for place, value in enumerate(values)}
                found[n, name] = {e: by_slot[slot] for e, slot in leading.items() if slot in by_slot}
                found[n, name, "all"] = [(e, v) for e, v in zip(layer.experts, values, strict=True) if e >= 0]
    return losses, found, balancer.statistics


def check_where_states_are(optimiser: Any, experts: Any, layers: list[Any], kind: str) -> None:
    """In the window, each at its own place."""
    places = set()
    for layer in layers:
        for parameter in (layer.gate_up, layer.down):
            for name in STATES[kind]:
                kept = optimiser.state[parameter][name]
                assert kept.data_ptr() == experts.state(parameter, name).data_ptr()
                places.add(kept.data_ptr())
    assert len(places) == 2 * LAYERS * len(STATES[kind])


def dense(first: dict[Any, Any], sizes: tuple[int, ...], steps: int, kind: str) -> tuple[list[float], dict[Any, Any]]:
    """The same in one process, in float64: losses of the whole, and the parameters at the end."""
    import torch

    leaf = {name: torch.from_numpy(value).double().requires_grad_() for name, value in first.items()}
    optimiser = make_optimiser(kind, list(leaf.values()))
    losses = []
    for step in range(steps):
        xs, ys = batches(sizes, step, "float32")
        x, y = (torch.cat(each).reshape(-1, HIDDEN) for each in (xs, ys))
        for n in range(LAYERS):
            ids, chosen, _ = route(x, leaf[n, "router"], TOP_K)
            x = x + moe(x, ids, chosen, leaf[n, "gate_up"], leaf[n, "down"])
        loss = (x - y).square().sum() / (6 * sum(sizes))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, {name: p.detach().numpy() for name, p in leaf.items()}


def first_values() -> dict[Any, Any]:
    """What layers of these seeds begin with."""
    import torch

    from tokenway.pytorch import nn

    def filled(shape: tuple[int, ...], seed: int, number: int) -> np.ndarray:
        values = torch.empty(shape)
        nn._fill(values, seed, number)
        return values.numpy()

    found = {}
    for n in range(LAYERS):
        found[n, "router"] = filled((EXPERTS, HIDDEN), n, 0)
        for at, name in enumerate(SHAPES, 1):
            found[n, name] = np.stack([filled(SHAPES[name], n, 2 * e + at) for e in range(EXPERTS)])
    return found


def merged(by_rank: list[dict[Any, Any]]) -> dict[Any, Any]:
    """The parameters of all ranks; replicas are alike."""
    made = {}
    for n in range(LAYERS):
        made[n, "router"] = by_rank[0][n, "router"]
        for name in SHAPES:
            of = {e: value for found in by_rank for e, value in found[n, name].items()}
            for found in by_rank:
                for expert, value in found[n, name, "all"]:
                    np.testing.assert_array_equal(value, of[expert], f"a replica of {expert}")
                np.testing.assert_array_equal(found[n, "router"], made[n, "router"])
            made[n, name] = np.stack([of[e] for e in range(EXPERTS)])
    return made


EXACT = {"mode": "high_throughput", "row_alignment": 8}


@pytest.mark.parametrize(
    ("sizes", "kind", "settings"),
    [((2, 0, 1), "AdamW", {}), ((2, 1), "SGD", EXACT), ((0, 3), "AdamW", {"combine_rows": "per_expert"} | EXACT)],
    ids=str,
)
def test_as_in_one_process(processes, backend, sizes, kind, settings) -> None:
    """Losses and all parameters, while experts move."""
    if backend == "nvlink" and settings:
        pytest.skip("PyTorch has grouped matrix products on devices for bfloat16 alone")
    steps = 11
    found = ready(processes(len(sizes))).run(train, sizes, steps, kind, "float32", settings)
    statistics = [each for _, _, each in found]
    assert statistics[0].plans > 0 and sum(each.moves for each in statistics) > 0
    losses, parameters = dense(first_values(), sizes, steps, kind)
    got = np.sum([each for each, _, _ in found], axis=0)
    np.testing.assert_allclose(got, losses, rtol=2e-4)
    last = merged([each for _, each, _ in found])
    for name, value in parameters.items():
        assert apart(last[name], value) < 5e-4, name


def test_bfloat16(processes) -> None:
    """Replicas stay alike, and losses are those of float32 as far as bfloat16 goes."""
    sizes, steps = (2, 1), 8
    found = ready(processes(2)).run(train, sizes, steps, "AdamW", "bfloat16", {})
    merged([each for _, each, _ in found])
    assert sum(each.moves for _, _, each in found) > 0
    losses, _ = dense(first_values(), sizes, steps, "AdamW")
    np.testing.assert_allclose(np.sum([each for each, _, _ in found], axis=0), losses, rtol=0.1)


# ---- a switch between forward and backward ---------------------------------------------------------


def switched(env: Env) -> Any:
    """A backward pass behind a switch of maps; and one behind an optimiser's border, which PyTorch refuses."""
    import torch

    from tokenway import autograd, nn, training

    on = env.device or "cpu"
    tensors = balance.trained({name: (shape, "float32") for name, shape in SHAPES.items()})
    with make_group(env, tensors, "float32") as group:
        before = group.expert_of_slot(0)
        own = np.flatnonzero(np.repeat(np.arange(env.nranks), len(before) // env.nranks) == env.rank)

        def forward(x: Any) -> tuple[Any, Any, np.ndarray]:
            """Each slot scales by its own number; what came to which slot is told."""
            ids = torch.arange(2 * len(x), device=on).view(-1, 2) % EXPERTS
            chosen = torch.ones(len(x), 2, device=on)
            routed = autograd.dispatch(group, x, ids, chosen, layout="grouped")
            sizes = routed.offsets.diff()
            of = torch.ones(len(own), device=on).requires_grad_()
            used = int(sizes.sum())
            scale = of.repeat_interleave(sizes)
            rows = torch.nn.functional.pad(routed.tokens[:used] * scale[:, None], (0, 0, 0, len(routed.tokens) - used))
            return autograd.combine(routed, rows), of, sizes.cpu().numpy()

        x = torch.ones(9 + env.rank, HIDDEN, device=on).requires_grad_()
        out, of, came = forward(x)
        assert group.moving.stage(before[::-1].copy(), 0) == 1
        group.moving.ready(1)
        turns = 0
        while group.moving.epochs().agreed != 1:
            forward(x.detach())
            turns += 1
            assert turns < 9
        out.sum().backward()
        later, of_later, came_later = forward(x.detach())
        later.sum().backward()
        tables = before[own].tolist(), group.expert_of_slot(0)[own].tolist()
        result = tables, (sent(of.grad), came), (sent(of_later.grad), came_later), sent(x.grad)

    with make_group(env, tensors, "float32") as group:
        weights = balance.Weights(group, tensors)
        experts = training.Experts(weights)
        layer = nn.ExpertParallelMoE(group, INNER, experts=experts, layer=1)
        with balance.TrainingBalancer(group, weights) as balancer:
            out = layer(torch.ones(1, 4, HIDDEN, device=on).requires_grad_())[0]
            balancer.step()
            try:
                out.sum().backward()
            except RuntimeError as error:
                return result, str(error)
    return result, ""


def test_a_backward_pass_behind_a_switch(processes) -> None:
    """Goes to the slots of the forward pass; and behind a border there is none."""
    found = processes(2).run(switched)
    for ((before, after), old, new, of_tokens), refused in found:
        for table, (gradient, came) in ((before, old), (after, new)):
            np.testing.assert_array_equal(gradient, HIDDEN * came)
            assert all(count == 0 for expert, count in zip(table, came, strict=True) if expert < 0)
        assert before != after and old[1].tolist() != new[1].tolist()
        np.testing.assert_array_equal(of_tokens, np.full_like(of_tokens, 2))
        assert "modified by an inplace operation" in refused
    assert sum(old[1].sum() for (_, old, _, _), _ in found) == 2 * (9 + 10)


# ---- what is kept ----------------------------------------------------------------------------------


def refusals(env: Env) -> list[Any]:
    import torch

    from tokenway import nn, training

    found: list[Any] = []
    tensors = balance.trained({name: (shape, "float32") for name, shape in SHAPES.items()}, ["exp_avg"])
    tensors["gate_up.exp_avg_sq"] = (SHAPES["gate_up"], "bfloat16")
    with make_group(env, tensors, "float32") as group:
        found.append(caught(nn.ExpertParallelMoE, group, INNER))
        experts = training.Experts(balance.Weights(group, tensors))
        found.append(caught(nn.ExpertParallelMoE, group, INNER, experts=experts, layer=LAYERS))
        found.append(caught(nn.ExpertParallelMoE, group, INNER + 1, experts=experts))
        found.append(caught(experts.parameter, "gate_up.grad"))
        layer = nn.ExpertParallelMoE(group, INNER, experts=experts)
        assert experts.parameter("down") is layer.down
        assert experts.state(layer.router, "exp_avg") is None
        for parameters in ([layer.gate_up], [layer.down]):
            optimiser = torch.optim.AdamW(parameters, lr=0.0)
            experts.keep(optimiser)
            experts.sum_gradients()
            found.append(caught(optimiser.step))
        layer.down.requires_grad_(False).grad = None
        experts.sum_gradients()
        assert layer.down.grad is None and not layer.gate_up.grad.any()
    with make_group(env, tensors, "float32") as other:
        found.append(caught(nn.ExpertParallelMoE, other, INNER, experts=experts))
    return found


def test_refused(processes) -> None:
    for found in ready(processes(2)).run(refusals):
        outcomes = iter(found)
        for pattern in (
            r"experts is None; a group whose expert_map has experts in slots of their own needs",
            r"layer is 2; it must be an integer from 0 to 1",
            r"experts has gate_up \(\(16, 8\), 'float32'\); it must be \(\(18, 8\), 'float32'\)",
            r"name is 'gate_up\.grad'; it must be one of \['gate_up', 'down'\]",
            r"dtype of 'exp_avg_sq' is torch\.float32 in the optimiser and torch\.bfloat16 in the weights",
            r"state is 'exp_avg_sq'; it must be one of \['exp_avg'\], which balance\.trained was told of",
            r"experts must be tokenway\.training\.Experts of the layer's group",
        ):
            said(next(outcomes), "twInvalidArgument", pattern)
        assert next(outcomes, None) is None


def loaded(env: Env) -> bool:
    """An optimiser that loads what another one has saved has it where it moves."""
    import torch

    from tokenway import nn, training

    tensors = balance.trained({name: (shape, "float32") for name, shape in SHAPES.items()}, STATES["AdamW"])
    with make_group(env, tensors, "float32") as group:
        experts = training.Experts(balance.Weights(group, tensors))
        layer = nn.ExpertParallelMoE(group, INNER, experts=experts)
        parameters = [layer.gate_up, layer.down]
        saved = torch.optim.AdamW(parameters)
        for p in parameters:
            p.grad = torch.ones_like(p)
        saved.step()  # not kept by experts
        optimiser = torch.optim.AdamW(parameters)
        experts.keep(optimiser)
        optimiser.load_state_dict(saved.state_dict())
        return all(
            optimiser.state[p][name].data_ptr() == experts.state(p, name).data_ptr()
            and torch.equal(optimiser.state[p][name], saved.state[p][name])
            and bool(saved.state[p][name].any())
            for p in parameters
            for name in STATES["AdamW"]
        )


def test_loaded_states(processes) -> None:
    assert ready(processes(1)).run(loaded) == [True]
