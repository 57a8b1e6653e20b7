"""What the package tells of libfabric, which the engine between hosts needs. tests/cc tests the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tokenway as tw
from tokenway import _native, info

PATH = os.pathsep.join(sys.path)
ASKS = "from tokenway import _native; print(*_native.libfabric())"
INTERRUPTED = f"import os, signal; {ASKS}; os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture
def version() -> str:
    """Of the libfabric that is here."""
    try:
        return _native.libfabric()[0]
    except tw.Unsupported as error:
        pytest.skip(str(error))


def run(code: str, folder: Path | None = None) -> list[str]:
    """What a process that finds libraries in a folder first says, in lines."""
    env = os.environ | {"PYTHONPATH": PATH} | ({"LD_LIBRARY_PATH": str(folder)} if folder else {})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()


def test_info_tells_of_it() -> None:
    facts = info.collect()
    said = facts["engines"]["libfabric"]
    section = info.text(facts).split("\nbetween hosts\n")[1].split("\n\n")[0]
    assert ["libfabric", said] in [line.split(maxsplit=1) for line in section.splitlines()]
    assert section.splitlines()[-1].split(maxsplit=1) == ["NCCL", facts["engines"]["NCCL"]]
    assert said.startswith("not available: ") or ", providers: " in said


def test_info_tells_of_the_backend(monkeypatch) -> None:
    """It is there where libfabric's tcp works, and else there is a reason."""
    said = []
    for found in (("1.17", "tcp, shm"), ("1.17", "shm"), tw.Unsupported("there is no libfabric")):

        def libfabric(found: Any = found) -> tuple[str, str]:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(_native, "libfabric", libfabric)
        said.append(info.collect()["backends"]["fabric"])
    assert said[0].startswith("available (on the CPU; ")
    assert said[1] == "not available: libfabric's provider tcp does not work here"
    assert said[2] == "not available: there is no libfabric"


def test_its_version_and_providers(version) -> None:
    assert int(version.split(".")[0]) >= 1
    assert "tcp" in _native.libfabric()[1].split(", ")


def test_another_library_of_its_name(version, compiler, tmp_path) -> None:
    (tmp_path / "other.c").write_text("int something(void) { return 1; }")
    options = ["-shared", "-fPIC", "-Wl,-soname,libfabric.so.1", "-o", tmp_path / "libfabric.so.1"]
    subprocess.run([compiler, tmp_path / "other.c", *options], check=True)
    assert run(ASKS, tmp_path)[-1] == "tokenway.errors.Unsupported: libfabric.so.1 is older than 1.11 here"


def test_no_library_that_can_be_loaded(version, tmp_path) -> None:
    (tmp_path / "libfabric.so.1").write_text("no library")
    assert "libfabric.so.1 cannot be loaded here" in run(ASKS, tmp_path)[-1]


def test_signals_stay_pythons(version) -> None:
    """Some of what libfabric is linked with takes SIGINT for itself when it is loaded, and ends the process."""
    assert run(INTERRUPTED)[-1] == "KeyboardInterrupt"
