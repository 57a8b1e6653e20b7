"""The benchmark of the NVLink backend, as far as it runs without a GPU: options, ratios, tables, and its whole course
with PyTorch's CUDA calls on the CPU."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace

import pytest
from conftest import need
from pretended_gpus import QUERIED, PretendReplay, PretendStream, floor_document, run_on_pretended_gpus

import tokenway as tw
from tokenway import cli
from tokenway.bench import (
    baselines,
    breakdown,
    command,
    floor,
    gpu_machine,
    nvlink,
    plot,
    report,
    timing,
    verify,
)
from tokenway.bench.case import FP8, Case
from tokenway.bench.control import Control
from tokenway.bench.nvlink_options import Nvlink
from tokenway.bench.profiles import PROFILES, Profile
from tokenway.bench.settings import Settings

CASE = Case(Profile("tiny", 160, 8, 3, 8, "softmax_topk"), "uniform", 7, 1, "bfloat16", "rank_major", "none")


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-15\t0\t\tN/A
NIC0\tSYS\tNODE\t X \t\t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NVLINK = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
"""


def test_what_nvidia_smi_tells() -> None:
    assert gpu_machine.parse_topology(TOPOLOGY) == "NV18"
    assert gpu_machine.parse_topology("") == "" == gpu_machine.parse_nvlink("")
    assert gpu_machine.parse_nvlink(NVLINK) == "2 x 26.562 GB/s"
    (gpu,) = gpu_machine.parse_query(QUERIED)
    assert gpu["name"] == "NVIDIA H200" and gpu["sm_clock"] == "1980 MHz" and gpu["power_limit"] == "700.00 W"
    assert gpu_machine.parse_query("Failed to initialize NVML: N/A\n") == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--sm-limit", "8"], "--sm-limit: only with --backend nvlink"),
        (["--verify"], "--verify: only with"),
        (["--backend", "tpu"], "--backend: invalid choice: 'tpu'"),
        (["--backend", "nvlink", "--lanes", "0"], "--lanes: 0"),
        (["--backend", "nvlink", "--lanes", "65"], "--lanes: 65; allowed 1..64"),
        (["--backend", "nvlink", "--payload", "int8"], "--payload: invalid choice: 'int8'"),
        (["--backend", "nvlink", "--payload", "fp8", "--dtype", "float16"], "--dtype is 'float16'"),
        (["--backend", "nvlink", "--payload", "fp8", "--compare", "fp8"], "fp8 already"),
        (["--backend", "nvlink", "--overhead"], "--overhead"),
        (["--backend", "nvlink", "--backward", "--compare", "fp8"], "--backward: not with --compare"),
        (["--mode", "fast"], "--mode: invalid choice: 'fast'"),
        (["--mode", "low_latency", "--layout", "flat"], "'flat'; allowed: rank_major, expert_major"),
        (["--mode", "high_throughput", "--layout", "rank_major"], "'rank_major'; allowed: flat, grouped"),
        (["--backend", "nvlink", "--baselines", "sockets"], "--baselines: 'sockets'; allowed: nccl-alltoall"),
        (["--backend", "nvlink", "--ranks", "3"], "--ranks: 3, but there are 2 GPUs"),
        (["--backend", "nvlink", "--local-ranks", "33"], "--local-ranks: 33; allowed 1..32 on 2 GPUs"),
        (["--backend", "nvlink", "--local-ranks", "4", "--ranks", "2"], "--local-ranks is 4"),
        (["--backend", "nvlink", "--over", "tcp"], "--over: invalid choice: 'tcp'"),
        (["--backend", "nvlink", "--over", "nccl", "--local-ranks", "2"], "--local-ranks: not with --over nccl"),
        (["--backend", "nvlink", "--over", "nccl", "--ablation"], "--ablation: not with --over nccl"),
        (["--over", "nccl"], "--over: only with --backend nvlink"),
        (["--backend", "nvlink", "--local-ranks", "2", "--baselines", "nccl-alltoall"], "threads"),
    ],
)
def test_options_of_gpus(argv, told, torch, capsys, monkeypatch) -> None:
    monkeypatch.setattr(gpu_machine, "device_count", lambda: 2)
    monkeypatch.setattr("tokenway.bench.nvlink_options.LOCAL_ENVIRONMENT", {})
    assert cli.main(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_settings_of_gpus(torch, monkeypatch) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(gpu_machine, "device_count", lambda: 2)
    monkeypatch.setattr(command, "run", lambda settings: asked.append(settings) or 0)
    assert cli.main(["bench", "--backend", "nvlink", "--payload", "fp8", "--sm-limit", "8", "--lanes", "2"]) == 0
    (settings,) = asked
    assert settings.ranks == 2 and settings.dtype == FP8 and settings.tokens[-1] == 4096
    assert settings.baselines == ("nccl-alltoall", "nccl-allgather")
    assert settings.nvlink == Nvlink(sm_limit=8, lanes=2) and settings.layout == "rank_major"
    parts = ["--mode", "high_throughput", "--backward", "--inbox-tokens", "9"]
    assert cli.main(["bench", "--backend", "nvlink", *parts]) == 0
    assert asked[1].layout == "flat" and asked[1].backward and asked[1].nvlink.inbox_tokens == 9
    assert nvlink.place(4, 2) == [0, 0, 1, 1] and nvlink.place(3, 1) == [0, 0, 0] and nvlink.place(1, 2) == [0]


def test_no_gpu(torch, capsys, monkeypatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert cli.main(["bench", "--backend", "nvlink"]) == 2
    assert "--backend nvlink: there is no CUDA driver on this machine" in capsys.readouterr().err


def test_ratios_to_the_floor() -> None:
    case = Case(PROFILES["deepseek-v3"], "balanced", 128, 2, "bfloat16", "rank_major", "none")
    assert floor.remote_rows(case) == (128, 128) and floor.wire_row(case) == 14336 + 8 + 64
    assert floor.remote_rows(replace(case, ranks=1)) == (0, 0)
    found = floor.Floor(floor_document([case]))
    assert found.put_gb_s() == 360.0
    assert found.exchange(128, 14408) == ("last_block", pytest.approx(7.84))
    told = found.compare(2 * 7.84, 128, 14408)
    assert told["times_floor"] == 2.0 and told["remote_bytes"] == 128 * 14408
    assert told["percent_of_put"] == pytest.approx(100 * 128 * 14408 / 15.68 / 1e3 / 360, abs=0.1)
    assert "times_floor" not in floor.Floor({"missing": "why"}).compare(1.0, 1, 16)


def test_floor_program(tmp_path, monkeypatch) -> None:
    program = tmp_path / "tokenway-floor"
    monkeypatch.setenv(floor.PATH, str(program))
    assert "no floor program" in floor.measure([CASE])["missing"]
    for line, told in (
        ("echo '{}'", {}),
        ("echo tokenway-floor: one GPU >&2; exit 1", {"missing": "no floor: one GPU"}),
    ):
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        assert floor.measure([CASE]) == told
    program.write_text('#!/bin/sh\necho "$@" > "$0.argv"; echo "{}"\n')
    floor.measure([replace(CASE, ranks=2, routing="balanced")])
    assert (tmp_path / "tokenway-floor.argv").read_text() == "--tokens 7 --row-bytes 320,352 --repeat 20\n"
    for devices, ranks, gpus in ((8, 4, 4), (2, 4, 2), (8, 1, 2), ("no driver", 4, 2), (64, 64, 16)):
        monkeypatch.setattr(gpu_machine, "device_count", lambda devices=devices: devices)
        assert floor.gpus(ranks) == gpus
    floor.measure([replace(CASE, ranks=4, routing="balanced")], 4)
    told = (tmp_path / "tokenway-floor.argv").read_text()
    assert told == "--tokens 16 --row-bytes 320,352 --repeat 20 --gpus 4\n"


def test_the_floor_of_four() -> None:
    """Rates are of all GPUs at once, and the line below the table says so."""
    from tokenway.bench.tables import nvlink as tables

    document = floor_document([replace(CASE, ranks=4)])
    assert floor.Floor(document).put_gb_s() == 360.0 and tables._floor_line(document).startswith("floor: GB/s")
    document["gpus"] = 4
    document["ceilings"].append({"kind": "put", "ways": 4, "sms": 132, "best_gb_s": 330.0, "median_gb_s": 320.0})
    assert floor.Floor(document).put_gb_s() == 320.0
    assert "floor of 4 GPUs: GB/s put both ways 360, put from all to all 320" in tables._floor_line(document)


def test_names_of_kernels() -> None:
    assert breakdown.short("void tw::(anonymous namespace)::dispatch<int, 8>(Side, int)") == "tw::dispatch<int, 8>"
    assert breakdown.short("void tw::combine<(twDtype_t)9, (tw::Kind)2, true>(tw::Params)") == "tw::combine<9, 2, true>"
    assert breakdown.short("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD"
    assert len(breakdown.short("x" * 100)) == 60


def test_the_profiler_runs_when_all_is_timed(torch, monkeypatch) -> None:
    # Launches take longer from then on.
    seen = []

    def noted(module, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **named: [seen.append(name), real(*given, **named)][1])

    noted(timing, "rounds_of")
    noted(breakdown, "kernels")
    gpu = Nvlink(local_ranks=1, ablation=True, breakdown=True)
    settings = Settings(
        ranks=1, profiles=("gpt-oss-120b", "deepseek-v3"), tokens=(1, 2), iterations=1, rounds=1, nvlink=gpu
    )
    rows = run_on_pretended_gpus(monkeypatch, torch, settings)["rows"]
    assert all("breakdown" in row for row in rows) and len(rows) == 4
    assert seen == ["rounds_of"] * 8 + ["kernels"] * 4  # of rows with waiting, and without


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "layout", "gpu"),
    [
        (1, "rank_major", Nvlink(verify=True)),
        (2, "rank_major", Nvlink(local_ranks=2, compare=FP8, ablation=True, verify=True, breakdown=True)),
        (2, "expert_major", Nvlink(local_ranks=2, verify=True)),
    ],
)
def test_run_on_gpus(ranks, layout, gpu, torch, monkeypatch, tmp_path, capsys) -> None:
    settings = Settings(
        ranks=ranks, profiles=("gpt-oss-120b",), tokens=(1, 5), layout=layout, iterations=4, rounds=2, nvlink=gpu
    )
    run = run_on_pretended_gpus(monkeypatch, torch, settings)
    for row in run["rows"]:
        assert row["verified_exchanges"] == 2 and len(row["by_rank_us"]) == ranks
        for phase in ("pair", "dispatch", "combine", "cached_pair", "outside_pair"):
            assert 0 < row[f"{phase}_us"]["p10"] <= row[f"{phase}_us"]["median"] and row[f"{phase}_us"]["rounds"]
        assert ("times_floor" in row["floor"]["dispatch"]) == (row["floor"]["dispatch"]["remote_rows"] > 0)
        assert {"direct", "route", "two additions", "update + pair"} <= set(row["host"])
        assert ("route + pair" in row["host"]) == (ranks == 1)
        assert ("registered ops" in row["host"]) == (ranks == 1)
        assert ("compare" in row) == bool(gpu.compare) and ("breakdown" in row) == gpu.breakdown
        assert gpu.ablation == bool(row.get("without_waiting", {}).get("incorrect"))
    assert run["window_of_a_large_group"]["experts"] == 512
    report.show(run)
    shown = capsys.readouterr().out
    assert ("of floor" in shown) == (ranks > 1) and "NV18" in shown and ("WRONG" in shown) == gpu.ablation
    page = report.markdown(json.loads(json.dumps(run)))
    assert page.count("\n| ") == 4 and "2.28.9" in page and "window of 64 ranks" in page
    few = json.loads(json.dumps(run))
    few["settings"]["nvlink"]["sm_limit"] = 8
    page = report.together([run, few])
    assert page.count("\n| ") == 6 and page.count("\n| all | gpt") == page.count("\n| 8 | gpt") == 2
    few["gpu"]["gpu"] = "another"
    assert report.together([run, few]).count("\n| 8 | another | gpt") == 2
    for row in few["rows"]:
        row["counts_us"] = row["pair_us"]
    with pytest.raises(ValueError, match="different columns"):
        report.together([run, few])
    need(importlib.util.find_spec("matplotlib") is not None, "matplotlib")
    plot.draw(run, report.title(run), str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["rank_major", "flat", "grouped"])
def test_backward_on_gpus(layout, torch, monkeypatch, capsys) -> None:
    """Gradients by the cached routing, verified, timed apart and behind the pair."""
    given = {"profiles": ("gpt-oss-120b",), "tokens": (1, 5), "iterations": 4, "rounds": 2, "backward": True}
    gpu = Nvlink(local_ranks=2, verify=True)
    run = run_on_pretended_gpus(monkeypatch, torch, Settings(ranks=2, layout=layout, nvlink=gpu, **given))
    for row in run["rows"]:
        assert row["verified_exchanges"] == 3 and ("counts_us" in row) == (layout != "rank_major")
        assert row["backward_us"]["median"] > 0 and row["both_us"]["median"] > 0
    report.show(run)
    assert "backward us  both us" in capsys.readouterr().out
    honest = verify.expected_output
    monkeypatch.setattr(
        verify, "expected_output", lambda case, rank: honest(case, rank) * (-1 if case.gradients else 1)
    )
    with pytest.raises(verify.Mismatch, match="combined tokens on rank 0 differ from the oracle"):
        run_on_pretended_gpus(monkeypatch, torch, Settings(ranks=2, layout=layout, nvlink=gpu, **given))


class PretendEvent:
    """Notes the time of the host."""

    def __init__(self, **kind: bool):
        self.at = 0

    def record(self) -> None:
        self.at = time.perf_counter_ns()

    def elapsed_time(self, other) -> float:
        return (other.at - self.at) / 1e6


class Counted:
    """A baseline that counts its calls."""

    name = "nccl-x"

    def __init__(self, calls: list[None]):
        self._calls = calls

    def __call__(self) -> None:
        self._calls.append(None)


def test_baselines_of_both_passes(torch, monkeypatch) -> None:
    """A baseline's backward pass is its calls once more, in a graph or, where it cannot be captured, by events."""
    from tokenway.bench import nccl

    monkeypatch.setattr(torch.cuda, "current_stream", PretendStream)
    monkeypatch.setattr(torch.cuda, "Event", PretendEvent)
    control = Control(tw.local_comms(1)[0])
    for captures in (True, False):
        calls: list[None] = []

        def refuse(*_: object) -> None:
            raise RuntimeError("cannot be captured")

        monkeypatch.setattr(nccl, "Replay", PretendReplay if captures else refuse)
        subject, problem = nccl.capture(Counted(calls), lambda found: found, True)
        assert (problem is None) == captures and subject.phases == ("pair", "both", "outside")
        calls.clear()
        assert len(subject.once(control)) == 3 and len(calls) == 10 + 20 + 2
        subject.close()
    control.close()


def test_gpu_results_are_checked(torch, monkeypatch) -> None:
    """A wrong result is found by the oracle before, and by comparison after the replays."""
    settings = Settings(ranks=1, profiles=("gpt-oss-120b",), tokens=(3,), iterations=1, rounds=1)
    honest = verify.expected_output
    with monkeypatch.context() as patch:
        patch.setattr(verify, "expected_output", lambda *a: -honest(*a))
        with pytest.raises(verify.Mismatch, match="combined tokens on rank 0 differ from the oracle"):
            run_on_pretended_gpus(patch, torch, replace(settings, nvlink=Nvlink(verify=True)))
    from tokenway.bench import gpu_case

    loops = gpu_case.DeviceCase.loops

    def spoiled(self, *given: bool) -> list:
        monkeypatch.setattr(self, "_rows", self._rows * 2)
        return loops(self, *given)

    monkeypatch.setattr(gpu_case.DeviceCase, "loops", spoiled)
    with pytest.raises(verify.Mismatch, match="differ after the replays"):
        run_on_pretended_gpus(monkeypatch, torch, replace(settings, nvlink=Nvlink()))


def test_an_error_ends_the_timing(torch, monkeypatch) -> None:
    """Graphs are not replayed after their group's error."""
    replays: list[None] = []
    once = PretendReplay.once

    def fail(_: object) -> None:
        if len(replays) > 4:
            raise tw.PeerTimeout("rank 1 did not arrive in time")

    monkeypatch.setattr(PretendReplay, "once", lambda self, control: replays.append(None) or once(self, control))
    monkeypatch.setattr(tw.Group, "check", fail)
    settings = Settings(ranks=1, profiles=("gpt-oss-120b",), tokens=(3,), iterations=90, rounds=1, nvlink=Nvlink())
    with pytest.raises(tw.PeerTimeout, match="did not arrive"):
        run_on_pretended_gpus(monkeypatch, torch, settings)
    assert 4 < len(replays) < 10


@pytest.mark.parametrize("name", ["nccl-alltoall", "nccl-allgather"])
def test_nccl_baselines(name, torch, monkeypatch) -> None:
    """Permutations, counts and sums, with a group of one rank that gloo makes."""
    import torch.distributed as dist

    from tokenway.bench import nccl

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype in ("bfloat16", FP8):
            plan = baselines.make_plan(replace(CASE, dtype=dtype), 0)
            baseline = nccl.KINDS[name](plan)
            baseline()
            baseline.check()
            baseline._out.neg_()
            with pytest.raises(verify.Mismatch, match="another sum"):
                baseline.check()
    finally:
        dist.destroy_process_group()
