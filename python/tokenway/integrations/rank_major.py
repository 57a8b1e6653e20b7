"""The exchange of one step after the other in rank_major, for frameworks that hold one object for each set of ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import tokenway as tw
from tokenway.integrations.groups import SharedGroup, Views, give_back
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

SCALES = "scales"  # the payload beside a row's values
_TWICE = "a dispatch follows another one without a combine between them"


class RankMajor:
    """A dispatch and its combine, then the next: rows by source, and a sum for each row back. So it is for all of them
    over one group: a combine that one leaves out, as experts raise, any of them refuses before it dispatches.

    shared: of the mode "low_latency"; group: its settings say which ids are received. max_tokens: of a rank in a step,
    the same on all ranks, until `make_room` says more. dtype, hidden: of the rows that experts return. dispatch_bytes:
    of a row that is sent, at most, so that no later one makes the group grow; a larger one does. Making it is
    collective."""

    def __init__(self, shared: SharedGroup, max_tokens: int, dtype: torch.dtype, hidden: int, dispatch_bytes: int):
        self.shared, self.max_tokens = shared, max_tokens
        self._dtype, self._hidden = dtype, hidden
        self._handle: Any = None  # dispatched, not combined yet
        self._views = Views(shared)
        size = max(dispatch_bytes, hidden * dtype.itemsize)
        self._largest = tw.RowType(size, "uint8", combine_dtype=dtype, combine_hidden=hidden)
        self._view = shared.with_room(self._largest, max_tokens)  # the group as the last dispatch's rows see it

    def make_room(self, tokens: int) -> None:
        """For dispatches of up to so many tokens of a rank from now on: what all ranks know, alike on all of them.
        Collective where that is more than before, else nothing. On a rank that has left a combine out the dispatch that
        follows is refused."""
        if tokens > self.max_tokens:
            self.shared.open.refuse()  # or its peers would wait in that one, and this rank here
            self.shared.with_room(self._largest, tokens)
            self.max_tokens = tokens

    def telling(self, bound: Any = None) -> AbstractContextManager[None]:
        """Around what precedes a dispatch: where it raises, peers are told at once. A combine that is missing is
        refused first, as they may wait in that one. bound: of the dispatch."""
        return gradients.telling(lambda: self._refuse(bound))

    def _refuse(self, bound: Any) -> None:
        # Both: a call of dispatch is a step of all ranks, so that whoever left the combine out is in step again.
        self.shared.open.refuse()
        self.shared.open.refused = False
        self._view.refuse_dispatch("rank_major", self.max_tokens if bound is None else bound)

    def refuse_combine(self) -> None:
        """Tells peers, who wait in it, that the combine of the last dispatch does not come, if it has not come yet."""
        self.shared.open.discard(self)
        pending, self._handle = self._handle, None
        if pending is not None:
            gradients.refuse_combine(pending, self._view)
            give_back(pending)

    def dispatch(
        self, tokens: Tensor, ids: Tensor, weights: Tensor | None, scales: Tensor | None, bound: int | None
    ) -> Any:
        """Sends rows [T, C] of any dtype, with scales [T, S] of any dtype beside them, to the ranks of their experts:
        `tokenway.Received` in rank_major, views until the combine. ids: [T, K] int32 or int64, -1 for none; weights:
        [T, K] of any floating dtype, None: 1. bound: of all ranks' T the largest, alike on all (None: max_tokens).

        A step of all ranks; never waits for the device, and can be captured once rows of this type were sent. Errors:
        as `Group.route` and `Group.dispatch`; peers hear of them at once. InvalidUsage before the combine of the last
        one over the group, whoever made it: peers that wait in that combine hear of it, and of this dispatch, and the
        next one is as ever."""
        self.shared.open.refuse()
        self._view = view = self._seen(tokens, scales, bound)
        bound = self.max_tokens if bound is None else bound
        with self.telling(bound):
            if self.shared.open.refused:
                raise tw.InvalidUsage(_TWICE)
            if not 1 <= bound <= self.max_tokens:
                raise tw.InvalidArgument.of("bound", f"is {bound}; it must be from 1 to {self.max_tokens}")
            handle = view.route(ids, None if weights is None else weights.float())
        try:
            received = view.dispatch(
                handle, tokens, None if scales is None else {SCALES: scales}, layout="rank_major", bound=bound
            )
        except Exception:
            give_back(handle)
            raise
        self._handle = handle
        self.shared.open.add(self, self.refuse_combine)
        return received

    def _seen(self, tokens: Tensor, scales: Tensor | None, bound: int | None) -> TypedGroup:
        """The group as such rows see it."""
        with self.telling(bound):
            for name, given in (("tokens", tokens), ("scales", scales)):
                if given is not None and given.dim() != 2:
                    raise tw.InvalidArgument.of(name, f"has shape {list(given.shape)}; it must have two dimensions")
            beside = None if scales is None else (scales.shape[1], scales.dtype)
            key = tokens.shape[1], tokens.dtype, beside
            view = self._views.find(key)
            if view is not None:
                return view
            payloads = None if beside is None else {SCALES: beside}
            rows = tw.RowType(tokens.shape[1], tokens.dtype, payloads, self._dtype, self._hidden)
            rows.all_payloads()  # which refuses dtypes that no rows have
        return self._views.make(key, rows, self.max_tokens)

    def combine(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Sums rows [N, b, H] or [N * b, H] over ranks, where they came from: [T, H] of their dtype, or in out. Rows
        are weighted and summed over the experts of this rank. A step of all ranks. Errors: as `Group.combine`, of which
        peers hear at once, and after which another dispatch may follow; InvalidUsage without a dispatch."""
        if self._handle is None:
            raise tw.InvalidUsage("a combine comes without a dispatch before it")
        handle, self._handle = self._handle, None
        self.shared.open.discard(self)
        try:
            with gradients.telling(lambda: gradients.refuse_combine(handle, self._view)):
                if rows.dim() < 2 or rows.shape[-1] != self._hidden:  # by its size it might pass for other rows
                    wanted = f"[N, b, {self._hidden}] or [N * b, {self._hidden}]"
                    raise tw.InvalidArgument.of("rows", f"has shape {list(rows.shape)}; it must be {wanted}")
                rows = rows.flatten(0, -2).contiguous()
            return self._view.combine(handle, rows, dtype=rows.dtype, out=out)
        except Exception:
            give_back(handle)
            raise
