"""The floor of `tokenway bench --backend fabric`: the bytes of a pair's rows alone, by plain sockets.

The rows that a pair moves to other hosts, and nothing beside them, go over TCP sockets between rail peers, from buffers
to buffers that stay the same: a dispatch's once to each host that wants them, then a combine's partials back, one from
each rank that has one, or, where hosts fold, one from each host. No row is looked up, copied or summed, and none waits
for a word. So it is what a network of sockets costs between these processes, whatever library uses it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tokenway.bench.baselines import Links
from tokenway.bench.case import Case
from tokenway.bench.control import Telling
from tokenway.bench.verify import Mismatch

FLOOR, FOLDED = "floor", "floor by domain"
PATIENCE = 60.0  # seconds for a socket to be made

Array = np.ndarray


def rail_peer(hosts: Sequence[int], rank: int, host: int) -> int:
    """The rank of a host in whose memory a rank's messages for that host lie."""
    there = [other for other, of in enumerate(hosts) if of == host]
    return there[list(hosts[:rank]).count(hosts[rank]) % len(there)]


def traffic(case: Case, hosts: Sequence[int], folded: bool) -> tuple[Array, Array]:
    """Bytes of rows from rank to rank, [N, N], of other hosts: in a dispatch, and in a combine. folded: hosts return
    one partial of a row each, by the rail peer of its owner."""
    of = np.asarray(hosts)
    out = np.zeros((len(of), len(of)), np.int64)
    back = np.zeros_like(out)
    for owner, routing in enumerate(case.exchange.routing):
        goes = np.asarray(routing.goes, bool)
        for host in set(hosts) - {hosts[owner]}:
            there = np.flatnonzero(of == host)
            peer = rail_peer(hosts, owner, host)
            rows = int(goes[:, there].any(axis=1).sum())
            out[owner, peer] += rows * case.dispatch_row
            if folded:
                back[peer, owner] += rows * case.combine_row
                continue
            for rank in there.tolist():
                back[rank, rail_peer(hosts, rank, hosts[owner])] += int(goes[:, rank].sum()) * case.combine_row
    return out, back


class Rails(Links):
    """A TCP socket between every two ranks of which one is the other's rail peer. Creating it is collective."""

    def __init__(self, talk: Telling, hosts: Sequence[int]):
        super().__init__(talk.rank)
        meeting = os.environ.get("MASTER_ADDR", "127.0.0.1")
        pairs = {(rank, rail_peer(hosts, rank, host)) for rank, of in enumerate(hosts) for host in set(hosts) - {of}}
        linked = sorted({a + b - self.rank for a, b in pairs if self.rank in (a, b)})
        family = socket.getaddrinfo(meeting, None)[0][0]
        with socket.create_server(("", 0), family=family) as listener:
            places = talk.allgather((_address_towards(meeting, family), listener.getsockname()[1]))
            problem = None
            try:
                self._connect(meeting, places, linked, listener)
            except OSError as error:
                problem = error
            if problems := [told for told in talk.allgather(problem and str(problem)) if told]:  # and nobody connects
                self.close()
                raise ConnectionError(f"no sockets between rail peers: {problems[0]}")

    def _connect(
        self, meeting: str, places: Sequence[tuple[str, int]], linked: Sequence[int], listener: socket.socket
    ) -> None:
        for peer in linked:
            if peer > self.rank:
                continue
            address, port = places[peer]
            # Where ranks meet is this very host for those that have no other address for it: to others it is none.
            local = address.startswith("127.") or address == "::1"
            link = socket.create_connection((meeting if local else address, port), timeout=PATIENCE)
            self.add(peer, link)
            link.send(self.rank.to_bytes(4, "little"))
        listener.settimeout(PATIENCE)
        for _ in [peer for peer in linked if peer > self.rank]:
            link = listener.accept()[0]
            link.settimeout(PATIENCE)
            self.add(int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little"), link)

    def add(self, peer: int, link: socket.socket) -> None:
        """Takes the socket to a peer."""
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().add(peer, link)


def _address_towards(name: str, family: int) -> str:
    """The address by which this machine reaches another."""
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        found.connect((name, 9))  # sends nothing
        address: str = found.getsockname()[0]
        return address


def _mark(rank: int) -> int:
    """What all bytes of a rank are."""
    return rank % 255 + 1


class Floor:
    """Pairs of routings by turns, as bytes alone: a subject of timing.rounds_of."""

    phases: ClassVar[tuple[str, ...]] = ("pair",)

    def __init__(self, name: str, rails: Rails, cases: Sequence[Case], hosts: Sequence[int]):
        self.name, self._rails = name, rails
        moved = [half for case in cases for half in traffic(case, hosts, name == FOLDED)]
        self.bytes = sum(int(half.sum()) for half in moved[:2])  # of the first routing's pair, of all ranks
        me, n = rails.rank, len(hosts)
        sent = memoryview(bytes([_mark(me)]) * max(int(half[me].max()) for half in moved))
        self._received = [np.zeros(max(int(half[rank, me]) for half in moved), np.uint8) for rank in range(n)]
        received = [memoryview(buffer) for buffer in self._received]
        self._halves = [
            ([sent[: int(b)] for b in half[me]], [received[rank][: int(half[rank, me])] for rank in range(n)])
            for half in moved
        ]
        self._next = 0
        self._came = [0] * n  # bytes of each rank, the most at once

    def once(self, _: Telling) -> tuple[int, ...]:
        """The bytes of a dispatch, then those of a combine."""
        begin = time.perf_counter_ns()
        for send, receive in self._halves[self._next : self._next + 2]:
            self._rails.exchange(send, receive)
        took = time.perf_counter_ns() - begin
        for _, receive in self._halves[self._next : self._next + 2]:
            self._came = [max(most, len(each)) for most, each in zip(self._came, receive, strict=True)]
        self._next = (self._next + 2) % len(self._halves)
        return (took,)

    def check(self, _: int) -> None:
        """Raises Mismatch unless every byte of what had its turn has come from its rank."""
        for rank, (buffer, count) in enumerate(zip(self._received, self._came, strict=True)):
            if not np.all(buffer[:count] == _mark(rank)):
                raise Mismatch(f"{self.name}: bytes of rank {rank} are missing")
