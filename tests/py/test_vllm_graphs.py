"""A small MoE decoder whose experts are vLLM's modular kernels over Tokenway, on two ranks with sequences of their own:
the same greedy text as of one rank that has all experts. On GPUs all steps but the first are replays of a CUDA graph.

The decoder is transformers', which has attention and routers; each rank has its half of each layer's experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import attempt, framework_apart, here, steps
from greedy import MOST, PROMPT, REPLAYS, SEQUENCES, WAYS, eager, replayed
from harness import HANGS
from test_transformers import CLOSE, close
from test_transformers import PINNED as TRANSFORMERS
from test_vllm import PINNED, SLOTS
from transformers_ranks import LAYERS, load, make_checkpoints, tokens
from vllm_ranks import ONE, begin, connect, forward, in_step, kernel_of

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS = 8
# Those of vLLM's backends that leave CUDA graphs on, of both formats.
BACKENDS = {
    name: SLOTS | {"hidden": 32, "top_k": 2, "experts": EXPERTS, "most": SEQUENCES * MOST} | change
    for name, change in (("slots", {"backend": ONE}), ("batched", {"batched": True}))
}


def computed(experts: Any, expert: int, rows: Any) -> Any:
    """What a layer of transformers' has an expert make of rows."""
    from torch.nn import functional

    gate, up = functional.linear(rows, experts.gate_up_proj[expert]).chunk(2, -1)
    return functional.linear(experts.act_fn(gate) * up, experts.down_proj[expert])


def served(model: Any, case: dict[str, Any], config: Any, rank: int) -> Any:
    """The model, whose layers' experts are vLLM's."""

    def run(kernel: Any, x: Any, ids: Any, weights: Any) -> Any:
        with in_step(case | {"sizes": (len(x), len(x))}, config, rank):
            return forward(kernel, rank, x, ids, weights, experts=EXPERTS)

    for layer in model.model.layers:
        experts = layer.mlp.experts
        kernel, _ = kernel_of(case, config, compute=partial(computed, experts))
        experts.forward = partial(run, kernel)
    return model


def stepped(way: str, model: Any, prompt: Any) -> tuple[Any, int]:
    """What `replayed` returns, without graphs."""
    before = steps()
    found = eager(way, model, prompt)
    return found, (steps() - before) // (1 + REPLAYS)  # of a prompt that goes into a cache there are fewer


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    rank, config = begin(store, blocking=False)
    from tokenway.integrations import vllm as adapter

    adapter.register()
    connect(config, rank)
    folder = Path(store).parent
    if rank == 0:
        make_checkpoints(folder)
    dist.barrier()
    settings = {"experts_implementation": "batched_mm"}  # of the one rank
    one, prompt = load(folder, "qwen3", None, **settings), tokens(rank, "fsdp", SEQUENCES, PROMPT)
    found: dict[str, Any] = {"prompt": prompt.tolist()}
    for name, case in BACKENDS.items():
        many = served(load(folder, "qwen3", None, **settings), case, config, rank)
        run = stepped if here().type == "cpu" else replayed
        found |= {(name, way): (attempt(run, way, many, prompt), attempt(eager, way, one, prompt)) for way in WAYS}
    dist.barrier()
    return found


apart = framework_apart({"vllm": PINNED, "transformers": TRANSFORMERS})


@pytest.fixture(scope="module")
def ran(apart: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("vllm_graphs") / "store"), timeout=4 * HANGS)


@pytest.mark.parametrize("way", ["no cache", "a static cache"])
@pytest.mark.parametrize("kernels", BACKENDS)
def test_the_same_greedy_text(ran, kernels, way) -> None:
    texts = []
    for (text, held), wanted in (found[kernels, way] for found in ran):
        assert held == 2 * LAYERS, (text, held)  # a dispatch and a combine in each layer
        assert text == wanted
        texts += np.array(text)[:, PROMPT:].tolist()
    assert ran[0]["prompt"] != ran[1]["prompt"] and len({tuple(row) for row in texts}) > 2  # sequences differ


@pytest.mark.parametrize("kernels", BACKENDS)
def test_moe_layers_alone(ran, kernels) -> None:
    for (found, held), wanted in (each[kernels, "MoE layers"] for each in ran):
        assert held == 2 * LAYERS, (found, held)
        close(found, wanted, 10 * CLOSE)  # of seven steps, of which each begins with what the one before made
