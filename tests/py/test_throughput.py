"""High throughput: exact layouts, counts that are exchanged first, room that does not suffice."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import harness
import numpy as np
import pytest
from cases import FLOATS, Case, Round, Setup, make_ids, make_payloads, one
from harness import PATIENT
from hypothesis import example, given
from marks import heavy_but
from strategies import SETTINGS
from strategies import cases as any_case
from test_exchange import check
from test_properties import PROCESSES, THREADS, judge

import tokenway as tw
from tokenway import reference as ref

EXACT = {"mode": "high_throughput"}
LAYOUTS = ("flat", "grouped")


def both(round_: Round) -> list[Round]:
    """A round in both layouts."""
    return [replace(round_, layout=layout, seed=round_.seed + i) for i, layout in enumerate(LAYOUTS)]


# ---- whatever the shape, the oracle's bits ------------------------------------------------------------------

HARD = Case(
    Setup(
        ranks=4,
        experts=7,
        top_k=5,
        hidden=3,
        payloads=((1, "uint8"), (17, "uint8")),
        lanes=2,
        row_alignment=8,
        **EXACT,
    ),
    (
        (
            Round((0, 8, 1, 0), routing="holes", send_dispatch=True, layout="grouped"),
            Round((8, 8, 8, 8), seed=1, layout="flat"),
        ),
        (Round((0, 0, 0, 0), seed=2, layout="flat"), Round((3, 0, 8, 1), seed=3, routing="one", layout="grouped")),
    ),
    slow=1,
)
IN_PARTS = replace(HARD, setup=replace(HARD.setup, inbox_tokens=3))
TIGHT = replace(HARD, setup=replace(HARD.setup, max_recv_tokens=9, overflow="drop"))


@pytest.mark.processes
@SETTINGS
@example(HARD)
@example(TIGHT)
@example(IN_PARTS)
@given(any_case(max_ranks=min(4, PROCESSES), exact=True))
def test_any_case_on_processes(backend: str, case: Case) -> None:
    judge(harness.Processes(backend, case.setup.ranks), case)


@SETTINGS
@example(HARD)
@example(TIGHT)
@example(IN_PARTS)
@given(any_case(max_ranks=THREADS, exact=True))
def test_any_case_on_threads(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)


@pytest.mark.parametrize("nranks", [1, 2, 3, 8])
def test_ranks(world: Any, nranks: int) -> None:
    setup = Setup(ranks=nranks, experts=2 * nranks + 1, top_k=min(3, nranks + 1), max_tokens=9, **EXACT)
    tokens = tuple(9 - r % 4 for r in range(nranks))
    check(world, one(setup, *both(Round(tokens)), *both(Round(tokens, seed=5, routing="holes"))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(world: Any, layout: str, dtype: str) -> None:
    setup = Setup(ranks=3, experts=6, top_k=3, dtype=dtype, combine_dtype=dtype, hidden=33, row_alignment=4, **EXACT)
    base = Round((8, 8, 3), layout=layout, special=True, rows=dtype, out=dtype)
    plain = replace(base, weighting="none", identity=True, seed=4)
    check(world, one(setup, base, plain, replace(base, rows="float32", out="float16", seed=9)))


@pytest.mark.parametrize("room", [1, 5, 16, 23, 24])
def test_rows_that_are_dropped(world: Any, room: int) -> None:
    """The last sources' rows have no room; sums lack them, and every rank knows."""
    if room > 8 * world.most:
        pytest.skip("fewer ranks, fewer rows")
    tight = {"max_recv_tokens": room, "overflow": "drop", "row_alignment": 4}
    setup = Setup(ranks=3, experts=4, top_k=3, max_tokens=8, lanes=2, **tight, **EXACT)
    base = Round((8, 8, 8), again=True)
    check(world, one(setup, *both(base), *both(replace(base, seed=3, again=False, late=True))))


@pytest.mark.parametrize("top_k", [1, 31, 33, 64])
def test_many_ids(world: Any, top_k: int) -> None:
    """As many as a warp has lanes, more, and most of all."""
    setup = Setup(ranks=3, experts=70, top_k=top_k, **EXACT)
    check(world, one(setup, *both(Round((8, 0, 5))), *both(Round((8, 8, 8), seed=3, routing="holes"))))


@pytest.mark.parametrize(("dtype",), heavy_but([("uint8",), ("bfloat16",)], ["uint8", "bfloat16", "int32", "float64"]))
def test_payloads_by_column(world: Any, dtype: str) -> None:
    """As grouped GEMMs read scales; whatever the size of an element, of a column and of what is left of 16 bytes."""
    setup = Setup(ranks=3, experts=5, top_k=2, payloads=((3, dtype), (1, "float32")), row_alignment=2, **EXACT)
    rounds = [
        Round((8, 3, 5), seed=seed, layout="grouped", columns=columns, own=seed % 2 == 0, send_dispatch=seed > 3)
        for seed, columns in enumerate([(1,), (2,), (1, 2), (), (2, 1)])
    ]
    nothing = Round((0, 0, 0), layout="grouped", columns=(1, 2), own=True)
    check(world, one(setup, *rounds, nothing, replace(nothing, own=False)))
    tight = replace(setup, max_recv_tokens=7, overflow="drop", row_alignment=None)
    check(world, one(tight, *rounds))


def test_the_oracle_by_column() -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    wanted = [[0, 2, 4, 6, 8, 0, 0, 0], [1, 3, 5, 7, 9, 0, 0, 0]]
    assert ref.columns(rows).tolist() == wanted and ref.columns(rows[:4]).tolist() == [w[:4] for w in wanted]
    assert ref.columns(rows[:0]).shape == (2, 0) and ref.columns(rows.astype(np.uint8)).shape == (2, 16)
    x = ref.Exchange([np.array([[1], [0], [1], [1], [1]])], None, experts=2, bound=5)
    got = ref.dispatch_grouped(x, 0, [[rows], [rows]], column_major=[1])
    assert got.payloads[0][:, 0].tolist() == [2, 0, 4, 6, 8]
    assert got.payloads[1].tolist() == [[2, 0, 4, 6, 8, 0, 0, 0], [3, 1, 5, 7, 9, 0, 0, 0]]


def columns_refused(env: Any) -> list[str]:
    said = []
    settings = {"payloads": {"scales": (2, "float32")}, "experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 6}
    tensor = env.backend.tensor
    with tw.Group(env.comm, timeout=PATIENT, **settings, **EXACT) as group:
        handle = group.exchange_counts(group.route(tensor(np.zeros((5, 1), np.int32))))
        tokens = tensor(np.zeros((5, 4), tw.tensors.numpy_dtype("bfloat16")))
        scales = tensor(np.ones((5, 2), np.float32))
        wrong: list[dict[str, Any]] = [
            {"layout": "grouped", "column_major": ["scale"]},
            {"layout": "grouped", "column_major": "scales"},
            {"layout": "grouped", "column_major": 1},
            {"layout": "flat", "column_major": ["scales"]},
            {
                "layout": "grouped",
                "column_major": ["scales"],
                "out": {"scales": tensor(np.zeros((5, 2), np.float32))},
            },
        ]
        for arguments in wrong:
            with pytest.raises(tw.InvalidArgument) as caught:
                group.dispatch(handle, tokens, {"scales": scales}, **arguments)
            said.append(str(caught.value))
        received = group.dispatch(handle, tokens, {"scales": scales}, layout="grouped", column_major=["scales"])
        found = received.payloads["scales"]
        assert found.shape == (2, 8) and found[:, :5].all() and not found[:, 5:].any()
        group.combine(handle, tensor(np.zeros((5, 4), np.float32)))
        received = group.dispatch(handle, tokens, {"scales": scales}, layout="grouped")
        assert received.payloads["scales"].shape == (5, 2), "a wish is for one dispatch"
        group.combine(handle, tensor(np.zeros((5, 4), np.float32)))
    return said


def test_columns_that_are_refused(world: Any) -> None:
    (said,) = world(1).run(columns_refused)
    names = "it must hold payloads of the group: ['tokens', 'scales']"
    wanted = [
        f"column_major is ['scale']; {names}",
        f"column_major is 'scales'; {names}",
        f"column_major is 1; {names}",
    ]
    wanted += ["column_major[1] is 1; only payloads of 'expert_major' and 'grouped', from 0 to 1, have columns"]
    wanted += ["out['scales'] has shape [5, 2]; it must be [2, 8]"]
    for sentence, part in zip(said, wanted, strict=True):
        assert part in sentence


# ---- sizes are known before rows go out ---------------------------------------------------------------------


def sizes(env: Any) -> list[Any]:
    setup = Setup(ranks=env.comm.nranks, experts=5, top_k=2, hidden=4, max_tokens=6, row_alignment=4, **EXACT)
    round_ = Round(tuple(6 - r for r in range(setup.ranks)))
    tensor, array = env.backend.tensor, env.backend.array
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        ids, weights = (tensor(array) for array in make_ids(setup, round_, env.rank))
        handle = group.route(ids, weights)
        with pytest.raises(tw.InvalidUsage, match="have not been exchanged"):
            _ = handle.recv_rows
        with pytest.raises(tw.InvalidUsage, match="have not been exchanged"):
            _ = handle.expert_rows
        group.exchange_counts(handle)
        experts = handle.expert_rows  # first: no other question has the host wait before
        found = [handle.recv_rows, handle.rows_of("grouped"), handle.num_recv_tokens()[1]]
        received = group.dispatch(handle, tensor(make_payloads(setup, round_, env.rank)[0]), layout="grouped")
        group.combine(handle, tensor(np.zeros((found[1], 4), np.float32)))
        offsets = array(received.offsets)
        found += [len(received.tokens), int(offsets[-1])]
        assert all(offset % 4 == 0 for offset in offsets)
        assert experts.dtype == np.int32 and experts.tolist() == array(received.counts).tolist()
        assert offsets.tolist() == [0, *(-(-experts // 4) * 4).cumsum().tolist()]
        handle.update(tensor(np.full_like(array(ids), -1)), weights)
        assert handle.rows_of("flat") is None
        with pytest.raises(tw.InvalidUsage, match="have not been exchanged"):
            _ = handle.expert_rows
        group.exchange_counts(handle)
        found.append(handle.recv_rows)
        assert not handle.expert_rows.any() and experts.sum() == array(received.counts).sum(), "an array of its own"
    return found


def test_sizes_before_rows(world: Any) -> None:
    for flat, grouped, total, rows, end, nothing in world(3).run(sizes):
        assert flat == total and grouped == rows == end and nothing == 0


def asking(env: Any) -> list[Any]:
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, lanes=2, **EXACT)
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        handle = group.route(np.full((2, 1), 3, np.int32))
        with pytest.raises(tw.InvalidUsage, match="no exchange of counts is under way"):
            handle.counts_ready()
        other = group.route(np.zeros((1, 1), np.int32))
        if env.rank == 1:  # its signal is the last one, and comes when rank 0 has seen that it is missing
            group.exchange_counts(other, lane=1)
        pending = group.exchange_counts(handle, lane=0, send_only=True)
        found = [handle.counts_ready(), handle.counts_ready(0.01)] if env.rank == 0 else []
        if env.rank == 0:
            group.exchange_counts(other, lane=1)
        for wrong in (-1.0, 1e9, float("nan")):
            with pytest.raises(tw.InvalidArgument, match="it must be None or from 0 to 2e6 seconds"):
                handle.counts_ready(wrong)
        found.append(handle.counts_ready(None))
        assert handle.rows_of("flat") is None, "asking takes nothing"
        pending.result()
        assert handle.counts_ready()
        return [*found, handle.recv_rows]


def test_asking_for_counts(world: Any, backend: str) -> None:
    if backend != "cpu":
        pytest.skip("on a device completing never waits; tests/gpu/test_exact_layouts.py asks there")
    assert world(2).run(asking) == [[False, False, True, 0], [True, 4]]


# ---- refusals -----------------------------------------------------------------------------------------------


def overflow(env: Any) -> list[str]:
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, max_recv_tokens=7, **EXACT)
    said = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        tokens = tensor(np.ones((6, 4), "float32").astype(tw.tensors.numpy_dtype("bfloat16")))
        everything_to_one = group.route(tensor(np.full((6, 1), 3, np.int32)))
        for send_only in (False, True):
            try:
                pending = group.exchange_counts(everything_to_one, send_only=send_only)
                pending.result()
            except tw.RecvOverflow as error:
                said.append(str(error))
                assert error.record is not None and error.record.phase == "counts" and not error.record.sticky
        # The group is as it was: fewer rows go.
        everything_to_one.update(tensor(np.array([[3], [-1], [0], [-1], [-1], [-1]], np.int32)))
        group.exchange_counts(everything_to_one)
        received = group.dispatch(everything_to_one, tokens)
        out = group.combine(everything_to_one, tensor(array(received.tokens).astype(np.float32)))
        assert array(out).astype(np.float32).sum(axis=1).tolist() == [4, 0, 4, 0, 0, 0]
    return said


def test_overflow_is_refused_alike(world: Any) -> None:
    said = world(2).run(overflow)
    assert said[0] == said[1] and len(said[0]) == 2
    assert "rank 1 would receive 12 rows; max_recv_tokens is 7" in said[0][0]


def telling(env: Any) -> list[list[tuple[str, ...]]]:
    """Who raises an overflow: of calls in several orders, each with Group.check behind it, twice."""
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, max_recv_tokens=7, **EXACT)
    orders = []
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor = env.backend.tensor
        tokens = tensor(np.zeros((6, 4), tw.tensors.numpy_dtype("bfloat16")))

        def check() -> None:
            if env.stream is not None:
                env.backend.wait()
            group.check()

        for order in (("recv_rows",), ("check", "expert_rows"), ("dispatch", "recv_rows"), ("check", "dispatch")):
            handle = group.route(tensor(np.full((6, 1), 3, np.int32)))
            calls: dict[str, Callable[[], Any]] = {
                "exchange_counts": partial(group.exchange_counts, handle),
                "recv_rows": partial(getattr, handle, "recv_rows"),
                "expert_rows": partial(getattr, handle, "expert_rows"),
                "dispatch": partial(group.dispatch, handle, tokens),
                "check": check,
            }
            told = [
                name
                for name in ("exchange_counts", *order, "check", "check")
                if harness.caught(calls[name])[0] == "twRecvOverflow"
            ]
            if handle.leased:
                handle.release()
            orders.append(tuple(told))
    return orders


def test_an_overflow_is_told_once(threads: Any) -> None:
    at_once = [("exchange_counts",)] * 4
    assert threads(2).run(telling) == [at_once] * 2


def test_an_overflow_that_is_learnt_late_is_told_once(threads: Any, backend: str, monkeypatch: Any) -> None:
    """Group.check tells it, or the call that cannot do without; Group.check nothing that a call has told."""
    if "emulated" not in backend:
        pytest.skip("tests/gpu has it, and elsewhere calls return what they find")
    monkeypatch.setenv("TOKENWAY_BLOCKING", "0")
    world = threads(2)
    world.forget()
    try:
        world.run(lambda env: monkeypatch.setattr(tw.cuda.Cuda, "learns_late", True))
        late = [("recv_rows",), ("check", "expert_rows"), ("recv_rows",), ("check",)]
        assert world.run(telling) == [late] * 2
    finally:
        world.forget()


def wrong_order(env: Any, knows_calls: bool) -> list[str]:
    said = []
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, lanes=2, **EXACT)

    def refused(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        ids = tensor(np.zeros((2, 1), np.int32))
        tokens = tensor(np.zeros((2, 4), tw.tensors.numpy_dtype("bfloat16")))
        handle = group.route(ids)
        refused(tw.InvalidUsage, lambda: group.dispatch(handle, tokens))
        refused(tw.InvalidArgument, lambda: group.dispatch(handle, tokens, layout="rank_major"))
        group.exchange_counts(handle)
        refused(tw.InvalidUsage, lambda: group.exchange_counts(handle))
        if knows_calls:  # else such a bound ends the group
            refused(tw.InvalidArgument, lambda: group.dispatch(handle, tokens, bound=7))
        rows = tensor(array(group.dispatch(handle, tokens).tokens))
        refused(tw.InvalidArgument, lambda: group.combine(handle, tensor(np.zeros((len(rows) + 1, 4), np.float32))))
        assert group.combine(handle, rows).shape == (2, 4)
    with tw.Group(env.comm, timeout=PATIENT, **replace(setup, mode="low_latency").settings()) as group:
        handle = group.route(ids)
        refused(tw.InvalidUsage, lambda: group.exchange_counts(handle))
    return said


def test_calls_in_the_wrong_order(world: Any, made_for: Any) -> None:
    for said in world(2).run(wrong_order, made_for.knows_calls):
        wanted: tuple[str, ...] = ("call exchange_counts", "'flat' or 'grouped'", "have been exchanged")
        wanted += ("to max_tokens, 6",) * made_for.knows_calls
        wanted += ("rows has shape", "'low_latency', which has no exchange of counts")
        assert len(said) == len(wanted)
        for sentence, part in zip(said, wanted, strict=True):
            assert part in sentence


def one_refuses(env: Any, send_only: bool) -> list[str]:
    """What one rank's call lacks, the others learn at once, and the group goes on."""
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, **EXACT)
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        ids = env.backend.tensor(np.zeros((2, 1), np.int32))
        handle, other = group.route(ids), group.route(ids)
        group.exchange_counts(other)
        with pytest.raises(tw.TokenwayError) as caught:
            pending = group.exchange_counts(other if env.rank == 0 else handle, send_only=send_only)
            if send_only:
                pending.result()
        assert handle.leased == (send_only and env.rank == 1)
        group.exchange_counts(handle)
        assert not handle.leased
        return [type(caught.value).__name__, str(caught.value), str(handle.recv_rows)]


@pytest.mark.parametrize("send_only", [False, True])
def test_one_rank_refuses(world: Any, send_only: bool) -> None:
    said = world(2).run(one_refuses, send_only)
    assert [name for name, _, _ in said] == ["InvalidUsage", "PeerRefused"]
    assert "rank 0 refused its arguments" in said[1][1]
    assert [rows for _, _, rows in said] == ["4", "0"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_recv_tokens": 0}, "max_recv_tokens is 0; it must be from 1 to 12"),
        ({"max_recv_tokens": 13}, "max_recv_tokens is 13; it must be from 1 to 12"),
        ({"row_alignment": 3}, "row_alignment is 3; it must be a power of two from 1 to 256"),
        ({"row_alignment": 512}, "row_alignment is 512; it must be from 1 to 256"),
        ({"overflow": "lose"}, "overflow is 'lose'; it must be one of ['refuse', 'drop']"),
        ({"mode": "fast"}, "mode is 'fast'; it must be one of ['low_latency', 'high_throughput', 'auto']"),
        ({"mode": "low_latency", "row_alignment": 3}, "row_alignment is 3; it must be a power of two from 1 to 256"),
    ],
)
def test_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with tw.local_comms(1)[0] as comm, pytest.raises(tw.InvalidArgument, match=re.escape(sentence)):
        tw.Group(comm, **{"experts": 4, "top_k": 1, "hidden": 4, "max_tokens": 12, **EXACT, **wrong})


def late_rank(env: Any, flags: str) -> str:
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=1, hidden=4, max_tokens=6, **EXACT)
    group = tw.Group(env.comm, timeout=0.5, **setup.settings())
    try:
        handle = group.route(env.backend.tensor(np.zeros((2, 1), np.int32)))
        if env.rank == 0:
            return "silent"
        with pytest.raises(tw.PeerTimeout) as caught:
            group.exchange_counts(handle)
        harness.raise_flag(flags, "given up")
        return str(caught.value)
    finally:
        if env.rank == 0:
            harness.await_flags(flags, "given up")
        group.abort()
        group.close()


@pytest.mark.processes
def test_a_rank_that_does_not_count(processes: Any, tmp_path: Any) -> None:
    said = processes(2).run(late_rank, str(tmp_path))
    assert said[0] == "silent" and "rank 0 did not arrive in time in the exchange of counts" in said[1]


# ---- one routing, several dispatches -------------------------------------------------------------------------


@pytest.mark.parametrize(("nranks", "top_k"), heavy_but([(1, 3), (2, 4)], [1, 2, 3], [3, 4]))
def test_a_routing_that_goes_again(world: Any, nranks: int, top_k: int) -> None:
    """On devices metadata travels with the first dispatch of a routing alone, if more rows than the packet bound go.
    Then another routing by the same handle; leases, for which counts are exchanged again; and rows that had no room.
    Four ids lie as a whole vector."""
    setup = Setup(ranks=nranks, experts=2 * nranks + 3, top_k=top_k, max_tokens=700, hidden=8, lanes=2, **EXACT)
    tokens = (700, 590, 0)[:nranks]
    first = Round(tokens, layout="flat", again=True, own=True)  # outputs of each dispatch's own, full of rubbish
    other = replace(first, seed=7, routing="holes", reuse=True)
    rounds = [first, other, replace(other, seed=8, layout="grouped"), replace(other, seed=9, own=False)]
    check(world, one(setup, *rounds, slow=nranks - 1))
    if top_k == 4:  # the last rows, and packets, in tiles of half the size, 5 to a row; the others have 3
        check(world, one(replace(setup, hidden=2048), first, replace(other, send_dispatch=True)))
    leased = replace(setup, lease_bytes=1 << 20)
    check(world, one(leased, *(replace(r, lease=True) for r in rounds)))
    check(world, one(replace(setup, max_recv_tokens=650, overflow="drop"), *rounds))
    parted = replace(setup, inbox_tokens=256)
    check(world, one(parted, *rounds, slow=nranks - 1))
    check(world, one(replace(parted, hidden=2048), first, replace(other, send_dispatch=True, send_combine=True)))


# ---- leases: rows that outlive their step ----------------------------------------------------------------------

ROOMS = [1 << 20, 4096, 256, 0]
LEASED = {"lanes": 2, "payloads": ((1, "uint8"), (17, "uint8")), **EXACT}


@pytest.mark.needs("leases")
@pytest.mark.parametrize(
    ("nranks", "room"),
    heavy_but([(1, 1 << 20), (3, 4096), (3, 256), (3, 0)], [1, 3, 8], ROOMS),
)
def test_leases(world: Any, nranks: int, room: int) -> None:
    """Leases of all ranks, of some, of none: the same bits, which later steps leave as they are."""
    setup = Setup(ranks=nranks, experts=2 * nranks + 1, top_k=min(3, nranks + 1), hidden=5, lease_bytes=room, **LEASED)
    full, odd = (8,) * nranks, tuple(8 * (r % 3) // 2 for r in range(nranks))
    several = [
        Round(full, lease=True, send_dispatch=True, layout="flat"),
        Round(odd, lease=True, seed=1, layout="flat", late=True, identity=True, rows="bfloat16"),
    ]
    none = (0,) * nranks
    others = [Round(none, lease=True, layout="flat"), Round(full, lease=True, layout="grouped", seed=3, again=True)]
    mixed = [Round(odd, layout="flat", seed=4), Round(full, lease=True, own=True, layout="flat", seed=5, again=True)]
    check(world, Case(setup, (tuple(several), tuple(others), tuple(mixed), tuple(several)), slow=nranks - 1))
