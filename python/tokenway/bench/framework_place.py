"""Where the ranks of `tokenway bench --frameworks` are, and how their calls are timed there. Needs PyTorch.

On GPUs a call is timed eagerly, by the wall clock until the device is done, and what of that the host takes; and, where
it can be captured, in a graph, whose last result is compared with what it must be before and behind. On the CPU it is
timed from a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenway.bench import gloo, gpu_rank, runner, timing
from tokenway.bench.control import Control
from tokenway.bench.graphs import Graphs, Loop, Replay
from tokenway.bench.progress import Progress
from tokenway.bench.settings import Settings
from tokenway.integrations import groups

COUNT = 10  # calls in a graph, each with a routing of its own
MANY = 40  # in a loop in which the host never waits, so that what it takes is told finely

# How far a row may be, of its norm: sums are rounded in other places. A weight that is a per cent off is farther.
NEAR = {torch.bfloat16: 0.008, torch.float16: 0.002, torch.float32: 1e-4}

Call = Callable[[int], Any]  # is given the number of the routing
Right = Callable[[int, Tensor], "str | None"]  # the number and what the call made of it: what is wrong
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

    def subjects(self, name: str, call: Call, *, right: Right | None = None, waits: bool = False) -> list[Any]:
        """What times a call, after its first calls: in a graph, whose last result must be right, if that is told; and
        in a loop. waits: the host does, for the device, in each call. Collective."""
        for number in range(COUNT):  # room for all that comes, before anything is captured
            call(number)
        self.settle()
        if not self.on_gpus:
            turns = cycle(range(COUNT))
            return [timing.Pair(f"{name}|eager", lambda: call(next(turns)))]
        made: list[Any] = []
        if right is not None:

            def body() -> Any:
                for number in range(COUNT - 1):
                    call(number)
                return call(COUNT - 1)

            self.progress.at(f"capturing {name}")
            replay = Replay(lambda: call(0), body, COUNT)
            made.append(_Captured(f"{name}|graph", replay, partial(right, COUNT - 1)))
            self.settle()
        numbers = cycle(range(COUNT))
        return [*made, Loop(f"{name}|eager", lambda: call(next(numbers)), COUNT if waits else MANY)]

    def in_graph(self, call: Callable[[], Tensor]) -> Tensor:
        """What a call, whose first ones are over, makes in a graph of its own. Collective."""
        self.settle()
        replay = Replay(lambda: None, call, 1)
        self.settle()
        made = _replayed(replay).clone()
        self.settle()
        replay.close()
        return made

    def times(self, subjects: Iterable[Any]) -> Times:
        """All of them in turns; before and behind, those that can tell a `problem` have none. Collective."""
        subjects = list(subjects)
        settings = self.settings

        def told(where: str) -> None:
            self.progress.at(where)
            for peers in groups.living():
                for shared in peers.groups.values():
                    if shared.group is not None:
                        shared.group.check()  # after an error graphs must not be replayed

        turns = {"rounds": settings.rounds, "iterations": settings.iterations, "warmup": settings.warmup}
        self._check(subjects)
        times = timing.rounds_of(subjects, self.control, **turns, told=told)
        self._check(subjects)
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

    def _check(self, subjects: list[Any]) -> None:
        for subject in subjects:
            if hasattr(subject, "problem"):
                self.progress.at(f"checking {subject.name}")
                self.agree(subject.problem())
                self.settle()


class _Captured(Graphs):
    """A graph whose last result is known."""

    def __init__(self, name: str, replay: Replay, right: Callable[[Tensor], str | None]):
        super().__init__(name, {"pair": replay})
        self._replay, self._right = replay, right

    def problem(self) -> str | None:
        """What is wrong with what a replay leaves. Collective: the replay."""
        return self._right(_replayed(self._replay))


def _replayed(replay: Replay) -> Tensor:
    """What a replay makes, and none before it: that is overwritten."""
    if replay.result is not None:
        replay.result.fill_(float("nan"))
    replay.replay()
    made: Tensor = replay.result
    return made


def gathered(parts: list[Tensor], ranks: int) -> list[Tensor]:
    """Each of them of all ranks, which have equally many rows, by PyTorch: in one call of NCCL. Collective."""
    outs = [x.new_empty(ranks * len(x), *x.shape[1:]) for x in parts]
    one_call = dist._coalescing_manager(device=parts[0].device) if parts[0].is_cuda else nullcontext()
    with one_call:
        for out, x in zip(outs, parts, strict=True):
            dist.all_gather_into_tensor(out, x.contiguous())
    return outs


def steps() -> int:
    """Of all groups of integrations in this process: none are made where a framework's own way is taken instead."""
    return sum(shared.steps for peers in groups.living() for shared in peers.groups.values())


def apart(got: Tensor, want: Tensor, share: float = 1.0) -> float:
    """How far rows [T, H] are from what they must be, of their norm: the worst of a share of them, the nearest ones; 0
    without rows."""
    if got.shape != want.shape:
        return float("inf")
    if not len(got):
        return 0.0
    far = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-30)
    return float(far.nan_to_num(float("inf")).sort().values[max(0, round(share * len(far)) - 1)])


def differs(got: Tensor, want: Tensor, dtype: torch.dtype) -> str | None:
    """Why rows [T, H] are not what they must be, as near as a dtype lets them be; None if they are."""
    near, far = NEAR[dtype], apart(got, want)
    return None if far <= near else f"a row is apart by {far:.3g} of its norm, allowed is {near}"
