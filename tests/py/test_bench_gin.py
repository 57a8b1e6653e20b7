"""`tokenway bench --backend gin`: pairs and layers between GPUs of several hosts, whole runs on emulated ones."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenway import cli, cuda
from tokenway.balance import copies, messages
from tokenway.bench import command, floor, gpu_machine, gpu_rank, graphs, report, runner
from tokenway.bench.case import Case
from tokenway.bench.nvlink_options import Nvlink
from tokenway.bench.profiles import PROFILES, Profile
from tokenway.bench.settings import Settings
from tokenway.planning import posts
from tokenway.planning.rows import Layer, counts

sys.path.insert(0, str(Path(__file__).parents[1] / "gin"))  # children of the tests too find it by this

import rates

TINY = Profile("tiny", hidden=72, experts=9, top_k=3, inner=8, gating="softmax_topk")
STANDS_FOR = "gpt-oss-120b"  # the profile by whose name options ask for that
RANKS, EACH = 3, 2  # ranks, and those of a host: the last is one alone
GIN = ["bench", "--backend", "gin"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([*GIN, "--over", "nccl"], "--over: only with --backend nvlink"),
        ([*GIN, "--local-ranks", "2"], "--local-ranks: not with --backend gin; its ranks are processes"),
        ([*GIN, "--ablation"], "--ablation: not with --backend gin"),
        ([*GIN, "--aux"], "--aux: not with --backend gin; it times pairs and layers alone"),
        ([*GIN, "--collective", "all"], "--collective: not with --backend gin"),
        ([*GIN, "--beside", "none"], "--beside: only with --backend fabric"),
        ([*GIN, "--ranks", "3"], "--ranks: 3, but there are 2 GPUs"),
        ([*GIN, "--ranks-per-host", "0"], "--ranks-per-host: 0"),
        (["bench", "--backend", "nvlink", "--ranks-per-host", "1"], "--ranks-per-host: only with --backend fabric"),
    ],
)
def test_options(argv: list[str], told: str, torch: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_machine, "device_count", lambda: 2)
    assert cli.main(argv) == 2
    assert told in capsys.readouterr().err


def test_settings(torch: Any, monkeypatch: Any) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(gpu_machine, "device_count", lambda: 2)
    monkeypatch.setattr(command, "run", lambda settings: asked.append(settings) or 0)
    assert cli.main([*GIN, "--ranks-per-host", "1", "--sm-limit", "8", "--mode", "high_throughput"]) == 0
    assert cli.main([*GIN, "--layer"]) == 0
    pairs, layers = asked
    assert pairs.nvlink == Nvlink(sm_limit=8, over="gin", ranks_per_host=1, floor=False) and pairs.layout == "flat"
    assert pairs.ranks == 2 and pairs.baselines == ("nccl-alltoall", "nccl-allgather") and pairs.hosts is None
    assert layers.layer and layers.nvlink == Nvlink(over="gin", floor=False)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("of", [[0, 0, 1], [0, 1, 0], [0, 1, 2], [0, 0, 0]])
def test_rows_to_other_hosts(tokens: int, of: list[int]) -> None:
    """Of the busiest rank, counted as a reader would."""
    case = Case(TINY, "skewed", tokens, RANKS, "bfloat16", "rank_major", "none")
    there = np.zeros((RANKS, RANKS), int)
    for source in range(RANKS):
        for row in case.exchange.routing[source].goes:
            for peer in range(RANKS):
                there[source, peer] += bool(row[peer]) and of[source] != of[peer]
    assert floor.remote_rows(case, of) == (max(there.sum(axis=1)), max(there.sum(axis=0)))
    assert floor.remote_rows(case) == floor.remote_rows(case, range(RANKS))


def pretend() -> None:
    """Gives this process emulated devices, and few turns of everything."""
    import torch
    from emulated_backend import Place
    from pretended_gpus import PretendReplay, pretend_cuda

    from tokenway.bench import gpu_case, layer, layer_case, nvlink

    cuda.Cuda, copies.DeviceCopies, messages.DeviceMemory = Place, copies.HostCopies, messages.HostMemory
    pretend_cuda(torch)
    torch.cuda.set_device, torch.cuda.device_count = lambda device: None, lambda: RANKS
    gpu_case.here = lambda: torch.device("cpu")
    gpu_case.Replay = layer.Replay = graphs.Replay = PretendReplay
    gpu_case.COUNT = nvlink.LAYERS = 2
    graphs.Loop.__init__.__defaults__ = (2, 1)
    layer_case.LayerCase.capturable = lambda self: None
    nvlink.Bench._ops = lambda self, ours: []  # ops ask PyTorch for streams of devices
    gpu_machine.results = lambda ranks: {}
    PROFILES[TINY.name], PROFILES[STANDS_FOR] = TINY, replace(TINY, name=STANDS_FOR)


def over_a_carrier(settings: Settings) -> Any:
    """Of a rank of the portable backend, where torchrun would have said that hosts are several."""
    from emulated_backend import OnHost, connect_group

    from tokenway import staged

    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(EACH)}
    staged.on_device, staged.connect = OnHost, connect_group
    return whole_run(settings)


def whole_run(settings: Settings) -> Any:
    """Of a rank."""
    from tokenway.bench import layer, nvlink

    pretend()
    return (layer if settings.layer else nvlink).measure_rank(settings)


@pytest.fixture
def emulated(backend: str, monkeypatch: Any) -> None:
    if backend != "emulated-gin":
        pytest.skip(f"for emulated devices of several hosts, not the backend {backend}")
    monkeypatch.setitem(PROFILES, TINY.name, TINY)


def run_of(layout: str = "rank_major", rank: Any = whole_run, over: str = "gin", **options: Any) -> dict[str, Any]:
    settings = Settings(
        ranks=RANKS,
        profiles=(TINY.name,),
        routings=("skewed",),
        layout=layout,
        iterations=1,
        rounds=1,
        warmup=0,
        nvlink=Nvlink(over=over, ranks_per_host=EACH, floor=over == "nccl", verify=True),
        **options,
    )
    results = runner.on_ranks(settings, rank, 300.0)
    assert results is not None
    run = json.loads(json.dumps(command.record(settings, results)))
    assert run["hosts"] == [2, 1] and run["settings"]["nvlink"]["over"] == over
    run["gpu"] = {"gpu": "none", "count": 0, "used": 0, "driver": None, "link": "", "nvlink": "", "gpus": []}
    return run


@pytest.mark.parametrize("layout", ["rank_major", pytest.param("flat", marks=pytest.mark.long)])
def test_pairs(layout: str, emulated: None, torch: Any, capsys: Any) -> None:
    """Verified, timed in graphs and without, and held against the bytes that a plan says are posted."""
    run = run_of(layout, tokens=(6,) if layout == "rank_major" else (1, 6))
    hosts = [rank // EACH for rank in range(RANKS)]
    for row in run["rows"]:
        assert row["verified_exchanges"] == 2 and len(row["by_rank_us"]) == RANKS
        assert {"direct", "dispatch", "combine"} <= set(row["host"])
        assert all(row["host"][name]["eager_us"]["median"] > 0 for name in ("dispatch", "combine"))
        case = Case(TINY, "skewed", row["tokens"], RANKS, "bfloat16", layout, "none")
        layer = Layer(TINY.experts, TINY.top_k, RANKS, 1)
        to_ranks = np.stack([counts(ids, layer)[0] for ids in case.exchange.ids])
        steps = {
            "dispatch": posts.dispatch(to_ranks, hosts, (case.dispatch_row,), TINY.top_k),
            "combine": posts.combine(to_ranks, hosts, case.combine_row),
        }
        for name, step in steps.items():
            told = row["floor"][name]
            assert told["remote_bytes"] == (step.bytes - posts.NOTE * step.adds).sum(axis=1).max() > 0
            spent = row[f"{name}_us"]["median"]
            assert told["remote_gb_s"] == pytest.approx(told["remote_bytes"] / spent / 1e3, abs=0.01)
    report.show(run)
    shown = capsys.readouterr().out
    assert "3 ranks, bfloat16" in shown and "on hosts of 2 and 1" in shown
    assert "dispatch GB/s to other hosts" in shown and "combine GB/s to other hosts" in shown


@pytest.mark.long
def test_the_portable_backend_between_hosts(emulated: None, torch: Any, capsys: Any) -> None:
    """The same run over it, for a comparison; the floor is of one host, and left out."""
    run = run_of(rank=over_a_carrier, over="nccl", tokens=(6,))
    assert "left out" in run["floor"]["missing"]
    assert run["rows"][0]["floor"]["dispatch"]["remote_bytes"] > 0 < run["rows"][0]["pair_us"]["median"]
    report.show(run)
    assert "over NCCL on hosts of 2 and 1" in capsys.readouterr().out


@pytest.mark.long
def test_layers(emulated: None, torch: Any, capsys: Any) -> None:
    """Beside all-gather and reduce-scatter of the process group by which ranks of several hosts meet."""
    run = run_of(tokens=(5,), layer=True)
    (row,) = run["layers"]
    assert {"tokenway", "nccl", "experts", "router", "exchange"} == set(row["us"])
    report.show(run)
    assert "3 ranks on hosts of 2 and 1" in capsys.readouterr().out


def rates_of(settings: Settings) -> Any:
    """Of a rank."""
    pretend()
    return rates.measure_rank(settings)


@pytest.mark.long
def test_rates_without_a_network(emulated: None, torch: Any, monkeypatch: Any, capfd: Any) -> None:
    """Steps end, and tell as many bytes as they do over a network, though no large put moves any."""
    monkeypatch.setattr(gpu_machine, "device_count", lambda: RANKS)
    monkeypatch.setenv("TOKENWAY_GIN_COUNT_ONLY", "0")
    words = ["--ranks", str(RANKS), "--iterations", "1", "--rounds", "1", "--warmup", "0", "--tokens", "200"]
    words += ["--profile", STANDS_FOR, "--routing", "skewed"]
    monkeypatch.setitem(PROFILES, STANDS_FOR, replace(TINY, name=STANDS_FOR))
    ways = [("low_latency", 8), ("high_throughput", 0)]
    document = rates.measure(words, rates_of, ways)
    assert document is not None and document["counted_alone"] and document["hosts"] == [1] * RANKS
    case = Case(TINY, "skewed", 200, RANKS, "bfloat16", "rank_major", "none")
    sent, back = floor.remote_rows(case, range(RANKS))
    sizes = {"dispatch": sent * floor.wire_row(case), "combine": back * case.combine_row}
    sizes["pair"] = sum(sizes.values())
    assert min(sizes.values()) > 4096
    found = {(row["mode"], row["sm_limit"], row["step"]): row for row in document["rates"]}
    assert found.keys() == {(*way, step) for way in ways for step in sizes}
    for (_, _, step), row in found.items():
        assert row["bytes"] == sizes[step] and not row["keeps_up"]
        assert row["eager_gb_s"] == pytest.approx(row["bytes"] / row["eager_us"] / 1e3, abs=0.01)
    rates.show(document)
    assert "results are wrong" in capfd.readouterr().out
    assert runner.on_ranks(rates.settings_of([*GIN[1:], *words, "--verify", "--baselines", "none"]), whole_run) is None
    assert "differ" in capfd.readouterr().err


def test_which_hosts_there_are(monkeypatch: Any) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings(ranks=4, nvlink=Nvlink(over="gin"))

    class Control:
        def allgather(self, mine: str) -> list[str]:
            return ["a", "a", "b", "b"]

    assert gpu_rank.hosts_between(settings, Control()) == [0, 0, 1, 1]
    assert gpu_rank.sizes_of_hosts(Settings(nvlink=Nvlink(over="gin"), launched=True), Control()) == {"hosts": [2, 2]}
    assert gpu_rank.sizes_of_hosts(Settings(nvlink=Nvlink()), Control()) == {}
    over_nccl = Settings(nvlink=Nvlink(over="nccl"), launched=True)
    assert gpu_rank.sizes_of_hosts(over_nccl, Control()) == {}
    monkeypatch.setenv("WORLD_SIZE", "4")
    for local, found in (("4", {}), ("2", {"hosts": [2, 2]})):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert gpu_rank.sizes_of_hosts(over_nccl, Control()) == found
        assert gpu_rank.sizes_of_hosts(Settings(nvlink=Nvlink()), Control()) == {}
