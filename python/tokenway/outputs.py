"""The outputs of a dispatch: what is allocated for it, and what it returns."""

from __future__ import annotations

from collections.abc import Collection
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenway import _native
from tokenway.errors import InvalidArgument
from tokenway.handle import Handle, Received, Tensor
from tokenway.tensors import numpy_dtype

if TYPE_CHECKING:
    from tokenway.group import Group
    from tokenway.structs import Structs


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


def choose_columns(group: Group, structs: Structs, columns: Collection[str] | None) -> InvalidArgument | None:
    """Tells C which payloads are wanted by column; none where there is a problem with them."""
    known = list(group._payload_specs)
    wanted = () if columns is None else columns
    right = isinstance(wanted, Collection) and not isinstance(wanted, str) and all(name in known for name in wanted)
    for q, name in enumerate(known):
        structs.dispatch_out.column_major[q] = 1 if right and name in wanted else 0
    if right:
        return None
    return InvalidArgument(f"column_major is {columns!r}; it must hold payloads of the group: {known}")


def add_by_expert(
    group: Group, structs: Structs, handle: Any, layout: str, b: int, made: dict[str, Tensor], like: Tensor
) -> None:
    """New tensors for what the caller has not given: there is no window to view by expert."""
    exact = layout == "grouped"
    rows = handle.rows_of(layout) if exact and isinstance(handle, Handle) else None
    if rows is None if exact else not 0 < b <= group.max_tokens:
        return  # refused anyway
    lead = (rows,) if exact else (group.num_local_experts, group.nranks * b)
    for q, (name, payload) in enumerate(group._payload_specs.items()):
        if made.get(name) is None:
            shape = (*lead, payload.elements)
            if rows is not None and structs.dispatch_out.column_major[q]:
                step = 16 // numpy_dtype(payload.dtype).itemsize
                shape = (payload.elements, -(-rows // step) * step)
            made[name] = group._place.empty(shape, payload.dtype, like)
    if made.get("ids") is None:
        made["ids"] = group._place.empty(lead, group.id_dtype, like)
    if made.get("weights") is None:
        made["weights"] = group._place.empty(lead, "float32", like)


def received(
    group: Group, structs: Structs, handle: Handle, layout: str, b: int, given: dict[str, Tensor], torch: bool
) -> Received:
    """What a dispatch returns: the tensors given, and views of the window and of the handle for the others."""
    lead: tuple[int, ...] = (structs.rows_shown(),) if group.exact else (group.nranks, b)
    if given or handle._landing is not None:
        fields, late, views = _fields(group, structs, handle, layout, lead, given, torch)
        leased = len(handle._landed) == len(group._payload_specs)
        handle._landing = None
    else:
        fields, late, views = _shown(group, structs, handle, layout, lead, torch)
        leased = False
    if views:
        group._torch_views.show(views)
    extra = {name: fields[name] for name in group._extra_names} if group._extra_names else {}
    return Received(handle, layout, extra, fields, late, torch, leased)


def _shown(group: Group, structs: Structs, handle: Handle, layout: str, lead: tuple[int, ...], torch: bool) -> Shown:
    """All of them views. Kept: finding out anew what is where takes longer than the rest of `received`."""
    key = (structs.shown(), lead, layout, torch)
    found = group._shown.get(key)
    if found is not None and not (torch and _in_graph(found.fields)):
        return found
    if len(group._shown) >= 1024:
        group._shown.clear()
    found = group._shown[key] = _fields(group, structs, handle, layout, lead, {}, torch)
    return found


def _in_graph(fields: dict[str, Tensor]) -> bool:
    """Whether autograd has taken any of them. (`any` over a generator takes twice as long.)"""
    for view in fields.values():  # noqa: SIM110
        if view.requires_grad:
            return True
    return False


def _fields(
    group: Group,
    structs: Structs,
    handle: Handle,
    layout: str,
    lead: tuple[int, ...],
    fields: dict[str, Tensor],
    torch: bool,
) -> Shown:
    """`fields` and what it lacks, which is added to it."""
    late: dict[str, tuple[int, tuple[int, ...], str]] = {}
    views: list[Tensor] = []
    for name, pointer in zip(structs.outputs, structs.shown(), strict=True):
        if fields.get(name) is not None:
            continue
        if (payload := group._payload_specs.get(name)) is not None:
            fields[name], view = _rows(group, handle, name, pointer, (*lead, payload.elements), torch)
            if view and torch:
                views.append(fields[name])
        elif name == "counts":
            shape = (group.nranks if layout in ("rank_major", "flat") else group.num_local_experts,)
            late[name] = pointer, shape, "int32"
        elif name == "offsets":
            if layout == "grouped":
                late[name] = pointer, (group.num_local_experts + 1,), "int32"
        elif name != "origins":  # written only where they are asked for
            late[name] = pointer, (*lead, group.top_k), group.id_dtype if name == "ids" else "float32"
    return Shown(fields, late, tuple(views))


def _rows(
    group: Group, handle: Handle, name: str, pointer: int, shape: tuple[int, ...], torch: bool
) -> tuple[Tensor, bool]:
    """Rows where they have come to: in a lease, which the tensor then owns, or (True) in a bank of the window."""
    payload = group._payload_specs[name]
    lease = (handle._landing or {}).get(name)
    if lease is None or lease.pointer != pointer:
        return _view(group, pointer, shape, payload.dtype, torch), True
    handle._landed.append((lease, shape[0] * payload.row_bytes()))
    return group._place.window_view(pointer, shape, payload.dtype, torch, lease), False


def _view(group: Group, pointer: int, shape: tuple[int, ...], name: str, torch: bool) -> Tensor:
    """A view of the window; there are few, so they are kept: making one takes longer than a small copy."""
    key = (pointer, shape, name, torch)
    found = group._views.get(key)
    if found is None or (torch and found.requires_grad):  # autograd has taken the old one into a graph
        if len(group._views) >= 1024:
            group._views.clear()
        if group._keeper is None:
            group._keeper = Keeper(group.pointer)
        found = group._views[key] = group._place.window_view(pointer, shape, name, torch, group._keeper)
    return found
