"""The NumPy oracle: every rank of an exchange, simulated in one process.

All other implementations must return the same bytes in the same places as this page does. It is
written to be read, and knows nothing of windows, steps or backends.

Letters: N ranks, E experts in all, L experts on one rank, T tokens of one rank (differs per rank), K ids per token, b
the bound (T <= b on every rank), H the hidden size.

    x = Exchange(ids, weights, experts=256, bound=128)       # ids[r]: [T_r, K]
    recv = [dispatch_rank_major(x, r, [tokens]) for r in range(x.ranks)]
    out = combine(x, [experts(r, recv[r]) for r in range(x.ranks)], weighting="topk")

Bits: sums are float32 and start from the first term (so one term passes through, signed zero included); each
multiplication and each addition is rounded to nearest even, none is fused. NaN stays NaN; its payload is unspecified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from tokenway.activation_reference import exponential as exponential
from tokenway.activation_reference import swiglu as swiglu
from tokenway.activation_reference import swiglu_backward as swiglu_backward
from tokenway.collective_reference import all_gatherv as all_gatherv
from tokenway.collective_reference import reduce_scatterv as reduce_scatterv
from tokenway.domain_reference import by_domain, folds
from tokenway.index_reference import index_capacity as index_capacity
from tokenway.index_reference import index_lists as index_lists
from tokenway.per_expert_reference import combine_per_expert as combine_per_expert
from tokenway.sum_reference import ordered_sum
from tokenway.view_reference import columns as columns
from tokenway.view_reference import columns_by_expert, source_counts
from tokenway.wire_reference import FP8, travelled

Array = np.ndarray
Placement = tuple[Array, Array]

LAYOUTS = ("rank_major", "expert_major", "flat", "grouped")
WEIGHTINGS = ("none", "topk")
DTYPES = tuple(np.dtype(d) for d in (np.float32, ml_dtypes.bfloat16, np.float16))


# ---- placement -----------------------------------------------------------------------------------


def contiguous_placement(experts: int, ranks: int) -> Placement:
    """Where experts live by default: contiguous blocks, the first E mod N ranks hold one more.

    Returns (rank [E] int32, slot [E] int32): the rank of each expert and its local slot there.
    """
    sizes = [experts // ranks + (r < experts % ranks) for r in range(ranks)]
    rank = np.repeat(np.arange(ranks, dtype=np.int32), sizes)
    slot = np.concatenate([np.arange(n, dtype=np.int32) for n in sizes])
    return rank, slot


def placement(experts: int, ranks: int, expert_map: Placement | None = None) -> Placement:
    """`expert_map`, checked, or the contiguous placement. Returns (rank [E], slot [E]), int32.

    Raises ValueError unless every rank is in 0..N-1 and the slots of each rank are 0..L-1.
    """
    if expert_map is None:
        return contiguous_placement(experts, ranks)
    rank, slot = (np.asarray(a, dtype=np.int32) for a in expert_map)
    if rank.shape != (experts,) or slot.shape != (experts,):
        raise ValueError(f"expert_map: shapes {rank.shape}, {slot.shape}; must be ({experts},)")
    if experts and not (rank.min() >= 0 and rank.max() < ranks):
        raise ValueError(f"expert_map: ranks {rank.min()}..{rank.max()}; allowed 0..{ranks - 1}")
    for r in range(ranks):
        if sorted(slot[rank == r]) != list(range(np.count_nonzero(rank == r))):
            raise ValueError(f"expert_map: slots of rank {r} are {slot[rank == r]}; must be dense")
    return rank, slot


# ---- routing -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the tokens of one rank go; -1 stands for "none"."""

    owner: Array  # [T, K] int32: rank that holds expert k of token t
    goes: Array  # [T, N] bool: token t goes to rank d
    slot: Array  # [T, N] int32: its slot there: earlier tokens of this rank that also go to d
    position: Array  # [T, N] int32: index of d among the token's ranks, ascending
    counts: Array  # [N] int32: tokens that go to d


def route(ids: Array, rank_of: Array, ranks: int) -> Routing:
    """Route one rank's tokens. ids: int [T, K], -1 = no expert; rank_of: int32 [E]."""
    owner = np.append(rank_of, np.int32(-1))[ids]  # id -1 reads the -1 appended at the end
    goes = (owner[:, :, None] == np.arange(ranks)).any(axis=1)
    count = goes.astype(np.int32)
    return Routing(
        owner=owner,
        goes=goes,
        slot=np.where(goes, count.cumsum(axis=0, dtype=np.int32) - 1, np.int32(-1)),
        position=np.where(goes, count.cumsum(axis=1, dtype=np.int32) - 1, np.int32(-1)),
        counts=count.sum(axis=0, dtype=np.int32),
    )


def routing_layout(ids: Array, rank_of: Array, ranks: int) -> dict[str, Array]:
    """Where one rank's tokens go, by name as `tokenway.RoutingLayout` has it. ids: int [T, K], physical experts, -1 =
    none; rank_of: int32 [P]."""
    routed = route(ids, rank_of, ranks)
    return {
        "tokens_per_rank": routed.counts,
        "tokens_per_expert": np.bincount(ids[ids >= 0], minlength=len(rank_of)).astype(np.int32),
        "token_in_rank": routed.goes,
        "physical_ids": ids.astype(np.int32),
    }


def expert_rows(ids: Sequence[Array], experts: int) -> list[Array]:
    """The row of every (source, token, k) in its expert's expert_major block.

    Returns per source int32 [T, K]: how many earlier (source, token) pairs chose the same expert;
    -1 where there is no expert.
    """
    base = np.zeros(experts + 1, np.int32)
    rows = []
    for of_source in ids:
        chosen = np.zeros((len(of_source), experts + 1), np.int32)  # id -1 marks the last column
        np.put_along_axis(chosen, of_source % (experts + 1), 1, axis=1)
        earlier = base + chosen.cumsum(axis=0, dtype=np.int32) - chosen
        row = np.take_along_axis(earlier, of_source % (experts + 1), axis=1)
        rows.append(np.where(of_source < 0, np.int32(-1), row))
        base = base + chosen.sum(axis=0, dtype=np.int32)
    return rows


@dataclass(frozen=True, eq=False)
class Exchange:
    """One routing of all ranks: what dispatch and combine need besides the rows.

    ids: per rank int32 or int64 [T, K], -1 = no expert, an id at most once per token.
    weights: per rank float32 [T, K], or None for all ones.
    bound: b, at least every T. expert_map: (rank [E], slot [E]) or None for contiguous blocks.
    id_space: received ids are "local" slots or "global" expert ids. invalid_id: stands in
    received ids for no expert, an expert that lives elsewhere (local only), and empty rows.
    For the exact layouts, flat and grouped: max_recv_tokens rows are all that a rank receives, those
    of the last sources are dropped (None: no limit); experts' rows begin at multiples of alignment, which may
    be one for each rank. domain: ranks whose partials a combine folds (domain_reference.py); 0: none.
    """

    ids: Sequence[Array]
    weights: Sequence[Array] | None
    experts: int
    bound: int
    expert_map: Placement | None = None
    id_space: str = "local"
    invalid_id: int = -1
    max_recv_tokens: int | None = None
    alignment: int | Sequence[int] = 1
    domain: int = 0

    def __post_init__(self) -> None:
        """Refuse what no implementation accepts."""
        _one_of("id_space", self.id_space, ("local", "global"))
        if self.weights is not None and len(self.weights) != self.ranks:
            raise ValueError(f"weights: {len(self.weights)} arrays; must be {self.ranks}")
        for r, ids in enumerate(self.ids):
            if ids.ndim != 2 or ids.shape[1] != self.top_k or ids.dtype not in (np.int32, np.int64):
                raise ValueError(f"ids[{r}]: {ids.dtype} {ids.shape}; must be int32/64 [T, K]")
            if len(ids) > self.bound:
                raise ValueError(f"ids[{r}]: {len(ids)} tokens; allowed 0..{self.bound} (bound)")
            for t, k in np.argwhere((ids < -1) | (ids >= self.experts))[:1]:
                raise ValueError(f"ids[{r}][{t}, {k}]: {ids[t, k]}; allowed -1..{self.experts - 1}")
            ordered = np.sort(ids, axis=1)
            if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
                raise ValueError(f"ids[{r}]: an id stands twice in one token")
            if self.weight[r].shape != ids.shape or self.weight[r].dtype != np.float32:
                raise ValueError(f"weights[{r}]: must be float32 {ids.shape}")

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.ids)

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids[0].shape[1]

    @cached_property
    def placement(self) -> Placement:
        """(rank [E], slot [E]), int32."""
        return placement(self.experts, self.ranks, self.expert_map)

    @cached_property
    def weight(self) -> list[Array]:
        """Per rank float32 [T, K]: the weights, or ones."""
        if self.weights is None:
            return [np.ones(ids.shape, np.float32) for ids in self.ids]
        return list(self.weights)

    @cached_property
    def routing(self) -> list[Routing]:
        """`route` of every rank."""
        return [route(ids, self.placement[0], self.ranks) for ids in self.ids]

    @cached_property
    def expert_row(self) -> list[Array]:
        """`expert_rows` of the exchange."""
        return expert_rows(self.ids, self.experts)

    @cached_property
    def kept(self) -> Array:
        """[N, N] int64: rows from each rank (first) to each that are not dropped."""
        counts = np.array([r.counts for r in self.routing], np.int64)
        if self.max_recv_tokens is None:
            return counts
        room = self.max_recv_tokens - (counts.cumsum(axis=0) - counts)
        return np.clip(room, 0, counts)

    @cached_property
    def kept_ids(self) -> list[Array]:
        """Per rank [T, K]: the ids, -1 where the token's row to that expert's rank was dropped."""
        ids = []
        for s, of in enumerate(self.ids):
            r = self.routing[s]
            dropped = r.goes & (r.slot >= self.kept[s])
            lost = np.take_along_axis(dropped, np.maximum(r.owner, 0), axis=1) & (r.owner >= 0)
            ids.append(np.where(lost, -1, of))
        return ids

    @cached_property
    def kept_row(self) -> list[Array]:
        """`expert_rows` of what is not dropped."""
        return expert_rows(self.kept_ids, self.experts)

    def sources(self, rank: int) -> Array:
        """[N + 1]: where each source's rows begin in the flat layout of `rank`."""
        return np.append(0, self.kept[:, rank].cumsum())

    def routed_rows(self, rank: int) -> Array:
        """[L] int32: rows that are routed to each local expert of `rank`, those that are dropped too."""
        chosen = np.concatenate([of[of >= 0] for of in self.ids])
        return np.bincount(chosen, minlength=self.experts)[self.local_experts(rank)].astype(np.int32)

    def blocks(self, rank: int) -> Array:
        """[L + 1] int32: where each local expert's rows begin in the grouped layout of `rank`. Dropped rows have places
        too, which hold nothing: sizes follow from what was routed."""
        rows = self.routed_rows(rank).astype(np.int64)
        alignment = self.alignment if isinstance(self.alignment, int) else self.alignment[rank]
        return np.append(0, (-(-rows // alignment) * alignment).cumsum()).astype(np.int32)

    def local_experts(self, rank: int) -> Array:
        """Expert ids that live on `rank`, by local slot: int [L]."""
        here = np.flatnonzero(self.placement[0] == rank)
        return here[np.argsort(self.placement[1][here])]


# ---- dispatch ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Received:
    """What dispatch leaves at one rank; rows beyond `counts` are unspecified (here: zero).

    rank_major: payloads [N, b, ...], counts [N] int32, ids [N, b, K], weights [N, b, K] float32.
    expert_major: payloads [L, N*b, ...], counts [L] int32, ids [L, N*b], weights [L, N*b] float32.
    flat: payloads [R', ...], counts [N], ids [R', K], weights [R', K]; grouped: payloads [P, ...],
    zero between experts, counts [L], ids [P], weights [P]. By expert: origins int64, like ids: row * K + k of
    rank_major or flat that a row was taken from, -1 for none; source_counts [L, N] int32, rows by source.
    ids have the type of the routing's ids; empty rows have ids = invalid_id and weights = 0.
    """

    payloads: list[Array]
    counts: Array
    ids: Array
    weights: Array
    origins: Array | None = None
    source_counts: Array | None = None


def dispatch_rank_major(x: Exchange, rank: int, payloads: Sequence[Sequence[Array]]) -> Received:
    """Dispatch, as `rank` receives it: slot p of source s at [s, p].

    payloads[i][s]: [T_s, ...], any dtype; the bytes are copied.
    """
    shape = (x.ranks, x.bound)
    counts = np.array([r.counts[rank] for r in x.routing], np.int32)
    ids = np.full((*shape, x.top_k), x.invalid_id, x.ids[0].dtype)
    weights = np.zeros((*shape, x.top_k), np.float32)
    received = [np.zeros(shape + of[0].shape[1:], of[0].dtype) for of in payloads]
    for s, n in enumerate(counts):
        tokens = np.flatnonzero(x.routing[s].goes[:, rank])  # ascending: token p is in slot p
        known = x.ids[s][tokens] >= 0
        if x.id_space == "local":
            known = x.routing[s].owner[tokens] == rank
        ids[s, :n] = np.where(known, _received_id(x, x.ids[s][tokens]), x.invalid_id)
        weights[s, :n] = x.weight[s][tokens]
        for out, of in zip(received, payloads, strict=True):
            out[s, :n] = of[s][tokens]
    return Received(received, counts, ids, weights)


def dispatch_expert_major(
    x: Exchange, rank: int, payloads: Sequence[Sequence[Array]], column_major: Sequence[int] = ()
) -> Received:
    """Dispatch, as `rank` sees it by expert: rows of a local expert in (source, token) order.

    payloads[i][s]: [T_s, ...], any dtype; a token stands once under each of its local experts. Those in `column_major`
    come by column.
    """
    shape = (len(x.local_experts(rank)), x.ranks * x.bound)
    counts = np.zeros(shape[0], np.int32)
    ids = np.full(shape, x.invalid_id, x.ids[0].dtype)
    weights = np.zeros(shape, np.float32)
    origins = np.full(shape, -1, np.int64)
    received = [np.zeros(shape + of[0].shape[1:], of[0].dtype) for of in payloads]
    for s in range(x.ranks):
        t, k = np.nonzero(x.routing[s].owner == rank)
        expert = x.ids[s][t, k]
        at = x.placement[1][expert], x.expert_row[s][t, k]
        np.add.at(counts, at[0], 1)
        origins[at] = (s * x.bound + x.routing[s].slot[t, rank]) * x.top_k + k
        ids[at] = _received_id(x, expert)
        weights[at] = x.weight[s][t, k]
        for out, of in zip(received, payloads, strict=True):
            out[at] = of[s][t]
    shown = [columns_by_expert(rows) if i in column_major else rows for i, rows in enumerate(received)]
    return Received(shown, counts, ids, weights, origins, source_counts(x.ids, x.local_experts(rank)))


def dispatch_flat(x: Exchange, rank: int, payloads: Sequence[Sequence[Array]]) -> Received:
    """Dispatch, as `rank` receives it in high throughput: the rows of source 0, then of 1 and so on.

    payloads[i][s]: [T_s, ...], any dtype; the bytes are copied.
    """
    rows = dispatch_rank_major(x, rank, payloads)
    kept = x.kept[:, rank]

    def flat(of: Array) -> Array:
        return np.concatenate([of[s, :n] for s, n in enumerate(kept)])

    return Received([flat(of) for of in rows.payloads], kept.astype(np.int32), flat(rows.ids), flat(rows.weights))


def dispatch_grouped(
    x: Exchange, rank: int, payloads: Sequence[Sequence[Array]], column_major: Sequence[int] = ()
) -> Received:
    """Dispatch, as `rank` sees it by expert in high throughput: `x.blocks(rank)` says which rows are whose.

    payloads[i][s]: [T_s, ...], any dtype; a token stands once under each of its local experts. Those in `column_major`
    come by column, as `columns` says.
    """
    blocks = x.blocks(rank)
    counts = np.zeros(len(blocks) - 1, np.int32)
    ids = np.full(blocks[-1], x.invalid_id, x.ids[0].dtype)
    weights = np.zeros(blocks[-1], np.float32)
    origins = np.full(blocks[-1], -1, np.int64)
    received = [np.zeros((blocks[-1], *of[0].shape[1:]), of[0].dtype) for of in payloads]
    for s in range(x.ranks):
        t, k = np.nonzero((x.routing[s].owner == rank) & (x.kept_ids[s] >= 0))
        expert = x.ids[s][t, k]
        at = blocks[x.placement[1][expert]] + x.kept_row[s][t, k]
        origins[at] = (x.sources(rank)[s] + x.routing[s].slot[t, rank]) * x.top_k + k
        np.add.at(counts, x.placement[1][expert], 1)
        ids[at] = _received_id(x, expert)
        weights[at] = x.weight[s][t, k]
        for out, of in zip(received, payloads, strict=True):
            out[at] = of[s][t]
    received = [columns(rows) if i in column_major else rows for i, rows in enumerate(received)]
    return Received(received, counts, ids, weights, origins, source_counts(x.kept_ids, x.local_experts(rank)))


def _received_id(x: Exchange, ids: Array) -> Array:
    """Ids as a receiver reads them: global as sent, or local slots. Same shape; -1: any value."""
    return ids if x.id_space == "global" else x.placement[1][ids]


# ---- combine -------------------------------------------------------------------------------------


@np.errstate(all="ignore")  # overflow to inf and inf - inf are results like any other
def combine(
    x: Exchange,
    rows: Sequence[Array],
    *,
    layout: str = "rank_major",
    weighting: str = "none",
    wire: Any = None,
    scale: float | None = None,
    out: Any = None,
    owners: Iterable[int] | None = None,
    bias: Sequence[Array | None] | None = None,
) -> list[Array]:
    """Combine, as all ranks (or only `owners`) receive it: per owner [T, H] of dtype `out`.

    rows[r]: what rank r's experts returned, [N, b, H] (rank_major), [L, N*b, H] (expert_major), [R', H] (flat) or
    [P, H] (grouped), float32, bfloat16 or float16; rows beyond the counts are not read. `wire` is the dtype that
    travels, float8_e4m3fn too (`scale`: wire_reference.py), `out` the result's; both default to that of the rows.

    A token's partials are added over its ranks ascending, in float32, and rounded once to `out`; where x has domains,
    their folds over domains ascending. A token without experts gives zeros. bias: per owner [T, H], float32 or of dtype
    `out`, the first term of each sum, or None; so a token without experts gives its bias.
    """
    wire, out = rows[0].dtype if wire is None else wire, rows[0].dtype if out is None else out
    for name, dtype in (("rows", rows[0].dtype), ("wire", wire), ("out", out)):
        _one_of(name, np.dtype(dtype), (*DTYPES, FP8) if name == "wire" else DTYPES)

    def terms(owner: int) -> Iterable[tuple[Array, Array]]:
        for r in range(x.ranks):
            part = partial_rows(x, r, owner, rows[r], layout=layout, weighting=weighting)
            yield np.flatnonzero(x.routing[owner].goes[:, r])[: len(part)], travelled(part, wire, scale)

    def summed(owner: int) -> Iterable[tuple[Array, Array]]:
        if not by_domain(x.domain, x.ranks):
            return terms(owner)
        return folds((len(x.ids[owner]), rows[0].shape[-1]), terms(owner), x.domain, wire)

    owners = range(x.ranks) if owners is None else owners
    first = [None] * x.ranks if bias is None else bias
    return [ordered_sum((len(x.ids[o]), rows[0].shape[-1]), summed(o), first[o]).astype(out) for o in owners]


@np.errstate(all="ignore")
def partial_rows(x: Exchange, rank: int, source: int, rows: Array, *, layout: str, weighting: str) -> Array:
    """What `rank` sends back to `source`, before it is rounded to what travels: [n, H] float32, row p for the
    token of slot p; in the exact layouts those are left out that were dropped.

    rank_major and flat: the row is the sum over the local experts already; with topk it is multiplied by
    the sum of the token's local weights. expert_major and grouped: the rows of the token's local experts, with
    topk each times its weight, are added. Both sums run over k ascending.
    """
    _one_of("layout", layout, LAYOUTS)
    _one_of("weighting", weighting, WEIGHTINGS)
    tokens = np.flatnonzero(x.routing[source].goes[:, rank])
    if layout in ("flat", "grouped"):
        tokens = tokens[: x.kept[source, rank]]
    here = x.routing[source].owner[tokens] == rank
    weights = x.weight[source][tokens]
    per_k = [(k, np.flatnonzero(here[:, k])) for k in range(x.top_k)]

    if layout in ("rank_major", "flat"):
        begin = x.sources(rank)[source]
        mine = rows[begin : begin + len(tokens)] if layout == "flat" else rows[source, : len(tokens)]
        if weighting == "none":
            return mine.astype(np.float32)
        local = ((at, weights[at, k, None]) for k, at in per_k)
        return ordered_sum((len(tokens), 1), local) * mine.astype(np.float32)

    def terms() -> Iterable[tuple[Array, Array]]:
        for k, at in per_k:
            t = tokens[at]
            expert = x.placement[1][x.ids[source][t, k]]
            if layout == "grouped":
                row = rows[x.blocks(rank)[expert] + x.kept_row[source][t, k]].astype(np.float32)
            else:
                row = rows[expert, x.expert_row[source][t, k]].astype(np.float32)
            yield at, row if weighting == "none" else weights[at, k, None] * row

    return ordered_sum((len(tokens), rows.shape[-1]), terms())


def choice_values(x: Exchange, values: Sequence[Array], *, layout: str = "rank_major") -> list[Array]:
    """The values of choices that a combine returns beside its rows: per owner [T, K] float32.

    values[r]: what rank r has for the choices of the rows that it received, float32: [N, b, K] (rank_major) or
    [R', K] (flat), where those of experts elsewhere are not read, [L, N*b] (expert_major) or [P] (grouped).
    Each value is the one of the rank that holds the chosen expert, bit for bit; 0 where the id is -1, and in
    the exact layouts where the row was dropped.
    """
    _one_of("layout", layout, LAYOUTS)
    exact = layout in ("flat", "grouped")
    out = [np.zeros(ids.shape, np.float32) for ids in x.ids]
    for s, routed in enumerate(x.routing):
        for r in range(x.ranks):
            served = routed.owner == r
            if exact:
                served &= x.kept_ids[s] >= 0
            t, k = np.nonzero(served)
            expert = x.placement[1][x.ids[s][t, k]]
            if layout == "rank_major":
                mine = values[r][s, routed.slot[t, r], k]
            elif layout == "flat":
                mine = values[r][x.sources(r)[s] + routed.slot[t, r], k]
            elif layout == "expert_major":
                mine = values[r][expert, x.expert_row[s][t, k]]
            else:
                mine = values[r][x.blocks(r)[expert] + x.kept_row[s][t, k]]
            out[s][t, k] = mine
    return out


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}; allowed: {', '.join(map(str, allowed))}")
