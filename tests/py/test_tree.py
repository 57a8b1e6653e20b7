"""scripts/check_tree.py refuses what goes against the arrows between rooms, in C++ and in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_tree.py"

# A tree of some rooms of Python and of C++, as it should be.
FILES = {
    "python/tokenway/__init__.py": "from tokenway.group import Group\n",
    "python/tokenway/errors.py": "",
    "python/tokenway/tensors.py": "from tokenway import errors\n",
    "python/tokenway/handle.py": "from tokenway import tensors\n",
    "python/tokenway/group.py": "import tokenway.tensors\nfrom tokenway.handle import Handle\n",
    "python/tokenway/autograd.py": "from tokenway.pytorch.autograd import combine\n",
    "python/tokenway/pytorch/__init__.py": "",
    "python/tokenway/pytorch/autograd.py": "import torch\nfrom tokenway.group import Group\n",
    "python/tokenway/bench/__init__.py": "",
    "python/tokenway/bench/case.py": "import tokenway\nfrom tokenway.bench import timing\n",
    "python/tokenway/bench/timing.py": "",
    "src/layout/place.h": "",
    "src/exchange/step.h": '#include "layout/place.h"\n',
    "src/cuda/device/warp.cuh": "",
    "src/quantize/fp8.h": "",
    "include/tokenway/tokenway.h": "typedef struct twInput {\n  int32_t lane;\n} twInput_t;\n",
}


def checked(folder: Path, **changed: str) -> list[str]:
    """What the script says of a tree with changed files, by their name without its ending."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.pop(path.stem, text))
    assert not changed
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
    *problems, summary = done.stdout.splitlines()
    assert summary == f"{len(FILES)} files, {len(problems)} problems" and done.returncode == (len(problems) > 0)
    return problems


def test_arrows_as_they_are(tmp_path: Path) -> None:
    assert checked(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "from tokenway import group\n",
        "import tokenway.group\n",
        "from tokenway.group import Group\n",
        "from .group import Group\n",
        "def later():\n    from tokenway import group\n",
        "if TYPE_CHECKING:\n    from tokenway.group import Group\n",
    ],
)
def test_an_import_against_an_arrow(tmp_path: Path, text: str) -> None:
    line = text.count("\n")
    assert checked(tmp_path, tensors=text)[0] == (
        f"python/tokenway/tensors.py:{line}: the room tensors may not import tokenway.group"
    )


@pytest.mark.parametrize("module", ["handle", "errors"])
def test_the_product_does_not_import_its_benchmark(tmp_path: Path, module: str) -> None:
    (problem,) = checked(tmp_path, **{module: "def late():\n    from tokenway.bench import timing\n"})
    assert problem.startswith(f"python/tokenway/{module}.py:2: the room ")
    assert problem.endswith(" may not import tokenway.bench.timing")


@pytest.mark.parametrize(
    "text", ["from tokenway import group\n", "if TYPE_CHECKING:\n    from tokenway import group\n"]
)
def test_a_circle_within_a_room(tmp_path: Path, text: str) -> None:
    (problem,) = checked(tmp_path, handle=text)
    told, _, circle = problem.rpartition(": ")
    assert told == "python/tokenway: modules import each other in a circle"
    assert set(circle.split(" -> ")) == {"tokenway.group", "tokenway.handle"}


def test_a_module_without_a_room(tmp_path: Path) -> None:
    (tmp_path / "python/tokenway").mkdir(parents=True)
    (tmp_path / "python/tokenway/novel.py").write_text("")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert "python/tokenway/novel.py: tokenway.novel is in no room" in done.stdout


def test_pytorch_only_where_it_is_asked_for(tmp_path: Path) -> None:
    assert checked(tmp_path / "late", handle="def view():\n    import torch\n") == []
    (problem,) = checked(tmp_path / "early", handle="from torch import Tensor\n")
    assert problem.startswith("python/tokenway/handle.py:1: the room exchange is imported without PyTorch")


def test_the_page_names_every_room_and_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import check_tree

    page = (SCRIPT.parents[1] / "docs" / "ARCHITECTURE.md").read_text()
    _, _, section = page.partition("\n## The rooms of python/tokenway\n")
    section = section.partition("\n## ")[0]
    for room, (modules, _) in check_tree.PYTHON.items():
        assert f"\n| {room} |" in section
        for module in modules.split():
            assert f"`{module}`" in section or f"`{module}.py`" in section, (room, module)


def test_an_include_against_an_arrow(tmp_path: Path) -> None:
    (problem,) = checked(tmp_path, place='#pragma once\n#include "exchange/step.h"\n')
    assert problem == 'src/layout/place.h:2: src/layout may not include "exchange/step.h"'


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("step", "int lane = 0;\n", "src/exchange/step.h:1: lane: lane is channel here"),
        ("step", "\nstruct CarriedSteps {};\n", "src/exchange/step.h:2: CarriedSteps: carried is staged here"),
        ("step", "int at = step.lanes;\n", "src/exchange/step.h:1: lanes: lanes is channels here"),
        ("warp", "int lane_of(int rank);\n", "src/cuda/device/warp.cuh:1: lane_of: lane is channel here"),
        ("warp", "int lane;\n", "src/cuda/device/warp.cuh:1: lane: lane is channel here"),
        ("fp8", "constexpr int kLine = 1;\n", "src/quantize/fp8.h:1: kLine: line is packet here"),
    ],
)
def test_a_retired_word(tmp_path: Path, file: str, text: str, problem: str) -> None:
    assert checked(tmp_path, **{file: text}) == [problem]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("step", "int at = input.lane + given->lane;  // a lane\n"),
        ("step", 'const char* const said = "no free lane";\n'),
        ("step", "int steps[TW_MAX_LANES];\n"),
        ("step", "constexpr int kCacheLine = 64;\n"),
        ("warp", "inline int lane() { return threadIdx.x % warpSize; }\n"),
        ("fp8", "constexpr int kPerLane = 4;\n"),
    ],
)
def test_words_that_stay(tmp_path: Path, file: str, text: str) -> None:
    assert checked(tmp_path, **{file: text}) == []


def test_a_file_named_with_a_retired_word(tmp_path: Path) -> None:
    (tmp_path / "src/exchange").mkdir(parents=True)
    (tmp_path / "src/exchange/lanes.h").write_text("")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "src/exchange/lanes.h: lanes is channels here"
