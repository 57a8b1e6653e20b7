"""Comms and groups that integrations share: one for each process group, whatever rows are, as long as it lives."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from frameworks import programs_of
from harness import AT_ONCE, HANGS, PATIENT, caught, said

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.usefixtures("torch")]

EXPERTS, TOP_K = 4, 2


def join(store: str) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, nranks = int(os.environ["TOKENWAY_RANK"]), int(os.environ["TOKENWAY_NRANKS"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nranks)
    return rank


def shared_of(process_group: Any = None) -> Any:
    from tokenway.integrations import groups

    return groups.of(process_group, timeout=PATIENT).shared(experts=EXPERTS, top_k=TOP_K, mode="auto")


def trained(view: Any, count: int, layout: str) -> list[bool]:
    """A dispatch and a combine, forward and backward, where expert e multiplies by e + 1: whether output and gradients
    are right, exactly, as numbers are whole."""
    import torch

    from tokenway import autograd

    rng = torch.Generator().manual_seed(view.rank)
    dtype = getattr(torch, view.dtype)
    x = torch.randint(-3, 4, (count, view.hidden), generator=rng).to(dtype).requires_grad_()
    weights = torch.randint(1, 3, (count, TOP_K), generator=rng).float().requires_grad_()
    ids = torch.rand(count, EXPERTS, generator=rng).topk(TOP_K).indices
    routed = autograd.dispatch(view, x, ids, weights, layout=layout)
    grouped = autograd.by_expert(routed)
    first = view.rank * view.num_local_experts
    factors = torch.cat([torch.full((n,), first + e + 1.0) for e, n in enumerate(grouped.sizes)])
    out = autograd.combine(routed, grouped.sum(grouped.rows * (grouped.weights * factors)[:, None]))
    out.float().sum().backward()
    factor = (weights * (ids + 1)).sum(1, keepdim=True)
    wanted = [(factor * x.float()).to(dtype), factor.expand_as(x).to(dtype), (ids + 1) * x.float().sum(1, keepdim=True)]
    return [torch.equal(*pair) for pair in zip((out, x.grad, weights.grad), wanted, strict=True)]


def all_row_types(store: str) -> Any:
    import torch
    import torch.distributed as dist

    from tokenway.integrations import groups

    join(store)
    shared = shared_of()
    right, windows = [], []
    for hidden, dtype, most in ((8, "float32", 3), (6, torch.bfloat16, 256), (32, "float32", 5), (8, "float32", 300)):
        view = shared.with_room(tw.RowType(hidden, dtype), most)
        for layout in ("rank_major",) * (most <= 256) + ("flat", "grouped"):
            right += trained(view, most, layout)
        windows.append((view.window_bytes().window, view.max_tokens))
    again = shared.with_room(tw.RowType(8, torch.float32), 300)
    said = str(shared), len(groups.living()), view is again, shared_of() is shared, shared.steps
    groups.close()
    ended = shared.group is None
    right += trained(shared.with_room(tw.RowType(8), 4), 4, "flat")  # made anew
    groups.close()
    dist.destroy_process_group()
    return right, windows, said, ended


def test_one_group_for_all_rows(tmp_path) -> None:
    """Gradients are right through rows of any type, and the window is as large as the largest."""
    for right, windows, told, ended in tw.run(all_row_types, 2, str(tmp_path / "store"), timeout=HANGS):
        assert right == [True] * 36
        sizes, tokens = zip(*windows, strict=True)
        assert tokens == (256, 256, 256, 512)
        assert sizes[0] == sizes[1] < sizes[2] < sizes[3]
        text, living, same_view, same, steps = told
        assert (living, same_view, same, steps) == (1, True, True, 44)  # four for each of eleven
        assert text.startswith("SharedGroup(experts=4, top_k=2") and text.endswith("steps=44)")
        assert ended


def kept_handles(store: str) -> Any:
    """Routings of many sizes, by handles that are kept and by new ones; and which handles those were."""
    import torch
    import torch.distributed as dist

    from tokenway.integrations import groups

    rank = join(store)
    shared, used, right = shared_of(), [], []

    def step(tokens: int, room: int, kind: str = "float32") -> Any:
        view = shared.with_room(tw.RowType(8, kind), room)
        rng = torch.Generator().manual_seed(10 * tokens + rank)
        ids = torch.rand(tokens, EXPERTS, generator=rng).topk(TOP_K).indices
        x, weights = torch.rand(tokens, 8, generator=rng).to(getattr(torch, kind)), torch.rand(tokens, TOP_K)
        found = []
        for make in (shared.route, lambda view, *routing: view.route(*routing)):
            handle, largest = make(view, ids, weights), view.max_tokens
            came = view.dispatch(handle, x, layout="rank_major", bound=tokens)
            shown = [came.merged(name) for name in ("ids", "weights")]
            found.append([each.clone() for each in (*shown, view.combine(handle, came.merged("tokens").clone()))])
            if make == shared.route:
                used.append(handle)
                shared.keep(handle, largest)
        right.extend(torch.equal(*pair) for pair in zip(*found, strict=True))
        return view

    for tokens in (3, 5, 1):
        view = step(tokens, 5)
    wrong = caught(lambda: shared.route(view, torch.full((1, TOP_K), EXPERTS), None))
    for kind, room in (("float32", 5), ("bfloat16", 5), ("float32", 5), ("float32", 300), ("float32", 300)):
        step(4, room, kind)
    last = weakref.ref(used[-1])
    numbers = [next(i for i, other in enumerate(used) if other is each) for each in used]
    used.clear()
    held = last() is not None
    groups.close()
    gone = last() is None
    dist.destroy_process_group()
    return right, numbers, wrong, held, gone


def test_handles_that_are_kept(tmp_path) -> None:
    """A kept handle brings what a new one does. It serves rows of its type and groups of its size, after an error no
    more, and ends with the group."""
    for right, numbers, wrong, held, gone in tw.run(kept_handles, 2, str(tmp_path / "store"), timeout=HANGS):
        assert right == [True] * 24
        assert numbers == [0, 0, 0, 3, 4, 3, 6, 6]
        said(wrong, "twInvalidArgument", r"ids\[0, 0\]")
        assert held and gone


def several(store: str) -> Any:
    import torch.distributed as dist

    from tokenway.integrations import groups

    rank = join(store)
    pair = dist.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    same = (
        groups.of(pair) is groups.of(pair),
        groups.of(mesh) is groups.of(mesh.get_group()),
        groups.of() is groups.of(),
    )
    apart = groups.of(pair) is groups.of()
    other = groups.of().shared(experts=EXPERTS, top_k=TOP_K) is shared_of()
    quiet = groups.living()  # nothing was made, and nobody asked
    rows = tw.RowType(8, "float32")
    right = trained(shared_of(pair).with_room(rows, 2), 2, "flat") + trained(shared_of().with_room(rows, 2), 2, "flat")
    comms = groups.of(pair).comm is groups.of().comm
    for each in (pair, None):
        groups.close(each)
    dist.destroy_process_group()
    return same, apart, other, all(g.group is None for p in quiet for g in p.groups.values()), right, comms, rank


def test_a_comm_for_each_process_group(tmp_path) -> None:
    for rank, found in enumerate(tw.run(several, 2, str(tmp_path / "store"), timeout=HANGS)):
        assert found == ((True, True, True), False, False, True, [True] * 6, False, rank)


def mapped() -> int:
    """Bytes of windows in this process' memory: files that have no name."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    ends = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ends)


def destroyed(store: str) -> Any:
    import torch.distributed as dist

    from tokenway.integrations import groups

    rank = join(store)
    pair, before = dist.new_group([0, 1]), mapped()
    shared = shared_of(pair)
    view = shared.with_room(tw.RowType(1024, "float32"), 512)
    right, taken = trained(view, 4, "flat"), mapped() - before
    gone = [weakref.ref(each) for each in (pair, groups.of(pair))]
    began = time.monotonic()
    if rank == 1:
        dist.destroy_process_group(pair)
        del pair
        gc.collect()
        told, left = "", len(groups.living())
        again = caught(shared.with_room, tw.RowType(8), 4)[:2]
        left_over, dead = mapped() - before, [each() for each in gone]
        dist.barrier()
    else:  # who waits for it hears of it
        told, left, again = caught(trained, view, 4, "flat")[:2], 0, ""
        dist.barrier()
        dist.destroy_process_group(pair)
        del pair
        gc.collect()
        left_over, dead = mapped() - before, [each() for each in gone]
    dist.destroy_process_group()
    return right, taken, told, left, again, left_over, dead, time.monotonic() - began


def test_a_process_group_that_is_destroyed(tmp_path) -> None:
    """Its comm, groups and windows go with it, without asking anybody."""
    first, second = tw.run(destroyed, 2, str(tmp_path / "store"), timeout=HANGS)
    for right, taken, _, _, _, left_over, dead, took in (first, second):
        assert right == [True] * 3 and taken > 2**20 and left_over == 0
        assert dead == [None, None] and took < PATIENT
    said(first[2], "twPeerAborted", "rank 1")
    assert second[3] == 0
    said(second[4], "twInvalidUsage", "the process group is destroyed")


def unlike(store: str) -> Any:
    """Rank 1 names another size than rank 0: where the group is made, and where it grows."""
    import torch.distributed as dist

    from tokenway.integrations import groups

    rank = join(store)
    rows, told = tw.RowType(8, "float32"), []
    shared = shared_of()
    began = time.monotonic()
    told.append(caught(shared.with_room, rows, (60, 600)[rank])[:2])
    view = shared.with_room(rows, 60)
    told.append(caught(shared.with_room, rows, (300, 1000)[rank])[:2])
    took = time.monotonic() - began
    right = trained(view, 4, "flat")
    groups.close()
    dist.destroy_process_group()
    return told, right, took


def test_ranks_that_name_unlike_sizes(tmp_path) -> None:
    """All of them are told, at once."""
    for told, right, took in tw.run(unlike, 2, str(tmp_path / "store"), timeout=HANGS):
        said(told[0], "twConfigMismatch", "max_tokens")
        said(told[1], "twConfigMismatch", "max_tokens")
        assert right == [True] * 3
        assert took < AT_ONCE


# ---- one process -----------------------------------------------------------------------------------------------------

ALONE = """
import gc, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("error", ResourceWarning)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import tokenway as tw
from tokenway.integrations import groups
shared = groups.of().shared(experts=2, top_k=1)
group = shared.with_room(tw.RowType(8, "float32"), 4)
handle = group.route(torch.tensor([[1]]))
rows = group.dispatch(handle, torch.ones(1, 8)).tokens
group.combine(handle, rows)
"""


@pytest.mark.parametrize("end", ["", "del shared, group, handle, rows; dist.destroy_process_group()"])
def test_a_process_that_ends(end: str) -> None:
    """It prints nothing, and waits for nobody."""
    command = [sys.executable, "-c", ALONE + end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_group_is_not_made_in_a_capture(monkeypatch) -> None:
    """Which would ask the other ranks, nor by settings that cannot be told from others. (The CPU captures nothing, so
    PyTorch is made to say that it does.)"""
    import torch
    import torch.distributed as dist

    from tokenway.integrations import groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shared = groups.of().shared(experts=2, top_k=1)
        small = tw.RowType(8, "float32")
        places = [0, 0], [0, 1]
        said(caught(groups.of().shared, experts=2, top_k=1, expert_map=places), "twInvalidArgument", "hashable")
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            said(caught(shared.with_room, small, 4), "twInvalidUsage", "before the capture")
            assert shared.group is None
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            view = shared.with_room(small, 4)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            said(caught(shared.with_room, small, 257), "twInvalidUsage", "before the capture")
            said(caught(shared.with_room, tw.RowType(9, "float32"), 4), "twInvalidUsage", "before the capture")
            assert shared.with_room(small, 256) is view  # there is room
        groups.close()
    finally:
        dist.destroy_process_group()


def test_the_guide() -> None:
    """The function that docs/FRAMEWORKS.md shows, where experts leave rows as they are."""
    import torch
    import torch.distributed as dist

    from tokenway.integrations import groups

    (program,) = programs_of("For an integration")
    names: dict[str, Any] = {}
    exec(program, names)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.arange(24.0).view(3, 8).requires_grad_()
        ids, weights = torch.tensor([[0, 7], [3, -1], [5, 2]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
        out = names["layer"](x, ids, weights, lambda rows, offsets: rows[: offsets[-1]], None, 8)
        out.sum().backward()
        factor = torch.tensor([[3.0], [3], [11]])
        assert torch.equal(out, x * factor) and torch.equal(x.grad, factor.expand(3, 8))
        assert [shared.steps for peers in groups.living() for shared in peers.groups.values()] == [4]
        groups.close()
    finally:
        dist.destroy_process_group()


def test_what_is_no_process_group_of_this_rank() -> None:
    import torch.distributed as dist

    from tokenway.integrations import groups

    said(caught(groups.of), "twInvalidUsage", "torch.distributed is not initialised")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
        told = r"process_group is a DeviceMesh of dimensions \('dp', 'ep'\); give one's, as mesh.get_group\('ep'\)"
        said(caught(groups.of, mesh), "twInvalidArgument", told)
        told = r"this rank \(global rank 0\) is not in process_group"
        said(caught(groups.of, dist.GroupMember.NON_GROUP_MEMBER), "twInvalidArgument", told)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_said_of_sizes() -> None:
    from tokenway.integrations.groups import Sizes, of

    for wrong in (0, -1, 2.5, 2**31):
        said(caught(Sizes, wrong), "twInvalidArgument", r"^max_tokens is .*; it must be None or an integer from 1 to")
    said(caught(Sizes().room, 3, "so"), "twInvalidUsage", r"say how many a rank has at most.* \(so\)")
    said(caught(Sizes(2).check, 3, "so"), "twInvalidArgument", r"^tokens are 3; at most 2 were said \(so\)")
    assert (Sizes(8).room(3, ""), Sizes(8, equal=True).room(9, ""), Sizes(equal=True).room(0, "")) == (8, 9, 1)
    said(caught(of), "twInvalidUsage", "torch.distributed is not initialised")
    said(caught(of, object(), device="meta"), "twInvalidArgument", "^device is 'meta'; it must be 'cpu' or a CUDA")


# ---- frameworks that are not there -----------------------------------------------------------------------------------


IMPORTS = """
import sys
FRAMEWORKS = ("torch", "transformers", "accelerate", "flashinfer", "megatron", "tensorrt_llm")
import tokenway, tokenway.integrations.flashinfer, tokenway.integrations.megatron, tokenway.integrations.transformers
import tokenway.integrations.tensorrt_llm
print([name for name in FRAMEWORKS if name in sys.modules])
import tokenway.integrations.by_expert, tokenway.integrations.rank_major, tokenway.integrations.transformers_experts
import tokenway.compat.deep_ep
print([name for name in FRAMEWORKS if name in sys.modules])
"""


def test_no_framework_is_imported() -> None:
    """Before it is asked for; PyTorch neither."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=HANGS, check=True)
    assert done.stdout == "[]\n['torch']\n"


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({}, r"^torch is not installed; needed is torch from 2\.7 on: pip install 'tokenway\[transformers\]'"),
        ({"torch": "2.6.0+cpu"}, r"^torch 2\.6\.0\+cpu is installed; needed is torch from 2\.7 on"),
        ({"torch": "2.7.0"}, r"^transformers is not installed; needed is transformers from 5\.24 on, before 5\.25"),
        ({"torch": "2.13.0", "transformers": "5.23.9"}, r"^transformers 5\.23\.9 is installed; needed is .*5\.24 on"),
        ({"torch": "2.13.0", "transformers": "5.25.0"}, r"^transformers 5\.25\.0 is installed; .*before 5\.25"),
        ({"torch": "2.13.0", "transformers": "6"}, r"^transformers 6 is installed; .*before 5\.25"),
        ({}, r"^torch is not installed.*tokenway\[flashinfer\]'"),
        ({"torch": "2.7.0"}, r"^flashinfer-python is not installed; needed is .* from 0\.7\.2 on, before 0\.7\.3"),
        ({"torch": "2.7.0", "flashinfer-python": "0.7.1.post2"}, r"^flashinfer-python 0\.7\.1\.post2 is installed"),
        ({"torch": "2.7.0", "flashinfer-python": "0.8.0"}, r"^flashinfer-python 0\.8\.0 is installed"),
        ({"torch": "2.7.0"}, r"^megatron-core is not installed; needed is .* from 0\.16\.1 on, before 0\.17"),
        ({"torch": "2.7.0", "megatron-core": "0.16.0"}, r"^megatron-core 0\.16\.0 is installed"),
        ({"torch": "2.7.0", "megatron-core": "0.17.0rc1"}, r"^megatron-core 0\.17\.0rc1 is installed"),
        ({"torch": "2.6.0"}, r"^torch 2\.6\.0 is installed; .*tokenway\[torchtitan\]'"),
        ({"torch": "2.7.0"}, r"^torchtitan is not installed; needed is .* from 0\.3\.0 on, before 0\.4"),
        ({"torch": "2.7.0", "torchtitan": "0.4.0"}, r"^torchtitan 0\.4\.0 is installed"),
        ({"torch": "2.7.0"}, r"^tensorrt-llm is not installed; needed is .* from 1\.2 on, before 1\.5"),
        ({"torch": "2.7.0", "tensorrt-llm": "1.5.0rc0"}, r"^tensorrt-llm 1\.5\.0rc0 is installed"),
    ],
)
def test_versions_that_are_not_supported(monkeypatch, versions, told) -> None:
    from tokenway.integrations import flashinfer, megatron, tensorrt_llm, transformers

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    begin = flashinfer.register if "flashinfer" in told else transformers.register
    begin = partial(megatron.through_tokenway, None) if "megatron" in told else begin
    begin = tensorrt_llm.register if "tensorrt-llm" in told else begin
    begin = partial(importlib.import_module, "tokenway.integrations.torchtitan") if "torchtitan" in told else begin
    said(caught(begin), "twUnsupported", told)


def test_versions_that_are_supported(monkeypatch) -> None:
    from tokenway.integrations import supported

    for found in ("5.24", "5.24.0", "5.24.7+local", "5.24.1.dev0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda package, found=found: found)
        supported.check("transformers", "5.24", "5.25", "transformers")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.7.2.post1")
    supported.check("flashinfer-python", "0.7.2", "0.7.3", "flashinfer")


@pytest.mark.parametrize("closed", [False, True])
def test_a_close_that_raises(torch: Any, closed: bool) -> None:
    """A group that is closed all the same is forgotten, with what was left open, and one that is not is still there.
    Threads that users have in it have ended before, once."""
    from tokenway.integrations.groups import OpenCombines, SharedGroup

    ended: list[int] = []

    class Group:
        def close(self) -> None:
            assert ended == [1]
            self.closed = closed
            raise tw.CallMismatch("another rank creates a group")

    shared = object.__new__(SharedGroup)
    shared._views, shared.group, shared.open = {1: None}, Group(), OpenCombines()
    shared._spare, shared.before_close = [(None, 1)], [lambda: ended.append(1)]
    refused: list[int] = []
    shared.open.add(0, lambda: refused.append(0))
    with pytest.raises(tw.CallMismatch):
        shared.close()
    shared.open.refuse()
    assert (shared.group is None) == closed == (not shared._views) == (not refused) == (not shared._spare)
