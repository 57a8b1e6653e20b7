"""The header and the ctypes classes are the same thing: a C program that includes the one says what
the other must hold. Both sides are read from the source, so nothing can be forgotten."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import conftest
import pytest

from tokenway import _balance, _carrier, _native, errors, portable, tensors
from tokenway.settings import Settings, make_config

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "include"
NAMES = (
    "types.h",
    "carrier.h",
    "tokenway.h",
    "comm.h",
    "placement.h",
    "collectives.h",
    "balance.h",
    "interrupt.h",
    "leases.h",
    "plan.h",
    "rows.h",
)
HEADER = "".join((INCLUDE / "tokenway" / name).read_text() for name in NAMES)
CODE = re.sub(r"//[^\n]*", "", HEADER)

# The ctypes class of each struct of the header.
STRUCTS = {
    "twTensor_t": _native.Tensor,
    "twCommConfig_t": _native.CommConfig,
    "twPayload_t": _native.Payload,
    "twPlacement_t": _native.Placement,
    "twGroupConfig_t": _native.GroupConfig,
    "twGroupInfo_t": _native.GroupInfo,
    "twWindowBytes_t": _native.WindowBytes,
    "twPlanQuery_t": _native.PlanQuery,
    "twErrorRecord_t": _native.ErrorRecord,
    "twDispatchInput_t": _native.DispatchInput,
    "twDispatchOutput_t": _native.DispatchOutput,
    "twCountsInput_t": _native.CountsInput,
    "twLeaseInfo_t": _native.LeaseInfo,
    "twCombineInput_t": _native.CombineInput,
    "twCombineOutput_t": _native.CombineOutput,
    "twChannelConfig_t": _carrier.ChannelConfig,
    "twMove_t": _carrier.Move,
    "twCarrier_t": _carrier.CarrierStruct,
    "twPortableConfig_t": _carrier.PortableConfig,
    "twPortableInfo_t": _carrier.PortableInfo,
    "twAllGatherVInput_t": _native.AllGatherVInput,
    "twAllGatherVOutput_t": _native.AllGatherVOutput,
    "twReduceScatterVInput_t": _native.ReduceScatterVInput,
    "twReduceScatterVOutput_t": _native.ReduceScatterVOutput,
    "twPlanConfig_t": _balance.PlanConfig,
    "twPlanOutput_t": _balance.PlanOutput,
    "twPlanMove_t": _balance.PlanMove,
}

DEFAULTS = ("mode", "combine_dtype", "lanes", "timeout_ms", "id_dtype", "id_space", "invalid_id", "sm_limit")

# What Python says of macros and enumerators, by name in C.
MACROS = {
    "TW_VERSION": _native.VERSION,
    "TW_MAX_PAYLOADS": _native.MAX_PAYLOADS,
    "TW_MAX_TOP_K": _native.MAX_TOP_K,
    "TW_MAX_RANKS": _native.MAX_RANKS,
    "TW_MAX_DIMS": _native.MAX_DIMS,
}


def names(pattern: str) -> list[str]:
    return re.findall(pattern, CODE, re.MULTILINE | re.DOTALL)


def enumerators() -> list[str]:
    bodies = names(r"typedef enum (?:TW_AS_INT )?\{(.*?)\}")
    return [name for body in bodies for name in re.findall(r"\b(tw\w+)\b", body)]


def macros() -> list[str]:
    """Macros that stand for a number."""
    return names(r"^#define (TW_\w+) [(\d]")


def fields(struct: str) -> list[str]:
    """Names of a struct's fields, as the header has them."""
    body = re.search(r"typedef struct \{([^}]*)\} " + struct + ";", CODE)
    assert body, struct
    pointers = r"\(\*(\w+)\)\([^;]*\)"
    declared = re.findall(pointers + r";|(\w+)(?:\[[^;]*\])?;", body[1])
    return [a or b for a, b in declared]


@pytest.fixture(scope="module")
def facts(compiler: str, tmp_path_factory: Any) -> dict[str, int]:
    """Name to number, as a C compiler sees the header."""
    lines = [f'  N("{n}", {n});' for n in [*enumerators(), *macros()]]
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


def test_every_struct_is_mirrored() -> None:
    declared = set(names(r"\} (tw\w+_t);")) - set(names(r"typedef enum (?:TW_AS_INT )?\{[^}]*\} (tw\w+_t);"))
    assert declared == set(STRUCTS)
    mirrored = {
        value
        for module in (_native, _carrier, _balance)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ctypes.Structure)
    }
    assert mirrored - {_native.Struct, ctypes.Structure} == set(STRUCTS.values())


@pytest.mark.parametrize("struct", STRUCTS)
def test_layout(struct: str, facts: dict[str, int]) -> None:
    kind = STRUCTS[struct]
    assert [name for name, _ in kind._fields_] == fields(struct)
    assert ctypes.sizeof(kind) == facts[f"sizeof {struct}"]
    for name, _ in kind._fields_:
        field = getattr(kind, name)
        assert field.offset == facts[f"offset {struct}, {name}"], name
        assert field.size == facts[f"size {struct}, {name}"], name
    if issubclass(kind, _native.Struct):
        assert kind().size == facts[f"sizeof {struct}"]


def test_numbers(facts: dict[str, int]) -> None:
    assert {name: facts[name] for name in MACROS} == MACROS
    assert facts["twInterrupted"] == _native.INTERRUPTED
    for result in [n for n in enumerators() if n in errors.BY_RESULT]:
        assert _native.lib.twResultString(facts[result]).decode() == result
    assert _native.lib.twResultString(0) == b"twSuccess"
    assert _native.lib.twResultString(9999) == b"unknown result"
    results = re.search(r"typedef enum (?:TW_AS_INT )?\{([^}]*)\} twResult_t", CODE)
    declared = set(re.findall(r"\b(tw\w+) =", results[1])) if results else set()
    assert declared == {"twSuccess", *errors.BY_RESULT}
    phases = [facts[f"twPhase{name.title()}"] for name in _native.PHASES]
    assert phases == list(range(len(_native.PHASES)))
    assert facts["twRankMajor"] == _native.LAYOUTS["rank_major"]
    assert facts["twExpertMajor"] == _native.LAYOUTS["expert_major"]
    assert facts["twWeightNone"] == _native.WEIGHTINGS["none"]
    assert facts["twWeightTopk"] == _native.WEIGHTINGS["topk"]
    assert facts["twIdLocal"] == _native.ID_SPACES["local"]
    assert facts["twIdGlobal"] == _native.ID_SPACES["global"]
    assert facts["twFlat"] == _native.LAYOUTS["flat"]
    assert facts["twGrouped"] == _native.LAYOUTS["grouped"]
    assert facts["twLowLatency"] == _native.MODES["low_latency"]
    assert facts["twHighThroughput"] == _native.MODES["high_throughput"]
    assert facts["twOverflowRefuse"] == _native.OVERFLOWS["refuse"]
    assert facts["twOverflowDrop"] == _native.OVERFLOWS["drop"]
    assert {f"tw{name.title()}": code for name, code in portable.STRATEGIES.items()} == {
        name: facts[name] for name in ("twRouted", "twGathered", "twAuto")
    }
    moves = [facts[name] for name in ("twMoveBlocks", "twMoveExact", "twMoveGather")]
    assert moves == [portable.BLOCKS, portable.EXACT, portable.GATHER]
    assert {f"twReplica{name.title().replace('_', '')}": code for name, code in _native.POLICIES.items()} == {
        name: facts[name] for name in facts if name.startswith("twReplica")
    }
    assert _native.lib.twVersion() == facts["TW_VERSION"]


def test_dtypes(facts: dict[str, int]) -> None:
    body = re.search(r"typedef enum (?:TW_AS_INT )?\{([^}]*)\} twDtype_t", CODE)
    assert body
    declared = {n: facts[n] for n in re.findall(r"\b(tw\w+) =", body[1]) if n != "twDtypeNone"}
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
    assert declared == set(_native._FUNCTIONS)
    symbols = exported()
    assert declared <= symbols
    others = {s for s in symbols - declared if s not in ("TOKENWAY", "_init", "_fini")}
    assert not {s for s in others if not re.fullmatch(r"TOKENWAY[\w.]*|TW[\w.]*", s)}, others


def test_argument_counts() -> None:
    for name, arguments in re.findall(r"^TW_API [\w* ]*?\b\*?(tw\w+)\((.*?)\);", CODE, re.M | re.S):
        count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        function = getattr(_native.lib, name)
        assert len(function.argtypes) == count == len(_native._FUNCTIONS[name][1]), name


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
