"""The layout of a routing: where a batch's tokens go, told without a step."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

from tokenway import _header, _native, tensors
from tokenway.handle import Tensor, stream_of
from tokenway.native_group import NativeGroup


@dataclass(frozen=True, eq=False)
class RoutingLayout:
    """Where the tokens of one rank go, as `Group.routing_layout` finds it: tensors of the kind that the ids are."""

    tokens_per_rank: Tensor
    """[N] int32: tokens that go to each rank, once each however many of their experts are there."""
    tokens_per_expert: Tensor
    """[P] int32: tokens that each physical expert serves; P is E without a `Placement`."""
    token_in_rank: Tensor
    """[T, N] bool: which ranks a token goes to."""
    physical_ids: Tensor
    """[T, K] int32: the physical expert that serves each choice, -1 for none; without a `Placement` the ids."""


def find_layout(native: NativeGroup, slots: int, top_k: int, ids: Tensor, layer: int) -> RoutingLayout:
    """As `Group.routing_layout` says. slots: P."""
    place = native.place
    pointer = native.pointer
    described = tensors.tensor_of(ids, place.describe)
    # What is no [T, K] is refused, whatever the outputs are.
    tokens = max(described.shape[0], 0) if described.ndim == 2 else 0
    found = {
        "tokens_per_rank": place.empty((native.nranks,), "int32", ids),
        "tokens_per_expert": place.empty((slots,), "int32", ids),
        "token_in_rank": place.empty((tokens, native.nranks), "bool", ids),
        "physical_ids": place.empty((tokens, top_k), "int32", ids),
    }
    layout = _header.RoutingLayout()
    for name, tensor in found.items():
        setattr(layout, name, tensors.tensor_of(tensor, place.describe))
    stream = stream_of(native, None)
    given = _native.fit("layer", layer), byref(described), byref(layout)
    result = _native.lib.twGroupRoutingLayout(pointer, *given, stream)
    if result:
        raise native.error(result, ids=ids)
    return RoutingLayout(**found)
