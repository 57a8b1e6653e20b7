"""Groups that grow: room for more tokens, or larger rows, in the window that there is."""

from __future__ import annotations

import numbers
from ctypes import byref
from dataclasses import replace
from typing import Any

from tokenway import _header, _native
from tokenway.errors import InvalidArgument


def reserve(
    group: Any,
    *,
    max_tokens: int | None = None,
    row_bytes: int | None = None,
    dispatch_room: int | None = None,
    combine_room: int | None = None,
) -> None:
    """Grows the group, collectively and between steps: afterwards calls may have up to max_tokens tokens, and rows of
    other types (`Group.rows`) up to dispatch_room and combine_room bytes; row_bytes stands for both where they are not
    given. What is no more than the group has changes nothing. All ranks name the same.

    Nothing that there is ends: tensors of earlier dispatches, leases, lanes that are held and graphs that were captured
    go on. A handle keeps the size that the group had when it was made, also as its default bound and as the default
    max_recv_tokens of its counts: it may be used and updated as before, but a larger bound or routing is
    InvalidArgument at its dispatch, and with overflow="drop" new counts are InvalidUsage; `route` makes larger ones.
    Where other ranks' handles are of another size, all name the bound or max_recv_tokens. Replays of a graph from
    before meet replays of it alone: where a rank calls anew instead, both are BoundMismatch. Where the group's
    max_recv_tokens was all that can come it grows too; lease_bytes do not. On a CUDA device it waits for the other
    ranks, not for the device.

    Errors leave the group as it was, and are errors on all ranks: InvalidArgument; InvalidUsage while a send_only call
    is pending or a graph is captured; ConfigMismatch where ranks differ; OutOfMemory; Timeout and PeerDied. And
    CallMismatch where another rank creates, shrinks or destroys a group of the comm. A rank that is in a dispatch or
    combine instead does not hear of this call: both wait until their timeouts, and the group is finished."""
    native = group.native
    asked = _header.Reserve()
    given_as = {"max_tokens": max_tokens, "dispatch_room": dispatch_room, "combine_room": combine_room}
    given = {
        "max_tokens": (max_tokens, 32),
        "dispatch_room": (row_bytes if dispatch_room is None else dispatch_room, 63),
        "combine_room": (row_bytes if combine_room is None else combine_room, 63),
    }
    problem = None
    for name, (value, bits) in given.items():
        if value is None:
            continue
        if isinstance(value, numbers.Integral) and 0 <= value < 2 ** (bits - 1):
            setattr(asked, name, int(value))
        elif problem is None:
            named = name if given_as[name] is not None else "row_bytes"
            problem = InvalidArgument.of(named, f"is {value!r}; it must be an integer from 0 to {2 ** (bits - 1) - 1}")
    asked.stream = native.place.stream()
    if problem is not None:
        asked.max_tokens = -1  # C refuses it, and tells the peers, which wait
    result = _native.lib.twGroupReserve(native.pointer, byref(asked))
    if problem is not None:
        raise problem
    if result:
        raise native.error(result)
    _take_over(group)


def _take_over(group: Any) -> None:
    """Makes the Python side as large as the C library's group is."""
    info = group.native.info()
    layouts = group.native.layouts()
    settings = group.settings
    given = [name for name in ("max_recv_tokens", "inbox_tokens") if getattr(settings, name) is not None]
    group.settings = replace(
        settings,
        **{name: getattr(info, name) for name in given},
        max_tokens=info.max_tokens,
        dispatch_room=info.dispatch_room,
        combine_room=info.combine_room,
    )
    for shape in (group.shape, *(typed.shape for typed in group._typed)):
        shape.grow(info, layouts)
    group._blocks.grow(group.native.handle_bytes())
    group._window_bytes = info.window_bytes
    group.max_tokens = info.max_tokens
    group.max_recv_rows = group.shape.max_recv_rows
    group.handle_bytes = group._blocks.handle_bytes
