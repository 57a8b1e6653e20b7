"""Routings, dispatches and combines: what `Group` does with their arguments, and the calls of the C library.

Whatever precedes such a call may fail, and none of it may keep the peers waiting (`arguments.Preparation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_void_p
from functools import partial
from typing import Any, TypeVar

from tokenway import _header, _native, arguments, callbacks, tensors
from tokenway.blocks import Blocks
from tokenway.counting import Counting
from tokenway.errors import InUse, InvalidArgument, InvalidUsage, OutOfMemory, TokenwayError
from tokenway.handle import Handle, Pending, Tensor, pointer_of, stream_of, unlike
from tokenway.native_group import NativeGroup
from tokenway.outputs import Outputs
from tokenway.shape import Shape
from tokenway.spare import Spare
from tokenway.structs import REFUSED, Structs

Owner = TypeVar("Owner")


class Exchange:
    """That of one group."""

    def __init__(self, native: NativeGroup, shape: Shape, blocks: Blocks, counting: Counting, outputs: Outputs):
        self._native, self._shape, self._blocks = native, shape, blocks
        self._counting, self._outputs = counting, outputs
        self.structs = Spare(partial(Structs, native.place, shape))

    def mode_of(self, bound: Any) -> str:
        """As `Group.chooses` says."""
        most = self._shape.max_tokens
        if bound is not None and not 1 <= arguments.int32(bound) <= most:
            raise InvalidArgument.of("bound", f"is {bound!r}; it must be None or an integer from 1 to {most}")
        return self._shape.mode_of(bound)

    def route(self, owner: Owner, ids: Tensor, weights: Tensor | None, layer: int, memory: Any) -> Handle[Owner]:
        """As `Group.route` says. owner: the group, for the handle."""
        native = self._native
        self._blocks.free()
        handle = Handle(owner, native, self._blocks, memory)
        pointer = c_void_p()
        routing = native.routings.take()
        given = _native.fit("layer", layer), *routing.describe(ids, weights)
        result = _native.lib.twHandleCreateForLayer(byref(pointer), native.pointer, *given, handle._base)
        native.routings.append(routing)
        if result:
            raise native.error(result, ids=ids, weights=weights)
        handle.pointer = pointer.value or 0
        handle.default_bound = self._shape.default_bound
        if memory is not None:
            handle.share(memory)
        handle.adopt_routing(ids, weights)
        return handle

    # --------------------------------------------------------------------------------------------------- dispatch

    def dispatch(
        self,
        handle: Any,
        tokens: Tensor,
        payloads: Any,
        layout: Any,
        bound: Any,
        lane: Any,
        out: Any,
        columns: Any,
        count: Any,
        send_only: Any,
        sm_limit: Any,
        index_block: Any,
    ) -> Any:
        """As `Group.dispatch` says."""
        native, shape = self._native, self._shape
        if self._blocks.finished:
            self._blocks.free()
        if shape.low_latency_tokens or type(layout) is str:
            layout = shape.choose(layout, bound, not isinstance(handle, Handle) or handle.counted)
        if shape.sizes_outputs and (shape.exact or shape.is_exact(layout)):
            self._counting.size_outputs(handle)
        structs = self.structs.take()
        layout, b, given, lists, sent, problem = self._prepare_dispatch(
            structs,
            handle,
            tokens,
            payloads,
            layout,
            bound,
            lane,
            out,
            columns,
            count,
            send_only,
            sm_limit,
            index_block,
        )
        asked, wanted = structs.dispatch_at
        torch = native.torch_views.meet((tokens,))
        result = _native.lib.twDispatch(native.pointer, pointer_of(handle), asked, wanted)
        if result:
            values = {"bound": bound, "lane": lane, "layout": layout, "sm_limit": sm_limit, "index_block": index_block}
            extra = {f"payloads[{name!r}]": sent.get(name) for name in shape.extra_names}
            error = native.error(result, problem, {"tokens": tokens, **extra}, values, unlike(handle))
            if isinstance(handle, Handle) and not isinstance(error, InvalidUsage):
                handle.refused = native.place.learns_late and isinstance(error, InvalidArgument)
                handle.leased = arguments.truth(send_only) or native.place.learns_late  # as twDispatch documents
                handle._landing = None
            native.torch_views.after(out, error)
            try:
                raise error
            finally:
                del error  # or it would hold this frame, and that the handle, until garbage is collected
        native.torch_views.after(out)
        if handle._shared is not None:
            handle.rewritten()
        handle.leased, handle.refused, handle.layout, handle.bound = True, False, layout, b
        if handle._unread is not None:
            handle.was_read()
        kept = (tokens, *sent.values(), *given.values(), *lists.values()) if send_only else ()
        received = self._outputs.received(structs, handle, layout, b, given, lists, torch)
        self.structs.append(structs)
        callbacks.tell()
        if send_only:
            return Pending(handle, received, kept, out)
        if handle._landed:
            handle.trim_leases()
        return received

    def _prepare_dispatch(
        self,
        structs: Structs,
        handle: Any,
        tokens: Tensor,
        payloads: Any,
        layout: Any,
        bound: Any,
        lane: Any,
        out: Any,
        columns: Any,
        count: Any,
        send_only: Any,
        sm_limit: Any,
        index_block: Any,
    ) -> tuple[Any, int, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], TokenwayError | None]:
        """Fills the structs of a dispatch. Returns (layout, b, tensors to write to, index lists, payloads, what C
        cannot see)."""
        native, shape = self._native, self._shape
        b, stream = 0, 0
        given: dict[str, Tensor] = {}
        lists: dict[str, Tensor] = {}
        sent: dict[str, Tensor] = {}
        with arguments.Preparation() as prepared:
            if bound is None:
                b = handle.default_bound if isinstance(handle, Handle) else shape.default_bound
                if shape.low_latency_tokens and shape.is_exact(layout):
                    b = 0
            else:
                b = arguments.int32(bound) or -2
            stream = 0 if native.device is None else stream_of(native, handle)
            structs.call(b, lane, send_only, count, stream, sm_limit)
            layout = layout or shape.default_layout
            structs.ask(layout)
            block = arguments.int32(index_block) if index_block else 0
            if out is not None:
                given = dict(out) if isinstance(out, Mapping) else {"tokens": out}
                known = (*structs.outputs, *structs.lists) if block else structs.outputs
                if (problem := arguments.problem_of_outputs(native.place, given, known)) is not None:
                    raise problem
            if columns is not None and (problem := self._outputs.choose_columns(structs, columns)) is not None:
                raise problem
            if payloads is not None:
                if not isinstance(payloads, Mapping) or not payloads.keys() <= shape.payloads.keys() - {"tokens"}:
                    raise arguments.problem_of_payloads(payloads, shape.extra_names)
                sent = dict(payloads)
            lands = shape.own and (shape.exact or shape.is_exact(layout))
            if not lands and isinstance(handle, Handle):
                handle._landing = None  # as C lets go of it
            try:
                if shape.copies(layout):
                    self._outputs.add_by_expert(structs, handle, layout, b, given, tokens)
                elif isinstance(handle, Handle) and handle._landing is not None:
                    self._counting.copy_out(handle, given, tokens)
                if block:
                    lists = self._outputs.add_lists(structs, handle, layout, b, block, given, tokens)
            except (MemoryError, RuntimeError) as error:
                raise OutOfMemory(f"no memory for the outputs: {error}") from error
            structs.tokens.set(tokens)
            for name in shape.extra_names:
                structs.inputs[name].set(sent.get(name))
            for name, tensor in given.items():
                if tensor is not None and name in structs.outputs:
                    structs.outputs[name].set(tensor)
        if prepared.problem is not None:
            # The peers wait on that lane, and take the refusal for what was called.
            structs.refuse(b, lane, arguments.truth(send_only), stream, layout if shape.low_latency_tokens else None)
        return layout, b, given, lists, sent, prepared.problem

    def refuse_dispatch(self, layout: Any, bound: Any) -> None:
        """As `Group.refuse_dispatch` says, of a group that is open."""
        native, structs, shape = self._native, self.structs.take(), self._shape
        if shape.low_latency_tokens or type(layout) is str:
            layout = shape.choose(layout, bound)
        structs.ask(layout or shape.default_layout)
        structs.call(arguments.int32(bound or 0), None, False, True, native.place.stream(), 0)
        _native.lib.twDispatch(native.address, None, *structs.dispatch_at)
        native.torch_views.after()

    # ---------------------------------------------------------------------------------------------------- combine

    def combine(
        self,
        handle: Any,
        rows: Tensor,
        weighting: Any,
        weights: Any,
        layout: Any,
        dtype: Any,
        out: Any,
        values: Any,
        bias: Any,
        send_only: Any,
        sm_limit: Any,
    ) -> Any:
        """As `Group.combine` says; `values` are its choice_values."""
        native, given = self._native, out
        structs = self.structs.take()
        layout, out, of_values, problem = self._prepare_combine(
            structs, handle, rows, weighting, weights, layout, dtype, out, values, bias, send_only, sm_limit
        )
        asked, wanted = structs.combine_at
        result = _native.lib.twCombine(native.pointer, pointer_of(handle), asked, wanted)
        if result:
            targets = {"out": out} if values is None else {"out[0]": out, "out[1]": of_values}
            if given is not None and problem is None:  # found here, so that calls that are right do not pay for it
                found = (native.place.problem_of_output(*target) for target in targets.items())
                problem = next((each for each in found if each is not None), None)
            told = {"layout": layout, "weighting": weighting, "sm_limit": sm_limit}
            inputs = {"rows": rows, "choice_values": values, "weights": weights, "bias": bias}
            error = native.error(result, problem, inputs, told, unlike(handle), **targets)
            if isinstance(handle, Handle) and native.place.learns_late:
                refused = handle.refused and isinstance(error, InvalidUsage) and not isinstance(error, InUse)
                if refused or isinstance(error, InvalidArgument):
                    handle.leased = handle.refused = False  # as twCombine documents
            native.torch_views.after(given, error)
            raise error
        native.torch_views.after(given)
        self.structs.append(structs)
        returned = out if values is None else (out, of_values)
        if send_only:
            kept = (rows, out, weights, bias, *(() if values is None else (values, of_values)))
            return Pending(handle, returned, kept, given, combining=True)
        handle.leased = False
        callbacks.tell()
        return returned

    def _prepare_combine(
        self,
        structs: Structs,
        handle: Any,
        rows: Tensor,
        weighting: Any,
        weights: Any,
        layout: Any,
        dtype: Any,
        out: Any,
        values: Any,
        bias: Any,
        send_only: Any,
        sm_limit: Any,
    ) -> tuple[Any, Tensor, Tensor | None, TokenwayError | None]:
        """Fills the structs of a combine. Returns (layout, the tensors to write to, what C cannot see)."""
        native, shape = self._native, self._shape
        code, weighted, stream, sends, limit = REFUSED, 0, 0, False, 0
        of_values = None
        with arguments.Preparation() as prepared:
            structs.give_values(values)  # first, as a refusal is of such rows
            stream = 0 if native.device is None else stream_of(native, handle)
            sends = bool(send_only)
            limit = arguments.int32(sm_limit) if sm_limit else 0
            weighted = arguments.code(_header.WEIGHTINGS, weighting)
            if layout is None:
                layout = getattr(handle, "layout", None)
            elif type(layout) is str and isinstance(handle, Handle):
                layout = shape.choose(layout, None, shape.is_exact(handle.layout))  # of the last dispatch's mode
            name = "out"
            if values is not None:
                name = "out[0]"
                out, of_values = arguments.pair("out", out)
                of_values = self._target("out[1]", of_values, handle, shape.top_k, "float32", rows)
                structs.take_values(of_values)
            out = self._target(name, out, handle, shape.combine_hidden, dtype, rows)
            structs.rows.set(rows)
            structs.result.set(out)
            structs.weights.give(weights)
            structs.bias.give(bias)
            code = arguments.code(_header.LAYOUTS, layout)
        structs.call_combine(code if prepared.problem is None else REFUSED, weighted, sends, stream, limit)
        return layout, out, of_values, prepared.problem

    def _target(self, name: str, given: Any, handle: Any, elements: int, dtype: Any, like: Tensor) -> Any:
        """Where a row of so many elements for each token of a handle goes: what is given, or a new tensor of dtype
        (None: what a combine returns). None where there is no handle, which C refuses."""
        place = self._native.place
        if given is not None:
            if (problem := place.unwritable(name, given)) is not None:
                raise problem
            return given
        if not isinstance(handle, Handle):
            return None
        kind = self._shape.sum_dtype if dtype is None else tensors.dtype_name(dtype)
        try:
            return place.empty((handle.tokens, elements), kind, like)
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for the result: {error}") from error
