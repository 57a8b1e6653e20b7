"""Behaviour: the layout grouped in low latency, which a bound sizes. What it has in common with other layouts the tests
of these show (test_exchange, test_properties and others play it); here is what it has of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, Round, Setup, one
from harness import caught
from test_exchange import check

import tokenway as tw
from tokenway import grouped_reference
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=9)
GROUPED = "grouped_by_bound"

# ---- whatever the shape, the oracle's bits -------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 3, 7])
@pytest.mark.parametrize("alignment", [None, 1, 2, 128])
def test_alignments(world, alignment, top_k) -> None:
    """Ids of -1, ranks without tokens, one expert for all, bounds that change, outputs that are given, columns, calls
    that are sent alone, several in flight."""
    setup = replace(OWN, row_alignment=alignment, top_k=top_k, lanes=2, payloads=((5, "uint8"), (3, "float32")))
    base = Round((9, 0, 4), layout=GROUPED)
    rounds = (
        base,
        replace(base, seed=1, routing="holes", own=True, send_combine=True, late=True, columns=(2,)),
        replace(base, seed=2, tokens=(2, 1, 0), bound=2, own=True, columns=(1, 2)),
        replace(base, seed=3, routing="one", tokens=(0, 9, 9), strided=True, weighting="none"),
        replace(base, seed=4, identity=True, rows="bfloat16", again=True, bound=9),
        replace(base, seed=5, routing="none", own=True),
        replace(base, seed=6, tokens=(0, 0, 0), bound=1, own=True),
    )
    together = tuple(replace(r, send_dispatch=True) for r in rounds[:2])
    check(world, Case(setup, (*((r,) for r in rounds), together), slow=1))


@pytest.mark.parametrize("placed", [((0, 0, 2, 2, 0, 2, 0), (2, 0, 1, 0, 1, 2, 3)), ((1,) * 7, tuple(range(7)))])
def test_ranks_without_experts(world, placed) -> None:
    setup = replace(OWN, expert_map=placed, row_alignment=4, id_space="global", id_dtype="int64", invalid_id=-7)
    base = Round((9, 3, 0), layout=GROUPED)
    check(world, one(setup, base, replace(base, seed=1, tokens=(0, 0, 1), own=True, columns=())))


@pytest.mark.parametrize("limit", [0, 2])
def test_rows_of_all_kernels(world, made_for, limit) -> None:
    """Rows that go as packets and as they lie; views of few rows and in batches, by all blocks and by few."""
    setup = Setup(ranks=2, experts=6, top_k=4, hidden=made_for.large, max_tokens=600, sm_limit=limit, row_alignment=16)
    base = Round((600, 537), weighting="none", rows="bfloat16", out="bfloat16", layout=GROUPED)
    rounds = (
        base,
        replace(base, seed=1, tokens=(1, 0), bound=1, weighting="topk", rows="float32"),
        replace(base, seed=2, tokens=(40, 3), bound=40, own=True),
        replace(base, seed=3, tokens=(4, 4), bound=4, routing="holes", own=True, late=True),
    )
    check(world, one(setup, *rounds))


@pytest.mark.parametrize("alignment", [1, 128])
def test_few_rows_of_all_kinds(world, alignment) -> None:
    """Rows that a view of few rows takes, beside scales by row and by column, and rows that it does not."""
    for hidden in (64, 13):
        setup = Setup(ranks=2, experts=9, top_k=4, hidden=hidden, max_tokens=4, row_alignment=alignment)
        setup = replace(setup, payloads=((8, "float32"), (16, "uint8")))
        base = Round((4, 3), layout=GROUPED)
        rounds = [replace(base, seed=i, columns=columns) for i, columns in enumerate(((), (1,), (1, 2)))]
        check(world, one(setup, *rounds, replace(base, seed=4, tokens=(0, 1), routing="holes", own=True)))


def test_per_expert(world) -> None:
    setup = replace(OWN, combine_rows="per_expert", row_alignment=8)
    base = Round((9, 0, 4), layout=GROUPED)
    late = replace(base, seed=1, routing="holes", late_weights=True, weighting="none", own=True, late=True)
    check(world, one(setup, base, late, replace(base, seed=2, tokens=(1, 2, 0), bound=2, rows="bfloat16")))


# ---- one dispatch, several layouts ---------------------------------------------------------------

LAYOUTS = ("rank_major", "expert_major", "grouped")


def across(env: Any, alignment: int) -> list[bool]:
    """Rows of each layout combined after a dispatch in each, the dispatch's own first and last. With weighting none and
    rows that follow from a token alone, what returns is known."""
    setup = replace(OWN, ranks=env.nranks, row_alignment=alignment, dtype="float32", combine_dtype="float32")
    good = []
    with tw.Group(env.comm, **setup.settings()) as group:
        tensor, array = env.backend.tensor, env.backend.array
        rng = np.random.default_rng(env.rank)
        ids = rng.random((5, 7)).argsort(axis=1)[:, :3].astype(np.int32)
        x = rng.integers(1, 9, (5, OWN.hidden)).astype(np.float32)
        home, _ = ref.placement(7, env.nranks, None)
        fan = np.array([[len({home[e] for e in row})] for row in ids])
        for first in LAYOUTS:
            handle = group.route(tensor(ids))
            rows = {}
            for layout in (*LAYOUTS, first):  # by one routing, so that all have the same rows
                rows[layout] = tensor(array(group.dispatch(handle, tensor(x), layout=layout).tokens))
            for layout in (first, *LAYOUTS, first):
                want = x * (fan if layout == "rank_major" else 3)
                good.append(np.array_equal(array(group.combine(handle, rows[layout], layout=layout)), want))
    return good


@pytest.mark.parametrize("alignment", [1, 4])
def test_combines_in_other_layouts(world, alignment) -> None:
    for good in world(min(3, world.most)).run(across, alignment):
        assert all(good), good


# ---- which of the two a call means ---------------------------------------------------------------

BOTH = replace(OWN, mode="auto", low_latency_tokens=4, max_recv_tokens=9, row_alignment=8)


def named(env: Any) -> list[Any]:
    """What a dispatch in "grouped" is in a group of both modes."""
    setup, found = replace(BOTH, ranks=env.nranks), []
    with tw.Group(env.comm, **setup.settings()) as group:
        ids = env.backend.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        x = env.backend.tensor(np.ones((2, OWN.hidden), numpy_dtype("bfloat16")))

        def rows(handle: Any, **given: Any) -> int:
            received = group.dispatch(handle, x, **({"layout": "grouped"} | given))
            assert received.layout == "grouped"
            group.combine(handle, received.tokens, layout="grouped")
            return received.tokens.shape[0]

        handle = group.route(ids)
        found += [rows(handle), rows(handle, bound=2), caught(rows, handle, bound=8)]
        group.exchange_counts(handle).learn_rows()
        found += [rows(handle), rows(handle, layout=GROUPED), rows(handle, bound=2)]
        handle.update(ids)
        found.append(rows(handle))
    return found


def test_grouped_of_both_modes(world) -> None:
    """Of low latency until the handle's counts are exchanged, but for a bound beyond low_latency_tokens; by its full
    name always."""
    (found,) = world(1).run(named)
    few, fewer, refused, counted, by_name, again, updated = found
    assert refused[0] == "twInvalidUsage" and "counts have not been exchanged" in refused[1], refused
    x = ref.Exchange([np.arange(6, dtype=np.int32).reshape(2, 3)], None, experts=7, bound=4, alignment=8)
    most = grouped_reference.rows_by_bound(x, 0)
    assert (few, by_name, updated) == (most,) * 3 and most == 4 * 3 + 7 * 7 - (4 * 3 + 7 * 7) % 8
    assert fewer == grouped_reference.rows_by_bound(replace(x, bound=2), 0)
    assert counted == again == x.blocks(0)[-1]


# ---- what is refused -----------------------------------------------------------------------------


def refuse(env: Any) -> list[Any]:
    heard = []
    heard.append(caught(tw.Group, env.comm, **replace(OWN, ranks=1, row_alignment=3).settings()))
    with tw.Group(env.comm, **replace(OWN, ranks=1).settings()) as group:
        x = env.backend.tensor(np.ones((1, OWN.hidden), numpy_dtype("bfloat16")))
        handle = group.route(env.backend.tensor(np.array([[0, 1, 2]], np.int32)))
        heard.append(caught(group.dispatch, handle, x, layout="grouped", index_block=16))
        heard.append(caught(group.dispatch, handle, x, layout="flat"))
        received = group.dispatch(handle, x, layout="grouped")
        heard.append(caught(group.combine, handle, received.tokens[1:]))
        group.combine(handle, received.tokens)
    return heard


def test_what_is_refused(world) -> None:
    (heard,) = world(1).run(refuse)
    wanted = [
        ("twInvalidArgument", "row_alignment is 3; it must be a power of two"),
        ("twInvalidArgument", "index_block is 16; it must be 0 in this layout"),
        ("twInvalidArgument", "layout is 'flat'; it must be 'rank_major', 'expert_major' or 'grouped_by_bound'"),
        ("twInvalidArgument", r"rows has shape \[26, 24\]; it must be \[27, 24\]"),
    ]
    for (code, text, _), (want, pattern) in zip(heard, wanted, strict=True):
        assert code == want and re.search(pattern, text), text
