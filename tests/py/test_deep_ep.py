"""Code that calls DeepEP's normal mode, over Tokenway: what comes and what returns, against NumPy."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from deep_ep_ranks import array, attempt, begin, counted, end, received, routed, since
from frameworks import assert_caught, mutated, programs_of
from harness import AT_ONCE, HANGS, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, HIDDEN = 8, 32


class Case(NamedTuple):
    tokens: tuple[int, int]
    top_k: int = 3
    dtype: str = "bfloat16"
    scales: tuple[int, str] | None = None
    alignment: int = 1
    worst: int = 0
    asynchronous: bool = False
    by_rank: bool = False
    no_choice: bool = True  # some ids are -1
    experts: int = EXPERTS


CASES = {
    "bfloat16": Case((5, 3)),
    "float32": Case((7, 6), dtype="float32"),
    "fp8 and scales": Case((6, 4), dtype="float8_e4m3fn", scales=(2, "float32"), alignment=16),
    "packed scales": Case((6, 4), dtype="float8_e4m3fn", scales=(1, "int32")),
    "nothing for rank 0": Case((0, 4)),
    "scales, none of rank 0": Case((0, 4), dtype="float8_e4m3fn", scales=(2, "float32")),
    "none at all": Case((0, 0)),
    "top 1": Case((9, 2), top_k=1),
    "top 5": Case((4, 9), top_k=5, no_choice=False),
    "other experts": Case((4, 9), experts=12),
    "more than there is room for": Case((300, 20)),
    "far more": Case((3, 1100)),
    "fewer again": Case((2, 1)),
    "asynchronous": Case((5, 8), asynchronous=True),
    "at most": Case((5, 8), worst=40),
    "by rank": Case((5, 8), by_rank=True, no_choice=False),
    "by rank, at most": Case((5, 8), by_rank=True, no_choice=False, worst=40),
}


def batch(name: str, rank: int) -> dict[str, Any]:
    """Of a rank: rows of whole numbers, so that bfloat16 is exact, ids, weights, scales."""
    case, rng = CASES[name], np.random.default_rng([rank, len(name)])
    count = case.tokens[rank]
    scales = None
    if case.scales:
        scales = rng.integers(1, 9, (count, case.scales[0])).astype(case.scales[1])
    return {
        "rows": rng.integers(-4, 5, (count, HIDDEN)).astype(np.float32),
        "ids": routed(count, case.experts, case.top_k, [rank, 5], case.no_choice),
        "weights": rng.integers(1, 64, (count, case.top_k)).astype(np.float32) / 8,
        "scales": scales,
    }


def exchanged(buffer: Any, name: str, device: Any) -> dict[str, Any]:
    """What a rank receives, and gets back: expert e multiplies by e + 1."""
    import torch

    case, rank = CASES[name], buffer.rank
    mine = {key: None if x is None else torch.from_numpy(x).to(device) for key, x in batch(name, rank).items()}
    values = mine["rows"].to(getattr(torch, case.dtype))
    x = values if mine["scales"] is None else (values, mine["scales"])
    before = buffer.capture() if case.asynchronous else None
    told = {"previous_event": before, "async_finish": case.asynchronous, "allocate_on_comm_stream": case.asynchronous}
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(mine["ids"], case.experts, **told)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    chosen = {} if case.by_rank else {"topk_idx": mine["ids"], "topk_weights": mine["weights"]}
    if case.asynchronous:
        told["previous_event"] = event
    limits = {"expert_alignment": case.alignment, "num_worst_tokens": case.worst}
    came, ids, weights, counts, handle, event = buffer.dispatch(x, **chosen, **layout, **limits, **told)
    if case.asynchronous:
        event.current_stream_wait()
    else:
        assert event.event is None
    rows, scales = came if case.scales else (came, None)
    found: dict[str, Any] = {"rows": array(rows), "counts": counts, "prefix": array(handle[0])[:, rank]}
    found |= {"layout": [array(per_rank), array(per_expert), array(in_rank)], "rdma": per_rdma}
    found["scales"] = None if scales is None else array(scales)
    found["ids"], found["weights"] = (None, None) if ids is None else (array(ids), array(weights))
    places = torch.full((len(rows), 1), 0, device=device) if ids is None else ids
    factors = torch.where(places >= 0, places + 1 + rank * (case.experts // 2), 0).sum(1, keepdim=True)
    made = rows.float() * factors
    made = made.to(torch.bfloat16 if case.scales else values.dtype)
    bias = (torch.arange(len(values), device=device) % 7).view(-1, 1).expand(-1, HIDDEN).to(made.dtype).contiguous()
    told |= since(buffer, case.asynchronous)
    out, sums, event = buffer.combine(made, handle, weights, bias=bias, **told)
    if case.asynchronous:
        event.current_stream_wait()
    found["out"], found["sums"] = array(out), None if sums is None else array(sums)
    # What a backward pass does: the same routing, of another dtype, and sums again; another bias.
    other = (mine["rows"] + 1).to(torch.float32)
    told |= since(buffer, case.asynchronous)
    again, *nothing, event = buffer.dispatch(other, handle=handle, **told)
    if case.asynchronous:
        event.current_stream_wait()
    assert nothing == [None] * 4
    found["again"] = array(again)
    made, biases = again * factors, (bias.float(), bias.float())
    told |= since(buffer, case.asynchronous)
    back, _, event = buffer.combine(made, handle, bias=biases, **told)
    if case.asynchronous:
        event.current_stream_wait()
    found["back"] = array(back)
    return found


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    local = case.experts // 2
    batches = [batch(name, source) for source in range(2)]
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict), found
        come = [received(each["ids"], case.experts, rank, 2) for each in batches]

        def of(key: str, come: Any = come) -> np.ndarray:
            return np.concatenate([each[key][t] for each, t in zip(batches, come, strict=True)])

        used = len(come[0]) + len(come[1])
        assert len(found["rows"]) == max(case.worst, used)
        assert np.array_equal(found["rows"][:used], of("rows"))
        assert np.array_equal(found["again"][:used], of("rows") + 1)
        assert np.array_equal(found["prefix"], np.cumsum([len(t) for t in come]))
        if case.scales:
            assert np.array_equal(found["scales"][:used], of("scales"))
        ids = of("ids")
        here = (ids >= 0) & (ids // local == rank)
        per_expert = [int((ids == rank * local + e).sum()) for e in range(local)]
        if case.worst:
            assert found["counts"] == [] and (case.by_rank or (found["ids"][used:] == -1).all())
        else:
            assert found["counts"] == [-(-n // case.alignment) * case.alignment for n in per_expert]
        own = batches[rank]
        goes = np.stack([((own["ids"] >= 0) & (own["ids"] // local == r)).any(1) for r in range(2)], 1)
        numbers = np.array([(own["ids"] == e).sum() for e in range(case.experts)])
        assert found["rdma"] is None
        for one, other in zip(found["layout"], (goes.sum(0), numbers, goes), strict=True):
            assert np.array_equal(one, other)
        bias = (np.arange(len(own["rows"])) % 7)[:, None]
        if case.by_rank:
            factor = (goes * (1 + np.arange(2) * local)).sum(1, keepdims=True)
            assert found["ids"] is None and found["weights"] is None and found["sums"] is None
        else:
            factor = np.where(own["ids"] >= 0, own["ids"] + 1, 0).sum(1, keepdims=True)
            assert np.array_equal(found["ids"][:used], np.where(here, ids - rank * local, -1))
            assert np.array_equal(found["weights"][:used], np.where(here, of("weights"), 0))
            assert np.array_equal(found["sums"], np.where(own["ids"] >= 0, own["weights"], 0))
        assert np.array_equal(found["out"], own["rows"] * factor + bias)
        assert np.array_equal(found["back"], (own["rows"] + 1) * factor + 2 * bias)
        assert found["steps"] == (4 if case.by_rank else 5)


# name: (text of normal.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ('return whole["tokens"], ', 'return whole["tokens"].roll(1, 0), ', "bfloat16"),
    "weights 2 % off": ('whole["ids"] < 0, 0)', 'whole["ids"] < 0, 0).mul_(1.02)', "bfloat16"),
    "ids off by one rank": (
        "view.route(ids, weights,",
        "view.route(torch.where(ids < 0, ids, (ids + 4) % 8), weights,",
        "top 5",
    ),
    "weights of other ranks' experts": ('whole["weights"].masked_fill_(whole["ids"] < 0, 0)', "pass", "float32"),
    "no bias": ("bias=bias", "bias=None", "bfloat16"),
    "scales of the wrong row": ("payloads = rows.payloads()", "payloads = _wrong(rows)", "fp8 and scales"),
}


def mutant(buffer: Any, name: str, device: Any) -> Any:
    """A case through an exchange whose source says something else."""
    from tokenway.compat.deep_ep import normal, ranks

    old, new, case = MUTATIONS[name]
    made = mutated(normal, old, new)
    made._wrong = lambda rows: rows.payloads() and {"scales": rows.payloads()["scales"].roll(1, 0)}
    with patch.object(ranks, "Normal", made.Normal):
        return attempt(counted, exchanged, buffer, case, device)


def wrong_alone(buffer: Any, device: Any) -> dict[str, Any]:
    """What ranks are told where rank 1 alone calls wrongly, and how long it took; after each, a right call."""
    import torch

    rank = buffer.rank
    right = {"x": torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=device)}
    right["topk_idx"] = torch.tensor([[0, 5, 2]] * 4, device=device)
    right["topk_weights"] = torch.ones(4, 3, device=device)
    *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(right["topk_idx"], EXPERTS)
    right |= {"num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank, "num_tokens_per_rank": per_expert}
    many = {name: right[name].repeat(2000, 1) for name in ("x", "topk_idx", "topk_weights")}
    chosen = "topk_idx", "topk_weights"  # without them tokens go by rank
    wrong: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what rank 0 gives, and what rank 1
        "weights": ({}, {"topk_weights": torch.ones(3, 3, device=device)}),
        "three dimensions": ({}, {"x": right["x"][None]}),
        "scales": ({}, {"x": (right["x"], torch.ones(3, 2, device=device))}),
        "more tokens elsewhere": (many, {"topk_weights": torch.ones(3, 3, device=device)}),
        "no bool": (dict.fromkeys(chosen), dict.fromkeys(chosen) | {"is_token_in_rank": in_rank[:, 0]}),
        "odd experts": (dict.fromkeys(chosen), dict.fromkeys(chosen) | {"num_tokens_per_expert": per_expert[:3]}),
        "an overflow": ({"num_worst_tokens": 7}, {"num_worst_tokens": 7}),
    }
    if device.type == "cpu":  # elsewhere ids are read by the device
        wrong["ids"] = ({}, {"topk_idx": right["topk_idx"] + 6})
    told: dict[str, Any] = {}
    for name, given in wrong.items():
        began = time.monotonic()
        outcome = attempt(buffer.dispatch, **(right | given[rank]))
        told[name] = outcome, time.monotonic() - began
        told[f"{name}, then"] = attempt(lambda: array(buffer.dispatch(**right)[0]).sum())
    *_, handle, _ = buffer.dispatch(**right)
    if device.type == "cpu":  # elsewhere a peer learns of it late
        began = time.monotonic()
        rows = torch.ones(8 - rank, HIDDEN, dtype=torch.bfloat16)
        told["rows"] = attempt(buffer.combine, rows, handle), time.monotonic() - began
        told["biases"] = attempt(two_biases, buffer, handle, rank), time.monotonic() - began
        told["rows, then"] = attempt(lambda: array(buffer.combine(torch.ones(8, HIDDEN), handle)[0]).sum())
    return told


def two_biases(buffer: Any, handle: Any, rank: int) -> None:
    """A combine with two of unlike shapes on rank 1."""
    import torch

    bias = torch.ones(4, HIDDEN)
    buffer.combine(torch.ones(8, HIDDEN), handle, bias=(bias, bias[: 4 - 2 * rank]))


def local_calls(buffer: Any, device: Any) -> dict[str, Any]:
    """What a rank is told of calls that send nothing."""
    import torch

    x = torch.ones(2, HIDDEN, device=device)
    none = torch.tensor([[9, 1], [-1, 8]], device=device)
    cls = type(buffer)
    return {
        "no group": attempt(cls, None),
        "shrink": attempt(cls, buffer.group, enable_shrink=True),
        "buffer": attempt(buffer.get_local_buffer_tensor, torch.float32),
        "handle": attempt(buffer.combine, x, (1, 2)),
        "no choice": attempt(buffer.dispatch, x),
        "mask": attempt(buffer.low_latency_update_mask_buffer, 1, True),
        "odd": attempt(cls.set_num_sms, 3),
        "experts": attempt(buffer.get_dispatch_layout, torch.zeros(2, 3, dtype=torch.int64, device=device), 7),
        "no expert": [array(x) for x in buffer.get_dispatch_layout(none, 8)[:4:2]],
    }


def installing() -> dict[str, Any]:
    """What stands in the place of deep_ep, and what does not."""
    from tokenway.compat import deep_ep as ours

    names = ("deep_ep", "deep_ep.utils", "deep_ep.utils.event")
    found: dict[str, Any] = {"absent": "deep_ep" in sys.modules}
    module = ours.install()
    found["twice"] = ours.install() is module
    found["specs"] = [importlib.util.find_spec(name).name for name in names]
    import deep_ep
    from deep_ep import Buffer, Config
    from deep_ep.utils import EventHandle, EventOverlap

    found["same"] = [deep_ep.Buffer is ours.Buffer, Buffer is ours.Buffer, EventHandle, EventOverlap, Config]
    found["same"] = all(found["same"]) and deep_ep.topk_idx_t.itemsize == 8
    found["missing"] = attempt(lambda: deep_ep.HybridEPBuffer)
    found["hints"] = Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(64, 2) > 0
    ours.uninstall()
    found["gone"] = [name in sys.modules for name in names]
    sys.modules["deep_ep"] = sys.modules["json"]
    found["other"] = attempt(ours.install)
    ours.uninstall()
    found["kept"] = sys.modules.pop("deep_ep") is sys.modules["json"]
    return found


def rank_main(store: str) -> dict[str, Any]:
    from tokenway.integrations import groups

    _, device = begin(store, 2)
    found: dict[str, Any] = {"installing": installing()}
    from tokenway.compat import deep_ep

    deep_ep.install()
    import torch.distributed as dist
    from deep_ep import Buffer

    buffer = Buffer(dist.group.WORLD, 1 << 20, explicitly_destroy=True)
    for name in CASES:
        found[name] = attempt(counted, exchanged, buffer, name, device)
    found["groups"] = [sorted(key[1] for key in _keys(peers)) for peers in groups.living()]
    found["wrong"] = wrong_alone(buffer, device)
    found["local"] = local_calls(buffer, device)
    for name in MUTATIONS:
        found[name] = mutant(buffer, name, device)
    found["guide"] = attempt(guide, device)
    buffer.destroy()
    found["closed"] = all(shared.group is None for peers in groups.living() for shared in peers.groups.values())
    found["anew"] = attempt(counted, exchanged, buffer, "bfloat16", device)
    end()
    return found


def guide(device: Any) -> bool:
    """The program of the guide: experts that double what they get, weighted."""
    import torch
    import torch.distributed as dist

    names: dict[str, Any] = {}
    (program,) = programs_of("Code that calls deep_ep")
    exec(program, names)
    x, ids = torch.ones(3, HIDDEN, dtype=torch.bfloat16, device=device), torch.tensor([[0, 5, 2]] * 3, device=device)
    weights = torch.tensor([[0.5, 0.25, 1.0]] * 3, device=device)
    out = names["layer"](
        dist.group.WORLD, x, ids, weights, lambda rows, _, scales: rows * 2 * scales.sum(1, keepdim=True).bfloat16(), 8
    )
    return bool((array(out) == 3.5).all())


def _keys(peers: Any) -> list[tuple[int, int]]:
    return [(each.settings["experts"], each.settings["top_k"]) for each in peers.groups.values()]


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("deep_ep") / "store"), timeout=4 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(ran, case) -> None:
    """As NumPy has them; a cached dispatch of another dtype, sums of weights, biases, counts of steps."""
    judge(case, [found[case] for found in ran])


def test_one_group_for_each_choice(ran) -> None:
    assert all(len(found["groups"]) == 1 for found in ran)
    assert ran[0]["groups"] == ran[1]["groups"]


def test_a_rank_that_calls_wrongly(ran) -> None:
    """It is told, as its peers are at once; the next call is right."""
    sentences = {
        "weights": r"^topk_weights has shape \[3, 3\]; it must be \[4, 3\]",
        "three dimensions": r"^x has shape \[1, 4, 32\]",
        "scales": "^the scales of x has 3 rows; it must have 4",
        "no bool": "^is_token_in_rank must be a tensor of bool",
        "odd experts": "^num_tokens_per_expert must be a tensor",
        "biases": r"^bias has shapes \[4, 32\] and \[2, 32\]",
        "more tokens elsewhere": r"^topk_weights has shape",
        "ids": "^ids",
        "rows": r"^x is bfloat16 \[7, 32\]; it must be bfloat16 \[8, 32\], as received",
    }
    for rank, found in enumerate(ran):
        for name, (outcome, took) in ((n, t) for n, t in found["wrong"].items() if not n.endswith("then")):
            if name == "an overflow":
                said(outcome, "RecvOverflow", "7")
            else:
                said(outcome, *(("InvalidArgument", sentences[name]) if rank == 1 else ("PeerRefused", "rank 1")))
            assert took < AT_ONCE
        assert all(total == 8 * HIDDEN for name, total in found["wrong"].items() if name.endswith("then"))


def test_calls_that_send_nothing(ran) -> None:
    for found in ran:
        told = found["local"]
        said(told["no group"], "Unsupported", "^group is None: give a process group")
        said(told["shrink"], "Unsupported", "^enable_shrink is not served")
        said(told["buffer"], "Unsupported", "^get_local_buffer_tensor is not served")
        said(told["handle"], "InvalidArgument", "^handle is of type tuple; it must come from a dispatch")
        said(told["no choice"], "InvalidArgument", "^topk_idx is None")
        said(told["mask"], "Unsupported", "Group.shrink")
        said(told["odd"], "AssertionError", "3")
        said(told["experts"], "InvalidArgument", "^num_experts is 7")
        assert [x.tolist() for x in told["no expert"]] == [[1, 0], [0, 1, 0, 0, 0, 0, 0, 0]]


def test_the_module_in_its_place(ran) -> None:
    for found in (each["installing"] for each in ran):
        assert not found["absent"] and found["twice"] and found["same"] and found["hints"] and found["kept"]
        assert found["specs"] == ["deep_ep", "deep_ep.utils", "deep_ep.utils.event"]
        said(found["missing"], "AttributeError", "HybridEPBuffer is not served.*Buffer")
        assert found["gone"] == [False] * 3
        said(found["other"], "InvalidUsage", "^deep_ep was imported before, from .*json")


def test_the_guide(ran) -> None:
    """Its program runs as it stands."""
    assert all(found["guide"] is True for found in ran), [found["guide"] for found in ran]


def test_destroyed_and_made_anew(ran) -> None:
    assert all(found["closed"] for found in ran)
    judge("bfloat16", [found["anew"] for found in ran])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An exchange that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], partial(judge, MUTATIONS[mutation][2]))


def dying(store: str) -> tuple[Any, float]:
    """Rank 1 ends between a dispatch and its combine: what rank 0 is told, and after how long."""
    import torch
    import torch.distributed as dist

    from tokenway.compat.deep_ep import Buffer

    rank, device = begin(store, 2)
    buffer = Buffer(dist.group.WORLD)
    ids = torch.tensor([[0, 5]] * 4, device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, *_, handle, _ = buffer.dispatch(torch.ones(4, HIDDEN, device=device), topk_idx=ids, **layout)
    if rank == 1:
        os._exit(7)
    began = time.monotonic()

    def combine() -> None:
        array(buffer.combine(rows, handle)[0])  # on a device this waits for it, and what it found is told then
        handle.routing.exchange.group.check()

    return attempt(combine), time.monotonic() - began


def test_a_rank_that_dies(torch: Any, tmp_path: Any) -> None:
    """Its peer, which waits in the combine, is told at once."""
    with tw.Ranks(dying, 2, str(tmp_path / "store")) as processes:
        first, second = processes.wait(HANGS)
    assert first is not None and second is not None and second.exitcode == 7
    told, took = first.value
    said(told, "PeerDied", "rank 1")
    assert took < AT_ONCE
