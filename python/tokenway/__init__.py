"""Tokenway: expert-parallel communication for mixture-of-experts models.

with tw.Group(comm, experts=256, top_k=8, hidden=7168, max_tokens=128) as group:
    handle = group.route(topk_ids, topk_weights)
    recv = group.dispatch(handle, tokens)          # recv.tokens, .ids, .weights, .counts, .offsets
    out = group.combine(handle, experts(recv))     # [T, hidden]
"""

from tokenway import interrupts as _interrupts  # noqa: F401  handlers of signals are heard from here on
from tokenway._native import VERSION_TEXT as _VERSION_TEXT
from tokenway.activation import swiglu, swiglu_backward
from tokenway.comm import Comm, local_comms
from tokenway.connecting import connect
from tokenway.errors import (
    BoundMismatch,
    CallMismatch,
    ConfigMismatch,
    ErrorRecord,
    Excluded,
    GroupFinished,
    InternalError,
    Interrupted,
    InvalidArgument,
    InvalidUsage,
    OutOfMemory,
    PeerAborted,
    PeerDied,
    PeerRefused,
    PeerTimeout,
    RecvOverflow,
    ReplicaMismatch,
    SystemFailure,
    TokenwayError,
    Unsupported,
)
from tokenway.group import Group
from tokenway.handle import Handle, Pending, Received
from tokenway.launch import Outcome, Ranks, run
from tokenway.microscaling import (
    dequantize_mxfp8,
    dequantize_nvfp4,
    pack_nvfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    tile_scales,
    unpack_nvfp4,
    untile_scales,
)
from tokenway.placement import Placement
from tokenway.quantize import dequantize_fp8, quantize_fp8
from tokenway.routing_layout import RoutingLayout
from tokenway.row_types import TypedRows
from tokenway.settings import Payload, RowType, WindowBytes, window_bytes

__version__ = _VERSION_TEXT

__all__ = [
    "BoundMismatch",
    "CallMismatch",
    "Comm",
    "ConfigMismatch",
    "ErrorRecord",
    "Excluded",
    "Group",
    "GroupFinished",
    "Handle",
    "InternalError",
    "Interrupted",
    "InvalidArgument",
    "InvalidUsage",
    "OutOfMemory",
    "Outcome",
    "Payload",
    "PeerAborted",
    "PeerDied",
    "PeerRefused",
    "PeerTimeout",
    "Pending",
    "Placement",
    "Ranks",
    "Received",
    "RecvOverflow",
    "ReplicaMismatch",
    "RoutingLayout",
    "RowType",
    "SystemFailure",
    "TokenwayError",
    "TypedRows",
    "Unsupported",
    "WindowBytes",
    "connect",
    "dequantize_fp8",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "local_comms",
    "pack_nvfp4",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "run",
    "swiglu",
    "swiglu_backward",
    "tile_scales",
    "unpack_nvfp4",
    "untile_scales",
    "window_bytes",
]
