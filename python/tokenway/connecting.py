"""How this process finds its peers, and which backend joins them: `connect`."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from tokenway import cuda, portable
from tokenway.comm import ADDRESS, NRANKS, RANK, Comm, usual_timeout
from tokenway.errors import ConfigMismatch, InvalidArgument, InvalidUsage, PeerRefused, Unsupported
from tokenway.party import Party, party_of
from tokenway.settings import milliseconds

_log = logging.getLogger("tokenway")

BACKENDS = ("auto", "shm", "fabric", "nvlink", "gin", "torch")
# What asks for a process group, a store or an allgather, as its ranks may be on several hosts.
_APART = ("fabric", "gin", "torch")


def connect(
    process_group: Any = None,
    *,
    rank: int | None = None,
    nranks: int | None = None,
    store: Any = None,
    allgather: Callable[[bytes], list[bytes]] | None = None,
    nccl_comm: Any = None,
    device: Any = None,
    timeout: float | None = None,
    backend: str = "auto",
    strategy: str | None = None,
    capacity: str | int | None = None,
    ranks_per_host: int | None = None,
    provider: str | None = None,
    crossing: str | None = None,
) -> Comm:
    """Connects this process with its peers, however it was started. Collective.

    device: None or "cpu": on the CPU; else the CUDA device of this rank, one of its own: a number, "cuda:1" or a
    torch.device. "cuda" is PyTorch's current device if another than cuda:0 has been chosen; else that of LOCAL_RANK
    (torchrun and the package's own launcher set it), modulo the number of devices, which then becomes the current
    device, so that "cuda" means the same to PyTorch. All ranks are on the CPU, or all on CUDA devices.

    In this order: `process_group` (of torch.distributed, or a DeviceMesh of one dimension), or rank, nranks and a way
    to meet; the default process group if torch.distributed is initialised; the package's own launcher (`tokenway
    launch`, `tokenway.run`); torchrun's environment; else one rank alone. May be called again, by all ranks in the same
    order, for further comms. timeout: seconds to wait for the others (default 100).

    Nothing of torch.distributed needs to be initialised for these: process_group: also a ProcessGroup made by hand, or
    an object with `rank`, `size` or `world_size`, and `store`, each a method or an attribute (vLLM's
    StatelessProcessGroup). rank and nranks with store: a torch.distributed.Store that the ranks share, and no other set
    of ranks (a PrefixStore each, if there are several). rank and nranks
    with allgather(mine): the bytes that every rank gives, equally many, as a list in rank order, for instance that of
    an mpi4py communicator; only itself bounds how long it waits. It is called a few times, in this thread. nccl_comm:
    the address of an ncclComm_t (an int or c_void_p), whose ranks these are. They meet by ncclAllGather, on the current
    stream of its device, which PyTorch must see; no other thread may use the communicator meanwhile, and nothing bounds
    how long NCCL waits.

    backend: "shm" (ranks of one host, on the CPU), "fabric" (ranks of any hosts, on the CPU, over libfabric), "nvlink"
    (on CUDA devices, of one host or of one NVLink domain), "gin" (on CUDA devices of any hosts, over NCCL's device
    API), "torch" (ranks anywhere, over torch.distributed, which must be initialised: on the CPU over gloo, on CUDA
    devices over NCCL) or "auto". That is "shm" or "nvlink" where all ranks are on one host, "nvlink" too where NVLink
    joins their hosts; else "gin" where NCCL joins their devices, on the CPU "fabric" where libfabric joins them, and
    "torch". `Comm.backend` and `Comm.why` say which and why, as a line of the log "tokenway" does.
    docs/BACKENDS.md is the guide.

    Equal on all ranks: ranks_per_host, of "fabric" and "gin" alone, and provider, of "fabric" alone, as in
    `Comm.fabric`; crossing, of "gin" alone, as in `Comm.gin`.

    Of "torch" alone, equal on all ranks: strategy: "routed" (ranks tell each other sizes, then send rows where they
    belong), "gathered" (all tokens to all ranks) or "auto" (the default: by what was measured when the first group was
    created). capacity: how much of each message travels at once, without its size being known: "exact" (nothing; the
    default of "routed"), "fixed" (all, however much a step may bring), bytes, or "auto" (as measured; the default of
    the others). On CUDA devices nothing may wait for the host, so all is "routed", in blocks as large as a call's bound
    allows: "fixed".
    """
    distributed = sys.modules.get("torch.distributed")
    fabric = {"ranks_per_host": ranks_per_host, "provider": provider, "crossing": crossing}
    wish = _Wish(device, backend, {"strategy": strategy, "capacity": capacity}, fabric, timeout)
    given = process_group, rank, nranks, store, allgather, nccl_comm
    if any(x is not None for x in given) or (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    ):
        return _noted(_connect_party(party_of(*given), wish))
    wish.check()
    if backend in _APART:
        raise InvalidUsage(
            f"backend is {backend!r}, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group first, or give a process_group, a store or an allgather"
        )
    elif RANK in os.environ:
        rank, nranks = _from_environment(RANK, NRANKS)
        comm = wish.comm(rank, nranks, _unique(os.environ[ADDRESS]), "the package's launcher starts ranks on one host")
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        comm = _connect_torchrun(wish)
    else:
        comm = wish.comm(0, 1, _unique(f"alone-{os.getpid()}"), "there is one rank")
    return _noted(comm)


def _noted(comm: Comm) -> Comm:
    if comm.rank == 0:
        _log.info("%d ranks, backend %r: %s", comm.nranks, comm.backend, comm.why)
    return comm


class _Wish:
    """What `connect` was asked for."""

    def __init__(
        self, device: Any, backend: str, portable: dict[str, Any], fabric: dict[str, Any], timeout: float | None
    ):
        self._given = None if str(device) == "cpu" else device
        self.backend = backend
        self.one_host = "CPU" if self._given is None else "NVLink"  # the backend between ranks of one host
        self.timeout = timeout
        self.portable = {name: x for name, x in portable.items() if x is not None}
        self.fabric = {name: x for name, x in fabric.items() if x is not None}

    def check(self) -> None:
        """Raises for what cannot be, once those who wait for this rank can be told."""
        backend = self.backend
        if backend not in BACKENDS:
            raise InvalidArgument.of("backend", f"is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}")
        device = self._given is not None
        on = {"shm": not device, "fabric": not device, "nvlink": device, "gin": device}
        if not on.get(backend, True):
            where = "the CPU" if self._given is None else f"device {self._given!r}"
            raise Unsupported(f"backend {backend!r} is not for {where}")
        if "strategy" in self.portable:
            portable.strategy_code(self.portable["strategy"])
        if "capacity" in self.portable:
            portable.inline_bytes(self.portable["capacity"])
        if self.fabric and backend not in ("fabric", "gin"):
            raise InvalidArgument(f"{' and '.join(self.fabric)} is given, which is for backend 'fabric' or 'gin' alone")
        if "provider" in self.fabric and backend == "gin":
            raise InvalidArgument(
                "provider is given, which is for backend 'fabric' alone: NCCL finds the network of 'gin'"
            )
        if "crossing" in self.fabric and backend == "fabric":
            raise InvalidArgument("crossing is given, which is for backend 'gin' alone: 'fabric' goes by the step")
        if self.portable and backend in ("shm", "fabric", "nvlink", "gin"):
            raise InvalidArgument(
                f"{' and '.join(self.portable)} is given, and backend {backend!r} has no choice: its ranks write where "
                "rows are wanted, and never more of them than that"
            )

    def index(self) -> int | None:
        """The CUDA device, chosen if it is to be chosen; None for the CPU."""
        if self._given is None:
            return None
        index = cuda.index_of(self._given)
        return cuda.choose_local_device() if index is None else index

    def comm(self, rank: int, nranks: int, address: str, why: str) -> Comm:
        """Meets the other ranks, which are on this host."""
        index = self.index()
        if index is None:
            comm = Comm.shm(rank, nranks, address, self.timeout)
        else:
            comm = Comm.cuda(rank, nranks, address, index, self.timeout)
        if self.backend == "auto":
            comm.why = why
        return comm


_connected = 0


def _unique(*parts: str) -> str:
    """A short address from what ranks have in common, another one for each comm of a process."""
    global _connected
    _connected += 1
    return hashlib.sha256("/".join([*parts, str(_connected)]).encode()).hexdigest()[:32]


def _from_environment(*names: str) -> tuple[int, ...]:
    values = []
    for name in names:
        try:
            values.append(int(os.environ[name]))
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"environment variable {name} is {os.environ.get(name)!r}; it must be an integer"
            ) from None
    return tuple(values)


def _connect_torchrun(wish: _Wish) -> Comm:
    rank, nranks, local = _from_environment("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if local != nranks:
        raise Unsupported(
            f"WORLD_SIZE is {nranks} and LOCAL_WORLD_SIZE {local}: the {wish.one_host} backend connects ranks of one "
            "host only; initialise torch.distributed to have NVLink between hosts, or the portable one"
        )
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    address = _unique("torchrun", *(os.environ.get(name, "") for name in names))
    return wish.comm(rank, nranks, address, "torchrun started all ranks on this host")


def _host() -> str:
    """Names this boot of this host and the network namespace: what shared memory, whose descriptors travel over Unix
    sockets, needs ranks to have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return os.uname().nodename


def _tried(party: Party, wish: _Wish, backend: str, limit: float, connect: Any) -> tuple[Comm | None, str]:
    """The comm that `connect` makes of ranks on several hosts, or None and why there is none. Ranks tell each other how
    it went, so that all fall back or none does: one that cannot do it fails otherwise than its peers, whom it
    refuses."""
    comm, error = None, None
    try:
        comm = connect()
    except Exception as caught:
        error = caught
    told = error and str(error), isinstance(error, Unsupported)
    try:
        all_ranks = party.gather(backend, told, limit)
    except BaseException:
        if comm is not None:
            comm.close()
        raise
    if all(text is None for text, _ in all_ranks):
        return comm, ""
    if comm is not None:
        comm.close()
    first = next((text for text, unsupported in all_ranks if unsupported), None)
    if first is None or wish.backend == backend:
        raise error or PeerRefused(next(f"rank {r}: {t}" for r, (t, _) in enumerate(all_ranks) if t is not None))
    return None, first


def _joined(party: Party, wish: _Wish, index: int | None, limit: float, allgather: Any) -> tuple[Comm | None, str]:
    """The comm of ranks on several hosts that something joins, and what; or None and why nothing does."""
    place = party.rank, party.nranks
    if index is not None:
        return _joined_devices(party, wish, index, limit, allgather)
    comm, because = _tried(
        party, wish, "fabric", limit, lambda: Comm.fabric(*place, allgather, timeout=wish.timeout, **wish.fabric)
    )
    return comm, "libfabric joins them" if comm is not None else f"not over libfabric: {because}"


def _joined_devices(party: Party, wish: _Wish, index: int, limit: float, allgather: Any) -> tuple[Comm | None, str]:
    place, because = (party.rank, party.nranks), []
    ways = {
        "nvlink": ("NVLink", lambda: Comm.cuda(*place, device=index, timeout=wish.timeout, allgather=allgather)),
        "gin": (
            "NCCL",
            lambda: Comm.gin(*place, allgather, device=index, timeout=wish.timeout, **wish.fabric),
        ),
    }
    for backend, (name, connect) in ways.items():
        if wish.backend not in ("auto", backend):
            continue
        comm, reason = _tried(party, wish, backend, limit, connect)
        if comm is not None:
            return comm, f"{name} joins their devices" if backend == "gin" else f"{name} joins them"
        because.append(f"not over {name}: {reason}")
    return None, "; ".join(because)


def _connect_party(party: Party, wish: _Wish) -> Comm:
    rank, nranks = party.rank, party.nranks
    problem: Exception | None
    index, problem, limit = None, None, usual_timeout()
    try:
        limit = limit if wish.timeout is None else milliseconds(wish.timeout) / 1000
        wish.check()
        index = wish.index()
    except Exception as error:  # the others, which wait in the gathering, learn of it first
        problem = error

    def allgather(mine: bytes) -> list[bytes]:
        return [bytes.fromhex(one) for one in party.gather("addresses", mine.hex(), limit)]

    mine = os.uname().nodename, _host(), os.urandom(16).hex(), problem and str(problem)
    mine = *mine, wish.backend if problem is None else ""
    all_ranks = party.gather("hosts", mine, limit)
    if problem is not None:
        raise problem
    for r, (*_, text, backend) in enumerate(all_ranks):
        if text is not None:
            raise PeerRefused(f"rank {r} cannot connect: {text}")
        if backend != all_ranks[0][4]:
            raise ConfigMismatch(f"backend differs: rank 0 has {all_ranks[0][4]!r}, rank {r} has {backend!r}")
    apart = next((r for r in range(nranks) if all_ranks[r][1] != all_ranks[0][1]), None)
    if apart is None:
        where = "all ranks are on one host"
    elif all_ranks[apart][0] == all_ranks[0][0]:
        where = f"rank 0 and rank {apart} run on {all_ranks[0][0]} in different network namespaces"
    else:
        where = f"rank 0 runs on {all_ranks[0][0]}, rank {apart} on {all_ranks[apart][0]}"
    if apart is None and wish.backend not in _APART:
        return wish.comm(rank, nranks, all_ranks[0][2], where)
    if wish.backend == "shm":
        raise Unsupported(f"{where}: the CPU backend connects ranks of one host only")
    if wish.backend != "torch" and not wish.portable:
        comm, because = _joined(party, wish, index, limit, allgather)
        if comm is not None:
            comm.why = f"{where}, and {because}" if wish.backend == "auto" else comm.why
            return comm
        where = f"{where}; {because}"
    options = {"process_group": party.process_group, "timeout": wish.timeout, **wish.portable}
    comm = Comm.portable(rank, nranks, allgather, device=index, **options)
    if wish.backend == "auto":
        comm.why = where
    return comm
