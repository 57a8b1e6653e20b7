"""Any case at all, on real processes: every bit as the oracle has it.

A failing example shrinks to a small Case and prints it; `test_exchange.check` plays it again.
"""

from __future__ import annotations

import harness
import player
import pytest
from cases import Case, Round, Setup, verify_case
from hypothesis import example, given
from strategies import SETTINGS
from strategies import cases as any_case

# The hard ones together: nothing from some ranks, -1, odd top-k, odd rows, E not divisible by N.
HARD = Case(
    Setup(ranks=4, experts=7, top_k=5, hidden=3, payloads=((1, "uint8"), (17, "uint8")), lanes=2),
    (
        (Round((0, 8, 1, 0), routing="holes", send_dispatch=True), Round((8, 8, 8, 8), seed=1)),
        (Round((0, 0, 0, 0), seed=2), Round((3, 0, 8, 1), seed=3, routing="one", bound=8)),
    ),
    slow=1,
)


PROCESSES = min(5, harness.most_ranks("processes"))
THREADS = min(8, harness.most_ranks("threads"))


def judge(world: harness.Processes | harness.Threads, case: Case) -> None:
    """Not the examples that have more ranks than the backend can have here."""
    if case.setup.ranks <= harness.BACKENDS[world.backend].most_ranks(world.kind):
        verify_case(case, world.run(player.play, case))


@pytest.mark.processes
@SETTINGS
@example(HARD)
@given(any_case(max_ranks=PROCESSES))
def test_any_case_on_processes(backend: str, case: Case) -> None:
    judge(harness.Processes(backend, case.setup.ranks), case)


@SETTINGS
@example(HARD)
@given(any_case(max_ranks=THREADS))
def test_any_case_on_threads(backend: str, case: Case) -> None:
    judge(harness.Threads(backend, case.setup.ranks), case)
