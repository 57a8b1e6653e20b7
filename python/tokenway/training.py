"""Training experts that have replicas, and that move. Needs PyTorch.

    tensors = balance.trained({"gate_up": ((2 * I, H), "float32"), "down": ((H, I), "float32")}, ("exp_avg", ...))
    weights = balance.Weights(group, tensors)
    experts = training.Experts(weights)
    layers = [nn.ExpertParallelMoE(group, I, experts=experts, layer=n) for n in range(group.layers)]
    experts.keep(optimiser)
    with balance.TrainingBalancer(group, weights) as balancer:
        ...
        loss.backward()
        experts.sum_gradients()
        optimiser.step()
        balancer.step()

docs/BALANCING.md has it whole, under «Training».
"""

from tokenway.pytorch.training import Experts

__all__ = ["Experts"]
