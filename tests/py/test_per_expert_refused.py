"""Errors of combines per expert: what such a group does not combine, weights that are wrong, ranks that differ in what
returns. Peers are told, and the group goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Setup
from harness import PATIENT, caught, said
from test_per_expert import OWN, make

import tokenway as tw
from tokenway.tensors import numpy_dtype


def received_rows(env: Any, group: tw.Group) -> tuple[tw.Handle, Any]:
    """A dispatch of two tokens, and rows for its combine."""
    ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    tokens = env.backend.tensor(np.ones((2, 24), numpy_dtype("bfloat16")))
    received = group.dispatch(group.route(ids), tokens, layout="expert_major")
    shape = (group.num_local_experts, group.nranks * 9, 24)
    return received.handle, env.backend.tensor(np.ones(shape, numpy_dtype("bfloat16")))


def given_back(handle: tw.Handle) -> None:
    if handle.leased:
        handle.release()


def refuse(env: Any) -> list[Any]:
    """Rank 0 gives what is wrong, and the others hear of it at once."""
    tensor = env.backend.tensor
    heard = []
    with make(env, replace(OWN, ranks=2)) as group:
        good = tensor(np.full((2, 3), 2, np.float32))
        shared = tensor(np.zeros(64, np.float32))
        wrong: list[dict[str, Any]] = [
            {"weights": "nothing"},
            {"weights": tensor(np.ones((2, 4), np.float32))},
            {"weights": tensor(np.ones((3, 3), np.float32))},
            {"weights": tensor(np.ones((2, 3), np.int32))},
            {"weights": good, "weighting": "topk"},
            {"layout": "rank_major", "rows": tensor(np.ones((2, 9, 24), numpy_dtype("bfloat16")))},
            {"weights": shared[45:51].reshape(2, 3), "out": shared[:48].reshape(2, 24)},
        ]
        for each in wrong:
            handle, rows = received_rows(env, group)
            given = {"rows": rows, **each} if env.rank == 0 else {"rows": rows, "weights": good}
            heard.append(caught(group.combine, handle, **given))
            given_back(handle)
            handle, rows = received_rows(env, group)
            out = env.backend.array(group.combine(handle, rows, weights=good, dtype="float32"))
            assert (out == 6).all(), out
            handle, rows = received_rows(env, group)
            assert (env.backend.array(group.combine(handle, rows, dtype="float32")) == 3).all(), "weights have stayed"
    return heard


def test_what_is_wrong_is_told(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    first, second = world(2).run(refuse)
    for outcome, pattern in zip(
        first,
        [
            r"weights is of type str",
            r"weights has shape \[2, 4\]; it must be \[2, 3\]",
            r"weights has shape \[3, 3\]; it must be \[2, 3\]",
            r"weights has dtype int32 .*; it must be float32",
            r"weights is given, and weighting is 'topk', which takes the handle's; .* it must be 'none'",
            r"layout is 'rank_major'; with combine_rows of 'per_expert' it must be 'expert_major' or 'grouped'",
            r"out at .* overlaps weights at .*; each must have memory of its own",
        ],
        strict=True,
    ):
        said(outcome, "twInvalidArgument", pattern)
    for outcome in second:
        assert outcome[0] == "twPeerRefused", outcome


def per_rank(env: Any) -> Any:
    with make(env, replace(OWN, ranks=1, combine_rows="per_rank")) as group:
        handle, rows = received_rows(env, group)
        heard = caught(group.combine, handle, rows, weights=env.backend.tensor(np.ones((2, 3), np.float32)))
        given_back(handle)
        return heard


def test_a_group_of_partials_takes_no_weights(world) -> None:
    (outcome,) = world(1).run(per_rank)
    said(
        outcome,
        "twInvalidArgument",
        "weights is given, which combine_rows of 'per_expert' alone takes; this group has 'per_rank'",
    )


def fp8(env: Any) -> Any:
    kind = tw.RowType(24, combine_dtype="float8_e4m3fn")
    with make(env, replace(OWN, ranks=1), combine_room=kind.combine_bytes) as group:
        handle, rows = received_rows(env, group)
        heard = caught(group.rows(kind).combine, handle, rows)
        given_back(handle)
        return heard


def test_rows_per_expert_do_not_return_as_fp8(world) -> None:
    (outcome,) = world(1).run(fp8)
    said(
        outcome,
        "twInvalidArgument",
        r"combine_dtype is float8_e4m3.* with combine_rows of 'per_expert' it must be float32, bfloat16 or float16",
    )


def differ(env: Any) -> Any:
    setup: Setup = replace(OWN, ranks=2, combine_rows=("per_rank", "per_expert")[env.rank])
    return caught(lambda: tw.Group(env.comm, timeout=PATIENT, **setup.settings()).close())


def test_ranks_that_differ_are_told(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    for outcome in world(2).run(differ):
        said(outcome, "twConfigMismatch", "combine_rows differs: rank 0 has 0, rank 1 has 1")


def unknown(env: Any) -> Any:
    return caught(lambda: make(env, replace(OWN, ranks=1, combine_rows="per_token")))


def test_unknown_rows(world) -> None:
    (outcome,) = world(1).run(unknown)
    said(outcome, "twInvalidArgument", r"combine_rows is 'per_token'; it must be one of \['per_rank', 'per_expert'\]")


def refuse_parts(env: Any, setup: Setup) -> Any:
    """Rank 0's weights are refused where a combine has five parts, and the next is good."""
    tensor, array = env.backend.tensor, env.backend.array
    ids = tensor(np.arange(120, dtype=np.int32).reshape(40, 3) % 7)
    tokens = tensor(np.ones((40, 24), numpy_dtype("bfloat16")))
    with make(env, setup) as group:
        found = []
        for bad in (env.rank == 0, False):
            received = group.dispatch(group.exchange_counts(group.route(ids)), tokens, layout="grouped")
            weights, out = tensor(np.full((40, 3 + bad), 5, np.float32)), tensor(np.zeros((40, 24), np.float32))
            heard = caught(group.combine, received.handle, received.tokens, weights=weights, out=out)
            found += [heard[0], array(out)]
            given_back(received.handle)
        return found


def test_parts_of_a_combine_that_was_refused(world) -> None:
    """Their results are NaN at the peers."""
    if world.most < 2:
        pytest.skip("needs two ranks")
    setup = replace(OWN, ranks=2, mode="high_throughput", max_tokens=40, inbox_tokens=9)
    for rank, (refused, out, good, after) in enumerate(world(2).run(refuse_parts, setup)):
        assert refused == ("twPeerRefused" if rank else "twInvalidArgument")
        assert np.isnan(out).all() if rank else not out.any()
        assert good == "twSuccess" and (after == 15).all()


def abandoned(env: Any) -> Any:
    """Rank 1 makes a step and gives the group up; rank 0 hears of it in its combine, or before."""
    with make(env, replace(OWN, ranks=2)) as group:

        def step() -> None:
            handle, rows = received_rows(env, group)
            group.combine(handle, rows, weights=env.backend.tensor(np.ones((2, 3), np.float32)))

        if env.rank == 1:
            step()
            group.abort()
            return None

        def steps() -> None:
            step()
            step()
            group.check()

        return caught(steps)


def test_a_rank_that_gives_up_ends_the_wait(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    outcome, _ = world(2).run(abandoned)
    assert outcome[0] == "twPeerAborted", outcome


def sizes(ranks: int, **more: Any) -> int:
    given = {"experts": 64, "top_k": 8, "hidden": 1024, "max_tokens": 64, "combine_dtype": "float32"}
    return tw.window_bytes(ranks, **given, **more).window


def test_what_the_window_takes() -> None:
    """Inboxes of B * K rows, of each bank, where a combine per rank has B * min(K, N). (These rows of float32 make the
    inbox what a bank is as large as.)"""
    for ranks in (1, 2, 4, 7):
        more = sizes(ranks, combine_rows="per_expert") - sizes(ranks)
        assert more == 2 * 64 * (8 - ranks) * 1024 * 4
    for ranks in (8, 9):
        assert sizes(ranks, combine_rows="per_expert") == sizes(ranks)
