"""TensorRT-LLM's communication through Tokenway: its contract, kept by two ranks.

The interface is that of `tensorrt_llm_parts`: a record, or TensorRT-LLM's own files where a checkout is named."""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path
from typing import Any

import by_source
import numpy as np
import pytest
import tensorrt_llm_parts as parts
from by_source import EXPERTS, HIDDEN, TOP_K, Case, answered, sent
from frameworks import assert_caught, attempt, begin, here, mutated, need_devices, on_devices, programs_of, steps
from harness import HANGS, PATIENT, caught, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

MOST = 700  # of a rank in a call: more than a group has room for at first, as has the case "more than before"
CASES = {
    "float32": Case((5, 3), "float32"),
    "bfloat16": Case((8, 8), "bfloat16"),
    "weights of bfloat16": Case((2, 4), "bfloat16", weights="bfloat16"),
    "no tokens": Case((0, 3), "bfloat16"),
    "none at all": Case((0, 0), "bfloat16"),
    "no weights": Case((3, 1), "float32", weights=""),
    "fp8 and scales": Case((4, 6), "float8_e4m3fn", ("float32", 2)),
    "packed nvfp4": Case((4, 6), "uint8", ("float8_e4m3fn", 2)),
    "more than before": Case((3, 300), "bfloat16"),
    "fewer again": Case((1, 2), "bfloat16"),
}


def results(case: str) -> str:
    """The dtype that experts return."""
    return "float32" if CASES[case].dtype == "float32" else "bfloat16"


def exchanged(comm: Any, name: str, rank: int, **more: Any) -> dict[str, Any]:
    """What a rank receives, and what it gets back, called as TensorRT-LLM's scheduler does."""
    import torch

    case = CASES[name]
    values, slots, weights, scales = sent(case, rank)
    assert comm.is_workload_feasible(list(case.tokens), 1) and comm.supports_post_quant_dispatch()
    came = comm.dispatch(
        hidden_states=values,
        hidden_states_sf=scales,
        token_selected_slots=slots,
        token_final_scales=weights,
        all_rank_num_tokens=list(case.tokens),
        use_dp_padding=False,
        enable_sanitize_expert_ids=True,
        **more,
    )
    rows, scales, slots, weights = came
    found, made = answered(case, rank, (rows, slots, weights, scales), -1, getattr(torch, results(name)))
    if name == "fewer again":  # experts that write where the rows came
        rows.copy_(made)
        made = rows
    bound = max(1, *case.tokens)
    given = made.view(2, bound, HIDDEN) if name == "bfloat16" else made
    out = comm.combine(given, all_rank_max_num_tokens=bound)
    return found | {"out": out.float().cpu().numpy(), "dtype": str(out.dtype)}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    by_source.judge(case, ranks, max(1, *case.tokens), -1, f"torch.{case.weights}" if case.weights else None)


# name: (text of the file, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ("came.tokens.flatten(0, 1),", "came.tokens.flatten(0, 1).roll(1, 0),", "bfloat16"),
    "weights 2 % off": ("came.weights.flatten(0, 1).to", "(came.weights.flatten(0, 1) * 1.02).to", "float32"),
    "weights of float32": (".to(token_final_scales.dtype)", "", "weights of bfloat16"),
    "slots of this rank": ('id_space="global"', 'id_space="local"', "float32"),
    "another slot for none": ("invalid_id=-1", "invalid_id=99", "no weights"),
    "scales off by one": ('["scales"].flatten(0, 1)', '["scales"].flatten(0, 1).roll(1, 0)', "packed nvfp4"),
    "a larger bound": ("return max(1, *sizes)", "return max(2, *sizes)", "none at all"),
}


def ones() -> dict[str, Any]:
    """A right dispatch of two tokens."""
    import torch

    x, slots = torch.ones(2, HIDDEN, device=here()), torch.tensor([[0, 1, 5]] * 2, dtype=torch.int32, device=here())
    given = {"hidden_states": x, "hidden_states_sf": None, "token_selected_slots": slots}
    return given | {"token_final_scales": torch.ones(2, TOP_K, device=here()), "all_rank_num_tokens": [2, 2]}


def refused(comm: Any) -> list[Any]:
    """What ranks are told of calls that are wrong on both; after each of them the right ones go on."""
    import torch

    rows = torch.zeros(4, HIDDEN, device=here())
    told = [attempt(comm.combine, rows)]
    comm.dispatch(**ones())
    told.append(attempt(partial(comm.dispatch, **ones())))
    told.append(attempt(comm.combine, rows))
    return told


# name: what rank 1 gives to a dispatch in place of what is right, and what it is told
WRONG_DISPATCHES: dict[str, tuple[Any, str, str]] = {
    "slots": (lambda x, s: {"token_selected_slots": s + 10}, "InvalidArgument", r"ids\[0, 0\]"),
    "sizes": (lambda x, s: {"all_rank_num_tokens": [2]}, "InvalidArgument", r"^all_rank_num_tokens is \[2\]; it must"),
    "size": (lambda x, s: {"all_rank_num_tokens": [2, -1]}, "InvalidArgument", r"^all_rank_num_tokens is \[2, -1\]"),
    "more": (lambda x, s: {"hidden_states": x.repeat(2, 1)}, "InvalidArgument", r"^tokens has shape \[4, 32\]"),
    "tokens": (lambda x, s: {"hidden_states": x[0]}, "InvalidArgument", r"^tokens has shape \[32\]; it must have two"),
    "scales": (lambda x, s: {"hidden_states_sf": x[0]}, "InvalidArgument", r"^scales has shape \[32\]; it must"),
    "mask": (lambda x, s: {"active_rank_mask": 1}, "InvalidArgument", "^active_rank_mask is given; it must be None"),
    "statistics": (
        lambda x, s: {"eplb_local_stats": x},
        "InvalidArgument",
        r"^eplb_local_stats has shape \[2, 32\] on .*; it must be a tensor of one dimension on",
    ),
}
# ... and to a combine
WRONG_ROWS: dict[str, tuple[tuple[int, ...], str]] = {
    "rows": ((3, HIDDEN), "rows"),
    "width": ((8, HIDDEN // 2), r"^rows has shape \[8, 16\]; it must be \[N, b, 32\] or"),  # as many elements
}


def wrong_dispatches() -> dict[str, tuple[Any, str, str]]:
    """Those that are refused: devices read ids themselves, where ids of no expert are nobody's."""
    return {name: case for name, case in WRONG_DISPATCHES.items() if name != "slots" or not on_devices()}


def wrong_alone(comm: Any, rank: int, larger: list[int]) -> dict[str, Any]:
    """What ranks are told where rank 1 alone calls wrongly, or leaves a combine out as experts raise: before a dispatch
    of usual size, and before one of sizes that there is no room for yet."""
    import torch

    def dispatch(**other: Any) -> None:
        comm.dispatch(**ones() | other)

    told: dict[str, Any] = {}
    for name, (wrong, *_) in wrong_dispatches().items():
        given = ones()
        other = wrong(given["hidden_states"], given["token_selected_slots"]) if rank == 1 else {}
        if name == "scales":  # of rows that leave room for them
            x = given["hidden_states"]
            other = {"hidden_states": x[:, :16].byte(), "hidden_states_sf": x[:, :2]} | other
        elif name == "statistics":
            other = {"eplb_local_stats": torch.ones(EXPERTS, device=here())} | other
        told[name] = attempt(partial(dispatch, **other))
    for name, (shape, _) in WRONG_ROWS.items():
        dispatch()
        told[name] = attempt(comm.combine, torch.zeros((4, HIDDEN) if rank == 0 else shape, device=here()))
    for name, sizes in (("left out", [2, 2]), ("left out, and larger", larger)):
        dispatch()
        again = partial(dispatch, all_rank_num_tokens=sizes)
        told[name] = attempt(comm.combine, torch.zeros(4, HIDDEN, device=here())) if rank == 0 else attempt(again)
        if rank == 0:
            told[f"{name}: next"] = attempt(again)
    dispatch()
    told["after"] = attempt(lambda: comm.combine(torch.full((4, HIDDEN), 3.0, device=here())).tolist())
    return told


def wrong_first(comm: Any, rank: int) -> list[Any]:
    """What ranks are told of a layer's first dispatch, which is wrong on rank 1 alone, and what the next one brings."""
    import torch

    sizes = [2, 2] if rank == 0 else [2]
    told = attempt(lambda: comm.dispatch(**ones() | {"all_rank_num_tokens": sizes}))
    comm.dispatch(**ones())
    return [told, comm.combine(torch.full((4, HIDDEN), 3.0, device=here())).tolist()]


def statistics(comm: Any, rank: int) -> list[Any]:
    """What each rank gave beside a dispatch, in steps that are counted; and that the next one has none."""
    import torch

    mine = torch.arange(EXPERTS, dtype=torch.int32, device=here()) + 100 * rank
    before = steps()
    exchanged(comm, "float32", rank, eplb_local_stats=mine)
    found = [steps() - before, comm.get_eplb_gathered_statistics().tolist()]
    exchanged(comm, "float32", rank)
    found.append(comm.get_eplb_gathered_statistics())
    # What is found wrong only where it is gathered, behind the dispatch; no combine is to be made then, nor any lost.
    wrong = mine if rank == 0 else mine.to_sparse()
    found.append(attempt(lambda: comm.dispatch(**ones() | {"eplb_local_stats": wrong})))
    found.append(attempt(comm.combine, torch.zeros(4, HIDDEN, device=here())))
    return [*found, exchanged(comm, "float32", rank)]


def made_by_mpi(mpi: parts.Mpi, created: Any, rank: int) -> dict[str, Any]:
    """Two layers of ranks that meet by MPI, once; and what becomes of their group."""
    first, second = created(), created()
    found: dict[str, Any] = {"exchanged": [exchanged(comm, "float32", rank) for comm in (first, second)]}
    shared = first._exchange.shared
    first.destroy()
    found["with one left"] = shared.group is not None
    found["still"] = exchanged(second, "float32", rank)
    second.destroy()
    second.destroy()  # does nothing more
    found["with none"] = shared.group is not None
    found["anew"] = exchanged(second, "float32", rank)
    found["statistics"] = statistics(second, rank)
    second.destroy()
    return found | {"met": mpi.groups}


def rank_main(store: str) -> Any:
    from importlib import import_module

    import torch
    import torch.distributed as dist

    rank, _ = begin(store, 2)
    mpi, by_mpi = parts.Mpi(), []
    utilities = {"mpi_disabled": lambda: not by_mpi, "mpi_comm": lambda: mpi}
    parts.put(Path(f"{store}-packages-{rank}"), source=parts.checkout(), **utilities)
    factory = import_module(parts.place_of(parts.checkout())).CommunicationFactory
    from tokenway.integrations import groups, tensorrt_llm

    def created(dtype: str, method: str | None = None, most: int | None = MOST, **other: Any) -> Any:
        told = parts.config(parts.mapping(rank, dist.group.WORLD, **other), HIDDEN, getattr(torch, dtype), most)
        return factory.create_strategy(told, EXPERTS, EXPERTS, TOP_K, EXPERTS // 2, communication_method=method)

    found: dict[str, Any] = {"unknown": attempt(created, "float32", "TOKENWAY")}
    made = tensorrt_llm.register(timeout=PATIENT)
    assert tensorrt_llm.register() is made
    found["by its layer"] = type(created("float32", "tokenway")) is made
    (program,) = programs_of("TensorRT-LLM")
    exec(program, {})
    assert os.environ[parts.FORCE] == "TOKENWAY"
    # Of a model that says no size, so that the group grows for the cases.
    of = {dtype: created(dtype, most=None) for dtype in ("float32", "bfloat16")}
    found["by the environment"] = [type(comm) is made for comm in of.values()]
    found["without data parallelism"] = created("float32", enable_attention_dp=False)
    found["feasible"] = [created("float32").is_workload_feasible([1, most], 3) for most in (MOST, MOST + 1)]
    found["wrong first"] = [attempt(wrong_first, of["float32"], rank)]
    for case in CASES:
        before = steps()
        found[case] = exchanged(of[results(case)], case, rank) | {"steps": steps() - before}
    found["groups"] = [len(peers.groups) for peers in groups.living()]
    found["refused"] = refused(created("float32"))
    found["after"] = exchanged(of["float32"], "float32", rank)
    kept = factory.__dict__["_create_forced_method"]
    for mutation, (old, new, case) in MUTATIONS.items():
        mutated(tensorrt_llm, old, new).register(timeout=PATIENT)
        found[mutation] = attempt(exchanged, created(results(case)), case, rank)
        factory._create_forced_method = kept
    found["wrong alone"] = attempt(wrong_alone, created("float32"), rank, [2, 2 * MOST])
    found["wrong first"].append(attempt(wrong_first, created("float32"), rank))
    found["next passes"] = []
    for most in (MOST, 8 * MOST):  # of a layer whose first dispatch that is: the group has room for it, or grows
        layers = created("float32", most=most), created("float32")
        found["next passes"].append(attempt(by_source.next_pass, lambda comm: comm.dispatch(**ones()), *layers, rank))
    found["statistics"] = statistics(of["float32"], rank)
    by_mpi.append(True)
    found["mpi"] = made_by_mpi(mpi, partial(created, "float32"), rank)
    for ranks in [None, *tensorrt_llm._met.values()]:
        groups.close(ranks)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    need_devices()
    # Many parts, each of which may take its time; those that hang end by the timeouts within.
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("tensorrt-llm") / "store"), timeout=6 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(ran, case) -> None:
    """Received rows are by source, each token once, with all its slots; sums come back."""
    judge(case, [found[case] for found in ran])
    for found in ran:
        assert found[case]["steps"] == 2 and found[case]["dtype"] == f"torch.{results(case)}"


def test_how_it_is_chosen(ran) -> None:
    """By the environment, or by a layer; and only where TensorRT-LLM has a communication at all."""
    for found in ran:
        said(found["unknown"], "ValueError", "^Unknown communication method: TOKENWAY")
        assert found["by its layer"] and found["by the environment"] == [True, True]
        assert found["without data parallelism"] is None
        assert found["feasible"] == [True, False]


def test_one_group_serves_all(ran) -> None:
    """Layers of two dtypes, and rows of four kinds, of sizes that it grows for."""
    assert all(found["groups"] == [1] for found in ran)


def test_what_is_refused(ran) -> None:
    for found in ran:
        alone, twice, none_left = found["refused"]
        for told in (alone, none_left):
            said(told, "InvalidUsage", "a combine comes without a dispatch before it")
        said(twice, "InvalidUsage", "a dispatch follows another one without a combine")
    judge("float32", [found["after"] for found in ran])


def test_peers_hear_of_what_is_refused(ran) -> None:
    """At once, or they would be told of a timeout; and the next call is as ever."""
    first, second = (found["wrong alone"] for found in ran)
    wanted = {name: (result, sentence) for name, (_, result, sentence) in wrong_dispatches().items()}
    wanted |= {name: ("InvalidArgument", sentence) for name, (_, sentence) in WRONG_ROWS.items()}
    for name in ("left out", "left out, and larger"):
        wanted[name] = "InvalidUsage", "a dispatch follows another one without a combine"
        said(first[f"{name}: next"], "PeerRefused", "rank 1")  # the dispatch that rank 1 was refused
    for name, (result, sentence) in wanted.items():
        said(second[name], result, sentence)
        said(first[name], "PeerRefused", "rank 1")
    for told in (first, second):
        assert np.array_equal(told["after"], np.full((2, HIDDEN), 6.0))


def test_a_first_call_that_is_wrong(ran) -> None:
    """Of a process's first layer, and of one more: peers hear of it as of any other."""
    for layer in range(2):
        (first, after), (second, _) = (found["wrong first"][layer] for found in ran)
        said(second, "InvalidArgument", r"^all_rank_num_tokens is \[2\]; it must")
        said(first, "PeerRefused", "rank 1")
        assert after == ran[1]["wrong first"][layer][1] == [[6.0] * HIDDEN] * 2


def test_a_pass_that_begins_with_another_layer(ran) -> None:
    """Behind experts that raised: each layer has a communication of its own."""
    for layer in range(2):
        by_source.judge_next_pass([found["next passes"][layer] for found in ran])


@pytest.mark.parametrize("met", ["by a process group", "by MPI"])
def test_statistics(ran, met) -> None:
    """Those of all ranks, in one step more; none of a dispatch that had none. Wrong ones take the combine along."""
    mine = np.arange(EXPERTS)
    told = [found["statistics"] if met == "by a process group" else found["mpi"]["statistics"] for found in ran]
    for rank, (count, gathered, after, wrong, combine, _) in enumerate(told):
        assert count == 3 and np.array_equal(gathered, [mine, mine + 100]) and after is None
        said(wrong, *(("PeerRefused", "rank 1") if rank == 0 else ("InvalidArgument", "sparse")))
        said(combine, "InvalidUsage", "a combine comes without a dispatch before it")
    judge("float32", [each[-1] for each in told])


def test_ranks_of_mpi(ran) -> None:
    """They meet once; the last layer closes the group, and a further dispatch makes it anew."""
    told = [found["mpi"] for found in ran]
    for each in told:
        assert each["met"] == [[0, 1]] and each["with one left"] and not each["with none"]
    for name in ("still", "anew"):
        judge("float32", [each[name] for each in told])
    for layer in range(2):
        judge("float32", [each["exchanged"][layer] for each in told])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], partial(judge, MUTATIONS[mutation][2]))


# ---- its interface ---------------------------------------------------------------------------------


@pytest.fixture
def put(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`tensorrt_llm_parts.put` in this process, undone behind the test; tensorrt_llm is registered nowhere yet."""
    from tokenway.integrations import tensorrt_llm

    monkeypatch.setattr(tensorrt_llm, "_made", None)
    kept = parts.CommunicationFactory.__dict__["_create_forced_method"]
    found: list[parts.Parts] = []
    yield lambda *args: found.append(parts.put(tmp_path, *args)) or tensorrt_llm
    for each in found:
        parts.forget(each, tmp_path)
    parts.CommunicationFactory._create_forced_method = kept


def told(function: Any) -> list[Any]:
    """What a function takes: names, kinds and defaults."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_adapter_keeps_the_interface(torch: Any) -> None:
    """It takes what TensorRT-LLM's methods take."""
    from tokenway.integrations.tensorrt_llm import RowsBySource

    for name in [*parts.Communication.__abstractmethods__, "destroy", "get_eplb_gathered_statistics"]:
        assert told(getattr(RowsBySource, name)) == told(getattr(parts.Communication, name)), name


def test_the_record_is_the_interface(put: Any) -> None:
    """Of TensorRT-LLM's own files, where a checkout is named."""
    source = parts.checkout()
    if source is None:
        pytest.skip(f"{parts.SOURCE} does not name a checkout of TensorRT-LLM")
    put(None, source)
    package = __import__(parts.place_of(source), fromlist=["Communication"])
    assert package.Communication.__abstractmethods__ == parts.Communication.__abstractmethods__
    for record in (parts.Communication, parts.CommunicationFactory):
        real = getattr(package, record.__name__)
        for name in [name for name, each in vars(record).items() if inspect.isroutine(getattr(record, name))]:
            assert told(getattr(real, name)) == told(getattr(record, name)), name


@pytest.mark.parametrize("place", [parts.NEW, parts.OLD])
def test_what_a_layer_is_made_of(put: Any, place: str) -> None:
    """In both places where TensorRT-LLM may have it, the hidden size of the call goes before the model's."""
    import torch

    made = put(place).register()
    factory = parts.CommunicationFactory
    config = parts.config(parts.mapping(0, None), HIDDEN, torch.bfloat16, MOST)
    given = {"method": "tokenway", "model_config": config, "num_experts": 6, "top_k": 2, "expert_size_per_partition": 3}
    given |= dict.fromkeys(("payload_in_workspace", "alltoall_result_do_sum", "use_flashinfer"), False)
    for hidden in (None, 64):
        comm = factory._create_forced_method(num_slots=8, hidden_size=hidden, **given)
        assert type(comm) is made and issubclass(made, parts.Communication)
        assert (comm.num_slots, comm.top_k, comm.max_num_tokens) == (8, 2, MOST)
        assert comm._results == (torch.bfloat16, hidden or HIDDEN)
    result, sentence, _ = caught(partial(factory._create_forced_method, num_slots=7, **given))
    said((result, sentence), "twInvalidArgument", "^num_slots is 7; it must be a multiple of the 2 ranks")


def test_another_interface_is_refused(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is there, whatever its version says."""
    adapter = put()
    with monkeypatch.context() as changed:
        changed.setattr(parts.Communication, "__abstractmethods__", frozenset({"send", "dispatch"}))
        said(caught(adapter.register), "twUnsupported", "Communication asks for dispatch, send; this integration has")
    with monkeypatch.context() as changed:
        changed.setattr(parts.Communication.combine, "__signature__", inspect.signature(lambda self, rows: 0), False)
        said(caught(adapter.register), "twUnsupported", r"combine takes \(self, rows\); this integration is for")
    with monkeypatch.context() as changed:
        changed.setattr(parts.CommunicationFactory, "_create_forced_method", staticmethod(lambda method: 0))
        said(caught(adapter.register), "twUnsupported", r"_create_forced_method takes \(method\); this integration is")
    monkeypatch.setattr(adapter, "PLACES", tuple(f"tensorrt_llm._torch.gone.{place[-4:]}" for place in adapter.PLACES))
    monkeypatch.setattr(parts.Parts, "find_spec", lambda *_: None)
    said(caught(adapter.register), "twUnsupported", "^tensorrt-llm has neither tensorrt_llm._torch.gone")
