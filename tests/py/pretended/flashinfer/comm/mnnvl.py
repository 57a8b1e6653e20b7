"""As far as the benchmark uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class MnnvlConfig:
    """How workspaces are mapped."""

    comm_backend: Any = None
