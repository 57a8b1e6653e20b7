"""What moves the blocks of portable groups on devices, where communicators do not end as graphs still hold collectives
of theirs: process groups are pretended, which wait as NCCL's do."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from harness import AT_ONCE, HANGS

from tokenway import staged

NRANKS, DEVICE = 2, 0


class Done:
    def wait(self) -> None:
        """It has ended."""


class Group:
    """A process group that ends when its graphs have been freed."""

    def __init__(self, ends: bool = True):
        self.told: list[str] = []
        self.freed = threading.Event()
        self.ended = threading.Event()
        if ends:
            self.freed.set()

    def alltoall_base(self, to: Any, source: Any, *_: Any) -> Done:
        to.copy_(source)
        return Done()

    def _end(self, how: str) -> None:
        self.told.append(how)
        self.freed.wait(HANGS)
        self.ended.set()

    def abort(self) -> None:
        self._end("abort")

    def shutdown(self) -> None:
        self._end("shutdown")


@pytest.fixture
def channel(torch, monkeypatch) -> Any:
    """Makes a channel of groups."""
    device = SimpleNamespace(device=lambda _: nullcontext())
    memory = SimpleNamespace(
        torch=SimpleNamespace(cuda=device, ones=torch.ones, zeros_like=torch.zeros_like, uint8=torch.uint8),
        device=torch.device("cpu"),
        coalesces=False,
        waits=False,
        settle=lambda: None,
    )
    monkeypatch.setattr(staged, "on_device", lambda _: memory)
    monkeypatch.setattr(staged, "CALLING_OFF", 0.2)
    monkeypatch.setattr(staged, "CLOSING", 0.2)
    return lambda *groups: staged.DeviceChannel(SimpleNamespace(device=DEVICE, nranks=NRANKS), list(groups))


def test_calling_off_does_not_wait_for_graphs(channel) -> None:
    """Every channel's communicator is told, also behind one whose graphs live on; it ends when these are freed."""
    groups = Group(ends=False), Group(ends=False), Group()
    made = channel(*groups)
    begin = time.monotonic()
    made.abort()
    made.close(False)
    assert time.monotonic() - begin < AT_ONCE
    assert groups[2].ended.wait(AT_ONCE)
    for group in groups:
        assert group.told == ["abort"]
    assert not groups[0].ended.is_set()
    groups[0].freed.set()
    assert groups[0].ended.wait(AT_ONCE)
    groups[1].freed.set()


def test_closing_does_not_wait_for_graphs(channel, caplog) -> None:
    """And says what the communicators wait for."""
    held, free = Group(ends=False), Group()
    made = channel(held, free)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "tokenway"):
        made.close(True)
    assert time.monotonic() - begin < AT_ONCE
    assert held.told == free.told == ["shutdown"] and free.ended.is_set() and not held.ended.is_set()
    assert "CUDA graphs" in caplog.text
    held.freed.set()
    assert held.ended.wait(AT_ONCE)


def test_closing_waits_for_communicators(channel, caplog) -> None:
    groups = Group(), Group()
    channel(*groups).close(True)
    assert all(group.ended.is_set() for group in groups) and not caplog.text


def test_a_communicator_that_fails_to_end(channel, caplog) -> None:
    """Is told in the log, and keeps no other from ending."""

    class Broken(Group):
        def shutdown(self) -> None:
            raise RuntimeError("no such communicator")

    other = Group()
    channel(Broken(), other).close(True)
    assert other.ended.is_set() and "no such communicator" in caplog.text
