#!/usr/bin/env python3
"""Times combines by domain between hosts of GPUs, straight and folded, where the network has no limit: what folds cost.

    NCCL_RMA_PLUGIN=.../tokenway_gin_plugin.so python tests/gin/folds.py [--json FILE] [--tokens T ...]

For two GPUs. Four ranks, threads of this process, are two hosts of two, each with a rank on either GPU, so what mates
read comes over NVLink; two ranks share a GPU and its SMs. As in rates.py the plugin counts large puts and does not move
them: sums are wrong, and nothing is compared. Choices are drawn evenly. us: of a combine in a graph of ten, the slowest
rank's median over replays.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "py"), str(ROOT / "tests" / "gin")]

from rates import ENVIRONMENT, PLUGIN  # noqa: E402

RANKS, EACH = 4, 2
HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
CALLS, REPLAYS = 10, 9
WAYS = {"flat": (0, "per_rank"), "by domain, owners fold": (EACH, "per_rank"), "by domain, folded": (EACH, "per_host")}


def timed(env: Any, domain: int, tokens: int, sm_limit: int, meeting: threading.Barrier) -> float:
    """us of a combine of this rank."""
    import numpy as np
    import torch

    import tokenway as tw

    device = torch.device("cuda", env.rank % EACH)
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    given = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": tokens, "sm_limit": sm_limit}
    with torch.cuda.stream(stream), tw.Group(env.comm, domain=domain, **given) as group:
        torch.manual_seed(env.rank)
        ids = torch.rand(tokens, EXPERTS, device=device).argsort(1)[:, :TOP_K].to(torch.int32).contiguous()
        handle = group.route(ids)
        rows = group.dispatch(handle, torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)).tokens.clone()
        out = group.combine(handle, rows)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        meeting.wait()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                group.combine(handle, rows, out=out)
        times = []
        for _ in range(REPLAYS):
            meeting.wait()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record(stream)
            graph.replay()
            events[1].record(stream)
            stream.synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3 / CALLS)
        if group.error is not None:
            raise RuntimeError(group.error.message)
        meeting.wait()
    return float(np.median(times))


def measure(tokens: list[int]) -> list[dict[str, Any]]:
    """A row for each sm_limit, number of tokens and way."""
    import harness
    from fabric_backend import EACH as HOSTS
    from gin_backend import CROSSING

    os.environ |= {"TOKENWAY_GIN_COUNT_ONLY": "1", HOSTS: str(EACH)}
    rows = []
    for way, (domain, crossing) in WAYS.items():
        os.environ[CROSSING] = crossing
        world = harness.Threads("gin", RANKS)
        world.forget()
        for sm_limit in (0, 8):
            for count in tokens:
                took = max(world.run(timed, domain, count, sm_limit, threading.Barrier(RANKS)))
                rows.append({"way": way, "tokens": count, "sm_limit": sm_limit, "combine_us": round(took, 1)})
                print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 1024, 4096])
    given = parser.parse_args()
    if not Path(os.environ.get(PLUGIN, "")).is_file():
        parser.error(f"{PLUGIN} must name tests/gin's plugin")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    import torch

    from tokenway import machine

    rows = measure(given.tokens)
    if given.json:
        shape = {"ranks": RANKS, "ranks_per_host": EACH, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K}
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        document = {
            "machine": machine.describe(),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "gpus": gpus,
        }
        document |= {"dtype": "bfloat16", **shape, "counted_alone": True, "combines": rows}
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
