"""DeepEP's own tests of its first and its second API, over Tokenway on the CPU: those of a checkout."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from frameworks import steps
from harness import HANGS, PATIENT

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.slow]

SOURCE = "TOKENWAY_DEEPEP_SOURCE"  # a checkout of github.com/deepseek-ai/DeepEP, of its main branch in 2026
# The source of DeepEP 2.5 (deepinfer-ep), whose package has no tests: its references judge EPBuffer then.
SOURCE_2_5 = "TOKENWAY_DEEPEP_2_5_SOURCE"
TOKENS, HIDDEN, TOP_K, EXPERTS = 48, 1024, 4, 16


def on_the_cpu() -> None:
    """What says "cuda" means the CPU, where there is no device; events take no time."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    OnCpu().__enter__()
    torch.cuda.synchronize = lambda *_: None
    # gloo wants tensors of the same number of dimensions.
    dist.all_gather_into_tensor = lambda out, mine, group: dist.all_gather(list(out.unbind(0)), mine, group)


def load(name: str, path: Path) -> Any:
    """A module of DeepEP's, under the name that its tests import."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def prepare(source: Path) -> None:
    """deep_ep is Tokenway's; beside it stand DeepEP's helpers of tests, which measure nothing here."""
    import torch

    from tokenway.compat import deep_ep

    deep_ep.install()
    sys.modules["deep_ep._C"] = types.ModuleType("deep_ep._C")
    comm = sys.modules["deep_ep.utils.comm"] = types.ModuleType("deep_ep.utils.comm")
    comm.get_nccl_comm_handle = None  # type: ignore[attr-defined]
    compiled, torch.compile = torch.compile, lambda *_, **__: lambda function: function
    for name in ("envs", "math", "testing", "gate", "refs"):
        load(f"deep_ep.utils.{name}", source / "deep_ep" / "utils" / f"{name}.py")
    torch.compile = compiled
    testing = sys.modules["deep_ep.utils.testing"]

    def once(function: Any, *_: Any, **__: Any) -> tuple[float, float, float]:
        function()
        return 1.0, 1.0, 1.0

    def profiled(function: Any, kernel_names: Any, *_: Any, num_kernels_per_period: int = 1, **__: Any) -> Any:
        function()
        return [1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period for _ in kernel_names]

    testing.bench, testing.bench_kineto = once, profiled  # type: ignore[attr-defined]


def elastic_main(kind: str, group: Any, source: Path) -> None:
    """All cases of the test of the second API, whose rows are compared bit by bit, of a kind of buffer."""
    import deep_ep
    import torch
    import torch.distributed as dist

    elastic = load("test_ep", source / "tests" / "elastic" / "test_ep.py")
    elastic.dist_print = lambda *_, **__: None
    modes = list(elastic.enumerate_ep_modes())
    if kind == "EPBuffer":  # which makes no copy of the ids
        elastic.enumerate_ep_modes = lambda: [mode for mode in modes if not mode[0]]
    # Of DeepEP's kernels; it is compared with itself.
    deep_ep.EPHandle.dst_buffer_slot_idx = property(lambda handle: handle.topk_idx)
    exchange = dist.all_to_all_single

    def of_bytes(out: Any, given: Any, *sizes: Any) -> None:  # gloo knows no fp8
        kinds = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (out, given))
        exchange(*kinds, *sizes)

    dist.all_to_all_single = of_bytes
    told = {"num_tokens": 24, "hidden": 256, "num_topk": TOP_K, "num_experts": EXPERTS, "num_sms": 0, "num_qps": 0}
    told |= {"unbalanced_ratio": 1.0, "precise_unbalanced_ratio": False, "masked_ratio": 0.0, "skip_check": False}
    told |= {"allow_multiple_reduction": 1, "allow_hybrid_mode": 1, "test_first_only": False}
    told |= {"skip_perf_test": True, "dump_profile_traces": ""}
    for waits, masked in ((1, 0.0), (0, 0.3)):
        buffer = getattr(deep_ep, kind)(group, num_max_tokens_per_rank=24, hidden=256, explicitly_destroy=True)
        args = argparse.Namespace(**told | {"do_cpu_sync": waits, "masked_ratio": masked, "deterministic": bool(waits)})
        elastic.test_dispatch_combine(buffer, args)


def rank_main(store: str, ranks: int) -> dict[str, int]:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["TOKENWAY_RANK"])
    torch.set_num_threads(1)
    on_the_cpu()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    source = Path(os.environ[SOURCE])
    prepare(source)
    import deep_ep

    from tokenway.integrations import groups

    group = dist.group.WORLD
    groups.of(group, timeout=PATIENT)
    low = load("test_low_latency", source / "tests" / "legacy" / "test_low_latency.py")
    normal = load("test_intranode", source / "tests" / "legacy" / "test_intranode.py")
    torch.manual_seed(rank)
    args = argparse.Namespace(num_tokens=TOKENS, hidden=HIDDEN, num_topk=TOP_K, num_experts=EXPERTS)
    buffer = deep_ep.Buffer(group, int(2e9), explicitly_destroy=True)
    found = {}
    normal.test_main(args, 24, rank, ranks, rank, buffer, group)
    found["normal"] = steps()
    mm = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda a, b: a  # type: ignore[assignment]  of large matrices, to take time
    low.test_main(TOKENS, HIDDEN, EXPERTS, TOP_K, rank, ranks, group, buffer, seed=1)
    torch.Tensor.__matmul__ = mm  # type: ignore[assignment]
    found["low latency"] = steps() - found["normal"]
    elastic_main("ElasticBuffer", group, source)
    found["elastic"] = steps() - found["normal"] - found["low latency"]
    if os.environ.get(SOURCE_2_5):
        load("deep_ep.utils.refs", Path(os.environ[SOURCE_2_5]) / "deep_ep" / "utils" / "refs.py")
    elastic_main("EPBuffer", group, source)
    found["ep"] = steps() - sum(found.values())
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_deep_eps_own_tests(torch: Any, tmp_path: Path, ranks: int) -> None:
    """All their cases but those of LogFMT and of masked ranks, which this is no part of; those of the second API by
    EPBuffer too, but where the handle has a copy of the ids."""
    if not os.environ.get(SOURCE):
        pytest.skip(f"{SOURCE} does not name a checkout of DeepEP")
    for found in tw.run(rank_main, ranks, str(tmp_path / "store"), ranks, timeout=2 * HANGS):
        assert found["normal"] > 60 and found["low latency"] > 40 and found["elastic"] > 1000
        assert found["ep"] > 500
