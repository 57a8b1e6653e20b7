"""`tokenway bench --backend nvlink`: one rank on a GPU, as a process of its own or as a thread of one process. And
`--backend gin`: the same between hosts, in processes.

What ranks tell each other goes over the CPU backend (control.py), or over gloo's between hosts (talk.py), so nothing
that is measured is used to measure it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from tokenway.bench import baselines, breakdown, floor, gloo, gpu_machine, nccl, nvlink_results, runner, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.gpu_rank import connect_gpu, hosts_between, sizes_of_hosts
from tokenway.bench.graphs import LAYERS, Loop
from tokenway.bench.libraries import LIBRARIES
from tokenway.bench.overhead import ops_path
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.bench.talk import on_several_hosts
from tokenway.bench.turns import PREPARE, Beside
from tokenway.comm import Comm, local_comms
from tokenway.group import Group

TIMEOUT = 20.0  # of groups, seconds: a benchmark that is stuck ends
LIMIT = 570.0  # of a run by the own launcher
UNSAFE = "TOKENWAY_UNSAFE_NO_WAIT"  # read by the library when a group is created


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    assert settings.nvlink is not None
    if settings.nvlink.local_ranks:
        return measure_threads(settings)
    libraries = sum(name in LIBRARIES for name in settings.baselines)
    return runner.on_ranks(settings, measure_rank, LIMIT + libraries * PREPARE)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks, each with a GPU and a process to itself. Collective."""

    def rows(control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
        progress.doing("the floor")
        document = _floor(settings) if control.rank == 0 else {}
        control.allgather(None)  # nobody has touched a GPU before
        progress.doing("connecting")
        comm = stack.enter_context(connect_gpu(settings, control))
        results = _rank(settings, control, comm, document, progress)
        results |= sizes_of_hosts(settings, control)
        return results | gpu_machine.results(settings.ranks) if control.rank == 0 else {}

    return runner.as_rank(settings, len(settings.cases()), rows)


def measure_threads(settings: Settings) -> Results:
    """The same with all ranks as threads of this process, over the devices that there are."""
    import torch  # noqa: F401  # here: of threads that import it at the same time, some find half of it

    n = settings.ranks
    devices = place(n, int(gpu_machine.device_count()))
    progress = Progress(len(settings.cases()), True)
    progress.doing("the floor")
    document = _floor(settings)
    controls, comms = local_comms(n), local_comms(n, devices=devices)

    def rank_main(rank: int) -> dict[str, Any]:
        control = Control(controls[rank])
        results = _rank(settings, control, comms[rank], document, progress if rank == 0 else Progress(0, False))
        control.close()
        return results

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(n)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        problem = next((error for future in done if (error := future.exception())), None)
        progress.close()
        if problem is not None:
            kind = "" if isinstance(problem, verify.Mismatch) else f"{type(problem).__name__}: "
            print(f"tokenway bench: {kind}{problem}", file=sys.stderr, flush=True)
            os._exit(1)  # the other threads wait for this rank, and nothing could end them
    for comm in [*comms, *controls]:
        comm.close()
    return futures[0].result() | gpu_machine.results(n)


def place(ranks: int, devices: int) -> list[int]:
    """The device of each local rank: neighbours share one, as [0, 0, 1, 1]."""
    return [rank * min(devices, ranks) // ranks for rank in range(ranks)]


def _floor(settings: Settings) -> dict[str, Any]:
    """The floor's document. Before any group is made, so that nothing else runs."""
    assert settings.nvlink is not None
    if not settings.nvlink.floor or on_several_hosts():  # the program is one of this host
        return {"missing": "no floor: left out"}
    cases = settings.cases()
    if settings.nvlink.compare:
        cases += [replace(case, dtype=settings.nvlink.compare) for case in cases]
    return floor.measure(cases, floor.gpus(settings.ranks))


def _rank(settings: Settings, control: Control, comm: Comm, document: dict, progress: Progress) -> dict[str, Any]:
    """All rows on one rank, on a stream of its own."""
    import torch

    torch.cuda.set_device(comm.device)
    with ExitStack() as stack, torch.cuda.stream(torch.cuda.Stream(comm.device)):
        bench = Bench(settings, control, comm, floor.Floor(document), progress, stack)
        try:
            rows = [row for name in settings.profiles for row in bench.profile(name)]
            bench.break_down(rows)
        except verify.Mismatch:
            raise
        except BaseException:
            stack.pop_all()
            raise
        return nvlink_results.run(settings, document, rows) if control.rank == 0 else {}


class Bench:
    """What the rows of a run share on one rank."""

    def __init__(
        self,
        settings: Settings,
        control: Control,
        comm: Comm,
        bottom: floor.Floor,
        progress: Progress,
        stack: ExitStack,
    ):
        assert settings.nvlink is not None
        self.progress = progress
        self.settings, self.gpu, self.control, self.comm, self.floor = settings, settings.nvlink, control, comm, bottom
        self._agree = partial(runner.agree, control)
        self._hosts = hosts_between(settings, control)
        if settings.baselines:
            stack.callback(gloo.Process(control, "nccl").close)
        named = [name for name in settings.baselines if name in LIBRARIES]
        self._beside = {name: Beside(name, control, comm.device, progress.at) for name in named}
        for library in self._beside.values():
            stack.callback(library.close)

    def profile(self, name: str) -> list[dict[str, Any]]:
        """All rows of one profile."""
        progress = self.progress
        cases = self._cases(name)
        rows = []
        with ExitStack() as groups:
            group = groups.enter_context(self._group(cases))
            other = None
            if self.gpu.compare and not self.settings.verify_only:
                other = groups.enter_context(self._group(self._compared(cases)))
            for case in cases:
                progress.doing(case.name)
                rows.append(self._row(case, group, other))
                progress.done()
            progress.at("closing the groups")
        if self.gpu.ablation and not self.settings.verify_only:
            progress.doing(f"{name} without waiting")
            self._without_waiting(cases, rows)
        return rows

    def break_down(self, rows: list[dict[str, Any]]) -> None:
        """Adds the kernels of a pair to all rows, if that is wanted. Last: once the profiler has run in a process, a
        launch takes the host longer, and a dispatch and a combine took it 36 us instead of 24."""
        if not self.gpu.breakdown or self.settings.verify_only:
            return
        from tokenway.bench.gpu_case import DeviceCase

        told = iter(rows)
        for name in self.settings.profiles:
            cases = self._cases(name)
            with self._group(cases) as group:
                for case in cases:
                    self.progress.doing(f"{case.name}: the profiler")
                    ours = DeviceCase(case, group)
                    ours.settle(self.meet)
                    pair = partial(ours.pair, ours.handle)
                    next(told)["breakdown"] = breakdown.kernels(pair, 10, self.meet, self.control.rank == 0)
                    self.meet()

    def _cases(self, name: str) -> list[Case]:
        return [case for case in self.settings.cases() if case.profile.name == name]

    def _group(self, cases: list[Case]) -> Any:
        keywords = cases[0].group_settings(max(case.tokens for case in cases))
        gpu = self.gpu
        own = {"lanes": gpu.lanes, "sm_limit": gpu.sm_limit, "inbox_tokens": gpu.inbox_tokens, "timeout": TIMEOUT}
        return runner.open_group(self.comm, **keywords, **own)

    def _compared(self, cases: list[Case]) -> list[Case]:
        assert self.gpu.compare is not None
        return [replace(case, dtype=self.gpu.compare) for case in cases]

    def meet(self) -> None:
        """A barrier of the hosts: between what allocates, or loads a kernel, and an exchange."""
        self.control.allgather(None)

    def prepared(self, case: Case, group: Group) -> Any:
        """The case on the device, with one exchange made, or two verified."""
        from tokenway.bench.gpu_case import DeviceCase

        self.progress.at(f"first exchanges, {case.dtype}")
        ours = DeviceCase(case, group)
        if self.gpu.verify:
            ours.verify(self._agree)
        else:
            ours.settle(self.meet)
        if not self.settings.backward:
            return ours
        ours.back = ours.gradients()
        self.meet()
        if self.gpu.verify:
            ours.back.exchange(ours.back.case, self._agree)
        else:
            ours.back.settle(self.meet)
        return ours

    def _row(self, case: Case, group: Group, other: Group | None) -> dict[str, Any]:
        from tokenway.bench.gpu_case import EXCHANGES

        ours = self.prepared(case, group)
        row = runner.facts(case, group, EXCHANGES + self.settings.backward if self.gpu.verify else 0)
        if self.settings.verify_only:
            return row
        told = self.progress.at
        loops = ours.loops(not self.gpu.local_ranks) + (ours.loops_apart() if self._hosts else [])
        subjects: list[Any] = [ours.graphs(told=told), *loops, *self._ops(ours)]
        kept = [(one, one.result.clone()) for one in (ours, ours.back) if one is not None]
        if other is not None:
            beside = self.prepared(self._compared([case])[0], other)
            subjects.append(beside.graphs("compare", told))
            kept.append((beside, beside.result.clone()))
        timed, checks, notes = self._baselines(case)
        libraries, missing = self._libraries(case, notes)
        if libraries:
            subjects.append(ours.stretches(nccl.barrier()))
        self.meet()
        times = self._times([*subjects, *timed, *libraries], [one.group for one, _ in kept])
        told("checking")
        for library in libraries:
            if problem := library.verdict():
                missing[library.name] = problem
                del times[library.name]
        for one, before in kept:
            self._agree(one.check_again(before))
        for check in checks:
            self._agree(verify.problem_of(check))
        own = [float(value) for value in subjects[0].mine["pair"]]
        by_rank = self.control.allgather(sorted(own)[len(own) // 2])
        told("freeing the graphs")
        for subject in [*subjects, *timed]:
            subject.close()
        row |= nvlink_results.row(case, times, self.floor, notes, self._hosts)
        if missing:
            row["missing"] = missing
        row["by_rank_us"] = [round(value, 2) for value in by_rank]
        return row

    def _times(self, subjects: list[Any], groups: list[Group]) -> dict[str, Any]:
        settings = self.settings

        def told(where: str) -> None:
            self.progress.at(where)
            for group in groups:
                group.check()  # after an error graphs must not be replayed

        return timing.rounds_of(
            subjects,
            self.control,
            rounds=settings.rounds,
            iterations=settings.iterations,
            warmup=settings.warmup,
            told=told,
        )

    def _ops(self, ours: Any) -> list[Any]:
        """The registered ops. They allocate in every call, which local ranks must not."""
        case = ours.case
        if case.layout != "rank_major" or case.scales or self.gpu.local_ranks:
            return []
        path = ops_path(ours.group, ours.tokens, ours.rows, [ours.ids, ours.weights], case.weighting)
        return [Loop("registered ops", lambda: path(LAYERS), 1, LAYERS)]

    def _baselines(self, case: Case) -> tuple[list[Any], list[Callable[[], None]], dict[str, str]]:
        """(what times the wanted baselines, their checks, why one is not a graph). Collective."""
        timed, checks, notes = [], [], {}
        plan = baselines.make_plan(case, self.control.rank) if self.settings.baselines else None
        for name in self.settings.baselines:
            if name in self._beside:
                continue
            assert plan is not None
            self.progress.at(f"first calls and capture of {name}")
            baseline = nccl.KINDS[name](plan)
            self.meet()
            subject, problem = nccl.capture(baseline, self.control.agree, self.settings.backward)
            if problem:
                notes[name] = problem
            self._agree(verify.problem_of(baseline.check))  # of the calls before the capture
            timed.append(subject)
            checks.append(baseline.check)
        return timed, checks, notes

    def _libraries(self, case: Case, notes: dict[str, str]) -> tuple[list[Beside], dict[str, str]]:
        """(the other libraries that do the case right, why others do not). notes: gets why one is not a graph.
        Collective."""
        found, missing = [], {}
        for name, library in self._beside.items():
            self.progress.at(f"{name} beside")
            problem, note = library.prepare(case)
            if problem is None:
                found.append(library)
            else:
                missing[name] = problem
            if note is not None:
                notes[name] = note
        return found, missing

    def _without_waiting(self, cases: list[Case], rows: list[dict[str, Any]]) -> None:
        """The same graphs in a group whose kernels do not wait for their peers: what waiting costs. Results are wrong,
        so nothing is checked."""
        from tokenway.bench.gpu_case import DeviceCase

        os.environ[UNSAFE] = "1"
        self.meet()  # local ranks share the environment
        with self._group(cases) as group:
            self.meet()
            os.environ.pop(UNSAFE, None)
            for case, row in zip(cases, rows, strict=True):
                ours = DeviceCase(case, group)
                graphs = ours.graphs("unsafe", self.progress.at)
                self.meet()
                row["without_waiting"] = nvlink_results.without_waiting(self._times([graphs], [])["unsafe"])
                graphs.close()
                self.meet()
