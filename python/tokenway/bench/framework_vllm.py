"""vLLM's ways, for `tokenway bench --frameworks exchange`: its classes as its modular kernel calls them, prepare and
finalize. Needs PyTorch, and vLLM in the calls.

vLLM's kernels are not needed: what is measured is around the experts. Without them vLLM finds no platform but the
CPU's, so where its own classes call its communicator for GPUs, they call NCCL through PyTorch here: the same
collectives of the same tensors, those of a dispatch in one group of NCCL's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenway as tw
from tokenway.bench.framework_place import Place, gathered
from tokenway.bench.framework_ways import Ones, Shape, Step, Way, by_row, operations, ranks_of
from tokenway.integrations import supported
from tokenway.integrations import vllm as adapter

_NOTE = "vLLM's own classes, whose communicator is PyTorch's NCCL (gloo on the CPU) in place of vLLM's binding of NCCL"


def missing() -> str | None:
    """Why there is no vLLM here, or None."""
    return supported.missing("vllm", adapter.LEAST, adapter.BELOW)


def begin(place: Place) -> None:
    """Makes vLLM's groups of data-parallel attention and expert-parallel layers over all ranks. Collective, once."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()  # the one that is there without kernels
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import get_dp_group, get_ep_group, parallel_state

    each = {"data_parallel_size": place.ranks, "data_parallel_rank": place.rank}
    config = VllmConfig(parallel_config=ParallelConfig(**each, enable_expert_parallel=True))
    place.stack.enter_context(set_current_vllm_config(config))
    parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")  # there is a process group already
    parallel_state.initialize_model_parallel(backend="gloo")
    for group in (get_dp_group(), get_ep_group()):
        group.device_communicator = _communicator(group.cpu_group)


def _communicator(cpu_group: Any) -> Any:
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    class Communicator(CpuCommunicator):
        """What vLLM's for GPUs does for equal sizes, on the default process group."""

        def all_gatherv(self, input_: list[Tensor], dim: int = 0, sizes: Any = None) -> list[Tensor]:
            return gathered(input_, self.world_size)

        def reduce_scatterv_into_output(
            self, input_: Tensor, output: Tensor, dim: int = 0, sizes: Any = None
        ) -> Tensor:
            dist.reduce_scatter_tensor(output, input_.contiguous())
            return output

        def allocate_combine_input(self, *args: Any, **kwargs: Any) -> None:
            return None

        def combine_into_output(self, hidden: Tensor, output: Tensor, is_sequence_parallel: bool = False) -> Tensor:
            return self.all2all_manager.combine_into_output(hidden, output, is_sequence_parallel)

    made = Communicator(cpu_group)
    made.all2all_manager = AgRsAll2AllManager(cpu_group)
    return made


class _Vllm(Way):
    framework = "vllm"

    def __init__(self, place: Place, shape: Shape):
        super().__init__(place, shape)
        from vllm.config import get_current_vllm_config
        from vllm.forward_context import get_forward_context, set_forward_context
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

        self._made = self._make()
        self._quant, self._reduce = FUSED_MOE_UNQUANTIZED_CONFIG, TopKWeightAndReduceNoOP()
        self._out = torch.empty(shape.tokens, shape.profile.hidden, dtype=place.dtype, device=place.device)
        # Once in a forward pass, as vLLM has it, and not in each layer.
        sizes = torch.full((place.ranks,), shape.tokens, dtype=torch.int32)
        told = {"num_tokens": shape.tokens, "num_tokens_across_dp": sizes}
        self.stack.enter_context(set_forward_context(None, get_current_vllm_config(), **told))
        self.stack.enter_context(get_forward_context().dp_metadata.sp_local_sizes(1))

    def _make(self) -> Any:
        """The class."""
        raise NotImplementedError

    def pair(self, step: Step, experts: Ones) -> Tensor:
        """Prepare and finalize."""
        count, quant = self.shape.profile.experts, self._quant
        rows, _, _, ids, weights = self._made.prepare(
            step.x, step.weights, step.ids32, count, None, False, quant, defer_input_quant=False
        )
        answers = experts.chosen(rows, ids, weights)
        self._made.finalize(self._out, answers, weights, ids, False, self._reduce)
        return self._out


class Standard(_Vllm):
    """Tokenway's class of vLLM's format Standard."""

    name, steps, rivals = "vLLM standard", 2, ("vllm",)

    def _make(self) -> Any:
        from vllm.distributed import get_ep_group

        from tokenway.integrations.rank_rows import RankRows
        from tokenway.integrations.vllm_layers import TokenwayManager, TokenwayStandardPrepareAndFinalize

        p, n, device = self.shape.profile, self.place.ranks, self.place.device
        manager = TokenwayManager(get_ep_group().cpu_group)
        shared = manager.exchange(RankRows, device, p.experts, p.top_k).shared
        kind = tw.RowType(p.hidden, self.place.dtype, None, self.place.dtype, p.hidden)
        self._view = shared.with_room(kind, self.shape.tokens)
        self.waits = self._view.chooses(self.shape.tokens) != "low_latency"
        return TokenwayStandardPrepareAndFinalize(manager, n, n, self.shape.first)

    def answers(self, step: Step) -> Tensor:
        """A sum from each rank."""
        return ranks_of(self.shape, step)

    def direct(self, step: Step, experts: Ones) -> Any:
        """In the same layout."""
        if self.waits:
            return operations(self._view, step, by_row(experts.chosen), "flat", None)
        return operations(self._view, step, by_row(experts.chosen), "rank_major", self.shape.tokens)


class AllGather(_Vllm):
    """vLLM's own class for its all-gather and reduce-scatter."""

    name, note = "vLLM all-gather, reduce-scatter", _NOTE
    waits = False

    def _make(self) -> Any:
        from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (
            MoEPrepareAndFinalizeNaiveDPEPModular,
        )

        return MoEPrepareAndFinalizeNaiveDPEPModular(num_dispatchers=self.place.ranks)

    def answers(self, step: Step) -> Tensor:
        """A row from every rank."""
        return torch.full_like(step.weights[:, 0], self.shape.ranks)


WAYS = (Standard, AllGather)
