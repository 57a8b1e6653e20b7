"""What is planned for: averages that reach back as far as the windows ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenway import balance
from tokenway.errors import InvalidArgument

Array = np.ndarray
SHAPE: dict[str, int] = {"ranks": 32, "slots": 9}


def forecast_of(windows: Array, *decays: float) -> balance.Forecast:
    made = balance.Forecast(decays) if decays else balance.Forecast()
    for window in windows:
        made.add(window)
    return made


def test_one_decay_is_a_plain_average() -> None:
    windows = np.random.default_rng(0).random((5, 3, 16))
    average = np.zeros((3, 16))
    for window in windows:
        average = 0.75 * average + 0.25 * window
    made = forecast_of(windows, 0.75)
    assert (made.loads == average).all() and (made.decay == 0.75).all()
    assert (forecast_of(windows, 0.0).loads == windows[-1]).all()


def test_the_decay_follows_the_windows() -> None:
    """Loads that move want the last window; noise around loads that stay, a long average. Each layer for itself."""
    moving = balance.drifting(16, 1, 256, memory=0.99, seed=1)
    still = balance.sample(np.tile(balance.lognormal(1, 256, seed=1), (16, 1, 1)), 4096, seed=1)
    both = np.concatenate([moving, still / still.mean()], axis=1)
    assert forecast_of(both).decay.tolist() == [0.0, 0.9]
    # What was, is forgotten: noise alone, then moves alone.
    made = forecast_of(still)
    assert made.decay.tolist() == [0.9]
    for window in moving:
        made.add(window * 16)
    assert made.decay.tolist() == [0.0]


def test_something_new_begins_anew() -> None:
    """The first window of another kind of text is all that counts, if what was foretold was good before; noise is not
    new, nor is a window without load, and each layer is for itself."""
    one, other = balance.lognormal(2, 256, seed=1)
    windows = balance.sample(np.tile(np.stack([one, one]), (12, 1, 1)), 16384, seed=3).astype(float)
    made = balance.Forecast()
    for i, window in enumerate(windows):
        made.add(window)
        assert i < 2 or not (made.loads == window).all(axis=1).any(), i
    assert made.decay.tolist() == [0.9, 0.9]
    new = balance.sample(np.stack([one, other]), 16384, seed=4).astype(float)
    made.add(np.stack([new[0], np.zeros(256)]))
    assert not (made.loads[1] == 0).all()
    made.add(new)
    assert (made.loads == new).all(axis=1).tolist() == [False, True]


def test_restless_loads_are_not_new_for_ever() -> None:
    made = forecast_of(np.tile(balance.lognormal(1, 64, seed=9), (6, 1, 1)))
    begun_anew = []
    for seed in range(40):
        window = balance.lognormal(1, 64, seed=seed)
        made.add(window)
        begun_anew.append(bool((made.loads == window).all()))
    assert begun_anew[0] and not any(begun_anew[20:]), begun_anew


def test_the_size_of_windows_does_not_matter() -> None:
    windows = balance.drifting(10, 4, 64, hot=2, seed=3)
    assert (forecast_of(windows * 1024).loads == forecast_of(windows).loads * 1024).all()
    empty = np.zeros((3, 4, 64))
    made = forecast_of(empty)
    assert not made.loads.any()
    made.add(windows[0])
    assert balance.plan(made.loads, ranks=8, slots=9).imbalance.max() < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_hot_sets_are_followed(seed: int) -> None:
    """16 writes a layer and window: under 0.06, and hardly above a plan made anew from the same windows."""
    windows = balance.drifting(20, 6, 256, memory=0.998, hot=2, boost=2.0, seed=seed)
    played = {p: balance.replay(windows, policy=p, writes=16, **SHAPE) for p in ("update", "replan")}
    assert played["update"].writes.max() <= 16
    found = {policy: outcome.imbalance[1:].mean() for policy, outcome in played.items()}
    assert found["update"] < 0.06 and found["update"] < found["replan"] + 0.01
    settled = [i for i in range(1, 20) if i % 8]  # else the hot set is a new one, which nobody can know
    assert played["update"].imbalance[settled].mean(axis=1).max() < 0.06


@pytest.mark.parametrize(("tokens", "hot"), [(None, 0), (128, 0), (16, 0), (None, 2), (128, 2), (16, 2)])
def test_no_decay_is_far_better_than_the_chosen(tokens: int | None, hot: int) -> None:
    windows = balance.drifting(24, 4, 256, memory=0.998, hot=hot, boost=2.0, seed=5)
    counted = None if tokens is None else balance.sample(windows, 32 * tokens * 8, 5)
    found = {
        decay: balance.replay(windows, decay=decay, counted=counted, writes=16, **SHAPE).imbalance[1:].mean()
        for decay in (0.0, 0.5, 0.75, 0.9, None)
    }
    best = min(value for decay, value in found.items() if decay is not None)
    assert found[None] <= 1.1 * best + 0.002, found


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: balance.Forecast([]), r"decays are \[\]; allowed are one or more"),
        (lambda: balance.Forecast([0.5, 1.0]), r"decays are \[0.5, 1.0\]"),
        (lambda: balance.Forecast().loads, "no window was added"),
        (lambda: balance.Forecast().decay, "no window was added"),
        (lambda: balance.Forecast().add(np.zeros(4)), r"window has shape \[4\]; it must be \[layers, experts\]"),
        (lambda: balance.Forecast().add(np.array([[1.0, -1.0]])), "none negative"),
        (lambda: balance.Forecast().add(np.array([[1.0, np.nan]])), "finite"),
        (
            lambda: forecast_of(np.ones((1, 2, 4))).add(np.ones((2, 5))),
            r"window has shape \[2, 5\]; so far it was \[2, 4\]",
        ),
        (
            lambda: balance.replay(np.ones((3, 1, 4)), ranks=2, slots=3, counted=np.ones((2, 1, 4))),
            r"counted has shape \[2, 1, 4\]; it must be that of windows, \[3, 1, 4\]",
        ),
    ],
)
def test_refusals(call: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        call()
