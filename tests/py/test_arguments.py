"""Arguments whose own code raises: the caller hears what, with the cause, and its peers hear of the refusal at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from cases import verify
from harness import Env
from refusals import ROUND, SETUP, Calls, adapt

import tokenway as tw

TIMEOUT = 200.0
AT_ONCE = 100.0  # seconds: half of what a fault would take, and what a busy machine may, where PyTorch is first used


class Angry(ZeroDivisionError):
    """What arguments raise here."""


def anger(*_: Any, **__: Any) -> Any:
    raise Angry("asked too much")


class NoTensor:
    """Not even its class can be asked for."""

    __class__ = property(anger)  # type: ignore[assignment]
    shape = dtype = layout = device = property(anger)
    __array_interface__ = __cuda_array_interface__ = property(anger)


class NoFlag:
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = anger  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class NoMapping(Mapping[str, Any]):
    __getitem__ = __iter__ = __len__ = keys = items = anger  # type: ignore[assignment]


class NoList(list):
    __iter__ = __len__ = anger  # type: ignore[assignment]


def no_torch(env: Env) -> Any:
    """A tensor on the right device whose every property raises."""
    import torch

    class Tensor(torch.Tensor):
        __torch_function__ = classmethod(anger)

    return torch.zeros(3, 4, device=env.device or "cpu").as_subclass(Tensor)


def told(call: Callable[..., Any], *args: Any, **given: Any) -> tuple[str, str, str, float]:
    """(error's result, sentence, what caused it, seconds) of a call."""
    begin = time.monotonic()
    result, text, cause = "twSuccess", "", ""
    try:
        call(*args, **given)
    except tw.TokenwayError as error:
        result, text, cause = error.result, str(error), type(error.__cause__).__name__
    except Exception as error:
        result, text, cause = type(error).__name__, str(error), type(error.__cause__).__name__
    return result, text, cause, time.monotonic() - begin


def check(by_rank: list[Any], call: str, text: str = "", cause: str = "Angry") -> None:
    """Rank 0 made a wrong call, and the others the right one."""
    (result, said, why, _), *others = by_rank
    assert (result, why) == ("twInvalidArgument", cause) and text in said, by_rank[0]
    for result, said, _, took in others:
        assert result == "twPeerRefused" and f"rank 0 refused its arguments of {call}" in said, (result, said)
        assert took < AT_ONCE


# ---- dispatch and combine ------------------------------------------------------------------------

DISPATCHES: dict[str, Callable[[Env], dict[str, Any]]] = {
    "tokens": lambda env: {"tokens": no_torch(env)},
    "tokens that are none": lambda env: {"tokens": NoTensor()},
    "a payload": lambda env: {"payloads": {"p0": no_torch(env)}},
    "payloads": lambda env: {"payloads": NoMapping()},
    "out": lambda env: {"out": no_torch(env)},
    "an out": lambda env: {"out": {"ids": NoTensor()}},
    "outs": lambda env: {"out": NoMapping()},
    "layout": lambda env: {"layout": NoFlag()},
    "bound": lambda env: {"bound": NoTensor()},
    "send_only": lambda env: {"send_only": NoFlag()},
    "count": lambda env: {"count": NoFlag()},
    "column_major": lambda env: {"column_major": NoTensor()},
}


def dispatched(env: Env, name: str) -> Any:
    calls = Calls(env, timeout=TIMEOUT)
    calls.good_round()
    changes = DISPATCHES[name](env) if env.rank == 0 else {}
    tokens, extra = (adapt(env, x) for x in refused_payloads(env))
    given = {"handle": calls.handle, "tokens": tokens, "payloads": {"p0": extra}} | changes
    outcome = told(calls.group.dispatch, **given)
    good = calls.good_round()
    calls.group.close()
    return outcome, good


def refused_payloads(env: Env) -> Any:
    from cases import make_payloads

    return make_payloads(SETUP, ROUND, env.rank)


@pytest.mark.torch
@pytest.mark.parametrize("name", DISPATCHES)
def test_dispatch(threads, made_for, torch, name) -> None:
    if name == "bound" and not made_for.knows_calls:
        pytest.skip("nobody knows what the peers move: test_staged.py")
    by_rank = threads(3).run(dispatched, name)
    text = {"tokens": "tokens is of type Tensor, and cannot be read: Angry: asked too much", "out": "out['tokens'] is"}
    cause = "NoneType" if name == "bound" else "Angry"  # it is no number, whatever else it is
    check([outcome for outcome, _ in by_rank], "dispatch", text.get(name, ""), cause)
    verify(SETUP, ROUND, [good for _, good in by_rank])


COMBINES: dict[str, Callable[[Env], dict[str, Any]]] = {
    "rows": lambda env: {"rows": no_torch(env)},
    "rows that are none": lambda env: {"rows": NoTensor()},
    "out": lambda env: {"out": no_torch(env)},
    "layout": lambda env: {"layout": NoTensor()},
    "weighting": lambda env: {"weighting": NoTensor()},
    "dtype": lambda env: {"dtype": NoTensor()},
    "send_only": lambda env: {"send_only": NoFlag()},
}


def combined(env: Env, name: str) -> Any:
    calls = Calls(env, timeout=TIMEOUT)
    calls.dispatch()
    rows = adapt(env, np.zeros((3, 8, 4), np.float32))
    given = {"handle": calls.handle, "rows": rows} | (COMBINES[name](env) if env.rank == 0 else {})
    outcome = told(calls.group.combine, **given)
    calls.combine()
    good = calls.good_round()
    calls.group.close()
    return outcome, good


@pytest.mark.torch
@pytest.mark.parametrize("name", COMBINES)
def test_combine(threads, torch, name) -> None:
    by_rank = threads(3).run(combined, name)
    check([outcome for outcome, _ in by_rank], "combine")
    verify(SETUP, ROUND, [good for _, good in by_rank])


# ---- more tokens than the group takes --------------------------------------------------------------


def too_many(env: Env, mode: str, update: bool) -> Any:
    """What rank 0's routing of one token too many ends in, and a good round behind it."""
    settings = {"experts": env.nranks, "top_k": 1, "hidden": 4, "max_tokens": 3, "mode": mode, "dtype": "float32"}
    with tw.Group(env.comm, timeout=TIMEOUT, **settings) as group:
        outcomes = []
        for tokens in (4 if env.rank == 0 else 3, 3):
            ids = adapt(env, np.arange(tokens, dtype=np.int32)[:, None] % env.nranks)
            rows = adapt(env, np.full((tokens, 4), 1 + env.rank, np.float32))
            if update:
                handle = group.route(adapt(env, np.zeros((1, 1), np.int32)))
                handle.update(ids)
            else:
                handle = group.route(ids)
            call = group.exchange_counts if mode == "high_throughput" else lambda h, x=rows: group.dispatch(h, x)
            outcomes.append(told(call, handle))
            if handle.leased:
                handle.release()
        return outcomes


@pytest.mark.needs("high_throughput")
@pytest.mark.parametrize("update", [False, True], ids=["routed", "updated"])
@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_too_many_tokens(threads, mode, update) -> None:
    """Routing tells nobody; the first call that peers wait in does, and the group goes on."""
    by_rank = threads(3).run(too_many, mode, update)
    call = "dispatch" if mode == "low_latency" else "exchange_counts"
    check([first for first, _ in by_rank], call, "ids has 4 tokens; it must have from 0 to max_tokens, 3", "NoneType")
    assert [second[0] for _, second in by_rank] == ["twSuccess"] * 3, by_rank


# ---- counts, gathers, reduces ----------------------------------------------------------------------


def counted(env: Env, name: str) -> Any:
    with tw.Group(
        env.comm, experts=3, top_k=1, hidden=4, max_tokens=3, mode="high_throughput", timeout=TIMEOUT
    ) as group:
        handle = group.route(adapt(env, np.arange(3, dtype=np.int32)[:, None]))
        outcome = told(group.exchange_counts, handle, **({name: NoFlag()} if env.rank == 0 else {}))
        group.exchange_counts(handle)
        return outcome, handle.recv_rows


@pytest.mark.needs("high_throughput")
@pytest.mark.parametrize("name", ["lease", "send_only"])
def test_counts(threads, name) -> None:
    by_rank = threads(3).run(counted, name)
    check([outcome for outcome, _ in by_rank], "exchange_counts")
    assert [rows for _, rows in by_rank] == [3, 3, 3]


COLLECTIVES: dict[str, Callable[[Env], dict[str, Any]]] = {
    "rows": lambda env: {"rows": no_torch(env)},
    "rows that are none": lambda env: {"rows": NoTensor()},
    "several rows": lambda env: {"rows": NoList([1])},
    "sizes": lambda env: {"sizes": NoList([1, 1, 1])},
    "sizes in memory": lambda env: {"sizes": no_torch(env), "bound": 1},
    "out": lambda env: {"out": no_torch(env)},
    "layout": lambda env: {"layout": NoTensor()},
    "send_only": lambda env: {"send_only": NoFlag()},
}


def collected(env: Env, name: str, reduces: bool) -> Any:
    with tw.Group(env.comm, hidden=4, max_tokens=4, dtype="float32", timeout=TIMEOUT) as group:
        call = group.reduce_scatterv if reduces else group.all_gatherv
        rows = adapt(env, np.ones((3 if reduces else 1, 4), np.float32))
        given = {"rows": rows, "sizes": [1, 1, 1]}
        outcome = told(call, **given | (COLLECTIVES[name](env) if env.rank == 0 else {}))
        after = call(**given)
        return outcome, float((after if reduces else after.rows).sum())


@pytest.mark.torch
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(threads, made_for, torch, name, reduces) -> None:
    if not made_for.knows_calls:
        pytest.skip("what peers move is not known, so the group ends: test_staged.py")
    by_rank = threads(3).run(collected, name, reduces)
    check([outcome for outcome, _ in by_rank], "reduce_scatterv" if reduces else "all_gatherv")
    assert [total for _, total in by_rank] == [12.0] * 3


# ---- what stands for a tensor ----------------------------------------------------------------------


def jagged(torch: Any) -> Any:
    return torch.nested.nested_tensor([torch.ones(4)] * 3, layout=torch.jagged)


def fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3, 4)


def wrapped(torch: Any) -> Any:
    found = []
    torch.func.vmap(lambda x: found.append(x) or x)(torch.ones(3, 4))
    return found[0]


class Standing:
    """Rank 0 gives something that only looks like a tensor of its group."""

    made: dict[str, tuple[Callable[[Any], Any], str]] = {  # noqa: RUF012
        "jagged": (jagged, "tokens is a tensor of layout torch.jagged; it must be strided"),
        "fake": (fake, "tokens is a FakeTensor, which has a shape and no memory; make the call outside of what is tr"),
        "meta": (lambda torch: torch.empty(3, 4, device="meta"), "tokens is a meta tensor; this group is on the CPU"),
        "functional": (lambda torch: torch._to_functional_tensor(torch.ones(3, 4)), "without memory of its own"),
        "vmap": (wrapped, "cannot be read: RuntimeError: "),
        "masked": (lambda _: np.ma.masked_array(np.ones((3, 4), np.float32), True), "tokens is a masked array, whose"),
    }


def standing(env: Env, name: str) -> Any:
    import torch

    with tw.Group(env.comm, experts=3, top_k=1, hidden=4, max_tokens=3, dtype="float32", timeout=TIMEOUT) as group:
        handle = group.route(np.arange(3, dtype=np.int32)[:, None])
        given = Standing.made[name][0](torch) if env.rank == 0 else np.ones((3, 4), np.float32)
        env.kept["barrier"] = group.all_gatherv(
            np.ones((1, 4), np.float32), [1, 1, 1]
        )  # the first jagged takes seconds
        outcome = told(group.dispatch, handle, given)
        out = {"ids": given} if env.rank == 0 else None
        again = told(group.dispatch, handle, np.ones((3, 4), np.float32), out=out)
        return outcome, again


@pytest.mark.torch
@pytest.mark.parametrize("name", Standing.made)
@pytest.mark.filterwarnings("ignore")
def test_what_stands_for_a_tensor(threads, backend, torch, name) -> None:
    if backend != "cpu":
        pytest.skip("of host memory")
    by_rank = threads(3).run(standing, name)
    causes = {"jagged": "AttributeError", "vmap": "RuntimeError"}
    check([first for first, _ in by_rank], "dispatch", Standing.made[name][1], causes.get(name, "NoneType"))
    text = Standing.made[name][1].replace("tokens is", "out['ids'] is")
    check([second for _, second in by_rank], "dispatch", text, causes.get(name, "NoneType"))


def test_dtensor(torch, tmp_path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        tokens = DTensor.from_local(torch.ones(3, 4), mesh)
        with tw.connect() as comm, tw.Group(comm, experts=1, top_k=1, hidden=4, max_tokens=3, dtype="float32") as group:
            handle = group.route(torch.zeros(3, 1, dtype=torch.int64))
            with pytest.raises(tw.InvalidArgument, match=r"tokens is a DTensor; give its to_local\(\)"):
                group.dispatch(handle, tokens)
            with pytest.raises(tw.InvalidArgument, match=r"weights is a DTensor; give its to_local\(\)"):
                group.route(torch.zeros(3, 1, dtype=torch.int64), DTensor.from_local(torch.ones(3, 1), mesh))
            with pytest.raises(tw.InvalidArgument, match=r"x is a DTensor; give its to_local\(\)"):
                tw.quantize_fp8(tokens)
            group.dispatch(handle, tokens.to_local())
    finally:
        dist.destroy_process_group()
