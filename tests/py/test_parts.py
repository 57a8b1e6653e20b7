"""Behaviour: combines in parts (`inbox_tokens`): the oracle's bits whatever a part has, calls that fail between parts,
and what a window takes."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, Round, Setup, one
from harness import PATIENT
from test_exchange import check

import tokenway as tw

LAYOUTS = ("flat", "grouped")
OWN = Setup(
    ranks=3,
    experts=7,
    top_k=3,
    hidden=24,
    max_tokens=40,
    lanes=3,
    dtype="float32",
    combine_dtype="float32",
    mode="high_throughput",
    inbox_tokens=9,
)


def setup_of(world: Any, **changes: Any) -> Setup:
    return replace(OWN, ranks=min(3, world.most), **changes)


def flights(setup: Setup, *rounds: Round, **kwargs: Any) -> Case:
    """Rounds one after the other, then all at once."""
    together = tuple(replace(r, seed=r.seed + 50, send_dispatch=True) for r in rounds[: setup.lanes])
    return Case(setup, (*((r,) for r in rounds), together), **kwargs)


@pytest.mark.parametrize("inbox", [3, 8, 13, 20, 39, 40])
def test_parts_of_any_size(world: Any, inbox: int) -> None:
    """Of one size and of two; ranks with no tokens in a part, or in any; bounds of fewer parts between those of all."""
    setup = setup_of(world, inbox_tokens=inbox)
    tokens = ((40, 0, 40), (9, 40, 1), (0, 0, 0), (20, 19, 21), (3, 2, 1))
    rounds = [
        Round(
            each[: setup.ranks],
            seed=seed,
            layout=LAYOUTS[seed % 2],
            routing=("random", "holes", "one")[seed % 3],
            bound=(None, None, None, 21, 3)[seed],
            send_combine=seed % 2 == 1,
            late=seed == 1,
            release=seed == 3,
            again=seed == 0,
        )
        for seed, each in enumerate(tokens)
    ]
    check(world, flights(setup, *rounds, slow=setup.ranks - 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_where_they_came(world: Any, layout: str) -> None:
    """Experts that return the view itself: its bank is read in all parts."""
    setup = setup_of(world, hidden=33)
    base = Round((40, 17, 31)[: setup.ranks], layout=layout, identity=True, rows="float32")
    check(world, flights(setup, base, replace(base, seed=3, routing="one"), slow=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_whose_lane_is_released(world: Any, layout: str) -> None:
    """The combine takes the same lane again, and must leave the view's bank alone too."""
    setup = setup_of(world, hidden=512, lanes=1)
    base = Round((40, 40, 31)[: setup.ranks], layout=layout, identity=True, rows="float32", release=True)
    check(world, one(setup, base, replace(base, seed=3), replace(base, seed=4, routing="holes")))


def test_rows_that_were_dropped(world: Any) -> None:
    setup = setup_of(world, max_recv_tokens=50, overflow="drop")
    base = Round((40, 40, 33)[: setup.ranks], layout="flat")
    check(world, flights(setup, base, replace(base, seed=2, layout="grouped", routing="holes")))


def test_leases(world: Any) -> None:
    setup = setup_of(world, lease_bytes=1 << 20)
    base = Round((40, 11, 33)[: setup.ranks], layout="flat", lease=True)
    check(world, flights(setup, base, replace(base, seed=2, release=True)))


# ---- calls that fail ---------------------------------------------------------------------------------------


def refuse_combine(env: Any, setup: Setup) -> list[Any]:
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        tokens = np.full((40, setup.hidden), 1.0, np.float32)
        ids = tensor(np.arange(120, dtype=np.int32).reshape(40, 3) % 7)
        handle = group.exchange_counts(group.route(ids))
        rows = tensor(array(group.dispatch(handle, tensor(tokens)).tokens))
        out = tensor(np.full((40, setup.hidden), 7.0, np.float32))
        result: list[Any] = []
        try:
            group.combine(handle, rows if env.rank else rows[:-1], out=out)
            group.check()
            env.backend.array(out)
            group.check()
        except tw.TokenwayError as error:
            result = [type(error).__name__, array(out)]
        handle = group.exchange_counts(group.route(ids))
        rows = tensor(array(group.dispatch(handle, tensor(tokens)).tokens))
        return [*result, array(group.combine(handle, rows))]


def test_one_rank_refuses(world: Any) -> None:
    """No part of a combine that a rank refused is left in the others' outputs, and the next goes well."""
    setup = setup_of(world)
    by_rank = world(setup.ranks).run(refuse_combine, setup)
    for rank, (name, out, after) in enumerate(by_rank):
        assert name == ("PeerRefused" if rank else "InvalidArgument")
        assert (out == 7.0).all() if rank == 0 else np.isnan(out).all()
        assert (after >= 1.0).all()


def overlap(env: Any, setup: Setup) -> list[str]:
    said = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        memory = tensor(np.zeros((60 * setup.ranks, setup.hidden), np.float32))
        ids = tensor(np.arange(15, dtype=np.int32).reshape(5, 3) % 7)
        for bound in (None, 5, 10):
            handle = group.exchange_counts(group.route(ids))
            received = group.dispatch(handle, tensor(np.ones((5, setup.hidden), np.float32)), bound=bound)
            count = len(received.tokens)
            memory[:count] = received.tokens
            try:
                out = array(group.combine(handle, memory[:count], out=memory[:5]))
                said.append("right" if (out >= 1.0).all() and (out <= setup.ranks).all() else "wrong")
            except tw.InvalidArgument as error:
                said.append(str(error))
                handle.release()
    return said


def test_output_over_rows(world: Any, made_for: Any) -> None:
    """Sums may overwrite rows only where one part has sent all of them."""
    setup = setup_of(world)
    if not made_for.parts:
        assert world(setup.ranks).run(overlap, setup) == [["right"] * 3] * setup.ranks
        return
    for every, few, ten in world(setup.ranks).run(overlap, setup):
        assert few == "right"
        for sentence, bound in ((every, 40), (ten, 10)):
            assert sentence.startswith("out overlaps rows, which later parts of this combine still read")
            assert f"the bound of the dispatch, {bound}, is more than the inbox has room for, 9 tokens" in sentence


def over_the_view(env: Any, setup: Setup, bound: int) -> tuple[str, bool]:
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        ids = tensor(np.arange(15, dtype=np.int32).reshape(5, 3) % 7)
        handle = group.exchange_counts(group.route(ids))
        received = group.dispatch(handle, tensor(np.ones((5, setup.hidden), np.float32)), bound=bound)
        said = ""
        try:
            group.combine(handle, received.tokens, out=received.tokens[:5])
        except tw.InvalidArgument as error:
            said = str(error)
        back = array(group.combine(handle, tensor(array(received.tokens))))
        return said, bool((back >= 1.0).all())


@pytest.mark.parametrize("bound", [5, 40])
def test_no_output_among_received_rows(world: Any, bound: int) -> None:
    """In one part or in several: the next steps of peers write there."""
    setup = setup_of(world)
    for sentence, right in world(setup.ranks).run(over_the_view, setup, bound):
        assert sentence.startswith("out lies among the received rows of the window, where peers write") and right


def unlike_bounds(env: Any, setup: Setup) -> list[str]:
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        ids = tensor(np.arange(15, dtype=np.int32).reshape(5, 3) % 7)
        tokens = tensor(np.ones((5, setup.hidden), np.float32))
        handle = group.exchange_counts(group.route(ids))
        try:
            array(group.dispatch(handle, tokens, bound=5 + env.rank).tokens)
            group.check()
            name = "nothing"
        except tw.TokenwayError as error:
            name = type(error).__name__
        handle = group.exchange_counts(group.route(ids))
        rows = tensor(array(group.dispatch(handle, tokens, bound=10).tokens))
        return [name, "right" if (array(group.combine(handle, rows)) >= 1.0).all() else "wrong"]


def test_ranks_must_name_the_same_bound(world: Any, made_for: Any) -> None:
    if not made_for.knows_calls:
        pytest.skip("their blocks do not meet, which ends the group")
    setup = setup_of(world)
    if setup.ranks > 1:
        assert world(setup.ranks).run(unlike_bounds, setup) == [["BoundMismatch", "right"]] * setup.ranks


def give_up(env: Any, setup: Setup) -> Any:
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        ids = tensor(np.arange(120, dtype=np.int32).reshape(40, 3) % 7)
        handle = group.exchange_counts(group.route(ids))
        rows = tensor(array(group.dispatch(handle, tensor(np.ones((40, setup.hidden), np.float32))).tokens))
        if env.rank == 0:
            time.sleep(0.3)  # the others wait in their first part by then, unless they are late
            group.abort()
            return None
        out = tensor(np.full((40, setup.hidden), 7.0, np.float32))
        with pytest.raises(tw.PeerAborted):
            group.combine(handle, rows, out=out)
            array(out)
            group.check()
        return array(out)


def test_a_rank_gives_up(world: Any) -> None:
    setup = setup_of(world)
    for out in world(setup.ranks).run(give_up, setup)[1:]:
        assert np.isnan(out).all() or (out == 7.0).all()


# ---- memory ------------------------------------------------------------------------------------------------

# Rows of DeepSeek-V3 in fp8 with a scale for 128 elements, sums in bfloat16.
LARGE: dict[str, Any] = {
    "experts": 256,
    "top_k": 8,
    "hidden": 7168,
    "dtype": "float8_e4m3fn",
    "payloads": {"scales": (56, "float32")},
    "combine_dtype": "bfloat16",
    "mode": "high_throughput",
}


def test_an_inbox_is_no_larger_than_the_rows() -> None:
    """By default, where it saves enough of a window: 8192 tokens of 8 ranks take less than 1 GiB."""
    whole = tw.window_bytes(8, max_tokens=8192, inbox_tokens=8192, **LARGE).window
    parted = tw.window_bytes(8, max_tokens=8192, **LARGE).window
    assert whole > 1.7 * 2**30
    assert parted < 0.95 * 2**30
    assert parted == tw.window_bytes(8, max_tokens=8192, inbox_tokens=4096, **LARGE).window
    small = {"max_tokens": 256, **LARGE}
    assert tw.window_bytes(8, **small) == tw.window_bytes(8, inbox_tokens=256, **small)


@pytest.mark.parametrize(
    ("mode", "most", "inbox", "allowed"),
    [
        ("high_throughput", 12, 0, "it must be from 1 to 12"),
        ("high_throughput", 12, 13, "it must be from 1 to 12"),
        ("high_throughput", 100, 6, "it must be from 7 to 100"),  # at most 16 parts
        ("low_latency", 12, 4, "in low latency it must be 0"),
    ],
)
def test_what_is_refused(mode: str, most: int, inbox: int, allowed: str) -> None:
    sentence = f"inbox_tokens is {inbox}; {allowed}"
    with tw.local_comms(1)[0] as comm, pytest.raises(tw.InvalidArgument, match=re.escape(sentence)):
        tw.Group(comm, experts=4, top_k=1, hidden=4, max_tokens=most, mode=mode, inbox_tokens=inbox)
