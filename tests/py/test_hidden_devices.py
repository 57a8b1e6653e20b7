"""A process that sees its own device alone (CUDA_VISIBLE_DEVICES) has the window and the packets of one that sees all:
how devices are joined is told by NVML, else by the test of packets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hidden import RANKS, bits, on_workers

from tokenway import _header, _native

pytestmark = pytest.mark.heavy  # processes that import PyTorch, for each test

OTHER, TESTED, NVML, VISIBLE = (_header.LINKS[name] for name in ("other", "tested", "nvml", "visible"))


@pytest.fixture(scope="module")
def emulated(backend: str) -> str:
    """The folder of an NVML for emulated devices."""
    if backend != "emulated":
        pytest.skip("the emulator has an NVML that says what a test wants; tests/gpu has the real one")
    return str(Path(_native.lib._name).parent / "nvml")


@pytest.fixture(scope="module")
def seen(emulated: str) -> list[dict[str, Any]]:
    """Ranks whose processes see all devices."""
    return on_workers("emulated", RANKS, {})


def ranks(folder: str, wiring: str | None) -> list[dict[str, Any]]:
    """Of processes that see one device each; wiring: what NVML says, None: there is none."""
    return on_workers(
        "emulated-alone", RANKS, {} if wiring is None else {"LD_LIBRARY_PATH": folder, "TOKENWAY_EMULATOR_NVML": wiring}
    )


@pytest.mark.parametrize(
    ("wiring", "links", "why"),
    [
        ("nvlink", NVML, "NVML tells that NVLink joins also the devices which this process does not see"),
        (None, TESTED, "a test has decided about packets"),
        ("own", TESTED, "a test has decided about packets"),
    ],
)
def test_as_if_all_were_visible(emulated, seen, wiring, links, why) -> None:
    hidden = ranks(emulated, wiring)
    for mine, theirs in zip(hidden, seen, strict=True):
        assert theirs["links"] == VISIBLE and theirs["why"] == "it was asked for"
        assert mine["links"] == links and why in mine["why"], mine["why"]
        assert mine["packets"] == theirs["packets"] > 0
        assert mine["window"] == theirs["window"]
        assert [bits(one) for one in mine["got"]] == [bits(one) for one in theirs["got"]]


@pytest.mark.parametrize("wiring", ["pcie", "bare"])
def test_devices_that_nvlink_does_not_join(emulated, wiring) -> None:
    for mine in ranks(emulated, wiring):
        assert (mine["links"], mine["packets"]) == (OTHER, 0)
        assert "NVLink does not join all devices" in mine["why"]
