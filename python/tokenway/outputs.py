"""The outputs of a dispatch: what is allocated for it, and what it returns."""

from __future__ import annotations

from collections.abc import Collection
from ctypes import byref, c_void_p
from typing import Any, NamedTuple

from tokenway import _native
from tokenway.errors import InvalidArgument
from tokenway.handle import Handle
from tokenway.native_group import NativeGroup
from tokenway.received import Received, Tensor
from tokenway.shape import BY_BOUND, Field, Shape
from tokenway.structs import Structs
from tokenway.tensors import numpy_dtype

_ASKED_FOR = ("origins", "source_counts")
_MOST_KEPT = 1024  # of what follows from a call's bound or rows: a few for each that calls give


class Keeper:
    """Keeps a group's window mapped, on this rank alone and beyond the group, for the views that hold this. It ends
    with the last of them, which may be whenever garbage is collected: no other rank has to know."""

    __slots__ = ("__weakref__", "_keeper")
    _release = _native.lib.twWindowRelease  # here, as a process that ends may have no modules any more

    def __init__(self, group: int):
        keeper = c_void_p()
        self._keeper: int | None = None
        _native.check(_native.lib.twWindowKeep(group, byref(keeper)))
        self._keeper = keeper.value

    def __del__(self) -> None:
        if self._keeper:
            self._release(self._keeper)


class Shown(NamedTuple):
    """What a dispatch returns that was given no outputs: where C shows them, call after call in few places."""

    fields: dict[str, Tensor]  # views of the window
    late: dict[str, tuple[int, tuple[int, ...], str]]  # as Received has it
    views: tuple[Tensor, ...]  # of the fields, PyTorch's views of a bank
    merged: dict[str, Tensor]  # what `Received.merged` has made of the fields


class Outputs:
    """Those of one group, and the views of its window, which are kept: making one takes longer than a small copy."""

    def __init__(self, native: NativeGroup, shape: Shape):
        self._native, self._shape = native, shape
        self._views: dict[Any, Tensor] = {}
        self._shown: dict[Any, Shown] = {}
        self._known: dict[Any, dict[str, Field]] = {}
        self._lists: dict[tuple[int, int], dict[str, Field]] = {}  # index lists, by rows of the view and block
        self.keeper: Keeper | None = None  # what views of the window hold, once there are any

    def clear(self) -> None:
        """Before the group is closed: views that others hold keep the window, and nothing here does."""
        self._views.clear()
        self._shown.clear()
        self.keeper = None

    # ------------------------------------------------------------------------------------------------- allocation

    def choose_columns(self, structs: Structs, columns: Any) -> InvalidArgument | None:
        """Tells C which payloads are wanted by column; none where there is a problem with them."""
        known = list(self._shape.payloads)
        wanted = () if columns is None else columns
        right = isinstance(wanted, Collection) and not isinstance(wanted, str) and all(name in known for name in wanted)
        for q, name in enumerate(known):
            structs.dispatch_out.column_major[q] = 1 if right and name in wanted else 0
        if right:
            return None
        return InvalidArgument.of("column_major", f"is {columns!r}; it must hold payloads of the group: {known}")

    def add_by_expert(
        self, structs: Structs, handle: Any, layout: str, b: int, made: dict[str, Tensor], like: Tensor
    ) -> None:
        """New tensors for what the caller has not given: there is no window to view by expert."""
        shape, empty = self._shape, self._native.place.empty
        exact = shape.layouts[layout].exact
        rows = 0
        if exact:
            known = handle.rows_of(layout) if isinstance(handle, Handle) else None
            if known is None:
                return  # refused anyway
            rows = known
        elif not 0 < b <= (shape.low_latency_tokens or shape.max_tokens):
            return  # refused anyway
        fields = self._wanted(layout, shape.lead(layout, b, rows))
        for q, name in enumerate(shape.payloads):
            if made.get(name) is None:
                extent, dtype = fields[name]
                if structs.dispatch_out.column_major[q]:
                    *blocks, places, elements = extent
                    step = 16 // numpy_dtype(dtype).itemsize
                    extent = *blocks, elements, -(-places // step) * step
                made[name] = empty(extent, dtype, like)
        for name in ("ids", "weights"):
            if made.get(name) is None:
                made[name] = empty(*fields[name], like)

    def add_lists(
        self, structs: Structs, handle: Any, layout: Any, b: int, block: int, given: dict[str, Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """The index lists of a dispatch, told to C: those that the caller has given, which leave `given`, and new
        tensors for the others. None where C refuses the call anyway."""
        structs.dispatch_out.index_block = block
        form = self._shape.layouts.get(layout) if type(layout) is str else None
        if form is None or form.by_expert:
            return {}
        rows = form.blocks * form.rows_per_bound * b
        if form.exact:
            rows = (handle.rows_of(layout) or 0) if isinstance(handle, Handle) else 0
        fields = self._list_fields(rows, block)
        lists: dict[str, Tensor] = {}
        for name, field in (fields or {}).items():
            tensor = given.pop(name, None)
            lists[name] = self._native.place.empty(*field, like) if tensor is None else tensor
            structs.lists[name].set(lists[name])
        return lists

    def _list_fields(self, rows: int, block: int) -> dict[str, Field] | None:
        """Those of a view of so many rows, kept; None where C finds them too long."""
        found = self._lists.get((rows, block))
        if found is None:
            try:
                capacity = self._native.index_capacity(rows, block)
            except InvalidArgument:
                return None
            if len(self._lists) >= _MOST_KEPT:
                self._lists.clear()
            found = self._lists[rows, block] = self._shape.list_fields(capacity, block)
        return found

    def _wanted(self, layout: str, lead: tuple[int, ...]) -> dict[str, Field]:
        """`Shape.fields`, kept: finding them anew takes as long as the rest of a small dispatch."""
        found = self._known.get((layout, lead))
        if found is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            found = self._known[layout, lead] = self._shape.fields(layout, lead)
        return found

    # ---------------------------------------------------------------------------------------------------- results

    def received(
        self,
        structs: Structs,
        handle: Handle[Any],
        layout: str,
        b: int,
        given: dict[str, Tensor],
        lists: dict[str, Tensor],
        torch: bool,
    ) -> Received:
        """What a dispatch returns: the tensors given, index lists, and views of the window and of the handle for the
        others."""
        shape = self._shape
        lead = shape.lead(layout, b, structs.rows_shown() if shape.layouts[layout].exact else 0)
        if given or handle._landing is not None:
            shown = self._fields(structs, handle, layout, lead, given, torch)
            leased = len(handle._landed) == len(shape.payloads)
            handle._landing = None
        else:
            shown = self._all_shown(structs, handle, layout, lead, torch)
            leased = False
        fields = shown.fields
        if shown.views:
            self._native.torch_views.show(shown.views)
        extra = {name: fields[name] for name in shape.extra_names} if shape.extra_names else {}
        named = "grouped" if layout == BY_BOUND else layout
        return Received(handle, named, extra, fields, shown.late, shown.merged, torch, leased, lists)

    def _all_shown(
        self, structs: Structs, handle: Handle[Any], layout: str, lead: tuple[int, ...], torch: bool
    ) -> Shown:
        """All of them views. Kept: finding out anew what is where takes longer than the rest of `received`."""
        key = (structs.shown(), lead, layout, torch)
        found = self._shown.get(key)
        if found is not None and not (torch and _in_graph(found.fields)):
            return found
        if len(self._shown) >= _MOST_KEPT:
            self._shown.clear()
        found = self._shown[key] = self._fields(structs, handle, layout, lead, {}, torch)
        return found

    def _fields(
        self,
        structs: Structs,
        handle: Handle[Any],
        layout: str,
        lead: tuple[int, ...],
        fields: dict[str, Tensor],
        torch: bool,
    ) -> Shown:
        """`fields` and what it lacks, which is added to it."""
        shape = self._shape
        known: dict[str, Field] | None = None  # made once something is missing: not where all is given, call after call
        late: dict[str, tuple[int, tuple[int, ...], str]] = {}
        views: list[Tensor] = []
        for name, pointer in zip(structs.outputs, structs.shown(), strict=True):
            if fields.get(name) is not None:
                continue
            # These are written only where they are asked for, and offsets of other layouts are sums of the counts.
            if name in _ASKED_FOR or (name == "offsets" and not shape.layouts[layout].offsets):
                continue
            if known is None:
                known = self._wanted(layout, lead)
            if name in shape.payloads:
                fields[name], view = self._rows(handle, name, pointer, known[name], torch)
                if view and torch:
                    views.append(fields[name])
            else:
                late[name] = pointer, *known[name]
        return Shown(fields, late, tuple(views), {})

    def _rows(self, handle: Handle[Any], name: str, pointer: int, field: Field, torch: bool) -> tuple[Tensor, bool]:
        """Rows where they have come to: in a lease, which the tensor then owns, or (True) in a bank of the window."""
        lease = (handle._landing or {}).get(name)
        if lease is None or lease.pointer != pointer:
            return self.view(pointer, *field, torch), True
        handle._landed.append((lease, field.shape[0] * self._shape.payloads[name].row_bytes()))
        return self._native.place.window_view(pointer, *field, torch, lease), False

    def view(self, pointer: int, shape: tuple[int, ...], dtype: str, torch: bool) -> Tensor:
        """A view of the window, of which there are few."""
        key = (pointer, shape, dtype, torch)
        found = self._views.get(key)
        if found is None or (torch and found.requires_grad):  # autograd has taken the old one into a graph
            if len(self._views) >= _MOST_KEPT:
                self._views.clear()
            if self.keeper is None:
                self.keeper = Keeper(self._native.pointer)
            found = self._views[key] = self._native.place.window_view(pointer, shape, dtype, torch, self.keeper)
        return found


def _in_graph(fields: dict[str, Tensor]) -> bool:
    """Whether autograd has taken any of them. (`any` over a generator takes twice as long.)"""
    for view in fields.values():  # noqa: SIM110
        if view.requires_grad:
            return True
    return False
