"""The C library's sentences in Python's words."""

from __future__ import annotations

import re
from ctypes import byref
from pathlib import Path

import numpy as np
import pytest

import tokenway as tw
from tokenway import _header, _native, sentences
from tokenway.sentences import ARGUMENT, CONSTANT, FUNCTION, LEAST, MOST, TEXT, VALUE, Part, tell

ROOT = Path(__file__).resolve().parents[2]


def argument(path: str, *indices: int) -> Part:
    return Part(ARGUMENT, "what C says", path, indices)


def value(number: int, path: str = "config.lanes", kind: int = VALUE) -> Part:
    return Part(kind, str(number), path, (), number)


def text(words: str) -> Part:
    return Part(TEXT, words)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (argument("config.lanes"), "lanes"),
        (argument("config.payloads[].elements", 0), "hidden"),
        (argument("config.payloads[].dtype", 0), "dtype"),
        (argument("config.payloads[].elements", 1), "payloads[1].elements"),
        (argument("config.combine_elements"), "combine_hidden"),
        (argument("config.placement->slot_expert[]", 0, 4), "placement.slot_expert[0, 4]"),
        (argument("config.placement->num_layers"), "placement.layers"),
        (argument("config.num_experts"), "experts"),
        (argument("input.host_sizes[]", 2), "sizes[2]"),
        (argument("input.tensors[]"), "rows"),
        (argument("output.tokens"), "out"),
        (argument("output.ids"), "out['ids']"),
        (argument("ids[]", 3, 0), "ids[3, 0]"),
        (argument("the handle's ids"), "the handle's ids"),
        (Part(CONSTANT, "twRankMajor (0)", "twRankMajor", (), 0), "'rank_major'"),
        (Part(CONSTANT, "twSomethingElse (5)", "twSomethingElse", (), 5), "twSomethingElse (5)"),
        (Part(FUNCTION, "twDispatch", "twDispatch"), "dispatch"),
        (Part(FUNCTION, "twSomethingElse", "twSomethingElse"), "twSomethingElse"),
        (Part(99, "a kind to come", "twDispatch"), "a kind to come"),
        (text("config.lanes of twDispatch (0)"), "config.lanes of twDispatch (0)"),
    ],
)
def test_words(said: Part, told: str) -> None:
    assert tell([text("as "), said, text(" is")]).text == f"as {told} is"


def test_tensors() -> None:
    inputs = ["tokens", "payloads['scales']"]
    assert tell([argument("input.payloads[]", 0)], inputs).text == "tokens"
    assert tell([argument("input.payloads[]", 1)], inputs).text == "payloads['scales']"
    assert tell([argument("output.payloads[]", 0)], inputs).text == "out['tokens']"
    assert tell([argument("output.payloads[]", 1)], inputs).text == "out['scales']"
    assert tell([argument("config.payloads[].dtype", 0)], inputs).text == "dtype"
    assert tell([argument("config.payloads[].dtype", 1)], inputs).text == "payloads['scales'].dtype"
    assert tell([argument("output.tensors[]", 1)], ["rows[0]", "rows[1]"]).text == "out[1]"
    assert tell([argument("input.tensors[]", 0)], ["rows"]).text == "rows"


def test_values() -> None:
    """What stands for something else is told as what was given; numbers that merely look like it are not."""
    bound, lane = argument("input.bound"), argument("input.lane")
    given = {"bound": 2**40, "lane": None, "layout": "by_colour"}
    assert tell([bound, text(" is "), value(-2, "input.bound")], (), given).text == "bound is 1099511627776"
    assert tell([bound, text(" is "), value(-3, "input.bound")], (), given).text == "bound is -3"
    assert tell([lane, text(" is "), value(-1, "input.lane")], (), given).text == "lane is -1"
    assert tell([argument("output.layout"), value(-1, "output.layout")], (), given).text == "layout'by_colour'"
    lanes = [argument("config.lanes"), text(" is "), value(sentences.ZERO)]
    assert tell(lanes).text == "lanes is 0"
    ids = [argument("ids[]", 32, 0), text(" is "), value(sentences.ZERO, "ids[]")]
    assert tell(ids).text == "ids[32, 0] is -2147483648"


def test_what_an_argument_is() -> None:
    said = [
        *(text("rank 1: "), argument("ids[]", 3, 0), text(" is "), value(99, "ids[]"), text("; it must be from ")),
        *(value(0, "ids[]", LEAST), text(" to "), value(7, "ids[]", MOST), text(" of ")),
        *(argument("config.lanes"), text(" is "), value(5)),
    ]
    told = tell(said)
    assert told.text == "rank 1: ids[3, 0] is 99; it must be from 0 to 7 of lanes is 5"
    assert told[1:] == ("ids", (3, 0), 99, (0, 7))
    assert tell([text("no free lane")])[1:] == (None, (), None, None)


def test_settings_that_cannot_be_written_down() -> None:
    """Peers of a rank whose settings are refused in Python hear of no struct."""
    size = value(0, "config")
    said = [text("rank 1: "), argument("config"), text("->size is "), size, text("; it must be sizeof(*")]
    told = tell([*said, argument("config"), text("), 368 in this version")])
    assert told.text == "rank 1: its settings were refused there"


def test_errors_have_their_argument() -> None:
    with pytest.raises(tw.InvalidArgument) as caught:
        tw.window_bytes(2, hidden=8, max_tokens=4, experts=4, top_k=5)
    error = caught.value
    assert str(error) == "top_k is 5; it must be from 1 to 4"
    assert (error.argument, error.index, error.value, error.allowed) == ("top_k", (), 5, (1, 4))
    with pytest.raises(tw.InvalidArgument) as caught:
        tw.window_bytes(2, hidden=8, max_tokens=4, experts=4, top_k=2, lanes=0)
    assert (caught.value.argument, caught.value.value, caught.value.allowed) == ("lanes", 0, (1, 64))
    with pytest.raises(tw.InvalidArgument) as caught:
        tw.window_bytes(2, hidden=8, max_tokens=4, experts=4, top_k=2, lanes="two")  # type: ignore[arg-type]
    assert (caught.value.argument, caught.value.value) == ("lanes", None)
    with pytest.raises(tw.InvalidArgument) as caught:
        tw.window_bytes(2, hidden=8, max_tokens=4, experts=4, top_k=2, expert_map=([0, 0, 1, 2], [0, 1, 0, 0]))
    assert (caught.value.argument, caught.value.index, caught.value.allowed) == ("expert_rank", (3,), (0, 1))


def test_errors_that_python_finds_have_it_too() -> None:
    settings = {"hidden": 8, "max_tokens": 4, "experts": 4, "top_k": 2}
    for wrong, said, named in [
        ({"mode": "fast"}, "mode is 'fast'; it must be one of", ("mode", ())),
        ({"timeout": 0}, "timeout is 0; it must be from 0.001", ("timeout", ())),
        (
            {"expert_map": ([0, 1, 2**40, 1], [0, 0, 1, 1])},
            "expert_map[0][2] is 1099511627776",
            ("expert_map[0]", (2,)),
        ),
        ({"payloads": {"ids": (1, "int8")}}, "payloads are named ['ids']", ("payloads", ())),
    ]:
        with pytest.raises(tw.InvalidArgument) as caught:
            tw.window_bytes(2, **(settings | wrong))
        assert str(caught.value).startswith(said)
        assert (caught.value.argument, caught.value.index) == named


def test_payloads_are_named() -> None:
    with pytest.raises(tw.InvalidArgument, match=r"^payloads\['scales'\].elements is 0; it must be from 1 to "):
        tw.window_bytes(2, hidden=8, max_tokens=4, experts=4, top_k=2, payloads={"scales": (0, np.float32)})


def literals() -> dict[str, str]:
    """Every string of the library's C++ code that is not a line of comment, with the code before it."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in (".cc", ".h", ".cu", ".cuh"):
            continue
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith(("//", "#include"))]
        code = "\n".join(lines)
        for match in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', code):
            words = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', match[0]))
            found[words] = code[max(0, match.start() - 40) : match.start()]
    return found


def test_names_are_marked() -> None:
    """Whatever a sentence of C names is a part of its own there, and has a word here."""
    name = re.compile(r"\btw[A-Z]\w*|\b(?:config|input|output|query)(?:\.|->)\w")
    unmarked = {words for words in literals() if name.search(words) and re.search(r"\s", words)}
    assert unmarked == {"one of twDtype_t"}  # there is no dtype that Python lacks


def test_names_are_known() -> None:
    """Every constant, and every function that a sentence names or finds under way, has a word in Python."""
    code = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.[ch]*")))
    constants = set(re.findall(r"TW_CONSTANT\((tw\w+)\)", code))
    assert constants and constants <= sentences.CONSTANTS.keys()
    names = {words for words in literals() if re.fullmatch(r"tw[A-Z]\w*", words)}
    functions = names - sentences.CONSTANTS.keys()  # which the table of layouts has
    assert len(functions) > 20 and functions <= sentences.FUNCTIONS.keys()


def test_the_last_error_stays() -> None:
    """Reading it part by part changes nothing."""
    bad = _header.GroupConfig()
    assert _native.lib.twGroupWindowBytes(byref(bad), 2, None) != 0
    before = _native.lib.twLastError()
    parts = _native._parts(_native.lib.twLastErrorPart)
    assert "".join(part.text for part in parts).encode() == before == _native.lib.twLastError()
