"""What is done on a rank between dispatch and combine, at virtual group sizes: expand, activation, finalize.

A rank of a group of N may receive the tokens of all, N * T; what comes are as many rows at every N. So the work is the
same, and only the room for it grows, as does that of a window. Kernels that go over all that could have come take
longer the larger the group is (figure 3 of
https://nvidia.github.io/TensorRT-LLM/blogs/tech_blog/blog8_Scaling_Expert_Parallelism_in_TensorRT-LLM_part2.html);
these read on the device how much came, and must not.

One rank plays the receiver: a group of its own with that room, to which it sends what would come from all. 2 * T tokens
come, each for half of the rank's experts, so that T * K rows stand before them.

expand      from flat to grouped: a dispatch in grouped less one in flat, which differ in that alone
activation  SwiGLU of the rows in grouped; quantised to fp8, with scales by column
finalize    from grouped to flat with weights, and of one rank to its tokens: a combine
all rows    (on a device) the activation where nobody says how many rows are valid: what following the room would cost
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from tokenway import reference, tensors
from tokenway.activation import swiglu
from tokenway.bench import gpu_machine, timing, verify
from tokenway.bench.graphs import COUNT, Replay
from tokenway.bench.settings import Settings
from tokenway.connecting import connect
from tokenway.group import Group

SIZES = (2, 4, 8, 16, 32, 64)
EXPERTS = 8  # of the rank
INNER = 2048  # moe_intermediate_size of https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json


class View:
    """What a rank of a group of `size` has: room, tensors, and a call for each phase."""

    def __init__(self, settings: Settings, size: int, comm: Any, stack: ExitStack, device: Any):
        profile, tokens = settings.cases()[0].profile, settings.tokens[0]
        self.size, self.room, self.device = size, size * tokens, device
        self._top_k = profile.top_k
        self.group = stack.enter_context(
            Group(
                comm,
                experts=EXPERTS,
                top_k=profile.top_k,
                hidden=profile.hidden,
                max_tokens=self.room,
                mode="high_throughput",
                max_recv_tokens=self.room,
            )
        )
        rng = np.random.default_rng(settings.seed)
        kind = tensors.numpy_dtype("bfloat16")
        come, each = 2 * tokens, max(1, min(profile.top_k, EXPERTS) // 2)
        self._ids = np.full((come, profile.top_k), -1, np.int32)
        self._ids[:, :each] = rng.permuted(np.tile(np.arange(EXPERTS), (come, 1)), axis=1)[:, :each]
        self._weights = rng.random(self._ids.shape, np.float32)
        self._sent = rng.standard_normal((come, profile.hidden), np.float32).astype(kind)
        self._made = rng.standard_normal((come * each, 2 * INNER), np.float32).astype(kind)
        self._results = rng.standard_normal((come * each, profile.hidden), np.float32).astype(kind)
        self.valid = come * each
        self._place()

    def _place(self) -> None:
        """All tensors, as large as there is room; what comes lies at their beginning."""
        self.handle = self.group.route(self._on(self._ids), self._on(self._weights))
        self.group.exchange_counts(self.handle)
        rows = self.handle.rows_of("grouped") or 0
        self.rows = max(rows, self.room * min(self._top_k, EXPERTS))  # the CPU's outputs are never larger than needed
        hidden = self.group.hidden
        self.tokens = self._on(self._sent)
        self.out = {"tokens": self._empty((rows, hidden)), "ids": self._empty((rows,), "int32")}
        self.out |= {"weights": self._empty((rows,), "float32"), "offsets": self._empty((EXPERTS + 1,), "int32")}
        self.inside, self.act = self._empty((self.rows, 2 * INNER)), self._empty((self.rows, INNER))
        self.inside[: self.valid] = self._on(self._made)
        self.quantised = (
            self._empty((self.rows, INNER), "float8_e4m3fn"),
            self._empty((-(-INNER // 128), -(-self.rows // 4) * 4), "float32"),
        )
        self.results = self._empty((rows, hidden))
        self.results[: self.valid] = self._on(self._results)
        self.back = self._empty(self._sent.shape)

    def _on(self, array: np.ndarray) -> Any:
        return array if self.device is None else tensors.to_torch(array).to(self.device)

    def _empty(self, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
        if self.device is None:
            return np.empty(shape, tensors.numpy_dtype(dtype))
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed, by name."""
        counts = self.out["offsets"][-1:]
        calls = {
            "flat": lambda: self._dispatch("flat", None),
            "grouped": lambda: self._dispatch("grouped", self.out),
            "activation": lambda: swiglu(self.inside, counts=counts, out=self.act),
            "quantised": lambda: swiglu(
                self.inside, counts=counts, quantize=True, column_major=True, out=self.quantised
            ),
            "finalize": lambda: self.group.combine(
                self.handle, self.results, layout="grouped", weighting="topk", out=self.back
            ),
        }
        if self.device is not None:
            calls["all_rows"] = lambda: swiglu(self.inside, out=self.act)
        return calls

    def _dispatch(self, layout: str, out: Any) -> None:
        self.group.dispatch(self.handle, self.tokens, layout=layout, out=out)
        self.handle.release()

    def verify(self) -> None:
        """Every bit of what each phase leaves. Raises verify.Mismatch."""
        for call in self.calls().values():
            call()
        x = reference.Exchange([self._ids], [self._weights], experts=EXPERTS, bound=self.room)
        want = reference.dispatch_grouped(x, 0, [[self._sent]])
        kind = self._sent.dtype
        values, scales = swiglu(self._made, quantize=True)  # itself compared with the oracle by the tests
        pairs = {
            "expand": (self.out["tokens"], want.payloads[0]),
            "weights": (self.out["weights"], want.weights),
            "activation": (self.act, reference.swiglu(self._made).astype(kind)),
            "quantised": (self.quantised[0], values),
            "scales": (self.quantised[1].T, scales),
            "finalize": (
                self.back,
                reference.combine(x, [self._results], layout="grouped", weighting="topk", wire=kind)[0],
            ),
        }
        for name, (got, wanted) in pairs.items():
            mine = self._array(got[: len(wanted)], wanted.dtype)
            if mine.tobytes() != np.ascontiguousarray(wanted).tobytes():
                raise verify.Mismatch(f"{name} of a group of {self.size} differs from the oracle")

    def _array(self, tensor: Any, kind: np.dtype) -> np.ndarray:
        if self.device is None:
            return np.ascontiguousarray(tensor)
        import torch

        return tensor.contiguous().view(torch.uint8).cpu().numpy().view(kind)


def measure(settings: Settings) -> dict[str, Any]:
    """On the CPU, or with --backend nvlink on one GPU."""
    if settings.nvlink is None:
        return {"auxiliary": measure_on(settings, None)}
    import torch

    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream(0)):
        measured = measure_on(settings, torch.device("cuda", 0))
    return {"backend": "nvlink", "auxiliary": measured, **gpu_machine.results(1)}


def measure_on(settings: Settings, device: Any) -> dict[str, Any]:
    """Times of each phase at each size, all sizes in turns. Raises verify.Mismatch."""
    sizes = SIZES[:3] if settings.quick else SIZES
    with ExitStack() as stack:
        comm = stack.enter_context(connect() if device is None else connect(device=f"cuda:{device.index}"))
        views = [View(settings, size, comm, stack, device) for size in sizes]
        for view in views:
            view.verify()
        timers = [_timers(view, stack) for view in views]
        found: list[dict[str, list[list[float]]]] = [{name: [] for name in of} for of in timers]
        share = -(-settings.iterations // settings.rounds)
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for _ in range(settings.rounds):
            for of, times in zip(timers, found, strict=True):
                for name, timer in of.items():
                    for _ in range(settings.warmup):
                        timer()
                    times[name].append([timer() for _ in range(share)])
        rows = [_row(view, times) for view, times in zip(views, found, strict=True)]
    profile = settings.cases()[0].profile
    return {
        "profile": profile.name,
        "hidden": profile.hidden,
        "inner": INNER,
        "experts": EXPERTS,
        "tokens": settings.tokens[0],
        "rows": rows,
    }


def _timers(view: View, stack: ExitStack) -> dict[str, Callable[[], float]]:
    """By phase what makes the call and says how long it took, in us."""
    if view.device is None:
        return {name: _clocked(call) for name, call in view.calls().items()}
    made = {}
    for name, call in view.calls().items():
        replay = Replay(call, _repeated(call, COUNT))
        stack.callback(replay.close)
        made[name] = _replayed(replay)
    return made


def _clocked(call: Callable[[], Any]) -> Callable[[], float]:
    def timer() -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    return timer


def _repeated(call: Callable[[], Any], count: int) -> Callable[[], None]:
    def body() -> None:
        for _ in range(count):
            call()

    return body


class _Alone:
    """A gate for one rank."""

    @staticmethod
    def gate() -> int:
        return time.perf_counter_ns()


def _replayed(replay: Any) -> Callable[[], float]:
    return lambda: float(replay.once(_Alone())[0]) / 1e3


def _row(view: View, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    told = {f"{name}_us": timing.summary(rounds) for name, rounds in times.items()}
    expand = told["grouped_us"]["median"] - told["flat_us"]["median"]
    return {
        "size": view.size,
        "room": view.room,
        "rows": view.rows,
        "valid": view.valid,
        "expand_us": {"median": round(expand, 3)},
        **told,
    }
