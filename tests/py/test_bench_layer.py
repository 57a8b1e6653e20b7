"""`tokenway bench --layer`: both layers give the same, wrong ones are found, and tables say what was measured. Timing
needs GPUs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from marks import heavy_but

from tokenway import cli
from tokenway.bench import report
from tokenway.bench.profiles import PROFILES, Profile
from tokenway.bench.tables import layer as tables

SMALL = Profile("small", hidden=64, experts=7, top_k=3, inner=32, gating="softmax_topk")


def compared(env: Any, tokens: int, skewed: bool, dtype: str, spoiled: str = "") -> str | None:
    """What a layer's case finds wrong."""
    from tokenway.bench import gloo
    from tokenway.bench.control import Control
    from tokenway.bench.layer_case import LayerCase

    with ExitStack() as stack:
        stack.callback(gloo.Process(Control(env.comm)).close)
        case = LayerCase(stack, env.comm, SMALL, tokens, skewed=skewed, backward=True, dtype=dtype)
        honest = case.ours
        if spoiled == "rows":
            case.ours = lambda x: (honest(x)[0].roll(1, dims=1), honest(x)[1])  # type: ignore[method-assign]
        if spoiled == "gradients":
            case.ours = lambda x: honest(x * 1.1 - 0.1 * x.detach())  # type: ignore[method-assign]
        for call in case.parts().values():
            call()
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
