"""What the options of the benchmarks share: the error that a bad one is, and the checks."""

from __future__ import annotations

from collections.abc import Sequence


class UsageError(ValueError):
    """A bad argument, told in one line."""


def choice(option: str, given: str | None, known: Sequence[str], default: str) -> str:
    """One of the known names."""
    if given is None:
        return default
    if given not in known:
        raise UsageError(f"{option}: {given!r}; allowed: {', '.join(known)}")
    return given


def number(option: str, given: int | None, least: int, default: int) -> int:
    """An integer that is not too small."""
    if given is None:
        return default
    if given < least:
        raise UsageError(f"{option}: {given}; must be at least {least}")
    return given
