"""What the tests of Megatron's layers have in common: a layer that two ranks share, and Megatron's own on one."""

from __future__ import annotations

import time
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from frameworks import attempt, begin, here, mutated, need_devices, need_version, steps, whole, within
from harness import AT_ONCE, HANGS, PATIENT, said

import tokenway as tw

PINNED = "0.16.1"
EXPERTS, TOP_K, HIDDEN, MOST = 4, 2, 16, 24
# As far as products of other numbers of rows, and sums over experts in another order, differ in float32.
CLOSE = 2e-5


@dataclass(frozen=True)
class Case:
    """A layer's settings and what comes to it."""

    settings: dict[str, Any] = field(default_factory=dict)  # of Megatron
    said: dict[str, Any] = field(default_factory=dict)  # to through_tokenway
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((5, 2), (5, 2))  # sequence length and batch of each rank
    own: dict[str, Any] = field(default_factory=dict)  # of Megatron on one rank, where they are others
    unchosen: bool = False  # tokens are positive, and nobody chooses rank 0's experts
    rows: int | None = None  # that each expert is given, where Megatron's own is given others
    steps: int = 4  # of Tokenway, forward and backward


class Stream:
    """A stream of a machine without devices: all that is given to it is done at once."""

    def __init__(self) -> None:
        self.device_index = self.idx = -1

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""


def begin_megatron(store: str, blocking: bool = True) -> tuple[int, Any]:
    """(rank, process groups of this rank alone), with experts shared by the two ranks. On the CPU it has streams that
    are none, since Megatron's all-to-all dispatcher and its shared experts make some."""
    import torch

    rank, device = begin(store, 2, blocking)
    if device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # where Megatron's router has its parameters: on the current device
        only = Stream()
        torch.cuda.Stream, torch.cuda.current_stream = Stream, lambda *_: only
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a name that it looks up, and has only with Transformer Engine
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    return rank, alone()


def config_of(ranks: int, **settings: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 24,
        "moe_ffn_hidden_size": 24,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": ranks,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**(made | settings))


def spec_of(adapter: Any = None, **settings: Any) -> Any:
    """Of an MoELayer: Megatron's, or one that goes through Tokenway."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    return spec if adapter is None else adapter.through_tokenway(spec, timeout=PATIENT, **settings)


def alone() -> Any:
    """Process groups of this rank alone."""
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    mine = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    names = ("ep", "tp", "cp", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
    groups = ProcessGroupCollection()
    for name in names:
        setattr(groups, name, mine)
    return groups


def weigh(layer: Any, first: int, unchosen: bool = False) -> None:
    """Sets parameters by an expert's number, so that ranks agree; they are drawn on the CPU."""
    import torch

    def draw(parameter: Any, seed: int, scale: float = 0.5) -> None:
        rng = torch.Generator().manual_seed(seed)
        parameter.copy_(torch.randn(parameter.shape, generator=rng) * scale)

    with torch.no_grad():
        draw(layer.router.weight, 1, 1.0)
        if unchosen:  # tokens are positive, so nobody chooses its experts
            layer.router.weight[:2] = -1
            layer.router.weight[2:].abs_()
        for number, expert in enumerate(layer.experts.local_experts, first):
            rng = torch.Generator().manual_seed(10 + number)
            for linear in (expert.linear_fc1, expert.linear_fc2):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=rng) * 0.5)
        for number, parameter in enumerate(shared_of(layer)):
            draw(parameter, 5 + number)


def shared_of(layer: Any) -> list[Any]:
    """The parameters of its shared experts."""
    return [] if layer.shared_experts is None else list(layer.shared_experts.parameters())


def batch(case: Case, rank: int, turn: int = 0) -> Any:
    import torch

    length, sequences = case.sizes[rank]
    rng = torch.Generator().manual_seed(20 + rank + 100 * turn)
    x = torch.randn(length, sequences, case.settings.get("hidden_size", HIDDEN), generator=rng)
    return x.abs() if case.unchosen else x


def trained(layer: Any, x: Any) -> dict[str, Any]:
    """Output, gradients of what a rank holds of its own, and how many rows each expert was given."""
    import torch

    x, rows = x.clone().requires_grad_(), []
    layer.zero_grad()
    hook = layer.experts.register_forward_pre_hook(lambda _, args: rows.append(args[1].cpu().numpy().copy()))
    out, bias = layer(x)
    hook.remove()
    assert bias is None
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum().backward()
    (of_experts,) = rows
    found = {"out": whole(out), "x": whole(x.grad), "router": whole(layer.router.weight.grad), "rows": of_experts}
    return found | {f"shared {number}": whole(p.grad) for number, p in enumerate(shared_of(layer))}


def gradients_of(layer: Any) -> list[Any]:
    return [
        np.zeros(tuple(p.shape), np.float32) if p.grad is None else whole(p.grad)
        for expert in layer.experts.local_experts
        for p in (expert.linear_fc1.weight, expert.linear_fc2.weight)
    ]


def take_none(layer: Any) -> Any:
    """A layer whose router takes no tokens too: Megatron's own product of none cannot tell its shape."""
    import torch

    layer.router.gating = lambda x: torch.nn.functional.linear(x, layer.router.weight)
    return layer


def layer_of(adapter: Any, case: Case, rank: int) -> Any:
    """Through Tokenway, its experts shared by both ranks."""
    layer = spec_of(adapter, **case.said)(config=config_of(2, **case.settings), layer_number=1).to(here())
    weigh(layer, 2 * rank, case.unchosen)
    return take_none(layer) if (0, 2) in case.sizes else layer


def own_layer(of_one: Any, case: Case) -> Any:
    """Megatron's, with all experts on this rank."""
    config = config_of(1, **(case.settings | case.own))
    own = spec_of()(config=config, layer_number=1, pg_collection=of_one).to(here())
    weigh(own, 0, case.unchosen)
    own = quantised_rows(own) if case.said.get("fp8_rows") else own
    return take_none(own) if (0, 2) in case.sizes else own


def quantised_rows(own: Any) -> Any:
    """Megatron's own layer, whose experts are given what quantising leaves of their rows."""
    import torch

    class Quantised(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any) -> Any:
            return tw.dequantize_fp8(*tw.quantize_fp8(rows)).to(rows.dtype)

        @staticmethod
        def backward(ctx: Any, rows: Any) -> Any:
            return rows

    kept = own.experts.forward
    own.experts.forward = lambda rows, *told: kept(Quantised.apply(rows), *told)
    return own


def wanted_of(of_one: Any, case: Case, rank: int, turn: int = 0) -> dict[str, Any]:
    """What this rank must find: by Megatron's own layer, which sees both batches."""
    own = own_layer(of_one, case)
    every, wanted, rows = [], {}, 0
    for source in range(2):
        each = trained(own, batch(case, source, turn).to(here()))
        every.append(gradients_of(own)[4 * rank : 4 * rank + 4])
        rows = rows + each["rows"][2 * rank : 2 * rank + 2]
        wanted = each if source == rank else wanted
    rows = rows if case.rows is None else np.full_like(rows, case.rows)
    return wanted | {"rows": rows, "experts": [sum(pair) for pair in zip(*every, strict=True)]}


def run_case(adapter: Any, of_one: Any, case: Case, rank: int) -> dict[str, Any]:
    """A layer on both ranks, forward and backward, then forward without gradients; and Megatron's own on this one."""
    import torch

    layer, x = layer_of(adapter, case, rank), batch(case, rank).to(here())
    before = steps()
    found = trained(layer, x)
    found["experts"], found["steps"] = gradients_of(layer), steps() - before
    with torch.no_grad():
        found["inferred"] = whole(layer(x)[0])
    wanted = wanted_of(of_one, case, rank)
    wanted |= {"steps": case.steps, "inferred": wanted["out"]}
    return {"found": found, "wanted": wanted, "dispatcher": type(layer.token_dispatcher).__name__}


def judge(ranks: list[dict[str, Any]], dispatcher: str = "Dispatcher") -> None:
    for each in ranks:
        assert isinstance(each, dict), each
        found, wanted = each["found"], each["wanted"]
        assert found.keys() == wanted.keys()
        assert np.array_equal(found["rows"], wanted["rows"])
        assert found["steps"] == wanted["steps"] and each["dispatcher"] == dispatcher
        for name in found.keys() - {"rows", "steps", "experts"}:
            close(found[name], wanted[name])
        for one, other in zip(found["experts"], wanted["experts"], strict=True):
            close(one, other)


def close(found: Any, wanted: Any, within_one: float = CLOSE) -> None:
    assert found.shape == wanted.shape and np.isfinite(found).all()
    assert np.abs(found - wanted).max(initial=0) <= within(within_one) * max(np.abs(wanted).max(initial=0), 1e-3)


def timed(function: Any, *args: Any) -> Any:
    """What a call returns or raises, and how many seconds it took."""
    began = time.monotonic()
    told = attempt(function, *args)
    return told, time.monotonic() - began


def mutant(old: str, new: str) -> Any:
    """What `through_tokenway` is of the adapter whose layer's source says `new` where it says `old`."""
    from tokenway.integrations import megatron, megatron_layer

    made = mutated(megatron_layer, old, new)

    def through_tokenway(spec: Any, **settings: Any) -> Any:
        spec = megatron.through_tokenway(spec, **settings)
        spec.module = made.TokenwayMoELayer
        return spec

    return types.SimpleNamespace(through_tokenway=through_tokenway)


def two_ranks(rank_main: Any, folders: Any, name: str) -> list[dict[str, Any]]:
    """What each of two processes has found, or a skip. folders: pytest's tmp_path_factory."""
    need_version("megatron-core", PINNED)
    need_devices()
    # Many parts, each of which may take its time; those that hang end by the timeouts within.
    return tw.run(rank_main, 2, str(folders.mktemp(name) / "store"), timeout=6 * HANGS)


def finish(found: dict[str, Any], mutations: dict[str, Any], run: Any) -> dict[str, Any]:
    """Adds what a rank's run gives with each mutation, and ends the rank. mutations: (old text, new text, what `run`
    takes beside the adapter)."""
    import torch.distributed as dist

    for mutation, (old, new, *more) in mutations.items():
        found[mutation] = attempt(run, mutant(old, new), *more)
    dist.barrier()
    dist.destroy_process_group()
    return found


def failing(adapter: Any, case: Case, rank: int, experts: Any) -> Any:
    """Rank 1's experts do something else: what each is told, and how long it took."""
    layer = layer_of(adapter, case, rank)
    kept = layer.experts.forward
    layer.experts.forward = kept if rank == 0 else lambda *args: experts(kept, *args)
    return timed(trained, layer, batch(case, rank).to(here()))


def judge_failure(ran: list[dict[str, Any]], name: str, result: str, sentence: str) -> None:
    """Rank 1 was told what failed, its peer so at once, and the next pass was right."""
    (first, took), (second, _) = (found[name] for found in ran)
    said(second, result, sentence)
    said(first, "PeerRefused", "rank 1")
    assert took < AT_ONCE
    judge([found["after"] for found in ran])
