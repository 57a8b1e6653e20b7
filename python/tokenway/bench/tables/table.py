"""A table as data, and the words that tables of several kinds of runs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenway import tables

Run = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells under their heads. `what` says what they show, without a full stop; the columns `texts` hold texts, the
    others numbers."""

    what: str
    heads: list[str]
    cells: list[list[str]]
    texts: range = range(2)

    def markdown(self) -> list[str]:
        """The lines of a Markdown table, numbers to the right."""
        rule = ["---" if i in self.texts else "---:" for i in range(len(self.heads))]
        return [markdown_row(line) for line in (self.heads, rule, *self.cells)]


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def microseconds(value: float) -> str:
    """Three digits or so."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def medians(what: str, settings: dict[str, Any], count: str = "") -> str:
    """What a table of medians shows. count: how many iterations there were, where the settings do not tell."""
    if settings["verify_only"]:
        return what
    count = count or f"{settings['iterations']} iterations in {settings['rounds']} rounds"
    return f"{what}; medians of {count}, all subjects in turns"


def where(run: Run) -> str:
    """The machine in a line: its GPUs, of a run on some."""
    return _gpus(run["gpu"]) if "gpu" in run else _cpu(run["machine"])


def _cpu(machine: dict[str, Any]) -> str:
    cache = tables.mebibytes(machine["last_level_cache_bytes"])
    cores = f"{machine['usable_cores']} cores" + " of a virtual machine" * machine["virtual"]
    gib = machine["memory_bytes"] / (1 << 30)
    return f"{machine['cpu']}, {cores}, {cache} MiB last-level cache, {gib:.0f} GiB memory, kernel {machine['kernel']}"


def _gpus(gpu: dict[str, Any]) -> str:
    first = gpu["gpus"][0] if gpu["gpus"] else {}
    parts = [f"{gpu['used']} of {gpu['count']} {gpu['gpu']}", gpu["link"] and f"linked by {gpu['link']}"]
    parts += [f"driver {gpu['driver']}"] if gpu["driver"] else []
    if first:
        parts.append(f"SM clock {first['sm_clock']} (most {first['max_sm_clock']}), {first['power_limit']}")
    return ", ".join(part for part in parts if part)
