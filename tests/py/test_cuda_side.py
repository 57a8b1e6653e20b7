"""Groups on CUDA devices, as far as Python decides: tensors of the right device, streams, what is kept alive for how
long, which device is whose. No GPU is needed: a pretended device, whose tensors are the CPU's, stands in."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import PATIENT, caught
from pretended import FIRST, SECOND, THIRD, Pretended

import tokenway as tw
from tokenway import _native, comm, cuda, info

pytestmark = pytest.mark.torch

ON = {"experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 2, "dtype": "float32"}


@pytest.fixture
def place(torch: Any) -> Pretended:
    return Pretended(torch)


@pytest.fixture
def group(place: Pretended, monkeypatch: Any) -> Iterator[tw.Group]:
    """One rank on the pretended device, over the CPU's library."""
    monkeypatch.setattr(cuda, "Cuda", lambda index: place)
    (rank,) = tw.local_comms(1)
    rank._device = 0
    with rank, tw.Group(rank, lanes=4, **ON) as made:
        yield made


def inputs(torch: Any) -> tuple[Any, Any, Any]:
    """(tokens, ids, weights)"""
    return torch.arange(8.0).view(2, 4), torch.tensor([[1], [0]]), torch.tensor([[0.5], [2.0]])


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_round_trip(torch, group, layout) -> None:
    tokens, ids, weights = inputs(torch)
    handle = group.route(ids, weights)
    got = group.dispatch(handle, tokens, layout=layout)
    fields = (got.tokens, got.ids, got.weights, got.counts, got.offsets)
    assert all(type(x) is torch.Tensor for x in fields)
    assert got.counts.tolist() == ([2] if layout == "rank_major" else [1, 1])
    assert got.offsets.tolist() == ([0, 2] if layout == "rank_major" else [0, 1, 2])
    assert got.offsets.dtype == torch.int32
    if layout == "rank_major":
        assert got.ids.flatten().tolist() == [1, 0] and got.weights.flatten().tolist() == [0.5, 2.0]
    out = group.combine(handle, got.tokens, weighting="topk")
    assert torch.equal(out, tokens * weights)


def test_handle_memory(torch, group) -> None:
    tokens, ids, _ = inputs(torch)
    memory = torch.zeros(group.handle_bytes + 64, dtype=torch.uint8)[64:]
    handle = group.route(ids, memory=memory)
    got = group.dispatch(handle, tokens)
    assert memory.data_ptr() <= got.counts.data_ptr() < memory.data_ptr() + group.handle_bytes
    group.combine(handle, got.tokens)
    for wrong, told in (
        (memory[::2], "not contiguous"),
        (memory.view(torch.int32), "of dtype int32"),
        (np.zeros(group.handle_bytes, np.uint8), "a NumPy array"),
        (memory[:9], "memory has 9 bytes"),
    ):
        outcome = caught(group.route, ids, memory=wrong)
        assert outcome[0] == "twInvalidArgument" and told in outcome[1], outcome
    del handle, got
    group.route(ids)
    assert not group._blocks.spare  # PyTorch's allocator reuses them, in stream order


def test_tensors_of_another_device(torch, group, place) -> None:
    tokens, ids, _ = inputs(torch)
    handle = group.route(ids)
    got = group.dispatch(handle, tokens)
    idle = group.route(ids)
    place.index, place.device = 0, torch.device("cuda:0")
    group._blocks.spare.append(torch.empty(group.handle_bytes, dtype=torch.uint8))
    place.empty = lambda shape, name, like: torch.empty(shape)
    sentence = "is a cpu tensor; this group is on cuda:0"
    for name, call in (
        ("ids", lambda: group.route(ids)),
        ("ids", lambda: idle.update(ids)),
        ("memory", lambda: group.route(ids, memory=torch.zeros(9999, dtype=torch.uint8))),
        ("rows", lambda: group.combine(handle, got.tokens)),
        ("out", lambda: group.combine(handle, tokens, out=tokens)),
        (r"out\['ids'\]", lambda: group.dispatch(handle, tokens, out={"ids": ids})),
    ):
        result, text, _ = caught(call)
        assert result == "twInvalidArgument" and re.search(f"{name} {sentence}", text), (name, text)
    assert "a NumPy array; it must be a PyTorch tensor on cuda:0" in caught(group.dispatch, handle, tokens.numpy())[1]
    assert "of type list; it must be a PyTorch tensor" in caught(group.dispatch, handle, [1])[1]
    place.index, place.device = -1, torch.device("cpu")
    assert "torch.sparse_coo; it must be strided" in caught(group.dispatch, handle, tokens.to_sparse())[1]


def test_views_of_the_window(torch, place) -> None:
    """Zero-copy, by the interface that says nothing of dtypes like bfloat16; and no child of inference_mode."""
    backing = torch.arange(64, dtype=torch.uint8)
    seen = []

    def as_tensor(memory: Any, device: Any) -> Any:
        told = memory.__cuda_array_interface__
        seen.append(told)
        begin = told["data"][0] - backing.data_ptr()
        return backing[begin : begin + told["shape"][0]]

    names = ("bfloat16", "empty", "inference_mode", "is_inference_mode_enabled", "enable_grad", "is_grad_enabled")
    place.torch = SimpleNamespace(**{name: getattr(torch, name) for name in names})
    place.torch.as_tensor = as_tensor
    view = cuda.Cuda.window_view(place, backing.data_ptr() + 16, (2, 3), "bfloat16", True, backing)
    assert (view.shape, view.dtype, view.data_ptr()) == ((2, 3), torch.bfloat16, backing.data_ptr() + 16)
    assert seen[0]["typestr"] == "|u1" and seen[0]["shape"] == (12,) and seen[0]["data"][1] is False
    with torch.inference_mode():
        nothing = cuda.Cuda.window_view(place, 0, (0, 3), "bfloat16", True, None)
    assert nothing.shape == (0, 3) and not nothing.is_inference()
    with torch.no_grad():
        kept = cuda.Cuda.window_view(place, backing.data_ptr() + 16, (2, 3), "bfloat16", True, backing)
    kept.mul_(torch.ones((), dtype=torch.bfloat16, requires_grad=True))
    assert kept.grad_fn is not None


def test_views_made_without_gradients_can_be_changed_with_them(torch) -> None:
    """Rows of a window and of a handle are shown again: an evaluation between two steps of a training is no trap."""
    tokens, ids, _ = inputs(torch)
    scale = torch.ones((), requires_grad=True)
    with tw.local_comms(1)[0] as rank, tw.Group(rank, **ON) as group:
        handle = group.route(ids)
        with torch.no_grad():
            for _ in range(2):  # in either bank
                received = group.dispatch(handle, tokens)
                shown = [received.weights, received.merged("tokens")]
                group.combine(handle, received.tokens)
        for turn in range(2):
            received = group.dispatch(handle, tokens)
            again = [received.weights, received.merged("tokens")]
            assert turn == 1 or again[0] is shown[0]
            for view in again:
                assert view.mul_(scale.to(view.dtype)).grad_fn is not None
            group.combine(handle, received.tokens.detach())


def test_views_that_autograd_took_are_made_anew(torch) -> None:
    tokens, ids, _ = inputs(torch)
    with tw.local_comms(1)[0] as rank, tw.Group(rank, **ON) as group:
        handle = group.route(ids)
        with torch.inference_mode():
            group.combine(handle, group.dispatch(handle, tokens).tokens)
        for _ in range(4):
            received = group.dispatch(handle, tokens)
            assert not received.tokens.requires_grad and not received.tokens.is_inference()
            assert not received.weights.requires_grad
            received.weights.requires_grad_()
            group.combine(handle, received.tokens.requires_grad_())


# ---- streams -------------------------------------------------------------------------------------


def test_other_streams(torch, group, place) -> None:
    """What a handle keeps is recorded where it is used; on its own stream nothing is."""
    tokens, ids, weights = inputs(torch)
    handle = group.route(ids, weights)
    block = handle._memory.data_ptr()
    place.now = SECOND
    got = group.dispatch(handle, tokens)
    assert place.recorded == [(x, SECOND) for x in (block, ids.data_ptr(), weights.data_ptr())]
    group.combine(handle, got.tokens)
    place.now = FIRST
    got = group.dispatch(handle, tokens)
    place.now = SECOND
    group.combine(handle, got.tokens)
    assert len(place.recorded) == 3  # once for each stream
    place.now = THIRD
    group.combine(handle, torch.zeros(1, 2, 4))
    assert place.recorded[3:] == [(block, THIRD)]
    handle.update(ids, weights)
    group.combine(handle, group.dispatch(handle, tokens).tokens)
    assert len(place.recorded) == 4


def test_completed_on_another_stream(torch, group, place) -> None:
    tokens, ids, _ = inputs(torch)
    handle = group.route(ids)
    pending = group.dispatch(handle, tokens, send_only=True, layout="expert_major")
    outputs = [pending._result.tokens, pending._result.ids, pending._result.weights]
    place.now = SECOND
    got = pending.result()
    assert place.waits == [(SECOND, FIRST)]
    wanted = [x.data_ptr() for x in (tokens, *outputs, handle._memory)]
    assert place.recorded == [(x, SECOND) for x in wanted]
    sent = group.combine(handle, got.tokens, send_only=True)
    sent.result()
    assert place.waits == [(SECOND, FIRST)] and len(place.recorded) == len(wanted)
    sent = group.combine(handle, got.tokens, send_only=True)
    place.now = THIRD
    out = sent.result()
    assert place.waits[1:] == [(THIRD, SECOND)]
    assert place.recorded[len(wanted) :] == [(x.data_ptr(), THIRD) for x in (got.tokens, out, handle._memory)]


def test_each_call_is_on_the_stream_of_its_moment(torch, group, place) -> None:
    tokens, ids, _ = inputs(torch)
    handle, rows = group.route(ids), torch.zeros(1, 2, 4)

    def dispatch() -> None:
        group.dispatch(handle, tokens)

    def combine() -> None:
        group.combine(handle, rows)

    for call in (dispatch, combine):
        for _ in range(2):
            place.now = FIRST
            dispatch()
            call()
            place.now = 5  # which C sees, and refuses on the CPU
            with pytest.raises(tw.InvalidArgument, match="stream is 0x5"):
                call()


@pytest.mark.parametrize("captured", [False, True])
def test_routing_lives_until_it_is_read(torch, group, place, captured) -> None:
    """By the first dispatch; where that is captured, each replay reads it again."""
    place.captured = captured
    tokens, ids, weights = inputs(torch)
    alive = weakref.ref(ids)
    handle = group.route(ids, weights)
    del ids, weights
    assert alive() is not None
    assert caught(group.dispatch, handle, tokens, bound=9)[0] == "twInvalidArgument"
    assert alive() is not None
    group.combine(handle, group.dispatch(handle, tokens).tokens)
    gc.collect()
    assert (alive() is not None) == captured
    handle.update(torch.tensor([[1], [0]]))
    gc.collect()
    assert alive() is None
    assert handle._unread is not None


def test_counts_on_the_host(torch, group, place) -> None:
    tokens, ids, _ = inputs(torch)
    handle = group.route(ids)
    group.dispatch(handle, tokens)
    counts, total = handle.num_recv_tokens()
    assert counts.tolist() == [2] and total == 2
    place.captured = True
    with pytest.raises(tw.InvalidUsage, match="a stream that is captured cannot"):
        handle.num_recv_tokens()


def test_ops(torch, group) -> None:
    from tokenway.pytorch import ops

    group.device = None  # outputs are made there
    tokens, ids, weights = inputs(torch)
    number = ops.register(group)
    for key in ("CPU", "CUDA"):
        for name in ("dispatch", "combine"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tokenway::{name}", key)
    elsewhere = ops.start().to("meta")
    with pytest.raises(tw.InvalidArgument, match="order is a meta tensor; it must be on the CPU"):
        ops._dispatch(tokens, ids, weights, elsewhere, number, 2, "rank_major")
    got = torch.ops.tokenway.dispatch(tokens, ids, weights, ops.start(), number, 2, "rank_major")
    with pytest.raises(tw.InvalidArgument, match="order is a meta tensor"):
        ops._combine(got[0], elsewhere, number, 2, "none")
    out, _ = torch.ops.tokenway.combine(got[0], got[4], number, 2, "none")
    assert torch.equal(out, tokens)


# ---- errors --------------------------------------------------------------------------------------


def test_check(group, monkeypatch) -> None:
    """Sticky errors every time, others once, and not if a call has raised them."""
    empty = _native.read_record(group.pointer)
    group.check()

    def found(**changes: Any) -> None:
        record = tw.ErrorRecord(**(vars(empty) | changes))
        monkeypatch.setattr(_native, "read_record", lambda pointer: record)

    found(result="twInvalidArgument", token=5, k=1, value=99, step=3, message="ids[5, 1] is 99")
    with pytest.raises(tw.InvalidArgument, match=r"ids\[5, 1\] is 99") as raised:
        group.check()
    record = raised.value.record
    assert record is not None and (record.token, record.k, record.value) == (5, 1, 99)
    group.check()
    found(result="twInvalidArgument", token=5, k=1, value=99, step=4, message="ids[5, 1] is 99")
    with pytest.raises(tw.InvalidArgument):
        group.check()
    found(result="twTimeout", sticky=True, peer=0, message="rank 0 is late")
    for _ in range(2):
        with pytest.raises(tw.PeerTimeout, match="rank 0 is late"):
            group.check()


def test_check_on_the_cpu() -> None:
    with tw.local_comms(1)[0] as rank:
        group = tw.Group(rank, **ON)
        group.check()
        group.abort()
        for _ in range(2):
            with pytest.raises(tw.PeerAborted):
                group.check()
        group.close()


# ---- devices -------------------------------------------------------------------------------------


def test_numbers_of_devices(torch) -> None:
    for given, index in ((3, 3), (np.int64(1), 1), ("cuda:2", 2), (torch.device("cuda:1"), 1), ("cuda", None)):
        assert cuda.index_of(given) == index
    for given in (-1, True, 2**31, "cpu", "cuda:", "cuda:x", 1.0, torch.device("cpu"), None):
        with pytest.raises(tw.InvalidArgument, match=re.escape(f"device is {given!r}; it must be the number of")):
            cuda.index_of(given)
    for devices, told in (("cuda", "a list"), (0, "a list"), ([0], "1 entries; it must have 2"), ([0, "x"], "'x'")):
        with pytest.raises(tw.InvalidArgument, match=told):
            tw.local_comms(2, devices=devices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "local", "count", "index"),
    [(None, None, 2, 0), (None, "1", 2, 1), (0, "3", 2, 1), (0, "3", 1, 0), (5, "1", 8, 5), (0, None, 4, 0)],
)
def test_the_local_device(torch, monkeypatch, chosen, local, count, index) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: chosen is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    made_current = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert cuda.choose_local_device() == index
    assert made_current == ([index] if local is not None and not chosen else [])


def test_no_local_device(torch, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(tw.Unsupported, match=r"PyTorch .* finds no CUDA device"):
        cuda.choose_local_device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(tw.InvalidArgument, match="LOCAL_RANK is 'one'; it must be an integer"):
        cuda.choose_local_device()


def test_connect_by_device(monkeypatch) -> None:
    """Whichever way the ranks were started, the device decides which kind of comm they get."""
    made = []
    met = SimpleNamespace(rank=1)
    monkeypatch.setattr(tw.Comm, "cuda", lambda *args: made.append(args) or met)
    for name in ("TOKENWAY_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tw.connect(device=3)
    with tw.connect(device="cpu") as alone:
        assert alone.device is None
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    tw.connect(device="cuda:1", timeout=7)
    for name, value in ((comm.RANK, "0"), (comm.NRANKS, "4"), (comm.ADDRESS, "x")):
        monkeypatch.setenv(name, value)
    tw.connect(device=2)
    assert [(*args[:2], *args[3:]) for args in made] == [(0, 1, 3, None), (1, 2, 1, 7), (0, 4, 2, None)]
    monkeypatch.delenv("TOKENWAY_RANK")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(tw.Unsupported, match="the NVLink backend connects ranks of one host only"):
        tw.connect(device=0)


def connect_where_one_cannot() -> Any:
    """Over a process group, in which the others would wait for the one."""
    import torch.distributed as dist

    rank = int(os.environ["TOKENWAY_RANK"])
    store = dist.FileStore(os.environ["STORE"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    outcome = caught(tw.connect, device="gpu" if rank == 1 else "cpu", timeout=PATIENT)
    dist.destroy_process_group()
    return outcome[:2]


@pytest.mark.processes
@pytest.mark.slow
def test_a_wrong_device_reaches_the_peers(tmp_path) -> None:
    with tw.Ranks(connect_where_one_cannot, 2, env={"STORE": str(tmp_path / "store")}) as ranks:
        outcomes = ranks.wait(120)
    assert all(o is not None and o.ok for o in outcomes), outcomes
    (first, told), (second, sentence) = (o.value for o in outcomes if o is not None)
    assert (first, second) == ("twPeerRefused", "twInvalidArgument")
    assert told == f"rank 1 cannot connect: {sentence}" and sentence.startswith("device is 'gpu'")


def test_info_of_devices(torch, monkeypatch) -> None:
    facts = {"name": "A GPU", "major": 9, "minor": 0, "total_memory": 3 << 29, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**facts))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a == 0)
    monkeypatch.setattr(info, "_nvlink_backend", lambda: info.AVAILABLE)
    text = info.text(info.collect())
    line = "A GPU, 132 SMs, 1.5 GiB, compute capability 9.0, reaches the memory of"
    assert re.search(rf"cuda:0 +{line} cuda:1\n", text) and re.search(rf"cuda:1 +{line} no other\n", text)


# ---- ranges --------------------------------------------------------------------------------------


def test_ranges(torch, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))

    def method(group: Any, x: int) -> float:
        """Says what it is."""
        return 1 / x

    monkeypatch.delenv(cuda.NVTX, raising=False)
    assert cuda.ranged("name")(method) is method
    monkeypatch.setenv(cuda.NVTX, "1")
    ranged = cuda.ranged("name")(method)
    assert ranged.__doc__ == method.__doc__
    assert ranged(SimpleNamespace(device=None), 1) == 1 and seen == []
    assert ranged(SimpleNamespace(device=0), 2) == 0.5 and seen == ["name", "end"]
    with pytest.raises(ZeroDivisionError):
        ranged(SimpleNamespace(device=0), x=0)
    assert seen == ["name", "end"] * 2


def test_collections_are_ranges(torch, monkeypatch) -> None:
    """Of the garbage collector, from the first group on a device on, once, and only where the environment asks."""
    seen = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gc, "callbacks", [])
    monkeypatch.setenv(cuda.NVTX, "0")
    cuda.Cuda(0)
    assert gc.callbacks == []
    monkeypatch.setenv(cuda.NVTX, "1")
    for index in (0, 1):
        cuda.Cuda(index)
    assert gc.callbacks == [cuda.mark_collection]
    for generation in (1, 2):
        for phase in ("start", "stop"):
            cuda.mark_collection(phase, {"generation": generation, "collected": 0, "uncollectable": 0})
    assert seen == ["python gc 1", "end", "python gc 2", "end"]
