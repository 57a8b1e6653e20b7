"""Errors of token replicas: sets of unlike tokens are found and told to all ranks, refusals and ranks that give
up reach everyone, and what a group cannot be made with is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Setup
from harness import PATIENT, caught, said

import tokenway as tw
from tokenway.tensors import numpy_dtype

OWN = Setup(ranks=4, experts=7, top_k=3, hidden=24, max_tokens=9, token_replicas=2)
TOKENS = 7


def make(env: Any, setup: Setup, **changes: Any) -> tw.Group:
    return tw.Group(env.comm, **({"timeout": PATIENT} | setup.settings() | changes))


def routing(env: Any, tokens: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    ids = np.array([rng.permutation(7)[:3] for _ in range(tokens)], np.int32)
    return ids, rng.standard_normal((tokens, 3)).astype(np.float32)


def exchanged(env: Any, group: tw.Group, ids: np.ndarray, weights: Any, dtype: Any = "float32") -> Any:
    """(how a combine ended, its result)."""
    tensor, array = env.backend.tensor, env.backend.array
    handle = group.route(tensor(ids), None if weights is None else tensor(weights))
    if group.exact:
        group.exchange_counts(handle)
    received = group.dispatch(handle, tensor(np.ones((len(ids), 24), numpy_dtype("bfloat16"))))
    out = tensor(np.zeros((len(ids), 24), numpy_dtype(dtype)))
    heard = caught(group.combine, handle, received.tokens, out=out)
    if handle.leased:
        handle.release()
    return heard, array(out)


def unlike(env: Any, setup: Setup) -> list[Any]:
    """Rank 1 holds others than rank 0 in one way after the other, and between them the same."""
    heard: list[Any] = []
    with make(env, setup) as group:
        ids, weights = routing(env)
        other_ids, other_weights = ids.copy(), weights.copy()
        other_ids[0, 1] = -1
        other_weights[-1, 2] += 1
        changes: list[tuple[Any, Any, Any]] = [
            (other_ids, weights, "float32"),
            (ids, other_weights, "float32"),
            (ids, None, "float32"),
            (ids[:-1], weights[:-1], "float32"),
            (ids[:1], weights[:1], "float32"),
            (ids[::-1].copy(), weights[::-1].copy(), "float32"),
            (ids, weights, "bfloat16"),
        ]
        for change in changes:
            heard.append(exchanged(env, group, *(change if env.rank == 1 else (ids, weights, "float32"))))
            heard.append(exchanged(env, group, ids, weights))
    return heard


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_unlike_tokens_are_told_to_all(world, mode) -> None:
    setup = replace(OWN, mode=mode, ranks=4 if world.most >= 4 else 2)
    for rank, heard in enumerate(world(setup.ranks).run(unlike, setup)):
        for outcome, out in heard[::2]:
            said(outcome, "twReplicaMismatch", r"ranks 0 and 1 are token replicas and hold unlike tokens")
            assert np.isnan(out.astype(np.float32)).all(), rank
        for outcome, out in heard[1::2]:
            assert type(outcome) is not tuple or outcome[0] == "twSuccess", outcome
            assert not np.isnan(out.astype(np.float32)).any() and out.any()


def padded(env: Any, setup: Setup) -> list[Any]:
    """Rows that pad a batch have no experts, and weights that nobody has written."""
    with make(env, setup) as group:
        ids, weights = routing(env)
        ids[-2:], ids[0, 1] = -1, -1
        weights[ids < 0] = np.float32([np.nan, 1e30, -7, 0.5])[env.rank]
        return [exchanged(env, group, ids, weights) for _ in range(2)]


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_weights_of_no_expert_may_differ(world, mode) -> None:
    setup = replace(OWN, mode=mode, ranks=4 if world.most >= 4 else 2)
    for heard in world(setup.ranks).run(padded, setup):
        for outcome, out in heard:
            assert answer(outcome) == "twSuccess", outcome
            assert not np.isnan(out).any() and out[:-2].any() and not out[-2:].any()


def apart(env: Any) -> list[Any]:
    """What a group with token replicas cannot be made with."""
    like = {key: value for key, value in OWN.settings().items() if key != "token_replicas"}
    heard = [
        caught(tw.Group, env.comm, **like | {"timeout": PATIENT, "token_replicas": 2, "combine_rows": "per_expert"})
    ]
    with tw.Group(env.comm, timeout=PATIENT, **like) as plain, make(env, OWN) as with_replicas:
        heard.append(caught(tw.Group, env.comm, **like | {"timeout": PATIENT, "token_replicas": 2}, arena=plain))
        heard.append(caught(tw.Group, env.comm, timeout=PATIENT, **like, arena=with_replicas))
        for group in (plain, with_replicas):  # both go on
            ids, weights = routing(env)
            assert answer(exchanged(env, group, ids, weights)[0]) == "twSuccess"
    return heard


def test_what_it_does_not_go_with(world) -> None:
    for per_expert, inside, around in world(2).run(apart):
        said(per_expert, "twInvalidArgument", r"token_replicas is 2; with combine_rows .*it must be 1")
        said(inside, "twInvalidArgument", r"token_replicas is 2; in the window of arena it must be 1")
        said(around, "twInvalidArgument", r"arena has 2 token replicas; a group whose window others use must have 1")


def recorded(env: Any) -> Any:
    with make(env, replace(OWN, ranks=2)) as group:
        ids, weights = routing(env)
        ids[3, 0] = -1 if env.rank else ids[3, 0]
        exchanged(env, group, ids, weights)
        record = group.error
        return record.result, record.peer, record.sticky, record.phase


def test_the_record_names_the_rank(world) -> None:
    for record in world(2).run(recorded):
        assert record == ("twReplicaMismatch", 1, False, "gather")


def refused(env: Any, setup: Setup) -> list[Any]:
    """Rank 0's combine is refused, then its dispatch, and the group goes on."""
    tensor, array = env.backend.tensor, env.backend.array
    heard = []
    ids, weights = routing(env)
    with make(env, setup) as group:
        for turn in range(3):
            handle = group.route(tensor(ids), tensor(weights))
            if group.exact:
                group.exchange_counts(handle)
            x = tensor(np.ones((TOKENS - (turn == 1 and env.rank == 0), 24), numpy_dtype("bfloat16")))
            dispatched = caught(group.dispatch, handle, x)
            if turn == 1:
                heard.append(dispatched[0])
                if handle.leased:
                    handle.release()
                continue
            received = group.dispatch(handle, x) if type(dispatched) is tuple else dispatched
            shape = (TOKENS + (turn == 0 and env.rank == 0), 24)
            out = tensor(np.zeros(shape, np.float32))
            heard.append(caught(group.combine, handle, received.tokens, out=out))
            heard.append(array(out))
            if handle.leased:
                handle.release()
    return heard


def answer(of: Any) -> str:
    return of[0] if type(of) is tuple else "twSuccess"


@pytest.mark.parametrize("inbox", [None, 2])
def test_refusals(world, inbox) -> None:
    mode = "low_latency" if inbox is None else "high_throughput"
    setup = replace(OWN, ranks=2, mode=mode, inbox_tokens=inbox)
    for rank, (combined, spoilt, dispatched, last, out) in enumerate(world(2).run(refused, setup)):
        wanted = "twPeerRefused" if rank else "twInvalidArgument"
        assert answer(combined) == wanted and dispatched == wanted
        assert rank == 0 or np.isnan(spoilt).all()
        assert answer(last) == "twSuccess" and out.any() and not np.isnan(out).any()


def given_up(env: Any) -> Any:
    """Rank 1 gives the group up instead of combining: the other is told who it was."""
    with make(env, replace(OWN, ranks=2)) as group:
        ids, weights = routing(env)
        tensor = env.backend.tensor
        handle = group.route(tensor(ids), tensor(weights))
        received = group.dispatch(handle, tensor(np.ones((TOKENS, 24), numpy_dtype("bfloat16"))))
        make(env, replace(OWN, ranks=2)).close()  # a meeting: the dispatch has ended everywhere
        if env.rank == 1:
            group.abort()
            return None
        return caught(group.combine, handle, received.tokens)[0], group.error.peer


def test_a_rank_that_gives_up(world) -> None:
    assert world(2).run(given_up)[0] == ("twPeerAborted", 1)


def said_of_groups(env: Any) -> list[Any]:
    heard = [caught(make, env, OWN, token_replicas=each) for each in (-1, 3, 4, 2**31, 0)]
    with make(env, replace(OWN, ranks=2, max_tokens=3)) as group:
        ids, weights = routing(env)
        heard.append(caught(group.routing_layout, env.backend.tensor(ids)))
        handle = group.route(env.backend.tensor(ids), env.backend.tensor(weights))
        heard.append(caught(group.dispatch, handle, env.backend.tensor(np.ones((7, 24), numpy_dtype("bfloat16")))))
        heard.append(group.token_replicas)
    return heard


def test_groups_and_calls_that_cannot_be(world) -> None:
    for heard in world(2).run(said_of_groups):
        for outcome, pattern in zip(
            heard[:5],
            (
                r"token_replicas is -1; it must be from 1 to 2",
                r"token_replicas is 3; it must be from 1 to 2",
                r"token_replicas is 4; it must be from 1 to 2",
                r"token_replicas is 2147483648",
                r"token_replicas is 0; it must be from 1 to 2",
            ),
            strict=True,
        ):
            said(outcome, "twInvalidArgument", pattern)
        said(heard[5], "twUnsupported", r"token_replicas is 2; routing_layout tells where one rank's tokens go")
        said(heard[6], "twInvalidArgument", r"ids has 7 tokens; it must have from 0 to token_replicas \* max_tokens, 6")
        assert heard[7] == 2


def uneven(env: Any) -> Any:
    return caught(make, env, OWN, token_replicas=2)


def test_replicas_must_divide_the_ranks(world) -> None:
    if world.most < 3:
        pytest.skip("needs three ranks")
    for outcome in world(3).run(uneven):
        said(outcome, "twInvalidArgument", r"token_replicas is 2; it must divide the number of ranks, 3")


def differing(env: Any) -> Any:
    return caught(make, env, OWN, token_replicas=1 + env.rank)


def test_ranks_that_differ_in_it(world) -> None:
    for outcome in world(2).run(differing):
        said(outcome, "twConfigMismatch", r"token_replicas differs: rank 0 has 1, rank 1 has 2")


def grown(env: Any) -> list[Any]:
    """More tokens than the window had room for, and float32 results of wider rows."""
    tensor, array = env.backend.tensor, env.backend.array
    outs = []
    with make(env, replace(OWN, ranks=2, max_tokens=2, top_k=1)) as group:
        for tokens in (4, 41):
            if tokens > 4:
                group.reserve(max_tokens=21)
            ids = (np.arange(tokens, dtype=np.int32) % 7)[:, None]
            x = np.arange(tokens * 24, dtype=np.float32).reshape(tokens, 24).astype(numpy_dtype("bfloat16"))
            received = group.dispatch(group.route(tensor(ids)), tensor(x))
            out = array(group.combine(received.handle, received.tokens, dtype="float32"))
            outs.append(np.array_equal(out, x.astype(np.float32)))
    return outs


def test_after_a_growth(world) -> None:
    for outs in world(2).run(grown):
        assert outs == [True, True]
