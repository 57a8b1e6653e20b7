"""The C library's sentences in Python's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenway.sentences import in_python, of_call

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "output.layout is 7; it must be twRankMajor (0) or twExpertMajor (1)",
            "layout is 7; it must be 'rank_major' or ",
        ),
        ("config.placement->slot_expert[4] differs", "placement.slot_expert[4] differs"),
        ("config.payloads[0].elements is 0", "hidden is 0"),
        ("config.payloads[1].elements is 0", "payloads[1].elements is 0"),
        ("output.tokens has stride 5", "out has stride 5"),
        ("output.ids has dtype int64 (7)", "out['ids'] has dtype int64 (7)"),
        (
            "rank 0 refused its arguments of twDispatch (step 3, lane 0)",
            "rank 0 refused its arguments of dispatch (step",
        ),
        ('config.address "a->b.c" is in use', 'address "a->b.c" is in use'),
        ("config.lanes is -2147483648; it must be from 1 to 64", "lanes is 0; it must be from 1 to 64"),
        ("ids[32, 0] is -2147483648 in device memory", "ids[32, 0] is -2147483648 in device memory"),
        ("twSomethingElse is as it was (5)", "twSomethingElse is as it was (5)"),
    ],
)
def test_words(said, told) -> None:
    assert in_python(said).startswith(told)


def test_tensors_and_values() -> None:
    inputs = ["tokens", "payloads['scales']"]
    assert of_call("input.payloads[0] has shape [1]", inputs, {}) == "tokens has shape [1]"
    assert of_call("input.payloads[1] has shape [1]", inputs, {}) == "payloads['scales'] has shape [1]"
    assert of_call("output.payloads[0] is", inputs, {}) == "out['tokens'] is"
    assert of_call("output.payloads[1] is", inputs, {}) == "out['scales'] is"
    assert (
        of_call("output.tensors[1] overlaps input.tensors[0]", ["rows[0]", "rows[1]"], {}) == "out[1] overlaps rows[0]"
    )
    assert of_call("bound is -2; it must", [], {"bound": 0, "lane": -2}) == "bound is 0; it must"
    assert of_call("layout is -1; it must", [], {"layout": "by_colour"}) == "layout is 'by_colour'; it must"
    assert of_call("lane is -1; it must", [], {"lane": None}) == "lane is -1; it must"


def test_constants_are_known() -> None:
    """Every constant and function that a sentence about arguments names has a word in Python."""
    text = "".join(path.read_text() for path in sorted((ROOT / "src").glob("api/*.cc")) if "balance" not in path.name)
    said = " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))
    others = r"twComm|twLastError|twWindow|\w+_t$"
    named = {name for name in re.findall(r"\btw[A-Z]\w*", said) if not re.match(others, name)}
    assert named and not {name for name in named if in_python(name) == name}
