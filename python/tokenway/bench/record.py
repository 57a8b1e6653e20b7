"""Measures what the pages show: python -m tokenway.bench.record FOLDER [NAME ...]

The pages are docs/PERFORMANCE.md and those of docs/performance and docs/notebook. One JSON file per table, named as the
table is; with names, only those: "gpu" is all that need GPUs, which are left out without a name. The machine should be
quiet.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RUNS = {
    "cpu-2-ranks": ["--ranks", "2"],
    "cpu-4-ranks": ["--ranks", "4"],
    "cpu-8-ranks": ["--ranks", "8", "--tokens", "1", "8", "128"],
    "cpu-layouts": ["--ranks", "4", "--layout", "expert_major", "--weighting", "topk", "--tokens", "8", "128", "512"],
    "cpu-profiles": ["--ranks", "4", "--profile", "all", "--tokens", "128", "--baselines", "memcpy,sockets"],
    "cpu-routings": ["--ranks", "4", "--routing", "all", "--tokens", "128", "--baselines", "memcpy,sockets"],
    "cpu-collectives": ["--collective", "all", "--ranks", "4", "--tokens", "1", "32", "512"],
    "cpu-overhead": ["--overhead"],
    "cpu-aux": ["--aux"],
    **{
        f"torch-{n}-ranks": ["--backend", "torch", "--ranks", str(n), "--tokens", "1", "8", "32", "128", "512"]
        for n in (2, 4)
    },
}
_GPU = ["--backend", "nvlink"]
_LOCAL = [*_GPU, "--tokens", "1", "8", "128", "--verify", "--no-floor", "--local-ranks"]
GPU_RUNS = {
    "nvlink-2-gpus": [*_GPU, "--ranks", "2", "--compare", "fp8", "--ablation", "--breakdown"],
    "nvlink-verify": [*_GPU, "--ranks", "2", "--verify-only", "--routing", "all"],
    "nvlink-expert-major": [
        *(*_GPU, "--ranks", "2", "--layout", "expert_major", "--weighting", "topk"),
        *("--tokens", "1", "8", "128", "512", "--verify"),
    ],
    "nvlink-flat": [
        *(*_GPU, "--ranks", "2", "--layout", "flat", "--compare", "fp8", "--verify"),
        *("--tokens", "1024", "2048", "4096", "8192", "16384"),
    ],
    "nvlink-backward": [
        *(*_GPU, "--ranks", "2", "--layout", "flat", "--backward", "--verify"),
        *("--tokens", "4096", "8192"),
    ],
    "nvlink-grouped": [*_GPU, "--ranks", "2", "--layout", "grouped", "--tokens", "1024", "4096", "8192", "--verify"],
    # With CUDA_VISIBLE_DEVICES=0: ranks that share a device, and its memory.
    "nvlink-expert-one-gpu": [
        *(*_GPU, "--local-ranks", "2", "--layout", "expert_major", "--weighting", "topk"),
        *("--tokens", "1", "8", "128", "512", "--verify", "--no-floor", "--baselines", "none"),
    ],
    "nvlink-grouped-one-gpu": [
        *(*_GPU, "--local-ranks", "2", "--layout", "grouped"),
        *("--tokens", "512", "4096", "--verify", "--no-floor", "--baselines", "none"),
    ],
    "nvlink-collectives": [
        *(*_GPU, "--ranks", "2", "--collective", "all"),
        *("--tokens", "1", "8", "32", "128", "512", "2048", "8192", "--iterations", "30"),
    ],
    **{
        f"nvlink-flat-{n}-sms": [
            *(*_GPU, "--ranks", "2", "--layout", "flat", "--sm-limit", str(n), "--tokens", "4096", "8192"),
            *("--verify", "--baselines", "none"),
        ]
        for n in (8, 16, 24, 48, 96)
    },
    "nvlink-one-sm": [*_GPU, "--ranks", "2", "--sm-limit", "1", "--tokens", "1", "128", "--verify", "--no-floor"],
    "nvlink-aux": [*_GPU, "--aux"],
    **{f"nvlink-local-{n}": [*_LOCAL, str(n)] for n in (1, 2, 3, 4, 8)},
    "nccl-2-gpus": [
        *(*_GPU, "--over", "nccl", "--ranks", "2", "--verify", "--no-floor"),
        *("--tokens", "1", "8", "32", "128", "512", "1024", "--iterations", "20"),
    ],
}
# Programs of their own.
PROGRAMS = {
    "cpu-balance": ["tokenway.bench.placement"],
    "cpu-balancing": ["tokenway.bench.balancing"],
    "cpu-replicas": ["tokenway.bench.replicas", "--batches", "8"],
    # With root or user namespaces, and libfabric.
    "hosts-2x2": [
        *("tokenway.bench.namespaces", "2x2", "--", sys.executable, "-m", "tokenway.cli"),
        *("bench", "--backend", "fabric"),
    ],
}
GPU_PROGRAMS = {"nvlink-counting": ["tokenway.bench.replicas", "--cost-only", "--device", "cuda"]}
PLOTTED = ("nvlink-2-gpus",)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks one after the other; returns the first exit code that is not 0."""
    bench = {name: ["tokenway.cli", "bench", *options] for name, options in (RUNS | GPU_RUNS).items()}
    programs = bench | PROGRAMS | GPU_PROGRAMS
    if not argv or not Path(argv[0]).is_dir() or not set(argv[1:]) <= {*programs, "gpu"}:
        print(f"{(__doc__ or '').strip()}\n\nnames: {', '.join(programs)}", file=sys.stderr)
        return 2
    gpu = [*GPU_RUNS, *GPU_PROGRAMS]
    names = [name for given in argv[1:] or [*RUNS, *PROGRAMS] for name in (gpu if given == "gpu" else [given])]
    for name in names:
        start = time.monotonic()
        command = [sys.executable, "-m", *programs[name], "--json", str(Path(argv[0], f"{name}.json"))]
        if name in PLOTTED:
            command += ["--plot", str(Path(argv[0], f"{name}.png"))]
        done = subprocess.run(command, check=False)
        print(f"{name}: {time.monotonic() - start:.0f} s\n", flush=True)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
