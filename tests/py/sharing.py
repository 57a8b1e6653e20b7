"""Groups that share a window, for the tests of arenas: what they are, how they are made, and calls of them in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from cases import LAYOUTS, Got, Round, Setup, one, verify
from harness import PATIENT
from player import Player

import tokenway as tw

Turn = tuple[int, Round]  # which group's, and what


# A target model, its draft model, and a layer whose experts have replicas: no two of them have a shape in common, and
# none has experts that the ranks divide.
TARGET = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=9, lanes=3)
DRAFT = Setup(
    ranks=3,
    experts=11,
    top_k=2,
    hidden=33,
    max_tokens=5,
    dtype="float32",
    combine_dtype="float32",
    payloads=((3, "int16"),),
    mode="high_throughput",
    row_alignment=4,
    id_dtype="int64",
)
REPLICAS = Setup(
    ranks=3,
    experts=5,
    top_k=1,
    hidden=8,
    max_tokens=20,
    id_space="global",
    invalid_id=-7,
    slot_expert=(0, 1, 2, 3, 4, 0, 2, 4),
)
ALL = (TARGET, DRAFT, REPLICAS)


def of_ranks(world: Any, setups: Sequence[Setup] = ALL) -> tuple[Setup, ...]:
    """The same for as many ranks as there are."""
    return tuple(replace(setup, ranks=min(3, world.most)) for setup in setups)


def keywords(setup: Setup, **changes: Any) -> dict[str, Any]:
    """What a group of another's window is made from: its lanes are the arena's."""
    given = setup.settings() | {"timeout": PATIENT} | changes
    del given["lanes"]
    return given


def make(env: Any, setups: Sequence[Setup], stack: ExitStack, **changes: Any) -> list[tw.Group]:
    """The first group with room for the others, and those in its window."""
    first, *others = setups
    more = [keywords(other) for other in others]
    given = first.settings() | {"timeout": PATIENT} | changes
    groups = [stack.enter_context(tw.Group(env.comm, room_for=more, **given))]
    groups += [stack.enter_context(tw.Group(env.comm, arena=groups[0], **given)) for given in more]
    assert [group.window_bytes().window > 0 for group in groups] == [True, *[False for _ in others]]
    return groups


def in_turns(env: Any, groups: Sequence[tw.Group], setups: Sequence[Setup], turns: Sequence[Turn]) -> list[Got]:
    """Rounds one after the other."""
    got: list[Got] = []
    for which, round_ in turns:
        (flight,) = Player(env, groups[which], one(setups[which], round_)).flights()
        got += flight
    return got


def at_once(env: Any, groups: Sequence[tw.Group], setups: Sequence[Setup], turns: Sequence[Turn]) -> list[Got]:
    """All of them under way together, each on a lane, and finished in another order on every rank."""
    work = []
    for which, round_ in turns:
        player = Player(env, groups[which], one(setups[which], round_))
        work.append((player, round_, player.handle(round_)))
    return together(env, work)


def together(env: Any, work: Sequence[tuple[Player, Round, tw.Handle]]) -> list[Got]:
    """Dispatches all, and finishes them in another order on every rank; then combines them likewise."""
    sent = [player.dispatch(round_, handle, player.payloads(round_), True) for player, round_, handle in work]
    order = np.random.default_rng(env.rank).permutation(len(work))
    received = {i: sent[i].result() for i in order}
    got = [player.snapshot(round_, received[i]) for i, (player, round_, _) in enumerate(work)]
    back = [
        player.combine(round_, handle, player.rows(round_, received[i], got[i]), True)
        for i, (player, round_, handle) in enumerate(work)
    ]
    for i in order[::-1]:
        got[i].out = work[i][0].array(back[i].result())
    return got


def check(
    world: Any, play: Callable[..., list[Got]], setups: Sequence[Setup], turns: Sequence[Turn], *more: Any
) -> None:
    """Every bit of every turn, on every rank, against the oracle."""
    by_rank = world(setups[0].ranks).run(play, setups, turns, *more)
    for i, (which, round_) in enumerate(turns):
        verify(setups[which], round_, [mine[i] for mine in by_rank])


def rounds(setups: Sequence[Setup], times: int = 2, **changes: Any) -> list[Turn]:
    """Each layout of each group, several times, so that every group meets every bank as every other has left it."""
    made: list[Turn] = []
    for seed in range(times):
        for layout in (0, 1):
            for which, setup in enumerate(setups):
                tokens = (setup.max_tokens, seed, setup.max_tokens - 1)[: setup.ranks]
                name = LAYOUTS[setup.mode][-layout if seed % 2 else layout]
                seeds = len(made) + 1
                made.append((which, Round(tokens, seed=seeds, layout=name, out="bfloat16", **changes)))
    return made
