"""Plans as the command tells them. What a plan must be is checked in tests/cc/plan_test.cc."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tokenway as tw
from tokenway import cli, plan

RECORDS = Path(__file__).parents[2] / "bench" / "results"


def test_a_step_of_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--plan", "tokens=128", "ranks=4"]) == 0
    said = capsys.readouterr().out
    assert "LL128 packets" in said and "dispatch" in said and "combine" in said
    assert cli.main(["info", "--plan", "tokens=128", "ranks=4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dispatch: kernel"] == told["combine: kernel"] == "LL128 packets"
    assert told["dispatch: rows as LL128 packets"] == "128"


def test_another_call_has_another_plan() -> None:
    bulk = plan.describe(ranks=2, tokens=4096, experts=256, top_k=8, hidden=7168)
    assert bulk["dispatch: kernel"] == "usual"
    few = plan.describe(ranks=2, tokens=4096, experts=256, top_k=8, hidden=7168, sm_limit=24)
    assert few["dispatch: kernel"] == "low-SM" and int(few["dispatch: blocks that send"]) < 24
    odd = plan.describe(ranks=2, tokens=128, experts=256, top_k=7, hidden=7168)
    assert odd["dispatch: kernel"] == "generic"
    exact = plan.describe(
        ranks=2, tokens=4096, experts=256, top_k=8, hidden=7168, mode="high_throughput", max_recv_tokens=8192
    )
    assert int(exact["dispatch of a known routing: blocks that send"]) > int(exact["dispatch: blocks that send"])
    both = plan.describe(ranks=2, tokens=4096, experts=256, top_k=8, hidden=7168, mode="auto", low_latency_tokens=256)
    few = plan.describe(ranks=2, tokens=256, experts=256, top_k=8, hidden=7168)
    of_low = {key.replace(" of low latency", ""): value for key, value in both.items() if " of low latency: " in key}
    assert of_low == {key: value for key, value in few.items() if ": " in key}
    assert all(both[key] == value for key, value in exact.items()), "high throughput is as in a group of its own"
    assert (both["low latency up to"], both["its packet bound"]) == ("256", "256")
    part = plan.describe(ranks=2, tokens=100, max_tokens=4096, experts=256, top_k=8, hidden=7168)
    assert part["dispatch: rows as LL128 packets"] == "100"


def test_what_a_plan_names_as_its_source_is_there() -> None:
    told = plan.describe(ranks=2, tokens=1, experts=2, top_k=1, hidden=8)
    names = re.split(r", ", told["measured in"])
    assert names and all((RECORDS / name).is_file() for name in names)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["tokens"], "--plan has 'tokens'; it must be NAME=VALUE"),
        (["speed=3"], "--plan has 'speed=3'; it must be NAME=VALUE with one of combine_dtype, "),
        (["tokens=many"], "--plan has 'tokens=many'; tokens must be an integer"),
        (["tokens=9", "max_tokens=8"], "tokens is 9; it must be from 0 to max_tokens, 8"),
        (["sms=-1"], "sms is -1; it must be from 1 to 1024"),
        (["ranks=0"], "nranks is 0"),
    ],
)
def test_what_cannot_be_planned(words: list[str], text: str) -> None:
    with pytest.raises(tw.InvalidArgument) as caught:
        plan.from_words(words)
    assert text in str(caught.value)
