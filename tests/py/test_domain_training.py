"""Gradients where sums are by domain: that of what a dispatch has sent is a combine, so its bits are the oracle's, fold
by fold, as the layer's output is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import same
from dense import sent
from harness import PATIENT

from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

# Ranks are processes: PyTorch has one thread for the backward passes of a device.
pytestmark = [pytest.mark.torch, pytest.mark.processes]

RANKS, EXPERTS, TOP_K, HIDDEN, BOUND = 5, 11, 6, 24, 9
TOKENS = (9, 0, 4, 9, 7)
LAYOUTS = {"rank_major": "low_latency", "flat": "high_throughput", "grouped": "high_throughput"}


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def made(rank: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids [T, K], tokens [T, H]) of one rank."""
    rng = np.random.default_rng([rank, 8])
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS[rank])], np.int64).reshape(-1, TOP_K)
    ids[rng.random(ids.shape) < 0.2] = -1
    return ids, rng.standard_normal((len(ids), HIDDEN)).astype(np.float32).astype(numpy_dtype(dtype))


def back(rank: int, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Gradients of what a rank received, or what its experts return: other numbers for each rank."""
    rng = np.random.default_rng([rank, seed])
    return rng.standard_normal(shape).astype(np.float32).astype(numpy_dtype(dtype))


def trained(env: Any, layout: str, dtype: str, domain: int) -> Any:
    """A dispatch, with gradients of all that it brought, and a combine of other rows: (gradient of tokens, sums, the
    shape of what came)."""
    import torch

    from tokenway import autograd

    ids, tokens = made(env.rank, dtype)
    settings = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": BOUND, "timeout": PATIENT}
    with autograd.make_group(env.comm, dtype=dtype, mode=LAYOUTS[layout], domain=domain, **settings) as group:
        device = "cpu" if group.device is None else group.native.place.device

        def tensor(array: np.ndarray) -> Any:
            return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, dtype)).to(device)

        x = tensor(tokens).requires_grad_()
        weights = torch.ones(ids.shape, device=device)
        routed = autograd.dispatch(group, x, torch.from_numpy(ids).to(device), weights, layout=layout)
        shape = tuple(routed.tokens.shape)
        rows = tensor(back(env.rank, shape, dtype, 2)).requires_grad_()
        out = autograd.combine(routed, rows)
        towards = tensor(back(env.rank, shape, dtype, 1))
        routed.tokens.backward(towards)
        return sent(x.grad), sent(out), shape


@pytest.mark.parametrize("domain", [0, 2, 3])
@pytest.mark.parametrize(
    ("layout", "dtype"), [("rank_major", "bfloat16"), ("flat", "float32"), ("grouped", "bfloat16")]
)
def test_gradients(processes, layout, dtype, domain) -> None:
    world = processes(RANKS)
    got = world.run(trained, layout, dtype, domain)
    x = ref.Exchange([made(rank, dtype)[0] for rank in range(RANKS)], None, EXPERTS, BOUND, domain=domain)
    for which, seed in ((0, 1), (1, 2)):
        rows = [back(rank, got[rank][2], dtype, seed) for rank in range(RANKS)]
        wanted = ref.combine(x, rows, layout=layout)
        other = ref.combine(ref.Exchange(x.ids, None, EXPERTS, BOUND), rows, layout=layout)
        for rank in range(RANKS):
            same(f"result {which} of rank {rank}", got[rank][which].astype(numpy_dtype(dtype)), wanted[rank])
        if domain != 0:
            assert any((a != b).any() for a, b in zip(wanted, other, strict=True)), "the case shows nothing of domains"
