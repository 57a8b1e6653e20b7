"""The NumPy oracle of sums by domain: the partials of neighbouring ranks become a fold, and the owner sums folds.

    terms = list(folds((tokens, hidden), terms, domain=4, wire=np.float16))

Letters and bits as in `tokenway.reference`. Which ranks share a domain follows from their numbers alone, so bits depend
neither on hosts nor on who the owner is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from tokenway.sum_reference import ordered_sum

Array = np.ndarray


def by_domain(domain: int, ranks: int) -> bool:
    """Whether there are folds: domains of which there is one alone give the usual sum. Those of one rank do too, as a
    fold of one term is that term."""
    return 1 < domain < ranks


@np.errstate(all="ignore")
def folds(
    shape: tuple[int, int], terms: Iterable[tuple[Array, Array]], domain: int, wire: Any
) -> Iterator[tuple[Array, Array]]:
    """What an owner sums, domains ascending: (at, fold), int [n] tokens and float32 [n, H] that were rounded to `wire`.

    shape: (T, H). terms: of each rank, ascending, (at, partial), partials as they travelled; ranks r with the same
    r // domain share a fold, the float32 sum of those partials that there are, from the first of them on.
    """
    for _, of_domain in groupby(enumerate(terms), lambda numbered: numbered[0] // domain):
        partials = [partial for _, partial in of_domain]
        at = np.unique(np.concatenate([tokens for tokens, _ in partials]))
        yield at, ordered_sum(shape, partials)[at].astype(wire).astype(np.float32)
