"""What devices of several hosts post to each other in a step whose routing is known: puts, bytes and adds, exactly.

This is the mesh of docs/PROTOCOL_ON_DEVICES.md, "Between hosts, on devices": each rank posts to each rank of another
host, whatever it has for it, a put for each part of its rows if there are any, a put of what it tells of the step, and
one add. The bytes of rows are those of `model.links` for the way "direct"; a closed form counts no notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenway.planning import memory

Array = np.ndarray

NOTE = 16  # bytes: a note, and the word for rows that come apart from their signal
COUNT = 4  # bytes of a number of rows


@dataclass(frozen=True)
class Posts:
    """Of one step, int64 [N, N], by source and peer; 0 between ranks of one host."""

    puts: Array
    bytes: Array
    adds: Array


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


def combine(to_ranks: Array, hosts: Sequence[int], row: int) -> Posts:
    """The combine of that dispatch, of partials of so many bytes."""
    return mesh(to_ranks.T, (row,), hosts)


def counts(hosts: Sequence[int], local_experts: int) -> Posts:
    """An exchange of counts, where no rank has more experts than so many."""
    n = len(hosts)
    return mesh(np.ones((n, n), np.int64), (COUNT * (n + local_experts),), hosts)


def nothing(hosts: Sequence[int]) -> Posts:
    """A step without rows: one that is left out for the sake of a view, or that all ranks refuse."""
    n = len(hosts)
    return mesh(np.zeros((n, n), np.int64), (), hosts)
