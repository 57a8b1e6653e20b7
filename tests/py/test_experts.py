"""The experts' matrix products by offsets, against one product for each expert."""

from __future__ import annotations

from typing import Any

import pytest
from dense import apart

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""
    from tokenway.pytorch import experts

    if experts._grouped_mm is None:
        pytest.skip("this PyTorch has no grouped products")


def leaves(dtype: str, sizes: list[int], beyond: int) -> tuple[Any, ...]:
    """rows, weights, ends and a gradient, NaN where nothing is to be read."""
    import torch

    made = torch.Generator().manual_seed(len(sizes) + sum(sizes))
    used, kind = sum(sizes), getattr(torch, dtype)
    rows, out = (torch.randn(used + beyond, n, generator=made).to(kind) for n in (16, 24))
    rows[used:], out[used:] = torch.nan, torch.nan
    weights = torch.randn(len(sizes), 24, 16, generator=made).to(kind)
    return rows, weights, torch.tensor(sizes).cumsum(0).int(), out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beyond", [0, 5])
@pytest.mark.parametrize("sizes", [[7], [3, 0, 4], [0, 0], [0, 9, 0, 1, 0]], ids=str)
def test_product(torch, monkeypatch, sizes, beyond, dtype) -> None:
    from tokenway import experts

    rows, weights, ends, towards = leaves(dtype, sizes, beyond)
    used = sum(sizes)
    ours = [t.clone().requires_grad_() for t in (rows, weights)]
    theirs = [t.double().requires_grad_() for t in (rows[:used], weights)]
    torch.use_deterministic_algorithms(True)  # memory is NaN until it is written
    try:
        out = experts.product(*ours, ends)
        out.backward(towards)
    finally:
        torch.use_deterministic_algorithms(False)
    parts = [x @ w.T for x, w in zip(theirs[0].split(sizes), theirs[1], strict=True)]
    torch.cat(parts).backward(towards[:used].double())
    limit = 1e-6 if dtype == "float32" else 8e-3
    assert out.shape == (used + beyond, 24) and apart(out[:used].detach(), torch.cat(parts).detach()) < limit
    assert apart(ours[0].grad[:used], theirs[0].grad) < limit
    assert apart(ours[1].grad, theirs[1].grad) < limit  # a NaN would be seen
    for expert, size in enumerate(sizes):
        assert size or not ours[1].grad[expert].any()


def test_an_expert_without_rows_has_no_gradient(torch, monkeypatch) -> None:
    """Though a device leaves its matrix as the memory was."""
    from tokenway.pytorch import experts

    honest = experts._grouped_mm

    def careless(a: Any, b: Any, offs: Any) -> Any:
        made = honest(a, b, offs=offs)
        return (
            made.masked_fill(offs.diff(prepend=offs.new_zeros(1))[:, None, None] == 0, torch.nan)
            if made.ndim == 3
            else made
        )

    monkeypatch.setattr(experts, "_grouped_mm", careless)
    rows, weights, ends, towards = leaves("float32", [3, 0, 4], 2)
    weights.requires_grad_()
    experts.product(rows, weights, ends).backward(towards)
    assert not weights.grad[1].any() and weights.grad[0].any() and not weights.grad.isnan().any()


def test_why_not(torch, monkeypatch) -> None:
    from tokenway.pytorch import experts

    why, cpu, gpu = experts.why_not, torch.device("cpu"), torch.device("cuda", 0)
    assert why(cpu, torch.float32, 2000, 16, 24) is None
    assert "a row has 18 elements; for grouped matrix products it must be a multiple of 4" in why(
        cpu, torch.float32, 2, 16, 18
    )
    for capability, takes in (((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, is_=capability: is_)
        said = why(gpu, torch.bfloat16, 8, 64, 32)
        assert said is None if takes else "cuda:0 has compute capability" in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "the dtype is torch.float32" in why(gpu, torch.float32, 8, 64, 32)
    assert "a row has 12 elements" in why(gpu, torch.bfloat16, 8, 12, 32)
    assert "there are 1025 experts" in why(gpu, torch.bfloat16, 1025, 64, 32)
    monkeypatch.setattr(experts, "_grouped_mm", None)
    assert "has no grouped_mm" in why(cpu, torch.float32, 2, 16, 16)
