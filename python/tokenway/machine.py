"""The machine that this process runs on, the versions of what it uses, and the commit that it is run from."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from tokenway import _native

DEFAULT_CACHE = 32 << 20  # where the kernel does not tell the size of the caches


def describe() -> dict[str, Any]:
    """CPU, cores, last-level cache, memory, kernel."""
    memory = memory_info()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "usable_cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": memory.get("MemTotal", 0),
        "memory_available_bytes": memory.get("MemAvailable", 0),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "virtual": "hypervisor" in _cpu_field("flags").split(),
    }


def versions() -> dict[str, str]:
    """Of this library, of Python and of the packages that tensors are made with, where present."""
    found = {"tokenway": _native.VERSION_TEXT, "python": platform.python_version()}
    for name in ("numpy", "ml_dtypes", "torch"):
        version = package_version(name)
        if version:
            found[name] = version
    return found


def package_version(name: str) -> str | None:
    """Of an installed package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The git commit that this package is run from, with "-dirty" if files differ from it."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here)]
    try:
        # A package installed below somebody else's checkout is not of that commit.
        tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(tracked, check=True, capture_output=True, timeout=10)
        head = subprocess.run([*git, "rev-parse", "HEAD"], **_RUN).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], **_RUN).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-dirty" if changed else "")


_RUN: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 10}


def cpu_model() -> str:
    """What the kernel calls it."""
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_field(name: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core, from sysfs; DEFAULT_CACHE if it is not told."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
        except (OSError, ValueError):
            continue
    return max(sizes, default=DEFAULT_CACHE)


def memory_info() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            number, *unit = value.split()
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    except (OSError, ValueError):
        pass
    return found


def measured() -> dict[str, Any]:
    """What is written of a measurement beside its results: when, of which commit, where, with which software."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe(),
        "versions": versions(),
    }
