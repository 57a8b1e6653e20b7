"""What a row of the tables is: the bug, the invariant that it breaks, the test that must fail, and the edits.

An edit's old text occurs exactly once in its file; when the library's code moves, run.py says which text is gone.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    file: str
    old: str  # occurs exactly once
    new: str


@dataclass(frozen=True)
class Mutation:
    name: str
    invariant: str
    unit: str  # tests/cc/<unit>.cc, which holds the test; py/<name>: tests/py/<name>.py, for edits of the package;
    # <backend>/<name>: tests/py/test_<name>.py on emulated devices, for edits of their sources
    test: str  # a GoogleTest filter; of pytest, what -k takes
    edits: tuple[Edit, ...]


SIGNALS = "src/exchange/signals.h"
STEP = "src/exchange/step.h"
NOTES = "src/exchange/notes.h"
LOADS_H = "src/exchange/loads.h"
DISPATCH = "src/exchange/dispatch.h"
COMBINE = "src/exchange/combine.h"
COUNTS_H = "src/exchange/counts.h"
ROUTING = "src/exchange/routing.h"
REPLICAS = "src/exchange/replicas.h"
LAYOUT_H = "src/exchange/routing_layout.h"
LAYOUT_API = "src/api/routing_layout.cc"
SUMMATION = "src/exchange/summation.h"
CONFIG = "src/core/config.cc"
BACKEND = "src/core/backend.h"
CALLS = "src/core/calls.cc"
COMBINING = "src/core/combining.cc"
SHRINK = "src/core/shrink.cc"
MESH = "src/bootstrap/mesh.cc"
GROUP = "src/core/group.cc"
CHANNELS = "src/core/channels.h"
LEASES = "src/core/leases.cc"
TRANSPORT = "src/cpu/transport.cc"
VECTOR = "src/cpu/vector.cc"
CPU = "src/cpu/backend.cc"
CPU_LOADS = "src/cpu/loads.h"
CHECK = "src/api/check.cc"
ROWS = "src/api/rows.cc"
ROW_TYPES = "src/api/row_types.cc"
COLLECTING = "src/cpu/collecting.h"
COLLECTIVE_H = "src/exchange/collective.h"
COLLECTIVES = "src/core/collectives.cc"
COLLECTIVES_API = "src/api/collectives.cc"
ENTRIES = "src/api/tokenway.cc"
MAP = "src/layout/window_map.h"
COLUMNS = "src/views/columns.h"
FP8 = "src/quantize/fp8.h"
TILES = "src/quantize/tiles.h"
INDEX_LISTS_API = "src/api/index_lists.cc"
INDEX_LISTS = "src/views/index_lists.h"
EXPERT_MAJOR = "src/views/expert_major.h"
GROUPED = "src/cpu/grouped.h"
LAYOUTS = "src/layout/layouts.h"
