"""examples/collectivex: the adapter does what CollectiveX asks of its backends, here a class with the same methods."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "collectivex"
EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 16, 5


class EPBackend:
    """As far as an adapter sees CollectiveX's."""

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: Any):
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device

    def finalize(self, rc: int) -> int:
        """The process group's end."""
        return rc


def of_rank(env: Any, tokens: int) -> list[bool]:
    """Whether what arrived, the counts, the oracle's sums and the staged sums are right; of the result of each."""
    import numpy as np
    import torch

    import tokenway as tw

    sys.modules["ep_backend"] = types.SimpleNamespace(EPBackend=EPBackend)  # type: ignore[assignment]
    sys.path.insert(0, str(FOLDER))
    from ep_tokenway import TokenwayBackend

    rank, n = env.comm.rank, env.comm.nranks
    args = types.SimpleNamespace(experts=EXPERTS, topk=TOP_K, hidden=HIDDEN)
    backend: Any = TokenwayBackend(args, rank, n, rank, torch.device("cpu"))
    tw.connect, connect = (lambda: env.comm), tw.connect
    backend.create_buffer(types.SimpleNamespace(max_tokens_per_rank=tokens + 2))
    tw.connect = connect
    rng = np.random.default_rng(7)
    ids = torch.from_numpy(np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(n * tokens)]))
    weights = torch.from_numpy(rng.random((n * tokens, TOP_K)).astype(np.float32))
    x = (torch.arange(n * tokens * HIDDEN).reshape(n * tokens, HIDDEN) % 256).bfloat16()
    own = slice(rank * tokens, (rank + 1) * tokens)
    problem = types.SimpleNamespace(
        T=tokens, dispatch_x=x[own], topk_idx=ids[own].to(backend._topk_idx_dtype()), topk_weights=weights[own]
    )
    found = []
    handle = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, handle)
    home = ids // (EXPERTS // n)
    come = (home == rank).any(dim=1)
    found.append(torch.equal(view.payload, x[come]))
    found.append(torch.equal(view.expert_ids, torch.where(home == rank, ids, -1)[come]))
    found.append(torch.equal(view.weights, weights.masked_fill(home != rank, 0)[come]))
    found.append(backend.recv_tokens(handle) == int(come.sum()) == len(view.payload))
    found.append(int(view.local_expert_counts.sum()) == int((home == rank).sum()))
    out = backend.combine_transformed(problem, handle, view.payload * 2)
    ranks_of = torch.stack([(home[own] == r).any(dim=1) for r in range(n)]).sum(dim=0)
    found.append(torch.equal(out, x[own] * 2 * ranks_of[:, None]))
    handle = backend.dispatch(problem)
    backend.stage(problem, handle)
    found.append(torch.equal(backend.combine(problem, handle), x[own] * ranks_of[:, None]))
    backend._comm = types.SimpleNamespace(close=lambda: None)  # the test's, which others use
    assert backend.finalize(3) == 3
    return found


@pytest.mark.torch
@pytest.mark.processes
def test_the_adapter(processes: Any, torch: Any) -> None:
    assert processes(2).run(of_rank, TOKENS) == [[True] * 7] * 2
