#!/usr/bin/env python3
"""The portable backend between two network namespaces of this machine, each with an address of its own.

    make test-netns ARGS="-k cut -x"

Needs root, or user namespaces that this user may make; where there are neither, says so and ends without a failure
(TW_STRICT=1: with one). Odd ranks of the suite's processes run in the other namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SUITE = (
    "test_exchange",
    "test_rounds",
    "test_errors",
    "test_survival",
    "test_throughput",
    "test_leases",
    "test_properties",
)
INSIDE = "TOKENWAY_TEST_INSIDE"
APART = "TOKENWAY_TEST_APART"  # the process that holds the other namespace
ADDRESSES = ("10.211.7.1", "10.211.7.2")
LINKS = ("tokenway0", "tokenway1")


def skip(why: str) -> int:
    print(f"two network namespaces: SKIPPED, {why}")
    return 1 if os.environ.get("TW_STRICT") == "1" else 0


def enter() -> int:
    """Starts this program again in a namespace of its own."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return skip(f"there is no {tool} here")
    new = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--user", "--map-root-user"]
    if subprocess.run([*new, "true"], capture_output=True).returncode:
        return skip("neither root nor user namespaces are to be had")
    return subprocess.call([*new, sys.executable, __file__, *sys.argv[1:]], env=os.environ | {INSIDE: "1"})


def connect(other: int) -> None:
    """A link between this namespace and that of another process, with an address at each end."""
    there = ["nsenter", f"--net=/proc/{other}/ns/net"]
    ip = ["ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1], "netns", str(other)]
    subprocess.run(ip, check=True)
    for prefix, address, link in (([], ADDRESSES[0], LINKS[0]), (there, ADDRESSES[1], LINKS[1])):
        for words in (f"addr add {address}/24 dev {link}", f"link set {link} up", "link set lo up"):
            subprocess.run([*prefix, "ip", *words.split()], check=True)


def main() -> int:
    if os.environ.get(INSIDE) != "1":
        return enter()
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # it has its namespace
        try:
            connect(holder.pid)
        except subprocess.CalledProcessError as error:
            return skip(f"{' '.join(error.cmd)} failed")
        environment = os.environ | {APART: str(holder.pid), "OMP_NUM_THREADS": "1"}
        suite = [str(HERE.parent / "py" / f"{name}.py") for name in SUITE]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        own = subprocess.call([*pytest, str(HERE), *sys.argv[1:]], env=environment)
        # Threads are all in one namespace; the run without namespaces has them.
        rest = subprocess.call([*pytest, *suite, "--backend", "torch", *sys.argv[1:], "-k", keyword()], env=environment)
        nothing = 5  # pytest's, where -k leaves none
        return max((code for code in (own, rest) if code != nothing), default=nothing)
    finally:
        holder.kill()
        holder.wait()


def keyword() -> str:
    """The caller's -k, and no threads."""
    given = [b for a, b in zip(sys.argv, sys.argv[1:], strict=False) if a == "-k"]
    return " and ".join(["not threads", *(f"({word})" for word in given)])


if __name__ == "__main__":
    sys.exit(main())
