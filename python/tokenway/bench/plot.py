"""`--plot`: latency and bandwidth against tokens, ours beside the baselines."""

from __future__ import annotations

from typing import Any

from tokenway.bench import nvlink_plot
from tokenway.bench.table import on_gpus, title


def draw(run: dict[str, Any], path: str) -> None:
    """Writes the picture: a line of two panels per profile and routing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run["rows"]:
        groups.setdefault((row["profile"], row["routing"]), []).append(row)
    figure, axes = plt.subplots(len(groups), 2, figsize=(11, 4 * len(groups)), squeeze=False, layout="constrained")
    for (latency, bandwidth), ((profile, routing), rows) in zip(axes, groups.items(), strict=True):
        rows = sorted(rows, key=lambda row: row["tokens"])
        if on_gpus(run):
            latency.set_title(f"{profile}, {routing}")
            nvlink_plot.panels(latency, bandwidth, rows)
            continue
        _panel(latency, rows, "us")
        latency.set(ylabel="dispatch + combine, us", title=f"{profile}, {routing}")
        _panel(bandwidth, rows, "GB/s")
        bandwidth.set(ylabel="rows moved by all ranks, GB/s", title="bandwidth of the pair")
    figure.suptitle(title(run), fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axes: Any, rows: list[dict[str, Any]], unit: str) -> None:
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
