"""Every example runs, small, as its first lines say, and prints what it promises."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import need

from tokenway import _native

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "docs" / "GUIDE.md"

pytestmark = pytest.mark.processes


def need_rich() -> None:
    """The printing of one example, and of the job."""
    need(importlib.util.find_spec("rich") is not None, "rich")


def run(*command: str | Path, code: int = 0) -> str:
    """The output of a command, which must end with that exit code."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def example(name: str, *arguments: str | Path, code: int = 0) -> str:
    """The output of a Python example."""
    return run(sys.executable, EXAMPLES / name, *arguments, code=code)


@pytest.fixture
def spoil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the examples' processes run a program first, which may put other functions in the library's place."""
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def write(program: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(program)

    return write


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of some hundred words, with what could be mistaken for markup."""
    path = tmp_path / "text.md"
    path.write_text("The router [red] sends *every* word, the [/] known and the unknown, to its experts.\n" * 15)
    return path


def test_the_guide_to_overlap(tmp_path: Path) -> None:
    """The program of docs/OVERLAP.md says that all sums are right."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "OVERLAP.md").read_text(), re.DOTALL)
    (tmp_path / "guide.py").write_text(program)
    assert run(sys.executable, tmp_path / "guide.py") == "[True, True]\n"


def test_everyday_runs() -> None:
    """The first example returns all rows."""
    out = example("00_everyday.py")
    assert re.findall(r"rank (\d): \d+ rows received, \(100, 7168\) returned", out) == ["0", "1", "2", "3"]


def test_everyday_is_the_guides() -> None:
    """docs/GUIDE.md shows this code, to the letter."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert (EXAMPLES / "00_everyday.py").read_text() in blocks


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks", "2"],
        pytest.param(["--ranks", "4", "--gate", "deepseek", "--max-tokens", "17"], marks=pytest.mark.long),
        ["--ranks", "3", "--experts", "2", "--top-k", "1", "--hidden", "40", "--inner", "24"],
    ],
    ids=["two", "deepseek", "rank without experts"],
)
def test_moe_layer(text: Path, options: list[str]) -> None:
    """All values are compared, and equal."""
    need_rich()
    out = example("01_moe_layer.py", text, *options)
    for line in ("Equal to the NumPy oracle, bit for bit", "Within rounding of one process in float64"):
        found = re.search(line + r": (\d+) of (\d+) values", out)
        assert found and found[1] == found[2] and int(found[2]) > 10000, out
    assert "All checks hold." in out
    busiest = re.search(r"\n +\d+ +\d+ +(\d+)   \S+ \d+", out.split("Busiest experts")[1])
    assert busiest and int(busiest[1]) > 10, out


@pytest.mark.long
def test_moe_layer_is_not_blind(text: Path, spoil: Callable[[str], None]) -> None:
    """One bit of one result changed, on one rank: the example says so and fails."""
    need_rich()
    spoil(
        "import tokenway as tw\n"
        "honest = tw.Group.combine\n"
        "def combine(self, *args, **kwargs):\n"
        "    out = honest(self, *args, **kwargs)\n"
        "    out.view('u2').flat[: self.rank] ^= 1\n"
        "    return out\n"
        "tw.Group.combine = combine\n"
    )
    out = example("01_moe_layer.py", text, "--ranks", "2", "--max-tokens", "999", code=1)
    found = re.search(r"bit for bit: (\d+) of (\d+) values", out)
    assert found and int(found[1]) == int(found[2]) - 1, out
    assert "A check FAILED." in out


def test_moe_layer_without_words(tmp_path: Path) -> None:
    """A file without words, or no file, is refused."""
    need_rich()
    (tmp_path / "empty.txt").write_text("\n")
    example("01_moe_layer.py", tmp_path / "empty.txt", code=2)
    example("01_moe_layer.py", tmp_path / "missing.txt", code=2)


def test_overlap() -> None:
    """Both orders give the same bits."""
    assert example("02_overlap.py").count("the same bits") == 2


def test_timeline(tmp_path: Path) -> None:
    """One after the other nothing overlaps; with two channels rows travel while experts compute, with the same bits."""
    need(importlib.util.find_spec("matplotlib") is not None, "matplotlib")
    plot, kept = tmp_path / "timeline.png", tmp_path / "timeline.json"
    size = ["--ranks", "3", "--tokens", "40", "--hidden", "64", "--inner", "32"]
    out = example("08_timeline.py", *size, "--plot", plot, "--json", kept)
    assert "The same bits in both orders." in out and "in turn: " in out and "overlapped: " in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    told = json.loads(kept.read_text())
    for order, overlaps in {"in turn": False, "overlapped": True}.items():
        assert (told["summary"][order]["experts_while_rows_travel_us"] > 0) == overlaps
        of = [i for i in told["intervals"] if i["order"] == order]
        assert all(0 <= i["begin"] <= i["end"] for i in of)
        parts = Counter((i["rank"], i["batch"], i["what"]) for i in of if i["what"] not in ("send", "wait"))
        assert parts == {(r, b, w): 1 for r in range(3) for b in range(2) for w in ("dispatch", "experts", "combine")}


@pytest.mark.parametrize("option", ["ranks", "tokens", "inner"])
def test_timeline_of_nothing(option: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "08_timeline.py", f"--{option}", "0"], capture_output=True, text=True
    )
    assert done.returncode == 2 and f"--{option} is 0; it must be at least 1" in done.stderr


def test_c_api(tmp_path: Path) -> None:
    """The C example, built by the command in its first lines."""
    need(shutil.which("cc") is not None, "cc, a C compiler")
    source = EXAMPLES / "03_c_api.c"
    command = next(line[2:].strip() for line in source.read_text().splitlines() if line.startswith("//   cc "))
    compile_, run_ = (shlex.split(part) for part in command.split("&&"))
    library = str(_native.library_path().parent)
    compile_ = [word.replace("$PWD/build", library).replace("-Lbuild", f"-L{library}") for word in compile_]
    program = str(tmp_path / "c_api")
    assert compile_[-1] == run_[0]
    compile_[-1] = program
    run(*compile_, "-Wall", "-Wextra", "-Werror")
    out = run(program)
    assert re.findall(r"rank (\d): .* 0 of \d+ sums are wrong", "\n".join(sorted(out.splitlines()))) == ["0", "1", "2"]
    assert "twInvalidArgument: ids[0, 1] is 8; it must be -1 (no expert) or from 0 to 7" in out


def test_failures() -> None:
    """The wrong table is named, the death is seen by all survivors, and they go on."""
    out = example("06_failures.py")
    assert out.count(": ConfigMismatch: expert_rank[5] differs: rank 0 has 0, rank 1 has 1\n") == 4
    assert len(re.findall(r"PeerDied .* twPeerDied +2 +combine ", out)) == 3
    values = re.findall(r"is rank \d of 3 now; (\d+) of (\d+) values equal the oracle's", out)
    assert len(values) == 3 and all(equal == compared for equal, compared in values)


def test_quantised(backend: str) -> None:
    """Every format takes the bytes that it promises, arrives as it was sent, and is as exact as it can be."""
    out = example("05_quantised.py", "--device", "cuda" if backend == "nvlink" else "cpu")
    found = re.findall(r"^(\S.*?)  +(\d+) +[\d.]+%   ([\d.]+)% .*  (\d+) values, bit for bit$", out, re.MULTILINE)
    assert [line[:2] for line in found] == [
        ("bf16", "2048"),
        ("fp8", "1056"),
        ("fp8, powers of two", "1056"),
        ("mxfp8", "1056"),
        ("nvfp4", "580"),
    ], out
    errors = [float(line[2]) for line in found]
    assert errors == sorted(errors), out
    assert all(int(line[3]) > 100000 for line in found)
    assert "All checks hold." in out


@pytest.mark.long
def test_quantised_is_not_blind(spoil: Callable[[str], None]) -> None:
    """One bit of one scale changed on its way, or scales that are not applied: the example says so and fails."""
    spoil(
        "import tokenway as tw\n"
        "honest = tw.Group.dispatch\n"
        "def dispatch(self, *args, **kwargs):\n"
        "    recv = honest(self, *args, **kwargs)\n"
        "    if self.rank == 1 and 'scales' in recv.payloads:\n"
        "        recv.payloads['scales'].view('u1')[0, 0, 0] ^= 1\n"
        "    return recv\n"
        "tw.Group.dispatch = dispatch\n"
    )
    out = example("05_quantised.py", "--ranks", "2", code=1)
    assert len(re.findall(r"\d values, 1 VALUES DIFFER$", out, re.MULTILINE)) == 4, out
    spoil(
        "import tokenway as tw\n"
        "honest = tw.dequantize_fp8\n"
        "tw.dequantize_fp8 = lambda values, scales: honest(values, scales * 0.97)\n"
    )
    out = example("05_quantised.py", "--ranks", "2", code=1)
    assert len(re.findall(r"^fp8.* WRONG .*bit for bit$", out, re.MULTILINE)) == 2, out
    assert out.endswith("A check FAILED.\n")


def test_one_window(backend: str) -> None:
    """A group of both modes grows for a prompt, and another group lives in its window."""
    out = example("11_one_window.py", "--device", "cuda" if backend == "nvlink" else "cpu")
    found = re.findall(r"^(\w+) +(\w+) +([\d.]+) MiB   exact on all ranks$", out, re.MULTILINE)
    names, layouts, windows = zip(*found, strict=True)
    assert names == ("draft", "decode", "prefill", "draft", "decode") and layouts[2] == "flat", out
    assert windows[0] == windows[3] == "0.00" and float(windows[1]) < float(windows[2]) == float(windows[4]), out
    assert out.endswith("All checks hold.\n")


def test_one_window_is_not_blind(spoil: Callable[[str], None]) -> None:
    """One value of the large batch changed on its way: the example says so and fails."""
    spoil(
        "import tokenway as tw\n"
        "honest = tw.Group.dispatch\n"
        "def dispatch(self, *args, **kwargs):\n"
        "    recv = honest(self, *args, **kwargs)\n"
        "    if recv.layout == 'flat' and self.rank == 1:\n"
        "        recv.tokens[0, 0] += 1\n"
        "    return recv\n"
        "tw.Group.dispatch = dispatch\n"
    )
    assert "WRONG" in example("11_one_window.py", "--ranks", "2", code=1)


def test_index_lists(backend: str) -> None:
    """The lists are the oracle's, and longer blocks take more places for the same choices."""
    out = example("10_index_lists.py", "--device", "cuda" if backend == "nvlink" else "cpu")
    found = re.findall(r"^ *(\d+) +(\d+) +(\d+) +(\d+)   [\d.e-]+ +as the oracle has them$", out, re.MULTILINE)
    blocks, choices, places, most = (list(map(int, column)) for column in zip(*found, strict=True))
    assert blocks == [1, 16, 64] and len(set(choices)) == 1 and places[0] == choices[0] > 100, out
    assert places == sorted(set(places)) and all(n % block == 0 for n, block in zip(places, blocks, strict=True))
    assert all(n <= m for n, m in zip(places, most, strict=True))
    assert out.endswith("All checks hold.\n")


@pytest.mark.torch
def test_index_lists_with_pytorch(torch) -> None:
    assert example("10_index_lists.py", "--device", "torch", "--ranks", "2").endswith("All checks hold.\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("recv.sorted_rows[0] += 1", "WRONG"),  # another row
        ("recv.block_experts[:2] = recv.block_experts[:2][::-1].copy()", "WRONG"),
        ("recv.weights[...] *= 0.5", "the error is WRONG"),
    ],
)
def test_index_lists_are_not_blind(change: str, said: str, spoil: Callable[[str], None]) -> None:
    """A list that is wrong, or a result: the example says so and fails."""
    spoil(
        "import tokenway as tw\n"
        "honest = tw.Group.dispatch\n"
        "def dispatch(self, *args, **kwargs):\n"
        "    recv = honest(self, *args, **kwargs)\n"
        f"    {change}\n"
        "    return recv\n"
        "tw.Group.dispatch = dispatch\n"
    )
    out = example("10_index_lists.py", "--ranks", "2", code=1)
    assert said in out and out.endswith("A check FAILED.\n")


def test_late_weights(backend: str) -> None:
    """Two combines of a dispatch, with the same bits on any ranks and by any placement."""
    out = example("12_late_weights.py", "--device", "cuda" if backend == "nvlink" else "cpu")
    found = re.findall(r"^ +(\d+)  (.{10})(\w{12}) +(\w{12}) +[\d.e-]+$", out, re.MULTILINE)
    ranks, names, first, second = zip(*found, strict=True)
    assert names[:3] == ("blocks    ", "in turns  ", "replicas  ") and len(set(ranks)) * 3 == len(ranks) >= 6, out
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0], out
    assert out.endswith("All results have the same bits.\n")


def test_late_weights_are_not_blind(spoil: Callable[[str], None]) -> None:
    """A weight that is wrong on one rank of two: the example says so and fails."""
    spoil(
        "import tokenway as tw\n"
        "honest = tw.Group.combine\n"
        "def combine(self, handle, rows, weights=None, **kwargs):\n"
        "    if self.rank == 1:\n"
        "        weights[0, 0] *= 1.001\n"
        "    return honest(self, handle, rows, weights=weights, **kwargs)\n"
        "tw.Group.combine = combine\n"
    )
    out = example("12_late_weights.py", "--ranks", "2", code=1)
    assert "NOT the same" in out and out.endswith("A check FAILED.\n")


def test_fp8_forward(backend: str) -> None:
    """The fp8 rows take no window of their own, and forward and backward are as exact as their formats."""
    out = example("09_fp8_forward.py", "--device", "cuda" if backend == "nvlink" else "cpu")
    assert "forward 1056 to the experts and 2048 back, backward 2048 and 2048" in out
    windows = re.search(r"^one window of ([\d.]+) MiB, for a group of each type ([\d.]+)$", out, re.MULTILINE)
    assert windows and float(windows[1]) < 0.8 * float(windows[2]), out
    assert out.endswith("All checks hold.\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tw.TypedRows.dispatch, 'scales'", "NOT WHAT WAS SENT"),
        ("tw.Group.dispatch, None", "NOT WHAT WAS SENT"),
        ("tw.Group.combine, None", " WRONG"),
    ],
)
def test_fp8_forward_is_not_blind(change: str, said: str, spoil: Callable[[str], None]) -> None:
    """One scale, one gradient, or a token's sum changed on its way: the example says so and fails."""
    spoil(
        "import tokenway as tw\n"
        "def change(call, payload):\n"
        "    def changed(self, *args, **kwargs):\n"
        "        result = call(self, *args, **kwargs)\n"
        "        if not hasattr(result, 'tokens'):\n"
        "            result *= result.dtype.type(1.06)\n"
        "        elif payload:\n"
        "            result.payloads[payload][0, 0, 0] *= 2\n"
        "        else:\n"
        "            result.tokens.view('u2')[0, 0, 0] ^= 1\n"
        "        return result\n"
        "    return changed\n"
        f"owner, payload = {change.split(', ')[0].rpartition('.')[0]}, {change.split(', ')[1]}\n"
        f"owner.{change.split(', ')[0].rpartition('.')[2]} = change({change})\n"
    )
    assert said in example("09_fp8_forward.py", "--ranks", "2", code=1)


SMALL = ("--steps", "4", "--max-tokens", "12", "--hidden", "48", "--inner", "24", "--rounds", "1")


@pytest.mark.parametrize(
    "options",
    [("--ranks", "4"), ("--ranks", "3", "--experts", "2", "--top-k", "1"), ("--ranks", "1", "--layers", "1")],
    ids=["four", "rank without experts", "one"],
)
def test_dp_attention(options: tuple[str, ...]) -> None:
    """Both ways give the same bits, the right ones, and what each costs."""
    check_dp_attention(example("07_dp_attention.py", *SMALL, *options), "shm")


@pytest.mark.long
def test_dp_attention_with_pytorch(backend: str) -> None:
    """The same over torch.distributed, and on GPUs."""
    need(importlib.util.find_spec("torch") is not None, "PyTorch")
    where = ("--device", "cuda") if backend == "nvlink" else ("--backend", "torch", "--ranks", "2")
    check_dp_attention(example("07_dp_attention.py", *SMALL, *where), "nvlink" if backend == "nvlink" else "torch")


def check_dp_attention(out: str, backend: str) -> None:
    assert f"backend {backend}\n" in out
    assert re.findall(r"^ +(\d+)  \[\d.*ed, by \d+%$", out, re.MULTILINE) == ["0", "1", "2", "3"], out
    layers = re.search(r" (\d) layers", out)
    assert layers
    profile = re.findall(r"^(\w+) +(\w+|all_gatherv of sizes) +(\d+) .*%$", out, re.MULTILINE)
    assert profile == [
        ("routed", "all_gatherv of sizes", "1"),
        ("routed", "dispatch", layers[1]),
        ("routed", "combine", layers[1]),
        ("gathered", "all_gatherv of sizes", "1"),
        ("gathered", "all_gatherv", layers[1]),
        ("gathered", "reduce_scatterv", layers[1]),
    ], out
    checked = re.findall(r"(\d+) of (\d+) values", out)
    assert len(checked) == 5 and all(good == values and int(values) > 500 for good, values in checked), out
    assert out.endswith("All checks hold.\n")


def test_dp_attention_is_not_blind(spoil: Callable[[str], None]) -> None:
    """One bit of one sum in one way, or the same mistake in both: the example says so and fails."""
    wrong = (
        "import tokenway as tw\n"
        "def spoil(name, change):\n"
        "    honest = getattr(tw.Group, name)\n"
        "    def method(self, *args, **kwargs):\n"
        "        sums = honest(self, *args, **kwargs)\n"
        "        if self.rank == 1 and len(sums):\n"
        "            change(sums)\n"
        "        return sums\n"
        "    setattr(tw.Group, name, method)\n"
        "def bit(sums): sums.view('u2')[0, 0] ^= 1\n"
        "def half(sums): sums[0, :8] *= 0.5\n"
    )
    for more, equal in (
        ("spoil('reduce_scatterv', bit)", False),
        ("for n in ('reduce_scatterv', 'combine'): spoil(n, half)", True),
    ):
        spoil(wrong + more + "\n")
        out = example("07_dp_attention.py", *SMALL, "--ranks", "2", code=1)
        same = re.search(r"bit for bit: (\d+) of (\d+) values", out)
        assert same and (same[1] == same[2]) is equal, out
        block = re.search(r"MoE block +(\d+) of (\d+) values", out)
        assert block and (block[1] == block[2]) is not equal, out
        assert out.endswith("A check FAILED.\n")


def load_job() -> ModuleType:
    """examples/main_job.py as a module."""
    spec = importlib.util.spec_from_file_location("main_job", EXAMPLES / "main_job.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_job(text: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What `make run` runs, with a smaller bench: every part prints, and it says that all is well."""
    need_rich()
    job = load_job()
    assert "--profile" in job.BENCH
    monkeypatch.setattr(job, "BENCH", ["--quick", "--ranks", "2", "--tokens", "1", "--baselines", "none"])
    monkeypatch.setattr(sys, "argv", ["main_job.py", str(text)])
    assert job.main() == 0
    out = capfd.readouterr().out
    for line in ("1. A mixture", "All checks hold.", "2. What", "PeerDied", "3. How long", "deepseek-v3"):
        assert line in out
    assert out.count("Everything is as it should be.") == 1


def test_job_fails_with_a_part(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A part that fails makes the job fail, after the others."""
    need_rich()
    job = load_job()
    parts = [("first", ["-c", "raise SystemExit(3)"]), ("second", ["-c", "print('still run')"])]
    monkeypatch.setattr(job, "parts", lambda text: parts)
    monkeypatch.setattr(sys, "argv", ["main_job.py", "any"])
    assert job.main() == 1
    out = capfd.readouterr().out
    assert "still run" in out and "exit code 3" in out and "FAILED" in out


def test_token_replicas(backend: str) -> None:
    """Ranks of a set send a share each, and half as many rows travel."""
    out = example("13_token_replicas.py", "--device", "cuda" if backend == "nvlink" else "cpu")
    rows = re.findall(r"(\d+)   exact on all ranks$", out, re.MULTILINE)
    assert len(rows) == 2 and int(rows[0]) == 2 * int(rows[1]) > 0, out
    assert out.endswith("All checks hold.\n")


def test_token_replicas_is_not_blind(spoil: Callable[[str], None]) -> None:
    """A result that one rank of a set has otherwise than the other: the example says so and fails."""
    spoil(
        "import tokenway as tw\n"
        "honest = tw.Group.combine\n"
        "def combine(self, *args, **kwargs):\n"
        "    out = honest(self, *args, **kwargs)\n"
        "    if self.token_replicas > 1 and self.rank == 1:\n"
        "        out[0, 0] += 1\n"
        "    return out\n"
        "tw.Group.combine = combine\n"
    )
    assert "WRONG" in example("13_token_replicas.py", "--ranks", "2", code=1)


def test_moving_experts(backend: str, tmp_path: Path) -> None:
    """Experts follow what tokens choose, and results stay the same bits."""
    drawn = tmp_path / "moving.png"
    plot = ["--plot", drawn] if importlib.util.find_spec("matplotlib") else []
    out = example("14_moving_experts.py", "--device", "cuda" if backend == "nvlink" else "cpu", *plot)
    lines = re.findall(r"^\d+ to (\d+) +\d +([\d.]+) % +([\d.]+) %$", out, re.MULTILINE)
    assert len(lines) == 12 and all(float(moved) < float(still) for last, still, moved in lines if int(last) % 64 == 63)
    assert int(re.findall(r"(\d+) experts came to another slot", out)[0]) > 0
    assert "bit for bit those without moves" in out and out.endswith("All checks hold.\n")
    assert not plot or drawn.read_bytes().startswith(b"\x89PNG")


def test_moving_experts_is_not_blind(spoil: Callable[[str], None]) -> None:
    """Weights that do not come along: the example says so and fails."""
    spoil("from tokenway import balance\nbalance.Weights.pull = lambda self, piece, stream: None\n")
    assert "WRONG" in example("14_moving_experts.py", "--ranks", "2", code=1)
