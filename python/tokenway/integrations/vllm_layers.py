"""vLLM's managers and prepare/finalize classes, of Tokenway's. `tokenway.integrations.vllm` says how they are used.

They have the constructors of vLLM's own for DeepEP and FlashInfer, in whose place they stand. vLLM names two formats:
Standard, where experts take rows with all their choices, weight and sum them; and BatchedExperts, where
they take rows by expert, and the owner of a token weights and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import all2all_utils, utils
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled, dbo_maybe_run_recv_hook

import tokenway as tw
from tokenway.integrations import groups
from tokenway.integrations.low_latency import LowLatency, Names, Sent
from tokenway.integrations.rank_rows import SUMMED, Arriving, RankRows
from tokenway.pytorch import gradients

_NAMES = Names("a1", "topk_ids", "topk_weights", "fused_expert_output", "max_tokens_per_rank")
_KIND: dict[str, Any] = {"names": _NAMES, "dtypes": SUMMED}  # of LowLatency


class TokenwayManager(All2AllManagerBase):
    """What layers of a process hold in common: the ranks of the expert-parallel group, and what is under way.

    cpu_group, tcp_store_group: as vLLM's communicator gives them. Collective, as all of vLLM's managers are."""

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None):
        super().__init__(cpu_group, tcp_store_group)
        config = get_current_vllm_config()
        if config.parallel_config.enable_fault_tolerance:
            raise tw.Unsupported("enable_fault_tolerance is True; over Tokenway it must be False: it masks no ranks")
        self.max_tokens: int = config.scheduler_config.max_num_batched_tokens  # of a rank in a step, alike on all
        self.sm_limit = 0
        self.open = groups.OpenCombines()  # by micro-batch
        self._exchanges: dict[Any, Any] = {}

    def get_handle(self, kwargs: Any) -> TokenwayManager:
        """What the classes below take: this. Not collective; kwargs are not needed."""
        return self

    def set_num_sms(self, num_sms: int) -> None:
        """The most thread blocks of Tokenway's kernels from now on, 0: as many as it chooses."""
        self.sm_limit = num_sms

    def exchange(self, kind: Any, device: torch.device, experts: int, top_k: int, **settings: Any) -> Any:
        """That of all layers that route alike. Not collective: its group is made in the first call."""
        key = kind, device, experts, top_k
        if key not in self._exchanges:
            self._exchanges[key] = kind(self.peers(device), experts, top_k, **settings)
        return self._exchanges[key]

    def peers(self, device: torch.device) -> groups.Peers:
        """The ranks, on such devices. Not collective."""
        return groups.of(self.cpu_group, device=device)

    def begin(self) -> int:
        """Before a dispatch: the number of the micro-batch. A combine that it has left out, as experts raised, is
        refused, in which peers wait; outside of micro-batches those of all of them are."""
        number: int = dbo_current_ubatch_id()
        self.open.refuse([number] if dbo_enabled() else None)
        return number


class _Tokenway(mk.FusedMoEPrepareAndFinalizeModular):
    """What both have in common. Calls of prepare and finalize are steps of all ranks, in one order on all of them."""

    def __init__(self, buffer: TokenwayManager, num_dispatchers: int):
        super().__init__()
        self._manager, self._num_dispatchers = buffer, num_dispatchers
        self._under_way: dict[int, Any] = {}  # by micro-batch: dispatched, not combined yet
        self._moving: Any = None  # where experts move, the exchange of their model
        self._layer = 0

    def make_exchange(self, experts: int, top_k: int, row: Tensor, **settings: Any) -> Any:
        """For `follow`, with its group: that of all layers of a model, alike on all ranks. row: as layers are given
        them, [H]. settings: further ones of the group. Collective."""
        raise NotImplementedError

    def follow(self, exchange: Any, layer: int) -> None:
        """Dispatches go by this exchange from now on, whose ids are those of logical experts, by the map of a layer of
        its; experts get rows by their slots, which for vLLM are physical experts."""
        self._moving, self._layer = exchange, layer

    def _exchange(self, kind: Any, a1: Tensor, experts: int, topk_ids: Tensor, **settings: Any) -> Any:
        if self._moving is not None:
            return self._moving
        return self._manager.exchange(kind, a1.device, experts, topk_ids.shape[1], **settings)

    def num_dispatchers(self) -> int:
        """N, ranks of the expert-parallel group."""
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        """Sums are whole."""
        return True

    def supports_async(self) -> bool:
        """By hooks: of micro-batches one is on its way while the other computes."""
        return True

    def prepare(self, *args: Any, **kwargs: Any) -> mk.PrepareResultType:
        """`prepare_async`, and what it returns, called."""
        hook, receiver = self.prepare_async(*args, **kwargs)
        hook()
        return receiver()

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """The same as `finalize_async` and what it returns, in one: a kernel of a GPU sends and receives."""
        self._combine(*args, **kwargs, send_only=False)

    def finalize_async(self, *args: Any, **kwargs: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        """As `_combine` says, with vLLM's arguments. Sends, and returns (what waits for the sums, what does nothing):
        vLLM has its shared experts compute before it waits."""
        return self._combine(*args, **kwargs, send_only=True), _nothing

    def _combine(self, *args: Any, send_only: bool, **kwargs: Any) -> Callable[[], None]:
        raise NotImplementedError

    def _sent(
        self, number: int, sent: Any, receive: Callable[[], None] | None, refuse: Callable[[], None]
    ) -> Callable[[], None]:
        """Keeps a dispatch for its combine. receive: waits for it, None: it has come; refuse: tells peers that no
        combine comes. Returns what waits for it, after which, if that fails, there is none to be made."""
        self._under_way[number] = sent
        self._manager.open.add(number, refuse)
        if receive is None:
            return _nothing

        def hook() -> None:
            try:
                receive()
            except tw.TokenwayError:
                self._under_way.pop(number, None)
                self._manager.open.discard(number)
                raise

        return hook

    def _to_combine(self) -> Any:
        """What a combine belongs to."""
        dbo_maybe_run_recv_hook()  # of the other micro-batch, which was sent before
        number = dbo_current_ubatch_id()
        self._manager.open.discard(number)
        sent = self._under_way.pop(number, None)
        if sent is None:
            raise tw.InvalidUsage("finalize comes without a prepare before it")
        return sent


class TokenwayStandardPrepareAndFinalize(_Tokenway):
    """Rows once to each rank of their experts, with all choices and weights; experts weight and sum.

    buffer: the manager; num_dispatchers: N; dp_size is not needed; rank_expert_offset: of this rank's first expert."""

    def __init__(self, buffer: TokenwayManager, num_dispatchers: int, dp_size: int, rank_expert_offset: int):
        super().__init__(buffer, num_dispatchers)
        self._first = rank_expert_offset
        self._width: Callable[[int], int] = lambda width: width

    def post_init_setup(self, fused_experts: Any) -> None:
        """Experts may return narrower rows than they get, without the padding of the hidden size."""
        self._width = fused_experts.output_hidden_dim

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        """Any number serves as it is."""
        return hidden_size

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """[R, H], and what each row has chosen."""
        return mk.FusedMoEActivationFormat.Standard

    def make_exchange(self, experts: int, top_k: int, row: Tensor, **settings: Any) -> RankRows:
        """As that of the base."""
        exchange = RankRows(self._manager.peers(row.device), experts, top_k, **settings)
        exchange.shared.with_room(tw.RowType(len(row), row.dtype), self._manager.max_tokens)
        return exchange

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int32: what experts get."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """No bound."""
        return None

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], mk.PrepareResultType]]:
        """Sends a1 [M, H] of bfloat16, float16 or float32 to the ranks of topk_ids [M, K], -1 for none, with
        topk_weights [M, K]. Returns (what waits for the rows, what returns them).

        Rows that vLLM quantises by blocks, as nvfp4 or as mxfp8 are quantised before they are sent, others where they
        arrive. Where vLLM knows the sizes of all ranks, and the largest is one of low latency, rows come in slots: [N *
        b, H], no step more, nothing waits, the numbers of rows are not told to experts. Else as many as come, two
        steps, and the host waits. Ids are global; of choices that are nobody's, and of unused rows, that of an expert
        of another rank. Errors: as `RankRows.dispatch`."""
        manager = self._manager
        number = manager.begin()
        exchange: RankRows = self._exchange(RankRows, a1, num_experts, topk_ids)
        bound = _largest()
        with gradients.telling(partial(exchange.refuse, bound)):
            results = a1.dtype, self._width(a1.shape[-1])
            if apply_router_weight_on_input:
                a1 = _weighted(a1, topk_weights)
            rows, scales, later = a1, None, None
            if not defer_input_quant and quant_config.quant_dtype is not None:
                if quant_config.is_block_quantized or quant_config.quant_dtype in ("nvfp4", "mxfp8"):
                    rows, scales = _quantized(a1, quant_config, swizzled=False)
                else:
                    later = quant_config
        room = manager.max_tokens if bound is None else bound
        # Micro-batches alone do something before they receive: without them it is one kernel that sends and receives.
        later_on = dbo_enabled()
        arriving = exchange.dispatch(
            rows, scales, topk_ids, topk_weights, results, bound, room, later_on, manager.sm_limit, self._layer
        )
        hook = self._sent(number, arriving, arriving.receive if later_on else None, arriving.refuse)
        return hook, partial(self._received, arriving, num_experts, quant_config, later)

    def _received(self, arriving: Arriving, num_experts: int, quant_config: Any, later: Any) -> mk.PrepareResultType:
        rows, scales, ids, weights = arriving.rows()
        if later is not None and len(rows):
            if arriving.experts is None:  # unused slots must not make the scale
                rows = rows.masked_fill((ids < 0).all(1, keepdim=True), 0)
            rows, scales = _quantized(rows, later, swizzled=later.is_scale_swizzled)
        elif scales is not None and quant_config.quant_dtype == "nvfp4" and quant_config.is_scale_swizzled:
            scales = _interleaved(scales)
        # vLLM's kernels want ids that are somebody's; expert_map makes nothing of those of another rank: of -1 the last
        # expert on rank 0, on others the first, in one kernel each.
        ids = ids.remainder(num_experts) if self._first == 0 else ids.clamp(min=0)
        meta = None
        if arriving.experts is not None:
            meta = mk.ExpertTokensMetadata.make_from_list(arriving.experts, device=rows.device)
        return rows, scales, meta, ids, weights

    def _combine(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
        *,
        send_only: bool,
    ) -> Callable[[], None]:
        """Returns fused_expert_output, [R, H] or still to be weighted and summed, to output [M, H]. Sums over ranks are
        float32, ranks ascending. Returns what waits for the sums: nothing, unless send_only. Errors: as
        `Group.combine`."""
        arriving: Arriving = self._to_combine()
        with gradients.telling(arriving.refuse):
            if fused_expert_output.numel():
                if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                    weight_and_reduce_impl = TopKWeightAndReduceContiguous()
                fused_expert_output = weight_and_reduce_impl.apply(
                    output=None,
                    fused_expert_output=fused_expert_output,
                    topk_weights=topk_weights,
                    topk_ids=topk_ids,
                    apply_router_weight_on_input=apply_router_weight_on_input,
                )
        return arriving.combine(fused_expert_output, output, send_only, self._manager.sm_limit)


class TokenwayCapturedPrepareAndFinalize(TokenwayStandardPrepareAndFinalize):
    """The same in the place of vLLM's class for FlashInfer's one-sided exchange, which leaves CUDA graphs on.

    num_experts: E; num_dispatchers: N; the rest is not needed."""

    def __init__(
        self,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        dispatch_format: Any = None,
        extra_payload_bytes_per_token: int = 0,
        num_dispatchers: int = 1,
    ):
        manager = all2all_utils.get_ep_all2all_manager()
        if not isinstance(manager, TokenwayManager):
            raise tw.InvalidUsage(
                f"the expert-parallel group has a {type(manager).__name__}, made before Tokenway was registered"
            )
        super().__init__(manager, num_dispatchers, manager.dp_world_size, manager.rank * num_experts // num_dispatchers)


def captured_layout(
    hidden_dim: int, quant_config: Any, input_dtype: torch.dtype | None = None
) -> all2all_utils.FlashInferOneSidedDispatchLayout:
    """What vLLM asks for that class, in the place of its own function, which refuses what FlashInfer cannot send."""
    return all2all_utils.FlashInferOneSidedDispatchLayout(None)


class TokenwayBatchedPrepareAndFinalize(_Tokenway):
    """Rows by expert, [L, N * max_tokens_per_rank, H], each returned as it is; its owner weights and sums.

    buffer: the manager; max_tokens_per_rank: b, alike on all ranks; use_fp8_dispatch: rows travel as e4m3 with a scale
    for each 128 elements; global_to_physical: [E], where experts are placed in another order than the ranks'."""

    def __init__(
        self,
        buffer: TokenwayManager,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: Tensor | None = None,
        physical_to_global: Tensor | None = None,
        local_expert_global_ids: Tensor | None = None,
    ):
        super().__init__(buffer, num_dispatchers)
        self._most, self._fp8, self._packed = max_tokens_per_rank, use_fp8_dispatch, False
        self._places = global_to_physical

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int) -> int:
        """Any number serves as it is."""
        return hidden_size

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Scales are packed powers of two where experts take these."""
        self._packed = self._fp8 and fused_experts.supports_packed_ue8m0_act_scales()

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """[L, N * b, H], and how many rows each expert has."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def make_exchange(self, experts: int, top_k: int, row: Tensor, **settings: Any) -> LowLatency:
        """As that of the base."""
        exchange = LowLatency(self._manager.peers(row.device), experts, top_k, **_KIND, **settings)
        exchange.view(len(row), row.dtype, None, self._most)
        return exchange

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int64, or else int32 as they are."""
        return torch.int64

    def max_num_tokens_per_rank(self) -> int | None:
        """b."""
        return self._most

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], mk.PrepareResultType]]:
        """Sends a1 [M, H] of bfloat16, float16 or float32 to the experts topk_ids [M, K], -1 for none. Returns (what
        waits for the rows, what returns them, and how many each expert has, [L] int32 on the device). A step; nothing
        waits for a device. Errors: as `LowLatency.dispatch`, of which peers hear at once."""
        manager = self._manager
        number = manager.begin()
        exchange: LowLatency = self._exchange(LowLatency, a1, num_experts, topk_ids, **_KIND)
        with gradients.telling(partial(exchange.refuse, self._most)):
            if defer_input_quant:
                raise tw.Unsupported("defer_input_quant is True; in batches by expert it must be False")
            if quant_config.quant_dtype == "nvfp4" and envs.VLLM_DEEPEPLL_NVFP4_DISPATCH:
                raise tw.Unsupported(
                    "VLLM_DEEPEPLL_NVFP4_DISPATCH is 1; over Tokenway it must be 0: rows travel as they are"
                )
            if apply_router_weight_on_input:
                a1 = _weighted(a1, topk_weights)
            if self._places is not None:
                places = self._places.to(topk_ids.dtype)[topk_ids.clamp(min=0)]
                topk_ids = torch.where(topk_ids < 0, -1, places)
        later_on = dbo_enabled()  # as of the class above
        sent, rows, scales, receive = exchange.dispatch(
            a1, topk_ids, self._most, self._fp8, self._packed, self._packed, later_on, manager.sm_limit, self._layer
        )
        refuse = partial(gradients.refuse_combine, sent.handle, sent.view)
        hook = self._sent(number, sent, receive if later_on else None, refuse)
        return hook, partial(self._received, sent, rows, scales, quant_config)

    def _received(self, sent: Sent, rows: Tensor, scales: Tensor | None, quant_config: Any) -> mk.PrepareResultType:
        meta = mk.ExpertTokensMetadata(expert_num_tokens=sent.counts, expert_num_tokens_cpu=None)
        if not self._fp8 and quant_config.quant_dtype not in (None, "nvfp4"):  # whose experts quantise
            if quant_config.a1_scale is None and not quant_config.per_act_token_quant:
                unused = torch.arange(rows.shape[1], device=rows.device) >= sent.counts[:, None]
                rows = rows.masked_fill(unused[..., None], 0)  # which must not make the scale
            values, scales = _quantized(rows.flatten(0, 1), quant_config, swizzled=quant_config.is_scale_swizzled)
            rows = values.view(*rows.shape[:2], -1)
            scales = utils.normalize_batched_scales_shape(scales, len(rows))
        return rows, scales, meta, None, None

    def _combine(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
        *,
        send_only: bool,
    ) -> Callable[[], None]:
        """Returns fused_expert_output [L, N * b, H] to output [M, H]: weighted, and summed over k ascending in float32.
        Returns what waits for the sums: nothing, unless send_only. Errors: as `LowLatency.combine`."""
        sent: Sent = self._to_combine()
        with gradients.telling(partial(gradients.refuse_combine, sent.handle, sent.view)):
            if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                told = f"is {type(weight_and_reduce_impl).__name__}; it must be TopKWeightAndReduceDelegate"
                raise tw.InvalidArgument.of("weight_and_reduce_impl", f"{told}, as the owner of a token sums")
            weights = topk_weights.float()
            weights = torch.ones_like(weights) if apply_router_weight_on_input else weights
        combine = sent.exchange.combine
        _, receive = combine(sent, fused_expert_output, weights, output, send_only, sm_limit=self._manager.sm_limit)
        return receive


def _nothing() -> None:
    pass


def _largest() -> int | None:
    """The largest number of tokens of all ranks in this step, where vLLM knows that on the host; at least 1."""
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return None
    sizes = metadata.local_sizes
    return max(1, *(metadata.num_tokens_across_dp_cpu.tolist() if sizes is None else sizes))


def _weighted(a1: Tensor, weights: Tensor) -> Tensor:
    """Rows that are multiplied by the one weight that each has."""
    if weights.shape[1] != 1:
        told = f"is True, and topk_weights has shape {list(weights.shape)}; it must be [M, 1] then"
        raise tw.InvalidArgument.of("apply_router_weight_on_input", told)
    return a1 * weights.to(a1.dtype)


def _quantized(rows: Tensor, config: Any, swizzled: bool) -> tuple[Tensor, Tensor | None]:
    """(values, scales) as vLLM makes them."""
    values, scales = utils.moe_kernel_quantize_input(
        rows,
        config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale,
        config.quant_dtype,
        config.per_act_token_quant,
        config.block_shape,
        is_scale_swizzled=swizzled,
        mx_alignment=config.mx_alignment,
    )
    return values, scales


def _interleaved(scales: Tensor) -> Tensor:
    """Scales [R, S] of nvfp4 in the order that CUTLASS wants."""
    from vllm.utils.flashinfer import nvfp4_block_scale_interleave

    if not len(scales):
        return scales
    width = scales.shape[-1]
    swizzled: Tensor = nvfp4_block_scale_interleave(scales.contiguous().view(torch.uint8)).view(-1, width)
    return swizzled
