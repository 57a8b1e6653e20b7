#!/usr/bin/env python3
"""The soak on GPUs: random rounds and graph replays, each compared with the oracle bit for bit.

    python tests/gpu/soak.py --rounds 20000 --replays 10000

One process for each GPU. A dozen groups of random settings are kept open; rounds of random
sizes, routings, layouts, types and delays run on them, then CUDA graphs of such rounds, with other
inputs before every replay and rounds without graphs in between. Results are compared on the device with
an oracle there, and one in 50 rounds with the NumPy oracle too. Ends with one line of JSON; the exit
code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "py"))

import device_backend
import harness

CHUNK = 1000  # rounds between two answers of the ranks
PATIENCE = 300.0  # seconds for a chunk


def in_chunks(world: harness.Processes, function: Any, count: int, say: Callable[[str], None]) -> list[str]:
    """What was wrong, by all ranks."""
    wrong: list[str] = []
    for done in range(0, count, CHUNK):
        for said in world.run(function, min(CHUNK, count - done), timeout=PATIENCE):
            wrong += said
        say(f"{function.__name__}: {min(done + CHUNK, count)} of {count}, {len(wrong)} wrong")
        if len(wrong) > 100:
            break
    return wrong


def soak(rounds: int, replays: int, groups: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs it all. The counts of what was done and of what was wrong."""
    import gpu_rounds

    ranks = harness.BACKENDS["nvlink"].most_ranks("processes")
    world = harness.Processes("nvlink", ranks)
    start = time.monotonic()
    drawn = world.run(gpu_rounds.begin, seed, groups, timeout=PATIENCE)
    if any(one != drawn[0] for one in drawn):
        raise SystemExit(f"the devices draw different random numbers from one seed: {drawn}")
    say(f"{groups} groups on {ranks} ranks")
    wrong = in_chunks(world, gpu_rounds.play_rounds, rounds, say)
    between = time.monotonic()
    wrong += in_chunks(world, gpu_rounds.play_replays, replays, say)
    finished = time.monotonic()
    judged = world.run(gpu_rounds.end, timeout=PATIENCE)
    for text in wrong[:10]:
        print(text, file=sys.stderr)
    return {
        "rounds": rounds,
        "replays": replays,
        "rounds_judged_by_numpy": min(judged),
        "groups": groups,
        "ranks": ranks,
        "failures": len(wrong),
        "seed": seed,
        "seconds_rounds": round(between - start, 1),
        "seconds_replays": round(finished - between, 1),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--replays", type=int, default=10000)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    args = parser.parse_args()
    device_backend.prepare(blocking=False)
    lacking = device_backend.missing()
    if lacking:
        print(f"the soak needs a GPU: {lacking}", file=sys.stderr)
        return 1
    print(f"seed {args.seed}", flush=True)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:8.1f} s  {text}", flush=True)

    try:
        result = soak(args.rounds, args.replays, args.groups, args.seed, say)
    finally:
        harness.POOL.reset()
    print(json.dumps(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
