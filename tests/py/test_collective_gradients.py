"""Gradients through gathers and reduces, eager and as registered ops: bit for bit those of the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import same
from harness import PATIENT, Env, caught
from test_torch import with_torch

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

pytestmark = pytest.mark.torch

SIZES = (5, 0, 3)
ROWS, HIDDEN, MOST = sum(SIZES), 12, 6
HOW = ("host", "memory", "own", "op")


@pytest.fixture(autouse=True)
def _torch(torch) -> Any:
    """All of this file needs PyTorch."""
    return torch


def values(rank: int, what: int, count: int, dtype: str) -> np.ndarray:
    """Other ones on each rank, for each purpose."""
    rng = np.random.default_rng([rank, what])
    return rng.standard_normal((count, HIDDEN), np.float32).astype(numpy_dtype(dtype))


def longer(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count - len(rows), HIDDEN), rows.dtype)])


def through(env: Env, how: str, dtype: str) -> list[np.ndarray]:
    """A gather and a reduce, twice, and back through them with gradients of this rank's own."""
    from tokenway import autograd, ops

    env = with_torch(env)
    tensor, array = env.backend.tensor, env.backend.array
    mine = SIZES[env.rank]
    sizes: Any = list(SIZES) if how in ("host", "op") else None
    bound = None if how in ("host", "op") else MOST
    padded = MOST if how == "memory" else mine
    if how == "memory":
        sizes = tensor(np.array(SIZES, np.int32))
    whole = ROWS if how in ("host", "op") else MOST * len(SIZES)
    found = []
    with tw.Group(env.comm, hidden=2 * HIDDEN, max_tokens=MOST, timeout=PATIENT) as group:
        number = ops.register(group)
        for again in range(2):
            rows = tensor(longer(values(env.rank, 10 + again, mine, dtype), padded)).requires_grad_()
            partials = tensor(longer(values(env.rank, 20 + again, ROWS, dtype), whole)).requires_grad_()
            if how == "op":
                import torch

                order = ops.start()
                gathered, order = torch.ops.tokenway.all_gatherv(rows, order, number, sizes)
                sums, order = torch.ops.tokenway.reduce_scatterv(partials, order, number, sizes)
            else:
                gathered = autograd.all_gatherv(group, rows, sizes, bound=bound)
                told = tensor(np.array(SIZES, np.int32)) if how == "own" else sizes
                sums = autograd.reduce_scatterv(group, partials, told, bound=bound)
            upstream = tensor(longer(values(env.rank, 30 + again, ROWS, dtype), len(gathered)))
            own = tensor(longer(values(env.rank, 40 + again, mine, dtype), len(sums)))
            # One graph, so that all ranks make the steps of the backward pass in the same order.
            ((gathered * upstream).sum() + (sums * own).sum()).backward()
            found += [array(x.detach()) for x in (gathered, sums, rows.grad, partials.grad)]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", HOW)
def test_gradients(threads, how, dtype) -> None:
    by_rank = threads(3).run(through, how, dtype)
    for rank, found in enumerate(by_rank):
        for again in range(2):
            inputs = [[values(r, what + again, n, dtype) for r, n in enumerate(counts)] for what, counts in PURPOSES]
            rows, partials, upstream, own = inputs
            want = [
                ref.all_gatherv(rows),
                ref.reduce_scatterv(partials, SIZES, rank),
                ref.reduce_scatterv(upstream, SIZES, rank),
                ref.all_gatherv(own),
            ]
            for name, got, wanted in zip(NAMES, found[4 * again : 4 * again + 4], want, strict=True):
                same(name, got[: len(wanted)], wanted, f"rank {rank}, {how}, {dtype}")
                assert not got[len(wanted) :].any(), f"{name}: not 0 beyond the rows that there are"


PURPOSES = ((10, SIZES), (20, (ROWS,) * 3), (30, (ROWS,) * 3), (40, SIZES))
NAMES = ("gathered", "sums", "gradients of rows", "gradients of partials")


def checked(env: Env) -> None:
    import torch

    from tokenway import ops

    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=PATIENT) as group:
        number = ops.register(group)
        rows = with_torch(env).backend.tensor(values(0, 1, 4, "float32")).requires_grad_()
        for op in (torch.ops.tokenway.all_gatherv, torch.ops.tokenway.reduce_scatterv):
            torch.library.opcheck(op.default, (rows, ops.start(), number, [4]))


def test_opcheck(threads) -> None:
    threads(1).run(checked)


def compiled(env: Env) -> Any:
    import torch

    from tokenway import ops

    env = with_torch(env)
    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=PATIENT) as group:
        number = ops.register(group)

        def model(rows: Any, order: Any) -> Any:
            gathered, order = torch.ops.tokenway.all_gatherv(rows * 2, order, number, list(SIZES[: env.nranks]))
            sums, order = torch.ops.tokenway.reduce_scatterv(gathered + 1, order, number, list(SIZES[: env.nranks]))
            return sums, order

        model = torch.compile(model, fullgraph=True, backend="aot_eager")
        rows = env.backend.tensor(values(env.rank, 1, SIZES[env.rank], "float32"))
        with torch.no_grad():
            return env.backend.array(model(rows, ops.start())[0])


@pytest.mark.processes
@pytest.mark.long
def test_compiled(processes) -> None:
    for rank, got in enumerate(processes(2).run(compiled, timeout=900)):
        rows = values(rank, 1, SIZES[rank], "float32") * np.float32(2) + np.float32(1)
        same("sums", got, rows + rows)


def refused_op(env: Env) -> Any:
    import torch

    from tokenway import ops

    env = with_torch(env)
    with tw.Group(env.comm, hidden=HIDDEN, max_tokens=MOST, timeout=PATIENT) as group:
        number = ops.register(group)
        count = SIZES[env.rank] + (1 if env.rank == 0 else 0)
        rows = env.backend.tensor(values(env.rank, 1, count, "float32"))
        return caught(torch.ops.tokenway.all_gatherv, rows, ops.start(), number, list(SIZES))


def test_refused(threads) -> None:
    first, *others = threads(3).run(refused_op)
    assert first[0] == "twInvalidArgument"
    assert all(told[0] == "twPeerRefused" for told in others)
