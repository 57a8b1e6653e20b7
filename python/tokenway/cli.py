"""The command `tokenway`: balance, bench, info, launch and plan."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

import tokenway
from tokenway import launch, usage
from tokenway.balance import options as balance_options
from tokenway.bench import options
from tokenway.errors import TokenwayError
from tokenway.planning import options as planning_options

BAD_ARGUMENTS = 2


class _Parser(argparse.ArgumentParser):
    """Errors are one line, told by `main`."""

    def error(self, message: str) -> NoReturn:
        raise usage.UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tokenway", description="Expert-parallel communication.")
    parser.add_argument("--version", action="version", version=tokenway.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="balance|bench|info|launch|plan")
    place = commands.add_parser("balance", help="plan where experts go", description=balance_options.DESCRIPTION)
    balance_options.add_arguments(place)
    place.set_defaults(run=_balance)
    bench = commands.add_parser("bench", help="verify and time dispatch and combine", description=_BENCH)
    options.add_arguments(bench)
    bench.set_defaults(run=_bench)
    info = commands.add_parser("info", help="what this installation and this machine can do")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.add_argument(
        "--plan",
        nargs="*",
        metavar="NAME=VALUE",
        help="instead how the CUDA backend would run a step, here without a GPU too: which kernels, how many SMs send; "
        "e.g. tokens=128 ranks=4 hidden=7168 experts=256 top_k=8 sm_limit=24 mode=high_throughput",
    )
    info.set_defaults(run=_info)
    start = commands.add_parser("launch", help="run a script as the ranks of this host")
    start.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="processes")
    start.add_argument("script", help="a .py file, run with this Python, or a program")
    start.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    start.set_defaults(run=_launch)
    told = planning_options.DESCRIPTION
    predicted = commands.add_parser("plan", help="predict an exchange on GPUs that are not here", description=told)
    planning_options.add_arguments(predicted)
    predicted.set_defaults(run=_plan)
    return parser


_BENCH = (
    "Verifies every row bit for bit against the NumPy oracle, then times dispatch, combine and "
    "both, in turns with baselines. Runs N processes of its own, or, started by torchrun or "
    "`tokenway launch`, as the ranks that it finds itself in. With --backend nvlink, the same on GPUs: "
    "beside the floor of the same run, in CUDA graphs and without, verified where asked for. With "
    "--backend torch, the portable backend's strategies beside each other, over gloo."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 when it failed, 2 for bad arguments."""
    try:
        args = _parser().parse_args(argv)
        with usage.printing():
            return int(args.run(args))
        return 0  # who reads has seen enough
    except usage.UsageError as error:
        print(f"tokenway: {_one_line(error)}", file=sys.stderr)
        return BAD_ARGUMENTS
    except SystemExit as end:  # --help, --version
        return int(end.code or 0)
    except (TokenwayError, OSError, MemoryError) as error:
        print(f"tokenway: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _bench(args: argparse.Namespace) -> int:
    from tokenway.bench import command

    return command.run(options.from_arguments(args))


def _balance(args: argparse.Namespace) -> int:
    from tokenway.balance import command

    return command.run(balance_options.from_arguments(args))


def _info(args: argparse.Namespace) -> int:
    from tokenway import info, plan

    if args.plan is not None:
        planned = plan.from_words(args.plan)
        print(json.dumps(planned, indent=1) if args.json else plan.text(planned))
        return 0
    facts = info.collect()
    print(json.dumps(facts, indent=1) if args.json else info.text(facts))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from tokenway.planning import command

    return command.run(planning_options.from_arguments(args))


def _launch(args: argparse.Namespace) -> int:
    if not 1 <= args.ranks <= tokenway._header.MAX_RANKS:
        limit = tokenway._header.MAX_RANKS
        raise usage.UsageError(f"launch: -n: {args.ranks}; allowed 1..{limit}")
    try:
        return launch.launch(launch.script_command(args.script, args.args), args.ranks)
    except FileNotFoundError:
        raise usage.UsageError(f"launch: no such program: {args.script}") from None


if __name__ == "__main__":
    sys.exit(main())
