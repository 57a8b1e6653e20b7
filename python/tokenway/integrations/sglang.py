"""SGLang: its DeepEP dispatchers, and the gathers of data-parallel attention, through Tokenway, by SGLang's plugins.

    TOKENWAY_SGLANG=1 python -m sglang.launch_server --moe-a2a-backend deepep ...

SGLang finds this plugin by itself, in each of its processes; without the variable it does nothing. The backend keeps
its name, since models ask for it by name in many places: what it calls is Tokenway instead (tokenway.compat.deep_ep).
docs/FRAMEWORKS.md says what works, and what ranks must do alike.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tokenway import InvalidArgument
from tokenway.integrations import supported

LEAST, BELOW = "0.5.23", "0.5.24"
NAME = "tokenway"  # of the plugin, as pyproject.toml has it
SWITCH = "TOKENWAY_SGLANG"
_DISPATCHER = "sglang.srt.layers.moe.token_dispatcher.deepep"
_QUANTIZE = "sglang_per_token_group_quant_fp8"  # a kernel of SGLang's, which it looks for only beside a deep_ep
_COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_registered = False


def plugin() -> None:
    """SGLang's entry point `sglang.srt.plugins`: `register`, if the environment asks for it (`asked`), else nothing.

    Errors: InvalidArgument for another value of the variable, and those of `register`. SGLang logs what a plugin
    raises and goes on; so that it does not go on with another library, the first DeepEP dispatcher says it again."""
    try:
        if asked():
            _register()  # SGLang applies hooks once all plugins have theirs, and passes over what was applied before
    except Exception as error:
        dispatcher: Any = sys.modules.get(_DISPATCHER)
        if dispatcher is not None:
            dispatcher.use_deepep, dispatcher._deepep_import_error = False, error
        raise


def asked() -> bool:
    """Whether the environment asks for Tokenway: TOKENWAY_SGLANG=1, or SGLANG_PLUGINS names "tokenway" and
    TOKENWAY_SGLANG is not 0. Errors: InvalidArgument for another value."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise InvalidArgument.of(SWITCH, f"is {value!r}; it must be 0 or 1")
    named = (name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(","))
    return value == "1" or (value == "" and NAME in named)


def register() -> None:
    """Puts Tokenway in the place of DeepEP in SGLang's dispatchers, and in that of NCCL in the gathers and
    reduce-scatters of uneven sizes of SGLang's groups, in this process. For programs that hold SGLang themselves: a
    server does it by `plugin`. Not collective; on every rank, before the first forward pass. Does nothing the second
    time.

    Errors: Unsupported, which names the versions, where SGLang or PyTorch is missing, too old or too new;
    InvalidArgument for another value of TOKENWAY_BALANCE than 0, 1 and "framework", which say who moves experts
    (sglang_eplb)."""
    _register()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()  # what is applied already stays as it is


def _register() -> None:
    """`register`, whose hooks are to be applied yet."""
    global _registered
    if _registered:
        return
    supported.check_framework("sglang", LEAST, BELOW)
    from tokenway.integrations import moved_experts

    _serve_dispatchers()
    _serve_gathers()
    if moved_experts.asked():
        _serve_balancer()
    _registered = True


def _serve_dispatchers() -> None:
    """Sets the names that SGLang's module has from deep_ep, there alone: SGLang's hooks would want them to be there,
    which they are not without DeepEP, and would replace them in DeepEP's own modules too."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    from tokenway.compat import deep_ep

    if not hasattr(deepep, _QUANTIZE):
        from sglang.kernels.ops.quantization import fp8_kernel

        setattr(deepep, _QUANTIZE, getattr(fp8_kernel, _QUANTIZE))
    deepep.Buffer, deepep.Config = deep_ep.Buffer, deep_ep.Config
    deepep.use_deepep, deepep._deepep_import_error = True, None


def _serve_gathers() -> None:
    """Hooks `all_gatherv` and `reduce_scatterv` of SGLang's groups, and has data-parallel attention call the first
    where it would fill up with zeros and all-reduce, unless the environment says otherwise (SGLANG_DP_USE_GATHERV)."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "SGLANG_DP_USE_GATHERV" not in os.environ:
        dp_attention._USE_DP_GATHERV = True
    for name, hook in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        HookRegistry.register(f"{_COORDINATOR}.{name}", hook, HookType.AROUND)


def _serve_balancer() -> None:
    """Hooks SGLang's balancer, whose experts Tokenway's moves then (TOKENWAY_BALANCE)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tokenway.integrations import sglang_eplb

    for target, name in sglang_eplb.HOOKS.items():
        HookRegistry.register(target, getattr(sglang_eplb, name), HookType.AROUND)


def _all_gatherv(original: Any, group: Any, input_: Any, sizes: Any = None, output: Any = None) -> Any:
    """In the place of GroupCoordinator.all_gatherv: the rows of all ranks, in a list, for a tensor too."""
    if group.world_size == 1:
        return original(group, input_, sizes=sizes, output=output)
    from tokenway.integrations import collectives

    rows = input_ if isinstance(input_, (list, tuple)) else [input_]
    out = None if output is None else [output]
    return list(collectives.of(group.device_group, rows[0].device).all_gatherv(rows, sizes, out))


def _reduce_scatterv(original: Any, group: Any, input_: Any, output: Any = None, sizes: Any = None) -> Any:
    """In the place of GroupCoordinator.reduce_scatterv: this rank's sums. Deterministic inference keeps SGLang's way,
    whose bits are those of its all-reduce."""
    from sglang.srt.environ import envs

    if group.world_size == 1 or envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get():
        return original(group, input_, output=output, sizes=sizes)
    from tokenway.integrations import collectives

    out = None if output is None else [output]
    return collectives.of(group.device_group, input_.device).reduce_scatterv([input_], sizes, out)[0]
