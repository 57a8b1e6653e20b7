"""Views of memory that the library owns: what they show after their group, and that the memory ends with them."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PATIENT, Env, Processes
from test_torch import with_torch

import tokenway as tw
from tokenway import _native

TOKENS, HIDDEN = 4, 6
SETTINGS: dict[str, Any] = {"experts": 6, "top_k": 2, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
SETTINGS |= {"payloads": {"more": (3, "int64")}, "timeout": 20}
PAGE = os.sysconf("SC_PAGESIZE")
MODES = {"rank_major": {}, "flat": {"mode": "high_throughput"}}


def made(env: Env, layout: str, **more: Any) -> tw.Group:
    return tw.Group(env.comm, **(SETTINGS | MODES[layout] | more))


def dispatched(env: Env, group: tw.Group, value: int) -> tw.handle.Received:
    """Rows of one value, from every rank."""
    tensor = env.backend.tensor
    ids = np.array([[t % 6, (t + 3) % 6] for t in range(TOKENS)], np.int32)
    handle = group.route(tensor(ids), tensor(np.full((TOKENS, 2), 0.5, np.float32)))
    if group.exact:
        group.exchange_counts(handle)
    tokens = tensor(np.full((TOKENS, HIDDEN), value, np.float32))
    return group.dispatch(handle, tokens, {"more": tensor(np.full((TOKENS, 3), value, np.int64))})


def shown(env: Env, received: tw.handle.Received) -> dict[str, np.ndarray]:
    """Copies of all that a dispatch shows and that has come."""
    fields = {name: getattr(received, name) for name in ("tokens", "ids", "weights", "counts")}
    arrays = {name: env.backend.array(x) for name, x in (fields | received.payloads).items()}
    came = arrays["counts"]
    if received.layout == "rank_major":
        kept = np.arange(arrays["ids"].shape[1]) < came[:, None]
    else:
        kept = np.arange(len(arrays["ids"])) < came.sum()
    return {name: x if name == "counts" else x[kept] for name, x in arrays.items()}


def same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


# ---- the end of a group -----------------------------------------------------------------------------------------


def run_closed(env: Env, layout: str, torch: bool, end: str) -> None:
    """Views of a group that has ended are nobody else's, whoever takes memory next; writing to them harms nobody."""
    env = with_torch(env) if torch else env
    group = made(env, layout)
    gathered = group.all_gatherv(
        env.backend.tensor(np.full((2, 5), env.rank, np.int32)), [2] * env.nranks, layout="rank_major"
    ).rows
    assert (env.backend.array(gathered) == np.arange(env.nranks)[:, None, None]).all()
    received = dispatched(env, group, 7)  # it may take the bank of the gather's rows, which are over
    before, view = shown(env, received), received.tokens[-1:]
    assert (before["tokens"] == 7).all() and len(before["ids"])
    other = None
    if end != "close":
        made(env, layout).close()  # all have what was dispatched
    if end == "shrink":
        other = group.shrink()
    elif end == "abort":
        group.abort()
    group.close()
    if end != "close":  # peers may have noticed later than this rank
        before = shown(env, received)
        if other is not None:
            other.close()
    others = [made(env, layout) for _ in range(3)]
    theirs = [dispatched(env, other, 20 + i) for i, other in enumerate(others)]
    assert same(shown(env, received), before), "of another group"
    rows = [env.backend.array(one.tokens) for one in theirs]
    gathered[...] = 9
    received.payloads["more"][...] = 9
    received.tokens[...] = 9  # at last, as the gather's rows may have had their place in the bank
    assert all(np.array_equal(env.backend.array(one.tokens), was) for one, was in zip(theirs, rows, strict=True))
    for i, (other, one) in enumerate(zip(others, theirs, strict=True)):
        sums = env.backend.array(other.combine(one.handle, one.tokens))
        assert (sums % (20 + i) == 0).all() and sums.min() > 0
        other.close()
    assert (env.backend.array(received.tokens) == 9).all()
    del received, gathered, group
    gc.collect()
    assert (env.backend.array(view) == 9).all(), "a view of a view alone"


@pytest.mark.parametrize("layout", MODES)
def test_closed(world, layout) -> None:
    world(2).run(run_closed, layout, False, "close")


@pytest.mark.parametrize("end", ["abort", "shrink"])
def test_ended_otherwise(world, end) -> None:
    world(2).run(run_closed, "rank_major", False, end)


@pytest.mark.torch
@pytest.mark.parametrize("layout", MODES)
def test_closed_with_pytorch(torch, processes, layout) -> None:
    processes(2).run(run_closed, layout, True, "close")


# ---- what is kept, and no longer ----------------------------------------------------------------------------------


EMULATED = hasattr(_native.lib, "tokenway_emulated_launches")
WINDOW = "tokenway-emulator" if EMULATED else "tokenway-window"


def windows(expected: int) -> bool:
    """Whether this process has so many mappings of windows, or soon will: a device's end in a thread of their own."""
    until = time.monotonic() + 60
    while (found := Path("/proc/self/maps").read_text().count(WINDOW)) != expected:
        if not EMULATED or time.monotonic() > until:
            print(f"{found} windows, not {expected}")
            return False
        time.sleep(0.01)
    return True


def run_own_alone(env: Env) -> None:
    """A view keeps one mapping, its rank's; peers are not held up, nor asked."""
    group = made(env, "rank_major")
    assert windows(env.nranks)
    received = dispatched(env, group, 3)
    group.close()
    assert windows(1)
    if env.rank == 0:
        del received
        assert windows(0), "collected by counting references"
    with made(env, "rank_major") as other:
        assert windows(env.nranks + (env.rank != 0))
        dispatched(env, other, 4).handle.release()
    assert windows(env.rank != 0)


def test_a_view_keeps_its_own_window_alone(backend) -> None:
    if backend not in ("cpu", "emulated"):
        pytest.skip("of windows that are files in memory")
    Processes(backend, 3).run(run_own_alone)


def in_use() -> tuple[int, int, int]:
    """(mappings, descriptors, MiB of address space) of this process. Emulated devices keep stacks: of windows alone."""
    maps = Path("/proc/self/maps").read_text()
    descriptors = len(os.listdir("/proc/self/fd"))
    if EMULATED:
        return maps.count(WINDOW), descriptors, 0
    return len(maps.splitlines()), descriptors, int(Path("/proc/self/statm").read_text().split()[0]) * PAGE >> 20


def run_many(env: Env, count: int, torch: bool) -> list[tuple[int, int, int]]:
    """Groups made, viewed, closed and dropped. What they take, after the first few and after all."""
    env = with_torch(env) if torch else env
    ids, tokens = np.array([[0]], np.int32), np.ones((1, 8192), np.float32)
    kept: list[Any] = []
    found = []
    for i in range(count):
        group = tw.Group(env.comm, experts=2, top_k=1, hidden=8192, max_tokens=16, dtype="float32", timeout=PATIENT)
        handle = group.route(env.backend.tensor(ids))
        received = group.dispatch(handle, env.backend.tensor(tokens))
        kept = [received.tokens, received.counts]  # those of one closed group are alive while the next is there
        group.combine(handle, received.tokens)
        group.close()
        del received, handle, group
        if i in (count // 5, count - 1):
            found.append(in_use())
    del kept
    return found


def many(worlds: Any, count: int, torch: bool = False) -> None:
    for first, last in worlds.run(run_many, count, torch):
        # A group's window has 2 MiB, so that one of each would be 1600 MiB and as many mappings.
        assert last[0] - first[0] < 40 and last[1] - first[1] < 20 and last[2] - first[2] < 256, (first, last)


def test_a_thousand_groups(world, backend) -> None:
    many(world(2), 1000 if backend == "cpu" else 25)


@pytest.mark.torch
def test_a_thousand_groups_with_pytorch(torch, processes, backend) -> None:
    many(processes(1), 1000 if backend == "cpu" else 25, True)


def run_counted(env: Env, torch: bool) -> None:
    """Nothing here waits for the collector of cycles."""
    env = with_torch(env) if torch else env
    gc.collect()
    gc.disable()
    try:
        group = made(env, "rank_major")
        received = dispatched(env, group, 3)
        fields = received.tokens, received.ids, received.counts
        keeper, dropped = weakref.ref(group._outputs.keeper), weakref.ref(group)
        received.handle.release()
        group.close()
        del received, group
        assert dropped() is None and keeper() is not None
        del fields
        assert keeper() is None
    finally:
        gc.enable()


def test_counting_references_is_enough(world) -> None:
    world(2).run(run_counted, False)


@pytest.mark.torch
def test_counting_references_is_enough_with_pytorch(torch, processes) -> None:
    processes(1).run(run_counted, True)


# ---- keepers, threads and processes ---------------------------------------------------------------------------------


def run_threads(env: Env) -> None:
    """The last view may go in any thread, also while groups are made and closed in this one."""
    views: list[Any] = []
    threads = []
    for i in range(30):
        with made(env, "rank_major") as group:
            received = dispatched(env, group, i)
            views.append(received.tokens)
            received.handle.release()
            del received
        taken = views.pop()
        assert (env.backend.array(taken[:, :1])[..., 0] == i).any()
        threads.append(threading.Thread(target=list.clear, args=([taken],)))
        del taken
        threads[-1].start()
    for thread in threads:
        thread.join()


def test_views_go_in_other_threads(world) -> None:
    world(2).run(run_threads)


def test_keepers() -> None:
    """The C calls: a window may be kept more than once, and what is no keeper is refused."""
    lib = _native.lib
    keepers = [ctypes.c_void_p() for _ in range(3)]
    comm = tw.local_comms(1)[0]
    with tw.Group(comm, experts=2, top_k=1, hidden=4, max_tokens=1, dtype="float32") as group:
        pointer = group.pointer
        assert [lib.twWindowKeep(pointer, ctypes.byref(k)) for k in keepers] == [0, 0, 0]
        with pytest.raises(tw.InvalidArgument, match="keeper is NULL"):
            _native.check(lib.twWindowKeep(pointer, None))
        assert lib.twWindowRelease(keepers.pop()) == 0
        view = group.dispatch(group.route(np.array([[0]], np.int32)), np.ones((1, 4), np.float32)).tokens
        address = view.ctypes.data
        del view
    with pytest.raises(tw.InvalidArgument, match="does not exist, or no longer"):
        _native.check(lib.twWindowKeep(pointer, ctypes.byref(ctypes.c_void_p())))
    comm.close()
    for keeper in keepers:  # one is enough
        assert (ctypes.c_float * 4).from_address(address)[:] == [1, 1, 1, 1]
        assert lib.twWindowRelease(keeper) == 0
        with pytest.raises(tw.InvalidArgument, match="which is none, or no longer"):
            _native.check(lib.twWindowRelease(keeper))
    with pytest.raises(tw.InvalidArgument, match="which is none, or no longer"):
        _native.check(lib.twWindowRelease(None))


SCRIPT = """
import gc, os, sys
import numpy as np
import tokenway as tw
comm = tw.local_comms(1)[0]
def viewed(value):
    with tw.Group(comm, experts=2, top_k=1, hidden=4, max_tokens=1, dtype="float32") as group:
        return group.dispatch(group.route(np.array([[0]], np.int32)), np.full((1, 4), value, np.float32)).tokens
first, second = viewed(1), viewed(2)
child = os.fork()
if child == 0:
    assert first[0, 0, 0] == 1 and second[0, 0, 0] == 2
    del first
    gc.collect()
    assert second[0, 0, 0] == 2
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert first[0, 0, 0] == 1 and second[0, 0, 0] == 2
keep = [second]
keep.append(keep)  # for the end of the interpreter
print("right")
"""


def test_children_and_the_end_of_the_interpreter() -> None:
    """A forked child has the views too; a process that ends has nothing to say of those that are alive."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "right\n", "")
