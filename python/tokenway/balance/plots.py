"""`tokenway balance --plot`: what ranks carry before and after, and what slots and writes buy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenway.balance import planner
from tokenway.balance.options import Options

Array = np.ndarray


def draw(options: Options, figures: dict[str, Any], plan: planner.Plan, windows: Array) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    online = figures.get("online")
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    _ranks(axes[0, 0], options, figures, plan)
    _slots(axes[0, 1], options, plan)
    _budgets(axes[1, 0], options, plan, windows)
    if online:
        _time(axes[1, 1], online, figures["balancer"])
    else:
        _layers(axes[1, 1], figures)
    for panel in axes.flat:
        panel.grid(True, alpha=0.25)
    experts, ranks, slots = plan.shape
    figure.suptitle(f"{options.source}: {experts} experts, {ranks} ranks of {slots} slots", fontsize=10)
    figure.savefig(str(options.plot), dpi=90)
    plt.close(figure)


def _ranks(axes: Any, options: Options, figures: dict[str, Any], plan: planner.Plan) -> None:
    layer = int(np.argmax(figures["before"]))
    loads = plan.loads[layer : layer + 1]
    old = planner.contiguous(1, loads.shape[1], plan.ranks, plan.slots) if plan.old is None else plan.old[layer][None]
    before = planner.rank_loads(loads, old, **options.shape)[0]
    after = plan.rank_loads[layer]
    at = np.arange(plan.ranks)
    mean = after.mean() or 1
    axes.bar(at, np.sort(before / mean)[::-1], color="tab:gray", alpha=0.5, label="before")
    axes.step(at, np.sort(after / mean)[::-1], where="mid", color="tab:blue", linewidth=2, label="after")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=f"layer {layer}", xlabel="ranks, the hottest first", ylabel="load / mean")
    axes.legend(fontsize=8)


def _slots(axes: Any, options: Options, plan: planner.Plan) -> None:
    experts, ranks, slots = plan.shape
    least = -(-experts // ranks)
    tried = sorted({least, least + 1, least + 2, least + 4, slots})
    made = [planner.plan(plan.loads, **{**options.where, "slots": s}) for s in tried]
    axes.plot(tried, [100 * max(p.imbalance.mean(), 1e-6) for p in made], marker="o", label="plan")
    axes.plot(tried, [100 * max(p.bound_imbalance.mean(), 1e-6) for p in made], "--", color="black", label="bound")
    axes.set(title="imbalance by slots", xlabel="slots of a rank", ylabel="%, mean of layers", yscale="log")
    axes.set_xticks(tried, [str(s) for s in tried])
    axes.legend(fontsize=8)


def _budgets(axes: Any, options: Options, plan: planner.Plan, windows: Array) -> None:
    """Updates of a plan that is out of date: made for the first window, or where there is one alone, for its loads with
    a drift."""
    target = windows[-1]
    old = planner.plan(windows[0], **options.where)
    if len(windows) == 1:
        noise = np.random.default_rng(options.seed).standard_normal(target.shape)
        target = target * np.exp(0.25 * noise)
    budgets = [0, *(b for b in (1, 2, 4, 8, 16, 32, 64, 128) if b < plan.ranks * plan.slots)]
    made = [planner.plan(target, old=old, writes=b, **options.where) for b in budgets]
    axes.plot(budgets, [100 * p.imbalance.mean() for p in made], marker="o")
    axes.set(title="an old plan, updated", xlabel="slot writes per layer", ylabel="imbalance, %")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(budgets, [str(b) for b in budgets])


def _time(axes: Any, online: list[dict[str, Any]], balancer: list[dict[str, Any]]) -> None:
    for row in online:
        name = row["policy"] if row["writes"] is None else f"{row['policy']}, {row['writes']} writes"
        axes.plot([100 * value for value in row["by_window"]], label=name)
    for row in balancer:
        name = f"balancer, {row['writes']} writes"
        axes.plot([100 * value for value in row["by_window"]], "--", label=name)
    axes.set(title="online", xlabel="window", ylabel="imbalance, %")
    axes.legend(fontsize=8)


def _layers(axes: Any, figures: dict[str, Any]) -> None:
    at = np.arange(figures["layers"])
    for name, color in (("before", "tab:gray"), ("after", "tab:blue")):
        shown = [100 * max(value, 1e-6) for value in figures[name]]
        axes.plot(at, shown, marker=".", linestyle="", color=color, label=name)
    axes.plot(at, [100 * max(value, 1e-6) for value in figures["bound"]], "_", color="black", label="bound")
    axes.set(title="by layer", xlabel="layer", ylabel="imbalance, %", yscale="log")
    axes.legend(fontsize=8)
