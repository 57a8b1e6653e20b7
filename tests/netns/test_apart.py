"""Ranks in two network namespaces: what connects them, and what happens when the link between them is cut."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from typing import Any

import numpy as np
import pytest
from harness import Env, caught

import tokenway as tw

TIMEOUT = 2.0


@pytest.fixture
def apart(world) -> Any:
    """apart(n): n ranks, the odd ones on another host than the even ones."""
    return lambda nranks: world((1, 1), "torch", whole=False, turns=nranks // 2)


# ---- on the ranks --------------------------------------------------------------------------------


def namespace(env: Env) -> str:
    return os.readlink("/proc/self/ns/net")


def make_group(env: Env, **options: Any) -> None:
    n = env.nranks
    env.kept["group"] = tw.Group(env.comm, experts=n, top_k=n, hidden=4, max_tokens=2, dtype="float32", **options)


def exchange(env: Env) -> None:
    """Every rank sends its number to all."""
    group, n = env.kept["group"], env.nranks
    handle = group.route(np.arange(n, dtype=np.int32)[None])
    received = group.dispatch(handle, np.full((1, 4), env.rank, np.float32))
    assert received.tokens[:, 0, 0].tolist() == list(range(n))
    assert group.combine(handle, received.tokens).tolist() == [[n * env.rank] * 4]


def exchange_until_error(env: Env) -> tuple[Any, float, Any]:
    """Rounds until one fails: its outcome, how long it took, and what a call says after it."""
    for _ in range(100000):
        begin = time.monotonic()
        outcome = caught(exchange, env)
        took = time.monotonic() - begin
        if outcome[0] != "twSuccess":
            again = caught(exchange, env)
            return outcome, took, again
        time.sleep(0.002)
    raise AssertionError("the link was never cut")


def close_group(env: Env) -> float:
    begin = time.monotonic()
    env.kept.pop("group").close()
    return time.monotonic() - begin


def connect_by_torch(env: Env, store: str, backend: str) -> tuple[Any, str]:
    """As a user's program does it: torch.distributed first."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tokenway").addHandler(handler)
    logging.getLogger("tokenway").setLevel(logging.INFO)
    dist.init_process_group("gloo", init_method=store, rank=env.rank, world_size=env.nranks)
    try:
        if backend not in ("auto", "torch"):
            outcome = caught(tw.connect, backend=backend, timeout=20)
            dist.barrier()  # who leaves at once takes the store away in which the others look
            return outcome, ""
        with tw.connect(backend=backend, timeout=20) as comm:
            env.comm = comm
            make_group(env)
            exchange(env)
            env.kept.pop("group").close()
            return (comm.backend, comm.why), "\n".join(records)
    finally:
        dist.destroy_process_group()


# ---- tests ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_ranks_are_apart(apart) -> None:
    spaces = apart(4).run(namespace)
    assert spaces[0] == spaces[2] != spaces[1] == spaces[3]


@pytest.mark.long
@pytest.mark.parametrize("nranks", [2, 4])
def test_cut(apart, nranks) -> None:
    """A link that is cut is an error on all ranks, within timeout + 1 s, and blames the other side."""
    made = apart(nranks)
    made.run(make_timed_group)
    made.start(exchange_until_error)
    time.sleep(0.5)
    made.network.cut(1)
    for rank, (outcome, took, again) in enumerate(made.collect()):
        result, text, record = outcome
        assert result in ("twTimeout", "twExcluded"), text
        assert took < TIMEOUT + 1, text
        assert record.sticky
        assert again[0] == result
        if nranks == 2:
            assert (record.peer, result) == (1 - rank, "twTimeout"), text
        else:
            assert record.peer % 2 != record.reporter % 2, text
    # Nobody waits for collectives that never end.
    assert max(made.run(close_group)) < 1.0


def make_timed_group(env: Env) -> None:
    make_group(env, timeout=TIMEOUT)


@pytest.mark.long
def test_cut_and_mended(apart) -> None:
    """A link that is away for less than the timeout delays, and nothing else."""
    made = apart(2)
    made.run(make_patient_group)
    made.start(exchange_often)
    time.sleep(0.3)
    made.network.cut(1)
    time.sleep(0.5)
    made.network.mend(1)
    assert made.collect() == [300, 300]


def make_patient_group(env: Env) -> None:
    make_group(env, timeout=30.0)


def exchange_often(env: Env) -> int:
    for _ in range(300):
        exchange(env)
        time.sleep(0.002)
    return 300


def test_auto(apart) -> None:
    """Ranks that share a host but no network are no domain of shared memory: auto takes libfabric, and says why; shared
    memory is refused."""
    made = apart(2)
    store = f"tcp://{made.network.hosts[0].address}"  # each time at another port: a store may outlive its group
    for rank, ((backend, why), log) in enumerate(made.run(connect_by_torch, f"{store}:29871", "auto")):
        assert backend == "fabric", why
        assert "rank 0 and rank 1 run on" in why and "in different network namespaces, and libfabric joins them" in why
        assert (f"2 ranks, backend 'fabric': {why}" in log) == (rank == 0)
    for outcome, _ in made.run(connect_by_torch, f"{store}:29872", "shm"):
        assert outcome[0] == "twUnsupported"
        assert "in different network namespaces: the CPU backend connects ranks of one host only" in outcome[1]


HIDE = "for file in $(ldconfig -p | sed -n 's/.*libfabric.so.1 .*=> //p'); do mount --bind /dev/null $file; done"


def test_a_host_without_libfabric(world) -> None:
    """auto then takes torch on all hosts, and says which rank has none; fabric is refused there and elsewhere."""
    made = world((1, 2), "torch")
    subprocess.run([*made.network.hosts[1].inside(), "sh", "-c", HIDE], check=True)
    store = f"tcp://{made.network.hosts[0].address}"  # each time at another port: a store may outlive its group
    for rank, ((backend, why), _) in enumerate(made.run(connect_by_torch, f"{store}:29871", "auto")):
        assert backend == "torch", (rank, why)
        assert "; not over libfabric: " in why and "libfabric" in why.split("not over libfabric: ")[1], why
    for outcome, _ in made.run(connect_by_torch, f"{store}:29872", "fabric"):
        assert outcome[0] == "twUnsupported" and "libfabric" in outcome[1], outcome
