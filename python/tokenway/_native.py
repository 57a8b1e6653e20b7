"""The C library: loaded, its functions as the header declares them, and its results as exceptions."""

from __future__ import annotations

import ctypes
import numbers
import os
from ctypes import byref, c_char_p
from importlib import resources
from pathlib import Path

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


def read_record(group: int) -> errors.ErrorRecord:
    """The record of a group's last error."""
    record = _header.ErrorRecord()
    lib.twGroupGetError(group, byref(record))
    return errors.ErrorRecord(
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
        message=sentences.in_python(record.message.decode(errors="replace")),
    )


# Results that a failure of a Python function leads to.
_CAUSED = (errors.SystemFailure, errors.GroupFinished)
_IN_USE = " is under way on the "  # as src/core/occupied.h says it
# Results that a group always keeps a record of.
_RECORDED = (errors.PeerRefused, errors.BoundMismatch, errors.GroupFinished)


def error_of(result: int, group: int | None = None) -> errors.TokenwayError:
    """The exception of a result that is not success, with the sentence of this thread's last call. Where a Python
    function that C had called has failed, what it raised is the cause, or, if it was an error of this package, the
    exception itself."""
    name = lib.twResultString(result).decode()
    message = sentences.in_python(lib.twLastError().decode(errors="replace"))
    kind = errors.BY_RESULT.get(name, errors.InternalError)
    if kind is errors.InvalidUsage and _IN_USE in message:
        kind = errors.InUse
    cause = callbacks.take_cause() if issubclass(kind, _CAUSED) else None
    if isinstance(cause, errors.TokenwayError) and issubclass(kind, errors.SystemFailure):
        return cause
    record = None if group is None else read_record(group)
    # Arguments have a record if a device has found them wrong. Then it is this error's, else that of an earlier call.
    if record is not None and not issubclass(kind, _RECORDED) and (record.result, record.message) != (name, message):
        record = None
    error = kind(message, record)
    if cause is not None:
        error.__cause__ = cause
    return error


def error_of_record(record: errors.ErrorRecord) -> errors.TokenwayError:
    """The exception of what a group has recorded."""
    return errors.BY_RESULT.get(record.result, errors.InternalError)(record.message, record)


def check(result: int, group: int | None = None) -> None:
    """Raises unless a call succeeded, and what a signal's handler has raised while it waited."""
    error = error_of(result, group) if result else None
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
    if not isinstance(value, numbers.Integral) or not -(2**bits) <= value < 2**bits:
        raise errors.InvalidArgument(f"{name} is {value!r}; it must be an integer of {bits + 1} bits")
    return int(value)


ZERO = -(2**31)  # stands for 0 in fields where C's 0 is its default, but not ours: `sentences` says 0 again


def fit_given(name: str, value: int) -> int:
    """The same for such a field: C is to refuse a 0."""
    return fit(name, value) or ZERO


def fit_place(rank: int, nranks: int) -> tuple[int, int]:
    """A rank and the number of ranks, likewise."""
    return fit("rank", rank), fit("nranks", nranks)
