"""When rows travel and when experts compute: a timeline of two micro-batches, in turn and overlapped.

    python examples/08_timeline.py --plot timeline.png              # 2 processes on the CPU
    python examples/08_timeline.py --device cuda --json times.json  # 2 GPUs

Two micro-batches go through dispatch, experts and combine twice: one after the other on one stream, and overlapped,
each on a lane of its own. Every part is noted with its begin and end: on GPUs by CUDA events on the stream that it runs
on, on the CPU by the clock around the calls. Printed is how long both orders take, and in how much of the experts' time
rows travel; --plot draws all of it, --json keeps the numbers. docs/OVERLAP.md explains what overlaps.

Experts are matrix products. Even ranks have more of them in the first micro-batch, odd ranks in the second. The results
of both orders must have the same bits: exit code 0 if they do. Needs PyTorch with --device cuda,
matplotlib with --plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import tokenway as tw
from tokenway import gating, tensors

BATCHES = 2
EXCHANGES, COMPUTES = ("dispatch", "combine"), ("experts",)
COLOURS = {"dispatch": "#2b7bba", "combine": "#7b3fa0", "experts": "#e08a1e", "send": "#9ecae1", "wait": "#dddddd"}


@dataclass(frozen=True)
class Job:
    """What both orders do."""

    device: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    sm_limit: int


@dataclass(frozen=True)
class Interval:
    """Something that took a while; times in us since the ranks met."""

    order: str  # in turn or overlapped
    rank: int
    row: str  # of the drawing: a stream of a GPU; on the CPU the calls, and each lane
    what: str
    batch: int
    begin: float
    end: float


class HostClock:
    """On the CPU: around calls. A lane is busy from a call that sends on it until the one that receives."""

    def __init__(self, order: str, rank: int):
        self._order, self._rank = order, rank
        self._begin = time.monotonic_ns()
        self._intervals: list[Interval] = []

    def note(self, row: str, what: str, batch: int, begin: int, end: int) -> None:
        """An interval, of the clock's times."""
        us = [(at - self._begin) / 1e3 for at in (begin, end)]
        self._intervals.append(Interval(self._order, self._rank, row, what, batch, *us))

    def call(
        self, what: str, batch: int, function: Callable[[], Any], lane_since: tuple[str, int] | None = None
    ) -> Any:
        """A call; lane_since: (dispatch or combine, when it was sent) of the one that it receives."""
        begin = time.monotonic_ns()
        result = function()
        end = time.monotonic_ns()
        self.note("calls", what, batch, begin, end)
        if lane_since is not None:
            self.note(f"lane {batch}", lane_since[0], batch, lane_since[1], end)
        return result

    def intervals(self) -> list[Interval]:
        """All that was noted."""
        return self._intervals


class DeviceClock:
    """On a GPU: events on the stream of each part, before and behind it."""

    def __init__(self, order: str, rank: int):
        import torch

        self._order, self._rank, self._cuda = order, rank, torch.cuda
        self._noted: list[tuple[str, str, int, Any, Any]] = []
        self._begin = self._event()

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def call(self, row: str, what: str, batch: int, function: Callable[[], Any]) -> tuple[Any, Any]:
        """A part on the current stream: its result, and the event behind it."""
        begin = self._event()
        result = function()
        end = self._event()
        self._noted.append((row, what, batch, begin, end))
        return result, end

    def intervals(self) -> list[Interval]:
        """All that was noted, when the device is done with it."""
        self._cuda.synchronize()
        return [
            Interval(self._order, self._rank, row, what, batch, *(1e3 * self._begin.elapsed_time(e) for e in (a, b)))
            for row, what, batch, a, b in self._noted
        ]


class Layer:
    """One rank's micro-batches, and what its experts do."""

    def __init__(self, job: Job, group: tw.Group):
        self.job, self.group = job, group
        rng = np.random.default_rng(group.rank)
        first, second = rng.standard_normal((job.hidden, job.inner)), rng.standard_normal((job.inner, job.hidden))
        self._matrices = [self._here(m / np.sqrt(len(m))) for m in (first, second)]
        self.batches = [self._here(rng.standard_normal((job.tokens, job.hidden))) for _ in range(BATCHES)]
        self.handles = []
        for _ in range(BATCHES):
            ids, weights = gating.softmax_topk(rng.standard_normal((job.tokens, job.experts)), job.top_k)
            handle = group.route(self._as_is(ids), self._as_is(weights))
            self.handles.append(group.exchange_counts(handle))
            _ = handle.recv_rows  # on a GPU the host learns it now, and asks for nothing later

    def _as_is(self, array: np.ndarray) -> Any:
        return array if self.group.device is None else tensors.to_torch(array).to(f"cuda:{self.group.device}")

    def _here(self, array: np.ndarray) -> Any:
        """An array in the group's dtype, where its tensors are."""
        return self._as_is(array.astype(tensors.numpy_dtype(self.group.dtype)))

    def dispatch(self, i: int, **how: Any) -> Any:
        """Of a micro-batch; its handle holds lane i until the combine."""
        return self.group.dispatch(self.handles[i], self.batches[i], lane=i, **how)

    def experts(self, i: int, received: Any) -> Any:
        """Rows [R', H] -> [R', H]; more than once where this rank has more to do."""
        rows = received.tokens
        for _ in range(3 if (self.group.rank + i) % 2 == 0 else 1):
            rows = rows @ self._matrices[0] @ self._matrices[1]
        return rows

    def combine(self, i: int, rows: Any, **how: Any) -> Any:
        """Of a micro-batch."""
        return self.group.combine(self.handles[i], rows, **how)


def host_in_turn(layer: Layer, clock: HostClock) -> list[Any]:
    """One micro-batch after the other."""
    outs = []
    for i in range(BATCHES):
        since = time.monotonic_ns()
        received = clock.call("wait", i, lambda: layer.dispatch(i), ("dispatch", since))  # noqa: B023  called at once
        rows = clock.call("experts", i, lambda: layer.experts(i, received))  # noqa: B023
        since = time.monotonic_ns()
        outs.append(clock.call("wait", i, lambda: layer.combine(i, rows), ("combine", since)))  # noqa: B023
    return outs


def host_overlapped(layer: Layer, clock: HostClock) -> list[Any]:
    """Both are sent before the first is waited for; each goes back before the next is computed."""
    sent, back = [], []
    for i in range(BATCHES):
        since = time.monotonic_ns()
        sent.append((since, clock.call("send", i, lambda: layer.dispatch(i, send_only=True))))  # noqa: B023
    for i, (since, pending) in enumerate(sent):
        received = clock.call("wait", i, pending.result, ("dispatch", since))
        rows = clock.call("experts", i, lambda: layer.experts(i, received))  # noqa: B023
        since = time.monotonic_ns()
        back.append((since, clock.call("send", i, lambda: layer.combine(i, rows, send_only=True))))  # noqa: B023
    return [clock.call("wait", i, p.result, ("combine", since)) for i, (since, p) in enumerate(back)]


def device_in_turn(layer: Layer, clock: DeviceClock) -> list[Any]:
    """One micro-batch after the other, on one stream."""
    outs = []
    for i in range(BATCHES):
        received, _ = clock.call("stream", "dispatch", i, lambda: layer.dispatch(i))  # noqa: B023  called at once
        rows, _ = clock.call("stream", "experts", i, lambda: layer.experts(i, received))  # noqa: B023
        outs.append(clock.call("stream", "combine", i, lambda: layer.combine(i, rows))[0])  # noqa: B023
    return outs


def device_overlapped(layer: Layer, clock: DeviceClock) -> list[Any]:
    """Exchanges on a stream of their own, which waits for experts and they for it; each micro-batch has a lane."""
    import torch

    compute, exchange = torch.cuda.current_stream(), torch.cuda.Stream()
    exchange.wait_stream(compute)
    arrived, outs = [], []
    with torch.cuda.stream(exchange):
        arrived = [clock.call("exchange stream", "dispatch", i, lambda: layer.dispatch(i)) for i in range(BATCHES)]  # noqa: B023
    for i, (received, here) in enumerate(arrived):
        compute.wait_event(here)
        rows, computed = clock.call("compute stream", "experts", i, lambda: layer.experts(i, received))  # noqa: B023
        exchange.wait_event(computed)
        with torch.cuda.stream(exchange):
            rows.record_stream(exchange)
            outs.append(clock.call("exchange stream", "combine", i, lambda: layer.combine(i, rows))[0])  # noqa: B023
    compute.wait_stream(exchange)
    return outs


ORDERS = {
    "cpu": {"in turn": host_in_turn, "overlapped": host_overlapped},
    "cuda": {"in turn": device_in_turn, "overlapped": device_overlapped},
}


def rank_main(job: Job) -> tuple[bool, list[Interval]]:
    """Both orders on one rank: whether they have the same bits, and what was noted."""
    comm = tw.connect(device=None if job.device == "cpu" else job.device)
    settings = {"experts": job.experts, "top_k": job.top_k, "hidden": job.hidden, "max_tokens": job.tokens}
    settings |= {"dtype": "float32" if comm.device is None else "bfloat16", "sm_limit": job.sm_limit}
    with comm, tw.Group(comm, lanes=BATCHES, mode="high_throughput", **settings) as group:
        layer = Layer(job, group)
        outs, intervals = [], []
        for order, run in ORDERS[job.device].items():
            make = HostClock if comm.device is None else DeviceClock
            run(layer, make(order, comm.rank))  # for practice; at its end the ranks have met
            clock = make(order, comm.rank)
            outs.append([bits(out) for out in run(layer, clock)])
            intervals += clock.intervals()
    return all(np.array_equal(a, b) for a, b in zip(*outs, strict=True)), intervals


def bits(out: Any) -> np.ndarray:
    """What a result is made of."""
    if isinstance(out, np.ndarray):
        return out.view(np.uint8)
    import torch

    return out.detach().contiguous().view(torch.uint8).cpu().numpy()


def both_at_once(intervals: list[Interval]) -> float:
    """us in which experts of a rank compute while rows of its travel."""
    total = 0.0
    for one in intervals:
        if one.what not in COMPUTES:
            continue
        beside = [i for i in intervals if i.what in EXCHANGES and i.rank == one.rank]
        cuts = sorted({one.begin, one.end, *(t for i in beside for t in (i.begin, i.end) if one.begin < t < one.end)})
        for begin, end in itertools.pairwise(cuts):
            total += (end - begin) * any(i.begin <= begin and end <= i.end for i in beside)
    return total


def summary(intervals: list[Interval]) -> dict[str, dict[str, float]]:
    """Of each order: us until the last rank is done, of the experts on all ranks, and of these while rows travel."""
    told = {}
    for order in dict.fromkeys(i.order for i in intervals):
        of = [i for i in intervals if i.order == order]
        told[order] = {
            "total_us": round(max(i.end for i in of) - min(i.begin for i in of), 1),
            "experts_us": round(sum(i.end - i.begin for i in of if i.what in COMPUTES), 1),
            "experts_while_rows_travel_us": round(both_at_once(of), 1),
        }
    return told


def draw(intervals: list[Interval], path: str) -> None:
    """A panel for each order: time to the right, a line for each rank's streams, or calls and lanes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    orders = list(dict.fromkeys(i.order for i in intervals))
    figure, panels = plt.subplots(len(orders), 1, figsize=(11, 3 * len(orders)), sharex=True, layout="constrained")
    for axes, order in zip(np.atleast_1d(panels), orders, strict=True):
        of = [i for i in intervals if i.order == order]
        rows = sorted({(i.rank, i.row) for i in of})
        for i in of:
            at = rows.index((i.rank, i.row))
            axes.barh(at, i.end - i.begin, left=i.begin, height=0.7, color=COLOURS[i.what], edgecolor="white")
            axes.text((i.begin + i.end) / 2, at, str(i.batch), ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(rows)), [f"rank {rank}, {row}" for rank, row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{order}: {summary(of)[order]['total_us']:,.0f} us", fontsize=10)
        axes.grid(True, axis="x", alpha=0.25)
    used = [what for what in COLOURS if any(i.what == what for i in intervals)]
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=COLOURS[w]) for w in used], used, loc="outside upper right", ncols=5
    )
    np.atleast_1d(panels)[-1].set_xlabel("us; the numbers are micro-batches")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse() -> argparse.Namespace:
    """The command line; what is not given depends on the device."""
    parser = argparse.ArgumentParser(description="A timeline of two micro-batches, in turn and overlapped.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes, or GPUs (default %(default)s)")
    parser.add_argument("--tokens", type=int, help="of a rank in a micro-batch (default 512; on GPUs 4096)")
    parser.add_argument("--hidden", type=int, help="elements of a token (default 1024; on GPUs 7168)")
    parser.add_argument("--inner", type=int, help="elements inside an expert (default 256; on GPUs 4096)")
    parser.add_argument("--sm-limit", type=int, help="SMs that an exchange takes (default 24)", default=24)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the timeline")
    parser.add_argument("--json", metavar="FILE", help="write every interval")
    options = parser.parse_args()
    for name, (cpu, gpu) in {"tokens": (512, 4096), "hidden": (1024, 7168), "inner": (256, 4096)}.items():
        if getattr(options, name) is None:
            setattr(options, name, cpu if options.device == "cpu" else gpu)
    for name in ("ranks", "tokens", "hidden", "inner", "sm_limit"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'tokenway[plot]'")
    return options


def main() -> int:
    """Starts the ranks, prints, draws."""
    o = parse()
    job = Job(o.device, o.tokens, o.hidden, o.inner, experts=16, top_k=4, sm_limit=o.sm_limit)
    found = tw.run(rank_main, o.ranks, job, timeout=120)
    intervals = [interval for _, of_rank in found for interval in of_rank]
    told = summary(intervals)
    for order, numbers in told.items():
        part = numbers["experts_while_rows_travel_us"] / numbers["experts_us"]
        print(f"{order}: {numbers['total_us']:,.0f} us; rows travel during {100 * part:.0f} % of the experts' time")
    same = all(same for same, _ in found)
    print("The same bits in both orders." if same else "DIFFERENT BITS")
    if o.json:
        with open(o.json, "w", encoding="utf-8") as file:
            json.dump(
                {"job": asdict(job), "summary": told, "intervals": [asdict(i) for i in intervals]}, file, indent=1
            )
    if o.plot:
        draw(intervals, o.plot)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
