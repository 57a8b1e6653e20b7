"""The soak, short: see soak.py for the long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import harness
import pytest
import soak

SEED = int(os.environ.get("SEED", "20"))


def possible(backend: str, ranks: tuple[int, ...], kind: str = "processes") -> tuple[int, ...]:
    """The numbers of ranks that a backend can have here; at least that of all its devices."""
    most = harness.BACKENDS[backend].most_ranks(kind)
    return tuple(n for n in ranks if n <= most) or (most,)


@pytest.mark.processes
@pytest.mark.slow
def test_random_rounds(request, backend) -> None:
    rounds = request.config.getoption("--rounds")
    assert soak.soak(rounds, SEED, possible(backend, (2, 3, 4)), backend=backend) == rounds


@pytest.mark.slow
def test_random_rounds_on_threads(request, backend) -> None:
    rounds = request.config.getoption("--rounds") // 4
    ranks = possible(backend, (2, 3, 4), "threads")
    assert soak.soak(rounds, SEED, ranks, backend=backend, kind="threads") == rounds


@pytest.mark.processes
def test_wrap_of_the_step(monkeypatch, backend) -> None:
    """Steps count past 2^32 as past any other number."""
    monkeypatch.setenv("TOKENWAY_FIRST_STEP", str(2**32 - 9))
    harness.POOL.reset()  # workers that read it
    try:
        soak.soak(100, SEED, possible(backend, (3,)), backend=backend)
    finally:
        harness.POOL.reset()


def shared(rounds: int, limit: float) -> subprocess.CompletedProcess[str]:
    """So many rounds, which processes share, on ranks that are threads."""
    line = [sys.executable, soak.__file__, "--rounds", str(rounds), "--workers", "2", "--limit", str(limit)]
    line += ["--kind", "threads", "--seed", str(SEED), "--ranks", "2"]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_processes_share_rounds() -> None:
    """The last line says how many have passed; all of them, or the exit code tells."""
    ran = shared(31, harness.HANGS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].endswith("31 of 31 rounds passed")
    ran = shared(10**6, 3)
    assert ran.returncode == 1
    assert re.search(r" \d+ of 1000000 rounds passed$", ran.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.slow
def test_killed_and_stopped_ranks(processes, backend) -> None:
    processes(2)  # where there can be so many
    kills, stops = (4, 2) if backend == "cpu" else (2, 1)  # processes that use a device take seconds to start
    soak.suffer(kills, stops, SEED, backend=backend)
