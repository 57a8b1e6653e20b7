"""Numbers that DeepEP asks its callers for, and hands out: how many SMs, and how many bytes; and what it does not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NoReturn

import torch

from tokenway import InvalidArgument, Unsupported

MAX_TOKENS = "TOKENWAY_DEEP_EP_MAX_TOKENS"
topk_idx_t = torch.int64  # of topk_idx
ALLOCATION_ALIGNMENT = 2 << 20  # bytes, of numbers for num_bytes


@dataclass
class Config:
    """Of a call in normal mode. num_sms: thread blocks of its kernels at most, 0 for as many as Tokenway chooses. The
    others are sizes of DeepEP's chunks and buffers, which Tokenway does not have: they change nothing."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """A number for Buffer's num_nvl_bytes: bytes of rows as long as that, 256 from each rank. Tokenway's windows
        follow what is sent, not this."""
        return 256 * num_ranks * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: Tokenway has no buffer of that kind."""
        return 0


def low_latency_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """A number for Buffer's num_rdma_bytes: of bfloat16 rows, from each rank for each of its experts."""
    return 2 * hidden * num_max_dispatch_tokens_per_rank * max(num_experts, num_ranks)


def start_tokens() -> int:
    """Tokens of a rank that groups of normal mode have room for from the start, by the environment; alike on all
    ranks. Errors: InvalidArgument."""
    given = os.environ.get(MAX_TOKENS, "1")
    if not given.isdecimal() or not 1 <= int(given) < 2**31:
        raise InvalidArgument(f"environment variable {MAX_TOKENS} is {given!r}; it must be from 1 to {2**31 - 1}")
    return int(given)


def not_served(what: str, instead: str) -> NoReturn:
    """Raises Unsupported. instead: what to do."""
    raise Unsupported(f"{what} is not served by tokenway.compat.deep_ep: {instead}")
