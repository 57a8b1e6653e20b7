"""`tokenway balance`, what it reads, and the loads that it makes up."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenway import balance, cli
from tokenway.bench import placement, report
from tokenway.errors import InvalidArgument

EXPERTS, TOP_K = 16, 2


def run(*argv: object) -> int:
    return cli.main(["balance", *map(str, argv)])


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line on stderr of a command that must be refused."""
    assert run(*argv) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("tokenway: ") and told.err.count("\n") == 1, told.err
    return told.err


def skewed_ids(steps: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Ids of a router that likes low experts."""
    rng = np.random.default_rng(seed)
    scores = -np.log(np.arange(1, EXPERTS + 1)) + rng.gumbel(size=(steps, tokens, EXPERTS))
    return np.argsort(-scores, axis=2)[..., :TOP_K].astype(np.int32)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """As `tokenway bench --routing` reads it; a few tokens have no second expert."""
    ids = skewed_ids(6, 200)
    ids[:, :7, 1] = -1
    np.savez(tmp_path / "trace.npz", ids=ids)
    return tmp_path / "trace.npz"


def test_a_recorded_routing(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert run(trace, "--ranks", 4, "--slots", 5, "--experts", EXPERTS, "--json", out, "--expert-mib", 2) == 0
    told = capsys.readouterr().out
    ids = np.load(trace)["ids"]
    counts = np.bincount(ids[ids >= 0], minlength=EXPERTS).astype(float)
    before = balance.rank_loads(counts, balance.contiguous(1, EXPERTS, 4, 5), ranks=4, slots=5)
    figures = json.loads(out.read_text())
    assert figures["before"] == balance.imbalance(before).tolist()
    assert figures["bound"][0] <= figures["after"][0] <= figures["before"][0]
    assert f"{100 * figures['before'][0]:.2f} %" in told and f"{100 * figures['after'][0]:.2f} %" in told
    # 4 slots more than experts: 1 a rank, of 2 MiB.
    assert "slots beyond one per expert: 4 a layer, 1.00 a rank; 2.0 MiB on a rank" in told
    assert f"copy {2 * sum(figures['moves']):.1f} MiB" in told


def test_what_the_training_example_records(tmp_path: Path) -> None:
    """chosen [steps, layers, batch, S, K] and how many experts there are."""
    chosen = np.stack([skewed_ids(3, 40, seed).reshape(3, 4, 10, TOP_K) for seed in range(2)], axis=1)
    path = tmp_path / "routing.npz"
    np.savez_compressed(path, chosen=chosen.astype(np.uint16), experts=EXPERTS + 3, batch=4, seed=0)
    recording = balance.read(path)
    assert recording.counts.shape == (3, 2, EXPERTS + 3) and recording.choices == 40 * TOP_K
    for step in range(3):
        for layer in range(2):
            wanted = np.bincount(chosen[step, layer].ravel(), minlength=EXPERTS + 3)
            assert (recording.counts[step, layer] == wanted).all()
    assert (recording.loads == recording.counts.sum(axis=0)).all()
    assert (recording.windows(2)[0] == recording.counts[:2].sum(axis=0)).all() and len(recording.windows(2)) == 1


@pytest.mark.parametrize("held", [[[1, 2, 3]], {"logical_count": [[1, 2, 3]]}, {"logical_count": [[[1, 2, 3]]]}])
def test_counts_as_json(held: Any, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(held))
    assert balance.read(path).loads.tolist() == [[1, 2, 3]]
    assert run(path, "--ranks", 2) == 0


def test_save_and_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "plan.json", tmp_path / "figures.json"
    shape = ["--ranks", 4, "--layers", 3, "--experts", 32]
    assert run("lognormal", *shape, "--save", saved) == 0
    again = [*shape, "--old", saved, "--json", out]
    assert run("lognormal", *again) == 0
    assert json.loads(out.read_text())["moves"] == [0, 0, 0]
    assert run("lognormal", *again, "--seed", 1, "--writes", 2) == 0
    figures = json.loads(out.read_text())
    assert max(figures["moves"]) <= 2 and np.mean(figures["after"]) < np.mean(figures["before"])
    assert "is for 4 ranks of 9 slots, 3 layers" in refused_after(capsys, "lognormal", *again, "--slots", 10)
    saved.write_text("{}")
    assert "KeyError" in refused_after(capsys, "lognormal", *again)


def refused_after(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    capsys.readouterr()
    return refused(capsys, *argv)


def test_online_and_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    shape = ["--ranks", 8, "--slots", 12, "--layers", 2, "--experts", 64, "--windows", 6, "--memory", 0.95]
    asked = ["--online", "--policies", "none", "static", "update", "replan", "--writes", 2, 8, "--tokens", 8, 64]
    assert run("drifting", *shape, *asked, "--json", out) == 0
    figures = json.loads(out.read_text())
    rows = {(row["policy"], row["writes"]): row for row in figures["online"]}
    assert set(rows) == {("none", None), ("static", None), ("update", 2), ("update", 8), ("replan", None)}
    assert rows["none", None]["mean"] > rows["static", None]["mean"] > rows["update", 8]["mean"]
    assert rows["update", 2]["written"] <= 2 and rows["update", 8]["written"] <= 8 < rows["replan", None]["written"]
    for row in figures["sampled"]:
        assert row["best"] < row["even"] and row["best"] < row["random"]
    assert figures["sampled"][0]["even"] > figures["sampled"][1]["even"]
    told = capsys.readouterr().out
    assert "worst window" in told and "tokens" in told


def test_online_through_the_balancer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What steps see: worse than a planner that takes no time, as maps come late, and better than no moves."""
    out = tmp_path / "figures.json"
    shape = ["--ranks", 8, "--slots", 9, "--layers", 2, "--experts", 64, "--windows", 6, "--memory", 0.95]
    asked = ["--online", "--steps", 24, "--writes", 8, "--gain", 0, "--json", out]
    assert run("drifting", *shape, *asked, "--expert-mib", 3) == 0
    figures = json.loads(out.read_text())
    rows = {row["policy"]: row for row in figures["online"]}
    (moved,) = figures["balancer"]
    assert rows["update"]["mean"] < moved["mean"] < rows["static"]["mean"]
    assert moved["writes"] == 8 and moved["plans"] == len(moved["delays"]) >= 4 and len(moved["by_window"]) == 6
    assert moved["mean"] == pytest.approx(np.mean(moved["by_window"][1:]))
    assert moved["mib_per_step"] == pytest.approx(3 * moved["moves"] / 8 / (6 * 24))
    told = capsys.readouterr().out
    assert "plans every 24 steps, 64 MiB a step and rank, experts of 3 MiB" in told
    assert f"{100 * moved['mean']:.2f} %" in told and f"{np.mean(moved['delays']):.1f}" in told
    # Later plans, and slower ones, leave more.
    assert run("drifting", *shape, *asked, "--delay", 6) == 0
    (late,) = json.loads(out.read_text())["balancer"]
    assert np.mean(late["delays"]) > np.mean(moved["delays"]) and late["mean"] > moved["mean"]


def test_a_recording_is_played_by_its_own_steps(tmp_path: Path) -> None:
    """Each step of a recording is a step of the balancer, and a window so many of them."""
    ids, out = skewed_ids(48, 200), tmp_path / "figures.json"
    ids[16:] = (ids[16:] + 5) % EXPERTS  # other experts are hot
    np.savez(tmp_path / "trace.npz", ids=ids)
    shape = [tmp_path / "trace.npz", "--ranks", 4, "--slots", 5, "--experts", EXPERTS, "--window", 8, "--online"]
    assert run(*shape, "--json", out) == 0
    (moved,) = json.loads(out.read_text())["balancer"]
    counts = balance.read(tmp_path / "trace.npz", EXPERTS).counts
    first = balance.plan(counts[:8].sum(axis=0), ranks=4, slots=5, old=balance.contiguous(1, EXPERTS, 4, 5), writes=20)
    played = balance.play(counts, ranks=4, first=first, every=8, expert_bytes=42 << 20, step_bytes=64 << 20)
    assert moved["by_window"] == played.imbalance.reshape(6, 8).mean(axis=1).tolist() and moved["plans"] > 0
    by_window = moved["by_window"]
    assert by_window[2] > 2 * by_window[5]  # it has followed


def test_groups_on_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    shape = ["--ranks", 8, "--nodes", 2, "--groups", 4, "--layers", 2, "--experts", 64]
    assert run("lognormal", *shape, "--tolerance", 1, "--json", out) == 0
    assert json.loads(out.read_text())["stray"] == [0, 0]
    assert "astray" in capsys.readouterr().out


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
@pytest.mark.parametrize("source", ["lognormal", "drifting"])
def test_plots(source: str, tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    online = ["--online", "--windows", 3] if source == "drifting" else []
    assert run(source, "--ranks", 4, "--layers", 2, "--experts", 32, "--plot", out, *online) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["lognormal"], "--ranks"),
        (["nonsense", "--ranks", 4], "'nonsense'; allowed: FILE.npz, FILE.json, lognormal"),
        (["gone.json", "--ranks", 4], "gone.json"),
        (["lognormal", "--ranks", 0], "--ranks: 0; must be at least 1"),
        (["lognormal", "--ranks", 4, "--slots", 3], "--slots: 3; 256 experts on 4 ranks; allowed 64..262144"),
        (["lognormal", "--ranks", 4, "--slots", 10**9], "--slots: 1000000000; 256 experts on 4 ranks; allowed 64.."),
        (["lognormal", "--ranks", 4, "--sigma", 1e6], "sigma is 1000000.0; allowed 0..20"),
        (["zipf", "--ranks", 4, "--sigma", "nan"], "exponent is nan; allowed 0..20"),
        (["lognormal", "--ranks", 4, "--expert-mib", -5], "--expert-mib: -5.0; must be above 0"),
        (["lognormal", "--ranks", 4, "--expert-mib", "nan"], "--expert-mib: nan; must be above 0"),
        (
            ["lognormal", "--ranks", 4, "--json", "/no/such/folder/x.json"],
            "--json: /no/such/folder/x.json: there is no such folder",
        ),
        (
            ["lognormal", "--ranks", 4, "--save", "/no/such/folder/x.json"],
            "--save: /no/such/folder/x.json: there is no such folder",
        ),
        (["lognormal", "--ranks", 4, "--plot", "plan.xyz"], "--plot: 'plan.xyz'; must end in .png, .pdf, .svg"),
        (["lognormal", "--ranks", 4, "--nodes", 3], "nodes is 3"),
        (["lognormal", "--ranks", 4, "--online"], "--online: 1 window; at least 2 are needed"),
        (["lognormal", "--ranks", 4, "--writes", 1, 2], "--writes: 2 budgets"),
        (["drifting", "--ranks", 4, "--writes", -1], "--writes: -1"),
        (["lognormal", "--ranks", 4, "--writes", 2], "--writes: a first plan has no budget"),
        (["drifting", "--ranks", 4, "--online", "--old", "plan.json"], "--old: with --online the first plan"),
        (["lognormal", "--ranks", 4, "--save", "."], "--save: .: is a folder"),
        (["drifting", "--ranks", 4, "--memory", 2], "memory is 2.0; allowed 0..1"),
        (["drifting", "--ranks", 4, "--online", "--policies", "magic"], "--policies: invalid choice: 'magic'"),
        (["drifting", "--ranks", 4, "--online", "--decay", 1], "decay is 1.0"),
        (["drifting", "--ranks", 4, "--online", "--decay", "nan"], "decay is nan"),
        (["drifting", "--ranks", 4, "--online", "--step-mib", 0], "--step-mib: 0.0; must be above 0"),
        (["drifting", "--ranks", 4, "--online", "--load-decay", 1], "--load-decay: 1.0; allowed from 0, below 1"),
        (["drifting", "--ranks", 4, "--online", "--layers", 1, "--gain", -1], "gain is -1.0; it must be at least 0"),
        (["drifting", "--ranks", 4, "--online", "--delay", 0], "--delay: 0; must be at least 1"),
    ],
)
def test_refusals(argv: list[object], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    if argv[0] == "gone.json":
        assert run(*argv) == 1
        assert told in capsys.readouterr().err
        return
    assert told in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[1, NaN]]", "logical_count[0, 1]: nan; must be finite and at least 0"),
        ("[[1, -2]]", "must be finite and at least 0"),
        ("[[1, 2], [3]]", "rows of numbers"),
        ("[1, 2]", "shape (2,)"),
        ('{"counts": [[1]]}', "must have 'logical_count'"),
        ("[[1,", "no JSON"),
        ("[" * 100000, "no JSON"),
        (f"[[1, {10**400}]]", "rows of numbers"),
    ],
)
def test_bad_counts(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counts.json"
    path.write_text(text)
    assert told in refused(capsys, path, "--ranks", 2)


def test_bad_traces(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "allowed -1..3 (experts)" in refused(capsys, trace, "--ranks", 2, "--experts", 4)
    assert "--window: 7; " in refused(capsys, trace, "--ranks", 2, "--window", 7)
    np.savez(tmp_path / "other.npz", chosen=np.zeros((2, 3), np.int32))
    assert "must be integers [steps, layers, ..., K]" in refused(capsys, tmp_path / "other.npz", "--ranks", 2)
    np.savez(tmp_path / "empty.npz", x=np.zeros(1))
    assert "must have 'ids'" in refused(capsys, tmp_path / "empty.npz", "--ranks", 2)
    np.savez(tmp_path / "other.npz", chosen=np.full((2, 1, 3, 2), 2**64 - 1, np.uint64), experts=4)
    assert "allowed -1..3 (experts)" in refused(capsys, tmp_path / "other.npz", "--ranks", 2)
    np.savez(tmp_path / "other.npz", chosen=np.zeros((2, 1, 3, 2), np.int32), experts=[4, 4])
    assert "experts: int64 (2,); must be an integer" in refused(capsys, tmp_path / "other.npz", "--ranks", 2)


@pytest.mark.parametrize("command", [["balance", "--ranks", "2"], ["bench", "--routing"]])
def test_damaged_traces(command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trace.read_bytes()
    np.save(tmp_path / "single.npy", np.zeros(3))
    middle = len(whole) // 2
    damaged = {
        "empty": b"",
        "cut": whole[:500],
        "turned": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
        "text": b"ids",
        "single": (tmp_path / "single.npy").read_bytes(),
    }
    for name, content in damaged.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        assert cli.main([*command, str(path)]) == 2, name
        assert f"{name}.npz: " in (told := capsys.readouterr().err) and "damaged" in told, told


def test_output_that_nobody_reads(trace: Path, tmp_path: Path) -> None:
    """Files are written whoever reads the table, and whatever he can read."""
    shutil.copy(trace, tmp_path / "\u00fcn\u00ef.npz")
    for name, source, env in (
        ("closed", "lognormal --layers 3000 --experts 16", {}),
        ("ascii", "\u00fcn\u00ef.npz", {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}),
    ):
        command = f"{sys.executable} -m tokenway.cli balance {source} --ranks 4 --save {name}.json"
        shell = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command} | head -1"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | env,
            capture_output=True,
            text=True,
        )
        assert (tmp_path / f"{name}.json").exists(), shell.stderr
        assert shell.returncode == 0 and not shell.stderr, shell


# ---- loads that are made up ----------------------------------------------------------------------


def test_workloads_are_what_they_say() -> None:
    for made in (
        balance.lognormal(3, 50, seed=1),
        balance.zipf(3, 50, seed=1),
        balance.dirichlet(3, 50, 0.01, seed=1),
        balance.drifting(4, 3, 50, hot=5, stay=2, seed=1),
        balance.domains(9, 3, 50, stay=2, seed=1),
    ):
        assert np.allclose(made.mean(axis=-1), 1) and (made >= 0).all()
    assert np.std(np.log(balance.lognormal(50, 500, 0.7, seed=3))) == pytest.approx(0.7, rel=0.05)
    falling = np.sort(balance.zipf(2, 10, 1.5, seed=0), axis=1)[:, ::-1]
    assert np.allclose(falling / falling[:, :1], np.arange(1, 11) ** -1.5)
    assert (balance.lognormal(2, 8, seed=1) == balance.lognormal(2, 8, seed=1)).all()
    assert (balance.lognormal(2, 8, seed=1) != balance.lognormal(2, 8, seed=2)).all()
    logs = np.log(balance.lognormal(20, 64, 0.0, seed=0, groups=4, group_sigma=1.0))
    assert np.ptp(logs.reshape(20, 4, 16), axis=2).max() < 1e-12 < np.ptp(logs, axis=1).min()


def test_drift_and_hot_sets_change_as_said() -> None:
    windows = np.log(balance.drifting(40, 4, 256, 0.75, memory=0.9, seed=1))
    near = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in pairwise(windows)]
    assert np.mean(near) == pytest.approx(0.9, abs=0.02)
    assert windows[-1].std() == pytest.approx(0.75, rel=0.1)
    flat = balance.drifting(4, 1, 100, 0.0, hot=10, boost=5.0, stay=2, seed=1)[:, 0]
    hot = [set(np.flatnonzero(window > 1).tolist()) for window in flat]
    assert hot[0] == hot[1] != hot[2] == hot[3] and len(hot[0]) == 10
    mixed = balance.domains(5, 1, 20, count=2, stay=2, seed=1)[:, 0]
    assert (mixed[0] == mixed[1]).all() and np.allclose(mixed[2], (mixed[1] + mixed[3]) / 2)


def test_samples_and_routers() -> None:
    loads = balance.lognormal(2, 32, seed=1)
    counts = balance.sample(loads, 100000, seed=1)
    assert (counts.sum(axis=1) == 100000).all() and np.abs(counts / 100000 * 32 - loads).max() < 0.1
    assert balance.sample(np.zeros((1, 4)), 400, seed=1).sum() == 400
    ids = balance.group_limited(loads[0], 500, 4, groups=8, top_groups=2, seed=1)
    assert ids.shape == (500, 4) and all(len(set(row)) == 4 for row in ids.tolist())
    assert max(len(set(row)) for row in (ids // 4).tolist()) == 2
    with pytest.raises(InvalidArgument, match="groups, top_groups and top_k are 8, 2 and 9"):
        balance.group_limited(loads[0], 5, 9, groups=8, top_groups=2)


def test_rows_between_nodes() -> None:
    plan = balance.plan(np.ones(8), ranks=4, slots=2, nodes=2)
    at = np.array([plan.expert_map()[e][0][0] // 2 for e in range(8)])
    both = [int(np.flatnonzero(at == n)[0]) for n in range(2)]
    # Tokens 0..3 are of ranks and nodes 0, 1, 0, 1 in turn: one expert on each node is one row to the other.
    assert balance.rows_between_nodes(plan, np.array([both] * 8)) == 1
    assert balance.rows_between_nodes(plan, np.array([[both[0]]] * 8)) == 0.5


@pytest.mark.long
def test_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All its tables, as the page shows them."""
    monkeypatch.setattr(placement, "LAYERS", 2)
    out = tmp_path / "balance.json"
    assert placement.main(["--seeds", "1", "--json", str(out)]) == 0
    text = report.read(out)
    assert text.count("| ---") >= 5 and "greedy by group" in text and "144 | 288" in text
    figures = json.loads(out.read_text())["placement"]
    assert all(row["layers_worse"] == 0 and row["bound"] <= row["mean"] for row in figures["full"])
    drifts = {(row["hot"], row["writes"]): row for row in figures["drift"] if row["policy"] == "update"}
    assert drifts[0, 16]["worst_seed"] < 0.06 and drifts[2, 16]["worst_seed"] < 0.06
