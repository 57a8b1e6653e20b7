"""Groups: route, dispatch, combine."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_size_t, c_void_p
from dataclasses import replace
from functools import partial
from typing import Any

from tokenway import _header, _native, arguments, asking, callbacks, cuda, outputs, sentences, tensors, versions
from tokenway.collectives import Collectives
from tokenway.comm import Comm
from tokenway.counting import Counting
from tokenway.errors import ErrorRecord, InUse, InvalidArgument, InvalidUsage, TokenwayError
from tokenway.handle import Handle, Pending, Tensor
from tokenway.placement import Placed, Placement
from tokenway.settings import Payload, Settings, WindowBytes, make_config, telling, window_of
from tokenway.structs import Spare, Structs


class Group(Counting, Placed, Collectives, _native.Shared):
    """Ranks that exchange tokens: how big, which experts where, over which memory. Collective, long-lived.

    On a comm of CUDA devices, tensors are PyTorch's on the device of this rank, and route, dispatch, combine and the
    completion of a pending one enqueue their work on that device's current stream and return: they never wait for the
    device, and can be captured into a CUDA graph, whose replays read and write the memory of the tensors captured.
    What a step finds out while it runs is in `error`, and raised by `check`; a sticky error is raised by every later
    call too. With TOKENWAY_BLOCKING=1 each call waits and raises its own. Steps on one lane must be ordered: one
    stream, or streams that wait for each other. Memory that Tokenway allocates may be used on other streams as any
    tensor's of PyTorch; what it reads of the caller's on another stream than the tensor's own, the caller records.

    experts: E. top_k: K, 1..64; a group that gathers and reduces alone (`Collectives`) needs neither. hidden: H,
    elements of a token. max_tokens: B, tokens of a rank in one call. dtype: of tokens (default bfloat16). payloads:
    further tensors per token, name to Payload or (elements, dtype).
    combine_dtype: of rows on their way back, float32, bfloat16 or float16 (default: dtype if it is one of these, else
    bfloat16). combine_hidden: elements of those rows (default H). expert_map: where experts
    are, (rank[E], slot[E]); default contiguous. For experts in several slots, maps by layer and counting a `Placement`,
    or what it is made from: the expert in each of P slots, [P], or (rank[E, R], slot[E, R]) with -1 for none.
    lanes: exchanges in flight. timeout: seconds after which a late peer is an error
    (default 100); while the group is made, the comm's. In the main thread Ctrl-C ends a wait. id_dtype, id_space
    ("local": slots of this rank, "global": as sent) and invalid_id of received ids. sm_limit: on a CUDA device, thread
    blocks of a kernel, at most one on each SM (default 0: the backend chooses).
    mode: "low_latency" (layouts "rank_major" and "expert_major", sized by a bound) or "high_throughput" (layouts "flat"
    and "grouped", as large as what comes: `exchange_counts` before a dispatch). Of the latter alone:
    max_recv_tokens, rows that a rank may receive in a step (default N*B); overflow, what becomes of more, "refuse"
    (RecvOverflow) or "drop"; row_alignment, of which an expert's first row in "grouped" is a multiple, a power of two
    to 256 (default 1); lease_bytes, of the window, for rows that outlive their step (default 0: none): autograd keeps
    its rows there instead of in copies, and `exchange_counts(lease=True)` asks for it. On a CUDA device a dispatch
    waits until the host knows how much comes, and for nothing else; with max_recv_tokens given, or while a graph is
    captured, it does not: outputs then have that many rows, of which `Received.counts` are used, ids of others being
    invalid.

    All ranks must give the same values, but for sm_limit; a difference is an error that names the field and the ranks.
    A group is for one thread at a time, but for `abort` and `error`: while one is in a call, another's is InvalidUsage,
    tells the peers nothing and changes nothing. Give each thread a group of its own, or hold a lock around the calls.
    """

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
        lanes: int = 1,
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
        )
        pointer = c_void_p()
        base = comm.pointer
        with telling(lambda nothing: _native.lib.twGroupCreate(byref(pointer), base, nothing)):
            config, keep = make_config(settings)
            place = tensors.Host() if comm.device is None else cuda.Cuda(comm.device)
        _native.check(_native.lib.twGroupCreate(byref(pointer), base, byref(config)))
        del keep
        self._adopt(comm, pointer.value or 0, settings, place)

    def _adopt(self, comm: Comm, pointer: int, settings: Settings, place: Any) -> None:
        """Takes a group of the C library over: this is what __init__ and shrink have in common."""
        self.comm = comm
        self.device = comm.device  # the CUDA device of this rank, None on the CPU
        self._place: Any = place  # tensors.Host or cuda.Cuda
        self._told: ErrorRecord | None = None
        self._pointer: int | None = pointer
        self.settings = settings
        self.hidden = settings.hidden
        self.max_tokens = settings.max_tokens
        self.dtype = tensors.dtype_name(settings.dtype)
        self.combine_hidden = settings.hidden if settings.combine_hidden is None else settings.combine_hidden
        self.combine_dtype = settings.combine_dtype_name()
        self.id_dtype = tensors.dtype_name(settings.id_dtype)
        self.exact = settings.mode == "high_throughput"  # outputs are as large as what comes
        # ... which the host of a device has to learn first, unless they have a fixed size.
        self._sizes_outputs = self.exact and self.device is not None and settings.max_recv_tokens is None
        self._copies = 0
        self._payload_specs = settings.all_payloads()
        self._extra_names = [name for name in self._payload_specs if name != "tokens"]
        info = _header.GroupInfo()
        _native.check(_native.lib.twGroupInfo(pointer, byref(info)))
        self.rank: int = info.rank
        self.nranks: int = info.nranks
        self.max_recv_rows = min(settings.max_recv_tokens or 2**31, self.nranks * self.max_tokens)
        self.experts: int = self.nranks if settings.experts is None else settings.experts
        self.top_k: int = 1 if settings.top_k is None else settings.top_k
        self.num_local_experts: int = info.num_local_experts
        self.comm_ranks: list[int] = list(info.comm_ranks[: info.nranks])
        self._window_bytes: int = info.window_bytes
        size = c_size_t()
        _native.check(_native.lib.twHandleMemBytes(pointer, byref(size)))
        self.handle_bytes = size.value  # of memory for one handle's arrays
        self._finished_handles: list[tuple[int, Tensor, bool]] = []
        self._leased_forever: list[tuple[int, Tensor, bool]] = []
        # No reference to the group itself in what makes spares: counting references is to be enough for it to end.
        self._spare_blocks = Spare(partial(place.new_block, self.handle_bytes))
        self._views: dict[Any, Tensor] = {}
        self._shown: dict[Any, outputs.Shown] = {}
        self._torch_views = versions.Views(pointer, settings.lanes)
        self._keeper: outputs.Keeper | None = None  # what views of the window hold, once there are any
        self._requests: dict[int, tuple[Any, ...]] = {}  # what gathers and reduces under way read and write
        self.op_handles: dict[int, Handle] = {}  # of tokenway.ops: dispatched, not combined yet
        self.structs = Spare(partial(Structs, place, self._payload_specs, self.exact))

    # ------------------------------------------------------------------------------------------------- everyday use

    def route(
        self, ids: Tensor, weights: Tensor | None = None, *, layer: int = 0, memory: Tensor | None = None
    ) -> Handle:
        """Caches a routing. ids: [T, K] int32 or int64, -1 for "no expert", each id at most once per token;
        weights: [T, K] float32, or None for all 1. Both are copied. memory: a contiguous, writable uint8 tensor of
        `handle_bytes` for the handle's arrays, 64-byte aligned (default: a new one). layer: whose map turns the ids
        into slots, of a group with a `Placement`. Not collective.
        Errors: InvalidArgument names token, k and value. More than `max_tokens` tokens are refused by the handle's
        dispatch or exchange of counts: the peers wait there, and hear of it at once. On a CUDA device ids and weights
        are read, and ids checked, by the handle's first dispatch: they must not change before it in stream order, and
        `check` tells of bad ids, which act as -1."""
        self._free_finished()
        if memory is None:
            block = self._spare_blocks.take()
        else:
            block = self._place.block_of(memory)
            if block.nbytes < self.handle_bytes:
                raise InvalidArgument(f"memory has {block.nbytes} bytes; it must have {self.handle_bytes}")
        handle = Handle(self, block, reusable=memory is None and self._place.reusable)
        pointer = c_void_p()
        args = _native.fit("layer", layer), *self._routing_args(ids, weights)
        result = _native.lib.twHandleCreateForLayer(byref(pointer), self.pointer, *args, handle._base)
        if result:
            raise self._error(result, ids=ids, weights=weights)
        handle.pointer = pointer.value or 0
        if memory is not None:
            handle.share(memory)
        handle.adopt_routing(ids, weights)
        return handle

    @cuda.ranged("tokenway.dispatch")
    def dispatch(
        self,
        handle: Handle,
        tokens: Tensor,
        payloads: Mapping[str, Tensor] | None = None,
        *,
        layout: str | None = None,
        bound: int | None = None,
        lane: int | None = None,
        out: Tensor | Mapping[str, Tensor] | None = None,
        column_major: Collection[str] | None = None,
        count: bool = True,
        send_only: bool = False,
    ) -> Any:
        """Sends every token to the ranks of its experts; returns `Received`, or `Pending[Received]` with send_only.

        tokens: [T, H], rows may be strided. payloads: [T, elements] each. layout: "rank_major" (views of the window,
        no copy; the default) or "expert_major", in high throughput "flat" (views, no copy; the default) or "grouped".
        bound (not in high throughput): b, equal on all ranks, T <= b <= max_tokens (default max_tokens): outputs
        are sized by it. lane: which one to lease (default: the next free one). out: a tensor for tokens, or a mapping
        of Received's fields and payload names, to have them written there. column_major: names of payloads (scales, for
        example) that "grouped" returns by column, [elements, M], M being the rows rounded up to whole 16 bytes, with
        zeros beyond them: as grouped GEMMs read scales. count: whether `loads` counts it, on all ranks alike; not for
        further passes over tokens that were counted, as of multi-token prediction.
        What is returned is detached: autograd does not know of the exchange (`tokenway.autograd` has one it knows of),
        but of writes to `out`, which may be no leaf that requires gradients.
        A step of all ranks. Errors: InvalidArgument (peers get PeerRefused at once), InvalidUsage, PeerRefused,
        BoundMismatch, GroupFinished.
        """
        if self._finished_handles:
            self._free_finished()
        if self._sizes_outputs:
            self.size_outputs(handle)
        structs = self.structs.take()
        layout, b, given, sent, problem = asking.dispatch(
            self, structs, handle, tokens, payloads, layout, bound, lane, out, column_major, count, send_only
        )
        asked, wanted = structs.dispatch_at
        torch = self._torch_views.meet((tokens,))
        result = _native.lib.twDispatch(self.pointer, arguments.pointer_of(handle), asked, wanted)
        if result:
            values = {"bound": bound, "lane": lane, "layout": layout}
            extra = {f"payloads[{name!r}]": sent.get(name) for name in self._extra_names}
            error = self._error(result, problem, {"tokens": tokens, **extra}, values, handle=handle)
            if isinstance(handle, Handle) and not isinstance(error, InvalidUsage):
                handle.leased = arguments.truth(send_only) or self._place.learns_late  # as twDispatch documents
                handle._landing = None
            self._torch_views.after(out, error)
            raise error
        self._torch_views.after(out)
        if handle._shared is not None:
            handle.rewritten()
        handle.leased, handle.layout, handle.bound = True, layout, b
        if handle._unread is not None:
            handle.was_read()
        kept = (tokens, *sent.values(), *given.values()) if send_only else ()
        received = outputs.received(self, structs, handle, layout, b, given, torch)
        self.structs.append(structs)
        self._tell_interrupt()
        if send_only:
            return Pending(handle, received, kept, out)
        if handle._landed:
            handle.trim_leases()
        return received

    @cuda.ranged("tokenway.combine")
    def combine(
        self,
        handle: Handle,
        rows: Tensor,
        *,
        weighting: str = "none",
        layout: str | None = None,
        dtype: Any = None,
        out: Tensor | None = None,
        send_only: bool = False,
    ) -> Any:
        """Returns rows to their owners and sums them: [T, H], or `Pending` of it with send_only.

        rows: as dispatched, [N, b, H] or [L, N*b, H] (leading dimensions may be flattened), [R', H] or [P, H], float32,
        bfloat16 or float16. weighting: "none" (rows are weighted already) or "topk". layout: that of rows (default: the
        handle's last dispatch). dtype: of the result (default combine_dtype). out: [T, H] to write to.
        Sums are float32 over k, then over ranks, both ascending, rounded to combine_dtype in between: the same bits
        every time. The result is detached: autograd does not know of the exchange. Errors as `dispatch`; after a step
        that failed, the result is NaN.
        """
        given = out
        structs = self.structs.take()
        layout, out, problem = asking.combine(self, structs, handle, rows, weighting, layout, dtype, out, send_only)
        asked, wanted = structs.combine_at
        result = _native.lib.twCombine(self.pointer, arguments.pointer_of(handle), asked, wanted)
        if result:
            if given is not None and problem is None:  # found here, so that calls that are right do not pay for it
                problem = self._place.problem_of_output("out", given)
            values = {"layout": layout, "weighting": weighting}
            error = self._error(result, problem, {"rows": rows}, values, handle=handle, out=out)
            if isinstance(handle, Handle) and self._place.learns_late and isinstance(error, InvalidArgument):
                handle.leased = False  # as twCombine documents
            self._torch_views.after(given, error)
            raise error
        self._torch_views.after(given)
        self.structs.append(structs)
        if send_only:
            return Pending(handle, out, (rows, out), given, combining=True)
        handle.leased = False
        self._tell_interrupt()
        return out

    def shrink(self, **changes: Any) -> Group:
        """A new group among the ranks that are still there, over fresh memory. Collective among them.

        They agree on who survives; ranks are renumbered (`comm_ranks` names them). Who has died, given the group up or
        closed it is left out at once, one that does not answer after the timeout (10 s at least). Keeps this group's
        settings with the default places of experts, but for `changes` (keywords of Group). This group stays to be
        closed. Raises Excluded on a rank that the others have given up, and CallMismatch where as many ranks create a
        group instead.
        """
        survivors = c_void_p()
        base = self.pointer
        with telling(lambda nothing: _native.lib.twGroupShrink(base, nothing, byref(survivors))):
            settings = replace(self.settings, **({"expert_map": self._survivors_map()} | changes))
            config, keep = make_config(settings)
        _native.check(_native.lib.twGroupShrink(base, byref(config), byref(survivors)), base)
        del keep
        group = object.__new__(Group)
        group._adopt(self.comm, survivors.value or 0, settings, self._place)
        return group

    def abort(self) -> None:
        """Gives the group up: the peers' calls raise PeerAborted within moments. For a rank that cannot go on; a
        `with` block that an exception leaves does it. On a finished group it only tells survivors not to wait. From any
        thread: it ends a call that waits in another one."""
        if self._pointer is not None:
            _native.check(_native.lib.twGroupAbort(self._pointer))

    def close(self) -> None:
        """Collective. Frees the handles and the window. Views of them that are alive keep this rank's memory, and show
        what was last there: see `Received`. Raises CallMismatch where another rank creates a group meanwhile, or closes
        another one; this group is closed all the same."""
        if self._pointer is not None:
            self._views.clear()
            self._shown.clear()
            self._torch_views.clear()
            self._keeper = None
            result = _native.lib.twGroupDestroy(self._pointer)
            if result not in (_header.INTERRUPTED, _header.CALL_MISMATCH):  # else the group is gone all the same
                _native.check(result)
            self._pointer = None
            held = (self._finished_handles, self._leased_forever, self._requests, self._spare_blocks, self.op_handles)
            for each in held:
                each.clear()
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
        if getattr(self, "_pointer", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return (
            f"Group(rank={self.rank}, nranks={self.nranks}, experts={self.experts}, top_k={self.top_k}, "
            f"hidden={self.hidden}, max_tokens={self.max_tokens})"
        )

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def pointer(self) -> int:
        """The C library's twGroup_t."""
        if self._pointer is None:
            raise InvalidUsage("the group is closed")
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether `close` is done."""
        return self._pointer is None

    @property
    def error(self) -> ErrorRecord | None:
        """The record of the last error, None if there was none. Never blocks."""
        record = _native.read_record(self.pointer)
        return None if record.result == "twSuccess" else record

    def check(self) -> None:
        """Raises what the record tells: a sticky error every time, another one once, and only if no call has raised it.
        Never blocks: on a CUDA device it sees what steps have found that have run, so synchronise first. There, bad
        ids are InvalidArgument, whose record has token, k and value."""
        error = self.untold()
        if error is not None:
            raise error

    def untold(self) -> TokenwayError | None:
        """What `check` would raise."""
        record = self.error
        if record is None or not (record.sticky or record != self._told):
            return None
        self._told = record
        return _native.error_of_record(record)

    def window_bytes(self) -> WindowBytes:
        """What this group takes per rank."""
        found = window_of(self.nranks, self.settings)
        return replace(found, window=self._window_bytes or found.window)

    # ---------------------------------------------------------------------------------------------------- internals

    def _free_finished(self) -> None:
        while self._finished_handles:
            try:
                pointer, block, reusable = self._finished_handles.pop()
            except IndexError:  # another thread was faster
                return
            try:
                _native.check(_native.lib.twHandleDestroy(pointer))
            except InUse:
                self._finished_handles.append((pointer, block, reusable))
                raise
            # A new block costs page faults, more than the rest of a route. A block that the caller still views is his.
            if reusable and not tensors.is_viewed(block):
                self._spare_blocks.append(block)

    def _routing_args(self, ids: Tensor, weights: Tensor | None) -> tuple[Any, Any]:
        describe = self._place.describe
        described = tensors.tensor_of(ids, describe), None if weights is None else tensors.tensor_of(weights, describe)
        if described[1] is not None and not described[1].data and not described[1].ndim:  # which to C are none: all 1
            seen = self._place.unlike(weights) or "a tensor that cannot be read, as in a transform of torch.func"
            raise InvalidArgument(f"weights is {seen}")
        return tuple(None if t is None else byref(t) for t in described)  # type: ignore[return-value]

    def refuse_dispatch(self) -> None:
        """Tells peers, which wait in a dispatch, that this rank cannot make the call; for callers that raise next."""
        if self._pointer is not None:
            structs = self.structs.take()
            structs.call(0, None, False, True, self._place.stream())
            _native.lib.twDispatch(self._pointer, None, *structs.dispatch_at)
            self._torch_views.after()

    def _error(
        self, result: int, problem: TokenwayError | None = None, inputs: Any = None, values: Any = None, **others: Any
    ) -> TokenwayError:
        """The exception of a call that C refused: with a problem that C cannot see, or by an argument that was no
        tensor for C, what C could not say. inputs: by name, the tensors that C has by number; values: see
        sentences.of_call."""
        error = _native.error_of(result, self._pointer)
        self._told = error.record or self._told
        self._tell_interrupt(error)
        if not isinstance(error, InvalidArgument):
            return error
        given = (inputs or {}) | others
        seen = [f"{name} is {what}" for name, x in given.items() if (what := arguments.unlike(self._place, name, x))]
        if problem is not None:
            if problem.__cause__ is not None:
                problem.args = ("; ".join([str(problem), *seen]),)
            return problem
        error.args = ("; ".join([sentences.of_call(str(error), inputs or {}, values or {}), *seen]),)
        if seen:
            error.__cause__ = arguments.cause_of(self._place, given) or error.__cause__
        return error

    _tell_interrupt = staticmethod(callbacks.tell)  # after each call

    def _stream_of(self, handle: Any) -> int:
        """The stream of a call on a CUDA device; its handle, if it is one of this group, learns of it."""
        ours = isinstance(handle, Handle) and handle.group is self
        return handle.follow_stream() if ours else self._place.stream()

    def _sending_stream(self) -> Any:
        """The current stream, for who completes a call on another; None on the CPU."""
        return None if self.device is None else self._place.current_stream()

    @cuda.ranged("tokenway.complete")
    def _complete(self, handle: Handle, kept: tuple[Any, ...], sent_on: Any) -> None:
        """Completes a pending call, which uses the tensors `kept` and was begun on a stream."""
        stream = None
        if self.device is not None:
            self._place.follow(sent_on, kept)
            stream = self._stream_of(handle)
        result = _native.lib.twComplete(self.pointer, handle.pointer, stream)
        error = self._error(result) if result else None
        if handle._landed and not isinstance(error, InUse):
            handle.trim_leases()
        if error is not None:
            raise error
        self._tell_interrupt()
