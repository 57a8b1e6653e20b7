"""`tokenway bench --backend torch`: the portable backend's strategies side by side, over tokens and top-k, on gloo.

What ranks tell each other goes over the CPU backend (control.py), so nothing that is measured is used to measure it.
Every point is compared with the oracle, bit for bit, in every way, before it is timed; ways take turns. `auto` is
there twice, with a comm and a group for each: what the two differ by is what the machine adds to any comparison. The
second one and `gathered` move the blocks that the first has measured, so that strategies are compared, not two
measurements of the same thing. Where iterations are short there are more of them. All groups are made several times:
for as long as two groups live, calls of one may take 15 % longer than equal ones of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tokenway.bench import runner, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.portable_options import WAYS
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.comm import Comm
from tokenway.connecting import connect
from tokenway.group import Group
from tokenway.portable import describe

MADE = 3  # times
SPENT = 3e6  # us of timing at a point each time, up to which it has more rounds than were asked for
MOST = 10  # times as many
NEAR = 4.0  # times as long as the fastest, up to which a way is worth it
AGAIN = "auto again"
Times = dict[str, list[list[float]]]  # us by way, round and iteration


def measure(settings: Settings) -> Results:
    """All points of a run."""
    return runner.on_ranks(settings, measure_rank)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    assert settings.portable is not None
    top_ks = settings.portable.top_k
    with ExitStack() as stack:
        control = Control(stack.enter_context(connect(backend="shm")))
        stack.callback(control.close)
        progress = Progress(_made(settings) * len(settings.cases()) * len(top_ks), control.rank == 0)
        stack.callback(progress.close)

        def points() -> dict[str, Any]:
            found = [
                _points(settings, control, profile, top_k, progress)
                for profile in settings.profiles
                for top_k in top_ks
            ]
            return {"backend": "torch", "rows": [row for rows in found for row in rows]}

        return runner.measured(points, control, progress, stack)


def _open(control: Control, stack: ExitStack, ways: Sequence[str], keywords: dict[str, Any]) -> dict[str, Group]:
    """A group for each way, of a comm of its own; the stack closes both, unless this rank alone has failed."""
    groups: dict[str, Group] = {}
    ways = [*ways, AGAIN] if "auto" in ways and len(ways) > 1 else ways
    for way in sorted(ways, key=lambda way: way != "auto"):
        options: dict[str, Any] = dict(WAYS.get(way, WAYS["auto"]))
        if way in ("gathered", AGAIN) and "auto" in groups:
            options["capacity"] = _describe(groups["auto"])["inline_bytes"]
        comm = stack.enter_context(Comm.portable(control.rank, control.nranks, control.allgather, **options))
        groups[way] = stack.enter_context(runner.open_group(comm, **keywords))
    return {way: groups[way] for way in ways}


def _describe(group: Group) -> dict[str, Any]:
    return asdict(describe(group.pointer))  # type: ignore[arg-type]


def _made(settings: Settings) -> int:
    """How often groups are."""
    return 1 if settings.quick or settings.verify_only else MADE


def _points(settings: Settings, control: Control, profile: str, top_k: int, progress: Progress) -> list[dict[str, Any]]:
    """The rows of one top-k: a group for each way, and a measurement of the machine for each of them."""
    cases = [case for case in settings.cases() if case.profile.name == profile]
    cases = [replace(case, profile=replace(case.profile, top_k=top_k)) for case in cases]
    keywords = cases[0].group_settings(max(case.tokens for case in cases))
    times: list[Times] = [{} for _ in cases]
    for _ in range(_made(settings)):
        with ExitStack() as stack:
            try:
                groups = _open(control, stack, settings.portable.strategies, keywords)
                chosen = {way: _describe(group) for way, group in groups.items() if way != AGAIN}
                for case, rounds in zip(cases, times, strict=True):
                    progress.doing(f"{case.name}, top-{top_k}")
                    _join(rounds, _point(settings, control, groups, case))
                    progress.done()
            except verify.Mismatch:  # the same on all ranks, which close what they have
                raise
            except BaseException:
                stack.pop_all()  # closing is collective: the others learn of it when this process ends
                raise
    return [_row(case, chosen, rounds) for case, rounds in zip(cases, times, strict=True)]


def _join(times: Times, found: Times) -> None:
    """Adds the rounds of groups made anew, as many of each way that is compared, so that rounds stay neighbours."""
    compared = {"routed", "gathered", "auto", AGAIN} & found.keys()
    least = min((len(found[way]) for way in compared), default=0)
    for way, rounds in found.items():
        times.setdefault(way, []).extend(rounds[:least] if way in compared else rounds)


def _row(case: Case, chosen: dict[str, Any], times: Times) -> dict[str, Any]:
    """Of the results. chosen: by the groups that were made last."""
    row: dict[str, Any] = runner.case_facts(case) | {
        "portable": chosen,
        "ways": {way: timing.summary(rounds) for way, rounds in times.items()},
    }
    if AGAIN in row["ways"]:
        row["again"] = row["ways"].pop(AGAIN)
    return row


def _point(settings: Settings, control: Control, groups: dict[str, Group], case: Case) -> Times:
    """us of a case by each way, after the results have been compared; empty if that is all."""
    rank, x = control.rank, case.exchange
    subjects, checks = [], []
    for way, group in groups.items():
        handle = group.route(x.ids[rank], x.weight[rank])
        made = verify.buffers(case, group)
        it = timing.Exchanged(case, group, handle, case.inputs(rank), made)
        _check(control, verify.exchange_once, case, group, handle, it.sent, made, False)
        it.combine()
        want = verify.expected_output(case, rank)
        _check(control, verify.check_output, case, rank, made[2], want)
        subjects.append(timing.Pair(way, it.pair))
        checks.append((case, rank, made[2], want))
    if settings.verify_only:
        return {}
    times = _times(settings, control, subjects)
    for arguments in checks:
        _check(control, verify.check_output, *arguments)
    return times


def _times(settings: Settings, control: Control, subjects: list[timing.Pair]) -> Times:
    """us of each subject, by round: as many as was asked for, and more of those that are short and near the fastest, as
    long as that takes not much longer. Collective."""
    how = {"iterations": settings.iterations, "warmup": settings.warmup}
    first = timing.rounds_of(subjects, control, rounds=settings.rounds, **how)
    times = {name: phases["pair"] for name, phases in first.items()}
    medians = {name: float(np.median(rounds)) for name, rounds in times.items()}
    near = [subject for subject in subjects if medians[subject.name] <= NEAR * min(medians.values())]
    each = sum(medians[subject.name] for subject in near) * settings.iterations
    more = 0 if settings.quick else min(MOST, int(SPENT / each)) - 1
    for _ in range(more):
        for name, phases in timing.rounds_of(near, control, rounds=settings.rounds, **how).items():
            times[name] += phases["pair"]
    return times


def _check(control: Control, check: Any, *args: Any) -> None:
    """Makes a check; what it finds on any rank all ranks raise. Collective."""
    runner.agree(control, verify.problem_of(check, *args))
