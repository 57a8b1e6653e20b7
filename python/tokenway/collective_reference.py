"""The oracle's gathers and reduces; `tokenway.reference` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def all_gatherv(rows: Sequence[Array]) -> Array:
    """What every rank receives: rows[r], [n_r, ...], of rank 0, then of 1 and so on; the bytes are copied."""
    return np.concatenate(rows)


@np.errstate(all="ignore")
def reduce_scatterv(rows: Sequence[Array], sizes: Sequence[int], rank: int, out: Any = None) -> Array:
    """What `rank` receives: [n_rank, ...] of dtype `out` (default: that of the rows).

    rows[r]: what rank r has for all, [sum of sizes, ...], that for rank 0 first, then that for rank 1 and so on. Sums
    over ranks ascending, in float32, rounded once to `out`.
    """
    begin = sum(sizes[:rank])
    terms = [of[begin : begin + sizes[rank]].astype(np.float32) for of in rows]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.astype(rows[0].dtype if out is None else out)
