"""Who takes part: comms, each made by one way of finding the other ranks. `connecting` chooses among them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_void_p
from typing import Any

from tokenway import _header, _native, cuda, meeting, portable, staged
from tokenway.errors import InvalidArgument, TokenwayError
from tokenway.settings import milliseconds

# What the package's own launcher tells its processes.
RANK, NRANKS, ADDRESS = "TOKENWAY_RANK", "TOKENWAY_NRANKS", "TOKENWAY_ADDRESS"
LOCAL_RANK = cuda.LOCAL_RANK  # as torchrun does


# What a group's twGroupInfo adds to `Comm.why`: of the links between its devices, and of how its windows are shared.
LINKS = {
    _header.LINKS["other"]: "NVLink does not join all devices, so few tokens take the way of many",
    _header.LINKS["tested"]: "neither CUDA nor NVML knows some of the devices, so a test has decided about packets",
    _header.LINKS["nvml"]: "NVML tells that NVLink joins also the devices which this process does not see",
}
HANDLES = {
    _header.HANDLES["refused"]: "fabric handles are refused here (CUresult {}), so windows are shared by descriptors",
    _header.HANDLES["fabric"]: "windows are shared by fabric handles",
}


# How rows of a dispatch cross between hosts; None: as is faster.
_CROSSINGS = {None: _header.CROSSINGS["faster"], **{n: c for n, c in _header.CROSSINGS.items() if n != "faster"}}


class Comm(_native.Shared):
    """One rank's part in a set of ranks on which groups are created.

    Use `connect()`, `Comm.shm(...)`, `Comm.fabric(...)`, `Comm.cuda(...)`, `Comm.gin(...)`, `Comm.portable(...)` or
    `local_comms(n)` to make one. Closing frees it; groups must be closed before. `backend` is "shm", "fabric",
    "nvlink", "gin" or "torch", `why` says why that one was taken; from the first group on CUDA devices on it also tells
    of links to devices that this process does not see, of devices that NVLink does not join, and of fabric handles,
    where devices know them.
    """

    def __init__(self, pointer: int, carrier: Any = None, backend: str | None = None):
        self._pointer: int | None = pointer
        self.carrier = carrier  # of a portable comm: the C library calls it
        rank, nranks = c_int32(), c_int32()
        _native.check(_native.lib.twCommRank(pointer, byref(rank), byref(nranks)))
        self.rank: int = rank.value
        self.nranks: int = nranks.value
        device = c_int32()
        _native.check(_native.lib.twCommDevice(pointer, byref(device)))
        self._device = device.value
        self.backend = backend or ("torch" if carrier is not None else "shm" if self._device < 0 else "nvlink")
        self.why = "it was asked for"

    def note(self, info: _header.GroupInfo) -> None:
        """Adds to `why` what a group's twGroupInfo tells of its devices and windows."""
        if self.backend != "nvlink":
            return
        for told in (LINKS.get(info.links), HANDLES.get(info.handles)):
            if told is not None and (sentence := told.format(info.refusal)) not in self.why:
                self.why = f"{self.why}; {sentence}"

    @classmethod
    def shm(cls, rank: int, nranks: int, address: str, timeout: float | None = None) -> Comm:
        """Connects processes of one host, on the CPU. Collective.

        address: the same on all ranks, unique to this comm on the host (at most 80 bytes); a name, or a path prefix
        for socket files if it begins with "/". timeout: seconds to wait for the others (default 100).
        """
        config = _config(timeout)
        config.address = _text("address", address)
        pointer = c_void_p()
        _native.check(_native.lib.twCommCreateShm(byref(pointer), *_native.fit_place(rank, nranks), byref(config)))
        return cls(pointer.value or 0)

    @classmethod
    def fabric(
        cls,
        rank: int,
        nranks: int,
        allgather: Callable[[bytes], list[bytes]],
        *,
        ranks_per_host: int | None = None,
        provider: str = "tcp",
        timeout: float | None = None,
    ) -> Comm:
        """Connects processes on any hosts, on the CPU. Collective.

        `connect(backend="fabric")` is the everyday form. Ranks of one host share memory; to others rows go by
        libfabric, once for each host. allgather(mine): the bytes that every rank gives, a list in rank order; nothing
        but itself bounds how long it waits. ranks_per_host: a host's ranks count as several hosts of so many each (for
        trials on one host); None: as they are. provider: libfabric's, "tcp", "verbs" or "efa" (the last two have not
        been tried), or "shm" on one host. Both are the same on all ranks. timeout: seconds to wait for the others
        (default 100). Raises Unsupported where libfabric or the provider is not here, or a rank is not reached by it.
        """
        config = _config(timeout)
        function = portable.c_allgather(allgather, rank, nranks)
        config.allgather = ctypes.cast(function, c_void_p)
        config.ranks_per_host = 0 if ranks_per_host is None else _native.fit("ranks_per_host", ranks_per_host)
        config.provider = _text("provider", provider)
        pointer = c_void_p()
        _native.check(_native.lib.twCommCreateFabric(byref(pointer), *_native.fit_place(rank, nranks), byref(config)))
        return cls(pointer.value or 0, backend="fabric")

    @classmethod
    def cuda(
        cls,
        rank: int,
        nranks: int,
        address: str | None = None,
        device: Any = None,
        timeout: float | None = None,
        *,
        allgather: Callable[[bytes], list[bytes]] | None = None,
    ) -> Comm:
        """Connects processes that have a CUDA device each; all pairs of devices must reach each other's memory (NVLink,
        or PCIe peer access). Collective.

        device: of this rank: a number, "cuda:1" or a torch.device; None or "cuda": the current one. address and
        timeout: as in `shm`, for ranks of one host. allgather(mine), instead of an address: the bytes that every rank
        gives, a list in rank order; ranks may then be on several hosts of one NVLink domain, where the platform grants
        fabric handles, and connect over TCP. Raises Unsupported where there is no driver, in a build without CUDA, or,
        on all ranks alike, for devices that do not reach each other.
        """
        index = None if device is None else cuda.index_of(device)
        config = _config(timeout)
        if (address is None) == (allgather is None):
            raise InvalidArgument("address or allgather must be given, and one of them alone")
        if allgather is not None:
            function = portable.c_allgather(allgather, rank, nranks)
            config.allgather = ctypes.cast(function, c_void_p)
        else:
            config.address = _text("address", address)
        config.device = cuda.current_device() if index is None else index
        pointer = c_void_p()
        _native.check(_native.lib.twCommCreateCuda(byref(pointer), *_native.fit_place(rank, nranks), byref(config)))
        return cls(pointer.value or 0)

    @classmethod
    def gin(
        cls,
        rank: int,
        nranks: int,
        allgather: Callable[[bytes], list[bytes]],
        *,
        device: Any = None,
        ranks_per_host: int | None = None,
        crossing: str | None = None,
        timeout: float | None = None,
    ) -> Comm:
        """Connects processes on any hosts that have a CUDA device each. Collective.

        `connect(backend="gin")` is the everyday form. Ranks of one host copy rows into each other's memory, over NVLink
        or PCIe; to ranks of other hosts kernels put them by NCCL's device API (GIN). allgather, device, ranks_per_host
        and timeout: as in `fabric` and `cuda`. crossing: how rows of a dispatch or gather cross between hosts, equal on
        all ranks: "per_host" (once for each host: its ranks copy theirs from where they lie at one of them), "per_rank"
        (once for each rank, straight to it), or None: per host where a GPU sees what the network writes to others of
        its host and there are enough rows. So do partials of a group whose domains are hosts, folded by their host, if
        there are enough. Raises InvalidArgument for another; Unsupported where there is no driver, in
        a build without CUDA, or where NCCL is too old or has no such network between all ranks.
        """
        index = None if device is None else cuda.index_of(device)
        config = _config(timeout)
        function = portable.c_allgather(allgather, rank, nranks)
        config.allgather = ctypes.cast(function, c_void_p)
        config.ranks_per_host = 0 if ranks_per_host is None else _native.fit("ranks_per_host", ranks_per_host)
        if crossing not in _CROSSINGS:
            known = ", ".join(map(repr, _CROSSINGS))
            raise InvalidArgument.of("crossing", f"is {crossing!r}; it must be one of {known}")
        config.crossing = _CROSSINGS[crossing]
        config.device = cuda.current_device() if index is None else index
        pointer = c_void_p()
        _native.check(_native.lib.twCommCreateGin(byref(pointer), *_native.fit_place(rank, nranks), byref(config)))
        return cls(pointer.value or 0, backend="gin")

    @classmethod
    def portable(
        cls,
        rank: int,
        nranks: int,
        allgather: Callable[[bytes], list[bytes]],
        *,
        process_group: Any = None,
        strategy: str = "auto",
        capacity: str | int | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> Comm:
        """Connects processes on any hosts whose groups exchange through torch.distributed. Collective.

        `connect(backend="torch")` is the everyday form. allgather(mine): the bytes that every rank gives, a list in
        rank order; what it raises is the cause of the SystemFailure that this raises. Nothing but itself bounds how
        long it waits for the others. process_group: groups exchange through further ones of its kind (default: gloo's,
        of devices NCCL's). strategy and capacity: as in `connect`. device: of this rank, as in `cuda`, but that None is
        the CPU. timeout: seconds to wait for the others (default 100), here and where groups are created.
        """
        index = None if device is None else cuda.index_of(device)
        if device is not None and index is None:
            index = cuda.current_device()
        if process_group is None:
            connect = portable.connect_gloo if index is None else staged.connect
        else:
            connect = portable.connect_like(meeting.group_of(process_group), index is not None)
        limit = 0 if timeout is None else milliseconds(timeout)
        options = {"strategy": strategy, "capacity": capacity, "timeout_ms": limit, "device": index}
        return cls(*portable.create(rank, nranks, allgather, connect=connect, **options))

    @property
    def device(self) -> int | None:
        """The CUDA device of this rank, None on the CPU."""
        return None if self._device < 0 else self._device

    @property
    def pointer(self) -> int:
        """The C library's twComm_t."""
        if self._pointer is None:
            raise InvalidArgument("the comm is closed")
        return self._pointer

    def close(self) -> None:
        """Frees the comm; peers see this rank as gone."""
        if self._pointer is not None:
            _native.check(_native.lib.twCommDestroy(self._pointer))
            self._pointer = None

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except TokenwayError:
            if kind is None:  # else the exception under way is the one to tell
                raise

    def __repr__(self) -> str:
        where = "" if self.device is None else f", device={self.device}"
        return f"Comm(rank={self.rank}, nranks={self.nranks}{where}, backend={self.backend!r})"


def _text(name: str, given: Any) -> bytes:
    """As the C library takes it: it would not see what comes after a NUL."""
    if not isinstance(given, str):
        raise InvalidArgument.of(name, f"is {given!r}; it must be a string")
    if "\0" in given:
        raise InvalidArgument.of(name, f"is {given!r}; it must not hold a NUL")
    try:
        return given.encode()
    except UnicodeEncodeError:
        raise InvalidArgument.of(name, f"is {given!r}; it must not hold a surrogate") from None


def _config(timeout: float | None) -> _header.CommConfig:
    config = _header.CommConfig()
    if timeout is not None:
        config.timeout_ms = milliseconds(timeout)
    return config


def local_comms(nranks: int, devices: Sequence[Any] | None = None, timeout: float | None = None) -> list[Comm]:
    """All ranks of a comm inside this process, to be driven by a thread each.

    devices: None, ranks on the CPU; or the CUDA device of each rank (a number, "cuda:1", a torch.device), up to 16
    ranks on each. Ranks that share a device wait for each other on it, so each needs a stream of its own (not the
    default one), and CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment before the first CUDA call of the process;
    nothing between their calls may synchronise the device, as the first call of a kernel, or PyTorch's allocator when
    it gives memory back, can; and no two of them may be branches of one CUDA graph. timeout: seconds to wait for
    others (default 100).
    """
    nranks = _native.fit("nranks", nranks)
    pointers = (c_void_p * max(1, min(nranks, _header.MAX_RANKS)))()
    config = _config(timeout)
    if devices is not None:
        if not isinstance(devices, Sequence) or isinstance(devices, str):
            raise InvalidArgument.of("devices", f"is {devices!r}; it must be a list with a device for each rank")
        if len(devices) != nranks:
            raise InvalidArgument.of("devices", f"has {len(devices)} entries; it must have {nranks}, one for each rank")
        indices = [cuda.index_of(device) for device in devices]
        numbers = [cuda.current_device() if index is None else index for index in indices]
        if -1 in numbers:
            raise InvalidArgument.of(
                "devices", "has 'cuda', but PyTorch, which would know the current device, is not in use"
            )
        array = (c_int32 * max(nranks, 1))(*numbers)
        config.devices = ctypes.addressof(array)
    first = ctypes.cast(pointers, ctypes.POINTER(c_void_p))
    _native.check(_native.lib.twCommCreateLocal(first, nranks, byref(config)))
    return [Comm(pointer) for pointer in pointers if pointer is not None]


def usual_timeout() -> float:
    """Seconds that the C library waits where nobody says how long."""
    return next(int(value) for name, value, _ in _native.environment() if name == "TOKENWAY_TIMEOUT_MS") / 1000
