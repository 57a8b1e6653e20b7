"""`tokenway bench --collective`: uneven gathers and reduce-scatters beside what frameworks do without this library.

Every row is compared with the oracle, bit for bit, before it is timed and after. On the CPU ranks are processes, and an
iteration is as in timing.py; on GPUs the calls are captured, ten in a graph, as in graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from tokenway import tensors
from tokenway.bench import collective_baselines, floor, gloo, gpu_machine, nccl, runner, timing
from tokenway.bench.collective_row import Row
from tokenway.bench.control import Control
from tokenway.bench.gpu_rank import connect_gpu
from tokenway.bench.graphs import COUNT, Graphs, Replay
from tokenway.bench.profiles import PROFILES
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.bench.verify import same_bits
from tokenway.comm import Comm
from tokenway.group import Group

TIMEOUT = 60.0  # of groups, seconds
LIMIT = 570.0  # of a run by the own launcher


def rows_of(settings: Settings) -> list[Row]:
    """The rows of a run, in order."""
    assert settings.collective is not None
    names = ["all_gatherv", "reduce_scatterv"] if settings.collective == "all" else [settings.collective]
    kinds = (True,) if settings.ranks == 1 else (False, True)
    return [
        Row(name, tokens, even, settings.ranks, PROFILES[profile].hidden, settings.dtype)
        for profile in settings.profiles
        for name in names
        for even in kinds
        for tokens in settings.tokens
    ]


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    return runner.on_ranks(settings, measure_rank, None if settings.nvlink is None else LIMIT)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    place = _on_host if settings.nvlink is None else _on_gpus
    return runner.as_rank(settings, len(rows_of(settings)), partial(place, settings))


def _on_host(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    if settings.baselines:
        stack.callback(gloo.Process(control).close)
    return {"collectives": _rows(settings, OnHost(settings, control), control.comm, progress)}


def _on_gpus(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    assert settings.nvlink is not None
    rows = rows_of(settings)
    progress.doing("the floor")
    document: dict[str, Any] = {"missing": "no floor: left out"}
    if control.rank == 0 and settings.nvlink.floor:
        sizes = {row.remote_rows for row in rows}, {row.row_bytes for row in rows}
        document = floor.measure_exchanges(*sizes, floor.gpus(settings.ranks))
    control.allgather(None)  # nobody has touched a GPU before
    import torch

    comm = stack.enter_context(connect_gpu(settings, control))
    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(comm.device)))
    if settings.baselines:
        stack.callback(gloo.Process(control, "nccl").close)
    bench = OnGpus(settings, control, floor.Floor(document))
    measured = _rows(settings, bench, comm, progress, sm_limit=settings.nvlink.sm_limit)
    more = gpu_machine.results(settings.ranks) if control.rank == 0 else {}
    return {"collectives": measured, "backend": "nvlink", "floor": document, **more}


def _rows(settings: Settings, bench: OnHost, comm: Comm, progress: Progress, **limits: int) -> list[dict[str, Any]]:
    """All rows, those of a hidden size in one group. limits: further settings of groups."""
    measured = []
    rows = rows_of(settings)
    keywords: dict[str, Any] = {"max_tokens": max(settings.tokens), "dtype": settings.dtype, "timeout": TIMEOUT}
    for hidden in dict.fromkeys(row.hidden for row in rows):
        with runner.open_group(comm, hidden=hidden, **keywords, **limits) as group:
            for row in (row for row in rows if row.hidden == hidden):
                progress.doing(f"{row.collective}, {row.tokens} tokens")
                measured.append(_row(row, bench, group, progress.at))
                progress.done()
    return measured


def _row(row: Row, bench: Any, group: Group, doing: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """A line: verified, timed, verified again. doing: told what comes."""

    def told_of(where: str) -> None:
        doing(where)
        group.check()  # after an error graphs must not be replayed

    want = row.wanted(group.rank)
    ours = Ours(row, group, bench.tensor)
    told = {
        "collective": row.collective,
        "tokens": row.tokens,
        "sizes": row.sizes,
        "hidden": row.hidden,
        "dtype": row.dtype,
        "remote_rows": row.remote_rows,
    }
    ours()
    bench.agree(_problem(row, group.rank, "tokenway", bench.array(ours.out), want))
    if bench.settings.verify_only:
        return told
    subjects, notes = [bench.subject("tokenway", ours)], {}
    for name in bench.settings.baselines:
        kind = bench.baselines.get(name)
        if kind is None or not kind.does(row):
            continue
        doing(f"first calls and capture of {name}")
        baseline = kind(row, group.rank, bench.tensor)
        baseline()
        bench.agree(_problem(row, group.rank, name, bench.array(baseline.out), want, exact=False))
        baseline.calm()
        timed, problem = bench.baseline(name, baseline)
        subjects.append(timed)
        notes |= {name: problem} if problem else {}
    times = timing.rounds_of(
        subjects,
        bench.control,
        rounds=bench.settings.rounds,
        iterations=bench.settings.iterations,
        warmup=bench.settings.warmup,
        told=told_of,
    )
    doing("freeing the graphs")
    for subject in subjects:
        getattr(subject, "close", lambda: None)()
    ours()
    bench.agree(_problem(row, group.rank, "tokenway", bench.array(ours.out), want))
    return told | bench.results(row, times, notes)


def _problem(row: Row, rank: int, name: str, got: np.ndarray, want: np.ndarray, exact: bool = True) -> str | None:
    """What is wrong with a result. Others' sums may be rounded on their way."""
    where = f"{row.collective} of {row.sizes}: {name} on rank {rank}"
    if exact or row.collective == "all_gatherv":
        return None if same_bits(got, want) else f"{where} has other bits than the oracle"
    near = np.allclose(got.astype(np.float32), want.astype(np.float32), rtol=2.0**-6, atol=2.0**-4 * row.ranks)
    return None if near else f"{where} has other sums than the oracle"


class Ours:
    """A call of this library, into a tensor that is there."""

    def __init__(self, row: Row, group: Group, tensor: Callable[[np.ndarray], Any]):
        self._call = getattr(group, row.collective)
        self._rows, self._sizes = tensor(row.inputs(group.rank)), row.sizes
        count = sum(row.sizes) if row.collective == "all_gatherv" else row.sizes[group.rank]
        self.out = tensor(np.zeros((count, row.hidden), tensors.numpy_dtype(row.dtype)))

    def __call__(self) -> None:
        """The step."""
        self._call(self._rows, self._sizes, out=self.out)


class OnHost:
    """Where tensors are NumPy's, and calls are timed from a gate."""

    def __init__(self, settings: Settings, control: Control):
        self.settings, self.control, self.baselines = settings, control, collective_baselines.GLOO

    def agree(self, problem: str | None) -> None:
        """Raises Mismatch on all ranks if any has a problem. Collective."""
        runner.agree(self.control, problem)

    @staticmethod
    def tensor(array: np.ndarray) -> Any:
        return array

    @staticmethod
    def array(tensor: Any) -> np.ndarray:
        return np.asarray(tensor)

    @staticmethod
    def subject(name: str, call: Any) -> Any:
        return timing.Pair(name, call)

    def baseline(self, name: str, call: Any) -> tuple[Any, str | None]:
        return self.subject(name, call), None

    @staticmethod
    def results(row: Row, times: dict[str, Any], notes: dict[str, str]) -> dict[str, Any]:
        """Summaries, and ratios to the baselines."""
        ours = timing.summary(times["tokenway"]["pair"])
        others = {}
        for name, phases in times.items():
            if name != "tokenway":
                found = timing.summary(phases["pair"])
                others[name] = {"us": found} | timing.ratio(found, ours)
        moved = row.remote_rows * row.row_bytes
        return {
            "us": ours,
            "remote_gb_s": round(moved / ours["median"] / 1e3, 2),
            "baselines": others,
            **({"notes": notes} if notes else {}),
        }


class OnGpus(OnHost):
    """Where tensors are on a device, and calls are captured."""

    def __init__(self, settings: Settings, control: Control, bottom: floor.Floor):
        super().__init__(settings, control)
        self.baselines, self.floor = collective_baselines.NCCL, bottom

    @staticmethod
    def tensor(array: np.ndarray) -> Any:
        return tensors.to_torch(array).cuda()

    @staticmethod
    def array(tensor: Any) -> np.ndarray:
        from tokenway.bench.gpu_case import to_numpy

        return to_numpy(tensor)

    def subject(self, name: str, call: Any) -> Any:
        self.control.allgather(None)  # no rank allocates while another is in an exchange
        made = Graphs(name, {"pair": Replay(call, lambda: [call() for _ in range(COUNT)] and None)})
        self.control.allgather(None)
        return made

    def baseline(self, name: str, call: Any) -> tuple[Any, str | None]:
        call.name = name
        return nccl.capture(call, self.control.agree)

    def results(self, row: Row, times: dict[str, Any], notes: dict[str, str]) -> dict[str, Any]:  # type: ignore[override]
        """With the floor of the same run."""
        told = OnHost.results(row, times, notes)
        return told | self.floor.compare(told["us"]["median"], row.remote_rows, row.row_bytes)
