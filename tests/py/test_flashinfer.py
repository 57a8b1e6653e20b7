"""FlashInfer's communication through Tokenway: its contract, kept by two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import by_source
import numpy as np
import pytest
from by_source import EXPERTS, HIDDEN, MOST, TOP_K, Case, answered, batch, sent
from frameworks import assert_caught, begin, here, mutated, need_devices, need_version, on_devices, programs_of, steps
from harness import HANGS, PATIENT, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PINNED = "0.7.2.post1"
INVALID = 77
CASES = {
    "float32": Case((5, 3), "float32"),
    "bfloat16": Case((8, 8), "bfloat16", bound=8, ids="int64"),
    "a bound": Case((2, 4), "bfloat16", bound=4),
    "no tokens": Case((0, 3), "bfloat16", bound=3),
    "none at all": Case((0, 0), "bfloat16", bound=1),
    "no weights": Case((3, 1), "float32", weights="", ids="int64"),
    "fp8 and scales": Case((4, 6), "float8_e4m3fn", ("float32", 2)),
    "packed nvfp4": Case((4, 6), "uint8", ("float8_e4m3fn", 2)),
}


def exchanged(comm: Any, name: str, rank: int) -> dict[str, Any]:
    """What a rank receives, and what it gets back."""
    case = CASES[name]
    values, ids, weights, scales = sent(case, rank)
    came = comm.dispatch(values, ids, weights, hidden_states_scale=scales, max_tokens_per_rank=case.bound)
    flat = came.hidden_states, came.topk_ids, came.topk_weights, came.hidden_states_scale
    found, made = answered(case, rank, flat, INVALID, comm.params.token_dtype)
    out = comm.combine(made if name != "a bound" else made.view(2, came.tokens_per_rank, HIDDEN))
    buffer = comm.get_combine_input_buffer(made.dtype)
    return found | {"out": out.float().cpu().numpy(), "buffer": buffer, "bound": came.tokens_per_rank}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    bound = MOST if case.bound is None else case.bound
    assert all(found["buffer"] is None and found["bound"] == bound for found in ranks)
    by_source.judge(case, ranks, bound, INVALID, "torch.float32" if case.weights else None)


# name: (text of a file, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ("received.tokens.flatten(0, 1)", "received.tokens.flatten(0, 1).roll(1, 0)", "bfloat16"),
    "weights 2 % off": ("received.weights.flatten(0, 1)", "received.weights.flatten(0, 1) * 1.02", "float32"),
    "ids off by one rank": (
        "given = hidden_states, topk_ids,",
        "given = hidden_states, (topk_ids + 3) % 6 * (topk_ids >= 0) - 1 * (topk_ids < 0),",
        "no weights",
    ),
    "ids of this rank": ('id_space="global"', 'id_space="local"', "float32"),
    "no bound": ("hidden_states_scale, max_tokens_per_rank\n", "hidden_states_scale, None\n", "a bound"),
}


def mutant(old: str, new: str) -> Any:
    """The adapter whose source says `new` where it says `old`."""
    from tokenway.integrations import flashinfer

    return mutated(flashinfer, old, new)


def attempt(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__, str(error)


def ones() -> tuple[Any, Any, Any]:
    """(rows, ids, weights) of two tokens."""
    import torch

    given = torch.ones(2, HIDDEN), torch.tensor([[0, 1, 5]] * 2), torch.ones(2, TOP_K)
    return tuple(each.to(here()) for each in given)  # type: ignore[return-value]


def dispatched(comm: Any) -> None:
    """Two tokens of each rank, which is all that any has."""
    comm.dispatch(*ones(), max_tokens_per_rank=2)


def statistics(comm: Any, rank: int) -> list[Any]:
    """What ranks are told of each other's loads beside three dispatches, of which the second has none."""
    import torch

    told = []
    for turn, dtype in enumerate((torch.int32, None, torch.float32)):
        mine = None if dtype is None else torch.arange(5, device=here()).to(dtype) + 10 * rank + turn
        came = comm.dispatch(*ones(), max_tokens_per_rank=2, eplb_local_stats=mine)
        gathered = came.eplb_gathered_stats
        told.append(None if gathered is None else (str(gathered.dtype), gathered.tolist()))
        told.append(float(comm.combine(came.hidden_states).sum()))
    return told


def refused(comm: Any) -> list[Any]:
    """What ranks are told of calls that are wrong on both; after each of them the right ones go on."""
    import torch

    x, ids, weights = ones()
    rows = torch.zeros(2 * MOST, HIDDEN, device=here())
    told = [attempt(comm.combine, rows)]
    comm.dispatch(x, ids, weights)
    told.append(attempt(comm.dispatch, x, ids, weights))
    told.append(attempt(comm.combine, rows))
    told.append(attempt(lambda: comm.dispatch(x, ids, weights, eplb_local_stats=x)))
    return told


# name: what rank 1 gives to a dispatch in place of what is right, and what it is told
WRONG_DISPATCHES: dict[str, tuple[Any, str, str]] = {
    "ids": (lambda x, ids, scales: {"ids": ids + 10}, "InvalidArgument", r"ids\[0, 0\]"),
    "bound": (lambda x, ids, scales: {"bound": 9}, "InvalidArgument", "^bound is 9; it must be from 1 to 8"),
    "tokens": (lambda x, ids, scales: {"x": x[0]}, "InvalidArgument", r"^tokens has shape \[32\]; it must have two"),
    "scales": (lambda x, ids, scales: {"scales": scales[0]}, "InvalidArgument", r"^scales has shape \[3\]; it must"),
    "dtype": (lambda x, ids, scales: {"x": x + 0j}, "InvalidArgument", "complex64"),
    "statistics": (lambda x, ids, scales: {"stats": x}, "InvalidArgument", r"^eplb_local_stats has shape \[2, 32\]"),
}
# ... and to a combine
WRONG_ROWS: dict[str, tuple[tuple[int, ...], str]] = {
    "rows": ((3, HIDDEN), "rows"),
    "width": ((8, HIDDEN // 2), r"^rows has shape \[8, 16\]; it must be \[N, b, 32\] or"),  # as many elements
    "dimensions": ((4 * HIDDEN,), r"^rows has shape \[128\]; it must be \[N, b, 32\] or"),
}


def wrong_dispatches() -> dict[str, tuple[Any, str, str]]:
    """Those that are refused: devices read ids themselves, where ids of no expert are nobody's."""
    return {name: case for name, case in WRONG_DISPATCHES.items() if name != "ids" or not on_devices()}


def wrong_alone(comm: Any, rank: int) -> dict[str, Any]:
    """What ranks are told where rank 1 alone calls wrongly, or leaves a combine out as experts raise."""
    import torch

    x, ids, weights = ones()

    def dispatch(x: Any = x, ids: Any = ids, scales: Any = None, bound: Any = 2, stats: Any = None) -> None:
        given = {"hidden_states_scale": scales, "max_tokens_per_rank": bound, "eplb_local_stats": stats}
        comm.dispatch(x, ids, weights, **given)

    told: dict[str, Any] = {}
    for name, (wrong, *_) in wrong_dispatches().items():
        given = {"scales": torch.ones(2, 3, device=here())}
        given |= wrong(x, ids, given["scales"]) if rank == 1 else {}
        told[name] = attempt(partial(dispatch, **given))
    for name, (shape, _) in WRONG_ROWS.items():
        dispatch()
        told[name] = attempt(comm.combine, torch.zeros((4, HIDDEN) if rank == 0 else shape, device=here()))
    dispatch()
    told["left out"] = attempt(comm.combine, torch.zeros(4, HIDDEN, device=here())) if rank == 0 else attempt(dispatch)
    if rank == 0:
        told["next"] = attempt(dispatch)
    dispatch()
    columns = torch.arange(HIDDEN, device=here()).float()[None, :, None].repeat(2, 1, 2)
    told["not contiguous"] = attempt(lambda: comm.combine(columns.transpose(1, 2)).tolist())
    return told


def misplaced(create: Any, rank: int) -> list[Any]:
    """What ranks are told of bootstraps that are not of the process group's ranks."""
    import torch.distributed as dist
    from flashinfer.moe_ep import BootstrapConfig

    alone = [dist.new_group([each]) for each in range(2)][rank]
    wrong = [
        BootstrapConfig(world_size=1, rank=0),  # of two pairs of ranks, say
        BootstrapConfig(world_size=2, rank=1 - rank),
        BootstrapConfig(world_size=2, rank=rank, process_group=alone),
        BootstrapConfig(world_size=2, rank=rank, nccl_comm=7),
    ]
    return [attempt(lambda given: repr(create(given)), each) for each in wrong]


def rank_main(store: str) -> Any:
    import torch
    import torch.distributed as dist
    from flashinfer.moe_ep import (
        BootstrapConfig,
        MoEEpCommParams,
        available_communication_backends,
        create_communication,
    )

    from tokenway.integrations import flashinfer, groups

    rank, device = begin(store, 2)
    bootstrap = BootstrapConfig(world_size=2, rank=rank)

    def created(adapter: Any, dtype: torch.dtype, name: str = "tokenway", given: Any = bootstrap) -> Any:
        adapter.register(name)
        params = MoEEpCommParams(EXPERTS, TOP_K, MOST, HIDDEN, dtype, invalid_expert_id=INVALID)
        return create_communication(given, params, name, timeout=PATIENT)

    of = {dtype: created(flashinfer, getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    found: dict[str, Any] = {"backends": available_communication_backends()}
    for case, told in CASES.items():
        before = steps()
        found[case] = exchanged(of.get(told.dtype, of["bfloat16"]), case, rank) | {"steps": steps() - before}
    found["groups"] = [len(peers.groups) for peers in groups.living()]
    names: dict[str, Any] = {}
    (program,) = programs_of("FlashInfer")
    exec(program, names)
    of_guide = names["step"](bootstrap, *(torch.from_numpy(x).to(device) for x in batch(CASES["float32"], rank)))
    found["guide"] = of_guide.float().cpu().numpy()
    found["misplaced"] = misplaced(lambda given: created(flashinfer, torch.float32, given=given), rank)
    found["refused"] = refused(of["float32"])
    found["after"] = exchanged(of["float32"], "float32", rank)
    found["statistics"] = attempt(statistics, of["float32"], rank)
    for mutation, (old, new, case) in MUTATIONS.items():
        comm = created(mutant(old, new), getattr(torch, CASES[case].dtype), "mutant")
        found[mutation] = attempt(exchanged, comm, case, rank)
    found["wrong alone"] = attempt(wrong_alone, of["float32"], rank)
    layers = [created(flashinfer, torch.float32) for _ in range(2)]
    found["next pass"] = attempt(by_source.next_pass, dispatched, *layers, rank)
    for comm in of.values():
        comm.destroy()
    groups.close()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    need_version("flashinfer-python", PINNED)
    need_devices()
    # Many parts, each of which may take its time; those that hang end by the timeouts within.
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("flashinfer") / "store"), timeout=6 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(ran, case) -> None:
    """Received rows are by source, each token once, with all its ids; sums come back."""
    judge(case, [found[case] for found in ran])
    assert all(found[case]["steps"] == 2 for found in ran)


def test_one_group_serves_all(ran) -> None:
    """Two communications, of two dtypes, and rows of four kinds."""
    for found in ran:
        assert found["groups"] == [1]
        assert "tokenway" in found["backends"]


def test_statistics(ran) -> None:
    """Those of each rank come to all, of any dtype, in the order of ranks; the rows come as ever."""
    for found in ran:
        first, out, none, again, third, last = found["statistics"]
        assert first == ("torch.int32", [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]])
        assert none is None and third == ("torch.float32", [[2, 3, 4, 5, 6], [12, 13, 14, 15, 16]])
        assert out == again == last == 2 * 2 * HIDDEN  # two tokens, each of which goes to both ranks


def test_the_guide(ran) -> None:
    """Its program, whose experts double what they get."""
    for rank, found in enumerate(ran):
        rows, ids, weights = batch(CASES["float32"], rank)
        assert np.array_equal(found["guide"], 2 * rows * np.where(ids >= 0, weights, 0).sum(1, keepdims=True))


def test_what_is_refused(ran) -> None:
    for found in ran:
        alone, twice, none_left, stats = found["refused"]
        for told in (alone, none_left):
            said(told, "InvalidUsage", "a combine comes without a dispatch before it")
        said(twice, "InvalidUsage", "a dispatch follows another one without a combine")
        said(stats, "InvalidArgument", r"^eplb_local_stats has shape \[2, 32\]; it must be \[S\]")
    judge("float32", [found["after"] for found in ran])


def test_peers_hear_of_what_is_refused(ran) -> None:
    """At once, or they would be told of a timeout; and the next call is as ever."""
    first, second = (found["wrong alone"] for found in ran)
    wanted = {name: (result, sentence) for name, (_, result, sentence) in wrong_dispatches().items()}
    wanted |= {name: ("InvalidArgument", sentence) for name, (_, sentence) in WRONG_ROWS.items()}
    wanted["left out"] = "InvalidUsage", "a dispatch follows another one without a combine"
    for name, (result, sentence) in wanted.items():
        said(second[name], result, sentence)
        said(first[name], "PeerRefused", "rank 1")
    said(first["next"], "PeerRefused", "rank 1")  # the dispatch that rank 1 was refused
    for told in (first, second):
        assert told["not contiguous"] == [[2.0 * h for h in range(HIDDEN)]] * 2


def test_a_pass_that_begins_with_another_layer(ran) -> None:
    """Behind experts that raised: its communication is another one over the same group."""
    by_source.judge_next_pass([found["next pass"] for found in ran])


def test_ranks_of_another_process_group_are_refused(ran) -> None:
    """Before anything is sent: rows would go to wrong ranks."""
    for rank, found in enumerate(ran):
        fewer, other, alone, adopted = found["misplaced"]
        of_all = "that of the default process group"
        said(fewer, "InvalidArgument", f"^bootstrap.world_size is 1; it must be 2, {of_all}")
        said(other, "InvalidArgument", f"^bootstrap.rank is {1 - rank}; it must be {rank}, {of_all}")
        said(alone, "InvalidArgument", "^bootstrap.world_size is 2; it must be 1, that of its process_group")
        said(adopted, "InvalidArgument", "^bootstrap.nccl_comm is 7, without a process_group; it must be None")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], partial(judge, MUTATIONS[mutation][2]))
