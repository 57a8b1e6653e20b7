"""Cases: what a group is made of and what its ranks exchange, as data that prints and shrinks.

Everything follows from seeds, so a rank makes its own inputs and the test makes those of all. Every (token, expert)
pair has an answer of its own: `answers` is an affine map that differs per expert, which NumPy rounds alike everywhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from bits import FLOATS, as_bits, same, same_columns

import tokenway as tw
from tokenway import reference as ref
from tokenway import replica_reference as replicas
from tokenway.grouped_reference import dispatch_grouped_by_bound
from tokenway.tensors import numpy_dtype

LAYOUTS = {  # by mode
    "low_latency": ("rank_major", "expert_major", "grouped_by_bound"),
    "high_throughput": ("flat", "grouped"),
}
BY_EXPERT = ("expert_major", "grouped", "grouped_by_bound")  # the last is what calls name grouped in low latency
ROUTINGS = ("random", "holes", "one", "none", "few")
SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, 65504.0, 3e38, -1.0], np.float32)


@dataclass(frozen=True)
class Setup:
    """A group: Group's settings, hashable."""

    ranks: int = 2
    experts: int = 8
    top_k: int = 2
    hidden: int = 16
    max_tokens: int = 8
    dtype: str = "bfloat16"
    payloads: tuple[tuple[int, str], ...] = ()
    combine_dtype: str = "bfloat16"
    combine_hidden: int | None = None
    expert_map: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    lanes: int = 1
    id_dtype: str = "int32"
    id_space: str = "local"
    invalid_id: int = -1
    mode: str = "low_latency"
    max_recv_tokens: int | None = None
    overflow: str = "refuse"
    row_alignment: int | None = None
    sm_limit: int = 0
    lease_bytes: int = 0
    inbox_tokens: int | None = None
    low_latency_tokens: int | None = None
    # What rows return as, in place of combine_dtype; calls name it, and the group has room for it.
    wire: str | None = None
    wire_scale: float | None = None
    combine_rows: str = "per_rank"
    token_replicas: int = 1  # ranks of a set have the same tokens in each round
    domain: int = 0
    # Experts in several slots, which expert_map then places.
    slot_expert: tuple[int, ...] | None = None
    policy: str = "round_robin"
    shares: tuple[float, ...] | None = None

    @property
    def exact(self) -> bool:
        """Whether counts are exchanged first, and outputs are as large as what comes: in all rounds."""
        return self.mode == "high_throughput"

    @property
    def default_bound(self) -> int:
        """Of rounds of low latency, and the most tokens that they may have."""
        if self.mode != "auto":
            return self.max_tokens
        return self.low_latency_tokens or min(512, self.inbox_tokens or self.max_tokens)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of Group."""
        settings = asdict(self)
        for name in ("ranks", "slot_expert", "policy", "shares", "wire", "wire_scale"):
            del settings[name]
        if self.wire is not None:
            settings["combine_room"] = self.row_type().combine_bytes
        if self.slot_expert is not None:
            settings["expert_map"] = tw.Placement(
                self.slot_expert, where=self.expert_map, policy=self.policy, shares=self.shares
            )
        settings["payloads"] = {f"p{q}": payload for q, payload in enumerate(self.payloads)}
        return settings

    def row_type(self) -> tw.RowType:
        """What its rows consist of, for calls of a group that has others."""
        payloads = {f"p{q}": payload for q, payload in enumerate(self.payloads)}
        back = self.wire or self.combine_dtype
        return tw.RowType(self.hidden, self.dtype, payloads, back, self.combine_hidden, self.wire_scale)

    def calls(self, group: tw.Group) -> Any:
        """What makes its calls: the group, or its rows of another type."""
        return group if self.wire is None else group.rows(self.row_type())

    @property
    def slots(self) -> int:
        """Places of experts: what the ids of an exchange name, behind the maps."""
        return self.experts if self.slot_expert is None else len(self.slot_expert)

    def slots_of(self, ids: np.ndarray, rank: int) -> np.ndarray:
        """The slots that serve the choices of a rank."""
        if self.slot_expert is None:
            return ids
        home, _ = ref.placement(self.slots, self.ranks, self.expert_map)
        shares = None if self.shares is None else np.array(self.shares, np.float32)
        return replicas.slots_of(ids, np.array(self.slot_expert), rank, self.policy, home, shares)

    def first_of(self, rank: int) -> int:
        """The first rank of a rank's set, from which the tokens of all its ranks follow."""
        return rank // self.token_replicas * self.token_replicas

    def share(self, tokens: int, rank: int) -> slice:
        """Of the tokens of its set those that a rank sends."""
        at, (each, more) = rank % self.token_replicas, divmod(tokens, self.token_replicas)
        begin = at * each + min(at, more)
        return slice(begin, begin + each + (at < more))

    def of_sets(self, shares: list[np.ndarray]) -> list[np.ndarray]:
        """What the ranks of each set have together, for each of its ranks."""
        if self.token_replicas == 1:
            return shares
        sets = [shares[first : first + self.token_replicas] for first in range(0, self.ranks, self.token_replicas)]
        return [np.concatenate(of) for of in sets for _ in of]

    @property
    def width(self) -> int:
        """Elements of a combined row."""
        return self.hidden if self.combine_hidden is None else self.combine_hidden


@dataclass(frozen=True)
class Round:
    """One routing and what is done with it."""

    tokens: tuple[int, ...]  # per rank
    seed: int = 0
    routing: str = "random"
    bound: int | None = None
    layout: str = "rank_major"
    weighting: str = "topk"
    late_weights: bool = False  # per expert: weights come with the combine, whose weighting is "none"
    weights: bool = True  # False: no weights are given
    ids: str = "int32"  # dtype of the ids given
    rows: str = "float32"  # dtype of the experts' rows
    out: str = "float32"  # dtype of the result
    lane: int | None = None
    send_dispatch: bool = False
    send_combine: bool = False
    again: bool = False  # dispatch twice
    late: bool = False  # combine once more, without a lease
    lease: bool = False  # rows land in leases, if there is room, and stay there; and once more by the same routing
    release: bool = False  # give the channel back before the combine, which then has no lease
    strided: bool = False  # rows of all inputs are apart
    own: bool = False  # outputs are given
    reuse: bool = False  # a handle of an earlier round is updated
    special: bool = False  # NaN, inf, -0 among the tokens
    memory: bool = False  # the handle lies in memory of the caller
    fortran: bool = False  # ids and weights by column
    columns: tuple[int, ...] = ()  # payloads that are wanted by column, by their place among all
    room: int | None = None  # max_recv_tokens of its counts
    alignments: tuple[int | None, ...] = ()  # row_alignment of its counts, by rank in turns
    limits: tuple[int, ...] = ()  # sm_limit of its calls in turns, on each rank from another one on
    identity: bool = False  # experts return the received tokens themselves: the view, where there is one
    index_block: int = 0  # of its dispatches, in rank_major and flat
    chosen: bool = False  # in the mode "auto": the bound says which layout, not the call
    bias: tuple[str, ...] = ()  # of its combines, by rank in turns: "" for none, a dtype, or "place": where the sums go

    @property
    def exact(self) -> bool:
        """Whether it is a round of high throughput."""
        return self.layout in ("flat", "grouped")

    @property
    def named(self) -> str:
        """The layout as calls name it and as it is in results."""
        return "grouped" if self.layout == "grouped_by_bound" else self.layout

    def alignment(self, rank: int) -> int | None:
        """row_alignment of a rank's counts; None: the group's."""
        return self.alignments[rank % len(self.alignments)] if self.alignments else None


@dataclass(frozen=True)
class Case:
    """A group and its rounds. Rounds of one flight are under way together."""

    setup: Setup
    flights: tuple[tuple[Round, ...], ...]
    slow: int | None = None  # this rank sleeps here and there
    order: int = 0  # seed of the orders of completion, which differ per rank


def one(setup: Setup, *rounds: Round, **kwargs: Any) -> Case:
    """Rounds one after the other."""
    return Case(setup, tuple((r,) for r in rounds), **kwargs)


def fewer_ranks(case: Case, ranks: int) -> Case:
    """The same case for fewer ranks: what the last ones bring and hold is left out, or held by the first."""
    setup = case.setup
    if setup.ranks <= ranks:
        return case
    replicas = min(setup.token_replicas, ranks)
    if setup.token_replicas > 1:
        ranks -= ranks % replicas
        each = [tuple(r.tokens[rank // replicas * replicas] for rank in range(ranks)) for f in case.flights for r in f]
        alike = iter(each)
        case = replace(case, flights=tuple(tuple(replace(r, tokens=next(alike)) for r in f) for f in case.flights))
    placed = setup.expert_map
    if placed is not None:
        home, before = [rank % ranks for rank in placed[0]], placed[1]
        order = sorted(range(len(home)), key=lambda e: (before[e], e))
        slot = [sum(home[f] == home[e] for f in order[: order.index(e)]) for e in range(len(home))]
        placed = tuple(home), tuple(slot)
    flights = tuple(tuple(replace(r, tokens=r.tokens[:ranks]) for r in flight) for flight in case.flights)
    slow = None if case.slow is None else case.slow % ranks
    return replace(
        case, setup=replace(setup, ranks=ranks, expert_map=placed, token_replicas=replicas), flights=flights, slow=slow
    )


# ---- inputs --------------------------------------------------------------------------------------


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bytes: payloads are copied, not interpreted. Only bool has bytes that mean nothing."""
    kind = numpy_dtype(dtype)
    raw = np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), np.uint8)
    return (raw & (1 if dtype == "bool" else 255)).view(kind).reshape(shape)


def make_ids(setup: Setup, round_: Round, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [T, K], weights [T, K] float32) of one rank."""
    rank = setup.first_of(rank)
    rng = np.random.default_rng([round_.seed, rank, 1])
    shape = round_.tokens[rank], setup.top_k
    ids = rng.random((shape[0], setup.experts)).argsort(axis=1)[:, : setup.top_k]
    if round_.routing == "holes":
        ids = np.where(rng.random(shape) < 0.4, -1, ids)
    elif round_.routing == "few":  # most tokens go nowhere
        ids = np.where(rng.random((shape[0], 1)) < 0.8, -1, ids)
    elif round_.routing in ("one", "none"):
        ids = np.full(shape, -1)
        if round_.routing == "one" and shape[0]:
            column = np.arange(shape[0]) % setup.top_k
            ids[np.arange(shape[0]), column] = round_.seed % setup.experts
    weights = rng.standard_normal(shape).astype(np.float32)
    if round_.special and weights.size:
        weights.flat[:: max(weights.size // 3, 1)] = (-0.0, np.float32(1e-30), 3.0, 1.0)[rank % 4]
    return ids.astype(round_.ids), weights


def owner_weights(setup: Setup, round_: Round, rank: int) -> np.ndarray:
    """[T, K] float32: what one rank gives with its combine."""
    weights = make_ids(setup, replace(round_, seed=round_.seed + 5000), rank)[1]
    return weights


def make_bias(setup: Setup, round_: Round, rank: int) -> np.ndarray | None:
    """[T, H], from which one rank's sums start; ranks of a set have the same."""
    kind = round_.bias[rank % len(round_.bias)] if round_.bias else ""
    if not kind:
        return None
    rng = np.random.default_rng([round_.seed, setup.first_of(rank), 3])
    values = rng.choice(SPECIAL if round_.special else SPECIAL[3:5], (round_.tokens[rank], setup.width))
    values = np.where(rng.random(values.shape) < 0.2, values, rng.standard_normal(values.shape, np.float32))
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(round_.out if kind == "place" else kind))


def make_payloads(setup: Setup, round_: Round, rank: int) -> list[np.ndarray]:
    """[T, elements] of every payload, tokens first."""
    rank = setup.first_of(rank)
    rng = np.random.default_rng([round_.seed, rank, 2])
    shape = round_.tokens[rank], setup.hidden
    if setup.dtype in FLOATS:
        values = rng.standard_normal(shape, np.float32)
        if round_.special:
            values = np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape), values)
        with np.errstate(over="ignore"):
            tokens = values.astype(numpy_dtype(setup.dtype))
    else:
        tokens = random_bits(rng, shape, setup.dtype)
    extra = [random_bits(rng, (shape[0], n), dtype) for n, dtype in setup.payloads]
    return [tokens, *extra]


# ---- experts -------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def answers(
    setup: Setup, round_: Round, rank: int, tokens: np.ndarray, ids: Any, weights: Any, counts: Any, offsets: Any = None
) -> np.ndarray:
    """What the experts of `rank` make of what it received: rows as combine wants them.

    A float NaN stands wherever the library has no business reading.
    """
    home, slot = ref.placement(setup.slots, setup.ranks, setup.expert_map)
    valid = filled(round_, tokens, counts, offsets)
    if round_.identity:
        rows = tokens.astype(np.float32)
    elif round_.layout in ("rank_major", "flat"):
        rows = _rank_major_answers(setup, round_, rank, tokens, ids, weights, home, slot)
    else:
        here = np.flatnonzero(home == rank)
        here = here[np.argsort(slot[here])]
        expert = here[:, None, None]
        if round_.named == "grouped":  # further rows are nobody's
            expert = np.zeros((len(tokens), 1), int)
            expert[: offsets[-1], 0] = np.repeat(here, np.diff(offsets))
        rows = affine(_widen(tokens, setup.width), expert)
        if round_.weighting == "none":
            rows = weights[..., None] * rows
    rows = np.where(valid[..., None], rows, np.float32(np.nan))
    return np.ascontiguousarray(rows.astype(numpy_dtype(round_.rows)))


def filled(round_: Round, tokens: np.ndarray, counts: Any, offsets: Any) -> np.ndarray:
    """Which rows of a layout hold something: bool, the leading dimensions of tokens."""
    counts = np.asarray(counts)
    if round_.layout == "flat":
        return np.ones(len(tokens), bool)
    if round_.named == "grouped":
        places = [np.arange(p) < n for p, n in zip(np.diff(offsets), counts, strict=True)]
        return np.concatenate([np.zeros(0, bool), *places, np.zeros(len(tokens) - offsets[-1], bool)])
    return np.arange(tokens.shape[1]) < counts[:, None]


def _rank_major_answers(
    setup: Setup, round_: Round, rank: int, tokens: Any, ids: Any, weights: Any, home: Any, slot: Any
) -> np.ndarray:
    """Sum over the local experts of each row, k ascending, as an MoE module returns it."""
    expert_at = np.full(setup.slots + 1, -1)
    expert_at[slot[home == rank]] = np.flatnonzero(home == rank)
    wide = _widen(tokens, setup.width)
    total = np.zeros_like(wide)
    for k in range(setup.top_k):
        known = (ids[..., k] >= 0) & (ids[..., k] < setup.slots)
        expert = np.where(known, ids[..., k], -1)
        if setup.id_space == "global":
            expert = np.where(np.append(home, -1)[expert] == rank, expert, -1)
        else:
            expert = expert_at[expert]
        here = expert >= 0  # the others would cost as much, and be thrown away
        term = affine(wide[here], expert[here, None])
        if round_.weighting == "none":
            term = weights[here, k, None] * term
        total[here] += term
    return total


def affine(tokens: np.ndarray, expert: Any) -> np.ndarray:
    """Expert e's answer: another straight line for each, so no two experts agree on a token."""
    expert = np.asarray(expert, np.float32)
    return tokens * (np.float32(1) + (expert + 1) / 64) + (expert + 1) / 32


def _widen(tokens: np.ndarray, width: int) -> np.ndarray:
    """Tokens as float32 of combine's width."""
    wide = tokens.astype(np.float32)
    return wide if width == tokens.shape[-1] else wide[..., np.arange(width) % tokens.shape[-1]]


# ---- the judge -----------------------------------------------------------------------------------


@dataclass
class Got:
    """What a rank brings home from a round."""

    payloads: list[np.ndarray]
    ids: np.ndarray
    weights: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    out: np.ndarray
    late: np.ndarray | None = None
    received: tuple[np.ndarray, int] | None = None  # num_recv_tokens()
    expert_rows: np.ndarray | None = None  # Handle.expert_rows, in high throughput
    origins: np.ndarray | None = None  # by expert, where it was asked for
    source_counts: np.ndarray | None = None  # likewise
    lists: tuple[np.ndarray, ...] = ()  # index lists, where they were asked for


def exchange_of(setup: Setup, round_: Round) -> ref.Exchange:
    """The oracle's exchange of a round."""
    shares = [setup.share(round_.tokens[r], r) for r in range(setup.ranks)]
    made = [tuple(part[mine] for part in make_ids(setup, round_, r)) for r, mine in enumerate(shares)]
    room = setup.max_recv_tokens if round_.room is None else round_.room
    return ref.Exchange(
        [setup.slots_of(ids, r) for r, (ids, _) in enumerate(made)],
        [weights for _, weights in made] if round_.weights else None,
        experts=setup.slots,
        bound=round_.bound or (setup.max_tokens if round_.exact else setup.default_bound),
        expert_map=setup.expert_map,
        id_space=setup.id_space,
        invalid_id=setup.invalid_id,
        max_recv_tokens=room if setup.overflow == "drop" and round_.exact else None,
        alignment=[round_.alignment(r) or setup.row_alignment or 1 for r in range(setup.ranks)],
        domain=setup.domain,
    )


DISPATCHES = {
    "rank_major": ref.dispatch_rank_major,
    "expert_major": ref.dispatch_expert_major,
    "flat": ref.dispatch_flat,
    "grouped": ref.dispatch_grouped,
    "grouped_by_bound": dispatch_grouped_by_bound,
}


LISTS = ("sorted_rows", "block_experts", "num_sorted")


def index_lists(x: ref.Exchange, round_: Round, rank: int) -> tuple[np.ndarray, ...]:
    """The oracle's index lists of a round; none if it wants none."""
    if not round_.index_block:
        return ()
    slots = DISPATCHES[round_.layout](replace(x, id_space="local", invalid_id=-1), rank, []).ids
    return ref.index_lists(slots, len(x.local_experts(rank)), round_.index_block)


def verify(setup: Setup, round_: Round, got: list[Got]) -> None:
    """Every bit of a round against the oracle."""
    x = exchange_of(setup, round_)
    shares = [setup.share(round_.tokens[r], r) for r in range(setup.ranks)]
    by_rank = [[part[mine] for part in make_payloads(setup, round_, r)] for r, mine in enumerate(shares)]
    payloads = [list(of) for of in zip(*by_rank, strict=True)]
    rows = []
    for rank, mine in enumerate(got):
        want = DISPATCHES[round_.layout](x, rank, payloads)
        where = f"rank {rank} of {round_}\n in {setup}"
        same("counts", mine.counts, want.counts, where)
        sums = np.append(0, want.counts.cumsum()).astype(np.int32)
        offsets = x.blocks(rank) if round_.named == "grouped" else sums
        same("offsets", mine.offsets, offsets, where)
        same("ids", mine.ids, want.ids.astype(setup.id_dtype), where)
        same("weights", mine.weights, want.weights, where)
        for name in ("origins", "source_counts"):
            if getattr(mine, name) is not None:
                same(name, getattr(mine, name), getattr(want, name), where)
        for name, one_got, one_want in zip(
            LISTS[: len(mine.lists)], mine.lists, index_lists(x, round_, rank), strict=True
        ):
            same(name, one_got, one_want, where)
        valid = filled(round_, want.payloads[0], want.counts, offsets)
        if round_.named == "grouped":
            valid[: offsets[-1]] = True  # what is between experts is zero
        for q, (one_got, one_want) in enumerate(zip(mine.payloads, want.payloads, strict=True)):
            if q in round_.columns:
                same_columns(f"payload {q} by column", round_.named, one_got, one_want, valid, where)
                continue
            assert one_got.shape == one_want.shape, (one_got.shape, one_want.shape, where)
            same(f"payload {q}", as_bits(one_got)[valid], as_bits(one_want)[valid], where)
        per_source = x.kept[:, rank].astype(np.int32)
        if mine.received is not None:
            same("num_recv_tokens", mine.received[0], per_source, where)
            assert mine.received[1] == per_source.sum(), where
        if mine.expert_rows is not None:
            same("expert_rows", mine.expert_rows, x.routed_rows(rank), where)
        want_tokens = want.payloads[0]
        rows.append(answers(setup, round_, rank, want_tokens, want.ids, want.weights, want.counts, offsets))
    wanted = setup.of_sets(combined(setup, round_, x, rows))
    for rank, mine in enumerate(got):
        where = f"rank {rank} of {round_}\n in {setup}"
        same("result", mine.out, wanted[rank], where)
        if mine.late is not None:
            same("result of the combine without a lease", mine.late, wanted[rank], where)


def combined(setup: Setup, round_: Round, x: ref.Exchange, rows: list[np.ndarray]) -> list[np.ndarray]:
    """The oracle's results."""
    given: dict[str, Any] = {"wire": numpy_dtype(setup.wire or setup.combine_dtype), "out": numpy_dtype(round_.out)}
    if round_.bias:
        all_rows = [make_bias(setup, round_, r) for r in range(setup.ranks)]
        shares = [setup.share(round_.tokens[r], r) for r in range(setup.ranks)]
        given["bias"] = [of if of is None else of[mine] for of, mine in zip(all_rows, shares, strict=True)]
    if setup.combine_rows == "per_rank":
        return ref.combine(x, rows, layout=round_.named, weighting=round_.weighting, **given, scale=setup.wire_scale)
    weights = x.weight if round_.weighting == "topk" else None
    if round_.late_weights:
        weights = [owner_weights(setup, round_, rank) for rank in range(setup.ranks)]
    return ref.combine_per_expert(x, rows, layout=round_.named, weights=weights, **given)


def verify_case(case: Case, by_rank: list[Any]) -> None:
    """Verifies all rounds of a case. `by_rank`: each rank's flights, as `player.play` returns them."""
    for f, flight in enumerate(case.flights):
        for i, round_ in enumerate(flight):
            verify(case.setup, round_, [mine[f][i] for mine in by_rank])
