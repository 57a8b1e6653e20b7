"""Handles of DeepEP: tuples by look, of which callers keep the whole and hand it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tokenway as tw
from tokenway.compat.deep_ep.normal import Routing
from tokenway.integrations.low_latency import Sent


class NormalHandle:
    """Of a dispatch in normal mode: (rank_prefix_matrix, ..., is_token_in_rank, ...) of six. Of these there are the
    first, [N, N] int32, in which the column of this rank is right and the others are 0, and the fifth, [T, N] bool; the
    rest is of DeepEP's kernels."""

    def __init__(self, routing: Routing, rank: int, token_in_rank: Tensor | None):
        self.routing, self._rank, self._token_in_rank = routing, rank, token_in_rank

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> Any:
        place = range(6)[place]
        if place == 0:
            counts = self.routing.counts
            matrix = torch.zeros(len(counts), len(counts), dtype=torch.int32, device=counts.device)
            matrix[:, self._rank] = counts.cumsum(0)
            return matrix
        if place == 4:
            return self._token_in_rank
        raise tw.Unsupported(
            f"handle[{place}] is of DeepEP's kernels, and Tokenway has no such thing: keep the handle whole, and hand "
            "it to dispatch or combine"
        )

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(6))


class LowLatencyHandle:
    """Of a low-latency dispatch: (source indices [L, N * b] int32, layout ranges [L, N] int64: where the rows of each
    source begin, times 2**32, plus how many they are; b, H, experts). The first two are there once it is received."""

    def __init__(self, sent: Sent, hidden: int, experts: int):
        self.sent, self._rest = sent, (sent.bound, hidden, experts)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> Any:
        place = range(5)[place]
        if place > 1:
            return self._rest[place - 2]
        return self.sent.source() if place == 0 else self.sent.ranges()

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(5))


def routing_of(handle: Any) -> Routing:
    """Of an argument `handle` of normal mode. Errors: InvalidArgument."""
    if not isinstance(handle, NormalHandle):
        told = f"is of type {type(handle).__name__}; it must come from a dispatch in normal mode"
        raise tw.InvalidArgument.of("handle", told)
    return handle.routing


def sent_of(handle: Any) -> Sent:
    """Of an argument `handle` of low-latency mode. Errors: InvalidArgument."""
    if not isinstance(handle, LowLatencyHandle):
        told = f"is of type {type(handle).__name__}; it must come from low_latency_dispatch"
        raise tw.InvalidArgument.of("handle", told)
    return handle.sent
