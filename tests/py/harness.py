"""Worlds: ranks that serve case after case, so that they are started once and not per test.

    world = Processes("cpu", 4)                 # or Threads("cpu", 4)
    values = world.run(function, argument)      # function(env, argument) on every rank

`env` holds the rank's comm and backend. A rank that fails, dies or hangs makes `run` raise RankFailed
with what every rank said, and the next run gets fresh ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import device_backend
import emulated_backend
import gin_backend
import numpy as np
from device_backend import COMM_TIMEOUT, Cuda, OwnDevice
from emulated_backend import Alone, Emulated, Hosts, Staged
from fabric_backend import made_of
from portable_backend import Nccl, variants

import tokenway as tw

HERE = Path(__file__).parent
# Tests must hold on a machine that is busy, where anything may take twenty times as long as else. So ranks that shall
# come are waited for PATIENT seconds, which only a fault lets pass, and what is told at once is told in AT_ONCE.
PATIENT = 120.0
AT_ONCE = 20.0
HANGS = 300.0  # seconds after which a rank that does not answer hangs
PLACES = "TOKENWAY_TEST_PLACES"  # processes in whose namespaces workers are, by turns, instead of this one's
SPACES = "TOKENWAY_TEST_SPACES"  # which of them: net; with mnt and uts, those of a whole host


class Cpu:
    """Ranks on the CPU: tensors are NumPy's."""

    name = "cpu"
    checks_ids_on_host = True  # bad ids are refused
    copies_routing = True  # ids and weights are the caller's again when route() returns
    death_seen = 1.0  # seconds until a dead peer is known of, on a machine that has nothing else to do
    knows_calls = True  # peers of a refused call need not know what it would have moved
    parts = True  # combines may take parts
    lacks: frozenset[str] = frozenset()  # what tests say they need, by the mark `needs`
    large = 576  # elements of rows that are large: here, that are summed in several blocks and stored past the cache

    @staticmethod
    def most_ranks(kind: str) -> int:
        """Ranks that a world of this kind can have."""
        return 1024

    @staticmethod
    def place(comm: tw.Comm) -> tuple[Any, Any]:
        """(device, stream) of a rank."""
        return None, None

    @staticmethod
    def context(device: Any, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Makes the calling thread work on a rank's device and stream."""
        return contextlib.nullcontext()

    @staticmethod
    def comm(rank: int, nranks: int, address: str) -> tw.Comm:
        return tw.Comm.shm(rank, nranks, address, timeout=COMM_TIMEOUT)

    @staticmethod
    def local_comms(nranks: int) -> list[tw.Comm]:
        return tw.local_comms(nranks, timeout=COMM_TIMEOUT)

    @staticmethod
    def arrive(comm: tw.Comm) -> bool:
        """Until all that a rank's device was given is done, on whatever stream. False where nobody can wait for that,
        as other ranks' kernels on the device wait for this rank."""
        return True

    @staticmethod
    def tensor(array: np.ndarray) -> Any:
        """The backend's tensor of an array: the same strides."""
        return array

    @staticmethod
    def array(tensor: Any) -> np.ndarray:
        """A copy as a NumPy array."""
        return np.array(tensor)


BACKENDS: dict[str, Any] = {"cpu": Cpu, "nvlink": Cuda, "emulated": Emulated, "torch-emulated": Staged, "nccl": Nccl}
BACKENDS |= (
    gin_backend.BACKENDS
    | variants(Cpu)
    | {
        "fabric": made_of(Cpu),
        "emulated-alone": Alone,
        "emulated-hosts": Hosts,
        "nvlink-alone": OwnDevice,
    }
)
CHOSEN = ["cpu"]  # backends that the tests run against: the option --backend
ON_EMULATED = {"emulated", "emulated-alone", "emulated-hosts", "emulated-gin", "torch-emulated"}
ON_GPUS = {"nvlink", "nvlink-alone", "nccl", "gin"}


def prepare(chosen: Collection[str]) -> str | None:
    """Sets the environment of this process and its children for backends, before anything calls CUDA or the library is
    loaded. What they need and this machine has not, as a sentence."""
    for some, made, options in ((ON_EMULATED, emulated_backend, {}), (ON_GPUS, device_backend, {"blocking": True})):
        if backends := some & {*chosen}:
            made.prepare(**options)  # tests expect a call's own errors from that call, as the CPU backend has it
            if lacking := made.missing():
                return f"--backend {min(backends)}: {lacking}"
    return None


def most_ranks(kind: str) -> int:
    """Ranks that a world of this kind can have on every backend that was chosen."""
    return min(BACKENDS[name].most_ranks(kind) for name in CHOSEN)


class Env:
    """What a function gets on a rank. `kept` lives as long as the comm."""

    def __init__(self, comm: tw.Comm, backend: Any):
        self.comm = comm
        self.backend = backend
        self.rank = comm.rank
        self.nranks = comm.nranks
        self.device, self.stream = backend.place(comm)
        self.kept: dict[str, Any] = {}

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Makes the calling thread this rank's. Worlds do it before they run a function."""
        return self.backend.context(self.device, self.stream)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(env, *args) in the rank's context."""
        with self.context():
            return function(self, *args)


class RankFailed(AssertionError):
    """What the ranks said: None for those that returned."""

    def __init__(self, failures: Sequence[str | None]):
        self.failures = list(failures)
        texts = [f"--- rank {r} ---\n{text}" for r, text in enumerate(failures) if text]
        super().__init__("\n" + "\n".join(texts))


def attempt(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """(True, value), or (False, traceback as text)."""
    try:
        return True, function(*args)
    except BaseException:
        return False, traceback.format_exc()


def settle(outcomes: Sequence[tuple[bool, Any]]) -> list[Any]:
    """The values, or RankFailed."""
    if not all(ok for ok, _ in outcomes):
        raise RankFailed([None if ok else text for ok, text in outcomes])
    return [value for _, value in outcomes]


# ---- processes -----------------------------------------------------------------------------------


class Workers:
    """Processes that run what they are told. They keep their comms from one call to the next."""

    def __init__(self, size: int, env: dict[str, str] | None = None):
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])} | (env or {})
        # tests/netns makes namespaces that stand for hosts.
        places = [place for place in variables.get(PLACES, "").split(",") if place]
        spaces = variables.get(SPACES, "net").split()
        flags = {"net": "net", "mnt": "mount", "uts": "uts"}
        for worker in range(size):
            ours, theirs = socket.socketpair()
            place = places[worker % len(places)] if places else ""
            where = ["nsenter", *(f"--{flags[space]}=/proc/{place}/ns/{space}" for space in spaces)] if place else []
            command = [*where, sys.executable, str(HERE / "harness.py"), str(theirs.fileno())]
            process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()])
            theirs.close()
            self.connections.append(Connection(ours.detach()))
            self.processes.append(process)

    def send(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any, key: Any) -> None:
        """Starts function(env, *args) on workers, as ranks of the comm that `key` names."""
        for rank, worker in enumerate(ranks):
            call = (key, rank, len(ranks), function, args)
            with contextlib.suppress(OSError):  # it is dead; collect() says so
                self.connections[worker].send(call)

    def collect(self, ranks: Sequence[int], timeout: float) -> list[tuple[bool, Any]]:
        """What the workers answered; a dead or hanging one counts as failed."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, tuple[bool, Any]] = {}
        while len(outcomes) < len(ranks):
            waiting = {self.connections[w]: w for w in ranks if w not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                worker = waiting[connection]  # type: ignore[index]
                try:
                    outcomes[worker] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    code = self.processes[worker].wait()
                    outcomes[worker] = False, f"the process ended with exit code {code}"
            if not ready:
                for worker in waiting.values():
                    self.processes[worker].send_signal(signal.SIGUSR1)  # stacks to stderr
                    outcomes[worker] = False, f"no answer within {timeout} s"
                time.sleep(0.2)
        return [outcomes[w] for w in ranks]

    def signal(self, worker: int, number: int) -> None:
        """Kills, stops or continues a worker."""
        self.processes[worker].send_signal(number)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.wait()


def serve(fd: int) -> None:
    """A worker: runs calls until its parent is gone. An env of an older key is let go of."""
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(fd)
    envs: dict[Any, tuple[Any, Env]] = {}

    def run(message: bytes) -> Any:
        key, rank, nranks, function, args = pickle.loads(message)
        name, generation, backend, address = key
        known, env = envs.get((name, backend, nranks), (None, None))
        if env is None or known != generation:
            comm = BACKENDS[backend].comm(rank, nranks, address)
            env = Env(comm, BACKENDS[backend])
            envs[name, backend, nranks] = generation, env
        return env.call(function, *args)

    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send(attempt(run, message))


class Pool:
    """Workers for all worlds of a session: a world of n ranks uses the first n of them."""

    def __init__(self) -> None:
        self.workers: Workers | None = None
        self.generation = 0
        self.name = (
            f"pool-{os.getpid()}-{time.monotonic_ns()}"  # no process before had it, as one might have the number
        )

    def run(self, backend: str, nranks: int, timeout: float, function: Any, args: tuple) -> list[Any]:
        if self.workers is None or len(self.workers.processes) < nranks:
            self.reset()
            self.workers = Workers(max(nranks, 8))
        address = f"{self.name}-{self.generation}-{backend}-{nranks}"
        ranks = range(nranks)
        key = ("pool", self.generation, backend, address)
        self.workers.send(ranks, function, *args, key=key)
        outcomes = self.workers.collect(ranks, timeout)
        if not all(ok for ok, _ in outcomes):
            self.reset()
        return settle(outcomes)

    def reset(self) -> None:
        if self.workers is not None:
            self.workers.close()
        self.workers = None
        self.generation += 1


POOL = Pool()


class Processes:
    """A world whose ranks are processes."""

    kind = "processes"

    def __init__(self, backend: str, nranks: int):
        self.backend = backend
        self.nranks = nranks

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = HANGS) -> list[Any]:
        """function(env, *args) on every rank: values by rank."""
        return POOL.run(self.backend, self.nranks, timeout, function, args)

    def forget(self) -> None:
        """Fresh comms from now on, where ranks have been given up."""
        POOL.generation += 1


# ---- threads -------------------------------------------------------------------------------------


class Threads:
    """A world whose ranks are threads of this process."""

    kind = "threads"
    _envs: dict[tuple[str, int], list[Env]] = {}  # noqa: RUF012

    def __init__(self, backend: str, nranks: int):
        self.backend = backend
        self.nranks = nranks

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = HANGS) -> list[Any]:
        """function(env, *args) on every rank: values by rank."""
        key = self.backend, self.nranks
        if key not in self._envs:
            backend = BACKENDS[self.backend]
            self._envs[key] = [Env(comm, backend) for comm in backend.local_comms(self.nranks)]
        envs = self._envs[key]
        hung = (False, f"no answer within {timeout} s")
        outcomes: list[tuple[bool, Any]] = [hung] * self.nranks

        def body(rank: int) -> None:
            outcomes[rank] = attempt(envs[rank].call, function, *args)

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.nranks)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not all(ok for ok, _ in outcomes):
            del self._envs[key]
            if any(thread.is_alive() for thread in threads):
                faulthandler.dump_traceback(all_threads=True)
        return settle(outcomes)

    def forget(self) -> None:
        """Fresh comms from now on, where ranks have been given up."""
        self._envs.clear()


WORLDS = {"threads": Threads, "processes": Processes}


# ---- ranks that wait for what others have done, whatever their groups do --------------------------


def raise_flag(folder: str | Path, name: Any) -> None:
    Path(folder, str(name)).touch()


def await_flags(folder: str | Path, *names: Any) -> None:
    """Until all of them have been raised."""
    until = time.monotonic() + HANGS / 2
    while missing := [name for name in names if not Path(folder, str(name)).exists()]:
        assert time.monotonic() < until, f"nobody raised {missing}"
        time.sleep(0.01)


# ---- what tests say about errors -----------------------------------------------------------------


def said(outcome: Any, result: str, pattern: str) -> None:
    """Asserts what `caught` has returned."""
    assert outcome[0] == result, outcome
    assert re.search(pattern, outcome[1]), f"{outcome[1]!r} does not match {pattern!r}"


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str, Any]:
    """(result name, sentence, record) of the error that a call raises; ("twSuccess", "", None) if none."""
    try:
        function(*args, **kwargs)
    except tw.TokenwayError as error:
        return error.result, str(error), error.record
    return "twSuccess", "", None


if __name__ == "__main__":
    import harness  # functions arrive by the name of their module: this file must have one

    harness.serve(int(sys.argv[1]))
