"""Rows of other types in one group: calls that name what their rows consist of."""

from __future__ import annotations

from ctypes import byref

from tokenway import _header, _native
from tokenway.blocks import Blocks
from tokenway.calls import Calls
from tokenway.counting import Counting
from tokenway.exchange import Exchange
from tokenway.native_group import NativeGroup
from tokenway.outputs import Outputs
from tokenway.settings import RowType
from tokenway.shape import Shape
from tokenway.structs import name_rows


class TypedRows(Calls):
    """Dispatches and combines of a group whose rows consist of something else than the group was made with, as
    `Group.rows` says. They share the group's window, lanes and handles: a handle that was routed once serves all types,
    in any order, and each call counts as one of the group's. `dispatch` and `combine` are as a group's, of rows of this
    type on all ranks, else BoundMismatch; a combine's whatever the dispatch's rows were. Leases are for the group's own
    rows: these come to the window, whatever `exchange_counts` has announced.

    `type` is what the rows consist of. It ends with the group."""

    def __init__(self, native: NativeGroup, shape: Shape, blocks: Blocks, counting: Counting, rows: RowType):
        self.type = rows
        self.shape = typed = shape.of_rows(rows)
        dispatched, combined = _header.DispatchInput(), _header.CombineInput()
        name_rows(typed, dispatched, combined)
        result = _native.lib.twGroupCheckRows(native.pointer, byref(dispatched), byref(combined))
        _native.check(result, tensors=rows.payload_names())
        self._outputs = Outputs(native, typed)
        self._exchange = Exchange(native, typed, blocks, counting, self._outputs)

    def clear(self) -> None:
        """Before the group is closed: see `Outputs.clear`."""
        self._outputs.clear()

    def __repr__(self) -> str:
        return f"TypedRows({self.type})"
