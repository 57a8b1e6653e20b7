"""As tests/py/test_hidden_devices.py, between real devices: processes that see one GPU each, and such that see all."""

from __future__ import annotations

from typing import Any

import pytest
from hidden import RANKS, bits, on_workers

from tokenway import _header

pytestmark = pytest.mark.usefixtures("two_devices")


def known(name: str) -> int:
    return _header.LINKS[name]


def test_as_if_all_were_visible() -> None:
    seen: list[dict[str, Any]] = on_workers("nvlink", RANKS, {})
    hidden = on_workers("nvlink-alone", RANKS, {})
    for mine, theirs in zip(hidden, seen, strict=True):
        joined = theirs["links"] == known("visible")
        assert mine["links"] in ((known("nvml"), known("tested")) if joined else (known("other"), known("tested")))
        if joined:
            assert mine["packets"] == theirs["packets"]
        assert mine["window"] == theirs["window"]
        assert [bits(one) for one in mine["got"]] == [bits(one) for one in theirs["got"]]
