#!/usr/bin/env python3
"""The portable backend between two network namespaces of this machine, each with an address of its own; and emulated
GPUs on two hosts that NVLink joins, the second of which has a boot, a name and mounts of its own besides.

    make test-netns ARGS="-k cut -x"
    python tests/netns/run_all.py --hosts -k auto        # the hosts alone

Needs root, or user namespaces that this user may make; where there are neither, says so and ends without a failure
(TW_STRICT=1: with one). Odd ranks of the suite's processes run in the other namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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
    "test_balancer",
)
HOSTS_SUITE = ("test_exchange", "test_survival")  # between the hosts, what is neither long nor heavy
INSIDE = "TOKENWAY_TEST_INSIDE"
APART = "TOKENWAY_TEST_APART"  # the process that holds the other namespace
SPACES = "TOKENWAY_TEST_SPACES"  # which of its namespaces odd ranks are in
# Makes this process's host another one: its kernel's boot is what the file says.
ANOTHER_HOST = """
set -e
hostname tokenway-other
cat /proc/sys/kernel/random/uuid > "$1"
mount --bind "$1" /proc/sys/kernel/random/boot_id
"""
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
    with tempfile.NamedTemporaryFile(prefix="tokenway-boot-") as boot:
        return run(boot.name)


def run(boot: str) -> int:
    """All of it. boot: a file for the name of another boot."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # it has its namespaces
        try:
            connect(holder.pid)
        except subprocess.CalledProcessError as error:
            return skip(f"{' '.join(error.cmd)} failed")
        environment = os.environ | {APART: str(holder.pid), "OMP_NUM_THREADS": "1"}
        if "--hosts" in sys.argv:
            sys.argv.remove("--hosts")
            return run_hosts(environment, holder.pid, boot)
        suite = [str(HERE.parent / "py" / f"{name}.py") for name in SUITE]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        own = subprocess.call([*pytest, str(HERE), *sys.argv[1:]], env=environment)
        # Threads are all in one namespace; the run without namespaces has them.
        rest = subprocess.call([*pytest, *suite, "--backend", "torch", *sys.argv[1:], "-k", keyword()], env=environment)
        hosts = run_hosts(environment, holder.pid, boot)
        return max((code for code in (own, rest, hosts) if code != NOTHING), default=NOTHING)
    finally:
        holder.kill()
        holder.wait()


NOTHING = 5  # pytest's, where -k leaves none


def run_hosts(environment: dict[str, str], holder: int, boot: str) -> int:
    """Emulated GPUs on two hosts: the tests of this folder that want them, and a part of the suite."""
    there = [f"--{flag}=/proc/{holder}/ns/{space}" for flag, space in (("mount", "mnt"), ("uts", "uts"))]
    made = subprocess.run(["nsenter", *there, "sh", "-c", ANOTHER_HOST, "sh", boot], capture_output=True, text=True)
    if made.returncode:
        return skip(f"a host of its own cannot be had: {made.stderr.strip()}")
    sys.path.append(str(HERE.parent / "emulator"))
    import run as emulator

    if not emulator.build("tokenway_emulated"):
        return skip(emulator.NOTHING)
    environment = environment | {
        SPACES: "net mnt uts",
        "PYTHONPATH": str(emulator.ROOT / "python"),
        "TOKENWAY_LIBRARY": str(emulator.BUILD / "emulator" / "libtokenway.so"),
    }
    suite = [str(HERE.parent / "py" / f"{name}.py") for name in HOSTS_SUITE]
    chosen = ["--backend", "emulated-hosts", "--capture=sys", "-m", "not long and not heavy"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {"EXAMPLES": "6"} | environment
    own = subprocess.call([*pytest, str(HERE / "test_hosts.py"), *sys.argv[1:]], env=environment)
    # A child that a killed rank has forked keeps its connections open, and no other host sees its process.
    chosen += ["-k", keyword("forked_child")]
    rest = subprocess.call([*pytest, *suite, *sys.argv[1:], *chosen], env=environment)
    return max((code for code in (own, rest) if code != NOTHING), default=NOTHING)


def keyword(*but: str) -> str:
    """The caller's -k, and no threads, nor those."""
    given = [b for a, b in zip(sys.argv, sys.argv[1:], strict=False) if a == "-k"]
    return " and ".join([*(f"not {word}" for word in ("threads", *but)), *(f"({word})" for word in given)])


if __name__ == "__main__":
    sys.exit(main())
