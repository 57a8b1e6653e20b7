#!/usr/bin/env python3
"""Breaks the library on purpose, once per row of the tables beside it; the named test must notice.

    tests/mutations/run.py [--only NAME] [--jobs N] [--keep] [--texts]

Each mutation is a bug that earlier designs had, or that a later hand may bring in; its row says which invariant of
docs/PROTOCOL.md it breaks and which test must fail. A mutation that survives means that the test does not test what
its name says. The unmutated sources must pass the test too, right behind the mutant.

Needs g++ (or $CXX) and GoogleTest. Without them: skipped, or, with TW_STRICT=1, a failure. Mutations of the Python
package need pytest, and what else the tests do; those of ranks on several hosts libfabric and its headers; those of
kernels what tests/emulator/run.py needs.
"""

import argparse
import concurrent.futures
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import emulated
from apart import APART
from arena import ARENA_MUTATIONS
from bias import BIAS
from choice_values import CHOICE_VALUES
from collectives import COLLECTIVES
from counts import COUNTS
from domain import DOMAIN
from engine import ENGINE_MUTATIONS
from folds import FOLDS
from fp8_combine import FP8_COMBINE
from giving_up import GIVING_UP
from hosts import HOSTS
from leases import LEASES_MUTATIONS
from messages import MESSAGES_MUTATIONS
from moving import MOVING_MUTATIONS
from mutation import Mutation
from per_expert import PER_EXPERT
from placement import PLACEMENT
from planning import PLANNING
from posts import POSTS
from protocol import PROTOCOL
from refused import REFUSED
from results import RESULTS
from shrunk_moving import SHRUNK_MOVING_MUTATIONS
from staged import STAGED
from straight import STRAIGHT_MUTATIONS
from token_replicas import TOKEN_REPLICAS
from training import TRAINING

ROOT = Path(__file__).resolve().parents[2]
ALL = (
    PROTOCOL
    + ARENA_MUTATIONS
    + COUNTS
    + LEASES_MUTATIONS
    + COLLECTIVES
    + PLACEMENT
    + RESULTS
    + STAGED
    + CHOICE_VALUES
    + FP8_COMBINE
    + BIAS
    + APART
    + GIVING_UP
    + REFUSED
    + PER_EXPERT
    + DOMAIN
    + TOKEN_REPLICAS
    + STRAIGHT_MUTATIONS
    + MOVING_MUTATIONS
    + TRAINING
    + SHRUNK_MOVING_MUTATIONS
    + MESSAGES_MUTATIONS
    + PLANNING
    + ENGINE_MUTATIONS
    + HOSTS
    + POSTS
    + FOLDS
)
TEST_TIMEOUT_S = 240
AGAIN = 2  # so often both runs are repeated when the unmutated one fails
CORES = len(os.sched_getaffinity(0))


# As CMake compiles the tests, but quicker.
FLAGS = ["-std=c++20", "-Og", "-DNDEBUG", "-fPIC", "-ffp-contract=off", "-pthread", "-w"]
FOLDERS = ("src", "tests/cc")
LIBRARIES = ["-lgtest", "-lgtest_main", "-pthread"]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
# Compiled once: without, half of the time goes into the standard library's headers.
PRECOMPILED = {
    "src": """#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>
""",
    "tests": """#include <gtest/gtest.h>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>
""",
}


class BuildError(Exception):
    pass


def is_python(unit: str) -> bool:
    """Whether it is a file of Python's tests: there the mutant is the package, with the control's library."""
    return unit.startswith("py/")


def is_emulated(unit: str) -> bool:
    """Whether it is a file of Python's tests on emulated devices: there the mutant is the library."""
    return unit.startswith("emulated")


def call(command: list[str], timeout: float | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def mutate(tree: Path, mutation: Mutation) -> dict[str, str]:
    """The changed files."""
    changed: dict[str, str] = {}
    for edit in mutation.edits:
        text = changed.get(edit.file) or (tree / edit.file).read_text()
        if text.count(edit.old) != 1:
            raise BuildError(
                f"{mutation.name}: {edit.file} holds the text to change {text.count(edit.old)} times, not once:\n"
                f"{edit.old}"
            )
        changed[edit.file] = text.replace(edit.old, edit.new)
    return changed


def check_texts(mutations: list[Mutation]) -> int:
    """A source that changed leaves its mutations behind; this says so without building any."""
    problems = []
    for mutation in mutations:
        try:
            mutate(ROOT, mutation)
        except BuildError as error:
            problems.append(str(error))
    print("\n".join(problems) or f"{len(mutations)} mutations still find what they change")
    return 1 if problems else 0


class Workshop:
    """A copy of the sources with the objects of the control; mutations are built as overlays of it."""

    def __init__(self, root: Path, compiler: str) -> None:
        self.root = root
        self.compiler = compiler
        self.flags = FLAGS + fabric_flags(compiler)
        self.tree = root / "tree"
        self.objects = root / "objects"
        for folder in ("src", "include", "tests/cc", "python"):
            shutil.copytree(ROOT / folder, self.tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        self.objects.mkdir()
        for folder, text in PRECOMPILED.items():
            self.precompiled(folder).write_text(text)
        self.needs: dict[str, dict[Path, set[Path]]] = {}  # unit -> source -> files that it includes
        self.cores = threading.Semaphore(CORES)

    def compile(self, source: Path, out: Path, overlay: Path | None = None) -> None:
        """`source` is relative to the tree; files of the overlay come before the tree's."""
        roots = [self.tree] if overlay is None else [overlay, self.tree]
        path = next(root / source for root in roots if (root / source).exists())
        includes = [f"-I{root / folder}" for folder in ("src", "include", "tests/cc") for root in roots]
        pre = ["-include", str(self.precompiled(source.parts[0]))]
        out.parent.mkdir(parents=True, exist_ok=True)
        dependencies = ["-MMD", "-MF", f"{out}.d"]
        with self.cores:
            call([self.compiler, *self.flags, *includes, *pre, *dependencies, "-c", str(path), "-o", str(out)])

    def precompiled(self, folder: str) -> Path:
        return self.objects / f"{folder}.h"

    def object_of(self, source: Path) -> Path:
        return self.objects / (str(source).replace("/", "~") + ".o")

    def included(self, source: Path) -> set[Path]:
        text = Path(f"{self.object_of(source)}.d").read_text().replace("\\\n", " ").split(":", 1)[1]
        return {Path(name).relative_to(self.tree) for name in text.split() if name.startswith(str(self.tree))}

    def build_control(self, units: list[str], pool: concurrent.futures.Executor) -> None:
        for pre in map(self.precompiled, PRECOMPILED):
            call([self.compiler, *self.flags, "-x", "c++-header", str(pre), "-o", f"{pre}.gch"])
        found = [*self.tree.glob("src/*/*.cc"), *self.tree.glob("src/cuda/plan/*.cc")]  # plans need no CUDA
        shared = sorted(path.relative_to(self.tree) for path in found)
        shared = [path for path in shared if path.parts[1] not in ("nvlink", "gin")]
        shared += [Path(f"tests/cc/{name}.cc") for name in ("harness", "hosts_world", "pretended_engine", "side")]
        binaries = [unit for unit in units if not is_python(unit) and not is_emulated(unit)]
        sources = shared + [Path(f"tests/cc/{unit}.cc") for unit in binaries]
        list(pool.map(lambda source: self.compile(source, self.object_of(source)), sources))
        call(["ar", "rcs", str(self.archive), *(str(self.object_of(source)) for source in shared)])
        list(pool.map(lambda unit: self.link_control(unit, shared), binaries))
        if any(is_python(unit) for unit in units):
            self.link_library([self.object_of(source) for source in shared if source.parts[0] == "src"])

    @property
    def archive(self) -> Path:
        return self.objects / "shared.a"

    @property
    def library(self) -> Path:
        return self.objects / "libtokenway.so"

    def control_of(self, unit: str) -> Path:
        if is_emulated(unit):
            return emulated.LIBRARY
        return self.tree / "python" if is_python(unit) else self.objects / unit

    def link_library(self, objects: list[Path]) -> None:
        """What Python loads."""
        exports = f"-Wl,--version-script={self.tree / 'src/api/exports.map'}"
        call([self.compiler, "-shared", *map(str, objects), exports, "-pthread", "-ldl", "-o", str(self.library)])

    def link_control(self, unit: str, shared: list[Path]) -> None:
        """Also finds out which objects the unit needs: only those are rebuilt for a mutation."""
        mine = Path(f"tests/cc/{unit}.cc")
        map_file = self.objects / f"{unit}.map"
        self.link([self.object_of(mine)], self.objects / unit, [f"-Wl,-Map={map_file}"])
        members = set(re.findall(r"shared\.a\(([^)]+)\)", map_file.read_text()))
        needed = [mine, *(source for source in shared if self.object_of(source).name in members)]
        self.needs[unit] = {source: self.included(source) for source in needed}

    def link(self, objects: list[Path], out: Path, more: list[str] | None = None) -> None:
        names = [str(path) for path in objects]
        call([self.compiler, *names, str(self.archive), *LIBRARIES, *(more or []), "-o", str(out)])

    def build_mutant(self, mutation: Mutation, overlay: Path) -> Path:
        """Gives what run_test takes: a binary, the folder of the package, or the library of emulated devices."""
        if is_emulated(mutation.unit):
            with self.cores:
                return emulated.build_mutant(mutate(self.tree, mutation), overlay)
        if is_python(mutation.unit):
            shutil.copytree(self.tree / "python", overlay / "python")
        for file, text in mutate(self.tree, mutation).items():
            (overlay / file).parent.mkdir(parents=True, exist_ok=True)
            (overlay / file).write_text(text)
        if is_python(mutation.unit):
            if any(not edit.file.startswith("python/") for edit in mutation.edits):
                raise BuildError(f"{mutation.unit} takes edits of python/ alone")
            return overlay / "python"
        changed = {Path(edit.file) for edit in mutation.edits}
        affected = [source for source, included in self.needs[mutation.unit].items() if included & changed]
        if not affected:
            raise BuildError(f"{mutation.unit} does not include what the mutation changes")
        unit = Path(f"tests/cc/{mutation.unit}.cc")
        objects = [] if unit in affected else [self.object_of(unit)]
        for folder in FOLDERS:
            if batch := [source.relative_to(folder) for source in affected if source.is_relative_to(folder)]:
                objects.append(self.compile_together(folder, batch, overlay))
        binary = overlay / "mutant"
        self.link(objects, binary)
        return binary

    def compile_together(self, folder: str, sources: list[Path], overlay: Path) -> Path:
        """A header that changed affects many sources; as one they take a third of the time."""
        whole = Path(folder, "whole.cc")
        (overlay / folder).mkdir(parents=True, exist_ok=True)
        (overlay / whole).write_text("".join(f'#include "{source}"\n' for source in sources))
        out = overlay / f"{Path(folder).name}.o"
        self.compile(whole, out, overlay)
        return out


def run_test(made: Path, mutation: Mutation, library: Path) -> tuple[int | None, int, str]:
    """Exit status (None: did not end), number of tests run, output."""
    command, environment, counted = [str(made), f"--gtest_filter={mutation.test}"], None, r"Running (\d+) test"
    if is_python(mutation.unit):
        command = [*PYTEST, str(ROOT / "tests" / f"{mutation.unit}.py"), "-k", mutation.test]
        # TW_STRICT: what is drawn is the same each time.
        environment = os.environ | {"PYTHONPATH": str(made), "TOKENWAY_LIBRARY": str(library), "TW_STRICT": "1"}
        counted = r"(\d+) passed"
    if is_emulated(mutation.unit):
        backend, name = mutation.unit.split("/")
        tests = str(ROOT / "tests" / "py" / f"test_{name}.py")
        command = [*PYTEST, "--backend", backend, "--capture=sys", tests]
        command += ["-k", f"{mutation.test} and not processes", "-m", "not heavy and not long"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "python"),
            "TOKENWAY_LIBRARY": str(made),
            "EXAMPLES": "4",
            "OMP_NUM_THREADS": "1",
        }
        counted = r"(\d+) passed"
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, 0, ""
    ran = re.search(counted, done.stdout)
    return done.returncode, int(ran.group(1)) if ran else 0, done.stdout + done.stderr


def failed_itself(mutation: Mutation, status: int, output: str) -> bool:
    """Whether the named test failed, or crashed: anything else that goes wrong shows nothing about the mutation."""
    test = mutation.test
    if is_emulated(mutation.unit) and status < 0:  # a kernel that aborts takes the test along
        return True
    if is_python(mutation.unit) or is_emulated(mutation.unit):  # an ERROR is of what stands round a test
        return any(test in name for name in re.findall(r"^FAILED \S+::(\S+)", output, re.MULTILINE))

    def named(tests: list[str]) -> list[str]:
        return [name for name in tests if any(fnmatch.fnmatchcase(name, part) for part in test.split(":"))]

    if named(re.findall(r"^\[  FAILED  \] ([\w/.]+)", output, re.MULTILINE)):
        return True
    # By a signal, or by an abnormal end like a sanitizer's, after it began and before it ended.
    begun = named(re.findall(r"^\[ RUN      \] ([\w/.]+)", output, re.MULTILINE))
    ended = named(re.findall(r"^\[ +OK \] ([\w/.]+)", output, re.MULTILINE))
    return status != 0 and len(begun) > len(ended)


@dataclass
class Outcome:
    caught: bool
    how: str
    seconds: float
    detail: str = ""


def judge(workshop: Workshop, made: Path, mutation: Mutation) -> Outcome:
    """What the named test says of the mutant, and then of the unmutated sources: tests bound their waiting, so it must
    pass while as much else is running."""
    begin = time.monotonic()
    status, _, output = run_test(made, mutation, workshop.library)
    seconds = time.monotonic() - begin
    if status is None:
        return Outcome(False, "HUNG", seconds, "the test must bound its own waiting")
    if status == 0:
        return Outcome(False, "SURVIVED", seconds, output[-2000:])
    if not failed_itself(mutation, status, output):
        return Outcome(False, "FAILED ELSEWHERE", seconds, f"status {status}\n{output[-2000:]}")
    control, ran, output = run_test(workshop.control_of(mutation.unit), mutation, workshop.library)
    if control != 0 or ran == 0:
        return Outcome(False, "FAILS UNMUTATED", seconds, f"status {control}, {ran} tests\n{output[-4000:]}")
    return Outcome(True, "yes" if status > 0 else f"signal {-status}", seconds)


def try_mutation(workshop: Workshop, number: int, mutation: Mutation) -> Outcome:
    begin = time.monotonic()
    overlay = workshop.root / f"mutant{number}"
    overlay.mkdir()
    try:
        made = workshop.build_mutant(mutation, overlay)
    except BuildError as error:
        return Outcome(False, "NOT BUILT", time.monotonic() - begin, str(error))
    built = time.monotonic() - begin
    outcome = judge(workshop, made, mutation)
    for _ in range(AGAIN):
        if outcome.how == "FAILS UNMUTATED":  # too much else was running
            outcome = judge(workshop, made, mutation)
    return replace(outcome, seconds=built + outcome.seconds)


def report(mutations: list[Mutation], outcomes: list[Outcome]) -> None:
    rows = [("mutation", "breaks", "test that must fail", "caught", "s")]
    for mutation, outcome in zip(mutations, outcomes, strict=True):
        rows.append((mutation.name, mutation.invariant, mutation.test, outcome.how, f"{outcome.seconds:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for mutation, outcome in zip(mutations, outcomes, strict=True):
        if not outcome.caught:
            print(f"\n{mutation.name}: {outcome.how}\n{outcome.detail}")


def fabric_flags(compiler: str) -> list[str]:
    """What builds the engine between hosts, where libfabric's headers are."""
    command = [compiler, "-x", "c++", "-fsyntax-only", "-include", "rdma/fabric.h", os.devnull]
    probe = subprocess.run(command, capture_output=True, check=False)
    return ["-DTOKENWAY_WITH_FABRIC=1"] if probe.returncode == 0 else []


def missing_tools(compiler: str) -> str:
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    probe = subprocess.run(
        [compiler, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"],
        input="#include <gtest/gtest.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if probe.returncode == 0 else "no GoogleTest (libgtest-dev)"


def turn_of(share: int) -> int:
    """Which of `share` parts is this commit's, so that those that follow each other try all."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return int(said or "0", 16) % share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a mutation's name or a part of it")
    parser.add_argument("--jobs", type=int, default=min(16, CORES + 6), help="of which each core compiles one")
    parser.add_argument("--keep", action="store_true", help="keep the folder that it builds in")
    parser.add_argument("--texts", action="store_true", help="build nothing: only look for the texts to change")
    parser.add_argument("--share", type=int, default=1, help="one of so many: which ones the commit decides")
    arguments = parser.parse_args()
    if arguments.texts:
        return check_texts(list(ALL))
    compiler = os.environ.get("CXX", "g++")
    if missing := missing_tools(compiler):
        strict = os.environ.get("TW_STRICT") == "1"
        print(f"mutations: {'FAILED' if strict else 'SKIPPED'}: {missing}", file=sys.stderr)
        return 1 if strict else 0
    chosen = [m for m in ALL if not arguments.only or any(part in m.name for part in arguments.only)]
    chosen = chosen[turn_of(arguments.share) :: arguments.share]
    if not chosen:
        parser.error("no mutation has such a name")
    if any(is_emulated(m.unit) for m in chosen) and (lacking := emulated.build_control()):
        if os.environ.get("TW_STRICT") == "1":
            parser.error(lacking)
        print(f"mutations of kernels: SKIPPED: {lacking}", file=sys.stderr)
        chosen = [m for m in chosen if not is_emulated(m.unit)]
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tokenway-mutations-"))
    try:
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            workshop = Workshop(folder, compiler)
            workshop.build_control(sorted({mutation.unit for mutation in chosen}), pool)
            print(f"control built in {time.monotonic() - begin:.0f} s", flush=True)
            outcomes = list(pool.map(lambda item: try_mutation(workshop, *item), enumerate(chosen)))
        report(chosen, outcomes)
        caught = sum(outcome.caught for outcome in outcomes)
        print(f"\n{caught} of {len(chosen)} mutations caught, {time.monotonic() - begin:.0f} s")
        return 0 if caught == len(chosen) else 1
    except BuildError as error:
        print(f"the unmutated sources do not build:\n{error}")
        return 1
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
