"""Experts in several slots in CUDA graphs: replays read ids anew, follow a map that is replaced and are counted; ids
that are wrong in device memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Round, Setup, exchange_of, make_ids, make_payloads, same
from gpu_world import TIMEOUT, capture

import tokenway as tw
from tokenway.reference import dispatch_rank_major
from tokenway.replica_reference import POLICIES, loads_of

TABLE = (0, 1, 2, 0, 3, 2, 4, 5, 0, 6, 2, -1)
OTHER = (6, 5, 4, 3, 2, 1, 0, 0, 1, 2, 3, -1)
DECAY = 0.5
SETUP = Setup(
    ranks=2, experts=7, top_k=4, hidden=32, max_tokens=1100, dtype="float32", id_space="global", slot_expert=TABLE
)
TURNS = 4
REPLACED = 2  # before this one


def round_of(tokens: tuple[int, ...], turn: int) -> Round:
    return Round(tokens, seed=turn, routing="holes" if turn % 2 else "random")


def replays(env: Any, policy: str, tokens: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(received ids by turn, loads, dispatches): an eager dispatch, then replays with other ids in the same memory."""
    made: dict[str, Any] = SETUP.settings()
    made["expert_map"] = tw.Placement(TABLE, policy=policy, count_loads=True, load_decay=DECAY)
    tensor = env.backend.tensor
    with tw.Group(env.comm, timeout=TIMEOUT, **made) as group:
        ids, weights = (tensor(a) for a in make_ids(SETUP, round_of(tokens, 0), env.rank))
        rows = tensor(make_payloads(SETUP, round_of(tokens, 0), env.rank)[0])
        handles = []

        def step() -> Any:
            handle = group.route(ids, weights)
            handles.append(handle)  # replays write to its memory
            received = group.dispatch(handle, rows, bound=max(tokens)).ids.clone()
            handle.release()
            return received

        found = [env.backend.array(step())]
        graph, received = capture(env, step)
        for turn in range(1, TURNS):
            if turn == REPLACED:
                env.stream.synchronize()
                group.replace_map(OTHER)
            ids.copy_(tensor(make_ids(SETUP, round_of(tokens, turn), env.rank)[0]))
            graph.replay()
            found.append(env.backend.array(received))
        nothing = group.route(ids[:0])
        group.dispatch(nothing, rows[:0], count=False)
        nothing.release()
        env.stream.synchronize()
        group.check()
        return found, group.loads[0], group.counted_dispatches


@pytest.mark.parametrize(
    "tokens", [(8, 3), (120, 70), (600, 530), (1100, 1030)], ids=["few", "lines", "two rounds", "bulk"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_replays(pair, policy, tokens) -> None:
    setups = [replace(SETUP, policy=policy, slot_expert=OTHER if t >= REPLACED else TABLE) for t in range(TURNS)]
    rounds = [replace(round_of(tokens, turn), bound=max(tokens)) for turn in range(TURNS)]
    counts = []
    for round_ in rounds:
        ids = np.concatenate([make_ids(SETUP, round_, r)[0].ravel() for r in range(2)])
        counts.append((0, np.bincount(ids[ids >= 0], minlength=SETUP.experts)))
    for rank, (found, loads, dispatches) in enumerate(pair.run(replays, policy, tokens)):
        for turn, (setup, round_) in enumerate(zip(setups, rounds, strict=True)):
            payloads = [[make_payloads(setup, round_, r)[0] for r in range(2)]]
            want = dispatch_rank_major(exchange_of(setup, round_), rank, payloads).ids
            same(f"ids of turn {turn}", found[turn], want)
        same("loads", loads, loads_of(counts, DECAY))
        assert dispatches.tolist() == [TURNS]


def wrong_id(env: Any, policy: str, value: int) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """A slot's number that is no expert's, or an expert twice."""
    made: dict[str, Any] = SETUP.settings()
    made["expert_map"] = tw.Placement(TABLE, policy=policy)
    tensor = env.backend.tensor
    with tw.Group(env.comm, timeout=TIMEOUT, **made) as group:
        ids = np.array([[0, 1, 2, 3], [3, 2, value, 0]], np.int32)
        handle = group.route(tensor(ids if env.rank == 1 else np.where(ids == value, -1, ids)))
        received = env.backend.array(group.dispatch(handle, tensor(np.zeros((2, 32), np.float32)), bound=2).ids)
        env.stream.synchronize()
        record = group.error
        handle.release()
        return received, None if record is None else (record.result, record.token, record.k, record.value)


@pytest.mark.parametrize("value", [len(TABLE) - 1, SETUP.experts])
@pytest.mark.parametrize("policy", ["round_robin", "balanced"])
def test_wrong_ids(pair, policy, value) -> None:
    (_, nothing), (received, record) = pair.run(wrong_id, policy, value)
    assert nothing is None
    assert record == ("twInvalidArgument", 1, 2, value)
    assert (np.count_nonzero(received >= 0)) > 0
