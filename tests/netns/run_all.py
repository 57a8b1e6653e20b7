#!/usr/bin/env python3
"""Ranks between network namespaces of this machine, which stand for hosts: each has a link, an address and ranks of its
own. The backends for several hosts, whose links are cut, and whose ranks die; emulated GPUs on two hosts that NVLink
joins.

    make test-netns ARGS="-k cut -x"
    python tests/netns/run_all.py --quick                # within two minutes: of everything on `fabric` a part
    python tests/netns/run_all.py --hosts -k auto        # the hosts of emulated GPUs alone
    python tests/netns/run_all.py --gin -k stopped       # emulated GPUs whose kernels post between hosts alone
    python tests/netns/run_all.py --faults -k stopped    # the tests of this folder alone
    python tests/netns/run_all.py --between              # the tests of behaviour alone, on two hosts of two ranks
    python tests/netns/run_all.py --soak --rounds 10000 --kills 50 --stops 20    # soak.py between two hosts of two

Needs root, or user namespaces that this user may make; where there are neither, says so and ends without a failure
(TW_STRICT=1: with one).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1] / "python"), str(HERE.parent / "py")]

import wired  # noqa: E402
from wire import BAD  # noqa: E402
from world import places  # noqa: E402

from tokenway.bench import namespaces  # noqa: E402
from tokenway.bench.namespaces import Network  # noqa: E402

SUITE = ("exchange", "rounds", "errors", "survival", "throughput", "leases", "properties", "balancer")
# Between hosts of several ranks, over `fabric`.
BETWEEN_SUITE = (
    *("exchange", "rounds", "errors", "survival", "throughput", "leases", "properties", "collectives"),
    *("row_types", "growth", "parts", "arena", "auto", "choice_values", "per_expert", "bias", "moving", "balancer"),
    "moved_ranks",
)
QUICK_SUITE = ("exchange", "survival")
QUICK = ("-m", "not long and not heavy and not slow")
HOSTS_SUITE = ("exchange", "survival")  # between the hosts, what is neither long nor heavy
# Of the kernels that post between hosts, in --quick.
GIN_QUICK = "(a_killed_host or a_cut_between_halves or (test_ranks and 4) or two_deaths)"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
NO_EMULATOR = "CUDA's headers or Boost.Context are missing"
NOTHING = 5  # pytest's, where -k leaves none


def skip(why: str) -> int:
    print(f"network namespaces: SKIPPED, {why}")
    return 1 if os.environ.get("TW_STRICT") == "1" else 0


def main(arguments: list[str]) -> int:
    if not namespaces.entered():
        if reason := namespaces.missing():
            return skip(reason)
        return namespaces.enter([sys.executable, __file__, *arguments])
    try:
        Network((1,)).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return skip(f"a host cannot be had: {error}")
    parts = {"--faults": run_faults, "--between": run_between, "--hosts": run_hosts, "--soak": run_soak}
    parts |= {"--gin": run_gin, "--quick": run_quick}
    for flag, part in parts.items():
        if flag in arguments:
            return part([argument for argument in arguments if argument != flag])
    codes = [part(arguments) for part in (run_faults, run_between, run_apart, run_hosts, run_gin)]
    return worst(codes)


def worst(codes: Sequence[int]) -> int:
    """The exit code of several runs."""
    return max((code for code in codes if code != NOTHING), default=NOTHING)


def run_quick(arguments: Sequence[str]) -> int:
    """A part of the tests of this folder, and of those of behaviour, on `fabric`; and of both where kernels post."""
    quick = [*QUICK, *arguments]
    return worst([run_faults(quick), run_between(quick, QUICK_SUITE), run_gin([*quick, "-k", GIN_QUICK])])


def environment(network: Network) -> dict[str, str]:
    """Of what runs on a network's hosts."""
    return os.environ | places(network)


def run_faults(arguments: Sequence[str]) -> int:
    """The tests of this folder, which make their own networks."""
    files = [str(path) for path in sorted(HERE.glob("test_*.py")) if path.name != "test_hosts.py"]
    return subprocess.call([*PYTEST, *files, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"})


def run_between(arguments: Sequence[str], names: Sequence[str] = BETWEEN_SUITE) -> int:
    """The tests of behaviour over `fabric`, on two hosts of two ranks; ranks beyond four are on both by turns."""
    suite = [str(HERE.parent / "py" / f"test_{name}.py") for name in names]
    # Threads are all on one host, and no host sees the process of another, nor a child that it has forked.
    chosen = ["--backend", "fabric", *arguments, "-k", keyword(arguments, "forked_child")]
    with Network((2, 2)) as network:
        return subprocess.call([*PYTEST, *suite, *chosen], env=environment(network))


def run_apart(arguments: Sequence[str]) -> int:
    """The tests of behaviour over the portable backend, odd ranks on another host than even ones."""
    suite = [str(HERE.parent / "py" / f"test_{name}.py") for name in SUITE]
    # Threads are all in one namespace; the run without namespaces has them.
    chosen = ["--backend", "torch", *arguments, "-k", keyword(arguments)]
    with Network((1, 1), whole=False) as network:  # a forked child's end is seen where the kernel is the same
        return subprocess.call([*PYTEST, *suite, *chosen], env=environment(network))


def emulated_library() -> dict[str, str]:
    """The environment in which Python has the library of emulated GPUs, which is built; empty if it cannot be."""
    sys.path.append(str(HERE.parent / "emulator"))
    import run as emulator

    if not emulator.build("tokenway_emulated"):
        return {}
    return {
        "PYTHONPATH": str(emulator.ROOT / "python"),
        "TOKENWAY_LIBRARY": str(emulator.BUILD / "emulator" / "libtokenway.so"),
        "CUDA_LAUNCH_BLOCKING": "1",  # as emulated_backend has it
        "TOKENWAY_BLOCKING": "1",
    }


def run_gin(arguments: Sequence[str]) -> int:
    """Emulated GPUs whose kernels post between hosts: faults, and a part of the suite on two hosts of two ranks."""
    if not (library := emulated_library()):
        return skip(NO_EMULATOR)
    chosen = [*arguments, "--capture=sys", "-k"]
    faults = subprocess.call(
        [*PYTEST, str(HERE / "test_faults.py"), *chosen, f"emulated-gin and {keyword(arguments)}"],
        env=os.environ | library | {"OMP_NUM_THREADS": "1"},
    )
    suite = [str(HERE.parent / "py" / f"test_{name}.py") for name in HOSTS_SUITE]
    chosen = ["--backend", "emulated-gin", *chosen, keyword(arguments, "forked_child")]
    with Network((2, 2)) as network:
        rest = subprocess.call([*PYTEST, *suite, *chosen], env={"EXAMPLES": "6"} | environment(network) | library)
    return worst([faults, rest])


def run_hosts(arguments: Sequence[str]) -> int:
    """Emulated GPUs on two hosts: the tests of this folder that want them, and a part of the suite."""
    if not (library := emulated_library()):
        return skip(NO_EMULATOR)
    suite = [str(HERE.parent / "py" / f"test_{name}.py") for name in HOSTS_SUITE]
    chosen = ["--backend", "emulated-hosts", "--capture=sys", "-m", "not long and not heavy"]
    # A child that a killed rank has forked keeps its connections open, and no other host sees its process.
    chosen += ["-k", keyword(arguments, "forked_child")]
    with Network((1, 1)) as network:
        variables = {"EXAMPLES": "6"} | environment(network) | library
        own = subprocess.call([*PYTEST, str(HERE / "test_hosts.py"), *arguments], env=variables)
        rest = subprocess.call([*PYTEST, *suite, *arguments, *chosen], env=variables)
    return worst([own, rest])


def run_soak(arguments: Sequence[str]) -> int:
    """Random rounds, deaths and stops on two hosts of two ranks, over a wire that delays, reorders and loses."""
    if reason := wired.missing():
        return skip(reason)
    soak = [sys.executable, str(HERE.parent / "py" / "soak.py"), "--backend", "fabric", "--ranks", "3", "4", "--busy"]
    with wired.Wired((2, 2), BAD) as network:
        return subprocess.call([*soak, *arguments], env=environment(network))


def keyword(arguments: Sequence[str], *but: str) -> str:
    """The caller's -k, and no threads, nor those."""
    given = [b for a, b in pairwise(arguments) if a == "-k"]
    return " and ".join([*(f"not {word}" for word in ("threads", *but)), *(f"({word})" for word in given)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
