"""A network whose frames a program carries (wire.py), late, out of order, twice, or not at all, as a test says.

The kernel's netem does the same, where a kernel has it. This needs /dev/net/tun alone, and can part any two hosts while
both reach a third.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from wire import PLAIN, Manner

from tokenway.bench.namespaces import Host, Network, call

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
WIRE = str(Path(__file__).with_name("wire.py"))


def missing() -> str | None:
    """Why there can be no wire here, as a clause; None if there can."""
    return None if os.access(TUN, os.R_OK | os.W_OK) else f"{TUN} cannot be opened here"


class Wired(Network):
    """Hosts joined by a wire."""

    def __init__(self, sizes: Sequence[int], manner: Manner = PLAIN, seed: int = 0):
        self._taps: list[int] = []
        self._wire: subprocess.Popen | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.manner = manner
        with theirs:
            super().__init__(sizes)
            fds = [theirs.fileno(), *self._taps]
            command = [sys.executable, WIRE, str(seed), *map(str, fds)]
            self._wire = subprocess.Popen(command, pass_fds=fds)
        for tap in self._taps:
            os.close(tap)
        self._taps = []
        self.behave(manner)

    def _begin(self) -> None:
        """There is nothing but the hosts' own ends."""

    def _attach(self, host: Host) -> None:
        tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        self._taps.append(tap)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", host.link.encode(), IFF_TAP | IFF_NO_PI))
        call(f"ip link set {host.link} netns {host.pid}")
        call(f"ip link set {host.link} name eth0", host.inside())

    def behave(self, manner: Manner) -> None:
        """From now on frames travel like this; those under way as they would have."""
        self.manner = manner
        self._control.send(json.dumps(asdict(manner)).encode())

    def part(self, here: Sequence[int], there: Sequence[int]) -> None:
        """Nothing passes between these hosts and those."""
        both = [pair for a in here for b in there for pair in ((a, b), (b, a))]
        self.behave(replace(self.manner, parted=(*self.manner.parted, *both)))

    def cut(self, number: int) -> None:
        """Nothing passes between this host and any other."""
        self.part([number], [host.number for host in self.hosts if host.number != number])

    def mend(self, number: int) -> None:
        """All passes again to and from this host."""
        self.behave(replace(self.manner, parted=tuple(pair for pair in self.manner.parted if number not in pair)))

    def close(self) -> None:
        """Ends it, and the wire."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            self._wire = None
        for tap in self._taps:
            os.close(tap)
        self._taps = []
        self._control.close()
        super().close()
