"""Rows of other types in one group: calls that name what their rows consist of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ctypes import byref
from typing import Any

from tokenway import _header, _native, cuda
from tokenway.blocks import Blocks
from tokenway.counting import Counting
from tokenway.exchange import Exchange
from tokenway.handle import Handle, Tensor
from tokenway.native_group import NativeGroup
from tokenway.outputs import Outputs
from tokenway.settings import RowType
from tokenway.shape import Shape
from tokenway.structs import name_rows


class TypedRows:
    """Dispatches and combines of a group whose rows consist of something else than the group was made with, as
    `Group.rows` says. They share the group's window, lanes and handles: a handle that was routed once serves all types,
    in any order, and each call counts as one of the group's.

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

    @cuda.ranged("tokenway.dispatch")
    def dispatch(
        self,
        handle: Handle[Any],
        tokens: Tensor,
        payloads: Mapping[str, Tensor] | None = None,
        *,
        layout: str | None = None,
        bound: int | None = None,
        lane: int | None = None,
        out: Tensor | Mapping[str, Tensor] | None = None,
        column_major: Collection[str] | None = None,
        count: bool = True,
        send_only: bool = False,
    ) -> Any:
        """As `Group.dispatch`, of rows of this type; on all ranks, else BoundMismatch. Leases are for the group's own
        rows: these come to the window, whatever `exchange_counts` has announced."""
        return self._exchange.dispatch(
            handle, tokens, payloads, layout, bound, lane, out, column_major, count, send_only
        )

    @cuda.ranged("tokenway.combine")
    def combine(
        self,
        handle: Handle[Any],
        rows: Tensor,
        *,
        weighting: str = "none",
        layout: str | None = None,
        dtype: Any = None,
        out: Tensor | None = None,
        send_only: bool = False,
    ) -> Any:
        """As `Group.combine`, of rows of this type, whatever the dispatch's rows were; on all ranks, else
        BoundMismatch."""
        return self._exchange.combine(handle, rows, weighting, layout, dtype, out, send_only)

    def clear(self) -> None:
        """Before the group is closed: see `Outputs.clear`."""
        self._outputs.clear()

    def __repr__(self) -> str:
        return f"TypedRows({self.type})"
