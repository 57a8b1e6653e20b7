"""Tables that commands print: in a pipe, on a terminal, and without rich."""

from __future__ import annotations

import importlib.util
import io

import pytest
from conftest import need

from tokenway import tables

HEADS = ["name", "where", "us", "of floor"]
CELLS = [["[bold] one", "a", "1.0", ""], ["two", "bb", "1,234", "1.50x"]]


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def rich() -> None:
    need(importlib.util.find_spec("rich") is not None, "rich")


@pytest.mark.usefixtures("rich")
def test_in_a_pipe(capsys, monkeypatch) -> None:
    """Plain columns, however wide: texts on the left, numbers on the right, and nothing that is taken for markup."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    tables.show_columns("What it shows", [*HEADS, "x" * 300], [[*line, "y"] for line in CELLS])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "What it shows" and len(lines) == 4
    assert [line[:38] for line in lines[1:]] == [
        "name        where     us  of floor  xx",
        "[bold] one  a        1.0              ",
        "two         bb     1,234     1.50x    ",
    ]
    assert {len(line) for line in lines[1:]} == {336}


@pytest.mark.usefixtures("rich")
def test_no_space_at_the_end(capsys) -> None:
    tables.show_columns("What it shows", HEADS, CELLS, range(0))
    assert all(line == line.rstrip() for line in capsys.readouterr().out.splitlines())


@pytest.mark.usefixtures("rich")
def test_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    tables.show_columns("What it shows", HEADS, CELLS)
    text = shown.getvalue()
    assert text.startswith("What it shows\n") and "┃" in text and "[bold] one" in text and "1.50x" in text


def test_without_rich(capsys, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    tables.show_columns("What it shows", HEADS, CELLS)
    assert capsys.readouterr().out.splitlines()[1:] == ["\t".join(line) for line in (HEADS, *CELLS)]
