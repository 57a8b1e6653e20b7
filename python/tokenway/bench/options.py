"""The options of `tokenway bench`: those of all its runs, and those that each kind of run declares."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from tokenway import portable, usage
from tokenway._header import MODES
from tokenway.bench import (
    alternatives,
    baselines,
    collective_baselines,
    framework_options,
    hosts_options,
    moving_options,
    nccl,
    nvlink_options,
    portable_options,
)
from tokenway.bench.case import DTYPES, EXACT_LAYOUTS, FP8, LAYOUTS
from tokenway.bench.control import MAX_RANKS
from tokenway.bench.libraries import LIBRARIES
from tokenway.bench.nvlink_options import Nvlink
from tokenway.bench.profiles import PROFILES
from tokenway.bench.routing import GENERATORS, from_npz
from tokenway.bench.settings import Settings
from tokenway.comm import NRANKS
from tokenway.usage import UsageError, listed, number, one_of

BACKENDS = ("cpu", "nvlink", "torch", "fabric", "gin")
MAX_TOKENS = 1 << 20
KINDS = (alternatives, framework_options, hosts_options, moving_options, nvlink_options, portable_options)
# (option, another that does not go with it, why)
APART = (
    ("--backward", "--dtype fp8", "gradients return as bfloat16, in a group of their own"),
    ("--plot", "--verify-only", "there is nothing to plot"),
    *(rule for kind in KINDS for rule in kind.APART),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    backends = "nvlink, torch, fabric, or gin, GPUs of several hosts"
    add("--backend", choices=BACKENDS, default="cpu", metavar="NAME", help=f"cpu (default), {backends}")
    add("--ranks", type=number(1, MAX_RANKS), metavar="N", help="local processes (default 4; on GPUs 2, one on each)")
    known = one_of((*PROFILES, "all"))
    profiles = f"all, or some of {', '.join(PROFILES)} (default deepseek-v3)"
    add("--profile", **listed(known, PROFILES), metavar="NAME", help=profiles)
    routings = "all, or some of uniform, balanced, skewed, FILE.npz (default uniform)"
    add("--routing", **listed(_routing, GENERATORS), default=Settings.routings, metavar="NAME", help=routings)
    tokens = "per rank (default 1 8 128 512; on GPUs up to 4096)"
    add("--tokens", **listed(number(1, MAX_TOKENS)), metavar="T", help=tokens)
    dtypes = f"{', '.join(DTYPES)} or fp8: float8 and a float32 scale per 128 elements"
    add("--dtype", choices=(*DTYPES, "fp8"), metavar="DTYPE", help=dtypes)
    layouts = "rank_major (default), expert_major or grouped_by_bound; flat or grouped, of high throughput"
    add("--layout", choices=LAYOUTS, metavar="LAYOUT", help=layouts)
    modes = "low_latency, high_throughput (default layout flat) or auto, both in one group (default: by --layout, of "
    modes += "layers auto)"
    add("--mode", choices=tuple(MODES), metavar="NAME", help=modes)
    add("--weighting", choices=("none", "topk"), default="none", metavar="NAME", help="none (default) or topk")
    add(
        "--iterations",
        type=number(1),
        metavar="I",
        help="timed, over all rounds (default 50; 200 with --backend fabric)",
    )
    rounds = "in which subjects take turns (default 5; 25 with --backend torch, 10 with fabric)"
    add("--rounds", type=number(1), metavar="R", help=rounds)
    warmup = "iterations before each turn (default 2; 1 with --backend torch)"
    add("--warmup", type=number(0), metavar="W", help=warmup)
    add("--seed", type=number(0), default=0, metavar="S", help="of tokens and routings")
    on_gpus = ", ".join((*nccl.NAMES, *LIBRARIES))
    others = f"auto, none, all, or some of {', '.join(baselines.NAMES)}; on GPUs of {on_gpus}"
    add("--baselines", **listed(str), metavar="NAME", help=others)
    add("--backward", action="store_true", help="gradients too: by the cached routing, apart and after the pair")
    add("--verify-only", action="store_true", help="compare with the oracle, time nothing")
    add("--quick", action="store_true", help="small numbers of tokens and iterations")
    add("--json", type=usage.writable, metavar="FILE", help="write everything measured, with machine and versions")
    add("--plot", type=usage.plot, metavar="FILE.png", help="latency and bandwidth against tokens")
    for kind in KINDS:
        kind.add_arguments(parser)


def _routing(word: str) -> str:
    """A word of --routing: a generator's name, or the absolute path of a recording."""
    if not word.endswith(".npz"):
        return one_of((*GENERATORS, "all", "FILE.npz"))(word)
    try:
        from_npz(word)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{word}: {error}") from None
    return os.path.abspath(word)


def from_arguments(args: argparse.Namespace) -> Settings:
    """Settings from parsed options and the environment. Raises UsageError."""
    gpu = nvlink_options.from_arguments(args)
    apart = portable_options.from_arguments(args)
    between = hosts_options.from_arguments(args)
    integrations = framework_options.from_arguments(args)
    moving = moving_options.from_arguments(args)
    ranks, launched = _ranks(1 if args.overhead or args.aux else args.ranks, gpu)
    quick: bool = args.quick
    both_modes = args.mode == "auto" and not args.layer
    # Ways are measured beside each other.
    beside = (
        apart is not None or between is not None or both_modes or args.returns or args.moving
    ) and not args.baselines
    untimed = args.verify_only or args.overhead or args.aux or args.layer or beside
    given = ("none",) if untimed or integrations is not None else args.baselines or ("auto",)
    wanted, skipped = _baselines(given, gpu, ranks, args.collective is not None)
    dtype = nvlink_options.dtype(args) or "bfloat16"
    settings = Settings(
        ranks=ranks,
        launched=launched,
        profiles=args.profile or (Settings.profiles if integrations is None else framework_options.PROFILES),
        routings=args.routing or Settings.routings,
        tokens=args.tokens or _tokens(args, gpu),
        dtype=FP8 if dtype == "fp8" else dtype,
        layout=_layout(args.mode, args.layout),
        weighting=args.weighting,
        **_turns(args, gpu, fine=apart is not None and not quick),
        seed=args.seed,
        baselines=wanted,
        skipped=skipped,
        backward=args.backward,
        both_modes=both_modes,
        returns=args.returns,
        collective=args.collective,
        verify_only=args.verify_only,
        overhead=args.overhead,
        aux=args.aux,
        layer=args.layer,
        **alternatives.of_layer(args, ranks),
        quick=quick,
        json=args.json,
        plot=args.plot,
        nvlink=gpu,
        portable=apart,
        hosts=between,
        frameworks=integrations,
        moving=moving,
    )
    _check_together(settings)
    if settings.layer:
        _check_layer(settings)
    if settings.returns and (gpu is None or settings.layout != LAYOUTS[0]):
        raise UsageError(f"--returns: with --backend nvlink and --layout {LAYOUTS[0]} alone")
    if gpu is not None:
        nvlink_options.check(settings)
    if apart is not None:
        portable_options.check(settings)
    if between is not None:
        hosts_options.check(settings)
    if integrations is not None:
        framework_options.check(settings)
    if moving is not None:
        moving_options.check(settings)
    return settings


def _tokens(args: argparse.Namespace, gpu: Nvlink | None) -> tuple[int, ...]:
    """Where they were not given."""
    if args.aux:
        return (8,) if args.quick else (128,)
    if args.quick:
        return (1, 8, 32)
    if args.moving:
        return moving_options.TOKENS
    if args.frameworks is not None and gpu is not None:
        return framework_options.TOKENS
    if args.backend == "fabric":
        return hosts_options.TOKENS
    return Settings.tokens if gpu is None else nvlink_options.TOKENS


def _turns(args: argparse.Namespace, gpu: Nvlink | None, fine: bool) -> dict[str, int]:
    """Iterations, rounds and warm-up, as given or as suits the run. fine: turns are short, so that ways that follow
    each other meet the same."""
    usual = {
        "iterations": 10 if args.quick else 50 if gpu is None else 60,
        "rounds": 25 if fine else 5 if gpu is None else 3,
        "warmup": 1 if args.quick or fine else 2,
    }
    if args.backend == "fabric":
        usual = hosts_options.QUICK if args.quick else hosts_options.TURNS
    given = {name: getattr(args, name) for name in usual}
    return usual | {name: value for name, value in given.items() if value is not None}


def _layout(mode: str | None, layout: str | None) -> str:
    """What --mode and --layout say together."""
    if mode == "auto":
        if layout is not None:
            raise UsageError(f"--layout: {layout!r}; not with --mode auto, which measures rank_major and flat")
        return LAYOUTS[0]
    exact = mode == "high_throughput"
    allowed = [name for name in LAYOUTS if mode is None or (name in EXACT_LAYOUTS) == exact]
    if layout is not None and layout not in allowed:
        raise UsageError(f"--layout, with --mode {mode}: {layout!r}; allowed: {', '.join(allowed)}")
    return layout or allowed[0]


def _check_together(settings: Settings) -> None:
    gpu = settings.nvlink
    given = {
        "--aux": settings.aux,
        "--backend nvlink": gpu is not None and gpu.over != "gin",
        "--backend fabric": settings.hosts is not None,
        "--backend gin": gpu is not None and gpu.over == "gin",
        "--backend torch": settings.portable is not None,
        "--backward": settings.backward,
        "--baselines": settings.baselines,
        "--collective": settings.collective,
        "--dtype fp8": settings.dtype == FP8,
        "--frameworks": settings.frameworks is not None,
        "--layer": settings.layer,
        "--mode auto": settings.both_modes,
        "--moving": settings.moving is not None,
        "--overhead": settings.overhead,
        "--plot": settings.plot,
        "--returns": settings.returns,
        "--verify-only": settings.verify_only,
    }
    if gpu is not None:
        given |= {"--ablation": gpu.ablation, "--compare": gpu.compare, "--local-ranks": gpu.local_ranks}
        given["--over nccl"] = gpu.over == "nccl"
    for option, other, why in APART:
        if given.get(option) and given.get(other):
            raise UsageError(f"{option}: not with {other}; {why}")
    if settings.collective is None:
        _check_recordings(settings)


def _check_layer(settings: Settings) -> None:
    """It has one router, one dtype, and its own layouts."""
    if settings.nvlink is None:
        raise UsageError("--layer: with --backend nvlink alone; it compares what GPUs do")
    for option, given, allowed in (
        ("--routing", settings.routings, ("uniform", "skewed")),
        ("--dtype", (settings.dtype,), ("bfloat16",)),
    ):
        for name in given:
            if name not in allowed:
                raise UsageError(f"{option}, with --layer: {name!r}; allowed: {', '.join(allowed)}")


def _check_recordings(settings: Settings) -> None:
    """A recording may have too few tokens, experts or ids."""
    for case in settings.cases():
        if case.routing in GENERATORS:
            continue
        try:
            case.exchange  # noqa: B018
        except ValueError as error:
            raise UsageError(f"--routing with {case.profile.name}: {error}") from None


def _baselines(
    given: Sequence[str], gpu: Nvlink | None, ranks: int, collective: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what is measured, what is not and why)."""
    if tuple(given) == ("none",):
        return (), ()
    if gpu is None:
        known, reason, hint = baselines.NAMES, portable.missing(), ": pip install 'tokenway[torch]'"
    else:
        known, reason, hint = (*nccl.NAMES, *LIBRARIES), nccl.missing(gpu.local_ranks, ranks), ""
    if collective:
        known = collective_baselines.NAMES["gloo" if gpu is None else "nccl"]
    cannot = [name for name in known if (name in LIBRARIES or name.startswith(("gloo", "nccl"))) and reason]
    if tuple(given) == ("auto",):
        known = tuple(name for name in known if name not in LIBRARIES)  # those compile for minutes: only if named
        cannot = [name for name in cannot if name in known]
        return tuple(name for name in known if name not in cannot), tuple(f"{name}: {reason}" for name in cannot)
    chosen = known if "all" in given else tuple(given)
    for name in chosen:
        if name not in known:
            raise UsageError(f"--baselines: {name!r}; allowed: {', '.join(known)}, all, auto, none")
        if name in cannot:
            raise UsageError(f"--baselines: {name}: {reason}{hint}")
    return chosen, ()


def _ranks(given: int | None, gpu: Nvlink | None) -> tuple[int, bool]:
    """(how many, whether a launcher has started this process as one of them)."""
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
