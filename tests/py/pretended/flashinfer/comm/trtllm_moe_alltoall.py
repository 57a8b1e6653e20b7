"""As far as the benchmark uses it: rows by source, in an order of its own, and room for the experts' rows."""

from __future__ import annotations

from typing import Any

import torch
from pretended_exchange import gathered, here, plain, summed


class MoeAlltoAll:
    """One dispatch, then one combine, over and over."""

    def __init__(
        self, mapping: Any, max_num_tokens: int, top_k: int, num_experts: int, hidden_size: int, mnnvl_config: Any
    ):
        self._n, self._rank = mapping.moe_ep_size, mapping.moe_ep_rank
        self._most, self._experts, self._room = max_num_tokens, num_experts, None
        self._dispatched = False

    def dispatch(self, ids: torch.Tensor, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        """[n, most, ...] of each payload."""
        assert not self._dispatched, "dispatch called twice without combine"
        assert ids.dtype == torch.int32 and most <= self._most
        self._dispatched, self._tokens = True, len(ids)
        found = [torch.zeros((self._n, most, *payload.shape[1:]), dtype=payload.dtype) for payload in payloads]
        self._of = []
        for source, (their_ids, theirs) in enumerate(gathered((ids, [plain(payload) for payload in payloads]))):
            self._of.append(here(their_ids, self._experts))
            for into, payload in zip(found, theirs, strict=True):
                for slot, token in enumerate(self._of[source]):
                    plain(into)[source, slot] = payload[token]
        return found

    def get_combine_payload_tensor_in_workspace(self, most: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Where the experts' rows go."""
        assert self._dispatched
        if self._room is None:
            self._room = torch.zeros((self._n, most, hidden), dtype=dtype)
        return self._room

    def combine(self, payload: torch.Tensor, most: int, payload_in_workspace: bool) -> torch.Tensor:
        """[T, H]."""
        assert self._dispatched and payload_in_workspace and payload is self._room
        self._dispatched = False
        everyone = gathered((payload, self._of))
        return summed(
            [(rows[self._rank, : len(of[self._rank])], of[self._rank]) for rows, of in everyone], self._tokens
        )
