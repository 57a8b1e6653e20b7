"""Leases with calls that return at once: memory goes back, and is leased again, while kernels still read it."""

from __future__ import annotations

from typing import Any

import pytest
from test_autograd import Case, assert_same
from test_leases import TOKENS, run_collected, run_saved, run_written


def test_garbage_collection_decides_nothing(pair: Any) -> None:
    """Each copy that is compared waits for the device; what lies between is enqueued."""
    for leased, _ in pair.run(run_collected, 2 * TOKENS * 6):
        assert any(leased)


def test_rows_are_written_once(pair: Any) -> None:
    pair.run(run_written)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_for_backward(pair: Any, dtype: str) -> None:
    """Four layers keep their rows where they arrived, through two backward passes."""
    case = Case(7, 3, (90, 41), dtype, layers=4, layout="flat")
    want = pair.run(run_saved, case, 0)
    for room in (1 << 22, 1 << 15, 1):
        for ours, copied in zip(pair.run(run_saved, case, room), want, strict=True):
            for a, b in zip(ours, copied, strict=True):
                assert_same(a, b)
