"""The command line: info, launch, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tokenway as tw
from tokenway import _native, cli, info
from tokenway.bench import report


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that must be refused."""
    assert cli.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("tokenway: ") and told.err.count("\n") == 1
    return told.err


def test_help_and_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{tw.__version__}\n"
    for command in ([], ["balance"], ["bench"], ["info"], ["launch"]):
        assert cli.main([*command, "--help"]) == 0
        assert "usage: tokenway" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "required"),
        (["nonsense"], "nonsense"),
        (["bench", "--nonsense"], "--nonsense"),
        (["bench", "--ranks", "0"], "--ranks: 0; allowed 1..64"),
        (["bench", "--ranks", "65"], "--ranks: 65"),
        (["bench", "--ranks", "two"], "two"),
        (["bench", "--profile", "gpt-2"], "--profile: 'gpt-2'; allowed: deepseek-v3"),
        (["bench", "--routing", "fair"], "--routing: 'fair'"),
        (["bench", "--routing", "gone.npz"], "gone.npz"),
        (["bench", "--tokens", "0"], "--tokens: 0; allowed 1.."),
        (["bench", "--tokens", "8", "-1"], "-1"),
        (["bench", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["bench", "--layout", "round"], "--layout: invalid choice: 'round'"),
        (["bench", "--weighting", "all"], "--weighting: invalid choice: 'all'"),
        (["bench", "--iterations", "0"], "--iterations: 0"),
        (["bench", "--rounds", "0"], "--rounds: 0"),
        (["bench", "--warmup", "-1"], "--warmup: -1"),
        (["bench", "--seed", "-1"], "--seed: -1"),
        (["bench", "--baselines", "nccl"], "--baselines: 'nccl'"),
        (["bench", "--json", "/no/such/folder/x.json"], "there is no such folder"),
        (["bench", "--json", "/"], "--json: /: is a folder"),
        (["bench", "--plot", "times.xyz"], "--plot: 'times.xyz'; must end in .png, .pdf, .svg"),
        (["bench", "--verify-only", "--overhead"], "--overhead"),
        (["bench", "--aux", "--overhead"], "--aux: not with --overhead"),
        (["bench", "--aux", "--ranks", "8", "--backward"], "--aux: not with --backward"),
        (["launch", "script.py"], "-n"),
        (["launch", "-n", "0", "script.py"], "-n: 0; allowed 1.."),
        (["launch", "-n", "2", "/no/such/program"], "no such program: /no/such/program"),
    ],
)
def test_bad_arguments(argv, told, capsys) -> None:
    assert told in refused(capsys, *argv)


def test_recording_that_does_not_fit(tmp_path, capsys) -> None:
    path = tmp_path / "short.npz"
    np.savez(path, ids=np.arange(32, dtype=np.int32).reshape(4, 8))
    told = refused(capsys, "bench", "--ranks", "2", "--tokens", "4", "--routing", str(path))
    assert "recording has 4" in told
    told = refused(capsys, "bench", "--profile", "mixtral-8x7b", "--routing", str(path))
    assert "top_k: 2; the recording has 8" in told


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("matplotlib", ["--plot", "x.png"]),
        ("torch", ["--baselines", "gloo-alltoall"]),
    ],
)
def test_optional_packages_are_asked_for(package, argv, capsys, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    assert "pip install 'tokenway[" in refused(capsys, "bench", *argv)


def test_ranks_of_a_launcher(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one of 2 ranks already" in refused(capsys, "bench", "--ranks", "3")
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "'many'" in refused(capsys, "bench")


def test_info(capsys) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == tw.__version__
    assert facts["library"] == str(_native.library_path())
    assert facts["backends"]["cpu"] == "available"
    assert facts["machine"]["usable_cores"] >= 1
    assert facts["machine"]["last_level_cache_bytes"] > 0
    assert facts["machine"]["memory_available_bytes"] > 0
    assert facts["kernel"] == {"memfd": True, "pidfd": True, "futex": True}
    assert facts["packages"]["numpy"]["version"] == np.__version__
    names = [variable["name"] for variable in facts["environment"]]
    assert {"TOKENWAY_TIMEOUT_MS", "TOKENWAY_LIBRARY", "TOKENWAY_RANK", "RANK"} <= set(names)

    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*names, *facts["packages"], *facts["backends"]])
    assert str(_native.library_path()) in text


SCRIPT = """
import sys
from pathlib import Path
import tokenway as tw
with tw.connect() as comm:
    Path(sys.argv[1], str(comm.rank)).write_text(f"{comm.nranks} {sys.argv[2]}")
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 7])
def test_launch(code, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = ["launch", "-n", "2", str(script), str(tmp_path), "--an-option", str(code)]
    assert cli.main(argv) == code
    found = {name: Path(tmp_path, name).read_text() for name in ("0", "1")}
    assert found == {"0": "2 --an-option", "1": "2 --an-option"}


@pytest.mark.processes
def test_launch_of_a_program() -> None:
    assert cli.main(["launch", "-n", "2", sys.executable, "-c", "pass"]) == 0


def test_report_of_what_is_no_run(tmp_path, capsys) -> None:
    assert report.main([]) == 2
    for name, text in (("gone.json", None), ("broken.json", "{"), ("other.json", "{}")):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert report.main([str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err


def table(name: str, shown: str = "") -> str:
    return f"<!-- table: {name} -->\n{shown}<!-- end of table -->\n"


@pytest.fixture
def pages(tmp_path, monkeypatch) -> Path:
    """A folder of pages and of one file of results, which is shown as its own text."""
    monkeypatch.setattr(report, "read", lambda *files: " ".join(file.read_text() for file in files))
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text("new")
    (tmp_path / "docs" / "prose.md").write_text("Between `<!-- table: FILE.json -->` and its end.\n")
    for name in ("first.md", "deep/second.md"):
        (tmp_path / "docs" / name).write_text(f"above\n\n{table('one.json')}below\n")
    return tmp_path


@pytest.mark.parametrize("names", [["docs"], ["docs/first.md", "docs/deep/second.md"], ["docs/first.md", "docs"]])
def test_report_updates_pages_and_folders(names, pages) -> None:
    prose, renewed = (pages / "docs" / "prose.md").read_text(), table("one.json", "new\n")
    assert report.main(["--update", *(str(pages / name) for name in names), str(pages / "results")]) == 0
    for name in ("first.md", "deep/second.md"):
        assert (pages / "docs" / name).read_text() == f"above\n\n{renewed}below\n"
    assert (pages / "docs" / "prose.md").read_text() == prose


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("docs/prose.md", None, "the page has no table"),
        ("results", None, "no page in it has a table"),
        ("docs/open.md", f"<!-- table: one.json -->\n\n{table('one.json')}", "each table needs both"),
        ("docs/gone.md", None, "No such file"),
        ("docs/other.md", table("other.json"), "other.json"),
    ],
)
def test_report_updates_all_pages_or_none(name, text, told, pages, capsys) -> None:
    """An error names the page that it is about, and no page is written."""
    if text is not None:
        (pages / name).write_text(text)
    first = (pages / "docs" / "first.md").read_text()
    assert report.main(["--update", str(pages / "docs" / "first.md"), str(pages / name), str(pages / "results")]) == 1
    said = capsys.readouterr().err.partition("Error: ")[2]
    assert name in said and told in said
    assert (pages / "docs" / "first.md").read_text() == first


def test_report_needs_a_page_and_a_folder(pages) -> None:
    assert report.main(["--update", str(pages / "results")]) == 2


def test_info_says_why_not(monkeypatch) -> None:
    assert info.collect()["backends"]["cpu"] == "available"

    def refuse(name: str) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refuse)
    facts = info.collect()
    assert facts["kernel"]["memfd"] is False
    why = "not available: memfd_create fails here (Function not implemented), which windows are made of"
    assert facts["backends"]["cpu"] == why
