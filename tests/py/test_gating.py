"""Gating against the formulas written out for one token at a time, in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenway.bench.profiles import PROFILES
from tokenway.gating import sigmoid_group_topk, softmax_topk


def best(scores: list[float], k: int) -> list[int]:
    """The k best indices, descending, ties to the lower index."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def softmax(x: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in x)
    return [math.exp(v) / total for v in x]


def deepseek(logits, k, groups, topk_groups, bias, scale, renormalize) -> tuple[list, list]:
    scores = [1 / (1 + math.exp(-v)) for v in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    group = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = set(best(group, topk_groups))
    ids = best([b if e // size in kept else -math.inf for e, b in enumerate(biased)], k)
    weights = [scores[e] for e in ids]
    if renormalize:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * scale for w in weights]


def logits_of(tokens: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, experts)).astype(np.float32) * 2


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_then_topk(renormalize) -> None:
    logits = logits_of(50, 128)
    ids, weights = softmax_topk(logits, 8, renormalize)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    for t, row in enumerate(logits.astype(float).tolist()):
        p = softmax(row)
        assert ids[t].tolist() == best(p, 8)
        want = np.array([p[e] for e in ids[t]])
        np.testing.assert_allclose(weights[t], want / want.sum() if renormalize else want, 1e-5)


def test_topk_then_softmax() -> None:
    logits = logits_of(50, 128, 1)
    ids, weights = softmax_topk(logits, 4, topk_first=True)
    for t, row in enumerate(logits.astype(float).tolist()):
        assert ids[t].tolist() == best(row, 4)
        np.testing.assert_allclose(weights[t], softmax([row[e] for e in ids[t]]), 1e-5)
    other = softmax_topk(logits, 4)
    assert (other[0] == ids).all()
    np.testing.assert_allclose(other[1], weights, 1e-5)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "topk_groups", "scale"),
    [(256, 8, 8, 4, 2.5), (384, 8, 1, 1, 2.827), (6, 3, 3, 3, 1.0), (4, 2, 4, 2, 1.0)],
)
def test_sigmoid_groups(experts, k, groups, topk_groups, scale, renormalize) -> None:
    logits = logits_of(50, experts, 2)
    bias = np.random.default_rng(3).standard_normal(experts).astype(np.float32)
    for b in (None, bias):
        ids, weights = sigmoid_group_topk(logits, k, groups, topk_groups, b, scale, renormalize)
        assert ids.dtype == np.int32 and weights.dtype == np.float32
        listed = [0.0] * experts if b is None else b.astype(float).tolist()
        for t, row in enumerate(logits.astype(float).tolist()):
            want = deepseek(row, k, groups, topk_groups, listed, scale, renormalize)
            assert ids[t].tolist() == want[0]
            np.testing.assert_allclose(weights[t], want[1], 1e-5)


def test_only_kept_groups_are_selected() -> None:
    """The best expert of all stands in a group whose two best sum to less."""
    logits = np.array([[9.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    ids, _ = sigmoid_group_topk(logits, 2, groups=2, topk_groups=1)
    assert ids.tolist() == [[3, 4]]


def test_negative_biased_scores_stay_inside_the_kept_groups() -> None:
    bias = np.array([-3.0, -3.0, -9.0, -9.0])
    ids, _ = sigmoid_group_topk(np.zeros((1, 4)), 2, 2, 1, bias)
    assert ids.tolist() == [[0, 1]]


def test_ties_go_to_the_lower_id() -> None:
    """Few different logits and many experts, so that an unstable sort would show."""
    logits = np.random.default_rng(4).integers(0, 3, (20, 256)).astype(np.float32)
    for t, row in enumerate(logits.tolist()):
        want = best(row, 100)
        assert softmax_topk(logits, 100)[0][t].tolist() == want
        assert softmax_topk(logits, 100, topk_first=True)[0][t].tolist() == want
        assert sigmoid_group_topk(logits, 100)[0][t].tolist() == want
    flat = np.zeros((3, 256))
    assert sigmoid_group_topk(flat, 20, 128, 64)[0].tolist() == [list(range(20))] * 3


def test_extreme_logits_give_finite_weights() -> None:
    logits = np.array([[1e4, -1e4, 1e4, 0.0], [-1e4] * 4])
    with np.errstate(all="raise", under="ignore"):
        for ids, weights in (
            softmax_topk(logits, 2),
            softmax_topk(logits, 2, topk_first=True),
            sigmoid_group_topk(logits, 2),
        ):
            assert ids[0].tolist() == [0, 2]
            assert np.isfinite(weights).all()


def test_no_tokens() -> None:
    for ids, weights in (softmax_topk(logits_of(0, 8), 2), sigmoid_group_topk(logits_of(0, 8), 2)):
        assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: softmax_topk(x, 9), r"k: 9; allowed 1..8"),
        (lambda x: softmax_topk(x, 0), r"k: 0; allowed 1..8"),
        (lambda x: softmax_topk(x[0], 1), r"must be \[T, E\]"),
        (lambda x: softmax_topk(x, 2, False, topk_first=True), "renormalize"),
        (lambda x: sigmoid_group_topk(x, 2, groups=3), "groups: 3; must divide"),
        (lambda x: sigmoid_group_topk(x, 5, 4, 2), r"topk_groups: 2; allowed 3..4"),
        (lambda x: sigmoid_group_topk(x, 2, 4, 5), r"topk_groups: 5; allowed 1..4"),
        (lambda x: sigmoid_group_topk(x, 2, bias=np.zeros(7)), r"bias: shape \(7,\)"),
    ],
)
def test_bad_arguments(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(logits_of(2, 8))


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_gate(name) -> None:
    p = PROFILES[name]
    ids, weights = p.gate(logits_of(20, p.experts))
    assert ids.shape == weights.shape == (20, p.top_k)
    assert all(len(set(row)) == p.top_k for row in ids.tolist())
    assert ids.min() >= 0 and ids.max() < p.experts
    np.testing.assert_allclose(weights.sum(axis=1), p.scale, 1e-5)
    if p.gating == "sigmoid_group_topk":
        group = ids // (p.experts // p.groups)
        assert max(len(set(row)) for row in group.tolist()) <= p.topk_groups
        shifted = p.gate(logits_of(20, p.experts), np.eye(p.experts, dtype=np.float32)[5] * 9)
        assert (shifted[0][:, 0] == 5).all()
    else:
        with pytest.raises(ValueError, match="bias"):
            p.gate(logits_of(1, p.experts), np.zeros(p.experts))


def test_profile_values() -> None:
    """(hidden, experts, top-k) as published."""
    known = {p.name: (p.hidden, p.experts, p.top_k) for p in PROFILES.values()}
    assert known == {
        "deepseek-v3": (7168, 256, 8),
        "deepseek-r1": (7168, 256, 8),
        "qwen3-30b-a3b": (2048, 128, 8),
        "qwen3-235b-a22b": (4096, 128, 8),
        "mixtral-8x7b": (4096, 8, 2),
        "gpt-oss-120b": (2880, 128, 4),
        "kimi-k2": (7168, 384, 8),
    }
