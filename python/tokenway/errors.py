"""Exceptions, one per result of the C library, grouped by what they break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ErrorRecord:
    """What ended a call, and who is to blame. Ranks are ranks of the group, -1 for none.

    `token`, `k` and `value` are those of an expert id that is out of range, where a CUDA device has found it:
    ids[token, k] == value. token and k are -1 in all other records.
    """

    result: str
    sticky: bool
    peer: int
    reporter: int
    phase: str
    lane: int
    step: int
    expected: int
    seen: int
    token: int
    k: int
    value: int
    message: str


class TokenwayError(Exception):
    """Base of all errors. `result` is the name of the C result, `record` the group's record or None."""

    result = "twInternalError"

    def __init__(self, message: str, record: ErrorRecord | None = None):
        super().__init__(message)
        self.record = record


class InvalidArgument(TokenwayError, ValueError):
    """An argument is out of range. Nothing was sent; the group is as it was.

    `argument` is its name ("lanes", "out['ids']"), None where the sentence is about none or several, and `index` the
    place in it of what is wrong, () for all of it. Of a number out of its range, `value` is that number, and `allowed`
    the least and the most that it may be; else they are None.
    """

    result = "twInvalidArgument"

    def __init__(
        self,
        message: str,
        record: ErrorRecord | None = None,
        *,
        argument: str | None = None,
        index: tuple[int, ...] = (),
        value: Any = None,
        allowed: tuple[int, int] | None = None,
    ):
        super().__init__(message, record)
        self.argument = argument
        self.index = index
        self.value = value
        self.allowed = allowed

    @classmethod
    def of(cls, argument: str, said: str, index: tuple[int, ...] = (), **fields: Any) -> InvalidArgument:
        """The sentence that begins with the argument's name. fields: further ones."""
        place = f"[{', '.join(map(str, index))}]" if index else ""
        return cls(f"{argument}{place} {said}", argument=argument, index=index, **fields)


class InvalidUsage(TokenwayError, RuntimeError):
    """Right arguments at the wrong time. Nothing was sent."""

    result = "twInvalidUsage"


class InUse(InvalidUsage):
    """Another call is under way on the group, or on its comm. Nothing has changed: it may be tried again."""


class OutOfMemory(TokenwayError, MemoryError):
    """A window does not fit; says how much is needed and how much is free."""

    result = "twOutOfMemory"


class SystemFailure(TokenwayError, OSError):
    """An operating system call failed."""

    result = "twSystemError"


class Unsupported(TokenwayError, NotImplementedError):
    """This build or machine cannot do it; says why."""

    result = "twUnsupported"


class ConfigMismatch(TokenwayError, ValueError):
    """Ranks disagree on a group's configuration; names the field and the ranks."""

    result = "twConfigMismatch"


class PeerRefused(TokenwayError, RuntimeError):
    """A peer was given bad arguments, so this call failed on all ranks. The group stays usable."""

    result = "twPeerRefused"


class BoundMismatch(TokenwayError, ValueError):
    """Ranks called with different bounds, so this call failed on all. The group stays usable."""

    result = "twBoundMismatch"


class ReplicaMismatch(TokenwayError, ValueError):
    """Token replicas hold unlike tokens, so this combine failed on all ranks. The group stays usable."""

    result = "twReplicaMismatch"


class RecvOverflow(TokenwayError, RuntimeError):
    """A rank would receive more than max_recv_tokens rows, so the exchange of counts failed on all ranks. The group
    stays usable."""

    result = "twRecvOverflow"


class GroupFinished(TokenwayError, RuntimeError):
    """The group can send nothing more; `Group.shrink` goes on with the survivors. Creating a comm or a group fails
    with the same kinds, where there is no group to go on with."""


class PeerTimeout(GroupFinished, TimeoutError):
    """A peer was later than the group's timeout."""

    result = "twTimeout"


class PeerDied(GroupFinished, ConnectionError):
    """A peer's process ended, or closed its comm; or it is out of reach."""

    result = "twPeerDied"


class Excluded(GroupFinished):
    """The peers gave this rank up and go on without it; or its network failed."""

    result = "twExcluded"


class CallMismatch(GroupFinished):
    """Ranks made different calls on the same lane."""

    result = "twCallMismatch"


class PeerAborted(GroupFinished):
    """A peer, or this rank, gave the group up (`Group.abort`); or a peer's network failed."""

    result = "twPeerAborted"


class Interrupted(GroupFinished):
    """What a signal's handler has raised ended this rank's wait, and the group is given up. Raised is that
    (KeyboardInterrupt, say); this is its cause, and says what was waited for."""

    result = "twInterrupted"


class InternalError(GroupFinished):
    """A promise of the library is broken: please report."""

    result = "twInternalError"


BY_RESULT: dict[str, type[TokenwayError]] = {
    kind.result: kind
    for kind in (
        InvalidArgument,
        InvalidUsage,
        OutOfMemory,
        SystemFailure,
        Unsupported,
        ConfigMismatch,
        PeerRefused,
        BoundMismatch,
        RecvOverflow,
        ReplicaMismatch,
        PeerTimeout,
        PeerDied,
        Excluded,
        CallMismatch,
        PeerAborted,
        Interrupted,
        InternalError,
    )
}
