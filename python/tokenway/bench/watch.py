"""A watchdog for ranks of a benchmark on GPUs: a run that comes to no end is ended, and it is told where each rank was.

Groups bound their own waits, and so does the gate; but a collective of a baseline's, a capture, or a communicator that
is closed may wait for ever, in a call that nothing can interrupt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from typing import Any

from tokenway.bench.control import Control

PATIENCE = 180.0  # seconds without a sign; the gate's is 120, and a group's timeout less
LOOK = 5.0  # seconds between looks
EXIT = 1


class Watch:
    """Ends the process when its rank has given no sign for `patience` seconds.

    A thread of Python's tells where all ranks are. It needs the interpreter, which a call that waits may hold; then
    faulthandler's thread, which needs nothing, ends the process a little later and shows where its threads are. Both go
    on after a rank has failed, until its process has ended.
    """

    def __init__(self, control: Control, patience: float = PATIENCE):
        self._control, self._patience = control, patience
        self._look = min(LOOK, patience / 4)
        self._sign = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenway-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def doing(self, what: str) -> None:
        """A sign of life: what comes now."""
        self._control.note(what)
        self._sign = time.monotonic()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):  # a stderr that is no file
                faulthandler.dump_traceback_later(self._patience + 2 * self._look, exit=True, file=sys.__stderr__)
            if self._ended.wait(self._look):
                return
            if time.monotonic() - self._sign > self._patience:
                self._end()

    def _end(self) -> None:
        told = f"rank {self._control.rank} gave no sign for {self._patience:.0f} s: {self._control.where()}"
        with tempfile.TemporaryFile() as stacks:  # so that all is written at once: other ranks end at the same time
            faulthandler.dump_traceback(file=stacks)
            stacks.seek(0)
            told += "\n" + stacks.read().decode(errors="replace")
        print(f"tokenway bench: {told}", file=sys.stderr, flush=True)
        os._exit(EXIT)  # whoever waits in a call cannot be told otherwise; peers see that this process has ended


class Silent:
    """A watch that watches nothing."""

    def doing(self, what: str) -> None:
        """Nothing."""


SILENT: Any = Silent()
