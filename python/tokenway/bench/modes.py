"""`tokenway bench --mode auto`: pairs of low latency and of high throughput in one group, and where the two cross.

Each row times dispatch and combine of the same tokens in both modes, in turns. Of high throughput it tells two figures:
with the exchange of counts before, as a new routing needs it, and by counts that are known. What is compared with the
oracle, and how calls are timed, is as in cpu.py and nvlink.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tokenway.bench import cpu, floor, gpu_machine, nvlink, runner, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.gpu_rank import connect_gpu
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.comm import Comm
from tokenway.group import Group

TIMEOUT = 60.0  # of groups, seconds
LIMIT = 570.0  # of a run by the own launcher
LAYOUTS = {"low latency": "rank_major", "high throughput": "flat"}  # those without a copy


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    return runner.on_ranks(settings, measure_rank, None if settings.nvlink is None else LIMIT)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    place = _on_host if settings.nvlink is None else _on_gpus
    return runner.as_rank(settings, len(settings.cases()), partial(place, settings))


def _on_host(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    return {"modes": _rows(OnHost(settings, control, stack), control.comm, progress)}


def _on_gpus(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    assert settings.nvlink is not None
    import torch

    progress.doing("connecting")
    comm = stack.enter_context(connect_gpu(settings, control))
    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(comm.device)))
    bench = nvlink.Bench(settings, control, comm, floor.Floor({"missing": "no floor"}), progress, stack)
    place = OnGpus(settings, control, bench)
    measured = _rows(place, comm, progress, sm_limit=settings.nvlink.sm_limit, lanes=settings.nvlink.lanes)
    more = gpu_machine.results(settings.ranks) if control.rank == 0 else {}
    return {"modes": measured, "backend": "nvlink", **more}


def _rows(place: Any, comm: Comm, progress: Progress, **limits: int) -> list[dict[str, Any]]:
    """All rows, those of a profile in one group, in which each size may be of either mode."""
    measured = []
    for name in place.settings.profiles:
        cases = [case for case in place.settings.cases() if case.profile.name == name]
        most = max(case.tokens for case in cases)
        keywords = cases[0].group_settings(most) | {"mode": "auto", "low_latency_tokens": most}
        with runner.open_group(comm, **keywords, **limits, timeout=TIMEOUT) as group:
            for case in cases:
                progress.doing(case.name)
                measured.append(_row(place, case, group, progress.at))
                progress.done()
    return measured


def _row(place: Any, case: Case, group: Group, doing: Callable[[str], None]) -> dict[str, Any]:
    """A line: both modes verified, timed, verified again."""

    def told(where: str) -> None:
        doing(where)
        group.check()  # after an error graphs must not be replayed

    sides = {mode: place.side(mode, replace(case, layout=layout), group) for mode, layout in LAYOUTS.items()}
    row = runner.facts(case, group, place.verified) | {"layouts": LAYOUTS}
    if place.settings.verify_only:
        return row
    subjects = [side.subject(told) for side in sides.values()]
    place.meet()
    times = timing.rounds_of(
        subjects,
        place.control,
        rounds=place.settings.rounds,
        iterations=place.settings.iterations,
        warmup=place.settings.warmup,
        told=told,
    )
    for side in sides.values():
        runner.agree(place.control, side.problem())
    for subject in subjects:
        getattr(subject, "close", lambda: None)()
    low, high = (times[mode] for mode in LAYOUTS)
    with_counts = (np.asarray(high["counts"]) + np.asarray(high["pair"])).round(2).tolist()
    return row | {
        "low_latency_us": timing.summary(low["pair"]),
        "high_throughput_us": timing.summary(with_counts),
        "counts_us": timing.summary(high["counts"]),
        "known_counts_us": timing.summary(high.get("cached", high["pair"])),
    }


class OnHost:
    """Where ranks are processes on the CPU."""

    verified = cpu.EXCHANGES

    def __init__(self, settings: Settings, control: Control, stack: ExitStack):
        self.settings, self.control = settings, control
        self._bench = cpu.Bench(settings, control, stack)

    def meet(self) -> None:
        """Nothing here allocates in a way that peers notice."""

    def side(self, mode: str, case: Case, group: Group) -> HostSide:
        """One mode, with exchanges made and verified. Collective."""
        ours, (want,) = self._bench.verified(case, group)
        return HostSide(replace(ours, name=mode), want)


class HostSide:
    """One mode's calls."""

    def __init__(self, ours: timing.Ours, want: np.ndarray):
        self._ours, self._want = ours, want

    def subject(self, _: Callable[[str], None]) -> timing.Subject:
        """What is timed."""
        return self._ours

    def problem(self) -> str | None:
        """What is wrong with the last result."""
        it = self._ours.forward
        return verify.problem_of(verify.check_output, it.case, it.group.rank, it.made[2], self._want)


class OnGpus:
    """Where each rank has a GPU, and calls are captured."""

    def __init__(self, settings: Settings, control: Control, bench: nvlink.Bench):
        from tokenway.bench.gpu_case import EXCHANGES

        assert settings.nvlink is not None
        self.settings, self.control, self._bench = settings, control, bench
        self.verified = EXCHANGES if settings.nvlink.verify else 0

    def meet(self) -> None:
        """A barrier of the hosts: between what allocates and an exchange."""
        self._bench.meet()

    def side(self, mode: str, case: Case, group: Group) -> DeviceSide:
        """One mode, with an exchange made, or two verified. Collective."""
        return DeviceSide(mode, self._bench.prepared(case, group))


class DeviceSide:
    """One mode's calls."""

    def __init__(self, mode: str, ours: Any):
        self._mode, self._ours, self._before = mode, ours, ours.result.clone()

    def subject(self, told: Callable[[str], None]) -> Any:
        """Its graphs."""
        return self._ours.graphs(self._mode, told)

    def problem(self) -> str | None:
        """What is wrong with the last result."""
        found: str | None = self._ours.check_again(self._before)
        return found
