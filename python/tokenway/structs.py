"""The C structs of a group's dispatches and combines, filled call after call."""

from __future__ import annotations

import ctypes
import itertools
import numbers
import struct
from functools import partial
from typing import Any

from tokenway import _header, _native, arguments, tensors
from tokenway.errors import InvalidArgument
from tokenway.settings import FP8, put_payloads
from tokenway.shape import Shape

_LAYOUT_AT = _header.DispatchOutput.layout.offset
_ROWS = struct.Struct("@q")
_ROWS_AT = _header.DispatchOutput.payloads.offset + _header.Tensor.shape.offset
LISTS = ("sorted_rows", "block_experts", "num_sorted")  # index lists
REFUSED = -1  # a code that the C library refuses


def name_rows(shape: Shape, dispatched: _header.DispatchInput, combined: _header.CombineInput) -> None:
    """Writes down what a call's rows consist of."""
    dispatched.num_types = len(shape.payloads)
    put_payloads(shape.payloads, dispatched.types)
    combined.wire_dtype = tensors.CODES[shape.combine_dtype]
    combined.elements = _native.fit("combine_hidden", shape.combine_hidden, 63)
    name_scales(shape, combined)


def name_scales(shape: Shape, combined: _header.CombineInput) -> None:
    """Writes down which scales rows on their way back have."""
    scale = shape.combine_scale
    if scale is not None:
        if not isinstance(scale, numbers.Real):
            raise InvalidArgument.of("combine_scale", f"is {scale!r}; it must be a number, or None")
        combined.wire_scales, combined.wire_scale = _header.SCALES["tensor"], float(scale)
    elif shape.combine_dtype == FP8:
        combined.wire_scales = _header.SCALES["blocks"]


class OptionalSlot:
    """A tensor that few combines have, in the slot of a CombineInput: what the last one had is not left to the next."""

    def __init__(self, slot: tensors.Slot, field: Any):
        self._slot, self._field = slot, field
        self.given = False

    def give(self, tensor: Any) -> None:
        """None: there is none. What is no tensor is told to C all the same, which refuses it: peers may have some."""
        if tensor is not None:
            self.given = True
            self._slot.set(tensor)
            if self._field.dtype == 0:
                self._field.ndim = REFUSED
        elif self.given:
            self._slot.set(None)
            self.given = False


class Structs:
    """A group's, with a slot for each tensor; index lists are apart, as few calls want them. place: tensors.Host or
    cuda.Cuda."""

    def __init__(self, place: Any, shape: Shape):
        self.dispatch_in, self.dispatch_out = _header.DispatchInput(), _header.DispatchOutput()
        self.combine_in, self.combine_out = _header.CombineInput(), _header.CombineOutput()
        given, wanted = self.dispatch_in, self.dispatch_out
        slot = partial(tensors.Slot, describe=place.describe)
        names = list(shape.payloads)
        self.inputs = {name: slot(given, given.payloads[q]) for q, name in enumerate(names)}
        self.tokens = self.inputs[names[0]]
        self.outputs = {name: slot(wanted, wanted.payloads[q]) for q, name in enumerate(names)}
        for name in ("ids", "weights", "counts", "offsets", "origins", "source_counts"):
            self.outputs[name] = slot(wanted, getattr(wanted, name))
        self.lists = {name: slot(wanted, getattr(wanted, name)) for name in LISTS}
        self.rows = slot(self.combine_in, self.combine_in.rows)
        self.result = slot(self.combine_out, self.combine_out.tokens)
        few = ("choice_values", "weights", "bias")
        fields = [getattr(self.combine_in, name) for name in few]
        self._values, self.weights, self.bias = (OptionalSlot(slot(self.combine_in, field), field) for field in fields)
        self._values_out = slot(self.combine_out, self.combine_out.choice_values)
        if shape.named:
            name_rows(shape, given, self.combine_in)
        structs = (given, wanted, self.combine_in, self.combine_out)
        at = [ctypes.addressof(each) for each in structs]
        self.dispatch_at, self.combine_at = (at[0], at[1]), (at[2], at[3])
        self._called: tuple[int, ...] = ()
        self._combined: tuple[int, ...] = ()
        self._wanted = memoryview(wanted).cast("B")
        self._blank = {name: self._image(code) for name, code in _header.LAYOUTS.items()}
        self._refused = self._image(REFUSED)
        # Addresses in the order of `outputs`, which is that of the struct.
        places = [slot.offset for slot in self.outputs.values()]
        between = "".join(f"{after - before - 8}xQ" for before, after in itertools.pairwise(places))
        self._pointers, self._pointers_at = struct.Struct(f"=Q{between}"), places[0]

    def _image(self, code: int) -> bytes:
        blank = _header.DispatchOutput()
        blank.layout = code
        return bytes(blank)[_LAYOUT_AT:]

    def ask(self, layout: Any) -> None:
        """For outputs in a layout: views, where no slot is set after this, and nothing by column."""
        self._wanted[_LAYOUT_AT:] = self._blank.get(layout, self._refused) if type(layout) is str else self._refused

    def call(self, bound: int, lane: int | None, send_only: bool, count: bool, stream: int, sm_limit: int) -> None:
        """The rest of a DispatchInput. Most calls say what the last did, and comparing takes less than assigning."""
        lane = -1 if lane is None else arguments.lane_number(lane)
        limit = arguments.int32(sm_limit) if sm_limit else 0
        called = bound, lane, not send_only, not count, stream, limit
        if called == self._called:
            return
        self._called = ()  # until all is written: a signal's handler may raise in between
        given = self.dispatch_in
        given.bound = bound
        given.lane = lane
        given.send_only = 1 if send_only else 0
        given.stream = stream
        given.uncounted = 0 if count else 1
        given.sm_limit = limit
        self._called = called

    def refuse(self, bound: int, lane: int | None, send_only: bool, stream: int, layout: Any) -> None:
        """A DispatchInput that C refuses. layout: where peers' calls follow from it, else None."""
        self.call(bound, lane, send_only, True, stream, 0)
        if layout is None:
            self.dispatch_out.layout = REFUSED
            return
        self.ask(layout)
        self._called = ()
        self.dispatch_in.uncounted = REFUSED

    def call_combine(self, layout: int, weighting: int, send_only: bool, stream: int, sm_limit: int) -> None:
        """The rest of a CombineInput, likewise."""
        called = layout, weighting, not send_only, stream, sm_limit
        if called == self._combined:
            return
        self._combined = ()
        given = self.combine_in
        given.layout = layout
        given.weighting = weighting
        given.send_only = 1 if send_only else 0
        given.stream = stream
        given.sm_limit = sm_limit
        self._combined = called

    def give_values(self, values: Any) -> None:
        """Of choices, for a CombineInput; None: there are none."""
        if values is None and self._values.given:
            self._values_out.set(None)
        self._values.give(values)

    def take_values(self, out: Any) -> None:
        """Where they go to."""
        self._values_out.set(out)

    def rows_shown(self) -> int:
        """Of the first payload, in the layout "flat"."""
        rows: int = _ROWS.unpack_from(self._wanted, _ROWS_AT)[0]
        return rows

    def shown(self) -> tuple[int, ...]:
        """The addresses of `outputs` that the C library has filled in."""
        return self._pointers.unpack_from(self._wanted, self._pointers_at)
