"""The layout of a routing with calls that return at once: in order of the stream, in a graph, beside other streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import Round, Setup, make_ids, same
from gpu_world import TIMEOUT, Locals, capture, sleep_on_device

import tokenway as tw
from tokenway import reference as ref

NAMES = ("tokens_per_rank", "tokens_per_expert", "token_in_rank", "physical_ids")
TABLE = (*range(60), *range(6))  # experts in slots: of six of them two


def setup_of(policy: str | None) -> Setup:
    made: dict[str, Any] = {"ranks": 2, "experts": 60, "top_k": 7, "max_tokens": 900, "mode": "high_throughput"}
    return Setup(**made) if policy is None else Setup(**made, slot_expert=TABLE, policy=policy)


def check(env: Any, setup: Setup, ids: np.ndarray, layout: tw.RoutingLayout, what: str) -> None:
    home, _ = ref.placement(setup.slots, setup.ranks)
    for name, want in ref.routing_layout(setup.slots_of(ids, env.rank), home, setup.ranks).items():
        same(name, env.backend.array(getattr(layout, name)), want, what)


def replayed(env: Any, policy: str | None) -> None:
    setup = setup_of(policy)
    with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
        batches = [make_ids(setup, Round((900, 411), seed=i, routing="holes"), env.rank)[0] for i in range(4)]
        ids = env.backend.tensor(batches[0])
        # Ids that are written late: the layout comes behind them.
        other = env.backend.tensor(batches[1])
        sleep_on_device(0.1)
        ids.copy_(other)
        layout = group.routing_layout(ids)
        check(env, setup, batches[1], layout, "behind a copy")
        graph, captured = capture(env, lambda: group.routing_layout(ids))
        for i, batch in enumerate(batches):
            ids.copy_(env.backend.tensor(batch))
            graph.replay()
            check(env, setup, batch, captured, f"replay {i}")
        ids[3, 1] = 60
        graph.replay()
        env.stream.synchronize()
        with pytest.raises(tw.InvalidArgument, match=r"ids\[3, 1\] of routing_layout is 60"):
            group.check()
        assert captured.physical_ids[3, 1].item() == -1
        graph.replay()  # each replay tells of its own
        env.stream.synchronize()
        with pytest.raises(tw.InvalidArgument, match=r"ids\[3, 1\] of routing_layout is 60"):
            group.check()
        group.check()
        graph.reset()


@pytest.mark.parametrize("policy", [None, "round_robin", "balanced"])
def test_in_a_graph(policy: str | None) -> None:
    with Locals(2) as ranks:
        ranks.run(replayed, policy)


def on_two_streams(env: Any) -> None:
    """Layouts and steps of one group on streams that do not wait for each other."""
    setup = setup_of("balanced")
    side = torch.cuda.Stream(env.device)
    with tw.Group(env.comm, timeout=TIMEOUT, **setup.settings()) as group:
        round_ = Round((900, 411), seed=9)
        made, weights = make_ids(setup, round_, env.rank)
        ids, tokens = env.backend.tensor(made), torch.zeros((len(made), setup.hidden), dtype=torch.bfloat16)
        handle = group.route(ids, env.backend.tensor(weights))
        tokens = tokens.to(env.device)
        side.wait_stream(env.stream)
        layouts = []
        for _ in range(20):
            handle.update(ids)
            group.exchange_counts(handle)
            group.dispatch(handle, tokens)
            handle.release()
            with torch.cuda.stream(side):
                layouts.append(group.routing_layout(ids))
        env.stream.wait_stream(side)
        for layout in layouts:
            check(env, setup, made, layout, "beside dispatches")
        assert group.error is None


def test_beside_dispatches() -> None:
    with Locals(2) as ranks:
        ranks.run(on_two_streams)
