"""Gathers and reduces as data that prints and shrinks; what a rank does with them; and the judge.

Everything follows from seeds. Every row of every rank is another, so rows in a wrong place are seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import player
from cases import FLOATS, SPECIAL, Case, Round, Setup, as_bits, random_bits, same, verify
from harness import PATIENT

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

Array = np.ndarray
HOW = ("host", "memory", "wide", "own", "own in memory")  # how sizes are given


@dataclass(frozen=True)
class Call:
    """A gather or a reduce."""

    sizes: tuple[int, ...]
    reduces: bool = False
    rows: tuple[tuple[int, str], ...] = ((16, "bfloat16"),)  # (elements, dtype) of each tensor
    how: str = "host"
    layout: str = "flat"
    seed: int = 0
    bound: int | None = None
    out: str | None = None  # dtype of sums
    own: bool = False  # outputs are given
    strided: bool = False
    place: bool = False  # the output is the input's place, as far as it may be
    special: bool = False  # NaN, inf, -0 among the rows
    chained: bool = False  # a gather's view is reduced from where it lies
    lane: int | None = None
    send_only: bool = False
    limits: tuple[int, ...] = ()  # sm_limit by rank, in turns

    @property
    def knows(self) -> bool:
        """Whether the host knows all sizes."""
        return self.how == "host"

    def room(self, most: int) -> int:
        """b of this call."""
        if self.bound is not None:
            return self.bound
        return most if self.how == "own" and not self.reduces else max(1, *self.sizes, 1)

    def problem(self) -> bool:
        """Whether no call is like this."""
        return self.reduces and self.layout == "flat" and self.how in ("own", "own in memory")


@dataclass(frozen=True)
class Plan:
    """A group, and what its ranks do on it, flight after flight: rounds of dispatch and combine, or calls, of which
    those that are sent alone are completed in another order on every rank."""

    setup: Setup
    flights: tuple[tuple[Call | Round, ...], ...]
    slow: int | None = None
    order: int = 0


def group_of(ranks: int, hidden: int = 16, max_tokens: int = 9, **more: Any) -> Setup:
    """A group whose rows have room for those of most tests, in float32 too."""
    return Setup(ranks=ranks, experts=ranks, top_k=1, hidden=hidden, max_tokens=max_tokens, dtype="float32", **more)


# ---- inputs --------------------------------------------------------------------------------------


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool) -> Array:
    """Any rows of a dtype."""
    if dtype not in FLOATS:
        return random_bits(rng, shape, dtype)
    made = rng.standard_normal(shape, np.float32)
    if special:
        made = np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape), made)
    with np.errstate(over="ignore"):
        return made.astype(numpy_dtype(dtype))


def rows_of(call: Call, rank: int) -> list[Array]:
    """What a rank gathers, [n, elements], or reduces, [sum of sizes, elements]."""
    rng = np.random.default_rng([call.seed, rank, int(call.reduces)])
    count = sum(call.sizes) if call.reduces else call.sizes[rank]
    return [values(rng, (count, n), dtype, call.special) for n, dtype in call.rows]


def padded(call: Call, rows: Array, room: int) -> Array:
    """Flat rows of all ranks as [N, room, elements]; NaN, or all bits, where there is none."""
    made = np.full((len(call.sizes), room, rows.shape[1]), 0xFF, np.uint8).repeat(rows.itemsize, axis=2)
    made = made.view(rows.dtype)
    begin = 0
    for rank, size in enumerate(call.sizes):
        made[rank, :size] = rows[begin : begin + size]
        begin += size
    return made


def longer(rows: Array, count: int) -> Array:
    """Rows with more behind them that nobody may take for some."""
    rest = np.full((count - len(rows), rows.shape[1] * rows.itemsize), 0xFF, np.uint8).view(rows.dtype)
    return np.concatenate([rows, rest])


# ---- on the ranks --------------------------------------------------------------------------------


def play(env: Any, plan: Plan) -> list[Any]:
    """What this rank got: by flight, a list of arrays for each call, or what `Player.flight` brings."""
    with tw.Group(env.comm, timeout=PATIENT, **plan.setup.settings()) as group:
        return Collector(env, group, plan).flights()


def play_on(env: Any, name: str, plan: Plan) -> list[Any]:
    """As `play`, on a group that is kept for further plans, and grows for those of more tokens."""
    plan = player.possible(env, plan)
    if name not in env.kept:
        env.kept[name] = tw.Group(env.comm, timeout=PATIENT, **plan.setup.settings())
    group = env.kept[name]
    if plan.setup.max_tokens > group.max_tokens:
        group.reserve(max_tokens=plan.setup.max_tokens)
    return Collector(env, group, plan).flights()


class Collector(player.Player):
    """One rank's way through a plan."""

    def __init__(self, env: Any, group: tw.Group, plan: Plan):
        super().__init__(env, group, Case(plan.setup, (), plan.slow, plan.order))
        self.plan = plan

    def flights(self) -> list[Any]:
        got = [self.some(flight) for flight in self.plan.flights]
        self.look_at_leases()
        return got

    def some(self, flight: tuple[Any, ...]) -> Any:
        if isinstance(flight[0], Round):
            return self.flight(flight)
        begun: dict[int, Any] = {}
        got: dict[int, Any] = {}
        for i, call in enumerate(flight):
            self.pause()
            begun[i] = self.begin(call)
            if not call.send_only:  # a view of the window is over when the next step on its channel begins
                got[i] = self.end(call, begun.pop(i))
        for i in self.own_order(list(begun)):
            self.pause()
            got[i] = self.end(flight[i], begun[i])
        return [got[i] for i in range(len(flight))]

    def begin(self, call: Call) -> Any:
        if call.chained:
            return self.chain(call)
        sizes, room = self.sizes(call), call.room(self.setup.max_tokens)
        made = [self.input(call, rows, room) for rows in rows_of(call, self.env.rank)]
        out = self.out(call, made, room) if call.own or call.place else None
        if call.place and call.reduces:
            out = [self.inside(call, x) for x in made]
        several = len(made) > 1
        keywords: dict[str, Any] = {"layout": call.layout, "lane": call.lane, "send_only": call.send_only}
        if call.bound is not None:
            keywords["bound"] = call.bound
        if call.limits:
            keywords["sm_limit"] = call.limits[self.env.rank % len(call.limits)]
        if out is not None:
            keywords["out"] = out if several else out[0]
        if not call.reduces:
            return self.group.all_gatherv(made if several else made[0], sizes, **keywords)
        if call.how == "own":
            sizes = call.sizes[self.env.rank]
        return self.group.reduce_scatterv(made if several else made[0], sizes, dtype=call.out, **keywords)

    def chain(self, call: Call) -> Any:
        """Gathers into the window, and reduces from there: each row times N."""
        (rows,) = rows_of(call, self.env.rank)
        gathered = self.group.all_gatherv(self.tensor(rows), list(call.sizes), layout="rank_major", lane=call.lane)
        return self.group.reduce_scatterv(
            gathered.rows, list(call.sizes), layout="rank_major", lane=call.lane, send_only=call.send_only
        )

    def end(self, call: Call, begun: Any) -> list[Array]:
        got = begun.result() if call.send_only else begun
        if call.chained or call.reduces:
            return [self.array(x) for x in (got if isinstance(got, tuple) else (got,))]
        rows = got.rows if isinstance(got.rows, tuple) else (got.rows,)
        return [self.array(x) for x in (*rows, got.counts, got.offsets)]

    def sizes(self, call: Call) -> Any:
        if call.how == "host":
            return list(call.sizes)
        if call.how == "own":
            return None
        mine = call.sizes[self.env.rank : self.env.rank + 1] if call.how == "own in memory" else call.sizes
        return self.tensor(np.array(mine, np.int64 if call.how == "wide" else np.int32))

    def input(self, call: Call, rows: Array, room: int) -> Any:
        """What is given: as large as what there is room for where sizes are in memory."""
        if call.reduces and call.layout == "rank_major":
            rows = padded(call, rows, room)
        elif not call.knows and call.how != "own":
            rows = longer(rows, room * len(call.sizes) if call.reduces else room)
        elif call.place and not call.reduces:
            return self.array_in_place(call, rows)
        return self.tensor(player.spread(rows, call.strided))

    def array_in_place(self, call: Call, rows: Array) -> Any:
        """Rows inside of a tensor for all."""
        whole = self.rubbish((sum(call.sizes), rows.shape[1]), rows.dtype.name)
        begin = sum(call.sizes[: self.env.rank])
        part = whole[begin : begin + len(rows)]
        part[...] = self.tensor(rows)
        self.wholes = [*getattr(self, "wholes", []), whole][-len(call.rows) :]
        return part

    def out(self, call: Call, made: list[Any], room: int) -> list[Any]:
        if call.place:
            return getattr(self, "wholes", [])
        lead: tuple[int, ...] = (sum(call.sizes) if call.knows else room * len(call.sizes),)
        if call.layout == "rank_major":
            lead = (len(call.sizes), room)
        if call.reduces:
            mine = call.sizes[self.env.rank]
            lead = (mine if call.knows or call.how == "own" else room,)
        return [self.rubbish((*lead, n), call.out or dtype) for n, dtype in call.rows]

    def inside(self, call: Call, x: Any) -> Any:
        """This rank's own rows of a tensor for all."""
        rank = self.env.rank
        if call.layout == "rank_major":
            return x[rank, : call.sizes[rank]]
        begin = sum(call.sizes[:rank])
        return x[begin : begin + call.sizes[rank]]


# ---- the judge -----------------------------------------------------------------------------------


def judge(plan: Plan, by_rank: list[list[Any]]) -> None:
    """Every bit against the oracle."""
    for f, flight in enumerate(plan.flights):
        for i, item in enumerate(flight):
            got = [mine[f][i] for mine in by_rank]
            if isinstance(item, Round):
                verify(plan.setup, item, got)
            else:
                judge_call(item, got, plan)


def judge_call(call: Call, got: list[list[Array]], plan: Plan) -> None:
    inputs = [rows_of(call, rank) for rank in range(len(call.sizes))]
    sizes = list(call.sizes)
    offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
    for rank, mine in enumerate(got):
        where = f"rank {rank} of {call}\n in {plan.setup}"
        for q in range(len(call.rows)):
            of_all = [rows[q] for rows in inputs]
            if call.chained:
                whole = ref.all_gatherv(of_all)
                same("chained", mine[0], ref.reduce_scatterv([whole] * len(sizes), sizes, rank), where)
            elif call.reduces:
                out = None if call.out is None else numpy_dtype(call.out)
                want = ref.reduce_scatterv(of_all, sizes, rank, out)
                rows = mine[q][: sizes[rank]]
                assert len(mine[q]) == (sizes[rank] if call.how in ("host", "own") else call.room(0)), where
                same(f"tensor {q}", rows, want, where)
            else:
                judge_gathered(call, q, mine[q], of_all, plan, where)
        if not call.reduces and not call.chained:
            same("counts", mine[-2], np.array(sizes, np.int32), where)
            same("offsets", mine[-1], offsets, where)


def judge_gathered(call: Call, q: int, rows: Array, of_all: list[Array], plan: Plan, where: str) -> None:
    room = call.room(plan.setup.max_tokens)
    count, whole = len(call.sizes), ref.all_gatherv(of_all)
    if call.layout == "flat":
        assert len(rows) == (len(whole) if call.knows else count * room), where
        same(f"tensor {q}", as_bits(rows[: len(whole)]), as_bits(whole), where)
        return
    assert rows.shape[:2] == (count, room), where
    for source, want in enumerate(of_all):
        same(f"tensor {q} of rank {source}", as_bits(rows[source, : len(want)]), as_bits(want), where)
