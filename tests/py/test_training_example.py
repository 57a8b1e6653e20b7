"""examples/04_train_moe_lm.py: small, but whole."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import need
from test_examples import EXAMPLES, ROOT, example, need_rich, run

NAME = "04_train_moe_lm.py"
SMALL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--inner", "8", "--length", "16", "--batch", "6"]

pytestmark = [pytest.mark.torch, pytest.mark.processes]


@pytest.fixture(autouse=True)
def _needs(torch) -> None:
    """All of this file does."""
    need_rich()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of which a byte alone does not say what follows, and what came before it does."""
    rng = np.random.default_rng(3)
    words = ["".join(rng.choice(list("abc"), 5)) for _ in range(4)]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words) * 1000 + "\n")
    return path


def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("train_moe_lm", EXAMPLES / NAME)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_moe_lm", loaded)
    spec.loader.exec_module(loaded)
    return loaded


def losses_of(out: str) -> tuple[float, float]:
    """(the model's, the bigrams') in nats, of the withheld text."""
    found = re.findall(r"^ +(?:this model|bigrams) +(\d+\.\d+) +(\d+\.\d+) *$", out, re.MULTILINE)
    assert len(found) == 2, out
    for nats, bits in found:
        assert float(bits) == pytest.approx(float(nats) / np.log(2), abs=2e-4)
    return float(found[0][0]), float(found[1][0])


@pytest.mark.long
def test_a_few_steps(text: Path, tmp_path: Path) -> None:
    """Everything is printed, drawn and recorded; with shares of a batch that are not even."""
    need(importlib.util.find_spec("matplotlib") is not None, "matplotlib")
    plot, routing = tmp_path / "loss.png", tmp_path / "routing.npz"
    options = ["--ranks", "4", "--steps", "4", "--experts", "7", "--top-k", "3", "--evaluate-every", "2"]
    kept = ["--plot", plot, "--record-routing", routing, "--sample", "12"]
    out = example(NAME, "--text", text, *SMALL, *options, *kept)
    model, bigrams = losses_of(out)
    assert 3 < model < 7 and 0.1 < bigrams < 2, out
    assert plot.read_bytes().startswith(b"\x89PNG")
    with np.load(routing) as found:
        chosen = found["chosen"]
        assert chosen.shape == (4, 2, 6, 16, 3) and found["experts"] == 7
    ordered = np.sort(chosen, axis=-1)
    assert (np.diff(ordered.astype(int), axis=-1) > 0).all() and ordered.max() < 7, "three experts, all different"
    assert len(np.unique(chosen)) == 7
    parameters, here = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) parameters, ([\d,]+) of", out).groups())  # type: ignore[union-attr]
    expert, shared = 3 * 16 * 8, 256 * 16 * 2 + 16 * 16 + 16 + 2 * (4 * 16 * 16 + 7 * 16 + 2 * 16)
    assert parameters == shared + 2 * 7 * expert and here == shared + 2 * 2 * expert, out


@pytest.mark.long
@pytest.mark.slow
def test_it_learns(text: Path) -> None:
    """What bigrams cannot know; and it writes words of the text."""
    out = example(NAME, "--text", text, *SMALL, "--ranks", "2", "--experts", "4", "--steps", "300", "--rate", "0.01")
    model, bigrams = losses_of(out)
    assert model < 0.5 * bigrams, out
    assert "The model is better than bigrams." in out
    words = set(text.read_text().split())
    written = out.split("what it writes")[1].split()
    assert sum(word in words for word in written) > 20, out


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--balance", "5"]], ids=str)
def test_ranks_agree(text: Path, more: list[str]) -> None:
    """However many there are, and wherever experts move; and a run again has the same bits."""
    out = example(NAME, "--text", text, *SMALL, "--layers", "1", "--experts", "5", "--check-ranks", *more)
    assert "Losses of 1, 2 and 4 ranks within 0.0001: yes" in out
    assert "4 ranks twice, the same bits: yes" in out
    found = re.findall(r"^ +([124]) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+) +(\d\.\de[+-]\d+) *$", out, re.MULTILINE)
    assert [row[0] for row in found] == ["1", "2", "4", "4"], out
    assert all(float(row[2]) < 0.8 * float(row[1]) for row in found), "the losses are those of a model that learns"


@pytest.mark.parametrize(
    ("factor", "again", "says"), [(1.001, 1.001, "NOyes"), (1, 1 + 1e-7, "yesNO"), (1, 1, "yesyes")]
)
def test_disagreement_is_told(monkeypatch, capsys, factor, again, says) -> None:
    """Losses are a thousandth apart, or have other bits in another run."""
    ex = module(monkeypatch)
    turns = iter([1.0, 1.0, factor, again])

    def run(function: Any, ranks: int, job: Any) -> list[Any]:
        by = next(turns)
        return [ex.Learned([5.0 * by, 4.0], [(50, 4.5)], "", 1, 1, 1.0, None)] * ranks

    monkeypatch.setattr(ex.tw, "run", run)
    monkeypatch.setattr(sys, "argv", [NAME, "--check-ranks"])
    assert ex.main() == (0 if says == "yesyes" else 1)
    out = capsys.readouterr().out
    assert "".join(re.findall(r": (yes|NO)$", out, re.MULTILINE)) == says, out


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_ranks_that_are_compared(monkeypatch, capsys, gpus) -> None:
    """On GPUs, as many as there are; the most of them twice."""
    ex = module(monkeypatch)
    asked = []

    def run(function: Any, ranks: int, job: Any) -> list[Any]:
        asked.append(ranks)
        return [ex.Learned([5.0, 4.0], [(50, 4.5)], "", 1, 1, 1.0, None)] * ranks

    monkeypatch.setattr(ex.tw, "run", run)
    monkeypatch.setattr(ex.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", [NAME, "--check-ranks", "--device", "cuda"])
    assert ex.main() == (2 if gpus == 0 else 0)
    assert asked == [[], [1, 1], [1, 2, 2]][gpus]
    told = capsys.readouterr()
    if gpus == 0:
        assert "finds no GPU" in told.err
    else:
        assert ["1 rank twice", "2 ranks twice"][gpus - 1] in told.out


@pytest.mark.long
def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of docs/TRAINING.md learns, as it stands there: who predicts 0 has a loss of 1."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two ranks share the cores
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "TRAINING.md").read_text(), re.DOTALL)[0]
    (tmp_path / "guide.py").write_text(program)
    losses = re.fullmatch(r"\[(\d\.\d+), (\d\.\d+)\]\n", run(sys.executable, tmp_path / "guide.py"))
    assert losses and all(float(loss) < 0.3 for loss in losses.groups()), losses


def test_wrong_options(monkeypatch, capsys, tmp_path: Path) -> None:
    """Refused before any rank is started."""
    ex = module(monkeypatch)
    (tmp_path / "short.txt").write_text("too short")
    wrong = {
        "9 bytes to train on and 0 withheld; each must be at least 1000": ["--text", str(tmp_path / "short.txt")],
        "0 bytes to train on": ["--text", str(tmp_path / "missing")],
        "--top-k is 17; it must be from 1 to 16": ["--top-k", "17"],
        "--hidden is 15; it must be a multiple of 4": ["--hidden", "15"],
        "--ranks is 0; it must be at least 1": ["--ranks", "0"],
        "--balance is -1; it must be at least 0": ["--balance", "-1"],
    }
    for sentence, options in wrong.items():
        monkeypatch.setattr(sys, "argv", [NAME, *options])
        try:
            assert ex.main() == 2
        except SystemExit as left:
            assert left.code == 2
        assert sentence in capsys.readouterr().err


def test_withheld_files_are_not_trained_on(monkeypatch) -> None:
    """Of the standard library the files of a list are withheld; of a folder every 20th."""
    module(monkeypatch)
    moe_lm = importlib.import_module("moe_lm")
    for path in (None, str(EXAMPLES.parent / "python")):
        corpus = moe_lm.read_corpus(path)
        again = moe_lm.read_corpus(path)
        assert np.array_equal(corpus.train, again.train)
        # A 20th of the files is not a 20th of the bytes, and which files they are changes with each that is added.
        assert len(corpus.train) > 4 * len(corpus.withheld) > 4000
        assert corpus.withheld[2000:2400].tobytes() not in corpus.train.tobytes()
    text = moe_lm.read_corpus(None).withheld.tobytes()
    assert all(word in text for word in (b"def heappush(", b"class TextCalendar", b"class TextWrapper", b"class shlex"))
