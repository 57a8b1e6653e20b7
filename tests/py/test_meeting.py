"""How ranks of a process group meet at its store: who is late is named, and one try hurts no other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import tokenway as tw
from tokenway import meeting

pytestmark = pytest.mark.usefixtures("torch")


@pytest.fixture
def store(torch) -> Any:
    import torch.distributed as dist

    return dist.HashStore()


def meet(store: Any, ranks: Any, nranks: int, timeout: float, occasion: str = "test") -> dict[int, Any]:
    """What each of some ranks hears, or the error that it gets."""
    heard: dict[int, Any] = {}

    def body(rank: int) -> None:
        table = meeting._Table(store, occasion, ["of", rank, time.monotonic()], rank, nranks, timeout)
        try:
            heard[rank] = [mine[:2] for mine in table.meet()]
        except tw.TokenwayError as error:
            heard[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return heard


def everyone(nranks: int) -> dict[int, Any]:
    return {rank: [["of", r] for r in range(nranks)] for rank in range(nranks)}


def test_again_and_again(store) -> None:
    """Cards of meetings that have been are not taken for new ones."""
    for _ in range(20):
        assert meet(store, range(3), 3, 30) == everyone(3)


@pytest.mark.parametrize("there", [(0, 1), (1, 2), (2,), (0,)])
def test_who_is_late_is_named_and_may_come_again(store, there: tuple[int, ...]) -> None:
    assert meet(store, range(3), 3, 30) == everyone(3)
    absent = ", ".join(str(rank) for rank in range(3) if rank not in there)
    for _ in range(2):
        heard = meet(store, there, 3, 0.3)
        for rank in there:
            assert isinstance(heard[rank], tw.PeerTimeout)
            # One of those that waited may have given up before the other, and was not late for that.
            assert f"rank {absent} of 3 did not arrive within 0.3 s" in str(heard[rank])
    assert meet(store, range(3), 3, 30) == everyone(3)


def test_ranks_at_different_occasions(store) -> None:
    """Do not meet, whatever each of them is about to say."""
    heard: list[dict[int, Any]] = []
    first = threading.Thread(target=lambda: heard.append(meet(store, [0], 2, 0.5, "hosts")))
    first.start()
    heard.append(meet(store, [1], 2, 0.5, "addresses"))
    first.join(60)
    for one in heard:
        for rank, error in one.items():
            assert isinstance(error, tw.PeerTimeout) and f"rank {1 - rank} of 2" in str(error)
    assert meet(store, range(2), 2, 30) == everyone(2)


def test_who_has_died_at_the_table(torch, tmp_path) -> None:
    """Is named at once: a rank that had come, and one that has been at an earlier meeting."""
    import torch.distributed as dist

    path = str(tmp_path / "store")
    lay_down = (
        "import sys; import torch.distributed as dist; from tokenway import meeting\n"
        "meeting._Table(dist.FileStore(sys.argv[1], 3), sys.argv[2], 'mine', 1, 3, 60)._lay_down(sys.argv[2])"
    )
    store = dist.FileStore(path, 3)
    for occasion in ("first", "second"):
        if occasion == "first":
            subprocess.run([sys.executable, "-c", lay_down, path, occasion], check=True, timeout=60)
        else:  # the roster of a meeting at which all have been
            cards = [store.get("card-1").decode()] * 3
            store.set("roster", "[" + ", ".join(cards) + "]")
        heard = meet(store, [0, 2], 3, 60, occasion)
        for rank in (0, 2):
            assert isinstance(heard[rank], tw.PeerDied) and "rank 1 is gone" in str(heard[rank]), heard


def test_a_store_that_does_not_answer() -> None:
    """The process that holds it may be stopped: PyTorch waits for it without end."""
    release = threading.Event()
    held = meeting.Bounded(lambda: release.wait(60))
    assert not held.wait(0.05)
    release.set()
    assert held.wait(60) and held.value is True
    with pytest.raises(ZeroDivisionError):
        meeting.Bounded(lambda: 1 // 0).wait(60)


@pytest.mark.parametrize("first", [False, True], ids=["forsaken first", "ended first"])
def test_what_comes_too_late_is_put_away_once(first: bool) -> None:
    release, put = threading.Event(), []
    if first:
        release.set()
    made = meeting.Bounded(lambda: release.wait(60))
    assert made.wait(60, over=lambda: True) or not first
    made.forsake(put.append)
    release.set()
    assert made.wait(60)
    until = time.monotonic() + 60
    while not put and time.monotonic() < until:
        time.sleep(0.001)
    assert put == [True]
