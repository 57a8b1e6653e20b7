"""`tokenway bench --layer`: both layers give the same, wrong ones are found, and tables say what was measured. Timing
needs GPUs."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Any

import pytest
from marks import heavy_but

from tokenway import cli
from tokenway.bench import report
from tokenway.bench.profiles import PROFILES, Profile
from tokenway.bench.tables import layer as tables

SMALL = Profile("small", hidden=64, experts=7, top_k=3, inner=32, gating="softmax_topk")


def compared(env: Any, tokens: int, skewed: bool, dtype: str, spoiled: str = "", empty_ranks: int = 0) -> str | None:
    """What a layer's case finds wrong."""
    from tokenway.bench import gloo
    from tokenway.bench.control import Control
    from tokenway.bench.layer_case import LayerCase

    with ExitStack() as stack:
        stack.callback(gloo.Process(Control(env.comm)).close)
        case = LayerCase(
            stack, env.comm, SMALL, tokens, skewed=skewed, backward=True, empty_ranks=empty_ranks, dtype=dtype
        )
        assert case.x.shape[1] == (0 if env.comm.rank >= env.comm.nranks - empty_ranks else tokens)
        honest = case.ours
        if spoiled == "rows":
            case.ours = lambda x: (honest(x)[0].roll(1, dims=1), honest(x)[1])  # type: ignore[method-assign]
        if spoiled == "gradients":
            case.ours = lambda x: honest(x * 1.1 - 0.1 * x.detach())  # type: ignore[method-assign]
        for call in case.parts().values():
            call()
        slept: list[str] = []
        out, _ = case.fixed(lambda: slept.append("here"))()
        assert {*slept} == {"here"} and out.shape == case.x.shape and case.layer.instead is None
        return case.problem()


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("tokens", "skewed", "dtype"),
    heavy_but([(9, True, "float32")], [1, 9], [False, True], ["float32", "bfloat16"]),
)
def test_both_layers_are_the_same(processes: Any, torch: Any, tokens: int, skewed: bool, dtype: str) -> None:
    assert processes(2).run(compared, tokens, skewed, dtype) == [None, None]


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "empty", "skewed"), [(2, 1, True), pytest.param(3, 2, False, marks=pytest.mark.long)]
)
def test_ranks_without_tokens(processes: Any, torch: Any, ranks: int, empty: int, skewed: bool) -> None:
    assert processes(ranks).run(compared, 9, skewed, "float32", "", empty) == [None] * ranks


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(("spoiled", "said"), [("rows", "forward on rank"), ("gradients", "both on rank")])
def test_a_wrong_layer_is_found(processes: Any, torch: Any, spoiled: str, said: str) -> None:
    for problem in processes(2).run(compared, 9, False, "float32", spoiled):
        assert said in problem and "of its norm, allowed is 0.02" in problem


def test_profiles_say_what_is_inside_an_expert() -> None:
    inner = {name: profile.inner for name, profile in PROFILES.items()}
    assert inner["deepseek-v3"] == 2048 and inner["qwen3-30b-a3b"] == 768 and inner["gpt-oss-120b"] == 2880


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--layer"], "--layer: with --backend nvlink alone"),
        (
            ["--layer", "--backend", "nvlink", "--dtype", "float16"],
            "--dtype, with --layer: 'float16'; allowed: bfloat16",
        ),
        (["--layer", "--backend", "nvlink", "--payload", "fp8"], "--layer: not with --dtype fp8"),
        (["--layer", "--backend", "nvlink", "--routing", "balanced"], "--routing, with --layer: 'balanced'"),
        (["--layer", "--aux"], "--layer: not with --aux"),
        (["--fixed-experts", "100"], "--fixed-experts: only with --layer"),
        (["--layer", "--backend", "nvlink", "--fixed-experts", "0"], "--fixed-experts: 0; must be at least 1"),
        (["--layer", "--backend", "nvlink", "--ranks", "2", "--empty-ranks", "2"], "of 2 ranks allowed are 1..1"),
        (["--layer", "--backend", "nvlink", "--local-ranks", "2"], "--layer: not with --local-ranks"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], told: str) -> None:
    assert cli.main(["bench", *argv]) == 2
    assert told in capsys.readouterr().err


def times(**phases: float) -> dict[str, Any]:
    return {name: {"median": us} for name, us in phases.items()}


def test_tables() -> None:
    """Ratios are theirs over ours; what is not there is left out."""
    us = {
        "tokenway": times(captured=100.0, eager=400.0, host=390.0, captured_both=300.0, eager_both=900.0),
        "nccl": times(captured=150.0, eager=200.0, host=180.0, captured_both=330.0, eager_both=450.0),
        "experts": times(captured=60.0),
        "router": times(captured=15.0),
        "exchange": times(captured=11.0),
    }
    row = {"profile": "qwen3-30b-a3b", "routing": "uniform", "tokens": 8, "us": us}
    run = {
        "settings": {"ranks": 2, "dtype": "bfloat16", "iterations": 60, "rounds": 3, "verify_only": False},
        "layers": [row],
        "versions": {"tokenway": "0"},
    }
    inference, training = tables.tables(run)
    cells = dict(zip(inference.heads, inference.cells[0], strict=False))
    assert [inference.cells[0][i] for i in (3, 4, 5)] == ["100", "150", "1.50x"]
    assert [inference.cells[0][i] for i in (6, 7, 8)] == ["400", "200", "0.50x"]
    assert cells["beside experts and router"] == "25.0" and cells["host"] == "390"
    assert [training.cells[0][i] for i in (5, 8)] == ["1.10x", "0.50x"]
    assert report.kind_of(run).tables is tables.tables
    eager = {"tokenway": times(eager=4.0, host=3.0), "nccl": times(eager=8.0, host=3.0), "not_captured": "no kernel"}
    (alone,) = tables.tables(run | {"layers": [row | {"us": eager}]})
    assert alone.cells[0][3:9] == ["", "", "", "4.0", "8.0", "2.00x"] and alone.cells[0][-2] == ""
    assert tables.notes(run | {"layers": [row | {"us": eager}]})[-1] == "not captured: no kernel"


def test_the_exchange_within_a_layer() -> None:
    """What a layer takes beyond a kernel of fixed time and its router, beside a bare exchange."""
    us = {
        "tokenway": times(captured=100.0, eager=400.0, host=390.0),
        "nccl": times(captured=150.0, eager=200.0, host=180.0),
        "fixed-layer": times(captured=238.0),
        "fixed-experts": times(captured=200.0),
        "router": times(captured=16.0),
        "exchange": times(captured=11.0),
    }
    row = {"profile": "gpt-oss-120b", "routing": "uniform", "tokens": 8, "us": us, "empty_ranks": 1}
    settings = {"ranks": 2, "dtype": "bfloat16", "iterations": 60, "rounds": 3, "verify_only": False}
    run = {"settings": settings | {"fixed_experts": 200}, "layers": [row], "versions": {"tokenway": "0"}}
    _, within = tables.tables(run)
    assert within.cells == [["gpt-oss-120b", "uniform", "8", "238", "200", "16.0", "22.0", "11.0", "11.0", "2.00x"]]
    assert "the last 1 ranks have no tokens; NCCL's way fills theirs up" in tables.notes(run)
    del us["fixed-layer"]["captured"]
    assert tables.tables(run)[1].cells[0][3:] == [""] * 7


def test_timeline(tmp_path: Any) -> None:
    """Of three replays the last; kernels by part, of which those of others are told by what is around them."""
    from types import SimpleNamespace

    from conftest import need

    from tokenway.bench import timeline

    names = ["gemm", "topk", "void tw::counts_kernel(P)", "void tw::dispatch_kernel<1>(P)", "grouped_gemm"]
    names += ["void tw::activation::forward_kernel(P)", "gemm", "void tw::combine_kernel<2>(P)", "reduce"]

    def event(name: str, begin: float, device: str = "DeviceType.CUDA") -> Any:
        span = SimpleNamespace(start=begin, end=begin + 1.5)
        return SimpleNamespace(name=name, device_type=device, time_range=span)

    events = [event(name, 100.0 * turn + 2 * at) for turn in range(3) for at, name in enumerate(names)]
    seen = timeline.kernels([event("cudaGraphLaunch", 0.0, "DeviceType.CPU"), *events[::-1]])
    found = timeline.with_parts(timeline.last_of(seen))
    assert [kernel["part"] for kernel in found] == [
        *["router"] * 2,
        *["dispatch"] * 2,
        *["experts"] * 3,
        "combine",
        "router",
    ]
    assert found[0]["begin_us"] == 0 and found[-1] == {
        "name": "reduce",
        "part": "router",
        "begin_us": 16.0,
        "end_us": 17.5,
    }
    row = {"profile": "small", "routing": "uniform", "tokens": 8, "timeline": {"kernels": found}}
    told = timeline.lines(row)
    assert (
        told[0].startswith("timeline of small, 8 tokens")
        and told[3] == "      4.00 ..     5.50  dispatch  tw::counts_kernel"
    )
    assert timeline.lines(row | {"timeline": {"missing": "why"}})[0].endswith("not measured (why)")
    assert timeline.with_parts([]) == [] == timeline.lines({})
    need(importlib.util.find_spec("matplotlib") is not None, "matplotlib")
    timeline.draw({"layers": [row, {}]}, "title", str(tmp_path / "layer.png"))
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def whole_run(env: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A run on this rank, with PyTorch's CUDA calls on the CPU."""
    from contextlib import nullcontext

    import torch
    from pretended_gpus import PretendReplay, pretend_cuda

    from tokenway.bench import gloo, gpu_machine, graphs, layer, layer_case, profiles, runner
    from tokenway.bench.nvlink_options import Nvlink
    from tokenway.bench.settings import Settings

    join, slept = gloo.Process, []
    runner.connect = lambda: nullcontext(env.comm)
    layer.connect_gpu = lambda settings, control: nullcontext(env.comm)
    gloo.Process = lambda control, backend: join(control)
    layer.Replay = graphs.Replay = PretendReplay
    gpu_machine.results = lambda ranks: {}
    layer_case.LayerCase.capturable = lambda self: None
    pretend_cuda(torch)
    torch.cuda._sleep = slept.append
    profiles.PROFILES[SMALL.name] = SMALL
    settings = Settings(
        ranks=env.comm.nranks,
        launched=True,
        profiles=(SMALL.name,),
        tokens=(3, 9),
        iterations=2,
        rounds=1,
        warmup=1,
        layer=True,
        nvlink=Nvlink(),
        **options,
    )
    results = layer.measure_rank(settings)
    assert bool(slept) == bool(options.get("fixed_experts"))
    return results


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.processes
def test_a_whole_run(processes: Any, torch: Any) -> None:
    """Every subject is timed, also of a rank without tokens; the profiler runs when all is timed."""
    options = {"fixed_experts": 5, "empty_ranks": 1, "timeline": "layer.png", "backward": True}
    results, others = processes(2).run(whole_run, options)
    assert others == {} and len(results["layers"]) == 2
    for row in results["layers"]:
        assert {"tokenway", "nccl", "experts", "router", "exchange", "fixed-layer", "fixed-experts"} == set(row["us"])
        assert set(row["us"]["tokenway"]) == {"captured", "eager", "host", "captured_both", "eager_both", "host_both"}
        assert row["empty_ranks"] == 1 and row["timeline"] == {"missing": "the profiler saw no kernel"}
    settings = {"ranks": 2, "dtype": "bfloat16", "iterations": 2, "rounds": 1, "verify_only": False, "fixed_experts": 5}
    run = {"settings": settings, "layers": results["layers"]}
    assert len(tables.tables(run)) == 3 and len(tables.tables(run)[1].cells) == 2
    assert "timeline of small, 9 tokens: not measured (the profiler saw no kernel)" in tables.notes(run)
