"""The C library's group of one rank, as the parts of `tokenway.group.Group` and its handles hold it."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_int64, c_size_t
from functools import partial
from typing import Any

from tokenway import _header, _native, arguments, callbacks, tensors, versions
from tokenway.comm import Comm
from tokenway.errors import ErrorRecord, InvalidArgument, InvalidUsage, TokenwayError
from tokenway.spare import Spare


class NativeGroup:
    """A group's address until it is closed, where its tensors are, and its errors.

    Parts of a group hold this object and never the group itself, so that counting references ends a group that nobody
    holds. comm: of the group, which lives as long as any of these: it has the functions that C calls. place:
    tensors.Host or cuda.Cuda. device: the CUDA device of this rank, None on the CPU. arena: a group whose window this
    one shares.
    """

    __slots__ = (
        "_comm",
        "_told",
        "address",
        "device",
        "nranks",
        "num_local_experts",
        "place",
        "routings",
        "torch_views",
    )

    def __init__(self, address: int, comm: Comm, place: Any, arena: NativeGroup | None = None):
        self.address: int | None = address  # None once the group is closed
        self._comm = comm
        self.place = place
        self.device = comm.device
        info = self.info()
        comm.note(info)
        self.torch_views = versions.Views(info.lanes) if arena is None else arena.torch_views
        self.torch_views.groups.append(address)
        self.nranks: int = info.nranks
        self.num_local_experts: int = info.num_local_experts
        self.routings: Spare[tensors.Routing] = Spare(partial(tensors.Routing, place))
        self._told: ErrorRecord | None = None  # the last record that an exception has told

    @property
    def pointer(self) -> int:
        """The address; InvalidUsage once the group is closed."""
        if self.address is None:
            raise InvalidUsage("the group is closed")
        return self.address

    @property
    def closed(self) -> bool:
        """Whether `close` is done."""
        return self.address is None

    def close(self) -> int:
        """Collective. Returns what twGroupDestroy did, and raises where the group is still there."""
        result: int = _native.lib.twGroupDestroy(self.pointer)
        if result not in (_header.INTERRUPTED, _header.CALL_MISMATCH):  # after these it is gone all the same
            _native.check(result)
        self.torch_views.leave(self.pointer)
        self.address = None
        return result

    def info(self) -> _header.GroupInfo:
        """What twGroupInfo tells."""
        info = _header.GroupInfo()
        _native.check(_native.lib.twGroupInfo(self.pointer, byref(info)))
        return info

    def layouts(self) -> dict[str, _header.LayoutInfo]:
        """What twGroupLayout tells of each layout that the group's mode has, by name."""
        found = {name: _header.LayoutInfo() for name in _header.LAYOUTS}
        ask, code = _native.lib.twGroupLayout, _header.LAYOUTS
        return {name: info for name, info in found.items() if ask(self.pointer, code[name], byref(info)) == 0}

    def index_capacity(self, rows: Any, block: Any) -> int:
        """As `Group.index_capacity` says."""
        capacity = c_int64()
        given = arguments.int32(rows), arguments.int32(block)
        result = _native.lib.twGroupIndexCapacity(self.pointer, *given, byref(capacity))
        if result:
            raise self.error(result, values={"rows": rows, "block": block})
        return capacity.value

    def handle_bytes(self) -> int:
        """Bytes of memory that a handle's arrays take."""
        size = c_size_t()
        _native.check(_native.lib.twHandleMemBytes(self.pointer, byref(size)))
        return size.value

    # ---------------------------------------------------------------------------------------------------- errors

    def record(self) -> ErrorRecord | None:
        """The record of the last error, None if there was none. Never blocks."""
        record = _native.read_record(self.pointer)
        return None if record.result == "twSuccess" else record

    def check(self) -> None:
        """Raises what `untold` finds."""
        if (error := self.untold()) is not None:
            raise error

    def untold(self) -> TokenwayError | None:
        """A sticky error, or one that no exception has told yet."""
        record = self.record()
        if record is None or not (record.sticky or record != self._told):
            return None
        self._told = record
        return _native.error_of_record(record)

    def error(
        self,
        result: int,
        problem: TokenwayError | None = None,
        inputs: Mapping[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
        handle_is: str | None = None,
        **others: Any,
    ) -> TokenwayError:
        """The exception of a call that C has refused, after a problem that C could not see, or with what is wrong about
        arguments that were no tensors for C.

        inputs: by name, the tensors that C has by number. values: what `sentences.tell` takes as given. handle_is: what
        the call's handle is instead of one (`handle.unlike`). others: further tensors by name. Raises an interrupt that
        ended the call."""
        inputs = inputs or {}
        error = _native.error_of(result, self.address, inputs, values)
        self._told = error.record or self._told
        callbacks.tell(error)
        if not isinstance(error, InvalidArgument):
            return error
        unlike = self.place.unlike
        seen = [f"{name} is {what}" for name, x in inputs.items() if x is not None and (what := unlike(x))]
        seen += [f"handle is {handle_is}"] * (handle_is is not None)
        seen += [f"{name} is {what}" for name, x in others.items() if x is not None and (what := unlike(x))]
        if problem is not None:
            if problem.__cause__ is not None:
                problem.args = ("; ".join([str(problem), *seen]),)
            return problem
        error.args = ("; ".join([str(error), *seen]),)
        if seen:
            given = (*inputs.values(), *others.values())
            error.__cause__ = arguments.cause_of(self.place, given) or error.__cause__
        return error

    # --------------------------------------------------------------------------------------------------- streams

    def sending_stream(self) -> Any:
        """The current stream, for who completes a call on another one; None on the CPU."""
        return None if self.device is None else self.place.current_stream()


def pointer_of(arena: Any) -> int:
    """The address of the group whose window another one shall share."""
    native = getattr(arena, "native", None)
    if not isinstance(native, NativeGroup):
        raise InvalidArgument.of("arena", f"is {arena!r}; it must be a Group")
    return native.pointer
