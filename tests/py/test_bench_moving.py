"""`tokenway bench --moving`: its whole course with PyTorch's CUDA calls on the CPU, and its options."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tokenway import cli
from tokenway.bench import report
from tokenway.bench.profiles import Profile

SMALL = Profile("small", hidden=64, experts=8, top_k=3, inner=32, gating="softmax_topk")


def whole_run(env: Any, spoil: bool) -> Any:
    """A run on this rank. spoil: experts that move are not those which were asked for."""
    from contextlib import nullcontext

    import torch
    from pretended_gpus import pretend_cuda

    from tokenway.balance import weights
    from tokenway.bench import gpu_machine, graphs, moving, profiles, runner
    from tokenway.bench.moving_options import Moving
    from tokenway.bench.nvlink_options import Nvlink
    from tokenway.bench.settings import Settings

    class Graph:
        """Makes the calls of a graph in each replay: collective, so not while it is made."""

        def __init__(self, body: Any, stream: Any):
            self.replay = body

        def reset(self) -> None:
            pass

    runner.connect = lambda: nullcontext(env.comm)
    moving.connect_gpu = lambda settings, control: nullcontext(env.comm)
    graphs.captured = Graph
    gpu_machine.results = lambda ranks: {}
    pretend_cuda(torch)
    torch.set_num_threads(1)  # of ranks that yield to each other
    profiles.PROFILES[SMALL.name] = SMALL
    if spoil:
        pieces = weights.Weights.pieces
        weights.Weights.pieces = lambda self, layer, source, *rest: pieces(self, layer, source ^ 1, *rest)
    settings = Settings(
        ranks=env.comm.nranks,
        launched=True,
        profiles=(SMALL.name,),
        tokens=(3,),
        rounds=2,
        nvlink=Nvlink(),
        moving=Moving(layers=2, spare=2, writes=4, steps=96, step_mib=1),
    )
    return moving.measure_rank(settings)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.processes
def test_a_whole_run(processes: Any, torch: Any) -> None:
    """Experts have moved, results are those of before, and all of it is shown."""
    results, others = processes(2).run(whole_run, False)
    assert others == {} and len(results["moving"]) == 1
    for row in results["moving"]:
        assert all(each["steps"] == 32 and 0 < each["p50"] <= each["p99"] for each in row["us"].values())
        assert min(row["moves"]) > 0 and row["plans"] > 1 and row["switch_steps"] > 1
        assert row["expert_bytes"] == 3 * 64 * 32 * 2 and 0 < row["moved_bytes_a_step"] <= 1 << 20
        assert all(us > 0 for each in row["product_us"] for us in each.values())
    gpu = {"gpu": "NVIDIA H200", "count": 2, "used": 2, "driver": "580", "link": "NV18", "nvlink": "", "gpus": []}
    settings = {"ranks": 2, "dtype": "bfloat16", "rounds": 2, "moving": {"layers": 2, "writes": 4}}
    told = {"settings": settings, "versions": {"tokenway": "0"}, "gpu": gpu, "commit": None, "date": "today"}
    shown = report.markdown(json.loads(json.dumps(told | results)))
    assert "p99 without" in shown and "steps to the switch" in shown and shown.count("| small |") == 2


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.processes
def test_wrong_weights_are_told(processes: Any, torch: Any) -> None:
    """A move that brings another expert's weights changes results."""
    assert processes(2).run(whole_run, True) == [None, None]


@pytest.mark.parametrize("ranks", [2, 4])
def test_plans_change_so_many_slots(ranks: int, torch: Any) -> None:
    from tokenway.bench.moving_case import Swaps

    now = np.stack([np.arange(16)] * 3)
    for wanted in [Swaps(ranks, 6).following(now), Swaps(ranks, 100).following(now)]:
        assert (np.sort(wanted) == now).all()
        of = wanted.reshape(3, ranks, -1) // (16 // ranks)
        others = (of != np.arange(ranks)[:, None]).sum(axis=(1, 2))
        assert (others == (wanted != now).sum(axis=1)).all()  # what changes goes to other ranks
    assert ((Swaps(ranks, 6).following(now) != now).sum(axis=1) == 6).all()
    assert (Swaps(ranks, 100).following(now) != now).all()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--moving", "--moving: with --backend nvlink alone"),
        ("--backend nvlink --ranks 3 --moving", "must divide the 256 experts"),
        ("--backend nvlink --ranks 1 --moving", "from 2 ranks on"),
        ("--backend nvlink --moving --moving-steps 5", "--moving-steps: 5; from 9 on"),
        ("--backend nvlink --moving --layer", "each is a run of its own"),
        ("--backend nvlink --moving --dtype fp8", "its layers choose"),
        ("--moving-spare 3", "--moving-spare"),
    ],
)
def test_options(given: str, why: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tokenway.bench.gpu_machine.device_count", lambda: 4)
    assert cli.main(["bench", *given.split()]) == 2
    assert why in capsys.readouterr().err
