"""The C API through ctypes: structs as in tokenway.h, field by field, and the library itself.

A test compiles the header and compares every size and offset with these classes.
"""

from __future__ import annotations

import ctypes
import numbers
import os
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from importlib import resources
from pathlib import Path

from tokenway import callbacks, errors, sentences

VERSION = 100  # TW_VERSION of the header that this file follows
MAX_PAYLOADS = 8
MAX_TOP_K = 64
MAX_RANKS = 1024
MAX_DIMS = 6

INTERRUPTED = 16  # twInterrupted
CALL_MISMATCH = 12  # twCallMismatch

MODES = {"low_latency": 0, "high_throughput": 1}
OVERFLOWS = {"refuse": 0, "drop": 1}
ID_SPACES = {"local": 0, "global": 1}
LAYOUTS = {"rank_major": 0, "expert_major": 1, "flat": 2, "grouped": 3}
WEIGHTINGS = {"none": 0, "topk": 1}
POLICIES = {"round_robin": 0, "local_first": 1, "shares": 2, "balanced": 3}
PHASES = ("none", "create", "dispatch", "combine", "shrink", "counts", "gather", "reduce")


class Struct(ctypes.Structure):
    """A struct of the C API that begins with its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.size = ctypes.sizeof(self)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int),
        ("ndim", c_int32),
        ("shape", c_int64 * MAX_DIMS),
        ("stride", c_int64 * MAX_DIMS),
    ]


class CommConfig(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_int32),
        ("address", c_char_p),
        ("device", c_int32),
        ("devices", c_void_p),
        ("allgather", c_void_p),
        ("allgather_context", c_void_p),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.device = -1


class Payload(ctypes.Structure):
    _fields_ = [("dtype", c_int), ("elements", c_int64)]


class GroupConfig(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("mode", c_int),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("max_tokens", c_int32),
        ("num_payloads", c_int32),
        ("payloads", Payload * MAX_PAYLOADS),
        ("combine_dtype", c_int),
        ("combine_elements", c_int64),
        ("expert_rank", c_void_p),
        ("expert_slot", c_void_p),
        ("lanes", c_int32),
        ("timeout_ms", c_int32),
        ("id_dtype", c_int),
        ("id_space", c_int),
        ("invalid_id", c_int32),
        ("sm_limit", c_int32),
        ("max_recv_tokens", c_int32),
        ("overflow", c_int),
        ("row_alignment", c_int32),
        ("alloc", c_void_p),
        ("release", c_void_p),
        ("alloc_context", c_void_p),
        ("lease_bytes", c_uint64),
        ("placement", c_void_p),
    ]


class Placement(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("num_layers", c_int32),
        ("num_slots", c_int32),
        ("slot_expert", c_void_p),
        ("slot_shares", c_void_p),
        ("policy", c_int),
        ("count_loads", c_int32),
        ("load_decay", c_float),
    ]


class GroupInfo(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_int32),
        ("nranks", c_int32),
        ("num_local_experts", c_int32),
        ("lanes", c_int32),
        ("timeout_ms", c_int32),
        ("comm_ranks", c_int32 * MAX_RANKS),
        ("window_bytes", c_uint64),
    ]


class WindowBytes(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("window", c_uint64),
        ("per_lane", c_uint64),
        ("dispatch_row", c_uint64),
        ("combine_row", c_uint64),
        ("expert_buffers", c_uint64),
    ]


class PlanQuery(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("tokens", c_int32),
        ("device_sms", c_int32),
    ]


class ErrorRecord(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("result", c_int),
        ("sticky", c_int32),
        ("peer", c_int32),
        ("reporter", c_int32),
        ("phase", c_int),
        ("lane", c_int32),
        ("step", c_uint32),
        ("expected", c_uint32),
        ("seen", c_uint32),
        ("token", c_int32),
        ("k", c_int32),
        ("value", c_int64),
        ("message", c_char * 512),
    ]


class DispatchInput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("payloads", Tensor * MAX_PAYLOADS),
        ("bound", c_int32),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("uncounted", c_int32),
    ]


class DispatchOutput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("layout", c_int),
        ("payloads", Tensor * MAX_PAYLOADS),
        ("ids", Tensor),
        ("weights", Tensor),
        ("counts", Tensor),
        ("offsets", Tensor),
        ("column_major", c_int32 * MAX_PAYLOADS),
        ("origins", Tensor),
    ]


class CountsInput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("landing", c_void_p * MAX_PAYLOADS),
    ]


class LeaseInfo(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("bytes", c_uint64),
        ("used", c_uint64),
        ("largest", c_uint64),
        ("leases", c_int32),
    ]


class CombineInput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("layout", c_int),
        ("weighting", c_int),
        ("rows", Tensor),
        ("send_only", c_int32),
        ("stream", c_void_p),
    ]


class CombineOutput(Struct):
    _fields_ = [("size", c_size_t), ("tokens", Tensor)]


class AllGatherVInput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("num_tensors", c_int32),
        ("tensors", Tensor * MAX_PAYLOADS),
        ("host_sizes", c_void_p),
        ("sizes", Tensor),
        ("bound", c_int32),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
    ]


class AllGatherVOutput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("layout", c_int),
        ("tensors", Tensor * MAX_PAYLOADS),
        ("counts", Tensor),
        ("offsets", Tensor),
        ("request", c_int64),
    ]


class ReduceScatterVInput(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("layout", c_int),
        ("num_tensors", c_int32),
        ("tensors", Tensor * MAX_PAYLOADS),
        ("host_sizes", c_void_p),
        ("sizes", Tensor),
        ("bound", c_int32),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
    ]


class ReduceScatterVOutput(Struct):
    _fields_ = [("size", c_size_t), ("tensors", Tensor * MAX_PAYLOADS), ("request", c_int64)]


# name: (result type, argument types). Pointers to structs are passed as addresses: no conversion on the way of a token.
_FUNCTIONS = {
    "twResultString": (c_char_p, [c_int]),
    "twLastError": (c_char_p, []),
    "twVersion": (c_int, []),
    "twSetInterrupt": (c_int, [c_void_p, c_void_p, c_int64]),
    "twEnvironment": (c_int, [c_int32, POINTER(c_char_p), POINTER(c_char_p), POINTER(c_char_p)]),
    "twCommCreateShm": (c_int, [POINTER(c_void_p), c_int32, c_int32, POINTER(CommConfig)]),
    "twCommCreateCuda": (c_int, [POINTER(c_void_p), c_int32, c_int32, POINTER(CommConfig)]),
    "twCommCreateLocal": (c_int, [POINTER(c_void_p), c_int32, POINTER(CommConfig)]),
    "twCommCreatePortable": (c_int, [POINTER(c_void_p), c_int32, c_int32, c_void_p]),
    "twCommDestroy": (c_int, [c_void_p]),
    "twCommRank": (c_int, [c_void_p, POINTER(c_int32), POINTER(c_int32)]),
    "twCommDevice": (c_int, [c_void_p, POINTER(c_int32)]),
    "twGroupWindowBytes": (c_int, [POINTER(GroupConfig), c_int32, POINTER(WindowBytes)]),
    "twDescribePlan": (
        c_int,
        [POINTER(GroupConfig), c_int32, POINTER(PlanQuery), c_char_p, c_size_t, POINTER(c_size_t)],
    ),
    "twGroupCreate": (c_int, [POINTER(c_void_p), c_void_p, POINTER(GroupConfig)]),
    "twGroupDestroy": (c_int, [c_void_p]),
    "twGroupAbort": (c_int, [c_void_p]),
    "twGroupShrink": (c_int, [c_void_p, POINTER(GroupConfig), POINTER(c_void_p)]),
    "twGroupInfo": (c_int, [c_void_p, POINTER(GroupInfo)]),
    "twGroupPortableInfo": (c_int, [c_void_p, c_void_p]),
    "twGroupGetError": (c_int, [c_void_p, POINTER(ErrorRecord)]),
    "twHandleMemBytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "twHandleCreate": (c_int, [POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_void_p]),
    "twHandleCreateForLayer": (c_int, [POINTER(c_void_p), c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "twGroupReplaceMap": (c_int, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "twGroupMap": (c_int, [c_void_p, c_int32, c_void_p, c_void_p]),
    "twGroupLoads": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twHandleUpdate": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twHandleRelease": (c_int, [c_void_p]),
    "twHandleDestroy": (c_int, [c_void_p]),
    "twHandleNumRecvTokens": (c_int, [c_void_p, POINTER(c_int32), POINTER(c_int32)]),
    "twHandleNumRecvRows": (c_int, [c_void_p, c_int, POINTER(c_int64)]),
    "twHandleNumOutputRows": (c_int, [c_void_p, c_int, POINTER(c_int64)]),
    "twHandleCountsReady": (c_int, [c_void_p, c_int32, POINTER(c_int32)]),
    "twExchangeCounts": (c_int, [c_void_p, c_void_p, POINTER(CountsInput)]),
    "twDispatch": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "twCombine": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "twComplete": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twAllGatherV": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twReduceScatterV": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twCompleteRequest": (c_int, [c_void_p, c_int64, c_void_p]),
    "twPlan": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twPlanLoads": (c_int, [*[c_void_p] * 4]),
    "twPlanSlots": (c_int, [*[c_void_p] * 4, c_int32]),
    "twPlanMoves": (c_int, [*[c_void_p] * 4, c_int64, POINTER(c_int64)]),
    "twWindowAlloc": (c_int, [c_void_p, c_uint64, POINTER(c_void_p)]),
    "twWindowTrim": (c_int, [c_void_p, c_uint64]),
    "twWindowFree": (c_int, [c_void_p]),
    "twGroupSteps": (c_int, [c_void_p, c_int32, POINTER(c_uint32)]),
    "twWindowKeep": (c_int, [c_void_p, POINTER(c_void_p)]),
    "twWindowRelease": (c_int, [c_void_p]),
    "twGroupLeaseInfo": (c_int, [c_void_p, POINTER(LeaseInfo)]),
    "twQuantizeFp8": (c_int, [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_void_p]),
    "twSwiGlu": (c_int, [*[c_void_p] * 5, c_int32, c_int32, c_void_p]),
    "twSwiGluBackward": (c_int, [*[c_void_p] * 6, c_int32, c_void_p]),
}


def library_path() -> Path:
    """The library that this package loads: TOKENWAY_LIBRARY, else the one in the package."""
    override = os.environ.get("TOKENWAY_LIBRARY")
    if override:
        return Path(override)
    return Path(str(resources.files("tokenway"))) / "lib" / "libtokenway.so"


def version_text(number: int) -> str:
    """A TW_VERSION as it is written."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


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
            f"{path} is Tokenway {version_text(version)}, and this package is {version_text(VERSION)}: install the "
            "wheel, or build the library of this version and set TOKENWAY_LIBRARY to it"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ImportError(f"{path} is Tokenway {version_text(version)} without {name}: build it anew")
        function.restype = result
        function.argtypes = arguments
    return lib


lib = _load()


def read_record(group: int) -> errors.ErrorRecord:
    """The record of a group's last error."""
    record = ErrorRecord()
    lib.twGroupGetError(group, byref(record))
    return errors.ErrorRecord(
        result=lib.twResultString(record.result).decode(),
        sticky=bool(record.sticky),
        peer=record.peer,
        reporter=record.reporter,
        phase=PHASES[record.phase],
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
