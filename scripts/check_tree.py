#!/usr/bin/env python3
"""The rules of the tree that no compiler checks.

    python scripts/check_tree.py [folder of the repository]

Files are at most 500 lines long, includes point one way only (the data's way, told in
docs/ARCHITECTURE.md), every include within the project is written from src/ or include/, no two
files of tests have one name, and no unfinished work is left marked in the text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
SIZED_FOLDERS = ("src", "include", "python", "tests", "examples")
SIZED_SUFFIXES = {".c", ".cc", ".cu", ".cuh", ".h", ".py", ".sh"}
TEXT_SUFFIXES = SIZED_SUFFIXES | {".cmake", ".map", ".md", ".pml", ".toml", ".txt", ".yml", ""}
CODE_SUFFIXES = {".c", ".cc", ".cu", ".cuh", ".h"}

# Put together here, so that this file passes its own check.
FORBIDDEN = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")

BACKENDS = {"cpu", "nvlink", "gin"}
PUBLIC = "tokenway"  # include/tokenway: anyone may include it
SHARED = {"layout", "exchange"}

# Folder of src/ -> folders that it may include. A file named in full is allowed on its own.
ALLOWED: dict[str, set[str]] = {
    "layout": {"layout"},
    "exchange": SHARED,
    "views": SHARED | {"views"},
    "quantize": SHARED | {"quantize", "core/status.h"},
    "activation": SHARED | {"activation", "quantize", "core/status.h"},
    "balance": {"balance"},
    "bootstrap": SHARED | {"bootstrap", "core/interrupt.h", "core/status.h"},
    "core": SHARED | {"core", "views", "bootstrap"},
    "api": SHARED | {"api", "core", "views", "quantize", "activation", "balance", "bootstrap"},
}
# Nobody includes a backend: core/backend.h declares the function that makes each of them.
ALLOWED |= {name: ALLOWED["core"] | {name} for name in BACKENDS}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')


def files_of(root: Path) -> list[Path]:
    """What git tracks or would track; where git cannot say, all but what is built."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, check=True, capture_output=True, text=True).stdout
        names = [name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
        for folder, folders, files in os.walk(root):
            built = {"build", "dist", "__pycache__"}
            folders[:] = [n for n in folders if n not in built and (n[0] != "." or n == ".ci")]
            names += [os.path.relpath(os.path.join(folder, name), root) for name in files]
    return sorted({Path(name) for name in names if (root / name).is_file()})


def may_include(folder: str, target: str) -> bool:
    """Whether a file of src/`folder` may include `target`, a path below src/ or include/."""
    target_folder = target.split("/", 1)[0]
    allowed = ALLOWED.get(folder, set())
    return target_folder == PUBLIC or target_folder in allowed or target in allowed


def check_includes(root: Path, path: Path, lines: list[str]) -> Iterator[str]:
    in_src = path.parts[0] == "src"
    folder = path.parts[1] if in_src and len(path.parts) > 2 else ""
    if in_src and folder not in ALLOWED:
        yield f"{path}: src/{folder} is a folder that scripts/check_tree.py knows no arrows for"
        return
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        target = match[1]
        if in_src and not any((root / base / target).is_file() for base in ("src", "include")):
            yield f'{path}:{number}: "{target}" is not a path below src/ or include/'
        elif in_src and not may_include(folder, target):
            yield f'{path}:{number}: src/{folder} may not include "{target}"'
        elif path.parts[0] == "include" and not target.startswith(PUBLIC + "/"):
            yield f'{path}:{number}: a public header may not include "{target}"'


def check_file(root: Path, path: Path) -> Iterator[str]:
    if path.name == "LICENSE" or path.suffix not in TEXT_SUFFIXES:
        return
    try:
        lines = (root / path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        yield f"{path}: not UTF-8"
        return
    sized = path.parts[0] in SIZED_FOLDERS and path.suffix in SIZED_SUFFIXES
    if sized and len(lines) > MAX_LINES:
        yield f"{path}: {len(lines)} lines; at most {MAX_LINES} are allowed"
    for number, line in enumerate(lines, 1):
        if match := FORBIDDEN.search(line):
            yield f"{path}:{number}: {match[0]}: finish it or open it as work of its own"
    if path.suffix in CODE_SUFFIXES and path.parts[0] in ("src", "include"):
        yield from check_includes(root, path, lines)


def check_test_names(files: list[Path]) -> Iterator[str]:
    """Processes that run a test's functions import its file by its name alone, from any folder of tests."""
    first: dict[str, Path] = {}
    for path in files:
        if path.parts[0] != "tests" or not path.match("test_*.py"):
            continue
        if (other := first.setdefault(path.name, path)) != path:
            yield f"{path}: {other} has that name too; processes would import one in place of the other"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    files = files_of(root)
    problems = [problem for path in files for problem in check_file(root, path)]
    problems += check_test_names(files)
    for problem in problems:
        print(problem)
    print(f"{len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
