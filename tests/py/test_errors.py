"""Refusals: the sentence says argument, value and range; peers learn at once; the group goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import refusals
from cases import verify
from harness import AT_ONCE, BACKENDS, PATIENT, Env, Threads, caught, said
from refusals import ROUND, SETUP, Calls, adapt, sentence

import tokenway as tw


def check_refused_call(by_rank: Any, pattern: str, call: str) -> None:
    (outcome, _, _), *others = by_rank
    said(outcome, "twInvalidArgument", pattern)
    for rank, (told, took, _) in enumerate(others, 1):
        said(told, "twPeerRefused", rf"rank 0 refused its arguments of {call.lower()}")
        record = told[2]
        assert (record.peer, record.reporter, record.sticky) == (0, rank, False)
        assert record.phase == call.lower() and record.result == "twPeerRefused"
        assert took < AT_ONCE
    verify(SETUP, ROUND, [good for _, _, good in by_rank])


def needs_numpy(backend: str, name: str) -> None:
    if backend != "cpu" and name in refusals.NUMPY_ALONE:
        pytest.skip("PyTorch has no such tensors")


@pytest.mark.parametrize("name", refusals.DISPATCHES)
def test_dispatch_refused(world, backend, made_for, name) -> None:
    needs_numpy(backend, name)
    if "bound" in name and not made_for.knows_calls:
        pytest.skip("nobody knows what the peers move: test_staged.py")
    by_rank = world(3).run(refusals.refused_dispatch, name)
    check_refused_call(by_rank, sentence(backend, refusals.DISPATCHES[name][1]), "Dispatch")


def among_received_rows(env: Env, mode: str) -> Any:
    """An output in the view of an earlier dispatch, by all ranks; then a call as ever."""
    tensor, array = env.backend.tensor, env.backend.array
    settings = {"experts": 6, "top_k": 3, "hidden": 4, "max_tokens": 2, "dtype": "float32", "mode": mode}
    ids = tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    rows = tensor(np.ones((2, 4), np.float32))
    with tw.Group(env.comm, timeout=PATIENT, **settings) as group:
        handle = group.route(ids)
        if group.exact:
            group.exchange_counts(handle)
        view = group.dispatch(handle, rows).tokens
        group.combine(handle, tensor(array(view)))
        outcome = caught(group.dispatch, handle, rows, out=view)
        return outcome, array(group.combine(handle, tensor(array(group.dispatch(handle, rows).tokens))))


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_outputs_among_received_rows(world, mode) -> None:
    for outcome, sums in world(3).run(among_received_rows, mode):
        said(outcome, "twInvalidArgument", r"^out\['tokens'\] lies among the received rows of the window, where peers")
        assert (sums >= 1.0).all()


@pytest.mark.parametrize("name", refusals.COMBINES)
def test_combine_refused(world, backend, name) -> None:
    needs_numpy(backend, name)
    by_rank = world(3).run(refusals.refused_combine, name)
    check_refused_call(by_rank, sentence(backend, refusals.COMBINES[name][1]), "Combine")


@pytest.fixture(scope="module")
def alone(backend) -> Any:
    """Calls of one rank on a group of three that nobody else uses."""
    if BACKENDS[backend].most_ranks("threads") < 3:
        pytest.skip("there are not three devices for threads")
    envs = [Env(comm, BACKENDS[backend]) for comm in BACKENDS[backend].local_comms(3)]
    threads = Threads(backend, 3)
    made = threads.run(lambda env: Calls(envs[env.rank]))
    with envs[0].context():
        yield made[0]
    threads.run(lambda env: made[env.rank].group.close())


@pytest.mark.parametrize("name", refusals.ROUTINGS)
def test_routing_refused(alone, made_for, name) -> None:
    """Not a step: nobody else is told. Creating and updating say the same."""
    needs_numpy(made_for.name, name)
    if name in refusals.BAD_IDS and not made_for.checks_ids_on_host:
        pytest.skip("ids in device memory are not refused; tests/gpu/test_bad_ids.py has what becomes of them")
    arguments, pattern = adapt(alone.env, refusals.ROUTINGS[name][0]), refusals.ROUTINGS[name][1]
    pattern = sentence(made_for.name, pattern)
    said(caught(alone.group.route, **arguments), "twInvalidArgument", pattern)
    if "memory" not in arguments:
        said(caught(alone.handle.update, **arguments), "twInvalidArgument", pattern)


@pytest.mark.parametrize("name", refusals.SETTINGS)
def test_settings_refused(world, backend, name) -> None:
    """One rank's settings are impossible: it says why, and the others repeat it."""
    changes, pattern = refusals.SETTINGS[name][0], sentence(backend, refusals.SETTINGS[name][1])
    by_rank = world(3).run(refusals.settings_on, 1, changes)
    for rank, (outcome, took) in enumerate(by_rank):
        said(outcome, "twInvalidArgument", ("" if rank == 1 else "rank 1: ") + ".*" + pattern)
        assert took < AT_ONCE


@pytest.mark.parametrize("name", refusals.MISMATCHES)
def test_settings_differ(world, name) -> None:
    changes, pattern = refusals.MISMATCHES[name]
    for outcome, took in world(3).run(refusals.settings_on, 1, changes):
        said(outcome, "twConfigMismatch", pattern)
        assert took < AT_ONCE


def test_windows_that_do_not_fit(world, backend) -> None:
    changes = {"max_tokens": 2**27, "hidden": 2**16}
    told = (
        r"windows of 3 ranks need 3 x [\d.]+ [KMGTPE]?i?B, and [\d.]+ [KMGTPE]?i?B are free, "
        r"(of the .* in|by MemAvailable in) /\S+; lower"
    )
    if backend != "cpu":  # memory of several devices
        told = r"[\d.]+ [KMGTPE]?i?B.* [\d.]+ [KMGTPE]?i?B.* free"
    for rank, (outcome, _) in enumerate(world(3).run(refusals_everywhere, changes)):
        said(outcome, "twOutOfMemory", told)
        assert rank >= 0


def refusals_everywhere(env: Env, changes: dict[str, Any]) -> Any:
    return refusals.settings_on(env, env.rank, changes)


CANNOT_HOLD = [
    ({"experts": 2**31}, r"experts is 2147483648; it must be an integer of 32 bits"),
    ({"max_tokens": 1.5}, r"max_tokens is 1.5; it must be an integer"),
    ({"hidden": 2**63}, r"hidden is 9223372036854775808; it must be an integer of 64 bits"),
    ({"hidden": 1.5}, r"hidden is 1.5; it must be an integer"),
    ({"payloads": {"p": (1.5, "uint8")}}, r"payloads\['p'\].elements is 1.5; it must be an integer"),
    (
        {"lease_bytes": 2**62},
        r"lease_bytes is 4611686018427387904; it must be an integer from 0 to 4611686018427387903",
    ),
    ({"timeout": "soon"}, r"timeout is 'soon'; it must be from 0.001"),
    ({"dtype": "float128"}, r"dtype is 'float128'; it must be one of uint8"),
    ({"payloads": {f"p{q}": (1, "uint8") for q in range(8)}}, r"payloads has 8 entries; .* 7"),
    ({"payloads": {"ids": (1, "uint8")}}, r"payloads are named \['ids'\]"),
    ({"id_space": "lunar"}, r"id_space is 'lunar'; it must be one of"),
    ({"expert_map": ([0] * 5, [0] * 5)}, r"expert_map has shapes \(5,\) and \(5,\); .* \(6,\)"),
    ({"expert_map": ([0],)}, r"expert_map has 1 parts"),
    (
        {"expert_map": tw.Placement(range(6), where=([0] * 5, [0] * 5))},
        r"expert_map.where has shapes \(5,\) and \(5,\); .* \(6,\)",
    ),
    ({"timeout": 0}, r"timeout is 0; it must be from 0.001"),
    ({"timeout": -5}, r"timeout is -5; it must be from 0.001"),
    ({"invalid_id": 2**31}, r"invalid_id is 2147483648; it must be an integer of 32 bits"),
]


@pytest.mark.parametrize(("changes", "told"), CANNOT_HOLD)
def test_settings_that_c_cannot_hold(changes, told) -> None:
    settings = SETUP.settings() | changes
    said(caught(tw.window_bytes, 3, **settings), "twInvalidArgument", told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *CANNOT_HOLD,
        ({"payloads": 5}, "settings: .*int"),
        ({"payloads": {"p": 5}}, "settings: "),
    ],
)
def test_peers_learn_what_c_cannot_hold(world, changes, told) -> None:
    for rank, (outcome, took) in enumerate(world(3).run(refusals.settings_on, 1, changes)):
        said(outcome, "twInvalidArgument", told if rank == 1 else "rank 1: its settings were refused there")
        assert took < AT_ONCE


@pytest.mark.parametrize("changes", [{"experts": 2**31}, {"no_such_setting": 1}])
def test_peers_learn_that_shrinking_cannot_be(world, changes) -> None:
    here = world(3)
    by_rank = here.run(refusals.broken_shrink, changes)
    here.forget()
    for rank, (outcome, took) in enumerate(by_rank):
        own = "experts is 2147483648|no_such_setting"
        said(outcome, "twInvalidArgument", own if rank == 1 else "rank 1: its settings were refused there")
        assert took < AT_ONCE


def test_sizes_without_a_group() -> None:
    """window_bytes refuses what a group would."""
    for changes, pattern in refusals.SETTINGS.values():
        outcome = caught(tw.window_bytes, 3, **SETUP.settings() | changes)
        said(outcome, "twInvalidArgument", pattern)
    said(caught(tw.window_bytes, 0, **SETUP.settings()), "twInvalidArgument", "nranks is 0; .* 1024")
    assert tw.window_bytes(2, **SETUP.settings()).window > 0


def test_environment(monkeypatch) -> None:
    for value in ("soon", "0", "-1", "99999999999", "5s"):
        monkeypatch.setenv("TOKENWAY_TIMEOUT_MS", value)
        told = rf'TOKENWAY_TIMEOUT_MS is "{value}"; it must be an integer from 1 to'
        said(caught(tw.local_comms, 2), "twInvalidArgument", told)
    monkeypatch.setenv("TOKENWAY_TIMEOUT_MS", "1234")
    comm = tw.local_comms(1)[0]
    with comm, tw.Group(comm, experts=1, top_k=1, hidden=1, max_tokens=1) as group:
        record = caught(group.route, np.ones((1, 1), np.int32))
        assert record[0] == "twInvalidArgument"
