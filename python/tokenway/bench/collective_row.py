"""One row of `tokenway bench --collective`: an uneven gather or reduce-scatter, what each rank gives and must get."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenway import reference, tensors


@dataclass(frozen=True)
class Row:
    """Which collective: so many rows of each rank."""

    collective: str  # all_gatherv or reduce_scatterv
    tokens: int  # of the rank that has most
    even: bool
    ranks: int
    hidden: int
    dtype: str

    @property
    def sizes(self) -> list[int]:
        """Rows of each rank: all the same, or from all of them down to an N-th."""
        n = self.ranks
        return [self.tokens if self.even else self.tokens * (n - r) // n for r in range(n)]

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.hidden * tensors.numpy_dtype(self.dtype).itemsize

    @property
    def remote_rows(self) -> int:
        """Rows over the busiest rank's link, in the direction that has more."""
        most, all_of_them = max(self.sizes), sum(self.sizes)
        one, many = most * (self.ranks - 1), all_of_them - min(self.sizes)
        return max(one, many)

    def inputs(self, rank: int) -> np.ndarray:
        """[n, H] to gather, or [sum of sizes, H] to reduce: every row of every rank is another."""
        count = self.sizes[rank] if self.collective == "all_gatherv" else sum(self.sizes)
        rows = np.arange(count, dtype=np.int32)[:, None] * 131 + rank * 1009
        values = (rows + np.arange(self.hidden, dtype=np.int32) * 7) % 509 - 254
        return (values.astype(np.float32) / 16).astype(tensors.numpy_dtype(self.dtype))

    def wanted(self, rank: int) -> np.ndarray:
        """The oracle's result."""
        inputs = [self.inputs(r) for r in range(self.ranks)]
        if self.collective == "all_gatherv":
            return reference.all_gatherv(inputs)
        return reference.reduce_scatterv(inputs, self.sizes, rank)
