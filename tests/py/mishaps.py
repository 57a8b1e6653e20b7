"""What ranks do while one of them is killed or stopped, and what must be true of those that remain."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

from cases import Case, Round, Setup, verify
from player import Player

import tokenway as tw

PHASES = ("dispatch", "combine")


def begin(env: Any, setup: Setup, timeout: float) -> None:
    """Makes the group that will break."""
    env.kept["group"] = tw.Group(env.comm, timeout=timeout, **setup.settings())


def busy_rounds(setup: Setup, seed: int) -> tuple[Round, ...]:
    base = Round((setup.max_tokens,) * setup.ranks, routing="holes")
    layouts = ("rank_major", "expert_major")
    return tuple(
        replace(base, seed=seed + i, layout=layouts[i % 2], send_dispatch=i % 2 == 0) for i in range(setup.lanes)
    )


def work_until_error(env: Any, setup: Setup, seed: int) -> dict[str, Any]:
    """Exchanges until that fails. CLOCK_MONOTONIC is the same in all processes of a host."""
    group = env.kept["group"]
    case = Case(setup, (busy_rounds(setup, seed),), slow=seed % setup.ranks)
    player = Player(env, group, case)
    try:
        while True:
            player.flights()
    except tw.TokenwayError as error:
        at = time.monotonic()
        record = group.error
        # Sticky: the next call says the same, at once.
        again = time.monotonic()
        try:
            player.flights()
            second = "twSuccess"
        except tw.TokenwayError as later:
            second = later.result
        return {
            "result": error.result,
            "text": str(error),
            "record": record,
            "carried": error.record,
            "at": at,
            "second": second,
            "second_took": time.monotonic() - again,
        }


def judge(
    report: dict[str, Any], rank: int, victim: int, number: int, struck: float, limit: float, again: float = 0.2
) -> None:
    """A survivor's record: the culprit, what it did, where this rank was, and in time."""
    said = f"rank {rank} of victim {victim}, signal {number}: {report}"
    assert report["result"] == ("twPeerDied" if number == signal.SIGKILL else "twTimeout"), said
    record = report["record"]
    assert record is not None and record.sticky and record.result == report["result"], said
    assert report["carried"] == record, said
    assert record.peer == victim and record.reporter != victim, said
    assert record.phase in PHASES, said
    assert f"rank {victim}" in record.message and record.phase in record.message, said
    assert report["second"] == report["result"] and report["second_took"] < again, said
    assert report["at"] - struck <= limit, f"{report['at'] - struck:.3f} s after; {said}"


def shrink_and_play(env: Any, setup: Setup, seed: int) -> list[list[Any]]:
    """The survivors' new group, and a few rounds on it."""
    old = env.kept["group"]
    with old.shrink(**setup.settings()) as group:
        case = Case(setup, (survivors_round(setup, seed),) * 2)
        env_of_group = _Renumbered(env, group.rank)
        played = Player(env_of_group, group, case).flights()
    old.close()
    return [[seed, group.comm_ranks], *played]


class _Renumbered:
    """The env as the new group numbers its ranks."""

    def __init__(self, env: Any, rank: int):
        self.rank = rank
        self.backend = env.backend


def survivors_round(setup: Setup, seed: int) -> tuple[Round, ...]:
    return tuple(Round((setup.max_tokens,) * setup.ranks, seed=seed + i) for i in range(setup.lanes))


def verify_survivors(setup: Setup, survivors: list[int], played: list[Any]) -> None:
    """Who is left, in which order, and their bits."""
    for said in played:
        assert said[0][1] == survivors, said[0]
    rounds = survivors_round(setup, played[0][0][0])
    for f in (1, 2):
        for i, round_ in enumerate(rounds):
            verify(setup, round_, [mine[f][i] for mine in played])
