"""The harness is that of the tests of behaviour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "py"))

import wired
from wire import Manner
from world import World

from tokenway.bench import namespaces

STRICT = os.environ.get("TW_STRICT") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if namespaces.entered():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="tests/netns/run_all.py makes the namespaces that this needs"))


@pytest.fixture
def network() -> Iterator[Any]:
    """network(sizes): hosts of so many ranks on a bridge; with a manner, on a wire that behaves like that. whole: as
    Network has it."""
    made: list[namespaces.Network] = []

    def make(sizes: tuple[int, ...], manner: Manner | None = None, whole: bool = True) -> namespaces.Network:
        if manner is None:
            made.append(namespaces.Network(sizes, whole))
            return made[-1]
        if reason := wired.missing():
            (pytest.fail if STRICT else pytest.skip)(f"a wire between hosts: {reason}")
        made.append(wired.Wired(sizes, manner))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def world(network: Any) -> Iterator[Any]:
    """world(sizes, backend): ranks on the hosts of a network of their own."""
    made: list[World] = []

    def make(
        sizes: tuple[int, ...], backend: str, manner: Manner | None = None, whole: bool = True, **keywords: Any
    ) -> World:
        made.append(World(network(sizes, manner, whole), backend, **keywords))
        return made[-1]

    yield make
    for each in made:
        each.close()
