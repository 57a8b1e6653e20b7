"""What experts compute, for rows that lie by expert and whose number only the device knows. Needs PyTorch.

    ends = routed.offsets[1:]  # of a dispatch in the layout grouped: where each expert's rows end
    inside = experts.swiglu(experts.product(routed.tokens, gate_up, ends), routed.weights, ends[-1:])
    out = autograd.combine(routed, experts.product(inside, down, ends))

PyTorch's grouped product reads where groups end from device memory, so nothing waits, and a graph can capture it. Rows
beyond the last group are neither read nor summed over, and an expert without rows has gradients of 0.
"""

from tokenway.pytorch.experts import product, swiglu, why_not

__all__ = ["product", "swiglu", "why_not"]
