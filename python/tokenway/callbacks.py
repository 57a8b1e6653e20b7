"""Python functions that the C library calls. Through C's frames no exception passes, and ctypes prints what such a
function raises and hands C a number that nobody gave. So it is kept here, and the call under way tells it: as the cause
of its own error, or, of an end that somebody asked for (Ctrl-C, a signal's handler), as what it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import get_ident
from typing import Any

_log = logging.getLogger("tokenway")

# By thread: what was raised first, and whether it is an interrupt, which no peer and no argument is to blame for.
_kept: dict[int, tuple[BaseException, bool]] = {}


def keep(error: BaseException, interrupt: bool = False) -> None:
    """Keeps what a function has raised for the call of this thread. An interrupt is kept before any error."""
    interrupt = interrupt or not isinstance(error, Exception)
    if interrupt or get_ident() not in _kept:
        _kept[get_ident()] = error, interrupt


def take_cause() -> BaseException | None:
    """What a function has raised since this thread last asked, no interrupts: the cause of an error that C returned."""
    kept = _kept.get(get_ident()) if _kept else None
    if kept is None or kept[1]:
        return None
    del _kept[get_ident()]
    return kept[0]


def interrupted() -> bool:
    """Whether an interrupt is kept for this thread."""
    return bool(_kept) and _kept.get(get_ident(), (None, False))[1]


def tell(error: BaseException | None = None) -> None:
    """After a call: raises an interrupt, whose cause `error` is if C has returned one. An error stays for the call that
    C lets fail by it, which may be a later one of this thread."""
    if _kept and interrupted():
        interrupt = _kept.pop(get_ident())[0]
        if error is not None:
            raise interrupt from error
        raise interrupt


def function(prototype: Any, call: Callable[..., Any], failed: Any, problem: str = "") -> Any:
    """A C function of a Python one; when that raises, C gets `failed`. problem: a line for the log, where the library's
    own threads call it too, or C would not ask how it went."""

    def guarded(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException as error:
            if problem and isinstance(error, Exception):
                _log.exception(problem)
            if failed is not None or not isinstance(error, Exception):
                keep(error)
            return failed

    return prototype(guarded)
