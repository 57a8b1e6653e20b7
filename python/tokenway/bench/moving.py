"""`tokenway bench --moving`: steps of MoE layers while experts move, beside the same steps without.

A step is a graph of `--moving-layers` layers, replayed with new routings: of each layer a dispatch, SwiGLU experts
whose weights lie in the window, and a combine per expert. Steps without moves, with moves and without take turns: what
the two turns without differ by is what the machine does. In turns with moves a balancer follows one plan after the
other, each of which changes `--moving-writes` slots of every layer. The host is two steps ahead at most, as one that
waits for tokens is. After all turns the results of a routing are compared, bit for bit, with those before any expert
has moved.

Beside it what the host spends in a balancer's step; which waiting calls of CUDA some steps with moves make, by a
profile; and a grouped product whose weights have just come to the window, beside one of memory by PyTorch's allocator.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from tokenway.balance import Balancer
from tokenway.bench import breakdown, gpu_machine, graphs, nvlink, runner
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.gpu_rank import connect_gpu
from tokenway.bench.moving_case import MovingLayers, Swaps
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.comm import Comm

AHEAD = 2  # steps that the host is before the device at most
TURNS = ("before", "moving", "after")  # of a round
WARMUP = 20  # steps before all turns
PROFILED = 24  # steps under a profile
IDLE = 16  # steps of a balancer behind each turn, when nothing moves any more
PRODUCTS = 40  # of each memory, in turns
WAITS = re.compile(r"Synchronize|cu(da)?Memcpy(?!\w*Async)|cu(da)?MemAlloc(?!\w*Async)|cu(da)?Malloc(?!\w*Async)")

Array = np.ndarray


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    return runner.on_ranks(settings, measure_rank, nvlink.LIMIT)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    return runner.as_rank(settings, len(settings.cases()), partial(_on_gpus, settings))


def _on_gpus(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    progress.doing("connecting")
    comm = stack.enter_context(connect_gpu(settings, control))
    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(comm.device)))
    measured = []
    for case in settings.cases():
        progress.doing(case.name)
        with ExitStack() as groups:
            measured.append(_row(settings, case, comm, control, progress, groups))
        progress.done()
    more = gpu_machine.results(settings.ranks) if control.rank == 0 else {}
    return {"moving": measured, "backend": "nvlink", **more}


def _row(
    settings: Settings, case: Case, comm: Comm, control: Control, progress: Progress, groups: ExitStack
) -> dict[str, Any]:
    """A profile at a size."""
    moving = settings.moving
    assert moving is not None
    progress.at("filling weights")
    made = MovingLayers(groups, comm, case, moving)
    balancer = groups.enter_context(Balancer(made.group, made.weights, every=None, step_bytes=moving.step_mib << 20))
    steps = Steps(made, balancer, Swaps(case.ranks, moving.writes, settings.seed), control)
    groups.callback(steps.close)
    before = steps.results(0)
    steps.run(WARMUP, moves=False)
    spent: dict[str, list[Array]] = {turn: [] for turn in TURNS}
    for number in range(settings.rounds):
        for turn in TURNS:
            progress.at(f"round {number + 1}, {turn}")
            steps.run(moving.steps // (3 * settings.rounds), moves=turn == "moving")
            spent[turn].append(control.slowest(steps.spent))
            steps.settle()
    progress.at("comparing")
    runner.agree(control, None if torch.equal(before, steps.results(0)) else "results differ once experts have moved")
    statistics = balancer.statistics
    if not statistics.moves:
        raise RuntimeError("no expert has moved: the turns were too short")
    row = runner.facts(case, made.group, 1) | {
        "layers": moving.layers,
        "expert_bytes": made.weights.layout.move_bytes,
        "us": {turn: _summary(np.concatenate(times)) for turn, times in spent.items()},
        "host_us": {kind: float(np.median(times)) for kind, times in steps.host.items() if times},
        "plans": statistics.plans,
        "moves": control.allgather(statistics.moves),
        "moved_bytes_a_step": statistics.bytes / max(1, steps.moved_in),
        "switch_steps": statistics.switch_steps,
    }
    progress.at("a product")
    row["product_us"] = control.allgather(_products(made, balancer))
    progress.at("a profile")
    return row | {"profile_of_steps": steps.profile()}


def _summary(us: Array) -> dict[str, float]:
    return {name: float(np.percentile(us, at)) for name, at in (("p50", 50), ("p99", 99))} | {"steps": len(us)}


class Steps:
    """A graph of one step, and what drives it: a host that loads ids, replays, and balances or does not."""

    def __init__(self, made: MovingLayers, balancer: Balancer, swaps: Swaps, control: Control):
        self._made, self._balancer, self._swaps, self._control = made, balancer, swaps, control
        self._stream = torch.cuda.current_stream()
        self._events: list[Any] = []
        self.spent: list[float] = []  # us of each step of the last turn, on this rank
        self.host: dict[str, list[float]] = {
            "moving": [],
            "settling": [],
            "idle": [],
        }  # us of each step of the balancer
        self.moved_in = 0  # steps in which experts may move, those behind a turn too
        self._asked = 0  # plans
        self._count = 0
        made.step()
        self._stream.synchronize()
        control.allgather(None)
        self._graph = graphs.captured(made.step, self._stream)

    def run(self, count: int, moves: bool) -> None:
        """A turn. Collective."""
        while len(self._events) <= count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._control.gate()
        self._events[0].record()
        for i in range(count):
            self._step(moves)
            self._events[i + 1].record()
            if i >= AHEAD:
                self._events[i + 1 - AHEAD].synchronize()
        self._stream.synchronize()
        self._made.group.check()
        pairs = zip(self._events[:count], self._events[1:], strict=False)
        self.spent = [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def _step(self, moves: bool) -> None:
        self._made.load(self._count)
        self._count += 1
        self._graph.replay()
        if moves:
            self.moved_in += 1
            self._ask()
            self._balance("moving")

    def _ask(self) -> None:
        """Rank 0 gives the next plan when the last one is done."""
        if self._made.group.rank == 0 and self._balancer.idle and self._balancer.statistics.plans == self._asked:
            self._balancer.follow(self._swaps.following(self._balancer.slot_maps().physical_to_logical))
            self._asked += 1

    def _balance(self, kind: str) -> None:
        begin = time.perf_counter_ns()
        self._balancer.step()
        self.host[kind].append((time.perf_counter_ns() - begin) / 1e3)

    def settle(self) -> None:
        """Steps until no expert moves any more. Collective."""
        while True:
            done = self._balancer.idle and self._balancer.statistics.plans >= self._asked
            if all(self._control.allgather(done)):
                for _ in range(IDLE):
                    self._balance("idle")
                return
            for _ in range(4):
                self.moved_in += 1
                self._step(moves=False)
                self._stream.synchronize()
                self._balance("settling")

    def results(self, step: int) -> torch.Tensor:
        """Of a step's routing, as experts are now."""
        self._control.allgather(None)
        self._made.load(step)
        self._graph.replay()
        self._stream.synchronize()
        self._made.group.check()
        return self._made.results.clone()

    def profile(self) -> dict[str, Any]:
        """{"calls": of CUDA that steps with moves make on the host of rank 0, "waits": those which wait}, or
        {"missing": why}. Collective."""
        profiler, problem = breakdown.start() if self._made.group.rank == 0 else (None, "another rank's")
        self._control.allgather(None)
        with torch.profiler.record_function("steps"):
            for _ in range(PROFILED):
                self._step(moves=True)
        self._stream.synchronize()
        found = {"missing": problem} if profiler is None else _calls(profiler)
        self.settle()
        return found

    def close(self) -> None:
        """Frees the graph, before what it uses ends."""
        self._graph.reset()


def _calls(profiler: Any) -> dict[str, Any]:
    try:
        profiler.__exit__(None, None, None)
        events = [*profiler.events()]
        steps = next(event.time_range for event in events if event.name == "steps")
    except Exception as error:  # whatever it is, a missing profile ends no benchmark
        return {"missing": f"{type(error).__name__}: {error}"}
    counted: dict[str, int] = {}
    for event in events:
        within = steps.start <= event.time_range.start <= steps.end and "CUDA" not in str(event.device_type)
        if within and re.match(r"cu(da)?[A-Z]", event.name):
            counted[event.name] = counted.get(event.name, 0) + 1
    if not counted:
        return {"missing": "the profiler saw no call"}
    return {"steps": PROFILED, "calls": counted, "waits": sorted(name for name in counted if WAITS.search(name))}


@torch.no_grad()
def _products(made: MovingLayers, balancer: Balancer) -> dict[str, float]:
    """us of the first grouped product of a layer's weights, one expert of which has just come by a copy engine: in the
    window, and in memory of PyTorch's allocator. Between two of them another layer's weights are read, so that no cache
    and no translation of addresses is left. Results are what they are: spare slots have no rows."""
    from tokenway.pytorch import experts

    profile = made.case.profile
    inside = made.tensor("gate_up", 0)
    apart = torch.empty_like(inside).copy_(inside)
    used = profile.experts // made.case.ranks
    table = balancer.table(0)[made.weights.rank_of_slot == made.group.rank]
    spare = int(np.flatnonzero(table < 0)[0])
    each = max(1, made.case.tokens * made.case.ranks * profile.top_k // profile.experts)
    sizes = torch.from_numpy(np.where(table < 0, 0, each)).to(inside.device)
    ends = sizes.cumsum(0).to(torch.int32)
    rows = torch.randn((used * each, profile.hidden), device=inside.device).to(inside.dtype)
    other = made.tensor("gate_up", made.layers - 1)
    stream = torch.cuda.current_stream()
    source = next(slot for slot, rank in enumerate(made.weights.rank_of_slot) if rank != made.group.rank)
    target = int(np.flatnonzero(made.weights.rank_of_slot == made.group.rank)[spare])
    pieces = made.weights.pieces(0, source, target, inside[0].nbytes)[:1]  # of gate_up
    spent: dict[str, list[float]] = {"window": [], "allocator": []}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for i in range(2 * PRODUCTS):
        where, weights = (("window", inside), ("allocator", apart))[i % 2]
        if where == "window":
            made.weights.pull(pieces[0], stream.cuda_stream)
        else:
            apart[spare].copy_(inside[spare])
        experts.product(rows, other, ends)
        events[0].record()
        experts.product(rows, weights, ends)
        events[1].record()
        stream.synchronize()
        spent[where].append(events[0].elapsed_time(events[1]) * 1e3)
    return {name: float(np.median(times[2:])) for name, times in spent.items()}
