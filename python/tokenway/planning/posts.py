"""What devices of several hosts post to each other in a step whose routing is known: puts, bytes and adds, exactly.

As docs/PROTOCOL_ON_DEVICES.md has it, "Between hosts on devices": each rank posts to each rank of another host, a put
for each part of its rows if there are any, a put of what it tells of the step, and one add. Rows of a dispatch or
gather that cross once for each host are in a message to one rank there, and folds of a host in one to each owner. The
bytes of rows are those of `model.links` for the ways "direct" and "pull"; a closed form counts no notes and lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenway.planning import memory

Array = np.ndarray

NOTE = 16  # bytes: a note, and the word for rows that come apart from their signal
COUNT = 4  # bytes of a number of rows
HEAD = 64  # bytes of a message in front of its lists (src/layout/inbox_map.h)
LISTED = 4  # bytes of an entry of a list


@dataclass(frozen=True)
class Posts:
    """Of one step, int64 [N, N], by source and peer; 0 between ranks of one host."""

    puts: Array
    bytes: Array
    adds: Array

    def __add__(self, other: Posts) -> Posts:
        return Posts(self.puts + other.puts, self.bytes + other.bytes, self.adds + other.adds)


def mesh(rows: Array, parts: Sequence[int], hosts: Sequence[int]) -> Posts:
    """A step in which each rank puts rows straight to each rank that wants them.

    rows: int [N, N], of a source for a peer. parts: the bytes of each part of a row, which lies apart. hosts: of each
    rank the number of its host.
    """
    of = np.asarray(hosts)
    adds = (of[:, None] != of[None]).astype(np.int64)
    return Posts(adds * (1 + len(parts) * (rows > 0)), adds * (NOTE + rows * sum(parts)), adds)


def dispatch(to_ranks: Array, hosts: Sequence[int], payloads: Sequence[int], top_k: int) -> Posts:
    """A dispatch of either mode. to_ranks: int [N, N], rows that each source has for each rank, as `rows.counts` gives
    them. payloads: the bytes of a row of each."""
    return mesh(to_ranks, (*payloads, memory.meta_bytes(top_k)), hosts)


def dispatch_once(
    to_ranks: Array, to_hosts: Array, tokens: Array, hosts: Sequence[int], payloads: Sequence[int], top_k: int
) -> Posts:
    """The same where rows cross once for each host of several ranks. to_hosts: int [N, hosts], rows that each source
    has for any rank of a host. tokens: int [N], those of each source."""
    parts = tuple(payloads)
    of = np.asarray(hosts)
    straight = dispatch(to_ranks, hosts, parts, top_k)
    told = mesh(to_ranks, (memory.meta_bytes(top_k),), hosts)
    alone = np.bincount(of)[of] == 1
    posts = Posts(*(np.where(alone, a, b) for a, b in zip(_arrays(straight), _arrays(told), strict=True)))
    for rank, keepers in enumerate(_keepers(of)):
        for host, keeper in keepers.items():
            rows = to_hosts[rank, host]
            lists = HEAD + LISTED * int((of == host).sum()) * int(tokens[rank])
            posts.puts[rank, keeper] += (1 + len(parts)) * (rows > 0)
            posts.bytes[rank, keeper] += (rows > 0) * lists + rows * sum(parts)
    return posts


def gather(sizes: Array, hosts: Sequence[int], parts: Sequence[int], once: bool) -> Posts:
    """A gather of so many rows of each rank, int [N]. once: rows cross once for each host of several ranks."""
    of = np.asarray(hosts)
    rows = np.repeat(np.asarray(sizes)[:, None], len(of), axis=1)
    for rank, keepers in enumerate(_keepers(of) if once else ()):
        for host, keeper in keepers.items():
            rows[rank] *= (of != host) | (np.arange(len(of)) == keeper)
    return mesh(rows, parts, hosts)


def _keepers(of: Array) -> list[dict[int, int]]:
    """Of each rank: the rank that keeps its messages, by the other hosts of several ranks."""
    there = [np.flatnonzero(of == host) for host in range(of.max() + 1)]
    rails = [int((of[:rank] == host).sum()) for rank, host in enumerate(of)]
    return [
        {
            host: int(ranks[rails[rank] % len(ranks)])
            for host, ranks in enumerate(there)
            if host != own and len(ranks) > 1
        }
        for rank, own in enumerate(of)
    ]


def _arrays(posts: Posts) -> tuple[Array, Array, Array]:
    return posts.puts, posts.bytes, posts.adds


def combine(to_ranks: Array, hosts: Sequence[int], row: int) -> Posts:
    """The combine of that dispatch, of partials of so many bytes."""
    return mesh(to_ranks.T, (row,), hosts)


def combine_folded(from_hosts: Array, hosts: Sequence[int], row: int, bound: int) -> Posts:
    """A combine by domain where domains are hosts, whose partials are folded before they travel. from_hosts: int [N,
    hosts], how many of an owner's tokens have a partial of a host. bound: the tokens of a list, which goes with folds.
    """
    of = np.asarray(hosts)
    posts = mesh(np.zeros((len(of), len(of)), np.int64), (), hosts)
    for rank, keepers in enumerate(_keepers(of)):
        for owner in keepers.values():
            folds = int(from_hosts[owner, of[rank]])
            posts.puts[rank, owner] += 2 * (folds > 0)
            posts.bytes[rank, owner] += (folds > 0) * (HEAD + LISTED * bound) + folds * row
    return posts


def counts(hosts: Sequence[int], local_experts: int) -> Posts:
    """An exchange of counts, where no rank has more experts than so many."""
    n = len(hosts)
    return mesh(np.ones((n, n), np.int64), (COUNT * (n + local_experts),), hosts)


def nothing(hosts: Sequence[int]) -> Posts:
    """A step without rows: one that is left out for the sake of a view, or that all ranks refuse."""
    n = len(hosts)
    return mesh(np.zeros((n, n), np.int64), (), hosts)
