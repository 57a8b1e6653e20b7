"""Code that calls DeepEP's low-latency mode, over Tokenway: what comes by expert and what returns, against NumPy."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from deep_ep_ranks import array, attempt, begin, counted, end, routed
from frameworks import assert_caught, mutated
from harness import AT_ONCE, HANGS, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, HIDDEN = 8, 1024


class Case(NamedTuple):
    tokens: tuple[int, int]
    bound: int = 8
    top_k: int = 3
    fp8: bool = False
    round_scale: bool = False
    packed: bool = False
    hook: bool = False
    asynchronous: bool = False
    zero_copy: bool = False


CASES = {
    "bfloat16": Case((5, 3)),
    "fp8": Case((5, 3), fp8=True),
    "powers of two": Case((8, 1), fp8=True, round_scale=True),
    "packed": Case((6, 7), fp8=True, round_scale=True, packed=True),
    "hooks": Case((5, 8), fp8=True, hook=True),
    "hooks, bfloat16": Case((5, 8), hook=True),
    "asynchronous": Case((5, 8), fp8=True, asynchronous=True),
    "zero copy": Case((5, 8), zero_copy=True),
    "nothing for rank 0": Case((0, 4), fp8=True),
    "none at all": Case((0, 0)),
    "top 5": Case((4, 7), top_k=5),
    "an odd bound": Case((3, 2), bound=3, fp8=True),
    "a larger bound": Case((300, 2), bound=300, fp8=True),
    "smaller again": Case((1, 2), bound=2, fp8=True),
}


def batch(name: str, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, ids, weights) of a rank: rows that fp8 and bfloat16 hold exactly, as each block's largest is 4."""
    case, rng = CASES[name], np.random.default_rng([rank, len(name)])
    count = case.tokens[rank]
    rows = rng.choice([-4, -2, -1, 0, 1, 2, 4], (count, HIDDEN)).astype(np.float32)
    rows[:, ::128] = 4
    ids = routed(count, EXPERTS, case.top_k, [rank, 5])
    return rows, ids, rng.integers(1, 5, (count, case.top_k)).astype(np.float32)


def finish(event: Any, hook: Any, case: Case) -> None:
    """What a framework does before it reads what a call has returned."""
    assert (hook is None) != case.hook and (event.event is None) != case.asynchronous
    if case.hook:
        hook()
    if case.asynchronous:
        event.current_stream_wait()


def exchanged(buffer: Any, name: str, device: Any) -> dict[str, Any]:
    """What a rank receives, and gets back: expert e multiplies by e + 1."""
    import torch

    case, rank = CASES[name], buffer.rank
    rows, ids, weights = (torch.from_numpy(x).to(device) for x in batch(name, rank))
    stats = torch.ones(EXPERTS // 2, dtype=torch.int32, device=device)
    told = {"async_finish": case.asynchronous, "return_recv_hook": case.hook}
    fp8 = {"use_fp8": case.fp8, "round_scale": case.round_scale, "use_ue8m0": case.packed}
    for _ in range(2):  # the first is given up
        came, counts, handle, event, hook = buffer.low_latency_dispatch(
            rows.bfloat16(),
            ids,
            case.bound,
            EXPERTS,
            cumulative_local_expert_recv_stats=stats,
            **fp8,
            **told,
        )
        finish(event, hook, case)
    source, ranges, *rest = handle
    assert rest == [case.bound, HIDDEN, EXPERTS]
    values, scales = came if case.fp8 else (came, None)
    whole = values.float() if scales is None else tw.dequantize_fp8(values, scales.contiguous()).float()
    found: dict[str, Any] = {"rows": array(whole), "counts": array(counts), "stats": array(stats)}
    found["form"] = None if scales is None else (list(scales.shape), scales.stride()[1], str(scales.dtype)[6:])
    found |= {"source": array(source), "ranges": array(ranges)}
    factor = torch.arange(1, EXPERTS // 2 + 1, device=device).view(-1, 1, 1) + rank * (EXPERTS // 2)
    made = (whole * factor).bfloat16()
    values.set_(torch.empty(0, dtype=values.dtype, device=device))  # as frameworks free them, which own them
    out = torch.empty(len(rows), HIDDEN, dtype=torch.bfloat16, device=device)
    if case.zero_copy:
        buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = made
        made = torch.full_like(made, float("nan"))
    combined, event, hook = buffer.low_latency_combine(
        made, ids, weights, handle, zero_copy=case.zero_copy, out=out, **told
    )
    finish(event, hook, case)
    assert combined is out
    found["out"] = array(out)
    # Again, by other weights.
    again, event, hook = buffer.low_latency_combine(made, ids, weights + 1, handle, zero_copy=case.zero_copy, **told)
    finish(event, hook, case)
    return found | {"again": array(again)}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    local, places = EXPERTS // 2, 2 * case.bound
    batches = [batch(name, source) for source in range(2)]
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict), found
        assert found["rows"].shape == (local, places, HIDDEN)
        for e in range(local):
            come = [np.flatnonzero((ids == rank * local + e).any(1)) for _, ids, _ in batches]
            used = sum(map(len, come))
            wanted = np.concatenate([rows[t] for (rows, *_), t in zip(batches, come, strict=True)])
            assert found["counts"][e] == used and found["stats"][e] == 1 + 2 * used
            assert np.array_equal(found["rows"][e, :used], wanted)
            assert np.array_equal(found["source"][e, :used], np.concatenate(come))
            begins = [0, len(come[0])]
            assert [int(x) for x in found["ranges"][e]] == [(begins[s] << 32) + len(come[s]) for s in range(2)]
        if case.fp8:
            columns, dtype = (HIDDEN // 512, "int32") if case.packed else (HIDDEN // 128, "float32")
            assert found["form"] == ([local, places, columns], 1, dtype)
        rows, ids, weights = batches[rank]
        for key, more in (("out", 0), ("again", 1)):
            factor = np.where(ids >= 0, (ids + 1) * (weights + more), 0).sum(1, keepdims=True)
            assert np.allclose(found[key], rows * factor, rtol=2**-8, atol=0)
        assert found["steps"] == 4


# name: (text of low_latency.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": (
        "rows, beside = x, {TOKEN:",
        "rows, beside = x.roll(1, 0), {TOKEN:",
        "bfloat16",
    ),
    "weights 2 % off": ('"weights": weights,', '"weights": weights * 1.02,', "bfloat16"),
    "ids off by one rank": ("view.route(ids,", "view.route(torch.where(ids < 0, ids, (ids + 4) % 8),", "fp8"),
    "scales off by one": (
        "rows, beside[SCALES] = tw.quantize_fp8(x, power_of_two, packed=packed)",
        "rows, beside[SCALES] = tw.quantize_fp8(x * (1 + torch.arange(len(x), device=x.device).view(-1, 1) % 2), True)",
        "fp8",
    ),
    "numbers of tokens": ("= torch.arange(len(told), device=device)", "= torch.arange(1, len(told) + 1)", "bfloat16"),
    "sources": ("told[:, 1] = view.rank", "told[:, 1] = 1 - view.rank", "bfloat16"),
}


def mutant(buffer: Any, name: str, device: Any) -> Any:
    """A case through an exchange whose source says something else."""
    from tokenway.compat.deep_ep import ranks
    from tokenway.integrations import low_latency

    old, new, case = MUTATIONS[name]
    with patch.object(ranks, "LowLatency", mutated(low_latency, old, new).LowLatency):
        return attempt(counted, exchanged, buffer, case, device)


def two_under_way(buffer: Any, device: Any) -> Any:
    """Two batches in turns, as frameworks overlap them: dispatches, then combines, received in the order of sending."""
    import torch

    given = [[torch.from_numpy(x).to(device) for x in batch(name, buffer.rank)] for name in ("hooks", "fp8")]
    stats = torch.zeros(2, EXPERTS // 2, dtype=torch.int32, device=device)
    sent = [
        buffer.low_latency_dispatch(rows.bfloat16(), ids, 8, EXPERTS, each, use_fp8=False, return_recv_hook=True)
        for (rows, ids, _), each in zip(given, stats, strict=True)
    ]
    outs = []
    for came, _, handle, _, hook in sent:
        hook()
        hook()  # once is enough, for statistics too
        outs.append((came, handle))
    back = []
    for (came, handle), (_, ids, weights) in zip(outs, given, strict=True):
        back.append(buffer.low_latency_combine(came, ids, weights, handle, return_recv_hook=True))
    for *_, hook in back:
        hook()
    found = [np.array_equal(array(each), array(counts)) for each, (_, counts, *_) in zip(stats, sent, strict=True)]
    for (rows, ids, weights), (out, *_) in zip(given, back, strict=True):
        factor = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        found.append(np.allclose(array(out), array(rows * factor), rtol=2**-8))
    return found


def wrong_alone(buffer: Any, device: Any) -> dict[str, Any]:
    """What ranks are told where rank 1 alone calls wrongly, and how long it took; after each, a right call."""
    import torch

    rank = buffer.rank
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=device)
    ids, weights = torch.tensor([[0, 5, 2]] * 4, device=device), torch.ones(4, 3, device=device)

    def dispatch(x: Any = x, ids: Any = ids) -> Any:
        return buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_fp8=False)

    def pair(wrong: bool = False, **asked: Any) -> float:
        came, _, handle, *_ = dispatch()
        rows = came[:, 1:] if wrong else came
        return float(array(buffer.low_latency_combine(rows, ids, weights, handle, **asked)[0]).sum())

    told: dict[str, Any] = {}
    wrong: dict[str, Any] = {
        "dtype": lambda: dispatch(x.float()),
        "many": lambda: dispatch(x.repeat(3, 1), ids.repeat(3, 1)),
        "ids": lambda: dispatch(ids=ids[:3]),
        "a number": lambda: dispatch(x.sum()),
        "an argument": lambda: buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_nvfp4=True),
        "an argument of the combine": lambda: pair(use_logfmt=True),
        "rows": lambda: pair(True),
    }
    for name, call in wrong.items():
        began = time.monotonic()
        right = pair if name in ("rows", "an argument of the combine") else dispatch
        told[name] = attempt(call if rank == 1 else right), time.monotonic() - began
        told[f"{name}, then"] = attempt(pair)
    return told


def numbers_kept() -> list[int]:
    """How many numbers of tokens there were, before and after a group had grown."""
    from tokenway.compat.deep_ep import ranks
    from tokenway.integrations import low_latency

    exchanges = (each for known in ranks._known.values() for each in known._exchanges.values())
    return [len(x) for each in exchanges if type(each) is low_latency.LowLatency for x in each._told if each.top_k == 3]


def failing_once() -> list[str]:
    """What a hook does whose receiving fails at first."""
    from tokenway.integrations.low_latency import Once

    told, errors = [], [tw.InvalidUsage("another call"), tw.InvalidUsage("and another")]

    def receive() -> None:
        told.append("receive")
        if errors:
            raise errors.pop()

    hook = Once(receive, lambda: told.append("count"))
    for _ in range(4):
        told.append(str(attempt(hook)))
    return told


def refused(buffer: Any, device: Any) -> dict[str, Any]:
    """What a rank is told of arguments that are not served; nothing is sent."""
    import torch

    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device)
    ids, weights = torch.tensor([[0, 5, 2]] * 2, device=device), torch.ones(2, 3, device=device)
    stats = torch.zeros(2, 2, dtype=torch.int64)
    status = torch.ones(2, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    buffer.low_latency_clean_mask_buffer()
    buffer.clean_low_latency_buffer(8, HIDDEN, EXPERTS)
    return {
        "stats": attempt(buffer.low_latency_dispatch, x, ids, 8, EXPERTS, dispatch_wait_recv_cost_stats=stats),
        "nvfp4": attempt(buffer.low_latency_dispatch, x, ids, 8, EXPERTS, use_nvfp4=True),
        "logfmt": attempt(buffer.low_latency_combine, x, ids, weights, (), use_logfmt=True),
        "handle": attempt(buffer.low_latency_combine, x, ids, weights, (1, 2)),
        "masks": status.tolist(),
        "hint": type(buffer).get_low_latency_rdma_size_hint(8, HIDDEN, 2, EXPERTS) > 0,
    }


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    from tokenway.compat.deep_ep import Buffer

    _, device = begin(store, 2)
    buffer = Buffer(dist.group.WORLD, num_rdma_bytes=1 << 20, low_latency_mode=True, explicitly_destroy=True)
    found: dict[str, Any] = {name: attempt(counted, exchanged, buffer, name, device) for name in CASES}
    found["numbers"] = numbers_kept()
    found["two"] = attempt(two_under_way, buffer, device)
    found["wrong"] = wrong_alone(buffer, device) if device.type == "cpu" else {}  # elsewhere peers learn late
    found["refused"] = refused(buffer, device)
    for name in MUTATIONS:
        found[name] = mutant(buffer, name, device)
    buffer.destroy()
    end()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("low") / "store"), timeout=4 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(ran, case) -> None:
    """As NumPy has them: rows by expert, their sources, scales by column, and sums by two sets of weights."""
    judge(case, [found[case] for found in ran])


def test_numbers_of_graphs_are_kept(ran) -> None:
    """A graph reads those that there were when it was captured, though the group has grown since."""
    assert all(found["numbers"] == [256, 512] for found in ran), [found["numbers"] for found in ran]


def test_a_hook_that_fails(torch: Any) -> None:
    """It fails as long as its receiving does, and counts once."""
    failed = [str(("InvalidUsage", told)) for told in ("and another", "another call")]
    assert failing_once() == ["receive", failed[0], "receive", failed[1], "receive", "count", "None", "None"]


def test_two_under_way(ran) -> None:
    assert all(found["two"] == [True] * 4 for found in ran), [found["two"] for found in ran]


def test_a_rank_that_calls_wrongly(ran) -> None:
    """It is told, as its peers are at once; the next call is right."""
    sentences = {
        "dtype": r"^x is float32 \[4, 1024\]; it must be bfloat16",
        "many": "^x has 12 rows; it must have at most num_max_dispatch_tokens_per_rank, 8",
        "ids": r"^topk_idx is \[3, 3\]; it must be \[4, 3\]",
        "a number": r"^x is bfloat16 \[\]; it must be bfloat16",
        "an argument": "^use_nvfp4 is not served",
        "an argument of the combine": "^use_logfmt is not served",
        "rows": r"^x is bfloat16 \[4, 15, 1024\]; it must be bfloat16 \[4, 16, 1024\]",
    }
    for rank, found in enumerate(ran):
        for name, told in found["wrong"].items():
            if name.endswith("then"):
                assert told == 4 * 3 * HIDDEN, (name, told)
                continue
            kind = "Unsupported" if "argument" in name else "InvalidArgument"
            said(told[0], *((kind, sentences[name]) if rank == 1 else ("PeerRefused", "rank 1")))
            assert told[1] < AT_ONCE


def test_what_is_not_served(ran) -> None:
    for told in (found["refused"] for found in ran):
        said(told["stats"], "Unsupported", "^dispatch_wait_recv_cost_stats is not served.*leave it out")
        said(told["nvfp4"], "Unsupported", "^use_nvfp4 is not served")
        said(told["logfmt"], "Unsupported", "^use_logfmt is not served")
        said(told["handle"], "InvalidArgument", "^handle is of type tuple; it must come from low_latency_dispatch")
        assert told["masks"] == [0, 0] and told["hint"]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An exchange that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], partial(judge, MUTATIONS[mutation][2]))
