"""What importing the package says of a library that is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenway import _header, _native

PATH = os.pathsep.join(sys.path)


def imported(library: Path) -> str:
    """The last line of what `import tokenway` says with that library."""
    env = os.environ | {"PYTHONPATH": PATH, "TOKENWAY_LIBRARY": str(library)}
    done = subprocess.run([sys.executable, "-c", "import tokenway"], env=env, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [""])[-1]


def build(compiler: str, folder: Path, code: str) -> Path:
    (folder / "other.c").write_text(code)
    library = folder / "libother.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(folder / "other.c"), "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("int twVersion(void) { return 10203; }", "is Tokenway 1.2.3, and this package is "),
        ("int something(void) { return 1; }", "is no Tokenway library: it has no function twVersion"),
        (f"int twVersion(void) {{ return {_header.VERSION}; }}", "without twResultString: build it anew"),
    ],
)
def test_another_library(compiler, tmp_path, code, told) -> None:
    library = build(compiler, tmp_path, code)
    said = imported(library)
    assert said.startswith(f"ImportError: {library} ") and told in said, said


def test_no_library(tmp_path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    assert imported(text).startswith(f"ImportError: the Tokenway library {text} cannot be loaded: ")
    assert f"no Tokenway library at {tmp_path}/none.so" in imported(tmp_path / "none.so")
    assert imported(_native.library_path().resolve()) == ""
