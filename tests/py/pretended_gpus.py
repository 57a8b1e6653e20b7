"""A run of the NVLink benchmark with PyTorch's CUDA calls on the CPU: everything but what only a device does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace

import tokenway as tw
from tokenway import machine
from tokenway.bench import floor, gpu_machine, nvlink
from tokenway.bench.case import FP8, Case
from tokenway.bench.control import Control
from tokenway.bench.progress import Progress
from tokenway.bench.settings import Settings

QUERIED = "NVIDIA H200, 580.95.05, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W\n"


def floor_document(cases: list[Case]) -> dict:
    """As tokenway-floor writes it; packets win up to 100 rows."""
    argv = floor.arguments(*floor.sizes(cases))
    tokens, sizes = ([int(n) for n in argv[i].split(",")] for i in (1, 3))
    figures = {"best": 1.0, "median": 2.0}
    return {
        "device": "NVIDIA H200",
        "sms": 132,
        **{f"{name}_us": figures for name in ("empty_kernel", "flag_relaxed", "flag_release_acquire")},
        "ceilings": [
            {"kind": "put", "ways": 2, "sms": sms, "best_gb_s": 370.0, "median_gb_s": rate}
            for sms, rate in ((132, 360.0), (8, 350.0))
        ],
        "exchanges": [
            {"kind": kind, "tokens": t, "row_bytes": size, "best_us": 1.0, "median_us": base + t * each}
            for kind, base, each in (("lines", 2.0, 0.05), ("last_block", 4.0, 0.03))
            for t in tokens
            for size in sizes
        ],
    }


class PretendStream:
    cuda_stream = 0

    def __init__(self, *device: object):
        pass

    def synchronize(self) -> None:
        pass


class PretendEvent:
    """One that has come when it is recorded, a moment behind any before it."""

    def __init__(self, **kind: bool):
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter() * 1e3

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: PretendEvent) -> float:
        return other._at - self._at + 1e-3


def pretend_cuda(torch) -> None:
    """Gives this process what runs of layers call of torch.cuda. For ranks that are processes of their own."""
    for name, stand_in in {
        "Stream": PretendStream,
        "current_stream": PretendStream,
        "Event": PretendEvent,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
    }.items():
        setattr(torch.cuda, name, stand_in)


class PretendReplay:
    """Makes the calls of a graph each time: collective, so not while it is made."""

    replaying = False  # whether what runs would be in a graph; of all threads

    def __init__(self, lead, body, count=10):
        self._calls = lead, body, count
        self.result = None

    def once(self, control: Control) -> tuple[float, float]:
        lead, _, count = self._calls
        control.gate()
        lead()
        start = time.perf_counter_ns()
        self.replay()
        return ((time.perf_counter_ns() - start) / count,) * 2

    def replay(self) -> None:
        PretendReplay.replaying = True
        try:
            self.result = self._calls[1]()
        finally:
            PretendReplay.replaying = False

    def close(self) -> None:
        pass


class PretendStretches:
    """Calls dispatch and combine in turn, behind barriers."""

    phases = ("dispatch", "combine")

    def __init__(self, name, barrier, calls):
        self.name, self._barrier, self._calls = name, barrier, calls

    def once(self, control: Control) -> tuple[float, ...]:
        for at in range(11):
            for call in self._calls.values():
                self._barrier()
                call(at)
        return 1e3, 2e3

    def close(self) -> None:
        pass


def run_on_pretended_gpus(monkeypatch, torch, settings: Settings) -> dict:
    """A run as a rank makes it, on the CPU backend: everything but what only a device does."""
    from tokenway.bench import gpu_case, returns

    monkeypatch.setattr(gpu_case, "here", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu_case, "Replay", PretendReplay)
    for name, stand_in in {
        "set_device": lambda device: None,
        "Stream": PretendStream,
        "current_stream": PretendStream,
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    ours, others = (tw.local_comms(settings.ranks) for _ in range(2))
    cases = settings.cases()
    document = floor_document([*cases, *(replace(case, dtype=FP8) for case in cases)])

    def rank_main(rank: int) -> dict:
        control = Control(others[rank])
        progress = Progress(0, False)
        if settings.returns:
            with ExitStack() as stack:
                results = {"returns": returns.rows(settings, control, ours[rank], progress, stack)}
        else:
            results = nvlink._rank(settings, control, ours[rank], document, progress)
        control.close()
        return results

    with ThreadPoolExecutor(settings.ranks) as pool:
        results, *_ = pool.map(rank_main, range(settings.ranks))
    for comm in [*ours, *others]:
        comm.close()
    gpus = gpu_machine.parse_query(QUERIED)
    gpu = {"gpu": "NVIDIA H200", "count": 2, "used": 2, "driver": "580", "link": "NV18", "nvlink": "", "gpus": gpus}
    versions = machine.versions() | {"nccl": "2.28.9"}
    told = asdict(settings) | {"skipped": []}
    return {"settings": told, "versions": versions, "gpu": gpu, "commit": None, "date": "today", **results}
