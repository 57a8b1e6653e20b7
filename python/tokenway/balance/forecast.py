"""What to plan for, from what was counted so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenway import checked
from tokenway.errors import InvalidArgument

Array = np.ndarray

DECAYS = (0.0, 0.25, 0.5, 0.75, 0.9)
_REMEMBERED = 0.8  # of past errors, after one more window
_FAR = 2.0  # times the usual error: a window that nothing has foretold
_MOST = 4.0  # times the usual error is what is remembered of it
_ALIKE = 0.01  # an error that is none


class Forecast:
    """The loads to plan the next window for: of each layer a decaying average of the windows so far, with the decay
    that would have foretold them best.

    How long an average should reach back depends on what is counted. Counts of few tokens are noisy, and a long average
    evens that out; loads that move leave a long average behind. Which of both counts is seen from the windows
    themselves: each layer keeps one average per decay, and before a window is added, how far each is from it (the sum
    over experts of the difference of their shares of the load). The decay whose recent errors are least is taken. A
    window that is twice as far from that average as windows were so far is of something new, another kind of text say:
    all averages of its layer then begin anew from it.

    Every rank that adds the same windows gets the same loads, bit for bit.
    """

    def __init__(self, decays: Sequence[float] = DECAYS) -> None:
        """decays: what is left of older windows after one more, each 0 <= d < 1; a single one is a plain decaying
        average."""
        if not decays or not all(0 <= decay < 1 for decay in decays):
            told = ", ".join(map(str, decays))
            raise InvalidArgument(f"decays are [{told}]; allowed are one or more of at least 0 and below 1")
        self.decays = tuple(decays)
        self._averages: Array | None = None  # [decays, layers, E]
        self._errors: Array | None = None  # [decays, layers], a sum in which older ones count for less
        self._counted = 0.0  # what all of the errors count for

    def add(self, window: Array) -> None:
        """window: [layers, E], what each expert got since the last one; tokens or anything proportional."""
        now = checked.floats("window", window, np.float64)
        if now.ndim != 2 or not now.shape[1] or not np.all(np.isfinite(now)) or np.any(now < 0):
            raise InvalidArgument.of(
                "window", f"has shape {list(now.shape)}; it must be [layers, experts], finite, none negative"
            )
        if self._averages is None or self._errors is None:
            self._averages = np.zeros((len(self.decays), *now.shape))
            self._errors = np.zeros((len(self.decays), len(now)))
            new = np.zeros(len(now), bool)
        elif now.shape != self._averages.shape[1:]:
            raise InvalidArgument.of(
                "window", f"has shape {list(now.shape)}; so far it was {list(self._averages.shape[1:])}"
            )
        else:
            self._errors, new = self._judged(self._averages, self._errors, now)
        kept = np.array(self.decays)[:, None, None]
        averages = kept * self._averages + (1 - kept) * now
        self._averages = np.where(new[:, None], now, averages)

    def _judged(self, averages: Array, errors: Array, now: Array) -> tuple[Array, Array]:
        """(the errors with those of a window, which layers are new in it). A window that is new says nothing of the
        decays, as none has foretold it: their errors grow alike, and so much that loads which have become restless are
        not new for long."""
        found = _sum(np.abs(_shares(averages) - _shares(now)))
        layers = np.arange(len(now))
        least = found[self._best, layers]
        usual = np.maximum(errors[self._best, layers] / max(self._counted, 1.0), _ALIKE)
        new = (least > _FAR * usual) & now.any(axis=1)
        if self._counted <= 1 or len(self.decays) == 1:
            new[:] = False
        self._counted = _REMEMBERED * self._counted + 1
        return _REMEMBERED * errors + np.where(new, np.minimum(_MOST * usual, least), found), new

    @property
    def loads(self) -> Array:
        """float64 [layers, E], in the unit of the windows. (Averages start from zero: the first few are below it.)"""
        if self._averages is None:
            raise InvalidArgument("no window was added")
        return self._averages[self._best, np.arange(self._averages.shape[1])]

    @property
    def decay(self) -> Array:
        """float64 [layers]: the decay that is taken of each; the first of equals."""
        return np.array(self.decays)[self._best]

    @property
    def _best(self) -> Array:
        if self._errors is None:
            raise InvalidArgument("no window was added")
        return self._errors.argmin(axis=0)


def _sum(values: Array) -> Array:
    """[...] of [..., E]: one after the other, as numpy.sum's order is not the same on all machines."""
    return np.cumsum(values, axis=-1)[..., -1]


def _shares(loads: Array) -> Array:
    totals = _sum(loads)[..., None]
    return np.divide(loads, totals, out=np.zeros_like(loads), where=totals > 0)
