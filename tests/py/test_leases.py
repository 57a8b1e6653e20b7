"""Leases: rows of a dispatch that outlive its step, in memory of the window. test_throughput.py has them against the
oracle."""

from __future__ import annotations

import gc
import logging
import time
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import pytest
from dense import sent
from harness import PATIENT, Env, caught
from test_autograd import Case, assert_same, group_of, leaves, train

import tokenway as tw
from tokenway import _header, _native

pytestmark = pytest.mark.needs("leases")

HIDDEN, TOKENS = 6, 8
ROW = 4 * HIDDEN
SETTINGS: dict[str, Any] = {"experts": 6, "top_k": 2, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "float32"}
SETTINGS |= {"mode": "high_throughput", "timeout": 20}


def group_with(env: Env, rows: int, **more: Any) -> tw.Group:
    """A group with leases for so many rows; each begins at 256 bytes."""
    return tw.Group(env.comm, lease_bytes=rows * ROW, **(SETTINGS | more))


def routed(env: Env, group: tw.Group, seed: int) -> tuple[tw.Handle, Any]:
    """(handle, tokens) of a routing; other tokens on each rank and for each seed."""
    rng = np.random.default_rng([env.rank, seed])
    ids = np.argsort(rng.random((TOKENS, 6)))[:, :2].astype(np.int32)
    return group.route(env.backend.tensor(ids)), env.backend.tensor(rng.standard_normal((TOKENS, HIDDEN), np.float32))


def copy(env: Env, tensor: Any) -> np.ndarray:
    return np.array(env.backend.array(tensor))


# ---- what lives, and what is given back -----------------------------------------------------------------------


def run_collected(env: Env, group_rows: int) -> tuple[list[bool], list[int]]:
    """Ranks drop what came at other times, in other orders: each has its own places, and no rank waits for another."""
    rng = np.random.default_rng(env.rank)
    kept: list[tuple[Any, np.ndarray]] = []
    leased, used = [], []
    with group_with(env, group_rows) as group:
        for seed in range(40):
            handle, tokens = routed(env, group, seed)
            group.exchange_counts(handle, lease=True)
            received = group.dispatch(handle, tokens)
            leased.append(received.leased)
            kept.append((received.tokens, copy(env, received.tokens)))
            group.combine(handle, received.tokens)
            del received, handle
            if rng.random() < 0.4:
                kept.pop(int(rng.integers(len(kept))))
            if rng.random() < 0.3:
                gc.collect()
            used.append(group.leases.used)
            for tensor, was in kept:
                assert np.array_equal(copy(env, tensor), was)
        assert group.leases.copies == leased.count(False)
        del tensor
        kept.clear()
        gc.collect()
        assert (group.leases.used, group.leases.leases, group.leases.largest) == (0, 0, group.leases.bytes)
    return leased, used


@pytest.mark.parametrize("nranks", [pytest.param(1, marks=pytest.mark.heavy), 3])
def test_garbage_collection_decides_nothing(world, nranks) -> None:
    """Ranks' leases differ in place, size and number; ranks that have none left go on with copies."""
    found = world(nranks).run(run_collected, nranks * TOKENS * 6)
    assert any(all(x) != any(x) for x, _ in found), "leases, and copies for want of one"
    assert nranks == 1 or len({tuple(used) for _, used in found}) > 1, "the same on all ranks"


def run_outliving(env: Env) -> None:
    """The group is closed, its window goes with the last lease."""
    with group_with(env, 4 * env.nranks * TOKENS) as group:
        handle, tokens = routed(env, group, 0)
        group.exchange_counts(handle, lease=True)
        received = group.dispatch(handle, tokens)
        rows, was = received.tokens[1:], copy(env, received.tokens[1:])
        handle.release()
    del received, group
    gc.collect()
    with group_with(env, env.nranks * TOKENS) as other:  # takes memory
        handle, tokens = routed(env, other, 1)
        other.exchange_counts(handle, lease=True)
        other.dispatch(handle, tokens)
        handle.release()
    assert np.array_equal(copy(env, rows), was)
    rows[...] = 3  # and it is still ours to write to
    assert (copy(env, rows) == 3).all()


def test_a_lease_outlives_its_group(world) -> None:
    world(2).run(run_outliving)


LATE: list[Any] = []  # of all ranks that are threads


def run_given_back_late(env: Env) -> None:
    """The last rank gives leases of all back while the others wait for it. Whoever does, perhaps garbage collection in
    any thread, must not wait for what their devices do."""
    with group_with(env, 4 * env.nranks * TOKENS) as group:
        handle, tokens = routed(env, group, 0)
        group.exchange_counts(handle, lease=True)
        LATE.append(group.dispatch(handle, tokens).tokens)
        handle.release()
    del group, handle
    gc.collect()
    with tw.Group(env.comm, **(SETTINGS | {"timeout": PATIENT})) as other:
        handle, tokens = routed(env, other, 1)
        if env.rank == env.nranks - 1:
            time.sleep(0.5)
            LATE.clear()
            gc.collect()
        other.exchange_counts(handle)
        other.combine(handle, env.backend.tensor(copy(env, other.dispatch(handle, tokens).tokens)))
    LATE.clear()


def test_a_lease_is_given_back_late(world) -> None:
    world(2).run(run_given_back_late)


def run_told(env: Env) -> list[str]:
    """No room: copied, with a flag, a count, and a line in the log, the first time."""
    lines: list[str] = []
    log = logging.getLogger("tokenway")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        # Of whole pages, and with other room on no rank: lease_bytes is everybody's.
        with group_with(env, 1, max_tokens=1000) as group:
            for seed in range(2):
                handle, tokens = routed(env, group, seed)
                group.exchange_counts(handle, lease=True)
                received = group.dispatch(handle, tokens)
                assert not received.leased and group.leases.copies == seed + 1
                was = copy(env, received.tokens)
                group.combine(handle, received.tokens)
                again, _ = routed(env, group, seed + 7)
                group.exchange_counts(again)
                group.dispatch(again, tokens)
                again.release()
                assert np.array_equal(copy(env, received.tokens), was), "no copy: a view"
    finally:
        log.removeHandler(handler)
    return lines


def test_copies_are_told(processes) -> None:
    for lines in processes(2).run(run_told):
        assert len(lines) == 1 and "no lease for tokens, 2000 rows of 24 bytes: of lease_bytes, 4096" in lines[0], lines


def run_payloads(env: Env) -> None:
    """Each payload has a lease of its own; those that are given are copied out of it; grouped is as ever."""
    more = {"payloads": {"scales": (3, "float32"), "odd": (5, "uint8")}}
    with group_with(env, 20 * env.nranks * TOKENS, **more) as group:
        handle, tokens = routed(env, group, 0)
        rng = np.random.default_rng(env.rank)
        extra = {
            "scales": env.backend.tensor(rng.standard_normal((TOKENS, 3), np.float32)),
            "odd": env.backend.tensor(rng.integers(0, 255, (TOKENS, 5)).astype(np.uint8)),
        }
        group.exchange_counts(handle)
        plain = group.dispatch(handle, tokens, extra)
        want = {name: copy(env, t) for name, t in {"tokens": plain.tokens, **plain.payloads}.items()}
        by_expert = copy(env, group.dispatch(handle, tokens, extra, layout="grouped").tokens)
        handle.release()
        group.exchange_counts(handle, lease=True)
        own = env.backend.tensor(np.zeros((handle.recv_rows, 3), np.float32))
        received = group.dispatch(handle, tokens, extra, out={"scales": own})
        assert not received.leased and received.payloads["scales"] is own
        handle.release()
        for name, tensor in {"tokens": received.tokens, **received.payloads}.items():
            assert np.array_equal(copy(env, tensor), want[name]), name
        group.exchange_counts(handle, lease=True)
        grouped = group.dispatch(handle, tokens, extra, layout="grouped")
        assert np.array_equal(copy(env, grouped.tokens), by_expert)
        handle.release()


def test_payloads(world) -> None:
    world(3).run(run_payloads)


# ---- bytes ------------------------------------------------------------------------------------------------------

CANARY = 0xA5


def launches() -> int | None:
    """Kernels that this thread has launched; None where nobody counts them."""
    count = getattr(_native.lib, "tokenway_emulated_launches", None)
    return None if count is None else count()


def run_written(env: Env) -> None:
    """Every byte that a dispatch may have written to, before and after."""
    hidden, most = 64, env.nranks * TOKENS
    with (
        group_with(env, 4 * most * 11, hidden=hidden) as group,
        tw.Group(env.comm, hidden=1, max_tokens=1, dtype="float32", timeout=PATIENT) as others,
    ):
        one = env.backend.tensor(np.ones((1, 1), np.float32))
        handle, _ = routed(env, group, 0)
        tokens = env.backend.tensor(
            np.random.default_rng(env.rank).integers(1, 99, (TOKENS, hidden)).astype(np.float32)
        )
        group.exchange_counts(handle)
        banks = [group.dispatch(handle, tokens).tokens for _ in range(2)]  # views: one of each bank
        want = copy(env, banks[1])
        handle.release()
        memory = c_void_p()
        _native.check(_native.lib.twWindowAlloc(group.pointer, group.leases.bytes, byref(memory)))
        area = group.native.place.window_view(
            memory.value or 0, (group.leases.bytes,), "uint8", group.device is not None, group
        )
        assert env.backend.array(others.all_gatherv(one).rows).sum() == env.nranks  # nobody writes to a bank any more
        for tensor in (*banks, area):
            tensor[...] = CANARY
        assert env.backend.array(others.all_gatherv(one).rows).sum() == env.nranks  # and now all may
        _native.check(_native.lib.twWindowFree(memory.value))
        group.exchange_counts(handle, lease=True)
        before = launches()
        received = group.dispatch(handle, tokens)
        assert received.leased and (before is None or launches() == before + 1), "a dispatch, and nothing behind it"
        rows = copy(env, received.tokens)
        assert np.array_equal(rows, want)
        for bank in banks:
            # Counts and what travels beside rows are in a bank; of rows, nothing behind the counts.
            assert (copy(env, bank)[1:] == CANARY).all(), "rows in a bank, too"
        written = np.flatnonzero(copy(env, area) != CANARY)
        # The lease is the first piece. float32 of small whole numbers has bytes of 0, so all of a row differ.
        assert len(written) == rows.nbytes and written[-1] == rows.nbytes - 1, (len(written), rows.nbytes)
        handle.release()


def test_rows_are_written_once(world) -> None:
    """To the lease, all of them and nothing beyond; no bank has them too, and no kernel copies them."""
    world(3).run(run_written)


# ---- refusals ----------------------------------------------------------------------------------------------------


def run_refused(env: Env) -> list[Any]:
    """Mistakes with the C calls, and what becomes of a lease whose dispatch was refused."""
    lib, found = _native.lib, []

    def exchange(group: tw.Group, handle: tw.Handle, *landing: Any) -> Any:
        given = _header.CountsInput()
        given.lane = -1
        given.stream = group.native.place.stream()
        for q, at in enumerate(landing):
            given.landing[q] = at
        return caught(_native.check, lib.twExchangeCounts(group.pointer, handle.pointer, byref(given)))

    memory = c_void_p()
    with group_with(env, 4 * env.nranks * TOKENS) as group:
        area = group.leases.bytes
        found.append(caught(_native.check, lib.twWindowAlloc(group.pointer, 0, byref(memory))))
        found.append(caught(_native.check, lib.twWindowAlloc(group.pointer, area + 1, byref(memory))))
        _native.check(lib.twWindowAlloc(group.pointer, 200, byref(memory)))
        small = memory.value or 0
        found.append(caught(_native.check, lib.twWindowTrim(small, 2000)))
        found.append(caught(_native.check, lib.twWindowFree(small + 256)))
        _native.check(lib.twWindowAlloc(group.pointer, env.nranks * TOKENS * ROW, byref(memory)))
        whole = memory.value or 0
        handle, tokens = routed(env, group, 0)
        for landing in [(small,), (whole + 1,), (whole + 256,), (None, whole), (small - 4096,)]:
            found.append(exchange(group, handle, *landing))
        # One that is announced: for that handle alone, whole, and to nobody else before its dispatch has ended.
        assert exchange(group, handle, whole)[0] == "twSuccess"
        other, _ = routed(env, group, 1)
        found.append(exchange(group, other, whole))
        found.append(caught(_native.check, lib.twWindowTrim(whole, 1)))
        _native.check(lib.twWindowFree(whole))
        used = group.leases.used
        group.dispatch(handle, tokens)
        found.append(exchange(group, handle))  # it holds a lane
        handle.release()
        assert group.leases.used < used, "freed when its dispatch had ended"
        _native.check(lib.twWindowFree(small))
        assert group.leases.used == 0
        group.exchange_counts(other)
        group.dispatch(other, tokens)  # the group goes on
        other.release()
    with tw.Group(env.comm, **SETTINGS) as plain:
        found.append(caught(_native.check, lib.twWindowAlloc(plain.pointer, 8, byref(memory))))
        handle, tokens = routed(env, plain, 0)
        found.append(exchange(plain, handle, 4096))
        plain.exchange_counts(handle, lease=True)
        assert not plain.dispatch(handle, tokens).leased
        handle.release()
        assert plain.leases.bytes == 0
    found.append(caught(tw.Group, env.comm, **(SETTINGS | {"mode": "low_latency", "lease_bytes": 8})))
    found.append(caught(tw.Group, env.comm, **(SETTINGS | {"lease_bytes": -1})))
    found.append(caught(tw.Group, env.comm, **(SETTINGS | {"lease_bytes": 4096 * (1 + env.rank)})))
    return [outcome and outcome[1] for outcome in found]


def test_refusals(world) -> None:
    sentences = [
        "bytes is 0; it must be from 1 to lease_bytes",
        "it must be from 1 to lease_bytes",
        "bytes is 2000; it must be from 1 to what the lease has, 256",
        "which is no lease, or no longer",
        "landing[0] has 256 bytes; it must have",
        "must be a multiple of 256 bytes",
        "landing[0] has ",
        "landing[1] is ",
        "which is no lease of this group",
        "which is announced already: its dispatch has not ended",
        "is announced: peers may write to all of it",
        "combine or release it before exchange_counts",
        "the group has no leases: lease_bytes is 0",
        "lease_bytes 0",
        "lease_bytes is 8; in low latency it must be 0",
        "lease_bytes is -1; it must be an integer from 0 to 4611686018427387903",
        "lease_bytes differs: rank 0 has 4096, rank 1 has 8192",
    ]
    for told in world(2).run(run_refused):
        assert len(told) == len(sentences)
        for text, sentence in zip(told, sentences, strict=True):
            assert text and sentence in text, (text, sentence)


def run_refused_dispatch(env: Env) -> list[Any]:
    """Rank 1 refuses a dispatch whose rows were to land: nobody's next one does, until counts are exchanged again."""
    found: list[Any] = []
    wrong = env.rank == 1
    with group_with(env, 8 * env.nranks * TOKENS) as group:
        handle, tokens = routed(env, group, 0)
        group.exchange_counts(handle)
        want = copy(env, group.dispatch(handle, tokens).tokens)
        handle.release()
        group.exchange_counts(handle, lease=True)
        found.append(caught(group.dispatch, handle, tokens[:, :3] if wrong else tokens))
        if handle.leased:
            handle.release()
        received = group.dispatch(handle, tokens)
        assert not received.leased and np.array_equal(copy(env, received.tokens), want)
        handle.release()
        assert env.backend.name != "cpu" or group.leases.used == 0
        # A dispatch whose handle it does not even know: the others' receive offsets are used, its own are not.
        group.exchange_counts(handle, lease=True)
        if wrong:
            group.refuse_dispatch()
        else:
            found.append(caught(group.dispatch, handle, tokens))
            if handle.leased:
                handle.release()
        found.append(caught(group.dispatch, handle, tokens))
        if handle.leased:
            handle.release()
        for _ in range(2):
            group.exchange_counts(handle, lease=True)
            received = group.dispatch(handle, tokens)
            assert received.leased and np.array_equal(copy(env, received.tokens), want)
            handle.release()
    return [outcome and outcome[:2] for outcome in found]


def test_refused_dispatch(world) -> None:
    others, mistaken = world(2).run(run_refused_dispatch)
    assert mistaken[0][0] == "twInvalidArgument" and others[0][0] == others[1][0] == "twPeerRefused"
    for result, text in (mistaken[-1], others[-1]):
        assert result == "twBoundMismatch" and "dispatch after different exchanges of counts" in text


# ---- training ----------------------------------------------------------------------------------------------------

ROOMS = {"all": 1 << 20, "some": 4096, "a page": 1}
STACKED = {"experts": 5, "top_k": 3, "sizes": (8, 3, 0), "layers": 4, "layout": "flat", "none": True}


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_stacked_layers(torch, processes, how, room) -> None:
    """Four layers forward before any backward, and checkpointed: the bits of copies."""
    leased = Case(**STACKED, room=(("lease_bytes", ROOMS[room]),))
    want = processes(3).run(train, Case(**STACKED))
    for a, b in zip(processes(3).run(train, leased, how), want, strict=True):
        assert_same(a, b)


def run_saved(env: Env, case: Case, room: int) -> list[dict[str, Any]]:
    """Experts whose backward pass reads what came itself, in the lease; twice over one graph."""
    from tokenway import autograd

    found = []
    with group_of(env, case, lease_bytes=room) as group:
        x, weights, ids, _, towards = leaves(env, group, case)
        y, came, dispatched = x, [], []
        for layer in range(case.layers):
            routed = autograd.dispatch(group, y, ids[layer], weights[layer], layout="flat")
            came.append((routed.tokens.detach(), routed.tokens.detach().clone()))
            dispatched.append(routed)
            w = routed.weights.sum(dim=1, keepdim=True)
            y = y + autograd.combine(routed, routed.tokens * routed.tokens * w)
        used = group.leases.leases
        for _ in range(2):
            (y * towards).sum().backward(retain_graph=True)
            found.append({"out": sent(y.detach()), "x": sent(x.grad), "weights": [sent(w.grad) for w in weights]})
            for now, was in came:
                assert (now == was).all(), "a lease was written to while it lived"
            x.grad = None
            for w in weights:
                w.grad = None
        assert used == (case.layers if room > 1 << 16 else used)
        copies = group.leases.copies
        del y, came, dispatched, routed, now, was, w
        gc.collect()
        assert group.leases.leases == 0, "all is given back"
        assert copies == 0 or room <= 1 << 16
    return found


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(8, 3), (2, 9, 5)])
def test_saved_for_backward(torch, processes, sizes) -> None:
    """Layers keep their rows where they arrived; a second backward pass over the graph has the same bits."""
    case = Case(7, 3, sizes, layers=4, layout="flat")
    want = processes(len(sizes)).run(run_saved, case, 0)
    for room in (1 << 20, 4096, 1):
        for ours, copied in zip(processes(len(sizes)).run(run_saved, case, room), want, strict=True):
            for a, b in zip(ours, copied, strict=True):
                assert_same(a, b)
            assert_same(*ours)
