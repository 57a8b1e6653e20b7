"""Times of CUDA graphs and of eager loops, on all ranks at once.

A graph holds one call that brings the ranks together, an event, `count` calls, and an event: both events are nodes of
the graph, so neither the launch of the graph nor the ranks' different starts are in the time. What a stopwatch around
the replay says, the launch included, is told beside it ("outside").
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any

from tokenway.bench.control import Control

COUNT = 10  # calls in a graph
LAYERS = 58  # pairs in a loop without a graph: as many as DeepSeek-V3 has layers with experts
_CAPTURE = threading.Lock()  # local ranks capture one after the other: PyTorch's allocator knows one capture at a time

Call = Callable[[], Any]


class Replay:
    """A captured graph on the current stream. Capturing is not collective, but peers must not be in an exchange with
    this rank on the same device: memory may be allocated. `lead` and `body` enqueue; body makes `count` calls.

    result: what body returned. Each replay writes it anew."""

    def __init__(self, lead: Call, body: Call, count: int = COUNT):
        import torch

        self.result: Any = None
        self._stream = torch.cuda.current_stream()
        self._count = count
        self._inner = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
        self._outer = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for event in [*self._inner, *self._outer]:
            event.record()  # creates it, which a capture should not have to
        self._stream.synchronize()

        def timed() -> None:
            lead()
            self._inner[0].record()
            self.result = body()
            self._inner[1].record()

        self._graph = captured(timed, self._stream)

    def once(self, control: Control) -> tuple[float, float]:
        """One replay on all ranks: ns per call between the graph's events, and outside. Collective."""
        control.gate()
        self._outer[0].record()
        self._graph.replay()
        self._outer[1].record()
        self._stream.synchronize()
        inner, outer = (pair[0].elapsed_time(pair[1]) for pair in (self._inner, self._outer))
        return inner * 1e6 / self._count, outer * 1e6 / (self._count + 1)

    def replay(self) -> None:
        """One replay on this rank, to its end."""
        self._graph.replay()
        self._stream.synchronize()

    def close(self) -> None:
        """Frees the graph, before what it uses ends."""
        self._graph.reset()


def captured(body: Call, stream: Any) -> Any:
    """A graph of what `body` enqueues, on the device already."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with _CAPTURE:
        # thread_local: NCCL's watchdog and the other local ranks call CUDA meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # the capture is broken, and that is told by the first error
                graph.capture_end()
            raise
        graph.capture_end()
    _upload(graph, stream)
    return graph


def _upload(graph: Any, stream: Any) -> None:
    """Brings the graph to the device now. Its first launch would do it, and may allocate for that, which waits for the
    device: with several ranks on it, for a peer that waits for this rank."""
    if not hasattr(graph, "raw_cuda_graph_exec"):
        return  # an older PyTorch
    driver = ctypes.CDLL("libcuda.so.1")
    with suppress(RuntimeError):
        driver.cuGraphUpload(ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream.cuda_stream))
        stream.synchronize()


class Stretches:
    """Calls apart, each behind a barrier of all ranks on their devices: one graph of `count` turns, in which every call
    of a turn has events of its own. What a call waits for is then the exchange alone, whoever was late before.

    calls: phase to a call, which is given the number of the turn; the first turn is not timed. barrier: enqueues one.
    """

    def __init__(self, name: str, barrier: Call, calls: dict[str, Callable[[int], Any]], count: int = COUNT):
        import torch

        self.name, self.phases = name, tuple(calls)
        self._stream = torch.cuda.current_stream()
        self._events = {
            phase: [[torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] for _ in range(count + 1)]
            for phase in calls
        }
        for event in (event for turns in self._events.values() for pair in turns for event in pair):
            event.record()  # as in a Replay
        self._stream.synchronize()

        def turns() -> None:
            for number in range(count + 1):
                for phase, call in calls.items():
                    begin, end = self._events[phase][number]
                    barrier()
                    begin.record()
                    call(number)
                    end.record()

        self._graph = captured(turns, self._stream)

    def once(self, control: Control) -> tuple[float, ...]:
        """One replay on all ranks: of each phase the ns of its median turn. Collective."""
        control.gate()
        self._graph.replay()
        self._stream.synchronize()
        spent = []
        for turns in self._events.values():
            spent.append(median(begin.elapsed_time(end) * 1e6 for begin, end in turns[1:]))
        return tuple(spent)

    def close(self) -> None:
        """Frees the graph."""
        self._graph.reset()


class Graphs:
    """Several graphs as one subject of timing.rounds_of: a phase for each, and `pair`'s time from outside."""

    def __init__(self, name: str, replays: dict[str, Replay]):
        self.name = name
        self._replays = replays
        self.phases = (*replays, "outside")
        self.mine: dict[str, list[float]] = {phase: [] for phase in self.phases}  # this rank's own, in us

    def once(self, control: Control) -> tuple[Any, ...]:
        """Each graph once."""
        inner, outside = [], 0.0
        for phase, replay in self._replays.items():
            own = replay.once(control)
            inner.append(own[0])
            if phase == "pair":
                outside = own[1]
        for phase, spent in zip(self.phases, [*inner, outside], strict=True):
            self.mine[phase].append(spent / 1e3)
        return (*inner, outside)

    def close(self) -> None:
        """Frees the graphs."""
        for replay in self._replays.values():
            replay.close()


class Together:
    """Subjects of different phases that take their turns as one, under the first one's name."""

    def __init__(self, subjects: list[Any]):
        self.name, self._subjects = subjects[0].name, subjects
        self.phases = tuple(phase for subject in subjects for phase in subject.phases)

    def once(self, control: Control) -> tuple[Any, ...]:
        """A turn of each."""
        return tuple(time for subject in self._subjects for time in subject.once(control))

    def close(self) -> None:
        """Closes each."""
        for subject in self._subjects:
            subject.close()


class Events:
    """Calls timed by events around a loop, for what cannot be captured."""

    def __init__(self, name: str, call: Call, times: dict[str, int] | None = None, count: int = COUNT):
        """times: phase to the calls that it has, instead of one for a pair."""
        import torch

        self.name = name
        self._call, self._count = call, count
        self._times = {"pair": 1} if times is None else times
        self.phases = (*self._times, "outside")
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._stream = torch.cuda.current_stream()

    def once(self, control: Control) -> tuple[float, ...]:
        """A loop for each phase on all ranks, after one call that brings them together; last the pair's again."""
        spent = []
        for calls in self._times.values():
            control.gate()
            self._call()
            self._events[0].record()
            for _ in range(self._count * calls):
                self._call()
            self._events[1].record()
            self._stream.synchronize()
            spent.append(self._events[0].elapsed_time(self._events[1]) * 1e6 / self._count)
        return (*spent, spent[0])

    def close(self) -> None:
        """Nothing to free."""


class Loop:
    """Calls without a graph: ns per call by the wall clock until the device is done (`eager`), and what the host
    alone needs to make it (`host`)."""

    phases = ("eager", "host")

    def __init__(self, name: str, call: Call, count: int = LAYERS, each: int = 1):
        """each: what one `call` counts for."""
        import torch

        self.name = name
        self._call, self._count, self._units = call, count, count * each
        self._stream = torch.cuda.current_stream()

    def once(self, control: Control) -> tuple[float, float]:
        """One loop on all ranks."""
        start = control.gate()
        begin = time.perf_counter_ns()
        for _ in range(self._count):
            self._call()
        made = time.perf_counter_ns()
        self._stream.synchronize()
        return (time.perf_counter_ns() - start) / self._units, (made - begin) / self._units

    def close(self) -> None:
        """Nothing to free."""
