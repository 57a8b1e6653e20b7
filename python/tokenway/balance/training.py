"""Balancing while experts are trained: they move, with what an optimiser keeps of them, between two of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from tokenway.balance import rounds
from tokenway.balance.balancer import LOG, PLANNER, Balancer, _board, _reached, _read_board
from tokenway.balance.replicas import Replicas, led_anew
from tokenway.balance.weights import Weights
from tokenway.errors import InternalError, TokenwayError
from tokenway.group import Group

Array = np.ndarray
TOGETHER = 8  # epochs that are open at once, of 15 that may be
TURNS = 16  # dispatches of a lane by which a version has come, and with them what a device tells of it


class TrainingBalancer(Balancer):
    """A `Balancer` for experts that are trained.

    `step` is called by all ranks in each step of the optimiser, behind it: where no rank is between a forward pass and
    its backward pass. It copies the weights of each expert from the slot that leads to its other slots
    (`Replicas.spread`). Every `every` steps rank 0 begins a plan, in a thread, and with the next step all ranks follow
    it: experts move, with the states of what leads them, and the maps switch before `step` returns. So there is never
    a copy that an optimiser's step could make stale. It waits for all ranks then; in other steps it does not.

    group: as of `Balancer`. weights: `Weights` of tensors as `trained` names them. step_bytes: a plan of more epochs
    goes on in the next step once a rank has copied so much in this one. Other options are those of `Balancer`;
    `paused` counts on rank 0.
    """

    def __init__(self, group: Group, weights: Weights, **options: Any):
        super().__init__(group, weights, **options)
        self.replicas = Replicas(weights)
        self._rounds: deque[list[rounds.Epoch]] = deque()  # of the plan under way: epochs that go together
        self._begun = False  # a plan was begun on rank 0, for the next step

    @property
    def idle(self) -> bool:
        """Whether this rank has done all of the last plan that it knows."""
        return not self._rounds

    def step(self, streams: Iterable[Any] = ()) -> None:
        """Collective. streams: those of CUDA, beside the current one, on which steps or the optimiser have run. Errors:
        those of the group, once it is finished."""
        for stream in streams:
            self.group.native.place.current_stream().wait_stream(stream)
        self._count(steps=1)
        self.replicas.spread()
        if self._begun:
            self._begun = False
            self._take(self._learn())
        self._move()
        if self.idle and self._every is not None and self.statistics.steps % self._every == 0:
            self._begun = True
            if self.group.rank == PLANNER:
                self._begin()

    # ---------------------------------------------------------------------------------------------------------- plans

    def _begin(self) -> None:
        """On rank 0, whose loads count: on devices ranks may have come to others."""
        self._planning = None
        if not self.paused and (loads := self.group.loads).any():
            self._planning = self._thread.submit(self._find, loads, self._tables.copy())

    def _learn(self) -> Array | None:
        """What rank 0 has planned, on all ranks; None where that is nothing."""
        number, wanted = self._staged + 1, None
        if self._planning is not None:
            try:
                wanted, told = self._planning.result()
                self._count(imbalance=told)
            except TokenwayError as error:
                LOG.warning("there is no plan: %s", error)
            self._planning = None
        self.replicas.meet()  # whoever reads the board has read what was told before
        board = self.weights.board()
        if self.group.rank == PLANNER:
            told = np.frombuffer(_board(number, np.zeros(0) if wanted is None else wanted), np.uint8)
            here = isinstance(board, np.ndarray)
            board[: len(told)] = told if here else self.group.native.place.torch.from_numpy(told.copy())
        self.replicas.meet()
        if self.group.rank != PLANNER:
            place = self.group.native.place
            self.weights.pull_board(PLANNER, place.stream() if self.group.device is not None else 0)
        read = board.tobytes() if isinstance(board, np.ndarray) else board.cpu().numpy().tobytes()
        return _read_board(read, number, (self.group.layers, -1))

    def _take(self, wanted: Array | None) -> None:
        if wanted is None:
            return
        self._began = self.statistics.steps
        lists = self._epochs(self._tables, wanted)
        for depth in range(max((len(each) for each in lists), default=0)):
            level = [each[depth] for each in lists if depth < len(each)]  # one of a layer (M1)
            self._rounds.extend(level[at : at + TOGETHER] for at in range(0, len(level), TOGETHER))
        self._count(plans=1)
        LOG.info("a plan: %d experts move", sum(len(epoch.pulls) for level in self._rounds for epoch in level))

    # ---------------------------------------------------------------------------------------------------------- moves

    def _move(self) -> None:
        """Brings epochs into force, until a rank has copied enough."""
        most = 0
        while self._rounds and most < self._step_bytes:
            most += self._bring_into_force(self._rounds.popleft())
            if self.idle:
                self._count(switch_steps=self.statistics.steps - self._began)

    def _bring_into_force(self, level: list[rounds.Epoch]) -> int:
        """Epochs of different layers. Returns how many bytes the rank that copies most has copied, on all ranks."""
        self.replicas.meet()  # weights that were spread are there
        failed = [not self._bring(epoch) for epoch in level]
        self.replicas.agree(True)  # and so are these
        for epoch in level:
            self._staged = self.group.moving.stage(epoch.table, epoch.layer)
        first = self._staged - len(level) + 1
        for number, fails in enumerate(failed, first):
            self.group.moving.ready(number, failed=fails)
        self._await(self._staged)
        epochs = self.group.moving.epochs()
        for number, epoch in enumerate(level, first):
            void = epochs.is_void(number)
            self._count(epochs=1, voids=int(void))
            if void:  # what follows was made for the map that did not come
                kept = ([each for each in later if each.layer != epoch.layer] for later in self._rounds)
                self._rounds = deque(later for later in kept if later)
            else:
                self._tables[epoch.layer] = epoch.table
        by_rank = np.zeros(self.group.nranks, np.int64)
        for epoch in level:
            np.add.at(by_rank, self.weights.rank_of_slot[[to for to, _ in epoch.pulls]], self.weights.layout.move_bytes)
        return int(by_rank.max())

    def _bring(self, epoch: rounds.Epoch) -> bool:
        """This rank's part of an epoch; False where a copy failed."""
        parts, bring = self.replicas.parts, self.replicas.bring
        states = led_anew(self._tables[epoch.layer], np.array(epoch.table))
        try:
            count = bring(epoch.layer, epoch.pulls, parts.weights) + bring(epoch.layer, states, parts.states)
        except TokenwayError as error:
            LOG.warning("a copy failed, so layer %d keeps its map: %s", epoch.layer, error)
            return False
        here = sum(self.weights.rank_of_slot[to] == self.group.rank for to, _ in epoch.pulls)
        self._count(moves=int(here), bytes=count)
        return True

    def _await(self, epoch: int) -> None:
        """Makes dispatches without tokens until all lanes of all ranks have an epoch: it is they that tell."""
        for _ in range(TURNS):
            for lane in range(self.group.settings.lanes or 1):
                self._dispatch_nothing(lane)
            if self.replicas.agree(_reached(self.group.moving.epochs().agreed, epoch)):
                return
        raise InternalError(f"epoch {epoch} is ready on all ranks, and has not come after {TURNS} dispatches")

    def _dispatch_nothing(self, lane: int) -> None:
        group, empty = self.group, self.group.native.place.empty
        extra = {
            name: empty((0, field.elements), field.dtype, None)
            for name, field in group.shape.payloads.items()
            if name != "tokens"
        }
        handle = group.route(empty((0, group.top_k), group.id_dtype, None))
        if group.exact:
            group.exchange_counts(handle, lane=lane)
        layout = "flat" if group.exact else "rank_major"
        tokens = empty((0, group.hidden), group.dtype, None)
        group.dispatch(handle, tokens, payloads=extra or None, layout=layout, bound=1, lane=lane, count=False)
        handle.release()
