"""Greedy text of a small MoE decoder of transformers, step by step, in CUDA graphs and without.

Steps are as an engine makes them: they read and write tensors that stay, and each makes one token for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frameworks import here, steps, whole

SEQUENCES, PROMPT, NEW = 3, 4, 8
MOST = PROMPT + NEW
REPLAYS = NEW - 2  # beside the prompt's token, where there is a cache, and the step before the capture


class Window:
    """Without a cache: a forward pass over all places each time, of which those behind a token change nothing before
    them. prompt: [SEQUENCES, PROMPT]."""

    def __init__(self, model: Any, prompt: Any):
        import torch

        self.model, self.place = model, torch.tensor([PROMPT - 1], device=here())
        self.text = torch.zeros(SEQUENCES, MOST, dtype=torch.int64, device=here())
        self.text[:, :PROMPT] = prompt

    def step(self) -> None:
        logits = self.model(self.text, use_cache=False).logits
        chosen = logits.index_select(1, self.place).argmax(-1)
        self.place.add_(1)
        self.text.index_copy_(1, self.place, chosen)

    def found(self) -> list[list[int]]:
        return self.text.tolist()


class Cached:
    """With a static cache: one token of each sequence goes through the decoder."""

    def __init__(self, model: Any, prompt: Any):
        import torch
        from transformers import StaticCache

        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=MOST)
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

    def __init__(self, model: Any, prompt: Any):
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


# A capture that fails may leave a library's state behind, so what holds the least comes first.
WAYS: dict[str, Callable[[Any, Any], Any]] = {"MoE layers": Layers, "no cache": Window, "a static cache": Cached}


def eager(way: str, model: Any, prompt: Any) -> Any:
    """What a way finds in as many steps as `replayed` makes."""
    import torch

    with torch.no_grad():
        made = WAYS[way](model, prompt)
        for _ in range(1 + REPLAYS):
            made.step()
    return made.found()


def replayed(way: str, model: Any, prompt: Any) -> tuple[Any, int]:
    """The same, of which all but the first step are replays, and how many steps of Tokenway's the capture holds."""
    import torch

    with torch.no_grad():
        made = WAYS[way](model, prompt)
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
