"""Streams, events and PyTorch's allocator around the exchange."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, Got, Round, Setup, make_ids, make_payloads, verify
from device_backend import stream_of
from gpu_world import TIMEOUT, Locals, line_tokens, sleep_on_device
from player import Player

import tokenway as tw

SETUP = Setup(ranks=2, experts=6, top_k=3, hidden=512, max_tokens=128, lanes=2)
ROUNDS = tuple(Round((128, 77), seed=s, layout=("rank_major", "expert_major")[s % 2]) for s in range(4))


def side_stream(env: Any) -> Any:
    return stream_of(env.comm.device, env.rank, "side")


def inputs(env: Any, round_: Round) -> list[Any]:
    """(ids, weights, tokens) as tensors of the current stream."""
    arrays = (*make_ids(SETUP, round_, env.rank), make_payloads(SETUP, round_, env.rank)[0])
    return [env.backend.tensor(a) for a in arrays]


def produced_elsewhere(env: Any) -> list[Got]:
    """Inputs come late, from another stream; results are read on it: events alone order the three."""
    side, results = side_stream(env), []
    with tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
        player = Player(env, group, Case(SETUP, ()))
        for round_ in ROUNDS:
            made = inputs(env, round_)
            late = [torch.zeros_like(t) for t in made]
            side.wait_stream(env.stream)
            with torch.cuda.stream(side):
                sleep_on_device(0.02)
                for to, tensor in zip(late, made, strict=True):
                    to.copy_(tensor)
                ready = side.record_event()
            env.stream.wait_event(ready)
            ids, weights, tokens = late
            received = group.dispatch(group.route(ids, weights), tokens, layout=round_.layout)
            got = player.snapshot(round_, received)
            rows = player.rows(round_, received, got)
            out = group.combine(received.handle, rows, weighting=round_.weighting, dtype=round_.out)
            side.wait_stream(env.stream)
            with torch.cuda.stream(side):
                got.out = env.backend.array(out)
            results.append(got)
    return results


def completed_elsewhere(env: Any) -> list[Got]:
    """send_only calls that are begun on one stream and completed on another, whose inputs are dropped in between."""
    side, results = side_stream(env), []
    with tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
        player = Player(env, group, Case(SETUP, ()))
        for round_ in ROUNDS:
            ids, weights, tokens = inputs(env, round_)
            sleep_on_device(0.005)
            handle = group.route(ids, weights)
            pending = group.dispatch(handle, tokens, layout=round_.layout, send_only=True)
            del ids, weights, tokens
            with torch.cuda.stream(side):
                received = pending.result()
                got = player.snapshot(round_, received)
                rows = player.rows(round_, received, got)
                pending = group.combine(handle, rows, weighting=round_.weighting, dtype=round_.out, send_only=True)
                del rows
            got.out = env.backend.array(pending.result())
            results.append(got)
    return results


def memory_reused(env: Any) -> list[Got]:
    """Tensors of another stream that are dropped while the exchange is still to read them, and whose memory that
    stream asks for again at once: `record_stream` keeps it, as for any kernel."""
    side, results = side_stream(env), []
    with tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
        player = Player(env, group, Case(SETUP, ()))
        for round_ in ROUNDS:
            with torch.cuda.stream(side):
                ids, weights, tokens = inputs(env, round_)
            env.stream.wait_stream(side)
            sleep_on_device(0.02)
            handle = group.route(ids, weights)
            received = group.dispatch(handle, tokens, layout=round_.layout)
            for tensor in (ids, weights, tokens):
                tensor.record_stream(env.stream)
            shapes = [t.shape for t in (ids, weights, tokens)]
            del ids, weights, tokens
            with torch.cuda.stream(side):
                for shape in shapes * 8:
                    torch.full(shape, 7, dtype=torch.int32, device=env.device)
            got = player.snapshot(round_, received)
            rows = player.rows(round_, received, got)
            got.out = env.backend.array(group.combine(handle, rows, weighting=round_.weighting, dtype=round_.out))
            results.append(got)
    return results


def dropped_at_once(env: Any) -> list[Got]:
    """Inputs, handles and rows that are dropped as soon as the call returns: memory of one stream is reused in its
    order, so nothing needs to be kept."""
    results = []
    with tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
        player = Player(env, group, Case(SETUP, ()))
        for round_ in ROUNDS:
            prepared = inputs(env, round_)
            sleep_on_device(0.01)
            copies = [t.clone() for t in prepared]
            shapes = [t.shape for t in copies]
            received = group.dispatch(group.route(*copies[:2]), copies[2], layout=round_.layout)
            del copies
            junk = [torch.full(shape, 9, dtype=torch.int32, device=env.device) for shape in shapes * 4]
            got = player.snapshot(round_, received)
            rows = player.rows(round_, received, got)
            out = group.combine(received.handle, rows.clone(), weighting=round_.weighting, dtype=round_.out)
            del received, junk
            junk = [torch.full(rows.shape, 9.0, device=env.device) for _ in range(4)]
            got.out = env.backend.array(out)
            del junk
            results.append(got)
    return results


def on_the_default_stream(env: Any) -> list[Got]:
    """Allowed where a process has its device for itself."""
    env.stream.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream(env.device)):
        with tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
            player = Player(env, group, Case(SETUP, ()))
            results = [player.flight((round_,))[0] for round_ in ROUNDS]
        torch.cuda.current_stream().synchronize()
    return results


def check(by_rank: list[list[Got]]) -> None:
    for s, round_ in enumerate(ROUNDS):
        verify(SETUP, round_, [replace(mine[s], received=None) for mine in by_rank])


WAYS = (produced_elsewhere, completed_elsewhere, memory_reused, dropped_at_once)


@pytest.mark.parametrize("way", [*WAYS, on_the_default_stream], ids=lambda way: way.__name__)
def test_processes(pair, way) -> None:
    check(pair.run(way))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_local_ranks(lines, way) -> None:
    with Locals(2, devices=[0, 0]) as ranks:
        for env in ranks.envs:
            side_stream(env)  # before any kernel waits
        check(ranks.run(way))


# ---- tensors that do not fit ---------------------------------------------------------------------


def elsewhere(env: Any) -> list[str]:
    """What is said to tensors that are not on the group's device."""
    said = []
    with tw.Group(env.comm, experts=2, top_k=1, hidden=4, max_tokens=4) as group:
        ids = torch.zeros(1, 1, dtype=torch.int32, device=env.device)
        tokens = torch.ones(1, 4, dtype=torch.bfloat16, device=env.device)
        handle = group.route(ids)

        def told(function: Any, *args: Any, **keywords: Any) -> None:
            try:
                function(*args, **keywords)
                said.append("nothing")
            except tw.InvalidArgument as error:
                said.append(str(error))

        told(group.route, ids.cpu())
        told(group.route, ids.cpu().numpy())
        told(group.dispatch, handle, tokens.cpu())
        told(group.dispatch, handle, tokens.cpu().view(torch.int16).numpy())
        told(group.dispatch, handle, tokens, out=tokens.cpu())
        received = group.dispatch(handle, tokens)
        told(group.combine, handle, received.tokens.cpu())
        told(group.combine, handle, received.tokens.clone(), out=torch.zeros(1, 4))
        if torch.cuda.device_count() > 1:
            other = torch.device("cuda", 1 - env.device.index)
            told(group.dispatch, handle, tokens.to(other))
        env.stream.synchronize()
        with contextlib.suppress(tw.InvalidUsage):  # a refused dispatch has given the channel back
            handle.release()
    return said


def test_tensors_elsewhere() -> None:
    with Locals(1) as ranks:
        (said,) = ranks.run(elsewhere)
    for text in said:
        assert "cpu" in text or "NumPy" in text or "cuda:1" in text, said


# ---- views ---------------------------------------------------------------------------------------


def in_place(env: Any) -> np.ndarray:
    """Experts write into the view; combine reads it there."""
    with line_tokens(0), tw.Group(env.comm, timeout=TIMEOUT, **SETUP.settings()) as group:
        ids, weights, tokens = inputs(env, ROUNDS[0])
        received = group.dispatch(group.route(ids, weights), tokens)
        received.tokens.mul_(2)
        out = group.combine(received.handle, received.tokens)
        goes = (ids >= 0).any(1)
        ranks = torch.stack([(ids // 3 == r).any(1) & goes for r in range(2)]).sum(0)
        assert received.tokens.is_cuda and received.tokens.device == env.device
        return env.backend.array(out.float() - (tokens * 2).float() * ranks[:, None])


def test_views_in_place(pair) -> None:
    for difference in pair.run(in_place):
        assert not difference.any()
