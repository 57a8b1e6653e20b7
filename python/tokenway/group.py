"""Groups: route, dispatch, combine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np

from tokenway import _native, cuda, tensors
from tokenway.blocks import Blocks
from tokenway.calls import Calls
from tokenway.collectives import Collectives, Rows
from tokenway.comm import Comm
from tokenway.counting import Counting
from tokenway.errors import ErrorRecord, InvalidArgument, TokenwayError
from tokenway.exchange import Exchange
from tokenway.growth import reserve
from tokenway.handle import Handle, Tensor
from tokenway.leases import LeaseInfo
from tokenway.maps import Maps
from tokenway.moving import Moving
from tokenway.native_group import NativeGroup, pointer_of
from tokenway.outputs import Outputs
from tokenway.placement import Placement
from tokenway.routing_layout import RoutingLayout, find_layout
from tokenway.row_types import TypedRows
from tokenway.settings import Payload, RowType, Settings, WindowBytes, make_config, telling, window_of
from tokenway.shape import Shape
from tokenway.survivors import shrink


class Group(Calls, _native.Shared):
    """Ranks that exchange tokens: how big, which experts where, over which memory. Collective, long-lived.

    On a comm of CUDA devices, tensors are PyTorch's on the device of this rank, and route, dispatch, combine and the
    completion of a pending one enqueue their work on that device's current stream and return: they never wait for the
    device, and can be captured into a CUDA graph, whose replays read and write the memory of the tensors captured.
    What a step finds out while it runs is in `error`, and raised by `check`; a sticky error is raised by every later
    call too. With TOKENWAY_BLOCKING=1 each call waits and raises its own. Steps on one lane must be ordered: one
    stream, or streams that wait for each other. Memory that Tokenway allocates may be used on other streams as any
    tensor's of PyTorch; what it reads of the caller's on another stream than the tensor's own, the caller records.

    experts: E. top_k: K, 1..64; a group that gathers and reduces alone needs neither. hidden: H, elements of a token.
    max_tokens: B, tokens that a rank sends in one call. dtype: of tokens (default bfloat16). payloads: further tensors
    per token, name to Payload or (elements, dtype).
    combine_dtype: of rows on their way back, float32, bfloat16 or float16 (default: dtype if it is one of these, else
    bfloat16). combine_hidden: elements of those rows (default H). expert_map: where experts
    are, (rank[E], slot[E]); default contiguous. For experts in several slots, maps by layer and counting a `Placement`,
    or what it is made from: the expert in each of P slots, [P], or (rank[E, R], slot[E, R]) with -1 for none.
    lanes: exchanges in flight (default 1; those of `arena`). timeout: seconds after which a late peer is an error
    (default 100); while the group is made, the comm's. In the main thread Ctrl-C ends a wait. id_dtype, id_space
    ("local": slots of this rank, "global": as sent) and invalid_id of received ids. sm_limit: on a CUDA device, thread
    blocks of a kernel, at most one on each SM (default 0: the backend chooses); calls may have their own.
    row_alignment: an expert's first row in "grouped" is a multiple of it, a power of two to 256 (default 1).
    mode: "low_latency" (layouts "rank_major", "expert_major" and "grouped", sized by a bound), "high_throughput" (those
    "flat" and "grouped", as large as what comes: `exchange_counts` before a dispatch) or "auto", both by the call,
    as `dispatch` says: decode and prefill over one window. Of that alone: low_latency_tokens, the largest bound of a
    low-latency dispatch (default 1024, or inbox_tokens, if given, or max_tokens, where less). Of the last two:
    max_recv_tokens, rows that a rank may receive in a step (default N*B); overflow, what becomes of more, "refuse"
    (RecvOverflow) or "drop"; lease_bytes, of the window, for rows that outlive their step (default 0: none): autograd
    keeps its rows there instead of in copies, and `exchange_counts(lease=True)` asks for it. On a CUDA device a
    dispatch waits until the host knows how much comes, and for nothing else; with max_recv_tokens given, here or to
    `exchange_counts`, or while a graph is captured, it does not: outputs then have that many rows, of which
    `Received.counts` are used, ids of others being invalid.

    dispatch_room, combine_room: bytes that the window has room for in a dispatched row, payloads and all, and in a
    combined one, so that `rows` may be of other types (default: as many as the rows above have;
    `RowType.dispatch_bytes`, `combine_bytes` tell what a type takes). inbox_tokens, not in low latency: tokens of a
    rank for which the window has room for what returns, from B / 16 to B. A combine takes a part for each so many
    tokens, which costs some microseconds more, and its output may not overlap its rows. Default: B, or fewer where
    that would be larger than the rows that come, and 512 MiB are saved.

    combine_rows: what a combine returns: "per_rank" (default), a row from each of a token's ranks, which sums what its
    experts made of it; or "per_expert", a row for each (token, k), which the owner weights and sums (`combine`). Then
    combines are in "expert_major" and "grouped" alone, weights may come with the combine, and results have the same
    bits on any number of ranks and with any placement of experts. K rows of a token return instead of at most
    min(K, N): as many times the bytes on the way back, and in the window.
    token_replicas: R, as many neighbouring ranks hold the same tokens (ranks 0..R-1, R..2R-1, ...), as ranks of
    tensor-parallel attention do; R divides the number of ranks (default 1: none). All tensors of tokens, ids, weights
    and results have the T rows of a set; of these each rank sends its share, T / R, and all R get every result. B and
    bounds are of shares: T is at most R * B. Ranks whose ids or weights differ within a set get ReplicaMismatch, on
    all ranks, in the combine (docs/GUIDE.md, «Token replicas»).
    domain: partials of as many neighbouring ranks (of rank // domain) are folded, in float32, and rounded to
    combine_dtype before the owner sums the folds, domains ascending. 0 (default), 1, at least as many as there are
    ranks: the usual sum. Not with combine_rows="per_expert" or rows of fp8. See docs/GUIDE.md, «Sums by domain».

    arena: a group of the comm whose window this one uses too, instead of one of its own, so that layers of unlike
    shapes pay for the largest. They have lanes in common: a view lasts until the next step of any of them on its lane,
    an error that finishes one finishes all, and one thread at a time calls any of them (docs/GUIDE.md, «Groups that
    share a window»). room_for: keywords of groups that shall be made so later, as dicts, for which this group's window
    is to have room from the start.

    All ranks must give the same values, but for sm_limit; a difference is an error that names the field and the ranks.
    A group is for one thread at a time, but for `abort` and `error`: while one is in a call, another's is InvalidUsage,
    tells the peers nothing and changes nothing. Give each thread a group of its own, or hold a lock around the calls.
    """

    former: NativeGroup | None = None  # the group that was shrunk to this one, if this began with its maps

    def __init__(
        self,
        comm: Comm,
        *,
        hidden: int,
        max_tokens: int,
        experts: int | None = None,
        top_k: int | None = None,
        dtype: Any = "bfloat16",
        payloads: Mapping[str, Payload | tuple[int, Any]] | None = None,
        combine_dtype: Any = None,
        combine_hidden: int | None = None,
        expert_map: Sequence[Any] | Placement | None = None,
        lanes: int | None = None,
        timeout: float | None = None,
        id_dtype: Any = "int32",
        id_space: str = "local",
        invalid_id: int = -1,
        sm_limit: int = 0,
        mode: str = "low_latency",
        max_recv_tokens: int | None = None,
        overflow: str = "refuse",
        row_alignment: int | None = None,
        lease_bytes: int = 0,
        dispatch_room: int = 0,
        combine_room: int = 0,
        inbox_tokens: int | None = None,
        low_latency_tokens: int | None = None,
        combine_rows: str = "per_rank",
        token_replicas: int = 1,
        domain: int = 0,
        arena: Group | None = None,
        room_for: Sequence[Mapping[str, Any]] = (),
    ):
        settings = Settings(
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=max_tokens,
            dtype=dtype,
            payloads=payloads,
            combine_dtype=combine_dtype,
            combine_hidden=combine_hidden,
            expert_map=expert_map,
            lanes=lanes,
            timeout=timeout,
            id_dtype=id_dtype,
            id_space=id_space,
            invalid_id=invalid_id,
            sm_limit=sm_limit,
            mode=mode,
            max_recv_tokens=max_recv_tokens,
            overflow=overflow,
            row_alignment=row_alignment,
            lease_bytes=lease_bytes,
            dispatch_room=dispatch_room,
            combine_room=combine_room,
            inbox_tokens=inbox_tokens,
            low_latency_tokens=low_latency_tokens,
            combine_rows=combine_rows,
            token_replicas=token_replicas,
            domain=domain,
            room_for=room_for,
        )
        pointer = c_void_p()
        base = comm.pointer
        with telling(lambda nothing: _native.lib.twGroupCreate(byref(pointer), base, nothing)):
            config, keep = make_config(settings)
            if arena is not None:
                config.arena = pointer_of(arena)
                config.lanes = 0 if lanes is None else config.lanes  # as many as there are
            place = tensors.Host() if comm.device is None else cuda.Cuda(comm.device)
        _native.check(_native.lib.twGroupCreate(byref(pointer), base, byref(config)), tensors=settings.payload_names())
        del keep
        self._adopt(comm, pointer.value or 0, settings, place, arena)

    def _adopt(self, comm: Comm, pointer: int, settings: Settings, place: Any, arena: Group | None = None) -> None:
        """Takes a group of the C library over: this is what __init__ and shrink have in common."""
        self.comm = comm
        self.device = comm.device  # the CUDA device of this rank, None on the CPU
        # Of this package: the C library's group, and what it is in numbers. Each part below answers one question, and
        # has what it needs for that, never the group.
        self.native = native = NativeGroup(pointer, comm, place, arena and arena.native)
        info = native.info()
        self.settings = settings = replace(settings, lanes=info.lanes)
        self.shape = shape = Shape.of(settings, native)
        self._blocks = blocks = Blocks(place, native.handle_bytes())
        self._counting = Counting(native, shape, blocks)
        self._outputs = Outputs(native, shape)
        self._exchange = Exchange(native, shape, blocks, self._counting, self._outputs)
        self._collectives = Collectives(native, shape, blocks, self._outputs)
        self._maps = Maps(native, settings.placement, shape.experts)
        self.moving = Moving(native, self._maps, info.lanes, blocks)  # maps that all ranks take over in one dispatch
        self._window_bytes: int = info.window_bytes
        self.rank, self.nranks = shape.rank, shape.nranks
        self.comm_ranks: list[int] = list(info.comm_ranks[: info.nranks])
        self.experts = shape.experts
        self.top_k = shape.top_k
        self.num_local_experts = shape.num_local_experts
        self.hidden = shape.hidden
        self.max_tokens = shape.max_tokens
        self.dtype = shape.dtype
        self.combine_hidden = shape.combine_hidden
        self.combine_dtype = shape.combine_dtype
        self.id_dtype, self.mode = shape.id_dtype, shape.mode
        self.token_replicas, self.domain = info.token_replicas, info.domain
        self.exact = shape.exact  # high throughput alone: outputs are as large as what comes
        self.low_latency_tokens = shape.low_latency_tokens  # 0 unless the mode is "auto"
        self.max_recv_rows = shape.max_recv_rows  # of a step
        self.handle_bytes = blocks.handle_bytes  # of memory for one handle's arrays
        self.structs = self._exchange.structs  # those that dispatches and combines fill, for the benchmark
        self._typed: list[TypedRows] = []
        self.op_handles: dict[int, Handle[Group]] = {}  # of tokenway.ops: dispatched, not combined yet

    # ------------------------------------------------------------------------------------------------- everyday use

    def route(
        self, ids: Tensor, weights: Tensor | None = None, *, layer: int = 0, memory: Tensor | None = None
    ) -> Handle[Group]:
        """Caches a routing. ids: [T, K] int32 or int64, -1 for "no expert", each id at most once per token;
        weights: [T, K] float32, or None for all 1. Both are copied. memory: a contiguous, writable uint8 tensor of
        `handle_bytes` for the handle's arrays, 64-byte aligned (default: a new one). layer: whose map turns the ids
        into slots, of a group with a `Placement`. Not collective.
        Errors: InvalidArgument names token, k and value. More than `max_tokens` tokens are refused by the handle's
        dispatch or exchange of counts: the peers wait there, and hear of it at once. On a CUDA device ids and weights
        are read, and ids checked, by the handle's first dispatch: they must not change before it in stream order, and
        `check` tells of bad ids, which act as -1."""
        return self._exchange.route(self, ids, weights, layer, memory)

    def routing_layout(self, ids: Tensor, *, layer: int = 0) -> RoutingLayout:
        """Where a handle of these ids would send this rank's tokens, by rank and by physical expert. ids, layer: as
        `route` takes them; T up to max_tokens. Makes no handle, sends nothing; not collective. On a CUDA device
        enqueued, and capturable. Errors: InvalidArgument; on a CUDA device bad ids act as -1, and `check` tells of
        them."""
        return find_layout(self.native, self._maps.slots, self.top_k, ids, layer)

    def index_capacity(self, rows: int, block: int) -> int:
        """Places of the index lists of a view of so many rows (N * b in "rank_major", R' in "flat"), in blocks of
        `block`, as `dispatch` with that `index_block` makes them. With choices = rows * min(K, L) and begun = min(L,
        choices): (begun + (choices - begun) // block) * block, as the first choice of each expert begins a block.
        Errors: InvalidArgument."""
        return self.native.index_capacity(rows, block)

    def rows(self, kind: RowType) -> TypedRows:
        """Rows of another type: returns what dispatches and combines them, over this group's window and by its
        handles. For layers whose rows differ: fp8 with scales forward, bfloat16 back; another hidden size. A row takes
        at most `dispatch_room` bytes, a combined one `combine_room`. Not collective; make it once, as making it takes
        longer than a call. Errors: InvalidArgument."""
        if not isinstance(kind, RowType):
            raise InvalidArgument.of("kind", f"is {kind!r}; it must be a RowType")
        made = TypedRows(self.native, self.shape, self._blocks, self._counting, kind)
        self._typed.append(made)
        return made

    def refuse_dispatch(self, layout: str | None = None, bound: int | None = None) -> None:
        """Tells peers, which wait in a dispatch, that this rank cannot make the call; for callers that raise next.
        layout, bound: of that call."""
        if not self.closed:
            self._exchange.refuse_dispatch(layout, bound)

    # ---------------------------------------------------------------------------------------------- high throughput

    def exchange_counts(
        self,
        handle: Handle[Any],
        *,
        lane: int | None = None,
        send_only: bool = False,
        lease: bool | str = False,
        max_recv_tokens: int | None = None,
        row_alignment: int | None = None,
        sm_limit: int = 0,
    ) -> Any:
        """In high throughput: ranks tell each other how many rows they will send, before a handle's first dispatch and
        after each `Handle.update`. Returns the handle, whose `recv_rows` is known then, or `Pending` of it. A step of
        all ranks. Errors: RecvOverflow and BoundMismatch on all ranks alike, InvalidUsage, PeerRefused, GroupFinished.
        After a send_only call that a rank refused, or in which ranks differed, the handle holds the lane, on all ranks,
        until its counts are exchanged or it is released.

        max_recv_tokens: 1 up to the group's, on all ranks alike; row_alignment: of this rank, a power of two to 256.
        Both are in place of the group's (default) for all that follows from these counts, until the handle exchanges
        counts again; where a CUDA graph has calls of a handle, they must stay what they were. sm_limit: as of
        `dispatch`.

        In a group with `lease_bytes`, counts that are known may be exchanged again while the handle holds no lane, for
        another dispatch by the same routing; with another max_recv_tokens no combine may come before that dispatch.
        lease: the rows of the next dispatch go straight to memory of the window that its result in the layout "flat"
        owns, as long as a tensor shows it, instead of memory that the lane's next step overwrites; "zeros": where
        outputs have a fixed size, rows that none comes to are 0. The peers learn the place with the counts. Where there
        is no room for all rows that may come, that dispatch copies them to new tensors: `Received.leased` and
        `leases.copies` say so, and, the first time, the log. So `lease` need not be the same on all ranks. On a CUDA
        device memory whose tensors are gone is leased again in stream order: other streams that use them must be waited
        for before."""
        return self._counting.exchange(handle, lane, send_only, lease, max_recv_tokens, row_alignment, sm_limit)

    @property
    def leases(self) -> LeaseInfo:
        """What is leased of the window; all 0 in a group without `lease_bytes`."""
        return self._counting.lease_info()

    def size_outputs(self, handle: Handle[Any]) -> None:
        """In high throughput on a CUDA device: has the host know how much comes, unless outputs have a fixed size
        (`max_recv_tokens`) or a graph is captured. A dispatch does it first, so who allocates its outputs asks too."""
        self._counting.size_outputs(handle)

    def refuse_routing(self, layout: str | None = None, bound: int | None = None) -> None:
        """As refuse_dispatch, where peers are in the first step of a routing: in high throughput the exchange of
        counts."""
        both = self.low_latency_tokens > 0
        if not self.shape.is_exact(self.shape.choose(layout, bound) if both else layout):
            self.refuse_dispatch(layout, bound)
        elif not self.closed:
            self._counting.refuse()

    # ------------------------------------------------------------------------------------ gathers and reduce-scatters

    @cuda.ranged("tokenway.all_gatherv")
    def all_gatherv(
        self,
        rows: Rows,
        sizes: Any = None,
        *,
        layout: str = "flat",
        bound: int | None = None,
        lane: int | None = None,
        out: Rows | None = None,
        send_only: bool = False,
        sm_limit: int = 0,
    ) -> Any:
        """Brings the rows of every rank to every rank: `Gathered`, or `Pending[Gathered]` with send_only.

        rows: a tensor [n, ...] of any dtype, or several, which travel together; they may be strided. sizes: see
        `tokenway.collectives`; None: the tensors tell this rank's own, and others' are learned in the step. layout:
        "flat", the rows of rank 0, then of rank 1 and so on: [R, ...], R being the sum of sizes that are known here,
        else N*b, of which the first offsets[N] are used; or "rank_major", [N, b, ...]: row i of rank r at [r, i], a
        view of the window without a copy, valid until the next step on the lane begins. bound: b, equal on all ranks
        (default: the largest size that is known here; with a tensor of sizes the rows of the first tensor; else
        max_tokens).
        out: a tensor, or as many as rows, to have rows written there; of known sizes it may hold rows in place.
        sm_limit: as of `dispatch`.
        What is returned is detached: `tokenway.autograd` has a gather that gradients flow through. Errors:
        InvalidArgument and InvalidUsage (peers get PeerRefused at once), PeerRefused, BoundMismatch where ranks give
        different sizes or rows, GroupFinished; after a step that failed counts and offsets are 0."""
        return self._collectives.all_gatherv(rows, sizes, layout, bound, lane, out, send_only, sm_limit)

    @cuda.ranged("tokenway.reduce_scatterv")
    def reduce_scatterv(
        self,
        rows: Rows,
        sizes: Any = None,
        *,
        layout: str = "flat",
        bound: int | None = None,
        lane: int | None = None,
        dtype: Any = None,
        out: Rows | None = None,
        send_only: bool = False,
        sm_limit: int = 0,
    ) -> Any:
        """Sums what all ranks have for each rank, there: [n, ...], or `Pending` of it with send_only.

        rows: a tensor of partials, float32, bfloat16 or float16, or several, which travel together. layout: "flat",
        [R, ...], those for rank 0, then for rank 1 and so on; or "rank_major", [N, b, ...], that for row i of rank r at
        [r, i], which may be the view that a gather has returned. sizes: see `tokenway.collectives`; None: each rank has
        an equal share of rows; an integer, of rank_major alone: this rank's own, the others' being not known here.
        With a tensor of sizes rows are N*b, and the result has b rows, of which the first n are written. bound: b
        (default: as rows and sizes say). dtype: of the result (default: that of rows). out: a tensor, or as many as
        rows, to write to; of known sizes it may be this rank's own rows of `rows`, in place. sm_limit: as of
        `dispatch`.
        Sums are float32 over ranks ascending, rounded once to the result's dtype: the same bits every time. Detached,
        and errors, as `all_gatherv`; after a step that failed the result is NaN."""
        return self._collectives.reduce_scatterv(rows, sizes, layout, bound, lane, dtype, out, send_only, sm_limit)

    # -------------------------------------------------------------------------------------- experts in several slots

    @property
    def layers(self) -> int:
        """Maps of this group, 1 without a `Placement`."""
        return self._maps.layers

    @property
    def slots(self) -> int:
        """P: physical slots of all ranks; E without a `Placement`."""
        return self._maps.slots

    def expert_of_slot(self, layer: int = 0) -> np.ndarray:
        """[P] int32: the expert in each slot, -1 for none. Received ids are slots: of id_space "global" places in this
        array, of "local" places in `expert_of_slot()[own slots]`. InvalidUsage without a `Placement`."""
        return self._maps.read(layer)[0]

    def replace_map(self, slot_expert: Any, layer: int = 0, shares: Any = None) -> None:
        """Replaces a layer's map: slot_expert [P], shares [P] (of policy "shares"; default alike). All ranks at the
        same place in their calls, between the same routings: a rank whose routing was made by another map (on a CUDA
        device in its first dispatch) is BoundMismatch on all of them when it dispatches. A handle keeps the slots that
        it has. Where slots are stays, weights are the caller's to move. On a CUDA device
        it waits for the device, on which nothing may be captured meanwhile, and replays of captured graphs follow the
        new map."""
        self._maps.replace(slot_expert, layer, shares)

    @property
    def loads(self) -> np.ndarray:
        """[layers, E] float32: how often each expert is chosen by all ranks in a dispatch, as a decaying average over
        the layer's dispatches on all lanes. Read without waiting for a rank or a device: on a CUDA device the last
        dispatch of each lane is not in it yet, nor what the device has still to do. The same on ranks that have made
        the same steps. InvalidUsage unless the group counts (`Placement.count_loads`)."""
        return self._maps.loads()[0]

    @property
    def counted_dispatches(self) -> np.ndarray:
        """[layers] int64: dispatches that `loads` is made of."""
        return self._maps.loads()[1]

    # ------------------------------------------------------------------------------------------- its growth and end

    reserve = reserve

    def shrink(self, **changes: Any) -> Group:
        """A new group among the ranks that are still there, over fresh memory. Collective among them.

        They agree on who survives; ranks are renumbered (`comm_ranks` names them). Who has died, given the group up or
        closed it is left out at once, one that does not answer after the timeout (10 s at least). Keeps this group's
        settings with the default places of experts, but for `changes` (keywords of Group); where maps move and changes
        have no expert_map, survivors keep their slots, and begin with the maps in force by the latest version that any
        of them has (`moving.lost_experts`). This group stays to be closed. Raises Excluded on a rank that the others
        have given up, and CallMismatch where as many ranks create a group instead.
        """
        group = object.__new__(Group)
        pointer, settings, group.former = shrink(self, self._maps, changes)
        group._adopt(self.comm, pointer, settings, self.native.place)
        return group

    def abort(self) -> None:
        """Gives the group up: the peers' calls raise PeerAborted within moments. For a rank that cannot go on; a
        `with` block that an exception leaves does it. On a finished group it only tells survivors not to wait. From any
        thread: it ends a call that waits in another one."""
        if not self.closed:
            _native.check(_native.lib.twGroupAbort(self.pointer))

    def close(self) -> None:
        """Collective. Frees the handles and the window. Views of them that are alive keep this rank's memory, and show
        what was last there: see `Received`. Raises CallMismatch where another rank creates a group meanwhile, or closes
        another one; this group is closed all the same."""
        if self.closed:
            return
        for outputs in (self._outputs, *self._typed):
            outputs.clear()
        result = self.native.close()
        for kept in (self._blocks, self._collectives.requests, self.op_handles):
            kept.clear()
        _native.check(result)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(TokenwayError):  # the exception under way is the one to tell
            self.abort()  # peers that wait for this rank learn of it now
            self.close()

    def __del__(self) -> None:
        # Closing is collective, so garbage collection cannot do it.
        if hasattr(self, "native") and not self.closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return str(self.shape)

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def pointer(self) -> int:
        """The C library's twGroup_t."""
        return self.native.pointer

    @property
    def closed(self) -> bool:
        """Whether `close` is done."""
        return self.native.closed

    @property
    def error(self) -> ErrorRecord | None:
        """The record of the last error, None if there was none. Never blocks."""
        return self.native.record()

    def check(self) -> None:
        """Raises what the record tells: a sticky error every time, another one once, and only if no call has raised it.
        Never blocks: on a CUDA device it sees what steps have found that have run, so synchronise first. There, bad
        ids are InvalidArgument, whose record has token, k and value."""
        self.native.check()

    def window_bytes(self) -> WindowBytes:
        """What this group takes per rank."""
        return replace(window_of(self.nranks, self.settings), window=self._window_bytes)
