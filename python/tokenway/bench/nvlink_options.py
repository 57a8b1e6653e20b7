"""The options of `tokenway bench --backend nvlink` and `--backend gin`, checked."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from tokenway.bench import gpu_machine
from tokenway.bench.case import FP8
from tokenway.usage import UsageError, add_group, number, refuse_given

BACKEND, BETWEEN = "--backend nvlink", "--backend gin"
BACKENDS = ("nvlink", "gin")
OVER = ("nvlink", "nccl")
TOKENS = (1, 8, 128, 256, 512, 1024, 2048, 4096)
PAYLOADS = {"bf16": "bfloat16", "fp8": FP8}
MAX_LANES = 64  # TW_MAX_LANES
MAX_LOCAL_RANKS = 16  # TW_MAX_LOCAL_RANKS: of one device
# What ranks that share a device need before the first CUDA call: hardware queues of their own, and no module that is
# loaded while a kernel waits for a peer.
LOCAL_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}

# (option, another that does not go with it, why)
APART = (
    ("--overhead", BACKEND, "its rows tell what calls cost the host"),
    ("--backward", "--compare", "gradients are not fp8"),
    *((option, "--over nccl", "its ranks wait in collectives") for option in ("--local-ranks", "--ablation")),
    *(
        (option, BETWEEN, "its ranks are processes, and wait for what comes")
        for option in ("--local-ranks", "--ablation")
    ),
    *(
        (option, BETWEEN, "it times pairs and layers alone")
        for option in ("--overhead", "--aux", "--collective", "--returns", "--moving", "--frameworks")
    ),
)


@dataclass(frozen=True)
class Nvlink:
    """What a run on GPUs measures beside what the CPU's does."""

    local_ranks: int = 0  # all ranks as threads of one process; 0: a process per GPU
    sm_limit: int = 0
    lanes: int = 1
    inbox_tokens: int | None = None
    verify: bool = False
    floor: bool = True
    ablation: bool = False
    breakdown: bool = False
    compare: str | None = None  # a second dtype for tokens, measured in the same rounds
    over: str = "nvlink"  # or "nccl": the portable backend; or "gin"
    ranks_per_host: int | None = None  # of "gin". None: hosts are what they are


_OPTIONS: dict[str, dict[str, Any]] = {
    "--payload": {"choices": PAYLOADS, "metavar": "NAME", "help": "bf16 (default) or fp8, short for --dtype"},
    "--compare": {"choices": ["fp8"], "metavar": "NAME", "help": "fp8: measure it beside, in the same rounds"},
    "--over": {"choices": OVER, "metavar": "NAME", "help": "nvlink (default), or nccl: the portable backend"},
    "--local-ranks": {
        "type": number(1),
        "metavar": "N",
        "help": "N ranks as threads of one process (default: a process per GPU)",
    },
    "--sm-limit": {
        "type": number(1),
        "metavar": "S",
        "help": "thread blocks of a kernel at most (default: the library chooses)",
    },
    "--lanes": {"type": number(1, MAX_LANES), "metavar": "L", "help": "lanes of the group (default 1)"},
    "--inbox-tokens": {
        "type": number(1),
        "metavar": "I",
        "help": "tokens whose returning rows a window of high throughput has room for (default: the library chooses)",
    },
    "--verify": {"action": "store_true", "help": "compare each row with the oracle before it is timed"},
    "--no-floor": {"action": "store_true", "help": "leave tokenway-floor out, and with it all ratios to the floor"},
    "--ablation": {"action": "store_true", "help": "also without waiting for peers; its results are wrong"},
    "--breakdown": {"action": "store_true", "help": "also the time of each kernel, from the profiler"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_group(parser, BACKEND, _OPTIONS)


def from_arguments(args: argparse.Namespace) -> Nvlink | None:
    """What was asked for; None with another backend. Raises UsageError."""
    if args.backend not in BACKENDS:
        refuse_given(args, BACKEND, _OPTIONS)
        return None
    between = args.backend == "gin"
    if between:
        refuse_given(args, BACKEND, ("--over",))
    return Nvlink(
        local_ranks=args.local_ranks or 0,
        sm_limit=args.sm_limit or 0,
        lanes=args.lanes or 1,
        inbox_tokens=args.inbox_tokens,
        verify=args.verify or args.verify_only,
        floor=not (args.no_floor or args.verify_only or between),
        ablation=args.ablation,
        breakdown=args.breakdown,
        compare=args.compare and PAYLOADS[args.compare],
        over="gin" if between else args.over or OVER[0],
        ranks_per_host=args.ranks_per_host if between else None,
    )


def dtype(args: argparse.Namespace) -> str | None:
    """What --payload and --dtype say together."""
    if args.payload is None:
        return args.dtype
    named = PAYLOADS[args.payload]
    if args.dtype not in (None, named, args.payload):
        raise UsageError(f"--payload: {args.payload!r}, but --dtype is {args.dtype!r}")
    return named


def check(settings: Any) -> None:
    """Whether this machine can do it. Raises UsageError."""
    gpu: Nvlink = settings.nvlink
    backend = BETWEEN if gpu.over == "gin" else BACKEND
    if gpu.compare == settings.dtype:
        raise UsageError("--compare: fp8; the tokens are fp8 already")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"{backend} needs PyTorch: pip install 'tokenway[torch]'")
    if gpu.local_ranks:
        for name, value in LOCAL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    found = gpu_machine.device_count()
    if isinstance(found, str):
        raise UsageError(f"{backend}: {found}")
    if gpu.local_ranks:
        if settings.launched:
            raise UsageError("--local-ranks: this process is one of several ranks already")
        if gpu.local_ranks > found * MAX_LOCAL_RANKS:
            raise UsageError(f"--local-ranks: {gpu.local_ranks}; allowed 1..{found * MAX_LOCAL_RANKS} on {found} GPUs")
    elif settings.ranks > found and not settings.launched:
        told = "there is 1 GPU" if found == 1 else f"there are {found} GPUs"
        raise UsageError(f"--ranks: {settings.ranks}, but {told}, and each rank needs one (or use --local-ranks)")
