"""The layout of a routing: without a step, what a dispatch of the same ids does."""

from __future__ import annotations

import re
from ctypes import byref
from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import Case, Round, Setup, fewer_ranks, make_ids, make_payloads, one, same
from harness import PATIENT
from hypothesis import example, given
from player import possible, spread
from strategies import SETTINGS
from strategies import cases as any_case
from test_properties import THREADS
from test_replicas import setup_of

import tokenway as tw
from tokenway import _header, _native
from tokenway import reference as ref
from tokenway.replica_reference import POLICIES
from tokenway.tensors import tensor_of

NAMES = ("tokens_per_rank", "tokens_per_expert", "token_in_rank", "physical_ids")


def arrays(env: Any, layout: tw.RoutingLayout) -> dict[str, np.ndarray]:
    return {name: env.backend.array(getattr(layout, name)) for name in NAMES}


def lay_out(env: Any, case: Case) -> list[dict[str, np.ndarray]]:
    """The layout of every round, each asked for twice, the second time by another view of the ids."""
    tensor, found = env.backend.tensor, []
    case = possible(env, case)
    with tw.Group(env.comm, timeout=PATIENT, **case.setup.settings()) as group:
        for round_ in (r for flight in case.flights for r in flight):
            ids, _ = make_ids(case.setup, round_, env.rank)
            first = arrays(env, group.routing_layout(tensor(ids)))
            other = np.asfortranarray(ids) if round_.fortran else spread(ids, True)
            again = arrays(env, group.routing_layout(tensor(other)))
            for name, was in first.items():
                same(name, again[name], was, f"{round_}, other strides")
            found.append(first)
    return found


def judge(world: Any, case: Case) -> None:
    """Every bit against the oracle."""
    setup = case.setup
    home, _ = ref.placement(setup.slots, setup.ranks, setup.expert_map)
    rounds = [r for flight in case.flights for r in flight]
    for rank, mine in enumerate(world.run(lay_out, case)):
        for round_, got in zip(rounds, mine, strict=True):
            slots = setup.slots_of(make_ids(setup, round_, rank)[0], rank)
            for name, want in ref.routing_layout(slots, home, setup.ranks).items():
                same(name, got[name], want, f"rank {rank} of {round_}\n in {setup}")


def check(world: Any, *cases: Case) -> None:
    for case in (fewer_ranks(case, world.most) for case in cases):
        judge(world(case.setup.ranks), case)


APART = tuple(e % 3 for e in range(7)), (1, 0, 1, 0, 1, 0, 2)


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_hard_batches(world: Any, top_k: int, ids: str) -> None:
    """No tokens, no ids, one expert for all, experts that ranks do not divide, and ranks that hold every third."""
    setup = Setup(ranks=3, experts=7, top_k=top_k, max_tokens=90)
    base = Round((90, 0, 1), ids=ids)
    rounds = [replace(base, routing=name, seed=i) for i, name in enumerate(("random", "holes", "one", "none", "few"))]
    rounds += [replace(base, tokens=(0, 0, 0)), replace(base, tokens=(33, 64, 65), fortran=True)]
    check(world, one(setup, *rounds), one(replace(setup, expert_map=APART), *rounds))


@pytest.mark.parametrize("top_k", [33, 64])
def test_many_ids(world: Any, top_k: int) -> None:
    setup = Setup(ranks=2, experts=70, top_k=top_k)
    check(world, one(setup, Round((8, 5)), Round((8, 8), seed=3, routing="holes")))


def test_many_tokens_and_experts(world: Any) -> None:
    """More tokens than blocks count at a time, and more experts than a block has counters of its own for."""
    few = Setup(ranks=2, experts=9, top_k=8, max_tokens=1100)
    many = Setup(ranks=2, experts=9001, top_k=4, max_tokens=130)
    check(world, one(few, Round((1100, 700))), one(many, Round((130, 65), routing="holes", ids="int64")))


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(world: Any, policy: str) -> None:
    """Ids are logical, and what is counted are the slots that serve them."""
    setup = setup_of(policy, max_tokens=200)
    rounds = [Round((24, 1, 0, 7)), Round((200, 24, 24, 24), seed=2, routing="one")]
    check(world, one(setup, *rounds, Round((3, 24, 9, 17), seed=4, routing="holes", ids="int64")))


def test_balancing_very_many_experts(world: Any) -> None:
    """Whose counts have no room in a block's memory."""
    table = (*range(5000), *range(3000))
    setup = Setup(ranks=2, experts=5000, top_k=3, max_tokens=40, slot_expert=table, policy="balanced")
    check(world, one(setup, Round((40, 33)), Round((40, 1), seed=2, routing="one")))


@SETTINGS
@example(one(Setup(ranks=4, experts=7, top_k=5), Round((0, 8, 1, 0), routing="holes"), Round((3, 0, 8, 1), seed=3)))
@given(any_case(max_ranks=min(6, THREADS)))
def test_any_case(backend: str, case: Case) -> None:
    if case.setup.ranks <= harness.BACKENDS[backend].most_ranks("threads"):
        judge(harness.Threads(backend, case.setup.ranks), case)


@SETTINGS
@given(any_case(max_ranks=min(4, THREADS), exact=True, replicas=True))
def test_any_replicas(backend: str, case: Case) -> None:
    if case.setup.ranks <= harness.BACKENDS[backend].most_ranks("threads"):
        judge(harness.Threads(backend, case.setup.ranks), case)


# ---- what a dispatch does ------------------------------------------------------------------------


def beside_a_dispatch(env: Any, setup: Setup) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """(the layout of layer 1, rows that came from each rank, rows of each local expert)."""
    round_ = Round((9, 30, 0, 17)[: setup.ranks], routing="holes")
    made: dict[str, Any] = setup.settings()
    table = made["expert_map"].slot_expert
    made["expert_map"] = tw.Placement((table[::-1], table), policy=setup.policy)
    tensor = env.backend.tensor
    with tw.Group(env.comm, timeout=PATIENT, **made) as group:
        ids, weights = make_ids(setup, round_, env.rank)
        handle = group.route(tensor(ids), tensor(weights), layer=1)
        between = group.exchange_counts(handle, send_only=True)
        layout = group.routing_layout(tensor(ids), layer=1)  # while a step is under way: it takes no lane
        between.result()
        experts = handle.expert_rows
        group.dispatch(handle, tensor(make_payloads(setup, round_, env.rank)[0]))
        received = handle.num_recv_tokens()[0]
        handle.release()
        assert group.error is None
        return arrays(env, layout), received, experts


@pytest.mark.parametrize("policy", ["shares", "balanced"])
def test_a_dispatch_goes_where_its_layout_says(world: Any, policy: str) -> None:
    ranks = min(4, world.most)
    setup = setup_of(policy, "high_throughput", ranks=ranks, max_tokens=30)
    by_rank = world(ranks).run(beside_a_dispatch, setup)
    told = np.array([layout["tokens_per_rank"] for layout, _, _ in by_rank])
    np.testing.assert_array_equal(told.T, [received for _, received, _ in by_rank])
    experts = np.sum([layout["tokens_per_expert"] for layout, _, _ in by_rank], axis=0)
    np.testing.assert_array_equal(experts, np.concatenate([mine for _, _, mine in by_rank]))


def test_the_oracle_by_hand() -> None:
    ids = np.array([[0, 2, 1], [3, -1, 2], [-1, -1, -1]], np.int64)
    got = ref.routing_layout(ids, np.array([0, 1, 0, 2], np.int32), 4)
    assert got["tokens_per_rank"].tolist() == [2, 1, 1, 0]
    assert got["tokens_per_expert"].tolist() == [1, 1, 2, 1]
    assert got["token_in_rank"].tolist() == [[True, True, False, False], [True, False, True, False], [False] * 4]
    assert got["physical_ids"].dtype == np.int32 and got["physical_ids"].tolist() == ids.tolist()


def kinds(env: Any) -> list[str]:
    import torch

    with tw.Group(env.comm, experts=4, top_k=2, hidden=4, max_tokens=4) as group:
        found = []
        for ids in (np.array([[0, 3]]), torch.tensor([[0, 3]])):
            layout = group.routing_layout(ids)
            found += [f"{type(x).__name__} {tw.tensors.dtype_of(x)}" for x in vars(layout).values()]
            assert layout.token_in_rank.tolist() == [[True] * env.nranks]
        return found


def test_tensors_are_of_the_kind_of_the_ids(threads: Any, torch: Any, backend: str) -> None:
    if backend != "cpu":
        pytest.skip("on a device all are PyTorch's")
    dtypes = ("int32", "int32", "bool", "int32")
    wanted = [f"{kind} {dtype}" for kind in ("ndarray", "Tensor") for dtype in dtypes]
    assert threads(2).run(kinds) == [wanted] * 2


# ---- errors --------------------------------------------------------------------------------------


def refused(env: Any) -> list[str]:
    said = []
    tensor = env.backend.tensor
    wrong: list[tuple[Any, int]] = [
        (tensor(np.zeros((5, 2), np.int32)), 0),
        (tensor(np.zeros((2, 3), np.int32)), 0),
        (tensor(np.zeros(4, np.int32)), 0),
        (tensor(np.zeros((2, 2), np.float32)), 0),
        ([[0, 1]], 0),
        (tensor(np.array([[0, 1]], np.int32)), 1),
    ]
    with tw.Group(env.comm, experts=4, top_k=2, hidden=4, max_tokens=4, timeout=PATIENT) as group:
        for ids, layer in wrong:
            with pytest.raises(tw.InvalidArgument) as caught:
                group.routing_layout(ids, layer=layer)
            said.append(str(caught.value))
        assert env.backend.array(group.routing_layout(tensor(np.array([[0, 3]]))).tokens_per_expert).sum() == 2
    with pytest.raises(tw.InvalidUsage, match="the group is closed"):
        group.routing_layout(tensor(np.array([[0, 3]])))
    return said


def test_refusals(world: Any) -> None:
    (said,) = world(1).run(refused)
    wanted = [
        r"ids has 5 tokens; it must have from 0 to max_tokens, 4",
        r"ids has shape \[2, 3\]; it must be \[T, 2\]",
        r"ids has shape \[4\]; it must be \[T, 2\]",
        r"ids has dtype float32 \(11\); it must be int32 or int64",
        r"ids has dtype none \(0\).*; ids is of type list; it must be a",
        r"layer is 1; it must be from 0 to 0",
    ]
    for sentence, pattern in zip(said, wanted, strict=True):
        assert re.search(pattern, sentence), (sentence, pattern)


def without_physical_ids(env: Any) -> str:
    """What C says where a batch is balanced and there is no memory for its choices."""
    placed = tw.Placement((0, 1, 2, 3, 0, 3), policy="balanced")
    with tw.Group(env.comm, experts=4, top_k=2, hidden=4, max_tokens=4, timeout=PATIENT, expert_map=placed) as group:
        native = group.native
        ids, per_rank = env.backend.tensor(np.array([[0, 3]])), env.backend.tensor(np.zeros(1, np.int32))
        layout = _header.RoutingLayout()
        layout.tokens_per_rank = tensor_of(per_rank, native.place.describe)
        given = byref(tensor_of(ids, native.place.describe)), byref(layout), native.place.stream()
        if result := _native.lib.twGroupRoutingLayout(group.pointer, 0, *given):
            return str(native.error(result, ids=ids))
        return str(env.backend.array(per_rank).tolist())


def test_a_balanced_batch_needs_memory_for_its_choices(threads: Any, made_for: Any) -> None:
    said = "layout.physical_ids has data NULL; on a device a group of policy 'balanced' needs it"
    wanted = "[1]" if made_for.checks_ids_on_host else said
    assert all(found.startswith(wanted) for found in threads(1).run(without_physical_ids))


BAD = {"above": (70, 1, 4), "below": (0, 0, -2), "64 bits": (3, 1, 2**32 + 1), "twice": (64, 1, None)}


def bad_id(env: Any, name: str, policy: str | None) -> Any:
    """What is told of a bad id, and the layout, where it acts as -1."""
    token, k, value = BAD[name]
    ids = np.tile(np.array([[0, 3]]), (72, 1))
    ids[token, k] = ids[token, 0] if value is None else value
    placed = None if policy is None else tw.Placement((0, 1, 2, 3, 0, 3), policy=policy)
    with tw.Group(env.comm, experts=4, top_k=2, hidden=4, max_tokens=72, timeout=PATIENT, expert_map=placed) as group:
        told, found = [], None
        for _ in range(2):  # the same mistake again is told again
            try:
                found = arrays(env, group.routing_layout(env.backend.tensor(ids)))
                group.check()
            except tw.InvalidArgument as error:
                told.append(str(error))
                if record := error.record:
                    assert not record.sticky and (record.phase, record.lane) == ("none", -1), record
                    assert (record.token, record.k, record.value) == (token, k, ids[token, k]), record
            group.check()
        return told, found


@pytest.mark.parametrize("policy", [None, "round_robin", "balanced"])
@pytest.mark.parametrize("name", BAD)
def test_bad_ids(threads: Any, made_for: Any, name: str, policy: str | None) -> None:
    token, k, _ = BAD[name]
    for told, found in threads(1).run(bad_id, name, policy):
        begin = f"ids[{token}, {k}] is " if made_for.checks_ids_on_host else f"ids[{token}, {k}] of routing_layout is "
        assert len(told) == 2 and all(said.startswith(begin) for said in told), told
        if made_for.checks_ids_on_host:
            assert found is None
            continue
        assert found["tokens_per_rank"].tolist() == [72]
        assert (found["physical_ids"] < 0).sum() == 1 and found["physical_ids"][token, k] == -1
        assert found["tokens_per_expert"].sum() == 2 * 72 - 1
