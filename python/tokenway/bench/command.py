"""`tokenway bench`: measures what was asked for, prints, writes and draws it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenway import machine, usage
from tokenway.bench import (
    auxiliary,
    collectives,
    cpu,
    frameworks,
    hosts,
    layer,
    modes,
    nvlink,
    overhead,
    portable,
    report,
)
from tokenway.bench.case import short_routing
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.bench.verify import Mismatch

SCHEMA = 1


def _subject(settings: Settings) -> Callable[[Settings], Results]:
    """What measures: work that is not a dispatch and a combine, where that was asked for; else these, by backend."""
    if settings.aux:
        return auxiliary.measure
    if settings.overhead:
        return overhead.measure
    if settings.layer:
        return layer.measure
    if settings.frameworks is not None:
        return frameworks.measure
    if settings.collective is not None:
        return collectives.measure
    if settings.both_modes:
        return modes.measure
    if settings.returns:
        from tokenway.bench import returns

        return returns.measure
    if settings.moving is not None:
        from tokenway.bench import moving

        return moving.measure
    if settings.nvlink is not None:
        return nvlink.measure
    if settings.hosts is not None:
        return hosts.measure
    return cpu.measure if settings.portable is None else portable.measure


def run(settings: Settings) -> int:
    """Measures; of several ranks the first prints. Returns the exit code."""
    try:
        results = _subject(settings)(settings)
    except Mismatch as problem:
        print(f"tokenway bench: {problem}", file=sys.stderr)
        return 1
    if results is None:
        return 1
    if results:
        finish(settings, record(settings, results))
    return 0


def record(settings: Settings, results: dict[str, Any]) -> dict[str, Any]:
    """What is written of a run: the results, and where, when and how they were measured."""
    told = asdict(settings)
    for name in ("json", "plot", "timeline", "launched"):
        del told[name]  # where it was written is nobody's business
    for name in ("nvlink", "portable", "hosts", "frameworks", "moving"):
        if told[name] is None:
            del told[name]
    told["routings"] = [short_routing(name) for name in settings.routings]
    of_results, where = results.pop("versions", {}), machine.measured()
    return {
        "schema": SCHEMA,
        **where,
        "versions": where["versions"] | of_results,
        "settings": told,
        **results,
    }


def finish(settings: Settings, run: dict[str, Any]) -> None:
    """Prints a run, and writes and draws it where that was asked for."""
    with usage.printing():  # first: the rest may fail
        report.show(run)
    if settings.json:
        # Numbers of one list on one line: a file that people can page through.
        text = re.sub(r"\[[\d\s.,e+-]+\]", lambda m: " ".join(m[0].split()), json.dumps(run, indent=1))
        Path(settings.json).write_text(text + "\n", encoding="utf-8")
    if settings.plot:
        from tokenway.bench import plot

        plot.draw(run, report.title(run), settings.plot)
    if settings.timeline:
        from tokenway.bench import timeline

        timeline.draw(run, report.title(run), settings.timeline)
