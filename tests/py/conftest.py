"""Fixtures of all Python tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import harness
import pytest

NO_TORCH = os.environ.get("TORCH") == "0"
STRICT = os.environ.get("TW_STRICT") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    default = int(os.environ.get("ROUNDS", "600"))
    parser.addoption("--rounds", type=int, default=default, help="rounds of the soak test")


def need(found: bool, what: str) -> None:
    """Skips where something is missing; with TW_STRICT=1 that is a failure."""
    if found:
        return
    if STRICT:
        pytest.fail(f"{what} is missing, and TW_STRICT=1 lets nothing be skipped")
    pytest.skip(f"{what} is missing")


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch. TORCH=0 leaves it out on purpose."""
    if NO_TORCH:
        pytest.skip("PyTorch is left out (TORCH=0)")
    need(importlib.util.find_spec("torch") is not None, "PyTorch")
    import torch

    return torch


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C compiler."""
    found = shutil.which(os.environ.get("CC", "cc"))
    need(found is not None, "a C compiler")
    return found or ""


@pytest.fixture(scope="session", autouse=True)
def _pool() -> Iterator[None]:
    """Ends the worker processes with the session."""
    yield
    harness.POOL.reset()


@pytest.fixture(params=["threads", "processes"])
def kind(request: pytest.FixtureRequest) -> str:
    """How ranks are run."""
    return request.param


@pytest.fixture(params=["cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Which backend; the suite is written for any."""
    return request.param


@pytest.fixture
def world(kind: str, backend: str) -> Any:
    """world(n): n ranks."""
    return lambda nranks: harness.WORLDS[kind](backend, nranks)


@pytest.fixture
def processes(backend: str) -> Any:
    """processes(n): n ranks, each a process."""
    return lambda nranks: harness.Processes(backend, nranks)
