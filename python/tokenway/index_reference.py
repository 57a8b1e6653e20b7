"""The oracle of index lists: by which rows of a received view products gather, expert after expert, in blocks."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def index_capacity(rows: int, top_k: int, experts: int, block: int) -> int:
    """Places of the lists of a view of so many rows, whatever its routing is. A row stands under at most
    min(K, L) experts. The first choice of each of X experts begins a block, and each further `block` choices fill
    one: X + (choices - X) // block blocks."""
    choices = rows * min(top_k, experts)
    begun = min(experts, choices)
    return (begun + (choices - begun) // block) * block


def index_lists(slots: Array, experts: int, block: int) -> tuple[Array, Array, Array]:
    """(sorted_rows [C], block_experts [C / block], num_sorted [1]), int32, of a received view.

    slots: [..., K], the local expert of each choice of each row of the view, -1 for none. A place of sorted_rows
    holds row * K + k, rows counted through the view. Experts ascend; each one's choices do, and are filled up to whole
    blocks by M * K, which is none. Beyond num_sorted places there is nothing: M * K, and the expert -1.
    """
    chosen = slots.reshape(-1, slots.shape[-1])
    capacity = index_capacity(len(chosen), chosen.shape[1], experts, block)
    sorted_rows = np.full(capacity, chosen.size, np.int32)
    block_experts = np.full(capacity // block, -1, np.int32)
    place = 0
    for expert in range(experts):
        choices = np.flatnonzero(chosen.reshape(-1) == expert)
        sorted_rows[place : place + len(choices)] = choices
        blocks = -(-len(choices) // block)
        block_experts[place // block : place // block + blocks] = expert
        place += blocks * block
    return sorted_rows, block_experts, np.array([place], np.int32)
