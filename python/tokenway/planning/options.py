"""The options of `tokenway plan`, checked."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from tokenway.bench.case import DTYPES, FP8
from tokenway.bench.profiles import PROFILES
from tokenway.bench.routing import GENERATORS
from tokenway.planning.machines import MACHINES, MOST_GPUS, Machine, given
from tokenway.planning.model import MODES
from tokenway.planning.rows import PLACEMENTS
from tokenway.usage import UsageError, listed, number, plot, writable

DESCRIPTION = (
    "Predicts what a dispatch and a combine would take on GPUs that are not here, and which way of the exchange would "
    "be the fastest. Within an NVLink domain constants are fitted from measured files. Between domains nothing has "
    "run: it "
    "is the protocol that docs/PROTOCOL.md describes, with published figures of networks. docs/PLANNING.md says how "
    "far either is to be believed."
)
MOST_TOKENS = 1 << 17
MOST_SIMULATED = 1 << 21  # pairs * ranks * ranks


@dataclass(frozen=True)
class Options:
    """What `tokenway plan` was asked for."""

    machine: Machine
    profile: str
    gpus: tuple[int, ...]
    tokens: tuple[int, ...]
    dtype: str
    mode: str
    placement: str
    routing: str
    simulate: int
    late_share: float
    late_us: float
    seed: int
    json: str | None
    plot: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tokenway plan`."""
    add = parser.add_argument
    add("--machine", choices=tuple(MACHINES), default="h100-cx7", metavar="NAME", help=", ".join(MACHINES))
    add("--gpus", **listed(number(2, MOST_GPUS)), metavar="N", help="in the group (default 8 16 32 64)")
    add("--domain", type=number(1, MOST_GPUS), metavar="L", help="GPUs that NVLink joins (as the machine has)")
    add("--nic", type=float, metavar="GB/S", help="of a GPU's network card in one direction (as the machine has)")
    add("--nic-latency", type=float, metavar="US", help="of a put between domains, without its bytes (8.35)")
    add("--put-us", type=float, metavar="US", help="of posting a put (0.1; a proxy on the CPU may take 1)")
    add("--profile", choices=tuple(PROFILES), default="deepseek-v3", metavar="NAME", help=", ".join(PROFILES))
    add("--tokens", **listed(number(1, MOST_TOKENS)), metavar="T", help="of a rank (default 128 4096)")
    add("--dtype", choices=(*DTYPES, "fp8"), default="bfloat16", metavar="DTYPE", help="of dispatched rows; or fp8")
    modes = f"auto (default): the faster; or {', '.join(MODES)}"
    add("--mode", choices=("auto", *MODES), default="auto", metavar="NAME", help=modes)
    placements = f"auto (default): contiguous, or replicated where ranks are more than experts; {', '.join(PLACEMENTS)}"
    add("--placement", choices=("auto", *PLACEMENTS), default="auto", metavar="NAME", help=placements)
    add("--routing", choices=tuple(GENERATORS), default="uniform", metavar="NAME", help=", ".join(GENERATORS))
    add("--simulate", type=number(1, 10_000), metavar="PAIRS", help="tails of so many pairs, event by event")
    late = "of --simulate: each rank is late with the chance P, by so many us"
    add("--late", nargs=2, type=float, metavar=("P", "US"), help=late)
    add("--seed", type=number(0), default=0, metavar="S", help="of routings and late ranks")
    add("--json", type=writable, metavar="FILE", help="all figures")
    add("--plot", type=plot, metavar="FILE.png", help="dispatch, combine and pair against GPUs")


def from_arguments(args: argparse.Namespace) -> Options:
    """Raises UsageError for what cannot be."""
    for option, value in (("--nic", args.nic), ("--nic-latency", args.nic_latency), ("--put-us", args.put_us)):
        least = "above 0" if option == "--nic" else "at least 0"
        if value is not None and not (0 < value < math.inf or (value == 0 and option != "--nic")):
            raise UsageError(f"{option}: {value}; must be {least}")
    if args.late is not None and args.simulate is None:
        raise UsageError("--late: only with --simulate")
    share, late_us = args.late or (0.0, 0.0)
    if not 0 <= share <= 1:
        raise UsageError(f"--late: {share}; the chance must be from 0 to 1")
    if not 0 <= late_us < math.inf:
        raise UsageError(f"--late: {late_us}; us must be at least 0")
    numbers = {"nic_gb_s": args.nic, "nic_us": args.nic_latency, "put_us": args.put_us}
    machine = given(MACHINES[args.machine], domain=args.domain, **numbers)
    gpus = args.gpus or (8, 16, 32, 64)
    for count in gpus:
        if count > machine.domain and count % machine.domain:
            raise UsageError(f"--gpus: {count}; must be at most --domain ({machine.domain}), or a multiple of it")
        if args.simulate and args.simulate * count * count > MOST_SIMULATED:
            most = MOST_SIMULATED // (count * count)
            allowed = f"allowed 1..{most}" if most else f"at most {math.isqrt(MOST_SIMULATED)} GPUs are simulated"
            raise UsageError(f"--simulate: {args.simulate} pairs of {count} GPUs; {allowed}")
        if args.placement == "contiguous" and count > PROFILES[args.profile].experts:
            told = (
                f"{count} GPUs and {PROFILES[args.profile].experts} experts; ranks without experts are not planned for"
            )
            raise UsageError(f"--placement contiguous: {told}")
    return Options(
        machine=machine,
        gpus=gpus,
        tokens=args.tokens or (128, 4096),
        dtype=FP8 if args.dtype == "fp8" else args.dtype,
        simulate=args.simulate or 0,
        late_share=share,
        late_us=late_us,
        **{name: getattr(args, name) for name in ("profile", "mode", "placement", "routing", "seed", "json", "plot")},
    )
