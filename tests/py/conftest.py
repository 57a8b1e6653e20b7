"""Fixtures of all Python tests."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import emulated_backend
import harness
import pytest
from hypothesis import settings

import tokenway as tw
from tokenway import _native

NO_TORCH = os.environ.get("TORCH") == "0"
STRICT = os.environ.get("TW_STRICT") == "1"


# A shell's job in the background begins with SIGINT ignored, one under nohup with SIGHUP; so would what tests start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    default = int(os.environ.get("ROUNDS", "600"))
    parser.addoption("--rounds", type=int, default=default, help="rounds of the soak test")
    parser.addoption(
        "--backend",
        action="append",
        choices=list(harness.BACKENDS),
        help="what the tests of behaviour run against (default cpu); may be given more than once",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported, and before anything calls CUDA."""
    if STRICT:  # what must pass is the same each time; elsewhere each run looks further
        settings.register_profile("strict", derandomize=True)
        settings.load_profile("strict")
    harness.CHOSEN[:] = config.getoption("--backend") or ["cpu"]
    if lacking := harness.prepare(harness.CHOSEN):
        raise pytest.UsageError(lacking)
    if (harness.ON_EMULATED | harness.ON_GPUS) & {*harness.CHOSEN}:
        os.environ.setdefault("EXAMPLES", "25")  # a device's time is dear, and the CPU's run has the many


def names(item: pytest.Item) -> list[str]:
    """Names of the fixtures that a test takes."""
    return getattr(item, "fixturenames", [])


def of_processes(item: pytest.Item) -> bool:
    """Whether a test's ranks are processes."""
    spec = getattr(item, "callspec", None)
    as_processes = spec is not None and spec.params.get("kind") == "processes"
    return as_processes or "processes" in names(item) or item.get_closest_marker("processes") is not None


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: tests that collect garbage need not look through it each time."""
    if not NO_TORCH and (harness.CHOSEN != ["cpu"] or any("torch" in names(item) for item in session.items)):
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", harness.CHOSEN, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if of_processes(item):
            item.add_marker("every_device")
        spec = getattr(item, "callspec", None)
        chosen = harness.BACKENDS.get(spec.params.get("backend", "")) if spec else None
        for needed in (mark.args[0] for mark in item.iter_markers("needs")):
            if chosen and needed in chosen.lacks:
                item.add_marker(pytest.mark.skip(reason=f"groups of {chosen.name} have no {needed}"))
    if "cpu" in harness.CHOSEN:
        return
    elsewhere = pytest.mark.skip(reason="is about the CPU backend, or about none: the run without --backend has it")
    for item in items:
        if "backend" not in names(item):
            item.add_marker(elsewhere)


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
def fabric() -> None:
    """What joins hosts: libfabric, with its provider tcp."""
    try:
        need("tcp" in _native.libfabric()[1].split(", "), "libfabric's provider tcp")
    except tw.Unsupported as error:
        need(False, str(error))


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


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Which backend; the suite is written for any."""
    return request.param


@pytest.fixture
def emulated_devices(backend: str) -> None:
    """Skips where ranks are not on emulated devices that reach each other's memory."""
    if backend != "emulated":
        pytest.skip(f"for emulated devices that reach each other, not the backend {backend}")


@pytest.fixture
def made_for(backend: str) -> Any:
    """The backend's class in the harness: tensors, comms, and what sets it apart."""
    return harness.BACKENDS[backend]


@pytest.fixture
def rows_in_place(made_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On emulated devices tensors are the CPU's: calls beside the exchange say that they are a device's."""
    if made_for.name != "emulated":
        return
    from tokenway import activation, microscaling, quantize

    honest = quantize.place_of

    def place(name: str, x: Any) -> tuple[int, int]:
        honest(name, x)
        return 0, emulated_backend.stream_of(0)

    for module in (activation, microscaling, quantize):
        monkeypatch.setattr(module, "place_of", place)


def enough(backend: str, kind: str, nranks: int) -> None:
    """Skips what has more ranks than a backend can have here."""
    most = harness.BACKENDS[backend].most_ranks(kind)
    if nranks > most:
        pytest.skip(f"{nranks} {kind} on the {backend} backend: there are devices for {most}")


@pytest.fixture
def world(kind: str, backend: str) -> Any:
    """world(n): n ranks."""

    def make(nranks: int) -> harness.Threads | harness.Processes:
        enough(backend, kind, nranks)
        return harness.WORLDS[kind](backend, nranks)

    make.most = harness.BACKENDS[backend].most_ranks(kind)  # type: ignore[attr-defined]
    return make


@pytest.fixture
def processes(backend: str) -> Any:
    """processes(n): n ranks, each a process."""

    def make(nranks: int) -> harness.Processes:
        enough(backend, "processes", nranks)
        return harness.Processes(backend, nranks)

    return make


@pytest.fixture
def threads(backend: str) -> Any:
    """threads(n): n ranks, each a thread."""

    def make(nranks: int) -> harness.Threads:
        enough(backend, "threads", nranks)
        return harness.Threads(backend, nranks)

    return make
