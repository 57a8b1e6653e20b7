"""Behaviour: rows that return as fp8, with a scale for each block of 128 elements or one for all. Whatever the layout,
the mode and the rows, every rank gets the oracle's bits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from cases import LAYOUTS, Case, Round, Setup, make_ids, one, verify, verify_case
from emulated_graphs import Graph, emulated_alone
from harness import PATIENT, caught, said
from hypothesis import given, settings
from hypothesis import strategies as st
from player import Player, play
from strategies import EXAMPLES, SETTINGS
from strategies import cases as any_case
from test_exchange import check

import tokenway as tw
from tokenway import reference as ref
from tokenway import wire_reference
from tokenway.tensors import numpy_dtype

FP8 = "float8_e4m3fn"
OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=9, combine_hidden=200, wire=FP8)
ALL_LAYOUTS = (*LAYOUTS["low_latency"], *LAYOUTS["high_throughput"])
SCALES = (None, 0.03)
scaled = pytest.mark.parametrize("scale", SCALES, ids=["blocks", "tensor"])


def mode_of(layout: str) -> str:
    return "high_throughput" if layout in LAYOUTS["high_throughput"] else "low_latency"


# ---- whatever the shape, the oracle's bits -------------------------------------------------------


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("top_k", "scale"), [(1, 0.03), (3, None), (6, 0.03)])
def test_layouts(world, layout, top_k, scale) -> None:
    """Ids of -1, ranks without tokens, outputs that are given, calls that are sent alone, further combines."""
    setup = replace(OWN, mode=mode_of(layout), top_k=top_k, lanes=2, wire_scale=scale)
    base = Round((9, 0, 4), layout=layout)
    rounds = (
        base,
        replace(base, seed=1, routing="holes", own=True, send_combine=True, late=True),
        replace(base, seed=2, strided=True, rows="bfloat16", out="bfloat16", weighting="none", release=True),
        replace(base, seed=3, routing="one", tokens=(0, 9, 9), rows="float16", out="float16"),
        replace(base, seed=4, special=True, weighting="none", tokens=(5, 5, 5)),
        replace(base, seed=5, routing="none", own=True, tokens=(9, 9, 9)),
        replace(base, seed=6, tokens=(0, 0, 0)),
    )
    together = tuple(replace(r, send_dispatch=True) for r in rounds[:2])
    check(world, Case(setup, (*((r,) for r in rounds), together), slow=1))


@scaled
@pytest.mark.parametrize("elements", [1, 15, 16, 127, 128, 129, 1008, 1024, 1040, 2311])
def test_widths(world, elements, scale) -> None:
    """Rows that end anywhere in a block, in 16 bytes and in a tile of 1024, or are whole tiles; aligned or not, sent
    alone, and by few blocks."""
    base = Round((7, 5), rows="bfloat16", out="bfloat16")
    for mode, (by_source, *_, by_expert) in LAYOUTS.items():
        setup = replace(OWN, ranks=2, mode=mode, combine_hidden=elements, wire_scale=scale)
        rounds = (
            replace(base, layout=by_source, weighting="none"),
            replace(base, layout=by_source, weighting="none", seed=3, send_combine=True, own=True),
            replace(base, layout=by_source, weighting="none", seed=4, out="float32"),
            replace(base, layout=by_source, weighting="none", seed=5, rows="float16", out="float16"),
            replace(base, layout=by_expert, seed=1),
            replace(base, layout=by_source, seed=2, strided=True, rows="float32", out="float32"),
        )
        check(world, one(setup, *rounds))


@scaled
@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_ranks(world, nranks, scale) -> None:
    """Experts that the ranks do not divide, and ranks that hold none."""
    home, slot = [e % max(1, nranks - 1) for e in range(7)], [e // max(1, nranks - 1) for e in range(7)]
    for placed in (None, (tuple(home), tuple(slot))):
        setup = replace(OWN, ranks=nranks, expert_map=placed, wire_scale=scale)
        base = Round((9, 3, 0, 7, 1)[:nranks])
        check(world, one(setup, base, replace(base, seed=1, layout="expert_major", out="bfloat16")))


@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.parametrize(("elements", "top_k"), [(264, 2), (1024, 3)])
def test_many_tokens(world, elements, top_k, mode) -> None:
    """Many chunks of an owner, and none of another; sizes that change from round to round. Rows of whole tiles have a
    kernel of their own, in which warps look ahead."""
    setup = replace(OWN, mode=mode, hidden=8, combine_hidden=elements, max_tokens=150, top_k=top_k)
    base = Round((150, 0, 33), rows="bfloat16", out="bfloat16", weighting="none")
    rounds = [
        replace(base, layout=layout, seed=seed, tokens=tokens)
        for layout in LAYOUTS[mode]
        for seed, tokens in enumerate(((150, 0, 33), (1, 150, 149), (3, 2, 1)))
    ]
    check(world, one(setup, *rounds, slow=2))


@pytest.mark.parametrize("mode", LAYOUTS)
def test_rows_where_they_came(world, mode) -> None:
    """Experts that return the view itself, which lies where peers will write."""
    setup = replace(OWN, mode=mode, hidden=160, combine_hidden=None, max_tokens=40)
    base = Round((40, 17, 31), layout=LAYOUTS[mode][0], identity=True, rows="bfloat16", out="bfloat16")
    rounds = [replace(base, seed=seed, weighting=w) for seed, w in enumerate(("none", "topk", "none", "none"))]
    check(world, one(setup, *rounds, slow=0))


@scaled
def test_several_in_flight(world, scale) -> None:
    setup = replace(OWN, lanes=3, wire_scale=scale)
    base = Round((9, 4, 8), send_dispatch=True, send_combine=True)
    flights = tuple(
        tuple(replace(base, seed=10 * f + i, layout=LAYOUTS["low_latency"][i % 3]) for i in range(3)) for f in range(2)
    )
    check(world, Case(setup, flights, slow=1, order=3))


@scaled
@pytest.mark.parametrize("inbox", [8, 13, 39])
def test_parts(world, inbox, scale) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, inbox_tokens=inbox, wire_scale=scale)
    base = Round((40, 0, 31))
    rounds = [replace(base, layout=layout, seed=i) for i, layout in enumerate(2 * LAYOUTS["high_throughput"])]
    check(world, one(setup, *rounds, replace(base, layout="flat", seed=9, routing="one", tokens=(0, 40, 2))))


def test_rows_that_were_dropped(world) -> None:
    setup = replace(OWN, mode="high_throughput", max_tokens=40, max_recv_tokens=25, overflow="drop")
    base = Round((40, 40, 33))
    rounds = [replace(base, layout=layout, seed=i) for i, layout in enumerate(2 * LAYOUTS["high_throughput"])]
    check(world, one(setup, *rounds))


def test_both_modes(world) -> None:
    setup = replace(OWN, mode="auto", max_tokens=40, low_latency_tokens=5)
    rounds = [
        replace(Round((4, 5, 0) if layout in LAYOUTS["low_latency"] else (40, 5, 17)), layout=layout, seed=seed)
        for seed, layout in enumerate(2 * ALL_LAYOUTS)
    ]
    check(world, one(setup, *rounds))


def drawn(case: Case, scale: float | None) -> Case:
    return replace(case, setup=replace(case.setup, wire=FP8, wire_scale=scale))


@settings(SETTINGS, max_examples=max(2, EXAMPLES // 3))
@given(data=st.data())
def test_any(backend: str, data: Any) -> None:
    exact = data.draw(st.booleans())
    case = drawn(data.draw(any_case(3, 2, exact)), data.draw(st.sampled_from((*SCALES, 2.0**-116, 2.0**116, 1.0))))
    verify_case(case, harness.Threads(backend, case.setup.ranks).run(play, case))


# ---- every magnitude -----------------------------------------------------------------------------


def extremes(rank: int, tokens: int, hidden: int) -> np.ndarray:
    """Rows of every magnitude, among which some blocks are zeros and others hold a NaN or an infinity; and at the end
    some whose quotients lie half-way between two e4m3, or by up to three last places off."""
    rng = np.random.default_rng([rank, 7])
    rows = rng.standard_normal((tokens, hidden)) * 10.0 ** rng.uniform(-44, 38, (tokens, 1))
    rows *= 10.0 ** np.where(rng.random((tokens, hidden)) < 0.3, rng.uniform(-8, 0, (tokens, hidden)), 0)
    with np.errstate(all="ignore"):
        rows = rows.astype(np.float32)
    rows[rng.random(rows.shape) < 0.05] = 0
    rows[rng.random(rows.shape) < 0.05] *= np.float32(-0.0)
    rows[::7, : hidden // 2] = (0.0, -0.0)[rank % 2]
    for at, value in enumerate((np.nan, np.inf, -np.inf)):
        rows[at :: tokens // 4, at * 50 + 3] = value
    rows[-40:] = half_way(rng, 40, hidden)
    return rows


EXTREMES = 300  # tokens


def half_way(rng: np.random.Generator, tokens: int, hidden: int) -> np.ndarray:
    values = np.sort(np.arange(0x7F, dtype=np.uint8).view(numpy_dtype(FP8)).astype(np.float32))
    scales = np.where(np.arange(tokens) % 2 == 0, np.float32(0.7), rng.uniform(0.1, 9, tokens)).astype(np.float32)
    rows = rng.choice((values[1:] + values[:-1]) / 2, (tokens, hidden)) * scales[:, None]
    rows = (rows.view(np.uint32) + rng.integers(-3, 4, rows.shape).astype(np.int32).view(np.uint32)).view(np.float32)
    rows[:, ::128] = 448 * scales[:, None]  # so that a block of its own has that scale
    return rows * rng.choice(np.float32([-1, 1]), rows.shape)


def sum_extremes(env: Any, scales: tuple[float | None, ...], dtype: str, out: str, hidden: int) -> list[np.ndarray]:
    tokens = EXTREMES
    backend, room = env.backend, tw.RowType(hidden, combine_dtype=FP8).combine_bytes
    ids = np.tile(np.arange(env.nranks, dtype=np.int32), (tokens, 1))
    rows = np.broadcast_to(extremes(env.rank, tokens, hidden), (env.nranks, tokens, hidden))
    with (
        np.errstate(all="ignore"),
        tw.Group(
            env.comm,
            experts=env.nranks,
            top_k=env.nranks,
            hidden=1,
            max_tokens=tokens,
            combine_room=room,
            timeout=PATIENT,
        ) as group,
    ):
        mine = backend.tensor(np.ascontiguousarray(rows.astype(numpy_dtype(dtype))))
        handle = group.route(backend.tensor(ids))
        group.dispatch(handle, backend.tensor(np.zeros((tokens, 1), numpy_dtype("bfloat16"))))
        kinds = [tw.RowType(1, combine_dtype=FP8, combine_hidden=hidden, combine_scale=scale) for scale in scales]
        return [backend.array(group.rows(kind).combine(handle, mine, dtype=out)).copy() for kind in kinds]


@pytest.mark.parametrize("hidden", [400, 1024])
@pytest.mark.parametrize(("dtype", "out"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_every_magnitude(world, dtype, out, hidden) -> None:
    """Blocks of zeros of both signs, subnormal numbers and scales, what saturates, NaN and infinities; rows of whole
    tiles, which are loaded and compared otherwise, too."""
    nranks = min(2, world.most)
    scales = (None, 1.0, 2.0**-116, 2.0**116, 1e-30, 3e33, 0.7)
    by_rank = world(nranks).run(sum_extremes, scales, dtype, out, hidden)
    with np.errstate(all="ignore"):
        rows = [extremes(r, EXTREMES, hidden).astype(numpy_dtype(dtype)).astype(np.float32) for r in range(nranks)]
        for i, scale in enumerate(scales):
            total = wire_reference.travelled(rows[0], FP8, scale)
            for more in rows[1:]:
                total = total + wire_reference.travelled(more, FP8, scale)
            want = total.astype(numpy_dtype(out))
            for mine in by_rank:
                got = mine[i]
                spoilt = np.isnan(want.astype(np.float32))
                assert np.array_equal(np.isnan(got.astype(np.float32)), spoilt), scale
                bits = f"u{want.itemsize}"
                assert np.array_equal(got.view(bits)[~spoilt], want.view(bits)[~spoilt]), scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_are_those_of_quantize_fp8(dtype) -> None:
    """What the oracle quantises is what the library's own function gives, bit for bit."""
    with np.errstate(all="ignore"):
        rows = extremes(0, 300, 400).astype(numpy_dtype(dtype))
        values, scales = tw.quantize_fp8(rows)
        want_values, want_scales = wire_reference.quantised(rows.astype(np.float32))
    assert np.array_equal(np.isnan(scales), np.isnan(want_scales))
    assert np.array_equal(scales[~np.isnan(scales)], want_scales[~np.isnan(scales)])
    assert np.array_equal(values.view(np.uint8), np.ascontiguousarray(want_values).view(np.uint8))


# ---- with what else a combine can do -------------------------------------------------------------


def with_values(env: Any, setup: Setup, round_: Round, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """A combine of fp8 with a value of each choice beside its rows."""
    given = setup.settings()
    given["combine_room"] += 4 * setup.top_k
    with tw.Group(env.comm, timeout=PATIENT, **given) as group:
        ids, weights = make_ids(setup, round_, env.rank)
        calls, backend = setup.calls(group), env.backend
        handle = group.route(backend.tensor(ids), backend.tensor(weights))
        group.dispatch(handle, backend.tensor(np.zeros((len(ids), setup.hidden), numpy_dtype("bfloat16"))))
        rows = np.arange(env.nranks * 9 * setup.width, dtype=np.float32).reshape(env.nranks, 9, -1) % 61 - env.rank
        of_rank = backend.tensor(np.ascontiguousarray(values[env.rank]))
        out = calls.combine(handle, backend.tensor(rows), choice_values=of_rank, dtype="float32")
        return tuple(backend.array(x).copy() for x in out)


def test_with_values_of_choices(world) -> None:
    setup = replace(OWN, ranks=min(3, world.most))
    round_ = Round((9, 4, 7)[: setup.ranks])
    rng = np.random.default_rng(5)
    values = rng.standard_normal((setup.ranks, setup.ranks, 9, 3)).astype(np.float32)
    made = [make_ids(setup, round_, r) for r in range(setup.ranks)]
    x = ref.Exchange([ids for ids, _ in made], [w for _, w in made], experts=setup.experts, bound=9)
    count = setup.ranks * 9 * setup.width
    rows = [np.arange(count, dtype=np.float32).reshape(setup.ranks, 9, -1) % 61 - r for r in range(setup.ranks)]
    sums = ref.combine(x, rows, wire=numpy_dtype(FP8), out=np.float32)
    back = ref.choice_values(x, list(values))
    for rank, (got, of_choices) in enumerate(world(setup.ranks).run(with_values, setup, round_, values)):
        assert np.array_equal(got, sums[rank])
        assert np.array_equal(of_choices, back[rank])


def grow(env: Any, setup: Setup, wider: Setup, rounds: list[Round]) -> list[Any]:
    """Rows of fp8 before and after a group has grown for larger ones."""
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        got = Player(env, group, one(setup, rounds[0]), setup.calls(group)).flights()
        group.reserve(max_tokens=wider.max_tokens, row_bytes=wider.row_type().combine_bytes)
        for each, round_ in ((setup, rounds[1]), (wider, rounds[2])):
            got += Player(env, group, one(each, round_), each.calls(group)).flights()
        return got


@pytest.mark.parametrize("mode", LAYOUTS)
def test_growth(world, mode) -> None:
    setup = replace(OWN, mode=mode, ranks=min(3, world.most))
    wider = replace(setup, combine_hidden=1200, max_tokens=30)
    layout = LAYOUTS[mode][1]
    rounds = [Round((9, 0, 4)[: setup.ranks], layout=layout), Round((3, 9, 4)[: setup.ranks], seed=1, layout=layout)]
    rounds.append(Round((30, 1, 17)[: setup.ranks], seed=2, layout=layout))
    by_rank = world(setup.ranks).run(grow, setup, wider, rounds)
    grown = replace(setup, max_tokens=30)
    for i, (each, round_) in enumerate(zip((setup, grown, wider), rounds, strict=True)):
        verify(each, round_, [mine[i][0] for mine in by_rank])


def share(env: Any, setup: Setup, rounds: list[Round]) -> list[Any]:
    """The same in another group's window, in turns with that group's rows, which are plain."""
    plain = replace(setup, wire=None, wire_scale=None)
    settings = setup.settings()
    del settings["lanes"]
    with (
        tw.Group(env.comm, timeout=PATIENT, room_for=[settings], **plain.settings()) as arena,
        tw.Group(env.comm, timeout=PATIENT, arena=arena, **settings) as group,
    ):
        got = []
        for i, round_ in enumerate(rounds):
            each, on = (setup, group) if i % 2 == 0 else (plain, arena)
            got += Player(env, on, one(each, round_), each.calls(on)).flights()
        return got


@scaled
def test_a_shared_window(world, scale) -> None:
    setup = replace(OWN, ranks=min(3, world.most), wire_scale=scale)
    rounds = [Round((9, 0, 4)[: setup.ranks], seed=seed, layout=LAYOUTS["low_latency"][seed // 2]) for seed in range(4)]
    by_rank = world(setup.ranks).run(share, setup, rounds)
    for i, round_ in enumerate(rounds):
        each = setup if i % 2 == 0 else replace(setup, wire=None, wire_scale=None)
        verify(each, round_, [mine[i][0] for mine in by_rank])


def replay(env: Any, mode: str, scale: float | None) -> list[bool]:
    """A captured pair whose rows return as fp8, beside one of the group's own rows; replayed with other inputs."""
    graph, backend = Graph(env), env.backend
    rng = np.random.default_rng(env.rank)
    tokens = (30, 17)[env.rank]
    ids = backend.tensor((rng.integers(0, 7, (tokens, 1)) + np.arange(3)).astype(np.int32) % 7)
    x = backend.tensor(np.zeros((tokens, 150), np.float32))
    outputs = [backend.tensor(np.zeros((tokens, 150), np.float32)) for _ in range(2)]
    settings = {"experts": 7, "top_k": 3, "hidden": 150, "max_tokens": 30, "dtype": "float32", "mode": mode}
    if mode == "high_throughput":
        settings["max_recv_tokens"] = 30 * env.nranks
    with tw.Group(env.comm, timeout=PATIENT, **settings) as group:
        fp8 = group.rows(tw.RowType(150, "float32", combine_dtype=FP8, combine_scale=scale))
        handle = group.route(ids)
        if mode == "high_throughput":
            group.exchange_counts(handle)

        def pairs() -> None:
            for calls, out in zip((fp8, group), outputs, strict=True):
                received = calls.dispatch(handle, x)
                calls.combine(handle, received.tokens, out=out)

        pairs()
        with graph.capture():
            pairs()
        good = []
        for _ in range(3):
            x[...] = backend.tensor(rng.integers(-50, 50, tuple(x.shape)).astype(np.float32))
            pairs()
            want = [backend.array(out).copy() for out in outputs]
            for out in outputs:
                out[...] = 0
            graph.replay()
            good += [np.array_equal(backend.array(out), sums) for out, sums in zip(outputs, want, strict=True)]
            good += [bool((sums != 0).any()) for sums in want]
            good.append(not np.array_equal(*want))
        return good


@emulated_alone
@scaled
@pytest.mark.parametrize("mode", LAYOUTS)
def test_graphs(world, backend, mode, scale) -> None:
    if backend != "emulated":
        pytest.skip("captures have kernels alone, not a carrier's moves")
    for good in world(2).run(replay, mode, scale):
        assert all(good), good


# ---- what is refused -----------------------------------------------------------------------------


def name_badly(env: Any) -> list[Any]:
    """Types that are no types of rows."""
    settings = {"hidden": 24, "max_tokens": 4, "timeout": PATIENT}
    with tw.Group(env.comm, **settings) as group:
        return [
            caught(group.rows, tw.RowType(24, combine_scale=0.5)),
            caught(group.rows, tw.RowType(24, combine_dtype=FP8, combine_scale=0.0)),
            caught(group.rows, tw.RowType(24, combine_dtype=FP8, combine_scale=float("inf"))),
            caught(group.rows, tw.RowType(24, combine_dtype=FP8, combine_scale="large")),
            caught(group.rows, tw.RowType(24, combine_dtype=FP8, combine_hidden=41)),
            caught(group.rows, tw.RowType(24, combine_dtype="float8_e5m2")),
            caught(tw.window_bytes, 1, combine_scale=0.5, **{k: settings[k] for k in ("hidden", "max_tokens")}),
            caught(tw.window_bytes, 1, combine_dtype=FP8, **{k: settings[k] for k in ("hidden", "max_tokens")}),
        ]


def test_what_is_no_type(world) -> None:
    (heard,) = world(1).run(name_badly)
    for outcome, pattern in zip(
        heard,
        [
            r"combine_scale is 0.5; rows of bfloat16 \(10\) have no scale, so it must be 0",
            r"combine_scale is 0; it must be from 2\^-116 to 2\^116",
            r"combine_scale is inf; it must be from",
            r"combine_scale is 'large'; it must be a number, or None",
            r"combine_hidden is 41, which takes rows of 64 bytes; combine_room has room for 48",
            r"combine_dtype is float8_e5m2 \(14\); it must be float32, bfloat16, float16 or float8_e4m3",
            r"combine_scale is 0.5; it must be None",
            r"combine_dtype is float8_e4m3",
        ],
        strict=True,
    ):
        said(outcome, "twInvalidArgument", pattern)


def differ(env: Any) -> list[Any]:
    """Ranks that name other scales, and one whose call is refused: all hear of it, what they have asked for is NaN, and
    the group goes on."""
    backend, heard = env.backend, []
    ids = backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    tokens = backend.tensor(np.ones((2, 24), numpy_dtype("bfloat16")))
    with tw.Group(env.comm, experts=7, top_k=3, hidden=24, max_tokens=4, timeout=PATIENT) as group:
        kinds = [group.rows(tw.RowType(24, combine_dtype=FP8, combine_scale=scale)) for scale in (None, 1.0, 1.5)]
        rows = backend.tensor(np.ones((env.nranks, 4, 24), numpy_dtype("bfloat16")))
        out = backend.tensor(np.zeros((2, 24), np.float32))
        for one_of, other in ((1, 2), (2, 0)):
            handle = group.dispatch(group.route(ids), tokens).handle
            out[...] = 0
            heard.append(caught(kinds[other if env.rank == 1 else one_of].combine, handle, rows, out=out))
            heard.append(bool(np.isnan(backend.array(out)).all()))
            if handle.leased:
                handle.release()
        handle = group.dispatch(group.route(ids), tokens).handle
        weighting = "neither" if env.rank == 0 else "none"
        heard.append(caught(kinds[0].combine, handle, rows, out=out, weighting=weighting))
        if handle.leased:
            handle.release()
        handle = group.dispatch(group.route(ids), tokens).handle
        heard.append(backend.array(kinds[0].combine(handle, rows, dtype="float32")).copy())
    return heard


def test_ranks_that_differ_are_told(world, made_for) -> None:
    if not made_for.knows_calls:
        pytest.skip("blocks of different sizes do not meet, which ends the group: CallMismatch")
    if world.most < 3:
        pytest.skip("needs three ranks")
    for rank, heard in enumerate(world(3).run(differ)):
        for outcome, spoilt in (heard[:2], heard[2:4]):
            said(outcome, "twBoundMismatch", "differ in the group or the rows of combine")
            assert spoilt, "sums of a step that failed must be NaN"
        said(heard[4], "twPeerRefused" if rank else "twInvalidArgument", "" if rank else "weighting")
        assert (heard[5] == heard[5][:, :1]).all() and (heard[5] > 0).all()


# ---- what it costs in accuracy -------------------------------------------------------------------


def errors(ranks: int, outliers: bool) -> list[float]:
    """Relative errors of sums of eight answers on so many ranks, in the Euclidean norm: rows that return as bfloat16,
    as fp8 by blocks, and as fp8 by the scale with which nothing saturates."""
    rng = np.random.default_rng(55)
    rows = rng.standard_normal((8, 16, 7168)).astype(np.float32)
    if outliers:
        rows[..., rng.random(7168) < 0.001] *= 100
    exact = rows.astype(np.float64).sum(0)
    partials = rows.reshape(ranks, 8 // ranks, 16, 7168).sum(1, dtype=np.float32)
    kinds = (("bfloat16", None), (FP8, None), (FP8, float(np.abs(partials).max() / 448)))
    found = []
    for wire, scale in kinds:
        sums = sum(wire_reference.travelled(p, numpy_dtype(wire), scale).astype(np.float64) for p in partials)
        found.append(float(np.linalg.norm(sums - exact) / np.linalg.norm(exact)))
    return found


def test_errors_in_the_guide() -> None:
    guide = Path(__file__).parents[2] / "docs" / "GUIDE.md"
    told = {
        (int(ranks), outliers == "with"): [float(x) for x in rest.split(" % | ")]
        for ranks, outliers, rest in re.findall(
            r"^\| (\d) ranks?, (with|without) outliers \| (.*) % \|$", guide.read_text(), re.MULTILINE
        )
    }
    assert sorted(told) == [(n, outliers) for n in (1, 8) for outliers in (False, True)]
    for (ranks, outliers), numbers in told.items():
        for number, error in zip(numbers, errors(ranks, outliers), strict=True):
            assert abs(number - 100 * error) < 0.02 + 0.01 * number, (ranks, outliers, number, error)
