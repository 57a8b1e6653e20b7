"""How processes of a host meet: addresses, missing ranks, ranks that are there twice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import struct
import threading
import time
from typing import Any

import pytest
from harness import AT_ONCE, PATIENT, caught, said
from meeting import Meeting, address_of

import tokenway as tw


def meet(*ranks: tuple[int, int], timeout: float = 3.0, address: str | None = None) -> list[Any]:
    """Comm.shm on threads: the outcomes of (rank, nranks)."""
    address = address or address_of("meet")
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


LONG = 90.0  # a timeout that nobody waits for
SOON = 40.0  # what takes a moment, on a busy machine


def told(heard: tuple[str, str, float], result: str, pattern: str) -> None:
    """What a rank heard, long before its timeout."""
    said(heard, result, pattern)
    assert heard[2] < SOON, heard


def test_addresses_that_are_not_text() -> None:
    for address, sentence in (
        ("job\0A", r"address is 'job\\x00A'; it must not hold a NUL"),
        ("job\udce9", r"address is 'job\\udce9'; it must not hold a surrogate"),
        (7, "address is 7; it must be a string"),
    ):
        said(caught(tw.Comm.shm, 0, 1, address), "twInvalidArgument", sentence)
        said(caught(tw.Comm.cuda, 0, 1, address, device=0), "twInvalidArgument", sentence)


def test_files_at_a_path_stay(tmp_path) -> None:
    path = str(tmp_path / "job")
    (tmp_path / "job.0").write_text("precious")
    (tmp_path / "job.1").mkdir()
    for rank in (0, 1):
        said(
            caught(tw.Comm.shm, rank, 2, path, timeout=LONG),
            "twInvalidArgument",
            rf"job\.{rank} exists and is not a socket",
        )
    # Who comes to a rank's place and finds a file there does not wait for it.
    other = str(tmp_path / "other")
    (tmp_path / "other.0").write_text("precious")
    said(caught(tw.Comm.shm, 1, 2, other, timeout=LONG), "twInvalidArgument", r"other\.0 exists and is not a socket")
    assert (tmp_path / "job.0").read_text() == (tmp_path / "other.0").read_text() == "precious"
    assert (tmp_path / "job.1").is_dir()


def test_stale_sockets_at_a_path_go(tmp_path) -> None:
    for rank in (0, 1):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(tmp_path / f"job.{rank}"))
            stale.listen(1)
    assert [outcome[0] for outcome in meet((0, 2), (1, 2), address=str(tmp_path / "job"), timeout=LONG)] == [
        "twSuccess"
    ] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["name", "path"])
def test_a_second_job_at_an_address(tmp_path, kind: str) -> None:
    address = str(tmp_path / "job") if kind == "path" else address_of("job")
    with Meeting(0, 2, address, LONG) as first:
        wait_for_listener(address)
        for _ in range(3):
            said(caught(tw.Comm.shm, 0, 2, address, timeout=LONG), "twInvalidArgument", "in use for rank 0")
        if kind == "path":
            assert stat.S_ISSOCK(os.stat(address + ".0").st_mode)
        with Meeting(1, 2, address, LONG) as second:
            assert first.heard()[0] == second.heard()[0] == "twSuccess"
        # While the comm lives nothing of it stands at the path.
        assert not list(tmp_path.iterdir())


def wait_for_listener(address: str, rank: int = 0) -> None:
    """Until a rank can be dialled."""
    name = f"{address}.{rank}" if address.startswith("/") else f"\0tokenway/{address}/{rank}"
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            probe.connect(name)
            return
        time.sleep(0.01)
    raise AssertionError(f"nobody listens at {address!r}")


def test_a_full_queue_blocks_nobody() -> None:
    address = address_of("full")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as queue:
        listener.bind(f"\0tokenway/{address}/0")
        listener.listen(0)
        for _ in range(8):
            caller = queue.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(f"\0tokenway/{address}/0")
        with Meeting(1, 2, address, 1.0) as rank:
            said(rank.heard(), "twTimeout", "rank 0 of 2 did not arrive")


def test_a_stopped_rank_meets_who_waits_for_it() -> None:
    """Attempts that gave up while it stood still do not matter to it."""
    address = address_of("stopped")
    with Meeting(0, 2, address, LONG) as first:
        wait_for_listener(address)
        first.signal(signal.SIGSTOP)
        for _ in range(5):
            said(caught(tw.Comm.shm, 1, 2, address, timeout=0.2), "twTimeout", "rank 0 of 2 did not arrive")
        with Meeting(1, 2, address, LONG) as second:
            first.signal(signal.SIGCONT)
            told(first.heard(), "twSuccess", "")
            told(second.heard(), "twSuccess", "")


def test_a_death_while_others_connect() -> None:
    """Told at once to who has come, whatever it waits for, and to who comes later; a rank may be the first to know."""
    for victim in (0, 1, 2):
        address = address_of("death")
        survivors = [rank for rank in range(3) if rank != victim]
        with contextlib.ExitStack() as stack:
            ranks = {rank: stack.enter_context(Meeting(rank, 5, address, LONG)) for rank in range(3)}
            wait_for_links(ranks)
            ranks[victim].signal(signal.SIGKILL)
            for rank in survivors:
                told(ranks[rank].heard(), "twPeerDied", rf"rank {victim} of 5 is gone")
            late = stack.enter_context(Meeting(3, 5, address, LONG))
            told(late.heard(), "twPeerDied", rf"rank \d: rank {victim} of 5 is gone")


def wait_for_links(ranks: dict[int, Meeting]) -> None:
    """Until each of these processes has a connection and a process descriptor of each other."""
    until = time.monotonic() + SOON
    for meeting in ranks.values():
        folder = f"/proc/{meeting.pid}/fd"
        wanted = len(ranks) - 1
        while True:
            names = []
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    names.append(os.readlink(f"{folder}/{name}"))
            if sum("pidfd" in name for name in names) >= wanted:
                break
            assert time.monotonic() < until, names
            time.sleep(0.02)
    time.sleep(0.2)  # for what they say of it


def test_a_refusal_is_told_to_who_waits() -> None:
    """Rank 0 sees that sizes differ; ranks that wait for it, or for others that never come, hear it."""
    address = address_of("sizes")
    with Meeting(0, 4, address, LONG) as rank0, Meeting(1, 4, address, LONG) as rank1:
        wait_for_links({0: rank0, 1: rank1})
        with Meeting(2, 5, address, LONG) as rank2:
            outcomes = [rank.heard() for rank in (rank0, rank1, rank2)]
            for outcome in outcomes:
                told(outcome, "twConfigMismatch", r"nranks: rank [01] has 4, rank 2 has 5")
        with Meeting(3, 4, address, LONG) as rank3:
            told(rank3.heard(), "twConfigMismatch", r"rank [01]: nranks: rank [01] has 4, rank 2 has 5")


def test_one_that_gave_up_is_met_again() -> None:
    """A rank that tells others why it failed gives its place up when its process wants it again."""
    address = address_of("again")
    with Meeting(2, 3, address, LONG) as victim:
        wait_for_listener(address, 2)
        failed = threading.Thread(target=lambda: outcomes.append(caught(tw.Comm.shm, 0, 3, address, timeout=LONG)))
        outcomes: list[Any] = []
        failed.start()
        wait_for_links({2: victim})
        until = time.monotonic() + SOON
        while "pidfd" not in str([os.readlink(f.path) for f in os.scandir(f"/proc/{victim.pid}/fd")]):
            assert time.monotonic() < until
        victim.signal(signal.SIGKILL)
        failed.join(SOON)
    said(outcomes[0], "twPeerDied", "rank 2 of 3 is gone")
    assert [outcome[0] for outcome in meet((0, 3), (1, 3), (2, 3), address=address, timeout=LONG)] == ["twSuccess"] * 3


def test_one_that_floods_is_cut_off() -> None:
    """Who says more than who it is, before that is known, is none of us; and it takes no memory."""
    address = address_of("flood")
    with Meeting(0, 2, address, LONG) as first:
        wait_for_listener(address)
        with socket.socket(socket.AF_UNIX) as flood:
            flood.connect(f"\0tokenway/{address}/0")
            flood.sendall(struct.pack("<IIQQ", 0x54574D31, 0, 0, 1 << 62))
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                for _ in range(1 << 12):
                    flood.sendall(bytes(1 << 16))
        with Meeting(1, 2, address, LONG) as second:
            told(first.heard(), "twSuccess", "")
            told(second.heard(), "twSuccess", "")
