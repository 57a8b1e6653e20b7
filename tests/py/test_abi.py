"""The header and the ctypes classes are the same thing: a C program that includes the one says what
the other must hold. Both sides are read from the source, so nothing can be forgotten."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import conftest
import pytest

from tokenway import _balance, _carrier, _header, _native, errors, portable, sentences, tensors
from tokenway.settings import Settings, make_config

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "include"
NAMES = (
    "types.h",
    "carrier.h",
    "errors.h",
    "tokenway.h",
    "comm.h",
    "group.h",
    "exchange.h",
    "placement.h",
    "collectives.h",
    "balance.h",
    "interrupt.h",
    "leases.h",
    "moving.h",
    "plan.h",
    "rows.h",
)
HEADER = "".join((INCLUDE / "tokenway" / name).read_text() for name in NAMES)
CODE = re.sub(r"//[^\n]*", "", HEADER)

# The ctypes class of each struct of the headers: twTensor_t is Tensor.
STRUCTS = {
    f"tw{kind.__name__}_t": kind
    for module in (_header, _carrier, _balance)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind not in (_header.Struct, ctypes.Structure)
}

# Python's names of modes, but that C calls "auto" twAutomatic: twAuto is a strategy.
C_MODES = {"automatic" if name == "auto" else name: code for name, code in _header.MODES.items()}

# What Python says of enumerators: by the enum, what their names begin with, and Python's names and numbers. Results and
# dtypes have tests of their own.
ENUMS = {
    "twMode_t": ("tw", C_MODES),
    "twOverflow_t": ("twOverflow", _header.OVERFLOWS),
    "twCombineRows_t": ("twRow", _header.COMBINE_ROWS),
    "twIdSpace_t": ("twId", _header.ID_SPACES),
    "twLayout_t": ("tw", _header.LAYOUTS),
    "twWeighting_t": ("twWeight", _header.WEIGHTINGS),
    "twScales_t": ("twScales", _header.SCALES),
    "twReplicaPolicy_t": ("twReplica", _header.POLICIES),
    "twPhase_t": ("twPhase", {name: code for code, name in enumerate(_header.PHASES)}),
    "twStrategy_t": ("tw", portable.STRATEGIES),
    "twLinks_t": ("twLinks", {name.capitalize(): code for name, code in _header.LINKS.items()}),
    "twHandles_t": ("twHandles", {name.capitalize(): code for name, code in _header.HANDLES.items()}),
    "twCrossing_t": ("twCross", _header.CROSSINGS),
    "twDomain_t": ("twDomain", {name.capitalize(): code for name, code in _header.DOMAINS.items()}),
    "twPartKind_t": ("twPart", {kind: code for code, kind in enumerate(sentences.KINDS)}),
    "twMoveKind_t": ("twMove", {"blocks": portable.BLOCKS, "exact": portable.EXACT, "gather": portable.GATHER}),
}

DEFAULTS = ("mode", "combine_dtype", "lanes", "timeout_ms", "id_dtype", "id_space", "invalid_id", "sm_limit")

# What Python says of macros.
MACROS = {
    "TW_VERSION": _header.VERSION,
    "TW_MAX_PAYLOADS": _header.MAX_PAYLOADS,
    "TW_MAX_TOP_K": _header.MAX_TOP_K,
    "TW_MAX_RANKS": _header.MAX_RANKS,
    "TW_MAX_INDEX_BLOCK": _header.MAX_INDEX_BLOCK,
    "TW_MAX_DIMS": _header.MAX_DIMS,
}


def names(pattern: str) -> list[str]:
    return re.findall(pattern, CODE, re.MULTILINE | re.DOTALL)


def enums() -> dict[str, list[str]]:
    """Enumerators by the type of their enum."""
    found = re.findall(r"typedef enum (?:TW_AS_INT )?\{([^}]*)\} (\w+);", CODE)
    return {name: re.findall(r"\b(tw\w+)\b", body) for body, name in found}


def macros() -> list[str]:
    """Macros that stand for a number."""
    return names(r"^#define (TW_\w+) [(\d]")


def fields(struct: str) -> list[str]:
    """Names of a struct's fields, as the header has them."""
    body = re.search(r"typedef struct (?:\w+ )?\{([^}]*)\} " + struct + ";", CODE)
    assert body, struct
    pointers = r"\(\*(\w+)\)\([^;]*\)"
    declared = re.findall(pointers + r";|(\w+)(?:\[[^;]*\])?;", body[1])
    return [a or b for a, b in declared]


@pytest.fixture(scope="module")
def facts(compiler: str, tmp_path_factory: Any) -> dict[str, int]:
    """Name to number, as a C compiler sees the header."""
    lines = [f'  N("{n}", {n});' for n in [*itertools.chain(*enums().values()), *macros()]]
    for struct in STRUCTS:
        lines.append(f'  N("sizeof {struct}", sizeof({struct}));')
        for field in fields(struct):
            at = f"{struct}, {field}"
            lines.append(f'  N("offset {at}", offsetof({at}));')
            lines.append(f'  N("size {at}", sizeof((({struct}*)0)->{field}));')
    lines.append("  twGroupConfig_t d = TW_GROUP_CONFIG_INIT;")
    lines += [f'  N("default {name}", d.{name});' for name in DEFAULTS]
    program = (
        "#include <tokenway/tokenway.h>\n#include <stdio.h>\n"
        '#define N(name, number) printf("%s=%lld\\n", name, (long long)(number))\n'
        "int main(void) {\n" + "\n".join(lines) + "\n  return 0;\n}\n"
    )
    folder = tmp_path_factory.mktemp("abi")
    (folder / "facts.c").write_text(program)
    build = [compiler, "-std=c99", f"-I{INCLUDE}", "facts.c", "-o", "facts"]
    subprocess.run(build, check=True, cwd=folder)
    text = subprocess.run([folder / "facts"], check=True, capture_output=True, text=True).stdout
    return {n: int(v) for n, v in (line.rsplit("=", 1) for line in text.splitlines())}


def test_every_type_is_mirrored() -> None:
    assert set(names(r"\} (tw\w+_t);")) == {*STRUCTS, *ENUMS, "twResult_t", "twDtype_t"}


@pytest.mark.parametrize("struct", STRUCTS)
def test_layout(struct: str, facts: dict[str, int]) -> None:
    kind = STRUCTS[struct]
    mirrored = [name for name, _ in kind._fields_]
    if issubclass(kind, _header.Struct):
        mirrored.insert(0, "size")
        assert kind().size == facts[f"sizeof {struct}"]
    assert mirrored == fields(struct)
    assert ctypes.sizeof(kind) == facts[f"sizeof {struct}"]
    for name in mirrored:
        field = getattr(kind, name)
        assert field.offset == facts[f"offset {struct}, {name}"], name
        assert field.size == facts[f"size {struct}, {name}"], name


@pytest.mark.parametrize("enum", ENUMS)
def test_enumerators(enum: str, facts: dict[str, int]) -> None:
    before, mirrored = ENUMS[enum]
    assert {before + name.title().replace("_", ""): code for name, code in mirrored.items()} == {
        name: facts[name] for name in enums()[enum]
    }


def test_numbers(facts: dict[str, int]) -> None:
    assert {name: facts[name] for name in MACROS} == MACROS
    assert facts["twInterrupted"] == _header.INTERRUPTED
    assert facts["twCallMismatch"] == _header.CALL_MISMATCH
    assert set(enums()["twResult_t"]) == {"twSuccess", *errors.BY_RESULT}
    for result in enums()["twResult_t"]:
        assert _native.lib.twResultString(facts[result]).decode() == result
    assert _native.lib.twResultString(9999) == b"unknown result"
    assert _native.lib.twVersion() == facts["TW_VERSION"]


def test_dtypes(facts: dict[str, int]) -> None:
    declared = {n: facts[n] for n in enums()["twDtype_t"] if n != "twDtypeNone"}
    plain = {n.replace("_", "").removesuffix("fn").lower(): c for n, c in tensors.CODES.items()}
    assert {name.removeprefix("tw").lower(): code for name, code in declared.items()} == plain


def exported() -> set[str]:
    """Functions that the library gives to the linker."""
    tool = shutil.which("nm")
    conftest.need(tool is not None, "nm")
    command = [tool or "", "-D", "--defined-only", str(_native.library_path())]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip()}


def test_every_function_has_a_signature() -> None:
    declared = set(names(r"^TW_API [\w* ]*?\b\*?(tw\w+)\("))
    assert declared == set(_header.FUNCTIONS)
    symbols = exported()
    assert declared <= symbols
    others = {s for s in symbols - declared if s not in ("TOKENWAY", "_init", "_fini")}
    assert not {s for s in others if not re.fullmatch(r"TOKENWAY[\w.]*|TW[\w.]*", s)}, others


def test_argument_counts() -> None:
    for name, arguments in re.findall(r"^TW_API [\w* ]*?\b\*?(tw\w+)\((.*?)\);", CODE, re.M | re.S):
        count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        function = getattr(_native.lib, name)
        assert len(function.argtypes) == count == len(_header.FUNCTIONS[name][1]), name


STANDARDS = {
    "c99": ["-x", "c", "-std=c99", "-pedantic-errors"],
    "c11": ["-x", "c", "-std=c11", "-pedantic-errors"],
    "c++98": ["-x", "c++", "-std=c++98", "-Wno-long-long", "-Wno-variadic-macros"],
    "c++20": ["-x", "c++", "-std=c++20", "-pedantic-errors"],
}


@pytest.mark.parametrize("standard", STANDARDS)
def test_header_alone(standard: str, compiler: str, tmp_path: Path) -> None:
    """It compiles first in a file and twice, without a warning, and its INIT macros fit."""
    if "++" in standard:
        compiler = shutil.which("c++") or compiler
    inits = [m for m in names(r"^#define (TW_\w+_INIT)\b")]
    assert inits
    uses = []
    for macro in inits:
        words = macro.removeprefix("TW_").removesuffix("_INIT").split("_")
        struct = "tw" + "".join(word.title() for word in words) + "_t"
        uses.append(f"{struct} v{len(uses)} = {macro};")
    text = "#include <tokenway/tokenway.h>\n#include <tokenway/tokenway.h>\n" + "\n".join(uses)
    source = tmp_path / "alone.txt"
    source.write_text(text + "\nint main(void) { return 0; }\n")
    flags = ["-Wall", "-Wextra", "-Werror", "-Wstrict-prototypes"] if "++" not in standard else []
    flags = flags or ["-Wall", "-Wextra", "-Werror"]
    command = [compiler, *STANDARDS[standard], *flags, f"-I{INCLUDE}", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    only = set(re.findall(r"#include <([\w.]+)>", HEADER))
    assert only == {"stddef.h", "stdint.h"}


def test_defaults(facts: dict[str, int]) -> None:
    """What TW_GROUP_CONFIG_INIT leaves out and what Group leaves out is the same group."""
    config, _ = make_config(Settings(experts=1, top_k=1, hidden=1, max_tokens=1))
    for name in DEFAULTS:
        assert getattr(config, name) == facts[f"default {name}"], name
