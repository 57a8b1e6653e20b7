"""Gathers and reduces: whatever sizes, types, layouts and ways to give sizes, every rank gets the oracle's bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import harness
import numpy as np
import pytest
from cases import FLOATS, Round, Setup
from collected import HOW, Call, Plan, group_of, judge, play
from hypothesis import given
from hypothesis import strategies as st
from strategies import SETTINGS


def check(world: Any, *plans: Plan) -> None:
    for plan in plans:
        judge(plan, world(plan.setup.ranks).run(play, plan))


def both(call: Call) -> tuple[Call, Call]:
    """A gather and a reduce of the same sizes."""
    return call, replace(call, reduces=True, seed=call.seed + 100)


def uneven(ranks: int, most: int = 9) -> tuple[int, ...]:
    return tuple((most - 3 * r) % (most + 1) for r in range(ranks))


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks(world, backend, nranks) -> None:
    if backend == "nvlink" and nranks in (5, 6, 7):
        pytest.skip("on GPUs 5, 6 and 7 ranks show nothing that 3, 4 and 8 do not")
    flights = [both(Call(uneven(nranks), layout=layout)) for layout in ("flat", "rank_major")]
    check(world, Plan(group_of(nranks), tuple(flights)))


@pytest.mark.parametrize("layout", ["flat", "rank_major"])
@pytest.mark.parametrize("how", HOW)
def test_sizes(world, how, layout) -> None:
    """From the host, in memory, of this rank alone; zero on some ranks and on all; other ones in each call."""
    many = [(3, 0, 9), (0, 0, 0), (9, 9, 9), (0, 4, 0), (1, 8, 2), (0, 0, 1)]
    calls = [c for s, sizes in enumerate(many) for c in both(Call(sizes, how=how, layout=layout, seed=s))]
    calls += [replace(c, bound=9, own=True) for c in calls]
    check(world, Plan(group_of(3), tuple((c,) for c in calls if not c.problem())))


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(world, dtype) -> None:
    """Rows and sums are of types of their own; one rank, two and five."""
    calls = [Call((4, 9, 1), True, ((16, dtype),), out=out, seed=s) for s, out in enumerate((None, *FLOATS))]
    calls += [replace(c, special=True, seed=9) for c in calls]
    for ranks in (1, 2, 5):
        plan = Plan(group_of(ranks), tuple((replace(c, sizes=uneven(ranks)),) for c in calls))
        check(world, plan)


@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 15, 16, 17, 127, 1000])
def test_row_sizes(world, hidden) -> None:
    """Rows that are no multiple of a vector or a word."""
    calls = [c for d in FLOATS for c in both(Call((5, 8), rows=((hidden, d),)))]
    calls += [Call((5, 8), rows=((hidden, "uint8"),), layout=layout) for layout in ("flat", "rank_major")]
    check(world, Plan(group_of(2, hidden), tuple((c,) for c in calls)))


@pytest.mark.parametrize("wire", FLOATS)
def test_wide_rows(world, wire) -> None:
    """More vectors than a warp has lanes, at once and left over."""
    calls = both(Call((21, 18), rows=((16 * 67, wire),))) + both(Call((40, 3), rows=((16 * 67, wire),), how="memory"))
    check(world, Plan(group_of(2, 16 * 67, 40), (calls,)))


SEVERAL = {
    "scales": ((16, "float8_e4m3fn"), (1, "float32")),
    "odd bytes": ((1, "uint8"), (3, "uint8"), (17, "uint8"), (5, "int8")),
    "every size": ((1, "int64"), (3, "int16"), (1, "bool"), (1, "float64"), (3, "bfloat16")),
    "eight": tuple((n, "uint8") for n in (1, 2, 3, 4, 5, 7, 8, 9)),
}


@pytest.mark.parametrize("layout", ["flat", "rank_major"])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_tensors(world, name, layout) -> None:
    call = Call((5, 0, 8), rows=SEVERAL[name], layout=layout)
    calls = [call, replace(call, strided=True, seed=1), replace(call, own=True, how="memory", seed=2)]
    check(world, Plan(group_of(3, 300), tuple((c,) for c in calls)))


def test_several_sums(world) -> None:
    """Tensors whose sums have types of their own."""
    rows = ((7, "bfloat16"), (16, "float32"), (5, "float16"))
    calls = [Call((5, 0, 8), True, rows, seed=s, out=out) for s, out in enumerate((None, "float32", "bfloat16"))]
    check(world, Plan(group_of(3, 300), tuple((c,) for c in calls)))


@pytest.mark.parametrize("layout", ["flat", "rank_major"])
@pytest.mark.parametrize("way", ["strided", "own", "place", "special"])
def test_ways_to_call(world, way, layout) -> None:
    calls = [c for c in both(Call((5, 0, 8), layout=layout)) if not (way == "place" and layout != "flat")]
    check(world, Plan(group_of(3), tuple((replace(c, **{way: True}),) for c in calls)))
    if way == "place" and layout == "rank_major":
        check(world, Plan(group_of(3), ((Call((5, 0, 8), True, layout=layout, place=True),),)))


def test_a_view_is_reduced(world) -> None:
    """The rows that a gather shows in the window are a reduce's input, on its channel and on the next."""
    calls = tuple(
        (Call((5, 0, 8), chained=True, seed=s, lane=0 if s % 2 else None, send_only=s > 2),) for s in range(6)
    )
    check(world, *(Plan(group_of(3, lanes=lanes), calls) for lanes in (1, 2)))


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("order", range(3))
def test_in_flight(world, lanes, order) -> None:
    """Several calls under way, more than there are channels, completed in another order on every rank."""
    flights = []
    for f in range(4):
        sizes = (f, 9 - f, 4)
        calls = [c for i in range(2) for c in both(Call(sizes, seed=10 * f + i, send_only=(f + i) % 3 != 0))]
        flights.append(tuple(replace(c, how=HOW[f % 3]) for c in calls))
    check(world, Plan(group_of(3, lanes=lanes), tuple(flights), order=order, slow=order))


def test_lanes_by_number(world) -> None:
    flights = [
        tuple(c for lane in order for c in both(Call((5, 8), seed=lane, lane=lane, send_only=True)))
        for order in itertools.islice(itertools.permutations(range(3)), 0, 6, 2)
    ]
    check(world, Plan(group_of(2, lanes=3), tuple(flights)))


@pytest.mark.parametrize("lanes", [1, 2])
def test_among_dispatches(world, lanes) -> None:
    """Calls on channels that dispatches and combines use too, with views of both and skips between them."""
    setup = Setup(ranks=3, experts=7, top_k=3, hidden=16, max_tokens=8, dtype="float32", lanes=lanes)
    flights: list[tuple[Any, ...]] = []
    for s in range(6):
        flights.append((Round((8, s, 3), seed=s, layout=("rank_major", "expert_major")[s % 2], again=s % 3 == 1),))
        layout = ("flat", "rank_major")[s // 2 % 2]
        flights.append(both(Call((s, 8, 0), seed=s, layout=layout, send_only=layout == "flat"))[: 1 + s % 2])
    check(world, Plan(setup, tuple(flights), slow=1))


def test_in_high_throughput(world) -> None:
    setup = Setup(
        ranks=3, experts=7, top_k=3, hidden=16, max_tokens=8, dtype="float32", mode="high_throughput", lanes=2
    )
    flights = [both(Call((4, 8, 0))), (Round((8, 4, 3), layout="flat"),), both(Call((1, 8, 2), layout="rank_major"))]
    check(world, Plan(setup, tuple(flights)))


def test_sizes_change(world) -> None:
    """A bank holds rows of other sizes and bounds from earlier steps: none of them may show."""
    rng = np.random.default_rng(5)
    flights = []
    for s in range(24):
        sizes = tuple(int(n) for n in rng.integers(0, 17, 3))
        rows = ((int(rng.integers(1, 33)), FLOATS[s % 3]),)
        call = Call(
            sizes, s % 2 == 1, rows, how=("host", "memory")[s % 2], seed=s, layout=("flat", "rank_major")[s % 4 // 2]
        )
        flights.append((call,))
    check(world, Plan(group_of(3, 32, 16), tuple(flights), slow=2))


def test_many_rows(world) -> None:
    """More rows than travel as packets, and than a bank of a smaller step holds."""
    calls = (
        *both(Call((600, 371), rows=((24, "bfloat16"),))),
        *both(Call((2, 600), rows=((24, "float32"),), how="memory")),
    )
    check(world, Plan(group_of(2, 24, 600), (calls, calls)))


def test_a_slow_rank(world) -> None:
    flights = tuple(both(Call((8, 8, 8), seed=s, layout=("flat", "rank_major")[s % 2])) for s in range(10))
    check(world, *(Plan(group_of(3), flights, slow=slow) for slow in (0, 2)))


# ---- any case --------------------------------------------------------------------------------------


@st.composite
def calls(draw: Any, ranks: int, most: int, seed: int) -> Call:
    sizes = st.integers(0, most) | st.sampled_from((0, most))
    reduces = draw(st.booleans())
    dtypes = st.sampled_from(FLOATS if reduces else (*FLOATS, "uint8", "int16", "int64"))
    rows = draw(st.lists(st.tuples(st.sampled_from((1, 2, 3, 8, 13, 16, 33)), dtypes), min_size=1, max_size=3))
    call = Call(
        sizes=tuple(draw(sizes) for _ in range(ranks)),
        reduces=reduces,
        rows=tuple(rows),
        how=draw(st.sampled_from(HOW)),
        layout=draw(st.sampled_from(("flat", "rank_major"))),
        seed=seed,
        out=draw(st.none() | st.sampled_from(FLOATS)) if reduces else None,
        own=draw(st.booleans()),
        strided=draw(st.booleans()),
        special=draw(st.booleans()),
        send_only=draw(st.booleans()),
        limits=tuple(draw(st.lists(st.sampled_from((0, 1, 2, 5, 2**31 - 1)), max_size=3))),
    )
    if call.problem():
        call = replace(call, layout="rank_major")
    if draw(st.booleans()):
        call = replace(call, bound=draw(st.integers(max(1, *call.sizes, 1), most)))
    # A view is over when the next step on its channel begins.
    return replace(call, send_only=False) if call.layout == "rank_major" and not (call.own or reduces) else call


@st.composite
def plans(draw: Any, max_ranks: int) -> Plan:
    ranks, most = draw(st.integers(1, max_ranks)), draw(st.integers(1, 12))
    setup = group_of(ranks, 400, most, lanes=draw(st.integers(1, 3)))
    flights = []
    for f in range(draw(st.integers(1, 3))):
        flight = [draw(calls(ranks, most, 10 * f + i)) for i in range(draw(st.integers(1, 3)))]
        views = [c for c in flight if c.layout == "rank_major" and not (c.own or c.reduces)]
        flights.append(tuple(flight) if not views else (views[0],))
    slow = draw(st.none() | st.integers(0, ranks - 1))
    return Plan(setup, tuple(flights), slow=slow, order=draw(st.integers(0, 9)))


@SETTINGS
@given(plans(max_ranks=min(8, harness.most_ranks("threads"))))
def test_any_plan_on_threads(backend: str, plan: Plan) -> None:
    judge(plan, harness.Threads(backend, plan.setup.ranks).run(play, plan))


@pytest.mark.processes
@SETTINGS
@given(plans(max_ranks=min(5, harness.most_ranks("processes"))))
def test_any_plan_on_processes(backend: str, plan: Plan) -> None:
    judge(plan, harness.Processes(backend, plan.setup.ranks).run(play, plan))
