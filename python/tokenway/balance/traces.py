"""Loads out of files: recorded routings (.npz) and counts (JSON)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenway import recorded
from tokenway.balance import planner

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Recording:
    """How often each expert was chosen: counts, float64 [steps, layers, experts]. choices: of one step and layer, the
    median; 0 if a file does not tell (JSON has sums)."""

    name: str
    counts: Array
    choices: int

    @property
    def loads(self) -> Array:
        """[layers, experts], of all steps together."""
        return self.counts.sum(axis=0)

    def windows(self, steps: int) -> Array:
        """[windows, layers, experts]: the counts of so many steps together, what is left at the end not among them."""
        whole = len(self.counts) // steps
        return self.counts[: whole * steps].reshape(whole, steps, *self.counts.shape[1:]).sum(axis=1)


def read(path: str | Path, experts: int | None = None) -> Recording:
    """Reads a recording. experts: how many there are; None: as the file says, or one more than the highest id.

    .npz: `chosen` [steps, layers, ..., K], with `experts` (examples/04_train_moe_lm.py --record-routing writes it), or
    `ids` [steps, tokens, K] or [tokens, K] of one layer, as `tokenway bench --routing` replays; -1 is no expert.
    .json: {"logical_count": [[...], ...]}, or that list alone: [layers][experts], or [steps][layers][experts].
    Errors: ValueError, which names what is wrong; OSError.
    """
    name = Path(path).name
    counts = _from_json(name, path) if name.endswith(".json") else _from_npz(name, path, experts)
    if experts is not None and experts != counts.shape[2]:
        raise ValueError(f"{name}: has {counts.shape[2]} experts; {experts} were asked for")
    per_step = counts.sum(axis=2)
    steps_known = not name.endswith(".json") or len(counts) > 1
    return Recording(name, counts, int(np.median(per_step)) if steps_known else 0)


def _from_npz(name: str, path: str | Path, experts: int | None) -> Array:
    with recorded.arrays(path) as file:
        chosen = file.get("chosen")
        if experts is None and "experts" in file:
            held = file["experts"]
            if held.size != 1 or held.dtype.kind not in "iu":
                raise ValueError(f"{name}: experts: {held.dtype} {held.shape}; must be an integer")
            experts = int(held.item())
    if chosen is None:
        chosen = recorded.routing(path)[0][:, None]
    if chosen.dtype.kind not in "iu" or chosen.ndim < 4:
        raise ValueError(f"{name}: chosen: {chosen.dtype} {chosen.shape}; must be integers [steps, layers, ..., K]")
    if not all(chosen.shape):
        raise ValueError(f"{name}: chosen: shape {chosen.shape}; it holds nothing")
    steps, layers = chosen.shape[:2]
    least, most = int(chosen.min()), int(chosen.max())
    experts = most + 1 if experts is None else experts
    if experts < 1 or most >= experts or least < -1:
        raise ValueError(f"{name}: ids are {least}..{most}; allowed -1..{experts - 1} (experts)")
    if experts > planner.MOST_SLOTS:
        raise ValueError(f"{name}: {experts} experts; allowed up to {planner.MOST_SLOTS}")
    flat = chosen.reshape(steps * layers, -1).astype(np.int64)
    # One row more for -1.
    at = flat + 1 + (experts + 1) * np.arange(len(flat))[:, None]
    counts = np.bincount(at.ravel(), minlength=len(flat) * (experts + 1))
    return counts.reshape(steps, layers, experts + 1)[..., 1:].astype(np.float64)


def _from_json(name: str, path: str | Path) -> Array:
    try:
        held: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: no JSON: {error}") from None
    if isinstance(held, dict):
        if "logical_count" not in held:
            raise ValueError(f"{name}: keys: {sorted(held)}; must have 'logical_count'")
        held = held["logical_count"]
    try:
        counts = np.array(held, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: logical_count: rows of numbers, all of one length, are needed") from None
    if counts.ndim not in (2, 3) or not all(counts.shape):
        raise ValueError(f"{name}: logical_count: shape {counts.shape}; must be [layers][experts] or [steps] of that")
    bad = ~np.isfinite(counts) | (counts < 0)
    for at in np.argwhere(bad)[:1]:
        raise ValueError(f"{name}: logical_count{at.tolist()}: {counts[tuple(at)]}; must be finite and at least 0")
    return counts if counts.ndim == 3 else counts[None]
