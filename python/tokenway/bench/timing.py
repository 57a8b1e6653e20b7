"""What is timed, and what becomes of the times.

One iteration of a subject starts all ranks at the gate (see control.py) and ends when the last rank
returns. Ours is timed three times per iteration: dispatch alone, combine alone, and the pair
without a gate between them. A backward pass is timed likewise: a dispatch of the gradients of
combine's results, by the routing that is cached, a combine of those of dispatch's rows, both, and
both after a pair of the forward pass. Gradients are rows of H elements; those of weights, which
training sends beside them, are left out. Outputs are allocated before, the handle is
reused, and the rows that combine reads lie in a buffer of the caller's, as experts leave them.
Routing is timed apart, as it needs no other rank. Subjects take turns: in each round every one of
them runs its warm-up and its share of the iterations, so that what disturbs the machine for a while
disturbs them all; ranks are spread over the cores before each turn.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.group import Group
from tokenway.handle import Handle

PHASES = ("dispatch", "combine", "pair")
BACKWARD = ("combine_backward", "dispatch_backward", "backward", "both")  # a dispatch, a combine, these; with the pair


class Subject(Protocol):
    """What is measured beside others: `once` gives a time in nanoseconds for each of `phases`."""

    name: str
    phases: tuple[str, ...]

    def once(self, control: Control) -> tuple[int, ...]:
        """One iteration. Collective."""
        ...


@dataclass
class Exchanged:
    """One pass over a routing: what a dispatch and a combine send, and where they leave it."""

    case: Case
    group: Group
    handle: Handle
    sent: tuple[Any, Any]
    made: tuple[dict[str, Any], Any, Any]

    def dispatch(self) -> None:
        """A step of all ranks."""
        payloads = None if self.sent[1] is None else {"scales": self.sent[1]}
        self.group.dispatch(
            self.handle,
            self.sent[0],
            payloads,
            layout=self.case.layout,
            bound=self.case.tokens,
            out=self.made[0],
        )

    def combine(self) -> None:
        """A step of all ranks."""
        self.group.combine(self.handle, self.made[1], weighting=self.case.weighting, out=self.made[2])

    def pair(self) -> None:
        """Both."""
        self.dispatch()
        self.combine()


@dataclass
class Ours:
    """Dispatch and combine of this library, through Python."""

    forward: Exchanged
    backward: Exchanged | None  # None: only the forward pass is timed
    name: str = "tokenway"

    @property
    def phases(self) -> tuple[str, ...]:
        """What `once` times: in high throughput the exchange of counts too, which a routing needs once."""
        names = PHASES if self.backward is None else PHASES + BACKWARD
        return (*names, "counts") if self.forward.case.exact else names

    def once(self, control: Control) -> tuple[int, ...]:
        """Dispatch, then combine, then both; the same backward; counts."""
        there, back = self.forward, self.backward
        calls = [there.dispatch, there.combine, there.pair]
        if back is not None:
            calls += [back.dispatch, back.combine, back.pair, self._both]
        times = tuple(control.time(call) for call in calls)
        if not there.case.exact:
            return times
        x, rank = there.case.exchange, there.group.rank
        there.handle.update(x.ids[rank], x.weight[rank])
        return (*times, control.time(lambda: there.group.exchange_counts(there.handle)))

    def _both(self) -> None:
        assert self.backward is not None
        self.forward.pair()
        self.backward.pair()


@dataclass
class Pair:
    """A baseline: one call does what a dispatch and a combine do."""

    name: str
    call: Callable[[], None]
    phases: tuple[str, ...] = ("pair",)

    def once(self, control: Control) -> tuple[int, ...]:
        """The pair."""
        return (control.time(self.call),)


def rounds_of(
    subjects: Sequence[Subject],
    control: Control,
    *,
    rounds: int,
    iterations: int,
    warmup: int,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, list[list[float]]]]:
    """Times in us: subject, phase, round, iteration; of the rank that was last. told: what comes, before each
    iteration. Collective."""
    mine: dict[str, list[list[tuple[int, ...]]]] = {s.name: [] for s in subjects}
    share = max(1, -(-iterations // rounds))
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for subject in subjects:
                _spread(control.rank)

                def once(subject: Subject = subject, where: str = f"timing {subject.name}, round {number}") -> Any:
                    told(where)
                    return subject.once(control)

                for _ in range(warmup):
                    once()
                mine[subject.name].append([once() for _ in range(share)])
    finally:
        gc.enable()
    times = {}
    for subject in subjects:
        slowest = control.slowest(mine[subject.name]) / 1e3  # [rounds, iterations, phases]
        times[subject.name] = {phase: slowest[:, :, i].round(2).tolist() for i, phase in enumerate(subject.phases)}
    return times


def _spread(rank: int) -> None:
    """Puts the ranks on different cores, as far as there are, and leaves them free to move.

    A subject that sleeps a lot can leave two ranks on one core with another idle, and those that
    follow would pay for it until the kernel notices.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[rank % len(cores)]})
    os.sched_setaffinity(0, cores)


def route_times(case: Case, handle: Handle, rank: int, count: int) -> list[float]:
    """Times in us of replacing the handle's routing by itself. Not collective."""
    ids, weights = case.exchange.ids[rank], case.exchange.weight[rank]
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        handle.update(ids, weights)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def summary(rounds: list[list[float]]) -> dict[str, Any]:
    """Median, p10, p90 over all iterations, the median of each round, and all the times."""
    flat = np.concatenate([np.asarray(r, float) for r in rounds])
    p10, median, p90 = np.percentile(flat, [10, 50, 90])
    return {
        "median": round(float(median), 2),
        "p10": round(float(p10), 2),
        "p90": round(float(p90), 2),
        "rounds": [round(float(np.median(r)), 2) for r in rounds],
        "all": rounds,
    }


def ratio(times: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """How many times as long `times` took as `base`: of the medians, and round by round."""
    pairs = zip(times["rounds"], base["rounds"], strict=True)
    return {
        "times_ours": round(times["median"] / base["median"], 4),
        "times_ours_rounds": [round(t / b, 4) for t, b in pairs],
    }
