"""The package's own launcher: functions, or commands, as the ranks of one host.

`connect` finds the ranks that torchrun has started, too. This is here for what torchrun does not do. It needs neither
PyTorch nor a port. It runs functions, and returns what they return. Of several ranks that failed it names the one to
blame, whose error does not tell of a peer. Ranks may be stopped and killed on purpose, and never outlive who has
started them. Several hosts, restarts, and a log for each rank are torchrun's.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from tokenway import _header, _native
from tokenway.comm import ADDRESS, LOCAL_RANK, NRANKS, RANK
from tokenway.errors import InvalidArgument, PeerAborted, PeerDied, PeerRefused, PeerTimeout

_GRACE = 5.0  # seconds between asking a process to end and ending it
_LOOK = 0.2  # seconds between looks at processes
_CULPRIT = 1.0  # seconds that the one to blame has to fail, once another has failed because of it
_OF_PEERS = (PeerAborted, PeerDied, PeerRefused, PeerTimeout)
_ENDS = (signal.SIGTERM, signal.SIGHUP)  # as schedulers and closed terminals send them
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass
class Outcome:
    """How a rank ended: its value, or what it raised (a traceback as text), or the exit code of a process that died."""

    value: Any = None
    error: str | None = None
    exitcode: int = 0
    by_peer: bool = False  # what it raised tells of a peer's failure

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return self.error is None and self.exitcode == 0


def _new_address() -> str:
    """A name for ranks to meet at, which no others have."""
    return f"launch-{os.getpid()}-{os.urandom(8).hex()}"


def _variables(rank: int, nranks: int, address: str) -> dict[str, str]:
    """What tells a process its place. LOCAL_RANK is torchrun's word for it, and says which CUDA device is its own."""
    return {RANK: str(rank), NRANKS: str(nranks), ADDRESS: address, LOCAL_RANK: str(rank)}


def _child(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], env: dict) -> None:
    threading.Thread(target=leave_with_parent, name="tokenway-parent", daemon=True).start()
    # It is one for its starter, whose exit ends it; but those may have no children, and a rank's data may have loaders.
    multiprocessing.current_process().daemon = False
    os.environ.update(env)
    try:
        value = function(*args)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # whoever has all outcomes may end what still runs
        connection.send(Outcome(value))
    except BaseException as error:
        by_peer = isinstance(error, _OF_PEERS)
        connection.send(Outcome(error=traceback.format_exc(), by_peer=by_peer))


def leave_with_parent() -> None:
    """Ends a process that multiprocessing has started when its parent ends, however that ends; for a thread in it.
    (The kernel's signal for this comes at the end of the parent's thread, and Ranks may be made in one that ends before
    they do.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    for child in multiprocessing.active_children():  # which would be nobody's
        child.kill()
    os._exit(1)


class Ranks:
    """Processes that run `function(*args)` as ranks; `tokenway.connect()` in them finds the others.

    The function must be importable (defined at the top of a module). Used where ranks may be killed or stopped on
    purpose; `run` is the everyday form.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        nranks: int,
        *args: Any,
        env: dict[str, str] | None = None,
    ):
        if not 1 <= _native.fit("nranks", nranks) <= _header.MAX_RANKS:
            raise InvalidArgument.of("nranks", f"is {nranks}; allowed 1..{_header.MAX_RANKS}")
        context = multiprocessing.get_context("spawn")
        address = _new_address()
        self._connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(nranks):
            variables = _variables(rank, nranks, address) | (env or {})
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, function, args, variables), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)
        self._outcomes: list[Outcome | None] = [None] * nranks

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank's process."""
        os.kill(self.processes[rank].pid, number)

    def wait(self, timeout: float | None = None, ranks: Sequence[int] | None = None) -> list[Outcome | None]:
        """Outcomes of all ranks, once those of `ranks` (default: all) are there; None for what is not in time."""
        wanted = set(range(len(self.processes)) if ranks is None else ranks)
        self._receive_until(lambda: all(self._outcomes[rank] is not None for rank in wanted), timeout)
        return list(self._outcomes)

    def wait_or_fail(self, timeout: float | None = None) -> tuple[list[Outcome | None], int | None]:
        """Outcomes of all ranks, and the rank to blame, None if there is none. Ends as soon as one fails; where that
        one tells of a peer, moments later, so that the peer can be named."""
        self._receive_until(lambda: None not in self._outcomes or bool(self._failed()), timeout)
        if self._failed():
            self._receive_until(lambda: not all(by_peer for by_peer, _ in self._failed()), _CULPRIT)
        return list(self._outcomes), min(self._failed(), default=(False, None))[1]

    def _failed(self) -> list[tuple[bool, int]]:
        """(whether a peer is to blame, rank) of those that have failed."""
        return [(o.by_peer, rank) for rank, o in enumerate(self._outcomes) if o is not None and not o.ok]

    def _receive_until(self, done: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done():
            left = None if deadline is None else deadline - time.monotonic()
            waiting = {
                connection: rank for rank, connection in enumerate(self._connections) if self._outcomes[rank] is None
            }
            if not waiting or (left is not None and left <= 0):
                return
            wait(list(waiting), _LOOK if left is None else min(left, _LOOK))
            for connection, rank in waiting.items():
                self._outcomes[rank] = self._outcome(connection, self.processes[rank])

    @staticmethod
    def _outcome(connection: Connection, process: Any) -> Outcome | None:
        """What a rank has sent, or how it ended without; None: it runs. The connection alone would not tell of its end
        while a process that it has forked lives."""
        ended = process.exitcode is not None
        try:
            if connection.poll():
                return connection.recv()
        except (EOFError, OSError):
            process.join()
            ended = True
        if not ended:
            return None
        code = process.exitcode
        return Outcome(exitcode=code, error=None if code else "the process ended before the function had returned")

    def close(self) -> None:
        """Ends what still runs, stopped processes included."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run(function: Callable[..., Any], nranks: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """Runs `function(*args)` in `nranks` processes and returns their values by rank.

    As soon as a rank fails, ends the others and raises RuntimeError with its traceback; of several, that of one whose
    error does not tell of a peer. Raises TimeoutError after `timeout` seconds, and InvalidArgument for fewer than one
    rank or more than a comm can have.
    """
    with Ranks(function, nranks, *args) as ranks:
        outcomes, culprit = ranks.wait_or_fail(timeout)
        if culprit is not None:
            outcome = outcomes[culprit]
            assert outcome is not None
            raise RuntimeError(
                f"rank {culprit} of {nranks}: {outcome.error or f'ended with exit code {outcome.exitcode}'}"
            )
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        if missing:
            raise TimeoutError(f"ranks {missing} of {nranks} did not end within {timeout} s")
        return [outcome.value for outcome in outcomes if outcome is not None]


def launch(command: Sequence[str], nranks: int) -> int:
    """Runs a command as `nranks` ranks (`tokenway launch`). When one fails, the others are ended.

    Returns the exit code of the first that failed, else 0.
    """
    address = _new_address()
    return launch_each([(command, _variables(rank, nranks, address)) for rank in range(nranks)])


def launch_each(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> int:
    """As `launch`, of a command for each rank, with the variables that it has beside those of this process."""
    children: list[subprocess.Popen] = []
    failed = 0
    main = threading.current_thread() is threading.main_thread()
    # What is ignored stays so: nohup.
    heeded = [number for number in _ENDS if main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _terminate) for number in heeded}
    bound = partial(die_with, os.getpid())
    try:
        for command, variables in commands:
            children.append(subprocess.Popen(command, env=os.environ | variables, preexec_fn=bound))
        codes: list[int | None] = [None]
        while None in codes and not failed:
            time.sleep(0.02)
            codes = [child.poll() for child in children]
            failed = next((code for code in codes if code), 0)
    except KeyboardInterrupt:
        failed = 128 + signal.SIGINT
    except _Terminated as end:
        failed = 128 + end.number
    finally:
        _end(children)
        for number, handler in before.items():
            signal.signal(number, handler)
    return failed if failed >= 0 else 128 - failed


class _Terminated(BaseException):
    """A signal to end: the ranks must not outlive who has started them."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def _terminate(number: int, _: object) -> None:
    raise _Terminated(number)


def die_with(launcher: int) -> None:
    """In a new process, before it becomes the command: the kernel kills it when the launcher's thread, which waits for
    it, ends without a word (SIGKILL)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _end(children: list[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + _GRACE
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def script_command(script: str, args: Sequence[str]) -> list[str]:
    """The command that runs a script with this interpreter, or a program."""
    return [sys.executable, script, *args] if script.endswith(".py") else [script, *args]
