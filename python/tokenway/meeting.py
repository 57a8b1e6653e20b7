"""How ranks that have a store in common, a process group's say, tell each other something within a timeout.

PyTorch's own gathering of objects knows no timeout but the group's, half an hour, says of nobody who is late, and
leaves the group's collectives out of step if it is given up. So ranks meet at the group's store: each lays down a card,
rank 0 writes all cards onto a roster, and who finds its own card there has met all others. A timeout hurts no later
try: who gives up says so on its card, and the next has another.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tokenway.errors import InvalidArgument, PeerDied, PeerTimeout

_LOOK = 0.01  # seconds between two looks at the store, of a few ranks; of many more, as there is one store for all
_FEW = 32
_GIVEN_UP = "given up"
# Seconds that a store may take to answer beyond the timeout. The process that holds it may be stopped, and PyTorch then
# waits for it without end, so a thread does.
_SLOW = 3.0


def group_of(given: Any) -> Any:
    """A caller's process group, None being the default one, or the group of a DeviceMesh of one dimension. Raises
    InvalidArgument for other things, and on a rank that is not in it."""
    import torch.distributed as dist

    outside = f"this rank (global rank {dist.get_rank()}) is not in process_group"
    if hasattr(given, "get_group") and hasattr(given, "get_coordinate"):
        if given.ndim != 1:
            names = given.mesh_dim_names or tuple(range(given.ndim))
            told = f"is a DeviceMesh of dimensions {names}; give one's, as mesh.get_group({names[-1]!r})"
            raise InvalidArgument.of("process_group", told)
        if given.get_coordinate() is None:
            raise InvalidArgument(outside, argument="process_group")
        given = given.get_group()
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(outside, argument="process_group")
    if given is not None and not isinstance(given, dist.ProcessGroup):
        what = type(given).__name__
        told = f"is of type {what}; it must be a ProcessGroup, or a DeviceMesh of one dimension"
        raise InvalidArgument.of("process_group", told)
    if dist.get_rank(given) < 0:
        raise InvalidArgument(outside, argument="process_group")
    return given


def gather(process_group: Any, occasion: str, mine: Any, rank: int, nranks: int, timeout: float) -> list[Any]:
    """What every rank gives, in rank order: something that JSON can say. Collective; `occasion` is the same everywhere.

    Raises PeerTimeout after `timeout` seconds, which names those that have not come; PeerDied at once if one that had
    come is dead, where this process can see that. The process group is as it was: no collective of it is used, but for
    one of MPI's, which has no store.
    """
    import torch.distributed as dist

    if nranks == 1:
        return [mine]
    if dist.get_backend(process_group) == "mpi":
        outcome: list[Any] = [None] * nranks
        made = Bounded(lambda: dist.all_gather_object(outcome, mine, group=process_group))
        if not made.wait(timeout):
            raise PeerTimeout(f"connecting: not all of the {nranks} ranks have come within {timeout:g} s")
        return outcome
    group = dist.group.WORLD if process_group is None else process_group
    # The public face of it, ProcessGroup.get_group_store, has come late, and there are groups without it.
    store = dist.distributed_c10d._get_process_group_store(group)
    return gather_at(store, occasion, mine, rank, nranks, timeout)


def gather_at(store: Any, occasion: str, mine: Any, rank: int, nranks: int, timeout: float) -> list[Any]:
    """The same of ranks that have a store of torch.distributed in common, and need no process group."""
    import torch.distributed as dist

    if nranks == 1:
        return [mine]
    table = _Table(dist.PrefixStore(f"tokenway-{nranks}", store), occasion, mine, rank, nranks, timeout)
    made = Bounded(table.meet)
    try:
        if made.wait(timeout + _SLOW):
            return made.value
    finally:
        table.over = True  # for who is interrupted too
    raise PeerTimeout(
        f"connecting: the ranks' store has not answered for {timeout + _SLOW:g} s; who holds it, rank 0 or "
        "torchrun, seems to be stopped"
    )


class Bounded:
    """Runs a function on a thread, for who waits no longer than he wants, or until a signal's handler raises."""

    def __init__(self, function: Callable[[], Any]):
        self.value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._too_late: Callable[[Any], None] | None = None
        threading.Thread(target=self._run, args=(function,), name="tokenway-bounded", daemon=True).start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self.value = function()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._done.set()
            too_late = self._too_late
        if too_late is not None and self._error is None:
            too_late(self.value)

    def wait(self, timeout: float, over: Callable[[], object] | None = None) -> bool:
        """Whether it has ended by then; raises what it has raised. over: asked every few milliseconds, whether to give
        up before."""
        if over is None:
            self._done.wait(timeout)
        else:
            until = time.monotonic() + timeout
            while not self._done.wait(max(0.0, min(_LOOK, until - time.monotonic()))):
                if time.monotonic() >= until or over():
                    break
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def forsake(self, too_late: Callable[[Any], None]) -> None:
        """What is to become of what the function returns, now that nobody waits for it."""
        with self._lock:
            self._too_late = too_late
            done = self._done.is_set()
        if done and self._error is None:
            too_late(self.value)


class _Table:
    """One meeting, as one rank sees it."""

    def __init__(self, store: Any, occasion: str, mine: Any, rank: int, nranks: int, timeout: float):
        self._store, self._occasion = store, occasion
        self._rank, self._nranks, self._timeout = rank, nranks, timeout
        self._nonce = os.urandom(16).hex()
        self._mine = mine
        self._processes: dict[int, tuple[str, int]] = {}  # by rank: the card it was seen by, and a descriptor
        self.over = False

    def meet(self) -> list[Any]:
        import torch.distributed as dist

        until = time.monotonic() + self._timeout
        look = _LOOK * max(1.0, self._nranks / _FEW)
        try:
            self._lay_down(self._occasion)
            ask = self._make_roster if self._rank == 0 else self._find_roster
            looked = time.monotonic()
            while (cards := ask()) is None:
                now = time.monotonic()
                if now >= until or self.over:
                    raise PeerTimeout(f"connecting: {self._absent()} within {self._timeout:g} s")
                if now - looked > 20 * look:
                    looked = now
                    self._fresh()  # looks for the dead
                time.sleep(look)
            return [card[-1] for card in cards]
        except dist.DistNetworkError as error:
            raise PeerDied(
                "connecting: the ranks' store is gone, and with it who held it: rank 0, or torchrun"
            ) from error
        except BaseException:
            with suppress(RuntimeError):  # PyTorch's
                self._lay_down(_GIVEN_UP)
            raise
        finally:
            for _, descriptor in self._processes.values():
                os.close(descriptor)
            self._processes.clear()

    def _lay_down(self, occasion: str) -> None:
        self._store.set(f"card-{self._rank}", json.dumps([self._nonce, occasion, *_process(), self._mine]))

    def _read(self, key: str) -> Any:
        """What stands at a key, None if nothing does. Never waits for one."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _fresh(self, *others: str) -> dict[int, Any]:
        """Cards of this occasion (or others), by rank. Those on the roster were of a meeting that has been."""
        roster = self._read("roster") or [None] * self._nranks
        fresh = {}
        for rank, spent in enumerate(roster):
            card = self._read(f"card-{rank}")
            if card is not None and card[1] in (self._occasion, *others) and (spent is None or card[0] != spent[0]):
                fresh[rank] = card
            if card or spent:  # who has been at any meeting is known
                self._check_alive(rank, card or spent)
        return fresh

    def _make_roster(self) -> list[Any] | None:
        fresh = self._fresh()
        if len(fresh) < self._nranks:
            return None
        cards = [fresh[rank] for rank in range(self._nranks)]
        self._store.set("roster", json.dumps(cards))
        return cards

    def _find_roster(self) -> list[Any] | None:
        cards = self._read("roster")
        return cards if cards and len(cards) == self._nranks and cards[self._rank][0] == self._nonce else None

    def _absent(self) -> str:
        came = self._fresh(_GIVEN_UP)  # who has given up since is not the one who was late
        absent = [rank for rank in range(self._nranks) if rank not in came]
        # None: they came, and went, at other times than this rank; or rank 0, which has all cards, does nothing.
        absent = absent or [rank for rank in range(self._nranks) if rank not in self._fresh()] or [0]
        names = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} others" if len(absent) > 8 else "")
        return f"rank {names} of {self._nranks} did not arrive"

    def _check_alive(self, rank: int, card: Any) -> None:
        """Of a rank that has laid down a card, and may have died since, if its process can be seen from here."""
        nonce, _, place, number, _ = card
        here, own = _process()
        if not place or place != here or number == own:
            return
        known = self._processes.get(rank)
        if known is None or known[0] != nonce:
            if known is not None:
                os.close(known[1])
                del self._processes[rank]
            try:
                self._processes[rank] = nonce, os.pidfd_open(number)
            except ProcessLookupError:
                raise PeerDied(f"connecting: rank {rank} is gone") from None
            except OSError:  # a kernel that has none, or no descriptor left
                return
        look = select.poll()
        look.register(self._processes[rank][1], select.POLLIN)
        if look.poll(0):
            raise PeerDied(f"connecting: rank {rank} is gone")


def _process() -> tuple[str, int]:
    """(boot and namespace of process numbers, number) of this process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    except OSError:
        return "", os.getpid()
