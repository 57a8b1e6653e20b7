"""The module `deep_ep`: its place in sys.modules, and what stands there."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import tokenway as tw

NAME = "deep_ep"


class _Made(Loader):
    """Loads a module that is made already."""

    def __init__(self, module: ModuleType):
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def put(modules: dict[str, dict[str, Any]]) -> ModuleType:
    """Puts modules of these names and contents into sys.modules, packages all of them, and returns the first, under
    which the others are; or what stands there, if this was done before. Errors: InvalidUsage, if other modules do."""
    there = sys.modules.get(NAME)
    if there is not None:
        if is_ours(there):
            return there
        raise tw.InvalidUsage(
            f"{NAME} was imported before, from {getattr(there, '__file__', None)}, and others may hold its classes: "
            "call install() before anything imports it"
        )
    for name, contents in modules.items():
        module = ModuleType(name, f"Tokenway in the place of {name} (tokenway.compat.deep_ep).")
        module.__spec__ = ModuleSpec(name, _Made(module), origin="tokenway.compat.deep_ep", is_package=True)
        module.__loader__, module.__package__, module.__path__ = module.__spec__.loader, name, []
        module.__dict__.update(contents)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    return sys.modules[NAME]


def remove() -> None:
    """Takes them away again; what others have imported from them stays with those."""
    if is_ours(sys.modules.get(NAME)):
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            if is_ours(sys.modules[name]):
                del sys.modules[name]


def is_ours(module: Any) -> bool:
    """Whether a module is one that `put` has made."""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Made)
