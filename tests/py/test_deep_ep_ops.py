"""What a layer through Tokenway in DeepEP's place asks of PyTorch beside the exchange: each operation is a kernel on a
device, and some of the host's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deep_ep_ranks import begin, end
from harness import HANGS

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, HIDDEN, TOKENS = 8, 64, 6
# They start nothing on a device.
NOTHING = {"view", "slice", "select", "detach", "transpose", "empty", "new_empty", "alias", "expand"}


def operations(call: Callable[[], Any]) -> list[str]:
    """The operations of PyTorch that a call makes, second and later times, but for those that start nothing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    call()
    with Noting():
        call()
    return [name for name in found if name not in NOTHING]


def rank_main(store: str) -> dict[str, list[str]]:
    import torch
    import torch.distributed as dist

    from tokenway.compat.deep_ep import Buffer

    rank, device = begin(store, 2)
    buffer = Buffer(dist.group.WORLD)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    ids = torch.tensor([[rank, 5, 2]] * TOKENS, device=device)
    weights = torch.ones(TOKENS, 3, device=device)
    stats = torch.zeros(EXPERTS // 2, dtype=torch.int32, device=device)

    def low_latency(stats: Any = None, hook: bool = False) -> None:
        told = {"use_fp8": False, "return_recv_hook": hook}
        rows, _, handle, _, receive = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, stats, **told)
        if hook:
            receive()
        *_, receive = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=hook)
        if hook:
            receive()

    def layout() -> Any:
        return buffer.get_dispatch_layout(ids, EXPERTS)

    per_rank, _, per_expert, in_rank, _ = layout()
    known = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}

    def normal() -> None:
        rows, _, _, _, handle, _ = buffer.dispatch(x, **known, topk_idx=ids, topk_weights=weights)
        buffer.combine(rows, handle)

    found = {
        "low latency": operations(low_latency),
        "with hooks": operations(lambda: low_latency(hook=True)),
        "with statistics": operations(lambda: low_latency(stats)),
        "layout": operations(layout),
        "normal": operations(normal),
    }
    end()
    return found


def test_operations_of_a_layer(torch: Any, tmp_path: Any) -> None:
    """The exchange alone, in low-latency mode; in normal mode weights of other ranks' experts are set to 0."""
    for found in tw.run(rank_main, 2, str(tmp_path / "store"), timeout=HANGS):
        assert found["low latency"] == [] and found["with hooks"] == []
        assert found["with statistics"] == ["add_"]
        assert found["normal"] == ["lt", "masked_fill_"]
        assert found["layout"] == ["new_zeros", "clamp", "remainder_", "scatter_", "sum", "any", "sum"]
