"""A rank of a launched job: python launched.py [torch] prints what it received from everybody."""

from __future__ import annotations

import sys

import numpy as np

import tokenway as tw


def exchange(comm: tw.Comm) -> list[int]:
    """Every rank sends its number to all: [0, 1, ..., N-1] everywhere."""
    n = comm.nranks
    with tw.Group(comm, experts=n, top_k=n, hidden=1, max_tokens=1, dtype="float32") as group:
        handle = group.route(np.arange(n, dtype=np.int32)[None])
        received = group.dispatch(handle, np.full((1, 1), comm.rank, np.float32))
        found = [int(x) for x in received.tokens[:, 0, 0]]
        total = group.combine(handle, received.tokens)
        assert total[0, 0] == n * comm.rank
    return found


def main() -> None:
    if sys.argv[1:] == ["torch"]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    if sys.argv[1:] == ["fail"]:
        with tw.connect(timeout=120) as comm:
            exchange(comm)
            sys.exit(7 if comm.rank == 1 else 0)
    for _ in range(2):  # comms of a process have addresses of their own
        with tw.connect(timeout=120) as comm:
            line = f"rank {comm.rank} of {comm.nranks}: {exchange(comm)}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
