"""`--plot`: latency and bandwidth against tokens, ours beside the baselines."""

from __future__ import annotations

from typing import Any

from tokenway.bench.tables.table import Row, Run

NONE: dict[str, dict[str, None]] = {"pair_us": {"median": None}}  # of a baseline that a row has not


def draw(run: Run, title: str, path: str) -> None:
    """Writes the picture: under its title, a line of two panels per profile and routing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = _panels_of_gpus if run.get("backend") == "nvlink" else _panels
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in run["rows"]:
        groups.setdefault((row["profile"], row["routing"]), []).append(row)
    figure, axes = plt.subplots(len(groups), 2, figsize=(11, 4 * len(groups)), squeeze=False, layout="constrained")
    for (latency, bandwidth), ((profile, routing), rows) in zip(axes, groups.items(), strict=True):
        panels(latency, bandwidth, sorted(rows, key=lambda row: row["tokens"]))
        latency.set_title(f"{profile}, {routing}")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panels(latency: Any, bandwidth: Any, rows: list[Row]) -> None:
    """Both panels of one profile and routing on the CPU; rows by ascending tokens."""
    _panel(latency, rows, "us")
    latency.set(ylabel="dispatch + combine, us")
    _panel(bandwidth, rows, "GB/s")
    bandwidth.set(ylabel="rows moved by all ranks, GB/s", title="bandwidth of the pair")


def _panel(axes: Any, rows: list[Row], unit: str) -> None:
    """One panel, all subjects."""
    tokens = [row["tokens"] for row in rows]
    for name in ["tokenway", *rows[0]["baselines"]]:
        figures = [row if name == "tokenway" else row["baselines"][name] for row in rows]
        of = [figure["pair_us"] for figure in figures]
        style = {"marker": "o", "linewidth": 2.5 if name == "tokenway" else 1.2, "label": name}
        if unit == "us":
            (line,) = axes.plot(tokens, [t["median"] for t in of], **style)
            low, high = [t["p10"] for t in of], [t["p90"] for t in of]
            axes.fill_between(tokens, low, high, alpha=0.15, color=line.get_color())
        else:
            moved = [r["bytes_moved"] / t["median"] / 1e3 for r, t in zip(rows, of, strict=True)]
            axes.plot(tokens, moved, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.set_xlabel("tokens per rank")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)


def _panels_of_gpus(times: Any, bandwidth: Any, rows: list[Row]) -> None:
    """The same on GPUs: times beside the floor and NCCL, and what of the put ceiling is reached."""
    tokens = [row["tokens"] for row in rows]
    _line(times, tokens, [row["pair_us"]["median"] for row in rows], "tokenway", linewidth=2.5)
    for phase in ("dispatch", "combine"):
        _line(times, tokens, [row[f"{phase}_us"]["median"] for row in rows], f"tokenway {phase}", linewidth=1.2)
    _line(times, tokens, [row["floor"].get("pair", {}).get("floor_us") for row in rows], "floor", linestyle="--")
    for name in dict.fromkeys(name for row in rows for name in row["baselines"]):
        values = [row["baselines"].get(name, NONE)["pair_us"]["median"] for row in rows]
        _line(times, tokens, values, name, linewidth=1.2)
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
