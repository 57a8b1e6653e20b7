"""What runs of all kinds have in common: ranks as processes of this host, a verdict that all of them share, and what is
known of a row before it is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tokenway.bench import verify
from tokenway.bench.case import Case, short_routing
from tokenway.bench.control import Control
from tokenway.bench.progress import Progress
from tokenway.bench.settings import Settings
from tokenway.bench.talk import Talk, on_several_hosts
from tokenway.bench.watch import SILENT, Watch
from tokenway.comm import Comm
from tokenway.connecting import connect
from tokenway.group import Group
from tokenway.launch import Outcome, Ranks

# What a rank has measured: of rank 0 everything, of others nothing; None after a mismatch, which has been told.
Results = dict[str, Any] | None


def on_ranks(settings: Settings, rank: Callable[[Settings], Results], limit: float | None = None) -> Results:
    """What `rank(settings)` returns in this process, if a launcher has started it as a rank; else what it returns as
    rank 0 of processes that are started here, for `limit` seconds at most, and None if one fails."""
    if settings.launched:
        return rank(settings)
    with Ranks(rank, settings.ranks, settings) as ranks:
        outcomes, culprit = ranks.wait_or_fail(limit)
    if culprit is not None:
        why = outcomes[culprit]
        assert why is not None
        print(f"tokenway bench: rank {culprit}: {_why(why)}", file=sys.stderr)
        return None
    if late := [number for number, outcome in enumerate(outcomes) if outcome is None]:
        print(f"tokenway bench: ranks {late} did not end within {limit:.0f} s", file=sys.stderr)
        return None
    values = [outcome.value for outcome in outcomes if outcome is not None]
    return None if None in values else values[0]


def _why(outcome: Outcome) -> str:
    if outcome.error:
        return outcome.error.strip().splitlines()[-1]
    return f"ended with exit code {outcome.exitcode}"


def as_rank(settings: Settings, count: int, rows: Callable[[Control, Progress, ExitStack], dict[str, Any]]) -> Results:
    """What `rows(control, progress, stack)` measures as one of the ranks. count: of rows to be shown. Collective."""
    with ExitStack() as stack:
        control = _control(settings, stack)
        stack.callback(control.close)
        watch = SILENT if settings.nvlink is None else stack.enter_context(Watch(control))
        progress = Progress(count, control.rank == 0, watch)
        stack.callback(progress.close)
        return measured(lambda: rows(control, progress, stack), control, progress, stack)


def _control(settings: Settings, stack: ExitStack) -> Any:
    """What ranks tell each other by: memory in common, or what reaches other hosts."""
    if settings.nvlink is None or not (settings.nvlink.over == "gin" or on_several_hosts()):
        return Control(stack.enter_context(connect()))
    import torch

    return Talk("nccl" if torch.cuda.is_available() else "gloo")


def measured(measure: Callable[[], dict[str, Any]], control: Control, progress: Progress, stack: ExitStack) -> Results:
    """What a rank whose open things are the stack's has measured; a mismatch is told by rank 0."""
    try:
        results = measure()
    except verify.Mismatch as problem:  # the same on all ranks: see `agree`
        progress.close()
        if control.rank == 0:
            print(f"tokenway bench: {problem}", file=sys.stderr, flush=True)
        return None
    except BaseException:
        # This rank alone failed. Closing is collective and would wait for peers that wait for
        # this rank; they learn of it at once when this process ends.
        stack.pop_all()
        if any(control.notes()):
            print(f"tokenway bench: rank {control.rank} failed: {control.where()}", file=sys.stderr, flush=True)
        raise
    progress.close()
    return results if control.rank == 0 else {}


def agree(control: Control, problem: str | None) -> None:
    """Raises Mismatch on all ranks if any has a problem. Collective."""
    if found := control.agree(problem):
        raise verify.Mismatch(found)


@contextmanager
def open_group(comm: Comm, make: Callable[..., Group] = Group, **keywords: Any) -> Iterator[Group]:
    """A group that is closed at the end, unless this rank alone failed."""
    group = make(comm, **keywords)
    try:
        yield group
    except verify.Mismatch:
        group.close()
        raise
    group.close()


def case_facts(case: Case) -> dict[str, Any]:
    """What every row of pairs begins with."""
    return {
        "profile": case.profile.name,
        "hidden": case.profile.hidden,
        "top_k": case.profile.top_k,
        "tokens": case.tokens,
        "ranks": case.ranks,
        "rows_moved": case.moved_rows()[0],
    }


def facts(case: Case, group: Group, verified: int) -> dict[str, Any]:
    """What is known of a row without timing it."""
    first = case_facts(case)
    window = group.window_bytes()
    return first | {
        "experts": case.profile.experts,
        "routing": short_routing(case.routing),
        "dtype": case.dtype,
        "combine_dtype": case.combine_dtype,
        "layout": case.layout,
        "weighting": case.weighting,
        "verified_exchanges": verified,
        "dispatch_row_bytes": case.dispatch_row,
        "combine_row_bytes": case.combine_row,
        "bytes_moved": first["rows_moved"] * (case.dispatch_row + case.combine_row),
        "formula_rows": case.tokens * min(case.ranks, case.profile.top_k),
        "window_bytes": window.window,
        "expert_buffers_bytes": window.expert_buffers,
        "max_tokens": group.max_tokens,
    }
