"""What dispatches bring: received rows, and what is known of them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from tokenway import cuda, tensors

Tensor = Any  # np.ndarray or torch.Tensor


class Received:
    """What a dispatch brought to this rank.

    N ranks, b the call's bound, K ids per token, L experts of this rank, H elements per row:

    ============  ==================  =======================  =============
    field         rank_major          expert_major             dtype
    ============  ==================  =======================  =============
    tokens        [N, b, H]           [L, N*b, H]              the group's
    payloads[x]   [N, b, elements]    [L, N*b, elements]       the payload's
    ids           [N, b, K]           [L, N*b]                 id_dtype
    weights       [N, b, K]           [L, N*b]                 float32
    counts        [N] per source      [L] per expert           int32
    offsets       [N + 1]             [L + 1]                  int32
    origins                           [L, N*b]                 int64
    source_counts                     [L, N]                   int32
    ============  ==================  =======================  =============

    in grouped of low latency as in that of high throughput, P being all rows that the bound lets come (N * b * min(K,
    L) and row_alignment - 1 for each expert); and in high throughput, of the R' rows that came:

    ============  ==================  =======================  =============
    field         flat                grouped                  dtype
    ============  ==================  =======================  =============
    tokens        [R', H]             [P, H]                   the group's
    payloads[x]   [R', elements]      [P, elements]            the payload's
    ids           [R', K]             [P]                      id_dtype
    weights       [R', K]             [P]                      float32
    counts        [N] per source      [L] per expert           int32
    offsets       [N + 1]             [L + 1], padded          int32
    origins                           [P]                      int64
    source_counts                     [L, N]                   int32
    ============  ==================  =======================  =============

    With `index_block`, in rank_major and flat, for products that gather their rows (fused MoE kernels of Triton and
    CUTLASS): sorted_rows [C], block_experts [C / index_block] and num_sorted [1], all int32, C being what
    `Group.index_capacity` tells for the M rows of the view. sorted_rows holds row * K + k of each choice that is an
    expert's of this rank: `v // K` is a row of tokens.reshape(M, H), `weights.reshape(-1)[v]` its weight. Choices are
    in order of local expert, then of source and slot; each expert's are filled up to whole blocks by M * K, which also
    stands from num_sorted on. block_experts names each block's local expert, whatever id_space is, -1 from num_sorted
    on.

    Payloads that were asked for by column (`column_major`) are [elements, M] in grouped, zeros from row P on, and
    [L, elements, M] in expert_major, where M is N*b rounded up to whole 16 bytes and what is beyond the counts is not
    written. Rows beyond the counts hold nothing of use (in grouped, zeros up to the last of the offsets); ids are
    invalid_id and weights 0 there. offsets are the running sums of counts; in grouped, where each expert's rows begin,
    and at last P, or where the last expert's end if P is what there is room for.
    By expert, and only where `out` has a tensor for it, a dispatch tells where rows came from. origins: row * K + k
    that each row was taken from, rows counted as in flat, or as in rank_major, where slot p of source s is s * b + p;
    -1 where there is nothing. source_counts: how many of an expert's rows came from each source; they stand in order of
    source. (A slot is the token's number among those that its source sent here. Where its number in the source's batch
    is wanted, it travels as a payload.)
    In rank_major and flat, tokens and payloads are views of the window, valid until the next step on
    the lane begins: experts may compute in place, and the combine of the same handle may read them; later calls may
    not. After `Group.close` they show what was last there, and keep this rank's window, no peer's, as long as one of
    them lives; of a group that was given up, peers that have not noticed may still write there. Where counts were
    exchanged with `lease` they own their memory instead, for as long as they live, and `leased` is True, if there was
    room. The other fields belong to the handle: its next dispatch overwrites them. What autograd of
    PyTorch has saved of views that are over is its error in a backward pass ("modified by an inplace operation").

    On a CUDA device all of them are PyTorch tensors there, and hold what is said once the device has come to it, in
    order of the stream that the dispatch was called on. For another stream the same holds as for all of PyTorch: it
    must wait for that one, and whose memory it uses must know (`Tensor.record_stream`), but for views of the window,
    which no allocator takes back. The next step on the lane must be ordered after whatever reads them.
    """

    __slots__ = (
        "_fields",
        "_late",
        "_lists",
        "_made",
        "_merged",
        "_torch",
        "handle",
        "layout",
        "leased",
        "payloads",
        "tokens",
    )

    def __init__(
        self,
        handle: Any,
        layout: str,
        payloads: dict[str, Tensor],
        fields: dict[str, Tensor],
        late: dict[str, tuple[int, tuple[int, ...], str]],
        merged: dict[str, Tensor],
        torch: bool,
        leased: bool = False,
        lists: dict[str, Tensor] | None = None,
    ):
        self.handle = handle
        self.layout = layout
        self.leased = leased
        self.tokens: Tensor = fields["tokens"]
        self.payloads = payloads
        # Both may be those of other dispatches too. `late`: (address, shape, dtype) of views of the handle, made when
        # they are asked for, as making one takes a microsecond.
        self._fields = fields
        self._late = late
        self._merged = merged  # of the fields, kept beside them
        self._lists = lists
        self._made: dict[str, Tensor] | None = None
        self._torch = torch

    def _field(self, name: str) -> Tensor:
        if name not in self._late:
            return self._fields[name]
        if self._made is None:
            self._made = {}
        if name not in self._made:
            self._made[name] = self.handle.view(*self._late[name], self._torch)
        return self._made[name]

    def merged(self, name: str) -> Tensor:
        """Of rank_major "tokens", a payload, "ids" or "weights", with the two dimensions before a row's as one: [N * b,
        ...]. In flat, which has one, the field itself. A view, made once where the field is."""
        late = self._late.get(name)
        if self.layout != "rank_major":
            return self._fields[name] if late is None else self._field(name)
        if late is not None:
            pointer, (sources, slots, *row), dtype = late
            return self.handle.view(pointer, (sources * slots, *row), dtype, self._torch)
        found = self._merged.get(name)
        if found is None or (self._torch and found.requires_grad):  # as `Handle.view` has it
            whole = self._fields[name]
            shape = (whole.shape[0] * whole.shape[1], *whole.shape[2:])
            with tensors.to_keep(sys.modules["torch"]) if self._torch else nullcontext():
                found = self._merged[name] = whole.reshape(shape)
        return found

    @property
    def ids(self) -> Tensor:
        """Expert ids of the rows, in the group's id_space."""
        return self._field("ids")

    @property
    def weights(self) -> Tensor:
        """Their weights, float32."""
        return self._field("weights")

    @property
    def counts(self) -> Tensor:
        """[N] or [L] int32: rows from each rank, or of each expert."""
        return self._field("counts")

    @property
    def origins(self) -> Tensor | None:
        """[L, N*b] or [P] int64: row * K + k, by source, that each row was taken from; None if `out` had no tensor for
        it."""
        return self._fields.get("origins")

    @property
    def source_counts(self) -> Tensor | None:
        """[L, N] int32: rows of each expert from each source; None if `out` had no tensor for it."""
        return self._fields.get("source_counts")

    @property
    def sorted_rows(self) -> Tensor | None:
        """[C] int32: row * K + k of each choice, by expert; None without `index_block`."""
        return self._lists["sorted_rows"] if self._lists else None

    @property
    def block_experts(self) -> Tensor | None:
        """[C / index_block] int32: the local expert of each block, -1 beyond; None without `index_block`."""
        return self._lists["block_experts"] if self._lists else None

    @property
    def num_sorted(self) -> Tensor | None:
        """[1] int32: places of sorted_rows in use, on the device; None without `index_block`."""
        return self._lists["num_sorted"] if self._lists else None

    @property
    def offsets(self) -> Tensor:
        """[N + 1] or [L + 1] int32: running sums of counts, from 0; in grouped with what experts' rows are padded to.
        On a CUDA device they are enqueued there."""
        if self.layout == "grouped":
            return self._field("offsets")
        if self.handle.device is not None:
            return cuda.offsets(self.counts)
        offsets = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(np.asarray(self.counts), out=offsets[1:])
        return tensors.to_torch(offsets) if tensors.is_torch(self.counts) else offsets
