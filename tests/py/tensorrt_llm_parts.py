"""TensorRT-LLM without its compiled parts: its interface of communications, and what stands in for all else of it.

No package registry has its sources, so the interface is recorded here: names, parameters and defaults. Where the
environment names a checkout (SOURCE), TensorRT-LLM's own files take the record's place, and are compared with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

SOURCE = "TOKENWAY_TENSORRT_LLM_SOURCE"  # a checkout of github.com/NVIDIA/TensorRT-LLM
# What was read there, below /blob/: base.py, which the record below follows, and communication_factory.py.
READ = (
    "0790edf6d3530e40d21d6a1155b516aef9b6f51b/tensorrt_llm/_torch/moe/fused_moe/communication/base.py",
    "17d5bd861cddd517bbcbc4520833d42354f8b42a/tensorrt_llm/_torch/moe/fused_moe/communication/communication_factory.py",
)
VERSION = "1.4.0"
NEW, OLD = "tensorrt_llm._torch.moe.fused_moe.communication", "tensorrt_llm._torch.modules.fused_moe.communication"
REAL = ("", ".base", ".communication_factory")  # files of a checkout that are run
FORCE = "TRTLLM_FORCE_COMM_METHOD"


class Communication(ABC):
    """The record of TensorRT-LLM's class."""

    def __init__(self, mapping):
        self.mapping, self.ep_size, self.ep_rank = mapping, mapping.moe_ep_size, mapping.moe_ep_rank
        assert self.is_platform_supported()

    @staticmethod
    @abstractmethod
    def is_platform_supported(): ...

    @abstractmethod
    def is_workload_feasible(self, all_rank_num_tokens, num_chunks): ...

    def supports_post_quant_dispatch(self):
        return True

    def prepare_dispatch(self, token_selected_slots, all_rank_num_tokens, local_statistic_tensor=None):
        return None

    @abstractmethod
    def dispatch(
        self,
        hidden_states,
        hidden_states_sf,
        token_selected_slots,
        token_final_scales,
        all_rank_num_tokens,
        use_dp_padding=None,
        **kwargs,
    ): ...

    @abstractmethod
    def combine(self, final_hidden_states, **kwargs): ...

    def destroy(self):
        return None

    def get_eplb_gathered_statistics(self):
        raise NotImplementedError


class CommunicationFactory:
    """The record of the factory, which knows no method of its own."""

    @staticmethod
    def create_strategy(
        model_config,
        num_experts,
        num_slots,
        top_k,
        expert_size_per_partition,
        payload_in_workspace=False,
        alltoall_result_do_sum=True,
        use_flashinfer=False,
        hidden_size=None,
        communication_method=None,
        allow_alltoall=True,
    ):
        mapping = model_config.mapping
        if not mapping.enable_attention_dp or mapping.dp_size == 1:
            return None
        given = model_config, num_experts, num_slots, top_k, expert_size_per_partition
        flags = payload_in_workspace, alltoall_result_do_sum, use_flashinfer
        method = os.environ.get(FORCE, communication_method)
        return CommunicationFactory._create_forced_method(method, *given, *flags, hidden_size=hidden_size)

    @staticmethod
    def _create_forced_method(
        method,
        model_config,
        num_experts,
        num_slots,
        top_k,
        expert_size_per_partition,
        payload_in_workspace,
        alltoall_result_do_sum,
        use_flashinfer,
        hidden_size=None,
    ):
        raise ValueError(f"Unknown communication method: {method}")


class _Absent(types.ModuleType):
    """A module of which all is there that is asked for, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds tensorrt_llm, where there is none. place: the package of communications; the other one is not there.
    source: a checkout, None: the record. given: names of other modules, by module."""

    def __init__(self, place: str, source: Path | None, given: dict[str, dict[str, Any]]):
        self.given = dict(given)
        self._lacks = (OLD if place == NEW else NEW).removesuffix(".fused_moe.communication")
        self._files: dict[str, Path] = {}
        if source is None:
            record = {"Communication": Communication, "CommunicationFactory": CommunicationFactory}
            self.given[place] = record
        else:
            folder = source / place.replace(".", "/")
            files = {part: folder / f"{part[1:] or '__init__'}.py" for part in REAL}
            self._files = {f"{place}{part}": file for part, file in files.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "tensorrt_llm" or f"{name}.".startswith(f"{self._lacks}."):
            return None
        if name in self._files:
            inside = [] if self._files[name].stem == "__init__" else None
            return importlib.util.spec_from_file_location(name, self._files[name], submodule_search_locations=inside)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        module.__dict__.update(self.given.get(module.__name__, {}))


def checkout() -> Path | None:
    return Path(os.environ[SOURCE]) if os.environ.get(SOURCE) else None


def place_of(source: Path | None) -> str:
    """Of the package of communications, in a checkout."""
    return OLD if source is not None and not (source / NEW.replace(".", "/")).is_dir() else NEW


def put(folder: Path, place: str | None = None, source: Path | None = None, **utilities: Any) -> Parts:
    """Makes tensorrt_llm known in this process. folder: to write what says its version to. utilities: of its module
    _utils."""
    info = folder / f"tensorrt_llm-{VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    told = f"Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: {VERSION}\n"
    (info / "METADATA").write_text(told, encoding="utf-8")
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    parts = Parts(place or place_of(source), source, {"tensorrt_llm._utils": utilities})
    sys.meta_path.insert(0, parts)
    return parts


def forget(parts: Parts, folder: Path) -> None:
    """Undoes `put`."""
    sys.meta_path.remove(parts)
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def mapping(rank: int, process_group: Any, **other: Any) -> types.SimpleNamespace:
    """Two ranks of attention with data parallelism."""
    told = {"moe_ep_size": 2, "moe_ep_rank": rank, "moe_ep_group": [0, 1], "moe_tp_size": 1, "world_size": 2}
    told |= {"enable_attention_dp": True, "dp_size": 2, "has_cp_helix": lambda: False}
    return types.SimpleNamespace(**told | {"moe_ep_group_pg": process_group} | other)


def config(of: Any, hidden: int, dtype: Any, most: int | None) -> types.SimpleNamespace:
    """As TensorRT-LLM's ModelConfig, of which the factory reads these."""
    told: dict[str, Any] = {"max_num_tokens": most, "moe_max_num_tokens": most, "torch_dtype": dtype}
    told |= dict.fromkeys(("quant_config", "moe_load_balancer")) | {"use_low_precision_moe_combine": False}
    pretrained = types.SimpleNamespace(hidden_size=hidden)
    return types.SimpleNamespace(mapping=of, pretrained_config=pretrained, use_cuda_graph=False, **told)


class Mpi:
    """As much of a communicator of mpi4py as ranks need to meet, over the default process group."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []

    def Get_group(self) -> Mpi:
        return self

    def Incl(self, ranks: list[int]) -> list[int]:
        return ranks

    def Create_group(self, ranks: list[int]) -> Mpi:
        self.groups.append(ranks)
        return self

    def Get_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    def Get_size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size()

    def allgather(self, mine: Any) -> list[Any]:
        import torch.distributed as dist

        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return every

    def bcast(self, given: Any, root: int) -> Any:
        return self.allgather(given)[root]
