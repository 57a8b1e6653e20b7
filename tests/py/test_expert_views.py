"""What layouts by expert show beside rows: payloads by column, where rows came from, and how many from each source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Round, Setup, exchange_of, make_payloads, one, verify_case
from harness import PATIENT
from marks import heavy_but
from player import Player, play

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype


def check(world: Any, case: Any) -> None:
    verify_case(case, world(case.setup.ranks).run(play, case))


@pytest.mark.parametrize(("dtype",), heavy_but([("uint8",), ("float32",)], ["uint8", "bfloat16", "float32", "float64"]))
def test_payloads_by_column(world: Any, dtype: str) -> None:
    """In blocks of one expert each, whatever the size of an element, of a column and of what is left of 16 bytes."""
    setup = Setup(ranks=3, experts=5, top_k=2, payloads=((3, dtype), (1, "float32")), max_tokens=9)
    rounds = [
        Round((8, 3, 5), seed=seed, layout="expert_major", columns=columns, own=seed % 2 == 0, send_dispatch=seed > 3)
        for seed, columns in enumerate([(1,), (2,), (1, 2), (), (2, 1)])
    ]
    holes = replace(rounds[0], routing="holes", bound=8, again=True)
    everyone = replace(rounds[2], routing="one", seed=4, bound=9, tokens=(9, 0, 9))
    nothing = Round((0, 0, 0), layout="expert_major", columns=(1, 2), own=True)
    check(world, one(setup, *rounds, holes, everyone, nothing, replace(nothing, own=False), slow=1))
    nobody = replace(setup, expert_map=((0, 0, 2, 2, 2), (0, 1, 0, 1, 2)))  # rank 1 has no expert
    check(world, one(nobody, *rounds[:3]))


@pytest.mark.parametrize("payload", [(16, "float32"), (32, "uint8"), (4, "int64")], ids=str)
def test_scales_of_few_rows(world: Any, payload: tuple[int, str]) -> None:
    """Rows of whole 16 bytes, at most two payloads: on devices they have a kernel of their own."""
    setup = Setup(ranks=2, experts=5, top_k=3, hidden=32, max_tokens=3, payloads=(payload,), lanes=2)
    base = Round((3, 2), layout="expert_major", own=True, columns=(1,))
    rounds = [base, replace(base, seed=1, own=False), replace(base, seed=2, columns=(), again=True)]
    check(world, one(setup, *rounds, replace(base, seed=3, routing="holes", bound=3), replace(base, tokens=(0, 3))))


def test_scales_of_many_rows(world: Any) -> None:
    """More than warps take one each, as words, as bytes, and in elements of 8 bytes."""
    payloads = (16, "float32"), (32, "uint8"), (4, "int64")
    setup = Setup(ranks=2, experts=5, top_k=3, hidden=32, max_tokens=300, payloads=payloads)
    base = Round((300, 299), layout="expert_major", own=True, columns=(1, 2, 3))
    check(world, one(setup, base, replace(base, seed=1, columns=(2,), own=False, routing="few")))


def unwritten(env: Any, case: Any) -> list[np.ndarray]:
    with tw.Group(env.comm, timeout=PATIENT, **case.setup.settings()) as group:
        player, ((round_,),) = Player(env, group, case), case.flights
        handle = player.handle(round_)
        out = player.outputs(round_, handle)
        received = player.dispatch(round_, handle, player.payloads(round_), False)
        del out
        shown = [player.array(received.payloads[name]) for name in ("p0", "p1")]
        handle.release()
        return shown


def test_what_is_beyond_the_counts_is_not_written(world: Any) -> None:
    setup = Setup(ranks=2, experts=4, top_k=2, payloads=((3, "uint8"), (4, "float32")), max_tokens=5)
    round_ = Round((4, 2), layout="expert_major", columns=(1, 2), own=True)
    x = exchange_of(setup, round_)
    sent = [list(of) for of in zip(*(make_payloads(setup, round_, r) for r in range(2)), strict=True)]
    for rank, shown in enumerate(world(2).run(unwritten, one(setup, round_))):
        want = ref.dispatch_expert_major(x, rank, sent, column_major=[1, 2])
        for got, payload in zip(shown, want.payloads[1:], strict=True):
            assert (
                got.shape == payload.shape == (2, payload.shape[1], -(-10 // (16 // got.itemsize)) * 16 // got.itemsize)
            )
            for expert, rows in enumerate(want.counts):
                assert np.array_equal(got[expert, :, :rows].view(np.uint8), payload[expert, :, :rows].view(np.uint8))
                assert (np.ascontiguousarray(got[expert, :, rows:]).view(np.uint8) == 0xA5).all()


def origins_by_hand(env: Any, layout: str) -> tuple[np.ndarray, ...]:
    """The rows of a view by source, those by expert, and what tells of them."""
    setup = Setup(ranks=env.comm.nranks, experts=4, top_k=2, hidden=3, max_tokens=6, mode="auto", low_latency_tokens=6)
    rng = np.random.default_rng(env.rank)
    tensor, array = env.backend.tensor, env.backend.array
    with tw.Group(env.comm, timeout=PATIENT, **setup.settings()) as group:
        tokens = tensor(rng.standard_normal((6 - env.rank, 3)).astype(numpy_dtype("bfloat16")))
        handle = group.route(
            tensor(np.array([[0, 3], [1, -1], [2, 1], [-1, -1], [3, 2], [0, 1]], np.int32)[env.rank :])
        )
        if layout == "grouped":
            group.exchange_counts(handle)
            handle.learn_rows()
        by_source = array(group.dispatch(handle, tokens, layout="flat" if layout == "grouped" else "rank_major").tokens)
        handle.release()
        lead = (handle.rows_of("grouped"),) if layout == "grouped" else (2, 2 * 6)
        out = {"origins": tensor(np.full(lead, 7, np.int64)), "source_counts": tensor(np.full((2, 2), 7, np.int32))}
        received = group.dispatch(handle, tokens, layout=layout, out=out)
        shown = received.tokens, received.ids, received.counts, received.origins, received.source_counts
        assert received.origins is out["origins"] and received.source_counts is out["source_counts"]
        found = (by_source, *(array(each) for each in shown))
        handle.release()
        return found


@pytest.mark.parametrize("layout", ["expert_major", "grouped"])
def test_where_rows_came_from(world: Any, layout: str) -> None:
    for by_source, rows, ids, counts, origins, source_counts in world(2).run(origins_by_hand, layout):
        there = ids >= 0
        assert (origins[~there] == -1).all() and there.sum() == counts.sum() > 0
        rows_by_source = by_source.reshape(-1, by_source.shape[-1])
        assert np.array_equal(rows[there].view(np.uint16), rows_by_source[origins[there] // 2].view(np.uint16))
        assert source_counts.sum(axis=1).tolist() == counts.tolist()
        if layout == "expert_major":
            for expert in range(2):
                source = origins[expert, : counts[expert]] // 2 // 6
                assert np.bincount(source, minlength=2).tolist() == source_counts[expert].tolist()
                assert (np.diff(source) >= 0).all()


def test_views_of_many_sources_and_experts(world: Any) -> None:
    """Counts of more sources than blocks may run, of experts in any order, and of rows that are dropped."""
    ranks = min(world.most, 5)
    rng = np.random.default_rng(3)
    home = rng.integers(0, ranks, 23)
    slot = [int((home[:e] == home[e]).sum()) for e in range(23)]
    setup = Setup(ranks=ranks, experts=23, top_k=7, max_tokens=40, expert_map=(tuple(map(int, home)), tuple(slot)))
    base = Round(tuple(40 - 9 * r for r in range(ranks)), layout="expert_major", own=True, limits=(1, 2))
    check(world, one(setup, base, replace(base, routing="holes", seed=1), replace(base, limits=(), seed=2)))
    exact = replace(setup, mode="high_throughput", max_recv_tokens=60, overflow="drop", row_alignment=4)
    grouped = replace(base, layout="grouped", seed=5)
    check(world, one(exact, grouped, replace(grouped, routing="one", seed=6), replace(grouped, tokens=(0,) * ranks)))


def packed(env: Any) -> tuple[np.ndarray, ...]:
    """Scales as packed powers of two, by column as a masked grouped GEMM reads them."""
    hidden, tensor, array = 1664, env.backend.tensor, env.backend.array  # 13 blocks: the fourth word has one byte
    rng = np.random.default_rng(env.rank)
    x = rng.standard_normal((5, hidden)).astype(np.float32) * np.float32(10) ** rng.integers(-6, 6, (5, 1)).astype(
        np.float32
    )
    values, scales = tw.quantize_fp8(x.astype(numpy_dtype("bfloat16")), packed=True)
    row = {"hidden": hidden, "dtype": "float8_e4m3fn", "payloads": {"scales": (scales.shape[1], "int32")}}
    with tw.Group(env.comm, experts=4, top_k=2, max_tokens=7, timeout=PATIENT, **row) as group:
        handle = group.route(tensor(np.array([[0, 3], [1, -1], [2, 1], [3, 0], [-1, -1]], np.int32)))
        received = group.dispatch(
            handle,
            tensor(values),
            {"scales": tensor(scales)},
            layout="expert_major",
            column_major=["scales"],
        )
        found = array(received.tokens), array(received.payloads["scales"]), array(received.counts)
        handle.release()
        return (*found, np.asarray(scales))


def test_packed_scales_by_column(world: Any) -> None:
    by_rank = world(2).run(packed)
    sent = [scales for *_, scales in by_rank]
    for rank, (values, columns, counts, _) in enumerate(by_rank):
        assert columns.dtype == np.int32 and columns.shape == (2, 4, 16) and counts.tolist() == [[4, 4], [2, 4]][rank]
        chosen = {0: [[0, 3], [1, 2]], 1: [[2], [0, 3]]}[rank]
        for expert, tokens in enumerate(chosen):
            want = np.concatenate([of[tokens] for of in sent])
            got = columns[expert, :, : counts[expert]].T
            assert np.array_equal(got, want)
            rows = tw.dequantize_fp8(values[expert, : counts[expert]], np.ascontiguousarray(got))
            assert np.isfinite(rows).all() and (np.abs(rows).max(axis=1) > 0).all()


def refusals(env: Any) -> list[str]:
    said = []
    settings = {"payloads": {"scales": (2, "float32")}, "experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 6}
    tensor = env.backend.tensor
    with tw.Group(env.comm, timeout=PATIENT, **settings) as group:
        handle = group.route(tensor(np.zeros((5, 1), np.int32)))
        tokens = tensor(np.zeros((5, 4), numpy_dtype("bfloat16")))
        scales = {"scales": tensor(np.ones((5, 2), np.float32))}
        origins, counts = tensor(np.zeros((2, 6), np.int64)), tensor(np.zeros((2, 1), np.int32))
        wrong: list[dict[str, Any]] = [
            {"layout": "rank_major", "column_major": ["scales"]},
            {"layout": "rank_major", "out": {"origins": origins}},
            {"layout": "rank_major", "out": {"source_counts": counts}},
            {"layout": "expert_major", "out": {"origins": counts}},
            {"layout": "expert_major", "out": {"source_counts": tensor(np.zeros((2, 2), np.int32))}},
            {
                "layout": "expert_major",
                "column_major": ["scales"],
                "out": {"scales": tensor(np.zeros((2, 6, 2), np.float32))},
            },
            {"layout": "expert_major", "out": {"offsets": counts}},
        ]
        for arguments in wrong:
            with pytest.raises(tw.InvalidArgument) as caught:
                group.dispatch(handle, tokens, scales, **arguments)
            said.append(str(caught.value))
        received = group.dispatch(handle, tokens, scales, layout="expert_major", column_major=["scales"])
        assert received.payloads["scales"].shape == (2, 2, 8) and received.source_counts is None is received.origins
        handle.release()
        received = group.dispatch(handle, tokens, scales, layout="expert_major")
        assert received.payloads["scales"].shape == (2, 6, 2), "a wish is for one dispatch"
        handle.release()
    return said


def test_what_is_refused(world: Any) -> None:
    (said,) = world(1).run(refusals)
    wanted = [
        "column_major[1] is 1; only payloads of 'expert_major' and 'grouped', from 0 to 1, have columns",
        "only 'expert_major' and 'grouped' have it",
        "only 'expert_major' and 'grouped' have it",
        "out['origins'] has dtype int32 (5); it must be int64",
        "out['source_counts'] has shape [2, 2]; it must be [2, 1]",
        "out['scales'] has shape [2, 6, 2]; it must be [2, 2, 8]",
        "out",
    ]
    for sentence, part in zip(said, wanted, strict=True):
        assert part in sentence, sentence


def test_the_oracle_by_hand() -> None:
    ids = [np.array([[0, 1], [1, -1]]), np.array([[1, 0], [-1, -1], [2, 1]])]
    rows = [np.arange(4, dtype=np.float32).reshape(2, 2), 10 + np.arange(6, dtype=np.float32).reshape(3, 2)]
    got = ref.dispatch_expert_major(ref.Exchange(ids, None, experts=4, bound=3), 0, [rows, rows], column_major=[1])
    assert got.counts.tolist() == [2, 4] and got.source_counts is not None and got.origins is not None
    assert got.source_counts.tolist() == [[1, 1], [2, 2]]
    assert got.origins.tolist() == [[0, 7, -1, -1, -1, -1], [1, 2, 6, 9, -1, -1]]
    assert got.payloads[1].tolist() == [
        [[0, 10, 0, 0, 0, 0, 0, 0], [1, 11, 0, 0, 0, 0, 0, 0]],
        [[0, 2, 10, 14, 0, 0, 0, 0], [1, 3, 11, 15, 0, 0, 0, 0]],
    ]
