"""Errors of values of choices: ranks that differ in whether they have some are told, and so are the peers of one whose
values are refused; the group goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Setup
from harness import caught, said
from test_choice_values import OWN, make

import tokenway as tw
from tokenway.tensors import numpy_dtype


def received_rows(env: Any, group: tw.Group) -> tuple[tw.Handle, Any]:
    """A dispatch of two tokens, and rows for its combine."""
    ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    received = group.dispatch(group.route(ids), env.backend.tensor(np.ones((2, 24), numpy_dtype("bfloat16"))))
    return received.handle, env.backend.tensor(np.ones((group.nranks, 9, 24), numpy_dtype("bfloat16")))


def given_back(handle: tw.Handle) -> None:
    if handle.leased:
        handle.release()


def differ(env: Any) -> list[Any]:
    """Some ranks have values and others none: each hears of it, and the group goes on."""
    heard: list[Any] = []
    with make(env, OWN) as group:
        values = env.backend.tensor(np.ones((3, 9, 3), np.float32))
        out = env.backend.tensor(np.zeros((2, 24), np.float32)), env.backend.tensor(np.zeros((2, 3), np.float32))
        for whose in (0, 2):
            handle, rows = received_rows(env, group)
            if env.rank == whose:
                heard.append(caught(group.combine, handle, rows))
            else:
                heard.append(caught(group.combine, handle, rows, choice_values=values, out=out))
                heard.append(bool(np.isnan(env.backend.array(out[1])).all()))
            given_back(handle)
        handle, rows = received_rows(env, group)
        heard.append(env.backend.array(group.combine(handle, rows, choice_values=values)[1]))
    return heard


def test_ranks_that_differ_are_told(world, made_for) -> None:
    if not made_for.knows_calls:
        pytest.skip("blocks of different sizes do not meet, which ends the group: CallMismatch")
    if world.most < 3:
        pytest.skip("needs three ranks")
    for *heard, after in world(3).run(differ):
        for outcome in heard:
            if type(outcome) is bool:
                assert outcome, "values of a step that failed must be NaN"
            else:
                said(outcome, "twBoundMismatch", "whether it has choice values")
        assert np.array_equal(after, np.ones((2, 3)))


def refuse(env: Any) -> list[Any]:
    """Rank 0 gives what is wrong, and the others hear of it at once."""
    tensor = env.backend.tensor
    heard = []
    with make(env, replace(OWN, ranks=2)) as group:
        good = tensor(np.ones((2, 9, 3), np.float32))
        shared = tensor(np.zeros(1 << 10, np.float32))
        in_values = shared[:54].reshape(2, 9, 3)
        pairs: list[tuple[Any, Any]] = [
            ("nothing", None),
            (tensor(np.ones((2, 9, 4), np.float32)), None),
            (tensor(np.ones((2, 9, 3), np.int32)), None),
            (good, tensor(np.zeros((2, 24), np.float32))),
            (good, (None, tensor(np.zeros((2, 4), np.float32)))),
            (good, (tensor(np.zeros((2, 24), np.float32)), "nothing")),
            (in_values, (None, shared[48:54].reshape(2, 3))),
            (in_values, (shared[6:54].reshape(2, 24), None)),
            (good, (shared[:48].reshape(2, 24), shared[45:51].reshape(2, 3))),
        ]
        for values, out in pairs:
            handle, rows = received_rows(env, group)
            wrong = {"choice_values": values, "out": out} if env.rank == 0 else {"choice_values": good}
            heard.append(caught(group.combine, handle, rows, **wrong))
            given_back(handle)
            handle, rows = received_rows(env, group)
            group.combine(handle, rows, choice_values=good)
    return heard


def test_values_that_are_wrong(world, made_for) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    first, second = world(2).run(refuse)
    for outcome, pattern in zip(
        first,
        [
            r"choice_values has dtype none.*it must be float32; choice_values is of type str",
            r"choice_values has shape \[2, 9, 4\]; it must be \[2, 9, 3\]",
            r"choice_values has dtype int32 .*; it must be float32",
            r"out is of type .*; it must be a pair, \(tokens, values\)",
            r"out\[1\] has shape \[2, 4\]; it must be \[2, 3\]",
            r"out\[1\] is of type str",
            r"out\[1\] at .* overlaps choice_values at .*; each must have memory of its own",
            r"out at .* overlaps choice_values at .*; each must have memory of its own",
            r"overlaps out at .*; each must have memory of its own",
        ],
        strict=True,
    ):
        said(outcome, "twInvalidArgument", pattern)
    for outcome in second:
        assert outcome[0] == "twPeerRefused", outcome


def refuse_parts(env: Any, setup: Setup) -> Any:
    """Rank 0's values are refused where a combine has five parts, and the next is good."""
    tensor, array = env.backend.tensor, env.backend.array
    ids = tensor(np.arange(120, dtype=np.int32).reshape(40, 3) % 7)
    tokens = tensor(np.ones((40, 24), numpy_dtype("bfloat16")))
    with make(env, setup) as group:
        found = []
        for bad in (env.rank == 0, False):
            received = group.dispatch(group.exchange_counts(group.route(ids)), tokens)
            values = tensor(np.full((len(received.tokens), 3 + bad), 5, np.float32))
            out = tensor(np.zeros((40, 24), np.float32)), tensor(np.zeros((40, 3), np.float32))
            heard = caught(group.combine, received.handle, received.tokens, choice_values=values, out=out)
            found += [heard[0], array(out[1])]
            given_back(received.handle)
        return found


def test_parts_of_a_combine_that_was_refused(world) -> None:
    if world.most < 2:
        pytest.skip("needs two ranks")
    setup = replace(OWN, ranks=2, mode="high_throughput", max_tokens=40, inbox_tokens=9)
    for rank, (refused, values, good, after) in enumerate(world(2).run(refuse_parts, setup)):
        assert refused == ("twPeerRefused" if rank else "twInvalidArgument")
        assert np.isnan(values).all() if rank else not values.any()
        assert good == "twSuccess" and (after == 5).all()


def without_room(env: Any) -> list[Any]:
    heard = []
    with make(env, replace(OWN, ranks=1), combine_room=59) as group:
        handle, rows = received_rows(env, group)
        values = env.backend.tensor(np.ones((1, 9, 3), np.float32))
        heard.append(caught(group.combine, handle, rows, choice_values=values))
        given_back(handle)
        narrow = group.rows(tw.RowType(23, "bfloat16"))  # with values its rows fit
        x = env.backend.tensor(np.ones((2, 23), numpy_dtype("bfloat16")))
        received = narrow.dispatch(group.route(env.backend.tensor(np.array([[0, 3, 1], [2, 4, 6]], np.int32))), x)
        _, got = narrow.combine(received.handle, received.tokens, choice_values=values)
        heard.append(bool((env.backend.array(got) == 1).all()))
        group.reserve(combine_room=60)
        handle, rows = received_rows(env, group)
        _, got = group.combine(handle, rows, choice_values=values)
        heard.append(bool((env.backend.array(got) == 1).all()))
    return heard


def test_values_without_room_are_refused(world) -> None:
    ((outcome, *good),) = world(1).run(without_room)
    said(
        outcome,
        "twInvalidArgument",
        "choice_values takes 12 bytes beside a row, 60 together; combine_room has room for 59",
    )
    assert all(good), "values of shorter rows, and after the group has grown"
