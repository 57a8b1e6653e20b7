"""Ranks of two hosts, which share neither boot, name nor network, on emulated GPUs of one NVLink domain: they exchange
by stores to each other's windows where the platform grants fabric handles, and over a carrier where it does not."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_backend
import numpy as np
import pytest
from emulated_backend import OnHost, connect_group
from harness import HANGS, PATIENT, SPACES, Env, Workers, caught, settle
from hidden import judge, look
from portable_backend import file_allgather

import tokenway as tw
from tokenway import _header, _native, staged

CLUSTER = "cluster " + "c1" * 16
TIMEOUT = 5.0


@pytest.fixture(autouse=True)
def two_hosts() -> None:
    if "mnt" not in os.environ.get(SPACES, ""):
        pytest.skip("tests/netns/run_all.py makes the two hosts that this needs, and builds the emulator")
    if lacking := emulated_backend.missing():
        pytest.fail(lacking)
    emulated_backend.prepare()


class World:
    """Worker processes, the odd ones on the other host."""

    def __init__(self, workers: Workers, nranks: int):
        self.workers = workers
        self.ranks = list(range(nranks))
        self.key = ("hosts", time.monotonic_ns(), "emulated-hosts", f"hosts-{os.getpid()}-{time.monotonic_ns()}")

    def start(self, function: Any, *args: Any) -> None:
        self.workers.send(self.ranks, function, *args, key=self.key)

    def collect(self, *ranks: int) -> list[Any]:
        return settle(self.workers.collect(ranks or self.ranks, HANGS))

    def run(self, function: Any, *args: Any) -> list[Any]:
        self.start(function, *args)
        return self.collect()


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[bool, Workers]]:
    """Processes by whether they have an NVML, for all tests that kill none."""
    made: dict[bool, Workers] = {}
    yield made
    for workers in made.values():
        workers.close()


@pytest.fixture
def world(kept) -> Iterator[Any]:
    """world(nranks): ranks of both hosts. nvml: whether theirs is installed. spent: they do not outlive the test."""
    own: list[Workers] = []

    def make(nranks: int, nvml: bool = True, spent: bool = False) -> World:
        if not spent and nvml in kept:
            return World(kept[nvml], nranks)
        folder = str(Path(_native.lib._name).parent / "nvml")
        workers = Workers(nranks if spent else 4, {"LD_LIBRARY_PATH": folder} if nvml else {})
        if spent:
            own.append(workers)
        else:
            kept[nvml] = workers
        return World(workers, nranks)

    yield make
    for workers in own:
        workers.close()


# ---- on the ranks --------------------------------------------------------------------------------


def where(env: Env) -> tuple[str, ...]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, socket.gethostname(), os.readlink("/proc/self/ns/net")


def connect(env: Env, platform: list[dict[str, str]], backend: str, meeting: str) -> Any:
    """A group's look on a comm of its own by `connect`, where each rank's platform is another; or the error."""
    for name in ("TOKENWAY_EMULATOR_FABRIC", "TOKENWAY_EMULATOR_CLIQUE"):
        os.environ.pop(name, None)
    os.environ.update(platform[env.rank % len(platform)])
    staged.on_device, staged.connect = OnHost, connect_group
    os.environ["TOKENWAY_EMULATOR_VISIBLE"] = str(env.rank)
    try:
        return connect_and_look(env, backend, meeting)
    finally:
        del os.environ["TOKENWAY_EMULATOR_VISIBLE"]


def connect_and_look(env: Env, backend: str, meeting: str) -> Any:
    allgather = file_allgather(env.rank, env.nranks, meeting)
    options = {"rank": env.rank, "nranks": env.nranks, "allgather": allgather, "timeout": PATIENT}
    outcome = caught(lambda: env.kept.update(comm=tw.connect(device=0, backend=backend, **options)))
    if outcome[0] != "twSuccess":
        return outcome[:2]
    env.comm = env.kept.pop("comm")
    seen = look(env)
    seen["backend"] = env.comm.backend
    env.comm.close()
    return seen


def make_group(env: Env, timeout: float) -> None:
    n = env.nranks
    env.kept["group"] = tw.Group(env.comm, experts=n, top_k=n, hidden=4, max_tokens=2, dtype="float32", timeout=timeout)


def exchange(env: Env, group: Any) -> list[float]:
    n = group.nranks
    handle = group.route(env.backend.tensor(np.arange(n, dtype=np.int32)[None]))
    received = group.dispatch(handle, env.backend.tensor(np.full((1, 4), env.rank, np.float32)))
    seen = env.backend.array(received.tokens)[:, 0, 0].tolist()
    assert env.backend.array(group.combine(handle, received.tokens)).tolist() == [[n * env.rank] * 4]
    return seen


def exchange_until_error(env: Env) -> Any:
    for _ in range(100000):
        outcome = caught(exchange, env, env.kept["group"])
        if outcome[0] != "twSuccess":
            return outcome, caught(exchange, env, env.kept["group"])[0]
    raise AssertionError("nothing went wrong")


def end_at_once(env: Env, culprit: int) -> Any:
    """The culprit gives the group up while the others wait for it."""
    if env.rank == culprit:
        time.sleep(0.5)
        env.kept["group"].abort()
        return None
    return caught(exchange, env, env.kept["group"])


def go_on(env: Env) -> Any:
    n = env.nranks - 1
    old = env.kept.pop("group")
    with old.shrink(experts=n, top_k=n) as group:
        seen = group.comm_ranks, exchange(env, group)
    old.close()
    return seen


# ---- tests ---------------------------------------------------------------------------------------

GRANTED = {"TOKENWAY_EMULATOR_FABRIC": "granted", "TOKENWAY_EMULATOR_CLIQUE": "7"}


def meeting() -> str:
    return f"hosts-meeting-{os.getpid()}-{time.monotonic_ns()}"


def test_hosts_share_nothing(world) -> None:
    spaces = world(4).run(where)
    assert spaces[0] == spaces[2] and spaces[1] == spaces[3]
    assert all(here != there for here, there in zip(spaces[0], spaces[1], strict=True))


@pytest.mark.parametrize(
    ("nvml", "links"),
    [(True, "NVML tells that NVLink joins also the devices"), (False, "a test has decided about packets")],
)
def test_auto_takes_nvlink(world, nvml, links) -> None:
    """Where NVML is not there to name the domain, mapping each other's memory decides. Processes see one device each,
    as those of another host are not among them."""
    made = world(2, nvml)
    hosts = [name for _, name, _ in made.run(where)]
    ranks = made.run(connect, [GRANTED], "auto", meeting())
    judge(ranks)
    for seen in ranks:
        assert seen["backend"] == "nvlink"
        assert f"rank 0 runs on {hosts[0]}, rank 1 on {hosts[1]}, and NVLink joins them" in seen["why"], seen["why"]
        assert links in seen["why"] and "; windows are shared by fabric handles" in seen["why"], seen["why"]
        assert seen["handles"] == _header.HANDLES["fabric"] and seen["packets"] > 0


APART = "rank 0 and rank 1 run on different hosts, and "
REFUSALS = {
    "no channel": (
        [GRANTED, GRANTED | {"TOKENWAY_EMULATOR_FABRIC": "refused"}],
        APART + "rank 1 has no memory for other hosts: cannot allocate a window: an error of the emulator (CUresult "
        "800); fabric handles are for processes with an IMEX channel",
    ),
    "no service": (
        [GRANTED | {"TOKENWAY_EMULATOR_FABRIC": "unexported"}, GRANTED],
        APART + "rank 0 has no memory for other hosts: cannot export a window",
    ),
    "another channel": (
        [GRANTED | {"TOKENWAY_EMULATOR_FABRIC": "foreign"}, GRANTED],
        APART + "rank 0 cannot have the memory of rank 1: cannot import a peer's window: an error of the emulator "
        "(CUresult 800)",
    ),
    "no such handles": ([{}, {}], APART + "rank 0 has no memory for other hosts: its device or driver knows no fabric"),
    "another clique": (
        [GRANTED, GRANTED | {"TOKENWAY_EMULATOR_CLIQUE": "8"}],
        APART + "rank 0 cannot have the memory of rank 1: NVLink does not join their devices: their domains are "
        f"{CLUSTER}, clique 7 and {CLUSTER}, clique 8",
    ),
    "no cluster": (
        [{"TOKENWAY_EMULATOR_FABRIC": "granted"}],
        APART + "rank 0 cannot have the memory of rank 1: NVLink does not join their devices: their domains are none "
        "beyond its host and none beyond its host",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_auto_takes_a_carrier_otherwise(world, name) -> None:
    platform, told = REFUSALS[name]
    made = world(2)
    ranks = made.run(connect, platform, "auto", meeting())
    judge(ranks)
    for seen in ranks:
        assert seen["backend"] == "torch"
        assert f"; not over NVLink: {told}" in seen["why"], seen["why"]
    for result, text in made.run(connect, platform, "nvlink", meeting()):
        assert result == "twUnsupported" and text.startswith(told), text


@pytest.mark.parametrize("nranks", [2, 4])
def test_a_killed_rank_is_blamed_and_the_others_go_on(world, nranks) -> None:
    made = world(nranks, spent=True)
    victim, others = nranks - 1, list(range(nranks - 1))  # it is odd: on the other host
    made.run(make_group, PATIENT)
    made.start(exchange_until_error)
    time.sleep(1.0)
    made.workers.signal(victim, signal.SIGKILL)
    for outcome, again in made.collect(*others):
        result, text, record = outcome
        assert (result, record.peer, again) == ("twPeerDied", victim, "twPeerDied"), text
        assert record.sticky
    if nranks == 2:
        return
    made.start(go_on)
    for rank, seen in zip(others, made.collect(*others), strict=True):
        assert seen == ([0, 1, 2], [0.0, 1.0, 2.0]), rank


def test_a_rank_that_gives_up_is_heard_at_the_other_host(world) -> None:
    made = world(3)
    made.run(make_group, PATIENT)
    for rank, outcome in enumerate(made.run(end_at_once, 1)):
        if rank != 1:
            assert outcome[0] == "twPeerAborted" and outcome[2].peer == 1, outcome


def test_a_stopped_rank_is_late(world) -> None:
    made = world(2)
    made.run(make_group, TIMEOUT)
    made.workers.signal(1, signal.SIGSTOP)
    try:
        made.start(exchange_until_error)
        ((outcome, again),) = made.collect(0)
    finally:
        made.workers.signal(1, signal.SIGCONT)
    made.collect(1)
    result, text, record = outcome
    assert (result, record.peer, again) == ("twTimeout", 1, "twTimeout"), text
