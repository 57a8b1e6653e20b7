"""As far as the benchmark uses it: 2.5, or with PRETENDED_DEEPEP=legacy what was before."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from pretended_exchange import gathered, here, plain, summed

topk_idx_t = torch.int64


class _EPBuffer:
    """Rows one after the other, in memory for all that may come."""

    def __init__(
        self,
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        use_fp8_dispatch: bool,
        explicitly_destroy: bool,
    ):
        self._n, self._most, self._fp8 = group.size(), num_max_tokens_per_rank, use_fp8_dispatch

    def get_theoretical_num_sms(self, experts: int, top_k: int) -> int:
        """Some."""
        return 8

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int, num_sms: int, do_cpu_sync: bool
    ) -> Any:
        """Five things."""
        assert isinstance(x, tuple) == self._fp8 and topk_idx.dtype == topk_idx_t and not do_cpu_sync
        parts = x if self._fp8 else (x,)
        found = [torch.zeros((self._n * self._most, part.shape[1]), dtype=part.dtype) for part in parts]
        of: list[tuple[int, int]] = []
        for source, (ids, theirs) in enumerate(gathered((topk_idx, [plain(part) for part in parts]))):
            for token in here(ids, num_experts):
                for into, part in zip(found, theirs, strict=True):
                    plain(into)[len(of)] = part[token]
                of.append((source, token))
        got = tuple(found) if self._fp8 else found[0]
        return got, None, None, (of, len(topk_idx)), None

    def combine(self, x: torch.Tensor, handle: Any, num_sms: int) -> Any:
        """Three things."""
        of, tokens = handle
        rank, pieces = dist.get_rank(), []
        for rows, theirs in gathered((x, of)):
            mine = [slot for slot, (source, _) in enumerate(theirs) if source == rank]
            pieces.append((rows[mine], [theirs[slot][1] for slot in mine]))
        return summed(pieces, tokens), None, None

    def destroy(self) -> None:
        """Nothing."""


class _Buffer:
    """Rows by expert."""

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        """Some."""
        return 1 << 20

    def __init__(self, group: Any, nvl: int, rdma: int, low_latency_mode: bool, num_qps_per_rank: int):
        assert low_latency_mode and rdma
        self._n, self._rank = group.size(), group.rank()

    def low_latency_dispatch(self, x: Any, ids: Any, most: int, experts: int, use_fp8: bool) -> Any:
        """Five things."""
        local = experts // self._n
        found = torch.zeros((local, self._n * most, x.shape[1]), dtype=x.dtype)
        of: list[list[tuple[int, int, int]]] = [[] for _ in range(local)]
        for source, (their_ids, rows) in enumerate(gathered((ids, x))):
            for token, k in [(t, k) for t in range(len(their_ids)) for k in range(their_ids.shape[1])][::-1]:
                slot = int(their_ids[token, k]) - self._rank * local
                if 0 <= slot < local:
                    found[slot, len(of[slot])] = rows[token]
                    of[slot].append((source, token, k))
        return found, torch.tensor([len(rows) for rows in of], dtype=torch.int32), of, None, None

    def low_latency_combine(self, x: Any, ids: Any, weights: Any, handle: Any) -> Any:
        """Three things."""
        pieces = []
        for rows, of in gathered((x, handle)):
            mine = [(e, slot, *where[1:]) for e, all_of in enumerate(of) for slot, where in enumerate(all_of)
                    if where[0] == self._rank]  # fmt: skip
            scaled = [rows[e, slot].float() * weights[token, k] for e, slot, token, k in mine]
            pieces.append((torch.stack(scaled), [token for *_, token, _ in mine]))
        return summed(pieces, len(ids)).to(x.dtype), None, None


if os.environ.get("PRETENDED_DEEPEP") == "legacy":
    Buffer = _Buffer
else:
    EPBuffer = _EPBuffer
