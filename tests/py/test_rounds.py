"""The soak, short: see soak.py for the long one."""

from __future__ import annotations

import os

import pytest
import soak

SEED = int(os.environ.get("SEED", "20"))


@pytest.mark.processes
@pytest.mark.slow
def test_random_rounds(request) -> None:
    rounds = request.config.getoption("--rounds")
    assert soak.soak(rounds, SEED) == rounds


@pytest.mark.processes
def test_wrap_of_the_step(monkeypatch) -> None:
    """Steps count past 2^32 as past any other number."""
    import harness

    monkeypatch.setenv("TOKENWAY_FIRST_STEP", str(2**32 - 9))
    harness.POOL.reset()  # workers that read it
    try:
        soak.soak(100, SEED, ranks=(3,))
    finally:
        harness.POOL.reset()


@pytest.mark.processes
@pytest.mark.slow
def test_killed_and_stopped_ranks() -> None:
    soak.suffer(kills=4, stops=2, seed=SEED)
