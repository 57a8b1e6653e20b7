"""What the options of all commands share: types for argparse, the error that a bad one is, and how to print."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLOTS = (".png", ".pdf", ".svg")


class UsageError(ValueError):
    """A bad argument, told in one line."""


# ---- types of argparse: they take an option's text, and raise ArgumentTypeError, which argparse tells with its name


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of integers from `least` on, and up to `most` if that is given."""
    allowed = f"must be at least {least}" if most is None else f"allowed {least}..{most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text}; {allowed}")
        return value

    return read


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """The type of some names, for words of `listed`; else argparse's own `choices` does it."""

    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {', '.join(known)}")
        return text

    return read


def listed(read: Callable[[str], Any], every: Iterable[Any] = ()) -> dict[str, Any]:
    """Keywords of add_argument for an option of several words, with commas or spaces between: a tuple of what the type
    `read` makes of each, nothing twice. every: what the word `all` stands for, if there is such a word."""
    every = tuple(every)

    def words(text: str) -> list[Any]:
        given = [word for word in text.split(",") if word]
        return [value for word in given for value in (every if every and word == "all" else [read(word)])]

    return {"nargs": "+", "type": words, "action": _Listed}


class _Listed(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(dict.fromkeys(value for words in values for value in words)))


def writable(path: str) -> str:
    """The type of files to be written, in a folder that is there: the absolute path."""
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no such folder")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: is a folder; it must be a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: cannot be written")
    return os.path.abspath(path)


def plot(path: str) -> str:
    """The type of pictures to be written, where there is what draws them."""
    if Path(path).suffix.lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"{path!r}; must end in {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib (pip install 'tokenway[bench]')")
    return writable(path)


# ---- options that go with another


def add_group(parser: argparse.ArgumentParser, needed: str, options: Mapping[str, dict[str, Any]]) -> None:
    """Declares options, name to keywords of add_argument, that are only for runs with another option."""
    group = parser.add_argument_group(f"with {needed}")
    for name, how in options.items():
        group.add_argument(name, **how)


def refuse_given(args: argparse.Namespace, needed: str, options: Iterable[str]) -> None:
    """Raises UsageError if one of these options was given, which are None or False where they are not."""
    for name in options:
        if getattr(args, name.lstrip("-").replace("-", "_")) not in (None, False):
            raise UsageError(f"{name}: only with {needed}")


# ---- printing


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
