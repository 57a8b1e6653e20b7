"""A mixture-of-experts layer as a PyTorch module, its experts spread over ranks. Needs PyTorch.

    group = tokenway.autograd.make_group(comm, experts=16, top_k=2, hidden=256, max_tokens=1024, dtype="float32")
    layer = tokenway.nn.ExpertParallelMoE(group, inner=512)
    out, balance = layer(x)  # x: [batch, sequence, 256]
    (loss(out) + 0.01 * balance).backward()

docs/TRAINING.md shows it in a model, with an optimiser and the gradients that ranks must add up.
"""

from tokenway.pytorch.nn import ExpertParallelMoE, balance_loss, expert_parameters, shared_parameters

__all__ = ["ExpertParallelMoE", "balance_loss", "expert_parameters", "shared_parameters"]
