"""What the options of all commands share: the error that a bad one is, the checks, and how to print."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PLOTS = (".png", ".pdf", ".svg")


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


@contextmanager
def printing() -> Iterator[None]:
    """Around what prints: a character that cannot be encoded, or a reader that has seen enough, ends nothing else."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the interpreter's end would try once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def writable(option: str, path: str | None) -> str | None:
    """A file to be written, in a folder that is there: its absolute path."""
    if path is None:
        return None
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise UsageError(f"{option}: {path}: there is no such folder")
    if file.is_dir():
        raise UsageError(f"{option}: {path}: is a folder; it must be a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{option}: {path}: cannot be written")
    return os.path.abspath(path)


def plot(option: str, path: str | None) -> str | None:
    """The same of a picture, where there is what draws it."""
    if path is None:
        return None
    if Path(path).suffix.lower() not in PLOTS:
        raise UsageError(f"{option}: {path!r}; must end in {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option}: needs matplotlib (pip install 'tokenway[plot]')")
    return writable(option, path)
