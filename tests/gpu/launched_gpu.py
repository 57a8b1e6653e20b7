"""A rank of a launched job on GPUs: python launched_gpu.py [gloo|nccl] prints what it received from everybody."""

from __future__ import annotations

import os
import sys

import torch

import tokenway as tw


def exchange(comm: tw.Comm) -> list[int]:
    """Every rank sends its number to all: [0, 1, ..., N-1] everywhere."""
    n, device = comm.nranks, torch.device("cuda", comm.device)
    with tw.Group(comm, experts=n, top_k=n, hidden=1, max_tokens=1, dtype="float32", timeout=20) as group:
        handle = group.route(torch.arange(n, dtype=torch.int32, device=device)[None])
        received = group.dispatch(handle, torch.full((1, 1), float(comm.rank), device=device))
        found = [int(x) for x in received.tokens[:, 0, 0].cpu()]
        total = group.combine(handle, received.tokens)
        assert total.item() == n * comm.rank
    return found


def meet() -> tuple[int, list[int]]:
    """For tokenway.run."""
    with tw.connect(device="cuda", timeout=60) as comm:
        torch.cuda.set_device(comm.device)
        return comm.device, exchange(comm)


def meet_at(path: str, backend: str) -> tuple[str, list[int]]:
    """For tokenway.run: ranks that have a store in common, and no process group."""
    import torch.distributed as dist

    rank, nranks = int(os.environ["TOKENWAY_RANK"]), int(os.environ["TOKENWAY_NRANKS"])
    torch.cuda.set_device(rank)
    store = dist.FileStore(path, nranks)
    with tw.connect(rank=rank, nranks=nranks, store=store, device=rank, backend=backend, timeout=60) as comm:
        return comm.backend, exchange(comm)


def main() -> None:
    if sys.argv[1:]:
        import torch.distributed as dist

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(sys.argv[1])
    for _ in range(2):  # comms of a process have addresses of their own
        with tw.connect(device="cuda", timeout=60) as comm:
            torch.cuda.set_device(comm.device)
            line = f"rank {comm.rank} of {comm.nranks} on cuda:{comm.device}: {exchange(comm)}\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if sys.argv[1:]:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
