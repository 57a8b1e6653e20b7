"""What happens when something goes wrong: every rank is told what and who, and the others go on.

    python examples/06_failures.py

1. One rank holds a wrong table of experts: found when the group is created, on all ranks.
2. A rank is killed while the others wait in combine: their calls end, and say who is gone.
3. The survivors shrink the group and go on; their results are compared with the NumPy oracle.

Exit code 0 if all of it is as told here.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

import tokenway as tw
from tokenway import gating, reference

Array = np.ndarray

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 24, 3, 512, 40
WRONG, VICTIM = 1, 2  # ranks
SETTINGS = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS}
TIMEOUT = 30  # of the group: much longer than what it takes to notice a death


# ---- an exchange that every rank can check for itself --------------------------------------------


def inputs(rank: int, ranks: int) -> tuple[Array, Array, Array]:
    """(tokens, ids, weights) of a rank: random, the same wherever they are asked for."""
    rng = np.random.default_rng([rank, ranks, 1])
    tokens = rng.standard_normal((TOKENS - 7 * rank, HIDDEN)).astype(bfloat16)
    ids, weights = gating.softmax_topk(rng.standard_normal((len(tokens), EXPERTS)), TOP_K)
    return tokens, ids, weights


def experts(tokens: Array, rank: int) -> Array:
    """[L, N*b, H]: every expert multiplies by another number, so that no row can go astray unseen."""
    factors = 1 + rank + np.arange(len(tokens), dtype=np.float32) / 16
    return (tokens.astype(np.float32) * factors[:, None, None]).astype(bfloat16)


def exchange(group: tw.Group) -> tuple[int, int]:
    """Dispatch, experts, combine; (values that equal the oracle's bit for bit, values compared)."""
    tokens, ids, weights = inputs(group.rank, group.nranks)
    handle = group.route(ids, weights)
    recv = group.dispatch(handle, tokens, layout="expert_major")
    recv.tokens[recv.ids < 0] = 0  # rows that nobody sent: the experts here take all rows alike
    out = group.combine(handle, experts(recv.tokens, group.rank), weighting="topk")
    want = oracle(group.rank, group.nranks)
    return int(np.count_nonzero(out.view(np.uint16) == want.view(np.uint16))), want.size


def oracle(owner: int, ranks: int) -> Array:
    """What `owner` must get, computed without communication."""
    all_tokens, ids, weights = zip(*(inputs(rank, ranks) for rank in range(ranks)), strict=True)
    plan = reference.Exchange(ids, weights, experts=EXPERTS, bound=TOKENS)
    rows = []
    for rank in range(ranks):
        recv = reference.dispatch_expert_major(plan, rank, [all_tokens])
        rows.append(experts(recv.payloads[0], rank))
    return reference.combine(plan, rows, layout="expert_major", weighting="topk", owners=[owner])[0]


# ---- 1. a wrong table of experts -----------------------------------------------------------------


def wrong_table() -> tuple[str, str, tuple[int, int]]:
    """On one rank, two experts have changed places in the table. (error, sentence, exchange after)"""
    comm = tw.connect()
    home, slot = reference.contiguous_placement(EXPERTS, comm.nranks)
    if comm.rank == WRONG:
        home[[5, 6]], slot[[5, 6]] = home[[6, 5]], slot[[6, 5]]
    kind, sentence = "none", ""
    try:
        tw.Group(comm, expert_map=(home, slot), **SETTINGS).close()
    except tw.ConfigMismatch as error:
        kind, sentence = type(error).__name__, str(error)
    # The comm is as good as before.
    with comm, tw.Group(comm, **SETTINGS) as group:
        return kind, sentence, exchange(group)


def show_wrong_table() -> bool:
    """Runs and prints 1."""
    print(f"Rank {WRONG} has experts 5 and 6 exchanged in its table:")
    outcomes = tw.run(wrong_table, RANKS, timeout=60)
    good = True
    for rank, (kind, sentence, (equal, compared)) in enumerate(outcomes):
        print(f"  rank {rank}: {kind}: {sentence}")
        good &= kind == "ConfigMismatch" and "expert_" in sentence and f"rank {WRONG}" in sentence
        good &= equal == compared > 0
    print("  with the right table on the same comm, the next group works on all ranks" if good else "  NOT GOOD")
    return good


# ---- 2. and 3. a killed rank ---------------------------------------------------------------------


@dataclass
class Survived:
    """What a survivor saw."""

    error: str  # of its combine
    ended: float  # when, on the host's monotonic clock
    record: tw.ErrorRecord | None
    blank: bool  # its result was filled with NaN
    shrunk: tuple[int, int]  # its rank in the new group, of how many
    exchange: tuple[int, int]


def lose_a_rank(everyone: Any) -> Survived:
    """A rank never reaches its combine. `everyone` is a barrier with the process that starts the ranks."""
    comm = tw.connect()
    group = tw.Group(comm, timeout=TIMEOUT, **SETTINGS)
    tokens, ids, weights = inputs(group.rank, group.nranks)
    exchange(group)

    handle = group.route(ids, weights)
    recv = group.dispatch(handle, tokens)
    rows, out = recv.tokens.copy(), np.zeros_like(tokens)
    everyone.wait(TIMEOUT)
    if group.rank == VICTIM:
        time.sleep(TIMEOUT)  # "computes its experts" until it is killed
    seen = Survived("none", 0, None, False, (-1, 0), (0, 0))
    try:
        group.combine(handle, rows, out=out)
    except tw.GroupFinished as error:
        seen = replace(seen, error=type(error).__name__, ended=time.monotonic(), record=error.record)
        seen.blank = bool(np.isnan(out.astype(np.float32)).all())

    with group.shrink() as survivors:
        seen.shrunk = survivors.rank, survivors.nranks
        seen.exchange = exchange(survivors)
    group.close()
    comm.close()
    return seen


def show_killed_rank() -> bool:
    """Runs and prints 2 and 3."""
    everyone = multiprocessing.get_context("spawn").Barrier(RANKS + 1)
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    with tw.Ranks(lose_a_rank, RANKS, everyone) as ranks:
        everyone.wait(TIMEOUT)
        time.sleep(0.3)  # the others are waiting in combine by now
        killed = time.monotonic()
        ranks.signal(VICTIM, signal.SIGKILL)
        outcomes = ranks.wait(60, others)

    print(f"Rank {VICTIM} is killed (SIGKILL) while ranks {others} wait for it in combine:")
    print("  rank  error       after kill  kind        peer  phase    lane  step  expected  seen")
    good = True
    for rank in others:
        outcome = outcomes[rank]
        if outcome is None or not outcome.ok:
            print(f"  rank {rank}: FAILED: {outcome and (outcome.error or outcome.exitcode)}")
            return False
        seen = outcome.value
        late = seen.ended - killed
        print(f"  {rank:<5} {seen.error:<11} {1000 * late:7.1f} ms  {record_text(seen.record)}")
        good &= seen.error == "PeerDied" and 0 <= late < 1 and seen.blank
        good &= seen.record is not None and seen.record.peer == VICTIM and seen.record.phase == "combine"
    print(f"  in words: {outcomes[others[0]].value.record.message}" if good else "  NOT GOOD")
    return show_shrunk([outcomes[rank].value for rank in others], others) and good


def record_text(r: tw.ErrorRecord | None) -> str:
    """The fields of an error record that say what happened where."""
    if r is None:
        return "no record"
    place = f"{r.phase:<7}  {r.lane:<4}  {r.step:<4}  {r.expected:<8}  {r.seen}"
    return f"{r.result:<10}  {r.peer:<4}  {place}"


def show_shrunk(survivors: list[Survived], others: list[int]) -> bool:
    """Prints 3."""
    print(f"The survivors shrink the group to {len(others)} ranks and go on:")
    good = True
    for index, (rank, seen) in enumerate(zip(others, survivors, strict=True)):
        equal, compared = seen.exchange
        place, size = seen.shrunk
        print(f"  rank {rank} is rank {place} of {size} now; {equal} of {compared} values equal the oracle's")
        good &= seen.shrunk == (index, len(others)) and equal == compared > 0
    return good


def main() -> int:
    """Runs all of it."""
    good = show_wrong_table()
    print()
    good &= show_killed_rank()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
