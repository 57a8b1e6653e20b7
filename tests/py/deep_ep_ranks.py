"""What tests of the compatibility with DeepEP have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import frameworks
import numpy as np
import pytest
from frameworks import steps
from harness import AT_ONCE, PATIENT, said


def begin(store: str, ranks: int, blocking: bool = True) -> tuple[int, Any]:
    """(rank, device) of a process in a process group, as `frameworks.begin`, whose peers are patient."""
    from tokenway.integrations import groups

    rank, device = frameworks.begin(store, ranks, blocking)
    groups.of(None, device=device, timeout=PATIENT)
    return rank, device


def end() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it returns, or (class, sentence) of what it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


def counted(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What it finds, and how many steps of Tokenway's it made."""
    before = steps()
    found = function(*args)
    return found | {"steps": steps() - before}


def since(buffer: Any, asynchronous: bool) -> dict[str, Any]:
    """What an asynchronous call is to wait for: all that the current stream holds by now."""
    return {"previous_event": buffer.capture()} if asynchronous else {}


def judge_wrong_calls(ran: list[dict[str, Any]], sentences: dict[str, str], total: int) -> None:
    """Asserts of calls that rank 1 alone made wrongly ("wrong" of each rank) that it was told the sentence, and its
    peer at once that it refused; and of a right call after each, that it brought `total`."""
    for rank, found in enumerate(ran):
        if not found["wrong"]:
            pytest.skip("on devices peers learn late")
        for name, told in found["wrong"].items():
            if name.endswith("then"):
                assert told == total, (name, told)
                continue
            said(told[0], *(("InvalidArgument", sentences[name]) if rank == 1 else ("PeerRefused", "rank 1")))
            assert told[1] < AT_ONCE


def array(tensor: Any) -> np.ndarray:
    """A copy, in float32 where NumPy lacks the dtype."""
    import torch

    known = tensor.dtype in (torch.int32, torch.int64, torch.bool, torch.float32)
    return (tensor if known else tensor.float()).detach().cpu().numpy().copy()


def routed(count: int, experts: int, top_k: int, seed: Any, none: bool = True) -> np.ndarray:
    """[T, K] int64: other experts for each token, in any order, some -1; of every fifth token all."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((count, experts)), axis=1)[:, :top_k].astype(np.int64)
    if none:
        ids[rng.random(ids.shape) < 0.2] = -1
        ids[4::5] = -1
    return ids


def received(ids: np.ndarray, experts: int, rank: int, ranks: int) -> list[int]:
    """The tokens of a source that a rank receives, in their order."""
    here = (ids >= 0) & (ids // (experts // ranks) == rank)
    return [int(t) for t in np.flatnonzero(here.any(axis=1))]
