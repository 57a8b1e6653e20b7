"""vLLM's part of `tokenway bench --frameworks exchange`. `make test-frameworks` has the package."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import need_version, packages_apart
from test_bench_frameworks import run, settings_of, whole

from tokenway.bench import report

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SETTINGS, SMALL = settings_of("exchange", tokens=(3, 300)), settings_of("exchange", tokens=(6,))
# name of the change: what is told of it
WRONG = {
    "vllm_rows": "vLLM standard, weighed: a row is apart by",
    "vllm_own": "vLLM all-gather, reduce-scatter, weighed: a row is apart by",
}


@pytest.fixture(scope="module")
def ran(torch: Any) -> dict[str, Any]:
    """What each job has found."""
    with packages_apart():
        need_version("vllm", "0.33.0")
        return run({"exchange": (SETTINGS, "")} | {name: (SMALL, name) for name in WRONG})


def test_vllm_beside_its_own_way(ran: dict[str, Any]) -> None:
    """In slots and as many as come: verified, timed, told."""
    found = whole(SETTINGS, ran["exchange"])
    few, many = found["frameworks"]["exchange"]["rows"]
    for row in (few, many):
        assert row["rivals"]["vLLM standard"] == ["vLLM all-gather, reduce-scatter"]
        assert row["steps"]["vLLM standard"] == 2 and "vLLM standard" in row["host_added_us"]
        assert row["us"]["vLLM all-gather, reduce-scatter"]["eager"]["median"] > 0
    assert not few["waits"]["vLLM standard"] and many["waits"]["vLLM standard"]
    assert "vLLM's own classes, whose communicator is PyTorch's" in report.markdown(found)


@pytest.mark.parametrize("change", WRONG)
def test_what_is_wrong_is_found(change: str, ran: dict[str, Any]) -> None:
    """A wrong row, and a rank that is left out."""
    assert WRONG[change] in ran[change]
