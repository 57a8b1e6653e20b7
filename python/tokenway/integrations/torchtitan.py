"""torchtitan: its expert-parallel layers through Tokenway, by torchtitan's own overrides.

    torchrun --nproc-per-node 8 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \\
        --parallelism.expert_parallel_degree 8 --training.disable_cuda_graphs \\
        --override.imports tokenway.integrations.torchtitan.dispatcher

To import this module is to ask for torchtitan: it registers the override. docs/FRAMEWORKS.md says what works, and what
ranks must do alike.
"""

from __future__ import annotations

from typing import Any

from tokenway.integrations import supported

LEAST, BELOW = "0.3.0", "0.4"


def dispatcher(
    config: Any, *, max_tokens: int | None = None, row_alignment: int | None = None, timeout: float | None = None
) -> Any:
    """The override that `--override.imports` names: what a layer has in the place of an AllToAllTokenDispatcher.Config.
    Not collective. All ranks give the same settings, as `target={"max_tokens": 8192}` on the command line.

    max_tokens: what the group has room for from the first forward pass on, of a rank in a call; without, it grows with
    what comes, which all ranks know, since torchtitan pads batches to the same number of tokens. row_alignment: the
    rows of each expert are filled up to a multiple of it, with rows of 0; by default what the dispatcher that is
    replaced did (torchtitan's quantised experts need it). timeout: seconds after which a late rank is an error (default
    100).

    Without expert parallelism a layer uses the dispatcher that it had. Errors: InvalidArgument for a max_tokens out of
    range, in the first forward pass for another setting."""
    from torchtitan.config import derive

    from tokenway.integrations.groups import Sizes
    from tokenway.integrations.torchtitan_dispatcher import TokenwayTokenDispatcher

    Sizes(max_tokens, True)  # which refuses what is out of range
    aligned = getattr(config, "pad_multiple", None) if row_alignment is None else row_alignment
    settings = {"max_tokens": max_tokens, "row_alignment": aligned, "timeout": timeout}
    return derive(config, TokenwayTokenDispatcher.Config, replaced=config, **settings)


def _register() -> None:
    """Makes `dispatcher` known to torchtitan. Raises Unsupported, which names the versions, where torchtitan or PyTorch
    is missing, too old or too new."""
    supported.check_framework("torchtitan", LEAST, BELOW)
    from torchtitan.config import override
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    override(target=AllToAllTokenDispatcher.Config, description="Tokenway's dispatch and combine")(dispatcher)


_register()
