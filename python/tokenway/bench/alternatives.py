"""What `tokenway bench` measures instead of dispatch and combine: the options, and what goes with none of them."""

from __future__ import annotations

import argparse
from typing import Any

from tokenway.usage import UsageError, add_group, number, plot, refuse_given

COLLECTIVES = ("all_gatherv", "reduce_scatterv", "all")

_EXCHANGES = "it measures no dispatch and combine between ranks"
_BOTH = "it measures pairs of both modes beside each other"
_WAYS = "it measures ways back beside each other, of bfloat16 rows in low latency"
# (option, another that does not go with it, why)
APART = (
    *(("--layer", other, "each is a run of its own") for other in ("--aux", "--overhead", "--collective")),
    *(("--layer", other, "its experts multiply in bfloat16") for other in ("--dtype fp8", "--compare")),
    *(
        ("--layer", other, "it is a layer of processes, timed beside NCCL's")
        for other in ("--local-ranks", "--over nccl")
    ),
    *(
        ("--layer", other, "its rows tell no latency and bandwidth of an exchange")
        for other in ("--plot", "--ablation")
    ),
    ("--aux", "--overhead", "each is a run of its own"),
    ("--aux", "--collective", "each is a run of its own"),
    *(("--aux", other, _EXCHANGES) for other in ("--verify-only", "--backward", "--plot", "--local-ranks")),
    ("--overhead", "--collective", "each is a run of its own"),
    ("--overhead", "--verify-only", "it only measures"),
    *((option, "--overhead", _EXCHANGES) for option in ("--backward", "--plot")),
    *((option, "--collective", _EXCHANGES) for option in ("--backward", "--plot", "--local-ranks")),
    ("--dtype fp8", "--collective", "sums are of wider elements"),
    *(("--mode auto", other, "each is a run of its own") for other in ("--aux", "--collective", "--overhead")),
    *((option, "--mode auto", _BOTH) for option in ("--backward", "--baselines", "--plot", "--local-ranks")),
    *((option, "--mode auto", _BOTH) for option in ("--ablation", "--compare", "--backend torch")),
    *(("--returns", other, "each is a run of its own") for other in ("--aux", "--collective", "--overhead", "--layer")),
    *((option, "--returns", _WAYS) for option in ("--backward", "--baselines", "--plot", "--local-ranks")),
    *((option, "--returns", _WAYS) for option in ("--ablation", "--compare", "--dtype fp8", "--over nccl")),
    ("--returns", "--mode auto", "each is a run of its own"),
)


_OF_LAYER: dict[str, dict[str, Any]] = {
    "--fixed-experts": {
        "type": number(1),
        "metavar": "US",
        "help": "also a layer whose experts are a kernel of so many microseconds: what its exchange takes",
    },
    "--empty-ranks": {"type": number(1), "metavar": "N", "help": "the last N ranks have no tokens"},
    "--timeline": {"type": plot, "metavar": "FILE.png", "help": "where the kernels of a captured layer begin and end"},
}


def of_layer(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Settings from options of --layer. Raises UsageError."""
    if not args.layer:
        refuse_given(args, "--layer", _OF_LAYER)
    if (args.empty_ranks or 0) >= ranks:
        raise UsageError(f"--empty-ranks: {args.empty_ranks}; of {ranks} ranks allowed are 1..{ranks - 1}")
    if args.timeline and args.verify_only:
        raise UsageError("--timeline: not with --verify-only; nothing is timed")
    return {
        "fixed_experts": args.fixed_experts,
        "empty_ranks": args.empty_ranks or 0,
        "timeline": args.timeline,
        "layer_mode": args.mode or "auto",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument_group("instead of dispatch and combine").add_argument
    add(
        "--collective",
        choices=COLLECTIVES,
        metavar="NAME",
        help="uneven gathers and reduces: all_gatherv, reduce_scatterv or all",
    )
    add("--returns", action="store_true", help="rows that return per expert, as fp8, or to replicas (on GPUs)")
    add("--overhead", action="store_true", help="what a call through Python adds (1 rank, 1 token)")
    add("--layer", action="store_true", help="whole MoE layers, beside NCCL's and PyTorch's, and their parts (on GPUs)")
    add_group(parser, "--layer", _OF_LAYER)
    add("--aux", action="store_true", help="what is done on a rank between the calls, at group sizes to 64 (1 rank)")
