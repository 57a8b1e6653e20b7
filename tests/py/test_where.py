"""docs/WHERE.md names files and symbols; they exist, and are defined where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<question>[^|]+) \| `(?P<file>[^`]+)` \| `(?P<symbol>[^`]+)` \|$", re.MULTILINE)
TEXT = (ROOT / "docs" / "WHERE.md").read_text()
ROWS = [m.groupdict() for m in ROW.finditer(TEXT)]

# What a newcomer asks for first.
ASKED = (
    *("slot decided", "signal published", "order of a sum fixed", "number of SMs", "becomes? LL128"),
    *("layout", "transport", "tuned numbers", "framework"),
)


def test_what_is_asked_first_is_answered() -> None:
    questions = "\n".join(row["question"] for row in ROWS)
    for asked in ASKED:
        assert re.search(asked, questions), asked
    assert len(ROWS) >= 30
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and "| file |" not in line]
    assert len(ROWS) == len(lines), "a row that names no file and no symbol"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['file']}:{row['symbol']}")
def test_symbols_exist(row: dict[str, str]) -> None:
    text = (ROOT / row["file"]).read_text()
    name = re.escape(row["symbol"])
    # As it stands where it is defined or declared: not in a comment, and not only called.
    kinds = rf"\b(class|struct|def|enum class) {name}\b"
    others = rf"[\w>&*] [&*]*(\w+::)?{name}\s*[\[({{=]"
    defined = rf"^(?!\s*(//|#|\*|return|if))[^\n=(]*({kinds}|{others})"
    assert re.search(defined, text, re.MULTILINE), f"{row['file']} defines no {row['symbol']}"
