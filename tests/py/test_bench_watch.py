"""A benchmark that comes to no end is ended, and says where each rank was."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from harness import HANGS, PATIENT

import tokenway as tw
import tokenway.launch
from tokenway.bench import runner, timing
from tokenway.bench.control import NOTE, Control
from tokenway.bench.progress import Progress
from tokenway.bench.watch import EXIT, Watch
from tokenway.launch import Ranks

PATIENCE = 4.0


def stuck(how: str) -> None:
    """Rank 1 hangs in a capture; rank 0 waits for it at the gate."""
    control = Control(tw.connect())
    with Watch(control, PATIENCE) as watch:
        progress = Progress(1, False, watch)
        progress.doing("tiny, 128 tokens")
        if control.rank == 0:
            progress.at("timing tokenway, round 0")
            control.gate()
        progress.at("capturing pair of tokenway")
        if how == "waits":
            threading.Event().wait(600)
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("how", ["waits", "holds the interpreter"])
def test_a_rank_that_hangs(how, capfd) -> None:
    with Ranks(stuck, 2, how) as ranks:
        outcomes = ranks.wait(HANGS)
    assert all(outcome is not None and outcome.exitcode == EXIT for outcome in outcomes), outcomes
    told = capfd.readouterr().err
    where = (
        "rank 0 at tiny, 128 tokens: timing tokenway, round 0; rank 1 at tiny, 128 tokens: capturing pair of tokenway"
    )
    assert f"tokenway bench: rank 0 gave no sign for 4 s: {where}" in told
    assert (f"rank 1 gave no sign for 4 s: {where}" in told) == (how == "waits")
    assert "in stuck" in told, "where its threads are"


def lively() -> float:
    """A run of many short phases, each far shorter than the patience and all together longer."""
    control = Control(tw.connect())
    begin = time.monotonic()
    with Watch(control, PATIENCE) as watch:
        for number in range(12):
            watch.doing(f"phase {number}")
            time.sleep(PATIENCE / 8)
    time.sleep(PATIENCE * 1.5)  # nothing watches any more
    control.close()
    return time.monotonic() - begin


@pytest.mark.long
@pytest.mark.processes
def test_a_rank_that_goes_on() -> None:
    with Ranks(lively, 1) as ranks:
        (outcome,) = ranks.wait(HANGS)
        assert outcome is not None and outcome.ok and outcome.value >= 3 * PATIENCE, outcome


def one_fails() -> None:
    control = Control(tw.connect())
    control.note("tiny: freeing the graphs")
    control.allgather(None)

    def measure() -> Any:
        if control.rank == 1:
            raise RuntimeError("no more graphs")
        return control.allgather(None)

    runner.measured(measure, control, Progress(0, False), ExitStack())


@pytest.mark.processes
def test_a_rank_that_fails_says_where(capfd, monkeypatch) -> None:
    monkeypatch.setattr(tokenway.launch, "_CULPRIT", PATIENT)  # which has as long as it takes to fail
    with Ranks(one_fails, 2) as ranks:
        outcomes, culprit = ranks.wait_or_fail(HANGS)
        assert culprit == 1 and "no more graphs" in outcomes[1].error
    assert "rank 1 failed: rank 0 at tiny: freeing the graphs; rank 1 at tiny: freeing" in capfd.readouterr().err


def test_notes() -> None:
    control = Control(tw.local_comms(1)[0])
    assert control.notes() == [""] and control.where() == "rank 0 at its start"
    control.note("x" * 500)
    assert control.notes() == ["x" * NOTE]
    control.note("e" * (NOTE - 1) + "é")  # cut in the middle of a letter
    assert len(control.notes()[0]) == NOTE
    before = control.gate()
    control.note("short")
    assert control.notes() == ["short"] and control.gate() > before
    control.close()


def test_what_is_timed_is_told() -> None:
    control, told = Control(tw.local_comms(1)[0]), []
    subjects = [timing.Pair(name, lambda: None) for name in ("one", "two")]
    timing.rounds_of(subjects, control, rounds=2, iterations=4, warmup=1, told=told.append)
    assert told == [f"timing {name}, round {number}" for number in (0, 1) for name in ("one", "two") for _ in range(3)]
    control.close()
