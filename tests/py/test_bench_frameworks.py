"""`tokenway bench --frameworks`: whole runs of small layers, what is wrong is found, and tables say what was measured.
What vLLM's part is, test_bench_vllm.py tests."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frameworks import need_version
from harness import HANGS

from tokenway import cli
from tokenway.bench import command, report
from tokenway.bench.control import Control
from tokenway.bench.framework_options import Frameworks
from tokenway.bench.profiles import PROFILES, Profile
from tokenway.bench.progress import Progress
from tokenway.bench.settings import Settings
from tokenway.bench.verify import Mismatch
from tokenway.connecting import connect
from tokenway.launch import Ranks

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SMALL = Profile("small", hidden=64, experts=8, top_k=3, inner=32, gating="softmax_topk")
LARGE = Profile("large", hidden=128, experts=12, top_k=2, inner=16, gating="softmax_topk")
PARTS = Frameworks(rows=(5, 40), layers=2, batch=5, prompt=7, generate=4)
MEGATRON = ["Megatron", "Megatron flex, compat deep_ep"]
DEEP_EP = ["compat deep_ep, low latency", "compat deep_ep, normal"]


def settings_of(*parts: str, **more: Any) -> Settings:
    """Of a small run."""
    usual: dict[str, Any] = {"ranks": 2, "launched": True, "profiles": ("small",), "tokens": (3, 20)}
    usual |= {"iterations": 2, "rounds": 1, "warmup": 1, "frameworks": replace(PARTS, parts=parts)}
    return Settings(**usual | more)


Job = tuple[Settings, str]  # what is measured, and which of the changes below are made before


def rank_main(jobs: dict[str, Job]) -> dict[str, Any]:
    """What a rank has measured by each job, or the sentence of what it found wrong. One process does all of them, since
    frameworks take long to import."""
    import torch

    from tokenway.bench import frameworks
    from tokenway.bench.framework_place import Place

    PROFILES.update({each.name: each for each in (SMALL, LARGE)})
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        control = Control(stack.enter_context(connect()))
        stack.callback(control.close)
        place = Place(next(iter(jobs.values()))[0], control, Progress(0, False), stack)
        for name, (settings, change) in jobs.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(place, "settings", settings)
                patch.setattr(place, "dtype", getattr(torch, settings.dtype))
                if change:
                    globals()[f"change_{change}"](patch, place)
                assert settings.frameworks is not None
                try:
                    found[name] = {part: frameworks.part(part, place) for part in settings.frameworks.parts}
                except Mismatch as problem:  # on all ranks
                    found[name] = str(problem)
            place.close()
    return found


def run(jobs: dict[str, Job]) -> dict[str, Any]:
    """What rank 0 of fresh processes has found: what frameworks do to a process ends with it."""
    with Ranks(rank_main, 2, jobs) as ranks:
        outcomes, culprit = ranks.wait_or_fail(6 * HANGS)
    assert culprit is None, outcomes[culprit]
    assert None not in outcomes, "a rank hangs"
    return outcomes[0].value


def whole(settings: Settings, parts: Any) -> dict[str, Any]:
    """A run as it is written and read again."""
    assert isinstance(parts, dict), parts
    return json.loads(json.dumps(command.record(settings, {"frameworks": parts})))


# ---- what changes a rank -------------------------------------------------------------------------------------------


def change_rows(patch: Any, place: Any) -> None:
    """A dispatcher that mixes up tokens."""
    from tokenway.bench.framework_megatron import Dispatcher

    honest = Dispatcher.pair
    patch.setattr(Dispatcher, "pair", lambda self, step, experts: honest(self, step, experts).roll(1, 0))


def change_weights(patch: Any, place: Any) -> None:
    """Blocks that come back with other weights."""
    from tokenway.bench.framework_ways import Weighing

    honest = Weighing.blocks
    patch.setattr(Weighing, "blocks", lambda self, rows: honest(self, rows) * 1.02)


def change_fallback(patch: Any, place: Any) -> None:
    """What is right is got without Tokenway."""
    from tokenway.bench.framework_deep_ep import Normal

    def pair(self: Any, step: Any, experts: Any) -> Any:
        if hasattr(experts, "wanted"):
            return experts.wanted(step)
        return self.answers(step)[:, None].expand(step.x.shape)

    patch.setattr(Normal, "pair", pair)


def change_vllm_rows(patch: Any, place: Any) -> None:
    """A class that mixes up tokens."""
    from tokenway.bench.framework_vllm import Standard

    honest = Standard.pair
    patch.setattr(Standard, "pair", lambda self, step, experts: honest(self, step, experts).roll(1, 0))


def change_vllm_own(patch: Any, place: Any) -> None:
    """A rank is left out of vLLM's sums."""
    from tokenway.bench.framework_vllm import AllGather

    honest = AllGather.pair
    patch.setattr(AllGather, "pair", lambda self, step, experts: honest(self, step, experts) / 2)


def change_scatter(patch: Any, place: Any) -> None:
    """Sums that are a per cent too large."""
    from tokenway.integrations import collectives

    honest = collectives.reduce_scatterv
    patch.setattr(collectives, "reduce_scatterv", lambda rows, sizes: honest(rows, sizes) * 1.01)


def change_sums(patch: Any, place: Any) -> None:
    """The same in a way of the decoder."""
    from tokenway.bench.mixings import Gathered

    honest = Gathered._scatter
    patch.setattr(Gathered, "_scatter", lambda self, sums: honest(self, sums) * 1.03)


def change_engine_fallback(patch: Any, place: Any) -> None:
    """What is right is got by NCCL's way."""
    from tokenway.bench.mixings import ReduceScatter, Routed

    def call(self: Any, *args: Any) -> Any:
        other = ReduceScatter(self.layers, self.rank)
        other.sizes = self.sizes
        return other(*args)

    patch.setattr(Routed, "__call__", call)


def change_gpus(patch: Any, place: Any) -> None:
    """PyTorch's CUDA calls, and graphs, are on the CPU."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher
    from pretended_gpus import PretendReplay, PretendStream

    from tokenway.bench import collective_baselines, framework_engine, framework_megatron, framework_place

    class Stream(PretendStream):
        def wait_stream(self, other: Any) -> None:
            pass

        def record_event(self) -> Any:
            return self

    class Graph(PretendReplay):
        def __init__(self, body: Any, stream: Any):
            super().__init__(None, body)

        def reset(self) -> None:
            pass

    moves = token_dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        found = moves(tensor)
        return found.numpy() if as_numpy and torch.is_tensor(found) else found

    patch.setattr(place, "on_gpus", True)
    patch.setattr(framework_place, "Replay", PretendReplay)
    patch.setattr(framework_engine, "captured", Graph)
    patch.setattr(framework_megatron._Own, "refuses", classmethod(lambda cls, place, shape: None))
    patch.setattr(collective_baselines, "NCCL", collective_baselines.GLOO)
    patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", moved)
    for name, stand_in in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_device": lambda: "cpu",
    }.items():
        patch.setattr(torch.cuda, name, stand_in)


def change_captured(patch: Any, place: Any, owner: Any, name: str) -> None:
    """What a call makes is wrong where it is captured, and right where it is called eagerly."""
    from pretended_gpus import PretendReplay

    change_gpus(patch, place)
    honest = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        made = honest(*args, **options)
        return made.roll(1, 0) * 1.02 if PretendReplay.replaying else made

    patch.setattr(owner, name, call)


def change_captured_rows(patch: Any, place: Any) -> None:
    """Of a pair."""
    from tokenway.bench.framework_deep_ep import LowLatency

    change_captured(patch, place, LowLatency, "pair")


def change_captured_answers(patch: Any, place: Any) -> None:
    """Of the pair that is timed alone."""
    from tokenway.bench.framework_ways import Ones

    change_captured(patch, place, Ones, "blocks")


def change_captured_direct(patch: Any, place: Any) -> None:
    """Of its operations."""
    from tokenway.bench.framework_deep_ep import LowLatency

    change_captured(patch, place, LowLatency, "direct")


def change_captured_scatter(patch: Any, place: Any) -> None:
    """Of a reduce-scatter."""
    from tokenway.integrations import collectives

    change_captured(patch, place, collectives, "reduce_scatterv")


def change_captured_rival(patch: Any, place: Any) -> None:
    """Of another's."""
    from tokenway.bench import framework_scatter

    change_captured(patch, place, framework_scatter, "_result")


def change_captured_layer(patch: Any, place: Any) -> None:
    """Of a decoder's layer."""
    from tokenway.bench.mixings import Gathered

    change_captured(patch, place, Gathered, "_scatter")


def change_captured_step(patch: Any, place: Any) -> None:
    """Of a decoder's attention."""
    from tokenway.bench.decoder import Decoder

    change_captured(patch, place, Decoder, "_attention")


def change_direct(patch: Any, place: Any) -> None:
    """Operations that mix up tokens."""
    from tokenway.bench.framework_megatron import Dispatcher

    honest = Dispatcher.direct
    patch.setattr(Dispatcher, "direct", lambda self, step, experts: honest(self, step, experts).roll(1, 0))


# ---- tests ---------------------------------------------------------------------------------------------------------

EXCHANGE = settings_of("exchange", profiles=("small", "large"), routings=("uniform", "skewed"), tokens=(9,))
ENGINE = settings_of("scatter", "engine", dtype="float32")
ALL = settings_of("exchange", "scatter", "engine", tokens=(6,))
ONE, VERIFIED = replace(ALL, frameworks=replace(PARTS, parts=("exchange",))), replace(ALL, verify_only=True)
# name of the change: (settings, what is told of it)
WRONG = {
    "rows": (ONE, "Megatron, weighed: a row is apart by"),
    "weights": (ONE, "compat deep_ep, low latency, weighed: a row is apart by"),
    "direct": (ONE, "Megatron, called directly, weighed: a row is apart by"),
    "captured_rows": (ONE, "compat deep_ep, low latency, weighed in a graph: a row is apart by"),
    "captured_answers": (ONE, "compat deep_ep, low latency, in the graph that is timed: a row is apart by"),
    "captured_direct": (ONE, "compat deep_ep, low latency, called directly, weighed in a graph: a row is apart by"),
    "captured_scatter": (ENGINE, "reduce_scatterv of [40, 20]: has other bits than the oracle"),
    "captured_rival": (ENGINE, "gloo-allreduce of [40, 20]: in a graph a row is apart by"),
    "captured_layer": (ENGINE, "gathered in a graph, 5 rows: a row is apart by"),
    "captured_step": (ENGINE, "routed: logits of the captured step are apart by"),
    "fallback": (ONE, "compat deep_ep, normal: made 0 steps of Tokenway's groups in two pairs, not 4"),
    "scatter": (ENGINE, "reduce_scatterv of [40, 20]: has other bits than the oracle"),
    "sums": (ENGINE, "gathered, 5 rows: a row is apart by"),
    "engine_fallback": (ENGINE, "routed: made 0 steps of Tokenway's groups, not 16"),
}
JOBS: dict[str, Job] = {"exchange": (EXCHANGE, ""), "engine": (ENGINE, ""), "verified": (VERIFIED, "")}
JOBS |= {name: (settings, name) for name, (settings, _) in WRONG.items()} | {"gpus": (ALL, "gpus")}


@pytest.fixture(scope="module")
def ran(torch: Any) -> dict[str, Any]:
    """What each job has found."""
    need_version("megatron-core", "0.16.1")
    return run(JOBS)


def test_the_exchange(ran: dict[str, Any]) -> None:
    """Every way that is here is verified, timed, and told in the JSON and in the tables."""
    found = whole(EXCHANGE, ran["exchange"])
    exchange = found["frameworks"]["exchange"]
    assert len(exchange["rows"]) == 4
    for row in exchange["rows"]:
        assert [name for name in row["rivals"] if not name.startswith("vLLM")] == [*MEGATRON, *DEEP_EP]
        assert all(row["steps"][name] == 2 for name in row["rivals"])
        assert set(row["refused"]) == {"Megatron all-gather", "Megatron all-to-all"}
        assert set(row["host_added_us"]) - {"vLLM standard"} == {"Megatron", *DEEP_EP}
        for name in (*MEGATRON, *DEEP_EP, *(f"direct: {name}" for name in row["host_added_us"])):
            assert row["us"][name]["eager"]["median"] > 0
    text = report.markdown(found)
    assert text.count("| small | uniform | Megatron |") == 2 and "| large | skewed | compat deep_ep, normal |" in text
    assert "needs CUDA" in text and "what integrations add to the host" in text


@pytest.mark.parametrize("change", WRONG)
def test_what_is_wrong_is_found(change: str, ran: dict[str, Any]) -> None:
    """Results in a wrong place, wrong by two per cent, wrong in graphs alone, or got without Tokenway."""
    assert WRONG[change][1] in ran[change]


def test_the_engine(ran: dict[str, Any]) -> None:
    """All ways generate the same text in float32; times to the first token and between tokens are told."""
    found = whole(ENGINE, ran["engine"])
    scatter, engine = found["frameworks"]["scatter"]["rows"], found["frameworks"]["engine"]
    assert [row["sizes"] for row in scatter] == [[5, 2], [40, 20]]
    assert all(row["us"]["reduce_scatterv"]["eager"]["median"] > 0 for row in scatter)
    assert [row["batches"] for row in engine["rows"]] == [[5, 5], [5, 2]] and not engine["graphs"]
    for row in engine["rows"]:
        assert row["same_text"] == dict.fromkeys(("routed", "gathered", "all-reduce", "reduce-scatter"), 1.0)
        assert row["steps"] == {"routed": 16, "gathered": 16, "all-reduce": 0, "reduce-scatter": 0}
        for phases in row["us"].values():
            assert phases["first"]["median"] > 0 < phases["between"]["median"] and phases["tokens_per_s"] > 0
    text = report.markdown(found)
    assert "| 5 2 | routed | 1.00 |" in text and "gloo-allreduce us" in text and "3 steps without graphs" in text


def test_as_on_gpus(ran: dict[str, Any]) -> None:
    """The course of a run on GPUs: graphs, loops, what the host takes, and Megatron's own ways."""
    found = whole(ALL, ran["gpus"])
    (row,) = found["frameworks"]["exchange"]["rows"]
    own = ["Megatron all-gather", "Megatron all-to-all"]
    assert row["rivals"]["Megatron"] == own and row["refused"] == {}
    assert set(row["us"]["compat deep_ep, low latency"]) == {"graph", "eager", "host"}
    assert set(row["us"]["Megatron"]) == {"eager", "host"} == set(row["us"]["direct: Megatron"])
    assert set(row["us"]["direct: compat deep_ep, low latency"]) == {"graph", "eager", "host"}
    timed = {"Megatron": "eager", "compat deep_ep, low latency": "host", "compat deep_ep, normal": "eager"}
    assert timed.items() <= row["host_timed"].items()
    assert set(found["frameworks"]["scatter"]["rows"][0]["us"]["reduce_scatterv"]) == {"graph", "eager", "host"}
    assert found["frameworks"]["engine"]["graphs"]
    tables = report.PARTS["frameworks"].tables(found)
    assert len(tables) == 4 and "in graphs" in tables[3].what
    assert {line[3] for line in tables[1].cells} == {"the host alone", "as a whole, with its wait"}
    compared = {(line[2], line[3], line[4]) for line in tables[0].cells}
    assert ("Megatron", "Megatron all-to-all", "eager") in compared


def test_graphs_in_the_table(ran: dict[str, Any]) -> None:
    """Bare operations stand beside a pair, as it was called; a rival's graph does where Tokenway's way has none. Files
    that do not say how the host was timed are shown too."""
    found = whole(ALL, ran["gpus"])
    (row,) = found["frameworks"]["exchange"]["rows"]
    us = row["us"]
    us["Megatron all-to-all"]["graph"] = us["direct: compat deep_ep, low latency"]["graph"] = {"median": 1234.0}
    us["direct: Megatron"]["eager"] = us["compat deep_ep, low latency"]["graph"] = {"median": 4321.0}
    us["Megatron all-gather"]["graph"] = {"median": 8642.0}
    before, host = report.PARTS["frameworks"].tables(found)[:2]
    lines = {(cells[2], cells[3]): [cells[4], cells[7], *cells[9:]] for cells in before.cells}
    assert lines["Megatron", "Megatron all-to-all"][:2] == ["eager", "4,321"]
    assert lines["Megatron", "Megatron all-to-all"][-1] == "1,234"
    assert lines["compat deep_ep, low latency", "Megatron all-gather"] == ["graph", "1,234", "2.00x", ""]
    del row["host_timed"]
    assert [cells[3] for cells in report.PARTS["frameworks"].tables(found)[1].cells] == [c[3] for c in host.cells]


def test_verified_alone(ran: dict[str, Any]) -> None:
    """Nothing is timed then."""
    text = report.markdown(whole(VERIFIED, ran["verified"]))
    assert "verified" in text and "us |" not in text


def test_the_command(torch: Any, tmp_path: Path, capsys: Any) -> None:
    """From options to tables and a file."""
    file = tmp_path / "found.json"
    many = ["--rows", "3", "--iterations", "2", "--rounds", "1", "--warmup", "0", "--json", str(file)]
    assert cli.main(["bench", "--frameworks", "scatter", "--ranks", "2", *many]) == 0
    assert "reduce-scatters of uneven sizes" in capsys.readouterr().out
    written = json.loads(file.read_text())
    rows = written["frameworks"]["scatter"]["rows"]
    assert [row["sizes"] for row in rows] == [[3, 1]] * 2 and [row["hidden"] for row in rows] == [2048, 7168]
    assert written["settings"]["frameworks"]["parts"] == ["scatter"] and "nvlink" not in written["settings"]
    assert written["settings"]["profiles"] == ["qwen3-30b-a3b", "deepseek-v3"]  # as no others are named


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--frameworks", "--layer"], "--frameworks: not with --layer"),
        (["--frameworks", "--ranks", "1"], "one has no peer"),
        (["--frameworks", "nothing"], "allowed: exchange, scatter, engine, all"),
        (["--rows", "4"], "--rows: only with --frameworks"),
        (["--frameworks", "--dtype", "fp8"], "--frameworks: not with --dtype fp8"),
    ],
)
def test_what_is_refused(argv: list[str], told: str, capsys: Any) -> None:
    assert cli.main(["bench", *argv]) == 2
    assert told in capsys.readouterr().err
