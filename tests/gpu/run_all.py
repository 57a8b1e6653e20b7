#!/usr/bin/env python3
"""Everything that needs GPUs, in parts with a time budget each; ends with what each part and each file of tests took.

    python tests/gpu/run_all.py                        all parts
    python tests/gpu/run_all.py --part suite -x        one part; the first failure ends it
    python tests/gpu/run_all.py --part gpu -k graphs   some of its tests
    python tests/gpu/run_all.py --part soak --rounds 20000 --replays 10000
    python tests/gpu/run_all.py --processes 2          on one GPU: processes that want two take turns there
    python tests/gpu/run_all.py --company 1            the tests of behaviour have their devices for themselves

    suite      the tests of behaviour of tests/py against the nvlink backend
    nccl       the same against the portable one, over NCCL, and what sets that apart
    gin        the same between hosts, over NCCL's device API, where NCCL has a network (TOKENWAY_TEST_GIN=1; tests/gin
               makes one)
    frameworks the tests of integrations, with a device for each rank; those whose framework is missing are skipped
    gpu        tests/gpu: what only a GPU has, also with two processes to a device
    soak       random rounds and graph replays on a process for each device, a short form by default
    sanitize   compute-sanitizer, memcheck and racecheck, over a small workload

Where pytest-xdist is installed, tests run beside each other (shares.py); without it one after the other.

Takes the package from the tree and the library from TOKENWAY_LIBRARY, else from build/gpu. The exit code
is 1 if a part failed or was not over in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import shares

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
    "moving",
    "balancer",
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
    "choice_values",
    "choice_values_refused",
    "per_expert",
    "per_expert_refused",
    "any_placement",
    "grouped_by_bound",
    "straight",
    "bias",
    "fp8_combine",
    "token_replicas",
    "token_replicas_refused",
    "index_lists",
    "in_place",
    "scales",
    "expert_views",
    "by_capacity",
)
FRAMEWORKS = (
    "deep_ep",
    "deep_ep_elastic",
    "deep_ep_epbuffer",
    "deep_ep_graphs",
    "deep_ep_late",
    "deep_ep_low_latency",
    "deep_ep_megatron",
    "deep_ep_streams",
    "transformers",
    "transformers_graphs",
    "megatron",
    "megatron_capacity",
    "megatron_fp8",
    "megatron_graphs",
    "megatron_shared",
    "flashinfer",
    "torchtitan",
    "vllm",
    "vllm_eplb",
    "vllm_graphs",
    "sglang",
    "sglang_eplb",
    "tensorrt_llm",
)
BUDGET = {"suite": 600, "nccl": 720, "gin": 720, "frameworks": 600, "gpu": 360, "soak": 600, "sanitize": 300}  # seconds
TOO_SLOW = (124, 137, -9)  # how `timeout` ends once it has ended a command, and where it had to kill it (and itself)
NO_TESTS = 5  # pytest's exit code where -k chose none
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "PYTHONUNBUFFERED": "1"}


@dataclass
class Command:
    """What a part runs."""

    name: str
    line: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    may_be_empty: bool = False  # no test at all is no failure


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


def has_network() -> bool:
    """Whether NCCL is said to have a network for its device API here."""
    return os.environ.get("TOKENWAY_TEST_GIN") == "1"


def of_pytest(part: str, args: argparse.Namespace, reports: Path) -> Iterator[Command]:
    """The commands of a part that is tests."""
    here, devices = ROOT / "tests" / "gpu", shares.device_names()
    names = (*BEHAVIOUR[:4], *({"nccl": ["staged"], "gin": ["window_images", "folds"]}.get(part, [])), *BEHAVIOUR[4:])
    behaviour = [str(ROOT / "tests" / "py" / f"test_{name}.py") for name in names]
    if part == "suite":
        runs = [
            (share, [*behaviour, "--backend", "nvlink", "--rounds", "150"])
            for share in shares.shared_out(part, devices, args.company)
        ]
    elif part == "nccl":
        every = shares.Share(part, shares.workers(1, args.company)[0])
        runs = [(every, [*behaviour, "--backend", "nccl", "--rounds", "60"])]
        runs.append((shares.Share(f"{part}: gpu"), [str(here / "test_devices_apart.py")]))
    elif part == "gin":
        every = shares.Share(part, shares.workers(1, args.company)[0])
        runs = [(every, [*behaviour, "--backend", "gin", "--rounds", "60"])]
        runs.append((shares.Share(f"{part}: gpu"), [str(here / "test_devices_apart.py")]))
    elif part == "frameworks":  # each file's ranks are started once, and find their devices (tests/py/frameworks.py)
        every = shares.Share(part, *shares.workers(1, args.company, dist="loadfile"))
        runs = [(every, [str(ROOT / "tests" / "py" / f"test_{name}.py") for name in FRAMEWORKS])]
    else:  # they tell of times, so that nobody else may be on their devices
        own = [str(here), "--ignore", str(here / "test_devices_apart.py")]
        runs = [(share, own) for share in shares.shared_out(part, devices, 1)]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=150"]
    # Tests that go by threads or by processes go by these over NCCL, as its users do: communicators that threads of one
    # process make and end at the same time crash inside NCCL 2.28.9 now and then.
    chosen = [f"({args.k})"] * bool(args.k) + {"nccl": ["not threads", "not gin"], "gin": ["not nccl"]}.get(part, [])
    pytest += ["-x"] * args.x + (["-k", " and ".join(chosen)] if chosen else [])
    for number, (share, what) in enumerate(runs):
        report = ["--durations=8", f"--junitxml={reports / f'{part}-{number}.xml'}"]
        line = [*pytest, *report, *share.options, *what]
        yield Command(share.name, line, share.environment, may_be_empty=bool(args.k))


def commands(part: str, args: argparse.Namespace, reports: Path) -> Iterator[Command]:
    """The commands of a part; pytest writes its reports into a folder."""
    here = ROOT / "tests" / "gpu"
    if part == "soak":
        sizes = ["--rounds", str(args.rounds), "--replays", str(args.replays)]
        seed = [] if args.seed is None else ["--seed", str(args.seed)]
        yield Command(part, [sys.executable, str(here / "soak.py"), *sizes, *seed])
    elif part == "sanitize":
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        for tool in ("memcheck", "racecheck"):
            options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
            yield Command(f"{part}: {tool}", [sanitizer, *options, sys.executable, str(here / "sanitize.py")])
    else:
        yield from of_pytest(part, args, reports)


def run(command: Command, budget: float) -> Outcome:
    """Runs a command with its output shown. One that is not over in time is interrupted, so that pytest tells what it
    knows, and ended with all that it started if that does not help."""
    if not Path(command.line[0]).is_file() and shutil.which(command.line[0]) is None:
        return Outcome(command.name, "skipped", 0.0, f"there is no {command.line[0]}")
    begin, said = time.monotonic(), ""
    bounded = ["timeout", "--signal=INT", "--kill-after=20", str(budget), *command.line]
    environment = os.environ | command.environment
    with subprocess.Popen(
        bounded, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                said = line.strip() or said
        except KeyboardInterrupt:  # which the command is out of the reach of
            process.terminate()
            raise
    code = process.returncode
    fine = code == 0 or (code == NO_TESTS and command.may_be_empty)
    result = "ok" if fine else "too slow" if code in TOO_SLOW else f"exit code {code}"
    return Outcome(command.name, result, time.monotonic() - begin, said)


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
    parser.add_argument("--company", type=int, default=2, help="tests of behaviour that share devices (default 2)")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    if args.processes:
        os.environ["TOKENWAY_TEST_PROCESSES"] = str(args.processes)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("TOKENWAY_LIBRARY", str(ROOT / "build" / "gpu" / "libtokenway.so"))
    outcomes = []
    with tempfile.TemporaryDirectory() as reports:
        for part in args.part or [part for part in BUDGET if part != "gin" or has_network()]:
            for command in commands(part, args, Path(reports)):
                print(f"\n==> {command.name}: {' '.join(command.line)}", flush=True)
                outcomes.append(run(command, args.budget or BUDGET[part]))
        print("", *shares.table(shares.of_files(Path(reports))), sep="\n")
    print(f"\n{'part':<22}{'result':<14}{'seconds':>8}  last line")
    for one in outcomes:
        print(f"{one.name:<22}{one.result:<14}{one.seconds:>8.1f}  {one.said[:120]}")
    return 0 if all(one.ok for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
