"""A small MoE decoder of transformers in CUDA graphs, over two devices: the same greedy text as one device's.

Experts are computed by `batched_mm`, of which all shapes are known: `grouped_mm` asks the host in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import attempt, devices, need_version
from greedy import PROMPT, SEQUENCES, WAYS, eager, replayed
from harness import HANGS
from test_transformers import CLOSE, PINNED, close
from transformers_ranks import LAYERS, begun, load, tokens

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    parts = begun(store, ("qwen3",), (), blocking=False)
    settings = {"experts_implementation": "batched_mm"}
    many = load(parts.folder, "qwen3", "tp", **settings)
    one = load(parts.folder, "qwen3", None, **settings)
    prompt = tokens(0, "tp", SEQUENCES, PROMPT)
    found = {way: (attempt(replayed, way, many, prompt), attempt(eager, way, one, prompt)) for way in WAYS}
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    need_version("transformers", PINNED)
    if devices() < 2:
        pytest.skip("two CUDA devices are missing")
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("transformers_graphs")), timeout=2 * HANGS)


@pytest.mark.parametrize("way", ["no cache", "a static cache"])
def test_the_same_greedy_text(ran, way) -> None:
    for (text, held), wanted in (found[way] for found in ran):
        assert held == 2 * LAYERS, (text, held)  # a dispatch and a combine in each layer
        assert text == wanted
        assert len({tuple(row) for row in np.array(text)[:, PROMPT:].tolist()}) > 1  # sequences differ


def test_moe_layers_alone(ran) -> None:
    for (found, held), wanted in (each["MoE layers"] for each in ran):
        assert held == 2 * LAYERS, (found, held)
        close(found, wanted, 10 * CLOSE)  # of seven steps, of which each begins with what the one before made
