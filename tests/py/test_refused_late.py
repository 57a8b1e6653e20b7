"""A rank whose dispatch is refused, and peers that learn of it late: after they have combined or released the handle.

On devices a call returns before its step has run, so peers may have made further calls by then. Whatever these were,
and whatever the rank that was refused does with its handle, all are on the same lanes and banks afterwards.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cases import Case, Round, Setup, verify
from harness import PATIENT, Env, caught, said
from player import Player

import tokenway as tw

RANKS, REFUSES = 3, 1
LATE = ("emulated", "emulated-gin", "torch-emulated")


def setup_of(mode: str, lanes: int, ranks: int = RANKS) -> tuple[Setup, Round]:
    setup = Setup(ranks=ranks, experts=2 * ranks, hidden=8, max_tokens=8, lanes=lanes, mode=mode)
    return setup, Round((3, 8, 2)[:ranks], layout="flat" if mode == "high_throughput" else "rank_major")


class Calls:
    """A group, and a dispatch that one rank is refused."""

    def __init__(self, env: Env, setup: Setup, round_: Round, timeout: float = PATIENT):
        self.env, self.round = env, round_
        self.refuses = env.rank == REFUSES
        self.group = tw.Group(env.comm, timeout=timeout, **setup.settings())
        self.player = Player(env, self.group, Case(setup, ((round_,),)))

    def refused_dispatch(self, without_handle: bool = False) -> tuple[Any, Any]:
        """(the handle, what came or nothing). without_handle: the rank that refuses has none."""
        player, round_ = self.player, self.round
        if without_handle and self.refuses:
            if self.group.exact:
                player.handle(round_)  # counts are exchanged before
            self.group.refuse_dispatch(round_.layout)
            return None, None
        handle, inputs = player.handle(round_), player.payloads(round_)
        if self.refuses:
            inputs[0] = player.tensor(np.zeros((3, 3), np.float32))
        received: list[Any] = []
        outcome = caught(lambda: received.append(player.dispatch(round_, handle, inputs, False)))
        assert outcome[0] == ("twInvalidArgument" if self.refuses else "twSuccess"), outcome
        player.unread.clear()
        return handle, received[0] if received else None

    def combine(self, handle: Any, received: Any) -> Any:
        """How the combine of a dispatch that has failed ends. Its sums are NaN."""
        rows = self.player.tensor(np.zeros((1, 1), np.float32)) if received is None else received.tokens
        out: list[Any] = []
        outcome = caught(lambda: out.append(self.group.combine(handle, rows)))
        assert not out or np.isnan(self.player.array(out[0]).astype(np.float32)).all()
        return outcome

    def leave(self, how: str, handle: Any, received: Any) -> None:
        if how in ("release", "both"):
            handle.release()
        if how in ("combine", "both"):
            outcome = self.combine(handle, received)
            if self.refuses:
                said(outcome, "twInvalidUsage", "dispatch was refused on this rank, so there is nothing to combine")
            else:
                assert outcome[0] == "twSuccess", outcome

    def check(self) -> None:
        """Peers learn of the refusal here."""
        begin = time.monotonic()
        while not self.refuses and self.group.error is None and time.monotonic() - begin < PATIENT:
            time.sleep(0.001)  # until a device has told it
        told = caught(self.group.check)[0]
        assert told == ("twSuccess" if self.refuses else "twPeerRefused"), told

    def again(self, handle: Any) -> Any:
        """A round by the routing whose dispatch has failed."""
        player, round_ = self.player, self.round
        received = player.dispatch(round_, handle, player.payloads(round_), False)
        got = player.snapshot(round_, received)
        got.out = player.array(player.combine(round_, handle, player.rows(round_, received, got), False))
        return got

    def gather(self) -> None:
        ranks = self.group.nranks
        one = self.player.tensor(np.full((1, 4), self.env.rank, np.float32))
        gathered = self.group.all_gatherv(one, sizes=[1] * ranks)
        assert np.array_equal(self.player.array(gathered.rows)[:, 0], np.arange(ranks))


def goes_on(env: Env, setup: Setup, round_: Round, here: str, there: str, same: bool, gathers: bool) -> list[Any]:
    """Rounds behind refusals. here, there: what the rank that was refused does with its handle, and what its peers do.
    same: whether that handle is dispatched again."""
    calls = Calls(env, setup, round_)
    got, views = [], []
    for _ in range(2):
        handle, received = calls.refused_dispatch(here == "no handle")
        calls.leave(here if calls.refuses else there, handle, received)
        calls.check()
        views.append(received)  # held by their caller
        if gathers:
            calls.gather()
        if same:
            got.append(calls.again(handle))
        del handle, received
        got += [calls.player.flight((round_,))[0] for _ in range(setup.lanes + 1)]
    calls.group.close()
    return got


@pytest.fixture
def late(backend: str, monkeypatch: Any, threads: Any) -> Any:
    if backend not in LATE:
        pytest.skip("for devices without a GPU; on hosts calls return what they find")
    monkeypatch.setenv("TOKENWAY_BLOCKING", "0")
    world = threads(RANKS)
    world.forget()
    world.run(lambda env: monkeypatch.setattr(tw.cuda.Cuda, "learns_late", True))
    yield world
    world.forget()


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("there", ["combine", "release", "both"])
@pytest.mark.parametrize("here", ["combine", "release", "both", "drop", "no handle"])
@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_going_on(late: Any, backend: str, mode: str, here: str, there: str, lanes: int) -> None:
    """both: it releases the handle, and combines it then."""
    if "both" in (here, there) and here != there:
        pytest.skip("each of the two alone is tried against all others")
    if backend == "torch-emulated" and here != there:
        pytest.skip("what a carrier moves for peers' combines, this rank must move as well")
    setup, round_ = setup_of(mode, lanes)
    same, gathers = here in ("combine", "release") and lanes != 3, lanes == 3
    for got in zip(*late.run(goes_on, setup, round_, here, there, same, gathers), strict=True):
        verify(setup, round_, list(got))


def keeps_its_lease(env: Env, setup: Setup, round_: Round) -> None:
    """Peers combine, and the rank that was refused does nothing with its handle."""
    calls = Calls(env, setup, round_)
    handle, received = calls.refused_dispatch()
    if not calls.refuses:
        calls.leave("combine", handle, received)
        calls.check()
    env.kept["calls"] = calls, handle


def dispatches_again(env: Env) -> Any:
    """What ranks are told that dispatch the handle then."""
    calls, handle = env.kept.pop("calls")

    def go_on() -> None:
        calls.again(handle)
        calls.group.check()

    outcome = caught(go_on)
    calls.group.close()
    return outcome


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_a_lease_that_peers_have_ended(late: Any, backend: str, mode: str) -> None:
    """Then banks differ. The sentence says what to do about it."""
    if backend == "torch-emulated":
        pytest.skip("a carrier's moves have no banks")
    late.run(keeps_its_lease, *setup_of(mode, 1))
    by_rank = late.run(dispatches_again)
    late.forget()
    for outcome in by_rank:
        said(outcome, "twCallMismatch", "made a different call")
    hint = r"refused on this rank, and the handle still holds lane 0: combine or release it where peers combine theirs"
    said(by_rank[REFUSES], "twCallMismatch", hint)
