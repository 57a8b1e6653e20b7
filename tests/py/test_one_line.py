"""Gathers and reduce-scatters of a process group in one line, on two ranks, against an all-reduce and a slice."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from deep_ep_ranks import array, begin, end
from frameworks import attempt, mutated, programs_of, steps
from harness import AT_ONCE, HANGS, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

HIDDEN = 8
# name: (rows of each rank, dtype)
CASES: dict[str, tuple[tuple[int, int], str]] = {
    "uneven": ((3, 1), "float32"),
    "a rank without rows": ((0, 4), "float32"),
    "no rows": ((0, 0), "float32"),
    "more than there is room for": ((2, 300), "float32"),
    "bfloat16": ((5, 2), "bfloat16"),
    "float16": ((2, 2), "float16"),
}
MUTATIONS = {
    "a row off by one": ("all_gatherv([rows], sizes)[0]", "all_gatherv([rows.roll(1, 0)], sizes)[0]"),
    "sums 2 % off": ("reduce_scatterv([rows], sizes)[0]", "reduce_scatterv([rows * 1.02], sizes)[0]"),
    "off by one rank": ("reduce_scatterv([rows], sizes)[0]", "reduce_scatterv([rows.flip(0)], sizes)[0]"),
}


def rows_of(name: str, rank: int) -> Any:
    import torch

    sizes, dtype = CASES[name]
    rng = torch.Generator().manual_seed(sum(name.encode()) + rank)
    return torch.randn(sizes[rank], HIDDEN, generator=rng).to(getattr(torch, dtype))


def layer(x: Any, sizes: list[int], rank: int, group: Any) -> tuple[Any, Any]:
    """What a model holds: each rank has another part of the sum, of other rows another one."""
    import torch

    from tokenway.integrations import collectives

    everyone = collectives.all_gatherv(x * 2, sizes, group)
    part = everyone * (rank + 1) + torch.arange(everyone.shape[0]).to(x)[:, None]
    return everyone, collectives.reduce_scatterv(part, sizes, group)


def run_case(name: str, rank: int, group: Any, call: Any = layer) -> dict[str, Any]:
    """Forward and backward; wanted is what an all-reduce and a slice give."""
    import torch

    sizes, dtype = CASES[name]
    x, before = rows_of(name, rank).requires_grad_(), steps()
    everyone, out = call(x, list(sizes), rank, group)
    (out.float() * torch.arange(out.numel()).view(out.shape)).sum().backward()
    found = {"everyone": array(everyone), "out": array(out), "x": array(x.grad), "steps": steps() - before}
    part = everyone.detach() * (rank + 1) + torch.arange(sum(sizes)).to(x)[:, None]
    total = part.float()
    torch.distributed.all_reduce(total)
    begin = sum(sizes[:rank])
    return found | {"wanted": array(total[begin : begin + sizes[rank]].to(getattr(torch, dtype)))}


def judge(name: str, ranks: list[dict[str, Any]]) -> None:
    everyone = np.concatenate([array(rows_of(name, rank) * 2) for rank in range(2)])
    for found in ranks:
        assert isinstance(found, dict), found
        assert found["steps"] == 4
        assert np.array_equal(found["everyone"], everyone) and np.array_equal(found["out"], found["wanted"])
        # Twice the gradient of the sum, from each rank times its factor: 2 * (1 + 2).
        wanted = 6.0 * np.arange(found["out"].size).reshape(found["out"].shape)
        assert np.allclose(found["x"], wanted, rtol=1e-2 if CASES[name][1] != "float32" else 1e-6)


def compiled(backend: str) -> Any:
    """The layer in one graph, without breaks."""
    import torch

    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend=backend)


def mutant(name: str, rank: int) -> Any:
    """A case whose source says something else. Its ops register under the same names, so its calls are made plainly."""
    from tokenway.integrations import collectives

    text, other = MUTATIONS[name]
    with patch("torch.library.Library"), patch("torch.library.register_fake"), patch("torch.library.register_autograd"):
        made = mutated(collectives, text, other)

    def plainly(call: Any) -> Any:
        return lambda rows, sizes, group: call(rows, sizes, "")

    with (
        patch.object(collectives, "all_gatherv", plainly(made._gather)),
        patch.object(collectives, "reduce_scatterv", plainly(made._reduce)),
    ):
        return attempt(outputs, rank)


def outputs(rank: int) -> dict[str, Any]:
    everyone, out = layer(rows_of("uneven", rank), [3, 1], rank, None)
    return {"everyone": array(everyone), "out": array(out)}


def refused(rank: int) -> list[Any]:
    """What is wrong on rank 1 alone: what each rank is told, and after how long."""
    import torch

    from tokenway.integrations import collectives

    x = torch.ones(2, HIDDEN)
    wrong = {
        "sizes": lambda: collectives.all_gatherv(x, [2, 2, 2] if rank else [2, 2]),
        "rows": lambda: collectives.reduce_scatterv(x if rank else torch.ones(4, HIDDEN), [2, 2]),
        "negative": lambda: collectives.all_gatherv(x, [2, -1] if rank else [2, 2]),
        "dtype": lambda: collectives.reduce_scatterv(
            torch.ones(4, 8, dtype=(torch.float32, torch.int32)[rank]), [2, 2]
        ),
    }
    found = []
    for call in wrong.values():
        began = time.monotonic()
        found.append((attempt(call), time.monotonic() - began))
    return found


def unknown() -> Any:
    import torch

    from tokenway.integrations import collectives

    return attempt(lambda: collectives.all_gatherv(torch.ones(2, HIDDEN), [2, 2], "nobody"))


def run_guide(rank: int) -> Any:
    """Its program, with a process group of its own."""
    import torch

    names: dict[str, Any] = {}
    (program,) = programs_of("Reduce-scatter in one line")
    exec(program, names)
    x = rows_of("uneven", rank)
    out = names["layer"](x, [3, 1], lambda rows: rows * (rank + 1), torch.distributed.new_group([0, 1]))
    return bool((out == 3 * x).all())


def without_gradients(rank: int) -> dict[str, Any]:
    """The results where nothing needs to see an op, and again with a mode that records what is called."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    def seen(rows: Any) -> Any:
        from tokenway.integrations import collectives

        with patch.object(collectives, "_reduce", side_effect=AssertionError("called plainly")):
            return attempt(lambda: tuple(collectives.reduce_scatterv(rows, [1, 1]).shape))

    names: list[str] = []
    found = {"meta": seen(torch.empty(2, HIDDEN, device="meta"))}
    with torch.autograd.forward_ad.dual_level():
        one = torch.ones(2, HIDDEN)
        found["dual"] = seen(torch.autograd.forward_ad.make_dual(one, one))
    for case, (sizes, _) in CASES.items():
        with torch.no_grad():
            found[case] = [array(of) for of in layer(rows_of(case, rank), list(sizes), rank, None)]
        with Recorded():
            found[case] += [array(of) for of in layer(rows_of(case, rank), list(sizes), rank, None)]
    return found | {"names": names}


def rank_main(store: str, backends: list[str]) -> dict[str, Any]:
    import torch

    rank, _ = begin(store, 2)
    named = torch.distributed.new_group([0, 1])
    groups = {"the default one": None, "a process group": named, "its name": named.group_name}
    found: dict[str, Any] = {}
    for case in CASES:
        found[case] = attempt(run_case, case, rank, None)
    for told, group in groups.items():
        found[told] = attempt(run_case, "uneven", rank, group)
    for backend in backends:
        call = compiled(backend)
        for case in CASES:
            found[backend, case] = attempt(run_case, case, rank, None, call)
        for told, group in groups.items():
            found[backend, told] = attempt(run_case, "uneven", rank, group, compiled(backend))
    found["plain"] = attempt(without_gradients, rank)
    found |= {name: mutant(name, rank) for name in MUTATIONS}
    found["refused"], found["unknown"] = attempt(refused, rank), unknown()
    found["after"] = attempt(run_case, "uneven", rank, None)
    found["guide"] = attempt(run_guide, rank)
    end()
    return found


def ranks(folder: Any, backends: list[str]) -> list[dict[str, Any]]:
    return tw.run(rank_main, 2, str(folder / "store"), backends, timeout=4 * HANGS)


@pytest.fixture(scope="module")
def ran(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    return ranks(tmp_path_factory.mktemp("line"), ["aot_eager"])


@pytest.mark.parametrize("case", CASES)
def test_as_an_all_reduce_and_a_slice(ran, case) -> None:
    judge(case, [found[case] for found in ran])


@pytest.mark.parametrize("case", CASES)
def test_without_gradients(ran, case) -> None:
    """The same bits, whether the op is called or what it does; and who records calls finds the ops."""
    for found in ran:
        everyone, out = (found[case][name] for name in ("everyone", "out"))
        for again in (found["plain"][case][:2], found["plain"][case][2:]):
            np.testing.assert_array_equal(again[0], everyone)
            np.testing.assert_array_equal(again[1], out)
        for name in ("all_gatherv", "reduce_scatterv"):
            assert sum(f"{name}_among" in told for told in found["plain"]["names"]) == len(CASES)
        assert found["plain"]["meta"] == (1, HIDDEN)
        assert "called plainly" not in str(found["plain"]["dual"])


@pytest.mark.parametrize("case", CASES)
def test_compiled(ran, case) -> None:
    judge(case, [found["aot_eager", case] for found in ran])


@pytest.mark.parametrize("told", ["the default one", "a process group", "its name"])
def test_process_groups(ran, told) -> None:
    judge("uneven", [found[told] for found in ran])
    judge("uneven", [found["aot_eager", told] for found in ran])


@pytest.mark.long
def test_compiled_by_inductor(torch, tmp_path) -> None:
    ran = ranks(tmp_path, ["inductor"])
    for case in CASES:
        judge(case, [found["inductor", case] for found in ran])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    right = [found["uneven"] for found in ran]
    outcomes = [found[mutation] for found in ran]
    assert all(isinstance(each, dict) for each in outcomes), outcomes
    for wrong, each in zip(outcomes, right, strict=True):
        assert any(not np.array_equal(wrong[name], each[name]) for name in wrong)


def test_what_is_refused(ran) -> None:
    """The peer is told at once, and the next call is as ever."""
    told = (
        r"^sizes is \[2, 2, 2\]; it must be 2 integers",
        r"^rows has shape \[2, 8\]; by sizes it must be a tensor of 4 rows",
        r"^sizes is \[2, -1\]; it must be 2 integers from 0 on",
        "int32.* must be",
    )
    for (first, took), (second, _), pattern in zip(*(found["refused"] for found in ran), told, strict=True):
        said(second, "InvalidArgument", pattern)
        said(first, "PeerRefused", "rank 1")
        assert took < AT_ONCE
    judge("uneven", [found["after"] for found in ran])
    for found in ran:
        said(found["unknown"], "InvalidArgument", "^process_group is 'nobody'; no process group has that name")


def test_the_guide(ran) -> None:
    assert [found["guide"] for found in ran] == [True, True]
