#!/usr/bin/env python3
"""Everything that needs GPUs, in parts with a time budget each; ends with a table.

    python tests/gpu/run_all.py                        all parts
    python tests/gpu/run_all.py --part suite -x        one part; the first failure ends it
    python tests/gpu/run_all.py --part gpu -k graphs   some of its tests
    python tests/gpu/run_all.py --part soak --rounds 20000 --replays 10000
    python tests/gpu/run_all.py --processes 2          on one GPU: processes that want two take turns there

    suite      the tests of behaviour of tests/py against the nvlink backend
    nccl       the same against the portable one, over NCCL, and what sets that apart
    gpu        tests/gpu: what only a GPU has
    soak       random rounds and graph replays on two processes, a short form by default
    sanitize   compute-sanitizer, memcheck and racecheck, over a small workload

Takes the package from the tree and the library from TOKENWAY_LIBRARY, else from build/gpu. The exit code
is 1 if a part failed or was not over in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEHAVIOUR = (
    "exchange",
    "errors",
    "usage",
    "handles",
    "throughput",
    "collectives",
    "collective_errors",
    "leases",
    "replicas",
    "loads",
    "torch",
    "ops",
    "properties",
    "rounds",
    "survival",
    "row_types",
    "call_settings",
    "growth",
    "growth_refused",
    "parts",
    "arena",
    "arena_refused",
    "auto",
    "routing_layout",
)
BUDGET = {"suite": 600, "nccl": 720, "gpu": 360, "soak": 300, "sanitize": 300}  # seconds
TOO_SLOW = (124, -9)  # how `timeout` ends once it has ended a command, and where it had to kill it and itself
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "PYTHONUNBUFFERED": "1"}


@dataclass
class Outcome:
    """How a command of a part ended."""

    name: str
    result: str
    seconds: float
    said: str  # its last line

    @property
    def ok(self) -> bool:
        return self.result in ("ok", "skipped")


def commands(part: str, args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(name, command) of a part."""
    python, here = sys.executable, ROOT / "tests" / "gpu"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=150", "--durations=8"]
    pytest += ["-x"] * args.x + (["-k", args.k] if args.k else [])
    if part == "suite":
        files = [str(ROOT / "tests" / "py" / f"test_{name}.py") for name in BEHAVIOUR]
        yield part, [*pytest, *files, "--backend", "nvlink", "--rounds", "150"]
    elif part == "nccl":
        names = (*BEHAVIOUR[:4], "staged", *BEHAVIOUR[4:])
        files = [str(ROOT / "tests" / "py" / f"test_{name}.py") for name in names]
        yield part, [*pytest, *files, "--backend", "nccl", "--rounds", "60"]
        yield f"{part}: gpu", [*pytest, str(here / "test_nccl.py")]
    elif part == "gpu":
        yield part, [*pytest, str(here), "--ignore", str(here / "test_nccl.py")]
    elif part == "soak":
        sizes = ["--rounds", str(args.rounds), "--replays", str(args.replays)]
        seed = [] if args.seed is None else ["--seed", str(args.seed)]
        yield part, [python, str(here / "soak.py"), *sizes, *seed]
    else:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        for tool in ("memcheck", "racecheck"):
            options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
            yield f"{part}: {tool}", [sanitizer, *options, python, str(here / "sanitize.py")]


def run(name: str, command: list[str], budget: float) -> Outcome:
    """Runs a command with its output shown. One that is not over in time is ended with all that it started."""
    if not Path(command[0]).is_file() and shutil.which(command[0]) is None:
        return Outcome(name, "skipped", 0.0, f"there is no {command[0]}")
    begin, said = time.monotonic(), ""
    bounded = ["timeout", "--kill-after=10", str(budget), *command]
    with subprocess.Popen(bounded, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                said = line.strip() or said
        except KeyboardInterrupt:  # which the command is out of the reach of
            process.terminate()
            raise
    code = process.returncode
    result = "ok" if code == 0 else "too slow" if code in TOO_SLOW else f"exit code {code}"
    return Outcome(name, result, time.monotonic() - begin, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=list(BUDGET), help="which (default all); may be repeated")
    parser.add_argument("--budget", type=float, help="seconds for each command (default by part)")
    parser.add_argument("-x", action="store_true", help="the first failure ends a part")
    parser.add_argument("-k", help="which tests, as pytest has it")
    parser.add_argument("--rounds", type=int, default=3000, help="of the soak")
    parser.add_argument("--replays", type=int, default=1500, help="of the soak")
    parser.add_argument("--seed", type=int, help="of the soak")
    parser.add_argument("--processes", type=int, help="ranks that are processes, where there are fewer GPUs")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    if args.processes:
        os.environ["TOKENWAY_TEST_PROCESSES"] = str(args.processes)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("TOKENWAY_LIBRARY", str(ROOT / "build" / "gpu" / "libtokenway.so"))
    outcomes = []
    for part in args.part or BUDGET:
        for name, command in commands(part, args):
            print(f"\n==> {name}: {' '.join(command)}", flush=True)
            outcomes.append(run(name, command, args.budget or BUDGET[part]))
    print(f"\n{'part':<22}{'result':<14}{'seconds':>8}  last line")
    for one in outcomes:
        print(f"{one.name:<22}{one.result:<14}{one.seconds:>8.1f}  {one.said[:120]}")
    return 0 if all(one.ok for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
