"""Gathers and reduce-scatters: the exchange with the set "every rank". Each is a step of all ranks, like a dispatch,
and leases no lane.

sizes, of the rows n_r that are rank r's own, 0 <= n_r <= b <= max_tokens, are given in the same way on all ranks:

* a list or tuple of N integers, known here, so that outputs are as large as what comes; or
* a tensor of the group's device (on the CPU NumPy's too), int32 or int64, [N], or [1] with this rank's own, read when
  the step runs: tensors then have as many rows as there is room for, b of each rank, and a captured graph reads the
  sizes anew in each replay; or
* None, which means what `Group.all_gatherv` and `Group.reduce_scatterv` say.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int32
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tokenway import _header, _native, arguments, callbacks, tensors, versions
from tokenway.blocks import Blocks
from tokenway.errors import InUse, InvalidArgument, InvalidUsage, OutOfMemory, TokenwayError
from tokenway.handle import Pending, Tensor
from tokenway.native_group import NativeGroup
from tokenway.outputs import Outputs
from tokenway.shape import Shape
from tokenway.spare import Spare

LAYOUTS = {name: _header.LAYOUTS[name] for name in ("flat", "rank_major")}
Rows = Any  # a tensor, or a sequence of them


class Gathered(NamedTuple):
    """What a gather brought: rows as they were given, a tensor or a tuple of several, [R, ...] in flat and [N, b, ...]
    in rank_major; the sizes, [N] int32, and where each rank's rows begin in flat, [N + 1] int32."""

    rows: Rows
    counts: Tensor
    offsets: Tensor


class Request(Pending[Any]):
    """A `send_only` gather or reduce-scatter under way. The step that next begins on its lane finishes it too, if that
    comes first: then a view of the window is over, and this tells how the call ended."""

    def __init__(
        self,
        native: NativeGroup,
        requests: dict[int, tuple[Any, ...]],
        number: int,
        result: Any,
        keep: tuple[Any, ...],
        written: Any,
    ):
        self._native = native
        self._requests = requests
        self._number = number
        self._sent_on = native.sending_stream()
        self._result = result
        self._written = written
        self._error: TokenwayError | None = None
        self._received = self._interrupted = False
        # Of the group: a later step on the lane finishes this one, and writes its results, whoever has dropped them.
        requests[number] = keep

    def hook(self) -> None:
        """Receives; does nothing if that is done, but for raising again what it raised then."""
        kept = self._requests.pop(self._number, None)
        if kept is not None:
            self._receive(kept)
            del kept
        elif not self._received:
            raise InvalidUsage("the group was closed before this was received")
        if self._error is not None:
            raise self._error

    def _receive(self, kept: tuple[Any, ...]) -> None:
        native, stream = self._native, None
        try:
            if native.device is not None:
                native.place.follow(self._sent_on, kept)
                stream = native.place.stream()
            result = _native.lib.twCompleteRequest(native.pointer, self._number, stream)
        except BaseException:  # a signal's handler, before the C call or behind it
            self._requests[self._number] = kept
            self._interrupted = True
            raise
        versions.written(self._written)
        if result:
            try:
                error = native.error(result)
            except BaseException:  # a signal's handler has ended the wait, and with it the group
                self._received, self._error = True, native.untold()
                raise
            if isinstance(error, InUse):  # another thread's call was in the way: this one is still to be completed
                self._requests[self._number] = kept
                raise error
            self._error = error
        if self._interrupted and isinstance(self._error, InvalidArgument):  # it had ended: nobody has told how
            self._error = native.untold()
        self._received = True
        callbacks.tell()


class _Call:
    """The structs of one kind of call, used again and again."""

    def __init__(self, place: Any, kind_given: Any, kind_out: Any):
        self.given, self.out = given, out = kind_given(), kind_out()
        self.inputs = [tensors.Slot(given, t, place.describe) for t in given.tensors]
        self.outputs = [tensors.Slot(out, t, place.describe) for t in out.tensors]
        self.sizes = tensors.Slot(given, given.sizes, place.describe)
        self.extra = [
            tensors.Slot(out, getattr(out, n), place.describe) for n in ("counts", "offsets") if hasattr(out, n)
        ]
        self.addresses = ctypes.addressof(given), ctypes.addressof(out)


class Sizes(NamedTuple):
    """Sizes as they are given."""

    host: tuple[int, ...] | None = None  # known here, of all ranks
    own: int | None = None  # or of this one
    tensor: Tensor | None = None  # in memory

    @staticmethod
    def of(sizes: Any) -> Sizes:
        if sizes is None:
            return Sizes()
        if isinstance(sizes, (int, np.integer)):
            return Sizes(own=int(sizes))
        if isinstance(sizes, (list, tuple)):
            return Sizes(host=tuple(sizes))
        return Sizes(tensor=sizes)

    def check(self, place: Any, nranks: int, max_tokens: int) -> None:
        """Raises what C cannot see."""
        if self.own is not None and not 0 <= self.own <= max_tokens:
            raise InvalidArgument.of("sizes", f"is {self.own}; it must be from 0 to max_tokens, {max_tokens}")
        if self.host is None:
            what = None if self.tensor is None else place.unlike(self.tensor)
            if what is not None:
                raise tensors.refusal("sizes", what, tensors.obstacle(place.describe, self.tensor))
            return
        if len(self.host) != nranks or not all(isinstance(n, (int, np.integer)) for n in self.host):
            raise InvalidArgument.of(
                "sizes", f"is {list(self.host)!r}; it must be {nranks} integers, or a tensor of int32 or int64"
            )
        for rank, n in enumerate(self.host):
            if not -(2**31) <= n < 2**31:
                raise InvalidArgument.of("sizes", f"is {n}; it must be from 0 to max_tokens, {max_tokens}", (rank,))


def gather_bound(shape: Shape, sizes: Sizes, rows: Sequence[Any], bound: Any) -> int:
    """b of a gather, for C: as given, else the largest size that is known here, else, if the sizes are in memory, the
    rows of the first tensor, else max_tokens."""
    otherwise = shape.max_tokens if sizes.tensor is None else _rows_beside(rows)
    if bound is not None:
        return arguments.int32(bound) or -2
    return otherwise if sizes.host is None else max((1, *map(int, sizes.host)))


def reduce_bound(shape: Shape, sizes: Sizes, rows: Sequence[Any], flat: bool, bound: Any) -> int:
    """b of a reduce-scatter, for C: as given, else as many rows as there are for each rank where sizes are not known
    here, else 0, by which C takes the largest."""
    if bound is not None:
        return arguments.int32(bound) or -2
    learns = sizes.host is None and (sizes.tensor is not None or not flat)
    return _room_of_each(shape, rows, flat) if learns else 0


def _room_of_each(shape: Shape, rows: Sequence[Any], flat: bool) -> int:
    """Rows for each rank that the first tensor of a reduce-scatter has."""
    first = rows[0] if rows else None
    return _extent(first, 0) // shape.nranks if flat else _extent(first, 1)


def _several(rows: Any) -> tuple[Any, ...]:
    return tuple(rows) if isinstance(rows, (list, tuple)) else (rows,)


def _extent(x: Any, dimension: int) -> int:
    """Of a tensor; 0 for what is none or has not so many dimensions, which is refused."""
    shape = getattr(x, "shape", ())
    return int(shape[dimension]) if len(shape) > dimension else 0


def _rows_beside(given: Sequence[Any]) -> int:
    """The bound of a gather whose sizes are in memory, as its rows have it."""
    rows = _extent(given[0], 0) if given else 0
    if rows == 0 and given and len(getattr(given[0], "shape", ())):
        raise InvalidArgument.of(
            "rows",
            "has 0 rows and sizes is a tensor, so the bound would be 0; beside such sizes rows must be as many as "
            "the bound, on all ranks alike and at least 1, or sizes a list",
        )
    return rows


class Collectives:
    """Those of one group."""

    def __init__(self, native: NativeGroup, shape: Shape, blocks: Blocks, outputs: Outputs):
        self._native, self._shape, self._blocks, self._outputs = native, shape, blocks, outputs
        place = native.place
        self._gathers = Spare(partial(_Call, place, _header.AllGatherVInput, _header.AllGatherVOutput))
        self._reduces = Spare(partial(_Call, place, _header.ReduceScatterVInput, _header.ReduceScatterVOutput))
        self.requests: dict[int, tuple[Any, ...]] = {}  # what those under way read and write, by number

    def all_gatherv(
        self,
        rows: Rows,
        sizes: Any,
        layout: Any,
        bound: Any,
        lane: Any,
        out: Rows | None,
        send_only: Any,
        sm_limit: Any,
    ) -> Any:
        """As `Group.all_gatherv` says."""
        native, shape, call = self._native, self._shape, self._gathers.take()
        known, b = Sizes(), 0
        given: tuple[Any, ...] = ()
        lead: tuple[int, ...] = ()
        made: list[Any] | None = None
        counts = offsets = None
        with arguments.Preparation() as prepared:
            call.out.layout = arguments.code(LAYOUTS, layout)
            known, given = Sizes.of(sizes), _several(rows)
            if known.own is not None:
                known = Sizes(tensor=sizes)  # of a gather rows tell it: refused
            known.check(native.place, shape.nranks, shape.max_tokens)
            b = gather_bound(shape, known, given, bound)
            views = layout == "rank_major"
            lead = (shape.nranks, b) if views else (shape.nranks * b if known.host is None else sum(known.host),)
            room = 1 <= b <= shape.max_tokens and all(0 <= n <= b for n in known.host or ())  # else refused
            made = self._made(given, out, lead if room and not views else None, 1, None)
            like = given[0] if given else None
            counts = native.place.empty((shape.nranks,), "int32", like)
            offsets = native.place.empty((shape.nranks + 1,), "int32", like)
            call.extra[0].set(counts)
            call.extra[1].set(offsets)
        function = _native.lib.twAllGatherV
        asked = {"bound": bound, "lane": lane, "layout": layout, "sm_limit": sm_limit}
        self._collect(function, call, given, made, known, prepared, b, asked, send_only, out)
        if made is None:
            torch = tensors.is_torch(given[0])
            made = [
                self._outputs.view(slot.pointer(), (*lead, *x.shape[1:]), tensors.dtype_of(x), torch)
                for slot, x in zip(call.outputs, given, strict=False)
            ]
            if torch:
                native.torch_views.show(tuple(made))
        result = Gathered(made[0] if given[0] is rows else tuple(made), counts, offsets)
        keep = (*given, *made, sizes, counts, offsets)
        return self._end(self._gathers, call, result, keep, out, send_only)

    def reduce_scatterv(
        self,
        rows: Rows,
        sizes: Any,
        layout: Any,
        bound: Any,
        lane: Any,
        dtype: Any,
        out: Rows | None,
        send_only: Any,
        sm_limit: Any,
    ) -> Any:
        """As `Group.reduce_scatterv` says."""
        native, shape, call = self._native, self._shape, self._reduces.take()
        known, b = Sizes(), 0
        given: tuple[Any, ...] = ()
        made: list[Any] | None = None
        with arguments.Preparation() as prepared:
            call.given.layout = arguments.code(LAYOUTS, layout)
            known, given = Sizes.of(sizes), _several(rows)
            known.check(native.place, shape.nranks, shape.max_tokens)
            flat = layout != "rank_major"
            if known.own is not None and flat:
                raise InvalidArgument.of(
                    "sizes", f"is {sizes}; of one rank alone it may be where layout is 'rank_major'"
                )
            b = reduce_bound(shape, known, given, flat, bound)
            own = _room_of_each(shape, given, flat) if known.own is None else known.own
            own = own if known.host is None else int(known.host[shape.rank])
            fits = 0 <= own <= shape.max_tokens  # else refused
            made = self._made(given, out, (own,) if fits else None, 1 if flat else 2, dtype)
        function = _native.lib.twReduceScatterV
        asked = {"bound": bound, "lane": lane, "layout": layout, "sm_limit": sm_limit}
        self._collect(function, call, given, made or (), known, prepared, b, asked, send_only, out)
        assert made is not None, "C has accepted the call"
        result = made[0] if given[0] is rows else tuple(made)
        return self._end(self._reduces, call, result, (*given, *made, sizes), out, send_only)

    def _end(
        self, spare: Spare[_Call], call: _Call, result: Any, keep: tuple[Any, ...], out: Any, send_only: Any
    ) -> Any:
        """What a call that has succeeded returns; its structs are for the next one from now on."""
        number: int = call.out.request
        spare.append(call)
        return Request(self._native, self.requests, number, result, keep, out) if send_only else result

    def _made(
        self, given: Sequence[Any], out: Any, lead: tuple[int, ...] | None, inner: int, dtype: Any
    ) -> list[Any] | None:
        """Tensors to write to. lead: of new ones, None where there are none, as the window is viewed or the call will
        be refused; after it come the dimensions of the inputs from `inner` on."""
        place = self._native.place
        if out is not None:
            made = list(_several(out))
            for q, x in enumerate(made):
                if (problem := place.problem_of_output("out" if q == 0 else f"out[{q}]", x)) is not None:
                    raise problem
            if len(made) != len(given):
                raise InvalidArgument.of("out", f"has {len(made)} tensors; it must have as many as rows, {len(given)}")
            return made
        if lead is None or any(place.unlike(x) for x in given):
            return None
        names = [tensors.dtype_name(tensors.dtype_of(x) if dtype is None else dtype) for x in given]
        try:
            return [place.empty((*lead, *x.shape[inner:]), n, x) for x, n in zip(given, names, strict=True)]
        except (MemoryError, RuntimeError, ValueError) as error:
            raise OutOfMemory(f"no memory for the result: {error}") from error

    def _collect(
        self,
        function: Callable[..., int],
        call: _Call,
        given: Sequence[Any],
        made: Sequence[Any] | None,
        sizes: Sizes,
        prepared: arguments.Preparation,
        bound: int,
        asked: Mapping[str, Any],
        send_only: Any,
        out: Any,
    ) -> None:
        """Makes a call of which all that is its own is set, unless `prepared` has a problem. asked, out: what the
        caller gave for bound, lane, layout and sm_limit, and to write to."""
        native = self._native
        self._blocks.free()
        call.given.bound, call.given.lane = bound, arguments.lane_number(asked["lane"])
        call.given.send_only = 1 if arguments.truth(send_only) else 0
        call.given.sm_limit = arguments.int32(asked["sm_limit"])
        if native.device is not None:
            call.given.stream = native.place.stream()
        hosted = None
        if prepared.problem is None:
            with prepared:
                bool(send_only)  # may raise
                if not 1 <= len(given) <= _header.MAX_PAYLOADS:
                    raise InvalidArgument.of(
                        "rows", f"has {len(given)} tensors; it must have from 1 to {_header.MAX_PAYLOADS}"
                    )
                for q, x in enumerate(given):
                    call.inputs[q].set(x)
                    if made is not None and q < len(made):
                        call.outputs[q].set(made[q])
                    else:
                        call.outputs[q].clear()
                if sizes.host is not None:
                    hosted = (c_int32 * native.nranks)(*(arguments.int32(n) for n in sizes.host))
                call.sizes.set(sizes.tensor)
        call.given.host_sizes = None if hosted is None else ctypes.addressof(hosted)
        call.given.num_tensors = len(given) if prepared.problem is None else -1
        native.torch_views.meet(given)
        result = function(native.pointer, *call.addresses)
        if result:
            named = {"rows" if len(given) == 1 else f"rows[{q}]": x for q, x in enumerate(given)}
            error = native.error(result, prepared.problem, named, asked, sizes=sizes.tensor)
            native.torch_views.after(out, error)
            raise error
        native.torch_views.after(out)
        callbacks.tell()
