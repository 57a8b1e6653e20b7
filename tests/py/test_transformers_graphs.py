"""A small MoE decoder of transformers in CUDA graphs, over two devices: the same greedy text as one device's.

Steps are as an engine makes them: they read and write tensors that stay, and each replay makes one token for each
sequence. Experts are computed by `batched_mm`, of which all shapes are known: `grouped_mm` asks the host in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frameworks import attempt, devices, here, need_version, steps, whole
from harness import HANGS
from test_transformers import CLOSE, PINNED, close
from transformers_ranks import LAYERS, begun, load, tokens

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SEQUENCES, PROMPT, NEW = 3, 4, 8
MOST = PROMPT + NEW


class Window:
    """Greedy text without a cache: a forward pass over all places each time, of which those behind a token change
    nothing before them."""

    def __init__(self, model: Any):
        import torch

        self.model, self.place = model, torch.tensor([PROMPT - 1], device=here())
        self.text = torch.zeros(SEQUENCES, MOST, dtype=torch.int64, device=here())
        self.text[:, :PROMPT] = tokens(0, "tp", SEQUENCES, PROMPT)

    def step(self) -> None:
        logits = self.model(self.text, use_cache=False).logits
        chosen = logits.index_select(1, self.place).argmax(-1)
        self.place.add_(1)
        self.text.index_copy_(1, self.place, chosen)

    def found(self) -> list[list[int]]:
        return self.text.tolist()


class Cached:
    """Greedy text with a static cache: one token of each sequence goes through the decoder."""

    def __init__(self, model: Any):
        import torch
        from transformers import StaticCache

        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=MOST)
        prompt = tokens(0, "tp", SEQUENCES, PROMPT)
        self.last = model(prompt, past_key_values=self.cache, use_cache=True).logits[:, -1:].argmax(-1)
        self.place = torch.tensor([PROMPT], device=here())
        self.text = torch.zeros(SEQUENCES, MOST, dtype=torch.int64, device=here())
        self.text[:, :PROMPT] = prompt
        self.text[:, PROMPT] = self.last[:, 0]

    def step(self) -> None:
        position = self.place.view(1, 1).expand(SEQUENCES, 1)
        out = self.model(self.last, position_ids=position, past_key_values=self.cache, use_cache=True)
        self.last.copy_(out.logits.argmax(-1))
        self.place.add_(1)
        self.text.index_copy_(1, self.place, self.last)

    def found(self) -> list[list[int]]:
        return self.text.tolist()


class Layers:
    """The MoE layers alone, one behind the other: routers, exchanges, experts."""

    def __init__(self, model: Any):
        import torch

        self.layers = [layer.mlp for layer in model.model.layers]
        drawn = torch.randn(SEQUENCES, 1, 32, generator=torch.Generator().manual_seed(4))
        self.x = drawn.to(here())

    def step(self) -> None:
        x = self.x
        for layer in self.layers:
            x = x + layer(x)
        self.x.copy_(x / x.abs().amax(-1, keepdim=True))  # other choices in the next step, and no growth

    def found(self) -> Any:
        return whole(self.x)


WAYS: dict[str, Callable[[Any], Any]] = {"MoE layers": Layers, "no cache": Window, "a static cache": Cached}
REPLAYS = NEW - 2  # beside the prompt's token, where there is a cache, and the step before the capture


def eager(way: str, model: Any) -> Any:
    import torch

    with torch.no_grad():
        made = WAYS[way](model)
        for _ in range(1 + REPLAYS):
            made.step()
    return made.found()


def replayed(way: str, model: Any) -> tuple[Any, int]:
    """The same, of which all but the first step are replays, and how many steps of Tokenway's the capture holds."""
    import torch

    with torch.no_grad():
        made = WAYS[way](model)
        made.step()  # makes groups, communicators and the libraries' handles
        torch.cuda.synchronize()
        graph, before = torch.cuda.CUDAGraph(), steps()
        # NCCL's watchdog asks for events meanwhile, in its own thread.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made.step()
        held = steps() - before
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    return made.found(), held


def rank_main(store: str) -> dict[str, Any]:
    import torch.distributed as dist

    parts = begun(store, ("qwen3",), (), blocking=False)
    settings = {"experts_implementation": "batched_mm"}
    many = load(parts.folder, "qwen3", "tp", **settings)
    one = load(parts.folder, "qwen3", None, **settings)
    # A capture that fails may leave a library's state behind, so what holds the least comes first.
    found = {way: (attempt(replayed, way, many), attempt(eager, way, one)) for way in WAYS}
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
