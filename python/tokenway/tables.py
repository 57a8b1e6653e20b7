"""Tables for people, which rich draws: with lines on a terminal, in plain columns in a pipe."""

from __future__ import annotations

import importlib.util
import sys

_WIDE = 10_000  # characters: a line of a pipe is as long as it needs to be


def mebibytes(value: float) -> str:
    """With one digit after the point where that says something."""
    mib = value / (1 << 20)
    return f"{mib:.1f}" if mib < 100 else f"{mib:,.0f}"


def show_columns(head: str, heads: list[str], cells: list[list[str]], texts: range = range(2)) -> None:
    """Prints one table under a line that says what it is. Its columns `texts` hold texts, the others numbers. Where
    rich is not installed, tabs stand between cells."""
    print(head)
    if importlib.util.find_spec("rich") is None:
        for line in (heads, *cells):
            print("\t".join(line))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    lines = sys.stdout.isatty()
    # Whatever variables say of colours, a pipe gets plain text.
    console = Console(force_terminal=lines, width=None if lines else _WIDE, markup=False, emoji=False, highlight=False)
    made = Table(box=box.HEAVY_HEAD if lines else None, pad_edge=lines)
    for i, name in enumerate(heads):
        made.add_column(name, justify="left" if i in texts else "right")
    for line in cells:
        made.add_row(*line)
    with console.capture() as drawn:
        console.print(made)
    for line in drawn.get().splitlines():  # printed here, as rich would end the process when nobody reads on
        print(line.rstrip())
