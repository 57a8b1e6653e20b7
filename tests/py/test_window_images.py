"""GPUs of several hosts leave in each other's windows what GPUs that NVLink joins do, byte for byte: signals, notes,
rows, metadata and what returns, step by step. What each means is the other tests' part."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import harness
import pytest
from cases import Round, Setup
from collected import Call
from gin_backend import CROSSING
from window_images import Image, apart, images

JOINED = {"emulated-gin": "emulated", "gin": "nvlink"}
OWN = Setup(ranks=4, experts=10, top_k=3, hidden=24, max_tokens=9, payloads=((3, "float32"), (17, "int8")))
SETUPS = {
    "low_latency": OWN,
    "global ids": replace(OWN, id_space="global", dtype="float32", combine_dtype="float16", hidden=37, payloads=()),
    "high_throughput": replace(OWN, mode="high_throughput"),
    "per expert": replace(OWN, combine_rows="per_expert", hidden=40),
}


def items_of(setup: Setup) -> list[Any]:
    """Rounds of all sizes and layouts, with more and then fewer rows, and gathers and reduces in between."""
    layouts = ("flat", "grouped") if setup.exact else ("rank_major", "expert_major", "grouped_by_bound")
    sizes = ((9, 9, 9, 9), (1, 0, 4, 9), (0, 0, 0, 0), (9, 0, 1, 7))
    routings = ("random", "holes", "random", "one")
    items: list[Any] = []
    for seed, (tokens, routing) in enumerate(zip(sizes, routings, strict=True)):
        by_expert = setup.combine_rows == "per_expert"
        for i, layout in enumerate(layouts[by_expert:]):
            items.append(Round(tokens, seed=10 * seed + i, routing=routing, layout=layout, weighting="none"))
        if not (setup.exact or by_expert):
            items.append(Round(tokens, seed=10 * seed + 5, bound=max(1, *tokens)))
        rows = ((setup.hidden, setup.dtype),)
        items.append(Call(tokens, rows=rows, seed=seed, layout=("flat", "rank_major")[seed % 2]))
        items.append(Call(tokens, True, rows=((setup.width, setup.combine_dtype),), seed=seed))
    return items


def images_on(backend: str, setup: Setup) -> list[tuple[str, list[Image]]]:
    """On comms of their own, which read the environment as it is now."""
    world = harness.Threads(backend, setup.ranks)
    world._envs = {}  # type: ignore[misc]
    return images(world, setup, items_of(setup))


@functools.cache
def near_images(backend: str, name: str) -> list[tuple[str, list[Image]]]:
    """What NVLink leaves, whatever way rows cross between hosts: rows and all, not places where nobody has written."""
    near = images_on(backend, SETUPS[name])
    for step, windows in near:
        for window in windows:
            empty = [region for region, held in window.regions.items() if held.size and not held.any()]
            assert not [region for region in empty if "counts" not in region], f"{empty} after {step}"
    return near


def compare(one: list[tuple[str, list[Image]]], other: list[tuple[str, list[Image]]]) -> None:
    """All steps of all ranks."""
    for (step, mine), (_, theirs) in zip(one, other, strict=True):
        for rank, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            wrong = apart(a, b)
            assert not wrong, f"rank {rank} after {step}: {'; '.join(wrong)}"


@pytest.mark.parametrize("crossing", ["per_rank", "per_host"])
@pytest.mark.parametrize("name", SETUPS)
def test_windows_of_threads_are_alike(backend, name, crossing, monkeypatch) -> None:
    if backend not in JOINED:
        pytest.skip("for GPUs of several hosts")
    monkeypatch.setenv("TOKENWAY_LINE_TOKENS", "0")  # packets lie elsewhere, and do not cross between hosts
    monkeypatch.setenv(CROSSING, crossing)
    near = near_images(JOINED[backend], name)
    compare(near, images_on(backend, SETUPS[name]))
    for at in range(0, len(near), 7):
        spoil_and_compare(near[at : at + 1])


def spoil_and_compare(near: list[tuple[str, list[Image]]]) -> None:
    """Any one byte that differs is told."""
    ((_, windows),) = near
    for rank, window in enumerate(windows):
        for name in [None, *(name for name, region in window.regions.items() if region.size)]:
            other = copy.deepcopy(near)
            spoilt = other[0][1][rank]
            (spoilt.signals if name is None else spoilt.regions[name]).reshape(-1).view("u1")[-1] ^= 1
            with pytest.raises(AssertionError, match=f"rank {rank} after"):
                compare(near, other)
