"""Code that calls DeepEP's second API, over Tokenway: rows by source and by expert, against NumPy."""

from __future__ import annotations

import time
import types
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from deep_ep_ranks import array, attempt, begin, counted, end, judge_wrong_calls, received, routed, since
from frameworks import assert_caught, mutated
from harness import HANGS, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, HIDDEN = 8, 32


class Case(NamedTuple):
    tokens: tuple[int, int]
    bound: int = 10
    top_k: int = 3
    dtype: str = "bfloat16"
    scales: tuple[int, str] | None = None
    expand: bool = True
    alignment: int = 1
    waits: bool = True
    columns: bool = False
    weighted: bool = True
    asynchronous: bool = False


CASES = {
    "by expert": Case((5, 8)),
    "by source": Case((5, 8), expand=False),
    "aligned": Case((5, 8), alignment=16),
    "by source, aligned": Case((5, 8), expand=False, alignment=16),
    "no wait": Case((5, 8), alignment=8, waits=False),
    "by source, no wait": Case((5, 8), expand=False, waits=False),
    "fp8": Case((6, 3), dtype="float8_e4m3fn", scales=(2, "float32"), columns=True, alignment=4),
    "fp8 by row": Case((6, 3), dtype="float8_e4m3fn", scales=(2, "float32"), alignment=4),
    "fp8 by source": Case((6, 3), dtype="float8_e4m3fn", scales=(3, "int32"), columns=True, expand=False),
    "fp8, no wait": Case((6, 3), dtype="float8_e4m3fn", scales=(2, "float32"), columns=True, waits=False),
    "nothing for rank 0": Case((0, 4)),
    "scales, none of rank 0": Case((0, 4), dtype="float8_e4m3fn", scales=(2, "float32")),
    "none at all": Case((0, 0), alignment=8),
    "none at all, by source": Case((0, 0), expand=False),
    "top 5": Case((4, 9), top_k=5),
    "no weights": Case((4, 9), weighted=False),
    "no weights, by source": Case((4, 9), weighted=False, expand=False, dtype="float32"),
    "a larger bound": Case((300, 2), bound=300, alignment=128),
    "smaller again": Case((2, 1), bound=2, asynchronous=True),
}


def batch(name: str, rank: int) -> dict[str, Any]:
    """Of a rank: rows of whole numbers, so that bfloat16 is exact, ids, weights, scales."""
    case, rng = CASES[name], np.random.default_rng([rank, len(name)])
    count, columns = case.tokens[rank], case.scales
    return {
        "rows": rng.integers(-4, 5, (count, HIDDEN)).astype(np.float32),
        "ids": routed(count, EXPERTS, case.top_k, [rank, 5]),
        "weights": rng.integers(1, 64, (count, case.top_k)).astype(np.float32) / 8,
        "scales": rng.integers(1, 9, (count, columns[0])).astype(columns[1]) if columns else None,
    }


def exchanged(buffer: Any, name: str, device: Any) -> dict[str, Any]:
    """What a rank receives, and gets back: expert e multiplies by e + 1."""
    import torch

    from tokenway.compat.deep_ep import EventOverlap

    case, rank = CASES[name], buffer.rank_idx
    mine = {key: None if x is None else torch.from_numpy(x).to(device) for key, x in batch(name, rank).items()}
    values = mine["rows"].to(getattr(torch, case.dtype))
    x = values if mine["scales"] is None else (values, mine["scales"])
    weights = mine["weights"] if case.weighted else None
    stats = torch.ones(EXPERTS // 2, dtype=torch.int32, device=device)
    told = {"async_with_compute_stream": case.asynchronous}
    if case.asynchronous:
        told |= {"previous_event": buffer.capture(), "allocate_on_comm_stream": True}
        told["previous_event_before_epilogue"] = EventOverlap(None)  # nothing to wait for
    asked = {"num_experts": EXPERTS, "num_max_tokens_per_rank": case.bound, "expert_alignment": case.alignment}
    asked |= {"do_cpu_sync": case.waits, "do_expand": case.expand, "use_tma_aligned_col_major_sf": case.columns}
    came, ids, here, handle, event = buffer.dispatch(
        x, mine["ids"], weights, cumulative_local_expert_recv_stats=stats, **asked, **told
    )
    if case.asynchronous:
        event.current_stream_wait()
    rows, scales = came if case.scales else (came, None)
    found: dict[str, Any] = {"rows": array(rows), "stats": array(stats), "list": handle.num_recv_tokens_per_expert_list}
    found["ends"] = array(handle.psum_num_recv_tokens_per_expert)
    found["from"] = array(handle.psum_num_recv_tokens_per_scaleup_rank)
    found["source"] = array(handle.recv_src_metadata)
    found["ids"], found["weights"] = (None if x is None else array(x) for x in (ids, here))
    found["scales"], found["step"] = (None, None) if scales is None else (array(scales), scales.stride()[0])
    if case.expand:
        numbers = torch.arange(EXPERTS // 2, device=device) + 1 + rank * (EXPERTS // 2)
        ends = handle.psum_num_recv_tokens_per_expert
        places = torch.arange(len(rows), device=device)
        expert = torch.searchsorted(ends, places, right=True).clamp(max=EXPERTS // 2 - 1)
        factors = numbers[expert].view(-1, 1)
    else:
        factors = torch.where(ids >= 0, ids + 1 + rank * (EXPERTS // 2), 0).sum(1, keepdim=True)
        ids.fill_(-1)  # they are the caller's
    made = (rows.float().nan_to_num(0, 0, 0) * factors).to(torch.bfloat16 if case.scales else values.dtype)
    bias = (torch.arange(len(values), device=device) % 7).view(-1, 1).expand(-1, HIDDEN).to(made.dtype).contiguous()
    told |= since(buffer, case.asynchronous)
    out, sums, event = buffer.combine(made, handle, here, bias=bias, **told)
    if case.asynchronous:
        event.current_stream_wait()
    found["out"], found["sums"] = array(out), None if sums is None else array(sums)
    other, heavier = mine["rows"] + 1, mine["weights"] + 1
    told |= since(buffer, case.asynchronous)
    again, _, later, _, event = buffer.dispatch(other, None, heavier, handle=handle, **told)
    if case.asynchronous:
        event.current_stream_wait()
    return found | {"again": array(again), "later": array(later)}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    case, local = CASES[name], EXPERTS // 2
    batches = [batch(name, source) for source in range(2)]
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict), found
        come = [received(each["ids"], EXPERTS, rank, 2) for each in batches]
        used = len(come[0]) + len(come[1])
        numbers = np.concatenate([s * case.bound + np.array(t, int) for s, t in enumerate(come)]).astype(int)

        def of(key: str, come: Any = come) -> np.ndarray:
            return np.concatenate([each[key][t] for each, t in zip(batches, come, strict=True)])

        rows, ids, weights = of("rows"), of("ids"), of("weights")
        counts = np.array([(ids == rank * local + e).sum() for e in range(local)])
        padded = -(-counts // case.alignment) * case.alignment
        assert np.array_equal(found["stats"], 1 + counts)
        assert found["list"] == (padded.tolist() if case.waits else [])
        assert np.array_equal(found["from"], np.cumsum([len(t) for t in come]))
        assert np.array_equal(found["source"][:used, 0], numbers) and (found["source"][used:] == -1).all()
        here = (ids >= 0) & (ids // local == rank)
        if case.expand:
            begins = np.cumsum(padded) - padded
            assert np.array_equal(found["ends"], begins + counts) and found["ids"] is None
            if case.waits:
                assert len(found["rows"]) == padded.sum()
            for e in range(local):
                row, k = np.nonzero(ids == rank * local + e)
                ends = begins[e] + counts[e]
                block, pad = slice(begins[e], ends), slice(ends, begins[e] + padded[e])
                assert np.array_equal(found["source"][row, 2 + k], np.arange(begins[e], ends))
                assert np.array_equal(found["rows"][block], rows[row]) and not found["rows"][pad].any()
                assert np.array_equal(found["again"][block], rows[row] + 1)
                assert np.array_equal(found["later"][block], weights[row, k] + 1) and not found["later"][pad].any()
                if case.weighted:
                    assert np.array_equal(found["weights"][block], weights[row, k])
                if case.scales:
                    assert np.array_equal(found["scales"][block], of("scales")[row])
        else:
            assert np.array_equal(found["ends"], np.cumsum(padded))
            assert len(found["rows"]) == (used if case.waits else 2 * case.bound)
            assert np.array_equal(found["rows"][:used], rows) and np.array_equal(found["again"][:used], rows + 1)
            assert np.array_equal(found["ids"][:used], np.where(here, ids - rank * local, -1))
            assert (found["ids"][used:] == -1).all()
            assert np.array_equal(found["later"][:used], np.where(here, weights + 1, 0))
            if case.weighted:
                assert np.array_equal(found["weights"][:used], np.where(here, weights, 0))
            if case.scales:
                assert np.array_equal(found["scales"][:used], of("scales"))
        if case.scales:
            assert found["step"] == (1 if case.columns else case.scales[0])
        own = batches[rank]
        factor = np.where(own["ids"] >= 0, own["ids"] + 1, 0).sum(1, keepdims=True)
        bias = (np.arange(len(own["rows"])) % 7)[:, None]
        assert np.array_equal(found["out"], own["rows"] * factor + bias)
        if case.weighted:
            assert np.array_equal(found["sums"], np.where(own["ids"] >= 0, own["weights"], 0))
        else:
            assert found["weights"] is None and found["sums"] is None
        assert found["steps"] == 3


# name: (text of expanded.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": (
        "        return whole\n",
        '        return whole | {"tokens": whole["tokens"].roll(1, 0)}\n',
        "aligned",
    ),
    "weights 2 % off": ("choice_values=weights", "choice_values=1.02 * weights", "by source"),
    "ids off by one rank": (
        "view.route(ids, weights)",
        "view.route(torch.where(ids < 0, ids, (ids + 4) % 8), weights)",
        "by expert",
    ),
    "no bias": ("bias=bias", "bias=None", "by expert"),
    "no alignment": ("row_alignment=plan.alignment", "row_alignment=1", "aligned"),
}


def mutant(buffer: Any, name: str, device: Any) -> Any:
    """A case through an exchange whose source says something else."""
    from tokenway.compat.deep_ep import expanded, ranks

    old, new, case = MUTATIONS[name]
    with patch.object(ranks, "Expanded", mutated(expanded, old, new).Expanded):
        return attempt(counted, exchanged, buffer, case, device)


def wrong_alone(buffer: Any, device: Any) -> dict[str, Any]:
    """What ranks are told where rank 1 alone calls wrongly, and how long it took; after each, a right call."""
    import torch

    x, ids = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=device), torch.tensor([[0, 5, 2]] * 4, device=device)

    unsaid = type(buffer)(buffer.group)

    def pair(rows: Any = x, ids: Any = ids, less: int = 0, bias: Any = None, by: Any = buffer) -> float:
        came, _, _, handle, _ = by.dispatch(rows, ids, num_experts=EXPERTS, do_expand=True)
        return float(array(buffer.combine(came[less:], handle, bias=bias)[0]).sum())

    told: dict[str, Any] = {}
    wrong: dict[str, Any] = {
        "many": (x.repeat(5, 1), ids.repeat(5, 1)),
        "ids": (x, ids[:3]),
        "rows": (x, ids, 1),
        "three dimensions": (x[None], ids),
        "a number": (x.sum(), ids),
        "biases": (x, ids, 0, (x, x[:2, :3])),
        "bound": (x, ids, 0, None, unsaid),
    }
    for name, given in wrong.items():
        began = time.monotonic()
        told[name] = attempt(pair, *(given if buffer.rank_idx == 1 else ())), time.monotonic() - began
        told[f"{name}, then"] = attempt(pair)
    return told


def refused(buffer: Any, device: Any) -> dict[str, Any]:
    """What a rank is told of calls that are not served; nothing is sent. And numbers that it is told."""
    import torch

    x, ids = torch.ones(2, HIDDEN, device=device), torch.tensor([[0, 5, 2]] * 2, device=device)
    unsaid = type(buffer)(buffer.group)
    return {
        "engram": attempt(buffer.engram_fetch, ids),
        "gather": attempt(buffer.all_gather, x),
        "handle": attempt(buffer.combine, x, (1, 2)),
        "experts": attempt(buffer.dispatch, x, ids),
        "bound": attempt(unsaid.dispatch, x, ids, num_experts=EXPERTS),
        "numbers": [buffer.get_theoretical_num_sms(8, 3), buffer.get_logical_domain_size(), buffer.num_scaleout_ranks],
        "hint": buffer.get_buffer_size_hint(buffer.group, 8, 32, 3) > 0,
    }


def at_a_store(store: str) -> bool:
    """Barriers of ranks that have no process group: whether none has left before all were there."""
    import torch.distributed as dist

    from tokenway.compat.deep_ep import ElasticBuffer

    own, rank = dist.FileStore(f"{store} of a barrier", 2), dist.get_rank()
    alone = types.SimpleNamespace(rank=lambda: rank, size=lambda: 2, store=own)
    buffer, came = ElasticBuffer(alone), []
    for turn in range(2):
        own.add(f"here {turn}", 1)
        buffer.barrier()
        came.append(own.add(f"here {turn}", 0))
        buffer.barrier()
    return came == [2, 2]


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    from tokenway.compat.deep_ep import ElasticBuffer

    _, device = begin(store, 2)
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=10, explicitly_destroy=True)
    found: dict[str, Any] = {name: attempt(counted, exchanged, buffer, name, device) for name in CASES}
    found["wrong"] = wrong_alone(buffer, device) if device.type == "cpu" else {}  # elsewhere peers learn late
    found["refused"] = refused(buffer, device)
    for name in MUTATIONS:
        found[name] = mutant(buffer, name, device)
    buffer.barrier()
    found["barrier"] = attempt(at_a_store, store)
    buffer.destroy()
    end()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("elastic") / "store"), timeout=4 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(ran, case) -> None:
    """As NumPy has them: rows, scales, where they came from, sums, and a dispatch by the same routing."""
    judge(case, [found[case] for found in ran])


def test_a_rank_that_calls_wrongly(ran) -> None:
    """It is told, as its peers are at once; the next call is right."""
    sentences = {
        "many": "^x has 20 rows; it must have at most num_max_tokens_per_rank, 10",
        "ids": r"^topk_idx has shape \[3, 3\]; it must be \[4, 3\]",
        "three dimensions": r"^x has shape \[1, 4, 32\]",
        "a number": r"^x has shape \[\]",
        "biases": r"^bias has shapes \[4, 32\] and \[2, 3\]",
        "bound": "^num_max_tokens_per_rank is 0; it must be at least 1",
        "rows": r"^x is bfloat16 \[\d+, 32\]; it must be bfloat16 \[\d+, 32\], as received",
    }
    judge_wrong_calls(ran, sentences, 4 * 3 * HIDDEN)


def test_what_is_not_served(ran) -> None:
    for told in (found["refused"] for found in ran):
        said(told["engram"], "Unsupported", "^engram_fetch is not served")
        said(told["gather"], "Unsupported", "^all_gather is not served.*Group.all_gatherv")
        said(told["handle"], "InvalidArgument", "^handle is of type tuple; it must come from ElasticBuffer.dispatch")
        said(told["experts"], "InvalidArgument", "num_experts must be given")
        said(told["bound"], "InvalidArgument", "^num_max_tokens_per_rank is 0; it must be at least 1")
        assert told["numbers"] == [0, (1, 2), 1] and told["hint"]


def test_a_barrier_without_a_process_group(ran) -> None:
    assert all(found["barrier"] is True for found in ran), [found["barrier"] for found in ran]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An exchange that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], partial(judge, MUTATIONS[mutation][2]))
