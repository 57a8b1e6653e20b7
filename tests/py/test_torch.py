"""PyTorch: tensors in and out, process groups as bootstrap, torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cases import FLOATS, Round, Setup, one, verify
from harness import PATIENT, Cpu, Env, caught
from player import Player

import tokenway as tw
from tokenway import tensors, versions

ONE = {"experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 2, "dtype": "float32"}

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).with_name("launched.py")


@pytest.fixture(autouse=True)
def _needs_torch(torch) -> None:
    """All of this file does."""


def to_torch(array: np.ndarray) -> Any:
    """The same memory and strides as a PyTorch tensor; NumPy reaches dtypes of its own by their bits."""
    import torch

    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = array.view(np.uint8 if array.itemsize == 1 else np.int16)
        return torch.from_numpy(bits).view(getattr(torch, name))
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> np.ndarray:
    """A copy."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
        return bits.numpy().copy().view(tensors.numpy_dtype(name))
    return np.array(tensor.numpy())


class TorchCpu(Cpu):
    """The harness's backend with PyTorch tensors."""

    tensor = staticmethod(to_torch)

    @staticmethod
    def array(tensor: Any) -> np.ndarray:
        import torch

        assert isinstance(tensor, torch.Tensor), f"{type(tensor)} came back, not a PyTorch tensor"
        return to_numpy(tensor)


def with_torch(env: Env) -> Env:
    """The env with a backend whose tensors are PyTorch's: those of GPUs are."""
    return Env(env.comm, TorchCpu) if issubclass(env.backend, Cpu) else env


def play(env: Env, case: Any) -> Any:
    with tw.Group(env.comm, timeout=PATIENT, **case.setup.settings()) as group:
        return Player(with_torch(env), group, case).flights()


def check(threads: Any, setup: Setup, *rounds: Round) -> None:
    by_rank = threads(setup.ranks).run(play, one(setup, *rounds))
    for f, round_ in enumerate(rounds):
        verify(setup, round_, [mine[f][0] for mine in by_rank])


PAYLOADS = (
    *((3, "uint8"), (5, "int8"), (3, "int16"), (1, "int32"), (3, "int64")),
    *((1, "bool"), (7, "float8_e4m3fn")),
)
MORE = ((5, "float8_e5m2"), (3, "uint16"), (1, "uint32"), (3, "uint64"), (1, "float64"), (2, "float16"))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("payloads", [PAYLOADS, MORE])
def test_every_dtype(threads, layout, payloads) -> None:
    for dtype in FLOATS:
        setup = Setup(ranks=2, dtype=dtype, payloads=payloads, combine_dtype=dtype, id_dtype="int64")
        base = Round((5, 8), layout=layout, ids="int64", rows=dtype, out=dtype)
        own = Round((8, 0), layout=layout, own=True, strided=True, seed=3, special=True)
        check(threads, setup, base, own)


def test_views_and_sequences(threads) -> None:
    setup = Setup(ranks=3, experts=7, dtype="float32", combine_dtype="float32", lanes=2)
    check(
        threads,
        setup,
        Round((5, 8, 0), identity=True, memory=True),
        Round((5, 8, 1), again=True, late=True, fortran=True, seed=1),
        Round((5, 8, 1), send_dispatch=True, send_combine=True, seed=2, weights=False),
    )


def zero_copy(env: Env) -> None:
    import torch

    settings: dict[str, Any] = {"experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 2}
    with tw.Group(env.comm, **settings) as group:
        ids = torch.tensor([[0], [1]], device=env.device)
        handle = group.route(ids)
        tokens = torch.arange(8, dtype=torch.bfloat16, device=env.device).view(2, 4)
        received = group.dispatch(handle, tokens)
        assert received.tokens.dtype == torch.bfloat16 and received.ids.dtype == torch.int32
        fields = [getattr(received, name) for name in ("tokens", "ids", "weights", "counts", "offsets")]
        assert all(type(t) is torch.Tensor and t.device == tokens.device for t in fields), fields
        # A view of the window: what an expert writes there is what combine returns.
        received.tokens.mul_(2)
        out = group.combine(handle, received.tokens)
        assert torch.equal(out, tokens * 2) and out.dtype == torch.bfloat16
        again = group.dispatch(handle, tokens)
        group.combine(handle, again.tokens)
        assert group.combine(handle, received.tokens.float(), dtype=torch.float32).dtype == torch.float32
        if env.device is not None:
            return
        # NumPy in, NumPy out; the two may be mixed from call to call.
        mixed = group.dispatch(handle, to_numpy(tokens))
        assert type(mixed.tokens) is np.ndarray
        assert type(group.combine(handle, mixed.tokens)) is np.ndarray


def test_zero_copy(threads) -> None:
    threads(1).run(zero_copy)


def refused(env: Env) -> list[Any]:
    import torch

    with tw.Group(env.comm, experts=2, top_k=1, hidden=4, max_tokens=2, dtype="float32") as group:
        ids, rows = torch.tensor([[0], [1]], device=env.device), torch.zeros(2, 4, device=env.device)
        handle = group.route(ids)
        outcomes = [
            caught(group.dispatch, handle, rows.to("meta")),
            caught(group.dispatch, handle, rows.to(torch.complex64)),
            caught(group.dispatch, handle, rows.to_sparse()),
            caught(group.dispatch, handle, torch.nn.functional.pad(rows, (0, 4))[:, ::2]),
            caught(group.route, ids.to("meta")),
            caught(group.route, ids.float()),
        ]
        group.dispatch(handle, rows)
        outcomes += [caught(group.combine, handle, torch.zeros(1, 2, 4, device="meta"))]
        received = group.dispatch(handle, rows.requires_grad_())
        assert not received.tokens.requires_grad
        group.combine(handle, received.tokens)
    return outcomes


def negated(env: Env) -> list[Any]:
    import torch

    with tw.Group(env.comm, experts=2, top_k=1, hidden=1, max_tokens=2, dtype="float32") as group:
        handle = group.route(torch.tensor([[0], [1]], device=env.device))
        rows = torch.tensor([[1 + 2j], [3 + 4j]], device=env.device).conj().imag
        out = torch.zeros(2, 1, dtype=torch.complex64, device=env.device).conj().imag
        outcomes = [caught(group.dispatch, handle, rows)]
        answers = group.dispatch(handle, rows.resolve_neg()).tokens.clone()
        outcomes += [caught(group.combine, handle, answers, out=out)]
        outcomes += [group.combine(handle, answers).flatten().tolist()]
    return outcomes


def test_negated_views(threads) -> None:
    """What lies in memory is not what the tensor says: refused, nothing is lost, and the resolved one is taken."""
    tokens, out, combined = threads(1).run(negated)[0]
    assert tokens[0] == out[0] == "twInvalidArgument"
    assert "tokens is a negated view" in tokens[1] and "out is a negated view" in out[1], (tokens, out)
    assert combined == [-2.0, -4.0]


def test_tensors_of_another_kind(threads) -> None:
    """On another device, sparse, of a dtype that is not known: refused like any other argument."""
    for outcome in threads(1).run(refused)[0]:
        assert outcome[0] == "twInvalidArgument", outcome
        assert "dtype" in outcome[1] or "stride" in outcome[1] or "shape" in outcome[1], outcome


# ---- other processes -----------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | more


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("mode", [[], ["torch"]])
def test_torchrun(mode) -> None:
    """With torchrun's environment alone, and with an initialised process group."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(SCRIPT), *mode], env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank} of 2: [0, 1]" in done.stdout


def subgroups() -> Any:
    """connect() over process groups: all ranks, and pairs whose ranks are numbered anew."""
    import torch.distributed as dist
    from launched import exchange

    rank = int(os.environ["TOKENWAY_RANK"])
    store = dist.FileStore(os.environ["STORE"], 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = pairs[0] if rank in (0, 3) else pairs[1]
    with tw.connect(timeout=PATIENT) as everyone, tw.connect(mine, timeout=PATIENT) as pair:
        found = (everyone.rank, everyone.nranks, pair.rank, pair.nranks), exchange(pair)
        exchange(everyone)
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.slow
def test_process_groups(tmp_path) -> None:
    with tw.Ranks(subgroups, 4, env={"STORE": str(tmp_path / "store")}) as ranks:
        outcomes = ranks.wait(120)
    assert all(o is not None and o.ok for o in outcomes), outcomes
    numbers = [o.value[0] for o in outcomes]  # type: ignore[union-attr]
    assert numbers == [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]
    assert all(o.value[1] == [0, 1] for o in outcomes)  # type: ignore[union-attr]


def test_tensors_that_are_elsewhere(torch) -> None:
    """The sentence says where, as the descriptor cannot."""
    with tw.local_comms(1)[0] as comm, tw.Group(comm, experts=1, top_k=1, hidden=2, max_tokens=4) as group:
        ids = torch.zeros(1, 1, dtype=torch.int32)
        sentence = "is a meta tensor; this group is on the CPU"
        handle = group.route(ids)
        far, near = torch.zeros(1, 2, device="meta", dtype=torch.bfloat16), torch.zeros(1, 2).bfloat16()
        outcomes = [
            ("ids", caught(group.route, ids.to("meta"))),
            ("ids", caught(handle.update, ids.to("meta"))),
            ("memory", caught(group.route, ids, memory=torch.zeros(group.handle_bytes, device="meta"))),
            ("tokens", caught(group.dispatch, handle, far)),
            (r"out\['tokens'\]", caught(group.dispatch, handle, near, out=far)),
        ]
        group.dispatch(handle, near, bound=1)
        outcomes.append(("rows", caught(group.combine, handle, far[None])))
        outcomes.append(("out", caught(group.combine, handle, near[None], out=far)))
        for name, (result, text, _) in outcomes:
            assert result == "twInvalidArgument" and re.search(f"{name} {sentence}", text), (name, text)
        assert caught(group.dispatch, handle, near.to_sparse())[1].endswith("torch.sparse_coo; it must be strided")


def test_memory_of_a_handle(torch) -> None:
    with tw.local_comms(1)[0] as comm, tw.Group(comm, experts=1, top_k=1, hidden=2, max_tokens=4) as group:
        ids = torch.zeros(1, 1, dtype=torch.int32)
        memory = torch.zeros(group.handle_bytes + 128, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 64 :]
        handle = group.route(ids, memory=memory)
        received = group.dispatch(handle, torch.ones(1, 2).bfloat16())
        assert memory.data_ptr() <= received.counts.data_ptr() < memory.data_ptr() + group.handle_bytes
        assert received.counts.tolist() == [1]
        group.combine(handle, received.tokens)
        sentence = "memory is of dtype float32; it must be a contiguous"
        assert sentence in caught(group.route, ids, memory=torch.zeros(group.handle_bytes))[1]
        sentence = "memory is not contiguous"
        wide = torch.zeros(group.handle_bytes * 2, dtype=torch.uint8)[::2]
        assert sentence in caught(group.route, ids, memory=wide)[1]


def test_outputs_without_memory(torch) -> None:
    """Inside a transform of torch.func a tensor has none: it is told so, and not by PyTorch's words."""
    comm = tw.local_comms(1)[0]
    with tw.Group(comm, experts=2, top_k=1, hidden=4, max_tokens=2, dtype="float32") as group:
        handle = group.route(torch.zeros(2, 1, dtype=torch.int32))
        rows = group.dispatch(handle, torch.ones(2, 4)).tokens
        with pytest.raises(tw.InvalidArgument, match="out"):
            torch.func.vmap(lambda out: group.combine(handle, rows, out=out))(torch.zeros(3, 2, 4))
        handle.release()
        received = group.dispatch(handle, torch.ones(2, 4))
        assert (group.combine(handle, received.tokens) == 1).all()
    comm.close()


def test_versions_one_by_one(torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.4 raises them: it takes one tensor, and calls everything else an error."""
    bump = torch.autograd.graph.increment_version

    def one(x: Any) -> None:
        if not isinstance(x, torch.Tensor):
            raise RuntimeError("increment_version expects a Tensor")
        bump(x)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", one)
    monkeypatch.setattr(versions, "_increment", None)
    x, y = torch.zeros(2), torch.zeros(3)
    versions.written([x, None, y])
    versions.written(x)
    assert (x._version, y._version) == (2, 1)


def test_calls_of_a_closed_group(torch) -> None:
    """They are refused by name with PyTorch's tensors as with NumPy's, whether or not the group has had any before."""
    for earlier in (False, True):
        with tw.local_comms(1)[0] as comm, tw.Group(comm, **ONE) as group:
            handle = group.route(torch.zeros(2, 1, dtype=torch.int32))
            rows = group.dispatch(handle, torch.ones(2, 4)).tokens if earlier else torch.ones(1, 2, 4)
            group.close()
            for call, given in ((group.dispatch, torch.ones(2, 4)), (group.combine, rows)):
                assert caught(call, handle, given)[:1] == ("twInvalidUsage",), call


def test_while_another_thread_imports_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is in sys.modules then, and has no tensors yet."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(tensors, "_tensor_type", None)
    with tw.local_comms(1)[0] as comm, tw.Group(comm, **ONE) as group:
        handle = group.route(np.zeros((2, 1), np.int32))
        rows = group.dispatch(handle, np.ones((2, 4), np.float32)).tokens
        assert (group.combine(handle, rows, out=np.empty((2, 4), np.float32)) == 1).all()
