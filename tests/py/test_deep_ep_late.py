"""What a rank in DeepEP's place refuses where peers learn late, as on GPUs: every step that they have enqueued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tokenway as tw

pytestmark = pytest.mark.torch

HIDDEN, TOP_K = 8, 2


class Told:
    """A group, and rows of it, that write down the steps they are asked for. late: whether peers learn late."""

    max_tokens = max_recv_rows = 64
    nranks, device, num_local_experts = 2, 0, 4

    def __init__(self, name: str, told: list[str], late: bool = True, group: Any = None):
        self.name, self.told, self.group = name, told, group or self
        self.native = SimpleNamespace(place=SimpleNamespace(learns_late=late))

    def route(self, ids: Any, weights: Any) -> Any:
        return SimpleNamespace(leased=False, tokens=len(ids), group=self)

    def exchange_counts(self, handle: Any, **asked: Any) -> None:
        self.told.append(f"counts of {self.name}")
        if asked["row_alignment"] == 3:
            raise tw.InvalidArgument("row_alignment is 3")

    def refuse_routing(self, layout: str) -> None:
        self.told.append(f"no counts of {self.name}")

    def refuse_dispatch(self, layout: str) -> None:
        self.told.append(f"no dispatch of {self.name}, {layout}")

    def combine(self, handle: Any, rows: Any, **asked: Any) -> Any:
        self.told.append(f"{'no ' * (rows is None)}combine of {self.name}")
        if rows is None or asked.get("bias") is not None:
            raise tw.InvalidArgument("bias has another shape")
        return rows


def refusals_of_routes(late: bool, waits: bool, alignment: int = 1, **wrong: Any) -> list[str]:
    """What peers are told by a dispatch of ElasticBuffer's with wrong rows or ids."""
    import torch

    from tokenway.compat.deep_ep.expanded import Expanded, Plan
    from tokenway.compat.deep_ep.normal import Rows
    from tokenway.integrations.groups import Views

    told: list[str] = []
    group = Told("group", told, late)
    rows = Told("rows", told, late, group)
    exchange = object.__new__(Expanded)
    exchange.experts, exchange.top_k, exchange.shared = 8, TOP_K, SimpleNamespace(group=group)
    x, ids = wrong.get("x", torch.ones(3, HIDDEN)), wrong.get("ids", torch.zeros(3, TOP_K, dtype=torch.int64))
    exchange._views = Views(exchange.shared)
    exchange._views._made[Rows.of(torch.ones(3, HIDDEN)).kind] = rows
    rows.exchange_counts = group.exchange_counts  # type: ignore[method-assign]
    with pytest.raises(tw.InvalidArgument):
        exchange.route(Rows.of(x), ids, None, Plan(None, True, 4, alignment, waits), 0)
    return told


def test_a_dispatch_of_elastic_buffers(torch: Any) -> None:
    """Of two steps, the second is refused by rows of the peers' type, unless their hosts wait for the first."""
    both = ["no counts of group", "no dispatch of rows, grouped"]
    for wrong in ({"x": torch.ones(3, HIDDEN, 1)}, {"x": torch.ones(5, HIDDEN)}, {"ids": torch.zeros(2, TOP_K)}):
        assert refusals_of_routes(True, False, **wrong) == both
        assert refusals_of_routes(True, True, **wrong) == refusals_of_routes(False, False, **wrong) == both[:1]
    assert refusals_of_routes(True, False, 3) == ["counts of group", both[1]]
    assert refusals_of_routes(True, True, 3) == ["counts of group"]


@pytest.mark.parametrize("late", [False, True])
def test_a_combine_with_weights(torch: Any, late: bool) -> None:
    """Of two steps: the second is refused too, whether rows are wrong or what the first finds."""
    from tokenway.compat.deep_ep.normal import Normal

    told: list[str] = []
    exchange = object.__new__(Normal)
    rows, weights = Told("rows", told, late), Told("weights", told, late)
    exchange.top_k = TOP_K
    exchange.view = lambda kind: weights if kind[0] == TOP_K else rows  # type: ignore[method-assign]
    routing = SimpleNamespace(handle=rows.route([1] * 3, None), limit=0, rows=5)
    given = torch.ones(5, HIDDEN), torch.ones(5, TOP_K)
    assert exchange.gather(routing, *given, None, 0)[1].shape == (5, TOP_K)
    assert told == ["combine of rows", "combine of weights"]
    for wrong, first in ((given[0][1:], "no combine of rows"), (given[0], "combine of rows")):
        told.clear()
        with pytest.raises(tw.InvalidArgument):
            exchange.gather(routing, wrong, given[1], torch.ones(1, 1), 0)
        assert told == [first, "no combine of weights"][: 1 + late]


def test_a_dispatch_by_rank(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of experts are summed before rows are sent, and not at all where most rows are said."""
    from tokenway.compat.deep_ep import Buffer
    from tokenway.compat.deep_ep.normal import Normal

    told: list[str] = []
    routing = SimpleNamespace(experts=[2], counts=None)
    monkeypatch.setattr(Normal, "route", lambda *_: routing)
    monkeypatch.setattr(Normal, "sums", lambda *_: told.append("sums") or [2, 4])
    monkeypatch.setattr(Normal, "send", lambda *_, **__: told.append("send") or (torch.ones(1), None, None, None))
    store = torch.distributed.HashStore()
    alone = type("Alone", (), {"rank": lambda _: 0, "size": lambda _: 2, "store": store})()
    buffer = Buffer(alone)
    layout = {"is_token_in_rank": torch.ones(3, 2, dtype=torch.bool)}
    layout["num_tokens_per_expert"] = torch.ones(8, dtype=torch.int32)
    for worst, steps, counts in ((0, ["sums", "send"], [2, 4]), (9, ["send"], [])):
        told.clear()
        assert buffer.dispatch(torch.ones(3, HIDDEN), **layout, num_worst_tokens=worst)[3] == counts
        assert told == steps
