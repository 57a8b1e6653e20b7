"""include/tokenway/balance.h through ctypes: structs field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_void_p
from typing import ClassVar

from tokenway import _header


class PlanConfig(_header.Struct):
    _fields_: ClassVar = [
        ("num_layers", c_int32),
        ("num_experts", c_int32),
        ("num_ranks", c_int32),
        ("slots_per_rank", c_int32),
        ("num_nodes", c_int32),
        ("num_groups", c_int32),
        ("node_tolerance", c_double),
        ("old_map", c_void_p),
        ("max_writes", c_int32),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = 1
        self.node_tolerance = 0.01
        self.max_writes = -1


class PlanOutput(_header.Struct):
    _fields_: ClassVar = [
        ("physical_to_logical", c_void_p),
        ("replicas", c_void_p),
        ("rank_loads", c_void_p),
        ("bounds", c_void_p),
        ("stray", c_void_p),
    ]


class PlanMove(ctypes.Structure):
    _fields_: ClassVar = [
        ("layer", c_int32),
        ("slot", c_int32),
        ("expert", c_int32),
        ("before", c_int32),
        ("source", c_int32),
    ]
