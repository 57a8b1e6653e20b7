"""Groups that grow, for the tests of growth: how they are made, and whether they work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import numpy as np
from cases import Setup
from harness import PATIENT

import tokenway as tw
from tokenway import reference as ref

OWN = Setup(ranks=3, experts=7, top_k=3, hidden=24, max_tokens=4, lanes=2)
EXACT = {"mode": "high_throughput", "row_alignment": 4}
MODES = {"low_latency": {}, "high_throughput": EXACT, "in parts": EXACT | {"inbox_tokens": 3}}
LAYOUTS = cases.LAYOUTS | {"in parts": cases.LAYOUTS["high_throughput"]}


def own_of(world: Any, mode: str) -> Setup:
    return replace(OWN, **MODES[mode], ranks=min(3, world.most))


def make(env: Any, own: Setup, **changes: Any) -> tw.Group:
    return tw.Group(env.comm, timeout=PATIENT, **(own.settings() | changes))


def works(env: Any, group: tw.Group, tokens: int) -> bool:
    """Whether an exchange of the group goes well."""
    ids = env.backend.tensor(np.arange(tokens, dtype=np.int32).reshape(-1, 1).repeat(3, 1) % 2 + np.arange(0, 6, 2))
    x = np.random.default_rng(env.rank).standard_normal((tokens, OWN.hidden)).astype(np.float32)
    handle = group.route(ids)
    received = group.dispatch(handle, env.backend.tensor(x))
    out = env.backend.array(group.combine(handle, received.tokens))
    home, _ = ref.placement(OWN.experts, group.nranks, None)
    fan = np.array([len({home[e] for e in row}) for row in env.backend.array(ids)], np.float32)
    sums = np.array([sum_alike(row, int(n)) for row, n in zip(x, fan, strict=True)], np.float32)
    return np.array_equal(out, sums.reshape(x.shape))


def sum_alike(row: np.ndarray, times: int) -> np.ndarray:
    total = row.copy()
    for _ in range(times - 1):
        total += row
    return total


def plain(env: Any, **changes: Any) -> tw.Group:
    return make(env, replace(OWN, dtype="float32", combine_dtype="float32"), **changes)
