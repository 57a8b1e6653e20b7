"""`tokenway bench --returns`: pairs whose rows return in other ways than one sum from each rank, beside those that do.

    sums        a partial from each rank, of the case's dtype: what the others are compared with
    per expert  expert_major, a row from each expert, which the owner weights by weights that come with the combine
    fp8         partials that are quantised where they are made, with a scale for each block
    shares      ranks in twos that hold the same tokens: each sends half of them, and both get all results

Experts answer what they got. Every result is then known, and compared bit for bit before the first time and after the
last. `sums` is also what ranks in twos do that each send all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tokenway import tensors
from tokenway.bench import floor, gpu_machine, nvlink, runner, timing, verify
from tokenway.bench.case import FP8, Case
from tokenway.bench.control import Control
from tokenway.bench.gpu_case import DeviceCase, to_numpy
from tokenway.bench.gpu_rank import connect_gpu
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.comm import Comm
from tokenway.group import Group
from tokenway.handle import Handle
from tokenway.settings import RowType
from tokenway.sum_reference import ordered_sum
from tokenway.wire_reference import travelled

Array = np.ndarray
REPLICAS = 2  # ranks of a set, in "shares"


def measure(settings: Settings) -> Results:
    """All rows of a run."""
    return runner.on_ranks(settings, measure_rank, nvlink.LIMIT)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    return runner.as_rank(settings, len(settings.cases()), partial(_on_gpus, settings))


def _on_gpus(settings: Settings, control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    progress.doing("connecting")
    comm = stack.enter_context(connect_gpu(settings, control))
    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(comm.device)))
    measured = rows(settings, control, comm, progress, stack)
    more = gpu_machine.results(settings.ranks) if control.rank == 0 else {}
    return {"returns": measured, "backend": "nvlink", **more}


def rows(
    settings: Settings, control: Control, comm: Comm, progress: Progress, stack: ExitStack
) -> list[dict[str, Any]]:
    """A row for each case, the ways' groups made once for a profile. Collective."""
    bench = nvlink.Bench(settings, control, comm, floor.Floor({"missing": "no floor"}), progress, stack)
    measured = []
    for name in settings.profiles:
        cases = [case for case in settings.cases() if case.profile.name == name]
        with ExitStack() as groups:
            opened = {name: groups.enter_context(opening) for name, opening in _groups(comm, cases, settings)}
            for case in cases:
                progress.doing(case.name)
                measured.append(_row(case, opened, bench, progress.at))
                progress.done()
    return measured


def _groups(comm: Comm, cases: list[Case], settings: Settings) -> Iterator[tuple[str, Any]]:
    """(a name, what opens the group), of each kind that the ways need."""
    assert settings.nvlink is not None
    most = max(case.tokens for case in cases)
    keywords = cases[0].group_settings(most) | {"timeout": nvlink.TIMEOUT, "sm_limit": settings.nvlink.sm_limit}
    yield "sums", runner.open_group(comm, **keywords)
    yield "per expert", runner.open_group(comm, **keywords, combine_rows="per_expert")
    if comm.nranks % REPLICAS == 0:
        shares = keywords | {"max_tokens": -(-most // REPLICAS), "token_replicas": REPLICAS}
        yield "shares", runner.open_group(comm, **shares)


def _row(case: Case, groups: dict[str, Group], bench: nvlink.Bench, told: Callable[[str], None]) -> dict[str, Any]:
    """Each way verified, timed in turns, verified again."""
    ways: dict[str, Sums] = {"sums": Sums(case, groups["sums"]), "fp8": Fp8(case, groups["sums"])}
    ways["per expert"] = PerExpert(replace(case, layout="expert_major"), groups["per expert"])
    if "shares" in groups:
        ways["shares"] = Shares(case, groups["shares"])

    def verified() -> None:
        for name, way in ways.items():
            told(f"checking {name}")
            way.settle(bench.meet)
            runner.agree(bench.control, verify.problem_of(way.check))

    verified()
    row = runner.facts(case, groups["sums"], 1) | {"link_bytes": {name: way.link_bytes() for name, way in ways.items()}}
    if bench.settings.verify_only:
        return row
    bench.meet()
    subjects = [way.graphs(name, told) for name, way in ways.items()]
    bench.meet()
    settings = bench.settings
    turns = {"rounds": settings.rounds, "iterations": settings.iterations, "warmup": settings.warmup}
    times = timing.rounds_of(subjects, bench.control, **turns, told=told)
    verified()
    for subject in subjects:
        subject.close()
    phases = ("pair", "dispatch", "combine")
    return row | {"ways": {name: {p: timing.summary(times[name][p]) for p in phases} for name in ways}}


class Sums(DeviceCase):
    """A partial from each rank. Experts answer what they got."""

    def check(self) -> None:
        """Compares the last result, of `settle`. Raises verify.Mismatch."""
        shape = (self.case.tokens, self.case.profile.hidden)
        want = ordered_sum(shape, self._terms()).astype(tensors.numpy_dtype(self.case.combine_dtype))
        verify.check_output(self.case, self.group.rank, to_numpy(self.result), want)

    def link_bytes(self) -> int:
        """Of rows that this rank sends to others and gets back from them."""
        return self._remote_rows() * (self.case.dispatch_row + self._returning_row())

    def _terms(self) -> Iterator[tuple[Array, Array]]:
        """(tokens, their partials in float32) from each rank, ascending."""
        values = self.case.inputs(self.rank)[0].astype(np.float32)
        for goes in self.case.exchange.routing[self.rank].goes.T:
            yield np.flatnonzero(goes), self._travelled(values[goes])

    def _travelled(self, partials: Array) -> Array:
        return travelled(partials, tensors.numpy_dtype(self.case.combine_dtype), None)

    def _remote_rows(self) -> int:
        counts = self.case.exchange.routing[self.rank].counts
        return int(counts.sum() - counts[self.group.rank])

    def _returning_row(self) -> int:
        return self.case.combine_row


class Fp8(Sums):
    """Partials that return as fp8."""

    def __init__(self, case: Case, group: Group):
        self._typed = group.rows(RowType(case.profile.hidden, dtype=case.dtype, combine_dtype=FP8))
        super().__init__(case, group)

    def _combine(self, handle: Handle) -> Callable[[], Any]:
        return partial(self._typed.combine, handle, self._rows_of(handle), out=self.result)

    def _travelled(self, partials: Array) -> Array:
        return travelled(partials, tensors.numpy_dtype(FP8), None)

    def _returning_row(self) -> int:
        return replace(self.case, dtype=FP8).dispatch_row  # values and scales of blocks, as those that are sent


class PerExpert(Sums):
    """A row from each expert, and weights that come with the combine."""

    def _combine(self, handle: Handle) -> Callable[[], Any]:
        return partial(self.group.combine, handle, self._rows_of(handle), weights=self.weights, out=self.result)

    def _terms(self) -> Iterator[tuple[Array, Array]]:
        """(tokens, their weighted rows in float32) of each choice, ascending."""
        values = self.case.inputs(self.rank)[0].astype(np.float32)
        ids, weights = (of[self.rank] for of in (self.case.exchange.ids, self.case.exchange.weight))
        for k in range(ids.shape[1]):
            chosen = np.flatnonzero(ids[:, k] >= 0)
            yield chosen, values[chosen] * weights[chosen, k, None]

    def link_bytes(self) -> int:
        """A row goes to a rank once, and returns from each of its experts there."""
        owner = self.case.exchange.routing[self.rank].owner
        returning = np.count_nonzero((owner >= 0) & (owner != self.group.rank))
        return self._remote_rows() * self.case.dispatch_row + int(returning) * self.case.combine_row


class Shares(Sums):
    """Ranks of a set have the same tokens, and each sends its share."""

    @property
    def bound(self) -> int:
        """Of a share."""
        return -(-self.case.tokens // REPLICAS)

    def _load(self, case: Case) -> None:
        self.rank = self.group.rank // REPLICAS  # the ranks of a set have the tokens of one
        super()._load(case)

    def link_bytes(self) -> int:
        """Of this rank's share, and its sums that go to the others of the set."""
        place, tokens = self.group.rank % REPLICAS, self.case.tokens
        share = slice(place * tokens // REPLICAS, (place + 1) * tokens // REPLICAS)
        goes = self.case.exchange.routing[self.rank].goes[share].copy()
        goes[:, self.group.rank] = False
        rows = int(goes.sum()) * (self.case.dispatch_row + self.case.combine_row)
        return rows + (share.stop - share.start) * (REPLICAS - 1) * self.case.combine_row
