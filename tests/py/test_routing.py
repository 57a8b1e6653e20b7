"""Properties of the routings that benchmarks use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenway.bench import routing
from tokenway.reference import contiguous_placement

NAMES = sorted(routing.GENERATORS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(0, 9), st.integers(1, 20), st.data())
def test_every_generator(name, ranks, tokens, experts, data) -> None:
    generate = routing.GENERATORS[name]
    top_k = data.draw(st.integers(1, experts), label="top_k")
    seed = data.draw(st.integers(0, 2**40), label="seed")
    for rank in range(ranks):
        ids, weights = generate(rank, tokens, experts, top_k, seed, ranks=ranks)
        assert ids.shape == weights.shape == (tokens, top_k)
        assert ids.dtype == np.int32 and weights.dtype == np.float32
        assert all(len(set(row)) == top_k for row in ids.tolist())
        assert not ids.size or (ids.min() >= 0 and ids.max() < experts)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)
        again = generate(rank, tokens, experts, top_k, seed, ranks=ranks)
        assert (again[0] == ids).all() and (again[1] == weights).all()


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_ranks_differ(name) -> None:
    generate = routing.GENERATORS[name]
    draws = [generate(r, 32, 64, 4, s, ranks=2)[0].tobytes() for r in (0, 1) for s in (0, 1)]
    assert len(set(draws)) == 4


def test_streams_differ() -> None:
    """The streams of all ranks, the shared one, and those of seeds wider than one 32-bit word."""
    streams = [(s, r) for s in (0, 1, 2, 2**32, 2**32 + 1) for r in (None, 0, 1, 2)]
    assert len({routing._rng(s, r).random() for s, r in streams}) == len(streams)


def spread(loads: np.ndarray) -> int:
    return int(loads.max() - loads.min())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99), st.data())
def test_balanced(ranks, tokens, per_rank, seed, data) -> None:
    experts = ranks * per_rank - data.draw(st.integers(0, ranks - 1), label="missing")
    top_k = data.draw(st.integers(1, experts), label="top_k")
    home = contiguous_placement(experts, ranks)[0]
    all_ids = [routing.balanced(r, tokens, experts, top_k, seed, ranks=ranks)[0] for r in range(ranks)]
    per_source = [np.bincount(i.ravel(), minlength=experts) for i in all_ids]
    assert spread(np.sum(per_source, axis=0)) <= 1
    assert max(spread(load) for load in per_source) <= 1
    if experts % ranks:
        return
    pairs = [np.bincount(home, weights=load, minlength=ranks) for load in per_source]
    assert spread(np.sum(pairs, axis=0)) <= 1
    assert max(spread(load) for load in pairs) <= 1
    for ids in all_ids:
        goes = (home[ids][:, :, None] == np.arange(ranks)).any(axis=1)
        assert (goes.sum(axis=1) == min(top_k, ranks)).all()
        assert spread(goes.sum(axis=0)) <= 1


def test_balanced_one_token_on_each_rank() -> None:
    """Tiny T: four tokens, one on each rank, hit 32 different experts, 8 on each rank."""
    ids = np.concatenate([routing.balanced(r, 1, 256, 8, 5, ranks=4)[0] for r in range(4)])
    assert len(np.unique(ids)) == 32
    assert np.bincount(ids.ravel() // 64).tolist() == [8, 8, 8, 8]


def test_uniform_is_uniform() -> None:
    ids, _ = routing.uniform(0, 20000, 16, 4, seed=1)
    load = np.bincount(ids.ravel(), minlength=16) / 20000
    np.testing.assert_allclose(load, 4 / 16, atol=5 * np.sqrt(0.25 * 0.75 / 20000))
    first = np.bincount(ids[:, 0], minlength=16) / 20000
    np.testing.assert_allclose(first, 1 / 16, atol=5 * np.sqrt(1 / 16 / 20000))


def test_skewed_draws_follow_popularity_without_replacement() -> None:
    experts, tokens = 12, 40000
    p = np.exp(routing.log_popularity(experts, seed=7))
    p /= p.sum()
    ids = np.concatenate([routing.skewed(r, tokens // 4, experts, 2, 7)[0] for r in range(4)])
    first = np.bincount(ids[:, 0], minlength=experts) / tokens
    np.testing.assert_allclose(first, p, atol=5 * np.sqrt(p.max() / tokens))
    pairs = np.zeros((experts, experts))
    np.add.at(pairs, (ids[:, 0], ids[:, 1]), 1 / tokens)
    want = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(want, 0)
    np.testing.assert_allclose(pairs, want, atol=5 * np.sqrt(want.max() / tokens))


def test_popularity_is_lognormal_of_sigma_three_quarters() -> None:
    log = routing.log_popularity(100_000, seed=0)
    assert abs(log.std() - 0.75) < 0.01 and abs(log.mean()) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 8, 9, 0), r"top_k: 9; allowed 1..8"),
        ((0, 4, 8, 0, 0), r"top_k: 0; allowed 1..8"),
        ((0, 4, 0, 1, 0), "experts: 0; allowed at least 1"),
        ((0, -1, 8, 2, 0), "tokens: -1; allowed at least 0"),
        ((2, 4, 8, 2, 0), r"rank: 2; allowed 0..1"),
        ((-1, 4, 8, 2, 0), r"rank: -1; allowed 0..1"),
        ((0, 4, 8, 2, -1), "seed: -1; allowed at least 0"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        routing.GENERATORS[name](*arguments, ranks=2)


# ---- recorded routings ---------------------------------------------------------------------------


def save(tmp_path, **arrays) -> str:
    path = str(tmp_path / "trace.npz")
    np.savez(path, **arrays)
    return path


def test_npz_steps_and_ranks(tmp_path) -> None:
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(10), (3, 8, 1)), axis=2)[:, :, :4]
    weights = np.random.default_rng(1).random(ids.shape)
    trace = routing.from_npz(save(tmp_path, ids=ids, weights=weights))
    for step in range(3):
        for rank in range(2):
            got = trace(rank, 4, 10, 4, seed=step + 3)
            assert got[0].dtype == np.int32 and got[1].dtype == np.float32
            assert (got[0] == ids[step, 4 * rank : 4 * rank + 4]).all()
            assert (got[1] == weights[step, 4 * rank : 4 * rank + 4].astype(np.float32)).all()


def test_npz_one_step_without_weights(tmp_path) -> None:
    trace = routing.from_npz(save(tmp_path, ids=np.array([[0, 1, -1], [-1, -1, -1]], np.int64)))
    ids, weights = trace(0, 2, 4, 3, 9)
    assert ids.tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert weights.tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    ids[:] = 3
    assert trace(0, 2, 4, 3, 9)[0].max() == 1  # the caller got copies


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"routes": np.zeros((2, 2), int)}, r"trace.npz: arrays: \['routes'\]; must have 'ids'"),
        ({"ids": np.zeros((2, 2))}, "dtype float64; must be an integer"),
        ({"ids": np.zeros(2, int)}, r"shape \(2,\); must be"),
        ({"ids": np.zeros((0, 2, 2), int)}, "at least 1"),
        ({"ids": np.array([[0, 1], [0, -2]])}, r"ids\[0, 1, 1\]: -2; allowed -1.."),
        ({"ids": np.array([[0, 1], [5, 5]])}, r"ids\[0, 1\]: 5 stands twice"),
        ({"ids": np.array([[0, 1]]), "weights": np.ones((1, 3))}, "weights: float64"),
        ({"ids": np.array([[0, 1]]), "weights": np.ones((1, 2), int)}, "must be floats"),
    ],
)
def test_bad_npz(tmp_path, arrays, message) -> None:
    with pytest.raises(ValueError, match=message):
        routing.from_npz(save(tmp_path, **arrays))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 8, 3), "top_k: 3; the recording has 2"),
        ((1, 2, 8, 2), "need 4 recorded tokens; the recording has 3"),
        ((0, 3, 6, 2), r"ids: 7; allowed -1..5"),
    ],
)
def test_bad_use_of_a_recording(tmp_path, arguments, message) -> None:
    trace = routing.from_npz(save(tmp_path, ids=np.array([[0, 1], [7, 2], [3, -1]])))
    with pytest.raises(ValueError, match=message):
        trace(*arguments)
