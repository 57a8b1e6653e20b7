"""`tokenway bench --backend torch`: the portable backend's strategies side by side, over tokens and top-k, on gloo.

What ranks tell each other goes over the CPU backend (control.py), so nothing that is measured is used to measure it.
Every point is compared with the oracle, bit for bit, in every way, before it is timed; ways take turns.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from tokenway.bench import runner, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.portable_options import WAYS, Portable
from tokenway.bench.progress import Progress
from tokenway.comm import Comm, connect
from tokenway.group import Group
from tokenway.portable import describe


def run(settings: Any) -> int:
    """Measures; returns the exit code."""
    return run_rank(settings) if settings.launched else runner.run_ranks(settings, run_rank)


def run_rank(settings: Any) -> int:
    """One rank's part."""
    with ExitStack() as stack:
        control = Control(stack.enter_context(connect(backend="shm")))
        stack.callback(control.close)
        asked: Portable = settings.portable
        progress = Progress(len(settings.cases()) * len(asked.top_k), control.rank == 0)
        stack.callback(progress.close)
        comms = {way: stack.enter_context(_comm(control, way)) for way in asked.strategies}
        rows = []
        try:
            for profile in settings.profiles:
                for top_k in asked.top_k:
                    rows += _points(settings, control, comms, profile, top_k, progress)
        except BaseException:
            stack.pop_all()  # closing is collective: the others learn of it when this process ends
            raise
        progress.close()
        if control.rank:
            return 0
        return runner.finish(settings, {"backend": "torch", "rows": rows})


def _comm(control: Control, way: str) -> Comm:
    return Comm.portable(control.rank, control.nranks, control.allgather, **WAYS[way])


def _points(
    settings: Any, control: Control, comms: dict[str, Comm], profile: str, top_k: int, progress: Progress
) -> list[dict[str, Any]]:
    """The rows of one top-k: a group for each way."""
    cases = [case for case in settings.cases() if case.profile.name == profile]
    cases = [replace(case, profile=replace(case.profile, top_k=top_k)) for case in cases]
    keywords = cases[0].group_settings(max(case.tokens for case in cases))
    groups = {way: Group(comm, **keywords) for way, comm in comms.items()}
    rows = []
    for case in cases:
        progress.doing(f"{case.name}, top-{top_k}")
        rows.append(_point(settings, control, groups, case))
        progress.done()
    for group in groups.values():
        group.close()
    return rows


def _point(settings: Any, control: Control, groups: dict[str, Group], case: Case) -> dict[str, Any]:
    rank, x = control.rank, case.exchange
    subjects, checks = [], []
    for way, group in groups.items():
        handle = group.route(x.ids[rank], x.weight[rank])
        made = verify.buffers(case, group)
        it = timing.Exchanged(case, group, handle, case.inputs(rank), made)
        _agree(control, verify.exchange_once, case, group, handle, it.sent, made, False)
        it.combine()
        want = verify.expected_output(case, rank)
        _agree(control, verify.check_output, case, rank, made[2], want)
        subjects.append(timing.Pair(way, it.pair))
        checks.append((case, rank, made[2], want))
    total, _, _ = case.moved_rows()
    row: dict[str, Any] = {
        "profile": case.profile.name,
        "hidden": case.profile.hidden,
        "top_k": case.profile.top_k,
        "tokens": case.tokens,
        "ranks": case.ranks,
        "rows_moved": total,
        "ways": {},
        "portable": {way: asdict(describe(group.pointer)) for way, group in groups.items()},  # type: ignore[arg-type]
    }
    if settings.verify_only:
        return row
    times = timing.rounds_of(
        subjects, control, rounds=settings.rounds, iterations=settings.iterations, warmup=settings.warmup
    )
    for arguments in checks:
        _agree(control, verify.check_output, *arguments)
    row["ways"] = {way: timing.summary(phases["pair"]) for way, phases in times.items()}
    return row


def _agree(control: Control, function: Any, *args: Any) -> None:
    problem = None
    try:
        function(*args)
    except verify.Mismatch as mismatch:
        problem = str(mismatch)
    if found := control.agree(problem):
        raise verify.Mismatch(found)
