"""`connect` without a process group of torch.distributed: over a store, an allgather, and what is like a group."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import HANGS, PATIENT, caught
from launched import exchange

import tokenway as tw
from tokenway import party

processes = pytest.mark.processes


class Files:
    """An allgather over files, as a caller may have one: it knows no PyTorch, and wants equal sizes."""

    def __init__(self, folder: str, rank: int, nranks: int):
        self.folder, self.rank, self.nranks, self.calls = Path(folder), rank, nranks, 0

    def __call__(self, mine: bytes) -> list[bytes]:
        self.calls += 1
        part = self.folder / f"{self.calls}-{self.rank}"
        part.with_suffix(".part").write_bytes(mine)
        part.with_suffix(".part").rename(part)
        until, found = time.monotonic() + PATIENT, []
        for rank in range(self.nranks):
            path = self.folder / f"{self.calls}-{rank}"
            while not path.exists():
                assert time.monotonic() < until, f"rank {rank} did not come"
                time.sleep(0.005)
            found.append(path.read_bytes())
        assert {len(each) for each in found} == {len(mine)}
        return found


def place() -> tuple[int, int]:
    return int(os.environ["TOKENWAY_RANK"]), int(os.environ["TOKENWAY_NRANKS"])


def over_files(folder: str, backend: str) -> Any:
    rank, nranks = place()
    found = []
    gather = Files(folder, rank, nranks)
    for _ in range(2):  # comms of a process have addresses of their own
        with tw.connect(rank=rank, nranks=nranks, allgather=gather, backend=backend, timeout=PATIENT) as comm:
            assert (comm.rank, comm.nranks) == (rank, nranks)
            found.append((comm.backend, exchange(comm)))
    return found, "torch" in sys.modules


@processes
def test_an_allgather_needs_no_pytorch(tmp_path) -> None:
    for found, torch in tw.run(over_files, 3, str(tmp_path), "auto", timeout=HANGS):
        assert found == [("shm", [0, 1, 2])] * 2
        assert not torch


@processes
@pytest.mark.usefixtures("torch")
def test_an_allgather_for_the_portable_backend(tmp_path) -> None:
    for found, _ in tw.run(over_files, 2, str(tmp_path), "torch", timeout=HANGS):
        assert found == [("torch", [0, 1])] * 2


@dataclass
class Stateless:
    """As an engine's own group is: neither torch.distributed nor this package knows it."""

    rank: int
    world_size: int
    store: Any


def over_store(path: str, kind: str, backend: str) -> Any:
    import torch.distributed as dist

    rank, nranks = place()
    store = dist.FileStore(path, nranks)
    groups = {
        "store": lambda: {"rank": rank, "nranks": nranks, "store": store},
        "stateless": lambda: {"process_group": Stateless(rank, nranks, store)},
        "made by hand": lambda: {"process_group": dist.ProcessGroup(store, rank, nranks)},
    }
    with tw.connect(**groups[kind](), backend=backend, timeout=PATIENT) as comm:
        found = comm.backend, exchange(comm)
    return found, dist.is_initialized()


@processes
@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("kind", "way"),
    [("store", "auto"), ("stateless", "torch"), ("made by hand", "auto"), ("store", "torch")],
)
def test_a_store_needs_no_process_group(tmp_path, kind: str, way: str) -> None:
    for found, initialised in tw.run(over_store, 2, str(tmp_path / "store"), kind, way, timeout=HANGS):
        assert found == ({"auto": "shm", "torch": "torch"}[way], [0, 1])
        assert not initialised


def alone(path: str) -> Any:
    import torch.distributed as dist

    rank, nranks = place()
    if rank == 1:
        return None
    store = dist.FileStore(path, nranks)
    return caught(tw.connect, rank=rank, nranks=nranks, store=store, timeout=0.5)[:2]


@processes
@pytest.mark.usefixtures("torch")
def test_who_does_not_come_is_named(tmp_path) -> None:
    first, _ = tw.run(alone, 2, str(tmp_path / "store"), timeout=HANGS)
    assert first == ("twTimeout", "connecting: rank 1 of 2 did not arrive within 0.5 s")


def wish(folder: str) -> Any:
    rank, nranks = place()
    wrong = {"backend": "smoke" * 200} if rank == 0 else {}
    gather = Files(folder, rank, nranks)
    return caught(tw.connect, rank=rank, nranks=nranks, allgather=gather, timeout=PATIENT, **wrong)[:2]


@processes
def test_a_wish_that_cannot_be_is_told_however_long(tmp_path) -> None:
    first, second = tw.run(wish, 2, str(tmp_path), timeout=HANGS)
    assert first[0] == "twInvalidArgument" and first[1].startswith("backend is 'smokesmoke")
    assert second[0] == "twPeerRefused" and second[1].startswith("rank 0 cannot connect: backend is 'smokesmoke")


def echo(mine: bytes) -> list[bytes]:
    return [mine, mine]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank": 0}, "rank is given; store or allgather must be, and one of them alone"),
        ({"rank": 0, "nranks": 2}, "rank and nranks is given; store or allgather must be, and one of them alone"),
        ({"allgather": echo}, "nranks is None; it must be an integer of at least 1"),
        ({"allgather": echo, "nranks": 2}, "rank is None; it must be an integer from 0 to 1"),
        ({"allgather": echo, "nranks": 2, "rank": 2}, "rank is 2; it must be an integer from 0 to 1"),
        ({"allgather": echo, "nranks": 0, "rank": 0}, "nranks is 0; it must be an integer of at least 1"),
        ({"allgather": 5, "nranks": 2, "rank": 0}, "allgather is of type int; it must be a function of bytes"),
        ({"store": {}, "nranks": 2, "rank": 0}, "store is of type dict; it must be a torch.distributed.Store"),
        ({"process_group": 5, "rank": 0}, "rank is given beside process_group, which has its own"),
        (
            {"allgather": lambda mine: [mine], "nranks": 2, "rank": 0},
            "allgather returned 1 parts on rank 0; it must return a list of 2, what each rank has given",
        ),
        (
            {"allgather": lambda mine: mine + mine, "nranks": 2, "rank": 0},
            "allgather returned a bytes on rank 0; it must return a list of 2, what each rank has given",
        ),
        (
            {"allgather": lambda mine: [mine, mine[1:]], "nranks": 2, "rank": 0},
            "it must return the 4096 that every rank has given",
        ),
        (
            {"allgather": lambda mine: [mine, "text"], "nranks": 2, "rank": 0},
            "allgather returned a str for rank 1 on rank 0; it must be bytes",
        ),
    ],
)
def test_what_is_no_party(given: dict[str, Any], told: str) -> None:
    result, text, *_ = caught(tw.connect, **given)
    assert result == "twInvalidArgument" and told in text


def test_an_allgather_that_raises_or_brings_old_cards() -> None:
    def fails(mine: bytes) -> list[bytes]:
        raise OSError("no link")

    result, text, *_ = caught(tw.connect, rank=0, nranks=2, allgather=fails)
    assert (result, text) == ("twSystemError", "allgather raised OSError on rank 0: no link")
    old: list[bytes] = []

    def late(mine: bytes) -> list[bytes]:
        old.append(mine)
        return [mine, old[0]]

    gather = party.party_of(None, 0, 2, None, late).gather
    assert gather("first", "a", 1.0) == ["a", "a"]
    result, text, *_ = caught(gather, "second", "b", 1.0)
    assert (result, text) == ("twSystemError", "allgather returned on rank 0 what rank 1 gave at another time")
    for wrong in (b"?", b"5", b"[1, 2, 3]", bytes([255])):
        noise = party.party_of(None, 0, 2, None, lambda mine, wrong=wrong: [mine, wrong.ljust(len(mine))]).gather
        result, text, *_ = caught(noise, "first", "a", 1.0)
        assert (result, text) == ("twSystemError", "allgather returned on rank 0 what rank 1 has not given")


@pytest.mark.usefixtures("torch")
def test_one_store_for_other_numbers_of_ranks() -> None:
    """Ranks that have met may meet again in other numbers."""
    import torch.distributed as dist

    store = dist.HashStore()
    for nranks in (2, 4, 3, 2, 4):

        def meet(rank: int, nranks: int = nranks) -> list[Any]:
            return party.party_of(None, rank, nranks, store, None).gather("again", [nranks, rank], PATIENT)

        with ThreadPoolExecutor(nranks) as pool:
            met = list(pool.map(meet, range(nranks)))
        assert met == [[[nranks, rank] for rank in range(nranks)]] * nranks
