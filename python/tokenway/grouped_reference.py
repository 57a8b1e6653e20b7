"""The NumPy oracle of the layout grouped in low latency, where a bound sizes it.

    recv = [dispatch_grouped_by_bound(x, r, [tokens]) for r in range(x.ranks)]
    out = combine(x, [experts(r, recv[r]) for r in range(x.ranks)], layout="grouped")

Letters as in `tokenway.reference`, whose combine reads these rows as those of high throughput: they stand at the same
places. x is an Exchange that drops nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenway import reference

Array = np.ndarray


def rows_by_bound(x: reference.Exchange, rank: int) -> int:
    """P: the most rows that can come to `rank` within the bound, each expert's padded to the alignment."""
    experts = len(x.local_experts(rank))
    step = x.alignment if isinstance(x.alignment, int) else x.alignment[rank]
    return (x.ranks * x.bound * min(x.top_k, experts) + experts * (step - 1)) // step * step


def dispatch_grouped_by_bound(
    x: reference.Exchange, rank: int, payloads: Sequence[Sequence[Array]], column_major: Sequence[int] = ()
) -> reference.Received:
    """Dispatch, as `rank` sees it: `dispatch_grouped`, with as many rows as could come. Those from `x.blocks(rank)[-1]`
    on are unspecified (here: zero), their ids invalid_id and their weights 0. Origins count rows as rank_major has
    them: slot p of source s is row s * b + p."""
    came = reference.dispatch_grouped(x, rank, payloads)
    more = rows_by_bound(x, rank) - len(came.ids)

    def longer(rows: Array, fill: Any = 0) -> Array:
        return np.concatenate([rows, np.full((more, *rows.shape[1:]), fill, rows.dtype)])

    shown = [longer(rows) for rows in came.payloads]
    return reference.Received(
        [reference.columns(rows) if i in column_major else rows for i, rows in enumerate(shown)],
        came.counts,
        longer(came.ids, x.invalid_id),
        longer(came.weights),
        longer(_by_slot(x, rank, came.origins), -1),
        came.source_counts,
    )


def _by_slot(x: reference.Exchange, rank: int, origins: Array) -> Array:
    """Origins that count rows without gaps as those that count slots."""
    begin = x.sources(rank)
    row, k = origins // x.top_k, origins % x.top_k
    source = np.searchsorted(begin, row, side="right") - 1
    slots = (source * x.bound + row - begin[source]) * x.top_k + k
    return np.where(origins < 0, origins, slots)
