"""The NumPy oracle of combines per expert: a row for each (token, k) returns, and its owner weights and sums them.

    out = combine_per_expert(x, rows, layout="expert_major", weights=late)

Letters and bits as in `tokenway.reference`. No sum knows which rank made which row: with the same ids, weights and rows
the bits are the same for any number of ranks and any placement of experts (`sum_choices` has all that they depend on).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenway.sum_reference import begin

Array = np.ndarray


@np.errstate(all="ignore")  # overflow to inf and inf - inf are results like any other
def combine_per_expert(
    x: Any,
    rows: Sequence[Array],
    *,
    layout: str = "expert_major",
    weights: Sequence[Array] | None = None,
    wire: Any = None,
    out: Any = None,
    bias: Sequence[Array | None] | None = None,
) -> list[Array]:
    """Combine per expert, as all ranks receive it: per owner [T, H] of dtype `out`.

    x: a `tokenway.reference.Exchange`. rows[r]: what rank r's experts returned, [L, N*b, H] (expert_major) or [P, H]
    (grouped), float32, bfloat16 or float16. weights: per owner float32 [T, K], or None: rows are weighted already.
    `wire` is the dtype that travels, `out` that of the result; both default to the dtype of the rows. bias: as of
    `tokenway.reference.combine`.
    """
    wire, out = rows[0].dtype if wire is None else wire, rows[0].dtype if out is None else out
    given = [None] * x.ranks if weights is None else weights
    returned = [returned_rows(x, owner, rows, layout=layout, wire=wire) for owner in range(x.ranks)]
    first = [None] * x.ranks if bias is None else bias
    return [sum_choices(*returned[owner], given[owner], first[owner]).astype(out) for owner in range(x.ranks)]


@np.errstate(all="ignore")
def returned_rows(x: Any, owner: int, rows: Sequence[Array], *, layout: str, wire: Any) -> tuple[Array, Array]:
    """What returns to an owner: rows [T, K, H] of dtype `wire`, and bool [T, K]: whether there is one. There is none
    for an id of -1, nor in the exact layouts for a row that was dropped."""
    if layout not in ("expert_major", "grouped"):
        raise ValueError(f"layout: {layout!r}; allowed: expert_major, grouped")
    exact = layout == "grouped"
    ids = x.kept_ids[owner] if exact else x.ids[owner]
    returned = np.zeros((*ids.shape, rows[0].shape[-1]), wire)
    for t, k in np.argwhere(ids >= 0):
        rank, slot = (of[ids[t, k]] for of in x.placement)
        if exact:
            row = rows[rank][x.blocks(rank)[slot] + x.kept_row[owner][t, k]]
        else:
            row = rows[rank][slot, x.expert_row[owner][t, k]]
        returned[t, k] = row.astype(np.float32).astype(wire)
    return returned, ids >= 0


@np.errstate(all="ignore")
def sum_choices(rows: Array, there: Array, weights: Array | None = None, bias: Array | None = None) -> Array:
    """The owner's sum over k ascending, float32 [T, H], from the first term on; zeros where there is none.

    rows: [T, K, H]; there: bool [T, K]; weights: float32 [T, K]; None: rows are added as they are. bias: [T, H], the
    first term of every sum.
    """
    total, started = begin((rows.shape[0], rows.shape[2]), bias)
    for k in range(rows.shape[1]):
        term = rows[:, k].astype(np.float32)
        if weights is not None:
            term = weights[:, k, None] * term
        here = there[:, k, None]
        total = np.where(here, np.where(started, total + term, term), total)
        started |= here
    return total
