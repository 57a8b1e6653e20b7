"""The table of waits (tests/py/waits.py) between two GPUs: over NVLink, and over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
import waits

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    """A store that no rank holds, as torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


@pytest.mark.parametrize("how", waits.HOWS)
@pytest.mark.parametrize("way", ["nvlink", "nccl"])
def test_waits(way: str, how: str, store_port: int) -> None:
    """A row at a time: each rank has a device's context of its own, which takes seconds."""
    for row in waits.rows(way, how, nranks=2):
        waits.play_all([row], store_port)
