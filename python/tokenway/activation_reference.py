"""The oracle of what experts do between their matrices, in NumPy: SwiGLU and its gradients, bit for bit.

Bits are those of `tokenway.reference`: float32, each operation rounded to nearest even, none fused.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


@np.errstate(all="ignore")
def exponential(x: Array) -> Array:
    """exp of float32 as the library defines it, so that it has the same bits everywhere."""
    f = np.float32
    x = np.where(x < -104, f(-104), x)
    x = np.where(x > 104, f(104), x)
    shifted = x * f(1.44269504) + f(12582912)
    n = shifted.view(np.int32) - f(12582912).view(np.int32)
    whole = shifted - f(12582912)
    r = (x - whole * f(0.693359375)) + whole * f(2.12194440e-4)
    y = f(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + f(c)
    y = (y * (r * r) + r) + f(1)
    low, high = ((part + 127 << 23).astype(np.int32).view(np.float32) for part in (n >> 1, n - (n >> 1)))
    return (y * low) * high


@np.errstate(all="ignore")
def swiglu(gate_up: Array, weights: Array | None = None) -> Array:
    """gate / (1 + exp(-gate)) * up [* weight]: [M, 2 * I] -> float32 [M, I], not yet rounded to its type."""
    gate, up = np.split(gate_up.astype(np.float32), 2, axis=1)
    out = gate / (np.float32(1) + exponential(-gate)) * up
    return out if weights is None else out * weights[:, None]


@np.errstate(all="ignore")
def swiglu_backward(gate_up: Array, gradient: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """From the gradient of the result [M, I]: those of gate_up, of its dtype, and of the weights, float32 [M]."""
    (gate, up), out, one = np.split(gate_up.astype(np.float32), 2, axis=1), gradient.astype(np.float32), np.float32(1)
    s = one / (one + exponential(-gate))
    a = gate * s
    t = out if weights is None else out * weights[:, None]
    made = np.concatenate([t * up * (s + a * (one - s)), t * a], axis=1).astype(gate_up.dtype)
    terms = out * (a * up)
    rows, inner = terms.shape
    chunks = np.zeros((rows, -(-inner // 256) * 256), np.float32)
    chunks[:, :inner] = terms
    sums = np.zeros((rows, 32, 8), np.float32)
    for begin in range(0, chunks.shape[1], 256):
        sums = sums + chunks[:, begin : begin + 256].reshape(rows, 32, 8)
    for by in (4, 2, 1):
        sums = sums[..., :by] + sums[..., by : 2 * by]
    for by in (16, 8, 4, 2, 1):
        sums = sums[:, :by] + sums[:, by : 2 * by]
    return made, sums.reshape(rows)
