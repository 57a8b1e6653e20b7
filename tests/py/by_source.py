"""Rows that come by source rank, for two ranks: what they send, what their experts make of it, and what must arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from frameworks import attempt, here
from harness import said

EXPERTS, TOP_K, HIDDEN, MOST = 6, 3, 32, 8
LOCAL = EXPERTS // 2


class Case(NamedTuple):
    tokens: tuple[int, int]  # of each rank
    dtype: str  # of rows
    scales: tuple[str, int] | None = None  # dtype, and number of a row
    bound: int | None = None
    weights: str = "float32"  # "": none
    ids: str = "int32"


def batch(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows [T, H] of whole numbers, ids [T, K] with some of -1, weights) of a rank."""
    count, rng = case.tokens[rank], np.random.default_rng([rank, *case.tokens])
    ids = np.argsort(rng.random((count, EXPERTS)))[:, :TOP_K]
    ids[::3, 1] = -1
    weights = rng.integers(1, 4, (count, TOP_K)) if case.weights else np.ones((count, TOP_K))
    return rng.integers(-4, 5, (count, HIDDEN)), ids, weights


def sent(case: Case, rank: int) -> tuple[Any, Any, Any, Any]:
    """(rows, ids, weights or None, scales or None) as tensors."""
    import torch

    rows, ids, weights = (torch.from_numpy(x).to(here()) for x in batch(case, rank))
    values = rows.to(getattr(torch, case.dtype)) if case.dtype != "uint8" else rows[:, ::2].to(torch.uint8)
    scales = rows[:, : case.scales[1]].float().to(getattr(torch, case.scales[0])) if case.scales else None
    given = weights.to(getattr(torch, case.weights)) if case.weights else None
    return values, ids.to(getattr(torch, case.ids)), given, scales


def answered(case: Case, rank: int, came: tuple[Any, Any, Any, Any], invalid: int, dtype: Any) -> tuple[Any, Any]:
    """(what a rank has received, what it returns): expert e multiplies by e + 1. came: (rows, ids, weights or None,
    scales or None), flat. invalid: the id of no expert. dtype: of what is returned."""
    import torch

    rows, ids, weights, scales = came
    ours = (ids >= rank * LOCAL) & (ids < (rank + 1) * LOCAL)
    factors = torch.where(ours, (ids + 1) * (1 if weights is None else weights.float()), 0)
    used = ids != invalid  # a row that has a token has a choice that is somebody's
    told = rows.view(torch.uint8) if case.dtype.startswith("float8") else rows
    found = {
        "rows": torch.where(used.any(1, keepdim=True), told.float(), 0).cpu().numpy(),
        "ids": ids.cpu().numpy().copy(),
        "weights": None if weights is None else weights.float().cpu().numpy(),
        "scales": None if scales is None else scales.float().cpu().numpy(),
        "shape": (len(rows), str(ids.dtype), None if weights is None else str(weights.dtype)),
    }
    made = torch.zeros(len(rows), HIDDEN, dtype=dtype, device=here())
    known = rows if case.dtype != "uint8" else rows.repeat_interleave(2, dim=1)
    made[used.any(1)] = (known.float() * factors.sum(1, keepdim=True))[used.any(1)].to(dtype)
    return found, made


def judge(case: Case, ranks: list[dict[str, Any]], bound: int, invalid: int, weights: str | None) -> None:
    """ranks: what each has received, and "out", what it got back. weights: their dtype where they are received."""
    batches = [batch(case, source) for source in range(2)]
    for rank, found in enumerate(ranks):
        assert found["shape"] == (2 * bound, "torch.int32", weights)
        for source, (rows, ids, given) in enumerate(batches):
            goes = [t for t in range(case.tokens[source]) if ((ids[t] >= 0) & (ids[t] // LOCAL == rank)).any()]
            block = slice(source * bound, source * bound + len(goes))
            assert np.array_equal(np.where(found["ids"][block] == invalid, -1, found["ids"][block]), ids[goes])
            assert (found["ids"][source * bound + len(goes) : (source + 1) * bound] == invalid).all()
            if weights:
                mine = ids[goes] >= 0
                assert np.array_equal(found["weights"][block][mine], given[goes][mine])
            if case.dtype in ("float32", "bfloat16"):
                assert np.array_equal(found["rows"][block], rows[goes])
            if case.scales:
                assert np.array_equal(found["scales"][block], rows[goes][:, : case.scales[1]])
        rows, ids, given = batches[rank]
        whole = rows if case.dtype != "uint8" else np.repeat(rows[:, ::2].astype(np.uint8), 2, axis=1)
        factor = np.where(ids >= 0, given * (ids + 1), 0).sum(1, keepdims=True)
        assert np.allclose(found["out"], whole * factor, rtol=2**-7)  # each rank's part is rounded once


def next_pass(dispatch: Callable[[Any], object], first: Any, second: Any, rank: int) -> dict[str, Any]:
    """What ranks are told where the experts of rank 1 raise in the second layer, and its next pass begins with the
    first one; and what both layers return then. dispatch: a right one by a layer, of two tokens that go to both
    ranks."""
    import torch

    told: dict[str, Any] = {}
    dispatch(second)
    if rank == 0:
        told["combine"] = attempt(second.combine, torch.zeros(4, HIDDEN, device=here()))
    told["dispatch"] = attempt(dispatch, first)
    for name, layer in (("first", first), ("second", second)):
        dispatch(layer)
        told[name] = layer.combine(torch.full((4, HIDDEN), 3.0, device=here())).tolist()
    return told


def judge_next_pass(ranks: list[dict[str, Any]]) -> None:
    """Peers hear of it at once, or they would be told of a timeout; and no lane is lost."""
    first, second = ranks
    said(second["dispatch"], "InvalidUsage", "a dispatch follows another one without a combine")
    for name in ("combine", "dispatch"):
        said(first[name], "PeerRefused", "rank 1")
    for told in ranks:
        for name in ("first", "second"):
            assert told[name] == [[6.0] * HIDDEN] * 2, told[name]
