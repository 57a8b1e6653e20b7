"""Tables on a terminal, with rich where it is installed, and in a pipe, in plain columns."""

from __future__ import annotations

import importlib.util
import sys


def mebibytes(value: float) -> str:
    """With one digit after the point where that says something."""
    mib = value / (1 << 20)
    return f"{mib:.1f}" if mib < 100 else f"{mib:,.0f}"


def show_columns(head: str, heads: list[str], cells: list[list[str]]) -> None:
    """Prints one table under a line that says what it is; its first two columns are texts."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        made = Table(title=head)
        for i, name in enumerate(heads):
            made.add_column(name, justify="left" if i < 2 else "right")
        for line in cells:
            made.add_row(*line)
        Console().print(made)
    else:
        print(head)
        print(plain(heads, cells))


def plain(heads: list[str], cells: list[list[str]]) -> str:
    """Columns aligned with spaces: texts on the left, numbers on the right."""
    lines = [heads, *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
