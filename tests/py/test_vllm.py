"""vLLM's modular kernels through Tokenway, and vLLM's own DeepEP classes over its deep_ep: two ranks, on GPUs or not.

`make test-frameworks` has the packages: vLLM itself, built without kernels, and what importing its MoE layers needs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from frameworks import (
    assert_caught,
    attempt,
    framework_apart,
    install_entry_points,
    mutated,
    on_devices,
    programs_of,
    steps,
)
from harness import AT_ONCE, HANGS, said
from vllm_ranks import (
    EXPERTS,
    HIDDEN,
    HIGH,
    LOW,
    MOST,
    ONE,
    OWN,
    apply,
    asked_of_torch,
    begin,
    connect,
    given,
    in_step,
    kernel_of,
    own_case,
    quantized,
    run_own,
    wanted,
)
from vllm_turns import run_micro_batches

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PINNED = "0.33.0"
# batched: the format; sizes: tokens of each rank; known: vLLM knows these on the host; none: some ids are -1; input:
# weights are applied to what is sent; robin: experts are placed by turns; results: columns that experts return, None
# for all; rows: that experts get, of a rank
SLOTS: dict[str, Any] = {
    "batched": False,
    "sizes": (5, 3),
    "top_k": 3,
    "hidden": HIDDEN,
    "dtype": "float32",
    "known": True,
    "none": True,
    "quant": None,
    "input": False,
    "robin": False,
    "results": None,
    "rows": (10, HIDDEN),
}
FLAT, BATCHED = SLOTS | {"known": False, "rows": None}, SLOTS | {"batched": True, "rows": (3, 2 * MOST, HIDDEN)}
CASES: dict[str, dict[str, Any]] = {
    "slots": SLOTS,
    "slots, bfloat16": SLOTS | {"dtype": "bfloat16"},
    "slots, no tokens here": SLOTS | {"sizes": (0, 3), "rows": (6, HIDDEN)},
    "slots, none at all": SLOTS | {"sizes": (0, 0), "rows": (2, HIDDEN)},
    "slots, weights on the input": SLOTS | {"top_k": 1, "input": True},
    "slots, fp8 by blocks": SLOTS | {"quant": "fp8", "hidden": 256, "rows": (10, 256)},
    "slots, nvfp4": SLOTS | {"quant": "nvfp4", "rows": (10, HIDDEN // 2)},
    "slots, one scale made where they arrive": SLOTS | {"quant": "one scale"},
    "slots, results without padding": SLOTS | {"results": 24},  # as of vLLM's experts for MXFP4
    "slots, fp8 by blocks, results without padding": SLOTS
    | {"quant": "fp8", "hidden": 256, "rows": (10, 256), "results": 200, "dtype": "bfloat16"},
    "as many as come": FLAT,
    "as many as come, bfloat16": FLAT | {"dtype": "bfloat16"},
    "as many as come, no tokens here": FLAT | {"sizes": (0, 3)},
    "as many as come, none at all": FLAT | {"sizes": (0, 0), "rows": None},
    "as many as come, fp8 by blocks": FLAT | {"quant": "fp8", "hidden": 256},
    "as many as come, nvfp4": FLAT | {"quant": "nvfp4"},
    "as many as come, nvfp4, none at all": FLAT | {"quant": "nvfp4", "sizes": (0, 0)},
    "as many as come, one scale": FLAT | {"quant": "one scale"},
    "as many as come, results without padding": FLAT | {"results": 24},
    "as many as come, none at all, results without padding": FLAT | {"sizes": (0, 0), "results": 24},
    "slots, for graphs": SLOTS | {"backend": ONE},
    "slots, for graphs, bfloat16, none at all": SLOTS
    | {"backend": ONE, "dtype": "bfloat16", "sizes": (0, 0), "rows": (2, HIDDEN)},
    "slots, for graphs, fp8 by blocks": SLOTS | {"backend": ONE, "quant": "fp8", "hidden": 256, "rows": (10, 256)},
    "more than low latency has room for": FLAT | {"known": True, "sizes": (300, 270)},
    "batched": BATCHED,
    "batched, bfloat16": BATCHED | {"dtype": "bfloat16"},
    "batched, float16": BATCHED | {"dtype": "float16"},
    "batched, no tokens here": BATCHED | {"sizes": (0, 3)},
    "batched, none at all": BATCHED | {"sizes": (0, 0)},
    "batched, weights on the input": BATCHED | {"top_k": 1, "input": True},
    "batched, experts by turns": BATCHED | {"robin": True},
    "batched, fp8 by blocks": BATCHED | {"quant": "fp8", "hidden": 256, "rows": (3, 2 * MOST, 256)},
    "batched, one scale made where they arrive": BATCHED | {"quant": "one scale"},
}
# In which nothing waits for the host.
COUNTED = {name: CASES[name] for name in ("slots", "batched")}
CLOSE = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}  # of the largest value


def dtype_of(case: dict[str, Any]) -> str:
    """Of what experts get."""
    known = {"nvfp4": "uint8", "fp8": "float8_e4m3fn", "one scale": "float8_e4m3fn"}
    return "torch." + known.get(case["quant"], case["dtype"])


def run_case(case: dict[str, Any], config: Any, rank: int, fail: Any = None) -> dict[str, Any]:
    from vllm.model_executor.layers.fused_moe import utils

    kernel, experts = kernel_of(case, config, fail)
    before, data = steps(), given(case, rank)
    with in_step(case, config, rank), patch.object(utils, "moe_kernel_quantize_input", quantized):
        out = apply(kernel, case, rank, *data)
    told = dict(type(experts).given)
    if told.get("counts") is not None:
        told["counts"] = told["counts"].tolist()
    return {"out": out.float().cpu().numpy(), "steps": steps() - before, "given": told, "data": data}


def judge(case: dict[str, Any], ranks: list[Any], refused: int = 0) -> None:
    """refused: combines of an earlier step, which rank 1 has refused."""
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict), found
        out = wanted(*found["data"], case["input"])[:, : case["results"]]
        assert found["out"].shape == out.shape and np.isfinite(found["out"]).all()
        assert np.abs(found["out"] - out).max(initial=0) <= CLOSE[case["dtype"]] * max(np.abs(out).max(initial=0), 1)
        assert found["steps"] == 2 + refused * rank  # a dispatch and a combine
        ids = [each["data"][1] for each in ranks]
        here = [(x >= 0) & ((x % 2 if case["robin"] else x // 3) == rank) for x in ids]
        got, come = found["given"], int(sum(x.any(1).sum() for x in here))
        if case["rows"] is not None or (got and come):
            width = case["hidden"] // (2 if case["quant"] == "nvfp4" else 1)
            assert got["rows"] == (case["rows"] or (come, width)), got
        assert not got or got["dtype"] == dtype_of(case)
        if got and got["counts"] is not None and (case["batched"] or come):
            by_turns = [e * 2 + rank if case["robin"] else rank * 3 + e for e in range(3)]
            assert got["counts"] == [int(sum((x == e).sum() for x in ids)) for e in by_turns]


def run_alias(config: Any, rank: int) -> Any:
    """As many rows as a rank has tokens: vLLM has the experts write to the output of the layer."""
    case = FLAT | {"sizes": (4, 4), "top_k": 1, "none": False}
    kernel, experts = kernel_of(case, config)
    rows, ids, weights = given(case, rank)
    ids[:] = 3 * rank + 1
    ids[0] = 4 - 3 * rank  # so that rows move
    out = apply(kernel, case, rank, rows, ids, weights)
    aliased = type(experts).given["output"] == out.untyped_storage().data_ptr()
    return aliased, out.cpu().numpy(), wanted(rows, ids, weights)


# ---- what fails --------------------------------------------------------------------------------------------


def no_memory(*_: Any) -> Any:
    raise RuntimeError("no memory, say")


# name: what rank 1 gives in place of (rows, ids, weights), the dtype of its rows, and what it is told
WRONG: dict[str, tuple[Any, str, str, str]] = {
    "ids": (lambda x, ids, w: (x, ids + EXPERTS, w), "float32", "InvalidArgument", r"ids\[0, "),
    "tokens": (
        lambda x, ids, w: tuple(each.repeat(7, 0) for each in (x, ids, w)),
        "float32",
        "InvalidArgument",
        r"^a1 has 21 rows; it must have at most",
    ),
    "weights": (lambda x, ids, w: (x, ids, w[:, :2]), "float32", "InvalidArgument", "weights"),
    "types": (lambda *same: same, "float64", "InvalidArgument", "^a1 is float64"),
}


def refused(name: str, wrong: str) -> bool:
    """Whether that is refused in that format, by this call: one without a bound has room for these tokens; weights by
    expert are read by the combine; ids in a device's memory act as -1 (tests/gpu/test_bad_ids.py)."""
    elsewhere = ("as many as come", "tokens"), ("batched", "weights")
    return (name, wrong) not in elsewhere and not (wrong == "ids" and on_devices())


def run_failing(config: Any, rank: int) -> dict[str, Any]:
    """What each rank is told where rank 1 alone fails, how long it took, and of the step after that."""
    told: dict[str, Any] = {}
    for name, case in (("slots", SLOTS), ("as many as come", FLAT), ("batched", BATCHED)):
        began = time.monotonic()
        outcome = attempt(run_case, case, config, rank, no_memory if rank == 1 else None)
        if rank == 1:  # its next call tells those who wait
            told[f"{name}: then"] = attempt(run_case, case, config, rank)
            told[f"{name}: experts"] = outcome, 0
        else:
            told[f"{name}: experts"] = outcome, time.monotonic() - began
            told[f"{name}: then"] = attempt(run_case, case, config, rank)
        for wrong, (change, dtype, *_) in WRONG.items():
            if not refused(name, wrong):
                continue
            began, (kernel, _) = time.monotonic(), kernel_of(case, config)
            data = given(case, rank)
            with in_step(case, config, rank):
                if rank == 1:
                    outcome = attempt(apply, kernel, case | {"dtype": dtype}, rank, *change(*data))
                else:
                    outcome = attempt(apply, kernel, case, rank, *data)
            told[f"{name}: {wrong}"] = outcome, time.monotonic() - began
            told[f"{name}: {wrong}, then"] = attempt(run_case, case, config, rank)
        kernel, _ = kernel_of(case, config)
        told[f"{name}: no prepare"] = attempt(
            lambda kernel=kernel: kernel.prepare_finalize.finalize(None, None, None, None, False, None)
        )
    return told


# ---- the plugin --------------------------------------------------------------------------------------------


def run_plugin(folder: Path) -> dict[str, Any]:
    """What vLLM does with the entry point that the package names."""
    import os

    from vllm import plugins
    from vllm.config import ParallelConfig
    from vllm.distributed.device_communicators import all2all
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tokenway.integrations import supported
    from tokenway.integrations import vllm as adapter

    install_entry_points(folder)
    own = all2all.DeepEPLLAll2AllManager

    def load(**variables: str) -> Any:
        plugins.plugins_loaded = False
        with patch.dict(os.environ, variables):
            plugins.load_general_plugins()
        return all2all.DeepEPLLAll2AllManager is own

    found: dict[str, Any] = {"nothing": load(), "another": ParallelConfig(all2all_backend=HIGH).all2all_backend}
    found["still nothing"] = all2all.DeepEPLLAll2AllManager is own
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    asked = EngineArgs.from_cli_args(parser.parse_args(["--all2all-backend", "tokenway_low_latency"]))
    with patch.dict(os.environ):
        config = ParallelConfig(all2all_backend=asked.all2all_backend)
        found["asked"] = asked.all2all_backend, config.all2all_backend, os.environ.get("TOKENWAY_VLLM")
        found["others"] = [ParallelConfig(all2all_backend=name).all2all_backend for name in adapter.NAMES]
    found["by name"] = all2all.DeepEPLLAll2AllManager.__name__
    adapter.unregister()
    found["taken away"] = all2all.DeepEPLLAll2AllManager is own
    found["by variable"] = load(TOKENWAY_VLLM="1"), all2all.DeepEPLLAll2AllManager.__name__
    adapter.unregister()
    with patch.object(supported.metadata, "version", lambda name: "0.34.1" if name == "vllm" else "2.13.0"):
        found["too new"] = attempt(lambda: load(TOKENWAY_VLLM="1"))
        found["too new, not asked for"] = load()
    return found


# ---- mutations ---------------------------------------------------------------------------------------------

# name: (text of vllm_layers.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ("        meta = None\n", "        meta, rows = None, rows.roll(1, 0)\n", "slots"),
    "weights 2 % off": (
        "rows, scales, topk_ids, topk_weights, results",
        "rows, scales, topk_ids, topk_weights * 1.02, results",
        "as many as come",
    ),
    "ids off by one rank": (
        "rows, scales, topk_ids, topk_weights, results",
        "rows, scales, torch.where(topk_ids < 0, topk_ids, (topk_ids + 3) % 6), topk_weights, results",
        "slots",
    ),
    "scales off by one": (
        "rows, scales = _quantized(a1, quant_config, swizzled=False)\n",
        "rows, scales = (lambda rows, scales: (rows, scales.roll(1, 0)))(\n"
        "                        *_quantized(a1, quant_config, swizzled=False)\n"
        "                    )\n",
        "slots, fp8 by blocks",
    ),
    "unused slots make the scale": (
        "rows.masked_fill((ids < 0).all(1, keepdim=True), 0)",
        "rows + 1000 * (ids < 0).all(1, keepdim=True)",
        "slots, one scale made where they arrive",
    ),
    "batched weights 2 % off": (
        "weights = topk_weights.float()\n",
        "weights = topk_weights.float() * 1.02\n",
        "batched",
    ),
    "batched ids off by one rank": (
        "            a1, topk_ids, self._most,",
        "            a1, torch.where(topk_ids < 0, topk_ids, (topk_ids + 3) % 6), self._most,",
        "batched",
    ),
    "no table of places": ("if self._places is not None:", "if False:", "batched, experts by turns"),
}


def run_mutant(old: str, new: str, case: str, config: Any, rank: int) -> Any:
    from vllm.model_executor.layers.fused_moe import all2all_utils

    from tokenway.integrations import vllm_layers

    made = mutated(vllm_layers, old, new)
    with (
        patch.object(all2all_utils, "DeepEPHTPrepareAndFinalize", made.TokenwayStandardPrepareAndFinalize),
        patch.object(all2all_utils, "DeepEPLLPrepareAndFinalize", made.TokenwayBatchedPrepareAndFinalize),
    ):
        return attempt(run_case, CASES[case], config, rank)


# ---- all of it ---------------------------------------------------------------------------------------------


def rank_main(store: str) -> Any:
    import torch.distributed as dist

    rank, config = begin(store)
    folder = Path(f"{store}-{rank}")
    folder.mkdir()
    found: dict[str, Any] = {"plugin": attempt(run_plugin, folder)}
    names: dict[str, Any] = {}
    (program,) = programs_of("vLLM")
    exec(program, names)
    found["manager"] = connect(config, rank)
    for name, case in CASES.items():
        found[name] = attempt(run_case, case, config, rank)
    found["alias"] = attempt(run_alias, config, rank)
    for name, case in COUNTED.items():
        found[f"counted, {name}"] = attempt(asked_of_torch, case, config, rank)
    found["failing"] = attempt(run_failing, config, rank)
    for name, case in (("slots", SLOTS), ("as many as come", FLAT), ("batched", BATCHED)):
        found[f"micro-batches, {name}"] = attempt(run_micro_batches, case, config, rank)
        left = attempt(run_micro_batches, case, config, rank, no_memory)
        found[f"left out, {name}"] = left, attempt(run_case, case, config, rank)
    for mutation, change in MUTATIONS.items():
        found[mutation] = run_mutant(*change, config, rank)
    found["in use"] = names["in_use"]()
    for name, (batched, fp8) in OWN.items():
        found[name] = attempt(run_own, SLOTS | own_case(batched, fp8), config, rank)
    dist.barrier()
    return found


apart = framework_apart({"vllm": PINNED})


@pytest.fixture(scope="module")
def ran(apart: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("vllm") / "store"), timeout=6 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_layers(ran, case) -> None:
    """What vLLM's kernel makes of a batch, as each expert alone would, by Tokenway's steps."""
    judge(CASES[case], [found[case] for found in ran])


def test_experts_that_write_to_the_output(ran) -> None:
    for found in ran:
        aliased, out, right = found["alias"]
        assert aliased and np.array_equal(out, right)


@pytest.mark.parametrize("case", COUNTED)
def test_what_a_pair_asks_of_torch(ran, case) -> None:
    """Each of these costs the host as much as a part of the exchange, and most of them a kernel: ids of nobody have one
    of somebody's, and rows by expert come into new memory."""
    ids = ["aten.remainder.Scalar", "aten.clamp.default"]  # on the first rank, on others
    for rank, found in enumerate(ran):
        asked = found[f"counted, {case}"]
        assert isinstance(asked, dict), asked
        if case == "slots":
            assert asked == {ids[rank]: 1}
        else:
            assert list(asked) == ["aten.empty.memory_format"] and sum(asked.values()) <= 6


@pytest.mark.parametrize("case", ["slots", "as many as come", "batched"])
def test_what_fails_on_one_rank(ran, case) -> None:
    """Its peers are told at once, or, where its experts fail, when it comes to its next step; which is as ever."""
    first, second = (found["failing"] for found in ran)
    sentences = {wrong: told for wrong, (_, _, *told) in WRONG.items() if refused(case, wrong)}
    sentences["experts"] = ["RuntimeError", "^no memory, say"]
    for wrong, (kind, sentence) in sentences.items():
        said(second[f"{case}: {wrong}"][0], kind, sentence)
        outcome, took = first[f"{case}: {wrong}"]
        said(outcome, "PeerRefused", "rank 1")
        assert took < AT_ONCE
        then = f"{case}: then" if wrong == "experts" else f"{case}: {wrong}, then"
        judge(CASES[case], [first[then], second[then]], int(wrong == "experts"))
    for told in (first, second):
        said(told[f"{case}: no prepare"], "InvalidUsage", "finalize comes without a prepare")


@pytest.mark.parametrize("case", ["slots", "as many as come", "batched"])
def test_micro_batches(ran, case) -> None:
    """Each has what it has alone; and the second begins before the first computes."""
    for found in ran:
        told = found[f"micro-batches, {case}"]
        assert isinstance(told, dict), told
        for out, right in zip(told["out"], told["wanted"], strict=True):
            assert isinstance(out, np.ndarray), out
            assert np.array_equal(out, right)
        assert told["steps"] == 4
        assert told["order"] == ["begin 0", "begin 1", "experts 0", "experts 1"]


@pytest.mark.parametrize("case", ["slots", "as many as come", "batched"])
def test_a_combine_that_a_micro_batch_leaves_out(ran, case) -> None:
    """On rank 1, where experts of the second raise: its peer is told by rank 1's next step, outside of micro-batches;
    the first is as ever, and so is that step."""
    first, second = (found[f"left out, {case}"] for found in ran)
    for rank, (told, _) in enumerate((first, second)):
        assert isinstance(told, dict), told
        assert np.array_equal(told["out"][0], told["wanted"][0])
        assert told["order"] == ["begin 0", "begin 1", "experts 0", "experts 1"] and told["steps"] == 4 - rank
    said(second[0]["out"][1], "RuntimeError", "^no memory, say")
    said(first[0]["left"], "PeerRefused", "rank 1")
    assert second[0]["left"] is None
    judge(CASES[case], [then for _, then in (first, second)], 1)


def test_the_manager_of_vllms_communicator(ran) -> None:
    """That for GPUs makes Tokenway's, as it finds the class in the place of DeepEP's."""
    if not on_devices():
        pytest.skip("two CUDA devices are missing: that for CPUs has one of its own in place of all others")
    assert [found["manager"] for found in ran] == ["TokenwayManager"] * 2


@pytest.mark.parametrize("name", OWN)
def test_vllms_own_classes(ran, name) -> None:
    """Unchanged, over Tokenway in the place of deep_ep."""
    batched, fp8 = OWN[name]
    for found in ran:
        assert isinstance(found[name], dict), found[name]
        assert found[name]["kinds"] == ("tokenway.compat.deep_ep.buffer", "deepep_ll" if batched else "deepep_ht")
    judge(SLOTS | own_case(batched, fp8), [found[name] for found in ran])


def test_the_plugin(ran) -> None:
    """Nothing changes unless it is asked for, by name or by the environment; another vLLM is refused."""
    for found in ran:
        told = found["plugin"]
        assert isinstance(told, dict), told
        assert told["nothing"] and told["another"] == HIGH and told["still nothing"]
        assert told["asked"] == ("tokenway_low_latency", LOW, "1")
        assert told["others"] == [ONE, HIGH, LOW]
        assert told["by name"] == "TokenwayManager" and told["taken away"]
        assert told["by variable"] == (False, "TokenwayManager")
        said(
            told["too new"],
            "Unsupported",
            r"^vllm 0\.34\.1 is installed; needed is vllm from 0\.33\.0 on, before 0\.34",
        )
        assert told["too new, not asked for"]


def test_the_guide(ran) -> None:
    """Its program has switched on what these tests run, and says what is in use: a group each for both formats and
    top-k."""
    for found in ran:
        assert found["in use"].count("SharedGroup") == 4 and "steps=" in found["in use"]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """A class that is wrong fails the test of its case."""
    raises = mutation == "unused slots make the scale"
    assert_caught([found[mutation] for found in ran], partial(judge, CASES[MUTATIONS[mutation][2]]), raises)
