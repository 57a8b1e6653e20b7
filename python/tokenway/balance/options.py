"""The options of `tokenway balance`, checked."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from tokenway.balance import simulation, traces, workloads
from tokenway.errors import InvalidArgument
from tokenway.usage import UsageError, number, plot, writable

DESCRIPTION = (
    "Plans where experts and their replicas go, so that all ranks carry the same, and prints what that gives: per "
    "layer the imbalance (how much the hottest rank carries above the mean) before, after, and what no plan is below. "
    "Loads come from a recorded routing (.npz of ids), from counts (.json of logical_count[layer][expert]), or are "
    "made up. With --online the plan is played against the windows that follow the one it was made from: by planners "
    "that take no time, and step by step through the balancer that moves experts while a model runs."
)
SHAPES = ("lognormal", "zipf", "dirichlet", "drifting", "domains")


@dataclass(frozen=True)
class Options:
    """What `tokenway balance` was asked for."""

    source: str
    file: str | None
    ranks: int
    slots: int
    nodes: int
    groups: int
    tolerance: float
    layers: int
    experts: int | None
    sigma: float
    windows: int
    memory: float
    seed: int
    online: bool
    window: int
    steps: int
    every: int
    spare: int
    gain: float
    delay: int
    load_decay: float
    step_mib: float
    policies: tuple[str, ...]
    writes: tuple[int, ...]
    decay: float | None
    tokens: tuple[int, ...]
    top_k: int
    old: str | None
    save: str | None
    expert_mib: float | None
    plot: str | None
    json: str | None

    @property
    def shape(self) -> dict[str, int]:
        """ranks and slots, as the planner takes them."""
        return {"ranks": self.ranks, "slots": self.slots}

    @property
    def window_steps(self) -> int:
        """Steps of a window."""
        return self.steps * (1 if self.file is None else self.window)

    @property
    def where(self) -> dict[str, Any]:
        """All that says where experts may go."""
        return {**self.shape, "nodes": self.nodes, "groups": self.groups, "node_tolerance": self.tolerance}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tokenway balance`."""
    add = parser.add_argument
    add("source", help=f"FILE.npz, FILE.json, or one of {', '.join(SHAPES)}")
    add("--ranks", type=number(1), required=True, metavar="N")
    add("--slots", type=number(1), metavar="S", help="physical experts of a rank; default: one more than is needed")
    add("--nodes", type=number(1), default=1, help="ranks are N / NODES to a node")
    add("--groups", type=int, default=0, help="of experts, each of which keeps to a node; 0: nodes are not looked at")
    add("--tolerance", type=float, default=0.01, help="by how much of the mean a node may exceed it (0.01)")
    add("--layers", type=number(1), default=8, help="of loads that are made up (8)")
    add("--experts", type=number(1), help="logical ones; made up: 256")
    add("--sigma", type=float, default=0.75, help="of lognormal, drifting and domains (0.75); of zipf the exponent")
    add("--windows", type=number(1), default=24, help="of drifting and domains (24)")
    add("--memory", type=float, default=0.998, help="of drifting: how much of a window's logarithms the next keeps")
    add("--seed", type=int, default=0)
    add("--online", action="store_true", help="play all windows: policies beside each other")
    add("--window", type=number(1), default=1, metavar="STEPS", help="of a recording: steps in a window (1)")
    lasting = "of --online: steps that loads of a window last, or each step of a recording (made up: 64, recorded: 1)"
    add("--steps", type=number(1), metavar="STEPS", help=lasting)
    add("--every", type=number(1), metavar="STEPS", help="of --online: between two plans of the balancer (a window)")
    add(
        "--spare", type=number(1), default=1, metavar="S", help="of --online: further slots of a rank, to move into (1)"
    )
    gained = "of --online: a layer stays as it is unless its imbalance falls by so much (0.02)"
    add("--gain", type=float, default=0.02, help=gained)
    add("--delay", type=number(1), default=1, metavar="STEPS", help="of --online: what a plan takes, and a copy (1)")
    left = "of --online: what is left of a group's loads after one more dispatch (0.99)"
    add("--load-decay", type=float, default=0.99, help=left)
    spent = "of --online: what a rank may copy in a step (64), of experts of --expert-mib (42)"
    add("--step-mib", type=float, default=64.0, metavar="MIB", help=spent)
    policies = f"of --online: {', '.join(simulation.POLICIES)} (default static, update and replan)"
    add("--policies", nargs="+", choices=simulation.POLICIES, metavar="P", help=policies)
    changed = "slots of a layer that an update may change (half a slot per rank); several with --online"
    add("--writes", type=number(0), nargs="+", metavar="W", help=changed)
    kept = "of --online: what is left of older windows after one more (of each layer what foretold the last ones best)"
    add("--decay", type=float, help=kept)
    noise = "per rank: what the noise of such batches leaves"
    add("--tokens", type=number(1), nargs="+", default=[], metavar="T", help=noise)
    add("--top-k", type=number(1), default=8, help="of --tokens (8)")
    add("--old", metavar="FILE.json", help="a plan that is in use, as --save writes it: update that")
    add("--save", type=writable, metavar="FILE.json", help="keep the plan")
    add("--expert-mib", type=float, metavar="MIB", help="of an expert's weights in a layer: tell the memory")
    pictures = "load per rank before and after; imbalance by slots, budget and time"
    add("--plot", type=plot, metavar="FILE.png", help=pictures)
    add("--json", type=writable, metavar="FILE", help="all figures")


def from_arguments(args: argparse.Namespace) -> Options:
    """Raises UsageError for what cannot be."""
    made_up = args.source in SHAPES
    if not made_up and not args.source.endswith((".npz", ".json")):
        raise UsageError(f"balance: {args.source!r}; allowed: FILE.npz, FILE.json, {', '.join(SHAPES)}")
    if args.expert_mib is not None and not 0 < args.expert_mib < math.inf:
        raise UsageError(f"--expert-mib: {args.expert_mib}; must be above 0")
    if not 0 < args.step_mib < math.inf:
        raise UsageError(f"--step-mib: {args.step_mib}; must be above 0")
    if not 0 <= args.load_decay < 1:
        raise UsageError(f"--load-decay: {args.load_decay}; allowed from 0, below 1")
    if args.writes and len(args.writes) > 1 and not args.online:
        raise UsageError(f"--writes: {len(args.writes)} budgets; several need --online")
    if args.writes and not args.online and args.old is None:
        raise UsageError("--writes: a first plan has no budget; give --old or --online")
    if args.online and args.old is not None:
        raise UsageError("--old: with --online the first plan is made from the first window")
    steps = args.steps or (64 if made_up else 1)
    return Options(
        source=args.source,
        file=None if made_up else args.source,
        slots=args.slots or 0,
        experts=args.experts or (256 if made_up else None),
        policies=tuple(args.policies or ("static", "update", "replan")),
        writes=tuple(args.writes or ()),
        tokens=tuple(args.tokens),
        steps=steps,
        every=args.every or steps * (1 if made_up else args.window),
        **{
            name: getattr(args, name)
            for name in (
                *("ranks", "nodes", "groups", "tolerance", "layers", "sigma", "windows", "memory", "seed", "online"),
                *("window", "decay", "top_k", "old", "save", "expert_mib", "plot", "json"),
                *("spare", "gain", "delay", "load_decay", "step_mib"),
            )
        },
    )


def read_windows(options: Options) -> tuple[Any, Any]:
    """(loads [windows, layers, experts] of the source; the same, or of a recording its steps, for as many windows)."""
    try:
        if options.file is not None:
            recording = traces.read(options.file, options.experts)
            if not len(recording.counts) // options.window:
                raise UsageError(f"--window: {options.window}; {options.source} has {len(recording.counts)} steps")
            windows = recording.windows(options.window)
            return windows, recording.counts[: len(windows) * options.window]
        windows = _made_up(options)
        return windows, windows
    except InvalidArgument as error:
        raise UsageError(f"balance: {error}") from None
    except ValueError as error:
        raise UsageError(f"balance: {error}") from None


def _made_up(options: Options) -> Any:
    shape = (options.layers, options.experts or 1)
    if options.source == "drifting":
        given = {"memory": options.memory, "seed": options.seed}
        return workloads.drifting(options.windows, *shape, options.sigma, **given)
    if options.source == "domains":
        return workloads.domains(options.windows, *shape, options.sigma, seed=options.seed)
    if options.source == "dirichlet":
        return workloads.dirichlet(*shape, seed=options.seed)[None]
    kind = workloads.zipf if options.source == "zipf" else workloads.lognormal
    return kind(*shape, options.sigma, seed=options.seed)[None]


def slots_of(options: Options, experts: int) -> int:
    """Of a rank: as given, else one more than is needed."""
    return options.slots or -(-experts // options.ranks) + 1
