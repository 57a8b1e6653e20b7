"""DeepEP's API of 2.5, `EPBuffer`: the calls of `ElasticBuffer`, which may be of two parts, the second when an event is
waited for."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import tokenway as tw
from tokenway.compat.deep_ep import ranks
from tokenway.compat.deep_ep.config import ALLOCATION_ALIGNMENT, not_served
from tokenway.compat.deep_ep.elastic import Asked, Bounded, EPHandle, refusing
from tokenway.compat.deep_ep.events import used_here
from tokenway.compat.deep_ep.expanded import nothing


class EPBuffer(Bounded):
    """What DeepEP 2.5 calls an EP buffer: dispatches, whose bound all ranks know, and combines, of a process group.

    Making one is not collective and takes no memory: groups are made in the first call that needs them, shared with all
    buffers of the process group that have the same experts and top-k, for `num_max_tokens_per_rank` tokens of a rank,
    alike on all ranks, here or in a call.

    group: a process group of torch.distributed, or what `tokenway.connect` takes for one. num_bytes: kept as the
    attribute of that name; without it, what `get_buffer_size_hint` says of num_max_tokens_per_rank, hidden, num_topk
    and use_fp8_dispatch, of which the first two must be given then. lb_allocation_plan_or_num_bytes: 0, else
    Unsupported. num_cpu_timeout_secs: of `barrier` at a store; other seconds are those of `tokenway.connect`. The rest
    is kept and changes nothing: calls are always deterministic, a row's experts of one rank are always summed there,
    rounded once (as with allow_multiple_reduction), all ranks are one domain, and there are no QPs.

    Streams, steps and errors are those of `Buffer`; async_with_compute_stream is its async_finish. Errors:
    InvalidArgument, Unsupported."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        if not isinstance(lb_allocation_plan_or_num_bytes, int) or lb_allocation_plan_or_num_bytes:
            not_served("lb_allocation_plan_or_num_bytes", _REPLICAS)
        super().__init__(group, num_max_tokens_per_rank, explicitly_destroy, float(num_cpu_timeout_secs))
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes, self.num_lb_bytes = num_bytes, 0
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """A number for num_bytes, a multiple of 2 MiB, that grows with tokens and hidden: bfloat16 rows from each rank.
        Tokenway's windows follow what is sent, not this. Errors: InvalidArgument for sizes below 1."""
        for name, value in (("num_max_tokens_per_rank", num_max_tokens_per_rank), ("hidden", hidden)):
            if value < 1:
                raise tw.InvalidArgument.of(name, f"is {value}; it must be at least 1, or num_bytes be given")
        step = ALLOCATION_ALIGNMENT
        return -(-2 * hidden * num_max_tokens_per_rank * group.size() // step) * step

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Waits on the host for all ranks to come here, and for what their devices are doing. Collective."""
        self._meet()

    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Sends each token once to each rank of its experts, where it lies by source, or with do_expand once for each
        of its experts there.

        x: [T, H] bfloat16 (or float32, float16), or (values of any dtype, scales [T, S] of any dtype). topk_idx: [T, K]
        int64, -1 for none, which the handle shows and nothing reads after the call; topk_weights: [T, K] float32.
        num_experts is needed without a handle. num_max_tokens_per_rank: T at most, alike on all ranks (default: the
        constructor's). expert_alignment: a power of two to 256. do_cpu_sync: the host waits, in this call, for what
        comes, and outputs are as large as that (the default without a handle); else they are as large as can come, and
        nothing waits: a call can be captured, once one of this size was made. handle: of another dispatch, whose
        routing this one has, and whose num_experts, num_max_tokens_per_rank, expert_alignment and do_expand; x may be
        of another type, topk_weights are optional, the host does not wait, and topk_idx is None.
        use_tma_aligned_col_major_sf: scales by column, beginning at multiples of 16 bytes. do_zero_padding: with
        do_expand alone; what is between experts is zeros without it too. cumulative_local_expert_recv_stats: [L] int32,
        to which the rows of each expert are added, without a handle. num_sms: thread blocks of kernels at most, 0 for
        as many as Tokenway chooses. do_handle_copy: False.

        Returns (x in the form given, [R, H] by source, or [P, H] by expert, each expert's rows beginning at a multiple
        of the alignment, in both by source and its order; topk_idx [R, K] int64 of this rank's experts, or -1, None by
        expert; topk_weights [R, K], 0 where the id is -1, or [P], None if none were given; handle; event).
        defer_epilogue, with async_with_compute_stream: the event alone, of which `wait` returns the other four, once.
        Two steps of all ranks, with a handle one, all of it made here. Errors: as `Buffer.dispatch`."""
        asked = Asked(
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            do_cpu_sync,
            do_expand,
            use_tma_aligned_col_major_sf,
            do_handle_copy,
            num_sms,
            nothing,
        )
        deferred = defer_epilogue, async_with_compute_stream
        check = partial(_check_dispatch, asked, handle, topk_idx, do_zero_padding, deferred)
        asked = asked._replace(checks=check)
        events, stats = (previous_event, None), cumulative_local_expert_recv_stats
        *results, event = self._dispatch(
            x, topk_idx, topk_weights, stats, handle, asked, events, async_with_compute_stream
        )
        if not defer_epilogue:
            return *results, event

        def shown() -> tuple[Any, ...]:
            came, ids, weights, made = results
            used_here(*(came if isinstance(came, tuple) else (came,)), ids, weights, *made.plan.kept())
            return came, ids, weights, made

        event.register_hook_after_wait(shown)
        return event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Sums rows where they came from: over ranks, and by expert first over a rank's experts. x: [R, H] or [P, H]
        bfloat16 (or float32, float16), as received. topk_weights: [R, K], or [P] by expert, float32, which return too,
        each from the rank of its expert, on all ranks or on none. bias: [T, H] of x's dtype or float32, or two of them,
        from which sums start. num_sms: 0 for those of the dispatch.

        Returns (x [T, H], topk_weights [T, K] or None, event). defer_epilogue, with async_with_compute_stream: the
        event alone, of which `wait` returns the other two, once. With a bias, rows are summed there, on the stream that
        waits, and the bias may be written to until then; before it, no other call of this process group with as many
        experts and the same top-k can be made (InvalidUsage). A step of all ranks. Errors: as `Buffer.dispatch`."""
        check = partial(_check_deferred, defer_epilogue, async_with_compute_stream)
        biased = any(each is not None for each in (bias if isinstance(bias, (tuple, list)) else (bias,)))
        events, later = (previous_event, None), defer_epilogue and biased
        out, weights, event, receive = self._combine(
            x, handle, topk_weights, bias, num_sms, events, async_with_compute_stream, later, check
        )
        if not defer_epilogue:
            return out, weights, event
        streams = ranks.of(self.group, x.device)[0].streams

        def received() -> tuple[Tensor, Tensor | None]:
            if later:
                with streams.call(None, False):
                    receive()
            used_here(out, weights)
            return out, weights

        event.register_hook_after_wait(received)
        return event


def _check_deferred(deferred: bool, asynchronous: bool) -> None:
    """Raises InvalidArgument for a call of two parts that is not asynchronous."""
    if deferred and not asynchronous:
        told = "is True; async_with_compute_stream must be True then, as what is returned is an event"
        raise tw.InvalidArgument.of("defer_epilogue", told)


def _check_dispatch(
    asked: Asked, handle: EPHandle | None, topk_idx: Any, zero_padding: bool, deferred: tuple[bool, bool]
) -> None:
    """Raises InvalidArgument for what DeepEP refuses of a dispatch, beside its tensors."""
    _check_deferred(*deferred)
    if asked.copies:
        raise tw.InvalidArgument.of("do_handle_copy", "is True; it must be False: the handle shows topk_idx itself")
    if zero_padding and not asked.expand:
        raise tw.InvalidArgument.of("do_zero_padding", "is True; do_expand must be True then: rows by source have none")
    if handle is None:
        return
    if topk_idx is not None:
        raise tw.InvalidArgument.of("topk_idx", "is a tensor; it must be None with a handle, whose routing it is")
    if asked.waits:
        raise tw.InvalidArgument.of("do_cpu_sync", "is True; it must be None or False with a handle")
    if asked.expand != handle.do_expand:
        raise tw.InvalidArgument.of("do_expand", f"is {asked.expand}; it must be {handle.do_expand}, as of the handle")
    for name, given, wanted in (
        ("num_experts", asked.experts, handle.num_experts),
        ("num_max_tokens_per_rank", asked.bound, handle.num_max_tokens_per_rank),
        ("expert_alignment", asked.alignment, handle.expert_alignment),
    ):
        if given is not None and given != wanted:
            raise tw.InvalidArgument.of(name, f"is {given}; it must be None or {wanted}, as of the handle")


_REPLICAS = "a tokenway.Placement has replicas of experts, whose weights and gradients the caller moves"
for _name in ("lb_get_theoretical_num_sms", "lb_prefetch_weights", "lb_reduce_grads"):
    setattr(EPBuffer, _name, refusing(_name, _REPLICAS))
setattr(EPBuffer, "print_memory_usage", refusing("print_memory_usage", "Group.window_bytes tells it of a group"))  # noqa: B010
