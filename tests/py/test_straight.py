"""Dispatches that put rows straight to their experts: one kernel on devices, where a copy followed the dispatch. Every
backend gives the same bits; where kernels are counted, a test tells which calls took one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Round, Setup, one, verify_case
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, caught
from player import play

import tokenway as tw
from tokenway import _native
from tokenway.tensors import numpy_dtype

LAYOUTS = ("expert_major", "grouped_by_bound")
BASE = Setup(ranks=4, experts=16, top_k=4, hidden=24, max_tokens=70, row_alignment=8)


def check(world: Any, case: Any) -> None:
    verify_case(case, world(case.setup.ranks).run(play, case))


def launches(env: Any) -> int | None:
    """Kernels that this thread has launched; None where nobody counts them, or where steps are more than kernels."""
    counts = env.backend.name.startswith("emulated")
    return _native.lib.tokenway_emulated_launches() if counts else None


# ---- which calls take one kernel -----------------------------------------------------------------


def kernels(env: Any, layout: str) -> list[int] | None:
    """How many each of some calls took."""
    counted = []
    settings = replace(BASE, ranks=env.nranks, payloads=((16, "uint8"),)).settings()
    with tw.Group(env.comm, timeout=PATIENT, **settings) as group:
        tensor = env.backend.tensor
        rng = np.random.default_rng(env.rank)

        def dispatch(tokens: int, bound: int, ids: str = "int32", **options: Any) -> None:
            chosen = rng.random((tokens, 16)).argsort(axis=1)[:, :4].astype(ids)
            rows = tensor(rng.standard_normal((tokens, 24)).astype(numpy_dtype("bfloat16")))
            scales = tensor(np.ones((tokens, 16), np.uint8))
            handle = group.route(tensor(chosen))
            before = launches(env)
            received = group.dispatch(handle, rows, {"p0": scales}, layout=layout, bound=bound, **options)
            if options.get("send_only"):
                received = received.result()
            if before is not None:
                counted.append(launches(env) - before)
            group.combine(handle, received.tokens)
            handle.release()

        dispatch(1, 1)
        dispatch(5, 8)
        dispatch(33, 70)
        dispatch(3, 70, "int64")
        dispatch(8, 8, column_major=("p0",))
        dispatch(8, 8, send_only=True)
    return counted or None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_calls_take_one_kernel(world: Any, layout: str) -> None:
    for counted in world(2).run(kernels, layout):
        assert counted in (None, [1, 1, 1, 1, 2, 3])


# ---- what arrives --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_all_bounds(world: Any, layout: str) -> None:
    """Few rows and many, from ranks that have more and fewer, in turns on one lane and beside other layouts."""
    base = Round((8, 3, 0, 5), layout=layout)
    rounds = (
        base,
        replace(base, seed=1, tokens=(1, 1, 1, 1), bound=1, ids="int64", own=True),
        replace(base, seed=2, tokens=(70, 2, 33, 64), bound=70, rows="bfloat16"),
        replace(base, seed=3, tokens=(33, 0, 31, 12), bound=33, routing="holes", own=True, again=True),
        replace(base, seed=4, layout="rank_major"),
        replace(base, seed=5, tokens=(32, 32, 32, 32), bound=32, routing="one", strided=True),
        replace(base, seed=6, tokens=(0, 0, 0, 0)),
        replace(base, seed=7, tokens=(9, 8, 7, 6), send_dispatch=True, late=True),
        replace(base, seed=8, tokens=(65, 64, 63, 70), bound=70, routing="few", special=True),
    )
    check(world, one(BASE, *rounds))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_payloads_and_experts(world: Any, layout: str) -> None:
    """Two payloads of which one begins within a packet, experts in any order, ranks without experts, global ids."""
    rng = np.random.default_rng(5)
    home = rng.integers(0, 2, 13)
    slot = [int((home[:e] == home[e]).sum()) for e in range(13)]
    setup = replace(
        BASE,
        ranks=3,
        experts=13,
        hidden=200,
        payloads=((32, "uint8"),),
        expert_map=(tuple(map(int, home)), tuple(slot)),
    )
    setup = replace(setup, id_space="global", id_dtype="int64", row_alignment=1, lanes=2)
    base = Round((7, 2, 30), layout=layout, own=True)
    more = replace(base, seed=1, tokens=(40, 70, 1), bound=70, limits=(0, 3), own=False)
    check(world, one(setup, base, more, replace(base, seed=2, weights=False), slow=1))


def test_other_slots(world: Any) -> None:
    """Replicas of experts: own rows must find the slots that senders have told."""
    setup = replace(BASE, ranks=2, experts=12, slot_expert=tuple(e % 12 for e in range(16)))
    for layout in LAYOUTS:
        base = Round((20, 17), layout=layout, weighting="topk")
        check(world, one(setup, base, replace(base, seed=1, tokens=(3, 50), bound=50, own=True)))


# ---- errors --------------------------------------------------------------------------------------


def refused(env: Any, layout: str) -> list[Any]:
    """What a rank sees of a step that another refuses, and of the next one."""
    heard: list[Any] = []
    with tw.Group(env.comm, timeout=PATIENT, **replace(BASE, ranks=env.nranks).settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        handle = group.route(tensor(np.arange(24, dtype=np.int32).reshape(6, 4) % 16))
        rows = tensor(np.ones((6, 24), numpy_dtype("bfloat16")))
        wrong = tensor(np.ones((6, 32), numpy_dtype("bfloat16")))
        packed = (env.nranks * 6 * 4 + 16 // env.nranks * 7) // 8 * 8
        lead = (packed,) if layout == "grouped_by_bound" else (16 // env.nranks, env.nranks * 6)
        given = tensor(np.full(lead, 5, np.int32)), tensor(np.full(16 // env.nranks, 5, np.int32))
        out = {"ids": given[0], "counts": given[1]}
        code, _, _ = caught(group.dispatch, handle, wrong if env.rank == 1 else rows, layout=layout, bound=6, out=out)
        shown = (bool((array(given[0]) == -1).all()), bool((array(given[1]) == 0).all()))
        if launches(env) is not None:  # elsewhere some learn of it later, and rows of others are shown
            heard.append((code, *shown) if env.rank != 1 else code)
        handle.release()
        handle = group.route(tensor(np.arange(24, dtype=np.int32).reshape(6, 4) % 16))
        received = group.dispatch(handle, rows, layout=layout, bound=6)
        heard.append(int(array(received.counts).sum()))
        handle.release()
    return heard


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_seen_of_a_refused_step(world: Any, layout: str) -> None:
    (*first, there), (*second, here) = world(2).run(refused, layout)
    assert there + here == 2 * 24
    assert not first or (first, second) == ([("twPeerRefused", True, True)], ["twInvalidArgument"])


# ---- captured calls ------------------------------------------------------------------------------


def replay(env: Any, layout: str) -> list[bool]:
    """A graph with a dispatch and its combine, replayed with other ids and other rows; between replays an odd number of
    steps, so that the next one must skip a bank."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    setup = replace(BASE, ranks=env.nranks, dtype="float32", combine_dtype="float32", row_alignment=16)
    x, ids = backend.tensor(np.zeros((40, 24), np.float32)), backend.tensor(np.zeros((40, 4), np.int32))
    out = backend.tensor(np.zeros((40, 24), np.float32))
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = group.route(ids)
        kept = []  # what a graph writes to must stay
        ids[...] = backend.tensor(rng.random((40, 16)).argsort(axis=1)[:, :4].astype(np.int32))
        with graph.capture():
            received = group.dispatch(handle, x, layout=layout)
            kept.append(received)
            group.combine(handle, received.tokens, out=out)
        good = []
        for i in range(4):
            chosen = rng.random((40, 16)).argsort(axis=1)[:, :4].astype(np.int32)
            chosen[rng.random((40, 4)) < 0.2] = -1
            ids[...] = backend.tensor(chosen)
            x[...] = backend.tensor(rng.integers(1, 50, (40, 24)).astype(np.float32))
            graph.replay()
            if i % 2 == 0:
                other = group.route(ids)
                group.dispatch(other, x, layout=layout)
                other.release()
            sums = (chosen >= 0).sum(1, keepdims=True).astype(np.float32) * backend.array(x)  # whole numbers, so exact
            good.append(np.array_equal(backend.array(out), sums))
        return good


@emulated_alone
@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured(world: Any, layout: str) -> None:
    for good in world(2).run(replay, layout):
        assert good == [True] * 4
