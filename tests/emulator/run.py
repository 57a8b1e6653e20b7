#!/usr/bin/env python3
"""Builds the CUDA backend for emulated GPUs and runs the tests of behaviour against it.

    python tests/emulator/run.py                         all of them
    python tests/emulator/run.py --threads               ranks as threads, no deaths, nothing heavy, fewer examples
    python tests/emulator/run.py --quick                 the same, nothing long, and a quarter of the examples
    python tests/emulator/run.py --staged                the portable backend: devices apart, whose blocks gloo moves
    python tests/emulator/run.py --quick --staged        ... of the files where who moves blocks matters
    python tests/emulator/run.py --gin                   devices of several hosts, between which kernels post
    python tests/emulator/run.py --threads --gin         ... of the files where who moves blocks matters
    python tests/emulator/run.py --quick --gin           ... a part of these, in a minute
    python tests/emulator/run.py --counted               over a transport that counts what kernels store at peers
    python tests/emulator/run.py -k rounds -x            arguments of pytest

Needs CUDA's headers and Boost.Context (Debian: libboost-context-dev); without them it says so and succeeds, unless
TW_STRICT=1. TOKENWAY_EMULATOR_SEED chooses another order of threads, TOKENWAY_EMULATOR_SMS the blocks of a device,
TOKENWAY_EMULATOR_ROOM those of a kernel that are there at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emulated"
TOOLS = Path(sys.executable).parent  # CMake and Ninja are in the environment of this Python
FILES = (
    *(
        "exchange",
        "errors",
        "usage",
        "handles",
        "throughput",
        "leases",
        "loads",
        "moving",
        "moved_ranks",
        "collectives",
    ),
    *("collective_errors", "properties", "rounds", "routing_layout", "survival", "views", "versions", "arguments"),
    *("call_settings", "growth", "growth_refused", "parts", "row_types", "auto", "arena", "arena_refused"),
    *("hidden_devices", "index_lists", "choice_values", "choice_values_refused", "in_place"),
    *("per_expert", "per_expert_refused", "any_placement", "grouped_by_bound", "bias", "domain"),
    *("straight", "fp8_combine", "token_replicas", "by_capacity", "refused_late"),
)
THREADS = tuple(name for name in FILES if name not in ("usage", "collective_errors", "survival"))
COUNTED = ("stores", "exchange", "throughput", "collectives")
STAGED = (
    *("exchange", "errors", "throughput", "leases", "collectives", "rounds", "call_settings", "growth", "parts"),
    *("row_types", "auto", "choice_values", "per_expert", "bias", "domain", "loads", "refused_late"),
)
# Of each: what has more than one rank and little to do, as connecting the ranks of several hosts is most of the time.
GIN = {
    "posts": "posted or tell_of or a_gather",
    "folds": "layouts and 4-2 or alone_are_posted and 4-2 or who_is_late or slow_mate or one_rank_refuses or dropped",
    "crossing": "puts_to_one_rank or mates_do_not_see or no_crossing or cross_otherwise",
    "network_failures": "fails_alone and computes",
    "bench_gin": "test_pairs",
    "window_images": "high_throughput-per_host",
    "exchange": "test_ranks or no_tokens or sizes_change or in_flight or slow_rank or scales",
    "throughput": "test_ranks",
    "collectives": "test_ranks or sizes_change or in_flight",
    "arena": "grows or view_of_another",
    "errors": "combine_refused",
    "refused_late": "combine-combine-2 or release-combine-3",
}
NOTHING = "CUDA's headers or Boost.Context are missing"


def build(target: str) -> bool:
    """Builds the library, or the one that counts. False if this machine has not what it takes."""
    cmake = str(TOOLS / "cmake")
    options = ["-DTOKENWAY_CUDA=OFF", "-DTOKENWAY_EMULATOR=ON", "-DCMAKE_UNITY_BUILD=ON"]
    options += [f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"]
    options += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={os.environ.get('CCACHE', '')}"]
    configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), "--log-level=NOTICE", *options]
    said = subprocess.run(configure, capture_output=True, text=True)
    if said.returncode:
        if "CUDAToolkit" not in said.stderr and "Boost" not in said.stderr:
            sys.exit(said.stderr)
        return False
    subprocess.run([cmake, "--build", str(BUILD), "--target", target], check=True)
    return True


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code."""
    counted = "--counted" in arguments
    if not build("tokenway_counted" if counted else "tokenway_emulated"):
        print(f"emulated GPUs: skipped, {NOTHING}", file=sys.stderr)
        return int(os.environ.get("TW_STRICT") == "1")
    names, chosen = FILES, []
    if counted:
        arguments = ["--quick", *(a for a in arguments if a != "--counted")]
    quick = "--quick" in arguments
    if quick or "--threads" in arguments:
        names, chosen = COUNTED if counted else THREADS, ["-k", "not processes and not killed"]
        arguments = [a for a in arguments if a not in ("--quick", "--threads")]
        chosen += ["-m", "not long and not heavy" if quick else "not heavy"]
        os.environ.setdefault("EXAMPLES", "6" if quick else "8")
        os.environ.setdefault("SHAPES", "20")
    backend = "emulated"
    if "--staged" in arguments:
        arguments = [a for a in arguments if a != "--staged"]
        names, backend = (*(STAGED if quick else names), "staged"), "torch-emulated"
    if "--gin" in arguments:
        arguments = [a for a in arguments if a != "--gin"]
        own = ("posts", "folds", "crossing", "network_failures", "bench_gin", "window_images")
        names, backend = (tuple(GIN) if chosen else (*own, *names)), "emulated-gin"
        if quick:
            os.environ["EXAMPLES"] = "2"
            chosen[1] += f" and ({' or '.join(GIN.values())})"
    files = [str(ROOT / "tests" / "py" / f"test_{name}.py") for name in names]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "python"),
        "TOKENWAY_LIBRARY": str(BUILD / ("counted" if counted else "emulator") / "libtokenway.so"),
    }
    # Capture of Python alone: what the emulator says before it aborts would be lost with the files of the other.
    command = [sys.executable, "-m", "pytest", *files, "--backend", backend, "--capture=sys", *chosen, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
