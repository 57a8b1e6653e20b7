"""What a rank does with a case. Runs on the ranks; brings home what `cases.verify` judges."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from cases import BY_EXPERT, FLOATS, LISTS, Case, Got, Round, answers, make_bias, make_ids, make_payloads, owner_weights
from harness import PATIENT

import tokenway as tw
from tokenway.tensors import numpy_dtype


def play(env: Any, case: Case) -> list[list[Got]]:
    """All flights on a group of their own: what this rank got, by flight and round."""
    case = possible(env, case)
    with tw.Group(env.comm, timeout=PATIENT, **case.setup.settings()) as group:
        return Player(env, group, case, case.setup.calls(group)).flights()


def possible(env: Any, case: Any) -> Any:
    """A case, or a plan, without leases where the backend has none."""
    if "leases" not in env.backend.lacks:
        return case
    return replace(case, setup=replace(case.setup, lease_bytes=0))


def close_kept(env: Any) -> None:
    """Closes the groups that `collected.play_on` kept."""
    for name in sorted(env.kept):
        env.kept.pop(name).close()


class Player:
    """One rank's way through a case."""

    def __init__(self, env: Any, group: tw.Group, case: Case, calls: Any = None):
        self.env = env
        self.group = group
        self.calls = calls or group  # what dispatches and combines: the group, or its rows of another type
        self.case = case
        self.setup = case.setup
        self.rng = np.random.default_rng([case.order, env.rank])
        self.spare: list[tw.Handle] = []
        self.leased: list[tuple[Any, np.ndarray]] = []  # what came into leases, and what it was
        self.unread: dict[tw.Handle, tuple[Any, ...]] = {}  # routings that their handle's first dispatch will read

    def flights(self) -> list[list[Got]]:
        got = [self.flight(rounds) for rounds in self.case.flights]
        self.look_at_leases()
        return got

    def look_at_leases(self) -> None:
        """What came into leases is what it was."""
        for tensor, was in self.leased:
            now = self.array(tensor)
            assert np.array_equal(now.view(np.uint8), was.view(np.uint8)), "a lease was written to while it lived"

    def pause(self) -> None:
        """The slow rank is late by a few milliseconds, now and then."""
        if self.case.slow == self.env.rank and self.rng.random() < 0.3:
            time.sleep(self.rng.random() * 0.004)

    def own_order(self, indices: list[int]) -> list[int]:
        """Another order on every rank: allowed wherever no channel is leased."""
        return [indices[i] for i in self.rng.permutation(len(indices))]

    # ---- one flight ------------------------------------------------------------------------------

    def flight(self, rounds: tuple[Round, ...]) -> list[Got]:
        """Dispatches all, then receives all, then combines all, each in an order of this rank where
        that is allowed. Leases, and calls that wait, come in the order of the rounds."""
        handles = [self.handle(r) for r in rounds]
        inputs = [self.payloads(r) for r in rounds]
        everyone = list(range(len(rounds)))
        pending = {}
        for i in everyone:
            self.pause()
            pending[i] = self.dispatch(rounds[i], handles[i], inputs[i], rounds[i].send_dispatch)
        received = self.receive(rounds, pending)
        pending = {}
        for i in self.own_order([i for i in everyone if rounds[i].again]):
            sent = len(rounds) > 1 or rounds[i].send_dispatch  # in an order of its own none may wait for the others
            pending[i] = self.dispatch(rounds[i], handles[i], inputs[i], sent)
        received |= self.receive(rounds, pending)
        got = [self.snapshot(rounds[i], received[i]) for i in everyone]
        rows = [self.rows(rounds[i], received[i], got[i]) for i in everyone]
        self.combine_all(rounds, handles, rows, got)
        for i in everyone:
            if rounds[i].late:
                self.pause()
                got[i].late = self.array(self.combine(rounds[i], handles[i], rows[i], False))
        for i in [i for i in everyone if rounds[i].lease and self.setup.lease_bytes]:
            self.dispatch_again(rounds[i], handles[i], inputs[i], got[i])
        self.spare = [h for h, r in zip(handles, rounds, strict=True) if not r.memory]
        return got

    def dispatch_again(self, round_: Round, handle: tw.Handle, inputs: list[Any], got: Got) -> None:
        """As a backward pass: by the routing that is known, into leases of its own."""
        self.pause()
        self.count(round_, handle, False)
        extra = {f"p{q}": p for q, p in enumerate(inputs[1:])}
        received = self.group.dispatch(handle, inputs[0], extra, layout="flat")
        again = self.snapshot(replace(round_, layout="flat"), received)
        if round_.layout == "flat":
            wholes = zip((*got.payloads, got.ids), (*again.payloads, again.ids), strict=True)
            rows = int(again.counts.sum())
            assert all(np.array_equal(a[:rows].view(np.uint8), b[:rows].view(np.uint8)) for a, b in wholes)
        handle.release()

    def receive(self, rounds: tuple[Round, ...], pending: dict[int, Any]) -> dict[int, tw.Received]:
        received = {}
        for i in self.own_order(list(pending)):
            self.pause()
            received[i] = pending[i].result() if isinstance(pending[i], tw.Pending) else pending[i]
        return received

    def combine_all(self, rounds: Any, handles: Any, rows: list[Any], got: list[Got]) -> None:
        sent = [i for i, r in enumerate(rounds) if r.send_combine and not r.release]
        pending = {}
        # Parts wait for the ranks to send them, and whoever folds partials of its host for those of its mates.
        in_one_order = self.setup.inbox_tokens is not None or self.setup.domain > 1
        for i in sent if in_one_order else self.own_order(sent):
            self.pause()
            pending[i] = self.combine(rounds[i], handles[i], rows[i], True)
        # Token replicas wait for each other when a combine is completed.
        for i in sent if self.setup.token_replicas > 1 else self.own_order(sent):
            if self.rng.random() < 0.5:
                pending[i].hook()
            got[i].out = self.array(pending[i].result())
        for i in [i for i in range(len(rounds)) if i not in sent]:
            self.pause()
            if rounds[i].release:
                handles[i].release()
            got[i].out = self.array(self.combine(rounds[i], handles[i], rows[i], False))

    # ---- calls -----------------------------------------------------------------------------------

    def handle(self, round_: Round) -> tw.Handle:
        ids, weights = make_ids(self.setup, round_, self.env.rank)
        given: Any = None
        if round_.weights:
            given = self.tensor(np.asfortranarray(weights) if round_.fortran else weights)
        ids = self.tensor(np.asfortranarray(ids) if round_.fortran else spread(ids, round_.strided))
        if round_.reuse and self.spare:
            handle = self.spare.pop()
            handle.update(ids, given)
        else:
            memory = self.tensor(aligned_bytes(self.group.handle_bytes)) if round_.memory else None
            handle = self.group.route(ids, given, memory=memory)
        if round_.exact:
            counted = self.count(round_, handle, round_.send_dispatch)
            assert (counted.result() if round_.send_dispatch else counted) is handle
            handle.learn_rows()  # so that outputs are as large as what comes, on a device too
        if self.env.backend.copies_routing:
            spoil(ids, given)
        else:
            self.unread[handle] = ids, given
        return handle

    def count(self, round_: Round, handle: tw.Handle, send_only: bool) -> Any:
        return self.group.exchange_counts(
            handle,
            send_only=send_only,
            lease=round_.lease,
            max_recv_tokens=round_.room,
            row_alignment=round_.alignment(self.env.rank),
            sm_limit=self.limit(round_, 0),
        )

    def layout(self, round_: Round, handle: tw.Handle) -> str | None:
        """As the dispatch names it; what grouped is, of a handle of both modes, its counts say."""
        if round_.chosen:
            return None
        return round_.layout if self.setup.mode == "auto" and handle.counted else round_.named

    def limit(self, round_: Round, call: int) -> int:
        """sm_limit of this rank's call of a round."""
        return round_.limits[(self.env.rank + call) % len(round_.limits)] if round_.limits else 0

    def payloads(self, round_: Round) -> list[Any]:
        made = make_payloads(self.setup, round_, self.env.rank)
        return [self.tensor(spread(p, round_.strided)) for p in made]

    def dispatch(self, round_: Round, handle: tw.Handle, inputs: list[Any], send_only: bool) -> Any:
        extra = {f"p{q}": p for q, p in enumerate(inputs[1:])}
        result = self.calls.dispatch(
            handle,
            inputs[0],
            extra,
            layout=self.layout(round_, handle),
            bound=round_.bound,
            lane=round_.lane,
            out=self.outputs(round_, handle) if round_.own else None,
            column_major=[f"p{q - 1}" for q in round_.columns] or None,
            send_only=send_only,
            sm_limit=self.limit(round_, 1),
            index_block=round_.index_block,
        )
        spoil(*self.unread.pop(handle, ()))
        return result

    def outputs(self, round_: Round, handle: tw.Handle) -> dict[str, Any]:
        """Tensors for everything that arrives, full of rubbish."""
        group, b = self.group, round_.bound or self.setup.default_bound
        lead: tuple[int, ...] = (group.nranks, b)
        per_row: tuple[int, ...] = (group.top_k,)
        blocks = group.nranks
        if round_.layout in BY_EXPERT:
            lead, per_row, blocks = (group.num_local_experts, group.nranks * b), (), group.num_local_experts
        if round_.exact:
            lead = (handle.rows_of(round_.layout) or 0,)
        elif round_.layout == "grouped_by_bound":
            lead = group.shape.lead(round_.layout, b, 0)
        shapes = {
            "tokens": ((*lead, self.setup.hidden), self.setup.dtype),
            "ids": ((*lead, *per_row), self.setup.id_dtype),
            "weights": ((*lead, *per_row), "float32"),
            "counts": ((blocks,), "int32"),
        }
        if round_.named == "grouped":
            shapes["offsets"] = (blocks + 1,), "int32"
        if round_.layout in BY_EXPERT:
            shapes |= {"origins": (lead, "int64"), "source_counts": ((blocks, group.nranks), "int32")}
        if block := round_.index_block:
            capacity = group.index_capacity(int(np.prod(lead)), block)
            shapes |= {"sorted_rows": ((capacity,), "int32"), "block_experts": ((capacity // block,), "int32")}
            shapes |= {"num_sorted": ((1,), "int32")}
        shapes |= {f"p{q}": ((*lead, n), d) for q, (n, d) in enumerate(self.setup.payloads)}
        for q in round_.columns:
            n, d = self.setup.payloads[q - 1]
            size = numpy_dtype(d).itemsize
            shapes[f"p{q - 1}"] = (*lead[:-1], n, -(-lead[-1] * size // 16) * 16 // size), d
        return {name: self.rubbish(shape, dtype) for name, (shape, dtype) in shapes.items()}

    def combine(self, round_: Round, handle: tw.Handle, rows: Any, send_only: bool) -> Any:
        out = None
        if round_.own:
            out = self.rubbish((round_.tokens[self.env.rank], self.setup.width), round_.out)
        weights = None
        if round_.late_weights:
            weights = self.tensor(spread(owner_weights(self.setup, round_, self.env.rank), round_.strided))
        bias, in_place = self.bias(round_)
        out = bias if in_place else out
        result = self.calls.combine(
            handle,
            rows,
            weighting=round_.weighting,
            weights=weights,
            dtype=round_.out,
            out=out,
            bias=bias,
            send_only=send_only,
            sm_limit=self.limit(round_, 2),
        )
        if out is not None and not send_only:
            assert result is out
        return result

    def bias(self, round_: Round) -> tuple[Any, bool]:
        """From which the sums of a combine start, and whether they go to the same place."""
        made = make_bias(self.setup, round_, self.env.rank)
        in_place = made is not None and round_.bias[self.env.rank % len(round_.bias)] == "place"
        return None if made is None else self.tensor(made if in_place else spread(made, round_.strided)), in_place

    # ---- tensors ---------------------------------------------------------------------------------

    def snapshot(self, round_: Round, received: tw.Received) -> Got:
        """A copy of everything that arrived."""
        payloads = [received.tokens, *(received.payloads[f"p{q}"] for q in range(len(self.setup.payloads)))]
        fields = [self.array(t) for t in payloads]
        if received.leased:
            self.leased += zip(payloads, fields, strict=True)
        rest = [self.array(getattr(received, n)) for n in ("ids", "weights", "counts", "offsets")]
        assert received.layout == round_.named
        got = Got(fields, *rest, np.empty(0), received=received.handle.num_recv_tokens())
        if received.sorted_rows is not None:
            got.lists = tuple(self.array(getattr(received, name)) for name in LISTS)
        if round_.exact:
            got.expert_rows = received.handle.expert_rows
        for name in ("origins", "source_counts"):
            if (told := getattr(received, name)) is not None:
                setattr(got, name, self.array(told))
        return got

    def rows(self, round_: Round, received: tw.Received, got: Got) -> Any:
        if round_.identity and round_.rows == self.setup.dtype and self.setup.dtype in FLOATS:
            # Beyond the counts lies what earlier rounds left. A view ends with its lease.
            ends = (round_.late or round_.release) and not received.leased
            return self.copy(received.tokens) if ends else received.tokens
        made = answers(
            self.setup, round_, self.env.rank, got.payloads[0], got.ids, got.weights, got.counts, got.offsets
        )
        return self.tensor(spread(made, round_.strided))

    def tensor(self, array: np.ndarray) -> Any:
        return self.env.backend.tensor(array)

    def array(self, tensor: Any) -> np.ndarray:
        return self.env.backend.array(tensor)

    def copy(self, tensor: Any) -> Any:
        return self.tensor(self.array(tensor))

    def rubbish(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = numpy_dtype(dtype)
        raw = np.full(int(np.prod(shape)) * kind.itemsize, 0xA5, np.uint8)
        return self.tensor(raw.view(kind).reshape(shape))


def spoil(*routing: Any) -> None:
    """Writes over ids and weights that have been copied: nobody may read them any more."""
    for tensor in routing:
        if tensor is not None:
            tensor[...] = 99


def spread(array: np.ndarray, apart: bool) -> np.ndarray:
    """The same values; `apart`: with gaps between rows and between blocks of rows."""
    if not apart:
        return array
    last = array.shape[-1]
    wide = np.zeros((*(n + 1 for n in array.shape[:-1]), last + 3), array.dtype)
    inner = tuple(slice(1, n + 1) for n in array.shape[:-1])
    view = wide[(*inner, slice(2, last + 2))]
    view[...] = array
    return view


def aligned_bytes(count: int) -> np.ndarray:
    """A uint8 array that begins at a multiple of 64."""
    raw = np.empty(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]
