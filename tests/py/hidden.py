"""Ranks whose processes see their own device alone, beside ranks that see all: what a group is like on them."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import player
from cases import Got, Round, Setup, one, verify
from harness import PATIENT, Workers, settle

import tokenway as tw

RANKS = 2
SETUP = Setup(ranks=RANKS, experts=7, top_k=3, hidden=64, max_tokens=12, payloads=((3, "uint8"),))
ROUNDS = (Round((12, 7)), Round((12, 7), seed=1, layout="expert_major", weighting="none"), Round((1, 0), seed=2))


def look(env: Any) -> dict[str, Any]:
    """What a rank's group is like, and what it did."""
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        info = group.native.info()
        got = player.Player(env, group, one(SETUP, *ROUNDS)).flights()
    return {
        "window": info.window_bytes,
        "packets": info.packet_tokens,
        "links": info.links,
        "handles": info.handles,
        "refusal": info.refusal,
        "why": env.comm.why,
        "got": [flight[0] for flight in got],
    }


def on_workers(backend: str, nranks: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    """`look` on processes of their own; what came is as the oracle has it."""
    workers = Workers(nranks, environment)
    try:
        key = ("hidden", 0, backend, f"hidden-{os.getpid()}-{time.monotonic_ns()}")
        workers.send(range(nranks), look, key=key)
        ranks = settle(workers.collect(range(nranks), PATIENT))
    finally:
        workers.close()
    judge(ranks)
    return ranks


def judge(ranks: list[dict[str, Any]]) -> None:
    """What came is as the oracle has it."""
    for i, round_ in enumerate(ROUNDS):
        verify(SETUP, round_, [rank["got"][i] for rank in ranks])


def bits(got: Got) -> bytes:
    """Of a round's result."""
    return np.ascontiguousarray(got.out).tobytes()
