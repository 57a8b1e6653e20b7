"""Code that calls DeepEP, in CUDA graphs and on streams of its own: on two devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deep_ep_ranks import array, attempt, begin, end, routed
from harness import HANGS, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 256, 16


def given(rank: int, turn: int, device: Any) -> dict[str, Any]:
    """Of a turn: rows of whole numbers, ids, weights."""
    import torch

    rng = np.random.default_rng([rank, turn])
    arrays = {
        "x": rng.integers(-4, 5, (TOKENS, HIDDEN)).astype(np.float32),
        "ids": routed(TOKENS, EXPERTS, TOP_K, [rank, turn, 1]),
        "weights": rng.integers(1, 5, (TOKENS, TOP_K)).astype(np.float32),
    }
    made = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
    return made | {"x": made["x"].bfloat16()}


def wanted(mine: dict[str, Any]) -> np.ndarray:
    """What experts that add nothing and multiply by e + 1 make of it, weighted."""
    ids, weights = array(mine["ids"]), array(mine["weights"])
    return array(mine["x"]) * np.where(ids >= 0, (ids + 1) * weights, 0).sum(1, keepdims=True)


def factors(rank: int, device: Any) -> Any:
    """[L, 1, 1]: of each expert of this rank."""
    import torch

    return (torch.arange(EXPERTS // 2, device=device) + 1 + rank * (EXPERTS // 2)).view(-1, 1, 1).bfloat16()


def low_latency(buffer: Any, mine: dict[str, Any], hook: bool = False, asynchronous: bool = False) -> Any:
    """A layer in low-latency mode."""
    told = {"return_recv_hook": hook, "async_finish": asynchronous}
    came, _, handle, event, receive = buffer.low_latency_dispatch(
        mine["x"], mine["ids"], TOKENS, EXPERTS, use_fp8=False, **told
    )
    if hook:
        receive()
    if asynchronous:
        event.current_stream_wait()
    made = came * factors(buffer.rank, came.device)
    out, event, receive = buffer.low_latency_combine(made, mine["ids"], mine["weights"], handle, **told)
    if hook:
        receive()
    if asynchronous:
        event.current_stream_wait()
    return out


def at_most(buffer: Any, mine: dict[str, Any], asynchronous: bool = False) -> Any:
    """A layer in normal mode whose outputs do not depend on what comes."""
    import torch

    told = {"async_finish": asynchronous}
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine["ids"], EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, ids, weights, _, handle, event = buffer.dispatch(
        mine["x"],
        topk_idx=mine["ids"],
        topk_weights=mine["weights"],
        num_worst_tokens=2 * TOKENS,
        **layout,
        **told,
    )
    if asynchronous:
        event.current_stream_wait()
    here = torch.where(ids >= 0, (ids + 1 + buffer.rank * (EXPERTS // 2)) * weights, 0).sum(1, keepdim=True)
    out, _, event = buffer.combine(rows.nan_to_num(0, 0, 0) * here.bfloat16(), handle, **told)
    if asynchronous:
        event.current_stream_wait()
    return out


def elastic(buffer: Any, mine: dict[str, Any]) -> Any:
    """A layer by the second API, without a wait of the host."""
    import torch

    rows, _, weights, handle, _ = buffer.dispatch(
        mine["x"], mine["ids"], mine["weights"], num_experts=EXPERTS, do_expand=True, do_cpu_sync=False
    )
    places = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    expert = torch.searchsorted(handle.psum_num_recv_tokens_per_expert, places, right=True).clamp(max=EXPERTS // 2 - 1)
    here = factors(buffer.rank_idx, rows.device).view(-1)[expert] * weights.nan_to_num(0, 0, 0).bfloat16()
    return buffer.combine(rows.nan_to_num(0, 0, 0) * here.view(-1, 1), handle)[0]


def captured(layer: Callable[..., Any], buffer: Any, rank: int, device: Any) -> list[bool]:
    """A layer in a graph, replayed with other rows and choices."""
    import torch

    static = given(rank, 0, device)
    layer(buffer, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(buffer, static)
    found = []
    for turn in range(1, 4):
        for name, tensor in given(rank, turn, device).items():
            static[name].copy_(tensor)
        graph.replay()
        found.append(bool(np.allclose(array(out), wanted(static), rtol=2**-7)))
    return found


def beside(buffer: Any, layer: Callable[..., Any], rank: int, device: Any) -> list[bool]:
    """Layers on the stream of calls, whose inputs are made, and results read, just before and behind on another."""
    import torch

    found, outs, stream = [], [], torch.cuda.Stream(device)
    turns = [given(rank, turn, device) for turn in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for mine in turns:
            torch.cuda._sleep(200_000)
            copied = {name: x.clone() for name, x in mine.items()}
            outs.append(layer(buffer, copied, asynchronous=True) + 0)
            del copied
        stream.synchronize()
    for mine, out in zip(turns, outs, strict=True):
        found.append(bool(np.allclose(array(out), wanted(mine), rtol=2**-7)))
    return found


def no_wait_without_a_bound(buffer: Any, rank: int, device: Any) -> Any:
    """Normal mode in a capture, as many rows as come."""
    import torch

    mine = given(rank, 0, device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine["ids"], EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer.dispatch(mine["x"], topk_idx=mine["ids"], topk_weights=mine["weights"], **layout)

    return attempt(capture)


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    from tokenway.compat.deep_ep import Buffer, ElasticBuffer

    rank, device = begin(store, 2, blocking=False)
    buffer = Buffer(dist.group.WORLD)
    second = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    found = {
        "low latency": attempt(captured, low_latency, buffer, rank, device),
        "hooks": attempt(captured, lambda *args: low_latency(*args, hook=True), buffer, rank, device),
        "at most": attempt(captured, at_most, buffer, rank, device),
        "elastic": attempt(captured, elastic, second, rank, device),
        "beside, low latency": attempt(beside, buffer, low_latency, rank, device),
        "beside, at most": attempt(beside, buffer, at_most, rank, device),
        "refused": no_wait_without_a_bound(buffer, rank, device),
    }
    end()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two CUDA devices are missing")
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("graphs") / "store"), timeout=2 * HANGS)


@pytest.mark.parametrize("layer", ["low latency", "hooks", "at most", "elastic"])
def test_replays_follow_what_comes(ran, layer) -> None:
    assert all(found[layer] == [True] * 3 for found in ran), [found[layer] for found in ran]


@pytest.mark.parametrize("layer", ["low latency", "at most"])
def test_calls_on_a_stream_of_their_own(ran, layer) -> None:
    assert all(found[f"beside, {layer}"] == [True] * 8 for found in ran), [found[f"beside, {layer}"] for found in ran]


def test_a_capture_that_would_wait(ran) -> None:
    for found in ran:
        said(found["refused"], "InvalidArgument", "^num_worst_tokens is 0; while a graph is captured")
