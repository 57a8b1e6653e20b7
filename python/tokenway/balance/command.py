"""`tokenway balance`: plans, tables, plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenway.balance import options as given
from tokenway.balance import planner, playing, simulation
from tokenway.balance.options import Options
from tokenway.errors import InvalidArgument
from tokenway.tables import mebibytes, show_columns
from tokenway.usage import UsageError

Array = np.ndarray
EXPERT_MIB = 42.0  # of an expert of DeepSeek-V3 in fp8


def run(options: Options) -> int:
    """Reads, plans, prints and draws; returns the exit code."""
    windows, steps = given.read_windows(options)
    options = replace(options, slots=given.slots_of(options, windows.shape[2]))
    try:
        figures, plan = _plan(options, windows)
        if options.online:
            figures["online"] = online(options, windows)
            figures["balancer"] = balancer(options, steps, plan)
        if options.tokens:
            figures["sampled"] = sampled(options, plan)
    except InvalidArgument as error:
        raise UsageError(f"balance: {error}") from None
    if options.save:
        held = {"ranks": plan.ranks, "slots": plan.slots, "physical_to_logical": plan.physical_to_logical.tolist()}
        Path(options.save).write_text(json.dumps(held), encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if options.plot:
        from tokenway.balance import plots

        plots.draw(options, figures, plan, windows)
    _show(options, figures, plan)  # last: who reads it may be gone
    return 0


def _plan(options: Options, windows: Array) -> tuple[dict[str, Any], planner.Plan]:
    """The plan for all windows together (with --online for the first, as it is made before the others are known)."""
    loads = windows[0] if options.online else windows.sum(axis=0)
    layers, experts = loads.shape
    old = None if options.old is None else _old(options, layers)
    least, most = -(-experts // options.ranks), planner.MOST_SLOTS // options.ranks
    if not least <= options.slots <= most:
        told = f"{experts} experts on {options.ranks} ranks; allowed {least}..{most}"
        raise UsageError(f"--slots: {options.slots}; {told}")
    before = planner.contiguous(layers, experts, options.ranks, options.slots) if old is None else old
    # A first plan too keeps what it can of where experts are.
    first = options.ranks * options.slots
    budget = first if old is None else options.writes[0] if options.writes else None
    plan = planner.plan(loads, old=before, writes=budget, **options.where)
    was = planner.imbalance(planner.rank_loads(loads, before, **options.shape))
    moves = planner.moves_between(before, plan.physical_to_logical, *plan.shape, nodes=options.nodes)
    figures = {
        "source": options.source,
        "layers": layers,
        "experts": experts,
        **options.where,
        "before": was.tolist(),
        "after": plan.imbalance.tolist(),
        "bound": plan.bound_imbalance.tolist(),
        "stray": plan.stray.tolist(),
        "moves": np.bincount(moves["layer"], minlength=layers).tolist(),
        "most_replicas": plan.replicas.max(axis=1).tolist(),
    }
    return figures, plan


def _old(options: Options, layers: int) -> Array:
    try:
        held = json.loads(Path(str(options.old)).read_text(encoding="utf-8"))
        placed = np.array(held["physical_to_logical"], np.int32)
        shape = (int(held["ranks"]), int(held["slots"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"--old: {options.old}: {type(error).__name__}: {error}") from None
    if placed.ndim != 2:
        raise UsageError(f"--old: {options.old}: physical_to_logical has shape {placed.shape}; must be [layers][slots]")
    if shape != (options.ranks, options.slots) or placed.shape != (layers, shape[0] * shape[1]):
        what = f"{shape[0]} ranks of {shape[1]} slots, {len(placed)} layers"
        raise UsageError(f"--old: {options.old} is for {what}, not {options.ranks} of {options.slots}, {layers}")
    return placed


def online(options: Options, windows: Array) -> list[dict[str, Any]]:
    """Each policy, and of update each budget, over all windows but the first, which plans are made from."""
    if len(windows) < 2:
        raise UsageError(f"--online: {len(windows)} window; at least 2 are needed (drifting, domains, or a recording)")
    rows = []
    for policy in options.policies:
        budgets = options.writes if policy == "update" and options.writes else (None,)
        for budget in budgets:
            asked = {"writes": budget, "decay": options.decay, **options.where}
            played = simulation.replay(windows, policy=policy, **asked)
            later = played.imbalance[1:]
            rows.append(
                {
                    "policy": policy,
                    "writes": budget,
                    "mean": float(later.mean()),
                    "worst_window": float(later.mean(axis=1).max()),
                    "written": float(played.writes[1:].mean()),
                    "by_window": played.imbalance.mean(axis=1).tolist(),
                }
            )
    return rows


def balancer(options: Options, loads: Array, first: planner.Plan) -> list[dict[str, Any]]:
    """What steps see while a balancer moves experts, for each budget: over all windows but the first, which the plan
    that it begins with is made from. loads: those of `options.steps` steps each."""
    rows = []
    for budget in options.writes or (None,):
        where = {"nodes": options.nodes, "groups": options.groups, "node_tolerance": options.tolerance}
        played = playing.play(
            loads,
            ranks=options.ranks,
            first=first,
            steps=options.steps,
            spare=options.spare,
            load_decay=options.load_decay,
            expert_bytes=round((options.expert_mib or EXPERT_MIB) * (1 << 20)),
            plan_steps=options.delay,
            copy_steps=options.delay,
            every=options.every,
            writes=budget,
            gain=options.gain,
            step_bytes=round(options.step_mib * (1 << 20)),
            **where,
        )
        by_window = played.imbalance.reshape(-1, options.window_steps, played.imbalance.shape[1]).mean(axis=(1, 2))
        rows.append(
            {
                "writes": options.ranks if budget is None else budget,
                "mean": float(by_window[1:].mean()),
                "worst_window": float(by_window[1:].max()),
                "plans": played.statistics[0].plans,
                "moves": played.moves,
                "mib_per_step": played.bytes_per_step / (1 << 20),
                "delays": list(played.delays),
                "by_window": by_window.tolist(),
            }
        )
    return rows


def sampled(options: Options, plan: planner.Plan) -> list[dict[str, Any]]:
    """What is left in batches of few tokens, by how an expert's rows are split over its replicas."""
    rows = []
    for tokens in options.tokens:
        row: dict[str, Any] = {"tokens": tokens}
        for split in simulation.SPLITS:
            asked = {"tokens": tokens, "top_k": options.top_k, "draws": 5, "seed": options.seed}
            row[split] = float(simulation.sampled_imbalance(plan, split=split, **asked).mean())
        rows.append(row)
    return rows


def percent(value: float) -> str:
    """An imbalance: 0.225 is 22.5 %."""
    return f"{100 * value:.2f} %"


def _show(options: Options, figures: dict[str, Any], plan: planner.Plan) -> None:
    experts, ranks, slots = plan.shape
    on_nodes = options.groups > 0 and options.nodes > 1
    heads = ["layer", "", "before", "after", "bound", "moves", "most replicas", *["astray"] * on_nodes]
    columns = [figures[name] for name in ("before", "after", "bound", "moves", "most_replicas", "stray")]
    cells = [
        [str(layer), "", *map(percent, row[:3]), str(row[3]), str(row[4]), *[percent(row[5])] * on_nodes]
        for layer, row in enumerate(zip(*columns, strict=True))
    ]
    means = [float(np.mean(figures[name])) for name in ("before", "after", "bound")]
    most = str(max(figures["most_replicas"]))
    cells.append(["all", "mean", *map(percent, means), str(sum(figures["moves"])), most])
    cells[-1] += [percent(float(np.mean(figures["stray"])))] * on_nodes
    what = f"{figures['layers']} layers, {experts} experts, {ranks} ranks of {slots} slots"
    show_columns(f"{options.source}: {what}: what the hottest rank carries above the mean", heads, cells)
    _show_memory(options, figures, plan)
    if "online" in figures:
        heads = ["policy", "writes allowed", "mean", "worst window", "writes per layer"]
        made = [
            [
                row["policy"],
                _allowed(row, plan),
                percent(row["mean"]),
                percent(row["worst_window"]),
                f"{row['written']:.1f}",
            ]
            for row in figures["online"]
        ]
        print()
        show_columns("each window under the plan made before it, as if that took no time", heads, made)
        _show_balancer(options, figures["balancer"])
    if "sampled" in figures:
        heads = ["tokens", "per rank", *simulation.SPLITS]
        made = [[str(row["tokens"]), "", *(percent(row[s]) for s in simulation.SPLITS)] for row in figures["sampled"]]
        print()
        show_columns(f"batches, top {options.top_k}, by how rows are split over replicas", heads, made)


def _show_balancer(options: Options, rows: list[dict[str, Any]]) -> None:
    heads = ["writes allowed", "mean", "worst window", "plans", "moves", "MiB a step", "steps to the switch"]
    made = [
        [
            str(row["writes"]),
            *(percent(row["mean"]), percent(row["worst_window"])),
            *(str(row["plans"]), str(row["moves"])),
            f"{row['mib_per_step']:.2f}",
            f"{np.mean(row['delays']):.1f}" if row["delays"] else "",
        ]
        for row in rows
    ]
    mib = options.expert_mib or EXPERT_MIB
    what = f"plans every {options.every} steps, {options.step_mib:g} MiB a step and rank, experts of {mib:g} MiB"
    print()
    show_columns(f"what steps see while a balancer moves experts: {what}", heads, made, texts=range(1))


def _allowed(row: dict[str, Any], plan: planner.Plan) -> str:
    if row["policy"] == "update":
        return "default" if row["writes"] is None else str(row["writes"])
    return str(plan.ranks * plan.slots) if row["policy"] == "replan" else "0"


def _show_memory(options: Options, figures: dict[str, Any], plan: planner.Plan) -> None:
    experts, ranks, slots = plan.shape
    extra = ranks * slots - experts
    told = f"slots beyond one per expert: {extra} a layer, {extra / ranks:.2f} a rank"
    if options.expert_mib is not None:
        per_rank = extra / ranks * figures["layers"] * options.expert_mib * (1 << 20)
        written = sum(figures["moves"]) * options.expert_mib * (1 << 20)
        told += f"; {mebibytes(per_rank)} MiB on a rank; the moves copy {mebibytes(written)} MiB"
    print(told)
