"""How processes of a host meet: addresses, missing ranks, ranks that are there twice."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from harness import AT_ONCE, PATIENT, caught, said

import tokenway as tw


def meet(*ranks: tuple[int, int], timeout: float = 3.0, address: str | None = None) -> list[Any]:
    """Comm.shm on threads: the outcomes of (rank, nranks)."""
    address = address or f"meet-{os.getpid()}-{time.monotonic_ns()}"
    outcomes: list[Any] = [None] * len(ranks)

    def join(i: int) -> None:
        made = []
        outcomes[i] = caught(lambda: made.append(tw.Comm.shm(*ranks[i], address, timeout=timeout)))
        barrier.wait(PATIENT)
        for comm in made:
            comm.close()

    barrier = threading.Barrier(len(ranks))
    threads = [threading.Thread(target=join, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return outcomes


def test_missing_ranks() -> None:
    begin = time.monotonic()
    for outcome in meet((0, 4), (2, 4)):
        said(outcome, "twTimeout", r"rank 1(, 3)? of 4 did not arrive in time")
    assert time.monotonic() - begin < 3 + AT_ONCE
    said(meet((1, 2), timeout=0.1)[0], "twTimeout", r"rank 0 of 2 did not arrive in time .* rank 1")


def test_same_rank_twice() -> None:
    outcomes = meet((0, 3), (1, 3), (1, 3))
    sentence = r'address "meet-.*" is in use for rank 1: .* each rank taken once'
    said(min(outcomes[1:], key=lambda outcome: outcome[0] != "twInvalidArgument"), "twInvalidArgument", sentence)
    said(outcomes[0], "twTimeout", r"rank 2 of 3 did not arrive")


def test_wrong_numbers_of_ranks() -> None:
    outcomes = meet((0, 2), (1, 3))
    said(outcomes[0], "twConfigMismatch", "nranks: rank 0 has 2, rank 1 has 3")
    assert outcomes[1][0] != "twSuccess"
    for rank, nranks in ((2, 2), (-1, 2), (0, 0), (0, 1025)):
        said(meet((rank, nranks))[0], "twInvalidArgument", r"n?ranks? is .*; it must be from")


def test_addresses(tmp_path) -> None:
    said(meet((0, 1), address="x" * 100)[0], "twInvalidArgument", "too long|at most")
    assert meet((0, 1), address="x" * 80)[0][0] == "twSuccess"
    said(caught(tw.Comm.shm, 0, 1, ""), "twInvalidArgument", "address is empty")
    path = str(tmp_path / "sockets")
    for _ in range(2):  # files that are left behind do not matter
        assert [outcome[0] for outcome in meet((0, 2), (1, 2), address=path, timeout=PATIENT)] == ["twSuccess"] * 2
    assert not list(tmp_path.iterdir())
    said(meet((0, 1), address="/nonexistent/folder/x")[0], "twSystemError", "cannot bind")
