"""DeepSeek's expert-parallel load balancer, written anew from its description (https://github.com/deepseek-ai/EPLB):
what plans are compared with.

Replicas: one more, again and again, of the expert whose replicas carry most. Packing: the heaviest first, to the pack
that is lightest and has room for another. Hierarchical: groups are packed to nodes, replicas made within each node, and
packed to its GPUs.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def _packed(weights: Array, packs: int) -> list[list[int]]:
    """The items of each pack, all of the same number."""
    room = len(weights) // packs
    held: list[list[int]] = [[] for _ in range(packs)]
    carried = [0.0] * packs
    for item in np.argsort(-weights, kind="stable"):
        pack = min((p for p in range(packs) if len(held[p]) < room), key=lambda p: carried[p])
        held[pack].append(int(item))
        carried[pack] += float(weights[item])
    return held


def _replicated(weights: Array, slots: int) -> tuple[Array, Array]:
    """(expert of each slot, replicas of each expert)."""
    counts = np.ones(len(weights), np.int64)
    experts = list(range(len(weights)))
    while len(experts) < slots:
        expert = int(np.argmax(weights / counts))
        counts[expert] += 1
        experts.append(expert)
    return np.array(experts), counts


def greedy(weights: Array, slots: int, groups: int, nodes: int, gpus: int) -> Array:
    """[layers, slots] physical to logical."""
    made = []
    for layer in weights:
        size = len(layer) // groups
        of_nodes = _packed(layer.reshape(groups, size).sum(axis=1), nodes)
        placed: list[int] = []
        for of_node in of_nodes:
            here = np.concatenate([np.arange(g * size, (g + 1) * size) for g in of_node])
            experts, counts = _replicated(layer[here], slots // nodes)
            for held in _packed((layer[here] / counts)[experts], gpus // nodes):
                placed += here[experts[held]].tolist()
        made.append(placed)
    return np.array(made, np.int32)
