"""A mixture-of-experts layer in one process: what the layer that is spread over ranks is compared with."""

from __future__ import annotations

from typing import Any


def experts_of(rows: Any, gate_up: Any, down: Any) -> Any:
    """[n, H] through one SwiGLU expert."""
    import torch

    inside = rows @ gate_up.T
    gate, up = inside.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.T


def moe(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """[T, H] through the experts of ids [T, K] (-1: none), weighted: every expert sees every token."""
    import torch

    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        share = torch.where(ids == expert, weights, torch.zeros_like(weights)).sum(dim=-1, keepdim=True)
        out = out + share * experts_of(x, gate_up[expert], down[expert])
    return out


def route(x: Any, router: Any, top_k: int, normalize: bool = True) -> tuple[Any, Any, Any]:
    """ids and weights [T, K], probabilities [T, E]."""
    probabilities = (x @ router.T).softmax(dim=-1)
    ids = probabilities.detach().argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = probabilities.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights, probabilities


def balance(probabilities: Any, ids: Any) -> Any:
    """The balance loss of one sequence, by counting."""
    import torch

    length, experts = probabilities.shape
    counts = torch.bincount(ids.reshape(-1), minlength=experts).to(probabilities.dtype)
    return experts * (counts / (length * ids.shape[1]) * probabilities.mean(dim=0)).sum()


def sent(tensor: Any) -> Any:
    """For the way from a rank to the test: tensors of PyTorch do not pass. bfloat16 becomes float32."""
    wide = tensor.detach().float() if tensor.is_floating_point() else tensor
    return wide.cpu().numpy()


def apart(got: Any, want: Any) -> float:
    """The largest difference, as a part of the largest value."""
    import torch

    got, want = torch.as_tensor(got), torch.as_tensor(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    if want.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).abs().max()
    scale = want.double().abs().max()
    return float(difference / scale) if scale > 0 else float(difference)
