"""What PyTorch's autograd is told of: writes to memory that it may have saved for a backward pass.

Each tensor has a version, which PyTorch raises with every write that is its own, and compares before it uses what it
has saved: a gradient that would be wrong is an error ("modified by an inplace operation"). Here the versions are raised
of what the C library writes to. It costs 0.4 us for a call, and nothing where there are none of PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_uint32
from typing import Any

import numpy as np

from tokenway import _native
from tokenway.errors import InUse
from tokenway.tensors import tensor_type

_increment: Any = None  # PyTorch's, once there was a tensor of its


def _raise(tensors: Any) -> None:
    """The versions of a sequence of tensors, in one call of PyTorch's."""
    global _increment
    if _increment is None:
        _increment = _choose_increment()
    _increment(tensors)


def _choose_increment() -> Callable[[Sequence[Any]], object]:
    increment: Any = sys.modules["torch"].autograd.graph.increment_version
    try:
        increment(())
    except (TypeError, RuntimeError):  # PyTorch 2.4 takes one tensor at a time
        return lambda tensors: [increment(x) for x in tensors]
    return increment


def written(out: Any) -> None:
    """What a call had to write to: a tensor, or a sequence or mapping of them, of PyTorch or not."""
    if tensors := _torch_of(out):
        _raise(tensors)


def _torch_of(out: Any) -> tuple[Any, ...]:
    """PyTorch's tensors among what a call had to write to."""
    kind = tensor_type()
    if kind is None or type(out) is np.ndarray:
        return ()
    if issubclass(type(out), kind):
        return (out,)
    if isinstance(out, (dict, Mapping)):
        out = out.values()
    elif not isinstance(out, (list, tuple)):
        return ()
    return tuple(x for x in out if issubclass(type(x), kind))


class Views:
    """PyTorch's views of a window, by the lane whose last step has shown them. The next step there, of whichever of the
    window's groups, is where they end: it lets peers write to their bank. So that is where their versions are raised,
    and again where they are shown anew."""

    def __init__(self, lanes: int):
        self.groups: list[int] = []  # addresses of those that live
        self._lanes: list[tuple[Any, ...]] = [()] * lanes
        self._steps = (c_uint32 * lanes)()
        self._stepped: list[int] = [0]  # lanes that the last call has made steps on
        self.used = False  # whether PyTorch has to do with this group

    def meet(self, given: Iterable[Any]) -> bool:
        """Before a call that may show views: whether it has tensors of PyTorch. Of a closed group none has views."""
        kind = tensor_type()
        if kind is None or not self.groups:
            return False
        for x in given:
            if issubclass(type(x), kind):
                if not self.used:
                    self.used = True
                    self._read()
                return True
        return False

    def after(self, out: Any = None, error: Exception | None = None) -> None:
        """After every call that may have made a step, also one that failed. out: what the caller gave to write to."""
        if isinstance(error, InUse):  # nothing has changed
            return
        told: tuple[Any, ...] = ()
        if out is not None:
            if error is None:
                told = _torch_of(out)
            else:  # what was refused may be no more than something whose own code raises
                with suppress(Exception):
                    written(out)
        if self.used:
            told += self._step()
        if told:  # all in one call, which takes as long for few as for one
            _raise(told)

    def _read(self) -> bytes:
        """The lanes' steps before; new ones are read. Where that is refused, any lane may have made one."""
        before = bytes(self._steps)
        if _native.lib.twGroupSteps(self.groups[0], len(self._steps), self._steps):
            self._steps = (c_uint32 * len(self._steps))(*(~step & 0xFFFFFFFF for step in self._steps))
        return before

    def _step(self) -> tuple[Any, ...]:
        """The views that the last call has ended."""
        lanes = self._lanes
        if len(lanes) > 1:
            before = memoryview(self._read()).cast("I")
            self._stepped = [lane for lane, step in enumerate(self._steps) if step != before[lane]]
        ended: tuple[Any, ...] = ()
        for lane in self._stepped:
            if lanes[lane]:
                ended += lanes[lane]
                lanes[lane] = ()
        return ended

    def show(self, views: tuple[Any, ...]) -> None:
        """What that step shows."""
        for lane in self._stepped:
            self._lanes[lane] = views
        _raise(views)

    def leave(self, group: int) -> None:
        """Where a group has ended. After the last one nobody writes to the views any more."""
        self.groups.remove(group)
        if not self.groups:
            self.used = False
            self._lanes = [()] * len(self._lanes)
