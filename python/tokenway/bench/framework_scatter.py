"""`tokenway bench --frameworks scatter`: a reduce-scatter of uneven sizes in place of an all-reduce and a slice.

The call is what a framework writes in its place, `tokenway.integrations.collectives.reduce_scatterv` of a process
group; beside it the all-reduce and slice, and the other ways of `tokenway bench --collective`. Tokenway's result is a
new tensor in each call. Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenway import tensors
from tokenway.bench import collective_baselines
from tokenway.bench.collective_row import Row
from tokenway.bench.framework_place import Place, apart, steps
from tokenway.bench.profiles import PROFILES
from tokenway.integrations import collectives

OURS = "reduce_scatterv"
NEAR = 0.02  # how far a row may be, of its norm: some round sums on their way


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

    def verify() -> None:
        before = steps()
        got = ours(0)
        problem = None if steps() == before + 1 else "made no step of a group of Tokenway's"
        if not torch.equal(got, want):
            problem = "has other bits than the oracle"
        place.agree(problem and f"reduce_scatterv of {row.sizes}: {problem}")

    verify()
    told = {"most": row.tokens, "sizes": row.sizes, "hidden": row.hidden, "dtype": row.dtype, "ranks": row.ranks}
    if place.settings.verify_only:
        return told
    subjects = place.subjects(OURS, ours, graph=True)
    for name, other in others.items():
        other()
        far = apart(_result(other), want)
        place.agree(None if far <= NEAR else f"{name} of {row.sizes}: a row is apart by {far:.3g} of its norm")
        other.calm()
        subjects += place.subjects(name, lambda _, other=other: other(), graph=True)
    times = place.times(subjects)
    verify()
    return told | {"us": times}


def _result(baseline: Any) -> torch.Tensor:
    out = baseline.out
    return out if isinstance(out, torch.Tensor) else tensors.to_torch(out)
