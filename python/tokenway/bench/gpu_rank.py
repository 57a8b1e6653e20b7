"""A rank that has a GPU and a process to itself."""

from __future__ import annotations

import os

import numpy as np

from tokenway.bench.control import Control
from tokenway.bench.settings import Settings
from tokenway.bench.talk import hosts_of, on_several_hosts, ranks_per_host
from tokenway.comm import Comm
from tokenway.connecting import _host, connect


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
    if settings.nvlink.over == "gin":
        each = _ranks_per_host(settings)
        if each:  # NCCL would take them all for one host
            os.environ.setdefault("NCCL_LSA_TEAM_SIZE", str(each))
        return connect(backend="gin", device=f"cuda:{index}", ranks_per_host=each)
    return connect(device=f"cuda:{index}", backend="nvlink" if on_several_hosts() else "auto")


def hosts_between(settings: Settings, control: Control) -> list[int] | None:
    """Of each rank the number of its host, where rows go to other hosts; else None. Collective."""
    assert settings.nvlink is not None
    over = settings.nvlink.over
    if over == "nvlink" or (over == "nccl" and not on_several_hosts()):
        return None
    return hosts_of(control.allgather(_host()), _ranks_per_host(settings))


def _ranks_per_host(settings: Settings) -> int | None:
    assert settings.nvlink is not None
    return ranks_per_host(settings.nvlink.ranks_per_host, settings.ranks, settings.launched)


def sizes_of_hosts(settings: Settings, control: Control) -> dict[str, list[int]]:
    """What is told of them: how many ranks each has. Collective."""
    found = hosts_between(settings, control)
    return {} if found is None else {"hosts": np.bincount(found).tolist()}
