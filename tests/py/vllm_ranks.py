"""What tests of vLLM have in common: ranks as vLLM sets them up, and experts of PyTorch alone.

vLLM's own kernels of experts are not built here. Theirs is everything around: process groups, configs, the modular
kernel, the contexts of forward passes and micro-batches; and on GPUs platform, communicators and workspaces."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar

import frameworks
import numpy as np
from frameworks import here, steps
from harness import PATIENT

import tokenway as tw

EXPERTS, HIDDEN, WIDTH, MOST = 6, 32, 8, 16
HIGH, LOW, ONE = "deepep_high_throughput", "deepep_low_latency", "flashinfer_nvlink_one_sided"
_kept = ExitStack()  # what lasts as long as the process
_made: dict[str, Any] = {}  # managers, by vLLM's name of the backend, which layers have in common


def begin(store: str, blocking: bool = True) -> tuple[int, Any]:
    """(rank, vLLM's config) of a process, on the CPU or on a device each (`frameworks.begin`): data-parallel attention
    and expert-parallel layers over two ranks, whose groups `connect` makes."""
    rank, device = frameworks.begin(store, 2, blocking)
    if device.type == "cpu":
        from vllm import platforms
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()  # vLLM finds it by the name of its own release alone
    else:
        stand_in_for_kernels()
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank, enable_expert_parallel=True)
    config = VllmConfig(parallel_config=parallel)
    _kept.enter_context(set_current_vllm_config(config))
    init_workspace_manager(device, num_ubatches=2)
    return rank, config


def stand_in_for_kernels() -> None:
    """Lets vLLM's platform for GPUs be imported where its kernels were not built, of which none is supported then."""
    kernels = "vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"
    if importlib.util.find_spec(kernels[0]) is not None:
        return
    sys.modules |= {name: types.ModuleType(name) for name in kernels}
    from vllm import _custom_ops

    for name in vars(_custom_ops):
        if re.match("cutlass_.*support", name):
            setattr(_custom_ops, name, lambda *_: False)


def connect(config: Any, rank: int) -> str:
    """Makes vLLM's process groups, as its workers do. Returns which manager its communicator has made for layers."""
    from vllm.distributed import get_ep_group, parallel_state

    from tokenway.integrations import groups

    config.parallel_config.all2all_backend = HIGH
    backend = "gloo" if here().type == "cpu" else "nccl"
    parallel_state.init_distributed_environment(1, 0, local_rank=rank, backend=backend)
    parallel_state.initialize_model_parallel(backend=backend)
    groups.of(get_ep_group().cpu_group, device=here(), timeout=PATIENT)
    made = get_ep_group().device_communicator.all2all_manager
    if here().type != "cpu":
        _made[HIGH] = made  # which layers get from the communicator
    return type(made).__name__


def moe_config(config: Any, backend: str, case: dict[str, Any]) -> Any:
    """Of a layer whose experts are the ranks' in turn. case: top_k, hidden, dtype; experts; most: tokens of a rank."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    config.parallel_config.all2all_backend = backend
    parallel = FusedMoEParallelConfig.make(1, 1, 2, 1, config.parallel_config)
    experts = case.get("experts", EXPERTS)
    return FusedMoEConfig(
        num_experts=experts,
        experts_per_token=case["top_k"],
        hidden_dim=case["hidden"],
        intermediate_size=WIDTH,
        num_local_experts=experts // 2,
        num_logical_experts=experts,
        activation=MoEActivation.SILU,
        device=here().type,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=getattr(torch, case["dtype"]),
        max_num_tokens=case.get("most", MOST),
    )


def computed(expert: int, rows: Any) -> Any:
    """What an expert makes of rows [R, H], float32: no two experts alike, and no two columns."""
    import torch

    return rows * (expert + 1) + torch.arange(rows.shape[1], device=rows.device) * 0.5


def experts_of(
    case: dict[str, Any],
    config: Any,
    quant: Any,
    fail: Any = None,
    compute: Callable[[int, Any], Any] = computed,
) -> Any:
    """vLLM's experts, of either format; nothing in them asks the host, so that they can be captured. fail: is called
    with what they are given. compute: what an expert makes of rows. case: robin: placed by turns; results: columns that
    they return, the first ones, None for all."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )

    rank, local = config.moe_parallel_config.ep_rank, config.num_local_experts
    names = [e * 2 + rank if case["robin"] else rank * local + e for e in range(local)]  # of this rank's experts
    batched, width = case["batched"], case["results"] or config.hidden_dim

    def plain(rows: Any, scales: Any) -> Any:
        """Rows as they were before they were quantised."""
        if scales is None:
            return rows.float()
        if scales.shape[-1] == 1:
            return rows.float() * scales
        if rows.dtype == torch.uint8:  # nvfp4, as the test packs it
            return rows.float().repeat_interleave(2, -1) * scales.float().repeat_interleave(16, -1)
        return tw.dequantize_fp8(rows.contiguous(), scales.contiguous())

    class Experts(mk.FusedMoEExpertsModular):
        given: ClassVar[dict[str, Any]] = {}

        @staticmethod
        def activation_format() -> Any:
            formats = mk.FusedMoEActivationFormat
            return formats.BatchedExperts if batched else formats.Standard

        @staticmethod
        def _yes(*_: Any) -> bool:
            return True

        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = _yes
        _supports_activation = _supports_parallel_config = _yes

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M, N, K, topk, E, L, meta, activation) -> Any:
            return (0,), (0,), (L, M, width) if batched else (M, width)

        def output_hidden_dim(self, hidden_dim: int) -> int:
            return width

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args: Any, **more: Any) -> None:
            meta, scales = more["expert_tokens_meta"], more["a1q_scale"]
            Experts.given = {
                "rows": tuple(hidden_states.shape),
                "dtype": str(hidden_states.dtype),
                "counts": None if meta is None else meta.expert_num_tokens,
                "output": output.untyped_storage().data_ptr(),
            }
            if fail is not None:
                fail(hidden_states)
            rows = plain(hidden_states, scales)
            sums = rows.new_zeros(output.shape)
            for e in range(config.num_local_experts):
                result = compute(names[e], rows[e] if batched else rows)[:, :width]
                if batched:
                    used = torch.arange(len(result), device=rows.device) < meta.expert_num_tokens[e]
                    sums[e] = torch.where(used[:, None], result, float("nan"))  # which nobody may read
                    continue
                chosen = more["expert_map"][topk_ids.long()] == e
                weights = 1 if more["apply_router_weight_on_input"] else (topk_weights * chosen).sum(1, keepdim=True)
                sums += torch.where(chosen.any(1, keepdim=True), result * weights, 0)
            output.copy_(sums)

    if not batched:
        return Experts(config, quant)
    return Experts(config, quant, max_num_tokens=config.max_num_tokens, num_dispatchers=2)


def batch(count: int, top_k: int, hidden: int, seed: Any, none: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows [T, H] of whole numbers, ids [T, K], some of -1, weights [T, K]) of a rank."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((count, EXPERTS)))[:, :top_k]
    if none:
        ids[::3, 0] = -1
        ids[4::5] = -1
    return rng.integers(-4, 5, (count, hidden)), ids, rng.integers(1, 4, (count, top_k)) / 4


def wanted(rows: np.ndarray, ids: np.ndarray, weights: np.ndarray, on_input: bool = False) -> np.ndarray:
    """[T, H] that a layer makes of a rank's batch."""
    out = np.zeros(rows.shape)
    for t, k in np.argwhere(ids >= 0):
        x, weight = (rows[t] * weights[t, k], 1) if on_input else (rows[t], weights[t, k])
        out[t] += weight * (x * (ids[t, k] + 1) + np.arange(rows.shape[1]) * 0.5)
    return out


def manager_of(backend: str) -> Any:
    from vllm.distributed import get_ep_group
    from vllm.distributed.device_communicators import all2all

    if backend not in _made:
        names = {HIGH: "DeepEPHTAll2AllManager", LOW: "DeepEPLLAll2AllManager", ONE: "FlashInferNVLinkOneSidedManager"}
        _made[backend] = getattr(all2all, names[backend])(get_ep_group().cpu_group)
    return _made[backend]


def quant_of(kind: str | None) -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig

    if kind is None:
        return FUSED_MOE_UNQUANTIZED_CONFIG
    if kind == "nvfp4":
        return FusedMoEQuantConfig.make("nvfp4", is_scale_swizzled=False)
    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128] if kind == "fp8" else None)


def quantized(rows: Any, scale: Any, dtype: Any, per_token: bool, blocks: Any = None, **_: Any) -> Any:
    """In the place of vLLM's kernels, which are not built here: [T, H] -> (values, scales)."""
    import torch

    if dtype == "nvfp4":  # pairs of one value, and a scale for 16
        scales = 1.0 + (rows.abs().amax(1, keepdim=True) > 6).float()
        return (rows / scales)[:, ::2].to(torch.uint8), scales.repeat(1, rows.shape[1] // 16).to(torch.float8_e4m3fn)
    if blocks is not None:
        return tw.quantize_fp8(rows)
    most = rows.abs().max().view(1)
    assert most <= 8, "what no token has sent makes the scale"
    return (rows * 16).to(torch.float8_e4m3fn), torch.full((1,), 1 / 16, device=rows.device)


def given(case: dict[str, Any], rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rank's batch, of rows that quantisation leaves what they are."""
    rows, ids, weights = batch(case["sizes"][rank], case["top_k"], case["hidden"], [rank, 7], case["none"])
    if case["quant"] == "nvfp4":
        rows = np.abs(rows[:, ::2]).repeat(2, 1) * np.where(np.arange(len(rows)) % 2, 4, 1)[:, None]
    if case["quant"] == "fp8":
        rows = 2.0 ** (np.abs(rows) - 4) * (1 + np.arange(len(rows)))[:, None]
    return rows, ids, weights


def kernel_of(case: dict[str, Any], config: Any, fail: Any = None, **more: Any) -> tuple[Any, Any]:
    """(a layer's kernel as vLLM makes it, its experts, which `experts_of` makes)."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.distributed import get_ep_group
    from vllm.model_executor.layers.fused_moe import all2all_utils

    backend = LOW if case["batched"] else case.get("backend", HIGH)
    # As vLLM's communicator for GPUs has it for one backend; that for CPUs has one of its own in place of all others.
    get_ep_group().device_communicator.all2all_manager = manager_of(backend)
    moe, quant = moe_config(config, backend, case), quant_of(case["quant"])
    places = torch.tensor([0, 3, 1, 4, 2, 5], device=here())  # of experts by turns
    local = torch.arange(3, device=here()) * 2 + moe.moe_parallel_config.ep_rank
    tables = (places, places.argsort(), local) if case["robin"] else None
    made = all2all_utils.maybe_make_prepare_finalize(
        moe, quant, routing_tables=tables, all2all_manager=manager_of(backend)
    )
    experts = experts_of(case, moe, quant, fail, **more)
    return mk.FusedMoEKernel(made, experts), experts


def apply(kernel: Any, case: dict[str, Any], rank: int, rows: Any, ids: Any, weights: Any) -> Any:
    """A layer's forward pass of a batch in NumPy: [T, H] on the rank's device."""
    import torch

    x = torch.from_numpy(rows).to(here(), getattr(torch, case["dtype"]))
    return forward(kernel, rank, x, *(torch.from_numpy(each).to(here()) for each in (ids, weights)), case["input"])


def forward(
    kernel: Any, rank: int, x: Any, ids: Any, weights: Any, on_input: bool = False, experts: int = EXPERTS
) -> Any:
    """A layer's forward pass: [T, H]."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    local, width = experts // 2, x.shape[-1]
    expert_map = torch.full((experts,), -1, device=x.device)
    expert_map[rank * local : (rank + 1) * local] = torch.arange(local, device=x.device)
    return kernel.apply(
        x,
        x.new_zeros(local, WIDTH, width),
        x.new_zeros(local, width, WIDTH),
        weights.float(),
        ids.to(kernel.prepare_finalize.topk_indices_dtype()),
        MoEActivation.SILU,
        experts,
        expert_map,
        on_input,
    )


def asked_of_torch(case: dict[str, Any], config: Any, rank: int) -> dict[str, int]:
    """PyTorch's operations, views too, and how often a prepare with its finalize asks for each, behind two others."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(function)] += 1
            return function(*args, **(kwargs or {}))

    kernel, (rows, *routing) = kernel_of(case, config)[0], given(case, rank)
    made = kernel.prepare_finalize
    x = torch.from_numpy(rows).to(here(), getattr(torch, case["dtype"]))
    ids, weights = (torch.from_numpy(each).to(here()) for each in routing)
    ids, weights, out = ids.to(made.topk_indices_dtype()), weights.float(), torch.empty_like(x)
    reduce, answers = kernel.fused_experts.finalize_weight_and_reduce_impl(), None
    for counting in (nullcontext(), nullcontext(), Counting()):
        with in_step(case, config, rank):
            with counting:
                came, *_, ids_here, weights_here = made.prepare(x, weights, ids, EXPERTS, None, False, quant_of(None))
            answers = torch.ones_like(came) if answers is None else answers
            chosen = (weights, ids) if ids_here is None else (weights_here, ids_here)
            with counting:
                made.finalize(out, answers, *chosen, False, reduce)
    return dict(counts)


def in_step(case: dict[str, Any], config: Any, rank: int) -> ExitStack:
    """As vLLM runs a forward pass, where the sizes are known."""
    import torch
    from vllm.forward_context import get_forward_context, set_forward_context

    stack = ExitStack()
    if case["known"]:
        told = torch.tensor(case["sizes"], dtype=torch.int32)
        stack.enter_context(
            set_forward_context(None, config, num_tokens=case["sizes"][rank], num_tokens_across_dp=told)
        )
        stack.enter_context(get_forward_context().dp_metadata.sp_local_sizes(1))
    return stack


# vLLM's own classes: name, (whether by expert, whether in fp8)
OWN = {
    "DeepEP, high throughput": (False, False),
    "DeepEP, low latency": (True, False),
    "DeepEP, low latency, fp8": (True, True),
}


def own_case(batched: bool, fp8: bool) -> dict[str, Any]:
    """Rows as DeepEP's kernels want them: bfloat16, and of the least number of elements that low latency has there."""
    return {"batched": batched, "quant": "fp8" if fp8 else None, "hidden": 2048, "dtype": "bfloat16", "rows": None}


def run_own(case: dict[str, Any], config: Any, rank: int) -> dict[str, Any]:
    """A layer of vLLM's, unchanged, whose deep_ep is Tokenway."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.distributed import get_ep_group
    from vllm.distributed.device_communicators import all2all
    from vllm.utils import import_utils

    from tokenway.compat import deep_ep
    from tokenway.integrations import vllm as adapter

    deep_ep.install()
    import_utils._has_module.cache_clear()  # on GPUs it has asked when its layers were imported, before there was one
    adapter.unregister()
    moe, quant = moe_config(config, LOW if case["batched"] else HIGH, case), quant_of(case["quant"])
    ranks = {"num_dispatchers": 2}
    if case["batched"]:
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize as Made

        most = {"max_num_tokens_per_dp_rank": MOST, "token_hidden_size": case["hidden"], "num_ep_ranks": 2}
        experts = {"num_global_experts": EXPERTS, "num_local_experts": EXPERTS // 2}
        buffer = all2all.DeepEPLLAll2AllManager(get_ep_group().cpu_group).get_handle(most | experts)
        ranks |= {"max_tokens_per_rank": MOST, "use_fp8_dispatch": case["quant"] is not None}
    else:
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize as Made

        buffer = all2all.DeepEPHTAll2AllManager(get_ep_group().cpu_group).get_handle({})
        ranks |= {"dp_size": 2, "rank_expert_offset": rank * EXPERTS // 2}
    kernel = mk.FusedMoEKernel(Made(buffer, **ranks), experts_of(case, moe, quant))
    before, data = steps(), given(case, rank)
    out = apply(kernel, case, rank, *data)
    kinds = type(buffer).__module__, type(kernel.prepare_finalize).__module__.rpartition(".")[2]
    return {"out": out.float().cpu().numpy(), "steps": steps() - before, "data": data, "kinds": kinds, "given": {}}
