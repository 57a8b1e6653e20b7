"""Balancing while experts are trained: they move, with what an optimiser keeps of them, between two of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from tokenway.arguments import telling
from tokenway.balance import board, rounds
from tokenway.balance.balancer import LOG, OPEN, PLANNER, Balancer, _pass, _reached
from tokenway.balance.replicas import Replicas, led_anew
from tokenway.balance.weights import Weights
from tokenway.comm import usual_timeout
from tokenway.errors import InternalError, TokenwayError
from tokenway.group import Group

Array = np.ndarray
TURNS = 16  # dispatches of a lane between two looks at the time


class TrainingBalancer(Balancer):
    """A `Balancer` for experts that are trained.

    `step` is called by all ranks in each step of the optimiser, behind it: where no rank is between a forward pass and
    its backward pass. It copies the weights of each expert from the slot that leads to its other slots
    (`Replicas.spread`). Every `every` steps rank 0 begins a plan, in a thread, and with the next step all ranks follow
    it: experts move, with the states of what leads them, and the maps switch before `step` returns. So there is never
    a copy that an optimiser's step could make stale. It waits for all ranks then; in other steps it does not.

    A plan that `follow` is given on rank 0 goes before rank 0's own, with the next step in which the ranks ask for one:
    behind every `every`-th, as soon as they have done the plan before. every: None for no plans but those; then the
    ranks ask in each step, and wait for each other in it.

    group: as of `Balancer`. weights: `Weights` of tensors as `trained` names them. step_bytes: a plan of more epochs
    goes on in the next step once a rank has copied so much in this one. Other options are those of `Balancer`;
    `paused` counts on rank 0.
    """

    group: Group
    weights: Weights

    def __init__(self, group: Group, weights: Weights, **options: Any):
        self.replicas = Replicas(weights)  # refuses before there is a thread
        super().__init__(group, weights, **options)
        self._rounds: deque[list[rounds.Epoch]] = deque()  # of the plan under way: epochs that go together
        self._asks = self._every is None  # in the next step: whether rank 0 has a plan

    @property
    def idle(self) -> bool:
        """Whether this rank has done all of the last plan that it knows."""
        return not self._rounds

    def step(self, streams: Iterable[Any] = (), idle: Iterable[int] = ()) -> None:
        """Collective. streams: those of CUDA, beside the current one, on which steps or the optimiser have run. idle:
        of no account here, where all lanes make dispatches of nothing when maps switch. Errors: those of the group,
        once it is finished."""
        del idle
        for stream in streams:
            self.group.native.place.current_stream().wait_stream(stream)
        self._count(steps=1)
        self.replicas.spread()
        if self._asks:
            self._take(self._learn())
        self._move()
        self._asks = self.idle and self.statistics.steps % (self._every or 1) == 0
        if self._asks and self.group.rank == PLANNER:  # whose loads count: on devices ranks may have come to others
            self._planning = self._begin_plan()

    # ---------------------------------------------------------------------------------------------------------- plans

    def _learn(self) -> Array | None:
        """What rank 0 has planned, on all ranks; None where that is nothing."""
        number, wanted = self._staged + 1, None
        if self._given is not None:  # since a plan was begun, in whose place it is
            self._planning = self._begin_plan()
        if self._planning is not None:
            with telling(self.replicas.refuse):  # peers are in the meeting that follows
                try:
                    wanted, imbalance = self._planning.result()
                    self._count(imbalance=imbalance)
                except TokenwayError as error:
                    LOG.warning("there is no plan: %s", error)
            self._planning = None
        self.replicas.meet()  # whoever reads the board has read what was told before
        here = self.weights.board()
        if self.group.rank == PLANNER:
            told = np.frombuffer(board.written(number, np.zeros(0) if wanted is None else wanted), np.uint8)
            host = isinstance(here, np.ndarray)
            here[: len(told)] = told if host else self.group.native.place.torch.from_numpy(told.copy())
        self.replicas.meet()
        if self.group.rank != PLANNER:
            place = self.group.native.place
            self.weights.pull_board(PLANNER, place.stream() if self.group.device is not None else 0)
        read = here.tobytes() if isinstance(here, np.ndarray) else here.cpu().numpy().tobytes()
        return board.read(read, number, (self.group.layers, -1))

    def _take(self, wanted: Array | None) -> None:
        if wanted is None:
            return
        self._began = self.statistics.steps
        if self.group.rank == PLANNER:
            self._count(plan_steps=self._began - self._looked)
        level: list[rounds.Epoch] = []
        for epoch in self._plans.epochs(self._tables, wanted):
            if len(level) == OPEN or any(other.layer == epoch.layer for other in level):  # one of a layer (M1)
                level = []
            if not level:
                self._rounds.append(level)
            level.append(epoch)
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
        copied = self._bytes_by_rank(level)
        epochs = self.group.moving.epochs()
        for number, epoch in enumerate(level, first):
            void = epochs.is_void(number)
            self._count(epochs=1, voids=int(void))
            if void:  # what follows was made for the map that did not come
                kept = ([each for each in later if each.layer != epoch.layer] for later in self._rounds)
                self._rounds = deque(later for later in kept if later)
            else:
                self._tables[epoch.layer] = epoch.table
        return int(copied.max())

    def _bytes_by_rank(self, level: list[rounds.Epoch]) -> Array:
        """[N]: what each rank copies for epochs that are not in force yet; the same on all ranks."""
        parts, size = self.replicas.parts, self.weights.layout.expert_bytes
        found = np.zeros(self.group.nranks, np.int64)
        for epoch in level:
            states = led_anew(self._tables[epoch.layer], np.array(epoch.table))
            for moves, names in ((epoch.pulls, parts.weights), (states, parts.states)):
                for to, _ in moves:
                    found[self.weights.rank_of_slot[to]] += sum(map(size, names))
        return found

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
        until = time.monotonic() + (self.group.settings.timeout or usual_timeout())
        turns = 0
        while True:
            for lane in range(self.group.settings.lanes or 1):
                _pass(self.group, self.weights, lane)
            if self.replicas.agree(_reached(self.group.moving.epochs().agreed, epoch)):
                return
            turns += 1  # a device is told by copies, behind whatever else goes there
            if turns % TURNS == 0 and not self.replicas.agree(time.monotonic() < until):
                raise InternalError(f"epoch {epoch} is ready on all ranks, and has not come after {turns} dispatches")
