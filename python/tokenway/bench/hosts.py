"""`tokenway bench --backend fabric`: pairs of dispatch and combine between hosts, beside the portable backend.

Ranks are processes of any hosts that torchrun has started, or of this machine (namespaces.py makes hosts of it), or
processes that are started here, of which so many stand for a host. What they tell each other goes over a process group
of gloo's, and not while anything is timed.

Hosts have no clock and no gate in common, so steps follow each other as in a program: a new routing, a dispatch, a
combine. A rank's time of a step is from the end of the one before; the time of the step is that of the rank that took
longest. Each step needs rows of every rank, so no rank is more than a step ahead. Backends take turns in the same
processes. The results of all routings are compared with the oracle before the timing, and again after it. In the same
turns go the bytes of a pair alone, by plain sockets (hosts_floor.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tokenway.bench import runner, timing, verify
from tokenway.bench.case import Case
from tokenway.bench.control import Telling
from tokenway.bench.hosts_floor import FLOOR, FOLDED, Floor, Rails
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.bench.talk import Talk, hosts_of, ranks_per_host
from tokenway.connecting import _host, connect
from tokenway.group import Group
from tokenway.handle import Handle

FABRIC, BY_DOMAIN = "fabric", "fabric by domain"
ROUTINGS = 4  # by turns, so that no step finds what it needs where the last one left it

Array = np.ndarray


def measure(settings: Settings) -> Results:
    """All points of a run."""
    return runner.on_ranks(settings, measure_rank)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    with ExitStack() as stack:
        talk = Talk()
        stack.callback(talk.close)
        progress = Progress(len(settings.cases()), talk.rank == 0)
        stack.callback(progress.close)
        return runner.measured(lambda: _points(settings, talk, progress, stack), talk, progress, stack)


@dataclass
class Step:
    """One of the routings of a case: what this rank sends, its experts' answers, and what must come of them."""

    case: Case
    sent: tuple[Array, Array | None]
    made: tuple[dict[str, Array], Array, Array]
    want: Array

    def check(self, rank: int) -> None:
        """Raises Mismatch if what was combined last is not right."""
        verify.check_output(self.case, rank, self.made[2], self.want)


class Steps:
    """Steps of a group, by turns of all routings: a subject of timing.rounds_of."""

    phases: ClassVar[tuple[str, ...]] = ("pair",)

    def __init__(self, name: str, group: Group, handle: Handle, steps: Sequence[Step]):
        self.name, self._group, self._handle, self.steps = name, group, handle, steps
        self._next = 0

    def once(self, _: Telling) -> tuple[int, ...]:
        """A routing, a dispatch, a combine."""
        begin = time.perf_counter_ns()
        step = self.steps[self._next % len(self.steps)]
        self._next += 1
        x, rank = step.case.exchange, self._group.rank
        self._handle.update(x.ids[rank], x.weight[rank])
        it = timing.Exchanged(step.case, self._group, self._handle, step.sent, step.made)
        it.pair()
        return (time.perf_counter_ns() - begin,)

    def check(self, rank: int) -> None:
        """Raises Mismatch if what was combined last of any routing that had its turn is not right."""
        for step in self.steps[: self._next]:
            step.check(rank)


def _points(settings: Settings, talk: Talk, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    """The rows of a run, and what hosts and backends there were."""
    assert settings.hosts is not None
    each = ranks_per_host(settings.hosts.ranks_per_host, settings.ranks, settings.launched)
    comms = {}
    for name in settings.hosts.backends:
        more = {"ranks_per_host": each} if name == FABRIC and each else {}
        comms[name] = stack.enter_context(connect(backend=name, **more))
    hosts = hosts_of(talk.allgather(_host()), each)
    domains = dict.fromkeys(comms, 0)
    if FABRIC in comms and (domain := alike(hosts)):
        comms[BY_DOMAIN], domains[BY_DOMAIN] = comms[FABRIC], domain
    rails = None
    if len(set(hosts)) > 1 and not settings.verify_only:
        rails = Rails(talk, hosts)
        stack.callback(rails.close)
    rows = []
    for profile in settings.profiles:
        cases = [case for case in settings.cases() if case.profile.name == profile]
        most = max(case.tokens for case in cases)
        with ExitStack() as groups:
            made: dict[str, Group] = {}
            for name, domain in domains.items():
                keywords = replace(cases[0], domain=domain).group_settings(most)
                made[name] = groups.enter_context(runner.open_group(comms[name], **keywords))
            for case in cases:
                progress.doing(case.name)
                names = [] if rails is None else _floors(hosts, made)
                floor = [Floor(name, rails, _routings(case), hosts) for name in names]
                rows.append(_point(settings, talk, made, case, hosts, floor))
                progress.done()
    why = {name: comm.why for name, comm in comms.items()}
    return {"backend": "fabric", "hosts": np.bincount(hosts).tolist(), "why": why, "rows": rows}


def _floors(hosts: Sequence[int], groups: dict[str, Group]) -> list[str]:
    """What of the bytes alone is timed: by domain, where hosts fold."""
    folds = BY_DOMAIN in groups and len(hosts) % groups[BY_DOMAIN].domain == 0
    return [FLOOR, FOLDED] if folds else [FLOOR]


def alike(hosts: Sequence[int]) -> int:
    """How many ranks each host has, where all but perhaps the last, which may have fewer, have as many, several, and in
    order; else 0: no domain is a host."""
    each = hosts.count(0)
    return each if each > 1 and len(hosts) > each and list(hosts) == [rank // each for rank in range(len(hosts))] else 0


def rows_between(case: Case, hosts: Sequence[int]) -> dict[str, int]:
    """Rows of all ranks that a dispatch moves to other hosts: once to each rank, and once to each host."""
    of_rank = np.asarray(hosts)
    to_ranks = to_hosts = 0
    for source, routing in enumerate(case.exchange.routing):
        for host in set(hosts) - {hosts[source]}:
            goes = np.asarray(routing.goes)[:, of_rank == host]
            to_ranks += int(goes.sum())
            to_hosts += int(goes.any(axis=1).sum())
    return {"to_ranks": to_ranks, "to_hosts": to_hosts}


def _point(
    settings: Settings,
    talk: Talk,
    groups: dict[str, Group],
    case: Case,
    hosts: Sequence[int],
    floor: Sequence[Floor],
) -> dict[str, Any]:
    """The row of a case: verified by each backend, and timed by turns."""
    steps = _verified(talk, groups, case)
    row = runner.case_facts(case) | {"rows_between_hosts": rows_between(case, hosts), "pairs": {}, "floor": {}}
    if settings.verify_only:
        return row
    subjects: list[Steps | Floor] = [*steps, *floor]
    times = timing.rounds_of(
        subjects, talk, rounds=settings.rounds, iterations=settings.iterations, warmup=settings.warmup
    )
    for subject in subjects:
        runner.agree(talk, verify.problem_of(subject.check, talk.rank))
        found = timing.summary(times[subject.name]["pair"])
        p99 = np.percentile(np.concatenate(times[subject.name]["pair"]), 99)
        found["p99"] = round(float(p99), 2)
        if isinstance(subject, Floor):
            row["floor"][subject.name] = found | {"bytes": subject.bytes}
        else:
            row["pairs"][subject.name] = found
    return row


def _routings(case: Case) -> list[Case]:
    """The case by all routings that take turns."""
    return [replace(case, seed=case.seed + number) for number in range(ROUTINGS)]


def _verified(talk: Talk, groups: dict[str, Group], case: Case) -> list[Steps]:
    """The subjects of a case, whose results all have been compared with the oracle's."""
    subjects = []
    wants: dict[int, list[Array]] = {}
    for name, group in groups.items():
        cases = _routings(replace(case, domain=group.domain))
        if group.domain not in wants:
            wants[group.domain] = [verify.expected_output(at, talk.rank) for at in cases]
        steps = []
        handle = None
        for at, want in zip(cases, wants[group.domain], strict=True):
            x, sent = at.exchange, at.inputs(talk.rank)
            if handle is None:
                handle = group.route(x.ids[talk.rank], x.weight[talk.rank])
            else:
                handle.update(x.ids[talk.rank], x.weight[talk.rank])
            step = Step(at, sent, verify.buffers(at, group), want)
            runner.agree(talk, verify.problem_of(verify.exchange_once, at, group, handle, sent, step.made, False))
            timing.Exchanged(at, group, handle, sent, step.made).combine()
            runner.agree(talk, verify.problem_of(step.check, talk.rank))
            step.made[2].fill(0)  # whatever is right after the timing was made in it
            steps.append(step)
        assert handle is not None
        subjects.append(Steps(name, group, handle, steps))
    return subjects
