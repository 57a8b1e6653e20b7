"""A group as a layer sees it whose rows are of another type than the group's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenway import _native
from tokenway.calls import Calls
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.settings import RowType, Settings


class TypedGroup(Calls, _native.Shared):
    """What the functions of `tokenway.autograd` take for a group: layers of several hidden sizes and dtypes train over
    one window. Its handles are for its rows; all else is the group's, which it keeps. Not collective; make it once. To
    train, rows and what is combined have the same dtype, float32 or bfloat16, and the group a `combine_room` of 4 *
    top_k bytes more than the rows take.

    steps: dispatches, combines, gathers and reduce-scatters that were called by it, forward and backward. Errors: as
    `Group.rows`."""

    def __init__(self, group: Group, rows: RowType):
        self.group = group
        self.type = rows
        self.steps = 0
        typed = group.rows(rows)
        self._exchange = typed._exchange
        self.shape = shape = typed.shape
        self.hidden, self.dtype = shape.hidden, shape.dtype
        self.combine_hidden, self.combine_dtype = shape.combine_hidden, shape.combine_dtype
        self._settings: tuple[Settings, Settings] | None = None  # the group's, and these rows'
        # What stays as it is, and is asked for in each call: `__getattr__` takes ten times as long.
        self.native, self.rank, self.nranks = group.native, group.rank, group.nranks
        self.top_k, self.num_local_experts = group.top_k, group.num_local_experts

    def __getattr__(self, name: str) -> Any:
        if name == "group":  # of one whose making has failed
            raise AttributeError(name)
        return getattr(self.group, name)

    @property
    def settings(self) -> Settings:
        """The group's, but for the rows; leases are for rows of the group's own type."""
        base = self.group.settings
        if self._settings is None or self._settings[0] is not base:
            rows = {name: getattr(self.type, name) for name in ("hidden", "dtype", "payloads")}
            combined = {"combine_dtype": self.combine_dtype, "combine_hidden": self.combine_hidden}
            leased = base.lease_bytes if self.shape.own else 0
            self._settings = base, replace(base, **rows, **combined, lease_bytes=leased)
        return self._settings[1]

    def route(self, ids: Any, weights: Any = None, *, layer: int = 0, memory: Any = None) -> Handle[TypedGroup]:
        """As `Group.route`."""
        return self._exchange.route(self, ids, weights, layer, memory)

    def dispatch(self, handle: Handle[Any], tokens: Any, payloads: Any = None, **settings: Any) -> Any:
        """As `Group.dispatch`, of rows of this type."""
        self.steps += 1
        return super().dispatch(handle, tokens, payloads, **settings)

    def combine(self, handle: Handle[Any], rows: Any, **settings: Any) -> Any:
        """As `Group.combine`, of rows of this type."""
        self.steps += 1
        return super().combine(handle, rows, **settings)

    def all_gatherv(self, rows: Any, sizes: Any = None, **settings: Any) -> Any:
        """As `Group.all_gatherv`, of any rows."""
        self.steps += 1
        return self.group.all_gatherv(rows, sizes, **settings)

    def reduce_scatterv(self, rows: Any, sizes: Any = None, **settings: Any) -> Any:
        """As `Group.reduce_scatterv`, of any rows."""
        self.steps += 1
        return self.group.reduce_scatterv(rows, sizes, **settings)

    def refuse_dispatch(self, layout: str | None = None, bound: int | None = None) -> None:
        """As `Group.refuse_dispatch`, of rows of this type."""
        if not self.group.closed:
            self._exchange.refuse_dispatch(layout, bound)

    def refuse_routing(self, layout: str | None = None, bound: int | None = None) -> None:
        """As `Group.refuse_routing`, of rows of this type."""
        both = self.low_latency_tokens > 0
        if self.shape.is_exact(self.shape.choose(layout, bound) if both else layout):
            self.group.refuse_routing(layout, bound)  # the exchange of counts, which moves no rows
        else:
            self.refuse_dispatch(layout, bound)

    def __repr__(self) -> str:
        return f"TypedGroup({self.group!r}, {self.type!r})"
