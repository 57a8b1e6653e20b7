"""Progress on stderr: a bar with rich on a terminal, else a line now and then; and for whoever watches a rank."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

from tokenway.bench.watch import SILENT, Watch


class Progress:
    """Rank 0's is shown; every rank's is told to its watch."""

    def __init__(self, total: int, enabled: bool, watch: Watch = SILENT):
        self._total, self._done, self._enabled = total, 0, enabled
        self._watch, self._what = watch, ""
        self._start = time.monotonic()
        self._bar: Any = None
        if enabled and sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def doing(self, what: str) -> None:
        """Tells what comes."""
        self._what = what
        self._watch.doing(what)
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        elif self._enabled:
            spent = time.monotonic() - self._start
            print(f"[{self._done}/{self._total}, {spent:.0f} s] {what}", file=sys.stderr, flush=True)

    def at(self, detail: str) -> None:
        """Tells the watch alone how far that is."""
        self._watch.doing(f"{self._what}: {detail}")

    def done(self) -> None:
        """One more row is finished."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
