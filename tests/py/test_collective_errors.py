"""What is wrong with a gather or reduce is said with argument, value and range; peers learn at once, and all go on."""

from __future__ import annotations

import gc
import re
import signal
import time
from typing import Any

import numpy as np
import pytest
from collected import Call, Collector, Plan, group_of, judge
from harness import AT_ONCE, HANGS, PATIENT, Workers, caught, settle

import tokenway as tw
from tokenway.tensors import numpy_dtype

SIZES = (3, 0, 5)
SETUP = group_of(3)
GOOD = Plan(SETUP, ((Call(SIZES), Call(SIZES, True)),))
BF16 = numpy_dtype("bfloat16")


def _rows(count: int = 3, elements: int = 16, dtype: Any = BF16) -> np.ndarray:
    return np.zeros((count, elements), dtype)


# What rank 0 gives; what it is told. The others make the right call, a gather or a reduce of the same sizes.
GATHERS: dict[str, tuple[dict[str, Any], str]] = {
    "too few rows": ({"rows": _rows(2)}, r"rows has 2 rows; it must have 3, this rank's of sizes"),
    "no tensor": ({"rows": None}, r"rows has 0 rows|rows is None|of type NoneType"),
    "no place for results": ({"out": ()}, r"^out has 0 tensors; it must have as many as rows, 1$"),
    "columns apart": ({"rows": _rows(3, 32)[:, ::2]}, r"rows has stride 2 in dimension 1"),
    "a scalar": ({"rows": np.zeros((), np.float32)}, r"rows has 0 "),
    "empty rows": ({"rows": _rows(3, 0)}, r"rows has shape \[3, 0\]; a row must have from 1 to"),
    "no room": (
        {"rows": _rows(3, 5000)},
        r"rows of 10000 bytes for a bound of 5 on 3 ranks; a bank of this group holds",
    ),
    "a size below 0": ({"sizes": [3, -1, 5]}, r"sizes\[1\] is -1; it must be from 0 to 5"),
    "a size above B": ({"sizes": [3, 10, 5]}, r"so the bound is 10; it must be from 1 to max_tokens, 9"),
    "a size above b": ({"bound": 4}, r"sizes\[2\] is 5; it must be from 0 to 4"),
    "a size of 33 bits": (
        {"sizes": [3 + 2**32, 0, 5]},
        r"^sizes\[0\] is 4294967299; it must be from 0 to max",
    ),
    "a size of many rows": (
        {"sizes": [3, 0, 2**31 - 1], "bound": 5},
        r"sizes\[2\] is 2147483647; it must be from 0",
    ),
    "bound of many rows": ({"sizes": None, "bound": 2**31 - 1}, r"bound is 2147483647, so the bound is 2147483647"),
    "no rows beside sizes in memory": (
        {"sizes": np.array([3, 0, 5]), "rows": _rows(0)},
        r"^rows has 0 rows and sizes is a tensor, so the bound would be 0; beside such sizes rows must be as many as",
    ),
    "few sizes": ({"sizes": [3, 5]}, r"^sizes is \[3, 5\]; it must be 3 integers"),
    "sizes of no type": ({"sizes": [3, "0", 5]}, r"^sizes is \[3, '0', 5\]; it must be 3 integers"),
    "sizes are a string": ({"sizes": "305"}, r"^sizes is of type str; it must be a"),
    "floats for sizes": (
        {"sizes": np.array([3.0, 0.0, 5.0])},
        r"sizes has dtype float64 \(12\); it must be int32",
    ),
    "sizes of two": ({"sizes": np.array([3, 5])}, r"sizes has shape \[2\]; it must be \[3\], .* or \[1\]"),
    "rows beside sizes in memory": (
        {"sizes": np.array([3, 0, 5]), "bound": 5},
        r"has 3 rows; it must have 5, the bound",
    ),
    "bound": ({"bound": 10}, r"bound is 10, so the bound is 10; it must be from 1 to max_tokens, 9"),
    "bound of 0": ({"bound": 0}, r"bound is 0"),
    "layout": ({"layout": "expert_major"}, r"layout is 'expert_major'; it must be 'flat' or 'rank_major'"),
    "out's rows": ({"out": _rows(7)}, r"out has shape \[7, 16\]; it must be \[8, 16\]"),
    "out's dtype": ({"out": _rows(8, 16, np.float32)}, r"out has dtype float32 \(11\); it must be bf"),
    "two outs": ({"out": [_rows(8), _rows(8)]}, r"^out has 2 tensors; it must have as many as rows, 1"),
    "out is a string": ({"out": "there"}, r"^out is of type str"),
    "nine tensors": ({"rows": [_rows()] * 9}, r"^rows has 9 tensors; it must have from 1 to 8"),
    "none at all": ({"rows": []}, r"^rows has 0 tensors; it must have from 1 to 8"),
}
REDUCES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"rows": _rows(7)}, r"rows has shape \[7, 16\]; it must be \[8, 16\]"),
    "dtype": ({"rows": _rows(8, 16, np.int32)}, r"rows has dtype int32 \(5\); it must be float32, bf"),
    "a size of 33 bits": (
        {"sizes": [3 + 2**32, 0, 5]},
        r"^sizes\[0\] is 4294967299; it must be from 0 to max",
    ),
    "a share of 40 bits": (
        {"sizes": 2**40, "rows": np.zeros((3, 5, 16), BF16), "layout": "rank_major"},
        r"^sizes is 1099511627776; it must be from 0 to max_tokens, 9",
    ),
    "no shares": ({"rows": _rows(8), "sizes": None}, r"has 8 rows and no sizes are given; it must be an equal share"),
    "one size of flat": ({"rows": _rows(9), "sizes": 3}, r"^sizes is 3; of one rank alone .* 'rank_major'"),
    "[1] of flat": (
        {"rows": _rows(9), "sizes": np.array([3])},
        r"sizes has shape \[1\]; of 'flat' it must be \[3\]",
    ),
    "one dimension": ({"rows": _rows(8), "layout": "rank_major"}, r"rows has shape \[8, 16\]; it must"),
    "out's rows": ({"out": _rows(2)}, r"out has 2 rows; it must have 3"),
    "out's dtype": ({"out": _rows(3, 16, np.int16)}, r"out has dtype int16 \(3\); it must be float32"),
    "dtype of sums": ({"dtype": "float12"}, r"dtype is 'float12'; it must be one of"),
}


def wrong_call(env: Any, name: str, reduces: bool) -> Any:
    """The call, wrong on rank 0; how long it took; and right calls after it."""
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        call = group.reduce_scatterv if reduces else group.all_gatherv
        arguments: dict[str, Any] = {"rows": _rows(8 if reduces else SIZES[env.rank]), "sizes": list(SIZES)}
        if env.rank == 0:
            arguments |= (REDUCES if reduces else GATHERS)[name][0]
        made = {k: adapt(env, v) for k, v in arguments.items()}
        begin = time.monotonic()
        outcome = caught(call, **made)
        took = time.monotonic() - begin
        return outcome, took, Collector(env, group, GOOD).flights()


def adapt(env: Any, value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [env.backend.tensor(x) for x in value]
    return env.backend.tensor(value) if isinstance(value, np.ndarray) else value


def needs_knowledge(made_for: Any) -> None:
    if not made_for.knows_calls:
        pytest.skip("what peers move is not known, so the group ends: test_staged.py")


@pytest.mark.parametrize(("name", "reduces"), [*((n, False) for n in GATHERS), *((n, True) for n in REDUCES)])
def test_refused(world, made_for, name, reduces) -> None:
    needs_knowledge(made_for)
    by_rank = world(3).run(wrong_call, name, reduces)
    pattern = (REDUCES if reduces else GATHERS)[name][1]
    (result, text, _), _, _ = by_rank[0]
    assert result == "twInvalidArgument" and re.search(pattern, text), (result, text)
    for rank, ((told, sentence, record), took, _) in enumerate(by_rank[1:], 1):
        what = "reduce_scatterv" if reduces else "all_gatherv"
        assert told == "twPeerRefused" and f"rank 0 refused its arguments of {what}" in sentence, sentence
        assert (record.peer, record.reporter, record.sticky) == (0, rank, False)
        assert record.phase == ("reduce" if reduces else "gather")
        assert took < AT_ONCE
    judge(GOOD, [good for _, _, good in by_rank])


DIFFERENCES = {
    "sizes": {"sizes": [3, 1, 5]},
    "bound": {"bound": 7},
    "elements": {"rows": _rows(3, 8)},
    "layout": {"layout": "rank_major"},
    "tensors": {"rows": [_rows(), _rows(3, 1)]},
    "knowledge": {"sizes": None, "bound": 5},
}


def different_call(env: Any, name: str) -> Any:
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        arguments: dict[str, Any] = {"rows": _rows(SIZES[env.rank]), "sizes": list(SIZES)}
        if env.rank == 0:
            arguments |= DIFFERENCES[name]
        outcome = caught(group.all_gatherv, **{k: adapt(env, v) for k, v in arguments.items()})
        return outcome, Collector(env, group, GOOD).flights() if outcome[0] == "twBoundMismatch" else None


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_differ(world, backend, made_for, name) -> None:
    """All of them are told, and go on."""
    needs_knowledge(made_for)
    if name == "layout" and backend != "cpu":
        pytest.skip("on a device one of them makes another step first, which ends the group")
    by_rank = world(3).run(different_call, name)
    for rank, ((result, text, record), _) in enumerate(by_rank):
        assert result == "twBoundMismatch", (rank, result, text)
        assert not record.sticky and record.reporter == rank and record.phase == "gather"
        assert record.peer == 0 or rank == 0
        assert "bound" in text if name == "bound" else "differ in the sizes, tensors" in text
    judge(GOOD, [good for _, good in by_rank])


def refused_while_sent(env: Any) -> Any:
    """Rank 0 refuses a call that the others have sent alone; then all make calls on all channels."""
    with tw.Group(env.comm, timeout=PATIENT, **group_of(3, lanes=2).settings()) as group:
        rows = env.backend.tensor(_rows(8 if env.rank else 7))
        begun: list[Any] = []
        first = caught(lambda: begun.append(group.reduce_scatterv(rows, list(SIZES), send_only=True)))
        again = [Collector(env, group, GOOD).flights() for _ in range(3)]
        last = caught(begun[0].result) if begun else None
        return first, last, again


def test_refused_while_sent(world, made_for) -> None:
    needs_knowledge(made_for)
    by_rank = world(3).run(refused_while_sent)
    assert by_rank[0][0][0] == "twInvalidArgument"
    for first, last, _ in by_rank[1:]:
        assert first[0] == "twSuccess" and last[0] == "twPeerRefused"
    for i in range(3):
        judge(GOOD, [again[i] for _, _, again in by_rank])


def stale_view(env: Any) -> Any:
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        rows = env.backend.tensor(_rows(SIZES[env.rank]))
        view = group.all_gatherv(rows, list(SIZES), layout="rank_major").rows
        group.all_gatherv(rows, list(SIZES))
        return caught(group.reduce_scatterv, view, list(SIZES), layout="rank_major")


def drop_what_is_sent(env: Any) -> tuple[bool, int, int]:
    """The next step on its channel finishes a call whose result nobody wants; into memory that is still its own."""
    with tw.Group(env.comm, hidden=16, max_tokens=5) as group:
        rows, sizes = _rows(5), [5] * group.nranks
        rows[:] = 1 + group.rank
        group.all_gatherv(rows, sizes, lane=0, send_only=True)
        gc.collect()
        others = [np.full((5 * group.nranks, 16), 7, BF16) for _ in range(64)]  # where it might have been
        waiting = len(group._collectives.requests)
        everyone = group.all_gatherv(rows, sizes, lane=0).rows
        good = all((x == 7).all() for x in others) and [float(x) for x in everyone[::5, 0]] == [1.0, 2.0, 3.0]
        kept = len(group._collectives.requests)
    return good, waiting, kept


def test_a_result_that_nobody_wants(threads, backend) -> None:
    if backend != "cpu":
        pytest.skip("with arrays of the host")
    assert threads(3).run(drop_what_is_sent) == [(True, 1, 1)] * 3


def test_a_view_that_is_over(world) -> None:
    for result, text, _ in world(3).run(stale_view):
        assert result == "twInvalidUsage" and "its lane has made another step since" in text, text


def overlapping(env: Any) -> Any:
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        whole = env.backend.tensor(_rows(9))
        first = caught(group.reduce_scatterv, whole[:8], list(SIZES), out=whole[1 : 1 + SIZES[env.rank]])
        second = caught(group.all_gatherv, whole[1 : 1 + SIZES[env.rank]], list(SIZES), out=whole[:8])
        return first, second


def test_outputs_that_overlap(world, made_for) -> None:
    """In place or apart. (Ranks whose rows are in place, or none, make the call.)"""
    needs_knowledge(made_for)
    first, second = world(3).run(overlapping)[0]
    for result, text, _ in (first, second):
        assert result == "twInvalidArgument" and "overlaps rows" in text, text


def among_received_rows(env: Any) -> Any:
    """Outputs in a view of the window, by all ranks; then calls as ever."""
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        view = group.all_gatherv(env.backend.tensor(_rows(3)), [3, 3, 3], layout="rank_major").rows
        mine, whole = env.backend.tensor(_rows(3)), env.backend.tensor(_rows(9))
        said = [
            caught(group.all_gatherv, mine, [3, 3, 3], layout="rank_major", out=view),
            caught(group.reduce_scatterv, whole, [3, 3, 3], out=view[0, :3]),
        ]
        return said, env.backend.array(group.all_gatherv(mine, [3, 3, 3]).rows)


def test_outputs_among_received_rows(world) -> None:
    for said, rows in world(3).run(among_received_rows):
        for result, text, _ in said:
            assert result == "twInvalidArgument" and "lies among the received rows of the window" in text, text
        assert np.array_equal(rows, np.concatenate([_rows(3)] * 3))


# ---- ranks that do not come ------------------------------------------------------------------------


LATE = 3.0  # seconds, in which the ranks that shall meet do


def alone(env: Any, reduces: bool) -> Any:
    """Rank 1 has the group and does not come to its call."""
    group = env.kept["group"] = tw.Group(env.comm, timeout=LATE, **SETUP.settings())
    if env.rank == 1:
        return None
    rows = env.backend.tensor(_rows(8 if reduces else SIZES[env.rank]))
    begin = time.monotonic()
    outcome = caught(group.reduce_scatterv if reduces else group.all_gatherv, rows, list(SIZES))
    took = time.monotonic() - begin
    return outcome, took, caught(group.all_gatherv, rows, list(SIZES))


@pytest.mark.parametrize("reduces", [False, True])
def test_a_late_rank(world, reduces) -> None:
    here = world(3)
    by_rank = here.run(alone, reduces)
    here.forget()
    for rank in (0, 2):
        (result, text, record), took, again = by_rank[rank]
        assert result == "twTimeout" and "rank 1 did not arrive in time" in text, text
        assert record.sticky and record.peer == 1 and record.phase == ("reduce" if reduces else "gather")
        assert took > LATE * 0.9 or record.reporter != rank, "it was not given up before its time"
        assert took < LATE + AT_ONCE and again[0] == "twTimeout"


def until_error(env: Any) -> Any:
    group = env.kept["group"]
    for seed in range(10**6):
        plan = Plan(SETUP, ((Call(SIZES, seed=seed), Call(SIZES, True, seed=seed, send_only=True)),))
        outcome = caught(Collector(env, group, plan).flights)
        if outcome[0] != "twSuccess":
            return outcome, time.monotonic()
    return None


def make_group(env: Any) -> None:
    env.kept["group"] = tw.Group(env.comm, timeout=PATIENT, **SETUP.settings())


@pytest.mark.processes
def test_a_dead_rank(backend, made_for) -> None:
    """Killed in the midst of gathers and reduces: the others name it, long before their timeout."""
    if made_for.most_ranks("processes") < 3:
        pytest.skip("there are not three devices")
    workers = Workers(3)
    key = "dead", 0, backend, f"collective-death-{time.time_ns()}"
    try:
        workers.send(range(3), make_group, key=key)
        settle(workers.collect(range(3), HANGS))
        workers.send(range(3), until_error, key=key)
        time.sleep(0.5)
        struck = time.monotonic()
        workers.signal(1, signal.SIGKILL)
        for (result, text, record), at in settle(workers.collect([0, 2], HANGS)):
            assert result == "twPeerDied" and "rank 1 is gone" in text, text
            assert record.peer == 1 and record.phase in ("gather", "reduce")
            assert at - struck < AT_ONCE
    finally:
        workers.close()
