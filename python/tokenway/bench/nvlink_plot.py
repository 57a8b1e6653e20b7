"""`--plot` of a run on GPUs: times beside the floor and NCCL, and what of the put ceiling is reached."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def panels(times: Any, bandwidth: Any, rows: list[Row]) -> None:
    """Fills both panels of one profile and routing; rows by ascending tokens."""
    tokens = [row["tokens"] for row in rows]
    _line(times, tokens, [row["pair_us"]["median"] for row in rows], "tokenway", linewidth=2.5)
    for phase in ("dispatch", "combine"):
        _line(times, tokens, [row[f"{phase}_us"]["median"] for row in rows], f"tokenway {phase}", linewidth=1.2)
    _line(times, tokens, [row["floor"].get("pair", {}).get("floor_us") for row in rows], "floor", linestyle="--")
    for name in rows[0]["baselines"]:
        _line(times, tokens, [row["baselines"][name]["pair_us"]["median"] for row in rows], name, linewidth=1.2)
    times.set(ylabel="us, in a CUDA graph", yscale="log")
    for phase in ("dispatch", "combine"):
        percent = [row["floor"][phase].get("percent_of_put") for row in rows]
        _line(bandwidth, tokens, percent, phase, linewidth=2)
    bandwidth.set(ylabel="% of the two-way put ceiling", title="remote bytes", ylim=(0, 105))
    for axes in (times, bandwidth):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.set_xlabel("tokens per rank")
        axes.grid(True, which="both", alpha=0.25)
        if axes.lines:
            axes.legend(fontsize=8)


def _line(axes: Any, tokens: list[int], values: list[float | None], label: str, **style: Any) -> None:
    """Where there is a value; a run without a floor has none."""
    known = [(t, value) for t, value in zip(tokens, values, strict=True) if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker="o", label=label, **style)
