"""Portable comms: ranks anywhere, whose groups exchange through collectives of torch.distributed.

The C library makes a message for each peer and unpacks those that come (include/tokenway/carrier.h); here is what moves
them. Each group has process groups of its own, so that its collectives are never mixed up with the caller's.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_void_p
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from tokenway import _carrier, _native, callbacks, staged
from tokenway.errors import InvalidArgument, Unsupported
from tokenway.meeting import Bounded
from tokenway.party import gathered

_log = logging.getLogger("tokenway")

STRATEGIES = {"routed": 0, "gathered": 1, "auto": 2}
CAPACITIES = {"exact": 0, "fixed": 2**63 - 1, "auto": -1}
_USUAL = {"routed": "exact", "gathered": "auto", "auto": "auto"}  # capacity of a strategy, where none is given

BLOCKS, EXACT, GATHER = range(3)
# Of a collective: the group's own timeout ends a wait, and must not find it broken by a shorter.
_FOREVER = staged.FOREVER
# What PyTorch is given to connect beyond the time that there is: the library looks for who is to blame, not PyTorch.
_BEYOND = timedelta(seconds=2)


@dataclass(frozen=True)
class PortableInfo:
    """How a group of a portable comm exchanges, and what decided it.

    inline_bytes of each message travel in the first collective of a step. Measured when the comm's first group was
    created, the same on all ranks: microseconds of a collective of few bytes, and bytes per microsecond that a rank
    sends in a large one; of an all-to-all (exchange) and of an all-gather, over gloo made of an all-to-all too. On CUDA
    devices nothing is measured, and inline_bytes are those of a dispatch's block for max_tokens rows.
    """

    strategy: str
    inline_bytes: int
    exchange_us: float
    exchange_rate: float
    gather_us: float
    gather_rate: float


def describe(group: int) -> PortableInfo | None:
    """How a group exchanges; None if its ranks share memory."""
    info = _carrier.PortableInfo()
    if _native.lib.twGroupPortableInfo(group, byref(info)):
        return None
    names = {code: name for name, code in STRATEGIES.items()}
    numbers = info.exchange_us, info.exchange_rate, info.gather_us, info.gather_rate
    return PortableInfo(names[info.strategy], info.inline_bytes, *numbers)


def inline_bytes(capacity: str | int) -> int:
    """What the C library calls a capacity."""
    if isinstance(capacity, str) and capacity in CAPACITIES:
        return CAPACITIES[capacity]
    if isinstance(capacity, int) and not isinstance(capacity, bool) and 0 <= capacity < 2**63:
        return capacity
    raise InvalidArgument.of(
        "capacity", f"is {capacity!r}; it must be 'auto', 'exact', 'fixed' or a number of bytes from 0"
    )


def strategy_code(strategy: str) -> int:
    """What the C library calls a strategy."""
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    raise InvalidArgument.of("strategy", f"is {strategy!r}; it must be 'routed', 'gathered' or 'auto'")


def missing() -> str | None:
    """Why no portable comm can be made here, as a clause; None if one can. Imports PyTorch where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch.distributed as dist

    return None if dist.is_available() and dist.is_gloo_available() else "this PyTorch has no gloo"


# ------------------------------------------------------------------------------------------------------- process groups

Connect = Callable[["Meeting"], Any]  # makes a process group of the ranks of a meeting


@dataclass(frozen=True)
class Meeting:
    """Ranks of a group that are about to connect."""

    store: Any  # of torch.distributed, for these ranks and this purpose alone
    rank: int
    nranks: int
    comm_ranks: list[int]
    address: str  # of this rank, as its peers reach it
    timeout: timedelta
    shared: dict[str, Any]  # what the process groups of one comm have in common


def connect_gloo(meeting: Meeting) -> Any:
    """Gloo, over the address that the peers reach, or GLOO_SOCKET_IFNAME's."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = meeting.timeout
    devices = meeting.shared.get(meeting.address)
    if devices is None:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        chosen = [{"interface": name} for name in interfaces] or [{"hostname": meeting.address}]
        devices = meeting.shared[meeting.address] = [ProcessGroupGloo.create_device(**one) for one in chosen]
    options._devices = devices
    options._threads = 1  # a lane has one collective under way
    return ProcessGroupGloo(meeting.store, meeting.rank, meeting.nranks, options)


def connect_like(process_group: Any, on_device: bool = False) -> Connect:
    """Process groups of the kind that a caller's one is, if that kind moves the memory; else gloo's, or, of devices,
    NCCL's."""
    import torch.distributed as dist

    base = dist.group.WORLD if process_group is None else process_group
    kinds = dict(part.split(":", 1) for part in dist.get_backend_config(base).split(","))
    name = kinds.get("cuda" if on_device else "cpu", "gloo")
    if on_device and name in ("nccl", "gloo"):  # gloo has no all-to-all of device memory
        return staged.connect
    if name == "gloo":
        return connect_gloo
    world = [dist.get_global_rank(base, rank) for rank in range(dist.get_world_size(base))]

    def connect(meeting: Meeting) -> Any:
        ranks = [world[rank] for rank in meeting.comm_ranks]
        return dist.new_group(ranks, timeout=_FOREVER, backend=name, use_local_synchronization=name != "mpi")

    return connect


# -------------------------------------------------------------------------------------------------------------- carrier


@dataclass
class Plan:
    """What C says of a channel, for a thread that may outlive the call."""

    rank: int
    nranks: int
    comm_ranks: list[int]
    local: str
    host: str
    port: int
    timeout_ms: int
    queues: int
    key: int
    device: int
    server: Any  # the store, where this rank has it
    groups: Sequence[Any] = ()
    store: Any = None  # where these ranks meet

    @classmethod
    def of(cls, config: _carrier.ChannelConfig, server: Any) -> Plan:
        ranks = config.comm_ranks[: config.nranks]
        names = config.local.decode(), config.host.decode()
        numbers = config.port, config.timeout_ms, config.queues, config.key, config.device
        return cls(config.rank, config.nranks, ranks, *names, *numbers, server)


def connect_queues(plan: Plan, connect: Connect, store: Any, shared: dict[str, Any]) -> list[Any]:
    """A process group for each queue of a channel."""
    import torch.distributed as dist

    timeout = timedelta(milliseconds=plan.timeout_ms) + _BEYOND
    store.set_timeout(timeout)
    groups = []
    for queue in range(plan.queues):
        own = dist.PrefixStore(f"tokenway-{plan.key}-{queue}", store)
        groups.append(connect(Meeting(own, plan.rank, plan.nranks, plan.comm_ranks, plan.local, timeout, shared)))
    return groups


class Channel:
    """What moves the messages of one group."""

    def __init__(self, plan: Plan):
        import torch
        import torch.distributed as dist

        self._groups = list(plan.groups)
        self._torch = torch
        self._gloo = dist.ProcessGroupGloo if dist.is_gloo_available() else ()
        self._nranks = plan.nranks
        self._exchange_options = dist.AllToAllOptions()
        self._exchange_options.timeout = _FOREVER
        self._gather_options = torch._C._distributed_c10d.AllgatherOptions()
        self._gather_options.timeout = _FOREVER
        self._works: dict[int, Any] = {}
        self._next = 0
        self._tensors: dict[tuple[int, int], Any] = {}
        self._copies: dict[int, Any] = {}  # by queue: uint8, what a gather over gloo sends
        _channels.add(self)

    def _tensor(self, address: int, count: int) -> Any:
        """uint8[count] over memory of the C library."""
        key = address, count
        found = self._tensors.get(key)
        if found is None:
            if len(self._tensors) > 64:
                self._tensors.clear()
            if count == 0:
                found = self._torch.empty(0, dtype=self._torch.uint8)
            else:
                memory = (c_char * count).from_address(address)
                found = self._torch.frombuffer(memory, dtype=self._torch.uint8)
            self._tensors[key] = found
        return found

    def _repeated(self, move: _carrier.Move, each: int) -> Any:
        """uint8[N * each]: a gather's part once for each rank.

        Gloo's own all-gather goes round a ring, and PyTorch copies what it brings with as many threads as there are
        cores, in each rank, which wait for each other by spinning: with 2 ranks on 2 cores 15 to 30 ms for 1 MiB from
        each, which an all-to-all of copies takes 1 for. The bytes on the wire are the same.
        """
        count = each * self._nranks
        kept = self._copies.get(move.queue)
        if kept is None or kept.numel() < count:
            kept = self._copies[move.queue] = self._torch.empty(count, dtype=self._torch.uint8)
        copies = kept[:count]
        np.copyto(copies.numpy().reshape(self._nranks, each), self._tensor(move.send, each).numpy())
        return copies

    def start(self, move: _carrier.Move) -> int:
        group, n = self._groups[move.queue], self._nranks
        if move.kind == EXACT:
            sent, received = move.send_bytes[:n], move.recv_bytes[:n]
            to, source = self._tensor(move.recv, sum(received)), self._tensor(move.send, sum(sent))
            work = group.alltoall_base(to, source, received, sent, self._exchange_options)
        else:
            each = move.send_bytes[0]
            to = self._tensor(move.recv, each * n)
            if move.kind == GATHER and isinstance(group, self._gloo):
                work = group.alltoall_base(to, self._repeated(move, each), [], [], self._exchange_options)
            elif move.kind == GATHER:
                work = group._allgather_base(to, self._tensor(move.send, each), self._gather_options)
            else:
                work = group.alltoall_base(to, self._tensor(move.send, each * n), [], [], self._exchange_options)
        self._next += 1
        self._works[self._next] = work
        return self._next

    def wait(self, move: int, timeout_ms: int) -> int:
        work = self._works[move]
        if timeout_ms <= 0 and not work.is_completed():
            return 0
        try:
            work.wait(timedelta(milliseconds=max(timeout_ms, 1)))
        except RuntimeError:
            if not work.is_completed():
                return 0
            try:
                work.wait(_FOREVER)  # it may have ended since
            except RuntimeError:
                del self._works[move]
                return -1
        del self._works[move]
        return 1

    def close(self, idle: bool) -> None:
        if not idle:
            self.keep()
        self._groups.clear()
        self._tensors.clear()

    def keep(self) -> None:
        """For ever: a collective that never ends cannot be called off, and its group's destructor would wait for it."""
        for kept in (*self._groups, self._works, self._copies):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_ended = ctypes.c_int32(0)  # for threads of the library, which may outlive the interpreter


@atexit.register
def _end() -> None:
    """A process that an error ends, with groups that nobody has closed, must not wait for a peer that is late."""
    _ended.value = 1
    for channel in list(_channels):
        channel.keep()


class Carrier:
    """The C library's twCarrier_t of one comm. Must live as long as the comm."""

    def __init__(self, connect: Connect = connect_gloo):
        self._connect = connect
        self._channels: dict[int, Any] = {}
        self._plans: dict[int, Plan] = {}  # of channels
        # Meeting places, by address: kept for all groups, as connecting asks for names, which can take seconds.
        self._stores: dict[tuple[str, int], Any] = {}
        self._server: Any = None
        self._shared: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._next = 0
        self.struct = _carrier.Carrier()
        # Kept: C has the addresses.
        failed = "a collective of the portable backend failed"
        self._functions = (
            callbacks.function(_carrier.Offer, self._offer, -1, "the portable backend cannot open a store to meet at"),
            callbacks.function(_carrier.Open, self._open, -1),
            callbacks.function(_carrier.Close, self._close, None, "a channel of the portable backend did not close"),
            callbacks.function(_carrier.Start, self._start, -1, failed),
            callbacks.function(_carrier.Wait, self._wait, -1, failed),
            callbacks.function(_carrier.Enqueue, self._enqueue, -1, failed),
            callbacks.function(_carrier.Join, self._join, -1, failed),
            callbacks.function(_carrier.Abort, self._abort, None, "collectives of the portable backend go on"),
        )
        fields = _carrier.Carrier._fields_[1:-1]
        for (name, _), function in zip(fields, self._functions, strict=True):
            setattr(self.struct, name, ctypes.cast(function, c_void_p))
        self.struct.ended = ctypes.addressof(_ended)

    def plan_of(self, group: int) -> Plan:
        """Who the ranks of a group are, and where they meet. group: its address, of more than one rank."""
        info = _carrier.PortableInfo()
        _native.check(_native.lib.twGroupPortableInfo(group, byref(info)))
        return self._plans[info.channel]

    def _offer(self, _: Any, port: Any) -> int:
        import torch.distributed as dist

        if self._server is None:  # by number: a host need not know any name, its own included
            self._server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port[0] = self._server.port
        return 0

    def _open(self, _: Any, config: Any, channel: Any, error: Any) -> int:
        given = config.contents
        plan = Plan.of(given, self._server)
        opened = Bounded(lambda: self._connected(plan))
        done = False
        try:
            done = opened.wait(plan.timeout_ms / 1000, lambda: given.over(given.meeting))
        except Exception as problem:
            text = f"{type(problem).__name__}: {problem}".encode()[:255]
            ctypes.memmove(error, text + b"\0", len(text) + 1)
            raise
        finally:
            if not done:
                self._forsake(opened, plan)
        if not done:
            return -1  # C finds who is to blame
        with self._lock:
            self._next += 1
            self._channels[self._next], self._plans[self._next] = opened.value, plan
            channel[0] = self._next
        return 0

    def _connected(self, plan: Plan) -> Any:
        """By a thread of its own: the store's process or a peer may be stopped, and nothing bounds that in PyTorch."""
        plan.store = self._store(plan)
        plan.groups = connect_queues(plan, self._connect, plan.store, self._shared)
        return Channel(plan) if plan.device < 0 else staged.DeviceChannel(plan, list(plan.groups))

    def _forsake(self, opened: Bounded, plan: Plan) -> None:
        """After connecting has failed: what still waits in a store has its lock, so the next group meets at others."""
        opened.forsake(lambda made: made.close(False))
        self._server = None
        self._stores = {}
        if plan.device >= 0:
            staged.end_groups(plan.groups, ("abort", "_abort"), staged.CALLING_OFF)

    def _store(self, plan: Plan) -> Any:
        import torch.distributed as dist

        if plan.rank == 0:
            return plan.server
        stores = self._stores
        if (plan.host, plan.port) not in stores:
            timeout = timedelta(milliseconds=plan.timeout_ms) + _BEYOND
            stores[plan.host, plan.port] = dist.TCPStore(
                plan.host, plan.port, None, False, timeout, wait_for_workers=False
            )
        return stores[plan.host, plan.port]

    def _close(self, _: Any, channel: int, idle: int) -> None:
        self._plans.pop(channel, None)
        self._channels.pop(channel).close(bool(idle))

    def _start(self, _: Any, channel: int, move: Any) -> int:
        return self._channels[channel].start(move.contents)

    def _wait(self, _: Any, channel: int, move: int, timeout_ms: int) -> int:
        try:
            return self._channels[channel].wait(move, timeout_ms)
        except RuntimeError:  # PyTorch's
            raise
        except BaseException as interrupt:  # a signal's handler: no peer is to blame, and the library ends the wait
            callbacks.keep(interrupt, interrupt=True)
            return 0

    def _enqueue(self, _: Any, channel: int, moves: Any, count: int, at_once: int, stream: int | None) -> int:
        self._channels[channel].enqueue(moves[:count], bool(at_once), stream or 0)
        return 0

    def _join(self, _: Any, channel: int, queue: int, stream: int | None) -> int:
        return 0 if self._channels[channel].join(queue, stream or 0) else -1

    def _abort(self, _: Any, channel: int) -> None:
        self._channels[channel].abort()


def c_allgather(allgather: Callable[[bytes], Any], rank: int, nranks: int) -> Any:
    """What C calls for a caller's allgather: nothing that it returns is read before it is known to be right."""

    def gather(mine: int, everyone: int, count: int, _: Any) -> int:
        parts = gathered(allgather, ctypes.string_at(mine, count), rank, nranks)
        ctypes.memmove(everyone, b"".join(parts), count * nranks)
        return 0

    return callbacks.function(_carrier.Allgather, gather, -1)


def create(
    rank: int,
    nranks: int,
    allgather: Callable[[bytes], list[bytes]],
    *,
    connect: Connect = connect_gloo,
    strategy: str = "auto",
    capacity: str | int | None = None,
    timeout_ms: int = 0,
    device: int | None = None,
) -> tuple[int, Any]:
    """(twComm_t, what must live as long). allgather(mine): what every rank gives, in rank order. device: of this rank,
    a CUDA device's number; None: the CPU."""
    try:
        problem = missing()
    except ImportError as error:
        raise Unsupported(f"the portable backend needs PyTorch, which cannot be imported: {error}") from error
    if problem is not None:
        raise Unsupported(f"the portable backend needs gloo of torch.distributed: {problem}")
    carrier = Carrier(connect)

    place = _native.fit_place(rank, nranks)
    function = c_allgather(allgather, rank, nranks)
    config = _carrier.PortableConfig()
    config.timeout_ms = timeout_ms
    config.allgather = ctypes.cast(function, c_void_p)
    config.carrier = ctypes.addressof(carrier.struct)
    config.strategy = strategy_code(strategy)
    config.inline_bytes = inline_bytes(_USUAL[strategy] if capacity is None else capacity)
    if device is not None:
        if capacity not in (None, "fixed", "auto"):
            raise Unsupported(
                f"capacity is {capacity!r}; on CUDA devices it must be 'fixed' or 'auto', which are the same there: "
                "blocks are sized by the call's bound"
            )
        config.on_device, config.device, config.inline_bytes = 1, device, CAPACITIES["fixed"]
    pointer = c_void_p()
    _native.check(_native.lib.twCommCreatePortable(byref(pointer), *place, byref(config)))
    return pointer.value or 0, carrier
