"""Measures everything that docs/PERFORMANCE.md shows: python -m tokenway.bench.record FOLDER [NAME ...]

One JSON file per table, named as the table is; with names, only those. The machine should be quiet.
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
    "cpu-overhead": ["--overhead"],
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks one after the other; returns the first exit code that is not 0."""
    if not argv or not Path(argv[0]).is_dir() or not set(argv[1:]) <= set(RUNS):
        print(f"{(__doc__ or '').strip()}\n\nnames: {', '.join(RUNS)}", file=sys.stderr)
        return 2
    for name in argv[1:] or RUNS:
        start = time.monotonic()
        command = [sys.executable, "-m", "tokenway.cli", "bench", *RUNS[name]]
        done = subprocess.run([*command, "--json", str(Path(argv[0], f"{name}.json"))], check=False)
        print(f"{name}: {time.monotonic() - start:.0f} s\n", flush=True)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
