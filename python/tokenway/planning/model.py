"""What a dispatch and a combine take, in closed form.

Within a domain a step is start + rows * row + bytes / rate (`fitting`). Between domains it is the protocol of
docs/PROTOCOL.md, "Between hosts", one part behind the other where one waits for the other:

    dispatch, pull      max(within the domain, put one way + bytes of messages / network) + word + reading one's rows
    dispatch, direct    max(within the domain, put one way + bytes of rows to each rank / network)
    combine, flat       as a dispatch, of partials
    combine, by_domain  partials to the rank that folds + word + fold + put one way + bytes of folds / network

A rank reads when a source's word has come, and that comes behind the whole message; so reading is not hidden behind
the network. Posting takes put_us for each chunk and each word, one behind the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenway.planning import memory
from tokenway.planning.fitting import wire_row
from tokenway.planning.machines import Machine
from tokenway.planning.rows import Layer, Rows

MODES = ("low_latency", "high_throughput")
ROUTES = ("routed", "gathered")
WAYS = ("pull", "direct")
SUMS = ("flat", "by_domain")
STEPS = {"routed": ("dispatch", "combine"), "gathered": ("gather", "reduce")}  # what goes out, what returns
CHUNK_ROWS, MOST_CHUNKS = 64, 24  # of a message (PROTOCOL.md, T7)


@dataclass(frozen=True)
class Work:
    """What is exchanged: `tokens` a rank, rows of so many bytes."""

    layer: Layer
    tokens: int
    dispatch_row: int
    combine_row: int


@dataclass(frozen=True)
class Choice:
    """How: each of the module's names."""

    route: str = "routed"
    mode: str = "low_latency"
    way: str = "pull"
    sums: str = "flat"


@dataclass(frozen=True)
class Bytes:
    """What crosses a rank's links in a step, in the mean: out and in are alike."""

    nvlink: float
    nic: float


@dataclass(frozen=True)
class Prediction:
    """us of a choice: counts are 0 in low latency. links: by step, dispatch and combine."""

    choice: Choice
    dispatch_us: float
    combine_us: float
    counts_us: float
    pair_us: float
    links: dict[str, Bytes]


def chunks_of(rows: float) -> int:
    """Chunks that a message of so many rows travels in; the word of an empty one needs none."""
    return min(MOST_CHUNKS, -(-int(-(-rows // 1)) // CHUNK_ROWS))


def choices(layer: Layer) -> list[Choice]:
    """All that there are for a layer; within one domain there is one way and one sum."""
    apart = layer.domains > 1
    return [
        Choice(*found)
        for found in itertools.product(ROUTES, MODES, WAYS if apart else WAYS[:1], SUMS if apart else SUMS[:1])
        # A gather counts nothing and has no folds on its way; folds go where a host's rows are, not to each rank.
        if not (found[0] == "gathered" and (found[1] != MODES[0] or found[3] != SUMS[0]))
        and not (found[2] == "direct" and found[3] == SUMS[1])
    ]


def network_us(machine: Machine, messages: float, rows: float, wire_bytes: float) -> float:
    """Until the last of so many messages, with these rows and bytes together, lies in the peer's memory."""
    puts = messages * chunks_of(rows / messages) if rows > messages else rows  # an empty message has none
    posted = messages + puts
    return machine.nic_us.value + posted * machine.put_us.value + wire_bytes / (machine.network_gb_s * 1e3)


def read_us(machine: Machine, layer: Layer, far: float, row: float) -> float:
    """A rank takes its rows out of its mates' inboxes, when it has seen their words there."""
    if layer.domain == 1:
        return 0.0
    return machine.card.flag_us + far * row * (1 - 1 / layer.domain) / (machine.read_gb_s * 1e3)


def packets(work: Work, mode: str) -> bool:
    """Whether all rows within the domain go as packets."""
    domain = work.layer.domain
    return mode == MODES[0] and domain > 1 and work.tokens <= memory.packet_bound(domain, work.tokens)


def near_us(machine: Machine, work: Work, choice: Choice, step: str, rows: float) -> float:
    """A step within the domain, of so many rows."""
    rate = machine.rate(_measured_as(choice, step), packets(work, choice.mode))
    return rate.us(rows, rows * near_row(work, choice, step))


def near_row(work: Work, choice: Choice, step: str) -> int:
    """Bytes of a row on a link of the domain."""
    row = work.dispatch_row if step in ("dispatch", "gather") else work.combine_row
    meta = memory.meta_bytes(work.layer.top_k)
    return wire_row(_measured_as(choice, step), row, packets(work, choice.mode), meta)


def _measured_as(choice: Choice, step: str) -> str:
    return f"exact {step}" if choice.mode == MODES[1] else step


def dispatch_us(machine: Machine, work: Work, choice: Choice, rows: Rows) -> float:
    """A dispatch or gather, from its start on all ranks to the last one's end."""
    layer = work.layer
    step, _ = STEPS[choice.route]
    near = near_us(machine, work, choice, step, rows.busiest_near)
    if layer.domains == 1:
        return near
    start = near_us(machine, work, choice, step, 0.0)
    if choice.way == "direct":
        others = layer.ranks - layer.domain
        wire = rows.busiest_far * (work.dispatch_row + memory.meta_bytes(layer.top_k))
        return max(near, start + network_us(machine, others, rows.busiest_far, wire))
    wire = rows.busiest_crossing * crossing_row(work, choice, rows)
    far = start + network_us(machine, layer.domains - 1, rows.busiest_crossing, wire)
    return max(near, far) + read_us(machine, layer, rows.busiest_far, work.dispatch_row)


def crossing_row(work: Work, choice: Choice, rows: Rows) -> float:
    """Bytes of a row in a dispatch's or gather's message."""
    if choice.route == "gathered":
        return memory.record(work.dispatch_row, rows.wanted)
    return memory.message_row(work.dispatch_row, work.layer.top_k, rows.wanted)


def combine_us(machine: Machine, work: Work, choice: Choice, rows: Rows) -> float:
    """A combine or reduce likewise."""
    layer, row = work.layer, work.combine_row
    _, step = STEPS[choice.route]
    near = near_us(machine, work, choice, step, rows.busiest_near)
    if layer.domains == 1:
        return near
    if choice.sums == "by_domain":
        return _folded_us(machine, work, choice, rows)
    start = near_us(machine, work, choice, step, 0.0)
    if choice.way == "direct" or step == "reduce":  # straight to each owner
        others = layer.ranks - layer.domain
        return max(near, start + network_us(machine, others, rows.busiest_far, rows.busiest_far * row))
    wire = rows.busiest_far * memory.record(row, 1)
    far = start + network_us(machine, layer.domains - 1, rows.busiest_far, wire)
    return max(near, far) + read_us(machine, layer, rows.busiest_far, row)


def fold_us(machine: Machine, far: float, crossing: float, row: float) -> float:
    """Reading as many partials as come for an owner's domain, and writing a fold of them."""
    return (far + crossing) * row / (machine.card.copy_gb_s * 2e3)


def _folded_us(machine: Machine, work: Work, choice: Choice, rows: Rows) -> float:
    layer, row = work.layer, work.combine_row
    inside = rows.busiest_far * (1 - 1 / layer.domain)
    to_fold = near_us(machine, work, choice, "combine", rows.busiest_near + inside)
    word = machine.card.flag_us if layer.domain > 1 else 0.0
    folds = rows.busiest_crossing
    fold = fold_us(machine, rows.busiest_far, folds, row)
    return to_fold + word + fold + network_us(machine, layer.domains - 1, folds, folds * memory.record(row, 1))


def counts_us(machine: Machine, work: Work, choice: Choice) -> float:
    """An exchange of counts, which high throughput begins with."""
    if choice.mode == MODES[0]:
        return 0.0
    assert machine.card.counts is not None
    near = machine.card.counts[0] + machine.card.counts[1] * work.tokens
    layer = work.layer
    if layer.domains == 1:
        return near
    told = layer.domain * 4.0 * (layer.ranks + -(-layer.experts // layer.ranks))
    wire = (layer.domains - 1) * told
    return near + network_us(machine, layer.domains - 1, layer.domains - 1, wire) + read_us(machine, layer, 0.0, 0.0)


def links(work: Work, choice: Choice, rows: Rows) -> dict[str, Bytes]:
    """Bytes that leave, and come to, a rank in the mean."""
    layer = work.layer
    out, back = (near_row(work, choice, step) for step in STEPS[choice.route])
    inside = 1 - 1 / layer.domain
    if choice.way == "direct" or layer.domains == 1:
        return {
            "dispatch": Bytes(rows.near * out, rows.far * (work.dispatch_row + memory.meta_bytes(layer.top_k))),
            "combine": Bytes(rows.near * back, rows.far * work.combine_row),
        }
    sent = Bytes(
        rows.near * out + rows.far * inside * work.dispatch_row, rows.crossing * crossing_row(work, choice, rows)
    )
    one = memory.record(work.combine_row, 1)
    if choice.route == "gathered":
        returned = Bytes(rows.near * back, rows.far * work.combine_row)
    elif choice.sums == "by_domain":
        returned = Bytes((rows.near + rows.far * inside) * back, rows.crossing * one)
    else:
        returned = Bytes(rows.near * back + rows.far * inside * work.combine_row, rows.far * one)
    return {"dispatch": sent, "combine": returned}


def predict(machine: Machine, work: Work, choice: Choice, rows: Rows) -> Prediction:
    """All of a choice. rows: of its route."""
    dispatch = dispatch_us(machine, work, choice, rows)
    combine = combine_us(machine, work, choice, rows)
    counts = counts_us(machine, work, choice)
    joined = machine.card.joined["exact" if counts else "bounded"]
    pair = max(dispatch, combine, dispatch + combine + counts - joined)
    return Prediction(choice, dispatch, combine, counts, pair, links(work, choice, rows))
