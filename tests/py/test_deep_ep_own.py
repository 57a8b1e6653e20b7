"""DeepEP's own tests of its normal and its low-latency mode, over Tokenway on the CPU: those of a checkout."""

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
    for name in ("envs", "math", "testing"):
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
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_deep_eps_own_tests(torch: Any, tmp_path: Path, ranks: int) -> None:
    """All their cases but those of LogFMT and of masked ranks, which this is no part of."""
    if not os.environ.get(SOURCE):
        pytest.skip(f"{SOURCE} does not name a checkout of DeepEP")
    for found in tw.run(rank_main, ranks, str(tmp_path / "store"), ranks, timeout=2 * HANGS):
        assert found["normal"] > 60 and found["low latency"] > 40
