"""What tests of integrations have in common."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "docs" / "FRAMEWORKS.md"


def programs_of(heading: str) -> list[str]:
    """The Python that a section of the guide shows."""
    text = GUIDE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(f"{heading}\n")]
    return re.findall(r"```python\n(.*?)```", found, re.DOTALL)


def whole(tensor: Any) -> Any:
    """A gradient as NumPy has it; of one that ranks have a part each of, all of it: collective."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().numpy().copy()


def steps() -> int:
    """Of all groups of Tokenway's in this process."""
    from tokenway.integrations import groups

    return sum(shared.steps for peers in groups.living() for shared in peers.groups.values())
