"""Dispatch and combine, as a group has them and its rows of other types."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tokenway import cuda
from tokenway.exchange import Exchange
from tokenway.handle import Handle, Tensor


class Calls:
    """What `Group` and `TypedRows` have in common: each is one that sets `_exchange`."""

    _exchange: Exchange

    def chooses(self, bound: int | None = None) -> str:
        """Which a dispatch is that names this bound and no layout: "low_latency", or "high_throughput", for which
        counts must have been exchanged. The group's mode, unless that is "auto". The same on all ranks, if bound is.
        """
        return self._exchange.mode_of(bound)

    @cuda.ranged("tokenway.dispatch")
    def dispatch(
        self,
        handle: Handle[Any],
        tokens: Tensor,
        payloads: Mapping[str, Tensor] | None = None,
        *,
        layout: str | None = None,
        bound: int | None = None,
        lane: int | None = None,
        out: Tensor | Mapping[str, Tensor] | None = None,
        column_major: Collection[str] | None = None,
        count: bool = True,
        send_only: bool = False,
        sm_limit: int = 0,
        index_block: int = 0,
    ) -> Any:
        """Sends every token to the ranks of its experts; returns `Received`, or `Pending[Received]` with send_only.

        tokens: [T, H], rows may be strided. payloads: [T, elements] each. layout: "rank_major" (views of the window, no
        copy; the default), "expert_major" or "grouped", in high throughput "flat" (views, no copy; the default) or
        "grouped".
        bound: b, equal on all ranks, T <= b <= max_tokens (default max_tokens): outputs are sized by it; in high
        throughput it only says how many parts a combine takes (`inbox_tokens`). In the mode "auto" a layout says which
        of the two the dispatch is: "grouped" is of high throughput once the handle's counts were exchanged, or where
        bound names more than `low_latency_tokens`, else of low latency, and "grouped_by_bound" is the latter always.
        Without a layout, it is of low latency if bound names at most `low_latency_tokens`, else of high throughput
        (`chooses` tells which it will be). lane: which one to lease (default: the next free one).
        out: a tensor for tokens, or a mapping of Received's fields and payload names, to have them written there.
        column_major: names of payloads (scales, for example) that the layouts by expert return by column, as grouped
        GEMMs read scales: "grouped" as [elements, M], M being the rows P rounded up to whole 16 bytes, zeros beyond
        them; "expert_major" as [L, elements, M], where what is beyond the counts is not written. count: whether
        `loads` counts it, on all ranks alike; not for further passes over tokens that were counted, as of multi-token
        prediction. sm_limit: on a CUDA device, thread blocks of this call's kernels, in place of the group's (default
        0: the group's); it holds for the completion of a pending call and in replays of a graph too, and need not be
        the same on all ranks. index_block: in "rank_major" and "flat", has the dispatch tell by which received rows the
        experts of this rank work, in blocks of so many places, 1 to 4096, of one expert each (`Received.sorted_rows`,
        `block_experts`, `num_sorted`): what products read that gather their rows, as fused MoE kernels do. Rows are not
        copied, and the combine is that of the layout: the caller sums a row's results over k. Ranks may give different
        ones (default 0: none).
        What is returned is detached: autograd does not know of the exchange (`tokenway.autograd` has one it knows of),
        but of writes to `out`, which may be no leaf that requires gradients.
        A step of all ranks. Errors: InvalidArgument (peers get PeerRefused at once), InvalidUsage, PeerRefused,
        BoundMismatch, GroupFinished.
        """
        return self._exchange.dispatch(
            handle, tokens, payloads, layout, bound, lane, out, column_major, count, send_only, sm_limit, index_block
        )

    @cuda.ranged("tokenway.combine")
    def combine(
        self,
        handle: Handle[Any],
        rows: Tensor,
        *,
        weighting: str = "none",
        weights: Tensor | None = None,
        layout: str | None = None,
        dtype: Any = None,
        out: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        choice_values: Tensor | None = None,
        bias: Tensor | None = None,
        send_only: bool = False,
        sm_limit: int = 0,
    ) -> Any:
        """Returns rows to their owners and sums them: [T, H], or `Pending` of it with send_only.

        rows: as dispatched, [N, b, H] or [L, N*b, H] (leading dimensions may be flattened), [R', H] or [P, H], float32,
        bfloat16 or float16. weighting: "none" (rows are weighted already) or "topk". layout: that of rows (default: the
        handle's last dispatch). dtype: of the result (default combine_dtype). out: [T, H] to write to. sm_limit: as of
        `dispatch`.
        Sums are float32 over k, then over ranks, both ascending, rounded to combine_dtype in between (rows of fp8 are
        quantised, as `RowType` says, and the result is by default of the dtype that tokens have): the same bits
        every time. The result is detached: autograd does not know of the exchange. Errors as `dispatch`; after a step
        that failed, the result is NaN. With token replicas also ReplicaMismatch, on all ranks, where a set holds unlike
        tokens; and all ranks complete what they have begun with send_only in one order.

        bias: [T, H], of the result's dtype or float32, rows may be strided: the first term of each token's sum, before
        its partials (per expert: its rows), in float32. So a token without experts gets its bias, and what a shared
        expert has made, or a residual, needs no addition of its own. It is this rank's own affair: it travels nowhere,
        and other ranks may give none; with token replicas the ranks of a set give the same, as each starts the sums of
        its share. `bias` may be `out`, the very tensor, which then has the sums in its place; otherwise they must not
        overlap. It is read when the sums are made: with send_only until `Pending.result`. After a step that failed, a
        bias that was `out` is NaN as any result is; a call that was refused for its arguments has not touched it.

        choice_values: a float32 value of each choice beside the rows, on all ranks or on none; what is returned is then
        (tokens, values), and out is such a pair, in which None stands for a new tensor. [N, b, K] or [R', K], where
        value k of a row is that of the row's k-th choice and counts if an expert of this rank serves it; by expert,
        [L, N*b] or [P], where each row is one choice. values: [T, K], each from the one rank that served the choice,
        bit for bit; 0 where none did. For gradients of router weights, in the backward pass of a dispatch. Needs a
        group with a `combine_room` of 4 * K bytes more than the rows take.

        In a group of `combine_rows="per_expert"` rows are by expert, "expert_major" or "grouped", and each returns as
        it is, rounded to combine_dtype. The owner multiplies row (t, k) by a weight: with weighting "topk" by that of
        the handle, or by weights[t, k], [T, K] float32 (only with weighting "none", and only in such a group), which
        may be another in each combine of a dispatch and need not be known before it; and sums over k ascending in
        float32, rounded once. The same bits on any number of ranks, whatever rank has which expert. With send_only
        weights are read until `Pending.result`.
        """
        return self._exchange.combine(
            handle, rows, weighting, weights, layout, dtype, out, choice_values, bias, send_only, sm_limit
        )
