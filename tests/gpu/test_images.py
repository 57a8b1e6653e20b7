"""What a dispatch leaves in a window, and what a combine returns: byte for byte as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, Got, Round, Setup, as_bits, same
from gpu_world import TIMEOUT, Locals, bits_equal
from player import Player

import tokenway as tw

SETUPS = {
    "bf16": Setup(ranks=2, experts=9, top_k=4, hidden=64, max_tokens=24, lanes=2),
    "odd rows": Setup(
        ranks=3,
        experts=7,
        top_k=3,
        hidden=17,
        dtype="uint8",
        payloads=((1, "uint8"), (3, "uint8"), (33, "uint8")),
        combine_hidden=11,
        max_tokens=24,
    ),
    "wide": Setup(
        ranks=2,
        experts=16,
        top_k=8,
        hidden=1000,
        max_tokens=130,
        dtype="float32",
        combine_dtype="float32",
        payloads=((8, "float32"),),
        id_dtype="int64",
        id_space="global",
    ),
    "one byte": Setup(ranks=4, experts=5, top_k=2, hidden=1, dtype="int8", combine_hidden=3, max_tokens=24),
}


def rounds_of(setup: Setup) -> list[Round]:
    """Sizes up and down, so that banks hold longer rounds from before."""
    most = setup.max_tokens
    sizes = [(most,) * setup.ranks, (1,) * setup.ranks, tuple(most - r for r in range(setup.ranks))]
    sizes += [tuple(most if r == 0 else 0 for r in range(setup.ranks)), (3, 0, 2, 1)[: setup.ranks]]
    rounds = [Round(tokens, seed=s) for s, tokens in enumerate(sizes)]
    rounds += [replace(rounds[2], routing="holes", seed=7), replace(rounds[4], bound=5, seed=8, again=True)]
    rounds += [replace(rounds[0], layout="expert_major", seed=9), replace(rounds[2], seed=10, late=True)]
    return rounds


def images(env: Any, setup: Setup) -> list[Got]:
    with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
        flights = tuple((round_,) for round_ in rounds_of(setup))
        return [got for (got,) in Player(env, group, Case(setup, flights)).flights()]


@pytest.mark.parametrize("name", SETUPS)
def test_rows_of_the_bank(lines, name) -> None:
    """Every byte of every row where the CPU has it, and all that is shown beside the rows."""
    setup = SETUPS[name]
    with Locals(setup.ranks, "cpu") as on_cpu:
        want = on_cpu.run(images, setup)
    with Locals(setup.ranks) as on_gpu:
        have = on_gpu.run(images, setup)
    for rank in range(setup.ranks):
        for round_, a, b in zip(rounds_of(setup), have[rank], want[rank], strict=True):
            where = f"rank {rank} of {round_} in {setup}"
            for field in ("counts", "offsets", "ids", "weights"):
                assert bits_equal(getattr(a, field), getattr(b, field)), f"{field}: {where}"
            filled = np.arange(b.weights.shape[1]) < b.counts[:, None]
            for q, (mine, theirs) in enumerate(zip(a.payloads, b.payloads, strict=True)):
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, where
                same(f"payload {q}", as_bits(mine)[filled], as_bits(theirs)[filled], where)
            assert bits_equal(a.out, b.out), f"out: {where}"
            assert a.late is None or bits_equal(a.late, b.late), f"late: {where}"


def places(env: Any, setup: Setup) -> list[int]:
    """Where the views of two dispatches on one lease lie, in bytes from the first."""
    with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
        player = Player(env, group, Case(setup, ()))
        round_ = rounds_of(setup)[0]
        handle, inputs = player.handle(round_), player.payloads(round_)
        found = []
        for _ in range(2):
            got = player.dispatch(round_, handle, inputs, False)
            views = [got.tokens, *(got.payloads[f"p{q}"] for q in range(len(setup.payloads)))]
            found += [v.__array_interface__["data"][0] if isinstance(v, np.ndarray) else v.data_ptr() for v in views]
        handle.release()
        return [place - found[0] for place in found]


@pytest.mark.parametrize("name", SETUPS)
def test_places_of_views(name, monkeypatch) -> None:
    """The map of a window is written once: where no rows travel as packets, which have a place in devices' banks alone,
    banks and payloads are as far apart as on the CPU."""
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "0")
    setup = SETUPS[name]
    with Locals(setup.ranks, "cpu") as on_cpu, Locals(setup.ranks) as on_gpu:
        assert on_gpu.run(places, setup) == on_cpu.run(places, setup)
