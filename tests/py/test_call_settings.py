"""Behaviour: settings that a call names in place of its group's. Whatever they are, every rank gets the oracle's bits;
what is out of range is refused, and told to the peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, Got, Round, Setup, one, verify
from collected import Call, Plan, group_of, judge
from collected import play as play_calls
from harness import PATIENT, caught, said
from player import Player
from test_exchange import LAYOUTS, check

import tokenway as tw

EXACT = {"mode": "high_throughput"}
BEYOND = 2**31 - 1  # more SMs than there are: as many as there is room for


# ---- sm_limit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(1,), (1, 0, 5), (BEYOND, 2)])
@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_limits_of_calls(world, mode, limits) -> None:
    """Each rank and each call has another one; groups have none, or few SMs."""
    layouts = ("flat", "grouped") if mode == "high_throughput" else LAYOUTS
    setup = Setup(ranks=3, experts=7, top_k=4, hidden=96, max_tokens=70, lanes=2, mode=mode)
    base = Round((70, 0, 61), limits=limits)
    rounds = [
        replace(base, layout=layout, seed=seed, send_dispatch=seed % 2 == 1, send_combine=seed > 1, late=seed == 2)
        for seed, layout in enumerate(layouts * 2)
    ]
    check(world, one(setup, *rounds), one(replace(setup, sm_limit=1), *rounds))


@pytest.mark.parametrize(("tokens", "limits"), [(1024, (1, 0)), (1024, (0, 1)), (1100, (2, BEYOND)), (520, (1,))])
def test_limits_among_packets(world, made_for, tokens, limits) -> None:
    """Ranks agree on how many rows are packets when the group is made, whatever a call's limit is: up to two rounds of
    tokens go so, by one block too, and the last rows of more."""
    setup = Setup(ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=tokens)
    base = Round((tokens, tokens - 37), weighting="none", rows="bfloat16", out="bfloat16", limits=limits)
    check(world, one(setup, base, replace(base, layout="expert_major", seed=1), replace(base, seed=2, limits=())))


@pytest.mark.parametrize("layout", ["flat", "rank_major"])
def test_limits_of_gathers(world, layout) -> None:
    calls = [
        Call((40, 0, 33), reduces, layout=layout, seed=seed, limits=limits, send_only=seed % 2 == 1)
        for seed, (reduces, limits) in enumerate((r, n) for r in (False, True) for n in ((1, 0, 5), (2, BEYOND), (1,)))
    ]
    plan = Plan(group_of(3, 64, 40), tuple((call,) for call in calls))
    judge(plan, world(3).run(play_calls, plan))


def refuse_limits(env: Any) -> list[Any]:
    """What is heard of limits that are none: by the rank that gives them, and by its peers."""
    heard = []
    with tw.Group(env.comm, hidden=8, experts=4, top_k=1, max_tokens=4, timeout=PATIENT) as group:
        ids = env.backend.tensor(np.array([[3], [0]], np.int32))
        tokens = env.backend.tensor(np.ones((2, 8), tw.tensors.numpy_dtype("bfloat16")))
        for bad in (-1, "many", 2**40, 1.5):
            limit = {"sm_limit": bad} if env.rank == 1 else {}
            handle = group.route(ids)
            heard.append(caught(group.dispatch, handle, tokens, **limit))
            if handle.leased:
                handle.release()
            received = group.dispatch(handle, tokens)
            heard.append(caught(group.combine, handle, received.tokens, **limit))
            if handle.leased:
                handle.release()
            heard.append(caught(group.all_gatherv, tokens, **limit))
        received = group.dispatch(group.route(ids), tokens, sm_limit=3)
        out = group.combine(received.handle, received.tokens, sm_limit=1)
        assert env.backend.array(out).astype(np.float32).sum() == 16
    return heard


def test_limits_that_are_refused(world) -> None:
    by_rank = world(2).run(refuse_limits)
    for i, outcome in enumerate(by_rank[1]):
        told = ("-1", "'many'", "1099511627776", "1.5")[i // 3]
        said(outcome, "twInvalidArgument", f"sm_limit is {told}; it must be from 0 to 2147483647")
    for outcome, call in zip(by_rank[0], ("dispatch", "combine", "all_gatherv") * 4, strict=True):
        said(outcome, "twPeerRefused", f"rank 1 refused its arguments of {call}")


# ---- limits of an exchange of counts ---------------------------------------------------------------


TIGHT = Setup(
    ranks=3,
    experts=7,
    top_k=3,
    max_tokens=9,
    lanes=2,
    payloads=((4, "float32"),),
    max_recv_tokens=18,  # as many as two ranks could send, where there are devices for no more
    overflow="drop",
    row_alignment=2,
    **EXACT,
)


def turns(**changes: Any) -> list[Round]:
    """Rounds whose counts have other limits each, in both layouts."""
    base = Round((9, 0, 7), **changes)
    limits = ((None, ()), (5, (8, None, 1)), (1, (None, 4)), (18, (256,)), (11, ()))
    return [
        replace(base, room=room, alignments=alignments, layout=layout, seed=2 * seed + i, columns=(1,) * i)
        for seed, (room, alignments) in enumerate(limits)
        for i, layout in enumerate(("flat", "grouped"))
    ]


@pytest.mark.parametrize("send_only", [False, True])
def test_limits_of_counts(world, send_only) -> None:
    """Of handles that are made for each round, and of those that are updated between them."""
    check(
        world,
        one(TIGHT, *turns(send_dispatch=send_only, late=True)),
        one(TIGHT, *turns(reuse=True, own=True, routing="holes", send_dispatch=send_only)),
        one(replace(TIGHT, overflow="refuse", max_recv_tokens=None), *(replace(r, room=None) for r in turns())),
    )


def test_limits_of_counts_in_flight(world) -> None:
    rounds = turns(send_dispatch=True, send_combine=True)
    check(world, Case(TIGHT, tuple(zip(rounds[:-1:2], rounds[3::2], strict=False)), order=3))


def test_limits_of_counts_with_leases(world) -> None:
    """A lease has room for as many rows as its exchange of counts lets come."""
    few = replace(TIGHT, lease_bytes=1 << 13)
    check(world, one(few, *turns(lease=True), *turns(lease=True, reuse=True)))


def count(group: tw.Group, handle: tw.Handle, **given: Any) -> int:
    """An exchange of counts, until it has ended; gives R'."""
    counted = group.exchange_counts(handle, **given)
    return (counted.result() if isinstance(counted, tw.Pending) else counted).recv_rows


def differ(env: Any) -> list[Any]:
    """Ranks that name another max_recv_tokens: each hears of it, and the handle goes on."""
    heard = []
    setup = replace(TIGHT, ranks=env.comm.nranks, payloads=())
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor = env.backend.tensor
        ids = tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        tokens = tensor(np.ones((2, setup.hidden), tw.tensors.numpy_dtype("bfloat16")))
        for send_only in (False, True):
            handle = group.route(ids)
            room = 3 if env.rank == 1 else (None, 18)[send_only]
            heard.append(caught(count, group, handle, send_only=send_only, max_recv_tokens=room))
            assert handle.leased == send_only
            if handle.leased:
                handle.release()
            group.exchange_counts(handle, max_recv_tokens=18)
            received = group.dispatch(handle, tokens, layout="grouped")
            group.combine(handle, received.tokens)
    return heard


def test_rooms_that_differ_are_told(world) -> None:
    for heard in world(3).run(differ):
        for outcome in heard:
            said(outcome, "twBoundMismatch", "max_recv_tokens of exchange_counts differs: rank . has")
            assert "rank 1 has 3" in outcome[1] and " has 18" in outcome[1], outcome
            assert outcome[2].phase == "counts" and not outcome[2].sticky


def overflow(env: Any) -> list[Any]:
    heard = []
    setup = replace(TIGHT, ranks=env.comm.nranks, payloads=(), overflow="refuse", max_recv_tokens=None, top_k=1)
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = group.route(env.backend.tensor(np.full((6, 1), 6, np.int32)))
        for room in (11, 12, None):
            heard.append(caught(count, group, handle, max_recv_tokens=room))
            if heard[-1][0] == "twSuccess":
                handle.update(env.backend.tensor(np.full((6, 1), 6, np.int32)))
    return heard


def test_an_overflow_follows_the_call(world) -> None:
    for first, *rest in world(2).run(overflow):
        said(first, "twRecvOverflow", r"rank 1 would receive 12 rows; max_recv_tokens is 11 \(nothing was sent\)")
        assert [outcome[0] for outcome in rest] == ["twSuccess"] * 2


BAD = [
    ({"max_recv_tokens": 0}, "max_recv_tokens is 0; it must be from 1 to 18"),
    ({"max_recv_tokens": 19}, "max_recv_tokens is 19; it must be from 1 to 18"),
    ({"max_recv_tokens": 2**40}, "max_recv_tokens is 1099511627776; it must be from 1 to 18"),
    ({"row_alignment": 0}, "row_alignment is 0; it must be from 1 to 256"),
    ({"row_alignment": 3}, "row_alignment is 3; it must be a power of two from 1 to 256"),
    ({"row_alignment": "4"}, "row_alignment is '4'; it must be from 1 to 256"),
    ({"sm_limit": -1}, "sm_limit is -1; it must be from 0 to 2147483647"),
]


def refuse_limits_of_counts(env: Any) -> list[Any]:
    heard = []
    setup = replace(TIGHT, ranks=env.comm.nranks, payloads=())
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = group.route(env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3)))
        for bad, _ in BAD:
            heard.append(caught(group.exchange_counts, handle, **(bad if env.rank == 1 else {})))
        group.exchange_counts(handle)
        heard.append(handle.recv_rows)
    return heard


def test_limits_of_counts_that_are_refused(world) -> None:
    first, own, last = world(3).run(refuse_limits_of_counts)
    assert [heard.pop() for heard in (first, own, last)] == [3, 3, 3]
    for outcome, (_, told) in zip(own, BAD, strict=True):
        said(outcome, "twInvalidArgument", told)
    for outcome in first + last:
        said(outcome, "twPeerRefused", "rank 1 refused its arguments of exchange_counts")


def realigned(rows: np.ndarray, got: Got, handle: tw.Handle, alignment: int) -> np.ndarray:
    """Rows of grouped as another alignment has them."""
    begin = np.append(0, (-(-handle.expert_rows // alignment) * alignment).cumsum())
    assert begin[-1] == handle.rows_of("grouped")
    moved = np.zeros((begin[-1], rows.shape[1]), rows.dtype)
    for expert, n in enumerate(got.counts):
        moved[begin[expert] :][:n] = rows[got.offsets[expert] :][:n]
    return moved


def exchange_again(env: Any) -> list[tuple[Round, Got]]:
    """By a routing whose counts are known, with other limits."""
    setup = replace(TIGHT, ranks=env.comm.nranks, payloads=(), lease_bytes=1 << 16, row_alignment=None)
    got = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = None
        for room, alignment in ((18, 4), (7, 4), (13, 8), (None, None), (12, 1)):
            round_ = Round((9,) * setup.ranks, seed=4, layout="grouped", room=room, alignments=(alignment,))
            player = Player(env, group, one(setup, round_))
            if handle is None:
                handle = player.handle(round_)
            else:
                player.count(round_, handle, False)
                rows = player.tensor(np.zeros((handle.rows_of("grouped"), 16), np.float32))
                said(caught(group.combine, handle, rows), "twInvalidUsage", "combine before dispatch")
            received = player.dispatch(round_, handle, player.payloads(round_), False)
            mine = player.snapshot(round_, received)
            rows = player.array(player.rows(round_, received, mine))
            mine.out = player.array(player.combine(round_, handle, player.tensor(rows), False))
            # Rows of another alignment are combined too: the counts say where each expert's are.
            player.count(replace(round_, alignments=(16,)), handle, False)
            moved = player.tensor(realigned(rows, mine, handle, 16))
            mine.late = player.array(player.combine(replace(round_, late=True), handle, moved, False))
            got.append((replace(round_, late=True), mine))
    return got


def test_counts_are_exchanged_again_with_other_limits(world, made_for) -> None:
    if "leases" in made_for.lacks:
        pytest.skip("there are no leases here, without which counts that are known stay so")
    by_rank = world(3).run(exchange_again)
    setup = replace(TIGHT, payloads=(), lease_bytes=1 << 16, row_alignment=None)
    for i, (round_, _) in enumerate(by_rank[0]):
        verify(setup, round_, [mine[i][1] for mine in by_rank])


def unasked(env: Any) -> list[Any]:
    """Sizes of outputs whose host has not been told of the counts."""
    found = []
    setup = replace(TIGHT, ranks=env.comm.nranks, payloads=(), overflow="refuse", max_recv_tokens=None, top_k=1)
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tokens = env.backend.tensor(np.ones((6, setup.hidden), tw.tensors.numpy_dtype("bfloat16")))
        for layout in ("flat", "grouped"):
            for room in (14, None):
                handle = group.route(env.backend.tensor(np.full((6, 1), 6, np.int32)))
                group.exchange_counts(handle, max_recv_tokens=room, row_alignment=4)
                received = group.dispatch(handle, tokens, layout=layout)
                rows = env.backend.array(received.tokens)
                ids = env.backend.array(received.ids).reshape(-1)
                at = int(env.backend.array(received.offsets)[-1])
                assert (ids[at:] == -1).all()
                found.append((len(rows), at))
                group.combine(handle, env.backend.tensor(rows.astype(np.float32)))
    return found


def enqueued(world: Any, monkeypatch: pytest.MonkeyPatch, task: Any) -> list[Any]:
    """What ranks return whose calls only enqueue, though a world's usually wait."""
    monkeypatch.setenv("TOKENWAY_BLOCKING", "0")
    world.forget()
    try:
        return world.run(task)
    finally:
        world.forget()


def test_outputs_have_as_many_rows_as_a_call_says(threads, backend, monkeypatch) -> None:
    """On a device, where the host is not asked then."""
    if backend != "emulated":
        pytest.skip("elsewhere the host knows the counts")
    by_rank = enqueued(threads(2), monkeypatch, unasked)
    # 4 experts on the first rank and 3 on the second, to which all of 12 rows go.
    assert by_rank == [[(14, 0), (0, 0), (24, 0), (0, 0)], [(14, 12), (12, 12), (20, 12), (12, 12)]]


def differ_unseen(env: Any) -> list[Any]:
    """What is heard of rooms that differ, where calls only enqueue."""
    setup = replace(TIGHT, ranks=env.comm.nranks, payloads=(), max_recv_tokens=None)
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        tokens = env.backend.tensor(np.ones((2, setup.hidden), tw.tensors.numpy_dtype("bfloat16")))
        handle = group.route(ids)
        group.exchange_counts(handle, max_recv_tokens=5 + env.rank)
        received = group.dispatch(handle, tokens)  # nobody has asked: nothing is sent
        group.combine(handle, received.tokens)
        counts = env.backend.array(received.counts)
        heard = [caught(lambda: handle.recv_rows), caught(group.check)]
        group.exchange_counts(handle, max_recv_tokens=6)
        received = group.dispatch(handle, tokens, layout="grouped")
        group.combine(handle, received.tokens)
        return [*heard, int(counts.sum()), handle.recv_rows]


def test_rooms_that_differ_are_learnt_late(threads, backend, monkeypatch) -> None:
    if backend != "emulated":
        pytest.skip("elsewhere calls return what they find")
    by_rank = enqueued(threads(2), monkeypatch, differ_unseen)
    assert [rows for *_, rows in by_rank] == [4, 2]
    for asked, checked, came, _ in by_rank:
        said(asked, "twBoundMismatch", "max_recv_tokens of exchange_counts differs: rank . has")
        assert checked[0] == "twSuccess", "it was told already"
        assert came == 0
