"""Baselines over torch.distributed's NCCL backend: what a framework does on GPUs without this library.

As with the CPU's baselines, ids and weights do not travel, counts and permutations are known beforehand, and all
buffers are reused.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from tokenway import tensors
from tokenway.bench import gloo
from tokenway.bench.baselines import Plan, check_result
from tokenway.bench.graphs import COUNT, Events, Graphs, Replay

NAMES = ("nccl-alltoall", "nccl-allgather")


def missing(local_ranks: int, ranks: int) -> str | None:
    """Why these baselines cannot run, or None."""
    if local_ranks:
        return "NCCL connects processes, and --local-ranks are threads of one"
    if ranks < 2:
        return "one rank has no peer"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    return None


def barrier() -> Any:
    """What enqueues a barrier of all ranks on their devices: the smallest all-reduce."""
    import torch
    import torch.distributed as dist

    one = torch.zeros(1, device="cuda")
    dist.all_reduce(one)  # sets the communicator up, which cannot be captured
    torch.cuda.current_stream().synchronize()
    return lambda: dist.all_reduce(one)


def _wide(array: np.ndarray) -> Any:
    """Rows of bytes in the widest elements that divide them: index_select works by element."""
    import torch

    size = next(size for size in (8, 4, 2, 1) if array.shape[1] % size == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    return torch.from_numpy(np.ascontiguousarray(array)).view(kind)


class AllToAll:
    """`all_to_all_single` there and back, each (token, rank) row once."""

    name = "nccl-alltoall"

    def __init__(self, plan: Plan):
        import torch

        self._plan = plan
        hidden, count = plan.case.profile.hidden, plan.rows.shape[0]
        total, n = sum(plan.send_counts), plan.case.ranks
        self._rows = _wide(plan.rows).cuda()
        self._order = torch.from_numpy(np.concatenate(plan.to)).cuda()
        self._send = self._rows.new_zeros((total, self._rows.shape[1]))
        self._received = self._rows.new_zeros((sum(plan.recv_counts), self._rows.shape[1]))
        self._parts = tensors.to_torch(np.concatenate(plan.parts)).cuda()
        # One row more than come back: it stays zero, for tokens that went to fewer ranks.
        self._back = self._parts.new_zeros((total + 1, hidden))
        places = np.full((count, n), total)
        begin = 0
        for rank, tokens in enumerate(plan.to):
            places[tokens, rank] = begin + np.arange(len(tokens))
            begin += len(tokens)
        self._places = torch.from_numpy(places.reshape(-1)).cuda()
        self._gathered = self._parts.new_zeros((count * n, hidden))
        self._by_rank = self._gathered.view(count, n, hidden)
        self._out = self._parts.new_zeros((count, hidden))

    def __call__(self) -> None:
        """Dispatch and combine. The sum of bfloat16 rows accumulates in float32."""
        import torch
        import torch.distributed as dist

        sends, receives = self._plan.send_counts, self._plan.recv_counts
        torch.index_select(self._rows, 0, self._order, out=self._send)
        dist.all_to_all_single(self._received, self._send, receives, sends)
        dist.all_to_all_single(self._back[:-1], self._parts, sends, receives)
        torch.index_select(self._back, 0, self._places, out=self._gathered)
        torch.sum(self._by_rank, 1, out=self._out)

    def check(self) -> None:
        """Raises Mismatch unless the last call did its work."""
        from tokenway.bench.gpu_case import to_numpy

        received = to_numpy(self._received).view(np.uint8).reshape(-1, self._plan.rows.shape[1])
        check_result(self._plan, self.name, received, to_numpy(self._out))


class AllGather(gloo.AllGather):
    """The same on GPUs."""

    name = "nccl-allgather"

    @staticmethod
    def _placed(tensor: Any) -> Any:
        return tensor.cuda()


KINDS: dict[str, Any] = {"nccl-alltoall": AllToAll, "nccl-allgather": AllGather}


def capture(baseline: Any, agree: Any, backward: bool = False) -> tuple[Any, str | None]:
    """(what times a baseline, why it is not a graph or None). agree: the first problem of any rank. Collective.

    backward: "both" too. The gradient of all_to_all_single is one with the counts exchanged, that of a permutation the
    other permutation, those of all_gather and reduce_scatter each other: so the backward pass is the forward pass's
    calls once more, on gradients.

    A communicator sets itself up in its first calls, which cannot be captured: those are made before.
    """
    import torch

    for _ in range(3):
        baseline()
    torch.cuda.current_stream().synchronize()
    agree(None)
    times = {"pair": 1} | ({"both": 2} if backward else {})
    replays: dict[str, Replay] = {}
    problem = None
    try:
        for phase, calls in times.items():
            replays[phase] = Replay(baseline, lambda calls=calls: [baseline() for _ in range(calls * COUNT)] and None)
    except RuntimeError as error:
        problem = (str(error).strip().splitlines() or ["capture failed"])[0]
    problem = agree(problem)
    if problem is None:
        return Graphs(baseline.name, replays), None
    for replay in replays.values():
        replay.close()
    return Events(baseline.name, baseline, times), problem
