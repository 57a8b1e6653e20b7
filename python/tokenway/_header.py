"""The public headers through ctypes, each thing once: constants, structs field by field, and the types of functions.
carrier.h and balance.h are in modules of their own, `_carrier` and `_balance`.

A test compiles the headers and compares every number, size and offset with these.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import ClassVar

VERSION = 100  # TW_VERSION of the header that this file follows
MAX_PAYLOADS = 8
MAX_TOP_K = 64
MAX_RANKS = 1024
MAX_INDEX_BLOCK = 4096
MAX_DIMS = 6

INTERRUPTED = 16  # twInterrupted
CALL_MISMATCH = 12  # twCallMismatch

MODES = {"low_latency": 0, "high_throughput": 1, "auto": 2}
OVERFLOWS = {"refuse": 0, "drop": 1}
COMBINE_ROWS = {"per_rank": 0, "per_expert": 1}
ID_SPACES = {"local": 0, "global": 1}
LINKS = {"other": 0, "tested": 1, "nvml": 2, "visible": 3}
HANDLES = {"none": 0, "descriptors": 1, "refused": 2, "fabric": 3}
CROSSINGS = {"faster": 0, "per_host": 1, "per_rank": 2}
DOMAINS = {"unknown": 0, "none": 1, "named": 2}
LAYOUTS = {"rank_major": 0, "expert_major": 1, "flat": 2, "grouped": 3, "grouped_by_bound": 4}
WEIGHTINGS = {"none": 0, "topk": 1}
SCALES = {"none": 0, "blocks": 1, "tensor": 2}
POLICIES = {"round_robin": 0, "local_first": 1, "shares": 2, "balanced": 3}
PHASES = ("none", "create", "dispatch", "combine", "shrink", "counts", "gather", "reduce")


class Struct(ctypes.Structure):
    """A struct of the C API that begins with its own size: the fields of a class below follow it."""

    _fields_: ClassVar = [("size", c_size_t)]

    def __init__(self) -> None:
        super().__init__()
        self.size = ctypes.sizeof(self)


class Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p),
        ("dtype", c_int),
        ("ndim", c_int32),
        ("shape", c_int64 * MAX_DIMS),
        ("stride", c_int64 * MAX_DIMS),
    ]


class CommConfig(Struct):
    _fields_: ClassVar = [
        ("timeout_ms", c_int32),
        ("address", c_char_p),
        ("device", c_int32),
        ("devices", c_void_p),
        ("allgather", c_void_p),
        ("allgather_context", c_void_p),
        ("ranks_per_host", c_int32),
        ("provider", c_char_p),
        ("crossing", c_int),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.device = -1


class Fabric(Struct):
    _fields_: ClassVar = [
        ("handles", c_int),
        ("refusal", c_int32),
        ("domain", c_int),
        ("clique", c_uint32),
        ("cluster", c_uint8 * 16),
    ]


class Payload(ctypes.Structure):
    _fields_: ClassVar = [("dtype", c_int), ("elements", c_int64)]


class GroupConfig(Struct):
    _fields_: ClassVar = [
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
        ("dispatch_room", c_uint64),
        ("combine_room", c_uint64),
        ("inbox_tokens", c_int32),
        ("arena", c_void_p),
        ("room_for", c_void_p),
        ("num_room_for", c_int32),
        ("low_latency_tokens", c_int32),
        ("combine_rows", c_int),
        ("token_replicas", c_int32),
        ("domain", c_int32),
    ]


class Placement(Struct):
    _fields_: ClassVar = [
        ("num_layers", c_int32),
        ("num_slots", c_int32),
        ("slot_expert", c_void_p),
        ("slot_shares", c_void_p),
        ("policy", c_int),
        ("count_loads", c_int32),
        ("load_decay", c_float),
        ("weight_bytes", c_uint64),
        ("moves", c_int32),
    ]


class Epochs(Struct):
    _fields_: ClassVar = [
        ("staged", c_uint32),
        ("ready", c_uint32),
        ("agreed", c_uint32),
        ("voids", c_uint32),
        ("oldest", c_uint32),
    ]


class GroupInfo(Struct):
    _fields_: ClassVar = [
        ("rank", c_int32),
        ("nranks", c_int32),
        ("num_local_experts", c_int32),
        ("lanes", c_int32),
        ("timeout_ms", c_int32),
        ("comm_ranks", c_int32 * MAX_RANKS),
        ("window_bytes", c_uint64),
        ("max_tokens", c_int32),
        ("max_recv_tokens", c_int32),
        ("dispatch_room", c_uint64),
        ("combine_room", c_uint64),
        ("inbox_tokens", c_int32),
        ("low_latency_tokens", c_int32),
        ("packet_tokens", c_int32),
        ("links", c_int),
        ("handles", c_int),
        ("refusal", c_int32),
        ("token_replicas", c_int32),
        ("domain", c_int32),
    ]


class Reserve(Struct):
    _fields_: ClassVar = [
        ("max_tokens", c_int32),
        ("dispatch_room", c_uint64),
        ("combine_room", c_uint64),
        ("stream", c_void_p),
    ]


class LayoutInfo(Struct):
    _fields_: ClassVar = [
        ("exact", c_int32),
        ("by_expert", c_int32),
        ("views", c_int32),
        ("blocks", c_int64),
        ("rows_per_bound", c_int64),
        ("ids_per_row", c_int64),
        ("offsets", c_int64),
        ("default_bound", c_int32),
        ("packed", c_int32),
        ("row_alignment", c_int32),
    ]


class WindowBytes(Struct):
    _fields_: ClassVar = [
        ("window", c_uint64),
        ("per_lane", c_uint64),
        ("dispatch_row", c_uint64),
        ("combine_row", c_uint64),
        ("expert_buffers", c_uint64),
    ]


class PlanQuery(Struct):
    _fields_: ClassVar = [
        ("tokens", c_int32),
        ("device_sms", c_int32),
    ]


class ErrorRecord(Struct):
    _fields_: ClassVar = [
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


class ErrorPart(Struct):
    _fields_: ClassVar = [
        ("kind", c_int),
        ("text", c_char_p),
        ("name", c_char_p),
        ("indices", c_int64 * 2),
        ("value", c_int64),
    ]


class DispatchInput(Struct):
    _fields_: ClassVar = [
        ("payloads", Tensor * MAX_PAYLOADS),
        ("bound", c_int32),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("uncounted", c_int32),
        ("num_types", c_int32),
        ("types", Payload * MAX_PAYLOADS),
        ("sm_limit", c_int32),
    ]


class DispatchOutput(Struct):
    _fields_: ClassVar = [
        ("layout", c_int),
        ("payloads", Tensor * MAX_PAYLOADS),
        ("ids", Tensor),
        ("weights", Tensor),
        ("counts", Tensor),
        ("offsets", Tensor),
        ("column_major", c_int32 * MAX_PAYLOADS),
        ("origins", Tensor),
        ("index_block", c_int32),
        ("sorted_rows", Tensor),
        ("block_experts", Tensor),
        ("num_sorted", Tensor),
        ("source_counts", Tensor),
    ]


class CountsInput(Struct):
    _fields_: ClassVar = [
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("landing", c_void_p * MAX_PAYLOADS),
        ("sm_limit", c_int32),
        ("max_recv_tokens", c_int32),
        ("row_alignment", c_int32),
    ]


class RoutingLayout(Struct):
    _fields_: ClassVar = [
        ("tokens_per_rank", Tensor),
        ("tokens_per_expert", Tensor),
        ("token_in_rank", Tensor),
        ("physical_ids", Tensor),
    ]


class LeaseInfo(Struct):
    _fields_: ClassVar = [
        ("bytes", c_uint64),
        ("used", c_uint64),
        ("largest", c_uint64),
        ("leases", c_int32),
    ]


class CombineInput(Struct):
    _fields_: ClassVar = [
        ("layout", c_int),
        ("weighting", c_int),
        ("rows", Tensor),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("wire_dtype", c_int),
        ("elements", c_int64),
        ("sm_limit", c_int32),
        ("choice_values", Tensor),
        ("wire_scales", c_int),
        ("wire_scale", c_float),
        ("weights", Tensor),
        ("bias", Tensor),
    ]


class CombineOutput(Struct):
    _fields_: ClassVar = [("tokens", Tensor), ("choice_values", Tensor)]


class AllGatherVInput(Struct):
    _fields_: ClassVar = [
        ("num_tensors", c_int32),
        ("tensors", Tensor * MAX_PAYLOADS),
        ("host_sizes", c_void_p),
        ("sizes", Tensor),
        ("bound", c_int32),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("sm_limit", c_int32),
    ]


class AllGatherVOutput(Struct):
    _fields_: ClassVar = [
        ("layout", c_int),
        ("tensors", Tensor * MAX_PAYLOADS),
        ("counts", Tensor),
        ("offsets", Tensor),
        ("request", c_int64),
    ]


class ReduceScatterVInput(Struct):
    _fields_: ClassVar = [
        ("layout", c_int),
        ("num_tensors", c_int32),
        ("tensors", Tensor * MAX_PAYLOADS),
        ("host_sizes", c_void_p),
        ("sizes", Tensor),
        ("bound", c_int32),
        ("lane", c_int32),
        ("send_only", c_int32),
        ("stream", c_void_p),
        ("sm_limit", c_int32),
    ]


class ReduceScatterVOutput(Struct):
    _fields_: ClassVar = [("tensors", Tensor * MAX_PAYLOADS), ("request", c_int64)]


# name: (result type, argument types). Pointers to structs are passed as addresses: no conversion on the way of a token.
FUNCTIONS = {
    "twResultString": (c_char_p, [c_int]),
    "twLastError": (c_char_p, []),
    "twLastErrorPart": (c_int, [c_int32, c_void_p]),
    "twRecordPart": (c_int, [c_int32, c_void_p]),
    "twVersion": (c_int, []),
    "twSetInterrupt": (c_int, [c_void_p, c_void_p, c_int64]),
    "twEnvironment": (c_int, [c_int32, POINTER(c_char_p), POINTER(c_char_p), POINTER(c_char_p)]),
    "twCommCreateShm": (c_int, [POINTER(c_void_p), c_int32, c_int32, POINTER(CommConfig)]),
    "twCommCreateFabric": (c_int, [POINTER(c_void_p), c_int32, c_int32, POINTER(CommConfig)]),
    "twCommCreateGin": (c_int, [POINTER(c_void_p), c_int32, c_int32, POINTER(CommConfig)]),
    "twCommCreateCuda": (c_int, [POINTER(c_void_p), c_int32, c_int32, POINTER(CommConfig)]),
    "twCommCreateLocal": (c_int, [POINTER(c_void_p), c_int32, POINTER(CommConfig)]),
    "twCommCreatePortable": (c_int, [POINTER(c_void_p), c_int32, c_int32, c_void_p]),
    "twCommDestroy": (c_int, [c_void_p]),
    "twCommRank": (c_int, [c_void_p, POINTER(c_int32), POINTER(c_int32)]),
    "twCommDevice": (c_int, [c_void_p, POINTER(c_int32)]),
    "twDeviceFabric": (c_int, [c_int32, POINTER(Fabric)]),
    "twNccl": (c_int, [POINTER(c_char_p)]),
    "twLibfabric": (c_int, [POINTER(c_char_p), POINTER(c_char_p)]),
    "twGroupWindowBytes": (c_int, [POINTER(GroupConfig), c_int32, POINTER(WindowBytes)]),
    "twDescribePlan": (
        c_int,
        [POINTER(GroupConfig), c_int32, POINTER(PlanQuery), c_char_p, c_size_t, POINTER(c_size_t)],
    ),
    "twGroupCreate": (c_int, [POINTER(c_void_p), c_void_p, POINTER(GroupConfig)]),
    "twGroupDestroy": (c_int, [c_void_p]),
    "twGroupAbort": (c_int, [c_void_p]),
    "twGroupReserve": (c_int, [c_void_p, POINTER(Reserve)]),
    "twGroupShrink": (c_int, [c_void_p, POINTER(GroupConfig), POINTER(c_void_p)]),
    "twGroupInfo": (c_int, [c_void_p, POINTER(GroupInfo)]),
    "twGroupIndexCapacity": (c_int, [c_void_p, c_int64, c_int32, POINTER(c_int64)]),
    "twGroupLayout": (c_int, [c_void_p, c_int, POINTER(LayoutInfo)]),
    "twGroupPortableInfo": (c_int, [c_void_p, c_void_p]),
    "twGroupGetError": (c_int, [c_void_p, POINTER(ErrorRecord)]),
    "twHandleMemBytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "twHandleCreate": (c_int, [POINTER(c_void_p), c_void_p, c_void_p, c_void_p, c_void_p]),
    "twHandleCreateForLayer": (c_int, [POINTER(c_void_p), c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "twGroupRoutingLayout": (c_int, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "twGroupReplaceMap": (c_int, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "twGroupMap": (c_int, [c_void_p, c_int32, c_void_p, c_void_p]),
    "twGroupStageMap": (c_int, [c_void_p, c_int32, c_void_p, c_void_p, POINTER(c_uint32)]),
    "twGroupWeights": (c_int, [c_void_p, c_int32, POINTER(c_void_p), POINTER(c_uint64)]),
    "twGroupPull": (c_int, [c_void_p, c_int32, c_uint64, c_uint64, c_uint64, c_void_p]),
    "twGroupMeet": (c_int, [c_void_p, c_void_p, c_uint64, c_int32, c_void_p]),
    "twGroupAddress": (c_int, [c_void_p, POINTER(c_char_p)]),
    "twGroupReady": (c_int, [c_void_p, c_uint32, c_int32]),
    "twGroupLost": (c_int, [c_void_p, c_int32, c_void_p]),
    "twGroupEpochs": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twGroupLoads": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twHandleUpdate": (c_int, [c_void_p, c_void_p, c_void_p]),
    "twHandleRelease": (c_int, [c_void_p]),
    "twHandleDestroy": (c_int, [c_void_p]),
    "twHandleNumRecvTokens": (c_int, [c_void_p, POINTER(c_int32), POINTER(c_int32)]),
    "twHandleNumRecvRows": (c_int, [c_void_p, c_int, POINTER(c_int64)]),
    "twHandleNumExpertRows": (c_int, [c_void_p, c_void_p]),
    "twHandleNumOutputRows": (c_int, [c_void_p, c_int, POINTER(c_int64)]),
    "twHandleCountsReady": (c_int, [c_void_p, c_int32, POINTER(c_int32)]),
    "twExchangeCounts": (c_int, [c_void_p, c_void_p, POINTER(CountsInput)]),
    "twDispatch": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "twGroupCheckRows": (c_int, [c_void_p, POINTER(DispatchInput), POINTER(CombineInput)]),
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
    "twQuantizeFp8": (c_int, [*[c_void_p] * 4, c_int32, c_int32, c_void_p]),
    "twQuantizeMxfp8": (c_int, [*[c_void_p] * 4, c_int32, c_void_p]),
    "twQuantizeNvfp4": (c_int, [*[c_void_p] * 5, c_int32, c_int32, c_void_p]),
    "twSwiGlu": (c_int, [*[c_void_p] * 5, c_int32, c_int32, c_void_p]),
    "twSwiGluBackward": (c_int, [*[c_void_p] * 6, c_int32, c_void_p]),
}
