"""Bit-for-bit comparison with the NumPy oracle, in memory that does not grow with the ranks.

A rank checks what it received, and then what it got back for its own tokens:

* dispatch: the oracle dispatches row numbers in place of rows (it copies bytes and does not care
  what they mean); rows are then compared source by source with what that source sent.
* combine: the oracle asks for the rows of one rank at a time and reads those of this owner only, so
  it is given nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tokenway import grouped_reference, reference, tensors
from tokenway.bench.case import BY_EXPERT, Case
from tokenway.group import Group
from tokenway.handle import Handle, Received
from tokenway.shape import BY_BOUND, GROUPED

Array = np.ndarray


class Mismatch(AssertionError):
    """A rank has other bits than the oracle; says where."""


def problem_of(check: Callable[..., object], *args: Any) -> str | None:
    """What a check finds wrong, as the words of its Mismatch; None if nothing."""
    try:
        check(*args)
    except Mismatch as mismatch:
        return str(mismatch)
    return None


def buffers(case: Case, group: Group, handle: Handle | None = None) -> tuple[dict[str, Array], Array, Array]:
    """(dispatch's out, the experts' rows, combine's out), allocated once for all calls of a case; in high throughput
    of a routing whose counts `handle` knows.

    rank_major and flat: dispatch's rows are views of the window, so its out is empty. expert_major takes
    L * N * b rows of address space here, of which only the received ones are ever touched.
    """
    t, hidden = case.tokens, case.profile.hidden
    lead = group.shape.lead(case.layout, t, (handle.rows_of(case.layout) or 0) if case.exact and handle else 0)
    answer = tensors.numpy_dtype(case.combine_dtype)
    out: dict[str, Array] = {}
    if case.layout in BY_EXPERT:
        out["tokens"] = np.empty((*lead, hidden), tensors.numpy_dtype(case.dtype))
        if case.scales:
            out["scales"] = np.empty((*lead, case.scales), np.float32)
        out["ids"], out["weights"] = np.empty(lead, np.int32), np.empty(lead, np.float32)
    return out, np.empty((*lead, hidden), answer), np.empty((t, hidden), answer)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays have the same shape, type and bytes (NaN and signed zeros included)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.size == 0:
        return True
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return bool(np.array_equal(a.view(unsigned), b.view(unsigned)))


def _expect(what: str, case: Case, rank: int, got: Array, want: Array) -> None:
    if not same_bits(got, want):
        where = ""
        if got.shape == want.shape and got.size:
            unsigned = np.dtype(f"u{got.dtype.itemsize}")
            at = np.argwhere(got.view(unsigned) != want.view(unsigned))
            first = at[0].tolist()
            where = f"; {len(at)} of {got.size}, first at {first}: "
            where += f"{got[tuple(at[0])]} is not {want[tuple(at[0])]}"
        raise Mismatch(f"{case.name}: {what} on rank {rank} differ from the oracle{where}")


def filled(case: Case, rank: int, counts: Array) -> list[Any]:
    """Where in a layout the rows lie that hold something: an index for each run of them, by source or by expert."""
    if case.layout == "flat":
        return [np.s_[: int(counts.sum())]]
    if case.layout in GROUPED:
        begins = case.exchange.blocks(rank)
        return [np.s_[begins[e] : begins[e] + n] for e, n in enumerate(counts)]
    return [np.s_[block, :n] for block, n in enumerate(counts)]


def check_dispatch(case: Case, rank: int, received: Received) -> None:
    """Compares counts, ids, weights and payload rows with the oracle's. Raises Mismatch."""
    x = case.exchange
    numbers = [np.arange(s * case.tokens, (s + 1) * case.tokens, dtype=np.int32) for s in range(x.ranks)]
    oracle = grouped_reference if case.layout == BY_BOUND else reference
    simulate = getattr(oracle, f"dispatch_{case.layout}")
    want = simulate(x, rank, [numbers])
    _expect("counts", case, rank, np.asarray(received.counts), want.counts)
    _expect("ids", case, rank, np.asarray(received.ids), want.ids)
    _expect("weights", case, rank, np.asarray(received.weights), want.weights)
    runs = filled(case, rank, want.counts)
    for source in range(x.ranks):
        sent = case.inputs(source)
        for at in runs:
            place = np.flatnonzero(want.payloads[0][at] // max(case.tokens, 1) == source)
            if place.size == 0:
                continue
            token = want.payloads[0][at][place] - source * case.tokens
            rows = slice(place[0], place[-1] + 1)  # one source's rows lie together
            what = f"rows from rank {source}"
            _expect(what, case, rank, received.tokens[at][rows], sent[0][token])
            if sent[1] is not None:
                got = received.payloads["scales"][at][rows]
                _expect(f"scales from rank {source}", case, rank, got, sent[1][token])


def run_experts(case: Case, rank: int, received: Received, rows: Array) -> None:
    """This rank's experts: reads what arrived and fills `rows`, laid out alike."""
    home = np.append(case.exchange.local_experts(rank), -1)  # local slot to expert; -1 stays
    scales = received.payloads.get("scales")
    for at in filled(case, rank, np.asarray(received.counts)):
        ids, weights = received.ids[at], received.weights[at]
        if case.layout in BY_EXPERT:
            ids, weights = ids[:, None], weights[:, None]
        of = None if scales is None else scales[at]
        case.answers(received.tokens[at], of, home[ids], weights, rows[at])


class _Answers(Sequence[Array]):
    """The rows that each rank's experts return to one owner, made when the oracle asks for them.

    They stand where the oracle looks: rank_major in [owner, slot] (the same memory for every
    source, as only the owner's is read), in other layouts in their places of an array of which only
    those rows are touched.
    """

    def __init__(self, case: Case, owner: int):
        self._case, self._owner = case, owner
        self._inputs = case.inputs(owner)
        self._last: tuple[int, Array] | None = None

    def __len__(self) -> int:
        return self._case.ranks

    def __getitem__(self, rank: int) -> Array:  # type: ignore[override]
        if self._last is None or self._last[0] != rank:
            by_source = self._case.layout in ("rank_major", "flat")
            self._last = rank, self._by_source(rank) if by_source else self._by_expert(rank)
        return self._last[1]

    def __iter__(self) -> Iterator[Array]:
        return (self[rank] for rank in range(len(self)))

    def _local(self, rank: int) -> tuple[Array, Array]:
        """(tokens that go to the rank, their experts there, else -1)."""
        x, owner = self._case.exchange, self._owner
        tokens = np.flatnonzero(x.routing[owner].goes[:, rank])
        here = x.routing[owner].owner[tokens] == rank
        return tokens, np.where(here, x.ids[owner][tokens], -1)

    def _answer(self, tokens: Array, experts: Array, weights: Array) -> Array:
        values, scales = self._inputs
        dtype = tensors.numpy_dtype(self._case.combine_dtype)
        rows = np.empty((len(tokens), values.shape[1]), dtype)
        of = None if scales is None else scales[tokens]
        self._case.answers(values[tokens], of, experts, weights, rows)
        return rows

    def _by_source(self, rank: int) -> Array:
        tokens, experts = self._local(rank)
        made = self._answer(tokens, experts, self._case.exchange.weight[self._owner][tokens])
        if self._case.layout == "rank_major":
            return np.broadcast_to(made[None], (len(self), *made.shape))
        begins = self._case.exchange.sources(rank)
        rows = np.empty((begins[-1], made.shape[1]), made.dtype)
        rows[begins[self._owner] : begins[self._owner] + len(made)] = made
        return rows

    def _by_expert(self, rank: int) -> Array:
        case, x, owner = self._case, self._case.exchange, self._owner
        t, k = np.nonzero(x.routing[owner].owner == rank)
        expert = x.ids[owner][t, k]
        made = self._answer(t, expert[:, None], x.weight[owner][t, k][:, None])
        slot, hidden = x.placement[1][expert], case.profile.hidden
        if case.layout in GROUPED:
            rows = np.empty((x.blocks(rank)[-1], hidden), made.dtype)
            rows[x.blocks(rank)[slot] + x.kept_row[owner][t, k]] = made
            return rows
        rows = np.empty((len(x.local_experts(rank)), case.ranks * case.tokens, hidden), made.dtype)
        rows[slot, x.expert_row[owner][t, k]] = made
        return rows


def expected_output(case: Case, owner: int) -> Array:
    """What the oracle combines for the tokens of one rank: [T, H]."""
    return reference.combine(
        case.exchange,
        _Answers(case, owner),
        layout="grouped" if case.layout == BY_BOUND else case.layout,
        weighting=case.weighting,
        wire=tensors.numpy_dtype(case.combine_dtype),
        out=tensors.numpy_dtype(case.combine_dtype),
        owners=[owner],
    )[0]


def check_output(case: Case, owner: int, got: Array, want: Array) -> None:
    """Compares a combine's output. Raises Mismatch."""
    _expect("combined tokens", case, owner, np.asarray(got), want)


def exchange_once(
    case: Case,
    group: Group,
    handle: Handle,
    sent: tuple[Array, Array | None],
    made: tuple,
    twice: bool,
) -> None:
    """One dispatch, checked, and the experts' rows for what it brought. made: of `buffers`.

    twice: dispatches once more before, as a recomputation does, so that what is checked lies in
    the other bank of the window than it would without.
    """
    out, rows, _ = made
    payloads = None if sent[1] is None else {"scales": sent[1]}
    for _ in range(2 if twice else 1):
        received = group.dispatch(handle, sent[0], payloads, layout=case.layout, bound=case.tokens, out=out)
    check_dispatch(case, group.rank, received)
    run_experts(case, group.rank, received, rows)
