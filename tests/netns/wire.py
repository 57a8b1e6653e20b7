"""A program that carries frames between taps, late, out of order, twice, or not at all: see wired.py."""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LARGEST = 65536  # bytes of a frame, or of what a test says


@dataclass(frozen=True)
class Manner:
    """How frames travel."""

    delay: tuple[float, float] = (0.0, 0.0)  # seconds; each frame's is drawn between the two
    reordered: float = 0.0  # the share that may overtake those before them; the others wait for them
    lost: float = 0.0
    doubled: float = 0.0
    parted: tuple[tuple[int, int], ...] = ()  # hosts between which nothing passes, in this direction


PLAIN = Manner()
BAD = Manner(delay=(0.0, 0.004), reordered=0.4, lost=0.01, doubled=0.02)


class Wire:
    """Frames between taps: one for each host, by its number."""

    def __init__(self, taps: Sequence[int], seed: int):
        self.taps = list(taps)
        self.manner = Manner()
        self._rng = random.Random(seed)
        self._homes: dict[bytes, int] = {}  # where an address is
        self._under_way: list[tuple[float, int, int, bytes]] = []  # (when it arrives, its number, where, frame)
        self._last: dict[tuple[int, int], float] = {}  # when the last one arrives that none may overtake
        self._count = 0

    def take(self, source: int) -> None:
        """All frames that a host has sent."""
        for _ in range(64):
            try:
                frame = os.read(self.taps[source], LARGEST)
            except BlockingIOError:
                return
            self._homes[frame[6:12]] = source
            home = self._homes.get(frame[:6])
            others = range(len(self.taps)) if home is None else [home]
            for target in others:
                if target != source:
                    self._send(source, target, frame)

    def _send(self, source: int, target: int, frame: bytes) -> None:
        manner, rng = self.manner, self._rng
        if (source, target) in manner.parted or rng.random() < manner.lost:
            return
        for _ in range(2 if rng.random() < manner.doubled else 1):
            arrives = time.monotonic() + rng.uniform(*manner.delay)
            if rng.random() >= manner.reordered:
                arrives = self._last[source, target] = max(arrives, self._last.get((source, target), 0.0))
            self._count += 1
            heapq.heappush(self._under_way, (arrives, self._count, target, frame))

    def deliver(self) -> float:
        """What has arrived; seconds until something does, -1 if nothing is under way."""
        while self._under_way:
            wait = self._under_way[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, target, frame = heapq.heappop(self._under_way)
            with suppress(OSError):  # where there is no room, or no host any more, it is lost
                os.write(self.taps[target], frame)
        return -1

    def run(self, control: socket.socket) -> None:
        """Until whoever made the network is gone."""
        epoll = select.epoll()
        places = {tap: number for number, tap in enumerate(self.taps)}
        for fd in (control.fileno(), *self.taps):
            epoll.register(fd, select.EPOLLIN)
        while True:
            for fd, _ in epoll.poll(self.deliver()):
                if fd in places:
                    self.take(places[fd])
                    continue
                said = control.recv(LARGEST)
                if not said:
                    return
                self.manner = as_manner(json.loads(said))


def as_manner(words: dict[str, Any]) -> Manner:
    """What `behave` has sent."""
    parted = tuple((a, b) for a, b in words.pop("parted"))
    low, high = words.pop("delay")
    return Manner(delay=(low, high), parted=parted, **words)


if __name__ == "__main__":
    given, control_fd, *tap_fds = map(int, sys.argv[1:])
    Wire(tap_fds, given).run(socket.socket(fileno=control_fd))
