"""Numbers that callers give: taken where they stay what they are, else refused by name, never wrapped or cut."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import caught, said

import tokenway as tw
from tokenway import balance, checked

RANK, PLACE = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
SETTINGS: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 8, "max_tokens": 4}

# What stands for the ranks of experts, and how it is refused.
NO_RANKS: dict[str, tuple[Any, str]] = {
    "beyond 32 bits": (RANK + 2**32, r"\[0\] is 4294967296; it must hold 32-bit integers"),
    "unsigned": (RANK.astype(np.uint64) + np.uint64(2**64 - 2**32), r"\[0\] is 184467\d+; it must hold 32-bit"),
    "fractions": (RANK + 0.9, r" has dtype float64; it must hold 32-bit integers"),
    "whole floats": (RANK.astype(float), r" has dtype float64"),
    "not a number": (np.array([np.nan, 0, 1, 1]), r" has dtype float64"),
    "bools": (RANK.astype(bool), r" has dtype bool"),
    "complex": (RANK * (1 + 0j), r" has dtype complex128"),
    "strings": (np.array(["0", "0", "1", "1"]), r" has dtype <U1"),
    "masked": (np.ma.masked_array(RANK, RANK == 0), r" is a masked array, whose mask"),
    "uneven": ([[0], [0, 1]], r" cannot be read as an array: ValueError"),
}


def refusal(call: Any, *args: Any, **given: Any) -> str:
    result, text, _ = caught(call, *args, **given)
    assert result == "twInvalidArgument", (result, text)
    return text


@pytest.mark.parametrize("name", NO_RANKS)
def test_maps(name) -> None:
    """In all places that a group has for maps, and in the planner's."""
    wrong, told = NO_RANKS[name]
    for field, given in (
        (r"expert_map\[0\]", (wrong, PLACE)),
        (r"expert_map\[1\]", (RANK, wrong)),
        (r"expert_map.where\[1\]", tw.Placement(range(4), where=(RANK, wrong))),
        ("slot_expert", tw.Placement(wrong)),
    ):
        text = refusal(tw.window_bytes, 2, **SETTINGS, expert_map=given)
        assert re.search(field + told, text), text
    if name not in ("uneven", "masked"):
        two = np.stack([np.asarray(wrong)] * 2, axis=1)
        text = refusal(tw.window_bytes, 2, **SETTINGS, expert_map=(two, np.stack([PLACE] * 2, axis=1)))
        assert re.search(r"expert_map\[0\]" + told.replace(r"\[0\] is", r"\[0, 0\] is"), text), text
    assert tw.window_bytes(2, **SETTINGS, expert_map=(RANK.astype(np.uint8), [0, 1, 0, 1])).window


def test_maps_of_torch(torch) -> None:
    made = torch.tensor(RANK), torch.tensor(PLACE)
    assert tw.window_bytes(2, **SETTINGS, expert_map=made).window
    assert "has dtype float32" in refusal(tw.window_bytes, 2, **SETTINGS, expert_map=(made[0].float(), made[1]))
    text = refusal(tw.window_bytes, 2, **SETTINGS, expert_map=(made[0].to("meta"), made[1]))
    assert text == "expert_map[0] is a meta tensor, which has no numbers"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"slots": 4.7}, r"slots is 4.7; it must be an integer"),
        ({"layers": 1.5}, r"layers is 1.5; it must be an integer"),
        ({"layers": 0}, r"layers is 0; it must be from 1"),
        ({"load_decay": "half"}, r"load_decay is 'half'; it must be a number"),
        ({"shares": ["1"] * 4, "policy": "shares"}, r"shares has dtype <U1; it must hold numbers"),
        ({"shares": [1j] * 4, "policy": "shares"}, r"shares has dtype complex128; it must hold numbers"),
        ({"shares": [True] * 4, "policy": "shares"}, r"shares has dtype bool; it must hold numbers"),
    ],
)
def test_placements(changes, told) -> None:
    given = {"slot_expert": range(4)} | changes
    said(caught(tw.window_bytes, 2, **SETTINGS, expert_map=tw.Placement(**given)), "twInvalidArgument", told)


def test_fewer_slots_than_none() -> None:
    """-1 is none, and nothing else is."""
    rank, place = np.array([[0, -1], [0, 1], [1, -7], [1, -1]]), np.zeros((4, 2), int)
    text = refusal(tw.window_bytes, 2, **SETTINGS, expert_map=(rank, place))
    assert text == "expert_map[0] has -7; it must have ranks, and -1 for none"


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "uint8", "longdouble"])
def test_loads_of_any_numbers(name) -> None:
    kind = getattr(ml_dtypes, name, None) or name
    loads = np.array([[4, 2, 1, 8]])
    made = balance.plan(loads.astype(kind), ranks=2, slots=2)
    assert made.rank_loads.tolist() == balance.plan(loads, ranks=2, slots=2).rank_loads.tolist()
    forecast = balance.Forecast((0.0,))
    forecast.add(loads.astype(kind))
    assert forecast.loads.tolist() == loads.tolist()


def test_loads_of_torch(torch) -> None:
    loads = torch.tensor([[4.0, 2.0, 1.0, 8.0]])
    want = balance.plan(loads, ranks=2, slots=2).rank_loads.tolist()
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int16):
        assert balance.plan(loads.to(kind), ranks=2, slots=2).rank_loads.tolist() == want
    for wrong, told in (
        (loads.to_sparse(), "loads is a tensor of layout torch.sparse_coo; it must be strided"),
        (loads.to("meta"), "loads is a meta tensor, which has no numbers"),
        (loads > 0, "loads has dtype bool; it must be a type of numbers"),
    ):
        assert refusal(balance.plan, wrong, ranks=2, slots=2) == told


@pytest.mark.parametrize(
    ("loads", "told"),
    [
        ([[1, 2], [3]], "loads cannot be read as an array: ValueError"),
        (np.ma.masked_array([[1.0, 2.0]], True), "loads is a masked array"),
        (["1", "2"], "loads has dtype <U1"),
        ([1j, 2j], "loads has dtype complex128"),
    ],
)
def test_loads_that_are_none(loads, told) -> None:
    assert told in refusal(balance.plan, loads, ranks=2, slots=2)
    assert told.replace("loads", "window") in refusal(balance.Forecast().add, loads)


def test_maps_in_use() -> None:
    told = r"old[0, 3] is 1099511627776; it must hold 32-bit integers"
    assert refusal(balance.plan, [1.0] * 4, ranks=2, slots=2, old=[[0, 1, 2, 1 << 40]]) == told


def test_shapes_stay() -> None:
    assert checked.floats("x", 2.5).shape == () and checked.integers("x", []).shape == (0,)
    assert checked.integers("x", np.zeros((2, 3), np.int64).T).flags.c_contiguous


@pytest.mark.parametrize("nranks", [1.5, "2", None, 2**40])
def test_numbers_of_ranks(nranks) -> None:
    for call in (tw.local_comms, lambda n: tw.Ranks(len, n)):
        assert "nranks is " in refusal(call, nranks)
    assert "nranks is 2147483647" in refusal(tw.local_comms, 2**31 - 1)  # without memory for so many
