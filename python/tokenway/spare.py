"""What calls fill and use again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Spare(list[Kept], Generic[Kept]):
    """What calls fill and use again, each its own: a call takes one and appends it when it has read the answer. So a
    second call, in another thread or in a signal's handler between two bytecodes of the first, finds none of the
    first's arguments changed, and the C library alone says whether both can be. What a call that fails does not give
    back is made anew."""

    def __init__(self, make: Callable[[], Kept]):
        super().__init__()
        self._make = make

    def take(self) -> Kept:
        """One for a call."""
        try:
            return self.pop()
        except IndexError:
            return self._make()
