"""Ends without a close: a process that ends, or drops what it has, prints nothing and waits for nobody, and its peers
see it as gone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import uuid

import pytest

PATIENT = 300  # seconds: a process that waited for its peers would take 1000
MAKE = """
import gc, os, sys, threading
import numpy as np, tokenway as tw
IDS, X = np.array([[0, 3], [1, 2]], np.int32), np.ones((2, 8), np.float32)
SETTINGS = dict(experts=4, top_k=2, hidden=8, max_tokens=4, dtype="float32", timeout=1000)
def make(comm=None, **more):
    group = tw.Group(comm or tw.connect(), **SETTINGS | more)
    return group, group.route(IDS)
"""
GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
ENDS = {
    "alive": "group, handle = make(); received = group.dispatch(handle, X); ids = received.ids",
    "views alone": "group, handle = make(); v = group.dispatch(handle, X).tokens; del group, handle; gc.collect()",
    "pending": "group, handle = make(); pending = group.dispatch(handle, X, send_only=True)",
    "pending dropped": """
group, handle = make(lanes=2)
group.dispatch(handle, X, send_only=True)
group.all_gatherv(X, [2])
""",
    "request dropped": "group, handle = make(); group.all_gatherv(X, [2], send_only=True)",
    "handles dropped": "group, handle = make(); group.dispatch(handle, X); del handle; gc.collect()",
    "a cycle": "group, handle = make(); group.itself = group; del group, handle",
    "a lease": """
group, handle = make(mode="high_throughput", lease_bytes=1 << 20)
group.exchange_counts(handle, lease=True)
rows = group.dispatch(handle, X).tokens
""",
    "a thread in a call": """
comms, groups = tw.local_comms(2), [None, None]
def create(rank): groups[rank] = make(comms[rank])
threads = [threading.Thread(target=create, args=(rank,)) for rank in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
group, handle = groups[0]
def dispatch():
    while True:  # either thread may find the other in a call
        try: group.dispatch(handle, X)
        except tw.InvalidUsage: pass
thread = threading.Thread(target=dispatch, daemon=True)
thread.start()
while True:
    try: group.route(IDS)
    except tw.InvalidUsage: break
""",
    "a forked child": """
group, handle = make(); received = group.dispatch(handle, X); tokens = received.tokens
child = os.fork()
if child == 0:
    if sys.argv[-1] == "drop": del group, handle, received, tokens; gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (group.combine(handle, tokens) == 1).all()
""",
    "torch.distributed": GLOO + "group, handle = make(); received = group.dispatch(handle, X)",
    "portable": GLOO + "group, handle = make(tw.connect(backend='torch')); rows = group.dispatch(handle, X).tokens",
    "portable, pending": GLOO
    + "group, handle = make(tw.connect(backend='torch')); pending = group.dispatch(handle, X, send_only=True)",
}


def ended(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE + script, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "portable" else name for name in ENDS]
)
def test_ends_quietly(name: str) -> None:
    if "dist" in ENDS[name] and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    process = ended(ENDS[name], "drop")
    out, err = process.communicate(timeout=PATIENT)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_child_that_lives_on() -> None:
    process = ended(ENDS["a forked child"], "keep")
    out, err = process.communicate(timeout=PATIENT)
    assert (process.returncode, out, err) == (0, "", "")


MEET = """
comm = tw.Comm.shm(int(sys.argv[1]), 2, sys.argv[2], timeout=1000)
group, handle = make(comm)
"""
LEAVES = MEET + "received = group.dispatch(handle, X)"
DROPS = MEET + "received = group.dispatch(handle, X); del group, handle, received, comm; gc.collect()"
STAYS = (
    MEET
    + """
group.dispatch(handle, X)
try:
    while True: group.dispatch(handle, X)
except tw.PeerDied as error:
    print(error.record.peer)
"""
)


@pytest.mark.parametrize("script", [LEAVES, DROPS], ids=["leaves", "drops"])
def test_peers_see_it_as_gone(script: str) -> None:
    address = f"tokenway-exit-{uuid.uuid4().hex}"
    processes = [ended(STAYS, "0", address), ended(script, "1", address)]
    told = [process.communicate(timeout=PATIENT) for process in processes]
    assert told == [("1\n", ""), ("", "")]
    assert [process.returncode for process in processes] == [0, 0]
