#!/usr/bin/env python3
"""The soak: many random rounds on ranks that live long, and ranks killed and stopped at random moments.

    python tests/py/soak.py --rounds 10000
    python tests/py/soak.py --rounds 0 --kills 50 --stops 20
    python tests/py/soak.py --rounds 0 --moves 2000
    python tests/netns/run_all.py --soak --rounds 10000 --kills 50     # between hosts, over a network that misbehaves
    python tests/py/soak.py --backend gin --kind threads --ranks 4 --rounds 2000 --workers 8 --limit 280 \\
        --crossing per_host per_rank --late 300    # between hosts' GPUs; docs/HOSTS.md says what NCCL needs for it

Sizes, modes, routings, channels and delays are random, and so are gathers and reduces between rounds and how groups
grow (random_rounds.py); everything is verified bit for bit. A rank that hangs ends the run with the stacks of all. In
rounds with moves experts move while ranks die (moved_ranks.py).
After a kill every survivor must hold its error record within a
second, after a stop within the timeout and a second; then the survivors shrink and verify again.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import collected
import gin_backend
import harness
import mishaps
import moved_ranks
import player
from random_rounds import MODES, grown, random_plan, random_setup

BATCH = 50  # rounds between two meetings with the judge
FEW, SOME = (2, 3, 4), (2, 3, 4, 5)  # ranks of random rounds, and of those of which one is struck


# ---- random rounds -------------------------------------------------------------------------------


def soak(
    rounds: int,
    seed: int,
    ranks: Sequence[int] = FEW,
    say: Any = None,
    backend: str = "cpu",
    kind: str = "processes",
) -> int:
    """Verifies so many rounds. A group lives for a few batches, so channels reach high steps; between some it grows."""
    rng = random.Random(seed)
    lacks = harness.BACKENDS[backend].lacks
    done = 0
    while done < rounds:
        setup = random_setup(rng, rng.choice(ranks), MODES)
        if "leases" in lacks:
            setup = replace(setup, lease_bytes=0)
        own = setup.default_bound
        world = harness.WORLDS[kind](backend, setup.ranks)
        for _ in range(rng.randint(1, 4)):
            count = min(BATCH, rounds - done)
            plan = random_plan(rng, setup, own, count, "collectives" not in lacks)
            collected.judge(plan, world.run(collected.play_on, "soak", plan, timeout=harness.HANGS))
            done += count
            if say:
                say(f"{done} of {rounds} rounds")
            if done >= rounds:
                break
            setup = grown(rng, setup)
        world.run(player.close_kept, timeout=harness.HANGS)
    return done


# ---- mishaps -------------------------------------------------------------------------------------


@dataclass
class Mishap:
    """What happened to which rank, and when the survivors noticed, in seconds after it."""

    victim: int
    number: int
    nranks: int
    seen: list[float]


def mishap(rng: random.Random, number: int, backend: str, timed: bool, ranks: Sequence[int] = SOME) -> Mishap:
    """Kills or stops one of a few busy ranks at a random moment; what do the others make of it?"""
    timeout = harness.PATIENT if number == signal.SIGKILL else 1.5 if timed else 6.0
    nranks = rng.choice([n for n in ranks if n <= harness.BACKENDS[backend].most_ranks("processes")])
    victim = rng.randrange(nranks)
    setup = random_setup(rng, nranks)
    workers = harness.Workers(nranks)
    everyone = range(nranks)
    survivors = [r for r in everyone if r != victim]
    key = ("mishap", 0, backend, f"mishap-{os.getpid()}-{rng.getrandbits(60):x}")
    try:
        workers.send(everyone, mishaps.begin, setup, timeout, key=key)
        harness.settle(workers.collect(everyone, harness.HANGS))
        workers.send(everyone, mishaps.work_until_error, setup, rng.getrandbits(30), key=key)
        time.sleep(rng.random() * 0.3)
        struck = time.monotonic()
        workers.signal(victim, number)
        limit = harness.BACKENDS[backend].death_seen if number == signal.SIGKILL else timeout + 1.0
        if not timed:
            limit += harness.AT_ONCE
        reports = harness.settle(workers.collect(survivors, limit + harness.HANGS))
        for rank, report in zip(survivors, reports, strict=True):
            mishaps.judge(report, rank, victim, number, struck, limit, 0.2 if timed else harness.AT_ONCE)
        again = random_setup(rng, nranks - 1)
        workers.send(everyone, mishaps.shrink_and_play, again, rng.getrandbits(30), key=key)
        played = harness.settle(workers.collect(survivors, harness.HANGS))
        mishaps.verify_survivors(again, survivors, played)
        if number == signal.SIGSTOP:
            workers.signal(victim, signal.SIGCONT)
            woken = harness.settle(workers.collect([victim], harness.HANGS))[0]
            assert woken["result"] == "twExcluded", f"the stopped rank {victim} was told {woken}"
            ok, text = workers.collect([victim], harness.HANGS)[0]
            assert not ok and "Excluded" in text, f"the stopped rank {victim} could shrink: {text}"
        return Mishap(victim, number, nranks, [report["at"] - struck for report in reports])
    finally:
        workers.close()


def suffer(
    kills: int,
    stops: int,
    seed: int,
    say: Any = None,
    backend: str = "cpu",
    timed: bool = False,
    ranks: Sequence[int] = SOME,
) -> None:
    """So many mishaps, one after the other; `timed`: the machine has nothing else to do, and notices within moments."""
    rng = random.Random(seed)
    numbers = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    rng.shuffle(numbers)
    for n, number in enumerate(numbers):
        state = rng.getrandbits(50)
        try:
            result = mishap(random.Random(state), number, backend, timed, ranks)
        except BaseException:
            print(f"mishap {n} of seed {seed}: signal {number}, state {state}", file=sys.stderr)
            raise
        if say:
            say(f"{n + 1} of {len(numbers)}: {result}")


# ---- rounds that processes share -----------------------------------------------------------------


def variables(worker: int, args: argparse.Namespace) -> dict[str, str]:
    """What one of the processes finds in its environment: every way for rows to cross in turns, and what the network
    does late in every other of them."""
    named = {"TOKENWAY_EMULATOR_SEED": str(args.seed + worker)}
    if args.crossing:
        named[gin_backend.CROSSING] = args.crossing[worker % len(args.crossing)]
    if args.late and worker // max(1, len(args.crossing)) % 2 == 0:
        named |= {"TOKENWAY_GIN_SEED": str(args.seed + worker + 1), "TOKENWAY_GIN_DELAY_US": str(args.late)}
    return named


def follow(worker: int, process: subprocess.Popen[str], done: list[int], say: Any) -> None:
    """Shows what a process says, and keeps how many rounds it has verified."""
    for line in process.stdout or ():
        if found := re.search(r"(\d+) of \d+ rounds", line):
            done[worker] = int(found[1])
        else:
            say(f"{worker}: {line.rstrip()}")


def share(args: argparse.Namespace, say: Any) -> tuple[int, bool]:
    """The rounds shared out among processes, each with a seed and ranks of its own: groups may take seconds to make.
    How many were verified, and whether each process has ended well in time."""
    done, processes, readers = [0] * args.workers, [], []
    for worker in range(args.workers):
        rounds = args.rounds // args.workers + (worker < args.rounds % args.workers)
        line = [sys.executable, __file__, "--rounds", str(rounds), "--seed", str(args.seed + worker)]
        line += ["--backend", args.backend, "--kind", args.kind, "--limit", str(args.limit)]
        line += ["--ranks", *map(str, args.ranks)] if args.ranks else []
        environment = os.environ | variables(worker, args)
        process = subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        processes.append(process)
        readers.append(threading.Thread(target=follow, args=(worker, process, done, say), daemon=True))
        readers[-1].start()
    until, well = time.monotonic() + args.limit + harness.AT_ONCE, True
    for worker, process in enumerate(processes):
        try:
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        readers[worker].join(harness.AT_ONCE)
        well &= code == 0
        say(f"{worker}: {done[worker]} rounds of seed {args.seed + worker}, exit code {code}")
    return sum(done), well


def chosen() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--moves", type=int, default=0, help="rounds in which ranks die while experts move")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--backend", default="cpu", choices=list(harness.BACKENDS))
    parser.add_argument("--ranks", type=int, nargs="+", help="of which each round takes some")
    parser.add_argument("--busy", action="store_true", help="nobody says how soon survivors notice")
    parser.add_argument("--kind", default="processes", choices=list(harness.WORLDS), help="what ranks of rounds are")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the rounds, if more than one")
    parser.add_argument("--limit", type=float, default=0, help="seconds in which all is over; 0: no limit")
    parser.add_argument("--crossing", nargs="+", default=[], help="how rows cross between hosts' GPUs, in turns")
    parser.add_argument("--late", type=int, default=0, help="microseconds by which tests/gin's network may be late")
    args = parser.parse_args()
    if args.workers > 1 and (args.kills or args.stops or args.moves or not args.limit):
        parser.error("processes share rounds alone, and within a limit")
    return args


def main() -> int:
    args = chosen()
    print(f"seed {args.seed}", flush=True)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:8.1f} s  {text}", flush=True)

    if args.workers > 1:
        passed, well = share(args, say)
        say(f"{passed} of {args.rounds} rounds passed")
        return 0 if well and passed == args.rounds else 1
    os.environ |= variables(0, args)
    if lacking := harness.prepare([args.backend]):
        print(lacking, file=sys.stderr)
        return 1
    if args.limit:
        faulthandler.dump_traceback_later(args.limit, exit=True)
    try:
        common = {"say": say, "backend": args.backend}
        suffer(args.kills, args.stops, args.seed, timed=not args.busy, ranks=args.ranks or SOME, **common)
        if args.moves:
            moved_ranks.play(args.moves, args.seed, say=say)
            moved_ranks.play(args.moves // 20, args.seed, kind="processes", say=say)
        soak(args.rounds, args.seed, ranks=args.ranks or FEW, kind=args.kind, **common)
    finally:
        harness.POOL.reset()
    say("all verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
