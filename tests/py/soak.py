#!/usr/bin/env python3
"""The soak: many random rounds on ranks that live long, and ranks killed and stopped at random moments.

    python tests/py/soak.py --rounds 10000
    python tests/py/soak.py --rounds 0 --kills 50 --stops 20
    python tests/py/soak.py --rounds 0 --moves 2000
    python tests/netns/run_all.py --soak --rounds 10000 --kills 50     # between hosts, over a network that misbehaves

Sizes, routings, channels and delays are random; every round is verified bit for bit. A rank that hangs
ends the run with the stacks of all. In rounds with moves experts move while ranks die (moved_ranks.py).
After a kill every survivor must hold its error record within a
second, after a stop within the timeout and a second; then the survivors shrink and verify again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import harness
import mishaps
import moved_ranks
import player
from cases import FLOATS, ROUTINGS, Case, Round, Setup, verify_case

BATCH = 50  # rounds between two meetings with the judge
FEW, SOME = (2, 3, 4), (2, 3, 4, 5)  # ranks of random rounds, and of those of which one is struck


# ---- random rounds -------------------------------------------------------------------------------


def random_setup(rng: random.Random, ranks: int) -> Setup:
    experts = rng.randint(1, 4 * ranks)
    return Setup(
        ranks=ranks,
        experts=experts,
        top_k=rng.randint(1, min(experts, 8)),
        hidden=rng.choice((1, 3, 16, 17, 64)),
        max_tokens=rng.choice((1, 5, 16, 24)),
        dtype=rng.choice((*FLOATS, "uint8")),
        payloads=rng.choice(((), ((1, "uint8"),), ((3, "float32"), (17, "int8")))),
        combine_dtype=rng.choice(FLOATS),
        lanes=rng.randint(1, 4),
        id_space=rng.choice(("local", "global")),
        row_alignment=rng.choice((None, 1, 4, 128)),
    )


def random_round(rng: random.Random, setup: Setup) -> Round:
    most = rng.choice((0, 1, setup.max_tokens, setup.max_tokens))
    tokens = tuple(rng.randint(0, most) for _ in range(setup.ranks))
    after = rng.choice(("again", "late", "release", "special", "special", "reuse", "reuse"))
    return Round(
        tokens=tokens,
        seed=rng.getrandbits(40),
        routing=rng.choice(ROUTINGS),
        bound=rng.choice((None, max(1, *tokens))),
        layout=rng.choice(("rank_major", "expert_major", "grouped_by_bound")),
        weighting=rng.choice(("none", "topk")),
        rows=rng.choice(FLOATS),
        out=rng.choice(FLOATS),
        send_dispatch=rng.random() < 0.7,
        send_combine=rng.random() < 0.5,
        strided=rng.random() < 0.2,
        own=rng.random() < 0.2,
        **{after: True},
    )


def random_case(rng: random.Random, setup: Setup, count: int) -> Case:
    flights = []
    while count > 0:
        size = min(rng.randint(1, setup.lanes), count)
        flights.append(tuple(random_round(rng, setup) for _ in range(size)))
        count -= size
    slow = rng.choice((None, rng.randrange(setup.ranks)))
    return Case(setup, tuple(flights), slow=slow, order=rng.getrandbits(30))


def soak(rounds: int, seed: int, ranks: Sequence[int] = FEW, say: Any = None, backend: str = "cpu") -> int:
    """Verifies so many rounds. A group lives for a few batches, so channels reach high steps."""
    rng = random.Random(seed)
    done = 0
    while done < rounds:
        setup = random_setup(rng, rng.choice(ranks))
        world = harness.Processes(backend, setup.ranks)
        for _ in range(rng.randint(1, 4)):
            count = min(BATCH, rounds - done)
            case = random_case(rng, setup, count)
            verify_case(case, world.run(player.play_on, "soak", case, timeout=harness.HANGS))
            done += count
            if say:
                say(f"{done} of {rounds} rounds")
            if done >= rounds:
                break
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--moves", type=int, default=0, help="rounds in which ranks die while experts move")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--backend", default="cpu", choices=list(harness.BACKENDS))
    parser.add_argument("--ranks", type=int, nargs="+", help="of which each round takes some")
    parser.add_argument("--busy", action="store_true", help="nobody says how soon survivors notice")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:8.1f} s  {text}", flush=True)

    try:
        common = {"say": say, "backend": args.backend}
        suffer(args.kills, args.stops, args.seed, timed=not args.busy, ranks=args.ranks or SOME, **common)
        if args.moves:
            moved_ranks.play(args.moves, args.seed, say=say)
            moved_ranks.play(args.moves // 20, args.seed, kind="processes", say=say)
        soak(args.rounds, args.seed, ranks=args.ranks or FEW, **common)
    finally:
        harness.POOL.reset()
    say("all verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
