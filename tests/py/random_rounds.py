"""What the soak draws: groups of all modes, rounds, gathers and reduces, and how groups grow."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from cases import FLOATS, LAYOUTS, ROUTINGS, Round, Setup
from collected import HOW, Call, Plan

SLOTS = ("low_latency",)
MODES = (*SLOTS, *SLOTS, "high_throughput", "auto")
GATHERS = 0.15  # of all flights


def random_setup(rng: random.Random, ranks: int, modes: tuple[str, ...] = SLOTS) -> Setup:
    experts = rng.randint(1, 4 * ranks)
    most, mode = rng.choice((1, 5, 16, 24)), rng.choice(modes)
    more: dict[str, Any] = {}
    if mode != "low_latency":
        more |= {"mode": mode, "inbox_tokens": rng.choice((None, None, -(-most // 3)))}
        more["lease_bytes"] = rng.choice((0, 0, 1 << 14))
        if rng.random() < 0.2:  # with less room than there may be rows they are dropped
            more |= {"overflow": "drop", "max_recv_tokens": rng.randint(1, ranks * most)}
    if mode == "auto":
        more["low_latency_tokens"] = rng.randint(1, more["inbox_tokens"] or most)
    return Setup(
        **more,
        ranks=ranks,
        experts=experts,
        top_k=rng.randint(1, min(experts, 8)),
        hidden=rng.choice((1, 3, 16, 17, 64)),
        max_tokens=most,
        dtype=rng.choice((*FLOATS, "uint8")),
        payloads=rng.choice(((), ((1, "uint8"),), ((3, "float32"), (17, "int8")))),
        combine_dtype=rng.choice(FLOATS),
        lanes=rng.randint(1, 4),
        id_space=rng.choice(("local", "global")),
        row_alignment=rng.choice((None, 1, 4, 128)),
        domain=rng.choice((0, 0, 2)),  # of two ranks, as hosts are in tests of several
    )


def grown(rng: random.Random, setup: Setup) -> Setup:
    """The same group, perhaps with room for more tokens."""
    if setup.overflow == "drop" or rng.random() < 0.5:
        return setup
    return replace(setup, max_tokens=setup.max_tokens + rng.choice((1, 7, 40)))


def random_round(rng: random.Random, setup: Setup, own: int) -> Round:
    """own: the bound of calls that name none, as the group was made."""
    exact = setup.exact or (setup.mode == "auto" and rng.random() < 0.5)
    room = setup.default_bound if setup.mode == "auto" and not exact else setup.max_tokens
    most = rng.choice((0, 1, room, room))
    tokens = tuple(rng.randint(0, most) for _ in range(setup.ranks))
    least = max(1, *tokens)
    after = rng.choice(("again", "late", "release", "special", "special", "reuse", "reuse"))
    more: dict[str, Any] = {after: True}
    if exact:
        more |= {
            "lease": setup.lease_bytes > 0 and rng.random() < 0.3,
            "alignments": rng.choice(((), (1, 8), (None, 2, 256))),
        }
    return Round(
        tokens=tokens,
        seed=rng.getrandbits(40),
        routing=rng.choice(ROUTINGS),
        bound=rng.choice((None, least)) if exact or least <= own else least,
        layout=rng.choice(LAYOUTS["high_throughput" if exact else "low_latency"]),
        weighting=rng.choice(("none", "topk")),
        rows=rng.choice(FLOATS),
        out=rng.choice(FLOATS),
        send_dispatch=rng.random() < 0.7,
        send_combine=rng.random() < 0.5,
        strided=rng.random() < 0.2,
        own=rng.random() < 0.2,
        **more,
    )


def random_call(rng: random.Random, setup: Setup) -> Call:
    """A gather of rows as they are dispatched, or a reduce of rows as they return."""
    reduces = rng.random() < 0.5
    most = rng.choice((0, 1, setup.max_tokens))
    call = Call(
        sizes=tuple(rng.randint(0, most) for _ in range(setup.ranks)),
        reduces=reduces,
        rows=((setup.width, setup.combine_dtype),) if reduces else ((setup.hidden, setup.dtype), *setup.payloads),
        how=rng.choice(HOW),
        layout=rng.choice(("flat", "rank_major")),
        seed=rng.getrandbits(40),
        own=rng.random() < 0.3,
        strided=rng.random() < 0.2,
        special=rng.random() < 0.3,
        send_only=rng.random() < 0.5,
    )
    if call.problem():
        call = replace(call, layout="rank_major")
    if call.how != "host" or rng.random() < 0.5:
        call = replace(call, bound=max(1, *call.sizes))
    return replace(call, send_only=False) if shows_window(call) else call


def shows_window(call: Call) -> bool:
    """Whether a call's result is a view, which is over when the next step on its lane begins."""
    return call.layout == "rank_major" and not (call.own or call.reduces)


def random_plan(rng: random.Random, setup: Setup, own: int, count: int, gathers: bool) -> Plan:
    """So many rounds and calls."""
    flights: list[tuple[Any, ...]] = []
    while count > 0:
        size = min(rng.randint(1, setup.lanes), count)
        if gathers and rng.random() < GATHERS:
            calls = [random_call(rng, setup) for _ in range(size)]
            views = [call for call in calls if shows_window(call)]
            flights.append(tuple(views[:1] or calls))
        else:
            flights.append(tuple(random_round(rng, setup, own) for _ in range(size)))
        count -= len(flights[-1])
    slow = rng.choice((None, rng.randrange(setup.ranks)))
    return Plan(setup, tuple(flights), slow=slow, order=rng.getrandbits(30))
