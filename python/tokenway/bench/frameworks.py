"""`tokenway bench --frameworks`: what integrations are worth, beside the frameworks' own ways, in three parts.

    exchange    dispatch and combine through vLLM's, Megatron's and deep_ep's calls (framework_exchange.py)
    scatter     a reduce-scatter of uneven sizes in place of an all-reduce and a slice (framework_scatter.py)
    engine      a small decoder that prompts and generates, by four ways (framework_engine.py)

Frameworks are imported in the part that needs them, and named where they are missing.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

from tokenway.bench import gpu_machine, runner
from tokenway.bench.control import Control
from tokenway.bench.progress import Progress
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings

LIMIT = 570.0  # of a run by the own launcher
PACKAGES = ("vllm", "megatron-core")


def measure(settings: Settings) -> Results:
    """All parts of a run."""
    return runner.on_ranks(settings, measure_rank, None if settings.nvlink is None else LIMIT)


def measure_rank(settings: Settings) -> Results:
    """The same as one of the ranks. Collective."""
    assert settings.frameworks is not None

    def parts(control: Control, progress: Progress, stack: ExitStack) -> dict[str, Any]:
        from tokenway.bench.framework_place import Place

        assert settings.frameworks is not None
        place = Place(settings, control, progress, stack)
        found = {name: part(name, place) for name in settings.frameworks.parts}
        more = gpu_machine.results(settings.ranks) if place.on_gpus and control.rank == 0 else {}
        if place.on_gpus:
            more["backend"] = "nvlink"
        return {"frameworks": found} | more | {"versions": more.get("versions", {}) | _versions()}

    return runner.as_rank(settings, len(settings.frameworks.parts), parts)


def part(name: str, place: Any) -> dict[str, Any]:
    """What a part measures. Collective."""
    measured: dict[str, Any] = import_module(f"tokenway.bench.framework_{name}").measure(place)
    place.progress.done()
    return measured


def _versions() -> dict[str, str]:
    """Of the frameworks that are here."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
