"""Loads to plan for where there is no trace: shapes seen in practice, by seed.

All are float64, of mean 1 per layer; multiply by tokens * top_k / experts to have tokens, or draw them with `sample`.
Public statistics of DeepSeek's models look lognormal, with a sigma of 0.70 to 0.85.
"""

from __future__ import annotations

import numpy as np

from tokenway.errors import InvalidArgument

Array = np.ndarray
MOST_SIGMA, MOST_FACTOR = 20.0, 1e6  # loads stay finite


def lognormal(
    layers: int, experts: int, sigma: float = 0.75, seed: int = 0, *, groups: int = 1, group_sigma: float = 0.0
) -> Array:
    """[layers, experts]: exp of a normal distribution of standard deviation sigma. With groups of consecutive experts
    that are liked or disliked together, each of them has such a factor of its own, of group_sigma."""
    _check(layers=layers, experts=experts, groups=groups)
    _check_within(MOST_SIGMA, sigma=sigma, group_sigma=group_sigma)
    if experts % groups:
        raise InvalidArgument.of("groups", f"is {groups}; it must divide experts, {experts}")
    rng = _rng(seed)
    logarithms = sigma * rng.standard_normal((layers, experts))
    if group_sigma:
        logarithms += np.repeat(group_sigma * rng.standard_normal((layers, groups)), experts // groups, axis=1)
    return _of_mean_1(np.exp(logarithms))


def zipf(layers: int, experts: int, exponent: float = 1.0, seed: int = 0) -> Array:
    """[layers, experts]: the r-th hottest expert carries r ** -exponent of the hottest, in each layer's own order."""
    _check(layers=layers, experts=experts)
    _check_within(MOST_SIGMA, exponent=exponent)
    falling = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return _of_mean_1(_rng(seed).permuted(np.tile(falling, (layers, 1)), axis=1))


def dirichlet(layers: int, experts: int, alpha: float = 1.0, seed: int = 0) -> Array:
    """[layers, experts]: a symmetric Dirichlet distribution; the smaller alpha, the more skewed."""
    _check(layers=layers, experts=experts)
    if not 0 < alpha <= MOST_FACTOR:
        raise InvalidArgument.of("alpha", f"is {alpha}; it must be above 0, at most {MOST_FACTOR:g}")
    # Gammas beside a least value, so that a tiny alpha leaves no layer without load.
    return _of_mean_1(_rng(seed).standard_gamma(alpha, (layers, experts)) + 1e-300)


def drifting(
    windows: int,
    layers: int,
    experts: int,
    sigma: float = 0.75,
    *,
    memory: float = 0.998,
    hot: int = 0,
    boost: float = 4.0,
    stay: int = 8,
    seed: int = 0,
) -> Array:
    """[windows, layers, experts]: lognormal loads whose logarithms drift, each window `memory` of the last and the rest
    new, so that sigma stays; and a hot set, `hot` experts of a layer that carry `boost` times theirs for `stay`
    windows, then others."""
    _check(windows=windows, layers=layers, experts=experts, stay=stay)
    _check_within(MOST_SIGMA, sigma=sigma)
    _check_within(MOST_FACTOR, boost=boost)
    if not 0 <= memory <= 1:
        raise InvalidArgument.of("memory", f"is {memory}; allowed 0..1")
    if not 0 <= hot <= experts:
        raise InvalidArgument.of("hot", f"is {hot}; allowed 0..{experts} (experts)")
    rng = _rng(seed)
    state = rng.standard_normal((layers, experts))
    fresh = np.sqrt(1 - memory**2)
    factor = np.ones((layers, experts))
    made = np.empty((windows, layers, experts))
    for window in range(windows):
        if window:
            state = memory * state + fresh * rng.standard_normal((layers, experts))
        if hot and window % stay == 0:
            chosen = rng.random((layers, experts)).argsort(axis=1)[:, :hot]
            factor = np.ones((layers, experts))
            np.put_along_axis(factor, chosen, boost, axis=1)
        made[window] = np.exp(sigma * state) * factor
    return _of_mean_1(made)


def domains(
    windows: int, layers: int, experts: int, sigma: float = 0.75, *, count: int = 3, stay: int = 8, seed: int = 0
) -> Array:
    """[windows, layers, experts]: `count` domains (code, law, another language, ...) with lognormal loads of their own.
    Traffic is of one for `stay` windows and then another's, half of it in the window between."""
    _check(windows=windows, layers=layers, experts=experts, count=count, stay=stay)
    _check_within(MOST_SIGMA, sigma=sigma)
    rng = _rng(seed)
    of_domain = _of_mean_1(np.exp(sigma * rng.standard_normal((count, layers, experts))))
    made = np.empty((windows, layers, experts))
    now = before = 0
    for window in range(windows):
        turns = window > 0 and window % stay == 0
        if turns and count > 1:
            before, now = now, (now + 1 + int(rng.integers(count - 1))) % count
        made[window] = (of_domain[before] + of_domain[now]) / 2 if turns else of_domain[now]
    return made


def group_limited(
    loads: Array, tokens: int, top_k: int, *, groups: int, top_groups: int, noise: float = 1.0, seed: int = 0
) -> Array:
    """int32 [tokens, top_k]: distinct ids as a group-limited router gives them (DeepSeek-V3's, section 2.1.2 of
    https://arxiv.org/abs/2412.19437): an expert's score is the logarithm of its load and a Gumbel noise of each token,
    a group's the sum of its two best, and the top_k experts are those of the top_groups best groups. loads: [E], above
    0."""
    experts = len(loads)
    _check(tokens=tokens, top_k=top_k, groups=groups, top_groups=top_groups)
    if experts % groups or top_groups > groups or top_k > experts // groups * top_groups:
        told = f"{groups}, {top_groups} and {top_k} with {experts} experts"
        raise InvalidArgument(f"groups, top_groups and top_k are {told}; groups must divide them, and hold top_k")
    scores = np.log(loads) + noise * _rng(seed).gumbel(size=(tokens, experts))
    by_group = scores.reshape(tokens, groups, -1)
    best = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
    out = np.argsort(-best, axis=1, kind="stable")[:, top_groups:]
    np.put_along_axis(by_group, out[:, :, None], -np.inf, axis=1)
    return np.argsort(-scores, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def sample(loads: Array, choices: int, seed: int = 0) -> Array:
    """int64 of the shape of loads [..., experts]: how often each expert is chosen in `choices` independent choices
    (tokens * top_k), by its share of the load."""
    _check(choices=choices)
    flat = np.asarray(loads, np.float64).reshape(-1, np.shape(loads)[-1])
    totals = flat.sum(axis=1, keepdims=True)
    shares = np.divide(flat, totals, out=np.full_like(flat, 1 / flat.shape[1]), where=totals > 0)
    return _rng(seed).multinomial(choices, shares).reshape(np.shape(loads))


def _of_mean_1(loads: Array) -> Array:
    return loads / loads.mean(axis=-1, keepdims=True)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _check_within(most: float, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= most:
            raise InvalidArgument.of(name, f"is {value}; allowed 0..{most:g}")


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument.of(name, f"is {value}; it must be at least 1")
