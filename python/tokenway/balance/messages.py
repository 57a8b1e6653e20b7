"""Experts' weights as messages, for ranks that have no memory in common, as those of several hosts: each rank serves
those that it has to peers that ask for them, over connections beside the group's steps. Ranks of a host that do have
memory in common read it as ever (`Weights.pull`).

Nobody sends what was not asked for. So what a rank reads of a peer's weights, it reads between its question and the end
of the answer, as it would between begin and end of a copy from memory in common (docs/PROTOCOL.md, M1); and what comes
after it has given up comes to a connection that is closed, and to no slot.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import byref, c_char_p, create_string_buffer
from typing import Any, NamedTuple

import numpy as np

from tokenway import _native
from tokenway.comm import usual_timeout
from tokenway.errors import ConfigMismatch, PeerRefused, SystemFailure, TokenwayError
from tokenway.group import Group
from tokenway.meeting import gather_at
from tokenway.settings import milliseconds

LOG = logging.getLogger("tokenway.balance")
_KEY_BYTES = 16  # by which a rank knows those that have met it
_ASKED = struct.Struct("<qq")  # where in the weights, and how many bytes; or _BOARDS and 0
_ANSWER = struct.Struct("<q")  # how many bytes follow; or _REFUSED
_BOARDS, _REFUSED = -1, -1
_GREETING = 10.0  # seconds that who connects may take to say the key
_LOOK = 5.0  # seconds between two looks whether who follows is still there
_CARD = 8 << 10  # bytes of what a rank tells where they meet: 512 characters, each of up to 12, and more
_PIECE = 8 << 20  # bytes of a device's memory that go through the host's at once


class HostMemory:
    """A rank's weights on the CPU: messages go from and to where they lie."""

    stream = 0

    def __init__(self, group: Group, view: Any):
        del group
        self._bytes = np.asarray(view).data
        self.size = len(self._bytes)

    def give(self, at: int, size: int, send: Callable[[Any], object]) -> None:
        """Hands bytes to `send`."""
        send(self._bytes[at : at + size])

    def take(self, at: int, size: int, fill: Callable[[Any], object]) -> None:
        """Lets `fill` write bytes."""
        fill(self._bytes[at : at + size])

    def behind(self, streams: Iterable[Any]) -> None:
        """What is taken comes behind what was launched before: that has ended."""

    def settle(self) -> None:
        """What was put on `stream` is done."""


class DeviceMemory:
    """A rank's weights on a CUDA device: messages go through pinned memory, by copy engines, on streams of their own.
    They wait for streams of steps, and none of those for them (M8)."""

    def __init__(self, group: Group, view: Any):
        self._torch = torch = group.native.place.torch
        self._device, self._view = group.device, view
        self.size = view.numel()
        self._stream = torch.cuda.Stream(self._device)
        self.stream = self._stream.cuda_stream
        self._own = threading.local()  # of each thread that gives or takes: pinned memory, and a stream to give by

    def _mine(self) -> tuple[Any, Any]:
        if not hasattr(self._own, "pinned"):
            with self._torch.cuda.device(self._device):
                self._own.pinned = self._torch.empty(_PIECE, dtype=self._torch.uint8, pin_memory=True)
                self._own.stream = self._torch.cuda.Stream(self._device)
        return self._own.pinned, self._own.stream

    def give(self, at: int, size: int, send: Callable[[Any], object]) -> None:
        """Hands bytes to `send`, in pieces."""
        pinned, stream = self._mine()
        for begin in range(at, at + size, _PIECE):
            count = min(_PIECE, at + size - begin)
            with self._torch.cuda.stream(stream):
                pinned[:count].copy_(self._view[begin : begin + count], non_blocking=True)
            stream.synchronize()
            send(memoryview(pinned[:count].numpy()))

    def take(self, at: int, size: int, fill: Callable[[Any], object]) -> None:
        """Lets `fill` write bytes, in pieces; they are there when this returns."""
        pinned, _ = self._mine()
        for begin in range(at, at + size, _PIECE):
            count = min(_PIECE, at + size - begin)
            fill(memoryview(pinned[:count].numpy()))
            with self._torch.cuda.stream(self._stream):
                self._view[begin : begin + count].copy_(pinned[:count], non_blocking=True)
            self._stream.synchronize()

    def behind(self, streams: Iterable[Any]) -> None:
        """What is taken comes behind what the current stream has now, and these."""
        for stream in (self._torch.cuda.current_stream(self._device), *streams):
            self._stream.wait_event(stream.record_event())

    def settle(self) -> None:
        """Waits for what was put on `stream`."""
        self._stream.synchronize()


class Door(NamedTuple):
    """Where a rank serves."""

    host: str
    port: int
    key: str


class Server:
    """Serves this rank's weights, and what it tells of plans, to those that have met it."""

    def __init__(self, memory: Any, host: str):
        self._memory = memory
        self._key = os.urandom(_KEY_BYTES)
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind, protocol)
        self._listener.bind(address)
        self._listener.listen(128)
        self.door = Door(host, self._listener.getsockname()[1], self._key.hex())
        self._open: set[socket.socket] = {self._listener}
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._told: list[bytes] = []  # the last board
        self._turn = 0  # how many there were
        self._over = False
        _thread(self._accept)

    def tell(self, board: bytes) -> None:
        """Tells all who follow."""
        with self._news:
            self._told, self._turn = [bytes(board)], self._turn + 1
            self._news.notify_all()

    def close(self) -> None:
        """Ends all connections, and their threads."""
        with self._lock:
            self._over = True
            _end(self._open)
        with self._news:
            self._news.notify_all()

    def _accept(self) -> None:
        while not self._over:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the end, or too many files are open
                time.sleep(0.0 if self._over else 0.1)
                continue
            with self._lock:
                if self._over:
                    connection.close()
                    break
                self._open.add(connection)
            _thread(self._serve, connection)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_GREETING)
            key = bytearray(_KEY_BYTES)
            _fill(connection, memoryview(key))
            if not hmac.compare_digest(key, self._key):
                return
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._over:
                at, size = _ASKED.unpack(_read(connection, _ASKED.size))
                if at == _BOARDS:
                    self._tell_all(connection)
                elif 0 <= at <= at + size <= self._memory.size:
                    connection.sendall(_ANSWER.pack(size))
                    self._memory.give(at, size, connection.sendall)
                else:
                    connection.sendall(_ANSWER.pack(_REFUSED))
        except OSError:  # who asked is gone, or this is the end
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _tell_all(self, connection: socket.socket) -> None:
        """Tells each new board, the last one first."""
        seen = 0
        while True:
            with self._news:
                while self._turn == seen and not self._over and not _ended(connection):
                    self._news.wait(_LOOK)
                if self._turn == seen or self._over:
                    return
                seen, (board,) = self._turn, self._told
            connection.sendall(_ANSWER.pack(len(board)) + board)


class Messages:
    """This rank's part: what it serves, and its connections to those that it asks. limit: seconds after which a peer
    that brings nothing more is given up."""

    def __init__(self, server: Server, memory: Any, doors: list[Door], limit: float):
        self.server, self.memory = server, memory
        self._doors, self._limit = doors, limit
        self._own = threading.local()  # of each thread that pulls: connections by rank
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def pull(self, rank: int, read: int, write: int, size: int) -> None:
        """Brings bytes of a rank's weights to this rank's own. Errors: SystemFailure where the rank is gone, brings
        nothing for too long, or where `cut` is called meanwhile."""
        if not hasattr(self._own, "known"):
            self._own.known = {}
        known: dict[int, socket.socket] = self._own.known
        try:
            if rank not in known:
                known[rank] = self._connect(rank)
            connection = known[rank]
            connection.sendall(_ASKED.pack(read, size))
            if _ANSWER.unpack(_read(connection, _ANSWER.size))[0] != size:
                raise SystemFailure(f"rank {rank} has refused {size} bytes of its weights from {read} on")
            self.memory.take(write, size, lambda part: _fill(connection, part))
        except BaseException as error:
            self._forget(known.pop(rank, None))
            if isinstance(error, OSError) and not isinstance(error, TokenwayError):
                raise SystemFailure(f"weights of rank {rank} did not come: {error}") from error
            raise

    def follow(self, rank: int, taken: Callable[[bytes], object]) -> None:
        """Hands each board of a rank to `taken`, until `cut` or the rank's end; by a thread of its own."""
        connection = None
        try:
            connection = self._connect(rank)
            connection.sendall(_ASKED.pack(_BOARDS, 0))
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                taken(_read(connection, _ANSWER.unpack(_read(connection, _ANSWER.size))[0]))
        except OSError as error:
            LOG.info("rank %d tells of no more plans: %s", rank, error)
        finally:
            self._forget(connection)

    def cut(self) -> None:
        """Ends what is under way, from another thread. What is asked for later connects anew."""
        with self._lock:
            self._open -= _end(self._open)

    def close(self) -> None:
        """Ends it all: peers, too, are brought nothing more from here."""
        self.cut()
        self.server.close()

    def _connect(self, rank: int) -> socket.socket:
        door = self._doors[rank]
        family, kind, protocol, _, address = socket.getaddrinfo(door.host, door.port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
        with self._lock:
            self._open.add(connection)
        try:
            connection.settimeout(self._limit)
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(door.key))
        except BaseException:
            self._forget(connection)
            raise
        return connection

    def _forget(self, connection: socket.socket | None) -> None:
        if connection is not None:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def connect(group: Group, view: Any, digest: str, problem: TokenwayError | None) -> Messages:
    """This rank's part in moving weights of a group where not all ranks have memory in common. Collective. view: its
    weights, bytes. digest: of how they lie. problem: why this rank has none; it is raised here, when the others know.
    Errors: PeerRefused where another rank has one, ConfigMismatch where weights lie otherwise, PeerTimeout, PeerDied,
    SystemFailure."""
    carrier = group.comm.carrier
    meeting: _InGroup | _AtStore = (
        _InGroup(group) if carrier is None else _AtStore(carrier.plan_of(group.native.pointer))
    )
    limit = group.settings.timeout or usual_timeout()
    server = None
    try:
        if problem is None:
            memory = (HostMemory if group.device is None else DeviceMemory)(group, view)
            server = Server(memory, meeting.local)
    except OSError as error:
        problem = SystemFailure(f"rank {group.rank} cannot serve its weights at {meeting.local}: {error}")
    try:
        mine = [str(problem)[:512]] if server is None else [*server.door, digest]
        cards = meeting.gather(mine, limit)
        _check(group.rank, cards, problem)
    except BaseException:
        if server is not None:
            server.close()
        raise
    assert server is not None
    return Messages(server, memory, [Door(*card[:3]) for card in cards], limit)


class _AtStore:
    """Ranks of a carrier meet where the group's channel did. plan: the channel's."""

    def __init__(self, plan: Any):
        self._plan = plan
        self.local: str = plan.local  # the address by which peers reach this rank

    def gather(self, mine: list[Any], limit: float) -> list[Any]:
        """What each rank gives, within so many seconds."""
        import torch.distributed as dist

        plan = self._plan
        store = dist.PrefixStore(f"tokenway-weights-{plan.key}", plan.store)
        return gather_at(store, "weights", mine, plan.rank, plan.nranks, limit)


class _InGroup:
    """Ranks between which the library itself is connected meet over that."""

    def __init__(self, group: Group):
        self._pointer, self._nranks = group.native.pointer, group.nranks
        address = c_char_p()
        _native.check(_native.lib.twGroupAddress(self._pointer, byref(address)))
        self.local = (address.value or b"").decode()

    def gather(self, mine: list[Any], limit: float) -> list[Any]:
        """As `_AtStore` does. It is one of the calls of a comm that ranks make in the same order."""
        card = json.dumps(mine).encode().ljust(_CARD)
        cards = create_string_buffer(_CARD * self._nranks)
        _native.check(_native.lib.twGroupMeet(self._pointer, card, _CARD, milliseconds(limit), cards))
        return [json.loads(cards.raw[_CARD * rank : _CARD * (rank + 1)]) for rank in range(self._nranks)]


def _check(me: int, cards: list[list[Any]], problem: TokenwayError | None) -> None:
    if problem is not None:
        raise problem
    for rank, card in enumerate(cards):
        if len(card) == 1:
            raise PeerRefused(f"rank {rank} has refused its weights: {card[0]}")
    for rank, card in enumerate(cards):
        if card[3] != cards[me][3]:
            raise ConfigMismatch(f"ranks {me} and {rank} were given weights of other names, shapes or dtypes")


def _thread(function: Callable[..., Any], *args: Any) -> None:
    threading.Thread(target=function, args=args, name="tokenway-weights", daemon=True).start()


def _end(connections: Iterable[socket.socket]) -> set[socket.socket]:
    """Wakes whoever waits for one of them. Gives those that are ended: others may be about to connect."""
    ended = set()
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            ended.add(connection)
    return ended


def _ended(connection: socket.socket) -> bool:
    """Whether its other end is closed; never waits."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _fill(connection: socket.socket, to: memoryview) -> None:
    got = 0
    while got < len(to):
        count = connection.recv_into(to[got:])
        if count == 0:
            raise ConnectionError("the connection is closed")
        got += count


def _read(connection: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    _fill(connection, memoryview(found))
    return bytes(found)
