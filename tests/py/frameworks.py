"""What tests of integrations have in common."""

from __future__ import annotations

import importlib.metadata
import re
import types
from pathlib import Path
from typing import Any

from conftest import need

GUIDE = Path(__file__).parents[2] / "docs" / "FRAMEWORKS.md"


def programs_of(heading: str) -> list[str]:
    """The Python that a section of the guide shows."""
    text = GUIDE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(f"{heading}\n")]
    return re.findall(r"```python\n(.*?)```", found, re.DOTALL)


def need_version(package: str, version: str) -> None:
    """Skips without the version that tests are for."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    need(found == version, f"{package} {version} (here: {found})")


def mutated(module: Any, old: str, new: str) -> Any:
    """A module whose source says `new` where that of `module` says `old`."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the adapter holds the text to change {text.count(old)} times, not once: {old}"
    made = types.ModuleType("mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), made.__dict__)
    return made


def whole(tensor: Any) -> Any:
    """A gradient as NumPy has it; of one that ranks have a part each of, all of it: collective."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().cpu().numpy().copy()


def steps() -> int:
    """Of all groups of Tokenway's in this process."""
    from tokenway.integrations import groups

    return sum(shared.steps for peers in groups.living() for shared in peers.groups.values())
