"""A group that is played: all its ranks in one thread, without rows, for a `Balancer` of each rank.

What a balancer sees of it is what it would see of a group on CPUs: loads as dispatches count them, maps that all ranks
take over in the dispatch behind the one in which the last rank has told that it is ready, plans and copies that take
steps. On devices a map comes a dispatch later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tokenway.balance import planner, rounds
from tokenway.balance.copies import Piece
from tokenway.moving import Epochs

Array = np.ndarray


class World:
    """tables: [layers, P], the first maps, -1 for spare slots. rank_of_slot: [P]. experts: E. decay: of loads, as of a
    `Placement`. expert_bytes: of one expert in a layer, of each of its tensors. plan_steps, copy_steps: what plans and
    copies take, each at least 1."""

    def __init__(
        self,
        tables: Array,
        rank_of_slot: Array,
        experts: int,
        *,
        decay: float,
        expert_bytes: tuple[int, ...],
        plan_steps: int = 1,
        copy_steps: int = 1,
    ):
        self.rank_of_slot, self.experts, self.expert_bytes = rank_of_slot, experts, expert_bytes
        self.ranks, self.layers = int(rank_of_slot.max()) + 1, len(tables)
        self.plan_steps, self.copy_steps = plan_steps, copy_steps
        self.placement = SimpleNamespace(load_decay=decay)
        self.step = 0
        self.tables = tables.astype(np.int32)
        self.version = 0  # of all ranks: the epoch up to which maps are in force
        self.ready = [0] * self.ranks
        self.board = bytes(24)
        self.loads = np.zeros((self.layers, experts), np.float32)
        self.dispatches = np.zeros(self.layers, np.int64)
        self._open: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._thought: tuple[Any, Any] | None = None

    def dispatch(self, layer: int, choices: Array) -> None:
        """Of all ranks, after which the loads count `choices`, [E], of all of them, and maps may be others."""
        decay = np.float32(self.placement.load_decay)
        added = (np.float32(1) - decay) * choices.astype(np.float32)
        self.loads[layer] = self.loads[layer] * decay + added
        self.dispatches[layer] += 1
        while self.version < min(self.ready):
            self.version += 1
            moved, table = self._open.pop(self.version)
            self.tables[moved] = table

    def imbalance(self, choices: Array) -> Array:
        """[layers], of ranks that serve choices [layers, E] by the maps in force, an expert's split evenly."""
        of, ranks = self.rank_of_slot, self.ranks
        slots = int(max(np.bincount(of[table >= 0], minlength=ranks).max() for table in self.tables))
        size = {"ranks": ranks, "slots": slots}
        used = np.stack([rounds.used_map(table, of, **size, loads=None) for table in self.tables])
        return planner.imbalance(planner.rank_loads(choices, used, **size))

    def stage(self, epoch: int, layer: int, table: tuple[int, ...]) -> None:
        """A rank's next epoch, which each rank stages alike."""
        told = self._open.setdefault(epoch, (layer, table))
        if epoch <= self.version or told != (layer, table):
            raise AssertionError(f"epoch {epoch} is not what another rank has staged")

    def once(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a function of arrays returns. What the rank before has thought is not thought again."""
        asked = function.__name__, *(np.asarray(arg).tobytes() for arg in args)
        if self._thought is None or self._thought[0] != asked:
            self._thought = asked, function(*args)
        return self._thought[1]


class PlayedRank:
    """A rank's group, its `Moving`, and its weights."""

    def __init__(self, world: World, rank: int):
        self._world, self.rank = world, rank
        self._staged = 0
        self.rank_of_slot = world.rank_of_slot

    @property
    def nranks(self) -> int:
        """N."""
        return self._world.ranks

    @property
    def layers(self) -> int:
        """Maps."""
        return self._world.layers

    @property
    def experts(self) -> int:
        """E."""
        return self._world.experts

    @property
    def settings(self) -> Any:
        """With a placement."""
        return SimpleNamespace(placement=self._world.placement)

    @property
    def moving(self) -> PlayedRank:
        """This."""
        return self

    @property
    def loads(self) -> Array:
        """[layers, E]"""
        return self._world.loads.copy()

    @property
    def counted_dispatches(self) -> Array:
        """[layers]"""
        return self._world.dispatches.copy()

    def expert_of_slot(self, layer: int = 0) -> Array:
        """[P]"""
        return self._world.tables[layer].copy()

    def stage(self, table: tuple[int, ...], layer: int) -> int:
        """As `Moving.stage`."""
        self._staged += 1
        self._world.stage(self._staged, layer, table)
        return self._staged

    def ready(self, epoch: int, failed: bool = False) -> None:
        """As `Moving.ready`: no copy fails here."""
        assert not failed and epoch == self._world.ready[self.rank] + 1
        self._world.ready[self.rank] = epoch

    def epochs(self) -> Epochs:
        """As `Moving.epochs`: no handle lives longer than a dispatch."""
        version = self._world.version
        return Epochs(self._staged, self._world.ready[self.rank], version, version, (version,), 0)

    def pieces(self, layer: int, source: int, target: int, most: int) -> list[Piece]:
        """As `Weights.pieces`."""
        del layer, target
        rank = int(self.rank_of_slot[source])
        return [
            (rank, at, at, min(most, size - at)) for size in self._world.expert_bytes for at in range(0, size, most)
        ]


@dataclass(frozen=True)
class _Thought:
    made: Any
    world: World
    due: int

    def done(self) -> bool:
        return self.world.step >= self.due

    def result(self) -> Any:
        return self.made


class PlayedBeside:
    """What a rank does beside its steps (`copies.Beside`): how long it takes is given in steps."""

    def __init__(self, world: World):
        self._world = world
        self._last: dict[int, int] = {}  # the step in which an epoch's last copy was begun

    def think(self, function: Callable[..., Any], *args: Any) -> _Thought:
        """Begins it."""
        return _Thought(self._world.once(function, args), self._world, self._world.step + self._world.plan_steps)

    def begin(self, epoch: int, piece: Piece) -> None:
        """Begins a copy."""
        del piece
        self._last[epoch] = self._world.step

    def ended(self, epoch: int) -> bool:
        """Whether all of an epoch have ended."""
        return epoch not in self._last or self._world.step >= self._last[epoch] + self._world.copy_steps

    def problem(self, epoch: int) -> BaseException | None:
        """None fails."""
        del epoch
        return None

    def forget(self, epoch: int) -> None:
        """The epoch is decided."""
        self._last.pop(epoch, None)

    def freed(self, streams: Iterable[Any] = ()) -> None:
        """There are no streams."""

    def write_board(self, told: bytes) -> bool:
        """Tells other ranks."""
        self._world.board = told
        return True

    def read_board(self, rank: int) -> bytes:
        """What a rank tells: one alone does."""
        del rank
        return self._world.board

    def wait(self) -> None:
        """Time is steps."""

    def close(self) -> None:
        """There is no thread."""
