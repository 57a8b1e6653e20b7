"""The harness is that of the tests of behaviour."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "py"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "TOKENWAY_TEST_APART" in os.environ:
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="tests/netns/run_all.py makes the namespaces that this needs"))
