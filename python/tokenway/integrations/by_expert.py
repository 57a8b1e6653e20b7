"""The exchange around experts that take rows by expert, each with its weight, forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor
from torch.nn import functional

import tokenway as tw
from tokenway import autograd
from tokenway.integrations.fp8_rows import bring, wire_of
from tokenway.integrations.groups import SharedGroup, Sizes, Views
from tokenway.pytorch import gradients


class ByExpert:
    """Tokens to their experts, and what experts make of them back and summed, in two calls.

    shared: of the mode "high_throughput". sizes: what ranks know of each other's batches; how: in which words a user
    gives them. fp8_rows: rows travel to their experts as fp8, and back as they are."""

    def __init__(self, shared: SharedGroup, sizes: Sizes, how: str, fp8_rows: bool = False):
        self.shared = shared
        self._views, self._sizes, self._how, self._fp8_rows = Views(shared), sizes, how, fp8_rows

    def dispatch(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> autograd.Routed:
        """tokens [T, H] of float32 or bfloat16, ids [T, K] int64, -1 for none, weights [T, K] of any floating dtype: in
        the layout grouped, of which the first `offsets[-1]` rows are used. Two steps of all ranks, and one in the
        backward pass. On a CUDA device the host waits for the number of rows. Errors: those of `tokenway.autograd` and
        `SharedGroup.with_room`; InvalidUsage without sizes; InvalidArgument for more tokens than were said."""
        room = max(self._sizes.room(len(tokens), self._how), 1)
        group = self._views.plain(tokens.shape[1], tokens.dtype, room)
        wire = wire_of(self._views, tokens.shape[1], room) if self._fp8_rows else None
        with gradients.telling(partial((wire or group).refuse_routing, "grouped")):
            self._sizes.check(len(tokens), self._how)
            weights = weights.float()
        if wire is not None:
            return bring(group, wire, tokens, ids, weights, "grouped", None)
        return autograd.dispatch(group, tokens, ids, weights, layout="grouped")

    @staticmethod
    def used(routed: autograd.Routed) -> int:
        """How many rows experts are given, with what fills them up to a multiple of row_alignment. Waits for nothing:
        `offsets[-1]`, as the exchange of counts told the host."""
        rows, step = routed.handle.expert_rows, routed.handle.group.settings.row_alignment or 1
        return int((rows if step == 1 else -(-rows // step) * step).sum())

    @staticmethod
    def combine(routed: autograd.Routed, rows: Tensor, *, weighted: bool = True) -> Tensor:
        """rows: what experts made of the rows that are used, [R, H] -> [T, H], summed over a token's experts. weighted:
        False for rows that are still to be multiplied by their weights, which is done in float32. A step of all ranks,
        and one in the backward pass. Errors: as `autograd.combine`; InvalidArgument for more or fewer rows than are
        used."""
        with gradients.telling(partial(gradients.refuse_combine, routed.handle)):
            used = ByExpert.used(routed)
            if len(rows) != used:
                told = f"are {len(rows)}; they must be {used}, as many as experts were given"
                raise tw.InvalidArgument.of("rows", told)
            rows = rows if weighted else rows.float() * routed.weights[:used, None]
            if missing := len(routed.tokens) - len(rows):  # a pad by nothing would copy all of them
                rows = functional.pad(rows, (0, 0, 0, missing))
        return autograd.combine(routed, rows)

    @staticmethod
    def telling(routed: autograd.Routed) -> AbstractContextManager[None]:
        """Around experts: peers, which wait in the combine, are told where they raise."""
        return gradients.telling(partial(gradients.refuse_combine, routed.handle))
