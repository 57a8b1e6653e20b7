"""A small decoder with random weights, for `tokenway bench --frameworks engine`: attention of each rank's own
sequences, and layers of experts that all ranks share. Needs PyTorch.

It has what takes an engine's time: root-mean-square norms, rotary positions, grouped-query attention over a cache of a
fixed size, a router, routed experts, a shared expert, and a head that chooses the next token. How rows get to their
experts and back is a `Mixing`, which is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenway.bench.profiles import Profile

HEAD = 128  # elements of a head
WIDTH = 64  # of the hidden size there is a head for so many elements, as Qwen3-30B-A3B has
SHARING = 8  # heads that share keys and values
VOCABULARY = 32768
BASE = 1e6  # of rotary positions

# (layer, normed rows [T, H], what the shared expert made of them [T, H]) -> [T, H], the latter included
Mixing = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sequences:
    """What a rank has: `batch` prompts of `prompt` tokens, each to be continued by `generate`."""

    batch: int
    prompt: int
    generate: int

    @property
    def length(self) -> int:
        """Of a sequence at its end."""
        return self.prompt + self.generate


class Decoder:
    """The same weights on all ranks, from a seed, but for the routed experts, which a Mixing has."""

    def __init__(self, profile: Profile, layers: int, device: torch.device, dtype: torch.dtype, seed: int):
        self.layers, self.hidden = layers, profile.hidden
        self.heads = max(1, profile.hidden // WIDTH)
        self.shared_heads = max(1, self.heads // SHARING)
        drawn = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            values = torch.randn((rows, columns), device=device, generator=drawn) * columns**-0.5
            return values.to(dtype)

        width = (self.heads + 2 * self.shared_heads) * HEAD
        self.qkv = [weight(width, self.hidden) for _ in range(layers)]
        self.out = [weight(self.hidden, self.heads * HEAD) for _ in range(layers)]
        self.gate_up = [weight(2 * profile.inner, self.hidden) for _ in range(layers)]  # of the shared expert
        self.down = [weight(self.hidden, profile.inner) for _ in range(layers)]
        self.embedding = weight(VOCABULARY, self.hidden) * self.hidden**0.5
        self.head = weight(VOCABULARY, self.hidden)

    def logits(self, ids: Tensor, cache: Cache, mixing: Mixing, *, first: bool) -> Tensor:
        """ids: [B, S] -> [B, vocabulary] of the last of each. first: of prompts, whose positions begin at 0; else S is
        1, at the position that the cache holds."""
        batch, length = ids.shape
        x = functional.embedding(ids, self.embedding).view(batch * length, self.hidden)
        for layer in range(self.layers):
            x = x + self._attention(layer, _normed(x).view(batch, length, -1), cache, first).view(x.shape)
            rows = _normed(x)
            gate, up = functional.linear(rows, self.gate_up[layer]).chunk(2, dim=-1)
            shared = functional.linear(functional.silu(gate) * up, self.down[layer])
            x = x + mixing(layer, rows, shared)
        last = x.view(batch, length, -1)[:, -1]
        return functional.linear(_normed(last), self.head)

    def _attention(self, layer: int, x: Tensor, cache: Cache, first: bool) -> Tensor:
        batch, length, _ = x.shape
        heads, few = self.heads, self.shared_heads
        rows = functional.linear(x, self.qkv[layer]).view(batch, length, -1, HEAD).transpose(1, 2)
        q, k, v = rows.split([heads, few, few], dim=1)
        q, k = (cache.turned(part, first) for part in (q, k))
        k, v = cache.kept(layer, k, v, first)
        if first:
            each = heads // few
            k, v = (part.repeat_interleave(each, dim=1) for part in (k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # heads that share keys are as many queries of one
            q = q.reshape(batch, few, heads // few, HEAD)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask())
            mixed = mixed.reshape(batch, heads, 1, HEAD)
        return functional.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.out[layer])


class Cache:
    """Keys and values of a rank's sequences, and where they have come to, on the device: [1] int64."""

    def __init__(self, decoder: Decoder, sequences: Sequences, device: torch.device, dtype: torch.dtype):
        shape = sequences.batch, decoder.shared_heads, sequences.length, HEAD
        self._kept = [[torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(decoder.layers)]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(sequences.length, device=device)
        angles = torch.outer(self._places.float(), BASE ** -(torch.arange(0, HEAD, 2, device=device) / HEAD))
        self._turns = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)  # [length, head]

    def turned(self, x: Tensor, first: bool) -> Tensor:
        """Rotary positions: [B, heads, S, D] -> the same."""
        turns = self._turns[: x.shape[2]] if first else self._turns.index_select(0, self.at)
        cos, sin = turns.chunk(2, dim=-1)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)

    def kept(self, layer: int, k: Tensor, v: Tensor, first: bool) -> Sequence[Tensor]:
        """Keeps keys and values: of prompts these, else all that there is room for."""
        pair = self._kept[layer]
        for all_of_it, new in zip(pair, (k, v), strict=True):
            if first:
                all_of_it[:, :, : new.shape[2]].copy_(new)
            else:
                all_of_it.index_copy_(2, self.at, new)
        return (k, v) if first else pair

    def mask(self) -> Any:
        """Which of them are there: [1, 1, 1, length] bool."""
        return (self._places <= self.at).view(1, 1, 1, -1)


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)
