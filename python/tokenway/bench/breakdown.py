"""Which kernels a pair is made of, and how long each runs: from PyTorch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def kernels(call: Callable[[], None], count: int, meet: Callable[[], object], profiled: bool) -> dict[str, Any]:
    """{"kernels": [{name, calls, mean_us}], longest first} of `count` calls, or {"missing": why}. The calls are made
    whether or not there is a profiler: they are collective. meet: a barrier; profiled: whether by this rank."""
    import torch

    profiler, problem = start() if profiled else (None, "another rank's")
    meet()  # starting takes seconds, which the peers must not spend in an exchange
    for _ in range(count):
        call()
    torch.cuda.current_stream().synchronize()
    if profiler is None:
        return {"missing": problem}
    try:
        profiler.__exit__(None, None, None)
        found = _mean(profiler.events())
    except Exception as error:  # whatever it is, a missing table ends no benchmark
        return {"missing": f"{type(error).__name__}: {error}"}
    return {"kernels": found} if found else {"missing": "the profiler saw no kernel"}


def start() -> tuple[Any, str]:
    """(the profiler, running), or (None, why there is none)."""
    try:
        from torch.profiler import ProfilerActivity, profile

        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        profiler.__enter__()
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return profiler, ""


def _mean(events: Any) -> list[dict[str, Any]]:
    """Mean times of what ran on the device, by name. Ranges that mark a stretch of time there are no kernels."""
    times: dict[str, list[float]] = {}
    for event in events:
        on_device = "CUDA" in str(event.device_type)
        if on_device and not getattr(event, "is_user_annotation", False):
            times.setdefault(event.name, []).append(float(event.time_range.elapsed_us()))
    told = [
        {"name": short(name), "calls": len(spent), "mean_us": round(sum(spent) / len(spent), 2)}
        for name, spent in times.items()
    ]
    return sorted(told, key=lambda kernel: -kernel["calls"] * kernel["mean_us"])


def short(name: str) -> str:
    """A kernel's name without its arguments and its return type; enumerators in it as numbers alone."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\([\w:]+\)(?=-?\d)", "", name)
    name = name.split("(", 1)[0].strip() or name
    return name if len(name) <= 60 else name[:57] + "..."
