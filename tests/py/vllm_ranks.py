"""What tests of vLLM have in common: ranks as vLLM sets them up, and experts of PyTorch alone.

vLLM's own kernels of experts need a GPU or Triton. Theirs is everything around: process groups, configs, the modular
kernel, the contexts of forward passes and micro-batches."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
from frameworks import steps

import tokenway as tw

EXPERTS, HIDDEN, WIDTH, MOST = 6, 32, 8, 16
HIGH, LOW, ONE = "deepep_high_throughput", "deepep_low_latency", "flashinfer_nvlink_one_sided"
_kept = ExitStack()  # what lasts as long as the process


def begin(store: str) -> tuple[int, Any]:
    """(rank, vLLM's config) of a process: data-parallel attention and expert-parallel layers over two ranks of gloo."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["TOKENWAY_RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()  # vLLM finds it by the name of its own release alone
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank, enable_expert_parallel=True)
    config = VllmConfig(parallel_config=parallel)
    _kept.enter_context(set_current_vllm_config(config))
    parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    return rank, config


def moe_config(config: Any, backend: str, top_k: int, hidden: int, dtype: Any, most: int = MOST) -> Any:
    """Of a layer whose experts are the ranks' in turn."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    config.parallel_config.all2all_backend = backend
    parallel = FusedMoEParallelConfig.make(1, 1, 2, 1, config.parallel_config)
    return FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS // 2,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
        max_num_tokens=most,
    )


def made(expert: int, rows: Any) -> Any:
    """What an expert makes of rows [R, H], float32: no two experts alike, and no two columns."""
    import torch

    return rows * (expert + 1) + torch.arange(rows.shape[1]) * 0.5


def experts_of(batched: bool, config: Any, quant: Any, fail: Any = None, robin: bool = False) -> Any:
    """vLLM's experts, of either format. fail: is called with what they are given. robin: placed by turns."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )

    rank, local = config.moe_parallel_config.ep_rank, config.num_local_experts
    names = [e * 2 + rank if robin else rank * local + e for e in range(local)]  # of this rank's experts

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
            rows = (L, M, config.hidden_dim) if batched else (M, config.hidden_dim)
            return (0,), (0,), rows

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args: Any, **more: Any) -> None:
            meta, scales = more["expert_tokens_meta"], more["a1q_scale"]
            Experts.given = {
                "rows": tuple(hidden_states.shape),
                "dtype": str(hidden_states.dtype),
                "counts": None if meta is None else meta.expert_num_tokens.tolist(),
                "output": output.untyped_storage().data_ptr(),
            }
            if fail is not None:
                fail(hidden_states)
            rows, sums = plain(hidden_states, scales), torch.zeros(output.shape)
            for e in range(config.num_local_experts):
                if batched:
                    used = int(meta.expert_num_tokens[e])
                    sums[e, :used] = made(names[e], rows[e, :used])
                    sums[e, used:] = float("nan")  # which nobody may read
                    continue
                r, k = (more["expert_map"][topk_ids.long()] == e).nonzero(as_tuple=True)
                weights = 1 if more["apply_router_weight_on_input"] else topk_weights[r, k, None]
                sums.index_add_(0, r, made(names[e], rows[r]) * weights)
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


_made: dict[Any, Any] = {}  # managers, which layers have in common


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
    """In the place of vLLM's kernels, which need a GPU or Triton: [T, H] -> (values, scales)."""
    import torch

    if dtype == "nvfp4":  # pairs of one value, and a scale for 16
        scales = 1.0 + (rows.abs().amax(1, keepdim=True) > 6).float()
        return (rows / scales)[:, ::2].to(torch.uint8), scales.repeat(1, rows.shape[1] // 16).to(torch.float8_e4m3fn)
    if blocks is not None:
        return tw.quantize_fp8(rows)
    most = rows.abs().max().view(1)
    assert most <= 8, "what no token has sent makes the scale"
    return (rows * 16).to(torch.float8_e4m3fn), torch.full((1,), 1 / 16)


def given(case: dict[str, Any], rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rank's batch, of rows that quantisation leaves what they are."""
    rows, ids, weights = batch(case["sizes"][rank], case["top_k"], case["hidden"], [rank, 7], case["none"])
    if case["quant"] == "nvfp4":
        rows = np.abs(rows[:, ::2]).repeat(2, 1) * np.where(np.arange(len(rows)) % 2, 4, 1)[:, None]
    if case["quant"] == "fp8":
        rows = 2.0 ** (np.abs(rows) - 4) * (1 + np.arange(len(rows)))[:, None]
    return rows, ids, weights


def kernel_of(case: dict[str, Any], config: Any, fail: Any = None) -> tuple[Any, Any]:
    """(a layer's kernel as vLLM makes it, its experts)."""
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.distributed import get_ep_group
    from vllm.model_executor.layers.fused_moe import all2all_utils

    backend = LOW if case["batched"] else case.get("backend", HIGH)
    # As vLLM's communicator for GPUs has it; that for CPUs has one of its own in place of all others.
    get_ep_group().device_communicator.all2all_manager = manager_of(backend)
    moe = moe_config(config, backend, case["top_k"], case["hidden"], getattr(torch, case["dtype"]))
    quant = quant_of(case["quant"])
    places = torch.tensor([0, 3, 1, 4, 2, 5])  # of experts by turns
    tables = (places, places.argsort(), torch.arange(3) * 2 + moe.moe_parallel_config.ep_rank)
    made = all2all_utils.maybe_make_prepare_finalize(
        moe, quant, routing_tables=tables if case["robin"] else None, all2all_manager=manager_of(backend)
    )
    experts = experts_of(case["batched"], moe, quant, fail, case["robin"])
    return mk.FusedMoEKernel(made, experts), experts


def apply(kernel: Any, case: dict[str, Any], rank: int, rows: Any, ids: Any, weights: Any) -> Any:
    """A layer's forward pass: [T, H]."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    local, width = torch.arange(EXPERTS // 2), case["hidden"]
    expert_map = torch.full((EXPERTS,), -1)
    expert_map[rank * len(local) + local] = local
    return kernel.apply(
        torch.from_numpy(rows).to(getattr(torch, case["dtype"])),
        torch.zeros(len(local), WIDTH, width),
        torch.zeros(len(local), width, WIDTH),
        torch.from_numpy(weights).float(),
        torch.from_numpy(ids).to(kernel.prepare_finalize.topk_indices_dtype()),
        MoEActivation.SILU,
        EXPERTS,
        expert_map,
        case["input"],
    )


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
    import torch
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.distributed import get_ep_group
    from vllm.distributed.device_communicators import all2all

    from tokenway.compat import deep_ep
    from tokenway.integrations import vllm as adapter

    deep_ep.install()
    adapter.unregister()
    moe = moe_config(config, LOW if case["batched"] else HIGH, case["top_k"], case["hidden"], torch.bfloat16)
    quant = quant_of(case["quant"])
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
    kernel = mk.FusedMoEKernel(Made(buffer, **ranks), experts_of(case["batched"], moe, quant))
    before, data = steps(), given(case, rank)
    out = apply(kernel, case, rank, *data)
    kinds = type(buffer).__module__, type(kernel.prepare_finalize).__module__.rpartition(".")[2]
    return {"out": out.float().numpy(), "steps": steps() - before, "data": data, "kinds": kinds, "given": {}}
