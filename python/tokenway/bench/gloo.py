"""Baselines over torch.distributed's gloo backend: what a framework does without this library."""

from __future__ import annotations

import os
import tempfile
import warnings
from datetime import timedelta
from typing import Any

import numpy as np

from tokenway import tensors
from tokenway.bench.baselines import Plan, check_result
from tokenway.bench.control import Control


def join(folder: str, backend: str, rank: int, ranks: int) -> None:
    """Makes this process a rank of a process group that meets in a folder. Collective."""
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100))


class Process:
    """This process's place in a process group: in that which there is, if any. Creating it is collective."""

    def __init__(self, control: Control, backend: str = "gloo"):
        import torch
        import torch.distributed as dist

        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // control.nranks))
        self._there = dist.is_initialized()  # of ranks on several hosts, who meet by it
        if self._there:
            return
        folder = tempfile.mkdtemp(prefix="tokenway-bench-") if control.rank == 0 else ""
        self._folder = control.allgather(folder)[0]
        self._control = control
        join(self._folder, backend, control.rank, control.nranks)
        control.allgather(None)

    def close(self) -> None:
        """Collective."""
        import shutil

        import torch.distributed as dist

        if self._there:
            return
        self._control.allgather(None)
        dist.destroy_process_group()
        self._control.allgather(None)
        if self._control.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def _numpy(tensor: Any, name: str) -> np.ndarray:
    import torch

    raw = tensor.view(torch.uint8) if tensor.numel() else tensor.to(torch.uint8)
    return raw.numpy().view(tensors.numpy_dtype(name))


class AllToAll:
    """`all_to_all_single` there and back, each (token, rank) row once."""

    def __init__(self, plan: Plan):
        import torch

        self._plan = plan
        self._dtype = getattr(torch, plan.case.combine_dtype)
        hidden, total = plan.case.profile.hidden, sum(plan.send_counts)
        self._rows = torch.from_numpy(plan.rows)
        self._to = [torch.from_numpy(t) for t in plan.to]
        self._order = torch.cat(self._to)
        self._send = torch.zeros((total, plan.rows.shape[1]), dtype=torch.uint8)
        self._received = torch.zeros((sum(plan.recv_counts), plan.rows.shape[1]), dtype=torch.uint8)
        self._parts = tensors.to_torch(np.concatenate(plan.parts))
        self._back = torch.zeros((total, hidden), dtype=self._dtype)
        self._sum = torch.zeros((len(plan.rows), hidden), dtype=torch.float32)
        self._out = torch.zeros((len(plan.rows), hidden), dtype=self._dtype)

    def __call__(self) -> None:
        """Dispatch and combine."""
        import torch
        import torch.distributed as dist

        sends, receives = self._plan.send_counts, self._plan.recv_counts
        torch.index_select(self._rows, 0, self._order, out=self._send)
        dist.all_to_all_single(self._received, self._send, receives, sends)
        dist.all_to_all_single(self._back, self._parts, sends, receives)
        self._sum.zero_()
        for tokens, rows in zip(self._to, self._back.split(sends), strict=True):
            self._sum.index_add_(0, tokens, rows.float())
        self._out.copy_(self._sum)

    def check(self) -> None:
        """Raises Mismatch unless the last call did its work."""
        out = _numpy(self._out, self._plan.case.combine_dtype)
        check_result(self._plan, "gloo-alltoall", self._received.numpy(), out)


class AllGather:
    """All tokens to everybody; answers, zero where a rank has none, come back by reduce-scatter."""

    name = "gloo-allgather"

    def __init__(self, plan: Plan):
        import torch

        self._plan = plan
        case, n = plan.case, plan.case.ranks
        dtype = tensors.numpy_dtype(case.combine_dtype)
        answers = np.zeros((n, case.tokens, case.profile.hidden), dtype)
        goes = [case.exchange.routing[s].goes[:, plan.rank] for s in range(n)]
        for source in range(n):
            answers[source, goes[source]] = plan.parts[source]
        self._mine = np.concatenate(goes)
        self._rows = self._placed(torch.from_numpy(plan.rows))
        self._gathered = self._rows.new_zeros((n * case.tokens, plan.rows.shape[1]))
        self._answers = self._placed(tensors.to_torch(answers.reshape(n * case.tokens, -1)))
        self._out = self._answers.new_zeros((case.tokens, case.profile.hidden))

    @staticmethod
    def _placed(tensor: Any) -> Any:
        """Where ranks exchange it."""
        return tensor

    def __call__(self) -> None:
        """Dispatch and combine."""
        import torch.distributed as dist

        dist.all_gather_into_tensor(self._gathered, self._rows)
        dist.reduce_scatter_tensor(self._out, self._answers)

    def check(self) -> None:
        """Raises Mismatch unless the last call did its work."""
        out = _numpy(self._out.cpu(), self._plan.case.combine_dtype)
        check_result(self._plan, self.name, self._gathered.cpu().numpy()[self._mine], out)
