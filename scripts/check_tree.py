#!/usr/bin/env python3
"""The rules of the tree that no compiler checks.

    python scripts/check_tree.py [folder of the repository]

Files are at most 500 lines long, includes and imports point one way only (told in docs/ARCHITECTURE.md), every include
within the project is written from src/ or include/, no two files of tests have one name, every link of a page leads to
a file and a heading that are there, files and identifiers of src/ are made of the glossary's words, and no unfinished
work is left marked in the text.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numbers_allowed

MAX_LINES = 500
SIZED_FOLDERS = ("src", "include", "python", "tests", "examples")
SIZED_SUFFIXES = {".c", ".cc", ".cu", ".cuh", ".h", ".py", ".sh"}
TEXT_SUFFIXES = SIZED_SUFFIXES | {".cmake", ".map", ".md", ".pml", ".toml", ".txt", ".yml", ""}
CODE_SUFFIXES = {".c", ".cc", ".cu", ".cuh", ".h"}

# Put together here, so that this file passes its own check.
FORBIDDEN = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")

PUBLIC = "tokenway"  # include/tokenway: anyone may include it
SHARED = {"layout", "exchange"}

# Room (a folder of src/, of src/cuda/ its folders) -> rooms that it may include, beside itself. A file named in full
# is allowed on its own.
ALLOWED: dict[str, set[str]] = {
    "layout": set(),
    "exchange": {"layout"},
    "views": SHARED,
    "quantize": SHARED | {"core/status.h"},
    "activation": SHARED | {"quantize", "core/status.h"},
    "balance": set(),
    "bootstrap": SHARED | {"core/interrupt.h", "core/status.h"},
    "net": {"bootstrap", "core/interrupt.h", "core/status.h"},
    "core": SHARED | {"views", "bootstrap"},
    "api": SHARED | {"core", "views", "quantize", "activation", "balance", "bootstrap"},
}
# The engine between hosts is made in one place, and used by its seam.
ALLOWED["api"] |= {"net/libfabric.h", "net/fabric.h", "net/endpoint.h"}
# Nobody includes a backend: core/backend.h declares the function that makes each of them.
BACKEND = {*ALLOWED["core"], "core"}
KERNEL = SHARED | {"views", "cuda/launch", "cuda/device"}
ALLOWED |= {
    "cpu": BACKEND | {"quantize", "net/engine.h"},
    "cuda/launch": SHARED | {"views"},
    "cuda/device": SHARED | {"views", "cuda/launch", "cuda/transport/target.cuh", "cuda/transport/store.cuh"},
    **{f"cuda/{room}": KERNEL for room in ("counts", "view")},
    "cuda/step": KERNEL | {"cuda/transport/net.cuh"},  # the one file that posts
    "cuda/dispatch": KERNEL | {"cuda/view/by_expert.cuh"},  # rows that go straight to their experts
    "cuda/combine": KERNEL | {"quantize"},  # rows that return as fp8
    "cuda/collective": KERNEL | {"cuda/combine"},  # a reduce-scatter is a combine whose owners are known
    "cuda/plan": SHARED | {"cuda/launch", "core/status.h", "core/plan_query.h"},
    "cuda/driver": {"core/status.h"},
    "cuda/transport": BACKEND | {"cuda/launch", "cuda/driver", "cuda/device/ptx.cuh", "net/engine.h"},
    "cuda/host": BACKEND | {"cuda/launch", "cuda/plan", "cuda/driver", "cuda/transport"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')

# Room of python/tokenway -> the modules of it (or the folder that it is), and the rooms that these may import, beside
# their own. Every import counts: late ones, and those for types alone. No modules import each other in a circle.
NATIVE, TENSORS = {"native"}, {"native", "tensors"}
GROUPS = TENSORS | {"settings", "ranks", "exchange"}
LIBRARY = GROUPS | {"rows", "oracle", "routing", "console", "balance", "pytorch", "faces", "package"}
PYTHON: dict[str, tuple[str, set[str]]] = {
    # what does the C library take and say
    "native": ("_header _carrier _balance _native callbacks errors interrupts sentences", set()),
    # how does a tensor become a descriptor, and memory a tensor
    "tensors": ("tensors cuda checked versions", NATIVE),
    # what do rows become beside the exchange
    "rows": ("activation microscaling quantize", TENSORS),
    # what is a group made of
    "settings": ("placement settings", TENSORS),
    # who takes part, and how do they find each other
    "ranks": ("comm connecting launch meeting nccl party portable staged", TENSORS | {"settings"}),
    # what can be done with a group
    "exchange": (
        "arguments blocks calls collectives counting exchange group growth handle leases maps moving "
        "native_group outputs received routing_layout row_types shape spare structs survivors",
        TENSORS | {"settings", "ranks"},
    ),
    # what must every result be
    "oracle": (
        "activation_reference collective_reference domain_reference grouped_reference index_reference "
        "per_expert_reference reference replica_reference sum_reference view_reference wire_reference",
        set(),
    ),
    # what does a router choose
    "routing": ("gating recorded", set()),
    # how do commands read options and print, and what do they run on
    "console": ("machine tables usage", NATIVE),
    # where do experts go
    "balance": ("balance/", GROUPS | {"routing", "console"}),
    # what does PyTorch get: all that cannot be imported without it
    "pytorch": ("pytorch/", GROUPS | {"rows", "oracle", "balance"}),
    # ... under which names
    "faces": ("autograd experts nn ops training", {"pytorch"}),
    # what is tokenway.x
    "package": ("__init__", GROUPS | {"rows"}),
    # how does a framework run it that calls another library
    "plugins": ("integrations/sglang integrations/sglang_eplb", {"compat", "integrations", "package"}),
    # how does a framework run it; nothing but the last, the next and bench imports this room
    "integrations": ("integrations/", {"package", "faces", "pytorch", "ranks", "native", "balance"}),
    # how does code run that calls another library; nothing but plugins and bench imports this room
    "compat": ("compat/", {"integrations", "package", "pytorch", "native"}),
    # how fast is it; no other room but the command line knows of it
    "bench": ("bench/", LIBRARY | {"integrations", "compat"}),
    # what would an exchange take on a machine that one does not have
    "planning": ("planning/", LIBRARY | {"bench", "window_plan"}),
    # how would the CUDA backend run a step
    "window_plan": ("plan", {"native", "tensors", "settings"}),
    # what does a command do
    "command": ("cli info", LIBRARY | {"bench", "planning", "window_plan"}),
}
# Rooms, and modules of others, that may import PyTorch when they are imported.
NEEDS_TORCH = {"pytorch", "faces", "compat"}
NEEDS_TORCH |= {f"tokenway.bench.{name}" for name in ("decoder", "gpu_case", "layer_case", "mixings", "returns")}
NEEDS_TORCH |= {f"tokenway.bench.{name}" for name in ("moving", "moving_case")}
NEEDS_TORCH |= {
    f"tokenway.bench.framework_{name}"
    for name in ("deep_ep", "engine", "exchange", "megatron", "place", "scatter", "vllm", "ways")
}
NEEDS_TORCH |= {
    f"tokenway.integrations.{name}"
    for name in (
        "by_capacity",
        "by_expert",
        "collectives",
        "expert_rows",
        "fp8_rows",
        "groups",
        "low_latency",
        "megatron_layer",
        "moved_experts",
        "rank_major",
        "rank_rows",
        "sglang_eplb",
        "torchtitan_dispatcher",
        "transformers_experts",
        "vllm_eplb",
        "vllm_layers",
    )
}


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


def room_of(path: str) -> str:
    """The room of a path below src/ (or of a public header: tokenway)."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "cuda" and len(parts) > 2 else parts[0]


def may_include(room: str, target: str) -> bool:
    """Whether a file of `room` may include `target`, a path below src/ or include/."""
    allowed = ALLOWED.get(room, set()) | {room, PUBLIC}
    return room_of(target) in allowed or target in allowed


def check_includes(root: Path, path: Path, lines: list[str]) -> Iterator[str]:
    in_src = path.parts[0] == "src"
    room = room_of("/".join(path.parts[1:])) if len(path.parts) > 2 else ""
    if in_src and room not in ALLOWED:
        yield f"{path}: src/{room} is a room that scripts/check_tree.py knows no arrows for"
        return
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        target = match[1]
        if in_src and not any((root / base / target).is_file() for base in ("src", "include")):
            yield f'{path}:{number}: "{target}" is not a path below src/ or include/'
        elif in_src and not may_include(room, target):
            yield f'{path}:{number}: src/{room} may not include "{target}"'
        elif path.parts[0] == "include" and not target.startswith(PUBLIC + "/"):
            yield f'{path}:{number}: a public header may not include "{target}"'


class Import(NamedTuple):
    """One import: where, of which module, and whether in a function, so that it runs when that is called."""

    line: int
    module: str
    late: bool


def imports_of(name: str, is_package: bool, tree: ast.Module, modules: Iterable[str]) -> Iterator[Import]:
    """What a module imports. `modules` are those of the package: what is imported from one may be another."""
    inside = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = {id(node) for scope in ast.walk(tree) if isinstance(scope, inside) for node in ast.walk(scope)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, id(node) in late)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(node.lineno, inner if inner in modules else base, id(node) in late)


def python_room_of(module: str) -> str:
    """The room of a module such as tokenway.bench.case, which may be named apart from its folder; none: "" """
    parts = module.split(".")[1:] or ["__init__"]
    for room, (names, _) in PYTHON.items():
        if {"/".join(parts), f"{parts[0]}/"} & set(names.split()):
            return room
    return ""


def check_imports(root: Path, files: list[Path]) -> Iterator[str]:
    """Imports within the Python package point one way, and none of them needs PyTorch before it is asked for."""
    paths: dict[str, Path] = {}
    for path in files:
        if path.parts[:2] == ("python", PUBLIC) and path.suffix == ".py":
            parts = path.with_suffix("").parts[1:]
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        room = python_room_of(name)
        if not room:
            yield f"{path}: {name} is in no room that scripts/check_tree.py knows"
            continue
        allowed = PYTHON[room][1] | {room}
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        for found in imports_of(name, path.name == "__init__.py", tree, paths):
            top = found.module.split(".")[0]
            if top == "torch" and not found.late and not {room, name} & NEEDS_TORCH:
                yield f"{path}:{found.line}: the room {room} is imported without PyTorch; import it where it is used"
            if top != PUBLIC:
                continue
            graph.setdefault(name, set()).add(found.module)
            if python_room_of(found.module) not in allowed:
                yield f"{path}:{found.line}: the room {room} may not import {found.module}"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"python/{PUBLIC}: modules import each other in a circle: {' -> '.join(reversed(error.args[1]))}"


NUMBER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F']+|\d[\d']*)(?:[uU]?[lL]{0,2}|f)\b(?!\.)")
# Rooms whose numbers are explained: kernels, and the host side. Plans have theirs in a table.
NUMBERED = {"device", "dispatch", "combine", "collective", "counts", "view", "step", "transport", "host"}


def code_of(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(number, code) of lines of C++, without comments, what strings hold, and what is for the preprocessor."""
    for number, line in enumerate(lines, 1):
        code = re.sub(r'"(\\.|[^"\\])*"', '""', line.split("//")[0])
        if not code.lstrip().startswith("#"):
            yield number, code


def check_numbers(path: Path, lines: list[str]) -> Iterator[str]:
    """Numbers of kernels and of the host side stand in numbers_allowed.py with a reason, or in the plan's table."""
    if path.parts[:2] != ("src", "cuda") or path.parts[2] not in NUMBERED:
        return
    reasons = numbers_allowed.ALLOWED.get("/".join(path.parts[2:]), {})
    unused = set(reasons)
    for number, code in code_of(lines):
        for match in NUMBER.finditer(code):
            value = int(match[1].replace("'", ""), 0)
            unused.discard(value)
            if value not in numbers_allowed.PLAIN and value not in reasons:
                yield f"{path}:{number}: {match[0]}: tuned: plan/tuning.cc; else explain it in numbers_allowed.py"
    for value in sorted(unused):
        yield f"scripts/numbers_allowed.py: {path} holds no {value}"


# Words that the field has others for: no file of src/, and no identifier in one, is made of them (docs/GLOSSARY.md).
RETIRED = {
    "beside": "metadata",
    "carriage": "staged",
    "carried": "staged",
    "comes": "arrives",
    "course": "order",
    "landing": "receive_offset",
    "lane": "channel",
    "lanes": "channels",
    "line": "packet",
    "lines": "packets",
    "tallies": "loads",
    "tally": "loads",
    "ticket": "work",
    "tickets": "work_counters",
    "unit": "tile",
    "units": "tiles",
}
# Identifiers in which one of them means something else.
MEANT_OTHERWISE = {"kCacheLine": "a line of the processor's caches"}
# Rooms whose lanes are those of a vector: the values that one thread converts at once.
VECTORS = {"activation", "quantize"}
PUBLIC_NAME = re.compile("tw[A-Z]|TW_")
WARP_LANE = re.compile(r"\blane\(\)")  # in src/cuda: the number of the thread in its warp
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@functools.cache
def public_names(root: Path) -> set[str]:
    """The identifiers of the public headers, whose words stay as they are."""
    texts = [path.read_text(encoding="utf-8") for path in (root / "include").rglob("*.h")]
    return {name for text in texts for _, code in code_of(text.splitlines()) for name in IDENTIFIER.findall(code)}


def is_public(root: Path, name: str, before: str) -> bool:
    """Whether a name behind that code is one of the C API: a member of its structs, a function, type or constant."""
    if PUBLIC_NAME.match(name):
        return True
    return before.rstrip().endswith((".", "->")) and name in public_names(root)


def retired_in(name: str, room: str) -> Iterator[str]:
    for part in PART.findall(name):
        word = part.lower()
        if word in RETIRED and not (room in VECTORS and word in ("lane", "lanes")):
            yield f"{word} is {RETIRED[word]} here"


def check_words(root: Path, path: Path, lines: list[str]) -> Iterator[str]:
    """Files and identifiers are made of the field's words."""
    if path.parts[0] != "src":
        return
    room = path.parts[1]
    for problem in retired_in(path.stem, room):
        yield f"{path}: {problem}"
    for number, code in code_of(lines):
        if room == "cuda":
            code = WARP_LANE.sub("", code)
        for match in IDENTIFIER.finditer(code):
            if match[0] in MEANT_OTHERWISE or is_public(root, match[0], code[: match.start()]):
                continue
            for problem in retired_in(match[0], room):
                yield f"{path}:{number}: {match[0]}: {problem}"


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
        yield from check_numbers(path, lines)
        yield from check_words(root, path, lines)


def check_test_names(files: list[Path]) -> Iterator[str]:
    """Processes that run a test's functions import its file by its name alone, from any folder of tests."""
    first: dict[str, Path] = {}
    for path in files:
        if path.parts[0] != "tests" or not path.match("test_*.py"):
            continue
        if (other := first.setdefault(path.name, path)) != path:
            yield f"{path}: {other} has that name too; processes would import one in place of the other"


LINK = re.compile(r"""(?:\]\(|\b(?:src|srcset|href)=")([^)\s"]+)""")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def prose_of(root: Path, page: Path) -> str:
    """A page without the code that it shows."""
    return FENCE.sub("", (root / page).read_text(encoding="utf-8"))


def anchors_of(text: str) -> set[str]:
    """The anchors that a page names, and those that GitHub gives to headings: of equal ones the second is name-1."""
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    for title in HEADING.findall(text):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        same = sum(other == name or re.fullmatch(re.escape(name) + r"-\d+", other) is not None for other in anchors)
        anchors.add(f"{name}-{same}" if same else name)
    return anchors


def check_links(root: Path, files: list[Path]) -> Iterator[str]:
    """Links within the tree: to files and folders that git knows, and to headings of pages."""
    known = set(files) | {folder for path in files for folder in path.parents}
    for page in files:
        if page.suffix != ".md":
            continue
        for link in LINK.findall(prose_of(root, page)):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            path = Path(os.path.normpath(page.parent / target)) if target else page
            if path not in known:
                yield f"{page}: the link {link} leads to no file"
            elif anchor and path.suffix == ".md" and anchor not in anchors_of(prose_of(root, path)):
                yield f"{page}: the link {link} leads to no heading"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    files = files_of(root)
    problems = [problem for path in files for problem in check_file(root, path)]
    problems += check_imports(root, files)
    problems += check_test_names(files)
    problems += check_links(root, files)
    for problem in problems:
        print(problem)
    print(f"{len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
