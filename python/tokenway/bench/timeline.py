"""Where the kernels of one captured layer begin and end: from PyTorch's profiler, as data, as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenway.bench import breakdown

REPLAYS = 3  # of the graph; the last one is told
PARTS = ("router", "dispatch", "experts", "combine")
Kernel = dict[str, Any]


def of_layer(made: Any, meet: Callable[[], object], profiled: bool) -> dict[str, Any]:
    """{"kernels": [{name, part, begin_us, end_us}], in order} of a forward pass of `made.ours`, or {"missing": why}.
    meet: a barrier of the hosts; profiled: whether by this rank. Collective."""
    import torch

    from tokenway.bench.graphs import Replay

    if (why := made.capturable()) is not None:
        return {"missing": why}
    call = made.passes(made.ours)["forward"]
    call()
    torch.cuda.current_stream().synchronize()
    meet()
    graph = Replay(lambda: None, call, 1)
    profiler, problem = breakdown.start() if profiled else (None, "another rank's")
    for _ in range(REPLAYS):
        meet()
        graph.replay()
    meet()
    graph.close()
    if profiler is None:
        return {"missing": problem}
    try:
        profiler.__exit__(None, None, None)
        found = last_of(kernels(profiler.events()))
    except Exception as error:  # whatever it is, a missing picture ends no benchmark
        return {"missing": f"{type(error).__name__}: {error}"}
    return {"kernels": with_parts(found)} if found else {"missing": "the profiler saw no kernel"}


def kernels(events: Any) -> list[Kernel]:
    """What ran on the device, by its beginning."""
    ran = [
        {"name": breakdown.short(event.name), "begin_us": event.time_range.start, "end_us": event.time_range.end}
        for event in events
        if "CUDA" in str(event.device_type) and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(ran, key=lambda kernel: kernel["begin_us"])


def last_of(ran: list[Kernel]) -> list[Kernel]:
    """Of the kernels of all replays those of the last, from 0 us on."""
    last = ran[len(ran) - len(ran) // REPLAYS :]
    start = last[0]["begin_us"] if last else 0.0
    return [
        {"name": kernel["name"]} | {at: round(kernel[at] - start, 2) for at in ("begin_us", "end_us")}
        for kernel in last
    ]


def with_parts(ran: list[Kernel]) -> list[Kernel]:
    """With the part of a layer that each belongs to: this library's by their names, and others by what stands before
    them. What comes before the exchange or behind it is the router's."""
    ours = [_of_exchange(kernel["name"]) for kernel in ran]
    first = ours.index("dispatch") if "dispatch" in ours else len(ran)
    last = len(ran) - 1 - ours[::-1].index("combine") if "combine" in ours else len(ran)
    return [
        {"name": kernel["name"], "part": own or ("experts" if first < at < last else "router"), **kernel}
        for at, (kernel, own) in enumerate(zip(ran, ours, strict=True))
    ]


def _of_exchange(name: str) -> str | None:
    if not name.startswith("tw::") or "activation::" in name:
        return None
    return "combine" if "combine" in name else "dispatch"


def lines(row: dict[str, Any]) -> list[str]:
    """Below a table: the parts of a row's layer, with their first kernel's beginning and their last one's end."""
    if "timeline" not in row:
        return []
    where = f"timeline of {row['profile']}, {row['tokens']} tokens"
    found = row["timeline"]
    if "missing" in found:
        return [f"{where}: not measured ({found['missing']})"]
    told = [f"{where}, one captured layer, us from its first kernel on:"]
    for kernel in found["kernels"]:
        told.append(f"  {kernel['begin_us']:8.2f} .. {kernel['end_us']:8.2f}  {kernel['part']:<8}  {kernel['name']}")
    return told


def draw(run: dict[str, Any], title: str, path: str) -> None:
    """Writes the picture: a panel for each row that has one, a line for each part of a layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in run["layers"] if "kernels" in row.get("timeline", {})]
    if not rows:
        return
    figure, axes = plt.subplots(len(rows), 1, figsize=(12, 2.2 * len(rows) + 0.6), squeeze=False, layout="constrained")
    for panel, row in zip(axes[:, 0], rows, strict=True):
        for line, part in enumerate(PARTS):
            spans = [
                (kernel["begin_us"], kernel["end_us"] - kernel["begin_us"])
                for kernel in row["timeline"]["kernels"]
                if kernel["part"] == part
            ]
            panel.broken_barh(spans, (line - 0.35, 0.7), facecolors=f"C{line}", edgecolor="black", linewidth=0.3)
        panel.set_yticks(range(len(PARTS)), PARTS)
        panel.invert_yaxis()
        panel.set_title(f"{row['profile']}, {row['routing']}, {row['tokens']} tokens", fontsize=10)
        panel.set_xlabel("us")
        panel.grid(True, axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
