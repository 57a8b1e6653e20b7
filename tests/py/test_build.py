"""The library as it was built: what it needs of a machine, and what it says where there is no CUDA driver."""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import conftest
import pytest
from harness import caught

import tokenway as tw
from tokenway import _native, info

LIBRARY = str(_native.library_path().resolve())
BUILT_WITHOUT = "this library was built without CUDA"
NO_DEVICE = re.compile(r"no CUDA device can be used: \w.*")
DRIVER = "libcuda.so"


@pytest.fixture(scope="module")
def refusal() -> str:
    """What a library with CUDA says here, where no device can be used."""
    outcome = caught(lambda: [comm.close() for comm in tw.local_comms(1, devices=[0])])
    if outcome[0] == "twSuccess":
        pytest.skip("there is a CUDA device")
    result, sentence = outcome[:2]
    assert result == "twUnsupported", outcome
    if sentence == BUILT_WITHOUT:
        if conftest.STRICT and shutil.which("nvcc") and os.environ.get("TOKENWAY_CUDA") != "OFF":
            pytest.fail("nvcc is here, but the library was built without CUDA; TW_STRICT=1 wants all of it")
        pytest.skip("the library was built without CUDA")
    return sentence


def lines_of(*command: str) -> list[str]:
    conftest.need(shutil.which(command[0]) is not None, command[0])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_needs_neither_driver_nor_runtime() -> None:
    """With CUDA too: the runtime is inside, the driver is looked up when a device is asked for."""
    needed = [line for line in lines_of("readelf", "-d", LIBRARY) if "NEEDED" in line]
    assert needed, "readelf -d names no library at all"
    found = lines_of("ldd", LIBRARY)
    for line in needed + found:
        assert not re.search(r"libcuda|libcudart|libnv|libfabric|not found", line), line
    assert not any("RUNPATH" in line or "RPATH" in line for line in lines_of("readelf", "-d", LIBRARY))


def test_exports_its_own_functions_alone() -> None:
    """What is linked statically, the CUDA runtime above all, must not meet another copy of itself in the process."""
    names = [line.split()[-1] for line in lines_of("nm", "-D", "--defined-only", LIBRARY)]
    assert "twVersion" in names
    assert [name for name in names if not re.match(r"tw[A-Z]", name)] == []


def test_loading_leaves_the_driver_alone(refusal: str) -> None:
    code = f"import ctypes; ctypes.CDLL({LIBRARY!r}).twVersion(); print({DRIVER!r} in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_refusal_without_a_driver(refusal: str) -> None:
    assert NO_DEVICE.fullmatch(refusal), refusal
    if ctypes.util.find_library("cuda") is None:
        assert "driver" in refusal, refusal


REFUSED = {
    "several ranks": lambda: tw.local_comms(2, devices=[0, 0]),
    "a process": lambda: tw.Comm.cuda(0, 2, "test-build", device=0, timeout=60),
    "no number": lambda: tw.Comm.cuda(0, 2, "test-build", timeout=60),
}


@pytest.mark.parametrize("what", REFUSED)
def test_all_ways_to_a_device_say_the_same(refusal: str, what: str) -> None:
    """At once: nobody waits for peers."""
    outcome: Any = caught(REFUSED[what])
    assert outcome[:2] == ("twUnsupported", refusal)


def test_the_cpu_is_not_affected(refusal: str) -> None:
    """After refusals as before them."""
    assert info._nvlink_backend() == f"not available: {refusal}"
    (comm,) = tw.local_comms(1)
    with tw.Group(comm, experts=2, top_k=1, hidden=4, max_tokens=2) as group:
        assert group.nranks == 1
    comm.close()
