"""Code that calls DeepEP's `EPBuffer`, over Tokenway: calls of one part and of two, and what it does not do."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from deep_ep_ranks import array, attempt, begin, counted, end, judge_wrong_calls, routed
from frameworks import assert_caught, mutated
from harness import HANGS, said
from test_deep_ep_elastic import CASES, EXPERTS, HIDDEN, MUTATIONS, exchanged, judge

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LOCAL = EXPERTS // 2


class Calls:
    """An EPBuffer by the calls that `exchanged` makes of an ElasticBuffer: in one part, or in two."""

    def __init__(self, buffer: Any, deferred: bool):
        self._buffer, self._deferred = buffer, deferred
        self.rank_idx, self.capture = buffer.rank_idx, buffer.capture

    def _told(self, told: dict[str, Any]) -> dict[str, Any]:
        told = {name: value for name, value in told.items() if name != "previous_event_before_epilogue"}
        return told | ({"async_with_compute_stream": True, "defer_epilogue": True} if self._deferred else {})

    def dispatch(self, x: Any, ids: Any, weights: Any, **told: Any) -> Any:
        expand = told["handle"].do_expand if "handle" in told else told["do_expand"]
        told = self._told(told) | {"do_expand": expand, "do_zero_padding": expand}
        found = self._buffer.dispatch(x, ids, weights, **told)
        return (*found.wait(), found) if self._deferred else found

    def combine(self, x: Any, handle: Any, weights: Any, bias: Any, **told: Any) -> Any:
        found = self._buffer.combine(x, handle, weights, bias, **self._told(told))
        return (*found.wait(), found) if self._deferred else found


# ------------------------------------------------------------------------------------- experts of one's own, by expert

# name: (tokens of each rank, top_k, which experts: None: any, some -1; else all tokens the same, or -1)
ROUTINGS: dict[str, tuple[tuple[int, int], int, Any]] = {
    "any": ((6, 9), 3, None),
    "one expert for all": ((7, 5), 1, [5]),
    "one rank for all": ((4, 10), 4, [4, 5, 6, 7]),
    "top 7": ((3, 8), 7, None),
    "no expert for any": ((4, 2), 3, [-1, -1, -1]),
    "nothing of rank 1": ((8, 0), 3, None),
    "nothing at all": ((0, 0), 3, None),
    "more than before": ((40, 17), 3, None),
    "a token each": ((1, 1), 3, None),
}


def inputs(name: str, rank: int) -> dict[str, np.ndarray]:
    """Of a rank: whole numbers so small that sums in bfloat16 are exact; each expert answers each token otherwise."""
    tokens, top_k, chosen = ROUTINGS[name]
    count, rng = tokens[rank], np.random.default_rng([rank, len(name), 3])
    ids = routed(count, EXPERTS, top_k, [rank, 9]) if chosen is None else np.tile(np.int64(chosen), (count, 1))
    rows = rng.integers(-2, 3, (count, HIDDEN)).astype(np.float32)
    rows[:, 0] = 1  # of no token are all columns 0
    return {"ids": ids, "rows": rows, "weights": rng.integers(1, 4, ids.shape).astype(np.float32)}


def trained(buffer: Any, name: str, device: Any) -> dict[str, Any]:
    """A layer forward and backward, in the calls that a trainer makes: expert e multiplies by e + 1."""
    import torch

    mine = {key: torch.from_numpy(x).to(device) for key, x in inputs(name, buffer.rank_idx).items()}
    rows = mine["rows"].bfloat16()
    told: dict[str, Any] = {"async_with_compute_stream": True, "num_sms": buffer.get_theoretical_num_sms(EXPERTS, 3)}
    by_expert: dict[str, Any] = {"do_expand": True, "do_zero_padding": True, "use_tma_aligned_col_major_sf": True}
    stats = by_expert["cumulative_local_expert_recv_stats"] = torch.zeros(LOCAL, dtype=torch.int32, device=device)
    event = buffer.dispatch(
        rows,
        topk_idx=mine["ids"],
        topk_weights=mine["weights"],
        num_experts=EXPERTS,
        num_max_tokens_per_rank=ROUTINGS[name][0][0] + 24,
        expert_alignment=4,
        previous_event=buffer.capture(),
        allocate_on_comm_stream=True,
        defer_epilogue=True,
        **told,
        **by_expert,
    )
    came, none, weights, handle = event.wait()
    assert none is None and handle.topk_idx is mine["ids"] and weights.shape == came.shape[:1]
    mine["ids"].fill_(-1)  # they are the caller's again
    places = torch.arange(len(came), device=device)
    expert = torch.searchsorted(handle.psum_num_recv_tokens_per_expert, places, right=True).clamp(max=LOCAL - 1)
    factor = (expert + 1 + buffer.rank_idx * LOCAL).view(-1, 1)
    shared = torch.full_like(rows, 5)
    event = buffer.combine(
        (came * factor * weights.view(-1, 1)).bfloat16(), handle, bias=shared, defer_epilogue=True, **told
    )
    shared.copy_(rows)  # written to while the call is under way
    out, _ = event.wait()
    grad = rows + 1
    back, _, nothing, same, event = buffer.dispatch(grad, handle=handle, **told, **by_expert)
    event.wait()
    assert nothing is None and same is handle
    of_weights = (came.float() * factor * back.float()).sum(1)
    into = (back * factor * weights.view(-1, 1)).bfloat16()
    of_rows, of_choices, event = buffer.combine(into, handle, of_weights, **told)
    event.wait()
    found = {"out": out, "grad": of_rows, "grad of weights": of_choices, "stats": stats}
    return {key: array(x) for key, x in found.items()} | {"list": handle.num_recv_tokens_per_expert_list}


def judge_trained(name: str, ranks: list[dict[str, Any]]) -> None:
    """Against one rank that has all experts."""
    each = [inputs(name, rank) for rank in range(2)]
    for rank, (found, mine) in enumerate(zip(ranks, each, strict=True)):
        assert isinstance(found, dict), found
        rows, used = mine["rows"], mine["ids"] >= 0
        factor = np.where(used, mine["ids"] + 1, 0).astype(np.float32)
        scale = (factor * mine["weights"]).sum(1, keepdims=True)
        assert np.array_equal(found["out"], rows * scale + rows)
        assert np.array_equal(found["grad"], (rows + 1) * scale)
        assert np.array_equal(found["grad of weights"], factor * (rows * (rows + 1)).sum(1, keepdims=True))
        ids = np.concatenate([x["ids"].ravel() for x in each])
        counts = [int((ids == rank * LOCAL + e).sum()) for e in range(LOCAL)]
        assert found["list"] == [-(-count // 4) * 4 for count in counts]
        assert found["stats"].tolist() == counts  # of the first dispatch alone
        assert found["steps"] == 4


# --------------------------------------------------------------------------------------------------- two calls at once


def in_flight(buffer: Any, device: Any) -> dict[str, Any]:
    """Two dispatches that are waited for in the other order, with host waits and without; then two combines, of which
    the one with a bias goes last, and is in the way of a third call."""
    import torch

    rows = [torch.full((n + buffer.rank_idx, HIDDEN), n, dtype=torch.bfloat16, device=device) for n in (2, 5)]
    ids = [torch.tensor([[0, 6]] * len(rows[0]), device=device), torch.tensor([[7, 3]] * len(rows[1]), device=device)]
    told = {"async_with_compute_stream": True, "defer_epilogue": True}
    begun = [
        buffer.dispatch(x, chosen, num_experts=EXPERTS, do_cpu_sync=waits, **told)
        for x, chosen, waits in zip(rows, ids, (True, False), strict=True)
    ]
    (second, _, _, other), (first, chosen, weights, handle) = begun[1].wait(), begun[0].wait()
    found: dict[str, Any] = {"first": array(first), "ids": array(chosen), "weights": weights}
    found["second"] = array(second[: int(other.psum_num_recv_tokens_per_scaleup_rank[-1])])
    found["expanded"] = [each.num_expanded_tokens for each in (handle, other)]
    biases = torch.zeros_like(rows[1]), torch.zeros_like(rows[1])
    begun = [buffer.combine(first, handle, **told), buffer.combine(second, other, bias=biases, **told)]
    found["in the way"] = attempt(buffer.combine, first, handle)
    biases[0].fill_(3), biases[1].fill_(4)
    (biased, _), (plain, none) = begun[1].wait(), begun[0].wait()
    found["again"] = begun[1].wait()
    return found | {"plain": array(plain), "biased": array(biased), "none": none}


# ------------------------------------------------------------------------------------------------------------ refusals


def wrong_alone(buffer: Any, device: Any) -> dict[str, Any]:
    """What ranks are told where rank 1 alone calls wrongly, and how long it took; after each, a right call."""
    import torch

    x, ids = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=device), torch.tensor([[0, 5, 2]] * 4, device=device)

    def first(**other: Any) -> Any:
        told = {"topk_idx": ids, "num_experts": EXPERTS, "do_expand": True} | other
        return buffer.dispatch(told.pop("x", x), **told)

    def pair(dispatching: Any = None, cached: Any = None, combining: Any = None) -> float:
        came, _, _, handle, _ = first(**(dispatching or {}))
        buffer.dispatch(x, handle=handle, **({"do_expand": True} | (cached or {})))
        out = buffer.combine(came, handle, **(combining or {}))
        return float(array(out[0]).sum())

    wrong: dict[str, tuple[Any, ...]] = {
        "copy": ({"do_handle_copy": True},),
        "deferred": ({"defer_epilogue": True},),
        "padding": ({"do_expand": False, "do_zero_padding": True},),
        "many": ({"x": x.repeat(5, 1), "topk_idx": ids.repeat(5, 1)},),
        "ids": ({"topk_idx": ids[:3]},),
        "dtype of ids": ({"topk_idx": ids.float()},),
        "ids and handle": (None, {"topk_idx": ids}),
        "wait and handle": (None, {"do_cpu_sync": True}),
        "by source": (None, {"do_expand": False}),
        "experts": (None, {"num_experts": 4}),
        "bound": (None, {"num_max_tokens_per_rank": 9}),
        "alignment": (None, {"expert_alignment": 8}),
        "deferred combine": (None, None, {"defer_epilogue": True}),
        "deferred, with a bias": (None, None, {"defer_epilogue": True, "bias": x}),
        "bias": (None, None, {"bias": x[:2]}),
        "weights": (None, None, {"topk_weights": x[:1, :1].float()}),
    }
    told: dict[str, Any] = {}
    for name, given in wrong.items():
        began = time.monotonic()
        told[name] = attempt(pair, *(given if buffer.rank_idx == 1 else ())), time.monotonic() - began
        told[f"{name}, then"] = attempt(pair)

    def later(less: int) -> Any:
        came, _, _, handle, _ = first()
        event = buffer.combine(came[less:], handle, bias=x, async_with_compute_stream=True, defer_epilogue=True)
        both = attempt(event.wait), attempt(event.wait)
        assert both[0] == both[1]  # an error is told as often as it is asked for
        return both[0]

    began = time.monotonic()
    told["rows"] = attempt(later, buffer.rank_idx), time.monotonic() - began
    told["rows, then"] = attempt(pair)
    return told


SENTENCES = {
    "copy": "^do_handle_copy is True; it must be False",
    "deferred": "^defer_epilogue is True; async_with_compute_stream must be True",
    "padding": "^do_zero_padding is True; do_expand must be True",
    "many": "^x has 20 rows; it must have at most num_max_tokens_per_rank, 10",
    "ids": r"^topk_idx has shape \[3, 3\]; it must be \[4, 3\]",
    "dtype of ids": "int64",
    "ids and handle": "^topk_idx is a tensor; it must be None with a handle",
    "wait and handle": "^do_cpu_sync is True; it must be None or False with a handle",
    "by source": "^do_expand is False; it must be True, as of the handle",
    "experts": "^num_experts is 4; it must be None or 8, as of the handle",
    "bound": "^num_max_tokens_per_rank is 9; it must be None or 10",
    "alignment": "^expert_alignment is 8; it must be None or 1",
    "deferred combine": "^defer_epilogue is True; async_with_compute_stream must be True",
    "deferred, with a bias": "^defer_epilogue is True; async_with_compute_stream must be True",
    "bias": "^bias",
    "rows": r"^x is bfloat16 \[\d+, 32\]; it must be bfloat16 \[\d+, 32\], as received",
    "weights": r"^topk_weights is float32 \[1, 1\]",
}


def refused(buffer: Any) -> dict[str, Any]:
    """What is told of what is not served, and of sizes; nothing is sent. And numbers."""
    kind, group = type(buffer), buffer.group
    return {
        "weights": attempt(buffer.lb_prefetch_weights, None, None, None),
        "gradients": attempt(buffer.lb_reduce_grads, None, None, None),
        "region": attempt(kind, group, 1 << 21, lb_allocation_plan_or_num_bytes=1 << 21),
        "memory": attempt(buffer.print_memory_usage),
        "no size": attempt(kind, group),
        "no hidden": attempt(kind.get_buffer_size_hint, group, 8, 0),
        "handle": attempt(buffer.combine, _row(), (1, 2)),
        "no ids": attempt(buffer.dispatch, _row()),
        "hints": [kind.get_buffer_size_hint(group, n, 7168, num_topk=8, use_fp8_dispatch=True) for n in (128, 4096)],
        "bytes": [buffer.num_bytes, kind(group, num_bytes=5 << 21).num_bytes],
        "numbers": [buffer.get_theoretical_num_sms(8, 3), buffer.get_logical_domain_size(), buffer.num_scaleout_ranks],
    }


def _row() -> Any:
    import torch

    return torch.ones(2, HIDDEN)


def installed(buffer: Any) -> dict[str, Any]:
    """What stands in deep_ep."""
    from tokenway.compat import deep_ep as ours

    ours.install()
    import deep_ep
    from deep_ep import EPBuffer, EPHandle, EventOverlap, comm
    from deep_ep.buffers.ep import EPBuffer as same

    found: dict[str, Any] = {"same": EPBuffer is same is type(buffer) and EPHandle is ours.EPHandle and EventOverlap}
    found["numbers"] = deep_ep.get_num_allocation_alignment(), deep_ep.get_num_tma_alignment()
    found["numbers"] += (deep_ep.get_num_rdma_alignment(),)
    found["domains"] = comm.get_physical_domain_size(buffer.group), deep_ep.get_logical_domain_size(buffer)
    comm.barrier(buffer, with_cpu_sync=True)
    deep_ep.destroy_all_managed_nccl_comm()
    found["missing"] = attempt(lambda: deep_ep.BucketBuffer)
    ours.uninstall()
    return found


# ----------------------------------------------------------------------------------------------------------- mutations

# name: (module, its text, what a later hand may make of it, the case of CASES or of ROUTINGS whose test must fail)
OWN_MUTATIONS = {
    "a bias that is read too early": ("ep", "defer_epilogue and biased", "False", "any"),
    "results in another order": ("ep", "return came, ids, weights, made", "return weights, ids, came, made", "any"),
    "rows by source instead": ("elastic", "Plan(None, asked.expand,", "Plan(None, False,", "aligned"),
    "weights of other ranks' experts": ("elastic", "weights.masked_fill_(ids < 0, 0)", "pass", "by source"),
    "counts twice": ("elastic", "stats += handle", "stats += 2 * handle", "by expert"),
    "the default bound": ("elastic", "asked.bound or self", "self", "a larger bound"),
}


def mutant(buffer: Any, name: str, device: Any) -> Any:
    """A case through a buffer whose source says something else."""
    from tokenway.compat.deep_ep import elastic, ep, expanded, ranks

    if name in MUTATIONS:
        old, new, case = MUTATIONS[name]
        with patch.object(ranks, "Expanded", mutated(expanded, old, new).Expanded):
            return attempt(counted, exchanged, Calls(buffer, True), case, device)
    module, old, new, case = OWN_MUTATIONS[name]
    if module == "ep":
        other = mutated(ep, old, new).EPBuffer(buffer.group, num_max_tokens_per_rank=10, hidden=HIDDEN)
        return attempt(counted, trained, other, case, device)
    changed = mutated(elastic, old, new).Bounded
    with patch.multiple(elastic.Bounded, _dispatch=changed._dispatch, _combine=changed._combine):
        return attempt(counted, exchanged, Calls(buffer, False), case, device)


def leave(buffer: Any, device: Any) -> None:
    """Makes a combine that waits for its second part, which never comes."""
    import torch

    rows, ids = torch.ones(4, HIDDEN, device=device), torch.tensor([[0, 3, 5]] * 4, device=device)
    came, _, _, handle, _ = buffer.dispatch(rows, topk_idx=ids, num_experts=EXPERTS)
    deferred = {"async_with_compute_stream": True, "defer_epilogue": True}
    buffer.combine(came, handle, bias=rows, **deferred)
    with pytest.raises(tw.InvalidUsage, match="is under way"):
        buffer.dispatch(rows, topk_idx=ids, num_experts=EXPERTS)


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    from tokenway.compat.deep_ep import EPBuffer

    _, device = begin(store, 2)
    buffer = EPBuffer(dist.group.WORLD, num_max_tokens_per_rank=10, hidden=HIDDEN, num_topk=3, explicitly_destroy=True)
    found: dict[str, Any] = {"installed": attempt(installed, buffer), "refused": refused(buffer)}
    for name in CASES:
        for deferred in (False, True):
            found[name, deferred] = attempt(counted, exchanged, Calls(buffer, deferred), name, device)
    for name in ROUTINGS:
        found[name] = attempt(counted, trained, buffer, name, device)
    found["in flight"] = attempt(counted, in_flight, buffer, device)
    found["wrong"] = wrong_alone(buffer, device) if device.type == "cpu" else {}  # elsewhere peers learn late
    for name in MUTATIONS | OWN_MUTATIONS:
        found[f"mutation: {name}"] = mutant(buffer, name, device)
    buffer.barrier()
    leave(buffer, device)
    buffer.destroy()
    found["after"] = attempt(counted, trained, buffer, "any", device)
    buffer.destroy()
    end()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("epbuffer") / "store"), timeout=4 * HANGS)


@pytest.mark.parametrize("deferred", [False, True], ids=["in one part", "in two"])
@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(ran, case, deferred) -> None:
    """As NumPy has them, and as of ElasticBuffer."""
    judge(case, [found[case, deferred] for found in ran])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_layer_forward_and_backward(ran, routing) -> None:
    """Of any sizes, which change from call to call: bit by bit that of one rank with all experts."""
    judge_trained(routing, [found[routing] for found in ran])


def test_two_calls_in_flight(ran) -> None:
    """In whatever order they are waited for; and what a combine with a bias says to a call in its way."""
    for rank, found in enumerate(each["in flight"] for each in ran):
        assert isinstance(found, dict), found
        mine, other = 2 + rank, 5 + rank
        assert found["first"].tolist() == [[2] * HIDDEN] * 5 and found["second"].tolist() == [[5] * HIDDEN] * 11
        assert found["ids"].tolist() == [[0, -1] if rank == 0 else [-1, 2]] * 5
        assert found["plain"].tolist() == [[4] * HIDDEN] * mine
        assert found["biased"].tolist() == [[17] * HIDDEN] * other
        said(found["in the way"], "InvalidUsage", "^a combine with defer_epilogue and a bias.*wait for its event first")
        assert found["expanded"] == [5, 2 * 10 * 2]  # what comes, and what can
        assert found["none"] is found["again"] is found["weights"] is None
        assert found["steps"] == 4


def test_a_rank_that_calls_wrongly(ran) -> None:
    """It is told, as its peers are at once; the next calls are right."""
    judge_wrong_calls(ran, SENTENCES, 4 * 3 * HIDDEN)


def test_what_is_not_served(ran) -> None:
    for told in (found["refused"] for found in ran):
        for name in ("weights", "gradients", "region"):
            said(told[name], "Unsupported", "^lb_.* is not served.*tokenway.Placement")
        said(told["memory"], "Unsupported", "Group.window_bytes")
        said(told["no size"], "InvalidArgument", "^num_max_tokens_per_rank is 0; it must be at least 1")
        said(told["no hidden"], "InvalidArgument", "^hidden is 0; it must be at least 1")
        said(told["handle"], "InvalidArgument", "^handle is of type tuple")
        said(told["no ids"], "InvalidArgument", "num_experts must be given")
        small, large = told["hints"]
        assert 0 < small < large and not (small | large) % (2 << 20) and told["bytes"] == [2 << 20, 5 << 21]
        assert told["numbers"] == [0, (1, 2), 1]


def test_the_names_in_deep_ep(ran) -> None:
    for found in (each["installed"] for each in ran):
        assert found["same"] and found["numbers"] == (2 << 20, 32, 64) and found["domains"] == ((1, 2), (1, 2))
        said(found["missing"], "AttributeError", "BucketBuffer is not served")


def test_a_buffer_that_was_destroyed(ran) -> None:
    """What is needed again is made anew, though a combine was never waited for."""
    judge_trained("any", [found["after"] for found in ran])


@pytest.mark.parametrize("mutation", MUTATIONS | OWN_MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """A buffer that is wrong fails the test of its case."""
    outcomes = [found[f"mutation: {mutation}"] for found in ran]
    case = MUTATIONS[mutation][2] if mutation in MUTATIONS else OWN_MUTATIONS[mutation][3]
    raises = mutation in ("results in another order", "the default bound")
    assert_caught(outcomes, partial(judge_trained if case in ROUTINGS else judge, case), raises)
