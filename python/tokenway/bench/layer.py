"""`tokenway bench --layer`: whole MoE layers between GPUs, and what they are made of.

A layer is a router, a dispatch, SwiGLU experts and a combine: `tokenway.nn.ExpertParallelMoE` in a group of both modes,
of low latency for few tokens (`LOW_LATENCY`) and else of high throughput with outputs of a fixed size, or in the mode
that --mode names; and beside it, with the same router, experts and products, what PyTorch does without this library:
all-gather, index_select, index_add, reduce-scatter. The other layer is told how many rows will come, so it has
no wait for the host. Each routes anew in every call. Both are compared before they are timed, captured and eager, for
inference and, with --backward, with gradients of the input and of all parameters. The parts are timed alone: experts,
router, and a bare exchange of the same tokens (rank_major).

With --fixed-experts also Tokenway's layer with a kernel of a fixed time, which reads nothing, in place of the experts'
products: what it takes beyond that kernel and the router is its exchange, which stands beside the bare one. With
--timeline a picture of where each kernel of one captured layer begins and ends.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from tokenway.bench import gloo, gpu_machine, runner, timeline, timing
from tokenway.bench.case import Case
from tokenway.bench.control import Control
from tokenway.bench.gpu_rank import connect_gpu, sizes_of_hosts
from tokenway.bench.graphs import Graphs, Loop, Replay
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.comm import Comm

LIMIT = 570.0  # of a run by the own launcher
COUNT = 4  # layers in a graph, and in a loop without
THEIRS = "nccl"
SLEEP_CYCLES = 20_000_000  # some 10 ms, in which a kernel's launch is nothing


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    return runner.on_ranks(settings, measure_rank, LIMIT)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""

    def rows(control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
        import torch

        progress.doing("connecting")
        comm = stack.enter_context(connect_gpu(settings, control))
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(comm.device)))
        stack.callback(gloo.Process(control, "nccl").close)
        measured = []
        for case in settings.cases():
            progress.doing(case.name)
            measured.append(_row(settings, case, comm, control, progress))
            progress.done()
        if settings.timeline:  # last: once the profiler has run in a process, launches take longer
            for case, row in zip(settings.cases(), measured, strict=True):
                progress.at(f"the timeline of {case.name}")
                row["timeline"] = _timeline(settings, case, comm, control)
        more = sizes_of_hosts(settings, control)
        more |= gpu_machine.results(settings.ranks) if control.rank == 0 else {}
        return {"layers": measured, "backend": "nvlink", **more}

    return runner.as_rank(settings, len(settings.cases()), rows)


def _row(settings: Settings, case: Case, comm: Comm, control: Control, progress: Progress) -> dict[str, Any]:
    """A profile at a size."""
    import torch

    profile = case.profile
    row: dict[str, Any] = {
        "profile": profile.name,
        "routing": case.routing,
        "tokens": case.tokens,
        "ranks": case.ranks,
        "hidden": profile.hidden,
        "experts": profile.experts,
        "top_k": profile.top_k,
        "inner": profile.inner,
        "empty_ranks": settings.empty_ranks,
    }
    with ExitStack() as groups:
        made = _layer_case(settings, case, comm, groups)
        row["window_bytes"] = made.group.window_bytes().window
        row["rows_by_rank"] = control.allgather(made.rows)
        progress.at("comparing")
        runner.agree(control, made.problem())
        row |= {"mode": made.mode, "layout": made.layout}
        torch.cuda.current_stream().synchronize()
        control.allgather(None)
        if not settings.verify_only:
            row["us"] = _times(settings, made, control, progress)
            runner.agree(control, made.problem())
        torch.cuda.synchronize()
        control.allgather(None)
    return row


def _layer_case(settings: Settings, case: Case, comm: Comm, groups: ExitStack) -> Any:
    """The layers of a case. Collective."""
    from tokenway.bench.layer_case import LayerCase

    return LayerCase(
        groups,
        comm,
        case.profile,
        case.tokens,
        skewed=case.routing == "skewed",
        backward=settings.backward,
        empty_ranks=settings.empty_ranks,
        seed=settings.seed,
        mode=settings.layer_mode,
    )


def _timeline(settings: Settings, case: Case, comm: Comm, control: Control) -> dict[str, Any]:
    """The kernels of one captured layer, on rank 0. Collective."""

    def meet() -> None:
        control.allgather(None)

    with ExitStack() as groups:
        made = _layer_case(settings, case, comm, groups)
        meet()
        return timeline.of_layer(made, meet, control.rank == 0)


def _times(settings: Settings, made: Any, control: Control, progress: Progress) -> dict[str, Any]:
    """subject -> phase -> summary: "captured" and "eager", with "_both" behind them where gradients are computed too;
    "host": what an eager forward pass takes the host."""
    subjects = [*_subjects(settings, made, control, progress.at)]

    def told(where: str) -> None:
        progress.at(where)
        made.group.check()  # after an error graphs must not be replayed

    times = timing.rounds_of(
        subjects,
        control,
        rounds=settings.rounds,
        iterations=settings.iterations,
        warmup=settings.warmup,
        told=told,
    )
    for subject in subjects:
        subject.close()
    found: dict[str, Any] = {}
    for subject, phases in times.items():
        name, phase, _ = subject.split()
        for inner, rounds in phases.items():
            if inner != "outside":
                key = {"pair": "captured", "eager": "eager", "host": "host"}[inner]
                found.setdefault(name, {})[key + ("" if phase == "forward" else f"_{phase}")] = timing.summary(rounds)
    if (why := made.capturable()) is not None:
        found["not_captured"] = why
    return found


def _subjects(settings: Settings, made: Any, control: Control, told: Any) -> list[Any]:
    """Graphs and loops of both layers and of the parts. Collective: whoever captures is in no exchange."""
    subjects: list[Any] = []
    layers = {"tokenway": made.passes(made.ours), THEIRS: made.passes(made.theirs)}
    calls = {f"{name} {phase}": call for name, phases in layers.items() for phase, call in phases.items()}
    parts = {f"{name} forward": call for name, call in made.parts().items()}
    if settings.fixed_experts:
        instead = _sleep(settings.fixed_experts)
        parts |= {"fixed-layer forward": made.fixed(instead), "fixed-experts forward": instead}
    for name, call in (calls | parts).items():
        told(f"first calls of {name}")
        for _ in range(2):
            call()
        _settle(control)
        if made.capturable() is None:
            told(f"capturing {name}")
            subjects.append(Graphs(f"{name} graph", {"pair": Replay(call, _repeat(call), COUNT)}))
            _settle(control)
    return subjects + [Loop(f"{name} loop", call, COUNT) for name, call in calls.items()]


def _sleep(us: float) -> Any:
    """What enqueues a kernel that takes so long and reads nothing: as many cycles as were that time just now."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (SLEEP_CYCLES // 10, SLEEP_CYCLES):  # once for the clock to rise
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    per_us = SLEEP_CYCLES / (begin.elapsed_time(end) * 1e3)
    return partial(torch.cuda._sleep, round(us * per_us))


def _repeat(call: Any) -> Any:
    def body() -> None:
        for _ in range(COUNT):
            call()

    return body


def _settle(control: Control) -> None:
    import torch

    torch.cuda.current_stream().synchronize()
    control.allgather(None)
