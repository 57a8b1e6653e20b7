"""The soak, short: see soak.py for the long one."""

from __future__ import annotations

import os

import harness
import pytest
import soak

SEED = int(os.environ.get("SEED", "20"))


def possible(backend: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of processes that a backend can have here; at least that of all its devices."""
    most = harness.BACKENDS[backend].most_ranks("processes")
    return tuple(n for n in ranks if n <= most) or (most,)


@pytest.mark.processes
@pytest.mark.slow
def test_random_rounds(request, backend) -> None:
    rounds = request.config.getoption("--rounds")
    assert soak.soak(rounds, SEED, possible(backend, (2, 3, 4)), backend=backend) == rounds


@pytest.mark.processes
def test_wrap_of_the_step(monkeypatch, backend) -> None:
    """Steps count past 2^32 as past any other number."""
    monkeypatch.setenv("TOKENWAY_FIRST_STEP", str(2**32 - 9))
    harness.POOL.reset()  # workers that read it
    try:
        soak.soak(100, SEED, possible(backend, (3,)), backend=backend)
    finally:
        harness.POOL.reset()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.slow
def test_killed_and_stopped_ranks(processes, backend) -> None:
    processes(2)  # where there can be so many
    kills, stops = (4, 2) if backend == "cpu" else (2, 1)  # processes that use a device take seconds to start
    soak.suffer(kills, stops, SEED, backend=backend)
