"""Tokenway in CollectiveX, SemiAnalysis' benchmark of expert-parallel libraries (InferenceX, experimental/CollectiveX).

It measures every library through one class of its own, `EPBackend` (bench/ep_backend.py); this is Tokenway's. In a
checkout of InferenceX:

1. Copy this file beside the other adapters, into experimental/CollectiveX/bench/.
2. In run_ep.py there, add "tokenway" to the choices of --backend, and where the classes are imported

       elif args.backend == "tokenway":
           from ep_tokenway import TokenwayBackend as Backend

3. Run a case as its README says for other backends, with `--backend tokenway`, under torchrun: each process needs the
   package, and its GPU reaches the others' over NVLink.

Rows are bfloat16 and lie by source rank (rank_major, low latency). They are combined where they came, as the other
adapters do it. Gate weights travel with the rows; the experts apply them, as CollectiveX's oracle does.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from ep_backend import EPBackend

import tokenway as tw


class TokenwayBackend(EPBackend):
    """Dispatch and combine of one group, which has room for the most tokens of the sweep."""

    name = "tokenway"
    maturity = "candidate"
    # One layout serves both: one row for each token and rank, with the gate applied before it returns.
    SUPPORTED_MODES = ("normal", "low-latency")
    receive_layout = "token-rank"
    combine_weight_semantics = "unweighted-rank-sum"
    # A dispatch of a new routing takes the lane that its combine gives back.
    requires_fresh_pair = True

    def create_buffer(self, spec: Any) -> None:
        """Connects the ranks that torchrun has started, and makes the group: collective."""
        on_gpu = self.device.type == "cuda"
        self._comm = tw.connect(device=str(self.device)) if on_gpu else tw.connect()
        self._group = tw.Group(
            self._comm,
            experts=self.args.experts,
            top_k=self.args.topk,
            hidden=self.args.hidden,
            max_tokens=spec.max_tokens_per_rank,
            dtype="bfloat16",
        )

    def _topk_idx_dtype(self) -> torch.dtype:
        return torch.int32

    def dispatch(self, problem: Any) -> Any:
        """Routes and sends. No wait for the device: ids are read there."""
        handle = self._group.route(problem.topk_idx, problem.topk_weights)
        received = self._group.dispatch(handle, problem.dispatch_x, bound=problem.T)
        return types.SimpleNamespace(handle=handle, received=received, combine_input=None)

    def stage(self, problem: Any, handle: Any) -> None:
        """Nothing moves: combine takes rows where the dispatch put them."""
        handle.combine_input = handle.received.tokens

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        """[T, H]: the sums of what all ranks return."""
        handle.out = self._group.combine(handle.handle, handle.combine_input)
        return handle.out

    def recv_tokens(self, handle: Any) -> int:
        """Rows that came."""
        return int(handle.received.counts.sum())

    def _filled(self, received: Any) -> torch.Tensor:
        """Which of the places [N, T] have rows: the first of each source."""
        places = torch.arange(received.tokens.shape[1], device=received.tokens.device)
        return places[None] < received.counts[:, None]

    def inspect_dispatch(self, problem: Any, handle: Any) -> Any:
        """What came, row by row, for the oracle: experts by their global numbers, -1 where they are another rank's."""
        received, filled = handle.received, self._filled(handle.received)
        slots = received.ids[filled].long()
        here = slots >= 0
        local = self._group.num_local_experts
        return types.SimpleNamespace(
            payload=received.tokens[filled],
            expert_ids=torch.where(here, slots + self.rank * local, -1),
            weights=received.weights[filled].masked_fill(~here, 0.0),
            local_expert_counts=torch.bincount(slots[here], minlength=local),
        )

    def combine_transformed(self, problem: Any, handle: Any, transformed: torch.Tensor) -> torch.Tensor:
        """The oracle's answers in the places of the rows that `inspect_dispatch` returned."""
        handle.received.tokens[self._filled(handle.received)] = transformed.to(handle.received.tokens.dtype)
        return self._group.combine(handle.handle, handle.received.tokens)

    def finalize(self, rc: int) -> int:
        """Closes what create_buffer has made: collective."""
        self._group.close()
        self._comm.close()
        return super().finalize(rc)
