"""Python functions that the C library calls: what they raise, and what they return that is no answer."""

from __future__ import annotations

import ctypes
import ipaddress
from typing import Any

import harness
import numpy as np
import pytest
from harness import PATIENT
from portable_backend import Meeting, connect_threads

import tokenway as tw
from tokenway import _carrier, _native, callbacks, portable

pytestmark = pytest.mark.usefixtures("torch")


def connect(rank: int, nranks: int, allgather: Any) -> tw.Comm:
    return tw.Comm.portable(rank, nranks, allgather, timeout=5)


def raising(error: BaseException) -> Any:
    def allgather(mine: bytes) -> list[bytes]:
        raise error

    return allgather


def test_an_allgather_that_raises() -> None:
    """Its error is the cause of the one that is raised, which says what and where."""
    problem = ZeroDivisionError("no such denominator")
    with pytest.raises(tw.SystemFailure, match="allgather raised ZeroDivisionError on rank 1: no such denom") as seen:
        connect(1, 2, raising(problem))
    assert seen.value.__cause__ is problem
    refused = tw.PeerTimeout("rank 3 did not come")
    with pytest.raises(tw.PeerTimeout) as told:  # an error of this package is the error
        connect(1, 2, raising(refused))
    assert told.value is refused


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_an_allgather_that_is_interrupted(end: BaseException, capfd: Any) -> None:
    """Whoever wants to end the process does; ctypes would print it and go on."""
    with pytest.raises(type(end)) as seen:
        connect(0, 2, raising(end))
    assert seen.value is end
    assert "ctypes" not in capfd.readouterr().err
    callbacks.tell()  # nothing is left of it


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda mine: [mine], r"allgather returned 1 parts on rank 0; it must return a list of 2"),
        (lambda mine: [mine] * 3, r"allgather returned 3 parts on rank 0; it must return a list of 2"),
        (lambda mine: mine * 2, r"allgather returned a bytes on rank 0; it must return a list of 2"),
        (lambda mine: [mine, None], r"allgather returned a NoneType for rank 1 on rank 0; it must be bytes"),
        (lambda mine: [mine, mine.hex()], r"allgather returned a str for rank 1 on rank 0; it must be bytes"),
        (lambda mine: [mine, mine[:-1]], r"allgather returned \d+ bytes for rank 1 on rank 0; it must return the \d+ "),
        (lambda mine: [b"", mine * 2], r"allgather returned 0 bytes for rank 0 on rank 0; it must return the \d+ "),
        (
            lambda mine: [mine, np.frombuffer(mine, np.uint8)],
            r"allgather returned a ndarray for rank 1 on rank 0; it must be bytes",
        ),
    ],
)
def test_an_allgather_with_wrong_answers(answer: Any, text: str) -> None:
    """Nothing is read beyond what it has returned."""
    with pytest.raises(tw.InvalidArgument, match=text):
        connect(0, 2, answer)


def test_answers_that_are_bytes_of_another_type() -> None:
    meeting = Meeting(2)

    def answer(rank: int, mine: bytes) -> Any:
        first, second = meeting.allgather(rank, mine)
        return bytearray(first), memoryview(second)

    comms = connect_threads(2, lambda rank, _: connect(rank, 2, lambda mine: answer(rank, mine)))
    assert [comm.rank for comm in comms] == [0, 1]
    for comm in comms:
        comm.close()


def break_start(env: harness.Env) -> Any:
    """A dispatch whose collective cannot be started on rank 1."""
    group = tw.Group(env.comm, experts=2, top_k=2, hidden=1, max_tokens=1, dtype="float32", timeout=PATIENT)
    problem = ValueError("no such collective")
    if env.rank == 1:
        (channel,) = env.comm.carrier._channels.values()
        channel.start = raising(problem)
    handle = group.route(np.arange(2, dtype=np.int32)[None])
    with pytest.raises(tw.GroupFinished) as seen:
        group.dispatch(handle, np.ones((1, 1), np.float32))
    assert seen.value.__cause__ is (problem if env.rank == 1 else None)
    group.close()


def test_a_collective_that_cannot_be_started() -> None:
    """The group's error has what was raised as its cause."""
    world = harness.Threads("torch", 2)
    world.forget()
    world.run(break_start)
    world.forget()


def test_a_store_that_cannot_be_opened(monkeypatch: Any) -> None:
    """Is told at once: by the rank itself with the cause, and to its peers."""
    import torch.distributed as dist

    problem = RuntimeError("no ports left")

    def refuse(*_: Any, **__: Any) -> Any:
        raise problem

    def create(env: harness.Env) -> Any:
        with pytest.raises(tw.SystemFailure, match="rank 0 could not begin to connect") as seen:
            tw.Group(env.comm, experts=2, top_k=1, hidden=1, max_tokens=1)
        return seen.value.__cause__

    world = harness.Threads("torch", 2)
    world.forget()
    monkeypatch.setattr(dist, "TCPStore", refuse)
    assert world.run(create, timeout=30) == [problem, None]
    world.forget()


def test_no_names_are_needed(monkeypatch: Any) -> None:
    """Ranks meet by numbers: a host may know no name at all, "localhost" included."""
    import torch.distributed as dist

    made = dist.TCPStore
    hosts: list[str] = []

    def store(host: str, *arguments: Any, **keywords: Any) -> Any:
        hosts.append(host)
        return made(host, *arguments, **keywords)

    def create(env: harness.Env) -> None:
        tw.Group(env.comm, experts=2, top_k=1, hidden=1, max_tokens=1).close()

    world = harness.Threads("torch", 2)
    world.forget()
    monkeypatch.setattr(dist, "TCPStore", store)
    world.run(create)
    world.forget()
    assert len(hosts) == 2, "one opens a store, the other comes to it"
    for host in hosts:
        ipaddress.ip_address(host)


def test_what_is_kept_is_told_once() -> None:
    """An interrupt before an error; errors only as the cause of what fails by them, on the thread that they were of."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_int)
    error, interrupt = ValueError("first"), KeyboardInterrupt()
    assert callbacks.function(prototype, raising_nothing(error), 7)() == 7
    assert callbacks.function(prototype, raising_nothing(ValueError("second")), 8)() == 8
    callbacks.tell()
    assert callbacks.take_cause() is error and callbacks.take_cause() is None
    assert callbacks.function(prototype, raising_nothing(interrupt), 9)() == 9
    assert callbacks.take_cause() is None
    with pytest.raises(KeyboardInterrupt):
        callbacks.tell()
    callbacks.tell()
    with pytest.raises(tw.InvalidArgument) as seen:  # of another kind: no function's failure leads to it
        callbacks.keep(error)
        _native.check(1)
    assert seen.value.__cause__ is None and callbacks.take_cause() is error


def raising_nothing(error: BaseException) -> Any:
    def call() -> int:
        raise error

    return call


def test_every_function_of_a_carrier_is_guarded() -> None:
    """None that C calls lets an exception through to ctypes."""
    carrier = portable.Carrier()
    names = [name for name, kind in _carrier.Carrier._fields_[1:-1] if kind is ctypes.c_void_p]
    assert len(carrier._functions) == len(names) == 8
    start = carrier._functions[names.index("start")]
    assert start(None, 77, None) == -1  # no such channel
    assert isinstance(callbacks.take_cause(), KeyError)
