"""`tokenway bench --collective`: uneven gathers and reduce-scatters beside what frameworks do without this library.

Every row is compared with the oracle, bit for bit, before it is timed and after. On the CPU ranks are processes, and an
iteration is as in timing.py; on GPUs the calls are captured, ten in a graph, as in graphs.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenway import reference, tensors
from tokenway.bench import floor, gloo, gpu_machine, runner, table, timing
from tokenway.bench.control import Control
from tokenway.bench.options import Settings
from tokenway.bench.profiles import PROFILES
from tokenway.bench.progress import Progress
from tokenway.bench.verify import Mismatch, same_bits
from tokenway.bench.watch import SILENT, Watch
from tokenway.comm import connect
from tokenway.group import Group

TIMEOUT = 60.0  # of groups, seconds
LIMIT = 570.0  # of a run by the own launcher


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    collective: str  # all_gatherv or reduce_scatterv
    tokens: int  # of the rank that has most
    even: bool
    ranks: int
    hidden: int
    dtype: str

    @property
    def sizes(self) -> list[int]:
        """Rows of each rank: all the same, or from all of them down to an N-th."""
        n = self.ranks
        return [self.tokens if self.even else self.tokens * (n - r) // n for r in range(n)]

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.hidden * tensors.numpy_dtype(self.dtype).itemsize

    @property
    def remote_rows(self) -> int:
        """Rows over the busiest rank's link, in the direction that has more."""
        most, all_of_them = max(self.sizes), sum(self.sizes)
        one, many = most * (self.ranks - 1), all_of_them - min(self.sizes)
        return max(one, many)

    def inputs(self, rank: int) -> np.ndarray:
        """[n, H] to gather, or [sum of sizes, H] to reduce: every row of every rank is another."""
        count = self.sizes[rank] if self.collective == "all_gatherv" else sum(self.sizes)
        rows = np.arange(count, dtype=np.int32)[:, None] * 131 + rank * 1009
        values = (rows + np.arange(self.hidden, dtype=np.int32) * 7) % 509 - 254
        return (values.astype(np.float32) / 16).astype(tensors.numpy_dtype(self.dtype))

    def wanted(self, rank: int) -> np.ndarray:
        """The oracle's result."""
        inputs = [self.inputs(r) for r in range(self.ranks)]
        if self.collective == "all_gatherv":
            return reference.all_gatherv(inputs)
        return reference.reduce_scatterv(inputs, self.sizes, rank)


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


def run(settings: Settings) -> int:
    """Runs the benchmark; returns the exit code."""
    if settings.launched:
        return run_process(settings)
    return runner.run_ranks(settings, run_process, None if settings.nvlink is None else LIMIT)


def run_process(settings: Settings) -> int:
    """One rank; rank 0 prints and writes the results."""
    with ExitStack() as stack:
        control = Control(stack.enter_context(connect()))
        stack.callback(control.close)
        watch = SILENT if settings.nvlink is None else stack.enter_context(Watch(control))
        progress = Progress(len(rows_of(settings)), control.rank == 0, watch)
        stack.callback(progress.close)
        results = runner.measured(lambda: _measure(settings, control, progress, stack), control, progress, stack)
        if results is None:
            return 1
        if control.rank != 0:
            return 0
        versions = gpu_machine.versions() if settings.nvlink is not None else None
        return runner.finish(settings, results, versions)


def _measure(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    rows = rows_of(settings)
    if settings.nvlink is None:
        if settings.baselines:
            stack.callback(gloo.Process(control).close)
        bench: Any = OnHost(settings, control)
        comm, more = control.comm, {}
    else:
        progress.doing("the floor")
        document: dict[str, Any] = {"missing": "no floor: left out"}
        if control.rank == 0 and settings.nvlink.floor:
            document = floor.measure_exchanges({row.remote_rows for row in rows}, {row.row_bytes for row in rows})
        control.allgather(None)  # nobody has touched a GPU before
        import torch

        from tokenway.bench.nvlink import connect_gpu

        index = int(os.environ.get("LOCAL_RANK", control.rank)) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        comm = stack.enter_context(connect_gpu(settings, control, index))
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(index)))
        if settings.baselines:
            stack.callback(gloo.Process(control, "nccl").close)
        bench = OnGpus(settings, control, floor.Floor(document))
        used = min(settings.ranks, int(gpu_machine.device_count()))
        more = {"backend": "nvlink", "floor": document, "gpu": gpu_machine.describe() | {"used": used}}
    measured = []
    keywords: dict[str, Any] = {"max_tokens": max(settings.tokens), "dtype": settings.dtype, "timeout": TIMEOUT}
    if settings.nvlink is not None:
        keywords["sm_limit"] = settings.nvlink.sm_limit
    for hidden in dict.fromkeys(row.hidden for row in rows):
        with runner.open_group(comm, hidden=hidden, **keywords) as group:
            for row in (row for row in rows if row.hidden == hidden):
                progress.doing(f"{row.collective}, {row.tokens} tokens")
                measured.append(_row(row, bench, group, progress.at))
                progress.done()
    return {"collectives": measured, **more}


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
        from tokenway.bench.collective_baselines import GLOO

        self.settings, self.control, self.baselines = settings, control, GLOO

    def agree(self, problem: str | None) -> None:
        """Raises Mismatch on all ranks if any has a problem. Collective."""
        if found := self.control.agree(problem):
            raise Mismatch(found)

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
        from tokenway.bench.collective_baselines import NCCL

        super().__init__(settings, control)
        self.baselines, self.floor = NCCL, bottom

    @staticmethod
    def tensor(array: np.ndarray) -> Any:
        return tensors.to_torch(array).cuda()

    @staticmethod
    def array(tensor: Any) -> np.ndarray:
        from tokenway.bench.gpu_case import to_numpy

        return to_numpy(tensor)

    def subject(self, name: str, call: Any) -> Any:
        from tokenway.bench.graphs import COUNT, Graphs, Replay

        self.control.allgather(None)  # no rank allocates while another is in an exchange
        made = Graphs(name, {"pair": Replay(call, lambda: [call() for _ in range(COUNT)] and None)})
        self.control.allgather(None)
        return made

    def baseline(self, name: str, call: Any) -> tuple[Any, str | None]:
        from tokenway.bench import nccl

        call.name = name
        return nccl.capture(call, self.control.agree)

    def results(self, row: Row, times: dict[str, Any], notes: dict[str, str]) -> dict[str, Any]:  # type: ignore[override]
        """With the floor of the same run."""
        told = OnHost.results(row, times, notes)
        return told | self.floor.compare(told["us"]["median"], row.remote_rows, row.row_bytes)


# ---- the table -------------------------------------------------------------------------------------


def columns(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells) of the table that shows a run."""
    rows = run["collectives"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("baselines", ())))
    heads = ["collective", "sizes", "us", "p10", "p90", "GB/s"]
    with_floor = any("floor_us" in row for row in rows)
    heads += ["floor us", "times floor"] * with_floor
    heads += [f"{name} {what}" for name in names for what in ("us", "times")]
    if not any("us" in row for row in rows):
        heads = ["collective", "sizes", "verified"]
    cells = []
    for row in rows:
        sizes = row["sizes"]
        shown = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " ".join(map(str, sizes))
        line = [row["collective"], shown]
        if "us" not in row:
            cells.append([*line, "yes"])
            continue
        line += [table.microseconds(row["us"][key]) for key in ("median", "p10", "p90")] + [f"{row['remote_gb_s']:.1f}"]
        if with_floor:
            found = row.get("floor_us")
            line += [table.microseconds(found), f"{row['times_floor']:.2f}"] if found else ["", ""]
        for name in names:
            other = row["baselines"].get(name)
            line += [table.microseconds(other["us"]["median"]), f"{other['times_ours']:.2f}"] if other else ["", ""]
        cells.append(line)
    return heads, cells


def title(run: dict[str, Any]) -> str:
    """The shape in a line."""
    settings = run["settings"]
    return f"{settings['ranks']} ranks, rows of {run['collectives'][0]['hidden']} {settings['dtype']}"
