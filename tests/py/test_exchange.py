"""Behaviour: whatever the shape, every rank gets the oracle's bits.

Written against a world, so that it runs with ranks as threads and as processes, and on any backend.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import player
import pytest
from cases import FLOATS, Case, Round, Setup, fewer_ranks, one, verify_case
from marks import heavy_but

import tokenway as tw

LAYOUTS = ("rank_major", "expert_major", "grouped_by_bound")


def check(world: Any, *cases: Case) -> None:
    """Plays cases and compares every round. Where a world cannot have so many ranks, they are played with fewer."""
    for case in (fewer_ranks(case, world.most) for case in cases):
        verify_case(case, world(case.setup.ranks).run(player.play, case))


def both(round_: Round) -> list[Round]:
    """A round in all layouts."""
    return [replace(round_, layout=layout, seed=round_.seed + i) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks(world, backend, nranks) -> None:
    if backend == "nvlink" and nranks in (5, 6, 7):
        pytest.skip("on GPUs 5, 6 and 7 ranks show nothing that 3, 4 and 8 do not")
    world(nranks)  # where there can be so many
    setup = Setup(ranks=nranks, experts=2 * nranks + 1, top_k=min(3, nranks + 1), max_tokens=9)
    tokens = tuple(9 - r % 4 for r in range(nranks))
    check(world, one(setup, *both(Round(tokens)), *both(Round(tokens, seed=5, routing="holes"))))


def test_sixteen_ranks(world) -> None:
    world(16)
    setup = Setup(ranks=16, experts=40, top_k=5, max_tokens=4, hidden=8)
    check(world, one(setup, *both(Round((4,) * 15 + (0,)))))


@pytest.mark.parametrize("weighting", ["none", "topk"])
@pytest.mark.parametrize("wire", FLOATS)
def test_wide_rows(world, wire, weighting) -> None:
    """More vectors than a warp has lanes, at once and left over; sums of one row, two and five."""
    setup = Setup(ranks=2, experts=10, top_k=5, hidden=16 * 67, dtype=wire, combine_dtype=wire, max_tokens=21)
    base = Round((21, 18), weighting=weighting, rows=wire, out=wire)
    check(world, one(setup, *both(base), *both(replace(base, seed=4, routing="holes", out="float32"))))


FEW = [("high_throughput", (2, 4)), ("low_latency", (1, 4)), ("low_latency", (2, 2))]


@pytest.mark.parametrize(
    ("mode", "limits"), heavy_but(FEW, ["low_latency", "high_throughput"], [(1, 4), (2, 4), (2, 2)])
)
def test_few_sms(world, made_for, mode, limits) -> None:
    """On a device with few SMs, rows are sent and summed whole, and sending blocks sum in the end."""
    # 4 ids of a token lie as a vector of 16 bytes, so that a dispatch has its kernel of few SMs; 2 do not.
    sm_limit, top_k = limits
    group = {"ranks": 2, "experts": 6, "top_k": top_k, "hidden": made_for.large, "max_tokens": 1100}
    setup = Setup(**group, mode=mode, sm_limit=sm_limit)
    base = Round((1100, 1037), weighting="none", rows="bfloat16", out="bfloat16")
    layouts = ("flat", "grouped") if mode == "high_throughput" else LAYOUTS
    beside = replace(setup, payloads=((4, "float32"),))
    check(
        world,
        one(setup, *(replace(base, layout=layout, seed=i) for i, layout in enumerate(layouts))),
        one(beside, replace(base, layout=layouts[0], seed=7, routing="holes", send_dispatch=True, late=True)),
    )


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("sm_limit", [3, 8, pytest.param(20, marks=pytest.mark.heavy)])
def test_few_of_many_sms(world, made_for, sm_limit, monkeypatch) -> None:
    """In a combine one block sends whole rows, or three send halves, or eight send usual tiles; with eight, the tiles
    that warps begin with belong to several turns. On an emulated device of 32 SMs."""
    monkeypatch.setenv("TOKENWAY_EMULATOR_SMS", "32")
    setup = Setup(ranks=2, experts=6, top_k=4, hidden=made_for.large + 352, max_tokens=1100, sm_limit=sm_limit)
    base = Round((1100, 1037), weighting="none", rows="bfloat16", out="bfloat16")
    check(world, one(setup, base, replace(base, seed=3, routing="holes", late=True)))


TWO = [("none", "expert_major"), ("topk", "rank_major")]


@pytest.mark.parametrize(
    ("weighting", "layout"), heavy_but([*TWO, ("topk", "grouped_by_bound")], ["none", "topk"], LAYOUTS)
)
def test_dtypes(world, layout, weighting) -> None:
    """Rows, wire and output are independent of each other and of the tokens."""
    cases = []
    for n, (rows, wire) in enumerate(itertools.product(FLOATS, FLOATS)):
        setup = Setup(ranks=3, experts=7, top_k=4, dtype=FLOATS[n % 3], combine_dtype=wire)
        base = Round((8, 5, 7), layout=layout, weighting=weighting, rows=rows)
        rounds = [replace(base, out=out, seed=10 * n + i) for i, out in enumerate(FLOATS)]
        cases.append(one(setup, *rounds))
    check(world, *cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(world, layout, dtype) -> None:
    """NaN, infinities, negative zeros, subnormals, overflow on the way to a narrow type."""
    setup = Setup(ranks=3, experts=6, top_k=3, dtype=dtype, combine_dtype=dtype, hidden=33)
    base = Round((8, 8, 3), layout=layout, special=True, rows=dtype, out=dtype)
    plain = replace(base, weighting="none", identity=True, seed=4)
    check(world, one(setup, base, plain, replace(base, rows="float32", out="float16", seed=9)))


@pytest.mark.parametrize("id_space", ["local", "global"])
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("invalid_id", [-1, 12, -(2**31), 2**31 - 1])
def test_received_ids(world, id_space, id_dtype, invalid_id) -> None:
    setup = Setup(ranks=3, experts=10, id_space=id_space, id_dtype=id_dtype, invalid_id=invalid_id, top_k=3)
    other = "int64" if id_dtype == "int32" else "int32"
    rounds = both(Round((6, 0, 8), ids=other)) + both(Round((6, 8, 8), ids=id_dtype, routing="holes"))
    check(world, one(setup, *rounds))


def merged(env, tokens) -> None:
    rows = np.arange(tokens * 8, dtype=np.float32).reshape(tokens, 8) + 100 * env.comm.rank
    ids = np.full((tokens, 2), [0, 1], np.int32)
    settings = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 8, "dtype": "float32"}
    with tw.Group(env.comm, **settings, payloads={"p": (3, "int32")}) as group:
        for _ in range(3):  # in both banks, and in the first again
            handle = group.route(env.backend.tensor(ids))
            sent = {"p": env.backend.tensor(np.full((tokens, 3), tokens, np.int32))}
            got = group.dispatch(handle, env.backend.tensor(rows), sent, bound=5)
            whole = {"tokens": got.tokens, "p": got.payloads["p"], "ids": got.ids, "weights": got.weights}
            for name, field in whole.items():
                shown = got.merged(name)
                assert tuple(shown.shape) == (2 * 5, *field.shape[2:])
                assert np.array_equal(env.backend.array(shown), env.backend.array(field).reshape(shown.shape))
                shown[6] = 1  # of the field's own memory
                assert (env.backend.array(field)[1, 1] == 1).all()
            group.combine(handle, got.merged("tokens"))


def test_fields_without_the_dimension_of_sources(world) -> None:
    world(2).run(merged, 3)


PAYLOADS = {
    "odd bytes": ((1, "uint8"), (3, "uint8"), (17, "uint8")),
    "every dtype": ((5, "int8"), (3, "int16"), (1, "uint16"), (3, "int32"), (7, "uint32")),
    "wide dtypes": ((1, "int64"), (3, "uint64"), (1, "float64"), (9, "float8_e4m3fn")),
    "eight": tuple((n, "uint8") for n in (1, 2, 3, 5, 7, 63, 65)),
    "scales": ((5, "float8_e5m2"), (2, "float32"), (3, "bool"), (3, "float16"), (1, "bfloat16")),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads(world, name) -> None:
    setup = Setup(ranks=3, experts=5, hidden=3, payloads=PAYLOADS[name], combine_hidden=11)
    tokens = replace(setup, dtype="uint8", hidden=17, payloads=PAYLOADS[name][:2])
    rounds = both(Round((8, 2, 5))) + both(Round((8, 2, 5), seed=7, own=True, strided=True))
    check(world, one(setup, *rounds), one(tokens, *rounds))


@pytest.mark.parametrize("hidden", [1, 2, 7, 15, 16, 17, 127, 1000])
def test_row_sizes(world, hidden) -> None:
    """Rows that are no multiple of a vector, on both ways and in all types."""
    cases = []
    for dtype in FLOATS:
        setup = Setup(ranks=2, hidden=hidden, dtype=dtype, combine_dtype=dtype)
        cases.append(one(setup, *both(Round((5, 8), rows=dtype, out=dtype))))
    check(world, *cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["strided", "own", "memory", "fortran", "weights", "identity"])
def test_ways_to_call(world, layout, name) -> None:
    """Strided inputs, outputs given, handle memory given, ids by column, no weights, views as rows."""
    setup = Setup(ranks=3, experts=8, top_k=3, payloads=((3, "uint8"),), dtype="float32")
    base = Round((8, 3, 6), layout=layout)
    changed = replace(base, **{name: name != "weights"})
    bound = replace(changed, bound=8, seed=3, weighting="none")
    check(world, one(setup, base, changed, bound, replace(changed, tokens=(0, 1, 8), seed=2)))


def test_everything_at_once(world) -> None:
    setup = Setup(ranks=4, experts=11, top_k=3, payloads=((3, "int8"),), id_space="global", lanes=3)
    base = Round((8, 0, 5, 2), strided=True, own=True, special=True, routing="holes", out="float16")
    flight = [replace(base, seed=s, layout=LAYOUTS[s % 3], send_dispatch=True) for s in range(3)]
    check(world, Case(setup, (tuple(flight),) * 3, slow=1, order=7))


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(0, 0, 0), (0, 8, 8), (8, 0, 0), (1, 0, 8)])
def test_no_tokens(world, tokens) -> None:
    setup = Setup(ranks=3, experts=5)
    check(world, one(setup, *both(Round(tokens)), *both(Round((3, 3, 3), seed=1))))


@pytest.mark.parametrize("routing", ["one", "none", "few", "holes"])
def test_lopsided_routings(world, routing) -> None:
    setup = Setup(ranks=3, experts=5, top_k=3)
    rounds = [Round((8, 7, 8), seed=s, routing=routing) for s in range(5)]
    check(world, one(setup, *(r for round_ in rounds for r in both(round_))))


def test_bounds(world) -> None:
    """Every bound from the largest T to max_tokens; places depend on it, answers do not."""
    setup = Setup(ranks=2, max_tokens=8, payloads=((3, "uint8"),))
    rounds = [Round((3, 2), bound=b, seed=b) for b in (3, 4, 7, 8)]
    rounds += [Round((3, 2)), Round((0, 0), bound=1)]
    check(world, one(setup, *(r for round_ in rounds for r in both(round_))))


def test_sizes_change(world) -> None:
    """A bank holds rows of other sizes from earlier rounds: none of them may show."""
    setup = Setup(ranks=3, experts=7, top_k=3, max_tokens=16)
    rng = np.random.default_rng(5)
    rounds = []
    for s in range(12):
        tokens = tuple(int(t) for t in rng.integers(0, 17, 3))
        rounds.append(Round(tokens, seed=s, bound=max(1, *tokens), layout=LAYOUTS[s % 3]))
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("top_k", [1, 3, 5, 64])
def test_top_k(world, top_k) -> None:
    setup = Setup(ranks=3, experts=max(8, top_k + 1), top_k=top_k)
    check(world, one(setup, *both(Round((5, 8, 2))), *both(Round((5, 8, 2), routing="holes"))))


def test_every_expert(world) -> None:
    """K = E: every token goes to every rank, which is an all-gather and a reduce-scatter."""
    setup = Setup(ranks=4, experts=6, top_k=6, dtype="float32", combine_dtype="float32")
    check(world, one(setup, *both(Round((8, 1, 0, 5))), Round((8,) * 4, identity=True, seed=2)))


def test_fewer_experts_than_ranks(world) -> None:
    setup = Setup(ranks=5, experts=2, top_k=2)
    check(world, one(setup, *both(Round((3, 4, 8, 0, 1)))))


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_many_experts(world, mode) -> None:
    """More on a rank than a device counts at a time, 4096; one row goes to experts of both times."""
    setup = Setup(ranks=2, experts=9001, top_k=24, hidden=8, max_tokens=40, mode=mode)
    layouts = ("grouped",) if mode == "high_throughput" else LAYOUTS[1:]
    rounds = [Round((40, 23), layout=layout) for layout in layouts]
    check(world, one(setup, *rounds, *(replace(each, seed=2, routing="holes") for each in rounds)))
    check(world, one(replace(setup, row_alignment=8), replace(rounds[-1], tokens=(9, 0), seed=3)))


MAPS = {
    "reversed": ((2, 2, 1, 1, 0, 0), (0, 1, 0, 1, 0, 1)),
    "slots mixed": ((0, 1, 2, 0, 1, 2), (1, 0, 1, 0, 1, 0)),
    "empty ranks": ((1, 1, 1, 1, 1, 1), (5, 3, 1, 0, 2, 4)),
    "uneven": ((0, 2, 2, 2, 2, 0), (1, 3, 0, 2, 1, 0)),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("id_space", ["local", "global"])
def test_expert_maps(world, name, id_space) -> None:
    setup = Setup(ranks=3, experts=6, top_k=4, expert_map=MAPS[name], id_space=id_space)
    check(world, one(setup, *both(Round((8, 4, 6))), *both(Round((8, 4, 6), own=True, seed=3))))


@pytest.mark.parametrize("tokens", [500, 1000, 1600])
@pytest.mark.parametrize("top_k", [8, 12])
def test_many_tokens(world, tokens, top_k) -> None:
    """On a device: one round of routing, two of packets alone, and more, whose marks blocks make for each other."""
    setup = Setup(ranks=2, experts=64, top_k=top_k, max_tokens=tokens, hidden=24)
    check(world, one(setup, *both(Round((tokens, 371))), Round((2, tokens), seed=4)))


def check_many_rows(world, setup) -> None:
    """Two rounds of up to 1200 tokens between two ranks, whose bfloat16 rows are summed as they are."""
    layout = "flat" if setup.exact else "rank_major"
    base = Round((1200, 1077), weighting="none", rows="bfloat16", out="bfloat16", layout=layout)
    check(world, one(setup, base, replace(base, tokens=(3, 1200), seed=2, routing="holes")))


SCALES, WIDE = ((32, "float32"),), ((4112, "uint8"),)
LARGE = [("high_throughput", ()), ("low_latency", SCALES), ("low_latency", WIDE)]


@pytest.mark.parametrize(("mode", "payloads"), heavy_but(LARGE, ["low_latency", "high_throughput"], [(), SCALES, WIDE]))
def test_many_large_rows(world, made_for, mode, payloads) -> None:
    """On a device: Simple rows in tiles of several sizes and with a second payload, then packets; sums are drawn."""
    large = made_for.large
    hidden = large if len(payloads) == 0 or payloads[0][0] == 32 else 16
    setup = Setup(
        ranks=2, experts=16, top_k=8, hidden=hidden, combine_hidden=large, payloads=payloads, max_tokens=1200, mode=mode
    )
    check_many_rows(world, setup)


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_many_large_rows_on_a_lane_of_two(world, made_for, mode) -> None:
    """On a device a channel has half of the SMs. These are so few that they send turns of several chunks, but more than
    low-SM kernels are for."""
    setup = Setup(ranks=2, experts=16, top_k=8, hidden=made_for.large, max_tokens=1200, mode=mode, lanes=2)
    check_many_rows(world, setup)


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("payloads", [(), ((32, "uint8"),)])
def test_many_blocks(world, payloads, monkeypatch) -> None:
    """More warps begin with a row than a round has tokens. On an emulated device, of more SMs than usual."""
    monkeypatch.setenv("TOKENWAY_EMULATOR_SMS", "48")
    setup = Setup(ranks=2, experts=64, top_k=8, max_tokens=1600, hidden=24, payloads=payloads)
    base = Round((1600, 1371), weighting="none", rows="bfloat16", out="bfloat16")
    check(world, one(setup, replace(base, send_dispatch=True), replace(base, seed=3), replace(base, seed=4, late=True)))


@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("top_k", [8, 12])
def test_blocks_without_room(world, top_k, monkeypatch) -> None:
    """S7: a block that sends waits for none that may have no SM yet. On an emulated device, of one SM that is free."""
    monkeypatch.setenv("TOKENWAY_EMULATOR_ROOM", "1")
    setup = Setup(ranks=2, experts=64, top_k=top_k, max_tokens=1600, hidden=24)
    check(world, one(setup, Round((1600, 1371)), Round((513, 1025), seed=4)))


# ---- sequences -----------------------------------------------------------------------------------


def test_handles_kept_and_reused(world) -> None:
    setup = Setup(ranks=2, lanes=2)
    rounds = [Round((s % 5, 8 - s), seed=s, reuse=s > 0, layout=LAYOUTS[s % 3]) for s in range(8)]
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dispatch_twice_and_combine_without_lease(world, layout) -> None:
    setup = Setup(ranks=3, lanes=2)
    base = Round((4, 8, 1), layout=layout)
    changes = ({"again": True}, {"late": True}, {"release": True}, {"again": True, "late": True})
    rounds = [replace(base, seed=s, **change) for s, change in enumerate(changes)]
    check(world, one(setup, *rounds, base))
    check(world, one(replace(setup, lanes=1), *rounds, base))


@pytest.mark.parametrize(("order", "lanes"), heavy_but([(0, 1), (1, 2), (2, 3), (0, 5)], range(3), [1, 2, 3, 5]))
def test_in_flight(world, lanes, order) -> None:
    """Several exchanges under way, completed in another order on every rank."""
    setup = Setup(ranks=3, experts=7, lanes=lanes, hidden=5)
    flights = []
    for f in range(4):
        base = Round((f, 8 - f, 4), send_dispatch=True, send_combine=f % 2 == 0)
        flights.append(
            tuple(replace(base, seed=10 * f + i, layout=LAYOUTS[(i + f) % 3], again=i % 2 == 1) for i in range(lanes))
        )
    check(world, Case(setup, tuple(flights), order=order, slow=order))


def test_lanes_by_number(world) -> None:
    setup = Setup(ranks=2, lanes=4)
    flights = []
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        lanes = [Round((5, 8), seed=lane, lane=lane, send_dispatch=True) for lane in order]
        flights.append(tuple(lanes))
    mixed = tuple(Round((5, 8), seed=s, lane=(2, 3, None, None)[s]) for s in range(4))
    check(world, Case(setup, (*flights, mixed, mixed)))


@pytest.mark.parametrize("slow", [0, 2])
def test_slow_rank(world, slow) -> None:
    setup = Setup(ranks=3, lanes=2, experts=9)
    rounds = [Round((8, 8, 8), seed=s, layout=LAYOUTS[s % 3]) for s in range(10)]
    check(world, one(setup, *rounds, slow=slow))
