"""Experts in several slots: whatever the map and the policy, the oracle's slots and the oracle's bits."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import LAYOUTS, Case, Round, Setup, exchange_of, make_ids, make_payloads, one, same
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import SETTINGS
from strategies import cases as any_case
from test_exchange import check
from test_properties import THREADS, judge

import tokenway as tw
from tokenway import replica_reference as rr
from tokenway.reference import dispatch_rank_major
from tokenway.replica_reference import POLICIES

# Seven experts in fifteen slots of four ranks: one in four slots, two of them on one rank, two experts in three, and a
# slot without any.
TABLE = (0, 1, 2, 0, 3, 2, 4, 5, 0, 6, 2, -1, 0, 5, 5)


def setup_of(policy: str, mode: str = "low_latency", **more: Any) -> Setup:
    shares = tuple(0.5 * (p % 3) + 0.25 for p in range(len(TABLE))) if policy == "shares" else None
    made: dict[str, Any] = {"ranks": 4, "experts": 7, "top_k": 5, "lanes": 2, "max_tokens": 24} | more
    return Setup(**made, mode=mode, slot_expert=TABLE, policy=policy, shares=shares)


@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(world, policy, mode) -> None:
    """Tokens that differ per rank, none on some, -1 ids, one expert for all, bounds, channels, second dispatches."""
    setup = setup_of(policy, mode)
    a, b, c = (*LAYOUTS[mode], LAYOUTS[mode][1])[:3]
    rounds = (
        Round((24, 1, 0, 7), layout=a),
        Round((24, 24, 24, 24), layout=b, seed=2, routing="one"),
        Round((0, 0, 0, 0), layout=b, seed=3),
        Round((3, 24, 9, 17), layout=a, seed=4, routing="holes", again=True, ids="int64"),
        Round((3, 24, 9, 17), layout=c, seed=5, routing="holes", weighting="none", late=True, strided=True),
        Round((5, 9, 2, 0), layout=a, seed=6, bound=None if setup.exact else 9, reuse=True),
    )
    check(world, one(setup, *rounds), one(replace(setup, id_space="global", id_dtype="int64"), *rounds[:2]))


@pytest.mark.parametrize("policy", POLICIES)
def test_many_tokens(world, policy) -> None:
    """More than a round of routing, more than go as packets, and as many experts as a token may have."""
    setup = setup_of(policy, experts=7, top_k=7, max_tokens=1100, hidden=8)
    check(world, one(replace(setup, ranks=2), Round((1100, 700)), Round((530, 1), seed=3, routing="holes")))


@pytest.mark.parametrize("policy", POLICIES)
def test_hot_expert(world, policy) -> None:
    """Eight ids, as kernels like them, and one expert that every token has: its slots share it."""
    experts, ranks = 32, 4
    table = tuple([*range(experts), *([0] * 4), 1, 1, 2, 3])
    setup = Setup(ranks=ranks, experts=experts, top_k=8, max_tokens=40, hidden=64, slot_expert=table, policy=policy)
    check(world, one(setup, Round((40, 40, 3, 0)), Round((32, 32, 32, 32), seed=9, layout="expert_major")))


HARD = Case(
    setup_of("balanced", hidden=3, payloads=((1, "uint8"), (17, "uint8"))),
    (
        (Round((0, 8, 1, 0), routing="holes", send_dispatch=True), Round((8, 8, 8, 8), seed=1)),
        (Round((0, 0, 0, 0), seed=2), Round((3, 0, 8, 1), seed=3, routing="one", bound=8)),
    ),
    slow=1,
)


@SETTINGS
@example(HARD)
@given(any_case(max_ranks=min(6, THREADS), replicas=True))
def test_any_case(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


@SETTINGS
@given(any_case(max_ranks=min(5, THREADS), exact=True, replicas=True))
def test_any_exact_case(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


# ---- the oracle, by hand and by what must hold ---------------------------------------------------


def test_oracle_by_hand() -> None:
    table, home = np.array([0, 1, 0, 1, 0, 2]), np.array([0, 0, 1, 1, 2, 2])
    ids = np.array([[0, 1], [0, 2], [1, 0], [-1, 0]], np.int32)

    def slots(policy: str, rank: int, shares: Any = None) -> list[list[int]]:
        return rr.slots_of(ids, table, rank, policy, home, shares).tolist()

    assert slots("round_robin", 0) == [[0, 1], [2, 5], [1, 4], [-1, 0]]
    assert slots("round_robin", 1) == [[2, 3], [4, 5], [3, 0], [-1, 2]]
    assert slots("local_first", 2) == [[4, 1], [4, 5], [1, 4], [-1, 4]]  # of expert 1 it has none: in turn
    assert slots("shares", 0, np.float32([0, 1, 1, 0, 0, 1])) == [[2, 1], [2, 5], [1, 2], [-1, 2]]
    # Four of expert 0, two of 1, one of 2 on rank 2: loads 2, 2 and 3 are the best there is.
    spread = np.bincount(home[[s for row in slots("balanced", 0) for s in row if s >= 0]])
    assert sorted(spread.tolist()) == [2, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_oracle_holds(data: Any) -> None:
    """A choice goes to a slot of its expert, with a share; those of a token to different ones."""
    setup = data.draw(any_case(max_ranks=5, replicas=True)).setup
    round_ = Round((setup.max_tokens,) * setup.ranks, routing="holes")
    for rank in range(setup.ranks):
        ids, _ = make_ids(setup, round_, rank)
        slots = setup.slots_of(ids, rank)
        assert ((slots < 0) == (ids < 0)).all()
        table = np.array(setup.slot_expert)
        assert (table[slots[slots >= 0]] == ids[ids >= 0]).all()
        if setup.shares is not None:
            assert all(setup.shares[s] > 0 for s in slots[slots >= 0])
        for row in slots:
            assert len(set(row[row >= 0])) == np.count_nonzero(row >= 0)


def test_shares_are_kept() -> None:
    """Every slot gets its share of a long batch, and nearly so of each stretch of it."""
    table, home = np.array([0, 0, 0, 1]), np.array([0, 1, 2, 3])
    shares = np.float32([5, 3, 2, 1])
    slots = rr.slots_of(np.zeros((1000, 1), np.int32), table, 3, "shares", home, shares)[:, 0]
    for stretch in (slots, slots[100:140], slots[500:600]):
        got = np.bincount(stretch, minlength=4)[:3] / len(stretch)
        assert np.abs(got - shares[:3] / 10).max() < 2.5 / len(stretch)


# ---- maps that are replaced ----------------------------------------------------------------------

OTHER = (6, 5, 4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5, 6, -1)


def dispatch_ids(env: Any, group: tw.Group, handle: Any, tokens: Any, **more: Any) -> np.ndarray:
    """Received ids; the channel is given back."""
    received = group.dispatch(handle, tokens, **more)
    ids = env.backend.array(received.ids)
    handle.release()
    return ids


def replace_maps(env: Any, setup: Setup) -> dict[str, Any]:
    """Two layers, of which the second's map is replaced between calls."""
    round_ = Round((9, 9, 9, 9))
    backend = env.backend
    made: dict[str, Any] = setup.settings()
    made["expert_map"] = tw.Placement((TABLE, TABLE), policy=setup.policy)
    with env.context(), tw.Group(env.comm, **made) as group:
        ids, weights = make_ids(setup, round_, env.rank)
        given = backend.tensor(ids), backend.tensor(weights)
        tokens = backend.tensor(make_payloads(setup, round_, env.rank)[0])
        kept = group.route(*given, layer=1)
        found = {"before": dispatch_ids(env, group, kept, tokens)}
        group.replace_map(OTHER, layer=1)
        found["kept"] = dispatch_ids(env, group, kept, tokens)
        found["after"] = dispatch_ids(env, group, group.route(*given, layer=1), tokens)
        found["other layer"] = dispatch_ids(env, group, group.route(*given), tokens)
        kept.update(*given)
        found["updated"] = dispatch_ids(env, group, kept, tokens)
        found["maps"] = [group.expert_of_slot(layer) for layer in (0, 1)]
        assert (group.layers, group.slots, group.experts) == (2, len(TABLE), 7)
    return found


@pytest.mark.parametrize("policy", ["round_robin", "balanced"])
def test_maps_are_replaced(world, policy) -> None:
    ranks = min(4, world.most)
    setup = setup_of(policy, ranks=ranks, id_space="global")
    round_ = Round((9,) * ranks)
    of = {
        name: exchange_of(replace(setup, slot_expert=table), replace(round_, bound=24))
        for name, table in (("old", TABLE), ("new", OTHER))
    }
    payloads = [[make_payloads(setup, round_, r)[0] for r in range(ranks)]]
    for rank, found in enumerate(world(ranks).run(replace_maps, setup)):
        wanted = {name: dispatch_rank_major(x, rank, payloads).ids for name, x in of.items()}
        for name in ("before", "kept", "other layer"):
            same(name, found[name], wanted["old"])
        for name in ("after", "updated"):
            same(name, found[name], wanted["new"])
        assert [m.tolist() for m in found["maps"]] == [list(TABLE), list(OTHER)]


def wrong_id(env: Any, setup: Setup) -> tuple[Any, ...] | None:
    """What is told of an id that is no expert's, where the channel does not stand before the bank of its dispatch."""
    backend = env.backend
    with env.context(), tw.Group(env.comm, **setup.settings()) as group:
        rows = backend.tensor(np.zeros((1, setup.hidden), np.float32))
        for last in (4, setup.experts):
            handle = group.route(backend.tensor(np.array([[0, 1, 2, 3, last]], np.int32)))
            if setup.exact:
                group.exchange_counts(handle)
            group.dispatch(handle, rows)
            handle.release()  # without a combine: the next dispatch skips a step, or leaves one out
        record = group.error
        return record and (record.phase, record.step, record.token, record.k, record.value)


@pytest.mark.parametrize("mode", LAYOUTS)
def test_steps_of_wrong_ids(world, backend, mode) -> None:
    """A record has the step of the exchange that the id was for, also where a kernel before it has met the id."""
    if harness.BACKENDS[backend].checks_ids_on_host:
        pytest.skip("ids in host memory are refused before there is a step")
    ranks = min(2, world.most)
    told = {
        policy: world(ranks).run(wrong_id, setup_of(policy, mode, ranks=ranks, lanes=1, dtype="float32"))
        for policy in POLICIES
    }
    for policy in POLICIES:
        assert told[policy] == told["round_robin"], policy
    assert told["balanced"][0][2:] == (0, 4, 7)


def differ(env: Any, setup: Setup, how: str) -> list[str]:
    """One rank replaces its map where others do not, or takes another layer, or does not count."""
    odd = env.rank == setup.ranks - 1
    made: dict[str, Any] = setup.settings()
    made["expert_map"] = tw.Placement((TABLE, TABLE), policy=setup.policy, count_loads=how == "count")
    backend = env.backend
    tokens = backend.tensor(np.zeros((1, setup.hidden), np.float32))
    ids = backend.tensor(np.array([[0, 1, 2, 3, 4]], np.int32))
    ended = []
    with env.context(), tw.Group(env.comm, **made) as group:
        if odd and how == "map":
            group.replace_map(OTHER)
        handle = group.route(ids, layer=1 if odd and how == "layer" else 0)
        try:
            if setup.exact:
                group.exchange_counts(handle)
            sent = group.dispatch(handle, tokens, count=not (odd and how == "count"), send_only=how == "layer")
            if how == "layer":
                time.sleep(0.15)  # long enough for a watching thread to look at what the others have begun
                sent.result()
            ended.append("went well")
        except tw.BoundMismatch as error:
            ended.append(str(error))
        handle.release()
        if how == "map":
            group.replace_map(OTHER)
        handle = group.route(ids)  # the group is as good as new
        if setup.exact:
            group.exchange_counts(handle)
        group.dispatch(handle, tokens)
        handle.release()
    return ended


@pytest.mark.parametrize("how", ["map", "layer", pytest.param("count", marks=pytest.mark.needs("loads"))])
@pytest.mark.parametrize("mode", LAYOUTS)
def test_ranks_that_differ_are_told(world, mode, how) -> None:
    ranks = min(3, world.most)
    if ranks < 2:
        pytest.skip("it takes two to differ")
    setup = setup_of("round_robin", mode, ranks=ranks, dtype="float32")
    for ended in world(ranks).run(differ, setup, how):
        assert "differ in the group, the layer, its map, the counting or the types of rows of" in ended[0]


# ---- what is refused -----------------------------------------------------------------------------

BAD = {
    "no slot": ({"slot_expert": [0, 1, 2, 3, 4, 5, 5]}, "has no slot of expert 6"),
    "range": (
        {"slot_expert": [0, 1, 2, 3, 4, 5, 6, 7]},
        r"slot_expert\[0, 7\] is 7; it must be -1 \(none\) or from 0",
    ),
    "few": ({"slot_expert": [0, 1]}, "placement.slots is 2; it must be from 7 to"),
    "shape": ({"slot_expert": [[[0]]]}, "slot_expert has shape"),
    "floats": ({"slot_expert": np.zeros(9)}, "must hold 32-bit integers"),
    "64 bits": ({"slot_expert": np.array([-(2**63), *range(8)])}, "must hold 32-bit integers"),
    "policy": ({"policy": "best"}, "policy is 'best'"),
    "shares": (
        {"policy": "shares", "shares": [1, 1, 1, 1, 1, 1, -1]},
        r"placement.shares\[0, 6\] is -1; it must be finite",
    ),
    "nan": ({"policy": "shares", "shares": [1, 1, 1, 1, 1, 1, float("nan")]}, r"placement.shares\[0, 6\] is -?nan"),
    "nothing": ({"policy": "shares", "shares": [1, 1, 1, 1, 1, 1, 0]}, r"placement.shares\[0\] of expert 6 are all 0"),
    "not shares": ({"shares": [1] * 7}, "only policy 'shares'"),
    "decay": ({"count_loads": True, "load_decay": 1.0}, "load_decay is 1; it must be at least 0 and below 1"),
    "layers": ({"layers": 0}, "placement.layers is 0; it must be from 1 to 4096"),
}


def refuse(env: Any, what: dict[str, Any]) -> str:
    """Creating a group fails, on all ranks; on the comm another is made."""
    with pytest.raises(tw.InvalidArgument) as caught:
        tw.Group(env.comm, experts=7, top_k=2, hidden=4, max_tokens=2, expert_map=tw.Placement(**what))
    tw.Group(env.comm, experts=7, top_k=2, hidden=4, max_tokens=2).close()
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_placements(threads, name) -> None:
    what, message = BAD[name]
    for said in threads(1).run(refuse, what):
        assert re.search(message, said), said


def misuse(env: Any) -> None:
    made = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 2}
    with env.context(), tw.Group(env.comm, **made) as group:
        for call in (lambda: group.expert_of_slot(), lambda: group.replace_map([0, 1, 2, 3]), lambda: group.loads):
            with pytest.raises(tw.InvalidUsage, match=r"without placement"):
                call()
        with pytest.raises(tw.InvalidArgument, match="layer is 1; it must be from 0 to 0"):
            group.route(env.backend.tensor(np.zeros((0, 2), np.int32)), layer=1)
    with env.context(), tw.Group(env.comm, **made, expert_map=[0, 1, 2, 3, 3, 0]) as group:
        with pytest.raises(tw.InvalidUsage, match="count_loads 0"):
            _ = group.loads
        with pytest.raises(tw.InvalidArgument, match="has no slot of expert 0"):
            group.replace_map([1, 1, 2, 3, 3, 2])
        with pytest.raises(tw.InvalidArgument, match="shape"):
            group.replace_map([1, 1, 2, 3, 3])
        assert group.expert_of_slot().tolist() == [0, 1, 2, 3, 3, 0]
    with env.context(), tw.Group(env.comm, **made, expert_map=([[0], [0], [0], [0]], [[3], [1], [2], [0]])) as group:
        assert group.expert_of_slot().tolist() == [3, 1, 2, 0]


def test_misuse(threads) -> None:
    threads(1).run(misuse)


def config_differs(env: Any) -> str:
    table = [0, 1, 2, 3, 0, 1] if env.rank == 0 else [0, 1, 2, 3, 1, 0]
    with pytest.raises(tw.ConfigMismatch) as caught:
        tw.Group(env.comm, experts=4, top_k=2, hidden=4, max_tokens=2, expert_map=table)
    return str(caught.value)


def test_maps_that_differ_at_birth(threads) -> None:
    for said in threads(2).run(config_differs):
        assert "placement.slot_expert[4] differs: rank 0 has 0, rank 1 has 1" in said


def shrink(env: Any) -> list[int]:
    """The maps stay with those that are left."""
    group = tw.Group(
        env.comm, experts=4, top_k=2, hidden=4, max_tokens=2, expert_map=[0, 1, 2, 3, 0, 1], timeout=harness.PATIENT
    )
    if env.rank == 2:
        group.abort()
        group.close()
        return []
    smaller = group.shrink()
    group.close()
    with smaller:
        assert smaller.num_local_experts == 3
        return smaller.expert_of_slot().tolist()


def test_shrink_keeps_the_map(threads) -> None:
    world = threads(3)
    try:
        maps = world.run(shrink)
    finally:
        world.forget()
    assert maps[:2] == [[0, 1, 2, 3, 0, 1]] * 2
