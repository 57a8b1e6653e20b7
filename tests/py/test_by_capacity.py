"""Experts that take a fixed number of rows (`tokenway.integrations.by_capacity`), on any backend: results and gradients
against one process that has all experts, in float64. Memory that nobody wrote to is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from dense import apart, experts_of, moe, sent
from frameworks import mutated
from harness import PATIENT, Env

import tokenway as tw

# Ranks are processes, as those of test_autograd.py.
pytestmark = [pytest.mark.torch, pytest.mark.processes]

HIDDEN, INNER, MOST = 144, 10, 12


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


@dataclass(frozen=True)
class Case:
    """Experts, and how many tokens each rank has."""

    experts: int
    top_k: int
    sizes: tuple[int, ...]
    capacity: int | None = None  # of an expert, from a rank; None: enough for all
    none: bool = False  # some ids are -1
    equal: bool = False
    fp8_rows: bool = False


CASES = [
    Case(4, 2, (5, 5), equal=True),
    Case(6, 3, (5, 9)),
    Case(7, 3, (4, 0, 7), none=True),
    Case(3, 1, (6, 2, 0, 1)),  # a rank without experts
    Case(6, 4, (9, 3), none=True, fp8_rows=True),
    Case(4, 3, (12, 12), capacity=4),
    Case(2, 1, (8, 8), capacity=0),
]


def drawn(case: Case) -> dict[str, Any]:
    """What all ranks have, as leaves in float64, of values that float32 has."""
    import torch

    rng = np.random.default_rng([case.experts, case.top_k, *case.sizes])

    def draw(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).double().requires_grad_()

    ids = [rng.permuted(np.tile(np.arange(case.experts), (t, 1)), axis=1)[:, : case.top_k] for t in case.sizes]
    if case.none:
        ids = [np.where(rng.random(i.shape) < 0.3, -1, i) for i in ids]
    return {
        "x": [draw(t, HIDDEN) for t in case.sizes],
        "weights": [draw(t, case.top_k) for t in case.sizes],
        "ids": [torch.from_numpy(np.ascontiguousarray(i)) for i in ids],
        "towards": [draw(t, HIDDEN).detach() for t in case.sizes],
        "gate_up": draw(case.experts, 2 * INNER, HIDDEN),
        "down": draw(case.experts, HIDDEN, INNER),
    }


def kept_of(case: Case, ids: list[Any]) -> list[Any]:
    """Of each choice, whether an expert has a place for it: in order of ranks and tokens."""
    import torch

    most = MOST if case.capacity is None else case.capacity
    every = torch.cat(ids)
    kept = torch.zeros_like(every, dtype=torch.bool)
    for expert in range(case.experts):
        chosen = (every == expert).nonzero()[: most * len(case.sizes)]
        kept[chosen[:, 0], chosen[:, 1]] = True
    return list(kept.split(case.sizes))


def expected(case: Case) -> dict[str, Any]:
    """In one process: by rank out, and gradients of x and weights; those of all experts."""
    import torch

    made, outs = drawn(case), []
    for x, weights, ids, kept in zip(made["x"], made["weights"], made["ids"], kept_of(case, made["ids"]), strict=True):
        seen = x
        if case.fp8_rows:
            seen = x + (tw.dequantize_fp8(*tw.quantize_fp8(x.detach().float())).double() - x).detach()
        places = torch.where(kept, ids, -1)
        outs.append(moe(seen, places, weights, made["gate_up"], made["down"]))
    sum((out * towards).sum() for out, towards in zip(outs, made["towards"], strict=True)).backward()
    found = {name: [leaf.grad for leaf in made[name]] for name in ("x", "weights")}
    return found | {"out": [out.detach() for out in outs], "gate_up": made["gate_up"].grad, "down": made["down"].grad}


class Shared:
    """Of `SharedGroup` what the exchange asks for: a group as such rows see it."""

    def __init__(self, group: Any):
        self.group = group

    def with_room(self, rows: tw.RowType, max_tokens: int) -> Any:
        from tokenway.pytorch.typed_group import TypedGroup

        assert max_tokens <= self.group.max_tokens
        return TypedGroup(self.group, rows)


def of_rank(env: Env, case: Case, change: tuple[str, str] | None = None) -> dict[str, Any]:
    """A layer, forward and backward; and what it is without gradients. change: text of the exchange, and what a later
    hand may make of it."""
    import torch

    from tokenway import autograd, reference
    from tokenway.integrations import by_capacity
    from tokenway.integrations.groups import Sizes
    from tokenway.pytorch.gradients import device_of

    torch.set_num_threads(1)  # ranks share the cores, and threads that wait for work would take them
    made, rank = drawn(case), env.comm.rank
    sizes = {"experts": case.experts, "top_k": case.top_k, "hidden": HIDDEN, "max_tokens": MOST, "dtype": "float32"}
    with autograd.make_group(env.comm, timeout=PATIENT, **sizes) as group:

        def here(x: Any) -> Any:
            return x.detach().float().to(device_of(group)).requires_grad_()

        module = by_capacity if change is None else mutated(by_capacity, *change)
        exchange = module.ByCapacity(Shared(group), Sizes(None if case.equal else MOST, case.equal), "", case.fp8_rows)
        ranks, _ = reference.contiguous_placement(case.experts, group.nranks)
        mine = np.flatnonzero(ranks == rank)
        x, weights, towards = (here(made[name][rank]) for name in ("x", "weights", "towards"))
        gate_up, down = (here(made[name][mine]) for name in ("gate_up", "down"))
        ids = made["ids"][rank].to(device_of(group))

        def layer() -> Any:
            routed = exchange.dispatch(x, ids, weights)
            capacity = routed.tokens.shape[1] if case.capacity is None else case.capacity
            padded = exchange.padded(routed, routed.tokens, routed.weights, capacity)
            assert len(padded.rows) == len(mine) * group.nranks * capacity == len(padded.weights)
            parts = padded.rows.view(len(mine), -1, HIDDEN) if len(mine) else []
            made = [experts_of(rows, gate_up[slot], down[slot]) for slot, rows in enumerate(parts)]
            results = torch.cat(made) if made else padded.rows
            return exchange.combine(routed, padded, results * padded.weights[:, None])

        torch.use_deterministic_algorithms(True, warn_only=True)  # what is not written to is NaN
        try:
            assert torch.empty(1).isnan().all()
            out = layer()
            (out * towards.detach()).sum().backward()
            with torch.no_grad():
                again = layer()
        finally:
            torch.use_deterministic_algorithms(False)
        found = {"out": out, "again": again, "x": x.grad, "weights": weights.grad}
        found |= {"gate_up": gate_up.grad, "down": down.grad} if len(mine) else {}
        return {name: sent(value) for name, value in found.items()} | {"mine": mine}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_in_one_process(processes, case) -> None:
    judge(case, processes(len(case.sizes)).run(of_rank, case))


def judge(case: Case, found: list[dict[str, Any]]) -> None:
    wanted = expected(case)
    for rank, each in enumerate(found):
        assert np.array_equal(each["again"], each["out"])
        for name in ("out", "x", "weights"):
            assert apart(each[name], wanted[name][rank]) < 1e-5, name
        if len(each["mine"]):
            for name in ("gate_up", "down"):
                assert apart(each[name], wanted[name][each["mine"]]) < 1e-5, name


MUTATIONS = {
    "padding is what the memory held": (".masked_fill_(padding, 0)", ""),
    "choices that are not there are read": (".masked_fill_(missing[:, k], 0)", ""),
    "an expert's last row is padding": ("(places >= begins[1:, None])", "(places + 1 >= begins[1:, None])"),
    "a row off by one": ("Places(choices // k,", "Places((choices // k - 1).clamp(min=0),"),
    "a place off by one": ("(sorted_keys * most + within)", "(sorted_keys * most + (within - 1).clamp(min=0))"),
    "what is beyond the capacity is kept": ("| (within >= most)", ""),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(processes, mutation) -> None:
    case = CASES[5 if "capacity" in mutation else 1]
    found = processes(len(case.sizes)).run(of_rank, case, MUTATIONS[mutation])
    with pytest.raises(AssertionError):
        judge(case, found)
