"""What a rank's window holds when a step has ended at all ranks, by the map of src/layout/window_map.h: the bytes that
mean something, so that two backends can be held against each other.

Nothing tells where a window lies, but a gather's view is a bank, and signals are in front of the first bank. Which rows
of a bank mean something, its signals and notes say. Places may depend on the backend: a combine's rows lie by token and
position where windows are mapped, and by source and slot where rows come in blocks. Chunk signals, packets and what
earlier steps have left are no part of it, and neither are rows that a rank keeps for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import Round, Setup, make_ids
from collected import Call, Collector, Plan
from harness import PATIENT
from random_rounds import shows_window

import tokenway as tw
from tokenway import reference as ref
from tokenway.tensors import numpy_dtype

LINE, PAGE, REGION = 64, 4096, 256  # kSignalStride, kPageAlignment, kRegionAlignment
MOST_PAYLOADS = 8
SKIP = 5
MODES = {1: "dispatch", 2: "combine", SKIP: "skip", 6: "counts", 7: "gather", 8: "reduce"}


@dataclass
class Image:
    """The bank of a rank's last step on a lane."""

    step: int
    signals: np.ndarray  # [2, N, (signal, note, rows signal)]: of both banks
    regions: dict[str, np.ndarray] = field(default_factory=dict)  # bytes


def apart(one: Image, other: Image) -> list[str]:
    """What differs."""
    wrong = [] if one.step == other.step else [f"step {one.step} and {other.step}"]
    for bank, source, word in np.argwhere(one.signals != other.signals):
        name = ("signal", "note", "rows signal")[word]
        a, b = one.signals[bank, source, word], other.signals[bank, source, word]
        wrong.append(f"{name} of source {source} in bank {bank}: {a:#x} and {b:#x}")
    for name in sorted(one.regions.keys() | other.regions.keys()):
        a, b = (image.regions.get(name, np.empty(0, np.uint8)) for image in (one, other))
        if a.size != b.size:
            wrong.append(f"{name}: {a.size} and {b.size} bytes")
        elif len(places := np.flatnonzero(a != b)):
            wrong.append(f"{name}: byte {places[0]} of {a.size} and {len(places) - 1} more")
    return wrong


def aligned(count: int, to: int) -> int:
    return -(-count // to) * to


def item(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


class Viewer:
    """A rank's group, its calls one after the other, and its window as each leaves it."""

    def __init__(self, env: Any, setup: Setup):
        self.env, self.setup, self.staged = env, setup, env.backend.name.endswith("gin")
        self.per_expert = setup.top_k if setup.combine_rows == "per_expert" else 1  # rows that return at a place
        self.group = tw.Group(env.comm, timeout=PATIENT, **setup.settings())
        self.player = Collector(env, self.group, Plan(setup, ()))
        self.bank, self.second = self.find_banks()
        self.round: Any = None
        self.handle: Any = None
        self.received: Any = None

    def find_banks(self) -> tuple[int, int]:
        """Bytes of a bank of the only lane, and where the second one begins: a gather shows it. Wrong bytes would not
        lead to signals."""
        setup, n = self.setup, self.env.nranks
        one = self.player.tensor(np.zeros((1, 1), np.uint8))
        second = self.group.all_gatherv(one, [1] * n, layout="rank_major").rows.data_ptr()
        self.env.backend.wait()
        slots = n * setup.max_tokens
        dispatch = slots * sum(self.widths()) + MOST_PAYLOADS * REGION
        inbox = (n if self.staged else self.fan_out()) * setup.max_tokens * self.per_expert
        counts = n * self.told() if setup.exact else 0
        size = aligned(max(dispatch, inbox * setup.width * item(setup.combine_dtype), counts), PAGE)
        return size, second

    def widths(self) -> list[int]:
        """Bytes of what a row consists of: payloads, and metadata (token, position, ids, weights)."""
        setup = self.setup
        payloads = [(setup.hidden, setup.dtype), *setup.payloads]
        return [*(count * item(dtype) for count, dtype in payloads), 8 + 8 * setup.top_k]

    def fan_out(self) -> int:
        """Places for what returns for a token, where windows are mapped."""
        return 1 if self.per_expert > 1 else min(self.setup.top_k, self.env.nranks)

    def told(self) -> int:
        """Bytes from one source's counts to the next's: its rows for each rank, and for as many experts as any has."""
        home, _ = ref.placement(self.setup.slots, self.setup.ranks, self.setup.expert_map)
        return 4 * (self.env.nranks + int(np.bincount(home).max()))

    # ---- calls -----------------------------------------------------------------------------------

    def act(self, what: str, item: Any) -> None:
        """A part of a round, or a call."""
        if isinstance(item, Call):
            self.player.end(item, self.player.begin(item))
        elif what == "route":
            self.round, self.handle = item, self.player.handle(item)
        elif what == "dispatch":
            inputs = self.player.payloads(item)
            self.received = self.player.dispatch(item, self.handle, inputs, False)
        else:
            got = self.player.snapshot(item, self.received)
            self.player.combine(item, self.handle, self.player.rows(item, self.received, got), False)
        self.env.backend.wait()

    # ---- the window ------------------------------------------------------------------------------

    def bytes(self, at: int, count: int) -> np.ndarray:
        view = self.group.native.place.window_view(at, (count,), "uint8", True, self.group)
        return self.env.backend.array(view)

    def image(self, item: Any) -> Image:
        """After a call of this item, when all ranks' have ended."""
        n = self.env.nranks
        first = self.second - self.bank
        raw = self.bytes(first - aligned(2 * LINE * n, PAGE), 2 * LINE * n)
        signals = raw.view(np.uint64).reshape(2, n, LINE // 8)[:, :, :3].copy()
        signals[:, :, 1][signals[:, :, 0] >> np.uint64(28) & np.uint64(15) == SKIP] = (
            0  # nobody reads the note of a skip
        )
        steps = signals[:, :, 0] >> np.uint64(32)
        step = int(steps.max())
        now = signals[step % 2]
        modes = {int(s) >> 28 & 15 for s in now[:, 0]}
        assert (steps[step % 2] == step).all() and len(modes) == 1, f"signals of a step that is over: {signals}"
        image = Image(step, signals)
        counts = [int(s) & 0xFFFFFFF for s in now[:, 0]]
        show = getattr(self, f"show_{MODES[modes.pop()]}")
        bank = self.bytes((first, self.second)[step % 2], self.bank)
        for name, at, count in show(item, counts, [int(note) for note in now[:, 1]]):
            image.regions[name] = bank[at : at + count]
        return image

    def show_skip(self, *_: Any) -> list[Any]:
        return []

    def show_dispatch(self, round_: Round, counts: list[int], notes: list[int]) -> list[Any]:
        """Rows and metadata in slots; in an exact layout without gaps, source by source."""
        setup = self.setup
        bits = setup.max_tokens.bit_length()
        bound = round_.bound or setup.max_tokens
        assert {note & ((1 << bits) - 1) for note in notes} == {bound}
        widths = self.widths()
        begin, shown = 0, []
        for q, width in enumerate(widths):
            for source, count in enumerate(counts):
                first = sum(counts[:source]) if round_.exact else source * bound
                name = f"payload {q}" if q < len(widths) - 1 else "metadata"
                shown.append((f"{name} of source {source}", begin + first * width, count * width))
            begin = aligned(begin + self.env.nranks * setup.max_tokens * width, REGION)
        return shown

    def show_combine(self, round_: Round, counts: list[int], notes: list[int]) -> list[Any]:
        """The row that each rank has returned of each token, but for this rank's own: these lie where the caller has
        them."""
        setup, me = self.setup, self.env.rank
        bound = round_.bound or setup.max_tokens
        home, _ = ref.placement(setup.slots, setup.ranks, setup.expert_map)
        width = setup.width * item(setup.combine_dtype)
        sent, shown = [0] * setup.ranks, []
        for token, ids in enumerate(make_ids(setup, round_, me)[0]):
            ranks = sorted({int(home[e]) for e in ids if e >= 0})
            places = [(rank, position, 0) for position, rank in enumerate(ranks)]
            if self.per_expert > 1:
                places = [(int(home[e]), 0, k) for k, e in enumerate(ids) if e >= 0]
            for rank, position, k in places:
                row = rank * bound + sent[rank] if self.staged else token * self.fan_out() + position
                place = row * self.per_expert + k
                if rank != me:
                    shown.append((f"token {token} from rank {rank}, row {k}", place * width, width))
            for rank in ranks:
                sent[rank] += 1
        assert sent == counts, f"the signals tell of {counts} rows, and {sent} must return"
        return shown

    def show_counts(self, round_: Round, counts: list[int], notes: list[int]) -> list[Any]:
        """How many rows a source sends to each rank, and for each expert of this one."""
        each = 4 * (self.env.nranks + self.group.num_local_experts)
        return [(f"counts of source {source}", source * self.told(), each) for source in range(self.env.nranks)]

    def show_gather(self, call: Call, counts: list[int], notes: list[int]) -> list[Any]:
        begin, shown = 0, []
        bound = call.room(self.setup.max_tokens)
        assert {note & 0xFFFFFFFF for note in notes} == {bound}
        for q, (n, dtype) in enumerate(call.rows):
            width = n * item(dtype)
            for source, count in enumerate(counts):
                if source != self.env.rank or shows_window(call):  # its own are taken from where the caller has them
                    name = f"tensor {q} of source {source}"
                    shown.append((name, begin + source * bound * width, count * width))
            begin = aligned(begin + self.env.nranks * bound * width, REGION)
        return shown

    show_reduce = show_gather


# ---- entry points on a rank ----------------------------------------------------------------------


def begin(env: Any, setup: Setup) -> None:
    env.kept["images"] = Viewer(env, setup)


def act(env: Any, what: str, item: Any) -> None:
    env.kept["images"].act(what, item)


def image(env: Any, item: Any) -> Image:
    return env.kept["images"].image(item)


def end(env: Any) -> None:
    env.kept.pop("images").group.close()


def images(world: Any, setup: Setup, items: list[Any]) -> list[tuple[str, list[Image]]]:
    """What each step leaves in all ranks' windows: (which one, by rank)."""
    world.run(begin, setup)
    found = []
    for item in items:
        counts = ["route"] if isinstance(item, Round) and item.exact else []
        for what in [*counts, "dispatch", "combine"] if isinstance(item, Round) else ["call"]:
            if what == "dispatch" and not counts:
                world.run(act, "route", item)
            world.run(act, what, item)
            found.append((f"{what} of {item}", world.run(image, item)))
    world.run(end)
    return found
