"""A rank that runs out of file descriptors says so itself, and its peers hear that it did."""

from __future__ import annotations

import contextlib
import re
import resource
import subprocess
import sys
from pathlib import Path

from harness import said
from meeting import Meeting, address_of

LONG = 90.0  # a timeout that nobody waits for
SOON = 40.0  # what takes a moment, on a busy machine
RANKS = 3
REFERENCE = Path(__file__).parents[2] / "docs" / "REFERENCE.md"


def needed(ranks: int) -> int:
    """What the table of limits says."""
    row = re.search(r"\| file descriptors.*?\| (\d+) per rank of the comm and (\d+)", REFERENCE.read_text())
    assert row, "the table has no row of file descriptors"
    return int(row[1]) * ranks + int(row[2])


def outcomes(spare: dict[int, int], ranks: int = RANKS) -> list[tuple[str, str, float]]:
    """What becomes of ranks that connect and make a group; some have only so many descriptors to spare."""
    address = address_of("spare")
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(Meeting(rank, ranks, address, LONG, spare=spare.get(rank), group=True))
            for rank in range(ranks)
        ]
        return [rank.heard() for rank in started]


def test_what_the_reference_says_is_enough() -> None:
    for ranks in (1, RANKS, 8):
        heard = outcomes(dict.fromkeys(range(ranks), needed(ranks)), ranks)
        assert [outcome[0] for outcome in heard] == ["twSuccess"] * ranks, heard
    # And not much more than is needed: some are open in passing only.
    heard = outcomes(dict.fromkeys(range(RANKS), needed(RANKS) - 10))
    assert "twSuccess" not in [outcome[0] for outcome in heard], heard


def test_what_stays_open() -> None:
    """A connection and a process of each peer, and an eventfd; windows' descriptors are closed."""
    for outcome in outcomes({}):
        said(outcome, "twSuccess", rf"^{2 * (RANKS - 1) + 1}$")


def test_a_rank_without_descriptors_says_so() -> None:
    """Wherever they end, from the first one on: all hear of it at once, who has none and who else waits."""
    own = rf"limit of \d+ file descriptors; a rank of {RANKS} needs up to {needed(RANKS)} .*ulimit -n.*errno 24"
    for short in (0, 2):
        for spare in range(1, needed(RANKS) - 9):
            for rank, outcome in enumerate(outcomes({short: spare})):
                said(outcome, "twSystemError", own if rank == short else rf"rank {short}: cannot .*{own}")
                assert outcome[2] < SOON, (short, spare, outcome)


def test_the_soft_limit_is_raised() -> None:
    """To the hard one, by connecting."""
    code = """
import resource
import tokenway as tw
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
tw.Comm.shm(0, 1, "alone").close()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    soft, hard = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert soft == hard == str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
