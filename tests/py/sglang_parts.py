"""SGLang without its kernels: which packages and parts of it stand empty, so that its dispatchers can be imported and
run, on a CPU and on GPUs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from frameworks import here, on_devices

PINNED = "0.5.23"
# What SGLang imports at its start, and no test uses: Triton's kernels, the web server and its client, pictures, words.
PACKAGES = {"triton", "starlette", "IPython", "aiohttp", "torchvision", "sentencepiece"}
# And on GPUs, where Triton is there: kernels that SGLang imports where it finds a device.
KERNELS = {"sgl_kernel", "flashinfer"}
# Parts of SGLang likewise, all with needs of their own: grouped products, formats of weights, batches, metrics.
PARTS = (
    "sglang.srt.layers.moe.moe_runner",
    "sglang.srt.layers.quantization",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.observability.metrics_collector",
)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them, as SGLang itself stands in for Triton where there is none: whatever is asked of a module is there."""

    def __init__(self, make: Any, packages: set[str]):
        self._make, self._packages = make, packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.partition(".")[0] in self._packages or any(name == p or name.startswith(f"{p}.") for p in PARTS)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return self._make(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def put_stand_ins() -> None:
    """Before SGLang is imported. Its functions that PyTorch would compile are not: a CPU's would want a real Triton."""
    import transformers.models.llama.modeling_llama  # noqa: F401  those ask what there is of Triton and torchvision

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    place = Path(importlib.util.find_spec("sglang").origin).parent / "_platform_stubs.py"  # type: ignore[union-attr]
    spec = importlib.util.spec_from_file_location("sglang_stand_ins", place)
    made = sys.modules["sglang_stand_ins"] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(made)  # type: ignore[union-attr]
    packages = PACKAGES - {"triton"} | KERNELS if on_devices() else PACKAGES
    sys.meta_path.insert(0, _StandIns(made._MockModule, packages))


def as_with_kernels() -> None:
    """What SGLang asks for, said by hand: that DeepGEMM is there, and its kernel that quantises; on a CPU also how many
    SMs there are, and which CUDA."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher import deepep

    if here().type == "cpu":
        torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=20)
        deepep.get_cuda_version = lambda: (13, 0)
    deepep._is_mnnvl_fabric_supported = lambda: False
    deepep.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    deepep.sglang_per_token_group_quant_fp8 = quantized


def quantized(rows: Any, block: int, **scales: Any) -> tuple[Any, Any]:
    """As SGLang's kernel: fp8 values, and a float32 scale for each 128 of them."""
    import tokenway as tw

    assert block == 128 and not any(scales.values())
    return tw.quantize_fp8(rows)
