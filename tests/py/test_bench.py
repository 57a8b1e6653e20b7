"""The benchmark: it verifies, it notices, and what it writes can be read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import need

import tokenway as tw
from tokenway import machine
from tokenway.bench import auxiliary, baselines, command, cpu, report, timing, verify
from tokenway.bench.case import LAYOUTS, Case
from tokenway.bench.control import CHUNK, Control
from tokenway.bench.profiles import PROFILES, Profile
from tokenway.bench.settings import Settings
from tokenway.bench.tables import modes
from tokenway.bench.tables.auxiliary import PHASES
from tokenway.cli import main

TINY = Profile("tiny", hidden=160, experts=8, top_k=3, inner=8, gating="softmax_topk")
CASE = Case(TINY, "uniform", 7, 1, "bfloat16", "rank_major", "none")


def bench(*argv: str, code: int = 0) -> str:
    """The output of `tokenway bench`, which must end with that exit code."""
    command = [sys.executable, "-m", "tokenway.cli", "bench", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- the oracle's word ---------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_every_profile_and_routing(ranks) -> None:
    what = ["--profile", "all", "--routing", "all", "--tokens", "1", "6"]
    out = bench("--ranks", str(ranks), *what, "--verify-only")
    assert all(out.count(f"\n{name} ") == 6 for name in PROFILES)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_profile_and_routing_on_more_ranks(ranks) -> None:
    what = ["--profile", "all", "--routing", "all", "--tokens", "1", "6", "--quick"]
    out = bench("--ranks", str(ranks), *what, "--verify-only")
    assert all(out.count(f"\n{name} ") == 6 for name in PROFILES)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dtype", "layout", "weighting"),
    [
        ("float16", "rank_major", "topk"),
        ("fp8", "expert_major", "topk"),
        ("bfloat16", "flat", "topk"),
        *(
            pytest.param(*kind, marks=pytest.mark.long)
            for kind in (
                ("float32", "expert_major", "none"),
                ("bfloat16", "expert_major", "topk"),
                ("fp8", "rank_major", "none"),
                ("float32", "grouped", "none"),
                ("fp8", "flat", "none"),
                ("fp8", "grouped", "topk"),
            )
        ),
    ],
)
def test_every_kind_of_row(dtype, layout, weighting) -> None:
    kind = ["--dtype", dtype, "--layout", layout, "--weighting", weighting]
    bench("--ranks", "3", "--profile", "gpt-oss-120b", "--tokens", "1", "9", *kind, "--verify-only")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("layout", "weighting"), [("rank_major", "topk"), ("flat", "none"), ("grouped", "topk")])
def test_backward(tmp_path, layout, weighting) -> None:
    """Gradients are verified as what they are, and timed apart, together, and after the forward pass."""
    data = tmp_path / "run.json"
    kind = ["--layout", layout, "--weighting", weighting, "--quick", "--baselines", "none", "--backward"]
    out = bench("--ranks", "2", "--profile", "gpt-oss-120b", "--tokens", "1", "9", *kind, "--json", str(data))
    assert "backward us  both us" in out
    run = json.loads(data.read_text())
    for row in run["rows"]:
        assert row["verified_exchanges"] == cpu.EXCHANGES + 1
        for phase in timing.BACKWARD:
            assert 0 < row[f"{phase}_us"]["p10"] <= row[f"{phase}_us"]["median"]
        assert row["moved_gb_s"]["both"] > 0 and row["moved_gb_s"]["backward"] > 0
    assert "backward us | both us" in report.markdown(run)


@pytest.mark.processes
def test_both_modes(tmp_path) -> None:
    """Each size in each mode, verified, and where they cross."""
    data = tmp_path / "run.json"
    kind = ["--mode", "auto", "--quick", "--weighting", "topk", "--json", str(data)]
    out = bench("--ranks", "2", "--profile", "gpt-oss-120b", "--tokens", "1", "9", *kind)
    assert "low latency us  high throughput us" in out and "gpt-oss-120b, uniform: low latency is faster" in out
    run = json.loads(data.read_text())
    assert [row["tokens"] for row in run["modes"]] == [1, 9]
    for row in run["modes"]:
        assert row["verified_exchanges"] == cpu.EXCHANGES and row["layouts"]["high throughput"] == "flat"
        assert row["high_throughput_us"]["median"] > row["counts_us"]["median"] > 0 < row["known_counts_us"]["p10"]
    assert "low latency us | high throughput us" in report.markdown(run)
    assert "exchanges verified" in bench("--ranks", "1", "--mode", "auto", "--quick", "--verify-only")


def test_where_modes_cross() -> None:
    times = [(1, 5, 9, 3), (8, 6, 8, 6), (64, 9, 9, 7), (512, 20, 15, 12)]
    names = ("low_latency_us", "high_throughput_us", "known_counts_us")
    rows = [{"tokens": t} | {n: {"median": u} for n, u in zip(names, us, strict=True)} for t, *us in times]
    assert modes.crossing(rows[::-1]) == (64, 512)
    assert modes.crossing(rows[:3]) == (64, None)
    assert modes.crossing(rows, "known_counts_us") == (None, 1)
    told = modes.notes({"modes": [row | {"profile": "p", "routing": "r"} for row in rows]})
    assert told == ["p, r: low latency is faster up to 64 tokens, slower at 512; where counts are known, at no size"]


@pytest.mark.parametrize("other", [["--layout", "flat"], ["--backward"], ["--overhead"], ["--baselines", "memcpy"]])
def test_both_modes_are_a_run_of_their_own(capsys, other) -> None:
    assert main(["bench", "--mode", "auto", *other]) == 2
    assert "not with" in (told := capsys.readouterr().err) and "--mode auto" in told


def test_gradients_are_other_values() -> None:
    """By the same routing: a step that leaves the forward pass's rows there would be noticed."""
    gradients = CASE.backward
    assert not (gradients.inputs(0)[0] == CASE.inputs(0)[0]).all(axis=1).any()
    assert all(np.array_equal(a, b) for a, b in zip(gradients.exchange.ids, CASE.exchange.ids, strict=True))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--dtype", "fp8"], "gradients return as bfloat16"),
        (["--overhead"], "it measures no dispatch and combine between ranks"),
    ],
)
def test_backward_is_refused(capsys, more, why) -> None:
    assert main(["bench", "--backward", *more]) == 2
    assert f"--backward: not with {' '.join(more)}" in (told := capsys.readouterr().err) and why in told


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_many_tokens(dtype) -> None:
    what = ["--profile", "gpt-oss-120b", "--tokens", "16384", "--layout", "flat", "--dtype", dtype, "--verify-only"]
    assert " 16384 " in bench("--ranks", "2", *what)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_verification_notices(layout, dtype) -> None:
    """Whatever single value is wrong, in what was received or in what came back."""
    case = replace(CASE, layout=layout, dtype=dtype)
    with tw.connect() as comm, tw.Group(comm, **case.group_settings(7)) as group:
        handle = group.route(case.exchange.ids[0], case.exchange.weight[0])
        tokens, scales = case.inputs(0)
        payloads = None if scales is None else {"scales": scales}
        if case.exact:
            group.exchange_counts(handle)
        made = verify.buffers(case, group, handle)
        bound = None if case.exact else 7
        received = group.dispatch(handle, tokens, payloads, layout=layout, bound=bound, out=made[0])
        verify.check_dispatch(case, 0, received)
        fields = {name: getattr(received, name) for name in ("tokens", "ids", "weights", "counts")}
        one_dimension = case.exact or layout == "grouped_by_bound"
        last = (int(received.counts[0]) - 1,) if one_dimension else (0, int(received.counts[0]) - 1)
        spots = {"tokens": (*last, 159), "ids": last, "weights": last, "counts": (0,), "scales": last}
        for name in [*fields, *received.payloads]:
            wrong = SimpleNamespace(**fields, payloads=dict(received.payloads))
            array = (received.payloads if name == "scales" else fields)[name].copy()
            array.view(f"u{array.itemsize}")[spots[name]] ^= 1
            if name == "scales":
                wrong.payloads[name] = array
            else:
                setattr(wrong, name, array)
            with pytest.raises(verify.Mismatch, match=name if name != "tokens" else "rows"):
                verify.check_dispatch(case, 0, wrong)
        verify.run_experts(case, 0, received, made[1])
        out = group.combine(handle, made[1], out=made[2])
        want = verify.expected_output(case, 0)
        verify.check_output(case, 0, out, want)
        out.view(np.uint16)[6, 159] ^= 1
        with pytest.raises(verify.Mismatch, match=r"1 of 1120, first at \[6, 159\]"):
            verify.check_output(case, 0, out, want)


def test_every_expert_answers_differently() -> None:
    values = CASE.inputs(0)[0][:1]
    out = np.empty((1, 160), values.dtype)
    answers = set()
    for expert in range(8):
        CASE.answers(values, None, np.array([[expert]]), np.ones((1, 1), np.float32), out)
        answers.add(out.tobytes())
    assert len(answers) == 8
    rows = CASE.inputs(0)[0]
    assert len({row.tobytes() for row in rows}) == 7
    assert np.isfinite(rows.astype(np.float32)).all()


@pytest.mark.parametrize("backward", [False, True])
def test_failure_ends_the_run(monkeypatch, capsys, backward) -> None:
    """A failure of the forward pass, or of the gradients alone."""
    honest = verify.expected_output
    monkeypatch.setattr(
        verify, "expected_output", lambda case, rank: honest(case, rank) * (-1 if case.gradients == backward else 1)
    )
    settings = Settings(1, launched=True, profiles=("mixtral-8x7b",), tokens=(2,), verify_only=True, backward=backward)
    assert command.run(settings) == 1
    told = capsys.readouterr()
    assert told.out == "" and "combined tokens on rank 0 differ from the oracle" in told.err


# ---- baselines -----------------------------------------------------------------------------------


def test_baselines_are_checked() -> None:
    plan = baselines.make_plan(CASE, 0)
    received = np.concatenate(plan.received)
    baselines.check_result(plan, "x", received, plan.want)
    with pytest.raises(verify.Mismatch, match="other rows"):
        baselines.check_result(plan, "x", received[::-1], plan.want)
    with pytest.raises(verify.Mismatch, match="another sum"):
        baselines.check_result(plan, "x", received, plan.want[::-1])


def test_memcpy_never_finds_its_bytes_in_a_cache() -> None:
    copy = baselines.Memcpy(1 << 20)
    copy.prepare(1 << 20)
    assert copy._size > 4 << 20
    for _ in range(6):
        copy()
    assert (copy._to[: 4 << 20] == 1).all()
    copy.prepare(9 << 20)
    assert copy._size >= 9 << 20
    copy()
    assert (copy._to == 1).all()


# ---- what ranks tell each other ------------------------------------------------------------------


def test_control() -> None:
    comms = tw.local_comms(3)

    def rank_main(comm: tw.Comm) -> None:
        control = Control(comm)
        mine = {"rank": comm.rank, "bytes": bytes([comm.rank]) * (comm.rank * CHUNK)}
        for told, rank in zip(control.allgather(mine), range(3), strict=True):
            assert told == {"rank": rank, "bytes": bytes([rank]) * (rank * CHUNK)}
        assert len(set(control.allgather(control.gate()))) == 1
        assert control.slowest([[comm.rank, -comm.rank]]).tolist() == [[2, 0]]
        assert control.agree(None) is None
        assert control.agree("bad" if comm.rank == 1 else None) == "rank 1: bad"
        control.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank_main, comms))
    for comm in comms:
        comm.close()


def test_figures() -> None:
    figures = timing.summary([[3.0, 1.0], [2.0, 10.0]])
    assert figures["median"] == 2.5 and figures["rounds"] == [2.0, 6.0]
    assert figures["p10"] < figures["median"] < figures["p90"]
    twice = timing.summary([[6.0, 2.0], [4.0, 20.0]])
    assert timing.ratio(twice, figures) == {"times_ours": 2.0, "times_ours_rounds": [2.0, 2.0]}


# ---- results -------------------------------------------------------------------------------------


def check_run(run: dict) -> None:
    """What a reader of the JSON may count on."""
    assert run["schema"] == command.SCHEMA and run["date"].endswith("+00:00")
    assert {"cpu", "cores", "last_level_cache_bytes", "memory_bytes", "kernel"} <= set(run["machine"])
    assert {"tokenway", "python", "numpy"} <= set(run["versions"])
    assert "commit" in run
    rounds = run["settings"]["rounds"]
    for row in run["rows"]:
        assert row["verified_exchanges"] == cpu.EXCHANGES
        assert row["window_bytes"] > 0 and row["expert_buffers_bytes"] > 0
        assert row["bytes_moved"] == row["rows_moved"] * (row["dispatch_row_bytes"] + row["combine_row_bytes"])
        timed = [row[f"{phase}_us"] for phase in timing.PHASES]
        timed += [base["pair_us"] for base in row["baselines"].values()]
        for figures in timed:
            assert len(figures["rounds"]) == len(figures["all"]) == rounds
            assert 0 < figures["p10"] <= figures["median"] <= figures["p90"]
        for base in row["baselines"].values():
            assert base["times_ours"] > 0 and len(base["times_ours_rounds"]) == rounds


@pytest.mark.long
@pytest.mark.processes
def test_results(tmp_path, torch) -> None:
    """With every baseline, on several ranks; a rank may have no rows at one token."""
    need(importlib.util.find_spec("matplotlib") is not None, "matplotlib")
    data, picture = tmp_path / "run.json", tmp_path / "run.png"
    what = ["--profile", "gpt-oss-120b", "mixtral-8x7b", "--tokens", "1", "5", "--quick"]
    out = bench("--ranks", "3", *what, "--json", str(data), "--plot", str(picture))
    run = json.loads(data.read_text())
    check_run(run)
    assert len(run["rows"]) == 4
    assert all(list(row["baselines"]) == list(baselines.NAMES) for row in run["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out.count("\n") == 8 and "of memcpy" in out
    table = report.markdown(run)
    assert table.count("\n| ") == 6 and "gloo-alltoall" in table


@pytest.mark.long
@pytest.mark.processes
def test_under_a_launcher(tmp_path) -> None:
    """Started as ranks, with a recorded routing; rank 0 tells once."""
    ids = np.stack([np.random.default_rng(t).permutation(8)[:2] for t in range(2 * 6)])
    ids[3, 0] = ids[4, :] = -1
    np.savez(tmp_path / "trace.npz", ids=ids.reshape(2, 6, 2))
    data = tmp_path / "run.json"
    argv = ["--profile", "mixtral-8x7b", "--routing", str(tmp_path / "trace.npz"), "--tokens", "3"]
    argv += ["--baselines", "sockets", "--quick", "--json", str(data)]
    program = [sys.executable, "-m", "tokenway.cli"]
    command = [*program, "launch", "-n", "2", *program, "bench", *argv]
    out = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout
    assert out.count("trace.npz") == 1
    run = json.loads(data.read_text())
    check_run(run)
    (row,) = run["rows"]
    assert row["ranks"] == 2 and list(row["baselines"]) == ["sockets"]
    experts = ids.reshape(2, 6, 2)[0]
    assert row["rows_moved"] == sum(len({e // 4 for e in token if e >= 0}) for token in experts)


@pytest.mark.long
@pytest.mark.processes
def test_overhead(tmp_path, compiler) -> None:
    data = tmp_path / "run.json"
    out = bench("--overhead", "--quick", "--json", str(data))
    run = json.loads(data.read_text())
    paths = run["overhead"]["paths"]
    assert 0 < paths["C"]["us"] < paths["NumPy, out= given"]["us"]
    assert "added to C" in out and "| path | us | added to C |" in report.markdown(run)


@pytest.mark.processes
def test_aux(tmp_path) -> None:
    """What a rank does between the calls, verified first; the same rows at every size."""
    data = tmp_path / "run.json"
    out = bench("--aux", "--quick", "--json", str(data))
    run = json.loads(data.read_text())
    rows = run["auxiliary"]["rows"]
    assert [(row["size"], row["room"], row["valid"]) for row in rows] == [(2, 16, 64), (4, 32, 64), (8, 64, 64)]
    assert all(row[f"{name}_us"]["median"] > 0 for row in rows for name in PHASES[1:-1])
    assert "room for" in out and "| group of | rows that come |" in report.markdown(run)


def test_aux_verifies(monkeypatch) -> None:
    """A result that is off by one is seen."""
    honest = auxiliary.swiglu

    def careless(x, **how):
        made = honest(x, **how)
        if "counts" in how and not how.get("quantize"):
            made[3, 5] += made.dtype.type(1)
        return made

    monkeypatch.setattr(auxiliary, "swiglu", careless)
    settings = Settings(ranks=1, tokens=(4,), iterations=1, rounds=1, quick=True, aux=True)
    with pytest.raises(verify.Mismatch, match="activation of a group of 2 differs from the oracle"):
        auxiliary.measure(settings)


def test_last_level_cache() -> None:
    assert machine.last_level_cache() >= 1 << 18
