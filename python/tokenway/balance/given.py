"""Plans of other planners, as DeepSeek's balancer and those that follow it have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tokenway import checked
from tokenway.balance import planner
from tokenway.errors import InvalidArgument

Array = np.ndarray


class SlotMaps(NamedTuple):
    """Where experts are, int32, as DeepSeek's balancer says it. P counts the slots in use of all ranks, equally many of
    each: slot p is of rank p // (P / ranks), and spare slots have no number here.

    physical_to_logical: [layers, P], the expert in each slot; -1 for what a rank has fewer than others, as after a
    shrink until the first plan. logical_to_physical: [layers, E, most replicas], the
    slots of each expert, ascending, -1 behind the last. logical_count: [layers, E], how many these are.
    """

    physical_to_logical: Array
    logical_to_physical: Array
    logical_count: Array


def slot_maps(physical_to_logical: Array, experts: int) -> SlotMaps:
    """Of maps [layers, P] in which each expert has a slot."""
    layers, places = physical_to_logical.shape
    known = np.where(physical_to_logical < 0, experts, physical_to_logical)  # one more, in the slots without any
    counts = np.stack([np.bincount(row, minlength=experts + 1) for row in known])
    slots = np.full((layers, experts + 1, int(counts.max(initial=0))), -1, np.int32)
    order = np.argsort(known, axis=1, kind="stable")
    of = np.take_along_axis(known, order, axis=1)
    nth = np.arange(places) - np.take_along_axis(np.cumsum(counts, axis=1) - counts, of, axis=1)
    slots[np.arange(layers)[:, None], of, nth] = order
    counts = counts[:, :experts].astype(np.int32)
    slots = slots[:, :experts, : int(counts.max(initial=0))]
    return SlotMaps(physical_to_logical.astype(np.int32), np.ascontiguousarray(slots), counts)


def checked_plan(given: Any, layers: int, experts: int, places: int) -> Array:
    """int32 [layers, P] of a plan that a caller gives: an array, a tensor of PyTorch (of a device too) or a Plan.
    Errors: InvalidArgument where the shape is another, or a layer has no slot for an expert."""
    table = given.physical_to_logical if isinstance(given, planner.Plan) else given
    found = checked.integers("physical_to_logical", table)
    if found.shape != (layers, places):
        what = f"has shape {list(found.shape)}; it must be [layers, slots in use of all ranks], {[layers, places]}"
        raise InvalidArgument.of("physical_to_logical", what)
    for layer, row in enumerate(found):
        wrong = np.flatnonzero((row < 0) | (row >= experts))
        if wrong.size:
            slot = int(wrong[0])
            raise InvalidArgument.of(
                "physical_to_logical", f"is {row[slot]}; it must be from 0 to {experts - 1}", (layer, slot)
            )
        lost = np.flatnonzero(np.bincount(row, minlength=experts) == 0)
        if lost.size:
            raise InvalidArgument.of(
                "physical_to_logical", f"has no slot for expert {lost[0]}; it must have one for each", (layer,)
            )
    return found
