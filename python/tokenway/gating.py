"""Gating: from router logits to expert ids and weights, as public MoE models do it, in NumPy.

Every function takes logits [T, E] and returns (ids int32 [T, K], weights float32 [T, K]), per token
in descending order of the score that selected; equal scores go to the lower expert id. Scores are
float32, as in the models' own code.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def softmax_topk(logits: Array, k: int, renormalize: bool = True, topk_first: bool = False) -> tuple[Array, Array]:
    """Softmax gating: logits [T, E] -> (ids int32 [T, k], weights float32 [T, k]).

    topk_first=False: softmax over all experts, the k most probable, divided by their sum if
    `renormalize`. Qwen3-MoE (`norm_topk_prob` true in the released config.json) and Mixtral, as in
    Qwen3MoeSparseMoeBlock and MixtralSparseMoeBlock of huggingface/transformers.
    https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json

    topk_first=True: the k largest logits, softmax over those (`renormalize` must stay True: they
    sum to 1 by construction). gpt-oss: gpt_oss/torch/model.py, class MLPBlock, in
    https://github.com/openai/gpt-oss. The Mixtral paper writes its gate this way (section 2.1 of
    https://arxiv.org/abs/2401.04088); in exact arithmetic both orders are the same.
    """
    logits = _checked(logits, k)
    if topk_first:
        if not renormalize:
            raise ValueError("renormalize: False; must be True with topk_first")
        ids = _top(logits, k)
        return ids, _softmax(np.take_along_axis(logits, ids, axis=1))
    probability = _softmax(logits)
    ids = _top(probability, k)
    weights = np.take_along_axis(probability, ids, axis=1)
    return ids, weights / weights.sum(axis=1, keepdims=True) if renormalize else weights


def sigmoid_group_topk(
    logits: Array,
    k: int,
    groups: int = 1,
    topk_groups: int = 1,
    bias: Array | None = None,
    scale: float = 1.0,
    renormalize: bool = True,
) -> tuple[Array, Array]:
    """Sigmoid gating limited to groups: logits [T, E] -> (ids int32 [T, k], weights float32).

    Scores are sigmoid(logits). `bias` (float32 [E], the learned load-balancing correction, or None)
    is added for selection only. Groups are `groups` equal runs of experts; a group's score is the
    sum of its two best biased scores; the best `topk_groups` groups remain, and the k best biased
    scores in them are selected. Weights are the scores without bias, divided by their sum (plus
    1e-20, as the models do) if `renormalize`, times `scale`.

    DeepSeek-V3 and R1: 256 experts, k=8, groups=8, topk_groups=4, scale=2.5 (`n_group`,
    `topk_group`, `routed_scaling_factor` of the config.json; section 2.1.2 of
    https://arxiv.org/abs/2412.19437; DeepseekV3MoE of huggingface/transformers).
    https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
    Kimi K2: 384 experts, k=8, groups=1, topk_groups=1, scale=2.827.
    https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json

    Groups that were not kept are masked with minus infinity, as in DeepSeek's inference code
    (inference/model.py, class Gate); transformers masks with 0, which differs only where a kept
    group has negative biased scores.
    """
    logits = _checked(logits, k)
    tokens, experts = logits.shape
    if groups < 1 or experts % groups:
        raise ValueError(f"groups: {groups}; must divide the number of experts, {experts}")
    size = experts // groups
    if not -(-k // size) <= topk_groups <= groups:
        raise ValueError(f"topk_groups: {topk_groups}; allowed {-(-k // size)}..{groups}")
    if bias is not None and np.shape(bias) != (experts,):
        raise ValueError(f"bias: shape {np.shape(bias)}; must be ({experts},)")

    with np.errstate(over="ignore"):  # exp(-logit) = inf gives the right score, 0
        scores = np.float32(1) / (np.float32(1) + np.exp(-logits))
    biased = scores if bias is None else scores + np.asarray(bias, np.float32)

    grouped = biased.reshape(tokens, groups, size)
    best_two = -np.sort(-grouped, axis=2)[:, :, :2]
    kept = _top(best_two.sum(axis=2), topk_groups)
    allowed = np.zeros((tokens, groups), bool)
    np.put_along_axis(allowed, kept, True, axis=1)
    allowed = np.repeat(allowed, size, axis=1)

    ids = _top(np.where(allowed, biased, np.float32(-np.inf)), k)
    weights = np.take_along_axis(scores, ids, axis=1)
    if renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return ids, weights * np.float32(scale)


def _checked(logits: Array, k: int) -> Array:
    """Logits as float32 [T, E]; ValueError unless they are 2-D and 1 <= k <= E."""
    logits = np.asarray(logits)
    if logits.ndim != 2:
        raise ValueError(f"logits: shape {logits.shape}; must be [T, E]")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: {k}; allowed 1..{logits.shape[1]} (experts)")
    return logits.astype(np.float32)


def _top(scores: Array, k: int) -> Array:
    """The k largest per row, descending, ties to the lower index: int32 [T, k]."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)


def _softmax(logits: Array) -> Array:
    """Softmax over the last axis, float32."""
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)
