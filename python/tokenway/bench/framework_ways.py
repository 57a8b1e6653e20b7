"""What ways to experts and back have in common, as `tokenway bench --frameworks exchange` measures them: the tokens and
routings that they are given, and experts for three formats. Needs PyTorch.

While ways are timed, experts answer ones, whatever they get, and take no time. What comes back is then known: each
token's number of answers. Before that, and behind it, experts weigh: what comes back is a token times a number that
follows from its choices, so that a row, an id or a weight in a wrong place is seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenway.bench.case import generator
from tokenway.bench.framework_place import COUNT, Place
from tokenway.bench.profiles import Profile
from tokenway.integrations.groups import give_back

Answer = Callable[[Any], Tensor]  # what a dispatch of a group brought -> the rows of its combine


@dataclass(frozen=True)
class Step:
    """A batch and its routing, in the forms that frameworks want."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, K] int64
    ids32: Tensor
    weights: Tensor  # [T, K] float32
    chosen: Tensor  # [T, E] bool
    probabilities: Tensor  # [T, E] float32, 0 where nothing was chosen
    rounded: Tensor  # the same in the dtype of x


@dataclass(frozen=True)
class Shape:
    """Of all ways at a point."""

    profile: Profile
    tokens: int  # of each rank
    rank: int
    ranks: int

    @property
    def local(self) -> int:
        """Experts of a rank, those of rank 0 first."""
        return self.profile.experts // self.ranks

    @property
    def first(self) -> int:
        """Of this rank's."""
        return self.rank * self.local


def steps_of(place: Place, shape: Shape, routing: str) -> list[Step]:
    """As many as are timed in a row, each with another routing."""
    p, seed = shape.profile, place.settings.seed
    drawn = torch.Generator().manual_seed(seed * 4099 + place.rank)
    x = torch.randn(shape.tokens, p.hidden, generator=drawn).to(place.device, place.dtype)
    made = []
    for number in range(COUNT):
        generate = generator(routing)
        told = generate(place.rank, shape.tokens, p.experts, p.top_k, seed + number, ranks=place.ranks)
        ids, weights = (torch.from_numpy(values).to(place.device) for values in told)
        probabilities = torch.zeros(shape.tokens, p.experts, device=place.device).scatter_(1, ids.long(), weights)
        rounded = probabilities.to(place.dtype)
        made.append(Step(x, ids.long(), ids, weights, probabilities > 0, probabilities, rounded))
    return made


class Ones:
    """Experts that answer ones, from memory that is there."""

    def __init__(self, place: Place):
        self._all = [torch.ones(0, dtype=place.dtype, device=place.device)]  # graphs read those of before too

    def chosen(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows [R, H] with all their choices [R, K], of any rank's experts."""
        return self._like(rows)

    def local(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same, ids being of this rank's experts, from 0, or -1."""
        return self._like(rows)

    def by_expert(self, rows: Tensor, counts: Any, weights: Tensor) -> Tensor:
        """Rows [R, H], as many of each of this rank's experts as counts [L] say, with their weights [R]."""
        return self._like(rows)

    def blocks(self, rows: Tensor) -> Tensor:
        """Rows [L, C, H] of each of this rank's experts, which their owners weigh."""
        return self._like(rows)

    def _like(self, rows: Tensor) -> Tensor:
        if rows.numel() > self._all[-1].numel():  # in the first calls alone
            self._all.append(self._all[-1].new_ones(rows.numel()))
        return self._all[-1][: rows.numel()].view(rows.shape)


class Weighing(Ones):
    """Experts that multiply a row by a number of their own."""

    def __init__(self, place: Place, shape: Shape):
        super().__init__(place)
        self._shape = shape

    def factor(self, ids: Tensor) -> Tensor:
        """What an expert multiplies by."""
        return 1 + ids.float() / self._shape.profile.experts

    def chosen(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        first = self._shape.first
        here = (ids >= first) & (ids < first + self._shape.local)
        scale = torch.where(here, weights.float() * self.factor(ids), 0).sum(1, keepdim=True)
        return (rows.float() * scale).to(rows.dtype)

    def local(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.chosen(rows, torch.where(ids < 0, -1, ids + self._shape.first), weights)

    def by_expert(self, rows: Tensor, counts: Any, weights: Tensor) -> Tensor:
        experts = self._own(rows).repeat_interleave(counts.to(rows.device))
        return (rows.float() * (self.factor(experts) * weights.flatten())[:, None]).to(rows.dtype)

    def blocks(self, rows: Tensor) -> Tensor:
        return (rows.float() * self.factor(self._own(rows))[:, None, None]).to(rows.dtype)

    def wanted(self, step: Step) -> Tensor:
        """What must come back."""
        return step.x.float() * (step.weights * self.factor(step.ids)).sum(1, keepdim=True)

    def _own(self, rows: Tensor) -> Tensor:
        return torch.arange(self._shape.local, device=rows.device) + self._shape.first


class Way(ABC):
    """One way to experts and back, at a point. Calls are collective.

    framework: whose; rivals: frameworks whose own ways one of Tokenway's stands beside, none for those; steps: of
    Tokenway's groups, in a pair; waits: the host waits for what comes, so that no graph holds it; note: what a reader
    must know."""

    name: ClassVar[str]
    framework: ClassVar[str]
    rivals: ClassVar[tuple[str, ...]] = ()
    steps: ClassVar[int] = 0
    note: ClassVar[str] = ""
    waits: bool = True

    def __init__(self, place: Place, shape: Shape):
        self.place, self.shape = place, shape
        self.stack = ExitStack()  # what lasts as long as this

    @classmethod
    def refuses(cls, place: Place, shape: Shape) -> str | None:
        """Why it cannot be measured at a point, None if it can."""
        return None

    @abstractmethod
    def pair(self, step: Step, experts: Ones) -> Tensor:
        """To experts and back: [T, H]."""

    @abstractmethod
    def answers(self, step: Step) -> Tensor:
        """How many ones, or weights of ones, come back for each token: [T]."""

    def direct(self, step: Step, experts: Ones) -> Any:
        """The same exchange by the group's own operations: of those of Tokenway's whose contract has no more."""
        raise NotImplementedError

    @property
    def has_direct(self) -> bool:
        """Whether there are these."""
        return type(self).direct is not Way.direct

    def close(self) -> None:
        """At the end of the point."""
        self.stack.close()


def ranks_of(shape: Shape, step: Step) -> Tensor:
    """How many ranks each token goes to: [T]."""
    goes = torch.zeros(len(step.ids), shape.ranks, device=step.ids.device)
    return goes.scatter_(1, step.ids // shape.local, 1.0).sum(1)


def by_row(experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Answer:
    """`chosen` or `local` of experts, for a layout by source."""

    def answer(came: Any) -> Tensor:
        rows, top_k = came.tokens, came.ids.shape[-1]
        return experts(rows.flatten(0, -2), came.ids.view(-1, top_k), came.weights.view(-1, top_k)).view(rows.shape)

    return answer


def operations(
    view: Any, step: Step, answer: Answer, layout: str, bound: int | None, *, late: bool = False, payloads: Any = None
) -> Any:
    """A routing, its dispatch and its combine, by a group's own calls: what every integration is made of. answer: what
    experts make of what comes. bound: of a dispatch of low latency, None: as many rows as come, which the host waits
    for. late: weights come with the combine. payloads: of the dispatch."""
    handle = view.route(step.ids32, None if late else step.weights)
    if bound is None:
        view.exchange_counts(handle)
    came = view.dispatch(handle, step.x, payloads, layout=layout, bound=bound)
    weights = {"weights": step.weights} if late else {}
    out = view.combine(handle, answer(came), layout=layout, **weights)
    give_back(handle)
    return out
