"""Which GPUs a measurement was made on: from nvidia-smi, the driver and PyTorch."""

from __future__ import annotations

import ctypes
import re
import subprocess
from contextlib import suppress
from typing import Any

QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
_FIELDS = ("name", "driver", "sm_clock", "max_sm_clock", "memory_clock", "power_limit")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def device_count() -> int | str:
    """CUDA devices that this process may use, or why there are none. Asks the driver and makes no context: importing
    PyTorch only to hear that there is no GPU takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver on this machine (libcuda.so.1 cannot be loaded)"
    result = driver.cuInit(0)
    count = ctypes.c_int()
    result = result or driver.cuDeviceGetCount(ctypes.byref(count))
    if result == 100 or (not result and not count.value):  # CUDA_ERROR_NO_DEVICE
        return "the CUDA driver sees no device"
    return f"the CUDA driver does not start (error {result})" if result else count.value


def describe() -> dict[str, Any]:
    """GPUs, driver, link and clocks; what nvidia-smi does not tell is missing."""
    gpus = parse_query(_smi(f"--query-gpu={QUERY}", "--format=csv,noheader"))
    told: dict[str, Any] = {
        "gpu": gpus[0]["name"] if gpus else "unknown",
        "count": len(gpus),
        "driver": gpus[0]["driver"] if gpus else None,
        "link": parse_topology(_smi("topo", "-m")),
        "nvlink": parse_nvlink(_smi("nvlink", "-s")),
        "gpus": gpus,
    }
    return told


def results(ranks: int) -> dict[str, Any]:
    """What a run of so many ranks tells of its GPUs; to be asked by a process that has PyTorch loaded."""
    return {"gpu": describe() | {"used": min(ranks, int(device_count()))}, "versions": versions()}


def versions() -> dict[str, str]:
    """Of what comes with PyTorch; to be asked by a process that has it loaded."""
    import torch

    found = {"cuda_runtime": str(torch.version.cuda)}
    with suppress(AttributeError, RuntimeError):  # a build without NCCL
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def parse_query(text: str) -> list[dict[str, str]]:
    """A line per GPU, of QUERY's fields."""
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, line, strict=True)) for line in lines if len(line) == len(_FIELDS)]


def parse_topology(text: str) -> str:
    """How GPUs are linked with each other: "NV18", or several, or "" where nothing tells."""
    lines = [re.split(r"\t\s*", _COLOUR.sub("", line)) for line in text.splitlines()]
    heads = next((line for line in lines if len(line) > 1 and line[1].strip() == "GPU0"), [])
    columns = [i for i, head in enumerate(heads) if re.fullmatch(r"GPU\d+", head.strip())]
    links: list[str] = []
    for line in lines:
        if line is heads or not re.fullmatch(r"GPU\d+", line[0].strip()):
            continue
        links += [line[i].strip() for i in columns if i < len(line) and line[i].strip() not in ("X", "")]
    return ", ".join(dict.fromkeys(links))


def parse_nvlink(text: str) -> str:
    """Links and speed of the first GPU, as "18 x 26.562 GB/s"."""
    rates: list[str] = []
    for line in text.splitlines():
        if line.startswith("GPU ") and rates:
            break
        if match := re.match(r"\s+Link \d+: ([\d.]+ GB/s)", line):
            rates.append(match[1])
    return ", ".join(f"{rates.count(rate)} x {rate}" for rate in dict.fromkeys(rates))
