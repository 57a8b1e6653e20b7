"""How tests are shared out among the devices of this machine, and what each file of them took.

A test whose ranks are threads has enough with two devices, where ranks have peers on their own and on another one. So a
machine of more runs as many of them at once as it has pairs, each in a worker of pytest-xdist that sees one pair. What
takes a process for each device sees all of them, behind that (mark `every_device`). Tests that tell nothing of times
may have company on their devices besides: most of their time is the host's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

PAIR = 2


def device_names() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may say, of each device that this process sees."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count.value)])[: count.value]


@dataclass
class Share:
    """A run of pytest: which of the tests, in how many workers, and which devices these see (all if none)."""

    name: str
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def workers(count: int, company: int, shares: str = "", dist: str = "worksteal") -> tuple[list[str], dict[str, str]]:
    """Options and environment for so many pytest workers, `company` to each set of devices. dist: how these share out
    tests, as pytest-xdist has it."""
    if count * company < 2 or importlib.util.find_spec("xdist") is None:
        return [], {}
    return ["-n", str(count * company), "--dist", dist], {"TOKENWAY_TEST_SHARES": shares} if shares else {}


def shared_out(name: str, devices: list[str], company: int) -> Iterator[Share]:
    """The runs for tests of which some are marked `every_device`: one if there are no two pairs, or no pytest-xdist."""
    pairs = [",".join(devices[i : i + PAIR]) for i in range(0, len(devices) - PAIR + 1, PAIR)]
    options, environment = workers(len(pairs), company, ";".join(pairs))
    if len(pairs) < 2 or not options:
        yield Share(name, workers(1, company)[0])
        return
    yield Share(f"{name}: pairs", ["-m", "not every_device", *options], environment)
    yield Share(f"{name}: all devices", ["-m", "every_device", *workers(1, company)[0]])


# ---- what they took ------------------------------------------------------------------------------


@dataclass
class File:
    """The tests of a file in all runs."""

    tests: int = 0
    skipped: int = 0
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")


def of_files(reports: Path) -> dict[str, File]:
    """What pytest's reports (--junitxml) in a folder tell, by file."""
    files: dict[str, File] = defaultdict(File)
    for report in sorted(reports.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            one, seconds = files[case.get("classname", "").rpartition(".")[2]], float(case.get("time", "0"))
            one.tests += 1
            one.skipped += case.find("skipped") is not None
            one.seconds += seconds
            one.slowest = max(one.slowest, (seconds, case.get("name", "")))
    return files


def table(files: dict[str, File]) -> Iterator[str]:
    """Lines, the file that took longest first. Seconds are those of workers: several pass at once."""
    if not files:
        return
    yield f"{'file':<34}{'tests':>7}{'skipped':>9}{'seconds':>9}  slowest"
    for name, one in sorted(files.items(), key=lambda item: -item[1].seconds):
        slowest = f"{one.slowest[0]:.1f}  {one.slowest[1]}"
        yield f"{name:<34}{one.tests:>7}{one.skipped:>9}{one.seconds:>9.1f}  {slowest[:90]}"
    every = files.values()
    tests, skipped = sum(one.tests for one in every), sum(one.skipped for one in every)
    yield f"{'all':<34}{tests:>7}{skipped:>9}{sum(one.seconds for one in every):>9.1f}"
