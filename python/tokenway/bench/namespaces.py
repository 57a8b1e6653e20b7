"""Hosts that are network namespaces of this machine, on one bridge, each with an address and ranks of its own.

    python -m tokenway.bench.namespaces 2x2 -- python -m tokenway.cli bench --backend torch
    python -m tokenway.bench.namespaces 1,2,3 -- python program.py

starts a command as so many ranks, here two hosts of two, or hosts of one, two and three, with the variables that
torchrun sets. Hosts share the machine's cores, memory, clock and files. They have neither a network nor a boot in
common, so that ranks find none on another host which they could share memory with. Needs iproute2 and util-linux, and
root or user namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from tokenway.launch import die_with, launch_each

INSIDE = "TOKENWAY_NAMESPACES"  # this process has been started again where it may make them
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
PORT = "29500"
SPACES = {"net": "net", "mnt": "mount", "uts": "uts"}  # of a whole host, and what unshare and nsenter call them
# Makes a host another one, with a name, and a kernel's boot as a file says, and keeps it.
BEGIN = """
set -e
hostname "$1"
cat /proc/sys/kernel/random/uuid > "$2"
mount --bind "$2" /proc/sys/kernel/random/boot_id
rm "$2"
"""
KEEP = "echo ready; exec sleep infinity"
_numbers = count(1)


def missing() -> str | None:
    """Why there can be none here, as a clause; None if there can."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"there is no {tool} here"
    if subprocess.run([*_unshare(), "true"], capture_output=True).returncode:
        return "neither root nor user namespaces are to be had"
    return None


def _unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--user", "--map-root-user"]


def enter(command: Sequence[str]) -> int:
    """Runs a command where it may make networks, which end with it; its exit code."""
    return subprocess.call([*_unshare(), *command], env=os.environ | {INSIDE: "1"})


def entered() -> bool:
    """Whether this process may make networks."""
    return os.environ.get(INSIDE) == "1"


def call(words: str, where: Sequence[str] = ()) -> None:
    """A command without blanks in its words. Raises CalledProcessError, with what it said."""
    subprocess.run([*where, *words.split()], check=True, capture_output=True, text=True)


@dataclass
class Host:
    """One of a network's: a process that keeps its namespaces, and an end of a link in them, eth0."""

    number: int
    ranks: tuple[int, ...]
    address: str
    link: str  # the other end, here
    holder: Any
    spaces: tuple[str, ...]

    @property
    def pid(self) -> int:
        """Of the process that holds the namespaces."""
        return self.holder.pid

    def inside(self) -> list[str]:
        """What a command begins with that runs on this host."""
        spaces = (f"--{SPACES[space]}=/proc/{self.pid}/ns/{space}" for space in self.spaces)
        return ["nsenter", *spaces, "env", "-C", os.getcwd()]


class Network:
    """Hosts of so many ranks, host by host, that reach each other until a link is cut. This process is beside them, at
    an address of its own.

    whole: each has a name, mounts and a boot of its own besides. Raises CalledProcessError or OSError where that cannot
    be had.
    """

    def __init__(self, sizes: Sequence[int], whole: bool = True):
        self.name = f"tw{next(_numbers)}"
        self.spaces = tuple(SPACES) if whole else ("net",)
        self.hosts: list[Host] = []
        try:
            call("ip link set lo up")
            self._begin()
            for number, size in enumerate(sizes):
                first = sum(sizes[:number])
                host = self._host(number, tuple(range(first, first + size)))
                self.hosts.append(host)
                self._attach(host)
                for words in (f"addr add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                    call(f"ip {words}", host.inside())
        except BaseException:
            self.close()
            raise

    def address_of(self, place: int) -> str:
        """Within the network."""
        return f"10.211.{self.name.removeprefix('tw')}.{place}"

    def _host(self, number: int, ranks: tuple[int, ...]) -> Host:
        link = f"{self.name}h{number}"
        boot, path = tempfile.mkstemp(prefix=f"tokenway-{link}-")
        os.close(boot)
        script = (BEGIN if len(self.spaces) > 1 else 'rm "$2"\n') + KEEP
        unshare = ["unshare", *(f"--{SPACES[space]}" for space in self.spaces)]
        command = [*unshare, "sh", "-c", script, "sh", link, path]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=partial(die_with, os.getpid()))
        assert holder.stdout is not None
        if not holder.stdout.readline():  # it has its namespaces, or has ended
            holder.wait()
            raise OSError("a host of its own cannot be had")
        return Host(number, ranks, self.address_of(number + 1), link, holder, self.spaces)

    def _begin(self) -> None:
        call(f"ip link add {self.name} type bridge")
        call(f"ip addr add {self.address_of(254)}/24 dev {self.name}")
        call(f"ip link set {self.name} up")

    def _attach(self, host: Host) -> None:
        """Gives a host its eth0."""
        call(f"ip link add {host.link} type veth peer name eth0 netns {host.pid}")
        call(f"ip link set {host.link} master {self.name} up")

    @property
    def hosts_of_ranks(self) -> list[Host]:
        """By rank."""
        return [host for host in self.hosts for _ in host.ranks]

    def places(self) -> str:
        """The hosts' processes by rank, as tests/py/harness.py takes them."""
        return ",".join(str(host.pid) for host in self.hosts_of_ranks)

    def cut(self, number: int) -> None:
        """Takes a host's link away; connections stay, and say nothing."""
        call(f"ip link set {self.hosts[number].link} down")

    def mend(self, number: int) -> None:
        """Gives it back."""
        call(f"ip link set {self.hosts[number].link} up")

    def close(self) -> None:
        """Ends it, and with it the network of whatever still runs there."""
        for host in self.hosts:
            host.holder.kill()
            host.holder.wait()
            subprocess.run(["ip", "link", "del", host.link], capture_output=True)  # it may be gone already
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)
        self.hosts = []

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def sizes_of(words: str) -> tuple[int, ...]:
    """ "2x3": two hosts of three ranks; "1,2,3": hosts of one, two and three. Raises ValueError."""
    hosts, cross, each = words.partition("x")
    sizes = (int(each),) * int(hosts) if cross else tuple(map(int, words.split(",")))
    if not sizes or min(sizes) < 1 or len(sizes) > 200:
        raise ValueError(f"{words!r} are no hosts with a rank or more each")
    return sizes


def variables(network: Network) -> list[dict[str, str]]:
    """By rank, what torchrun would set there."""
    found = []
    for rank, host in enumerate(network.hosts_of_ranks):
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(network.hosts_of_ranks)),
                "LOCAL_RANK": str(host.ranks.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(host.ranks)),
                "GROUP_RANK": str(host.number),
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
            }
        )
    return found


def main(argv: Sequence[str]) -> int:
    """Returns the exit code of the first rank that failed, else 0."""
    try:
        sizes = sizes_of(argv[0])
        if argv[1] != "--" or not argv[2:]:
            raise IndexError
    except (IndexError, ValueError) as error:
        print(f"{(__doc__ or '').strip()}\n\n{error if isinstance(error, ValueError) else ''}".strip(), file=sys.stderr)
        return 2
    if not entered():
        if reason := missing():
            print(f"tokenway.bench.namespaces: {reason}", file=sys.stderr)
            return 1
        return enter([sys.executable, "-m", "tokenway.bench.namespaces", *argv])
    with Network(sizes) as network:
        places = zip(network.hosts_of_ranks, variables(network), strict=True)
        return launch_each([([*host.inside(), *argv[2:]], more) for host, more in places])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
