"""The protocol between domains as events: when a pair ends where rows are uneven and ranks late.

Every rank has four servers, each of which does one thing at a time: its network card out and in, its NVLink out and in.
A rank that begins puts its rows to its domain, and chunks to its rail peers, to all domains in turn; the word follows
the last chunk. Whoever has begun and sees a word reads its own rows out of the mate's inbox. A combine is the same with
partials, once the dispatch has ended at that rank. `model` has the same in closed form; without skew and late ranks
both agree. Sums by domain, direct puts, high throughput and gathers are not simulated.

Times are us. The same arguments give the same times.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokenway.bench import routing
from tokenway.planning import memory, model, rows
from tokenway.planning.machines import Machine
from tokenway.planning.model import Choice, Work

Array = np.ndarray


@dataclass(frozen=True)
class Traffic:
    """Rows of a pair: from each rank to each other float64 [N, N], and to each domain [N, N / L]."""

    to_rank: Array
    to_domain: Array


@dataclass
class _Clock:
    """Events by time; of equal times those that were asked for first come first."""

    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    number: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, time: float, then: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.number), then))

    def run(self) -> None:
        while self.events:
            time, _, then = heapq.heappop(self.events)
            then(time)


def even(work: Work) -> Traffic:
    """Every rank has what it has in the mean, of a uniform routing."""
    layer = work.layer
    by_rank, by_domain = rows.chances(layer, "uniform")
    n = layer.ranks
    return Traffic(
        np.full((n, n), work.tokens * by_rank.mean()), np.full((n, layer.domains), work.tokens * by_domain.mean())
    )


def drawn(work: Work, kind: str, seed: int) -> Traffic:
    """What a routing of the benchmarks' generator `kind` gives."""
    layer = work.layer
    generate = routing.GENERATORS[kind]
    found = []
    for rank in range(layer.ranks):
        ids, _ = generate(rank, work.tokens, layer.experts, layer.top_k, seed, ranks=layer.ranks)
        found.append(rows.counts(ids, layer, seed * layer.ranks + rank))
    to_rank, to_domain = (np.array(part, dtype=float) for part in zip(*found, strict=True))
    return Traffic(to_rank, to_domain)


class _Step:
    """A dispatch or a combine of all ranks."""

    def __init__(
        self,
        clock: _Clock,
        machine: Machine,
        work: Work,
        choice: Choice,
        sent: Array,
        crossing: Array | None,
        sizes: tuple[float, float],
        step: str,
        ended: Callable[[int, float], None],
    ) -> None:
        """sent: rows [N, N] by source and reader. crossing: rows [N, domains] in messages; None: as many as are sent
        there. sizes: bytes of a row in a message, and of one that is read."""
        layer = work.layer
        self.clock, self.machine, self.layer, self.ended = clock, machine, layer, ended
        self.sent, self.sizes = sent, sizes
        domain = np.arange(layer.ranks) // layer.domain
        self.domain = domain
        by_domain = np.add.reduceat(sent, np.arange(0, layer.ranks, layer.domain), axis=1)
        self.crossing = by_domain if crossing is None else crossing
        own = domain[:, None] == domain[None, :]
        near = np.where(own & ~np.eye(layer.ranks, dtype=bool), sent, 0.0)
        self.start = model.near_us(machine, work, choice, step, 0.0)
        # What comes to a rank and what leaves it are one figure of the fit: the busier of both.
        self.near_us = [
            model.near_us(machine, work, choice, step, float(most)) for most in np.maximum(near.sum(0), near.sum(1))
        ]
        self.begun: set[int] = set()
        self.near_done: dict[int, float] = {}
        self.missing = np.full(layer.ranks, layer.ranks - layer.domain)
        self.words: list[list[tuple[int, int]]] = [[] for _ in range(layer.ranks)]
        self.out, self.inward, self.reading = (np.zeros(layer.ranks) for _ in range(3))
        self.last = np.zeros(layer.ranks)

    def begin(self, rank: int, now: float) -> None:
        """A rank calls: its rows go out."""
        self.begun.add(rank)
        mates = self._mates(rank)
        if all(mate in self.begun for mate in mates):  # this one's rows come last
            for mate in mates:
                self.near_done[mate] = now + self.near_us[mate]
                self._try_end(mate)
        self.clock.at(now + self.start, lambda time, rank=rank: self._post(rank, time))
        for source, peer in self.words[rank]:
            self._read(rank, source, peer, now)
        self.words[rank].clear()

    def _mates(self, rank: int) -> range:
        first = rank - rank % self.layer.domain
        return range(first, first + self.layer.domain)

    def _post(self, rank: int, now: float) -> None:
        machine, layer = self.machine, self.layer
        # The next domain first: in one order for all, all would put to one domain at once, and its cards be the limit.
        others = [(self.domain[rank] + step) % layer.domains for step in range(1, layer.domains)]
        chunks = {d: model.chunks_of(self.crossing[rank, d]) for d in others}
        for number in range(max(chunks.values(), default=0) + 1):
            for d in others:
                if number > chunks[d]:
                    continue
                peer = d * layer.domain + rank % layer.domain
                size = self.crossing[rank, d] * self.sizes[0] / chunks[d] if number < chunks[d] else 0.0
                took = size / (machine.network_gb_s * 1e3) + machine.put_us.value
                self.out[rank] = max(self.out[rank], now) + took
                self.clock.at(
                    self.out[rank] - took + machine.nic_us.value,
                    lambda time, source=rank, peer=peer, took=took, word=number == chunks[d]: self._land(
                        source, peer, took, word, time
                    ),
                )

    def _land(self, source: int, peer: int, took: float, word: bool, now: float) -> None:
        self.inward[peer] = max(self.inward[peer], now) + took
        if word:
            self.clock.at(self.inward[peer], lambda time: self._tell(source, peer, time))

    def _tell(self, source: int, peer: int, now: float) -> None:
        for reader in self._mates(peer):
            if reader in self.begun:
                self._read(reader, source, peer, now)
            else:
                self.words[reader].append((source, peer))

    def _read(self, reader: int, source: int, peer: int, now: float) -> None:
        if reader == peer:
            self._took(reader, now)
            return
        took = self.sent[source, reader] * self.sizes[1] / (self.machine.read_gb_s * 1e3)
        begin = max(now + self.machine.card.flag_us, self.reading[reader])
        self.reading[reader] = begin + took
        self.clock.at(begin + took, lambda time: self._took(reader, time))

    def _took(self, reader: int, now: float) -> None:
        self.missing[reader] -= 1
        self.last[reader] = max(self.last[reader], now)
        self._try_end(reader)

    def _try_end(self, rank: int) -> None:
        if self.missing[rank] == 0 and rank in self.near_done:
            end = max(self.last[rank], self.near_done[rank])
            self.clock.at(end, lambda time: self.ended(rank, time))
            self.missing[rank] = -1


def pair_us(machine: Machine, work: Work, choice: Choice, traffic: Traffic, late: Array) -> float:
    """From the instant at which all would begin until the last rank has its sums. late: us by which each rank begins
    after it [N]. The choice must be routed, low_latency, pull and flat. Raises ValueError for others."""
    if (choice.route, choice.mode, choice.way, choice.sums) != ("routed", "low_latency", "pull", "flat"):
        raise ValueError(f"choice: {choice}; the simulation knows routed, low_latency, pull, flat alone")
    layer = work.layer
    clock = _Clock()
    ends = np.zeros(layer.ranks)
    wanted = traffic.to_rank.sum() / max(traffic.to_domain.sum(), 1e-9)
    message = memory.message_row(work.dispatch_row, layer.top_k, wanted)

    def ended(rank: int, time: float) -> None:
        ends[rank] = time

    back = traffic.to_rank.T.copy()
    sizes = memory.record(work.combine_row, 1), float(work.combine_row)
    combine = _Step(clock, machine, work, choice, back, None, sizes, "combine", ended)
    sizes = message, float(work.dispatch_row)
    dispatch = _Step(clock, machine, work, choice, traffic.to_rank, traffic.to_domain, sizes, "dispatch", combine.begin)
    for rank in range(layer.ranks):
        clock.at(float(late[rank]), lambda time, rank=rank: dispatch.begin(rank, time))
    clock.run()
    return float(ends.max()) - machine.card.joined["bounded"]


@dataclass(frozen=True)
class Tails:
    """us of pairs: the median, and what one of a hundred exceeds."""

    p50: float
    p99: float


def tails(
    machine: Machine, work: Work, kind: str, pairs: int, *, share: float = 0.0, late_us: float = 0.0, seed: int = 0
) -> Tails:
    """Of `pairs` pairs with new routings, where each rank is late by late_us with the chance `share`."""
    rng = np.random.default_rng([5, seed])
    found = []
    for number in range(pairs):
        late = np.where(rng.random(work.layer.ranks) < share, late_us, 0.0)
        found.append(pair_us(machine, work, Choice(), drawn(work, kind, seed + number), late))
    return Tails(*(float(value) for value in np.percentile(found, (50, 99))))
