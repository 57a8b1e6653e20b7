"""What moves the blocks of portable groups on CUDA devices: collectives of torch.distributed that are enqueued on the
caller's stream, behind the kernel that lays the blocks out and before the one that shows what has come.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from tokenway import _carrier
from tokenway.cuda import DeviceMemory
from tokenway.errors import Unsupported

_log = logging.getLogger("tokenway")

# NCCL's process group watches its collectives by a thread that ends the process when one fails or is late, and by
# another that watches this thread. Here the library watches, and a peer that is late or gone is an error of the group.
# Read when a process group is made.
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
FOREVER = timedelta(days=20)
# Seconds to wait for communicators to end. They end when the last graph that holds collectives of theirs has been freed
# (ncclCommDestroy and ncclCommAbort, since NCCL 2.26), which is the caller's affair and may be never.
CALLING_OFF = 1.0
CLOSING = 3.0  # less than peers wait for each other when they close a group
_MOST_TENSORS = 1024  # kept over memory of the C library: a few for each bound that calls give


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def connect_nccl(meeting: Any) -> Any:
    """A process group of NCCL's for the ranks of a meeting."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise Unsupported("this PyTorch has no NCCL, which the portable backend needs for CUDA tensors")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    with _environment(_QUIET):
        return ProcessGroupNCCL(meeting.store, meeting.rank, meeting.nranks, options)


class OnCuda:
    """Memory and streams of a CUDA device."""

    coalesces = True  # several collectives may be one
    waits = False  # a work's wait() is the stream's, not the host's

    def __init__(self, index: int):
        import torch

        self.torch = torch
        self.device = torch.device("cuda", index)

    def tensor(self, address: int, count: int) -> Any:
        """uint8[count] over memory of the C library."""
        return self.torch.as_tensor(DeviceMemory(address, count), device=self.device)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Makes a stream the current one of this device."""
        cuda = self.torch.cuda
        with cuda.device(self.device):
            if cuda.current_stream().cuda_stream == stream:
                yield
            else:
                with cuda.stream(cuda.ExternalStream(stream, device=self.device)):
                    yield

    def settle(self) -> None:
        """Waits for the current stream."""
        self.torch.cuda.current_stream(self.device).synchronize()


on_device: Any = OnCuda  # of which kind the memory of devices is
connect: Any = connect_nccl  # and which process groups move it, where the caller's are of no such kind


def end_groups(groups: Sequence[Any], names: Sequence[str], moment: float) -> bool:
    """Calls the first of these methods that a process group has, of each, and waits a moment for all of them; whether
    they have ended. Those that have not go on, and nothing waits for them: each has a thread of its own, since one that
    does not end must not keep the next from being told."""
    threads = []
    for group in groups:
        method = next((getattr(group, name) for name in names if hasattr(group, name)), None)
        if method is not None:
            threads.append(threading.Thread(target=_attempt, args=(method,), name="tokenway-end", daemon=True))
            threads[-1].start()
    until = time.monotonic() + moment
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _attempt(method: Any) -> None:
    try:
        method()
    except Exception:
        _log.exception("a communicator of the portable backend did not end")


class DeviceChannel:
    """What moves the blocks of one group."""

    def __init__(self, config: _carrier.ChannelConfig, groups: list[Any]):
        import torch.distributed as dist

        self._groups = groups
        self._memory = on_device(config.device)
        self._nranks = config.nranks
        self._options = {at_once: self._make_options(dist, at_once) for at_once in (False, True)}
        self._works: list[list[Any]] = [[] for _ in groups]
        # What torch.distributed's own groups want to know, and those of one backend, as connect_nccl's, do not.
        own = bool(groups) and isinstance(groups[0], dist.ProcessGroup)
        self._where = (self._memory.device,) if own else ()
        self._tensors: dict[tuple[int, int], Any] = {}
        self._over = False
        self._together = self._memory.coalesces and all(hasattr(group, "_start_coalescing") for group in groups)
        self._warm()

    def _make_options(self, dist: Any, at_once: bool) -> Any:
        options = dist.AllToAllOptions()
        options.timeout = FOREVER
        # Else a collective runs on a stream of its own, so that the caller may compute meanwhile.
        if at_once and not self._memory.waits and hasattr(options, "asyncOp"):
            options.asyncOp = False
        return options

    def _warm(self) -> None:
        """Connects all ranks now: it takes long, and could not be captured. Finds out whether several collectives can
        be one."""
        torch = self._memory.torch
        with torch.cuda.device(self._memory.device) if not self._memory.waits else contextlib.nullcontext():
            for queue in range(len(self._groups)):
                for at_once in (True, False):
                    if not self._try(queue, at_once) and self._together:
                        self._together = False
                        self._try(queue, at_once)

    def _try(self, queue: int, at_once: bool) -> bool:
        """Moves a byte to each rank, twice at a time. What one rank cannot do here, none can."""
        torch = self._memory.torch
        given = torch.ones(2, self._nranks, dtype=torch.uint8, device=self._memory.device)
        taken = torch.zeros_like(given)
        try:
            self._start(queue, list(zip(given, taken, strict=True)), at_once)
            self._join(queue)
        except (TypeError, NotImplementedError):
            if not self._together:
                raise
            return False
        self._memory.settle()
        if not self._together and not taken.all():
            raise RuntimeError("an all-to-all has ended, and what it was to bring is not there")
        return bool(taken.all())

    def _tensor(self, address: int, count: int) -> Any:
        key = address, count
        found = self._tensors.get(key)
        if found is None:
            if len(self._tensors) >= _MOST_TENSORS:
                self._tensors.clear()
            found = self._tensors[key] = self._memory.tensor(address, count)
        return found

    def _start(self, queue: int, pairs: list[tuple[Any, Any]], at_once: bool) -> None:
        group, options = self._groups[queue], self._options[at_once]
        together = self._together and len(pairs) > 1
        if together:
            group._start_coalescing(*self._where)
        works = [group.alltoall_base(to, source, [], [], options) for source, to in pairs]
        if together:
            works = [group._end_coalescing(*self._where)]
        self._works[queue] = [work for work in works if work is not None]

    def _join(self, queue: int) -> bool:
        works, self._works[queue] = self._works[queue], []
        for work in works:
            if not self._memory.waits:
                work.wait()
            elif not self._wait_on_host(work):
                return False
        return True

    def _wait_on_host(self, work: Any) -> bool:
        while not self._over:
            try:
                work.wait(timedelta(milliseconds=10))
            except RuntimeError:
                if not work.is_completed():
                    continue
                try:
                    work.wait(FOREVER)  # it may have ended since
                except RuntimeError:
                    return False
            return True
        return False

    def enqueue(self, moves: list[Any], at_once: bool, stream: int) -> None:
        """Begins to move blocks, behind what is on a stream."""
        n = self._nranks
        pairs = []
        for move in moves:
            count = move.send_bytes[0] * n
            pairs.append((self._tensor(move.send, count), self._tensor(move.recv, count)))
        with self._memory.on(stream):
            self._start(moves[0].queue, pairs, at_once)

    def join(self, queue: int, stream: int) -> bool:
        """Orders a stream behind what a queue has begun."""
        with self._memory.on(stream):
            return self._join(queue)

    def abort(self) -> None:
        """Calls off what is under way: soon, and without waiting for graphs that hold it."""
        self._over = True
        if not self._memory.waits:
            end_groups(self._groups, ("abort", "_abort"), CALLING_OFF)

    def close(self, idle: bool) -> None:
        """Lets go of the process groups; if not `idle`, of what has been called off nothing is waited for."""
        if not idle:
            for kept in (*self._groups, self._works):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        elif not self._memory.waits and not end_groups(self._groups, ("shutdown", "_shutdown"), CLOSING):
            _log.warning(
                "a group was closed whose collectives are in CUDA graphs: its communicators end when these are freed"
            )
        self._groups = []
        self._tensors.clear()
