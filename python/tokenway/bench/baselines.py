"""What dispatch and combine are measured against; gloo.py holds those that need PyTorch.

Each baseline does the work of a pair: the same rows to the same ranks and back, summed at their
owner. They are spared some of it: ids and weights do not travel, counts are known beforehand, and
all buffers are reused.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
from dataclasses import dataclass, replace

import numpy as np

from tokenway import tensors
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.verify import Mismatch, expected_output, same_bits

Array = np.ndarray

NAMES = ("memcpy", "sockets", "gloo-alltoall", "gloo-allgather")


@dataclass
class Plan:
    """What this rank sends and what it must get, worked out once.

    rows: uint8 [T, row], payloads of this rank's tokens side by side. to[d]: tokens that go to
    rank d. received[s]: uint8 [n, row], what comes from s. parts[s]: [n, H], the answers to s.
    want: [T, H], the oracle's result.
    """

    case: Case
    rank: int
    rows: Array
    to: list[Array]
    received: list[Array]
    parts: list[Array]
    want: Array

    @property
    def send_counts(self) -> list[int]:
        """Rows to each rank in dispatch, from each rank in combine."""
        return [len(t) for t in self.to]

    @property
    def recv_counts(self) -> list[int]:
        """Rows from each rank in dispatch, to each rank in combine."""
        return [len(r) for r in self.received]


def make_plan(case: Case, rank: int) -> Plan:
    """The plan of one rank. Answers are weighted sums of the rank's experts, as in rank_major."""
    case = replace(case, layout="rank_major", weighting="none")
    x = case.exchange
    received, parts = [], []
    for source in range(case.ranks):
        tokens = np.flatnonzero(x.routing[source].goes[:, rank])
        values, scales = case.inputs(source)
        values, scales = values[tokens], None if scales is None else scales[tokens]
        here = x.routing[source].owner[tokens] == rank
        answer = np.empty(values.shape, tensors.numpy_dtype(case.combine_dtype))
        experts = np.where(here, x.ids[source][tokens], -1)
        case.answers(values, scales, experts, x.weight[source][tokens], answer)
        received.append(row_bytes(values, scales))
        parts.append(answer)
    to = [np.flatnonzero(x.routing[rank].goes[:, d]) for d in range(case.ranks)]
    rows = row_bytes(*case.inputs(rank))
    return Plan(case, rank, rows, to, received, parts, expected_output(case, rank))


def row_bytes(values: Array, scales: Array | None) -> Array:
    """Payloads side by side: uint8 [T, row]."""
    parts = [a.view(np.uint8) for a in (values, scales) if a is not None]
    return np.concatenate(parts, axis=1)


def check_result(plan: Plan, name: str, received: Array, out: Array) -> None:
    """Raises Mismatch unless all rows arrived, and the sum is the oracle's within rounding.

    received: uint8, this rank's rows in (source, slot) order.
    """
    if not same_bits(received, np.concatenate(plan.received)):
        raise Mismatch(f"{plan.case.name}: {name} on rank {plan.rank} received other rows than were sent to it")
    check_sum(plan, name, out)


def check_sum(plan: Plan, name: str, out: Array) -> None:
    """Raises Mismatch unless the sum is the oracle's within rounding."""
    want, got = plan.want.astype(np.float32), out.astype(np.float32)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[plan.case.combine_dtype]
    # One rounding per partial sum, each at most half a unit of the largest partial.
    largest = max([float(np.abs(p.astype(np.float32)).max()) for p in plan.parts if p.size] + [1.0])
    if got.shape != want.shape or (np.abs(got - want) > 2 * plan.case.ranks * unit * largest).any():
        raise Mismatch(f"{plan.case.name}: {name} on rank {plan.rank} has another sum than the oracle")


# ---- memcpy --------------------------------------------------------------------------------------


class Memcpy:
    """Copies as many bytes as this rank sends in dispatch and in combine, its own rows included.

    From one large buffer to another, each over four times the last-level cache, touched before;
    every call goes on where the last one ended, so that neither side is in a cache.
    """

    def __init__(self, cache_bytes: int):
        self._least = 4 * cache_bytes + (1 << 20)
        self._size = 0
        self._at = 0

    def prepare(self, bytes_moved: int) -> None:
        """Sets how much a call copies."""
        self.bytes = bytes_moved
        if self._size < max(self._least, bytes_moved):
            self._size = max(self._least, bytes_moved)
            self._from = np.full(self._size, 1, np.uint8)
            self._to = np.full(self._size, 2, np.uint8)

    def __call__(self) -> None:
        """The copy."""
        at = self._at if self._at + self.bytes <= self._size else 0
        ctypes.memmove(self._to.ctypes.data + at, self._from.ctypes.data + at, self.bytes)
        self._at = at + self.bytes


# ---- sockets -------------------------------------------------------------------------------------


class Links:
    """Stream sockets to other ranks, which exchange bytes all at once."""

    def __init__(self, rank: int):
        self.rank = rank
        self._peers: dict[int, socket.socket] = {}

    def add(self, peer: int, link: socket.socket) -> None:
        """Takes the socket to a peer."""
        link.setblocking(False)
        self._peers[peer] = link

    def exchange(self, send: list[memoryview], receive: list[memoryview]) -> None:
        """send[d] to each rank d, receive[s] from each rank s, all at once; lengths are known."""
        receive[self.rank][:] = send[self.rank]
        poll, by_fd = select.poll(), {}
        sends, receives = dict(enumerate(send)), dict(enumerate(receive))
        for rank, peer in self._peers.items():
            events = (select.POLLOUT if len(sends[rank]) else 0) | (select.POLLIN if len(receives[rank]) else 0)
            if events:
                poll.register(peer, events)
                by_fd[peer.fileno()] = rank, peer
        while by_fd:
            for fd, ready in poll.poll():
                rank, peer = by_fd[fd]
                if ready & select.POLLIN:
                    count = peer.recv_into(receives[rank])
                    if count == 0:
                        raise ConnectionError(f"rank {rank} is gone")
                    receives[rank] = receives[rank][count:]
                if ready & select.POLLOUT:
                    sends[rank] = sends[rank][peer.send(sends[rank]) :]
                if ready & (select.POLLERR | select.POLLNVAL):
                    raise ConnectionError(f"the socket to rank {rank} failed")
                events = (select.POLLOUT if len(sends[rank]) else 0) | (select.POLLIN if len(receives[rank]) else 0)
                if events:
                    poll.modify(fd, events)
                else:
                    poll.unregister(fd)
                    del by_fd[fd]

    def close(self) -> None:
        """Closes the sockets of this rank."""
        for peer in self._peers.values():
            peer.close()


class Mesh(Links):
    """A Unix stream socket between every two ranks. Creating it is collective."""

    def __init__(self, control: Control):
        super().__init__(control.rank)
        name = control.allgather(os.urandom(8).hex())[0]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0tokenway-bench-{name}-{self.rank}")
            listener.listen(control.nranks)
            control.allgather(None)  # everybody listens
            for rank in range(self.rank):
                peer = socket.socket(socket.AF_UNIX)
                peer.connect(f"\0tokenway-bench-{name}-{rank}")
                peer.sendall(self.rank.to_bytes(4, "little"))
                self.add(rank, peer)
            for _ in range(self.rank + 1, control.nranks):
                peer = listener.accept()[0]
                self.add(int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little"), peer)


def _blocks(array: Array, counts: list[int]) -> list[memoryview]:
    """Consecutive rows of a C-contiguous array as bytes, so many at a time."""
    raw = array.view(np.uint8)
    ends = np.cumsum(counts)
    return [memoryview(raw[e - n : e].reshape(-1)) for e, n in zip(ends, counts, strict=True)]


class Sockets:
    """A straightforward all-to-all over a full mesh of sockets, one thread per rank."""

    def __init__(self, plan: Plan, mesh: Mesh):
        self._plan, self._mesh = plan, mesh
        self._order = np.concatenate(plan.to)
        dtype = tensors.numpy_dtype(plan.case.combine_dtype)
        hidden = plan.case.profile.hidden
        self._send = np.zeros((len(self._order), plan.rows.shape[1]), np.uint8)
        self._received = np.zeros((sum(plan.recv_counts), plan.rows.shape[1]), np.uint8)
        self._parts = np.concatenate(plan.parts)
        self._back = np.zeros((len(self._order), hidden), dtype)
        self._sum = np.zeros((len(plan.rows), hidden), np.float32)
        self._out = np.zeros((len(plan.rows), hidden), dtype)

    def __call__(self) -> None:
        """Dispatch and combine."""
        plan = self._plan
        np.take(plan.rows, self._order, axis=0, out=self._send, mode="clip")
        there = _blocks(self._send, plan.send_counts), _blocks(self._received, plan.recv_counts)
        self._mesh.exchange(*there)
        back = _blocks(self._parts, plan.recv_counts), _blocks(self._back, plan.send_counts)
        self._mesh.exchange(*back)
        self._sum[...] = 0
        at = 0
        for tokens in plan.to:
            self._sum[tokens] += _widen(self._back[at : at + len(tokens)])
            at += len(tokens)
        self._out[...] = self._sum

    def check(self) -> None:
        """Raises Mismatch unless the last call did its work."""
        check_result(self._plan, "sockets", self._received, self._out)


def _widen(x: Array) -> Array:
    """To float32; bfloat16 by its bits, which is several times as fast as a conversion."""
    if x.dtype.name != "bfloat16":
        return x.astype(np.float32)
    return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
