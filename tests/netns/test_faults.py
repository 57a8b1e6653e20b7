"""Ranks on several hosts, of which one dies, stops or is cut off: who is blamed, and who goes on, with which bits."""

from __future__ import annotations

import signal
import time
from typing import Any

import emulated_backend
import mishaps
import player
import pytest
import soak
from cases import Case, Round, Setup, verify_case
from harness import AT_ONCE, PATIENT, Env, caught
from wire import BAD
from world import World

# Emulated GPUs where the library has them, which run_all.py sees to.
GPUS = pytest.mark.skipif(emulated_backend.missing() is not None, reason="the library has no emulated devices")
BACKENDS = ("fabric", pytest.param("torch", marks=pytest.mark.long), pytest.param("emulated-gin", marks=GPUS))
LONG = pytest.mark.long  # left out of run_all.py --quick, which has a death and a stop among its random rounds
PAIR, UNLIKE, THREE = (2, 2), (1, 2, 3), (2, 2, 2)
TIMEOUT = 4.0  # seconds after which a rank that says nothing is given up
SEED = 11

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def setup_of(nranks: int) -> Setup:
    """More channels than one, so that several exchanges are in flight."""
    return Setup(ranks=nranks, experts=2 * nranks, top_k=3, hidden=24, max_tokens=9, lanes=2)


def busy(world: World, timeout: float) -> None:
    """Lets all ranks exchange until that fails."""
    setup = setup_of(world.nranks)
    world.run(mishaps.begin, setup, timeout)
    world.start(mishaps.work_until_error, setup, SEED)
    time.sleep(0.7)


def judge(report: dict[str, Any], results: set[str], blamed: list[int], struck: float, limit: float) -> None:
    """A survivor's error: what it says, whom it names, and that it stays."""
    record = report["record"]
    assert report["result"] in results, report
    assert record.sticky and record.result == report["result"] == report["second"], report
    assert record.peer in blamed and f"rank {record.peer}" in record.message, report
    assert record.phase in mishaps.PHASES, report
    assert report["at"] - struck < limit + AT_ONCE, report


def go_on(world: World, survivors: list[int]) -> None:
    """The survivors are those, and their bits are right."""
    setup = setup_of(len(survivors))
    world.start(mishaps.shrink_and_play, setup, SEED)
    mishaps.verify_survivors(setup, survivors, world.collect(survivors))


def outlive(world: World, victims: list[int], silent: bool = False, number: int = signal.SIGKILL) -> None:
    """Strikes some of busy ranks with a signal: the others blame these at once, or after the timeout where nothing says
    that they are gone (`silent`), and go on."""
    result, timeout, limit = ("twTimeout", TIMEOUT, TIMEOUT) if silent else ("twPeerDied", PATIENT, 0.0)
    others = [rank for rank in world.everyone if rank not in victims]
    busy(world, timeout)
    struck = time.monotonic()
    if silent and number == signal.SIGKILL:  # a process that ends says so, unless its host cannot
        for host in {world.host_of(rank) for rank in victims}:
            world.network.cut(host)
    world.strike(number, victims)
    for report in world.collect(others):
        judge(report, {result}, victims, struck, limit)
    go_on(world, others)


# ---- deaths ------------------------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize(("sizes", "victim"), [(PAIR, 0), (PAIR, 3), (UNLIKE, 0), (UNLIKE, 4)])
def test_a_killed_rank(world, backend, sizes, victim) -> None:
    outlive(world(sizes, backend), [victim])


@pytest.mark.parametrize(
    ("sizes", "dead"), [pytest.param(PAIR, 1, marks=LONG), (PAIR, 0), pytest.param(UNLIKE, 2, marks=LONG)]
)
def test_a_killed_host(world, backend, sizes, dead) -> None:
    """All its processes end, and its kernel says so."""
    made = world(sizes, backend)
    outlive(made, made.ranks_of(dead))


@pytest.mark.parametrize(("sizes", "dead"), [(PAIR, 1), pytest.param(UNLIKE, 1, marks=LONG)])
def test_a_host_without_power(world, backend, sizes, dead) -> None:
    """Nobody says anything: its ranks are late, and given up."""
    made = world(sizes, backend, env={"TOKENWAY_SHRINK_MS": "3000"})
    outlive(made, made.ranks_of(dead), silent=True)


# ---- ranks that do not answer --------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_rank(world, backend, victim) -> None:
    if backend == "torch":
        pytest.skip("ranks that wait for a stopped one may be named there: docs/PROTOCOL.md, errors")
    made = world(PAIR, backend)
    outlive(made, [victim], silent=True, number=signal.SIGSTOP)
    made.strike(signal.SIGCONT, [victim])
    (woken,) = made.collect([victim])
    assert woken["result"] == "twExcluded", woken


def shrink_alone(env: Env, setup: Setup, seed: int) -> tuple[str, list[int]]:
    """(how a shrink of a part ends, who is in the new group)."""
    members: list[int] = []

    def shrink() -> None:
        with env.kept["group"].shrink(experts=setup.experts, top_k=1) as group:
            members.extend(group.comm_ranks)

    result, _, _ = caught(shrink)
    return result, members


def test_a_cut_between_halves(world, backend) -> None:
    """Either half blames the other one, and nobody goes on with ranks that it does not reach."""
    made = world(PAIR, backend, env={"TOKENWAY_SHRINK_MS": "3000"})
    busy(made, TIMEOUT)
    struck = time.monotonic()
    made.network.cut(1)
    for rank, report in enumerate(made.collect()):
        judge(report, {"twTimeout", "twExcluded"}, made.everyone, struck, TIMEOUT)
        record = report["record"]
        assert made.host_of(record.peer) != made.host_of(record.reporter), report
        assert made.host_of(record.reporter) == made.host_of(rank), report
    outcomes = made.run(shrink_alone, setup_of(2), SEED)
    for rank, (result, members) in enumerate(outcomes):
        half = made.ranks_of(made.host_of(rank))
        assert (result, members) in [("twExcluded", []), ("twSuccess", half)], outcomes
        assert outcomes[half[0]] == outcomes[half[1]], outcomes


@LONG
def test_a_cut_from_the_others(world, backend) -> None:
    """Two hosts of three go on, and the third hears, when the link is there again, that they have."""
    made = world(THREE, backend, env={"TOKENWAY_SHRINK_MS": "3000"})
    busy(made, TIMEOUT)
    struck = time.monotonic()
    made.network.cut(1)
    alone = made.ranks_of(1)
    others = made.ranks_of(0, 2)
    for report in made.collect(others):
        judge(report, {"twTimeout"}, alone, struck, TIMEOUT)
    for report in made.collect(alone):
        judge(report, {"twTimeout", "twExcluded"}, made.everyone, struck, TIMEOUT)
    go_on(made, others)


def exchange_so_often(env: Env, case: Case) -> Any:
    """Rounds on a group of their own, which a cut may only delay."""
    return player.play(env, case)


def rounds(nranks: int, count: int) -> Case:
    """Flights of two, whatever the routing."""
    setup = setup_of(nranks)
    routings = ("random", "holes", "few", "none")
    pairs = [
        tuple(
            Round((setup.max_tokens,) * nranks, seed=2 * n + i, routing=routings[n % 4], send_dispatch=True)
            for i in range(setup.lanes)
        )
        for n in range(count)
    ]
    return Case(setup, tuple(pairs), slow=nranks - 1)


@pytest.mark.parametrize("manner", [pytest.param(None, marks=LONG, id="bridge"), pytest.param(BAD, id="wire")])
def test_a_partition_that_heals(world, backend, manner) -> None:
    """Cuts that are shorter than the timeout delay, and nothing else."""
    made = world(PAIR, backend, manner)
    case = rounds(made.nranks, 150)
    made.start(exchange_so_often, case)
    for number in (1, 0):
        time.sleep(0.3)
        made.network.cut(number)
        time.sleep(0.4)
        made.network.mend(number)
    verify_case(case, made.collect())


@LONG
def test_two_hosts_that_a_third_reaches(world, backend) -> None:
    """A link that is gone between two hosts of three: a rank of one of them is blamed by a rank of the other."""
    made = world(THREE, backend, BAD, env={"TOKENWAY_SHRINK_MS": "3000"})
    busy(made, TIMEOUT)
    struck = time.monotonic()
    made.network.part([1], [2])
    for report in made.collect():
        judge(report, {"twTimeout", "twExcluded"}, made.ranks_of(1, 2), struck, TIMEOUT)


# ---- a network that misbehaves -------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize("sizes", [PAIR, UNLIKE])
def test_bad_links(world, backend, sizes) -> None:
    """Frames that are late, lost, doubled or out of order change no bit."""
    made = world(sizes, backend, BAD)
    case = rounds(made.nranks, 60)
    verify_case(case, made.run(exchange_so_often, case))


@LONG
def test_eight_hosts(world, backend) -> None:
    made = world((2,) * 8, backend)
    case = rounds(made.nranks, 6)
    verify_case(case, made.run(exchange_so_often, case))


def test_random_rounds(network, backend, monkeypatch) -> None:
    """A short form of `run_all.py --soak`: rounds on two hosts, a death and a stop, over bad links."""
    import harness

    made = network(PAIR, BAD)
    monkeypatch.setenv(harness.PLACES, made.places())
    harness.POOL.reset()
    try:
        soak.suffer(1, int(backend == "fabric"), SEED, backend=backend, ranks=(3, 4))
        assert soak.soak(150, SEED, (3, 4), backend=backend) == 150
    finally:
        harness.POOL.reset()
