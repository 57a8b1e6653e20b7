"""Online balancing: experts move to where their load is wanted while the model runs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tokenway.balance import board, rounds
from tokenway.balance.copies import Beside, Piece, Thought, copies_of
from tokenway.balance.given import SlotMaps, checked_plan, slot_maps
from tokenway.balance.plans import Plans, Wanted
from tokenway.errors import InvalidArgument, InvalidUsage, TokenwayError
from tokenway.moving import Epochs

Array = np.ndarray
LOG = logging.getLogger("tokenway.balance")
LOOK = 4  # steps between two looks at the board, of which each is a copy
OPEN = 15  # epochs at a time: as many as may be
PLANNER = 0  # the rank whose plan all follow: on devices ranks read loads at other times


class BalancedGroup(Protocol):
    """What a balancer uses of a `Group`."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def nranks(self) -> int:
        """N."""

    @property
    def layers(self) -> int:
        """Maps."""

    @property
    def experts(self) -> int:
        """E."""

    @property
    def settings(self) -> Any:
        """With the group's `Placement`."""

    @property
    def moving(self) -> Any:
        """As `Moving`."""

    @property
    def loads(self) -> Array:
        """[layers, E]"""

    @property
    def counted_dispatches(self) -> Array:
        """[layers]"""

    def expert_of_slot(self, layer: int = 0) -> Array:
        """[P]"""


class MovedWeights(Protocol):
    """What a balancer uses of `Weights`."""

    rank_of_slot: Array

    def pieces(self, layer: int, source: int, target: int, most: int) -> list[Piece]:
        """Of a move."""


@dataclass(frozen=True)
class Statistics:
    """Since a balancer began. plans: that were followed; epochs: decided, and how many of them void; moves: experts
    that came to this rank, with bytes; steps: of `Balancer.step`. Of the last plan, switch_steps: from that this rank
    has seen it to its last epoch; and on rank 0 plan_steps: before that, from the loads that it was made from; and
    imbalance: what it found, hottest over mean - 1 averaged over layers, and what it was to leave."""

    plans: int = 0
    epochs: int = 0
    voids: int = 0
    moves: int = 0
    bytes: int = 0
    steps: int = 0
    plan_steps: int = 0
    switch_steps: int = 0
    imbalance: tuple[float, float] = (0.0, 0.0)


@dataclass
class _Open:
    """An epoch that is staged: its number, and pieces that are still to be copied."""

    number: int
    epoch: rounds.Epoch
    pieces: deque[Piece]
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
    `balance.plan`. paused: no plan is made; a plan under way ends, and `follow` goes on. beside: what works beside the
    steps (default: threads, on a CUDA device a copy engine for copies).

    It is planned for a `Forecast`, whose windows are the loads between two plans.
    """

    def __init__(
        self,
        group: BalancedGroup,
        weights: MovedWeights,
        *,
        every: int | None = 64,
        writes: int | None = None,
        gain: float = 0.02,
        step_bytes: int = 64 << 20,
        nodes: int = 1,
        groups: int = 0,
        node_tolerance: float = 0.01,
        paused: bool = False,
        beside: Beside | None = None,
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
        self._every, self._step_bytes = every, step_bytes
        self._tables = np.stack([group.expert_of_slot(layer) for layer in range(group.layers)])
        self._slots = self._slots_in_use()
        self._plans = Plans(
            *(group.nranks, self._slots, weights.rank_of_slot),
            decay=float(np.float32(group.settings.placement.load_decay)),
            gain=gain,
            writes=group.nranks if writes is None else writes,
            where={"nodes": nodes, "groups": groups, "node_tolerance": node_tolerance},
        )
        if every is not None:
            self._plans.refuse(group.experts, self._tables)  # on all ranks
        self._beside = copies_of(weights) if beside is None else beside
        self._planning: Thought[Wanted] | None = None
        self._making: Thought[list[rounds.Epoch]] | None = None
        self._queue: deque[rounds.Epoch] = deque()
        self._open: deque[_Open] = deque()  # staged, and not decided on all lanes here
        self._staged = begun.staged  # the last epoch that is staged: others than this balancer stage none
        self._told = 0  # rank 0: the last plan that it has told, by the epoch that it begins with
        self._looked = 0  # rank 0: when it read the loads of that plan
        self._began = 0
        self._next = every or 0
        self._given: Array | None = None  # rank 0: what `follow` was given, until it is looked at
        self.statistics = Statistics()
        self._tell_nothing()

    def step(self, streams: Iterable[Any] = (), idle: Iterable[int] = ()) -> None:
        """Takes over what has happened since, and goes on with it. streams: those of CUDA, beside the current one, on
        which steps of the group or its experts run. idle: lanes on which the model makes no dispatches meanwhile, which
        hold all epochs open; the same on all ranks. On each an empty dispatch is made, uncounted, a step of all ranks
        like any other; no handle may hold the lane. Errors: those of the group, once it is finished."""
        for lane in idle:
            _pass(self.group, self.weights, lane)
        self._count(steps=1)
        self._close(streams)
        if not self._queue and not self._open:
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
        return slot_maps(self._plans.used(self._tables), self.group.experts)

    @property
    def idle(self) -> bool:
        """Whether this rank has done all of the last plan that it knows."""
        return not self._making and not self._queue and not self._open

    def table(self, layer: int = 0) -> Array:
        """[P] int32: the layer's map, as far as all lanes of this rank have it."""
        return self._tables[layer].copy()

    def wait(self) -> None:
        """Waits for what this rank has begun beside its steps, so that the next `step` finds it done: a plan, copies.
        No other rank is waited for. Where all ranks do this before each step, and a dispatch of all ranks lies between
        two steps, experts move in the same steps however fast the machine is."""
        self._beside.wait()

    def close(self) -> None:
        """Ends the thread, and waits for copies. Epochs that are open stay so."""
        self._tell_nothing()
        self._beside.close()

    def _tell_nothing(self) -> None:
        """On rank 0: a plan that was told and that nobody has followed yet must not be taken for one of the next
        balancer's, whose first has the same number."""
        if self.group.rank == PLANNER:
            self._beside.write_board(board.written(0, np.zeros(0)))

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------- epochs of a plan

    def _close(self, streams: Iterable[Any]) -> None:
        """Takes epochs that all lanes have, and that no handle of an older version needs."""
        epochs: Epochs = self.group.moving.epochs()
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
            self._beside.forget(done.number)
            self._beside.freed(streams)
            if self.idle:
                self._count(switch_steps=self.statistics.steps - self._began)
                LOG.info("epoch %d was the plan's last, after %d steps", done.number, self.statistics.switch_steps)

    def _stage(self) -> None:
        """Stages what may be, in the order of the plan: one epoch of a layer at a time (M1)."""
        while self._queue and all(other.epoch.layer != self._queue[0].layer for other in self._open):
            if len(self._open) >= OPEN:
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
        """Copies at most so many bytes, and says which epochs this rank is ready for, in their order. What is begun in
        a step is looked at in the next, so that it is not up to luck which step an epoch is told in."""
        left, waits = self._step_bytes, False
        for each in self._open:
            if each.told:
                continue
            begun = ended = False
            try:
                while each.pieces and each.pieces[0][3] <= left and not each.failed:
                    left -= each.pieces[0][3]
                    self._beside.begin(each.number, each.pieces.popleft())
                    begun = True
                # In this order: a copy that ended in between would hide its error.
                ended = not begun and not each.pieces and self._beside.ended(each.number)
                problem = self._beside.problem(each.number)
            except TokenwayError as error:
                problem = error
            if problem is not None and not each.failed:
                LOG.warning("epoch %d: a copy failed, so its layer keeps its map: %s", each.number, problem)
                each.failed = True
            if each.pieces and not each.failed:
                left = 0  # what comes behind does not overtake it
            waits = waits or not (ended or each.failed)
            if not waits:
                self.group.moving.ready(each.number, failed=each.failed)
                each.told = True

    # ---------------------------------------------------------------------------------------------------------- plans

    def _plan_anew(self) -> None:
        """Plans in the thread, every so many steps, and tells the others by this rank's board, in the step before they
        look at it. A plan has the number of the epoch that it begins with, which is the same on all ranks that are
        idle. There is no other before this rank follows it, and then only when all of its epochs are decided, which all
        ranks must have been ready for: nobody misses one."""
        number = self._staged + 1
        if self._told == number:
            return
        if self._planning is None:
            self._planning = self._begin_plan()
            return
        if not self._planning.done() or (self.statistics.steps + 1) % LOOK:
            return
        try:
            wanted, told = self._planning.result()
            if wanted is not None and not self._beside.write_board(board.written(number, wanted)):
                return  # what was told before is still on its way there
            self._count(imbalance=told)
            self._told = self._told if wanted is None else number
        except TokenwayError as error:
            LOG.warning("there is no plan: %s", error)
        self._planning = None
        self._next = self._looked + (self._every or 0)

    def _begin_plan(self) -> Thought[Wanted] | None:
        """In the thread: what was given, else a plan of this rank's own if it is time for one."""
        tables, now = self._tables.copy(), self.statistics.steps
        if self._given is not None:
            wanted, self._given, self._looked = self._given, None, now
            return self._beside.think(self._plans.look_at, wanted, self.group.loads, tables)
        if self.paused or self._every is None or now < self._next or not (loads := self.group.loads).any():
            return None
        self._looked = now
        return self._beside.think(self._plans.find, loads, self.group.counted_dispatches, tables)

    def _follow(self) -> None:
        """Takes the next plan over, if it is there, and has its epochs made in the thread."""
        if self._making is None:
            if self.statistics.steps % LOOK == 0:
                self._making = self._look_at_board()
            return
        if not self._making.done():
            return
        self._queue.extend(self._making.result())
        self._making = None
        self._count(plans=1)
        before, after = self.statistics.imbalance
        LOG.info(
            "a plan from epoch %d on: %d epochs, %d experts move; imbalance %.3f, to be %.3f",
            self._staged + 1,
            len(self._queue),
            sum(len(epoch.pulls) for epoch in self._queue),
            before,
            after,
        )

    def _look_at_board(self) -> Thought[list[rounds.Epoch]] | None:
        """None where there is no plan that is new."""
        told = self._beside.read_board(PLANNER)
        wanted = None if told is None else board.read(told, self._staged + 1, (self.group.layers, -1))
        if wanted is None:
            return None
        self._began = self.statistics.steps
        if self.group.rank == PLANNER:
            self._count(plan_steps=self._began - self._looked)
        return self._beside.think(self._plans.epochs, self._tables.copy(), wanted)

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
        last = {"plan_steps", "switch_steps", "imbalance"}
        old = self.statistics
        self.statistics = replace(
            old, **{name: value if name in last else getattr(old, name) + value for name, value in more.items()}
        )


def _pass(group: Any, weights: Any, lane: int) -> None:
    """Makes a dispatch of nothing on a lane, which tells and learns how far ranks are."""
    place, like = group.native.place, weights.board()
    tensors = {name: place.empty((0, of.elements), of.dtype, like) for name, of in group.shape.payloads.items()}
    tokens = tensors.pop("tokens")
    handle = group.route(place.empty((0, group.top_k), group.id_dtype, like))
    if group.exact:
        group.exchange_counts(handle, lane=lane)
    group.dispatch(handle, tokens, tensors or None, bound=1, lane=lane, count=False)
    handle.release()


def _reached(version: int, epoch: int) -> bool:
    """Whether a version has come as far as an epoch: numbers wrap."""
    return (version - epoch) % 2**31 < 2**30
