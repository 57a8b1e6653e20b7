"""The C library: loaded, its functions as the header declares them, and its results as exceptions."""

from __future__ import annotations

import ctypes
import numbers
import os
from collections.abc import Callable, Collection, Mapping
from ctypes import byref, c_char_p
from importlib import resources
from pathlib import Path
from typing import Any

from tokenway import _header, callbacks, errors, sentences
from tokenway._header import VERSION


def library_path() -> Path:
    """The library that this package loads: TOKENWAY_LIBRARY, else the one in the package."""
    override = os.environ.get("TOKENWAY_LIBRARY")
    if override:
        return Path(override)
    return Path(str(resources.files("tokenway"))) / "lib" / "libtokenway.so"


def version_text(number: int) -> str:
    """A TW_VERSION as it is written."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


VERSION_TEXT = version_text(VERSION)


def _load() -> ctypes.CDLL:
    path = library_path()
    if not path.exists():
        raise ImportError(f"no Tokenway library at {path}: install the wheel, or build it and set TOKENWAY_LIBRARY")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"the Tokenway library {path} cannot be loaded: {error}") from error
    if not hasattr(lib, "twVersion"):
        raise ImportError(f"{path} is no Tokenway library: it has no function twVersion")
    if (version := lib.twVersion()) != VERSION:
        raise ImportError(
            f"{path} is Tokenway {version_text(version)}, and this package is {VERSION_TEXT}: install the "
            "wheel, or build the library of this version and set TOKENWAY_LIBRARY to it"
        )
    for name, (result, arguments) in _header.FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ImportError(f"{path} is Tokenway {version_text(version)} without {name}: build it anew")
        function.restype = result
        function.argtypes = arguments
    return lib


lib = _load()


def _parts(read: Callable[[int, Any], int]) -> list[sentences.Part]:
    """The sentence that one of C's functions shows part by part."""
    part, parts = _header.ErrorPart(), []
    while read(len(parts), byref(part)) == 0:
        text, name = part.text.decode(errors="replace"), part.name.decode()
        indices = tuple(index for index in part.indices if index >= 0)
        parts.append(sentences.Part(part.kind, text, name, indices, part.value))
    return parts


_READS = 8


def _read_record(group: int) -> tuple[errors.ErrorRecord, list[sentences.Part]]:
    """The record of a group's last error, and its sentence as C has it.

    C shows the parts of what this thread has asked for last, which may be another record: a finalizer or a signal's
    handler may ask between two of these calls. Then it is asked again."""
    record = _header.ErrorRecord()
    for _ in range(_READS):
        lib.twGroupGetError(group, byref(record))
        parts = _parts(lib.twRecordPart)
        if "".join(part.text for part in parts).startswith(record.message.decode(errors="ignore")):
            break
    told = errors.ErrorRecord(
        result=lib.twResultString(record.result).decode(),
        sticky=bool(record.sticky),
        peer=record.peer,
        reporter=record.reporter,
        phase=_header.PHASES[record.phase],
        lane=record.lane,
        step=record.step,
        expected=record.expected,
        seen=record.seen,
        token=record.token,
        k=record.k,
        value=record.value,
        message=sentences.tell(parts).text,
    )
    return told, parts


def read_record(group: int) -> errors.ErrorRecord:
    """The record of a group's last error."""
    return _read_record(group)[0]


def _made(
    kind: type[errors.TokenwayError], told: sentences.Told, record: errors.ErrorRecord | None
) -> errors.TokenwayError:
    if not issubclass(kind, errors.InvalidArgument):
        return kind(told.text, record)
    return kind(told.text, record, argument=told.argument, index=told.index, value=told.value, allowed=told.allowed)


# Results that a failure of a Python function leads to.
_CAUSED = (errors.SystemFailure, errors.GroupFinished)
# Results that a group always keeps a record of.
_RECORDED = (errors.PeerRefused, errors.BoundMismatch, errors.ReplicaMismatch, errors.GroupFinished)


def error_of(
    result: int, group: int | None = None, tensors: Collection[str] = (), given: Mapping[str, Any] | None = None
) -> errors.TokenwayError:
    """The exception of a result that is not success, with the sentence of this thread's last call. Where a Python
    function that C had called has failed, what it raised is the cause, or, if it was an error of this package, the
    exception itself. tensors, given: see sentences.tell."""
    name = lib.twResultString(result).decode()
    parts = _parts(lib.twLastErrorPart)
    told = sentences.tell(parts, list(tensors), given)
    kind = errors.BY_RESULT.get(name, errors.InternalError)
    if kind is errors.InvalidUsage and any(part.kind == sentences.UNDER_WAY for part in parts):
        kind = errors.InUse
    cause = callbacks.take_cause() if issubclass(kind, _CAUSED) else None
    if isinstance(cause, errors.TokenwayError) and issubclass(kind, errors.SystemFailure):
        return cause
    record, recorded = (None, None) if group is None else _read_record(group)
    # Arguments have a record if a device has found them wrong. Then it is this error's, else that of an earlier call.
    if record is not None and not issubclass(kind, _RECORDED) and (record.result, recorded) != (name, parts):
        record = None
    error = _made(kind, told, record)
    if cause is not None:
        error.__cause__ = cause
    return error


def error_of_record(record: errors.ErrorRecord) -> errors.TokenwayError:
    """The exception of what a group has recorded."""
    kind = errors.BY_RESULT.get(record.result, errors.InternalError)
    bad_id = record.k >= 0
    told = sentences.Told(record.message, *(("ids", (record.token, record.k), record.value) if bad_id else ()))
    return _made(kind, told, record)


def check(result: int, group: int | None = None, tensors: Collection[str] = ()) -> None:
    """Raises unless a call succeeded, and what a signal's handler has raised while it waited."""
    error = error_of(result, group, tensors) if result else None
    callbacks.tell(error)
    if error is not None:
        raise error


def environment() -> list[tuple[str, str, str]]:
    """(name, value in force, meaning) of every environment variable that the C library reads."""
    variables = []
    name, value, doc = c_char_p(), c_char_p(), c_char_p()
    while lib.twEnvironment(len(variables), byref(name), byref(value), byref(doc)) == 0:
        variables.append((name.value.decode(), value.value.decode(), doc.value.decode()))
    return variables


def libfabric() -> tuple[str, str]:
    """(version, providers that work here) of libfabric; Unsupported where it is not here, or was not at the build."""
    version, providers = c_char_p(), c_char_p()
    check(lib.twLibfabric(byref(version), byref(providers)))
    return version.value.decode(), providers.value.decode()


def nccl() -> str:
    """NCCL's version, where it can join devices of several hosts; Unsupported where it cannot."""
    version = c_char_p()
    check(lib.twNccl(byref(version)))
    return version.value.decode()


class Shared:
    """An object of the C library's that others hold: copies of these, as a model's average, share it."""

    def __copy__(self) -> Shared:
        return self

    def __deepcopy__(self, memo: object) -> Shared:
        return self

    def __reduce__(self) -> str:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: it is the C library's, of this process")


def fit(name: str, value: int, bits: int = 31) -> int:
    """An integer that C can hold; ctypes would cut it silently."""
    if type(value) is int and -(2**bits) <= value < 2**bits:  # asking an abstract class takes 0.6 us
        return value
    if not isinstance(value, numbers.Integral) or not -(2**bits) <= value < 2**bits:
        said = f"is {value!r}; it must be an integer of {bits + 1} bits"
        raise errors.InvalidArgument.of(name, said, value=value if isinstance(value, numbers.Number) else None)
    return int(value)


def fit_given(name: str, value: int) -> int:
    """The same for a field where C's 0 is its default, but not ours: C is to refuse a 0."""
    return fit(name, value) or sentences.ZERO


def fit_place(rank: int, nranks: int) -> tuple[int, int]:
    """A rank and the number of ranks, likewise."""
    return fit("rank", rank), fit("nranks", nranks)
