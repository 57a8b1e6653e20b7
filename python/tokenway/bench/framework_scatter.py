"""`tokenway bench --frameworks scatter`: a reduce-scatter of uneven sizes in place of an all-reduce and a slice.

The call is what a framework writes in its place, `tokenway.integrations.collectives.reduce_scatterv` of a process
group; beside it the all-reduce and slice, and the other ways of `tokenway bench --collective`. Tokenway's result is a
new tensor in each call. Results are compared eagerly, and in graphs where there are any. Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenway import tensors
from tokenway.bench import collective_baselines
from tokenway.bench.collective_row import Row
from tokenway.bench.framework_place import Place, differs, steps
from tokenway.bench.profiles import PROFILES
from tokenway.integrations import collectives

OURS = "reduce_scatterv"


def measure(place: Place) -> dict[str, Any]:
    """All sizes. Collective."""
    frameworks = place.settings.frameworks
    assert frameworks is not None
    rows = []
    for hidden in dict.fromkeys(PROFILES[name].hidden for name in place.settings.profiles):
        for most in sorted(frameworks.rows, reverse=True):  # the group grows once
            row = Row("reduce_scatterv", most, False, place.ranks, hidden, place.settings.dtype)
            place.progress.doing(f"scatter: {most} rows of {hidden}")
            rows.append(_row(place, row))
    return {"rows": sorted(rows, key=lambda row: (row["hidden"], row["most"]))}


def _row(place: Place, row: Row) -> dict[str, Any]:
    """A size: verified, timed, verified again."""

    def tensor(array: Any) -> Any:
        return tensors.to_torch(array).to(place.device)

    rows, want = tensor(row.inputs(place.rank)), tensor(np.ascontiguousarray(row.wanted(place.rank)))
    kinds = collective_baselines.NCCL if place.on_gpus else collective_baselines.GLOO
    others = {name: kind(row, place.rank, tensor) for name, kind in kinds.items()}

    def ours(_: int) -> torch.Tensor:
        return collectives.reduce_scatterv(rows, row.sizes)

    def right(_: int, got: torch.Tensor) -> str | None:
        return None if torch.equal(got, want) else f"reduce_scatterv of {row.sizes}: has other bits than the oracle"

    def verify() -> None:
        before = steps()
        problem = right(0, ours(0))
        if steps() != before + 1:
            problem = problem or f"reduce_scatterv of {row.sizes}: made no step of a group of Tokenway's"
        place.agree(problem)

    verify()
    told = {"most": row.tokens, "sizes": row.sizes, "hidden": row.hidden, "dtype": row.dtype, "ranks": row.ranks}
    if place.settings.verify_only:
        return told
    subjects = place.subjects(OURS, ours, right=right)
    for name, other in others.items():
        _verify(place, f"{name} of {row.sizes}", other, rows, want)
        # Sums in place are 0 while they are timed: nothing can be compared there.
        subjects += place.subjects(name, lambda _, other=other: other(), right=lambda *_: None)
    times = place.times(subjects)
    verify()
    for name, other in others.items():
        _verify(place, f"{name} of {row.sizes}", other, rows, want)
    return told | {"us": times}


def _verify(place: Place, name: str, other: Any, rows: torch.Tensor, want: torch.Tensor) -> None:
    """Compares what another way makes of rows, in a graph too. Collective."""

    def call() -> torch.Tensor:
        other.rows.copy_(rows)  # of which some make sums in place
        other()
        return _result(other)

    problem = differs(call(), want, place.dtype)
    if place.on_gpus:
        in_graph = differs(place.in_graph(call), want, place.dtype)
        problem = problem or (in_graph and f"in a graph {in_graph}")
    place.agree(problem and f"{name}: {problem}")
    other.calm()


def _result(baseline: Any) -> torch.Tensor:
    out = baseline.out
    return out if isinstance(out, torch.Tensor) else tensors.to_torch(out)
