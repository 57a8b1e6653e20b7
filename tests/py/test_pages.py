"""What README.md and the guides show: figures are those of the files, programs run, and outputs are of what is run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_examples import load_job, need_rich, run

from tokenway.bench import peers, report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
README, DOCS = ROOT / "README.md", ROOT / "docs"
PERFORMANCE = DOCS / "PERFORMANCE.md"
GUIDE, COMPARISON, SERVING = DOCS / "GUIDE.md", DOCS / "COMPARISON.md", DOCS / "SERVING.md"


def programs(page: Path) -> list[str]:
    """The Python that a page shows."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


# ---- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "most"), [(README, 200), (PERFORMANCE, 300)], ids=["README", "PERFORMANCE"])
def test_the_first_pages_are_short(page: Path, most: int) -> None:
    """What is beyond goes to pages of its own: of PERFORMANCE.md, in docs/performance."""
    assert len(page.read_text(encoding="utf-8").splitlines()) <= most


PAGES = report.pages_of([README, DOCS])


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_tables_are_those_of_the_files(page: Path) -> None:
    """python -m tokenway.bench.report --update README.md docs bench/results puts them right."""
    text = page.read_text(encoding="utf-8")
    assert report.update(text, RESULTS) == text


def test_tables_stand_in_one_page_each() -> None:
    assert {README, COMPARISON, PERFORMANCE} < set(PAGES)
    files = [name for page in PAGES for tables in report.tables_of(page) for name in tables.split()]
    assert sorted(files) == sorted(set(files))


def test_results_are_found_from_one_page() -> None:
    """PERFORMANCE.md links every page of docs/performance, and names every file of results."""
    text = PERFORMANCE.read_text(encoding="utf-8")
    for page in (DOCS / "performance").glob("*.md"):
        assert f"](performance/{page.name}" in text
    for file in RESULTS.glob("*.json"):
        several = re.sub(r"-\d+(-sms)?$", r"-N\1", file.stem)  # nvlink-local-N, nvlink-flat-N-sms
        assert any(f"{name}`" in text or f"{name}.json" in text for name in (file.stem, several)), file.name


@pytest.mark.parametrize("theme", list(peers.THEMES))
def test_pictures_are_of_the_files(theme: str) -> None:
    """python -m tokenway.bench.peers bench/results docs/pictures draws them anew."""
    name = f"latency-{theme}.svg"
    assert peers.digest(RESULTS) in (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
    assert f"docs/pictures/{name}" in README.read_text(encoding="utf-8")


def test_a_table_of_peers() -> None:
    """A figure of each row, a star where nothing repeats it, and ratios to the fastest and to the floor."""
    row = {"layout": "", "what": "", "repeatable_with": None}
    run = {
        "what": "us",
        "date": "today",
        "commit": "abc",
        "gpu": {"gpu": "B", "used": 2, "driver": "1", "link": "L"},
        "settings": {"tokens": [1, 8], "dtype": "t", "hidden": 1, "experts": 2, "top_k": 1},
        "peers": [
            row | {"name": "ours", "role": "ours", "us": [2.0, 1000], "repeatable_with": "make it"},
            row | {"name": "one", "role": "peer", "us": [3.0, None]},
            row | {"name": "other", "role": "peer", "us": [8.0, 1500]},
            row | {"name": "floor", "role": "floor", "us": [1.0, 800]},
        ],
    }
    table = report.markdown(run)
    for line in (
        "| us | 1 | 8 |",
        "| ours | 2.0 | 1,000 |",
        "| one * | 3.0 |  |",
        "| fastest of the others / ours | 1.50x | 1.50x |",
        "| ours / floor | 2.00x | 1.25x |",
        "    make it",
    ):
        assert f"\n{line}\n" in table


def test_whom_the_readme_advises() -> None:
    """Its sentences about who is faster up to 32 tokens, and from 128 on in place, and what in place costs now."""
    run = json.loads((RESULTS / peers.FOUR).read_text(encoding="utf-8"))
    tokens = run["settings"]["tokens"]
    others = zip(*(row["us"] for row in run["peers"] if row["role"] == "peer"), strict=True)
    fastest = [min(value for value in column if value is not None) for column in others]
    ours, in_place = (row["us"] for row in run["peers"] if row["role"] == "ours")
    for count, own, within, theirs in zip(tokens, ours, in_place, fastest, strict=True):
        assert own < theirs
        assert (within < theirs) == (count <= 32)
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert "up to 32 tokens no library in the table is faster, whether the experts write in place or not" in text
    assert "In the table FlashInfer is faster in place from 128 tokens on." in text
    now = json.loads((RESULTS / "in-place-4-gpus.json").read_text(encoding="utf-8"))["us"]
    more = {name: us["place"] / us["buffer"] - 1 for name, us in now.items()}
    assert all(more[f"low_latency {count}"] < 0.02 for count in (1, 8, 32, 128, 512))
    assert round(100 * more["low_latency 4096"]) == round(100 * more["high_throughput 4096"]) == 6
    assert "cost nothing](docs/performance/exchange.md#in-place) up to 512 tokens, but 6 % at 4096" in text


# ---- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [README, GUIDE], ids=["README", "GUIDE"])
def test_programs_are_python(page: Path) -> None:
    assert programs(page)
    for number, program in enumerate(programs(page)):
        compile(program, f"{page.name}, program {number}", "exec")


@pytest.mark.processes
def test_ten_lines_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "ten_lines.py").write_text(programs(README)[1])
    assert run(sys.executable, tmp_path / "ten_lines.py") == f"{[(100, 512)] * 4}\n"


@pytest.mark.processes
def test_a_step_of_an_engine(tmp_path: Path) -> None:
    (program,) = programs(SERVING)
    (tmp_path / "engine.py").write_text(program)
    assert run(sys.executable, tmp_path / "engine.py") == "True\n"


def test_ten_lines_on_gpus(torch: Any, backend: str) -> None:
    """On a GPU as they stand there; else on the CPU, which makes the same calls. This process is the only rank."""
    program = programs(README)[0]
    assert program.count('device="cuda"') == 3
    names: dict[str, Any] = {}
    exec(program if backend == "nvlink" else program.replace('"cuda"', '"cpu"'), names)
    assert names["out"].shape == (100, 7168) and names["group"].closed
    # A row per rank, doubled there: with one rank, each token twice.
    assert torch.equal(names["out"], 2 * names["tokens"])
    names["comm"].close()


def test_the_recipe_for_a_test(threads: Any) -> None:
    """The test that CONTRIBUTING.md shows passes."""
    (program,) = programs(ROOT / "CONTRIBUTING.md")
    names: dict[str, Any] = {}
    exec("import numpy as np\nimport tokenway as tw\n" + program, names)
    names["test_all_rows_go_to_the_first_rank"](threads)


def test_the_output_of_make_run() -> None:
    """docs/MAKE_RUN.md is of the text that `make run` reads, and of a run in which all was well."""
    need_rich()
    text = re.search(r"examples/main_job\.py (\S+)\n", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert text
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from moe_text import words_of
    finally:
        sys.path.remove(str(ROOT / "examples"))
    words = words_of(str(ROOT / text[1]))
    assert 1500 < len(words) < 3000
    output = (ROOT / "docs" / "MAKE_RUN.md").read_text(encoding="utf-8")
    assert f"{len(words)} words of {Path(text[1]).name} on 4 ranks\n" in output
    for number, (heading, _) in enumerate(load_job().parts("any"), 1):
        assert f"\n{number}. {heading} ─" in output
    assert "All checks hold." in output and "Everything is as it should be." in output
