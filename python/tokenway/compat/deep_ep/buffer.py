"""DeepEP's `Buffer`: what frameworks call, over Tokenway's groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

import tokenway as tw
from tokenway.compat.deep_ep import ranks
from tokenway.compat.deep_ep.config import Config, low_latency_size_hint, not_served
from tokenway.compat.deep_ep.events import EventHandle, EventOverlap
from tokenway.compat.deep_ep.handles import LowLatencyHandle, NormalHandle, routing_of, sent_of
from tokenway.compat.deep_ep.normal import Normal, Rows
from tokenway.integrations import groups
from tokenway.integrations.low_latency import LowLatency, Once
from tokenway.pytorch.gradients import refuse_combine, telling


class Buffer:
    """What DeepEP calls a buffer: the calls of a process group, in normal and in low-latency mode.

    Making one is not collective and takes no memory. All Buffers of a process group share a comm, and a group for each
    mode and each pair of experts and top_k, which are made in the first call that needs them, on the device of its
    tensors: collective, as that call is. In normal mode a group has room for 256 tokens of a rank at first, or for as
    many as the environment variable TOKENWAY_DEEP_EP_MAX_TOKENS says, alike on all ranks; where a rank has more, the
    dispatch learns of it, and all ranks make their group larger, by doubling. In low-latency mode the argument
    num_max_dispatch_tokens_per_rank, alike on all ranks, says how much room is needed.

    group: a process group of torch.distributed, or what `tokenway.connect` takes for one. num_nvl_bytes,
    num_rdma_bytes, num_qps_per_rank, allow_...: of DeepEP's transport; kept, and without effect. low_latency_mode:
    likewise, as both modes are always there. explicitly_destroy: `destroy` may be called. enable_shrink, comm (of
    MPI): Unsupported.

    With CUDA tensors, calls are enqueued: on the current stream, or with async_finish on a stream of calls, which waits
    for `previous_event`, or without one for the current stream; then the event that is returned is to be waited for.
    All calls of a process group are ordered among themselves. In normal mode a dispatch without `handle` waits on the
    host for the number of rows, unless it is captured, which takes num_worst_tokens. Errors are Tokenway's, and say
    what is wrong. What only a device finds is not raised where no host waits: rows are left out, or results are NaN,
    and `check` of the groups tells it once the device has come there (docs/FRAMEWORKS.md, «Errors»)."""

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ):
        if group is None:
            told = "give a process group of torch.distributed" if comm is None else "an MPI communicator will not do"
            raise tw.Unsupported(f"group is None: {told}; tokenway.connect(allgather=...) joins ranks that have none")
        if enable_shrink:
            not_served("enable_shrink", "a group that has lost ranks shrinks instead (tokenway.Group.shrink)")
        self.group = group
        self.rank: int = group.rank()
        self.group_size: int = group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._found: dict[torch.device, tuple[ranks.Ranks, groups.Peers]] = {}

    def _ranks(self, device: torch.device) -> tuple[ranks.Ranks, groups.Peers]:
        """`ranks.of`, which is the same as long as the process group lives, and that this object holds."""
        found = self._found.get(device)
        if found is None:
            found = self._found[device] = ranks.of(self.group, device)
        return found

    def destroy(self) -> None:
        """Collective: closes the groups of all Buffers of this process group, with the handles of their dispatches.
        What is needed again is made anew."""
        assert self.explicitly_destroy, "explicitly_destroy must be set to destroy a Buffer"
        ranks.close(self.group)

    # ----------------------------------------------------------------------------------------------------- settings

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether fp8 rows can be sent: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Thread blocks of a kernel in normal mode at most, for calls without a Config of their own; an even number."""
        assert new_num_sms % 2 == 0, f"the number of SMs must be even; it is {new_num_sms}"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Of a dispatch: with `num_sms` as it was set."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Of a combine: with `num_sms` as it was set."""
        return Config(Buffer.num_sms)

    get_low_latency_rdma_size_hint = staticmethod(low_latency_size_hint)

    @staticmethod
    def capture() -> EventOverlap:
        """What the current stream holds at this moment, as an event."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """The torch.cuda.Stream that asynchronous calls on the current device run on; Unsupported without CUDA."""
        if not torch.cuda.is_available():
            not_served("get_comm_stream", "calls on the CPU have no stream")
        return ranks.of(self.group, torch.device("cuda", torch.cuda.current_device()))[0].streams.own

    def get_local_buffer_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Unsupported."""
        not_served("get_local_buffer_tensor", "the layout rank_major of a tokenway.Group shows a window")

    # -------------------------------------------------------------------------------------------------- normal mode

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Where tokens go: ([N] int32 tokens to each rank, None, [E] int32 tokens to each expert, [T, N] bool, event).
        topk_idx: [T, K] int64, -1 for none. Not collective; nothing waits. Errors: InvalidArgument."""
        size = self.group_size
        if num_experts % size or topk_idx.dim() != 2:
            told = f"is {num_experts}; it must be a multiple of the {size} ranks, and topk_idx [T, K]"
            raise tw.InvalidArgument.of("num_experts", told)
        here, _ = self._ranks(topk_idx.device)
        with here.streams.call(previous_event, async_finish, (topk_idx,)) as call:
            chosen = topk_idx.new_zeros(len(topk_idx), num_experts + 1, dtype=torch.int32)
            # What is no expert goes behind them: -1 by the remainder.
            places = topk_idx.long().clamp(-1, num_experts).remainder_(num_experts + 1)
            chosen = chosen.scatter_(1, places, 1)[:, :num_experts]
            per_expert = chosen.sum(0, dtype=torch.int32)
            in_rank = chosen.view(len(chosen), size, num_experts // size).any(2)
            per_rank = in_rank.sum(0, dtype=torch.int32)
            call.gives(per_rank, per_expert, in_rank)
        return per_rank, None, per_expert, in_rank, call.event

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        """Sends each token once to each rank of its experts.

        x: [T, H] bfloat16 (or float32, float16), or (values [T, H] fp8 or of any dtype, scales [T, S] of any dtype).
        topk_idx: [T, K] int64, -1 for none; topk_weights: [T, K] float32. num_tokens_per_expert: [E] int32, of which
        the number of experts is taken. num_worst_tokens: rows that outputs have, where they shall not depend on what
        comes: at least as many as come, else RecvOverflow on all ranks. handle: of another dispatch, whose routing this
        one has; x may be of another type then. Without topk_idx and handle, tokens go by is_token_in_rank.

        Returns (x in the form given, [R, H], by source and its order; topk_idx [R, K] int64 of this rank's experts, or
        -1; topk_weights [R, K] float32, 0 where it is -1; rows of each expert of this rank, each rounded up to
        expert_alignment, [] with num_worst_tokens; handle; event). With `handle`, None but for x and event.
        A step of all ranks. Errors: InvalidArgument, of which peers get PeerRefused; the next call is as ever."""
        rows = Rows.of(x)
        sms = (config or self.get_dispatch_config(self.group_size)).num_sms
        here, peers = self._ranks(rows.values.device)
        inputs = rows.values, rows.scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert
        with here.streams.call(previous_event, async_finish, inputs) as call:
            if handle is not None:
                values, scales, _, _ = routing_of(handle).exchange.send(routing_of(handle), rows, sms)
                call.gives(values, scales)
                found: tuple[Any, ...] = (None, None, None, None)
            else:
                by_rank = topk_idx is None
                exchange = self._normal(here, peers, topk_idx, num_tokens_per_expert, is_token_in_rank)
                size = self.group_size
                choices = partial(_chosen, topk_idx, is_token_in_rank, num_tokens_per_expert, size)
                routing = exchange.route(rows, choices, topk_weights, num_worst_tokens, sms)
                counts = routing.experts
                if by_rank and not num_worst_tokens:  # before rows are sent: whoever refuses that has made this step
                    counts = exchange.sums(num_tokens_per_expert)
                values, scales, local_ids, weights = exchange.send(routing, rows, sms, first=True)
                call.gives(values, scales, local_ids, weights, routing.counts)
                padded = [] if num_worst_tokens else [-(-n // expert_alignment) * expert_alignment for n in counts]
                made = NormalHandle(routing, self.rank, is_token_in_rank)
                found = (None, None, padded, made) if by_rank else (local_ids, weights, padded, made)
        return rows.like(values, scales), *found, call.event

    def _normal(self, here: ranks.Ranks, peers: groups.Peers, ids: Any, per_expert: Any, token_in_rank: Any) -> Normal:
        """The exchange of a routing. Errors: InvalidArgument."""
        if ids is None:
            if token_in_rank is None or per_expert is None:
                told = "is None, and so is handle; then is_token_in_rank and num_tokens_per_expert must be given"
                raise tw.InvalidArgument.of("topk_idx", told)
            return here.normal(peers, self.group_size, self.group_size)
        if per_expert is None:
            told = "is None; it must be [E], of which the number of experts is taken"
            raise tw.InvalidArgument.of("num_tokens_per_expert", told)
        return here.normal(peers, len(per_expert), ids.shape[-1])

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums rows over ranks, where they came from. x: [R, H] bfloat16 (or float32, float16), as received.
        topk_weights: [R, K] float32, which are summed likewise. bias: [T, H] of x's dtype or float32, or two of them,
        from which sums start. Returns (x [T, H], topk_weights [T, K] or None, event). A step of all ranks, two with
        topk_weights: on all ranks or on none. Errors: as `dispatch`, but that on a CUDA device no host waits here."""
        routing = routing_of(handle)
        sms = (config or self.get_combine_config(self.group_size)).num_sms
        here, _ = self._ranks(x.device)
        inputs = x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,))
        with here.streams.call(previous_event, async_finish, inputs) as call:
            out, weights = routing.exchange.gather(routing, x, topk_weights, bias, sms)
            call.gives(out, weights)
        return out, weights, call.event

    def internode_dispatch(self, x: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As `dispatch`, which goes between hosts as within one."""
        return self.dispatch(x, *args, **kwargs)

    def internode_combine(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As `combine`, which goes between hosts as within one."""
        return self.combine(x, *args, **kwargs)

    # --------------------------------------------------------------------------------------------- low-latency mode

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing is left behind that would have to be cleaned."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **others: Any,
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Sends each token to each of its experts. x: [T, H] bfloat16; topk_idx: [T, K] int64, -1 for none. b =
        num_max_dispatch_tokens_per_rank: T at most, alike on all ranks. use_fp8: rows are quantised before, with a
        float32 scale for 128 elements; round_scale: powers of two; use_ue8m0: these packed, four to an int32.
        cumulative_local_expert_recv_stats: [L] int32, to which the counts are added.

        Returns (rows [L, N * b, H], with fp8 (rows, scales [L, N * b, H / 128], or H / 512 packed, by column); counts
        [L] int32; handle; event; hook, which receives, if it was asked for). Rows beyond the counts hold anything.
        What is returned is the caller's own. Nothing waits, and it can be captured, once a call of this size was made.
        With return_recv_hook the call runs on the current stream, and so does what the hook does, from whatever stream
        it is called, which waits for that then; two calls may be under way. A step of all ranks. Errors: as
        `dispatch`, but that on a CUDA device no host waits here: those of a device are told by `check` alone."""
        here, peers = self._ranks(x.device)
        exchange = self._low_latency(here, peers, num_experts, topk_idx.shape[-1])
        with telling(partial(exchange.refuse, num_max_dispatch_tokens_per_rank)):
            _leave_out(dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats, **others)
        inputs = x, topk_idx, cumulative_local_expert_recv_stats
        with here.streams.call(None, async_finish and not return_recv_hook, inputs) as call:
            settings = use_fp8, round_scale, use_ue8m0, return_recv_hook
            sent, rows, scales, receive = exchange.dispatch(x, topk_idx, num_max_dispatch_tokens_per_rank, *settings)
            call.gives(rows, scales, sent.counts, sent.told)
            receive = Once(receive, partial(_count, sent, cumulative_local_expert_recv_stats))
            if not return_recv_hook:
                receive()
        hook = partial(_receive, here, call.stream, receive) if return_recv_hook else None
        handle = LowLatencyHandle(sent, x.shape[1], num_experts)
        return (rows, scales) if use_fp8 else rows, sent.counts, handle, call.event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Returns rows, which are weighted where they came from and summed. x: [L, N * b, H] bfloat16; topk_idx: that
        of the dispatch; topk_weights: [T, K] float32. zero_copy: rows are those in the tensor that
        `get_next_low_latency_combine_buffer` has returned. Returns ([T, H] bfloat16, or `out`; event; hook, which
        receives, if it was asked for). A dispatch may be combined more than once. Streams, steps and errors as
        `low_latency_dispatch`."""
        with telling(lambda: refuse_combine(sent_of(handle).handle, sent_of(handle).view)):
            if use_logfmt:
                not_served("use_logfmt", "rows return as bfloat16")
            _leave_out(combine_wait_recv_cost_stats=combine_wait_recv_cost_stats, **others)
        sent = sent_of(handle)
        if zero_copy and sent.buffer is not None:
            x = sent.buffer
        here, _ = self._ranks(x.device)
        with here.streams.call(None, async_finish and not return_recv_hook, (x, topk_weights, out)) as call:
            combined, receive = sent.exchange.combine(sent, x, topk_weights, out, return_recv_hook)
            call.gives(combined)
        hook = partial(_receive, here, call.stream, receive) if return_recv_hook else None
        return combined, call.event, hook

    def _low_latency(self, here: ranks.Ranks, peers: groups.Peers, experts: int, top_k: int) -> LowLatency:
        """The exchange of a dispatch."""
        return here.low_latency(peers, experts, top_k)

    def get_next_low_latency_combine_buffer(self, handle: Any) -> Tensor:
        """[L, N * b, H] bfloat16, for the rows of a combine with zero_copy: a tensor like any other, of which Tokenway
        makes no copy either."""
        sent = sent_of(handle)
        if sent.buffer is None:
            sent.buffer = torch.empty(sent.shape, dtype=torch.bfloat16, device=sent.device)
        return sent.buffer

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Unsupported, but to unmask a rank, as none is masked."""
        if mask:
            not_served("low_latency_update_mask_buffer", "a group that has lost ranks shrinks (tokenway.Group.shrink)")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """[N] int32 of zeros: no rank is masked."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """No rank is masked."""


def _leave_out(**given: Any) -> None:
    """Raises Unsupported for arguments that are not served, unless they are None or False."""
    for name, value in given.items():
        if value is not None and value is not False:
            not_served(name, "leave it out")


def _chosen(ids: Any, token_in_rank: Any, per_expert: Any, size: int) -> Any:
    """[T, K]: the ids of a dispatch, or where these are None from [T, N] bool the ranks that a token goes to, as
    experts, -1 for none. Errors: InvalidArgument."""
    if ids is not None:
        return ids
    if not isinstance(token_in_rank, Tensor) or token_in_rank.dim() != 2 or token_in_rank.dtype != torch.bool:
        raise tw.InvalidArgument.of("is_token_in_rank", f"must be a tensor of bool, [T, {size}]")
    if not isinstance(per_expert, Tensor) or per_expert.dim() != 1 or len(per_expert) % size:
        raise tw.InvalidArgument.of("num_tokens_per_expert", f"must be a tensor [E], E being a multiple of {size}")
    numbers = torch.arange(token_in_rank.shape[1], device=token_in_rank.device)
    return torch.where(token_in_rank, numbers, -1)


def _count(sent: Any, stats: Tensor | None) -> None:
    if stats is not None:
        stats += sent.counts


def _receive(here: ranks.Ranks, stream: Any, receive: Callable[[], None]) -> None:
    """A hook. stream: on which its call was made."""
    with here.streams.on(stream), here.streams.call(None, False):
        receive()
