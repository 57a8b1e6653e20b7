"""Other libraries as baselines, each in a process of its own: pretended ones, over gloo, that do the exchange, do it
wrongly, or come to no end."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENT
from pretended_gpus import PretendStream, PretendStretches, run_on_pretended_gpus

from tokenway.bench.case import FP8, Case
from tokenway.bench.profiles import Profile

PRETENDED = str(Path(__file__).parent / "pretended")
CASE = Case(Profile("tiny", 256, 8, 3, 8, "softmax_topk"), "uniform", 7, 2, "bfloat16", "rank_major", "none")
TURN = 3.0  # seconds of a turn: those that hang are given up after as many


def beside(env: Any, name: str, cases: list[Case], variables: str = "", turns: int = 2) -> list[Any]:
    """(problem, whether each turn was timed, verdict) of each case."""
    import os

    from tokenway.bench.control import Control
    from tokenway.bench.turns import Beside

    control = Control(env.comm)
    os.environ[f"TOKENWAY_PEER_{name.replace('-', '_').upper()}"] = f"PYTHONPATH={PRETENDED} {variables}"
    before = dict(os.environ)
    library = Beside(name, control, None).limit(PATIENT, TURN if "hangs" in variables else PATIENT)
    found: list[Any] = []
    for case in cases:
        problem, _ = library.prepare(case)
        times = [] if problem else [library.once(control) for _ in range(turns)]
        verdict = None if problem else library.verdict()
        found.append((problem, [not math.isnan(time[0]) for time in times], verdict))
    library.close()
    control.close()
    assert dict(os.environ) == before, "what a library's process is given is no concern of this one"
    return found


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "layout", "dtype", "variables"),
    [
        ("flashinfer", "rank_major", "bfloat16", ""),
        pytest.param("flashinfer", "rank_major", FP8, "", marks=pytest.mark.long),
        pytest.param("deepep", "rank_major", FP8, "", marks=pytest.mark.long),
        pytest.param("deepep", "rank_major", "bfloat16", "", marks=pytest.mark.long),
        ("deepep", "rank_major", "bfloat16", "PRETENDED_DEEPEP=legacy"),
        pytest.param("nccl-ep", "rank_major", "bfloat16", "", marks=pytest.mark.long),
        pytest.param("nccl-ep", "flat", FP8, "", marks=pytest.mark.long),
    ],
)
def test_libraries_do_the_exchange(processes, torch, name, layout, dtype, variables) -> None:
    case = replace(CASE, layout=layout, dtype=dtype)
    cases = [case, replace(case, tokens=3, routing="skewed", weighting="topk")]
    assert processes(2).run(beside, name, cases, variables) == [[(None, [True, True], None)] * 2] * 2


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("variables", "problem", "verdict"),
    [
        ("PRETENDED=wrong", "flashinfer on rank 1 has another sum than the oracle", ""),
        pytest.param("PRETENDED=wrong PRETENDED_AT=3", "", "has another sum than the oracle", marks=pytest.mark.long),
        ("PRETENDED=hangs PRETENDED_AT=3", "", "did not answer within 3 s on rank"),
        pytest.param(
            "PRETENDED=dies PRETENDED_AT=3", "", "its process ended with exit code 7 on rank 1", marks=pytest.mark.long
        ),
    ],
)
def test_those_that_misbehave(processes, torch, variables, problem, verdict) -> None:
    """They have no times, all ranks say the same, and who is lost is not asked again."""
    first, second = processes(2).run(beside, "flashinfer", [CASE, CASE], variables)
    assert [case[::2] for case in first] == [case[::2] for case in second], (first, second)
    (found, _, told), (again, *_) = first
    assert bool(found) == bool(problem) and problem in (found or "")
    assert bool(told) == bool(verdict) and verdict in (told or "")
    if "hangs" in variables or "dies" in variables:
        assert again == told and second[0][1] == [True, False], "rank 1 is lost in its second turn"


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "case", "variables", "told"),
    [
        ("flashinfer", replace(CASE, dtype="float16"), "", "refuses the shape: dtype: float16; it takes bfloat16 and"),
        ("deepep", replace(CASE, dtype=FP8), "PRETENDED_DEEPEP=legacy", "refuses the shape: dtype: float8_e4m3fn"),
        ("nccl-ep", CASE, "PYTHONPATH=/nowhere", "cannot be imported: No module named 'nccl'"),
    ],
)
def test_those_that_cannot(processes, torch, name, case, variables, told) -> None:
    for found in processes(2).run(beside, name, [case], variables):
        assert found[0][0].startswith(told) and found[0][1:] == ([], None)


def test_what_is_asked_for(torch, monkeypatch) -> None:
    """Other libraries are there when they are named: they compile for minutes."""
    from tokenway import cli
    from tokenway.bench import command, gpu_machine

    asked: list[Any] = []
    monkeypatch.setattr(gpu_machine, "device_count", lambda: 2)
    monkeypatch.setattr(command, "run", lambda settings: asked.append(settings.baselines) or 0)
    for given in (["auto"], ["all"], ["deepep", "nccl-allgather"]):
        assert cli.main(["bench", "--backend", "nvlink", "--baselines", *given]) == 0
    nccl = ("nccl-alltoall", "nccl-allgather")
    assert asked == [nccl, (*nccl, "flashinfer", "deepep", "nccl-ep"), ("deepep", "nccl-allgather")]
    assert cli.main(["bench", "--backend", "nvlink", "--local-ranks", "2", "--baselines", "deepep"]) == 2


def row(tokens: int, **phases: float) -> dict[str, Any]:
    """As a run has it of a library with these times and of ours, of 10 us each."""
    from tokenway.bench import nvlink_results
    from tokenway.bench.floor import Floor

    ours = {key: [[10.0, 10.0]] for key in ("pair", "dispatch", "combine", "cached", "outside")}
    apart = {key: [[10.0, 10.0]] for key in ("dispatch", "combine")}
    times: dict[str, Any] = {"tokenway": ours, nvlink_results.BEHIND: apart}
    for name, us in {"direct": 5.0, "two additions": 5.0, "update + pair": 8.0, "route + pair": 11.0}.items():
        times[name] = {"eager": [[20.0, 20.0]], "host": [[us, us]]}
    if phases:
        times["flashinfer"] = {phase: [[us, us]] for phase, us in phases.items()}
    told = {"profile": "tiny", "routing": "uniform", "window_bytes": 1, "expert_buffers_bytes": 1, "ranks": 2}
    return told | {"tokens": tokens} | nvlink_results.row(CASE, times, Floor({"missing": "why"}), {})


def test_table(tmp_path, torch) -> None:
    """A column for each phase of a library; a dash and a sentence where it was not timed."""
    from tokenway.bench import peers
    from tokenway.bench.tables import nvlink as tables

    rows = [row(1, pair=15.0, dispatch=12.0, combine=8.0, outside=15.0), row(8)]
    rows[1]["missing"] = {"flashinfer": "did not answer within 30 s on rank 1"}
    heads, cells = tables.columns({"rows": rows, "settings": {"nvlink": {"local_ranks": 0}}})
    first, second = (dict(zip(heads, row, strict=True)) for row in cells)
    assert first["flashinfer us"] == "15.0 (1.5x)" and second["flashinfer us"] == "-"
    assert first["flashinfer dispatch us"] == "12.00 (1.20x)" and second["flashinfer dispatch us"] == "-"
    assert first["flashinfer combine us"] == "8.00 (0.80x)" and first["combine behind a barrier us"] == "10.00"
    assert first["update + pair host us"] == "8.0 (1.60x)" and first["route + pair host us"] == "11.0 (2.20x)"
    big = {"ranks": 64, "experts": 512, "max_tokens": 128, "window_bytes": 1, "expert_buffers_bytes": 1, "times": 1.0}
    notes = tables.notes({"rows": rows, "floor": {"missing": "why"}, "window_of_a_large_group": big})
    assert notes[-1] == "flashinfer, 8 tokens: not measured: did not answer within 30 s on rank 1"
    for one in rows:
        one["floor"]["pair"] = {"floor_us": 5.0}
    lines = {name: values for name, _, _, values in peers.lines_of({"settings": {"tokens": [1, 8]}, "rows": rows})}
    assert lines["FlashInfer one-sided"] == [15.0] and "NCCL all-to-all" not in lines


def test_bounds() -> None:
    from tokenway.bench.libraries import LIBRARIES

    many = Profile("many", 256, 64, 23, 8, "softmax_topk")
    assert LIBRARIES["flashinfer"].refuses(replace(CASE, profile=many)) == "top-k: 23; it has room for 22"
    assert LIBRARIES["flashinfer"].refuses(replace(CASE, ranks=65)) == "ranks: 65; it has room for 64"
    uneven = replace(CASE, profile=replace(many, experts=7, top_k=2))
    assert LIBRARIES["nccl-ep"].refuses(uneven) == "7 experts on 2 ranks; it wants as many on each"
    assert LIBRARIES["nccl-ep"].refuses(CASE) is None


class PretendEvent:
    """Notes how many calls were made before it."""

    calls: list[str]

    def __init__(self, **kind: bool):
        self.at = 0

    def record(self) -> None:
        """Now."""
        self.at = len(self.calls)

    def elapsed_time(self, other: PretendEvent) -> float:
        """ "ms", one for each call."""
        return float(other.at - self.at)


def test_stretches(torch, monkeypatch) -> None:
    """Each call is timed alone: neither the barrier before it nor the first turn is."""
    import tokenway as tw
    from tokenway.bench import graphs
    from tokenway.bench.control import Control

    class Graph:
        def __init__(self, body: Any, stream: Any):
            self.replay, self.reset = body, lambda: None

    calls: list[str] = []
    monkeypatch.setattr(PretendEvent, "calls", calls, raising=False)
    monkeypatch.setattr(graphs, "captured", Graph)
    monkeypatch.setattr(torch.cuda, "Event", PretendEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", PretendStream)
    control = Control(tw.local_comms(1)[0])
    made = {
        "dispatch": lambda at: calls.append(f"d{at}"),
        "combine": lambda at: calls.extend(["c"] * (1 if at else 9)),
    }
    stretches = graphs.Stretches("x", lambda: calls.append("barrier"), made, count=2)
    pair = graphs.Replay(lambda: calls.append("lead"), lambda: calls.extend(["d", "c"]), count=2)
    both = graphs.Together([graphs.Graphs("x", {"pair": pair}), stretches])
    assert both.phases == ("pair", "outside", "dispatch", "combine") and both.name == "x"
    assert both.once(control) == (1e6, 1e6, 1e6, 1e6)
    assert calls == ["lead", "d", "c", "barrier", "d0", "barrier", *["c"] * 9, *["barrier", "d1", "barrier", "c"],
                     *["barrier", "d2", "barrier", "c"]]  # fmt: skip
    both.close()
    control.close()


def test_other_libraries_in_a_run(torch, monkeypatch) -> None:
    """They are timed in the same rounds, and what cannot be timed has a sentence in the row."""
    from tokenway.bench import gloo, gpu_case, nccl
    from tokenway.bench.nvlink_options import Nvlink
    from tokenway.bench.settings import Settings
    from tokenway.bench.tables import nvlink as tables

    monkeypatch.setenv("TOKENWAY_PEER_FLASHINFER", f"PYTHONPATH={PRETENDED}")
    monkeypatch.setattr(gpu_case, "Stretches", PretendStretches)
    monkeypatch.setattr(gloo, "Process", lambda control, backend: SimpleNamespace(close=lambda: None))
    barriers: list[None] = []
    monkeypatch.setattr(nccl, "barrier", lambda: lambda: barriers.append(None))
    settings = Settings(
        ranks=1,
        profiles=("gpt-oss-120b",),
        tokens=(1, 5),
        iterations=2,
        rounds=2,
        baselines=("flashinfer", "nccl-ep"),
        nvlink=Nvlink(verify=True),
    )
    run = run_on_pretended_gpus(monkeypatch, torch, settings)
    for row in run["rows"]:
        assert (
            list(row["baselines"]) == ["flashinfer"] and len(row["baselines"]["flashinfer"]["pair_us"]["rounds"]) == 2
        )
        assert row["missing"] == {"nccl-ep": "cannot be imported: No module named 'nccl'"}
        assert row["behind_barrier"]["combine_us"]["median"] == 2.0
    assert barriers and "nccl-ep us" in tables.columns(run)[0]
    assert "nccl-ep, 5 tokens: not measured: cannot be imported: No module named 'nccl'" in tables.notes(run)
