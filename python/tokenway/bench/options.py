"""The options of `tokenway bench`, checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenway import portable, usage
from tokenway._header import MODES
from tokenway.bench import baselines, collective_baselines, nccl, nvlink_options, portable_options
from tokenway.bench.case import DTYPES, EXACT_LAYOUTS, FP8, LAYOUTS, Case
from tokenway.bench.control import MAX_RANKS
from tokenway.bench.profiles import PROFILES
from tokenway.bench.routing import GENERATORS, from_npz
from tokenway.comm import NRANKS
from tokenway.usage import UsageError
from tokenway.usage import choice as _choice
from tokenway.usage import number as _number

MAX_TOKENS = 1 << 20
COLLECTIVES = ("all_gatherv", "reduce_scatterv", "all")


@dataclass(frozen=True)
class Settings:
    """What a run measures; the same on all ranks."""

    ranks: int = 4
    launched: bool = False  # by torchrun or `tokenway launch`: this process is a rank
    profiles: tuple[str, ...] = ("deepseek-v3",)
    routings: tuple[str, ...] = ("uniform",)
    tokens: tuple[int, ...] = (1, 8, 128, 512)
    dtype: str = "bfloat16"
    layout: str = "rank_major"
    weighting: str = "none"
    iterations: int = 50
    rounds: int = 5
    warmup: int = 2
    seed: int = 0
    baselines: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # baselines that cannot run here, and why
    backward: bool = False
    collective: str | None = None  # all_gatherv, reduce_scatterv or all: these, instead of dispatch and combine
    verify_only: bool = False
    overhead: bool = False
    aux: bool = False
    quick: bool = False
    json: str | None = None
    plot: str | None = None
    nvlink: nvlink_options.Nvlink | None = None  # None: the CPU backend
    portable: portable_options.Portable | None = None  # likewise

    def cases(self) -> list[Case]:
        """The rows of the run, in order."""
        return [
            Case(
                PROFILES[profile],
                routing,
                tokens,
                self.ranks,
                self.dtype,
                self.layout,
                self.weighting,
                self.seed,
            )
            for profile in self.profiles
            for routing in self.routings
            for tokens in self.tokens
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    many: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    add("--ranks", type=int, metavar="N", help="local processes (default 4; on GPUs 2, one on each)")
    add("--profile", **many, help=f"all, or some of {', '.join(PROFILES)} (default deepseek-v3)")
    add("--routing", **many, help="all, or some of uniform, balanced, skewed, FILE.npz")
    add("--tokens", nargs="+", metavar="T", help="per rank (default 1 8 128 512; on GPUs up to 4096)")
    add("--dtype", help=f"{', '.join(DTYPES)} or fp8: float8 and a float32 scale per 128 elements")
    add("--layout", help="rank_major (default) or expert_major; flat or grouped, of high throughput")
    add(
        "--mode",
        metavar="NAME",
        help="low_latency or high_throughput, whose default layout is flat (default: by --layout)",
    )
    add("--weighting", help="none (default) or topk")
    add("--iterations", type=int, metavar="I", help="timed, over all rounds (default 50)")
    add("--rounds", type=int, metavar="R", help="in which subjects take turns (default 5; 25 with --backend torch)")
    add("--warmup", type=int, metavar="W", help="iterations before each turn (default 2; 1 with --backend torch)")
    add("--seed", type=int, default=0, help="of tokens and routings")
    add(
        "--baselines",
        **many,
        help=f"auto, none, or some of {', '.join(baselines.NAMES)}; on GPUs of {', '.join(nccl.NAMES)}",
    )
    add("--backward", action="store_true", help="gradients too: by the cached routing, apart and after the pair")
    add(
        "--collective",
        metavar="NAME",
        help="all_gatherv, reduce_scatterv or all: uneven gathers and reduces instead of dispatch and combine",
    )
    add("--verify-only", action="store_true", help="compare with the oracle, time nothing")
    add("--overhead", action="store_true", help="what a call through Python adds (1 rank, 1 token)")
    add("--aux", action="store_true", help="what is done on a rank between the calls, at group sizes to 64 (1 rank)")
    add("--quick", action="store_true", help="small numbers of tokens and iterations")
    add("--json", metavar="FILE", help="write everything measured, with machine and versions")
    add("--plot", metavar="FILE.png", help="latency and bandwidth against tokens")
    nvlink_options.add_arguments(parser)
    portable_options.add_arguments(parser)


def from_arguments(args: argparse.Namespace) -> Settings:
    """Settings from parsed options and the environment. Raises UsageError."""
    gpu = nvlink_options.from_arguments(args)
    apart = portable_options.from_arguments(args)
    ranks, launched = _ranks(1 if args.overhead or args.aux else args.ranks, gpu)
    quick: bool = args.quick
    beside = apart is not None and not args.baselines  # the ways are measured beside each other
    untimed = args.verify_only or args.overhead or args.aux or beside
    collective = _choice("--collective", args.collective, COLLECTIVES, "") or None
    given = ["none"] if untimed else _names(args.baselines) or ["auto"]
    wanted, skipped = _baselines(given, gpu, ranks, collective is not None)
    tokens, rounds = (Settings.tokens, 5) if gpu is None else (nvlink_options.TOKENS, 3)
    fine = apart is not None and not quick  # turns are short, so that ways that follow each other meet the same
    dtype = nvlink_options.dtype(args)
    settings = Settings(
        ranks=ranks,
        launched=launched,
        profiles=_choices("--profile", _names(args.profile), list(PROFILES), ["deepseek-v3"]),
        routings=_routings(_names(args.routing) or ["uniform"]),
        tokens=_tokens(_names(args.tokens))
        or (((8,) if quick else (128,)) if args.aux else (1, 8, 32) if quick else tokens),
        dtype=_choice("--dtype", FP8 if dtype == "fp8" else dtype, DTYPES, "bfloat16"),
        layout=_layout(args.mode, args.layout),
        weighting=_choice("--weighting", args.weighting, ("none", "topk"), "none"),
        iterations=_number("--iterations", args.iterations, 1, 10 if quick else 50 if gpu is None else 60),
        rounds=_number("--rounds", args.rounds, 1, 25 if fine else rounds),
        warmup=_number("--warmup", args.warmup, 0, 1 if quick or fine else 2),
        seed=_number("--seed", args.seed, 0, 0),
        baselines=wanted,
        skipped=skipped,
        backward=args.backward,
        collective=collective,
        verify_only=args.verify_only,
        overhead=args.overhead,
        aux=args.aux,
        quick=quick,
        json=usage.writable("--json", args.json),
        plot=usage.plot("--plot", args.plot),
        nvlink=gpu,
        portable=apart,
    )
    _check_together(settings)
    if gpu is not None:
        nvlink_options.check(settings)
    if apart is not None:
        portable_options.check(settings)
    return settings


def _layout(mode: str | None, layout: str | None) -> str:
    """What --mode and --layout say together."""
    if mode is None:
        return _choice("--layout", layout, LAYOUTS, "rank_major")
    exact = _choice("--mode", mode, tuple(MODES), "") == "high_throughput"
    allowed = tuple(name for name in LAYOUTS if (name in EXACT_LAYOUTS) == exact)
    return _choice(f"--layout, with --mode {mode}", layout, allowed, allowed[0])


def _check_together(settings: Settings) -> None:
    if settings.plot and (settings.verify_only or settings.overhead):
        raise UsageError("--plot: nothing to plot with --verify-only or --overhead")
    if settings.aux:
        others = {
            "--overhead": settings.overhead,
            "--collective": settings.collective,
            "--verify-only": settings.verify_only,
            "--backward": settings.backward,
        }
        others |= {"--plot": settings.plot, "--local-ranks": settings.nvlink and settings.nvlink.local_ranks}
        if wrong := [name for name, given in others.items() if given]:
            raise UsageError(f"--aux: not with {wrong[0]}; it measures one rank's own work")
    if settings.backward and settings.overhead:
        raise UsageError("--backward: not with --overhead, which measures no backward pass")
    if settings.backward and settings.nvlink is not None and settings.nvlink.compare:
        raise UsageError("--backward: not with --compare; gradients are not fp8")
    if settings.backward and settings.dtype == FP8:
        raise UsageError("--backward: not with --dtype fp8; gradients return as bfloat16, in a group of their own")
    if settings.collective is not None:
        _check_collective(settings)
        return
    if settings.verify_only and settings.overhead:
        raise UsageError("--overhead measures: it cannot go with --verify-only")
    for case in settings.cases():
        if case.routing in GENERATORS:
            continue
        try:
            case.exchange  # noqa: B018  a recording may have too few tokens, experts or ids
        except ValueError as error:
            raise UsageError(f"--routing with {case.profile.name}: {error}") from None


def _check_collective(settings: Settings) -> None:
    refused = {
        "--plot": settings.plot,
        "--backward": settings.backward,
        "--overhead": settings.overhead,
        "--aux": settings.aux,
        "--dtype fp8": settings.dtype == FP8,
        "--local-ranks": settings.nvlink is not None and settings.nvlink.local_ranks,
    }
    for option, given in refused.items():
        if given:
            raise UsageError(f"{option}: not with --collective")


def _names(given: Sequence[str] | None) -> list[str]:
    return [name for item in given or () for name in item.split(",") if name]


def _choices(option: str, given: list[str], known: list[str], default: list[str]) -> tuple:
    if "all" in given:
        given = known
    return tuple(_choice(option, name, known, "") for name in dict.fromkeys(given or default))


def _tokens(given: list[str]) -> tuple[int, ...]:
    for text in given:
        if not text.isdecimal() or not 1 <= int(text) <= MAX_TOKENS:
            raise UsageError(f"--tokens: {text!r}; allowed 1..{MAX_TOKENS}")
    return tuple(dict.fromkeys(int(text) for text in given))


def _routings(given: list[str]) -> tuple[str, ...]:
    routings: list[str] = []
    for name in given:
        if name == "all":
            routings += GENERATORS
        elif name in GENERATORS:
            routings.append(name)
        elif name.endswith(".npz"):
            try:
                from_npz(name)
            except (OSError, ValueError) as error:
                raise UsageError(f"--routing: {name}: {error}") from None
            routings.append(os.path.abspath(name))
        else:
            known = ", ".join([*GENERATORS, "all", "FILE.npz"])
            raise UsageError(f"--routing: {name!r}; allowed: {known}")
    return tuple(dict.fromkeys(routings))


def _baselines(
    given: list[str], gpu: nvlink_options.Nvlink | None, ranks: int, collective: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what is measured, what is not and why)."""
    if given == ["none"]:
        return (), ()
    if gpu is None:
        names, reason, hint = baselines.NAMES, portable.missing(), ": pip install 'tokenway[torch]'"
    else:
        names, reason, hint = nccl.NAMES, nccl.missing(gpu.local_ranks, ranks), ""
    if collective:
        names = collective_baselines.NAMES["gloo" if gpu is None else "nccl"]
    cannot = [n for n in names if n.startswith(("gloo", "nccl")) and reason]
    if given == ["auto"]:
        return tuple(n for n in names if n not in cannot), tuple(f"{n}: {reason}" for n in cannot)
    chosen = _choices("--baselines", given, list(names), [])
    for name in chosen:
        if name in cannot:
            raise UsageError(f"--baselines: {name}: {reason}{hint}")
    return chosen, ()


def _ranks(given: int | None, gpu: nvlink_options.Nvlink | None = None) -> tuple[int, bool]:
    if gpu is not None and gpu.local_ranks:
        if given not in (None, gpu.local_ranks):
            raise UsageError(f"--ranks: {given}, but --local-ranks is {gpu.local_ranks}")
        given = gpu.local_ranks
    started = os.environ.get(NRANKS) or (os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None)
    if started is not None:
        if not started.isdecimal():
            raise UsageError(f"this process was started as a rank of {started!r} ranks")
        if given is not None and given != int(started):
            raise UsageError(f"--ranks: {given}; this process is one of {started} ranks already")
        given = int(started)
    ranks = (4 if gpu is None else 2) if given is None else given
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"--ranks: {ranks}; allowed 1..{MAX_RANKS}")
    return ranks, started is not None
