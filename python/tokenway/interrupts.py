"""Signals while the main thread waits in the C library: their handlers run there within a moment, and what one raises
(Ctrl-C's KeyboardInterrupt, a SIGTERM handler's SystemExit) ends the wait. The library asks, see interrupt.h; handlers
run in Python alone, so what it calls is Python.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Generator

from tokenway import _native, callbacks


def _answers() -> Generator[int, None, None]:
    """Whether the wait is to end, again and again.

    A generator, whose `send` ctypes calls: a function's beginning is where Python may run handlers, outside of any
    `try`, and ctypes would lose what they raise. A generator is resumed within its `try`. There are two of them because
    what handles an exception may be interrupted as well.
    """
    answer = 0
    while True:
        try:
            while True:
                try:
                    yield answer
                    ctypes.pythonapi.PyErr_CheckSignals()
                    answer = int(callbacks.interrupted())
                except GeneratorExit:
                    raise
                except BaseException as raised:
                    answer = 1
                    callbacks.keep(raised, interrupt=True)
        except GeneratorExit:
            return
        except BaseException as raised:
            answer = 1
            callbacks.keep(raised, interrupt=True)


_generator = _answers()
next(_generator)
_asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_generator.send)  # kept: C has the address


def _begin() -> None:
    """Handlers run in the main thread alone, so no other one is asked."""
    main = threading.main_thread()
    # In a forked child the thread that forked is the main one, whose number some versions do not renew.
    number = threading.get_native_id() if threading.current_thread() is main else main.native_id
    if number is not None:
        _native.lib.twSetInterrupt(_asked, None, number)


_begin()
os.register_at_fork(after_in_child=_begin)


@atexit.register
def _end() -> None:
    """Threads may wait on while the interpreter ends, and must not enter it any more."""
    _native.lib.twSetInterrupt(None, None, 0)
