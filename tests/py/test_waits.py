"""Every wait ends, in every phase and on every backend, by the timeout that was given or by an error that names who is
gone: the table of waits.py."""

from __future__ import annotations

import pytest
import waits

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def store_port(torch) -> int:
    """A store that no rank holds, as torchrun's."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


@pytest.mark.parametrize("how", waits.HOWS)
def test_shared_memory(how: str) -> None:
    waits.play_all(waits.rows("shm", how))


@pytest.mark.parametrize("how", waits.HOWS)
def test_under_torch_distributed(how: str, store_port: int) -> None:
    waits.play_all(waits.rows("auto", how), store_port)


@pytest.mark.parametrize("how", waits.HOWS)
def test_portable(how: str, store_port: int) -> None:
    waits.play_all(waits.rows("torch", how), store_port)
