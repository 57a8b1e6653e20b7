"""DeepEP's second API, `ElasticBuffer`, over Tokenway's groups; and what `EPBuffer`, in `ep`, has in common with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

import tokenway as tw
from tokenway.compat.deep_ep import ranks
from tokenway.compat.deep_ep.config import not_served
from tokenway.compat.deep_ep.events import EventHandle, EventOverlap, handle_of
from tokenway.compat.deep_ep.expanded import NUMBER, WEIGHTS, Expanded, Plan, nothing
from tokenway.compat.deep_ep.normal import SCALES, Rows, refuse_dispatch
from tokenway.integrations import groups
from tokenway.pytorch.gradients import telling


class EPHandle:
    """Of a dispatch: what `combine`, and dispatches by the same routing, take. N ranks, L experts of this rank; R rows
    that come by source, or as many as can come where the host did not wait.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms, topk_idx: as they were given.
    num_recv_tokens: R. num_expanded_tokens: rows by expert, as they are or would be. num_recv_tokens_per_expert_list:
    rows of each expert, rounded up to the alignment; [] where the host did not wait."""

    def __init__(self, plan: Plan, exchange: Expanded, topk_idx: Tensor, num_sms: int):
        self.plan, self.exchange = plan, exchange
        self.do_expand, self.expert_alignment = plan.expand, plan.alignment
        self.num_experts, self.num_max_tokens_per_rank = exchange.experts, plan.bound
        self.num_sms, self.topk_idx = num_sms, topk_idx
        self.num_recv_tokens = plan.tokens
        self.num_expanded_tokens = plan.size if plan.expand else exchange.expanded(plan)
        self.num_recv_tokens_per_expert_list = [_up(count, plan.alignment) for count in plan.experts or []]
        self._metadata: Tensor | None = None

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """[L] int32: rows of each expert, on the device."""
        plan = self.plan
        if plan.expand:
            return plan.counts.clone()
        local = self.exchange.group.num_local_experts
        places = torch.where(plan.ids < 0, local, plan.ids).view(-1)
        counts = torch.zeros(local + 1, dtype=torch.int32, device=plan.ids.device)
        return counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))[:local]

    @property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """[L] int32, on the device: by source, running sums of the experts' rows, each rounded up to the alignment; by
        expert, where each expert's rows end, of which those of the next begin at the next multiple of it."""
        if self.plan.expand:
            return self.plan.offsets[:-1] + self.plan.counts
        counts = self.num_unaligned_recv_tokens_per_expert
        return (_up(counts, self.expert_alignment)).cumsum(0, dtype=torch.int32)

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """[N] int32, on the device: running sums of the tokens from each rank, each counted once."""
        size = self.exchange.group.nranks
        if not self.plan.expand:
            return self.plan.counts.cumsum(0, dtype=torch.int32)
        sources = self._by_source()
        sources = torch.where(sources < 0, size, sources // self.num_max_tokens_per_rank)
        counts = torch.zeros(size + 1, dtype=torch.int32, device=sources.device)
        counts.scatter_add_(0, sources, torch.ones_like(sources, dtype=torch.int32))
        return counts[:size].cumsum(0, dtype=torch.int32)

    @property
    def recv_src_metadata(self) -> Tensor:
        """[R, K + 2] int32: of each row by source, its number, source * num_max_tokens_per_rank + token; -1; and by
        expert, where its K rows are, -1 for none. Rows beyond those that come hold -1."""
        if self._metadata is None:
            plan, top_k = self.plan, self.exchange.top_k
            if plan.expand:
                numbers = self._by_source()
            else:
                numbers = plan.numbers.view(-1)
                come = torch.arange(len(numbers), device=numbers.device) < plan.counts.sum()
                numbers = numbers.masked_fill(~come, -1)
            whole = torch.full((len(numbers), top_k + 2), -1, dtype=torch.int32, device=numbers.device)
            whole[:, 0] = numbers
            if plan.expand:
                slots = torch.full((plan.tokens * top_k + 1,), -1, dtype=torch.int32, device=numbers.device)
                places = torch.where(plan.origins < 0, plan.tokens * top_k, plan.origins)
                slots.scatter_(0, places, torch.arange(len(places), dtype=torch.int32, device=numbers.device))
                whole[:, 2:] = slots[:-1].view(-1, top_k)
            self._metadata = whole
        return self._metadata

    @recv_src_metadata.setter
    def recv_src_metadata(self, given: Tensor) -> None:
        self._metadata = given

    def _by_source(self) -> Tensor:
        """[R] int64: the numbers of rows by source, from those by expert; -1 where none comes."""
        plan = self.plan
        rows = torch.where(plan.origins < 0, plan.tokens, plan.origins // self.exchange.top_k)
        found = torch.full((plan.tokens + 1,), -1, dtype=torch.int64, device=rows.device)
        return found.scatter_(0, rows, plan.numbers.view(-1)[: len(rows)].long())[:-1]


class Asked(NamedTuple):
    """Of a dispatch. columns: scales by column; copies: the handle has a copy of topk_idx; checks: raises
    InvalidArgument for what else is wrong of it, before anything is sent."""

    experts: int | None
    bound: int | None
    alignment: int | None
    waits: bool | None
    expand: bool
    columns: bool
    copies: bool
    sms: int
    checks: Callable[[], None]


class Bounded:
    """What `ElasticBuffer` and `EPBuffer` have in common: dispatches, whose bound all ranks know, and combines, of a
    process group. Groups are those of `Buffer`, made in the first call that needs them."""

    def __init__(self, group: Any, num_max_tokens_per_rank: int, explicitly_destroy: bool, patience: float):
        self.group = group
        self.rank_idx = self.scaleup_rank_idx = self.rank = group.rank()
        self.num_ranks = self.num_scaleup_ranks = self.num_nvlink_ranks = self.group_size = group.size()
        self.num_scaleout_ranks, self.scaleout_rank_idx, self.num_rdma_ranks = 1, 0, 1
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self._patience = patience  # seconds, of barriers at a store

    def destroy(self) -> None:
        """As `Buffer.destroy`."""
        assert self.explicitly_destroy, f"explicitly_destroy must be set to destroy an {type(self).__name__}"
        ranks.close(self.group)

    @staticmethod
    def capture() -> EventHandle:
        """What the current stream holds at this moment."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """As `Buffer.get_comm_stream`."""
        if not torch.cuda.is_available():
            not_served("get_comm_stream", "calls on the CPU have no stream")
        return ranks.of(self.group, torch.device("cuda", torch.cuda.current_device()))[0].streams.own

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(1, N): all ranks are one domain."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, N): all ranks are one domain."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """0, for `num_sms`: as many as Tokenway chooses."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: Tokenway has none."""
        return 0

    def _meet(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        groups.barrier(self.group, self._patience)

    def _dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        stats: Tensor | None,
        handle: EPHandle | None,
        asked: Asked,
        events: tuple[Any, Any],
        asynchronous: bool,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """As `ElasticBuffer.dispatch`. stats: counts of experts' rows, to be added to. events: before the call, and
        before what follows its kernels."""
        given = x if isinstance(x, (tuple, list)) else (x,)
        here, peers = ranks.of(self.group, given[0].device)
        inputs = *given, topk_idx, topk_weights, stats
        if handle is not None:
            plan = checked(handle).plan
            inputs += plan.ids, plan.origins, plan.counts
        with here.streams.call(events[0], asynchronous, inputs) as call:
            _wait(events[1])
            if handle is None:
                if not isinstance(topk_idx, Tensor) or topk_idx.dim() != 2 or asked.experts is None:
                    raise tw.InvalidArgument.of("topk_idx", "[T, K] and num_experts must be given, or a handle")
                bound = asked.bound or self.num_max_tokens_per_rank
                plan = Plan(None, asked.expand, bound, asked.alignment or 1, asked.waits is None or asked.waits)
                exchange = here.expanded(peers, asked.experts, topk_idx.shape[-1])
                with telling(partial(exchange.refuse, plan)):
                    asked.checks()
                rows = Rows.of(x, **{NUMBER: self._numbers(bound, given[0])})
                exchange.route(rows, topk_idx, topk_weights, plan, asked.sms)
                found = exchange.send(plan, rows, asked.sms, asked.columns, True)
                ids, weights = found.get("ids"), found["weights"]
                if ids is not None:
                    weights.masked_fill_(ids < 0, 0)
                handle = EPHandle(plan, exchange, topk_idx.clone() if asked.copies else topk_idx, asked.sms)
                if stats is not None:
                    stats += handle.num_unaligned_recv_tokens_per_expert
            else:
                with telling(lambda: refuse_dispatch(plan.handle.group, plan.handle, plan.layout)):
                    asked.checks()
                rows = Rows.of(x, **({} if topk_weights is None else {WEIGHTS: topk_weights}))
                found = handle.exchange.send(plan, rows, asked.sms, asked.columns, False)
                ids = None if plan.ids is None else plan.ids.clone()
                weights = None if topk_weights is None else _weights(plan, found[WEIGHTS])
            scales = found.get(SCALES)
            if scales is not None and asked.columns:
                scales = scales.t()[: plan.size]
            call.gives(found["tokens"], scales, ids, weights, handle.topk_idx)
            call.gives(plan.counts, plan.numbers, plan.offsets, plan.origins, plan.ids)
        return rows.like(found["tokens"], scales), ids, None if topk_weights is None else weights, handle, call.event

    def _combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None,
        bias: Any,
        sms: int,
        events: tuple[Any, Any],
        asynchronous: bool,
        later: bool = False,
        checks: Callable[[], None] = nothing,
    ) -> tuple[Tensor, Tensor | None, EventOverlap, Callable[[], None]]:
        """As `ElasticBuffer.combine`, and what receives its results, which is done already, unless `later`."""
        exchange, plan = checked(handle).exchange, handle.plan
        here, _ = ranks.of(self.group, x.device)
        inputs = x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,))
        with here.streams.call(events[0], asynchronous, inputs) as call:
            _wait(events[1])
            sms = sms or handle.num_sms
            out, weights, receive = exchange.gather(plan, x, topk_weights, bias, sms, later, checks)
            call.gives(out, weights)
        return out, weights, call.event, receive

    def _numbers(self, bound: int, values: Tensor) -> Tensor:
        """[T, 1] int32: of this rank's tokens among those of all ranks."""
        first, count = self.rank_idx * bound, values.shape[0] if values.dim() else 0
        return torch.arange(first, first + count, dtype=torch.int32, device=values.device).view(-1, 1)


class ElasticBuffer(Bounded):
    """What DeepEP 2 calls a buffer: dispatches, whose bound all ranks know, and combines, of a process group.

    Making one is not collective and takes no memory: groups are made as those of `Buffer`, with which it shares them,
    for `num_max_tokens_per_rank` tokens of a rank, alike on all ranks, here or in a call. num_topk, hidden, bytes, QPs,
    modes and timeouts are kept or dropped, and change nothing. All ranks are one domain (`num_scaleup_ranks`).

    Streams, steps and errors are those of `Buffer`. `deterministic` is always so. Sums are float32 over a rank's
    experts, rounded once, and over ranks ascending."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        super().__init__(group, num_max_tokens_per_rank, explicitly_destroy, float(num_cpu_timeout_secs))
        self.num_bytes = num_bytes or 0
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, *_: Any, **__: Any
    ) -> int:
        """A number for num_bytes: of bfloat16 rows, from each rank. Tokenway's windows follow what is sent."""
        return 2 * hidden * num_max_tokens_per_rank * group.size()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
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
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to each rank of its experts, where it lies by source, or with do_expand once for each
        of its experts there.

        x: [T, H] bfloat16 (or float32, float16), or (values of any dtype, scales [T, S] of any dtype). topk_idx: [T, K]
        int64, -1 for none; topk_weights: [T, K] float32. num_experts is needed without a handle.
        num_max_tokens_per_rank: T at most, alike on all ranks (default: the constructor's). expert_alignment: a power
        of two to 256. do_cpu_sync: the host waits for what comes, and outputs are as large as that (the default); else
        they are as large as can come, and nothing waits: a call can be captured, once one of this size was made.
        handle: of another dispatch, whose routing this one has; x may be of another type, topk_weights others.
        use_tma_aligned_col_major_sf: scales by column, beginning at multiples of 16 bytes. Padding is always zeros
        between experts. cumulative_local_expert_recv_stats: [L] int32, to which the rows of each expert are added,
        without a handle.

        Returns (x in the form given, [R, H] by source, or [P, H] by expert, each expert's rows beginning at a multiple
        of the alignment; topk_idx [R, K] of this rank's experts, or -1, None by expert; topk_weights [R, K], or [P], if
        they were given; handle; event). A step of all ranks. Errors: as `Buffer.dispatch`."""
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
        events, stats = (previous_event, previous_event_before_epilogue), cumulative_local_expert_recv_stats
        return self._dispatch(x, topk_idx, topk_weights, stats, handle, asked, events, async_with_compute_stream)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums rows where they came from: over ranks, and by expert first over a rank's experts. x: [R, H] or [P, H]
        bfloat16 (or float32, float16), as received. topk_weights: [R, K], or [P] by expert, float32, which return too,
        each from the rank of its expert, on all ranks or on none. bias: as of `Buffer.combine`. Returns (x [T, H],
        topk_weights [T, K] or None, event). A step of all ranks. Errors: as `Buffer.dispatch`."""
        events = previous_event, previous_event_before_epilogue
        asynchronous = async_with_compute_stream
        out, weights, event, _ = self._combine(x, handle, topk_weights, bias, num_sms, events, asynchronous)
        return out, weights, event


def _up(count: Any, alignment: int) -> Any:
    """Rounded up."""
    return (count + alignment - 1) // alignment * alignment


def _wait(event: Any) -> None:
    """Has the current stream wait for an event, if there is one."""
    event = handle_of(event)
    if event is not None:
        event.current_stream_wait()


def checked(handle: Any) -> EPHandle:
    """The argument `handle`. Errors: InvalidArgument."""
    if not isinstance(handle, EPHandle):
        told = f"is of type {type(handle).__name__}; it must come from ElasticBuffer.dispatch"
        raise tw.InvalidArgument.of("handle", told)
    return handle


def _weights(plan: Plan, came: Tensor) -> Tensor:
    """Those of this rank's experts, from all of a token's: [R, K], or of a row's choice [P]."""
    if not plan.expand:
        return came.masked_fill(plan.ids < 0, 0)
    choices = plan.origins.clamp(min=0) % came.shape[1]
    chosen = came[: len(choices)].gather(1, choices.view(-1, 1)).view(-1).masked_fill(plan.origins < 0, 0)
    return torch.nn.functional.pad(chosen, (0, plan.size - len(chosen)))


def refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        """Unsupported."""
        not_served(name, instead)

    return refuse


for _name in ("engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv"):
    setattr(ElasticBuffer, _name, refusing(_name, "Tokenway has no such thing"))
for _name in ("create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config", "all_gather"):
    setattr(ElasticBuffer, _name, refusing(_name, "Group.all_gatherv and Group.reduce_scatterv gather and reduce"))
