"""Hypothesis for cases: how many are tried, and strategies in which every hard thing is in reach of one draw."""

from __future__ import annotations

import os
from typing import Any

from cases import BY_EXPERT, FLOATS, ROUTINGS, Case, Round, Setup
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tokenway.replica_reference import POLICIES

EXAMPLES = int(os.environ.get("EXAMPLES", "150"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# Sizes that vectors do not like, and a few that they do.
WIDTHS = st.sampled_from([1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100])
PAYLOAD_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64", "float8_e4m3fn", "bool")


@st.composite
def expert_maps(draw: Any, experts: int, ranks: int) -> Any:
    """None, or any placement: some ranks may hold nothing."""
    if draw(st.booleans()):
        return None
    home = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    slots = [0] * experts
    for rank in range(ranks):
        here = [e for e in range(experts) if home[e] == rank]
        for slot, expert in enumerate(draw(st.permutations(here))):
            slots[expert] = slot
    return tuple(home), tuple(slots)


@st.composite
def replica_maps(draw: Any, experts: int) -> dict[str, Any]:
    """Fields of a Setup: each expert in a slot and some in more, some slots empty, by any policy."""
    more = draw(st.lists(st.integers(-1, experts - 1), max_size=9))
    table = tuple(draw(st.permutations([*range(experts), *more])))
    policy = draw(st.sampled_from(POLICIES))
    chosen: dict[str, Any] = {"slot_expert": table, "policy": policy}
    if policy == "shares" and draw(st.booleans()):
        shares = [draw(st.sampled_from((0.0, 0.25, 1.0, 3.0, 1e-30))) for _ in table]
        for expert in range(experts):  # none may have nothing
            first = table.index(expert)
            shares[first] = shares[first] or 1.0
        chosen["shares"] = tuple(shares)
    return chosen


@st.composite
def setups(
    draw: Any,
    max_ranks: int = 5,
    exact: bool = False,
    replicas: bool = False,
    auto: bool = False,
    token_replicas: bool = False,
) -> Setup:
    """A group of any kind; `exact`: in high throughput; `auto`: of both modes; `replicas`: of experts in more slots;
    `token_replicas`: several ranks have the same tokens."""
    ranks = draw(st.integers(1, max_ranks))
    more: dict[str, Any] = {}
    if token_replicas:
        more["token_replicas"] = draw(st.integers(2, max_ranks))
        ranks = more["token_replicas"] * draw(st.integers(1, max_ranks // more["token_replicas"]))
    experts = draw(st.integers(1, 13))
    placed = draw(replica_maps(experts)) if replicas else {}
    slots = len(placed["slot_expert"]) if replicas else experts
    id_space = draw(st.sampled_from(("local", "global")))
    payloads = st.lists(st.tuples(WIDTHS, st.sampled_from(PAYLOAD_DTYPES)), max_size=3)
    most = draw(st.integers(1, 12))
    more["row_alignment"] = draw(st.none() | st.sampled_from((1, 2, 8, 256)))
    if exact or auto:
        more["mode"] = "auto" if auto else "high_throughput"
        more["lease_bytes"] = draw(st.sampled_from((0, 4096, 1 << 14, 1 << 20)))
        more["inbox_tokens"] = draw(st.none() | st.integers(1, most))  # combines may take parts
        if auto:
            more["low_latency_tokens"] = draw(st.none() | st.integers(1, more["inbox_tokens"] or most))
        if draw(st.booleans()):  # with less room than there may be rows they are dropped
            more |= {"overflow": "drop", "max_recv_tokens": draw(st.integers(1, ranks * most))}
    return Setup(
        **more,
        **placed,
        ranks=ranks,
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 9))),
        hidden=draw(WIDTHS),
        max_tokens=most,
        dtype=draw(st.sampled_from((*FLOATS, "uint8"))),
        payloads=tuple(draw(payloads)),
        combine_dtype=draw(st.sampled_from(FLOATS)),
        combine_hidden=draw(st.none() | WIDTHS),
        expert_map=draw(expert_maps(slots, ranks)),
        lanes=draw(st.integers(1, 4)),
        id_dtype=draw(st.sampled_from(("int32", "int64"))),
        id_space=id_space,
        invalid_id=draw(st.sampled_from((-1, -7, slots, 2**31 - 1))),
    )


@st.composite
def rounds(draw: Any, setup: Setup, seed: int) -> Round:
    """One routing and what is done with it."""
    exact = draw(st.booleans()) if setup.mode == "auto" else setup.exact
    most = setup.max_tokens if exact else setup.default_bound
    each = setup.token_replicas
    counts = st.integers(0, most * each) | st.sampled_from((0, most * each))
    tokens = tuple(n for n in [draw(counts) for _ in range(setup.ranks // each)] for _ in range(each))
    flags = ("weights", "strided", "own", "special", "memory", "fortran", "identity", "reuse")
    after = draw(st.sampled_from(("", "", "again", "late", "release")))
    chosen: dict[str, Any] = {name: draw(st.booleans()) for name in flags}
    # Experts that return what they got need rows that are fit to be combined.
    chosen["identity"] &= setup.dtype in FLOATS and setup.width == setup.hidden
    chosen["reuse"] &= not chosen["memory"]
    chosen["lease"] = exact and draw(st.booleans())
    if after:
        chosen[after] = True
    if exact:
        chosen["alignments"] = tuple(draw(st.lists(st.none() | st.sampled_from((1, 2, 8, 256)), max_size=3)))
        if setup.overflow == "drop":
            chosen["room"] = draw(st.none() | st.integers(1, setup.max_recv_tokens or 1))
    layout = draw(st.sampled_from(("flat", "grouped") if exact else ("rank_major", "expert_major", "grouped_by_bound")))
    bound = draw(st.none() | st.integers(max(1, *(-(-n // each) for n in tokens)), most))
    few = bound is not None and bound <= setup.default_bound
    if setup.mode == "auto" and layout == ("rank_major" if few else "flat"):
        chosen["chosen"] = draw(st.booleans())
    extra = range(1, len(setup.payloads) + 1) if layout in BY_EXPERT else ()
    if layout in ("rank_major", "flat"):
        chosen["index_block"] = draw(st.sampled_from((0, 0, 0, 1, 3, 16, 64, 256)))
    return Round(
        tokens=tokens,
        columns=tuple(q for q in extra if draw(st.booleans())),
        seed=seed,
        routing=draw(st.sampled_from(ROUTINGS)),
        bound=bound,
        layout=layout,
        weighting=draw(st.sampled_from(("none", "topk"))),
        ids=draw(st.sampled_from(("int32", "int64"))),
        rows=setup.dtype if chosen["identity"] else draw(st.sampled_from(FLOATS)),
        out=draw(st.sampled_from(FLOATS)),
        send_dispatch=draw(st.booleans()),
        send_combine=draw(st.booleans()),
        limits=tuple(draw(st.lists(st.sampled_from((0, 1, 2, 5, 2**31 - 1)), max_size=3))),
        **chosen,
    )


@st.composite
def cases(
    draw: Any,
    max_ranks: int = 5,
    max_flights: int = 3,
    exact: bool = False,
    replicas: bool = False,
    auto: bool = False,
    token_replicas: bool = False,
) -> Case:
    """A group and flights of rounds."""
    setup = draw(setups(max_ranks, exact, replicas, auto, token_replicas))
    flights = []
    for f in range(draw(st.integers(1, max_flights))):
        size = draw(st.integers(1, setup.lanes))
        base = draw(st.integers(0, 1000))
        flights.append(tuple(draw(rounds(setup, base + 10 * f + i)) for i in range(size)))
    slow = draw(st.none() | st.integers(0, setup.ranks - 1))
    return Case(setup, tuple(flights), slow=slow, order=draw(st.integers(0, 99)))
