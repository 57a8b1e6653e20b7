"""Megatron: its MoE layers through Tokenway, by Megatron's own specs of modules.

    from tokenway.integrations import megatron as tokenway_megatron

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(config, tokenway_megatron.through_tokenway(spec), ...)

docs/FRAMEWORKS.md says what works, and what ranks must do alike.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tokenway import InvalidArgument
from tokenway.integrations import supported

LEAST, BELOW = "0.16.1", "0.17"


def through_tokenway(
    spec: Any,
    *,
    max_tokens: int | None = None,
    equal: bool | None = None,
    timeout: float | None = None,
    fp8_rows: bool = False,
) -> Any:
    """A copy of a spec, in which every MoELayer exchanges its tokens through Tokenway: a ModuleSpec of one, of a layer
    or a block that has one, or TransformerBlockSubmodules. Not collective; all ranks call it alike.

    Sizes must be known alike: equal, that all ranks have equally many tokens in each forward pass (default: unless the
    config says `variable_seq_lengths`); or max_tokens, the most of a rank (sequences times length, divided by the ranks
    that share a sequence). Where ranks that count as equal are not, one that must grow and the others wait for each
    other until the timeout, after which the group is finished: say max_tokens then. timeout: seconds after which a late
    rank is an error (default 100). fp8_rows: rows travel to their experts as e4m3 with a float32 scale for each 128
    elements, alike on all ranks; experts are given rows of the dtype that they had, gradients pass straight through,
    and what returns, forward and backward, is of that dtype.

    Megatron builds the dispatcher that its config names first; it is not used. Comms and groups are made in the first
    forward pass, and grow in one that has more tokens than all before (`tokenway.integrations.groups`): collective
    among the expert-parallel group. All layers share a group. Errors: Unsupported, which names the versions, where
    Megatron or PyTorch is missing, too old or too new; InvalidArgument for a spec without an MoELayer."""
    if not isinstance(fp8_rows, bool):
        raise InvalidArgument.of("fp8_rows", f"is {fp8_rows!r}; it must be True or False")
    supported.check_framework("megatron-core", LEAST, BELOW, "megatron")
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from tokenway.integrations.groups import Sizes
    from tokenway.integrations.megatron_layer import TokenwayMoELayer

    sizes = Sizes(max_tokens, bool(equal))
    said = {"sizes": None if equal is None and max_tokens is None else sizes, "timeout": timeout, "fp8_rows": fp8_rows}
    copied = deepcopy(spec)
    found = [each for each in _specs(copied) if each.module is MoELayer]
    if not found:
        raise InvalidArgument.of("spec", "has no MoELayer; it must be of one, or of layers that have one")
    for each in found:
        each.module = TokenwayMoELayer
        each.params = {**each.params, **said}
    return copied


def _specs(spec: Any) -> list[Any]:
    """A ModuleSpec and all within it, each once."""
    found, left = [], [spec]
    while left:
        each = left.pop()
        if isinstance(each, (list, tuple)):
            left += each
        elif each is not None and not isinstance(each, type) and hasattr(each, "__dataclass_fields__"):
            if hasattr(each, "module") and all(each is not other for other in found):
                found.append(each)
            left += [getattr(each, name) for name in each.__dataclass_fields__ if name not in ("params", "metainfo")]
    return found
