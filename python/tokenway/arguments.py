"""What callers may give by mistake: said to C in a way that it refuses, so that peers are told, and told in words here
where C cannot see what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from tokenway import sentences, tensors
from tokenway.errors import InvalidArgument, TokenwayError


class Preparation:
    """Around all that a call of all ranks does before the C library is asked, where peers may wait for it already.

    Arguments are code of the caller's: a property, a mapping, `__torch_function__` may raise anything. What is raised
    becomes the call's `problem`, and the call is made all the same, with something that C refuses, so that the peers
    hear of it at once; then the problem is raised. What is no Exception (Ctrl-C) passes: the caller's `with` block
    gives the group up."""

    __slots__ = ("problem",)

    def __init__(self) -> None:
        self.problem: TokenwayError | None = None

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, TokenwayError):
            self.problem = error
        else:
            self.problem = InvalidArgument(f"an argument cannot be read: {type(error).__name__}: {error}")
            self.problem.__cause__ = error
        return True


class Telling:
    """What `telling` returns: a class, as a generator would take as long as what it is put around."""

    __slots__ = ("_refuse",)

    def __init__(self, refuse: Callable[[], object]):
        self._refuse = refuse

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            with suppress(Exception):  # the exception under way is the one to tell
                self._refuse()


def telling(refuse: Callable[[], object]) -> Telling:
    """Around what can fail before a step that the peers are in already, where that step is another function's: what is
    raised is told to them by `refuse`, at once."""
    return Telling(refuse)


def cause_of(place: Any, given: Iterable[Any]) -> Exception | None:
    """What the first of a call's tensors raises when it is described."""
    found = (tensors.obstacle(place.describe, x) for x in given)
    return next((error for error in found if error is not None), None)


def code(table: Mapping[str, int], name: Any) -> int:
    """The number of a name; -1, which the C library refuses, for everything else."""
    return table.get(name, -1) if isinstance(name, str) else -1


def int32(value: Any) -> int:
    """An argument for a 32-bit field. What does not fit becomes -2, which the C library refuses in every such field:
    the call still reaches it, so that peers are told."""
    try:
        fits = isinstance(value, (int, np.integer)) and -(2**31) <= value < 2**31
        return int(value) if fits else -2
    except Exception:  # its own code
        return -2


def limit(value: Any) -> int:
    """The same for a field whose 0 is the group's value to C, which is None here: C is to refuse a 0."""
    return 0 if value is None else int32(value) or sentences.ZERO


def lane_number(lane: Any) -> int:
    """A lane for C, whose -1 is the next free one, None here."""
    if lane is None:
        return -1
    number = int32(lane)
    return -2 if number == -1 else number


def truth(flag: Any) -> bool:
    """Of a flag, whatever it does when it is asked: False where it cannot say."""
    try:
        return bool(flag)
    except Exception:
        return False


def pair(name: str, given: Any) -> tuple[Any, Any]:
    """Two optional arguments that are given as one: None stands for none of them."""
    if given is None:
        return None, None
    if type(given) not in (tuple, list) or len(given) != 2:
        raise InvalidArgument.of(name, f"is of type {type(given).__name__}; it must be a pair, (tokens, values)")
    return given[0], given[1]


def problem_of_outputs(place: Any, given: Mapping[str, Any], known: Collection[str]) -> InvalidArgument | None:
    """Why a mapping of outputs cannot be written to, as far as C does not see it."""
    for name, tensor in given.items():
        if name not in known:
            return InvalidArgument.of("out", f"has {name!r}; it may have {', '.join(known)}")
        problem: InvalidArgument | None = None
        if tensor is not None and (problem := place.problem_of_output(f"out[{name!r}]", tensor)) is not None:
            return problem
    return None


def problem_of_payloads(payloads: Any, known: Collection[str]) -> InvalidArgument:
    """What is given instead of a mapping of the group's payloads."""
    told = list(payloads) if isinstance(payloads, Mapping) else f"{type(payloads).__name__}, no mapping"
    return InvalidArgument.of("payloads", f"is {told}; this group's are {sorted(known)}")
