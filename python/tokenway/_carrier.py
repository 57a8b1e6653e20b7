"""include/tokenway/carrier.h through ctypes: structs field by field, and the types of its functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import ClassVar

from tokenway import _header

Over = ctypes.CFUNCTYPE(c_int32, c_void_p)


class ChannelConfig(_header.Struct):
    _fields_: ClassVar = [
        ("rank", c_int32),
        ("nranks", c_int32),
        ("comm_ranks", POINTER(c_int32)),
        ("local", c_char_p),
        ("host", c_char_p),
        ("port", c_int32),
        ("timeout_ms", c_int32),
        ("queues", c_int32),
        ("key", c_uint64),
        ("device", c_int32),
        ("over", Over),
        ("meeting", c_void_p),
    ]


class Move(_header.Struct):
    _fields_: ClassVar = [
        ("kind", c_int),
        ("queue", c_int32),
        ("send", c_void_p),
        ("recv", c_void_p),
        ("send_bytes", POINTER(c_uint64)),
        ("recv_bytes", POINTER(c_uint64)),
    ]


class Carrier(_header.Struct):
    _fields_: ClassVar = [
        ("context", c_void_p),
        ("offer", c_void_p),
        ("open", c_void_p),
        ("close", c_void_p),
        ("start", c_void_p),
        ("wait", c_void_p),
        ("enqueue", c_void_p),
        ("join", c_void_p),
        ("abort", c_void_p),
        ("ended", c_void_p),
    ]


class PortableConfig(_header.Struct):
    _fields_: ClassVar = [
        ("timeout_ms", c_int32),
        ("allgather", c_void_p),
        ("allgather_context", c_void_p),
        ("carrier", c_void_p),
        ("strategy", c_int),
        ("inline_bytes", c_int64),
        ("on_device", c_int32),
        ("device", c_int32),
    ]


class PortableInfo(_header.Struct):
    _fields_: ClassVar = [
        ("strategy", c_int),
        ("inline_bytes", c_int64),
        ("exchange_us", c_double),
        ("exchange_rate", c_double),
        ("gather_us", c_double),
        ("gather_rate", c_double),
        ("channel", c_int64),
    ]


Allgather = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
Offer = ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(c_int32))
Open = ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(ChannelConfig), POINTER(c_int64), c_void_p)
Close = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int32)
Start = ctypes.CFUNCTYPE(c_int64, c_void_p, c_int64, POINTER(Move))
Enqueue = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, POINTER(Move), c_int32, c_int32, c_void_p)
Join = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_int32, c_void_p)
Abort = ctypes.CFUNCTYPE(None, c_void_p, c_int64)
Wait = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64, c_int32)
