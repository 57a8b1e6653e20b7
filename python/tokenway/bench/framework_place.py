"""Where the ranks of `tokenway bench --frameworks` are, and how their calls are timed there. Needs PyTorch.

On GPUs a call is timed eagerly, by the wall clock until the device is done, and what of that the host takes; and, where
it can be captured, in a graph. On the CPU it is timed from a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import torch

from tokenway.bench import gloo, gpu_rank, runner, timing
from tokenway.bench.control import Control
from tokenway.bench.graphs import Graphs, Loop, Replay
from tokenway.bench.progress import Progress
from tokenway.bench.settings import Settings
from tokenway.integrations import groups

COUNT = 10  # calls in a graph, each with a routing of its own
MANY = 40  # in a loop in which the host never waits, so that what it takes is told finely

Call = Callable[[int], Any]  # is given the number of the routing
Times = dict[str, dict[str, Any]]  # name, "graph", "eager" or "host" -> summary


class Place:
    """A rank: its device, its process group (the default one), and the clock. Collective to make."""

    def __init__(self, settings: Settings, control: Control, progress: Progress, stack: ExitStack):
        self.settings, self.control, self.progress, self.stack = settings, control, progress, stack
        self.rank, self.ranks = control.rank, control.nranks
        self.dtype = getattr(torch, settings.dtype)
        self.on_gpus = settings.nvlink is not None
        self.device = self._device()
        if self.on_gpus:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
        stack.callback(gloo.Process(control, "cpu:gloo,cuda:nccl" if self.on_gpus else "gloo").close)
        stack.callback(self.close)
        self.begun: set[str] = set()  # frameworks that are imported, and have process groups

    def _device(self) -> torch.device:
        return torch.device("cuda", gpu_rank.use_gpu(self.control)) if self.on_gpus else torch.device("cpu")

    def settle(self) -> None:
        """Between what allocates and an exchange: all ranks are here, and their devices are done. Collective."""
        if self.on_gpus:
            torch.cuda.current_stream().synchronize()
        self.control.allgather(None)

    def close(self) -> None:
        """Closes all groups of integrations, which are made anew where they are needed again. Collective."""
        self.settle()
        for peers in groups.living():
            peers.close()

    def agree(self, problem: str | None) -> None:
        """Raises Mismatch on all ranks if any has a problem. Collective."""
        runner.agree(self.control, problem)

    def subjects(self, name: str, call: Call, *, graph: bool, waits: bool = False) -> list[Any]:
        """What times a call, after its first calls: in a graph if asked for, and in a loop. waits: the host does, for
        the device, in each call. Collective."""
        for number in range(COUNT):  # room for all that comes, before anything is captured
            call(number)
        self.settle()
        if not self.on_gpus:
            turns = cycle(range(COUNT))
            return [timing.Pair(f"{name}|eager", lambda: call(next(turns)))]
        made: list[Any] = []
        if graph:

            def body() -> None:
                for number in range(COUNT):
                    call(number)

            self.progress.at(f"capturing {name}")
            made.append(Graphs(f"{name}|graph", {"pair": Replay(lambda: call(0), body, COUNT)}))
            self.settle()
        numbers = cycle(range(COUNT))
        return [*made, Loop(f"{name}|eager", lambda: call(next(numbers)), COUNT if waits else MANY)]

    def times(self, subjects: Iterable[Any]) -> Times:
        """All of them in turns. Collective."""
        subjects = list(subjects)
        settings = self.settings

        def told(where: str) -> None:
            self.progress.at(where)
            for peers in groups.living():
                for shared in peers.groups.values():
                    if shared.group is not None:
                        shared.group.check()  # after an error graphs must not be replayed

        turns = {"rounds": settings.rounds, "iterations": settings.iterations, "warmup": settings.warmup}
        times = timing.rounds_of(subjects, self.control, **turns, told=told)
        for subject in subjects:
            getattr(subject, "close", lambda: None)()
        found: Times = {}
        for subject, phases in times.items():
            name, kind = subject.split("|")
            for phase, rounds in phases.items():
                if phase != "outside":
                    key = kind if phase in ("pair", "eager") else phase
                    found.setdefault(name, {})[key] = timing.summary(rounds)
        return found


def steps() -> int:
    """Of all groups of integrations in this process: none are made where a framework's own way is taken instead."""
    return sum(shared.steps for peers in groups.living() for shared in peers.groups.values())


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far rows [T, H] are from what they must be, of their norm: the worst one; 0 without rows."""
    if got.shape != want.shape:
        return float("inf")
    if not len(got):
        return 0.0
    far = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-30)
    return float(far.nan_to_num(float("inf")).max())
