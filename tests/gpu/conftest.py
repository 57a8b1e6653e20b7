"""Fixtures of the tests that need GPUs. They call asynchronously: TOKENWAY_BLOCKING is off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The harness, the cases and the player are those of the tests of behaviour.
sys.path.append(str(Path(__file__).parents[1] / "py"))

import device_backend
import harness

device_backend.prepare(blocking=False)
MISSING = device_backend.missing()
if MISSING and "PyTorch is missing" in MISSING:
    collect_ignore_glob = ["test_*.py"]  # they import it


def pytest_report_header() -> str:
    if MISSING:
        return f"tests/gpu: all is skipped: {MISSING}"
    import torch

    names = [torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count())]
    return f"tests/gpu: {len(names)} devices: {', '.join(names)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session", autouse=True)
def _pool() -> Iterator[None]:
    """Ends the worker processes with the session."""
    yield
    harness.POOL.reset()


@pytest.fixture(params=["lines", "bulk"])
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How few tokens travel; read when a group is made."""
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", {"lines": "-1", "bulk": "0"}[request.param])
    return request.param


@pytest.fixture(scope="session")
def devices() -> int:
    """How many there are."""
    return harness.BACKENDS["nvlink"].device_count()


@pytest.fixture(scope="session")
def two_devices(devices: int) -> None:
    if devices < 2:
        pytest.skip(f"it needs two GPUs; there are {devices}")


@pytest.fixture(scope="session")
def pair() -> Any:
    """Two ranks, each a process with a device of its own."""
    most = harness.BACKENDS["nvlink"].most_ranks("processes")
    if most < 2:
        pytest.skip(f"two processes need two GPUs, or to take turns on one ({device_backend.PROCESSES}=2)")
    return harness.Processes("nvlink", 2)
