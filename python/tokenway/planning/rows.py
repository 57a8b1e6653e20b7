"""How many rows go where: exact expectations where every set of K experts is as likely, else by drawing routings.

A token goes once to each rank that has one of its experts, and between domains once to each domain that has one. So all
follows from two chances: that a token wants a given rank, and that it wants a given domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenway.bench import routing
from tokenway.reference import contiguous_placement

Array = np.ndarray

PLACEMENTS = ("contiguous", "interleaved", "replicated")
SAMPLED = 1 << 25  # products of (token, rank) that a sampled chance is made of, at most
MOST_SAMPLED = 1 << 15  # tokens


@dataclass(frozen=True)
class Layer:
    """What routing knows of a layer and where its experts are: E experts, K of them for a token, N ranks in domains of
    L neighbours. N must be a multiple of L."""

    experts: int
    top_k: int
    ranks: int
    domain: int
    placement: str = "contiguous"

    @property
    def domains(self) -> int:
        """How many there are."""
        return self.ranks // self.domain

    def shares(self) -> Array:
        """Which part of an expert's rows each rank takes: float64 [N, E], columns sum to 1.

        contiguous: as the library places experts where nothing is said. interleaved: expert e on rank e modulo N.
        replicated: each rank has ceil(E / N) slots, which copies of all experts fill in turn; a token takes any copy of
        an expert, all alike.
        """
        n, e = self.ranks, self.experts
        made = np.zeros((n, e))
        if self.placement == "contiguous":
            made[contiguous_placement(e, n)[0], np.arange(e)] = 1
        elif self.placement == "interleaved":
            made[np.arange(e) % n, np.arange(e)] = 1
        else:
            slots = -(-e // n)
            np.add.at(made, (np.arange(n * slots) // slots, np.arange(n * slots) % e), 1)
            made /= made.sum(axis=0)
        return made

    def domain_shares(self) -> Array:
        """The same of domains: float64 [N / L, E]."""
        return self.shares().reshape(self.domains, self.domain, -1).sum(axis=1)


@dataclass(frozen=True)
class Rows:
    """Rows of a step at one rank, its own left out, as means over all ranks and for the busiest one.

    near: from (or to) ranks of its domain. far: that it gets from ranks of other domains. crossing: that come to it
    over the network where each token crosses once for a domain, for whichever rank there.
    """

    near: float
    far: float
    crossing: float
    busiest_near: float
    busiest_far: float
    busiest_crossing: float

    @property
    def wanted(self) -> float:
        """Of a row that crosses to a domain: how many ranks there want it."""
        return self.far / self.crossing if self.crossing else 0.0

    def mean(self) -> Rows:
        """The same without a busiest rank, as if all ranks had what they have in the mean."""
        return Rows(self.near, self.far, self.crossing, self.near, self.far, self.crossing)


def chance(shares: Array, experts: int, top_k: int) -> float:
    """The chance that a token of K distinct experts out of E, all sets alike, wants a place that takes these parts of
    each expert's rows, float64 [E].

    That is 1 - e_K(1 - share) / (E over K), with the elementary symmetric polynomial e_K; where shares are 0 and 1, the
    hypergeometric 1 - (E - n over K) / (E over K). Computed as a mean over sets, expert by expert, so that nothing
    overflows.
    """
    none = np.zeros(top_k + 1)  # [k]: of k experts drawn from those seen so far, the mean product of 1 - share
    none[0] = 1.0
    drawn = np.arange(1, top_k + 1)
    for seen, share in enumerate(shares, 1):
        # A set of k out of `seen` has the last one with the chance k / seen.
        part = np.minimum(drawn / seen, 1.0)
        none[1:] = none[1:] * (1 - part) + none[:-1] * part * (1 - share)
    return float(1 - none[top_k]) if experts else 0.0


def chances(layer: Layer, kind: str, seed: int = 0) -> tuple[Array, Array]:
    """(of each rank [N], of each domain [N / L]): that a token wants it. kind: uniform, or another generator of
    tokenway.bench.routing, whose routing is drawn."""
    places = layer.shares(), layer.domain_shares()
    if kind == "uniform":
        return _exact(places[0], layer), _exact(places[1], layer)
    tokens = max(256, min(MOST_SAMPLED, SAMPLED // layer.ranks))
    ids, _ = routing.GENERATORS[kind](0, tokens, layer.experts, layer.top_k, seed, ranks=layer.ranks)
    return _sampled(places[0], ids), _sampled(places[1], ids)


def _exact(places: Array, layer: Layer) -> Array:
    known: dict[bytes, float] = {}
    made = []
    for shares in places:
        key = np.sort(shares).tobytes()  # sets are alike, so the order of experts says nothing
        if key not in known:
            known[key] = chance(shares, layer.experts, layer.top_k)
        made.append(known[key])
    return np.array(made)


def _sampled(places: Array, ids: Array) -> Array:
    """Means over tokens of the chance that the copies which a token takes are elsewhere, for each place."""
    return np.array([1 - np.prod((1 - shares)[ids], axis=1).mean() for shares in places])


def spread(count: int) -> float:
    """By how many standard deviations the largest of so many alike normal values exceeds the mean, in the median
    (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def routed(layer: Layer, tokens: int, kind: str = "uniform", seed: int = 0) -> Rows:
    """Rows of a dispatch of `tokens` tokens on each rank."""
    by_rank, by_domain = chances(layer, kind, seed)
    others = tokens * (layer.domain - 1), tokens * (layer.ranks - layer.domain), tokens * (layer.domains - 1)
    near, far = _step(by_rank, others[0]), _step(by_rank, others[1])
    crossing = _step(np.repeat(by_domain, layer.domain), others[2])
    return Rows(near[0], far[0], crossing[0], near[1], far[1], crossing[1])


def _step(wanted: Array, tokens: int) -> tuple[float, float]:
    """(mean, busiest) of the rows that come of so many tokens with these chances: a rank's number is binomial."""
    mean = float(wanted.mean()) * tokens
    most = float((tokens * wanted + spread(len(wanted)) * np.sqrt(tokens * wanted * (1 - wanted))).max())
    return mean, max(mean, min(most, tokens))


def gathered(layer: Layer, tokens: int) -> Rows:
    """Rows where every token goes to every rank, and each rank returns a sum for each."""
    near, far, crossing = (float(tokens * n) for n in (layer.domain - 1, layer.ranks - layer.domain, layer.domains - 1))
    return Rows(near, far, crossing, near, far, crossing)


def counts(ids: Array, layer: Layer, seed: int = 0) -> tuple[Array, Array]:
    """(rows to each rank int64 [N], to each domain [N / L]) of a rank's ids [T, K], -1 for none; of an expert with
    copies each token takes one, by `seed`."""
    shares = layer.shares()
    edges = np.cumsum(shares, axis=0)
    draws = np.random.default_rng([4, seed]).random(ids.shape)
    homes = np.where(ids < 0, layer.ranks, (edges[:, ids] <= draws * (1 - 1e-12)).sum(axis=0))
    return _distinct(homes, layer.ranks), _distinct(homes // layer.domain, layer.domains)


def _distinct(places: Array, count: int) -> Array:
    """How many rows of `places` name each place below `count`, once each."""
    ordered = np.sort(places, axis=1)
    first = np.ones_like(ordered, dtype=bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return np.bincount(ordered[first & (ordered < count)], minlength=count)
