"""One rank of a benchmark: verifies each row, then times it."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tokenway import machine, usage
from tokenway.bench import baselines, gloo, table, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.options import Settings
from tokenway.bench.progress import Progress
from tokenway.comm import Comm, connect
from tokenway.group import Group
from tokenway.launch import Outcome, Ranks

SCHEMA = 1
EXCHANGES = 2  # verified per row


def run_rank(settings: Settings) -> int:
    """Runs all rows as one rank; rank 0 prints and writes the results. Returns the exit code."""
    if settings.overhead:
        from tokenway.bench import overhead

        return finish(settings, {"overhead": overhead.measure(settings)})
    with ExitStack() as stack:
        comm = stack.enter_context(connect())
        control = Control(comm)
        stack.callback(control.close)
        progress = Progress(len(settings.cases()), control.rank == 0)
        stack.callback(progress.close)

        def measure() -> dict[str, Any]:
            bench = Bench(settings, control, stack)
            return {"rows": [row for profile in settings.profiles for row in bench.profile(profile, progress)]}

        results = measured(measure, control, progress, stack)
        if results is None:
            return 1
        return finish(settings, results) if control.rank == 0 else 0


def measured(measure: Callable[[], Any], control: Control, progress: Progress, stack: ExitStack) -> Any:
    """What was measured, by a rank whose open things are the stack's; None after a mismatch, which rank 0 tells."""
    try:
        results = measure()
    except verify.Mismatch as problem:  # the same on all ranks: see Bench._agree
        progress.close()
        if control.rank == 0:
            print(f"tokenway bench: {problem}", file=sys.stderr, flush=True)
        return None
    except BaseException:
        # This rank alone failed. Closing is collective and would wait for peers that wait for
        # this rank; they learn of it at once when this process ends.
        stack.pop_all()
        if any(control.notes()):
            print(f"tokenway bench: rank {control.rank} failed: {control.where()}", file=sys.stderr, flush=True)
        raise
    progress.close()
    return results


@contextmanager
def open_group(comm: Comm, **keywords: Any) -> Iterator[Group]:
    """A group that is closed at the end, unless this rank alone failed."""
    group = Group(comm, **keywords)
    try:
        yield group
    except verify.Mismatch:
        group.close()
        raise
    group.close()


def finish(settings: Settings, results: dict[str, Any], versions: dict[str, str] | None = None) -> int:
    """Prints and writes what was measured. versions: of more than is known here."""
    told = asdict(settings)
    del told["json"], told["plot"], told["launched"]  # where it was written is nobody's business
    for name in ("nvlink", "portable"):
        if told[name] is None:
            del told[name]
    told["routings"] = [table.short(name) for name in settings.routings]
    run = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "versions": machine.versions() | (versions or {}),
        "settings": told,
        **results,
    }
    with usage.printing():  # first: the rest may fail
        table.show(run)
    if settings.json:
        with open(settings.json, "w", encoding="utf-8") as file:
            # Numbers of one list on one line: a file that people can page through.
            text = json.dumps(run, indent=1)
            file.write(re.sub(r"\[[\d\s.,e+-]+\]", lambda m: " ".join(m[0].split()), text) + "\n")
    if settings.plot:
        from tokenway.bench import plot

        plot.draw(run, settings.plot)
    return 0


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
        with open_group(self.control.comm, **keywords) as group:
            for case in cases:
                progress.doing(f"{case.name}: verifying")
                ours, wants = self._verified(case, group)
                row = facts(case, group, EXCHANGES + self.settings.backward)
                if not self.settings.verify_only:
                    progress.doing(f"{case.name}: timing")
                    row |= self._timed(case, ours, wants)
                rows.append(row)
                progress.done()
        return rows

    def _agree(self, problem: str | None) -> None:
        """Raises Mismatch on all ranks if any has a problem. Collective."""
        found = self.control.agree(problem)
        if found:
            raise verify.Mismatch(found)

    def _verified(self, case: Case, group: Group) -> tuple[timing.Ours, list[np.ndarray]]:
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
        self._agree(_problem(verify.exchange_once, it.case, it.group, it.handle, it.sent, it.made, twice))
        it.combine()
        want = verify.expected_output(it.case, self.rank)
        self._agree(_problem(verify.check_output, it.case, self.rank, it.made[2], want))
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
                self._agree(_problem(check))
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
            self._agree(_problem(check, *args))
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


def facts(case: Case, group: Group, verified: int = EXCHANGES) -> dict[str, Any]:
    """What is known of a row without timing it."""
    total, _, _ = case.moved_rows()
    window = group.window_bytes()
    k, n = case.profile.top_k, case.ranks
    return {
        "profile": case.profile.name,
        "hidden": case.profile.hidden,
        "experts": case.profile.experts,
        "top_k": k,
        "routing": table.short(case.routing),
        "tokens": case.tokens,
        "ranks": n,
        "dtype": case.dtype,
        "combine_dtype": case.combine_dtype,
        "layout": case.layout,
        "weighting": case.weighting,
        "verified_exchanges": verified,
        "dispatch_row_bytes": case.dispatch_row,
        "combine_row_bytes": case.combine_row,
        "rows_moved": total,
        "bytes_moved": total * (case.dispatch_row + case.combine_row),
        "formula_rows": case.tokens * min(n, k),
        "window_bytes": window.window,
        "expert_buffers_bytes": window.expert_buffers,
        "max_tokens": group.max_tokens,
    }


def _problem(check: Any, *args: Any) -> str | None:
    try:
        check(*args)
    except verify.Mismatch as mismatch:
        return str(mismatch)
    return None


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


def run_ranks(settings: Settings, rank: Callable[[Settings], int] = run_rank, limit: float | None = None) -> int:
    """Runs the ranks as processes of this host, for `limit` seconds at most; returns the exit code."""
    with Ranks(rank, settings.ranks, settings) as ranks:
        outcomes, culprit = ranks.wait_or_fail(limit)
        if culprit is None:
            late = [number for number, outcome in enumerate(outcomes) if outcome is None]
            if late:
                print(f"tokenway bench: ranks {late} did not end within {limit:.0f} s", file=sys.stderr)
                return 1
            return max(int(outcome.value) for outcome in outcomes if outcome is not None)
        why = outcomes[culprit]
        assert why is not None
        print(f"tokenway bench: rank {culprit}: {_why(why)}", file=sys.stderr)
        return 1


def _why(outcome: Outcome) -> str:
    if outcome.error:
        return outcome.error.strip().splitlines()[-1]
    return f"ended with exit code {outcome.exitcode}"
