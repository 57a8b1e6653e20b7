"""Online balancing: experts move to where their load is wanted while the model runs."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenway.balance import planner, rounds
from tokenway.balance.copies import copies_of
from tokenway.balance.given import SlotMaps, checked_plan, slot_maps
from tokenway.balance.weights import Weights
from tokenway.errors import InvalidArgument, InvalidUsage, TokenwayError
from tokenway.group import Group

Array = np.ndarray
LOG = logging.getLogger("tokenway.balance")
LOOK = 4  # steps between two looks at the board, of which each is a copy
PLANNER = 0  # the rank whose plan all follow: on devices ranks read loads at other times


@dataclass(frozen=True)
class Statistics:
    """Since a balancer began. plans: that were followed; epochs: decided, and how many of them void; moves: experts
    that came to this rank, with bytes; steps: of `Balancer.step`; switch_steps: from a plan to its last epoch, of the
    last one. imbalance: what the last plan found, hottest over mean - 1 averaged over layers, and what it was to
    leave."""

    plans: int = 0
    epochs: int = 0
    voids: int = 0
    moves: int = 0
    bytes: int = 0
    steps: int = 0
    switch_steps: int = 0
    imbalance: tuple[float, float] = (0.0, 0.0)


@dataclass
class _Open:
    """An epoch that is staged: its number, and pieces that are still to be copied."""

    number: int
    epoch: rounds.Epoch
    pieces: deque[tuple[int, int, int, int]]
    failed: bool = False
    told: bool = False  # that this rank is ready for it


class Balancer:
    """Moves experts between ranks as their loads change, beside the steps of a group, without a wait.

    `step` is called once in each step of the model, by all ranks, on the thread and stream that use the group; it never
    waits for a rank or a device. Every `every` of them rank 0 plans in a thread, by the group's loads; the others read
    its plan. `follow` has it tell them another planner's. Each rank then copies the experts that it gets into spare
    slots, at most `step_bytes` in a step, and says so; each lane of the group goes by the new map from the same
    dispatch on, on all ranks.

    group: of `Placement(..., moves=True)`, whose maps leave at least one slot of each rank empty (-1): those are spare.
    Where ranks use unlike numbers of slots, as after a shrink, plans use as many on each as the most that one uses,
    and fill them with replicas. weights: `Weights` of that group, filled with what the maps say. every: None for no
    plans but those that `follow` gives. writes: most slots of a layer that a plan changes (default: one of each rank).
    gain: a layer stays as it is unless its imbalance falls by so much. nodes, groups, node_tolerance: as
    `balance.plan`. paused: no plan is made; a plan under way ends, and `follow` goes on.
    """

    def __init__(
        self,
        group: Group,
        weights: Weights,
        *,
        every: int | None = 64,
        writes: int | None = None,
        gain: float = 0.02,
        step_bytes: int = 64 << 20,
        nodes: int = 1,
        groups: int = 0,
        node_tolerance: float = 0.01,
        paused: bool = False,
    ):
        for name, value in (("every", every), ("step_bytes", step_bytes)):
            if name == "every" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument.of(name, f"is {value!r}; it must be an integer, at least 1")
        if not gain >= 0:
            raise InvalidArgument.of("gain", f"is {gain!r}; it must be at least 0")
        begun = group.moving.epochs()
        if begun.staged != begun.agreed:
            open_ones = f"epochs {begun.agreed + 1} to {begun.staged} of the group are open"
            raise InvalidUsage(f"{open_ones}; a balancer begins where none is")
        self.group, self.weights, self.paused = group, weights, paused
        self._every, self._gain, self._step_bytes = every, gain, step_bytes
        self._writes = group.nranks if writes is None else writes
        self._asked = {"nodes": nodes, "groups": groups, "node_tolerance": node_tolerance}
        self._tables = np.stack([group.expert_of_slot(layer) for layer in range(group.layers)])
        self._slots = self._slots_in_use()
        self._copies = copies_of(weights)
        self._thread = ThreadPoolExecutor(1, "tokenway-plan")
        self._planning: Future[Any] | None = None
        self._queue: deque[rounds.Epoch] = deque()
        self._open: deque[_Open] = deque()  # staged, and not decided on all lanes here
        self._staged = begun.staged  # the last epoch that is staged: others than this balancer stage none
        self._told = 0  # rank 0: the last plan that it has told, by the epoch that it begins with
        self._began = 0
        self._next = every or 0
        self._given: Array | None = None  # rank 0: what `follow` was given, until it is looked at
        self.statistics = Statistics()
        if every is not None:  # refuses what the planner would, on all ranks
            self._find(np.ones((group.layers, group.experts)), self._tables)

    def step(self, streams: Iterable[Any] = (), idle: Iterable[int] = ()) -> None:
        """Takes over what has happened since, and goes on with it. streams: those of CUDA, beside the current one, on
        which steps of the group or its experts run. idle: lanes on which the model makes no dispatches meanwhile, which
        hold all epochs open; the same on all ranks. On each an empty dispatch is made, uncounted, a step of all ranks
        like any other; no handle may hold the lane. Errors: those of the group, once it is finished."""
        for lane in idle:
            _pass(self.group, self.weights, lane)
        self._count(steps=1)
        self._close(streams)
        if self.idle and self.statistics.steps % LOOK == 0:
            self._follow()
        self._stage()
        self._copy()
        if self.group.rank == PLANNER and self.idle:
            self._plan_anew()

    def follow(self, physical_to_logical: Any) -> None:
        """Has all ranks take over a plan from elsewhere: DeepSeek's, a framework's, or a `Plan`. On rank 0, on the
        thread of `step`; calls of other ranks do nothing, and do not look at it.

        physical_to_logical: integers [layers, P], as `slot_maps` has them: the expert in each slot in use, those of
        rank 0 first, equally many of each. Each rank gets the experts that it has there, in slots that the balancer
        chooses. `step` tells the others as soon as they have done the plan before, in place of one that this rank makes
        meanwhile; a plan that was given and not told yet gives its place to the next. `gain` and `writes` do not bound
        it. Errors: InvalidArgument where the shape is another or an expert is missing; nothing has changed then.
        """
        if self.group.rank == PLANNER:
            places = self.group.nranks * self._slots
            self._given = checked_plan(physical_to_logical, self.group.layers, self.group.experts, places)
            self._planning = None  # whatever comes of it

    def slot_maps(self) -> SlotMaps:
        """Where experts are, as far as all lanes of this rank have it, in the format of DeepSeek's balancer."""
        return slot_maps(self._used(self._tables), self.group.experts)

    @property
    def idle(self) -> bool:
        """Whether this rank has done all of the last plan that it knows."""
        return not self._queue and not self._open

    def table(self, layer: int = 0) -> Array:
        """[P] int32: the layer's map, as far as all lanes of this rank have it."""
        return self._tables[layer].copy()

    def close(self) -> None:
        """Ends the thread, and waits for copies. Epochs that are open stay so."""
        self._thread.shutdown()
        self._copies.close()

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------- epochs of a plan

    def _close(self, streams: Iterable[Any]) -> None:
        """Takes epochs that all lanes have, and that no handle of an older version needs."""
        epochs = self.group.moving.epochs()
        while (
            self._open
            and _reached(epochs.agreed, self._open[0].number)
            and _reached(epochs.oldest, self._open[0].number)
        ):
            done = self._open.popleft()
            void = epochs.is_void(done.number)
            self._count(epochs=1, voids=int(void))
            if void:  # what follows was made for the map that did not come
                self._queue = deque(epoch for epoch in self._queue if epoch.layer != done.epoch.layer)
            else:
                self._tables[done.epoch.layer] = done.epoch.table
            self._copies.forget(done.number)
            self._copies.freed(streams)
            if self.idle:
                self._count(switch_steps=self.statistics.steps - self._began)
                LOG.info("epoch %d was the plan's last, after %d steps", done.number, self.statistics.switch_steps)

    def _stage(self) -> None:
        """Stages what may be, in the order of the plan: one epoch of a layer at a time (M1)."""
        while self._queue and all(other.epoch.layer != self._queue[0].layer for other in self._open):
            if len(self._open) >= 8:  # of 15 that may be
                return
            epoch = self._queue[0]
            self._staged = self.group.moving.stage(epoch.table, epoch.layer)
            self._queue.popleft()
            mine = [pull for pull in epoch.pulls if self.weights.rank_of_slot[pull[0]] == self.group.rank]
            pieces = [
                piece
                for target, source in mine
                for piece in self.weights.pieces(epoch.layer, source, target, self._step_bytes)
            ]
            self._count(moves=len(mine), bytes=sum(piece[3] for piece in pieces))
            self._open.append(_Open(self._staged, epoch, deque(pieces)))

    def _copy(self) -> None:
        """Copies at most so many bytes, and says which epochs this rank is ready for, in their order."""
        left = self._step_bytes
        for each in self._open:
            if each.told:
                continue
            try:
                while each.pieces and each.pieces[0][3] <= left and not each.failed:
                    left -= each.pieces[0][3]
                    self._copies.begin(each.number, each.pieces.popleft())
                each.failed = each.failed or self._copies.failed(each.number)
            except TokenwayError as error:
                LOG.warning("epoch %d: a copy failed, so its layer keeps its map: %s", each.number, error)
                each.failed = True
            if not each.failed and (each.pieces or not self._copies.ended(each.number)):
                return
            self.group.moving.ready(each.number, failed=each.failed)
            each.told = True

    # ---------------------------------------------------------------------------------------------------------- plans

    def _plan_anew(self) -> None:
        """Plans in a thread, every so many steps, and tells the others by this rank's board. A plan has the number of
        the epoch that it begins with, which is the same on all ranks that are idle. There is no other before this rank
        follows it, and then only when all of its epochs are decided, which all ranks must have been ready for: nobody
        misses one."""
        number = self._staged + 1
        if self._told == number:
            return
        if self._planning is None:
            self._planning = self._begin_plan()
            return
        if not self._planning.done():
            return
        try:
            wanted, told = self._planning.result()
            if wanted is not None and not self._copies.write_board(_board(number, wanted)):
                return  # what was told before is still on its way there
            self._count(imbalance=told)
            self._told = self._told if wanted is None else number
        except TokenwayError as error:
            LOG.warning("there is no plan: %s", error)
        self._planning = None
        self._next = self.statistics.steps + (self._every or 0)

    def _begin_plan(self) -> Future[Any] | None:
        """In the thread: what was given, else a plan of this rank's own if it is time for one."""
        if self._given is not None:
            wanted, self._given = self._given, None
            return self._thread.submit(self._look_at, wanted, self.group.loads, self._tables.copy())
        if self.paused or self._every is None or self.statistics.steps < self._next:
            return None
        loads = self.group.loads
        return self._thread.submit(self._find, loads, self._tables.copy()) if loads.any() else None

    def _look_at(self, wanted: Array, loads: Array, tables: Array) -> tuple[Array | None, tuple[float, float]]:
        """As `_find`, of maps that were given."""
        before, after = (self._imbalance(loads, maps) for maps in (self._used(tables, loads), wanted))
        found = float(before.mean()), float(after.mean())
        return (wanted if any(self._epochs(tables, wanted)) else None), found

    def _find(self, loads: Array, tables: Array) -> tuple[Array | None, tuple[float, float]]:
        """(maps [layers, slots in use], None where nothing is gained; the imbalance before and after)."""
        now = self._used(tables, loads)
        size = {"ranks": self.group.nranks, "slots": self._slots}
        made = planner.plan(loads, **size, old=now, writes=self._writes, **self._asked)
        before = self._imbalance(loads, now)
        better = before - made.imbalance > self._gain
        wanted = np.where(better[:, None], made.physical_to_logical, now)
        after = np.where(better, made.imbalance, before)
        found = float(before.mean()), float(after.mean())
        return (wanted if any(self._epochs(tables, wanted)) else None), found

    def _used(self, tables: Array, loads: Array | None = None) -> Array:
        """[layers, slots in use]: maps without spare slots, as the planner has them. loads: by which ranks are filled
        that have fewer experts; None: with -1."""
        of, ranks = self.weights.rank_of_slot, self.group.nranks
        wanted = [None] * len(tables) if loads is None else np.asarray(loads)
        pairs = zip(tables, wanted, strict=True)
        return np.stack([rounds.used_map(table, of, ranks, self._slots, by) for table, by in pairs])

    def _imbalance(self, loads: Array, used: Array) -> Array:
        """[layers]"""
        return planner.imbalance(planner.rank_loads(loads, used, ranks=self.group.nranks, slots=self._slots))

    def _epochs(self, tables: Array, wanted: Array) -> list[list[rounds.Epoch]]:
        """Of each layer."""
        rows = wanted.reshape(len(tables), self.group.nranks, self._slots)
        of = self.weights.rank_of_slot
        return [list(rounds.epochs(layer, table, rows[layer], of)) for layer, table in enumerate(tables)]

    def _follow(self) -> None:
        """Takes the next plan over, if it is there."""
        board = self._copies.read_board(PLANNER)
        number = self._staged + 1
        wanted = None if board is None else _read_board(board, number, (self.group.layers, -1))
        if wanted is None:
            return
        self._began = self.statistics.steps
        lists = self._epochs(self._tables, wanted)
        # A layer has one open epoch: those of other layers go between.
        depth = max((len(each) for each in lists), default=0)
        self._queue.extend(each[i] for i in range(depth) for each in lists if i < len(each))
        self._count(plans=1)
        before, after = self.statistics.imbalance
        LOG.info(
            "a plan from epoch %d on: %d epochs, %d experts move; imbalance %.3f, to be %.3f",
            number,
            len(self._queue),
            sum(len(epoch.pulls) for epoch in self._queue),
            before,
            after,
        )

    def _slots_in_use(self) -> int:
        """Of each rank, by a plan: the most that one uses in a map. Errors: InvalidArgument."""
        rank_of_slot, ranks = self.weights.rank_of_slot, self.group.nranks
        used = max(int(np.bincount(rank_of_slot[table >= 0], minlength=ranks).max()) for table in self._tables)
        local = np.bincount(rank_of_slot, minlength=ranks)
        if used >= local.min():
            what = f"has maps that use up to {used} slots of a rank, of {sorted(set(local.tolist()))}"
            raise InvalidArgument.of("group", f"{what}; plans use as many on each, and must leave some empty (-1)")
        return used

    def _count(self, **more: Any) -> None:
        """Adds to the statistics, but for what is said anew each time."""
        last = {"switch_steps", "imbalance"}
        old = self.statistics
        self.statistics = replace(
            old, **{name: value if name in last else getattr(old, name) + value for name, value in more.items()}
        )


def _pass(group: Group, weights: Weights, lane: int) -> None:
    """Makes a dispatch of nothing on a lane, which tells and learns how far ranks are."""
    place, like = group.native.place, weights.board()
    tensors = {name: place.empty((0, of.elements), of.dtype, like) for name, of in group.shape.payloads.items()}
    tokens = tensors.pop("tokens")
    handle = group.route(place.empty((0, group.top_k), "int32", like))
    if group.exact:
        group.exchange_counts(handle, lane=lane)
    group.dispatch(handle, tokens, tensors or None, bound=1, lane=lane, count=False)
    handle.release()


def _reached(version: int, epoch: int) -> bool:
    """Whether a version has come as far as an epoch: numbers wrap."""
    return (version - epoch) % 2**31 < 2**30


def _board(number: int, wanted: Array) -> bytes:
    """A plan as ranks read it: its number, maps, and a sum of both, as it may be read while it is written."""
    head = np.array([number, wanted.size], np.int64).tobytes() + wanted.astype(np.int32).tobytes()
    return np.array([zlib.crc32(head)], np.int64).tobytes() + head


def _read_board(board: bytes, number: int, shape: tuple[int, int]) -> Array | None:
    """The maps of a plan, None where it is another one or not whole."""
    told, found, size = np.frombuffer(board, np.int64, 3)
    if found != number or not 0 < size <= (len(board) - 24) // 4:
        return None
    if zlib.crc32(board[8 : 24 + 4 * int(size)]) != told:
        return None
    return np.frombuffer(board, np.int32, int(size), 24).reshape(shape)
