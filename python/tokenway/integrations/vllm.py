"""vLLM: the dispatch and combine of its MoE layers through Tokenway, by vLLM's plugins.

    vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --enable-expert-parallel \\
        --all2all-backend tokenway_low_latency

vLLM's lists of backends are closed. So three names are added to what `--all2all-backend` takes, each for one of vLLM's
own, which a config holds from there on; and where vLLM looks for the classes of those, it finds Tokenway's.
docs/FRAMEWORKS.md says what works, and what ranks must do alike.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from functools import wraps
from typing import Any, Literal, get_args

from tokenway import Unsupported
from tokenway.integrations import supported

LEAST, BELOW = "0.33.0", "0.34"
VARIABLE = "TOKENWAY_VLLM"  # of the environment: "1" is as a call of `register` in every process of vLLM's
# Of --all2all-backend, and for which of vLLM's it stands.
NAMES = {
    "tokenway": "flashinfer_nvlink_one_sided",
    "tokenway_high_throughput": "deepep_high_throughput",
    "tokenway_low_latency": "deepep_low_latency",
}

_kept: list[tuple[Any, str, Any]] = []  # module or class, name, and what vLLM had there, if anything
_MISSING = object()


def plugin() -> None:
    """What vLLM calls in each of its processes (entry point `vllm.general_plugins`): `register` if the environment says
    TOKENWAY_VLLM=1, else `offer`, where vLLM is one that it is for. Not collective. Errors: those of `register`."""
    if os.environ.get(VARIABLE) == "1":
        register()
    try:
        _check()
    except Unsupported:  # nobody has asked for it
        return
    try:
        offer()
    except Exception:  # nor for this
        logging.getLogger(__name__).warning("--all2all-backend takes no names of Tokenway's here", exc_info=True)


def register() -> None:
    """Puts Tokenway's classes in the place of vLLM's for DeepEP and FlashInfer in this process, so that
    `--all2all-backend deepep_high_throughput`, `deepep_low_latency` and `flashinfer_nvlink_one_sided` are Tokenway's.
    Before vLLM makes its process groups; not collective; on every rank. Does nothing the second time. Errors:
    Unsupported, which names the versions, where vLLM or PyTorch is missing, too old or too new; InvalidArgument for
    another value of TOKENWAY_BALANCE than 0, 1 and "framework", which say who moves experts (vllm_eplb)."""
    _check()
    if _kept:
        return
    from tokenway.integrations import moved_experts

    balanced = moved_experts.asked()
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import all2all_utils

    from tokenway.integrations import vllm_layers

    places = {
        "DeepEPHTPrepareAndFinalize": vllm_layers.TokenwayStandardPrepareAndFinalize,
        "DeepEPLLPrepareAndFinalize": vllm_layers.TokenwayBatchedPrepareAndFinalize,
        "DEEPEP_QUANT_BLOCK_SHAPE": [128, 128],
        "FlashInferNVLinkOneSidedPrepareAndFinalize": vllm_layers.TokenwayCapturedPrepareAndFinalize,
        "flashinfer_one_sided_dispatch_layout": vllm_layers.captured_layout,
    }
    # vLLM has imported those of DeepEP only where a deep_ep is installed; its function looks them up when it is called.
    looked_up = all2all_utils.maybe_make_prepare_finalize.__code__.co_names
    managers = {"DeepEPHTAll2AllManager", "DeepEPLLAll2AllManager", "FlashInferNVLinkOneSidedManager"}
    if not places.keys() <= set(looked_up) or not managers <= vars(all2all).keys():
        raise Unsupported(
            f"vLLM's {all2all_utils.__name__} is not that of vllm {LEAST}: it names no classes for DeepEP"
        )
    for name, made in places.items():
        _put(all2all_utils, name, made)
    for name in managers:
        _put(all2all, name, vllm_layers.TokenwayManager)
    if balanced:
        from tokenway.integrations import vllm_eplb

        for owner, name, made in vllm_eplb.places():
            _put(owner, name, made)


def unregister() -> None:
    """Takes them away again. What was made of them stays."""
    while _kept:
        module, name, before = _kept.pop()
        if before is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, before)


def offer() -> None:
    """Has `--all2all-backend` take the names, and `ParallelConfig(all2all_backend=...)` likewise: who asks for one
    has TOKENWAY_VLLM=1 in the environment, which processes that are started inherit, and a config that holds vLLM's
    name, which is Tokenway's from then on in this process and in those. Nothing else is changed. Not collective. Does
    nothing the second time, nor in a process of vLLM's that makes no config: workers have imported no command line."""
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is None:
        return
    from vllm.config import ParallelConfig

    field, computed = ParallelConfig.__dataclass_fields__["all2all_backend"], arg_utils._compute_kwargs
    if set(NAMES) <= set(get_args(field.type)):
        return
    computed.cache_clear()  # what the command line takes
    field.type = Literal[(*get_args(field.type), *NAMES)]
    made = ParallelConfig.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stands_for = NAMES.get(kwargs.get("all2all_backend"))  # type: ignore[arg-type]
        if stands_for is not None:
            register()
            os.environ[VARIABLE] = "1"
            kwargs["all2all_backend"] = stands_for
        made(self, *args, **kwargs)

    ParallelConfig.__init__ = init


def _check() -> None:
    supported.check_framework("vllm", LEAST, BELOW)


def _put(module: Any, name: str, made: Any) -> None:
    _kept.append((module, name, inspect.getattr_static(module, name, _MISSING)))
    setattr(module, name, made)
