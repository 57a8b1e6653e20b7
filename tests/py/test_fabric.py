"""Fabric handles between processes of a host: windows go by them where the platform grants them, by descriptors where
it does not, and results are the same bits. tests/netns has ranks of two hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import one, verify
from harness import HANGS, PATIENT, Workers, settle
from hidden import RANKS, ROUNDS, SETUP, judge, look
from player import Player

import tokenway as tw
from tokenway import _header, _native, info

DESCRIPTORS, REFUSED, FABRIC = (_header.HANDLES[name] for name in ("descriptors", "refused", "fabric"))
SHARED, INSTEAD = "windows are shared by fabric handles", "fabric handles are refused here (CUresult 800), so windows"
VARIABLE = "TOKENWAY_EMULATOR_FABRIC"
CLUSTER = "c1" * 16
heavy = pytest.mark.heavy  # processes that import PyTorch


@pytest.fixture(autouse=True)
def emulated(backend: str) -> None:
    if backend != "emulated":
        pytest.skip("the emulator's platform grants what a test wants")


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    """run(function, ...): on a comm of two processes."""
    workers = Workers(RANKS, {"LD_LIBRARY_PATH": str(Path(_native.lib._name).parent / "nvml")})

    def run(function: Any, *args: Any) -> list[Any]:
        key = ("fabric", time.monotonic_ns(), "emulated", f"fabric-{os.getpid()}-{time.monotonic_ns()}")
        workers.send(range(RANKS), function, *args, key=key)
        return settle(workers.collect(range(RANKS), HANGS))

    yield run
    workers.close()


def grant(fabric: str | None) -> None:
    """What the platform says of fabric handles to this process from now on."""
    if fabric is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = fabric


def granted(env: Any, *fabric: str | None) -> dict[str, Any]:
    """`look`, by the platform of each rank."""
    grant(fabric[env.rank])
    return look(env)


@heavy
@pytest.mark.parametrize(
    ("fabric", "handles", "refusal", "why"),
    [
        (("granted", "granted"), FABRIC, 0, SHARED),
        (("refused", "refused"), REFUSED, 800, INSTEAD),
        (("unexported", "unexported"), REFUSED, 800, INSTEAD),
        (("foreign", "foreign"), REFUSED, 800, INSTEAD),
        ((None, None), DESCRIPTORS, 0, None),
    ],
)
def test_windows_by_what_is_granted(run, fabric, handles, refusal, why) -> None:
    ranks = run(granted, *fabric)
    judge(ranks)
    for rank in ranks:
        assert (rank["handles"], rank["refusal"]) == (handles, refusal)
        assert rank["why"] == "it was asked for" if why is None else why in rank["why"]


@heavy
@pytest.mark.parametrize(
    ("fabric", "handles"),
    [
        (("granted", "refused"), (REFUSED, FABRIC)),  # whose handle is refused has the other's
        (("foreign", "granted"), (REFUSED, FABRIC)),
        ((None, "granted"), (FABRIC, DESCRIPTORS)),
    ],
)
def test_ranks_that_are_granted_different_things(run, fabric, handles) -> None:
    ranks = run(granted, *fabric)
    judge(ranks)
    assert tuple(rank["handles"] for rank in ranks) == handles


def grow(env: Any, *fabric: str | None) -> list[Any]:
    """A round, and one in the group when it has grown; what is granted then, if anything, is the second of each."""
    grant(fabric[0])
    large = replace(SETUP, max_tokens=3 * SETUP.max_tokens)
    with tw.Group(env.comm, timeout=PATIENT, **SETUP.settings()) as group:
        got = [Player(env, group, one(SETUP, ROUNDS[0])).flights()]
        grant(fabric[1])
        group.reserve(max_tokens=large.max_tokens)
        got.append(Player(env, group, one(large, replace(ROUNDS[0], tokens=(30, 36)))).flights())
    return [each[0][0] for each in got]


@heavy
@pytest.mark.parametrize("fabric", [("granted", "granted"), ("granted", "refused"), ("refused", "granted")])
def test_growth(run, fabric) -> None:
    """Also where the platform has changed its mind since."""
    got = run(grow, *fabric)
    verify(SETUP, ROUNDS[0], [rank[0] for rank in got])
    large = replace(SETUP, max_tokens=3 * SETUP.max_tokens)
    verify(large, replace(ROUNDS[0], tokens=(30, 36)), [rank[1] for rank in got])


@pytest.mark.parametrize(
    ("fabric", "handles", "refusal", "told"),
    [
        ("granted", "fabric", 0, "fabric handles granted; "),
        ("refused", "refused", 800, "fabric handles refused (CUresult 800; 800: this process has no IMEX channel); "),
        ("unexported", "refused", 800, "fabric handles refused (CUresult 800;"),
        (None, "descriptors", 0, "fabric handles not known to the device or its driver; "),
    ],
)
def test_info(monkeypatch, fabric, handles, refusal, told) -> None:
    monkeypatch.setenv(VARIABLE, fabric) if fabric else monkeypatch.delenv(VARIABLE, raising=False)
    devices = info.fabric()
    assert [device["index"] for device in devices] == list(range(16))
    assert {(device["handles"], device["refusal"]) for device in devices} == {(handles, refusal)}
    (line,) = info._fabric_lines(devices)
    assert line[0].startswith("cuda:0, cuda:1,") and line[1].startswith(told)
    assert f"\nbetween hosts\n  {line[0]}" in info.text(info.collect())


def domains(env: Any) -> Any:
    found = []
    for clique in (None, "5"):
        if clique is not None:
            os.environ["TOKENWAY_EMULATOR_CLIQUE"] = clique
        device = info.fabric()[0]
        text = info._fabric_text(device).rsplit("; ", 1)[1]
        found.append((device["domain"], device["cluster"], device["clique"], text))
    del os.environ["TOKENWAY_EMULATOR_CLIQUE"]
    return found


@heavy
def test_domains(run) -> None:
    """By NVML: a cluster of zeros ends with the host."""
    expected = [
        ("none", None, None, "no NVLink domain beyond this host"),
        ("named", CLUSTER, 5, f"NVLink domain: cluster {CLUSTER}, clique 5"),
    ]
    assert run(domains) == [expected] * RANKS


def test_what_is_asked_must_be_there() -> None:
    told = _header.Fabric()
    assert _native.lib.twDeviceFabric(16, told) != 0
    assert b"device is 16; it must be from 0 to 15" in _native.lib.twLastError()
    for given in ({}, {"address": "x", "allgather": lambda mine: [mine]}):
        with pytest.raises(tw.InvalidArgument, match="address or allgather must be given, and one of them alone"):
            tw.Comm.cuda(0, 1, device=0, **given)
