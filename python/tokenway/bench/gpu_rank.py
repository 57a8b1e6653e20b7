"""A rank that has a GPU and a process to itself."""

from __future__ import annotations

import os

from tokenway.bench.control import Control
from tokenway.bench.settings import Settings
from tokenway.comm import Comm
from tokenway.connecting import connect


def use_gpu(control: Control) -> int:
    """Makes this rank's GPU PyTorch's current one; its number."""
    import torch

    index = int(os.environ.get("LOCAL_RANK", control.rank)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return index


def connect_gpu(settings: Settings, control: Control) -> Comm:
    """The same, and connects the comm that is measured. Collective."""
    assert settings.nvlink is not None
    index = use_gpu(control)
    if settings.nvlink.over == "nccl":
        return Comm.portable(control.rank, control.nranks, control.allgather, device=index)
    return connect(device=f"cuda:{index}")
