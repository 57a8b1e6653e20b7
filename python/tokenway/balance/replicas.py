"""Experts of several slots while they are trained: one gradient, one step of the optimiser, the same weights.

Of the slots that have an expert the lowest *leads*. The gradients of all are summed there, so that an optimiser has the
whole one in that slot and 0 in the others, and what it then makes of the weights there goes to the others. So it is
that one slot whose states count, a norm over all gradients counts each expert once, and replicas are copies of each
other whatever an optimiser rounds how.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from tokenway import versions
from tokenway.arguments import telling
from tokenway.balance.trained import Parts, gradient_of
from tokenway.balance.weights import Weights
from tokenway.errors import InvalidArgument, Unsupported

Array = np.ndarray
Slots = tuple[int, ...]


def replicated(table: Array) -> list[Slots]:
    """The slots of each expert of a map [P] that has several, ascending; by expert."""
    return [
        tuple(np.flatnonzero(table == expert).tolist())
        for expert, count in enumerate(np.bincount(table[table >= 0]))
        if count > 1
    ]


def leads(table: Array) -> dict[int, int]:
    """The slot of each expert of a map [P] that leads it: its lowest."""
    experts, slots = np.unique(table, return_index=True)
    return {int(expert): int(slot) for expert, slot in zip(experts, slots, strict=True) if expert >= 0}


def led_anew(table: Array, following: Array) -> list[tuple[int, int]]:
    """(slot that leads in the following map, slot that leads now) of each expert for which they differ."""
    now, then = leads(table), leads(following)
    return [(then[expert], slot) for expert, slot in now.items() if then[expert] != slot]


class Replicas:
    """Those of all layers, on one rank. Its calls are collective, on the stream of the steps.

    weights: `Weights` of tensors as `balance.trained` names them. Maps must leave a slot of each rank empty (-1), to
    which gradients of other ranks come. Errors: InvalidArgument; Unsupported, on all ranks alike, where
    some have no memory in common.
    """

    def __init__(self, weights: Weights):
        if weights.messages is not None:  # they come beside the steps, and sums are in the order of the stream
            raise Unsupported(
                "some ranks of the group have no memory in common, so experts cannot be trained in replicas"
            )
        self.weights, self._group = weights, weights.group
        self.parts = Parts.of(weights.layout.tensors)
        self._place = self._group.native.place
        self._torch = self._group.device is not None
        for layer, table in enumerate(self.tables()):
            spare = np.bincount(weights.rank_of_slot[table < 0], minlength=self._group.nranks)
            if not spare.all():
                full = int(np.flatnonzero(spare == 0)[0])
                what = f"has a map of layer {layer} with no slot of rank {full} empty (-1); each must have one"
                raise InvalidArgument.of("group", what)

    def tables(self) -> Array:
        """[layers, P]: the maps in force."""
        return np.stack([self._group.expert_of_slot(layer) for layer in range(self._group.layers)])

    # ------------------------------------------------------------------------------------------------------ agreement

    def meet(self) -> None:
        """What all ranks have done before is done before what any of them does behind this; in stream order. A step of
        all ranks."""
        self._gather(0)

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes. As `meet`, and waits for the stream."""
        return bool(np.asarray(self._gather(int(yes)).tolist()).all())

    def refuse(self) -> None:
        """Tells peers, which are in `meet`, that this rank does not come."""
        self._group.all_gatherv(())

    def _gather(self, value: int) -> Any:
        if self._torch:  # filled on the device: a copy from the host would wait for the stream
            row = self._place.torch.full((1, 1), value, dtype=self._place.torch.uint8, device=self._place.device)
        else:
            row = np.full((1, 1), value, np.uint8)
        return self._group.all_gatherv(row, [1] * self._group.nranks).rows

    # ----------------------------------------------------------------------------------------------------- each step

    def sum_gradients(self, names: Collection[tuple[str, int]] | None = None) -> None:
        """Sums the gradients of each expert's slots, NAME.grad, in the one that leads, and sets the others to 0.

        A sum is in float32, in the order of slots, ascending, and rounded once to the gradient's dtype. names: (name of
        weights, layer) of those to sum, alike on all ranks (default: all). Two steps of all ranks, none where no expert
        has several slots.
        """
        tables = self.tables()
        found = [(layer, slots) for layer, table in enumerate(tables) for slots in replicated(table)]
        if not found:
            return
        spare = [self._spare(table) for table in tables]
        with telling(self.refuse):
            asked = {
                layer: [gradient_of(name) for name in self.parts.weights if names is None or (name, layer) in names]
                for layer in range(len(tables))
            }
        self.meet()
        for layer, slots in found:
            if self._is_here(slots[0]):
                for gradient in asked[layer]:
                    self._sum(gradient, layer, slots, spare[layer])
        self.meet()  # no gradient is read any more
        for layer, slots in found:
            for place in self._places((*slots[1:], spare[layer])):
                for gradient in asked[layer]:
                    self.weights.tensor(gradient, layer)[place] = 0

    def _sum(self, gradient: str, layer: int, slots: Slots, spare: int) -> None:
        rows, place = self.weights.tensor(gradient, layer), self.weights.place_of_slot
        total = self._float32(rows[place[slots[0]]])
        for slot in slots[1:]:
            at = slot
            if not self._is_here(slot):
                self._copy(layer, slot, spare, (gradient,))
                at = spare
            total += self._float32(rows[place[at]])
        rows[place[slots[0]]] = total

    def _float32(self, row: Any) -> Any:
        return row.float() if self._torch else row.astype(np.float32)

    def spread(self) -> None:
        """Copies what the optimiser has made of each expert's weights from the slot that leads to the others. A step of
        all ranks, none where no expert has several slots. Peers read weights of this rank until the next `meet` or
        `sum_gradients`: until then nothing may change them."""
        found = [(layer, slots) for layer, table in enumerate(self.tables()) for slots in replicated(table)]
        if not found:
            return
        self.meet()
        for layer, slots in found:
            self.bring(layer, [(slot, slots[0]) for slot in slots[1:]], self.parts.weights)

    def bring(self, layer: int, moves: Iterable[tuple[int, int]], names: Collection[str]) -> int:
        """Copies tensors of experts to slots of this rank: moves (to slot, from slot), those to other ranks being
        theirs. Not collective. Returns how many bytes."""
        count = sum(self._copy(layer, source, to, names) for to, source in moves if self._is_here(to))
        if count:
            versions.written(self.weights.shown)
        return count

    def _copy(self, layer: int, source: int, to: int, names: Collection[str]) -> int:
        stream = self._place.stream() if self._torch else 0
        pieces = self.weights.pieces(layer, source, to, names=names)
        for piece in pieces:
            self.weights.pull(piece, stream)
        return sum(piece[3] for piece in pieces)

    def _places(self, slots: Iterable[int]) -> list[int]:
        """Of those slots that are this rank's, in its tensors."""
        return [int(self.weights.place_of_slot[slot]) for slot in slots if self._is_here(slot)]

    def _is_here(self, slot: int) -> bool:
        return bool(self.weights.rank_of_slot[slot] == self._group.rank)

    def _spare(self, table: Array) -> int:
        """A slot of this rank that has no expert."""
        return int(np.flatnonzero((self.weights.rank_of_slot == self._group.rank) & (table < 0))[0])
