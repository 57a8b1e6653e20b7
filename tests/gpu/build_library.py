#!/usr/bin/env python3
"""Builds the library for the GPUs of this machine, or says in a sentence what is missing.

    python3 tests/gpu/build_library.py --check              is there a GPU, and nvcc where it is needed?
    python3 tests/gpu/build_library.py --into build/gpu     builds build/gpu/libtokenway.so

TOKENWAY_LIBRARY in the environment names a library that is there already: nothing is built then. Needs
no package but Python's own.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLKIT = Path("/usr/local/cuda/bin/nvcc")


def missing(library: str) -> str | None:
    """What keeps GPU tests from running here, as a sentence; None if nothing does."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "a GPU is needed, and this machine has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "a GPU is needed, and the NVIDIA driver of this machine finds none"
    if library:
        return None if Path(library).is_file() else f"TOKENWAY_LIBRARY is {library}, and there is no such file"
    if nvcc() is None:
        return "nvcc, the CUDA compiler, is needed to build the library; or name a built one: TOKENWAY_LIBRARY=..."
    return None


def nvcc() -> str | None:
    """The CUDA compiler: CUDACXX, the path's, or the usual place's."""
    named = os.environ.get("CUDACXX")
    return shutil.which(named or "nvcc") or (str(TOOLKIT) if TOOLKIT.is_file() and not named else None)


def tool(name: str) -> str | None:
    """A program of .venv, else the path's."""
    own = ROOT / ".venv" / "bin" / name
    return str(own) if own.is_file() else shutil.which(name)


def build(into: Path) -> int:
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None:
        print("cmake >= 3.30 is needed to build the library: pip install cmake", file=sys.stderr)
        return 1
    configure = [cmake, "-S", str(ROOT), "-B", str(into), "--log-level=NOTICE"]
    configure += ["-DTOKENWAY_CUDA=ON", "-DTOKENWAY_TESTS=OFF", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    configure += [f"-DCMAKE_CUDA_COMPILER={nvcc()}"]
    if ninja:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    return subprocess.call(configure) or subprocess.call([cmake, "--build", str(into), "--parallel"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu", help="folder of the build")
    args = parser.parse_args()
    library = os.environ.get("TOKENWAY_LIBRARY", "")
    lacking = missing(library)
    if lacking:
        print(lacking, file=sys.stderr)
        return 1
    return 0 if args.check or library else build(args.into)


if __name__ == "__main__":
    sys.exit(main())
