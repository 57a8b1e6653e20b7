"""SGLang's own DeepEP dispatchers, unchanged, on two ranks through Tokenway's plugin, against a dense layer.

`make test-frameworks` has SGLang. Its kernels are not there, nor is a server started: `sglang_parts` says what stands
empty, and what is said by hand."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sglang_attention
from deep_ep_ranks import array, begin, end, routed
from frameworks import (
    GUIDE,
    SGLANG_APART,
    assert_caught,
    attempt,
    framework_apart,
    here,
    install_entry_points,
    mutated,
    on_devices,
    programs_of,
    steps,
)
from harness import AT_ONCE, HANGS, said
from sglang_parts import PINNED, as_with_kernels, put_stand_ins

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXPERTS, TOP_K, HIDDEN = 8, 3, 256
CLOSE = 1e-2  # of the largest value: bfloat16 rounds rows, the sum of a rank and the sum of all, 2^-9 each


@dataclass(frozen=True)
class Case:
    mode: str = "normal"
    sizes: tuple[int, int] = (7, 4)  # tokens of each rank
    told: bool = False  # asynchronous in normal mode, by hooks in low latency
    dtype: str = "bf16"  # that rows are sent in
    packed: bool = False  # scales as UE8M0
    nobody: bool = False  # ids are all -1


CASES = {
    "normal": Case(),
    "normal, asynchronous": Case(told=True),
    "normal, a rank without tokens": Case(sizes=(5, 0)),
    "normal, no tokens": Case(sizes=(0, 0)),
    "normal, nobody is chosen": Case(nobody=True),
    "normal, more than there is room for": Case(sizes=(300, 2)),
    "normal, fp8": Case(dtype="fp8"),
    "low latency": Case("low_latency"),
    "low latency, hooks": Case("low_latency", told=True),
    "low latency, a rank without tokens": Case("low_latency", (0, 6), told=True),
    "low latency, no tokens": Case("low_latency", (0, 0)),
    "low latency, nobody is chosen": Case("low_latency", nobody=True),
    "low latency, fp8": Case("low_latency", dtype="fp8"),
    "low latency, fp8, hooks": Case("low_latency", told=True, dtype="fp8"),
    "low latency, UE8M0": Case("low_latency", told=True, dtype="fp8", packed=True),
    "by the batch, prefill": Case("auto extend"),
    "by the batch, decode": Case("auto", told=True),
}


def weights_of_experts() -> Any:
    """[E, H, H] float32: every expert gives every token another answer."""
    import torch

    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7)) / HIDDEN**0.5


def batch(name: str, rank: int) -> tuple[Any, Any, Any]:
    """(tokens [T, H] bfloat16, ids [T, K] int32, some -1, weights [T, K] float32) of a rank."""
    import torch

    case = CASES[name]
    count = case.sizes[rank]
    rng = torch.Generator().manual_seed(sum(name.encode()) + rank)
    x = torch.randn(count, HIDDEN, generator=rng).bfloat16()
    ids = torch.from_numpy(routed(count, EXPERTS, TOP_K, (sum(name.encode()), rank))).int()
    return x, ids.fill_(-1) if case.nobody else ids, torch.rand(count, TOP_K, generator=rng) + 0.1


def sent(case: Case, x: Any) -> Any:
    """Tokens as experts see them."""
    if case.dtype == "bf16":
        return x.float()
    values, scales = tw.quantize_fp8(x, case.packed)
    return values.float() * scales.repeat_interleave(128, 1)


def dense(name: str, rank: int) -> np.ndarray:
    """What one rank that has all experts would compute of this rank's tokens."""
    import torch

    x, ids, weights = batch(name, rank)
    every = torch.einsum("th,ehd->ted", sent(CASES[name], x), weights_of_experts())
    chosen = every.gather(1, ids.clamp(min=0).long()[..., None].expand(-1, -1, HIDDEN))
    return array((chosen * torch.where(ids < 0, 0, weights)[..., None]).sum(1))


def dispatcher_of(case: Case) -> Any:
    """SGLang's, with its two inner ones for two batches in turns."""
    import torch
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode

    deepep.deep_gemm_wrapper.DEEPGEMM_BLACKWELL = case.packed
    made = MaybeTboDeepEPDispatcher(
        group=torch.distributed.group.WORLD,
        router_topk=TOP_K,
        permute_fusion=True,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS // 2,
        hidden_size=HIDDEN,
        params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode(case.mode.split()[0]),
        async_finish=case.told,
        return_recv_hook=case.told,
    )
    made.set_quant_config({"dispatcher_output_dtype": case.dtype})
    return made


def given(name: str, rank: int) -> dict[str, Any]:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x, ids, weights = (each.to(here()) for each in batch(name, rank))
    return {"hidden_states": x, "topk_output": StandardTopKOutput(weights, ids, None)}


def experts(case: Case, rank: int, came: Any) -> Any:
    """What this rank's experts make of what a dispatch has brought, as SGLang hands it to combine."""
    import torch

    own = weights_of_experts()[rank * 4 : rank * 4 + 4].to(here())
    rows, scales = came.hidden_states, came.hidden_states_scale
    if case.packed:
        exponents = scales.flatten().clone().view(torch.uint8).view(*scales.shape[:-1], 4)
        scales = torch.exp2(exponents[..., : HIDDEN // 128].float() - 127)
    rows = rows.float() if scales is None else rows.float() * scales.repeat_interleave(128, -1)
    if came.format.name == "DEEPEP_LL":
        out = torch.full_like(rows, 3.0)  # what lies behind the rows that came is nobody's
        for expert, count in enumerate(came.masked_m.tolist()):
            out[expert, :count] = rows[expert, :count] @ own[expert]
    else:
        each = torch.einsum("th,ehd->ted", rows, own)
        chosen = each.gather(1, came.topk_ids.clamp(min=0)[..., None].expand(-1, -1, HIDDEN))
        out = (chosen * torch.where(came.topk_ids < 0, 0, came.topk_weights)[..., None]).sum(1)
    return out.bfloat16(), came.topk_ids, came.topk_weights


def run_case(name: str, rank: int) -> dict[str, Any]:
    """A dispatch and a combine, three times over one dispatcher, as layers follow each other; the last counts."""
    from sglang.srt.runtime_context import get_forward

    case, before = CASES[name], steps()
    with get_forward().scoped(is_extend_in_batch="extend" in case.mode):
        dispatcher = dispatcher_of(case)
        for _ in range(3):
            came = dispatcher.dispatch(**given(name, rank))
            out = dispatcher.combine(combine_input=experts(case, rank, came))
    if came.format.name == "DEEPEP_LL":
        counts = came.masked_m.tolist()
    else:
        counts = came.num_recv_tokens_per_expert
    return {"out": array(out), "steps": steps() - before, "counts": counts, "format": came.format.name}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    every = np.concatenate([array(batch(name, rank)[1]).ravel() for rank in range(2)])
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict), found
        assert found["steps"] == 6
        normal = case.mode in ("normal", "auto extend")
        assert found["format"] == ("DEEPEP_NORMAL" if normal else "DEEPEP_LL")
        counts = [int((every == expert).sum()) for expert in range(rank * 4, rank * 4 + 4)]
        assert found["counts"] == ([-(-n // 128) * 128 for n in counts] if normal else counts)
        close(found["out"], dense(name, rank))


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape and np.isfinite(found).all()
    assert np.abs(found - wanted).max(initial=0) <= CLOSE * np.abs(wanted).max(initial=0)


IN_TURNS = {
    "low latency in turns": ("low latency, hooks", "low latency, fp8, hooks"),
    "normal in turns": ("normal, asynchronous", "normal"),
}


def run_in_turns(names: tuple[str, str], rank: int) -> list[dict[str, Any]]:
    """Two batches through the two inner dispatchers, whose halves SGLang's operations call in turns."""
    from sglang.srt.layers.moe.utils import is_tbo_enabled
    from sglang.srt.runtime_context import get_flags

    before = steps()
    with get_flags().moe.override(tbo_enabled=True):
        assert is_tbo_enabled()
        both = dispatcher_of(CASES[names[0]])
    both._inners[1].set_quant_config({"dispatcher_output_dtype": CASES[names[1]].dtype})
    turns = list(enumerate(names))
    for turn, name in turns:
        both.dispatch_a(tbo_subbatch_index=turn, **given(name, rank))
    rows = [experts(CASES[name], rank, both.dispatch_b(tbo_subbatch_index=turn)) for turn, name in turns]
    for turn, _ in turns:
        both.combine_a(tbo_subbatch_index=turn, combine_input=rows[turn])
    out = [array(both.combine_b(tbo_subbatch_index=turn)) for turn, _ in turns]
    return [{"out": each, "steps": steps() - before} for each in out]


NORMAL, LOW_LATENCY = "tokenway.compat.deep_ep.normal", "tokenway.integrations.low_latency"
# name: (module whose exchange is broken, its class, text of it, what a later hand may make of it, case that must fail)
MUTATIONS = {
    "normal: a row off by one": (
        NORMAL, "Normal", 'return whole["tokens"], ', 'return whole["tokens"].roll(1, 0), ', "normal",
    ),
    "normal: weights 2 % off": (
        NORMAL, "Normal", 'whole["ids"] < 0, 0)', 'whole["ids"] < 0, 0).mul_(1.02)', "normal",
    ),
    "normal: ids off by one rank": (
        NORMAL, "Normal", "view.route(ids, weights,",
        "view.route(torch.where(ids < 0, ids, (ids + 4) % 8), weights,", "normal",
    ),
    "low latency: a row off by one": (
        LOW_LATENCY, "LowLatency", "rows, beside = x, {TOKEN:", "rows, beside = x.roll(1, 0), {TOKEN:", "low latency",
    ),
    "low latency: weights 2 % off": (
        LOW_LATENCY, "LowLatency", '"weights": weights,', '"weights": weights * 1.02,', "low latency, hooks",
    ),
    "low latency: ids off by one rank": (
        LOW_LATENCY, "LowLatency", "view.route(ids,",
        "view.route(torch.where(ids < 0, ids, (ids + 4) % 8),", "low latency, fp8",
    ),
}  # fmt: skip


def mutant(name: str, rank: int) -> Any:
    """A case through an exchange whose source says something else."""
    from tokenway.compat.deep_ep import ranks

    module, kind, old, new, case = MUTATIONS[name]
    made = mutated(importlib.import_module(module), old, new)
    with patch.object(ranks, kind, getattr(made, kind)), patch.object(ranks, "_known", {}):
        return attempt(run_case, case, rank)


def wrong_id(case: Case, rank: int, dispatcher: Any, name: str) -> Any:
    arguments = given(name, rank)
    if rank == 1:
        arguments["topk_output"].topk_ids[0, 0] = EXPERTS
    return dispatcher.dispatch(**arguments)


def a_row_less(case: Case, rank: int, dispatcher: Any, name: str) -> Any:
    rows, *rest = experts(case, rank, dispatcher.dispatch(**given(name, rank)))
    rows = rows if rank == 0 else rows[:-1] if rows.dim() == 2 else rows[:, :-1]
    return dispatcher.combine(combine_input=(rows, *rest))


# name: (what is done, case, what rank 1 is told); on devices a wrong id acts as -1 (tests/gpu/test_bad_ids.py)
FAILING = {
    "a wrong id": (wrong_id, "normal", r"8.* must be"),
    "a wrong id in low latency": (wrong_id, "low latency", r"8.* must be"),
    "a row less": (a_row_less, "normal", r"must"),
    "a row less in low latency": (a_row_less, "low latency, hooks", r"^x is .*it must be bfloat16"),
}


def failing(name: str, rank: int) -> Any:
    """What a rank is told, after how long, and what it gets in the call after it."""
    function, case, _ = FAILING[name]
    began = time.monotonic()
    told = attempt(function, CASES[case], rank, dispatcher_of(CASES[case]), case)
    took = time.monotonic() - began
    return told, took, attempt(run_case, case, rank)


def refused() -> list[Any]:
    """Arguments of forks of DeepEP, by which SGLang overlaps a combine with its experts."""
    import torch

    name = "low latency"
    arguments = {"overlap": True, "src_signals": torch.zeros(1), "src_signal_expect_value": 1}
    from tokenway.compat import deep_ep

    buffer = deep_ep.Buffer(torch.distributed.group.WORLD)
    x, ids, weights = (each.to(here()) for each in batch(name, torch.distributed.get_rank()))
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids.long(), 8, EXPERTS, use_fp8=False)
    return attempt(lambda: buffer.low_latency_combine(rows, ids.long(), weights, handle, **arguments))


SWITCHES: dict[str, dict[str, str]] = {
    "unasked": {},
    "off": {"TOKENWAY_SGLANG": "0", "SGLANG_PLUGINS": "tokenway"},
    "wrong": {"TOKENWAY_SGLANG": "yes"},
    "too new": {"TOKENWAY_SGLANG": "1"},
    "on": {"SGLANG_PLUGINS": "other, tokenway"},
}


@dataclass(frozen=True)
class Installed:
    """importlib.metadata, of another version of SGLang."""

    sglang: str
    PackageNotFoundError = importlib.metadata.PackageNotFoundError

    def version(self, package: str) -> str:
        return self.sglang if package == "sglang" else importlib.metadata.version(package)


def switched(folder: Path) -> dict[str, Any]:
    """By SGLang's own loader of plugins: what it is asked by, before and after."""
    from sglang.srt import plugins
    from sglang.srt.layers.moe.token_dispatcher import deepep

    from tokenway.integrations import supported

    found: dict[str, Any] = {"before": deepep.use_deepep}
    install_entry_points(folder)
    for name, variables in SWITCHES.items():
        plugins._plugins_loaded = False
        version = "0.6.0" if name == "too new" else PINNED
        with patch.dict(os.environ, variables), patch.object(supported, "metadata", Installed(version)):
            plugins.load_plugins()
        found[name] = deepep.use_deepep, str(deepep._deepep_import_error)
    found["buffer"] = deepep.Buffer.__module__
    return found


def command_line() -> tuple[Any, ...]:
    """What SGLang's own parser reads in that of the guide."""
    from sglang.srt.server_args import ServerArgs

    shown = re.search(r"TOKENWAY_SGLANG=1 python -m sglang.launch_server (.*?)\n\n", GUIDE.read_text(), re.DOTALL)
    assert shown is not None
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    told = parser.parse_args(shown[1].replace("\\\n", " ").split())
    return told.moe_a2a_backend, told.deepep_mode, told.tp_size, told.attn_dp_size, told.ep_size


def run_guide() -> list[Any]:
    """Its program switches Tokenway on, once more, and says what is in use."""
    names: dict[str, Any] = {}
    (program,) = programs_of("SGLang")
    exec(program, names)
    names["switch_on"]()
    return [command_line(), names["in_use"](), *(str(each) for each in names["gathered"]())]


def rank_main(store: str) -> dict[str, Any]:
    put_stand_ins()
    rank, _ = begin(store, 2)
    assert "deep_ep" not in sys.modules
    found: dict[str, Any] = {"switched": switched(Path(store).parent / f"plugin{rank}")}
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_context, get_flags

    as_with_kernels()
    get_context().override_server_args(moe_a2a_backend="deepep").install()
    get_flags().moe.a2a_backend = MoeA2ABackend.DEEPEP
    for case in CASES:
        found[case] = attempt(run_case, case, rank)
    for name, names in IN_TURNS.items():
        found[name] = attempt(run_in_turns, names, rank)
    for name in MUTATIONS:
        found[name] = mutant(name, rank)
    for name in FAILING:
        if not (on_devices() and "id" in name.split()):
            found[name] = failing(name, rank)
    found["refused"] = attempt(refused)
    found |= sglang_attention.run(rank)
    found["guide"] = attempt(run_guide)
    end()
    return found


apart = framework_apart({"sglang": PINNED}, SGLANG_APART)


@pytest.fixture(scope="module")
def ran(apart: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("sglang") / "store"), timeout=6 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_outputs(ran, case) -> None:
    """As one rank that has all experts computes them; each call is a step of Tokenway's."""
    judge(case, [found[case] for found in ran])


@pytest.mark.parametrize("turns", IN_TURNS)
def test_two_batches_in_turns(ran, turns) -> None:
    """By the halves that SGLang's two-batch overlap calls."""
    for rank, found in enumerate(ran):
        assert isinstance(found[turns], list), found[turns]
        for name, each in zip(IN_TURNS[turns], found[turns], strict=True):
            assert each["steps"] == 4
            close(each["out"], dense(name, rank))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An exchange that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], partial(judge, MUTATIONS[mutation][-1]))


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_that_fails(ran, name) -> None:
    """Its peer is told at once, and the next call is as ever."""
    if name not in ran[0]:
        pytest.skip("ids in device memory are not refused")
    (first, took, _), (second, _, _) = (found[name] for found in ran)
    said(second, "InvalidArgument", FAILING[name][2])
    said(first, "PeerRefused", "rank 1")
    assert took < AT_ONCE
    judge(FAILING[name][1], [found[name][2] for found in ran])


def test_what_is_refused(ran) -> None:
    for found in ran:
        said(found["refused"], "Unsupported", "^overlap is not served")


def test_switching_on(ran) -> None:
    """Nothing unless it is asked for; what is wrong is told in SGLang's log, and where DeepEP is first used."""
    for found in ran:
        how = found["switched"]
        missing = "No module named 'deep_ep'"
        assert how["before"] is False and how["unasked"] == how["off"] == (False, missing)
        assert how["wrong"] == (False, "TOKENWAY_SGLANG is 'yes'; it must be 0 or 1")
        assert how["too new"][0] is False
        assert how["too new"][1].startswith("sglang 0.6.0 is installed; needed is sglang from 0.5.23 on, before 0.5.24")
        assert how["on"] == (True, "None") and how["buffer"] == "tokenway.compat.deep_ep.buffer"


@pytest.mark.parametrize("case", sglang_attention.CASES)
def test_attention(ran, case) -> None:
    """Gathers to the bit, sums as of an all-reduce and a slice; each call is a step of Tokenway's."""
    sglang_attention.judge(case, [found[f"attention: {case}"] for found in ran])


@pytest.mark.parametrize("mutation", sglang_attention.MUTATIONS)
def test_mutations_of_attention_are_caught(ran, mutation) -> None:
    outcomes = [found[f"attention: {mutation}"] for found in ran]
    assert all(isinstance(each, dict) for each in outcomes), outcomes
    with pytest.raises(AssertionError):
        sglang_attention.judge("uneven", outcomes)


def test_attention_refused(ran) -> None:
    """The peer is told at once, and the next call is as ever."""
    sglang_attention.judge_refused([found["attention: refused"] for found in ran])
    sglang_attention.judge("uneven", [found["attention: after"] for found in ran])


def test_deterministic_attention_is_left_alone(ran) -> None:
    for rank, found in enumerate(ran):
        out, made = found["attention: deterministic"]
        assert made == 0 and out.shape == ((3, 1)[rank], sglang_attention.HIDDEN) and (out == 2).all()


def test_the_guide(ran) -> None:
    """Its program, and its command line."""
    for rank, found in enumerate(ran):
        told, in_use, everyone, mine = found["guide"]
        assert told == ("deepep", "auto", 8, 8, 8)
        assert "steps=" in in_use and everyone == "[3, 8]" and mine == str([(2, 1)[rank], 8])
