"""What callers may give by mistake: said to C in a way that it refuses, so that peers are told, and told in words here
where C cannot see what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tokenway.errors import InvalidArgument
from tokenway.handle import Handle


def code(table: Mapping[str, int], name: Any) -> int:
    """The number of a name; -1, which the C library refuses, for everything else."""
    return table.get(name, -1) if isinstance(name, str) else -1


def pointer_of(handle: Any) -> int | None:
    """Of a handle; NULL, which the C library refuses, for one of a closed group and for everything else."""
    return handle.pointer if isinstance(handle, Handle) and handle.group._pointer is not None else None


def int32(value: Any) -> int:
    """An argument for a 32-bit field. What does not fit becomes -2, which the C library refuses in every such field:
    the call still reaches it, so that peers are told."""
    fits = isinstance(value, (int, np.integer)) and -(2**31) <= value < 2**31
    return int(value) if fits else -2


def unlike(place: Any, name: str, argument: Any) -> str | None:
    """What an argument is instead of what it must be, where its type or place alone is wrong."""
    if name != "handle":
        return None if argument is None else place.unlike(argument)
    if not isinstance(argument, Handle):
        return f"{argument!r}; it must come from Group.route"
    return "of a group that is closed" if argument.group.closed else None


def problem_of_outputs(place: Any, given: Mapping[str, Any], known: Collection[str]) -> InvalidArgument | None:
    """Why a mapping of outputs cannot be written to, as far as C does not see it."""
    for name, tensor in given.items():
        if name not in known:
            return InvalidArgument(f"out has {name!r}; it may have {', '.join(known)}")
        problem = None if tensor is None else place.problem_of_output(f"out[{name!r}]", tensor)
        if problem is not None:
            return problem
    return None


def problem_of_payloads(payloads: Any, known: Collection[str]) -> InvalidArgument:
    """What is given instead of a mapping of the group's payloads."""
    told = list(payloads) if isinstance(payloads, Mapping) else f"{type(payloads).__name__}, no mapping"
    return InvalidArgument(f"payloads is {told}; this group's are {sorted(known)}")
