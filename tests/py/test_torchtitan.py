"""torchtitan's MoE layer whose experts two ranks share through Tokenway's override, against its own on one rank.

`make test-frameworks` has its packages. Triton is not among them: one of torchtitan's dispatchers, which is not used
here, holds kernels for it, and the test puts a module without any in their place."""

from __future__ import annotations

import sys
import time
import types
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from frameworks import GUIDE, assert_caught, attempt, begin, framework_apart, here, mutated, programs_of, steps, within
from harness import AT_ONCE, HANGS, PATIENT, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PINNED = "0.3.0"
TARGET = "tokenway.integrations.torchtitan.dispatcher"
EXPERTS, HIDDEN = 4, 16
# Experts compute in bfloat16, whatever tokens are. Each row by itself, so only the order of float32 sums differs in
# what belongs to a token; but a sum over an expert's rows, the gradient of its weights, is rounded to 8 bits.
CLOSE, ROUNDED = 1e-4, 2e-2
# name: settings of the override; top_k; sequences of a rank, and their length; what the router does; dtype; backend of
# torchtitan's for distributed tensors; activation checkpoints; steps of Tokenway's
EQUAL: dict[str, Any] = {
    "settings": {},
    "top_k": 2,
    "batch": (2, 5),
    "router": "uneven",
    "dtype": "float32",
    "backend": "partial_dtensor",
    "checkpoint": None,
    "steps": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "equal": EQUAL,
    "more tokens than before": EQUAL | {"batch": (2, 300)},
    "said before": EQUAL | {"settings": {"max_tokens": 64}, "batch": (1, 3)},
    "aligned rows": EQUAL | {"settings": {"row_alignment": 8}},
    "an expert nobody chooses": EQUAL | {"router": "not the first"},
    "all to one expert": EQUAL | {"router": "the last", "top_k": 1},
    "all to rank 0": EQUAL | {"router": "not the last two"},
    "bfloat16": EQUAL | {"dtype": "bfloat16"},
    "spmd_types": EQUAL | {"backend": "spmd_types"},
    "checkpoints": EQUAL | {"checkpoint": "full", "steps": 6},
    "selective checkpoints": EQUAL | {"checkpoint": "selective", "steps": 6},
}


def config_of(case: dict[str, Any]) -> Any:
    """Of torchtitan's MoE, with its dispatcher by all-to-all, and what it shards where."""
    import spmd_types
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    top_k = case["top_k"]
    experts = make_routed_experts_config(
        dim=HIDDEN, hidden_dim=24, num_experts=EXPERTS, top_k=top_k, param_init={}, comm_backend="standard"
    )
    gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=top_k, route_norm=top_k > 1)
    config = MoE.Config(num_experts=EXPERTS, routed_experts=experts, router=router)
    layout = {"w1_EFD": spmd_types.S(1), "w2_EDF": spmd_types.S(2), "w3_EFD": spmd_types.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    return config


def override(config: Any, settings: dict[str, Any]) -> Any:
    """As the command line does it."""
    import json

    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

    settings = {"timeout": PATIENT, **settings}
    (line,) = apply_overrides(OverrideConfig(imports=parse_cli_imports([f"{TARGET}={json.dumps(settings)}"])), config)
    assert "routed_experts.token_dispatcher AllToAllTokenDispatcher.Config -> TokenwayTokenDispatcher.Config" in line
    return config


def built(case: dict[str, Any], config: Any) -> Any:
    """A layer with its parameters, the same on all ranks, not parallel yet."""
    import torch

    layer = config.build()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
        layer.tokens_per_expert_E.zero_()
        gate = layer.router.gate.weight
        out = {"not the first": [0], "the last": [0, 1, 2], "not the last two": [2, 3]}.get(case["router"])
        if out is not None:  # tokens are positive, so nobody chooses these
            gate.abs_()
            gate[out] = -1
    return layer.to(here(), getattr(torch, case["dtype"]))


def batch(case: dict[str, Any], rank: int) -> Any:
    import torch

    x = torch.randn(*case["batch"], HIDDEN, generator=torch.Generator().manual_seed(20 + rank))
    x = x if case["router"] == "uneven" else x.abs()
    return x.to(here(), getattr(torch, case["dtype"]))


def local(tensor: Any) -> Any:
    """What this rank holds, as NumPy has it."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().float().cpu().numpy().copy()


def trained(layer: Any, x: Any) -> dict[str, Any]:
    """Output, gradients of all there is, and how many rows each expert was given."""
    import torch

    x, rows = x.clone().requires_grad_(), []
    inner = next(module for name, module in layer.named_modules() if name.endswith("inner_experts"))
    hook = inner.register_forward_pre_hook(lambda _, args: rows.append(args[1].cpu().numpy().copy()))
    layer.zero_grad()
    out = layer(x)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum().backward()
    hook.remove()
    found = {"out": local(out), "x": local(x.grad), "rows": rows[0]}
    for name, parameter in layer.named_parameters():
        found["router" if "gate" in name else name.split(".")[-1]] = local(parameter.grad)
    return found


def checkpointed(layer: Any, how: str | None) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    if how is None:
        return layer
    policy = FullAC if how == "full" else SelectiveAC
    return policy(policy.Config())._wrap_block(layer)


def parallel(layer: Any, backend: str) -> Any:
    """Experts over two ranks, by torchtitan's own plan."""
    layer.parallelize(dims_of(backend))
    return layer


_dims: dict[str, Any] = {}


def dims_of(backend: str) -> Any:
    from torchtitan.distributed.parallel_dims import ParallelDims

    if backend not in _dims:
        dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, world_size=2, spmd_backend=backend)
        dims.build_mesh()
        _dims[backend] = dims
    return _dims[backend]


def with_backend(backend: str) -> ExitStack:
    """As torchtitan's trainer runs a step under it."""
    from torchtitan.distributed import spmd_types, utils

    stack = ExitStack()
    utils.set_spmd_backend(backend)
    stack.callback(utils.set_spmd_backend, "partial_dtensor")
    if backend == "spmd_types":
        dims = dims_of(backend)
        dense = dims.spmd_dense_mesh()
        spmd_types.set_spmd_meshes(dense_mesh=dense, sparse_mesh=dims.spmd_sparse_mesh())
        stack.enter_context(spmd_types.set_current_spmd_mesh(dense))
    return stack


def run_case(name: str, rank: int) -> dict[str, Any]:
    """A layer on both ranks, forward and backward, and torchtitan's own on this one, which sees both batches."""
    case = CASES[name]
    before = steps()
    with with_backend(case["backend"]):
        layer = parallel(built(case, override(config_of(case), case["settings"])), case["backend"])
        kind = type(layer.routed_experts.token_dispatcher).__name__
        found = trained(checkpointed(layer, case["checkpoint"]), batch(case, rank))
    found["steps"] = steps() - before
    own = built(case, config_of(case))
    every = [trained(own, batch(case, source)) for source in range(2)]
    wanted, mine = dict(every[rank]), slice(2 * rank, 2 * rank + 2)
    for name in ("rows", "w1_EFD", "w2_EDF", "w3_EFD"):
        wanted[name] = sum(each[name] for each in every)[mine]
    step = case["settings"].get("row_alignment", 1)
    wanted["rows"] = -(-wanted["rows"] // step) * step
    return {"found": found, "wanted": wanted, "dispatcher": kind, "case": case}


def judge(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert isinstance(each, dict), each
        found, wanted, case = each["found"], each["wanted"], each["case"]
        assert each["dispatcher"] == "TokenwayTokenDispatcher" and found["steps"] == case["steps"]
        assert np.array_equal(found["rows"], wanted["rows"])
        for name in ("out", "x", "router"):
            close(found[name], wanted[name], CLOSE if case["dtype"] == "float32" else ROUNDED)
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            close(found[name], wanted[name], ROUNDED)


def close(found: Any, wanted: Any, tolerance: float) -> None:
    assert found.shape == wanted.shape and np.isfinite(found).all()
    assert np.abs(found - wanted).max(initial=0) <= within(tolerance) * max(np.abs(wanted).max(initial=0), 1e-3)


def run_alone() -> bool:
    """Without expert parallelism: the dispatcher that was replaced, so the same bits."""
    case, before = CASES["equal"], steps()
    found = trained(built(case, override(config_of(case), {})), batch(case, 0))
    wanted = trained(built(case, config_of(case)), batch(case, 0))
    return steps() == before and all(np.array_equal(found[name], wanted[name]) for name in wanted)


# name: (text of torchtitan_dispatcher.py, what a later hand may make of it, the case whose test must fail)
MUTATIONS = {
    "a row off by one": ("routed.tokens[: ByExpert.used(routed)]", "routed.tokens.roll(1, 0)", "equal"),
    "weights 2 % off": (
        "topk_expert_ids_TK, topk_scores_TK)\n",
        "topk_expert_ids_TK, topk_scores_TK * 1.02)\n",
        "equal",
    ),
    "ids off by one rank": ("(x_TD, topk_expert_ids_TK, ", "(x_TD, (topk_expert_ids_TK + 2) % 4, ", "equal"),
}


def run_mutant(old: str, new: str, case: str, rank: int) -> Any:
    """A case with a dispatcher whose source says `new` where it says `old`."""
    from tokenway.integrations import torchtitan_dispatcher

    kept = torchtitan_dispatcher.TokenwayTokenDispatcher
    torchtitan_dispatcher.TokenwayTokenDispatcher = mutated(torchtitan_dispatcher, old, new).TokenwayTokenDispatcher
    try:
        return run_case(case, rank)
    finally:
        torchtitan_dispatcher.TokenwayTokenDispatcher = kept


def no_memory(*_: Any) -> Any:
    raise RuntimeError("no memory, say")


def a_row_less(kept: Any, *args: Any) -> Any:
    return kept(*args)[1:]


def a_row_more(kept: Any, *args: Any) -> Any:
    rows = kept(*args)
    return rows.repeat(2, 1)[: len(rows) + 1]


# name: (what rank 1's experts do, what it is told)
FAILING: dict[str, tuple[Any, str, str]] = {
    "an error": (no_memory, "RuntimeError", "^no memory, say"),
    "a row less": (a_row_less, "InvalidArgument", r"^rows are \d+; they must be \d+, as many as experts were given"),
    "a row more": (a_row_more, "InvalidArgument", r"^rows are \d+; they must be \d+, as many as experts were given"),
}


def failing(rank: int, layer: Any, experts: Any, ranks: tuple[int, ...] = (1,)) -> Any:
    """Experts of some ranks do something else: what each is told, and how long it took."""
    inner = layer.routed_experts.inner_experts
    kept = inner.forward
    inner.forward = (lambda *args: experts(kept, *args)) if rank in ranks else kept
    began = time.monotonic()
    told = attempt(trained, layer, batch(CASES["equal"], rank))
    inner.forward = kept
    return told, time.monotonic() - began


def run_failing(rank: int) -> dict[str, Any]:
    """All with one layer, whose next forward pass follows at once, as to build a layer is collective."""
    case = CASES["equal"]
    layer = parallel(built(case, override(config_of(case), {})), case["backend"])
    found = {name: failing(rank, layer, experts) for name, (experts, *_) in FAILING.items()}
    found["an error on both"] = failing(rank, layer, no_memory, (0, 1))
    found["the pass after it"], _ = failing(rank, layer, None, ())
    found["after"] = attempt(run_case, "equal", rank)
    return found


def run_refused(rank: int) -> list[Any]:
    """Settings and types that are refused."""
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    from tokenway.integrations import torchtitan

    padded = TorchAOTokenDispatcher.Config(num_experts=4, top_k=2, pad_multiple=16)
    assert torchtitan.dispatcher(padded).row_alignment == 16
    assert torchtitan.dispatcher(padded, row_alignment=32).row_alignment == 32
    case = CASES["equal"] | {"dtype": "float16"}
    layer = parallel(built(case, override(config_of(case), {})), case["backend"])
    return [
        attempt(lambda: torchtitan.dispatcher(padded, max_tokens=0)),
        attempt(lambda: layer.routed_experts.token_dispatcher.dispatch(*half(rank))),
    ]


def half(rank: int) -> tuple[Any, ...]:
    import torch

    tokens = torch.zeros(3, HIDDEN, dtype=torch.float16, device=here(), requires_grad=True)
    return tokens, *(x.to(here()) for x in (torch.ones(3, 2), torch.tensor([[0, 1]] * 3), torch.zeros(EXPERTS)))


def run_guide() -> tuple[str, str]:
    """Its program switches Tokenway on and says what is in use."""
    names: dict[str, Any] = {}
    (program,) = programs_of("torchtitan")
    exec(program, names)
    config = config_of(CASES["equal"])
    names["switch_on"](config)
    return type(config.routed_experts.token_dispatcher).__qualname__, names["in_use"]()


class NoKernels(types.ModuleType):
    """Whatever is imported from it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def rank_main(store: str) -> Any:
    import torch.distributed as dist

    rank, device = begin(store, 2)
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[kernels] = NoKernels(kernels)
    from torchtitan.distributed import parallel_dims, utils

    parallel_dims.device_type = device.type  # it takes "cuda" where there is no device
    utils.set_spmd_backend("partial_dtensor")
    from tokenway.integrations import groups

    found: dict[str, Any] = {case: attempt(run_case, case, rank) for case in CASES}
    found["groups"] = [len(peers.groups) for peers in groups.living()]
    found["alone"] = attempt(run_alone)
    found |= run_failing(rank)
    found["refused"] = attempt(run_refused, rank)
    for mutation, (old, new, case) in MUTATIONS.items():
        found[mutation] = attempt(run_mutant, old, new, case, rank)
    found["guide"] = attempt(run_guide)
    dist.barrier()
    dist.destroy_process_group()
    return found


apart = framework_apart({"torchtitan": PINNED})


@pytest.fixture(scope="module")
def ran(apart: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    # Many parts, each of which may take its time; those that hang end by the timeouts within.
    return tw.run(rank_main, 2, str(tmp_path_factory.mktemp("torchtitan") / "store"), timeout=6 * HANGS)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(ran, case) -> None:
    """As on one rank: outputs, and gradients of tokens, of the router and of all experts."""
    judge([found[case] for found in ran])


def test_cases_are_what_they_say(ran) -> None:
    """Of an expert nobody chooses, and of one that all choose."""
    rows = [np.concatenate([found[case]["found"]["rows"] for found in ran]).tolist() for case in CASES]
    of = dict(zip(CASES, rows, strict=True))
    assert of["an expert nobody chooses"][0] == 0 and min(of["an expert nobody chooses"][1:]) > 0
    assert of["all to one expert"] == [0, 0, 0, 20] and of["all to rank 0"] == [20, 20, 0, 0]
    assert len(set(of["equal"])) > 1 and sum(of["equal"]) == 40


def test_one_group_serves_what_routes_alike(ran) -> None:
    """One each for top-2, aligned rows and top-1, whatever sizes, types and meshes are."""
    assert all(found["groups"] == [3] for found in ran), [found["groups"] for found in ran]


def test_without_expert_parallelism(ran) -> None:
    assert all(found["alone"] is True for found in ran), [found["alone"] for found in ran]


def test_what_is_refused(ran) -> None:
    for found in ran:
        assert isinstance(found["refused"], list), found["refused"]
        many, half_precision = found["refused"]
        said(many, "InvalidArgument", "^max_tokens is 0; it must be None or an integer")
        said(half_precision, "InvalidArgument", "float16.* must be .*float32 or bfloat16")


@pytest.mark.parametrize("experts", FAILING)
def test_a_rank_whose_experts_fail(ran, experts) -> None:
    """Or give other rows than they were given. Its peers are told, at its next forward pass at the latest, and the one
    after that is right."""
    (first, took), (second, _) = (found[experts] for found in ran)
    said(second, *FAILING[experts][1:])
    said(first, "PeerRefused", "rank 1")
    assert took < AT_ONCE


def test_ranks_whose_experts_all_fail(ran) -> None:
    for found in ran:
        said(found["an error on both"][0], "RuntimeError", "^no memory, say")
        assert isinstance(found["the pass after it"], dict), found["the pass after it"]
        assert np.array_equal(found["the pass after it"]["out"], found["after"]["found"]["out"])
    judge([found["after"] for found in ran])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """A dispatcher that is wrong fails the test of its case."""
    assert_caught([found[mutation] for found in ran], judge)


def test_the_guide(ran) -> None:
    """Its program, and the name on its command line."""
    for found in ran:
        kind, in_use = found["guide"]
        assert kind == "TokenwayTokenDispatcher.Config" and "steps=" in in_use
    assert f"--override.imports {TARGET}\n" in GUIDE.read_text(encoding="utf-8")
