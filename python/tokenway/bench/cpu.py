"""Dispatch and combine between processes of this host, over shared memory: verifies each row, then times it beside the
baselines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from tokenway import machine
from tokenway.bench import baselines, gloo, runner, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.connecting import connect
from tokenway.group import Group

EXCHANGES = 2  # verified per row


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    return runner.on_ranks(settings, measure_rank)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    with ExitStack() as stack:
        comm = stack.enter_context(connect())
        control = Control(comm)
        stack.callback(control.close)
        progress = Progress(len(settings.cases()), control.rank == 0)
        stack.callback(progress.close)

        def rows() -> dict[str, Any]:
            bench = Bench(settings, control, stack)
            return {"rows": [row for profile in settings.profiles for row in bench.profile(profile, progress)]}

        return runner.measured(rows, control, progress, stack)


class Bench:
    """What the rows of a run share on one rank."""

    def __init__(self, settings: Settings, control: Control, stack: ExitStack):
        self.settings, self.control = settings, control
        self.rank = control.rank
        wanted = settings.baselines
        self._memcpy = baselines.Memcpy(machine.last_level_cache()) if "memcpy" in wanted else None
        self._mesh = baselines.Mesh(control) if "sockets" in wanted else None
        if self._mesh is not None:
            stack.callback(self._mesh.close)
        if any(name.startswith("gloo") for name in wanted):
            stack.callback(gloo.Process(control).close)

    def profile(self, name: str, progress: Progress) -> list[dict[str, Any]]:
        """All rows of one profile, in one group."""
        cases = [case for case in self.settings.cases() if case.profile.name == name]
        keywords = cases[0].group_settings(max(case.tokens for case in cases))
        rows = []
        with runner.open_group(self.control.comm, **keywords) as group:
            for case in cases:
                progress.doing(f"{case.name}: verifying")
                ours, wants = self.verified(case, group)
                row = runner.facts(case, group, EXCHANGES + self.settings.backward)
                if not self.settings.verify_only:
                    progress.doing(f"{case.name}: timing")
                    row |= self._timed(case, ours, wants)
                rows.append(row)
                progress.done()
        return rows

    def _check(self, check: Callable[..., None], *args: Any) -> None:
        """Makes a check; what it finds on any rank all ranks raise. Collective."""
        runner.agree(self.control, verify.problem_of(check, *args))

    def verified(self, case: Case, group: Group) -> tuple[timing.Ours, list[np.ndarray]]:
        """Two exchanges with different data, in different banks, and one of gradients if they are wanted, each compared
        with the oracle; the last ones' tensors stay for timing, with the outputs that are right."""
        made = None if case.exact else verify.buffers(case, group)
        handle = None
        for turn in reversed(range(EXCHANGES)):
            at = replace(case, seed=case.seed + turn)
            x, sent = at.exchange, at.inputs(self.rank)
            if handle is None:
                handle = group.route(x.ids[self.rank], x.weight[self.rank])
            else:
                handle.update(x.ids[self.rank], x.weight[self.rank])
            if case.exact:
                made = verify.buffers(at, group, group.exchange_counts(handle))
            assert made is not None
            there = timing.Exchanged(at, group, handle, sent, made)
            wants = [self._exchanged(there, twice=turn % 2 == 1)]
        assert handle is not None
        back = None
        if self.settings.backward:
            case = case.backward
            back = timing.Exchanged(case, group, handle, case.inputs(self.rank), verify.buffers(case, group, handle))
            wants.append(self._exchanged(back))
        return timing.Ours(there, back), wants

    def _exchanged(self, it: timing.Exchanged, twice: bool = False) -> np.ndarray:
        """One exchange, compared with the oracle; what a combine returned that is right."""
        self._check(verify.exchange_once, it.case, it.group, it.handle, it.sent, it.made, twice)
        it.combine()
        want = verify.expected_output(it.case, self.rank)
        self._check(verify.check_output, it.case, self.rank, it.made[2], want)
        return want

    def _timed(self, case: Case, ours: timing.Ours, wants: list[np.ndarray]) -> dict[str, Any]:
        """Times ours and the baselines in turns; checks afterwards that all were still right."""
        subjects: list[timing.Subject] = [ours]
        passes = [it for it in (ours.forward, ours.backward) if it is not None]
        checks: list[tuple[Any, ...]] = [
            (verify.check_output, it.case, self.rank, it.made[2], want) for it, want in zip(passes, wants, strict=True)
        ]
        for name, call, check in self._baselines(case):
            subjects.append(timing.Pair(name, call))
            if check is not None:
                call()  # once to see that it is right, before it is timed
                self._check(check)
                checks.append((check,))
        settings = self.settings
        times = timing.rounds_of(
            subjects,
            self.control,
            rounds=settings.rounds,
            iterations=settings.iterations,
            warmup=settings.warmup,
        )
        for check, *args in checks:
            self._check(check, *args)
        route = timing.route_times(case, ours.forward.handle, self.rank, settings.iterations)
        slowest = self.control.slowest(route)
        return _results(case, times, timing.summary([slowest.round(2).tolist()]))

    def _baselines(self, case: Case) -> list[tuple[str, Any, Any]]:
        """(name, call, check) of each wanted baseline."""
        plan = baselines.make_plan(case, self.rank) if self.settings.baselines else None
        found: list[tuple[str, Any, Any]] = []
        for name in self.settings.baselines:
            assert plan is not None
            if self._memcpy is not None and name == "memcpy":
                _, sent, received = case.moved_rows()
                self._memcpy.prepare(
                    int(sent[self.rank]) * case.dispatch_row + int(received[self.rank]) * case.combine_row
                )
                found.append((name, self._memcpy, None))
                continue
            if self._mesh is not None and name == "sockets":
                subject: Any = baselines.Sockets(plan, self._mesh)
            else:
                subject = {"gloo-alltoall": gloo.AllToAll, "gloo-allgather": gloo.AllGather}[name](plan)
            found.append((name, subject, subject.check))
        return found


def _results(case: Case, times: dict[str, Any], route: dict[str, Any]) -> dict[str, Any]:
    """Summaries of a row's times, bandwidths, and ratios to the baselines."""
    ours = {phase: timing.summary(rounds) for phase, rounds in times["tokenway"].items()}
    row: dict[str, Any] = {"route_us": route}
    row |= {f"{phase}_us": figures for phase, figures in ours.items()}
    formula = case.tokens * min(case.ranks, case.profile.top_k)
    total, _, _ = case.moved_rows()
    moved = {"dispatch": case.dispatch_row, "combine": case.combine_row}
    moved["pair"] = moved["dispatch"] + moved["combine"]
    if "both" in ours:
        moved |= {"backward": 2 * case.combine_row, "both": moved["pair"] + 2 * case.combine_row}
    row["formula_gb_s"] = {
        phase: round(formula * size / ours[phase]["median"] / 1e3, 3) for phase, size in moved.items()
    }
    row["moved_gb_s"] = {phase: round(total * size / ours[phase]["median"] / 1e3, 3) for phase, size in moved.items()}
    row["baselines"] = {}
    for name, phases in times.items():
        if name != "tokenway":
            pair = timing.summary(phases["pair"])
            row["baselines"][name] = {
                "pair_us": pair,
                "moved_gb_s": round(total * moved["pair"] / pair["median"] / 1e3, 3),
            } | timing.ratio(pair, ours["pair"])
    return row
