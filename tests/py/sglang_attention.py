"""SGLang's data-parallel attention, unchanged: its uneven gathers and reduce-scatters by Tokenway's plugin."""

from __future__ import annotations

import importlib
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from deep_ep_ranks import array
from frameworks import attempt, here, mutated, steps
from harness import AT_ONCE, said

HIDDEN = 24
# name: (tokens of each rank, dtype)
CASES: dict[str, tuple[tuple[int, int], str]] = {
    "uneven": ((3, 1), "float32"),
    "bfloat16": ((2, 5), "bfloat16"),
    "a rank without tokens": ((0, 4), "bfloat16"),
    "no tokens": ((0, 0), "bfloat16"),
    "equal": ((5, 5), "float32"),
    "more than there is room for": ((1, 300), "bfloat16"),
}
# name: (text of sglang.py, what a later hand may make of it)
MUTATIONS = {
    "a row off by one": ("all_gatherv(rows, sizes, out)", "all_gatherv([x.roll(1, 0) for x in rows], sizes, out)"),
    "sums 2 % off": ("reduce_scatterv([input_], sizes, out)", "reduce_scatterv([input_ * 1.02], sizes, out)"),
    "off by one rank": ("reduce_scatterv([input_], ", "reduce_scatterv([input_.roll(len(input_) // 2, 0)], "),
}


def coordinator(rank: int) -> Any:
    """SGLang's group of all ranks, without NCCL."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    without = ("pynccl", "mscclpp", "custom_allreduce", "torch_symm_mem_all_reduce", "hpu_communicator")
    options = {f"use_{name}": False for name in (*without, "xpu_communicator")}
    return GroupCoordinator([[0, 1]], rank, "gloo" if here().type == "cpu" else "nccl", group_name="tp", **options)


def data_parallel(group: Any, rank: int, sizes: tuple[int, int]) -> ExitStack:
    """As SGLang runs a step in which each rank has requests of its own, not filled up."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.runtime_context import get_parallel

    stack = ExitStack()
    widths = {"tp_size": 2, "attn_dp_size": 2, "attn_tp_size": 1, "attn_cp_size": 1, "moe_ep_size": 2}
    ranks = {"tp_rank": rank, "attn_dp_rank": rank, "attn_tp_rank": 0}
    stack.enter_context(get_parallel().override(tp_group=group, **widths, **ranks))
    dp_attention.set_dp_buffer_len(sum(sizes), sizes[rank], False, list(sizes))
    return stack


def tokens_of(name: str, rank: int) -> Any:
    import torch

    sizes, dtype = CASES[name]
    rng = torch.Generator().manual_seed(sum(name.encode()) + rank)
    return torch.randn(sizes[rank], HIDDEN, generator=rng).to(getattr(torch, dtype))


def run_case(group: Any, name: str, rank: int) -> dict[str, Any]:
    """What SGLang's own functions bring, and what an all-reduce and a slice do."""
    import torch
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.layer_boundary import ops

    sizes, dtype = CASES[name]
    step = SimpleNamespace(dp_padding_mode=dp_attention.DpPaddingMode.SUM_LEN, global_num_tokens_cpu=list(sizes))
    mine, before = tokens_of(name, rank).to(here()), steps()
    with data_parallel(group, rank, sizes):
        everyone = mine.new_full((sum(sizes), HIDDEN), 7)
        dp_attention.dp_gather_partial(everyone, mine, step)
        partial = everyone * (rank + 1) + torch.arange(sum(sizes)).to(mine)[:, None]
        out, other = mine.new_full(mine.shape, 7), mine.new_full(mine.shape, 7)
        dp_attention.dp_reduce_scatter_tensor(out, partial)
        ops.dp_reduce_scatterv(other, partial, step)
        numbers = torch.arange(sizes[rank], device=here()) + 1000 * rank
        several = group.all_gatherv([mine, numbers], sizes=list(sizes))
    found = {"steps": steps() - before, "everyone": array(everyone), "out": array(out), "other": array(other)}
    found |= {"rows": array(several[0]), "numbers": several[1].tolist()}
    total = partial.float()  # gloo would round after each addition
    torch.distributed.all_reduce(total)
    begin = sum(sizes[:rank])
    return found | {"wanted": array(total[begin : begin + sizes[rank]].to(getattr(torch, dtype)))}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    sizes, _ = CASES[name]
    everyone = np.concatenate([array(tokens_of(name, rank)) for rank in range(2)])
    for found in ranks:
        assert isinstance(found, dict), found
        assert found["steps"] == 4
        assert np.array_equal(found["everyone"], everyone) and np.array_equal(found["rows"], everyone)
        assert found["numbers"] == [1000 * rank + place for rank in range(2) for place in range(sizes[rank])]
        assert np.array_equal(found["out"], found["wanted"]) and np.array_equal(found["other"], found["wanted"])


def mutant(group: Any, name: str, rank: int) -> Any:
    """A case through hooks whose source says something else."""
    from tokenway.integrations import sglang

    made = mutated(sglang, *MUTATIONS[name])

    def hooked(hook: Any) -> Any:
        return lambda *args, **kwargs: hook(None, *args, **kwargs)

    with (
        patch.object(type(group), "all_gatherv", hooked(made._all_gatherv)),
        patch.object(type(group), "reduce_scatterv", hooked(made._reduce_scatterv)),
    ):
        return attempt(run_case, group, "uneven", rank)


def refused(group: Any, rank: int) -> list[Any]:
    """Rows that are not as many as the sizes say, on rank 1: what each rank is told, and after how long."""
    mine = tokens_of("uneven", rank).to(here())
    wrong = mine[:0] if rank else mine
    found = []
    for call, rows in ((group.all_gatherv, wrong), (group.reduce_scatterv, mine.new_zeros(4 + rank, HIDDEN))):
        began = time.monotonic()
        found.append((attempt(lambda call=call, rows=rows: call(rows, sizes=[3, 1])), time.monotonic() - began))
    return found


def deterministic(group: Any, rank: int) -> Any:
    """With deterministic inference SGLang's own way, by an all-reduce: its sums, and Tokenway's steps."""
    import torch
    from sglang.srt.environ import envs

    before = steps()
    with envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.override(True):
        out = group.reduce_scatterv(torch.ones(4, HIDDEN, device=here()), sizes=[3, 1])
    return array(out), steps() - before


def run(rank: int) -> dict[str, Any]:
    """What a rank has found, under names that begin with "attention"."""
    importlib.import_module("sglang.srt.layers.layer_boundary.ops")
    group = coordinator(rank)
    found: dict[str, Any] = {name: attempt(run_case, group, name, rank) for name in CASES}
    found |= {name: mutant(group, name, rank) for name in MUTATIONS}
    found["refused"] = attempt(refused, group, rank)
    found["after"] = attempt(run_case, group, "uneven", rank)
    found["deterministic"] = attempt(deterministic, group, rank)
    return {f"attention: {name}": each for name, each in found.items()}


def judge_refused(ranks: list[Any]) -> None:
    for (first, took), (second, _) in zip(*ranks, strict=True):
        said(second, "InvalidArgument", r"^rows has shape \[\d, 24\]; by sizes it must be a tensor of [14] rows")
        said(first, "PeerRefused", "rank 1")
        assert took < AT_ONCE
