"""Right arguments at the wrong time, ranks that do different things, and the ends of groups and comms."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from cases import verify
from harness import AT_ONCE, PATIENT, Env, RankFailed, Workers, await_flags, caught, raise_flag, said, settle
from refusals import ROUND, SETUP, Calls, adapt

import tokenway as tw

# ---- lanes and handles ---------------------------------------------------------------------------


def no_free_lane(env: Env) -> Any:
    calls = Calls(env, lanes=2)
    first, outcomes = calls.handle, []
    calls.dispatch()
    calls.route()
    second = calls.handle
    calls.dispatch()
    calls.route()
    outcomes.append(caught(calls.dispatch))
    outcomes.append(caught(calls.dispatch, lane=1))
    outcomes.append(caught(calls.dispatch, lane=2))
    outcomes.append(caught(calls.dispatch, lane=-1))
    outcomes.append(caught(calls.dispatch, handle=first, lane=1))
    outcomes.append(caught(first.update, adapt(env, np.zeros((1, 2), np.int32))))
    for handle in (first, second):
        calls.combine(handle=handle)
    calls.combine(handle=first)  # once more, without a lease
    good = calls.good_round()
    calls.group.close()
    return outcomes, good


def test_lanes(world) -> None:
    by_rank = world(3).run(no_free_lane)
    sentences = [
        ("twInvalidUsage", r"no free lane: all 2 are held by handles .* more lanes"),
        ("twInvalidUsage", r"lane 1 is held by another handle"),
        ("twInvalidArgument", r"lane is 2; it must be -1 .* or from 0 to 1"),
        ("twInvalidArgument", r"lane is -\d+; it must be"),
        ("twInvalidUsage", r"lane is 1, but the handle holds lane 0"),
        ("twInvalidUsage", r"handle holds lane 0; combine or release it"),
    ]
    for outcomes, _ in by_rank:
        for outcome, (result, sentence) in zip(outcomes, sentences, strict=True):
            said(outcome, result, sentence)
    verify(SETUP, ROUND, [good for _, good in by_rank])


def wrong_order(env: Env) -> Any:
    calls = Calls(env)
    outcomes = [caught(calls.combine), caught(calls.handle.num_recv_tokens)]
    pending = calls.dispatch(send_only=True)
    outcomes += [caught(calls.combine), caught(calls.dispatch), caught(calls.handle.release)]
    pending.hook()
    pending = calls.combine(send_only=True)
    outcomes += [caught(calls.combine), caught(calls.handle.release)]
    pending.hook()
    pending.hook()  # does nothing
    good = calls.good_round()
    calls.group.close()
    return outcomes, good


def test_wrong_order(world) -> None:
    """Nothing is sent: ranks go on as if the call had not been."""
    by_rank = world(3).run(wrong_order)
    sentences = [
        r"combine before dispatch: the handle has not been dispatched",
        r"has not been dispatched since it was routed",
        r"the handle's dispatch is pending; call Pending.result",
        r"send_only dispatch pending; call Pending.result first",
        r"send_only dispatch pending; call Pending.result first",
        r"send_only combine pending; call Pending.result first",
        r"send_only combine pending; call Pending.result first",
    ]
    for outcomes, _ in by_rank:
        for outcome, sentence in zip(outcomes, sentences, strict=True):
            said(outcome, "twInvalidUsage", sentence)
    verify(SETUP, ROUND, [good for _, good in by_rank])


def refused_while_pending(env: Env) -> Any:
    """A send_only call whose peer refused fails when it is completed, every time it is asked."""
    calls = Calls(env)
    outcomes = []
    if env.rank == 1:
        outcomes = [caught(calls.dispatch, tokens=None, send_only=True)] * 2
    else:
        pending = calls.dispatch(send_only=True)
        outcomes = [caught(pending.hook), caught(pending.result)]
    calls.handle.release()  # a send_only dispatch that failed keeps its channel
    good = calls.good_round()
    calls.group.close()
    return outcomes, good


def test_refused_while_pending(world) -> None:
    by_rank = world(3).run(refused_while_pending)
    for rank, (outcomes, _) in enumerate(by_rank):
        for outcome in outcomes:
            if rank == 1:
                said(outcome, "twInvalidArgument", "has dtype none")
            else:
                said(outcome, "twPeerRefused", "rank 1 refused")
    verify(SETUP, ROUND, [good for _, good in by_rank])


def many_handles(env: Env) -> int:
    """Handles that are dropped are freed by the next call, however their rounds were run."""
    calls = Calls(env)
    for i in range(60):
        calls.route()
        pending = calls.dispatch(send_only=i % 2 == 0)
        if i % 2 == 0:
            pending.result()
        del pending
        pending = calls.combine(send_only=i % 3 == 0)
        if i % 3 == 0:
            pending.result()
        del pending
    calls.route()
    calls.route()
    left = len(calls.group._blocks.finished) + len(calls.group._blocks.leased)
    calls.group.close()
    return left


def test_handles_of_finished_rounds(world) -> None:
    assert max(world(3).run(many_handles)) <= 1


# ---- ranks that differ ---------------------------------------------------------------------------


def other_bound(env: Env) -> Any:
    calls = Calls(env)
    outcome = caught(calls.dispatch, bound=8 - (env.rank == 2) if env.rank != 1 else 8)
    good = calls.good_round()
    calls.group.close()
    return outcome, good


def test_bounds_differ(world, made_for) -> None:
    if not made_for.knows_calls:
        pytest.skip("ranks move blocks of different sizes: test_staged.py")
    by_rank = []
    # Rank 1 has 8 tokens, so only ranks 0 and 2 can have a tighter bound.
    for outcome, good in world(3).run(other_bound):
        by_rank.append(good)
        said(outcome, "twBoundMismatch", r"bound of dispatch differs: rank \d has \d, rank \d has \d")
        assert "rank 2 has 7" in outcome[1]
        assert not outcome[2].sticky and outcome[2].phase == "dispatch"
    verify(SETUP, ROUND, by_rank)


def begin_round(env: Env) -> None:
    """A run of its own: a call that has its data may yet learn what its peers did next."""
    env.kept["calls"] = Calls(env, timeout=PATIENT)
    env.kept["calls"].dispatch()


def other_call(env: Env) -> Any:
    calls = env.kept.pop("calls")
    first = caught(calls.dispatch if env.rank == 0 else calls.combine)
    later = caught(calls.dispatch)
    record = calls.group.error
    left: list[int] = []
    shrunk = caught(lambda: left.extend(shrink_and_close(calls.group)))
    calls.group.close()
    return first, later, record, shrunk[0], left


def shrink_and_close(group: tw.Group) -> list[int]:
    with group.shrink(timeout=PATIENT) as survivors:
        return survivors.comm_ranks


def test_calls_differ(world) -> None:
    here = world(3)
    here.run(begin_round)
    by_rank = here.run(other_call)
    here.forget()
    # Two calls met, so ranks may blame each other; two of three go on, and agree on who.
    left_out = [r for r in range(3) if by_rank[r][3] == "twExcluded"]
    assert len(left_out) == 1, by_rank
    for rank, (first, later, record, shrunk, left) in enumerate(by_rank):
        assert first[0] in ("twExcluded", "twCallMismatch"), (rank, first)
        assert later[0] == first[0] and "the group is finished" in later[1]
        assert record.sticky and "made a different call" in record.message
        assert shrunk == ("twExcluded" if rank in left_out else "twSuccess")
        assert left == ([] if rank in left_out else [r for r in range(3) if r not in left_out])


LATE = 3.0  # seconds, in which the ranks that shall meet do


def hear(env: Env, group: tw.Group) -> None:
    """Until a rank on a device knows that its peers have given it up. Where that is told over connections, it comes a
    moment later than it is known, and a step whose rows are all there would end well before."""
    until = time.monotonic() + PATIENT
    while env.stream is not None and group.error is None and time.monotonic() < until:
        time.sleep(0.01)


def late_rank(env: Env, late: int, phase: str, flags: str) -> Any:
    """One rank comes when the others have given it up. Ends the comm: ranks differ from then on."""
    calls = Calls(env, timeout=LATE)
    if phase == "combine":
        calls.dispatch()
    if env.rank == late:
        await_flags(flags, *(rank for rank in range(env.nranks) if rank != late))
        hear(env, calls.group)
    begin = time.monotonic()
    outcome = caught(getattr(calls, phase))
    took = time.monotonic() - begin
    raise_flag(flags, env.rank)
    out = np.full((ROUND.tokens[env.rank], 4), 7, np.float32)
    again = caught(calls.combine, out=out)
    shrunk = caught(lambda: calls.group.shrink(timeout=PATIENT).close())
    calls.group.close()
    return outcome, took, again, shrunk


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_timeout(world, phase, tmp_path) -> None:
    here = world(3)
    by_rank = here.run(late_rank, 2, phase, str(tmp_path))
    here.forget()
    for rank, (outcome, took, again, shrunk) in enumerate(by_rank[:2]):
        said(outcome, "twTimeout", rf"rank 2 did not arrive in time in {phase} of step \d on lane 0")
        record = outcome[2]
        assert record.sticky and record.peer == 2 and record.phase == phase and record.lane == 0
        assert record.reporter in (0, 1) and record.seen < record.expected == record.step
        assert took > LATE * 0.9 or record.reporter != rank, "it was not given up before its time"
        assert took < LATE + AT_ONCE
        said(again, "twTimeout", "the group is finished: rank 2")
        assert shrunk[0] == "twSuccess"
    outcome, _, again, shrunk = by_rank[2]
    said(outcome, "twExcluded", "its peers go on without it")
    assert again[0] == shrunk[0] == "twExcluded"


def one_leaves(env: Env) -> Any:
    calls = Calls(env)
    calls.dispatch()
    if env.rank == 1:
        os._exit(0)
    out = adapt(env, np.zeros((ROUND.tokens[env.rank], 4), np.float32))
    outcome = caught(calls.combine, out=out)
    left = shrink_and_close(calls.group)
    calls.group.close()
    return outcome, bool(np.isnan(env.backend.array(out)).all()), left


def test_process_that_ends_orderly(processes, backend) -> None:
    processes(3)  # where there can be so many
    workers = Workers(3)
    try:
        key = ("leaves", 0, backend, f"leaves-{os.getpid()}")
        workers.send(range(3), one_leaves, key=key)
        for outcome, blank, left in settle(workers.collect([0, 2], 120)):
            said(outcome, "twPeerDied", "rank 1 is gone in combine")
            assert outcome[2].peer == 1 and outcome[2].phase == "combine"
            assert blank, "the result of a failed combine must be NaN"
            assert left == [0, 2]
    finally:
        workers.close()


# ---- ends ----------------------------------------------------------------------------------------


def ends(env: Env) -> Any:
    calls = Calls(env)
    other = Calls(env)
    outcomes = [
        caught(env.comm.close),
        caught(calls.dispatch, handle=other.handle),
        caught(calls.combine, handle=other.handle),
    ]
    other.dispatch(handle=other.handle, send_only=True).hook()
    pending = other.combine(handle=other.handle, send_only=True)
    other.group.close()
    other.group.close()  # again: nothing
    outcomes += [
        caught(other.dispatch),
        caught(other.combine),
        caught(other.route),
        caught(other.handle.release),
        caught(other.handle.update, adapt(env, np.zeros((1, 2), np.int32))),
        caught(other.handle.num_recv_tokens),
        caught(pending.hook),
        caught(calls.dispatch, handle=other.handle),
        caught(calls.combine, handle=other.handle),
        caught(calls.dispatch, handle=None),
        caught(calls.combine, handle="h"),
    ]
    good = calls.good_round()
    calls.group.close()
    return outcomes, good


def test_closed_and_foreign(world) -> None:
    sentences = [
        ("twInvalidUsage", r"comm has 2 groups; destroy them first"),
        ("twInvalidArgument", r"handle 0x\w+ belongs to another group"),
        ("twInvalidArgument", r"handle 0x\w+ belongs to another group"),
        ("twInvalidUsage", "the group is closed"),
        ("twInvalidUsage", "the group is closed"),
        ("twInvalidUsage", "the group is closed"),
        *[("twInvalidUsage", "the group is closed")] * 4,
        ("twInvalidArgument", r"handle is NULL; handle is of a group that is closed"),
        ("twInvalidArgument", r"handle is NULL; handle is of a group that is closed"),
        ("twInvalidArgument", r"handle is NULL; handle is None; it must come from Group\.route"),
        ("twInvalidArgument", r"handle is NULL; handle is 'h'; it must come from Group\.route"),
    ]
    by_rank = world(3).run(ends)
    for outcomes, _ in by_rank:
        for outcome, (result, sentence) in zip(outcomes, sentences, strict=True):
            said(outcome, result, sentence)
    verify(SETUP, ROUND, [good for _, good in by_rank])


def test_closed_comm(made_for) -> None:
    comm = made_for.local_comms(1)[0]
    comm.close()
    comm.close()
    said(caught(tw.Group, comm, experts=1, top_k=1, hidden=1, max_tokens=1), "twInvalidArgument", "closed")


def test_comm_does_not_hide_an_exception(made_for) -> None:
    group = None
    with pytest.raises(KeyError, match="mine"), made_for.local_comms(1)[0] as comm:
        group = tw.Group(comm, experts=1, top_k=1, hidden=1, max_tokens=1)
        raise KeyError("mine")
    group.close()
    comm.close()


def test_numbers_of_local_ranks() -> None:
    for nranks in (0, -1, 1025):
        said(caught(tw.local_comms, nranks), "twInvalidArgument", rf"nranks is {nranks}; .* 1 to 1024")


# ---- a rank that raises --------------------------------------------------------------------------


def test_failed_rank_shows_its_traceback(world) -> None:
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        world(2).run(divide, 0)


def divide(env: Env, by: int) -> float:
    return 1 / by


def raises_alone(env: Env) -> Any:
    """Rank 1 leaves its `with` block by an exception of its own while the others wait for it."""
    start = time.monotonic()
    try:
        with tw.Group(env.comm, experts=4, top_k=1, hidden=2, max_tokens=1, dtype="float32", timeout=PATIENT) as group:
            handle = group.route(adapt(env, np.zeros((1, 1), np.int32)))
            if env.comm.rank == 1:
                raise KeyError("not Tokenway's business")
            group.dispatch(handle, adapt(env, np.zeros((1, 2), np.float32)))
    except (KeyError, tw.PeerAborted) as error:
        peer = error.record.peer if isinstance(error, tw.PeerAborted) else None
        return type(error).__name__, peer, time.monotonic() - start
    return None


def test_exception_in_one_rank_reaches_the_others(world) -> None:
    by_rank = world(3).run(raises_alone)
    assert [outcome[:2] for outcome in by_rank] == [("PeerAborted", 1), ("KeyError", None), ("PeerAborted", 1)]
    assert max(outcome[2] for outcome in by_rank) < AT_ONCE
