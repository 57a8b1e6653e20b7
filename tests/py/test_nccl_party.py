"""Ranks that meet by a communicator of NCCL's, here of a library that pretends to be NCCL: its ranks are threads, and
device memory is the CPU's."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import PATIENT, caught
from launched import exchange

import tokenway as tw
from tokenway import nccl, party

ADDRESSES = 0x1000  # a communicator's address is this and its rank


class Pretended:
    """NCCL's functions that are used. `slow`: so many looks pass until a call has begun, as where it does not block."""

    def __init__(self, nranks: int, slow: int = 0, failing: str = ""):
        self.nranks, self.slow, self.failing = nranks, slow, failing
        self._barrier = threading.Barrier(nranks)
        self._sent: list[bytes] = [b""] * nranks
        self._looks: dict[int, int] = {}
        self.gathers = 0

    def _tell(self, name: str, value: Any, number: int) -> int:
        value._obj.value = number
        return 3 if name == self.failing else 0

    def ncclCommUserRank(self, comm: Any, rank: Any) -> int:
        return self._tell("ncclCommUserRank", rank, comm.value - ADDRESSES)

    def ncclCommCount(self, comm: Any, count: Any) -> int:
        return self._tell("ncclCommCount", count, self.nranks)

    def ncclCommCuDevice(self, comm: Any, device: Any) -> int:
        return self._tell("ncclCommCuDevice", device, 2)

    def ncclAllGather(self, sent: Any, got: Any, count: Any, kind: Any, comm: Any, stream: Any) -> int:
        assert (kind.value, stream.value) == (1, 0xCAFE)
        if self.failing == "ncclAllGather":
            return 3
        rank = comm.value - ADDRESSES
        self._sent[rank] = ctypes.string_at(sent.value, count.value)
        self._barrier.wait(PATIENT)
        assert {len(each) for each in self._sent} == {count.value}
        ctypes.memmove(got.value, b"".join(self._sent), count.value * self.nranks)
        if self._barrier.wait(PATIENT) == 0:
            self.gathers += 1
        self._looks[rank] = self.slow
        return 7 if self.slow else 0

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        rank = comm.value - ADDRESSES
        self._looks[rank] -= 1
        state._obj.value = 7 if self._looks[rank] > 0 else 0
        return 0


class OnHost:
    """As nccl.Device, whose memory is the CPU's."""

    stream = 0xCAFE

    def __init__(self, index: int):
        import torch

        assert index == 2
        self._torch = torch

    def put(self, mine: bytes) -> Any:
        return self._torch.frombuffer(bytearray(mine), dtype=self._torch.uint8)

    def room(self, count: int) -> Any:
        return self._torch.full((count,), 0xEE, dtype=self._torch.uint8)

    def get(self, tensor: Any) -> bytes:
        return bytes(tensor.numpy())


@pytest.fixture
def pretend(monkeypatch, torch) -> Any:
    def make(nranks: int, **keywords: Any) -> Pretended:
        library = Pretended(nranks, **keywords)
        monkeypatch.setattr(nccl, "load", lambda: library)
        monkeypatch.setattr(nccl, "Device", OnHost)
        return library

    return make


def on_all(nranks: int, function: Any) -> list[Any]:
    with ThreadPoolExecutor(nranks) as pool:
        return list(pool.map(function, range(nranks)))


@pytest.mark.parametrize("slow", [0, 3])
@pytest.mark.parametrize("nranks", [1, 3])
def test_ranks_tell_each_other_something(pretend, nranks, slow) -> None:
    pretend(nranks, slow=slow)

    def meet(rank: int) -> Any:
        found = party.party_of(None, None, None, None, None, ctypes.c_void_p(ADDRESSES + rank))
        told = [found.gather(word, f"{word} of {rank}", PATIENT) for word in ("first", "second")]
        return found.rank, found.nranks, told

    words = [[f"{word} of {rank}" for rank in range(nranks)] for word in ("first", "second")]
    assert on_all(nranks, meet) == [(rank, nranks, words) for rank in range(nranks)]


def test_connecting(pretend) -> None:
    """On the CPU, over memory of the host: NCCL is for the meeting alone."""
    library = pretend(2)

    def connect(rank: int) -> Any:
        with tw.connect(nccl_comm=ADDRESSES + rank, timeout=PATIENT) as comm:
            return comm.backend, comm.rank, comm.nranks, exchange(comm)

    assert on_all(2, connect) == [("shm", rank, 2, [0, 1]) for rank in range(2)]
    assert library.gathers == 1


@pytest.mark.parametrize("name", ["ncclCommUserRank", "ncclCommCount", "ncclAllGather"])
def test_what_nccl_refuses(pretend, name) -> None:
    pretend(1, failing=name)
    result, text, _ = caught(lambda: tw.connect(nccl_comm=ADDRESSES, timeout=PATIENT))
    assert result == "twSystemError" and f"{name} of nccl_comm failed with ncclResult_t 3" in text


@pytest.mark.parametrize("address", [0, True, "comm", 1.5, object(), ctypes.c_void_p()])
def test_what_is_no_communicator(address) -> None:
    result, text, _ = caught(lambda: tw.connect(nccl_comm=address))
    assert result == "twInvalidArgument" and "it must be the address of an ncclComm_t" in text


def test_a_communicator_beside_other_ways_to_meet() -> None:
    result, text, _ = caught(lambda: tw.connect(nccl_comm=ADDRESSES, rank=0, nranks=1))
    assert (result, text) == ("twInvalidArgument", "rank and nranks is given beside nccl_comm, which has its own")


def test_no_library(monkeypatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-that-is-not-here.so")
    result, text, _ = caught(lambda: tw.connect(nccl_comm=ADDRESSES))
    assert result == "twUnsupported" and "libnccl-that-is-not-here.so cannot be loaded" in text
