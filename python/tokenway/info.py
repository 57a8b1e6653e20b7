"""What `tokenway info` tells: this installation, and what this machine can do."""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import byref
from pathlib import Path
from typing import Any

from tokenway import _header, _native, cuda, machine, portable
from tokenway.comm import local_comms
from tokenway.errors import TokenwayError

AVAILABLE = "available"

PACKAGES = {
    "numpy": "required",
    "ml_dtypes": "required",
    "torch": "tensors, CUDA, process groups, the gloo baselines",
    "matplotlib": "bench --plot",
    "rich": "tables and progress of bench",
}

# What launchers set, and `connect` reads.
LAUNCHERS = {
    "TOKENWAY_RANK": "this rank, set by `tokenway launch`",
    "TOKENWAY_NRANKS": "all ranks, set by `tokenway launch`",
    "TOKENWAY_ADDRESS": "the name they meet at, set by `tokenway launch`",
    "RANK": "this rank, set by torchrun",
    "WORLD_SIZE": "all ranks, set by torchrun",
    "LOCAL_WORLD_SIZE": "ranks on this host, set by torchrun",
    cuda.LOCAL_RANK: "this rank on this host, set by torchrun and `tokenway launch`: its CUDA device for connect()",
}

# What the Python package reads itself.
PYTHON_SIDE = {
    "TOKENWAY_LIBRARY": "the library that the Python package loads",
    cuda.NVTX: "1: calls on CUDA devices and garbage collections are NVTX ranges; read when the package is imported",
}

# What the CPU backend asks of the kernel: numbers are the same on x86-64 where they differ else.
_SYSCALLS = {
    "x86_64": {"pidfd_open": 434, "futex": 202},
    "aarch64": {"pidfd_open": 434, "futex": 98},
}


def collect() -> dict[str, Any]:
    """Everything that is told, as plain data."""
    here = machine.describe()
    memory = machine.memory_info()
    here["huge_pages"] = _transparent_huge_pages()
    here["huge_page_bytes"] = memory.get("Hugepagesize", 0)
    here["huge_pages_free"] = memory.get("HugePages_Free", 0)
    nvlink = _nvlink_backend()
    return {
        "version": _native.VERSION_TEXT,
        "library": str(_native.library_path()),
        "python": platform.python_version(),
        "commit": machine.commit(),
        "backends": {
            "cpu": _cpu_backend(),
            "fabric": _fabric_backend(),
            "nvlink": nvlink,
            "gin": _gin_backend(nvlink),
            "torch": _portable_backend(),
        },
        "machine": here,
        "kernel": kernel_features(),
        "cuda": cuda_devices() if nvlink == AVAILABLE else [],
        "fabric": fabric() if nvlink == AVAILABLE else [],
        "engines": {"libfabric": _libfabric(), "NCCL": _nccl()},
        "packages": {name: {"version": machine.package_version(name), "use": use} for name, use in PACKAGES.items()},
        "environment": _environment(),
    }


def _environment() -> list[dict[str, Any]]:
    known = [{"name": name, "value": value, "doc": doc} for name, value, doc in _native.environment()]
    others = PYTHON_SIDE | LAUNCHERS
    return known + [{"name": name, "value": os.environ.get(name), "doc": doc} for name, doc in others.items()]


def kernel_features() -> dict[str, bool]:
    """Whether memfd, pidfd and futex can be used here."""
    numbers = _SYSCALLS.get(platform.machine(), {})
    return {
        "memfd": _memfd(),
        "pidfd": "pidfd_open" in numbers and _pidfd(),
        "futex": "futex" in numbers and _futex(numbers["futex"]),
    }


def _cpu_backend() -> str:
    problem = _memfd_problem()
    return AVAILABLE if problem is None else f"not available: {problem}, which windows are made of"


def _fabric_backend() -> str:
    """The CPU's between hosts, which takes libfabric's tcp unless it is told otherwise."""
    problem = _memfd_problem()
    try:
        if problem is None and "tcp" not in _native.libfabric()[1].split(", "):
            problem = "libfabric's provider tcp does not work here"
    except TokenwayError as error:
        problem = str(error)
    if problem is not None:
        return f"not available: {problem}"
    return f"{AVAILABLE} (on the CPU; connect() takes it where ranks are not all on one host, if it joins them)"


def _nvlink_backend() -> str:
    """Asks the library for a comm of one rank on the first device, and tells what it says if there is none."""
    try:
        for comm in local_comms(1, devices=[0], timeout=10):
            comm.close()
    except TokenwayError as error:
        return f"not available: {error}"
    return AVAILABLE


def _gin_backend(nvlink: str) -> str:
    """Whether there are devices, and an NCCL that is new enough; NICs are looked for by `connect`."""
    if nvlink != AVAILABLE:
        return nvlink
    problem = _nccl()
    if problem.startswith("not available"):
        return problem
    return f"{AVAILABLE} (over NCCL {problem}, where it finds NICs that reach all hosts: connect() tells)"


def _portable_backend() -> str:
    problem = portable.missing()
    if problem is None:
        return f"{AVAILABLE} (on the CPU; connect() takes it where ranks of several hosts have nothing else)"
    return f"not available: {problem}"


def _libfabric() -> str:
    """What is known of the library that the engine between hosts is made of."""
    try:
        version, providers = _native.libfabric()
    except TokenwayError as error:
        return f"not available: {error}"
    return f"{version}, providers: {providers or 'none of those that are known'}"


def _nccl() -> str:
    """What is known of the library that joins GPUs of several hosts."""
    try:
        return _native.nccl()
    except TokenwayError as error:
        return f"not available: {error}"


def cuda_devices() -> list[dict[str, Any]]:
    """The CUDA devices of this machine, as PyTorch knows them: none where it cannot be imported."""
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        reached = [peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)]
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "processors": properties.multi_processor_count,
                "reaches": reached,
            }
        )
    return found


def fabric() -> list[dict[str, Any]]:
    """What the platform says of each CUDA device's fabric handles, which ranks of several hosts need, and of its NVLink
    domain."""
    handles = {code: name for name, code in _header.HANDLES.items()}
    domains = {code: name for name, code in _header.DOMAINS.items()}
    found: list[dict[str, Any]] = []
    told = _header.Fabric()
    while _native.lib.twDeviceFabric(len(found), byref(told)) == 0:
        named = domains[told.domain] == "named"
        found.append(
            {
                "index": len(found),
                "handles": handles[told.handles],
                "refusal": told.refusal,
                "domain": domains[told.domain],
                "cluster": bytes(told.cluster).hex() if named else None,
                "clique": told.clique if named else None,
            }
        )
    return found


def _fabric_text(device: dict[str, Any]) -> str:
    handles = {
        "fabric": "granted",
        "refused": f"refused (CUresult {device['refusal']}; 800: this process has no IMEX channel)",
        "descriptors": "not known to the device or its driver",
    }[device["handles"]]
    domain = {
        "unknown": "NVML tells of no NVLink domain",
        "none": "no NVLink domain beyond this host",
        "named": f"NVLink domain: cluster {device['cluster']}, clique {device['clique']}",
    }[device["domain"]]
    return f"fabric handles {handles}; {domain}"


def _fabric_lines(devices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Devices that are alike have one line."""
    alike: dict[str, list[int]] = {}
    for device in devices:
        alike.setdefault(_fabric_text(device), []).append(device["index"])
    return [(", ".join(f"cuda:{index}" for index in indices), text) for text, indices in alike.items()]


def _memfd() -> bool:
    return _memfd_problem() is None


def _memfd_problem() -> str | None:
    try:
        os.close(os.memfd_create("tokenway-info"))
    except OSError as error:
        return f"memfd_create fails here ({error.strerror})"
    return None


def _pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _futex(number: int) -> bool:
    """Wakes nobody at an address of our own: 0 waiters, or an error."""
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    wake, nobody = 1, None
    return bool(libc.syscall(number, ctypes.byref(word), wake, 1, nobody, nobody, 0) == 0)


def _transparent_huge_pages() -> str:
    """The setting for shared memory: [in brackets] among the choices."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        chosen = [word for word in path.read_text().split() if word.startswith("[")]
    except OSError:
        return "unknown"
    return chosen[0].strip("[]") if chosen else "unknown"


def _size(value: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << shift:
            return f"{value / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{value} B"


def _device_line(device: dict[str, Any]) -> tuple[str, str]:
    reached = ", ".join(f"cuda:{peer}" for peer in device["reaches"])
    return (
        f"cuda:{device['index']}",
        f"{device['name']}, {device['processors']} SMs, {_size(device['memory_bytes'])}, compute capability "
        f"{device['capability']}, reaches the memory of {reached or 'no other'}",
    )


def text(facts: dict[str, Any]) -> str:
    """The same for people."""
    m = facts["machine"]
    cores = f"{m['usable_cores']} usable of {m['cores']}"
    pages = f"shared memory: {m['huge_pages']}; {m['huge_pages_free']} reserved of "
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        (
            "",
            [
                ("tokenway", facts["version"] + (f" ({facts['commit']})" * bool(facts["commit"]))),
                ("library", facts["library"]),
                ("python", facts["python"]),
            ],
        ),
        ("backends", list(facts["backends"].items())),
        *([("cuda devices", [_device_line(d) for d in facts["cuda"]])] if facts["cuda"] else []),
        ("between hosts", [*_fabric_lines(facts["fabric"]), *facts["engines"].items()]),
        (
            "machine",
            [
                ("cpu", m["cpu"] + (" (virtual machine)" if m["virtual"] else "")),
                ("cores", cores),
                ("last-level cache", _size(m["last_level_cache_bytes"])),
                (
                    "memory",
                    f"{_size(m['memory_available_bytes'])} available of {_size(m['memory_bytes'])}",
                ),
                ("huge pages", pages + _size(m["huge_page_bytes"])),
                ("kernel", m["kernel"]),
                *((name, "yes" if there else "NO") for name, there in facts["kernel"].items()),
            ],
        ),
        (
            "packages",
            [(name, f"{p['version'] or 'not installed'} ({p['use']})") for name, p in facts["packages"].items()],
        ),
        (
            "environment",
            [(e["name"], f"{'-' if e['value'] is None else e['value']} ({e['doc']})") for e in facts["environment"]],
        ),
    ]
    width = max(len(name) for _, lines in sections for name, _ in lines) + 2
    out = []
    for head, lines in sections:
        if head:
            out += ["", head]
        indent = "  " if head else ""
        out += [f"{indent}{name:<{width + 2 - len(indent)}}{value}" for name, value in lines]
    return "\n".join(out)
