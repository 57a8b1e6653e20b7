"""One case on one rank's GPU: its tensors, its handles, and the calls that are measured. Needs PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tokenway import tensors
from tokenway.bench import verify
from tokenway.bench.case import BY_EXPERT, Case
from tokenway.bench.graphs import COUNT, Graphs, Loop, Replay, Stretches
from tokenway.bench.nvlink_results import BEHIND
from tokenway.group import Group
from tokenway.handle import Handle

EXCHANGES = 2  # verified per row
GRAPHS = 8  # of a case at most


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host, with the dtype that NumPy and ml_dtypes have for it."""
    host = tensor.detach().contiguous().cpu()
    name = tensors.dtype_of(host)
    if not host.numel():
        return np.zeros(tuple(host.shape), tensors.numpy_dtype(name))
    return host.view(torch.uint8).numpy().view(tensors.numpy_dtype(name))


def here() -> torch.device:
    """The rank's device."""
    return torch.device("cuda", torch.cuda.current_device())


class DeviceCase:
    """What a rank keeps for a case. Everything that a measured call reads or writes is allocated here.

    A graph has a handle for each of its dispatches, with a routing that no dispatch has seen: so each replay reads the
    ids and works out the slots in every dispatch, as the layers of a model do. In high throughput it exchanges all
    counts anew before it is timed: then its dispatches are the first of their routing in every replay.
    """

    def __init__(self, case: Case, group: Group):
        self.case, self.group, self.rank = case, group, group.rank
        self._place = here()
        t, hidden = case.tokens, case.profile.hidden
        self._by_expert = case.layout in BY_EXPERT
        self._load(case)
        # In high throughput each graph has its own, whose counts stay; allocated before anybody exchanges.
        graphs = GRAPHS if case.exact else 1
        self._sets = [[group.route(self.ids, self.weights) for _ in range(COUNT + 1)] for _ in range(graphs)]
        self.handles = self._sets[0]
        self.handle = group.route(self.ids, self.weights)  # of eager calls
        if case.exact:
            self._count(self.handle)
        self._allocate()
        self.result = torch.zeros((t, hidden), dtype=getattr(torch, case.combine_dtype), device=self._place)
        self.back: DeviceCase | None = None  # the backward pass, if it is measured
        torch.cuda.current_stream().synchronize()

    def gradients(self) -> DeviceCase:
        """The backward pass over the routing that `handle` has: a dispatch of the gradients of combine's results, and a
        combine of those of dispatch's rows. Handles are this case's, all other memory is its own."""
        back = copy.copy(self)
        back.case = self.case.backward
        back._load(back.case)
        back._allocate()
        back.result = torch.zeros_like(self.result)
        torch.cuda.current_stream().synchronize()
        return back

    def _count(self, handle: Handle) -> None:
        """The exchange of counts, and the host learns them: outputs are as large as what comes. Collective."""
        self.group.exchange_counts(handle)
        self._room = handle.rows_of(self.case.layout) or 0
        handle.learn_rows()

    def _allocate(self) -> None:
        """Memory for what comes: the outputs by expert, and the experts' rows. In high throughput for all that there is
        room for, which a graph needs that exchanges counts itself."""
        case = self.case
        lead = self.group.shape.lead(case.layout, self.bound, self._room if case.exact else 0)
        self._out = self._outputs(lead) if self._by_expert else None
        answer = getattr(torch, case.combine_dtype)
        self._rows = torch.zeros((*lead, case.profile.hidden), dtype=answer, device=self._place)

    @property
    def bound(self) -> int:
        """Of the tokens that a rank sends."""
        return self.case.tokens

    @property
    def rows(self) -> torch.Tensor:
        """The experts' rows of `handle`."""
        return self._rows_of(self.handle)

    def _rows_of(self, handle: Handle) -> torch.Tensor:
        return self._rows[: handle.rows_of(self.case.layout)] if self.case.exact else self._rows

    def _out_of(self, handle: Handle) -> dict[str, torch.Tensor] | None:
        """The outputs of a dispatch by expert; None: it returns views of the window."""
        if self._out is None or not self.case.exact:
            return self._out
        return {name: tensor[: handle.rows_of(self.case.layout)] for name, tensor in self._out.items()}

    def _update(self, handle: Handle) -> None:
        """The routing again: the handle's next dispatch is its first. In high throughput collective."""
        handle.update(self.ids, self.weights)
        if self.case.exact:
            self._count(handle)

    def _reset_handles(self, graph: int) -> None:
        """Handles for the graph of this number, whose dispatches are their first. In high throughput collective."""
        self.handles = self._sets[graph % len(self._sets)]
        for handle in self.handles:
            self._update(handle)

    def _outputs(self, lead: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Every output of a dispatch but the counts, in memory of the caller's."""
        case = self.case
        per_row = () if self._by_expert else (case.profile.top_k,)
        made = {
            "tokens": ((*lead, case.profile.hidden), getattr(torch, case.dtype)),
            "scales": ((*lead, case.scales), torch.float32),
            "ids": ((*lead, *per_row), torch.int32),
            "weights": ((*lead, *per_row), torch.float32),
        }
        if not case.scales:
            del made["scales"]
        return {name: torch.empty(shape, dtype=dtype, device=self._place) for name, (shape, dtype) in made.items()}

    def _load(self, case: Case) -> None:
        """Tokens and routing of a case of this shape."""
        values, scales = case.inputs(self.rank)
        self.tokens = self._device(values)
        self.payloads = None if scales is None else {"scales": self._device(scales)}
        self.ids = self._device(case.exchange.ids[self.rank])
        self.weights = self._device(case.exchange.weight[self.rank])

    def _device(self, array: np.ndarray) -> torch.Tensor:
        return tensors.to_torch(np.ascontiguousarray(array)).to(self._place)

    # ---------------------------------------------------------------------------------------------- measured calls

    def dispatch(self, handle: Handle) -> Any:
        """rank_major and flat: rows stay in the window, and what is returned are views."""
        return self._dispatch(handle, self._out_of(handle))()

    def combine(self, handle: Handle) -> None:
        """Of rows in a buffer of the caller's, as experts leave them."""
        self._combine(handle)()

    def _dispatch(self, handle: Handle, out: Any) -> Callable[[], Any]:
        """The call with all its arguments."""
        case = self.case
        return partial(
            self.group.dispatch, handle, self.tokens, self.payloads, layout=case.layout, bound=self.bound, out=out
        )

    def _combine(self, handle: Handle) -> Callable[[], Any]:
        rows = self._rows_of(handle)
        return partial(self.group.combine, handle, rows, weighting=self.case.weighting, out=self.result)

    def pair(self, handle: Handle) -> None:
        """Dispatch and combine."""
        self.dispatch(handle)
        self.combine(handle)

    def graphs(self, name: str = "tokenway", told: Callable[[str], None] = lambda _: None) -> Graphs:
        """pair; dispatch alone and combine alone, a handle's again and again: on the lane that it holds, and without
        one; and pairs of one handle, whose routing is known from its first dispatch on ("cached"), as those of a
        backward pass. In high throughput the exchange of the pairs' counts is apart ("counts"). Where the backward pass
        is measured, it alone ("backward"), and after a pair by the same handle ("both"). told: what comes."""

        def dispatches() -> None:
            first = self.handles[0]
            for _ in range(COUNT):
                self.dispatch(first)
            first.release()

        def each(call: Callable[[Handle], None]) -> Callable[[], None]:
            return lambda: [call(handle) for handle in self.handles[1:]] and None

        def again(call: Callable[[Handle], None]) -> Callable[[], None]:
            return lambda: [call(self.handles[0]) for _ in range(COUNT)] and None

        bodies = {
            "pair": (self.pair, each(self.pair)),
            "dispatch": (self.dispatch, dispatches),
            "combine": (self.pair, again(self.combine)),
            "cached": (self.pair, again(self.pair)),
        }
        if self.back is not None:
            back = self.back.pair

            def there_and_back(handle: Handle) -> None:
                self.pair(handle)
                back(handle)

            bodies["backward"] = (self.pair, again(back))
            bodies["both"] = (self.pair, each(there_and_back))
        if self.case.exact:
            bodies["counts"] = (self._recount, each(self._recount))
        replays = {}
        for number, (phase, (lead, body)) in enumerate(bodies.items()):
            told(f"capturing {phase} of {name}")
            self._reset_handles(number)
            new = self.handles if self.case.exact and phase in ("pair", "both") else []

            def begin(lead: Callable[[Handle], None] = lead, new: list[Handle] = new) -> None:
                for handle in new:
                    self._recount(handle)
                lead(self.handles[0])

            replays[phase] = Replay(begin, body)
        return Graphs(name, replays)

    def stretches(self, barrier: Callable[[], Any]) -> Stretches:
        """Dispatch alone and combine alone behind a barrier, each dispatch of a routing new to it, but for counts."""
        self._reset_handles(GRAPHS - 1)
        calls = {
            "dispatch": lambda at: self.dispatch(self.handles[at]),
            "combine": lambda at: self.combine(self.handles[at]),
        }
        return Stretches(BEHIND, barrier, calls)

    def _reroute(self, handle: Handle) -> None:
        handle.update(self.ids, self.weights)

    def _recount(self, handle: Handle) -> None:
        """The exchange of counts of a new routing."""
        handle.update(self.ids, self.weights)
        self.group.exchange_counts(handle)

    def loops(self, allocates: bool = True) -> list[Loop]:
        """Eager subjects: what each call costs the host, and until the device is done. Beside them what two launches
        cost at least that go through PyTorch. allocates: whether calls may, which ranks of one device must not."""
        combine = self._combine(self.handle)

        def pairs(out: Any) -> Callable[[], object]:
            dispatch = self._dispatch(self.handle, out)
            return lambda: (dispatch(), combine())

        one = torch.zeros(1, device=self._place)
        loops = [
            Loop("direct", pairs(self._out_of(self.handle))),
            Loop("two additions", lambda: (one.add_(1), one.add_(1))),
            Loop("route", lambda: (self._recount if self.case.exact else self._reroute)(self.handle)),
        ]
        if not self.case.exact:
            loops.append(Loop("update + pair", lambda: (self._reroute(self.handle), self.pair(self.handle))))
            if allocates:
                loops.append(Loop("route + pair", lambda: self.pair(self.group.route(self.ids, self.weights))))
        if self.case.layout == "rank_major":
            given = self._outputs((self.case.ranks, self.case.tokens))
            given["counts"] = torch.empty(self.case.ranks, dtype=torch.int32, device=self._place)
            loops.append(Loop("all outputs given", pairs(given)))
        return loops

    def loops_apart(self) -> list[Loop]:
        """Eager subjects again: a dispatch alone, which leaves its lane, and a combine alone."""
        combine = self._combine(self.handle)
        return [
            Loop("dispatch", lambda: (self.dispatch(self.handle), self.handle.release())),
            Loop("combine", combine),
        ]

    # ------------------------------------------------------------------------------------------------- verification

    def settle(self, meet: Callable[[], object]) -> None:
        """One exchange, whose rows are then the experts' answers of all measured calls. meet: a barrier of the hosts;
        between exchanges kernels may be loaded, which must not wait for a peer's exchange. Collective."""
        meet()
        received = self.dispatch(self.handle)
        torch.cuda.current_stream().synchronize()
        meet()
        self.rows.copy_(received.tokens)
        torch.cuda.current_stream().synchronize()
        meet()
        self.combine(self.handle)
        torch.cuda.current_stream().synchronize()
        meet()

    def verify(self, agree: Callable[[str | None], None]) -> None:
        """Two exchanges with different data, in different banks, each compared bit for bit with the oracle. The last
        one's tensors stay. agree: raises on all ranks what one has found. Collective."""
        for turn in reversed(range(EXCHANGES)):
            at = replace(self.case, seed=self.case.seed + turn)
            self._load(at)
            torch.cuda.current_stream().synchronize()
            agree(None)  # nobody allocates any more
            self._update(self.handle)
            if self.case.exact:  # of other tokens, others come
                torch.cuda.current_stream().synchronize()
                agree(None)
                self._allocate()
                torch.cuda.current_stream().synchronize()
                agree(None)
            # Twice, as a recomputation does: what is checked lies in the other bank than it would without.
            self.exchange(at, agree, 2 if turn % 2 == 1 else 1)

    def exchange(self, at: Case, agree: Callable[[str | None], None], dispatches: int = 1) -> None:
        """One exchange of what is loaded, compared bit for bit with the oracle. agree: as of `verify`. Collective."""
        for _ in range(dispatches):
            received = self.dispatch(self.handle)
        torch.cuda.current_stream().synchronize()
        agree(self._problem(lambda: self._answer(at, received)))
        self.combine(self.handle)
        torch.cuda.current_stream().synchronize()
        want = verify.expected_output(at, self.rank)
        agree(self._problem(lambda: verify.check_output(at, self.rank, to_numpy(self.result), want)))

    def _answer(self, at: Case, received: Any) -> None:
        """Checks what arrived, and lets the experts answer it."""
        names = ("tokens", "ids", "weights", "counts")
        got = SimpleNamespace(**{name: to_numpy(getattr(received, name)) for name in names})
        got.payloads = {name: to_numpy(tensor) for name, tensor in received.payloads.items()}
        verify.check_dispatch(at, self.rank, got)  # type: ignore[arg-type]
        rows = np.zeros(tuple(self.rows.shape), tensors.numpy_dtype(at.combine_dtype))
        verify.run_experts(at, self.rank, got, rows)  # type: ignore[arg-type]
        self.rows.copy_(tensors.to_torch(rows))
        torch.cuda.current_stream().synchronize()

    def _problem(self, check: Callable[[], None]) -> str | None:
        record = self.group.error
        if record is not None:
            return record.message
        try:
            check()
        except verify.Mismatch as mismatch:
            return str(mismatch)
        return None

    def check_again(self, before: torch.Tensor) -> str | None:
        """What is wrong after the measurements: a step that ended in an error, or another result than before."""

        def same() -> None:
            if not torch.equal(self.result.view(torch.uint8), before.view(torch.uint8)):
                raise verify.Mismatch(f"{self.case.name}: combined tokens on rank {self.rank} differ after the replays")

        return self._problem(same)
