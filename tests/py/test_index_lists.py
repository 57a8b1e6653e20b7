"""Behaviour: index lists, by which products gather the rows of a view. Whatever the routing and the block, every rank
gets the oracle's lists, and what is gathered by them is what the experts get by other layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import harness
import numpy as np
import pytest
from cases import LISTS, Case, Round, Setup, one, same
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, caught, said
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EXAMPLES, SETTINGS, cases
from test_exchange import check

import tokenway as tw
from tokenway import reference as ref

VIEWS = {"low_latency": "rank_major", "high_throughput": "flat"}
BLOCKS = (1, 16, 64, 128, 256)
BASE = Setup(ranks=3, experts=7, top_k=3, hidden=8, max_tokens=9)


def viewed(setup: Setup, *rounds: Round, **changes: Any) -> list[Case]:
    """The same in both modes, each in its view."""
    return [
        one(replace(setup, mode=mode, **changes), *(replace(r, layout=layout) for r in rounds))
        for mode, layout in VIEWS.items()
    ]


# ---- the oracle --------------------------------------------------------------------------------------------------


def test_an_example_by_hand() -> None:
    """Two sources of two slots, of which the second one's last is empty; two choices, three experts here."""
    slots = np.array([[[2, 0], [-1, 2]], [[0, -1], [-1, -1]]])
    sorted_rows, block_experts, num_sorted = ref.index_lists(slots, 3, 2)
    # Expert 0 works by rows 0 (k = 1) and 2, expert 1 by none, expert 2 by rows 0 and 1 (k = 1); 8 is no choice.
    assert sorted_rows.tolist() == [1, 4, 0, 3, 8, 8, 8, 8, 8, 8]
    assert block_experts.tolist() == [0, 2, -1, -1, -1]
    assert num_sorted.tolist() == [4]
    sorted_rows, block_experts, num_sorted = ref.index_lists(slots, 3, 3)
    assert sorted_rows.tolist() == [1, 4, 8, 0, 3, 8, 8, 8, 8, 8, 8, 8]
    assert block_experts.tolist() == [0, 2, -1, -1] and num_sorted.tolist() == [6]


def test_the_capacity_is_enough() -> None:
    """For every number of choices that each expert may have; too much by less than a block of each."""
    for rows, top_k, experts, block in itertools.product(range(4), (1, 2, 3), range(4), (1, 2, 3, 5)):
        most = 0
        for counts in itertools.product(range(rows + 1), repeat=experts):
            if sum(counts) <= rows * min(top_k, experts):
                most = max(most, sum(-(-n // block) * block for n in counts))
        more = ref.index_capacity(rows, top_k, experts, block) - most
        assert 0 <= more <= max(experts - 1, 0) * block, (rows, top_k, experts, block)
        assert more == 0 or min(top_k, experts) > 1


def told(env: Any, asked: list[tuple[int, int]]) -> list[int]:
    with tw.Group(env.comm, timeout=PATIENT, **BASE.settings()) as group:
        return [group.index_capacity(*each) for each in asked]


def test_the_library_tells_the_same(world) -> None:
    asked = [(rows, block) for rows in (0, 1, 2, 27, 1000) for block in (1, 2, 7, 64, 4096)]
    ranks = min(3, world.most)
    for rank, mine in enumerate(world(ranks).run(told, asked)):
        experts = int((ref.contiguous_placement(BASE.experts, ranks)[0] == rank).sum())
        assert mine == [ref.index_capacity(rows, BASE.top_k, experts, block) for rows, block in asked]


# ---- lists -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [*BLOCKS, 3, 4096])
def test_blocks(world, block) -> None:
    base = Round((9, 0, 5), index_block=block)
    check(world, *viewed(BASE, base, replace(base, seed=1, own=True), replace(base, seed=2, again=True)))


@pytest.mark.parametrize("routing", ["holes", "one", "none", "few"])
def test_routings(world, routing) -> None:
    base = Round((9, 9, 9), routing=routing, index_block=4)
    check(world, *viewed(BASE, base, replace(base, seed=3, tokens=(0, 0, 0))))


@pytest.mark.parametrize("top_k", [1, 2, 9, 40])
def test_choices(world, top_k) -> None:
    """Odd and even numbers of choices, and more than a warp has lanes."""
    setup = replace(BASE, experts=50, top_k=top_k)
    check(world, *viewed(setup, Round((9, 3, 7), index_block=16), Round((2, 9, 1), routing="holes", index_block=1)))


def test_ranks_without_experts(world) -> None:
    """All experts are the second rank's, in an order of its own."""
    setup = replace(BASE, expert_map=((1,) * 7, (3, 6, 0, 1, 5, 2, 4)))
    check(world, *viewed(setup, Round((9, 0, 5), index_block=16), Round((1, 1, 1), index_block=2)))


def test_ids_of_any_kind(world) -> None:
    """The lists name local experts, whatever received ids are."""
    setup = replace(BASE, id_space="global", invalid_id=99, id_dtype="int64")
    check(world, *viewed(setup, Round((9, 0, 5), routing="holes", index_block=8)))


@pytest.mark.parametrize("policy", ["round_robin", "shares", "balanced"])
def test_replicas(world, policy) -> None:
    """Some experts are in two slots, and one slot is empty."""
    setup = replace(BASE, slot_expert=(0, 1, 2, 3, 4, 5, 6, 6, 0, -1, 2), policy=policy)
    check(world, *viewed(setup, Round((9, 0, 5), index_block=4), Round((9, 9, 9), routing="holes", index_block=1)))


def test_calls_of_all_kinds(world) -> None:
    """Handles that are dispatched again and updated, calls that are sent first and completed later, and limits."""
    base = Round((9, 2, 5), index_block=4)
    changes = ({"send_dispatch": True, "again": True}, {"reuse": True, "late": True}, {"memory": True, "own": True})
    more = ({"release": True}, {"identity": True, "rows": "bfloat16"}, {"limits": (1, 2, 0)})
    rounds = [replace(base, seed=i, **each) for i, each in enumerate((*changes, *more))]
    check(world, *viewed(BASE, *rounds))


def test_rows_that_are_dropped_are_not_listed(world) -> None:
    setup = replace(BASE, mode="high_throughput", overflow="drop", max_recv_tokens=7)
    base = Round((9, 9, 9), layout="flat", index_block=4)
    check(world, one(setup, base, replace(base, seed=1, room=3), replace(base, seed=2, own=True)))


def test_leases(world, made_for) -> None:
    setup = replace(BASE, mode="high_throughput", lease_bytes=1 << 16)
    check(world, one(setup, Round((9, 0, 5), layout="flat", lease=True, index_block=16)))


def test_both_modes_in_one_group(world) -> None:
    """By layouts that calls name, and by bounds alone."""
    setup = replace(BASE, mode="auto", low_latency_tokens=5)
    few, many = Round((5, 0, 2), bound=5, index_block=4), Round((9, 9, 1), layout="flat", index_block=4)
    turns = (few, many, replace(few, chosen=True, seed=1), replace(many, chosen=True, seed=2))
    check(world, one(setup, *turns))


@pytest.mark.parametrize("limit", [0, 1])
def test_many_rows(world, limit) -> None:
    """More than a block of a kernel numbers at a time, and more blocks than one."""
    setup = Setup(ranks=2, experts=9, top_k=2, hidden=2, max_tokens=300, sm_limit=limit)
    check(world, *viewed(setup, Round((300, 217), index_block=16)))


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_room_for_many_rows(world, limit) -> None:
    """So many that on a device a kernel in front counts them, unless there is one block alone."""
    setup = Setup(ranks=2, experts=9, top_k=3, hidden=2, max_tokens=3000, sm_limit=limit)
    rounds = Round((300, 217), index_block=16), Round((0, 1), seed=1, index_block=5, routing="holes")
    check(world, *viewed(setup, *rounds))


def test_room_for_many_rows_on_lanes(world) -> None:
    """Each lane has counts of its own."""
    setup = Setup(ranks=2, experts=9, top_k=3, hidden=2, max_tokens=3000, lanes=2)
    flight = tuple(Round((70, 40 + seed), seed=seed, index_block=4, send_dispatch=True) for seed in range(2))
    check(world, Case(setup, (flight, flight)))


@pytest.mark.heavy
def test_many_experts(world) -> None:
    """More than a kernel counts at a time, with and without rows of the last ones."""
    setup = Setup(ranks=1, experts=9000, top_k=64, hidden=2, max_tokens=40)
    check(world, *viewed(setup, Round((40,), index_block=3), Round((1,), routing="holes", index_block=1)))


@settings(SETTINGS, max_examples=max(1, EXAMPLES // 2))
@given(data=st.data())
def test_any(backend: str, data: Any) -> None:
    kind = data.draw(st.sampled_from(({}, {"exact": True}, {"auto": True}, {"replicas": True})))
    case = data.draw(cases(max_ranks=4, max_flights=2, **kind))
    block = st.integers(1, 40) | st.sampled_from((64, 128, 256, 4096))

    def listed(round_: Round) -> Round:
        view = "flat" if round_.exact else "rank_major"
        return replace(round_, layout=view, index_block=data.draw(block), columns=(), chosen=False)

    case = replace(case, flights=tuple(tuple(map(listed, flight)) for flight in case.flights))
    check(OnThreads(backend), case)


class OnThreads:
    """Threads of a backend, as `check` asks for a world."""

    most = 4

    def __init__(self, backend: str):
        self.make = partial(harness.Threads, backend)

    def __call__(self, ranks: int) -> Any:
        return self.make(ranks)


# ---- what they are for -------------------------------------------------------------------------------------------


def gather(env: Any, mode: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """A layer whose product gathers by the lists, and the same by expert: what both combine to."""
    rng = np.random.default_rng(env.rank)
    settings = {"experts": 7, "top_k": 3, "hidden": 16, "max_tokens": 20, "dtype": "float32", "timeout": PATIENT}
    ids = (rng.integers(0, 7, (20, 1)) + np.arange(3)).astype(np.int32) % 7
    weights, x = rng.random((20, 3), np.float32), rng.standard_normal((20, 16), np.float32)
    array = env.backend.array
    with tw.Group(env.comm, mode=mode, combine_dtype="float32", **settings) as group:
        handle = group.route(env.backend.tensor(ids), env.backend.tensor(weights))
        if mode == "high_throughput":
            group.exchange_counts(handle)
            handle.learn_rows()
        matrices = np.random.default_rng(99 + env.rank).integers(-4, 5, (group.num_local_experts, 16, 16))
        recv = group.dispatch(handle, env.backend.tensor(x), index_block=block)
        rows = array(recv.tokens).reshape(-1, 16)
        lists = [array(getattr(recv, name)) for name in LISTS]
        flat_weights = array(recv.weights).reshape(-1)
        products = np.zeros((len(rows), 3, 16), np.float32)
        for first in range(0, int(lists[2][0]), block):
            choices = lists[0][first : first + block]
            choices = choices[choices < 3 * len(rows)]
            product = rows[choices // 3] @ matrices[lists[1][first // block]].astype(np.float32)
            products[choices // 3, choices % 3] = flat_weights[choices, None] * product
        summed = products.sum(axis=1).reshape(recv.tokens.shape)  # k ascending; zeros change no sum's value
        by_rows = array(group.combine(handle, env.backend.tensor(summed))).copy()
        recv = group.dispatch(handle, env.backend.tensor(x), layout="grouped" if group.exact else "expert_major")
        rows = np.nan_to_num(array(recv.tokens), nan=0, posinf=0, neginf=0).clip(-99, 99)  # anything beyond the counts
        experts = np.repeat(np.arange(len(matrices)), np.diff(array(recv.offsets))) if group.exact else None
        by_expert = (
            np.einsum("ph,phi->pi", rows, matrices[experts].astype(np.float32))
            if group.exact
            else np.stack([of @ m.astype(np.float32) for of, m in zip(rows, matrices, strict=True)])
        )
        return by_rows, array(group.combine(handle, env.backend.tensor(by_expert), weighting="topk"))


@pytest.mark.parametrize("mode", VIEWS)
def test_what_is_gathered_is_what_experts_get(world, mode) -> None:
    for by_rows, by_expert in world(min(3, world.most)).run(gather, mode, 4):
        np.testing.assert_allclose(by_rows, by_expert, rtol=1e-5, atol=1e-5)
        assert (by_rows != 0).any()


# ---- what is refused ---------------------------------------------------------------------------------------------


def refuse(env: Any) -> list[Any]:
    """Rank 0 asks for lists that there are not; the others hear of it, and the group goes on."""
    b, heard = env.backend, []
    with tw.Group(env.comm, timeout=PATIENT, **BASE.settings()) as group:
        ids = b.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        x = b.tensor(np.ones((2, 8), tw.tensors.numpy_dtype("bfloat16")))
        short = {"sorted_rows": b.tensor(np.zeros(5, np.int32))}
        wide = {"num_sorted": b.tensor(np.zeros(1, np.int64))}
        both = b.tensor(np.zeros(1, np.int32))
        for wrong in (
            {"index_block": -1},
            {"index_block": 4097},
            {"index_block": "64"},
            {"index_block": 16, "layout": "expert_major"},
            {"index_block": 16, "out": short},
            {"index_block": 16, "out": wide},
            {"out": {"num_sorted": both}},
        ):
            handle = group.route(ids)
            right = {"index_block": 16} | {k: v for k, v in wrong.items() if k == "layout"}
            right = right if "layout" not in right else {"layout": right["layout"]}
            heard.append(caught(group.dispatch, handle, x, **(wrong if env.rank == 0 else right)))
            if handle.leased:
                handle.release()
            recv = group.dispatch(group.route(ids), x, index_block=1 + env.rank)  # ranks may differ
            assert recv.num_sorted is not None
            group.combine(recv.handle, recv.tokens)
        for rows, block in ((-1, 4), (4, 0), (4, 5000), (2**31 - 1, 4), (2**40, 4), ("4", 4)):
            heard.append(caught(group.index_capacity, rows, block))
        recv = group.dispatch(group.route(ids), x)
        assert [getattr(recv, name) for name in LISTS] == [None] * 3
        group.combine(recv.handle, recv.tokens)
    return heard


def test_lists_that_there_are_not(world, made_for) -> None:
    ranks = min(3, world.most)
    first, *others = world(ranks).run(refuse)
    patterns = [
        r"index_block is -1; it must be from 1 to 4096",
        r"index_block is 4097; it must be from 1 to 4096",
        r"index_block is '64'; it must be from 1 to 4096",
        r"index_block is 16; it must be 0 in this layout, as only 'rank_major' and 'flat' have index lists",
        r"out\['sorted_rows'\] has shape \[5\]; it must be \[\d+\]",
        r"out\['num_sorted'\] has dtype int64 .*; it must be int32",
        r"out has 'num_sorted'",
        r"rows is -1; it must be from 0 to 2147483647",
        r"block is 0; it must be from 1 to 4096",
        r"block is 5000; it must be from 1 to 4096",
        r"block is 4; the index lists of 2147483647 rows would have \d+ places for 6442450941 choices",
        r"rows is 1099511627776; it must be from 0 to 2147483647",
        r"rows is '4'; it must be from 0 to 2147483647",
    ]
    for outcome, pattern in zip(first, patterns, strict=True):
        said(outcome, "twInvalidArgument", pattern)
    for heard in others:
        for outcome in heard[:7] if made_for.knows_calls else []:
            said(outcome, "twPeerRefused", "")


# ---- captured calls ----------------------------------------------------------------------------------------------


def replay(env: Any, mode: str) -> list[tuple[list[np.ndarray], np.ndarray, int]]:
    """A graph with an exchange, replayed with other ids: after each replay its lists, received ids, and experts."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    settings = {"experts": 7, "top_k": 3, "hidden": 8, "max_tokens": 30, "dtype": "float32", "timeout": PATIENT}
    if mode == "high_throughput":
        settings["max_recv_tokens"] = 30 * env.nranks
    tokens = (30, 17)[env.rank]
    ids = backend.tensor(np.zeros((tokens, 3), np.int32))
    x, out = (backend.tensor(np.ones((tokens, 8), np.float32)) for _ in range(2))
    got = []
    with tw.Group(env.comm, mode=mode, **settings) as group:

        def choose() -> None:
            chosen = (rng.integers(0, 7, (tokens, 1)) + np.arange(3)) % 7
            ids[...] = backend.tensor(np.where(rng.random(chosen.shape) < 0.3, -1, chosen).astype(np.int32))

        def pair() -> tw.Received:
            handle.update(ids)
            if mode == "high_throughput":
                group.exchange_counts(handle)
            received = group.dispatch(handle, x, index_block=8)
            group.combine(handle, received.tokens, out=out)
            return received

        choose()
        handle = group.route(ids)
        pair()
        with graph.capture():
            captured = pair()
        for _ in range(3):
            choose()
            for name in LISTS:
                getattr(captured, name)[...] = 77
            graph.replay()
            lists = [backend.array(getattr(captured, name)).copy() for name in LISTS]
            got.append((lists, backend.array(captured.ids).copy(), group.num_local_experts))
    return got


@emulated_alone
@pytest.mark.parametrize("mode", VIEWS)
def test_graphs_hold_lists(world, mode) -> None:
    for mine in world(2).run(replay, mode):
        assert len({lists[0].tobytes() for lists, _, _ in mine}) == 3, "replays follow the ids"
        for lists, ids, experts in mine:
            for name, one_got, one_want in zip(LISTS, lists, ref.index_lists(ids, experts, 8), strict=True):
                same(name, one_got, one_want)
