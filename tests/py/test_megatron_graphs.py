"""Megatron's layers with a fixed capacity, forward and backward, in a CUDA graph over two devices: replays follow other
tokens, and find what Megatron's own layer finds on one rank. On CPUs the same steps are made without a graph, and must
not depend on what routers choose. And the parts into which Megatron cuts a layer of which it graphs the router."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from frameworks import assert_caught, attempt, here, on_devices, steps, whole
from megatron_ranks import (
    MOST,
    Case,
    batch,
    begin_megatron,
    close,
    finish,
    gradients_of,
    layer_of,
    shared_of,
    two_ranks,
    wanted_of,
)
from test_megatron_capacity import padded
from test_megatron_shared import GATED

pytestmark = [pytest.mark.torch, pytest.mark.processes]

REPLAYS = 3
CASES = {
    "equal": Case(padded(1.0)),
    "room for half": Case(padded(0.5), sizes=((8, 2), (8, 2))),
    "uneven": Case(padded(1.0), {"max_tokens": MOST}, ((6, 3), (1, 2))),
    "with shared experts": Case(padded(1.0, **GATED)),
    "fp8 rows": Case(padded(0.5), {"fp8_rows": True}, ((8, 2), (8, 2))),
}
PARTS = {
    "dropless": Case(),
    "dropped tokens": Case({"moe_expert_capacity_factor": 0.5}),
    "padded": Case(padded(1.0)),
    "beside shared experts": Case(GATED),
}
# What asks the device for numbers, or for sizes that follow from them.
ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "is_nonzero", "equal.default")
# name: (text of megatron_layer.py, what a later hand may make of it)
MUTATIONS = {
    "ids are not a part of graphs": ('self.cudagraph_attrs = ["ids"]', "self.cudagraph_attrs = []"),
    "nor what shared experts see": ('"shared_experts.cached_fc1_input"]', "]"),
    "nor their gate": ("* shared_experts.use_shared_expert_gate", "* 0"),
}


class Static:
    """A layer over memory that stays, as a graph reads and writes it."""

    def __init__(self, adapter: Any, case: Case, rank: int):
        self.case, self.rank, self.layer = case, rank, layer_of(adapter, case, rank)
        self.x = batch(case, rank).to(here()).requires_grad_()

    def load(self, turn: int) -> None:
        """Other tokens, which choose others."""
        self.x.detach().copy_(batch(self.case, self.rank, turn))

    def step(self) -> Any:
        """Forward and backward; gradients begin anew."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        out, _ = self.layer(self.x)
        back(out)
        return out.detach()


def left(layer: Any, x: Any, out: Any) -> dict[str, Any]:
    """As `trained`, of what a step has left."""
    named = {"out": out, "x": x.grad, "router": layer.router.weight.grad}
    named |= {f"shared {number}": p.grad for number, p in enumerate(shared_of(layer))}
    return {name: whole(value) for name, value in named.items()} | {"experts": gradients_of(layer)}


def back(out: Any) -> None:
    """The backward pass of what `trained` makes of an output."""
    import torch

    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum().backward()


def replayed(adapter: Any, of_one: Any, case: Case, rank: int) -> dict[str, Any]:
    """What each of some replays has found, and Megatron's own; and how many steps of Tokenway's the graph holds."""
    static = Static(adapter, case, rank)
    pairs, (run, held) = [], captured(static) if on_devices() else stepped(static)
    for turn in range(1, 1 + REPLAYS):
        static.load(turn)
        found = left(static.layer, static.x, run())
        pairs.append((found, wanted_of(of_one, case, rank, turn)))
    check_groups()
    return {"pairs": pairs, "held": held}


def captured(static: Static) -> tuple[Any, int]:
    """(what replays a step and returns its output, steps that the graph holds)."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # makes the group, communicators, and what libraries allocate once
            static.step()
    torch.cuda.synchronize()
    before = steps()
    # NCCL's watchdog asks for events meanwhile, in its own thread.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = static.step()
    held = steps() - before

    def run() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return out

    return run, held


def stepped(static: Static) -> tuple[Any, int]:
    """The same without a graph."""
    before = steps()
    static.step()
    return static.step, steps() - before


def check_groups() -> None:
    """Raises what steps have found out while they ran."""
    from tokenway.integrations import groups

    for peers in groups.living():
        for shared in peers.groups.values():
            shared.group.check()


def operations(adapter: Any, case: Case, rank: int) -> list[list[tuple[str, Any]]]:
    """What PyTorch is asked for in a step, with the shapes of tensors, of two batches."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Noting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.noted: list[tuple[str, Any]] = []

        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.noted.append((str(function), shapes))
            return function(*args, **(kwargs or {}))

    static, noted = Static(adapter, case, rank), []
    static.step()
    for turn in (1, 2):
        static.load(turn)
        with Noting() as noting:
            static.step()
        noted.append(noting.noted)
    return noted


def in_parts(adapter: Any, of_one: Any, case: Case, rank: int) -> dict[str, Any]:
    """A layer as Megatron runs it where a graph holds its router: the router's results, and what the dispatcher names
    beside them, are memory of the graph, and other tokens' were the dispatcher's last."""
    layer = layer_of(adapter, case, rank)
    x = batch(case, rank).to(here()).requires_grad_()

    def run(part: str, *args: Any) -> Any:
        layer.fwd_execution_map = part
        return layer(args[0], intermediate_tensors=args[1:])

    hidden, probs, shared = run("route", x)
    dispatcher = layer.token_dispatcher
    kept = {name: attrgetter(name)(dispatcher).clone() for name in dispatcher.cudagraph_attrs}
    run("route", batch(case, rank, 1).to(here()))
    for name, value in kept.items():
        *path, last = name.split(".")
        setattr(attrgetter(*path)(dispatcher) if path else dispatcher, last, value)
    before = steps()
    output, bias = run("expert_compute", None, hidden, probs)
    assert bias is None
    out = run("postprocess", None, output, shared)
    back(out)
    return {"pairs": [(left(layer, x, out), wanted_of(of_one, case, rank))], "held": steps() - before}


def judge(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert isinstance(each, dict), each
        assert each["held"] == 4  # a dispatch and a combine, and their backward passes
        for found, wanted in each["pairs"]:
            for name in found.keys() - {"experts"}:
                close(found[name], wanted[name])
            for one, other in zip(found["experts"], wanted["experts"], strict=True):
                close(one, other)


def rank_main(store: str) -> dict[str, Any]:

    rank, of_one = begin_megatron(store, blocking=False)
    from tokenway.integrations import megatron

    found: dict[str, Any] = {name: attempt(replayed, megatron, of_one, case, rank) for name, case in CASES.items()}
    found["operations"] = {name: attempt(operations, megatron, case, rank) for name, case in (CASES | PARTS).items()}
    for name, case in PARTS.items():
        found[name] = attempt(in_parts, megatron, of_one, case, rank)
    return finish(found, MUTATIONS, lambda adapter: in_parts(adapter, of_one, PARTS["beside shared experts"], rank))


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return two_ranks(rank_main, tmp_path_factory, "megatron_graphs")


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_other_tokens(ran, case) -> None:
    """Outputs and gradients are those of Megatron's own layer on one rank."""
    judge([found[case] for found in ran])


@pytest.mark.parametrize("case", CASES)
def test_nothing_depends_on_what_routers_choose(ran, case) -> None:
    """Two batches ask PyTorch for the same operations on the same shapes, and for none that asks the device."""
    for one, other in (found["operations"][case] for found in ran):
        assert one == other and len(one) > 20
        assert not [name for name, _ in one if any(asking in name for asking in ASKING)]


def test_what_depends_on_it_is_seen(ran) -> None:
    """Of a layer without a fixed capacity, shapes do."""
    assert any(one != other for one, other in (found["operations"]["dropless"] for found in ran))


@pytest.mark.parametrize("case", PARTS)
def test_a_layer_in_parts(ran, case) -> None:
    """Where a graph holds the router, the exchange follows what it gives."""
    judge([found[case] for found in ran])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails."""
    assert_caught([found[mutation] for found in ran], judge)
