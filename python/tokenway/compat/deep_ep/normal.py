"""Normal mode: rows as many as come, each once to a rank, by source; sums over ranks back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import tokenway as tw
from tokenway.compat.deep_ep.config import start_tokens
from tokenway.errors import InUse
from tokenway.integrations.groups import Peers, SharedGroup, Views, give_back
from tokenway.pytorch import gradients
from tokenway.pytorch.typed_group import TypedGroup

SCALES = "scales"  # the payload beside a row's values
Kind = tuple[int, torch.dtype, tuple[tuple[str, int, torch.dtype], ...]]  # H, dtype, and what is beside: name, C, dtype


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows that are sent: values [T, H], and scales [T, S] of any dtype beside them, or [T]; and further tensors [T, C]
    that travel with them."""

    values: Tensor
    scales: Tensor | None
    others: dict[str, Tensor]

    @classmethod
    def of(cls, x: Any, **others: Tensor) -> Rows:
        """From the argument x: a tensor, or a pair of values and scales."""
        values, scales = x if isinstance(x, (tuple, list)) else (x, None)
        return cls(values, scales, others)

    def check(self) -> None:
        """Raises InvalidArgument for what are no rows."""
        for name, given, allowed in (("x", self.values, (2,)), ("the scales of x", self.scales, (1, 2))):
            if given is None and name != "x":
                continue
            if given.dim() not in allowed:
                raise tw.InvalidArgument.of(name, f"has shape {list(given.shape)}; it must be [T, ...]")
            if len(given) != len(self.values):
                told = f"has {len(given)} rows; it must have {len(self.values)}, as x"
                raise tw.InvalidArgument.of(name, told)

    @cached_property
    def kind(self) -> Kind:
        """What a row consists of. Errors: those of `check`."""
        self.check()
        beside = [(name, x.shape[1], x.dtype) for name, x in self.payloads().items()]
        return self.values.shape[1], self.values.dtype, tuple(beside)

    def payloads(self) -> dict[str, Tensor]:
        """What travels beside the values, as a dispatch takes it."""
        scales = self.scales
        if scales is None:
            return self.others
        return {SCALES: (scales[:, None] if scales.dim() == 1 else scales).contiguous()} | self.others

    def like(self, values: Tensor, scales: Tensor | None) -> Any:
        """What has come, in the form of the argument x."""
        if self.scales is None or scales is None:
            return values
        return values, scales.view(-1) if self.scales.dim() == 1 else scales


class _NoRoom(tw.InvalidUsage):
    """More tokens than the group has room for, as long as it has not grown."""


class Routing:
    """A routing and what it brought, for dispatches of other rows by it and for combines.

    rows: that come, R', or, where the caller has said how many at most, that outputs have; the same for combines.
    experts: rows of each expert of this rank, on the host, or None where nothing waited for it. limit: most rows that
    were said to come (num_worst_tokens), 0 if nothing was."""

    def __init__(self, exchange: Normal, handle: Any, rows: int, experts: list[int] | None, limit: int):
        self.exchange, self.handle, self.rows, self.experts, self.limit = exchange, handle, rows, experts, limit
        self.counts: Any = None  # [N] int32: rows from each rank, once rows were sent

    @property
    def tokens(self) -> int:
        """T: tokens of this rank."""
        count: int = self.handle.tokens
        return count


class Exchange:
    """Calls that route alike, of all Buffers of a process group: over one group, as rows of several types see it. It
    holds no lane between calls, so these may follow in any order.

    peers: those of the process group. experts, top_k: of the routings. settings: further ones of the group."""

    def __init__(self, peers: Peers, experts: int, top_k: int, **settings: Any):
        self.experts, self.top_k = experts, top_k
        settings = {"mode": "high_throughput", "id_dtype": "int64"} | settings
        self.shared: SharedGroup = peers.shared(experts=experts, top_k=top_k, **settings)
        self._views = Views(self.shared)

    @property
    def group(self) -> tw.Group:
        """The group, once there is one."""
        group = self.shared.group
        assert group is not None, "it is made in the first call that needs it"
        return group

    def view(self, kind: Kind, room: int = 0) -> TypedGroup:
        """The group as such rows see it. Collective the first time, and where rows, or the room for so many tokens of a
        rank, are larger than all before, of which all ranks know alike. Errors: as `SharedGroup.with_room`."""
        view = self._views.find(kind, room)
        if view is not None:
            return view
        hidden, dtype, beside = kind
        rows = tw.RowType(hidden, dtype, {name: tuple(what) for name, *what in beside} or None)
        group = self.shared.group
        return self._views.make(kind, rows, max(room, start_tokens() if group is None else group.max_tokens))


class Normal(Exchange):
    """Of normal mode, whose group grows with what the ranks have. A dispatch is two steps of all ranks, one with a
    routing that is known, and a combine one, or two with weights."""

    # ---------------------------------------------------------------------------------------------------- routings

    def route(
        self,
        rows: Rows,
        choices: Callable[[], Tensor],
        weights: Tensor | None,
        limit: int,
        sm_limit: int,
        layer: int = 0,
    ) -> Routing:
        """Ranks tell each other how many rows will come. A step of all ranks, in which the host waits for what it
        brings, but in a capture; and where a rank has more tokens than there is room for, or cannot make the call, two
        more, in which ranks learn that, and the group grows.

        choices: returns [T, K] int64, -1 for none; what it raises, peers are told of. weights: [T, K] float32, or None.
        limit: most rows that come, 0: as many as do. layer: whose map ids go by, in a group that has maps. Errors:
        InvalidArgument, on the other ranks PeerRefused; RecvOverflow on all."""
        for _ in range(2):
            handle, problem = None, None
            try:
                with gradients.telling(self._refuse_routing):
                    view = self.view(rows.kind)
                    ids, tokens = choices(), len(rows.values)
                    check_choices(ids, weights, tokens, self.top_k)
                    if tokens > view.max_tokens:
                        told = f"are {tokens}, and the group has room for {view.max_tokens}"
                        raise _NoRoom(f"tokens {told}: make the largest call once before the capture")
                    handle = view.route(ids, weights, layer=layer)
                    most = min(limit, view.max_recv_rows) or None
                    if most is None and gradients.capturing(view.group):
                        told = "is 0; while a graph is captured it must be the most rows that may come"
                        raise tw.InvalidArgument.of("num_worst_tokens", told)
                return self._counted(view, handle, most, limit, sm_limit)
            except Exception as error:
                if handle is not None:
                    give_back(handle)
                # These are known on all ranks alike, or to nobody else.
                if isinstance(error, (tw.GroupFinished, tw.RecvOverflow, tw.BoundMismatch, InUse)):
                    raise
                problem = error
            self._grow(rows, problem)
        raise problem

    def _refuse_routing(self) -> None:
        if self.shared.group is not None:
            self.shared.group.refuse_routing("flat")

    def _counted(self, view: TypedGroup, handle: Any, most: int | None, limit: int, sm_limit: int) -> Routing:
        view.group.exchange_counts(handle, max_recv_tokens=most, sm_limit=sm_limit)
        experts = None
        if not gradients.capturing(view.group):
            _ = handle.recv_rows  # on a device, too, a peer's refusal is known from here on
            experts = handle.expert_rows.tolist()
        return Routing(self, handle, handle.rows_of("flat"), experts, limit)

    def _grow(self, rows: Rows, problem: Exception) -> None:
        """After an exchange of counts that some rank has refused: all ranks learn why, and the group grows if it was
        for want of room. Raises on all ranks if it was for anything else on one of them, and in a capture."""
        group = self.shared.group
        if group is None or gradients.capturing(group):
            raise problem
        refused = not isinstance(problem, (_NoRoom, tw.PeerRefused))
        tokens = 0 if refused else len(rows.values)
        mine = torch.tensor([[tokens, int(refused)]], dtype=torch.int32, device=gradients.device_of(group))
        told = group.all_gatherv(mine, [1] * group.nranks, bound=1).rows.tolist()
        if any(failed for _, failed in told):
            if isinstance(problem, _NoRoom):
                rank = next(rank for rank, (_, failed) in enumerate(told) if failed)
                raise tw.PeerRefused(f"rank {rank} refused its arguments of dispatch") from None
            raise problem
        self.view(rows.kind, max(count for count, _ in told))

    # -------------------------------------------------------------------------------------------------------- steps

    def send(self, routing: Routing, rows: Rows, sm_limit: int, first: bool = False) -> tuple[Tensor, ...]:
        """Sends rows by a routing: (values [R, H], scales [R, S] or None, ids [R, K] int64, local or -1, weights [R, K]
        float32, 0 where the id is -1; the last two only if it is the first time, else None). R is as many as come, or
        as were said at most; then ids beyond those that come are -1, and rows there hold anything.

        A step of all ranks. On a CUDA device nothing waits. Errors: as `Group.dispatch`."""
        handle, view = routing.handle, routing.handle.group
        with gradients.telling(lambda: refuse_dispatch(view, handle)):
            view = self.view(rows.kind)
            if len(rows.values) != handle.tokens:
                told = f"has {len(rows.values)} rows; it must have {handle.tokens}, as when it was routed"
                raise tw.InvalidArgument.of("x", told)
            whole, used = self._outputs(routing, rows, first)
            payloads = rows.payloads()
        try:
            view.dispatch(handle, rows.values, payloads, layout="flat", out=used, count=first, sm_limit=sm_limit)
        finally:
            give_back(handle)
        if first:
            routing.counts = used["counts"]
            whole["weights"].masked_fill_(whole["ids"] < 0, 0)
        return whole["tokens"], whole.get(SCALES), whole.get("ids"), whole.get("weights")

    def _outputs(self, routing: Routing, rows: Rows, first: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what a caller gets, what a dispatch writes to): the second are the first rows of it."""
        device, count = rows.values.device, max(routing.limit, routing.rows)
        whole = {"tokens": rows.values.new_empty(count, rows.values.shape[1])}
        for name, elements, dtype in rows.kind[2]:
            whole[name] = torch.empty(count, elements, dtype=dtype, device=device)
        if first:
            make = torch.empty if count == routing.rows else partial(torch.full, fill_value=-1)
            whole["ids"] = make((count, self.top_k), dtype=torch.int64, device=device)
            whole["weights"] = torch.empty(count, self.top_k, dtype=torch.float32, device=device)
        all_come = count == routing.rows
        used = dict(whole) if all_come else {name: tensor[: routing.rows] for name, tensor in whole.items()}
        if first:
            used["counts"] = torch.empty(self.group.nranks, dtype=torch.int32, device=device)
        return whole, used

    def gather(
        self, routing: Routing, rows: Tensor, weights: Tensor | None, biases: Any, sm_limit: int
    ) -> tuple[Tensor, Tensor | None]:
        """Sums rows [R, H] over ranks, where they came from: [T, H] of their dtype, from `biases` on; and weights
        [R, K] float32: [T, K], if there are any, on all ranks or on none.

        A step of all ranks, or two with weights. Errors: as `Group.combine`."""
        handle, view, beside = routing.handle, routing.handle.group, None
        with gradients.telling(lambda: refuse_combine(handle, view, beside)):
            beside = None if weights is None else self.view((self.top_k, torch.float32, ()))
            bias = sum_of(biases)
            values = _used("x", rows, routing, (rows.shape[-1],), rows.dtype)
            view = self.view((rows.shape[-1], rows.dtype, ()))
            if weights is not None:
                weights = _used("topk_weights", weights, routing, (self.top_k,), torch.float32)
        out = None
        try:
            out = view.combine(handle, values, layout="flat", dtype=rows.dtype, bias=bias, sm_limit=sm_limit)
            if beside is None:
                return out, None
            return out, beside.combine(handle, weights, layout="flat", dtype=torch.float32, sm_limit=sm_limit)
        except tw.InvalidArgument:
            if out is None:
                _refuse_second(handle, beside)
            raise
        finally:
            give_back(handle)

    def sums(self, per_expert: Tensor) -> list[int]:
        """[E] of this rank: over all ranks, those of this rank's experts, on the host. As many steps as there are parts
        of `max_tokens` experts."""
        group, parts = self.group, []
        for part in per_expert.to(torch.int32).view(-1, 1).split(group.max_tokens):
            came = group.all_gatherv(part, [len(part)] * group.nranks, bound=len(part)).rows
            parts.append(came.view(group.nranks, len(part)).sum(0))
        return torch.cat(parts).view(group.nranks, -1)[group.rank].tolist()


def sum_of(biases: Any) -> Tensor | None:
    """The argument bias of a combine as one: None, a tensor, or two."""
    first, second = biases if isinstance(biases, (tuple, list)) else (biases, None)
    if first is None or second is None:
        return second if first is None else first
    if first.shape != second.shape:
        told = f"has shapes {list(first.shape)} and {list(second.shape)}; they must be the same"
        raise tw.InvalidArgument.of("bias", told)
    return first.float() + second.float()


def check_choices(ids: Any, weights: Any, tokens: int, top_k: int) -> None:
    """Raises InvalidArgument unless they are [T, K], or there are no weights."""
    for name, given in (("topk_idx", ids), ("topk_weights", weights)):
        if given is None and name != "topk_idx":
            continue
        if not isinstance(given, Tensor):
            raise tw.InvalidArgument.of(name, f"is of type {type(given).__name__}; it must be a PyTorch tensor")
        if tuple(given.shape) != (tokens, top_k):
            raise tw.InvalidArgument.of(name, f"has shape {list(given.shape)}; it must be {[tokens, top_k]}")


def _used(name: str, rows: Tensor, routing: Routing, row: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The rows of a combine that have come; InvalidArgument for others than were received."""
    wanted = max(routing.limit, routing.rows), *row
    if tuple(rows.shape) != wanted or rows.dtype != dtype:
        told = f"is {str(rows.dtype)[6:]} {list(rows.shape)}; it must be {str(dtype)[6:]} {list(wanted)}, as received"
        raise tw.InvalidArgument.of(name, told)
    return (rows if len(rows) == routing.rows else rows[: routing.rows]).contiguous()


def refuse_dispatch(view: TypedGroup, handle: Any, layout: str = "flat") -> None:
    """As `Group.refuse_dispatch`, on the lane that the handle holds."""
    with suppress(tw.TokenwayError):
        view.dispatch(handle, None, layout=layout)
    give_back(handle)


def refuse_combine(handle: Any, view: TypedGroup, beside: TypedGroup | None, values: Any = None) -> None:
    """As `Group.refuse_dispatch`. beside: of a second step, where peers that learn late are on their way to it. values:
    anything, if the peers' combine has values of choices."""
    with suppress(tw.TokenwayError):
        view.combine(handle, None, choice_values=values)
    _refuse_second(handle, beside)
    give_back(handle)


def _refuse_second(handle: Any, beside: TypedGroup | None) -> None:
    """Refuses the second step of a combine with weights that peers have enqueued, if they learn only later that the
    first was refused."""
    if beside is not None and beside.native.place.learns_late:
        gradients.refuse_combine(handle, beside)
