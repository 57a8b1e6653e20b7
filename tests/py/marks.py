"""Marks of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def heavy_but(kept: Iterable[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """All combinations of the values, of which those that are not kept are marked heavy."""
    return but("heavy", kept, *values)


def but(mark: str, kept: Iterable[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """All combinations of the values, of which those that are not kept have a mark."""
    few = list(kept)
    every = list(itertools.product(*values))
    assert set(few) <= set(every), "what is kept must be one of the combinations"
    return [each if each in few else pytest.param(*each, marks=getattr(pytest.mark, mark)) for each in every]
