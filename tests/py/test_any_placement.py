"""The promise of combines per expert: the same bits for any number of ranks and any placement of experts, replicas and
replaced maps included. Random shapes are played by groups of several sizes; each must return what `sum_choices` makes
of all tokens' rows, whoever had them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
import pytest
from cases import FLOATS, affine, same
from harness import PATIENT

import tokenway as tw
from tokenway.per_expert_reference import sum_choices
from tokenway.replica_reference import POLICIES
from tokenway.tensors import numpy_dtype

RANKS = (1, 2, 3, 4, 8)
SHAPES = int(os.environ.get("SHAPES", "1000"))  # fewer where every kernel is emulated and something else waits


@dataclass(frozen=True)
class Model:
    """What a model gives, whatever it runs on: choices, weights and rows of all tokens."""

    seed: int
    experts: int
    top_k: int
    ids: np.ndarray  # [T, K]
    weights: np.ndarray
    tokens: np.ndarray  # [T, H]
    wire: str
    out: str
    rows: str

    @classmethod
    def of(cls, seed: int) -> Model:
        rng = np.random.default_rng([seed, 11])
        experts = int(rng.integers(1, 20))
        top_k = int(rng.integers(1, min(experts, 9) + 1))
        count, hidden = int(rng.integers(0, 25)), int(rng.choice([1, 3, 8, 17, 40]))
        ids = rng.random((count, experts)).argsort(axis=1)[:, :top_k].astype(np.int32)
        ids = np.where(rng.random(ids.shape) < rng.choice([0.0, 0.3]), -1, ids).astype(np.int32)
        weights = rng.standard_normal(ids.shape).astype(np.float32)
        tokens = rng.standard_normal((count, hidden)).astype(np.float32)
        wire, out, rows = (str(rng.choice(FLOATS)) for _ in range(3))
        return cls(seed, experts, top_k, ids, weights, tokens, wire, out, rows)

    @np.errstate(over="ignore")
    def answer(self, tokens: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Of experts [...] to tokens [..., H], as they return it."""
        return affine(tokens.astype(np.float32), experts[..., None]).astype(numpy_dtype(self.rows))

    @np.errstate(over="ignore")
    def result(self) -> np.ndarray:
        """[T, H]: what every group must return."""
        rows = self.answer(self.tokens[:, None], self.ids).astype(np.float32).astype(numpy_dtype(self.wire))
        return sum_choices(rows, self.ids >= 0, self.weights).astype(numpy_dtype(self.out))


@dataclass(frozen=True)
class Home:
    """Where it runs: which tokens are whose, and which slots of which rank hold which expert, before and after."""

    begin: np.ndarray  # [N + 1]
    mode: str
    table: np.ndarray  # [P]
    later: np.ndarray  # [P]
    where: tuple[np.ndarray, np.ndarray]
    policy: str
    replicas: bool

    @classmethod
    def of(cls, model: Model, ranks: int) -> Home:
        rng = np.random.default_rng([model.seed, ranks, 12])
        count = len(model.ids)
        cuts = np.sort(rng.integers(0, count + 1, ranks - 1))
        replicas = bool(rng.random() < 0.5)
        more = rng.integers(-1, model.experts, rng.integers(0, 9)) if replicas else np.zeros(0, int)
        table = rng.permutation(np.append(np.arange(model.experts), more))
        home = rng.integers(0, ranks, len(table))
        place = np.zeros(len(table), int)
        for rank in range(ranks):
            place[home == rank] = rng.permutation(int((home == rank).sum()))
        mode, policy = str(rng.choice(["low_latency", "high_throughput"])), str(rng.choice(POLICIES))
        return cls(
            np.concatenate([[0], cuts, [count]]), mode, table, rng.permutation(table), (home, place), policy, replicas
        )

    def settings(self, model: Model) -> dict[str, Any]:
        placed: Any = self.where
        if self.replicas:
            placed = tw.Placement(self.table, where=self.where, policy=self.policy)
        return {
            "experts": model.experts,
            "top_k": model.top_k,
            "hidden": model.tokens.shape[1],
            "dtype": "float32",
            "combine_dtype": model.wire,
            "max_tokens": max(1, int(np.diff(self.begin).max())),
            "mode": self.mode,
            "expert_map": placed,
            "id_space": "global",
            "combine_rows": "per_expert",
        }


def passes(env: Any, group: tw.Group, model: Model, home: Home, table: np.ndarray, late: bool) -> np.ndarray:
    """One pass of this rank's tokens."""
    tensor, array = env.backend.tensor, env.backend.array
    mine = slice(home.begin[env.rank], home.begin[env.rank + 1])
    ids, weights = model.ids[mine], model.weights[mine]
    handle = group.route(tensor(ids), None if late else tensor(weights))
    if home.mode == "high_throughput":
        group.exchange_counts(handle).learn_rows()
    layout = "grouped" if home.mode == "high_throughput" else "expert_major"
    received = group.dispatch(handle, tensor(model.tokens[mine]), layout=layout)
    slots = array(received.ids)
    experts = np.where(slots >= 0, table[slots] if home.replicas else slots, 0)
    with np.errstate(all="ignore"):
        rows = tensor(model.answer(np.nan_to_num(array(received.tokens)), experts))
    given = {"weights": tensor(weights)} if late else {"weighting": "topk"}
    return array(group.combine(handle, rows, dtype=model.out, **given))


def run(env: Any, seeds: list[int]) -> list[list[np.ndarray]]:
    """All models, each by a group of its own: with weights of the handle, then of the combine and by another map."""
    found = []
    for seed in seeds:
        model = Model.of(seed)
        home = Home.of(model, env.nranks)
        with tw.Group(env.comm, timeout=PATIENT, **home.settings(model)) as group:
            got = [passes(env, group, model, home, home.table, False)]
            table = home.table
            if home.replicas:
                table = home.later
                group.replace_map(table)
            found.append([*got, passes(env, group, model, home, table, True)])
    return found


def judge(backend: str, seeds: list[int]) -> None:
    most = harness.BACKENDS[backend].most_ranks("threads")
    for ranks in (n for n in RANKS if n <= most):
        by_rank = harness.Threads(backend, ranks).run(run, seeds)
        for i, seed in enumerate(seeds):
            model = Model.of(seed)
            want = model.result()
            for turn in range(2):
                got = np.concatenate([mine[i][turn] for mine in by_rank])
                same("result", got, want, f"{ranks} ranks, pass {turn}, {model} in {Home.of(model, ranks)}")


def test_a_few_shapes_on_any_ranks(backend) -> None:
    judge(backend, list(range(7)))


@pytest.mark.long
def test_a_thousand_shapes_on_any_ranks(backend) -> None:
    for begin in range(0, SHAPES, 50):
        judge(backend, list(range(100 + begin, 100 + min(begin + 50, SHAPES))))
