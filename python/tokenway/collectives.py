"""Gathers and reduces: the exchange with the set "every rank". `Group` has them as methods."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenway import _header, _native, arguments, cuda, outputs, tensors, versions
from tokenway.errors import InUse, InvalidArgument, InvalidUsage, OutOfMemory, TokenwayError
from tokenway.handle import Pending, Tensor
from tokenway.structs import Spare

if TYPE_CHECKING:
    from tokenway.group import Group

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

    def __init__(self, group: Group, number: int, result: Any, keep: tuple[Any, ...], written: Any):
        self._group = group
        self._number = number
        self._sent_on = group._sending_stream()
        self._result = result
        self._written = written
        self._error: TokenwayError | None = None
        self._received = self._interrupted = False
        # Of the group: a later step on the lane finishes this one, and writes its results, whoever has dropped them.
        group._requests[number] = keep

    def hook(self) -> None:
        """Receives; does nothing if that is done, but for raising again what it raised then."""
        group, stream = self._group, None
        kept = group._requests.pop(self._number, None)
        if kept is not None:
            try:
                if group.device is not None:
                    group._place.follow(self._sent_on, kept)
                    stream = group._place.stream()
                result = _native.lib.twCompleteRequest(group.pointer, self._number, stream)
            except BaseException:  # a signal's handler, before the C call or behind it
                group._requests[self._number] = kept
                self._interrupted = True
                raise
            versions.written(self._written)
            if result:
                try:
                    error = group._error(result)
                except BaseException:  # a signal's handler has ended the wait, and with it the group
                    self._received, self._error = True, group.untold()
                    raise
                if isinstance(error, InUse):  # another thread's call was in the way: this one is still to be completed
                    group._requests[self._number] = kept
                    raise error
                self._error = error
            if self._interrupted and isinstance(self._error, InvalidArgument):  # it had ended: nobody has told how
                self._error = group.untold()
            self._received = True
            group._tell_interrupt()
            del kept
        elif not self._received:
            raise InvalidUsage("the group was closed before this was received")
        if self._error is not None:
            raise self._error


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


class _Sizes(NamedTuple):
    """Sizes as they are given."""

    host: tuple[int, ...] | None = None  # known here, of all ranks
    own: int | None = None  # or of this one
    tensor: Tensor | None = None  # in memory

    @staticmethod
    def of(sizes: Any) -> _Sizes:
        if sizes is None:
            return _Sizes()
        if isinstance(sizes, (int, np.integer)):
            return _Sizes(own=int(sizes))
        if isinstance(sizes, (list, tuple)):
            return _Sizes(host=tuple(sizes))
        return _Sizes(tensor=sizes)

    def check(self, place: Any, nranks: int, max_tokens: int) -> None:
        """Raises what C cannot see."""
        if self.own is not None and not 0 <= self.own <= max_tokens:
            raise InvalidArgument(f"sizes is {self.own}; it must be from 0 to max_tokens, {max_tokens}")
        if self.host is None:
            what = None if self.tensor is None else place.unlike(self.tensor)
            if what is not None:
                raise tensors.refusal("sizes", what, tensors.obstacle(place.describe, self.tensor))
            return
        if len(self.host) != nranks or not all(isinstance(n, (int, np.integer)) for n in self.host):
            raise InvalidArgument(
                f"sizes is {list(self.host)!r}; it must be {nranks} integers, or a tensor of int32 or int64"
            )
        for rank, n in enumerate(self.host):
            if not -(2**31) <= n < 2**31:
                raise InvalidArgument(f"sizes[{rank}] is {n}; it must be from 0 to max_tokens, {max_tokens}")

    def bound_of(self, bound: Any, otherwise: int) -> int:
        """b of a gather, for C. otherwise: where neither it nor sizes are known here."""
        if bound is not None:
            return arguments.int32(bound) or -2
        return otherwise if self.host is None else max((1, *map(int, self.host)))


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
        raise InvalidArgument(
            "rows has 0 rows and sizes is a tensor, so the bound would be 0; beside such sizes rows must be as many as "
            "the bound, on all ranks alike and at least 1, or sizes a list"
        )
    return rows


class Collectives:
    """Gathers and reduces of a group. Each is a step of all ranks, like a dispatch, and leases no lane.

    sizes, of the rows n_r that are rank r's own, 0 <= n_r <= b <= max_tokens, given in the same way on all ranks:
    a list or tuple of N integers, known here, so that outputs are as large as what comes; or a tensor of the group's
    device (on the CPU NumPy's too), int32 or int64, [N], or [1] with this rank's own, read when the step runs: tensors
    then have as many rows as there is room for, b of each rank, and a captured graph reads the sizes anew in each
    replay. None: see there.
    """

    @cuda.ranged("tokenway.all_gatherv")
    def all_gatherv(
        self: Group,  # type: ignore[misc]
        rows: Rows,
        sizes: Any = None,
        *,
        layout: str = "flat",
        bound: int | None = None,
        lane: int | None = None,
        out: Rows | None = None,
        send_only: bool = False,
    ) -> Any:
        """Brings the rows of every rank to every rank: `Gathered`, or `Pending[Gathered]` with send_only.

        rows: a tensor [n, ...] of any dtype, or several, which travel together; they may be strided. sizes: see
        `Collectives`; None: the tensors tell this rank's own, and others' are learned in the step. layout: "flat", the
        rows of rank 0, then of rank 1 and so on: [R, ...], R being the sum of sizes that are known here, else N*b, of
        which the first offsets[N] are used; or "rank_major", [N, b, ...]: row i of rank r at [r, i], a view of the
        window without a copy, valid until the next step on the lane begins. bound: b, equal on all ranks (default: the
        largest size that is known here; with a tensor of sizes the rows of the first tensor; else max_tokens).
        out: a tensor, or as many as rows, to have rows written there; of known sizes it may hold rows in place.
        What is returned is detached: `tokenway.autograd` has a gather that gradients flow through. Errors:
        InvalidArgument and InvalidUsage (peers get PeerRefused at once), PeerRefused, BoundMismatch where ranks give
        different sizes or rows, GroupFinished; after a step that failed counts and offsets are 0."""
        call = self._collective_call(_header.AllGatherVInput, _header.AllGatherVOutput)
        known, given, b = _Sizes(), (), 0
        lead: tuple[int, ...] = ()
        made: list[Any] | None = None
        counts = offsets = None
        with arguments.Preparation() as prepared:
            call.out.layout = arguments.code(LAYOUTS, layout)
            known, given = _Sizes.of(sizes), _several(rows)
            if known.own is not None:
                known = _Sizes(tensor=sizes)  # of a gather rows tell it: refused
            known.check(self._place, self.nranks, self.max_tokens)
            b = known.bound_of(bound, self.max_tokens if known.tensor is None else _rows_beside(given))
            views = layout == "rank_major"
            lead = (self.nranks, b) if views else (self.nranks * b if known.host is None else sum(known.host),)
            room = 1 <= b <= self.max_tokens and all(0 <= n <= b for n in known.host or ())  # else refused
            made = self._collective_outputs(given, out, lead if room and not views else None, 1, None)
            counts = self._place.empty((self.nranks,), "int32", given[0] if given else None)
            offsets = self._place.empty((self.nranks + 1,), "int32", given[0] if given else None)
            call.extra[0].set(counts)
            call.extra[1].set(offsets)
        function, asked = _native.lib.twAllGatherV, {"bound": bound, "lane": lane, "layout": layout}
        self._collect(function, call, given, made, known, prepared, b, asked, send_only, out)
        if made is None:
            torch = tensors.is_torch(given[0])
            made = [
                outputs._view(self, slot.pointer(), (*lead, *x.shape[1:]), tensors.dtype_of(x), torch)
                for slot, x in zip(call.outputs, given, strict=False)
            ]
            if torch:
                self._torch_views.show(tuple(made))
        result = Gathered(made[0] if given[0] is rows else tuple(made), counts, offsets)
        number = self._end_collective(call)
        if not send_only:
            return result
        return Request(self, number, result, (*given, *made, sizes, counts, offsets), out)

    @cuda.ranged("tokenway.reduce_scatterv")
    def reduce_scatterv(
        self: Group,  # type: ignore[misc]
        rows: Rows,
        sizes: Any = None,
        *,
        layout: str = "flat",
        bound: int | None = None,
        lane: int | None = None,
        dtype: Any = None,
        out: Rows | None = None,
        send_only: bool = False,
    ) -> Any:
        """Sums what all ranks have for each rank, there: [n, ...], or `Pending` of it with send_only.

        rows: a tensor of partials, float32, bfloat16 or float16, or several, which travel together. layout: "flat",
        [R, ...], those for rank 0, then for rank 1 and so on; or "rank_major", [N, b, ...], that for row i of rank r at
        [r, i], which may be the view that a gather has returned. sizes: see `Collectives`; None: each rank has an equal
        share of rows; an integer, of rank_major alone: this rank's own, the others' being not known here. With a
        tensor of sizes rows are N*b, and the result has b rows, of which the first n are written. bound: b (default: as
        rows and sizes say). dtype: of the result (default: that of rows). out: a tensor, or as many as rows, to write
        to; of known sizes it may be this rank's own rows of `rows`, in place.
        Sums are float32 over ranks ascending, rounded once to the result's dtype: the same bits every time. Detached,
        and errors, as `all_gatherv`; after a step that failed the result is NaN."""
        call = self._collective_call(_header.ReduceScatterVInput, _header.ReduceScatterVOutput)
        known, given, b = _Sizes(), (), 0
        made: list[Any] | None = None
        with arguments.Preparation() as prepared:
            call.given.layout = arguments.code(LAYOUTS, layout)
            known, given = _Sizes.of(sizes), _several(rows)
            known.check(self._place, self.nranks, self.max_tokens)
            flat = layout != "rank_major"
            if known.own is not None and flat:
                raise InvalidArgument(f"sizes is {sizes}; of one rank alone it may be where layout is 'rank_major'")
            first = given[0] if given else None
            room = _extent(first, 0) // self.nranks if flat else _extent(first, 1)
            learns = known.host is None and (known.tensor is not None or not flat)
            b = room if bound is None and learns else 0 if bound is None else arguments.int32(bound) or -2
            own = room if known.own is None else known.own
            own = own if known.host is None else int(known.host[self.rank])
            fits = 0 <= own <= self.max_tokens  # else refused
            made = self._collective_outputs(given, out, (own,) if fits else None, 1 if flat else 2, dtype)
        function, asked = _native.lib.twReduceScatterV, {"bound": bound, "lane": lane, "layout": layout}
        self._collect(function, call, given, made or (), known, prepared, b, asked, send_only, out)
        assert made is not None, "C has accepted the call"
        result = made[0] if given[0] is rows else tuple(made)
        number = self._end_collective(call)
        return Request(self, number, result, (*given, *made, sizes), out) if send_only else result

    # ---------------------------------------------------------------------------------------------------- internals

    def _collective_call(self: Group, given: Any, out: Any) -> _Call:  # type: ignore[misc]
        calls: dict[Any, Spare[_Call]] = self.__dict__.setdefault("_collective_calls", {})
        if given not in calls:
            calls.setdefault(given, Spare(partial(_Call, self._place, given, out)))
        return calls[given].take()

    def _end_collective(self: Group, call: _Call) -> int:  # type: ignore[misc]
        """The number of a `send_only` call; the structs are for the next one from now on."""
        number: int = call.out.request
        self.__dict__["_collective_calls"][type(call.given)].append(call)
        return number

    def _collective_outputs(
        self: Group,  # type: ignore[misc]
        given: Sequence[Any],
        out: Any,
        lead: tuple[int, ...] | None,
        inner: int,
        dtype: Any,
    ) -> list[Any] | None:
        """Tensors to write to. lead: of new ones, None where there are none, as the window is viewed or the call will
        be refused; after it come the dimensions of the inputs from `inner` on."""
        if out is not None:
            made = list(_several(out))
            for q, x in enumerate(made):
                if (problem := self._place.problem_of_output("out" if q == 0 else f"out[{q}]", x)) is not None:
                    raise problem
            if len(made) != len(given):
                raise InvalidArgument(f"out has {len(made)} tensors; it must have as many as rows, {len(given)}")
            return made
        if lead is None or any(self._place.unlike(x) for x in given):
            return None
        names = [tensors.dtype_name(tensors.dtype_of(x) if dtype is None else dtype) for x in given]
        try:
            return [self._place.empty((*lead, *x.shape[inner:]), n, x) for x, n in zip(given, names, strict=True)]
        except (MemoryError, RuntimeError, ValueError) as error:
            raise OutOfMemory(f"no memory for the result: {error}") from error

    def _collect(
        self: Group,  # type: ignore[misc]
        function: Any,
        call: _Call,
        given: Sequence[Any],
        made: Sequence[Any] | None,
        sizes: _Sizes,
        prepared: arguments.Preparation,
        bound: int,
        asked: Mapping[str, Any],
        send_only: bool,
        out: Any,
    ) -> None:
        """Makes a call of which all that is its own is set, unless `prepared` has a problem. asked, out: what the
        caller gave for bound, lane and layout, and to write to."""
        self._free_finished()
        call.given.bound, call.given.lane = bound, arguments.lane_number(asked["lane"])
        call.given.send_only = 1 if arguments.truth(send_only) else 0
        if self.device is not None:
            call.given.stream = self._place.stream()
        hosted = None
        if prepared.problem is None:
            with prepared:
                bool(send_only)  # may raise
                if not 1 <= len(given) <= _header.MAX_PAYLOADS:
                    raise InvalidArgument(
                        f"rows has {len(given)} tensors; it must have from 1 to {_header.MAX_PAYLOADS}"
                    )
                for q, x in enumerate(given):
                    call.inputs[q].set(x)
                    if made is not None and q < len(made):
                        call.outputs[q].set(made[q])
                    else:
                        call.outputs[q].clear()
                if sizes.host is not None:
                    hosted = (c_int32 * self.nranks)(*(arguments.int32(n) for n in sizes.host))
                call.sizes.set(sizes.tensor)
        call.given.host_sizes = None if hosted is None else ctypes.addressof(hosted)
        call.given.num_tensors = len(given) if prepared.problem is None else -1
        self._torch_views.meet(given)
        result = function(self.pointer, *call.addresses)
        if result:
            named = {"rows" if len(given) == 1 else f"rows[{q}]": x for q, x in enumerate(given)}
            error = self._error(result, prepared.problem, named, asked, sizes=sizes.tensor)
            self._torch_views.after(out, error)
            raise error
        self._torch_views.after(out)
        self._tell_interrupt()
