"""What becomes of the times that were measured on GPUs: rows of a run's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenway.bench import floor, timing
from tokenway.bench.case import Case
from tokenway.bench.graphs import COUNT, LAYERS
from tokenway.bench.settings import Settings
from tokenway.settings import window_bytes

BEHIND = "behind a barrier"  # the subject of ours that other libraries' dispatch and combine are compared with
BIG = {"ranks": 64, "experts": 512, "max_tokens": 128}  # a group that is computed, not made

METHOD = {
    "pair_us, dispatch_us, combine_us": (
        f"{COUNT} calls in one CUDA graph, between two events that are nodes of it, after one call that brings the "
        "ranks together; per call, the slowest rank of each replay; each dispatch of a pair works out a routing new to "
        "it; dispatch alone is one handle's, again and again"
    ),
    "cached_pair_us": "as pair_us, all pairs with one handle, whose routing is known",
    "counts_us": "as pair_us, of the exchange of counts of a new routing, which high throughput needs once for it",
    "backward_us, both_us": (
        "as cached_pair_us, of gradients, which are rows of H elements: by a routing that is known, and after a pair "
        "whose routing is new; of a baseline its calls twice, since its backward pass is the same calls on gradients"
    ),
    "behind_barrier": (
        f"dispatch alone and combine alone, of a routing new to it, in one graph of {COUNT} turns, each behind a "
        "barrier of all ranks on their devices (an all-reduce of one number) and between events of its own; the median "
        "turn of each replay, the slowest rank; of other libraries likewise, in their own processes, in the same rounds"
    ),
    "outside_pair_us": f"as pair_us, between events around the replay, over {COUNT + 1} pairs: the launch is in it",
    "host": (
        f"loops of {LAYERS} turns without a graph; eager_us per turn by the clock until the device is done, host_us "
        "the host's part; a turn is a pair, or with --backend gin a dispatch or a combine alone, or route's call, or "
        "two of PyTorch's, additions in place of one number; update + pair and route + pair are pairs of new ids, by a "
        "handle that is updated and by a new one"
    ),
    "floor": "of tokenway-floor in the same run; times_floor against its fastest exchange of the same rows",
    "remote_bytes": (
        "of the rank from which the most bytes go to other ranks; with --backend gin, to ranks of other hosts, as if "
        "each row went to each of these, and without what they are told of a step"
    ),
    "percent_of_put": (
        "remote bytes / time / two-way put ceiling; ids, weights and headers are remote bytes, too, but in high "
        "throughput, where a dispatch alone is not the first of its routing and moves rows only"
    ),
}


def run(settings: Settings, document: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run's results."""
    case = settings.cases()[0]
    keywords = case.group_settings(BIG["max_tokens"]) | {"experts": max(BIG["experts"], case.profile.experts)}
    computed = window_bytes(BIG["ranks"], **keywords)
    ratio = computed.expert_buffers / computed.window
    return {
        "backend": "nvlink",
        "method": METHOD,
        "floor": document,
        "window_of_a_large_group": BIG
        | {
            "experts": keywords["experts"],
            "window_bytes": computed.window,
            "expert_buffers_bytes": computed.expert_buffers,
            "times": round(ratio, 2),
        },
        "rows": rows,
    }


def row(
    case: Case,
    times: dict[str, Any],
    bottom: floor.Floor,
    notes: dict[str, str],
    hosts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Summaries of a row's times, ratios to the floor and to the baselines. times: of timing.rounds_of. hosts: of each
    rank the number of its host, where bytes to other hosts are told; they have no floor."""
    ours = {phase: timing.summary(rounds) for phase, rounds in times["tokenway"].items()}
    told: dict[str, Any] = {f"{phase}_us": ours[phase] for phase in ("pair", "dispatch", "combine")}
    told["cached_pair_us"], told["outside_pair_us"] = ours["cached"], ours["outside"]
    told |= {f"{phase}_us": ours[phase] for phase in ("counts", "backward", "both") if phase in ours}
    told["pair_less_dispatch_us"] = round(ours["pair"]["median"] - ours["dispatch"]["median"], 2)
    told["floor"] = _beside_floor(case, ours, bottom, hosts)
    told["baselines"], told["host"] = {}, {}
    for name, phases in times.items():
        if "eager" in phases:
            told["host"][name] = {f"{phase}_us": timing.summary(rounds) for phase, rounds in phases.items()}
        elif name == "compare":
            told["compare"] = _compared(phases, ours)
        elif name == BEHIND:
            told["behind_barrier"] = {f"{phase}_us": timing.summary(rounds) for phase, rounds in phases.items()}
        elif name != "tokenway":
            pair = timing.summary(phases["pair"])
            told["baselines"][name] = {"pair_us": pair, "timed": "events" if name in notes else "graph"}
            told["baselines"][name] |= timing.ratio(pair, ours["pair"])
            if "both" in phases:
                both = timing.summary(phases["both"])
                told["baselines"][name]["both"] = {"both_us": both} | timing.ratio(both, ours["both"])
            if "dispatch" in phases:
                told["baselines"][name]["behind_barrier"] = _apart(phases, times[BEHIND])
            if name in notes:
                told["baselines"][name]["no_graph"] = notes[name]
    return told


def _apart(phases: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Dispatch alone and combine alone of another library, beside ours."""
    told: dict[str, Any] = {}
    for phase in ("dispatch", "combine"):
        times, base = timing.summary(phases[phase]), timing.summary(ours[phase])
        told[phase] = {"us": times} | timing.ratio(times, base)
    return told


def _beside_floor(case: Case, ours: dict[str, Any], bottom: floor.Floor, hosts: Sequence[int] | None) -> dict[str, Any]:
    sent, back = floor.remote_rows(case, hosts)
    moved = floor.moved_row(case) if hosts is None else floor.wire_row(case)  # posts are of whole rows
    both = {
        "dispatch": bottom.compare(ours["dispatch"]["median"], sent, moved),
        "combine": bottom.compare(ours["combine"]["median"], back, case.combine_row),
    }
    bottoms = [bottom.exchange(sent, floor.wire_row(case)), bottom.exchange(back, case.combine_row)]
    if None not in bottoms and sent and back:
        total = sum(us for _, us in bottoms)
        both["pair"] = {"floor_us": round(total, 3), "times_floor": round(ours["pair"]["median"] / total, 3)}
    return both


def _compared(phases: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The second dtype: its times, and its dispatch as a part of ours."""
    beside = {phase: timing.summary(phases[phase]) for phase in ("pair", "dispatch", "combine")}
    told: dict[str, Any] = {f"{phase}_us": figures for phase, figures in beside.items()}
    told["dispatch_ratio"] = round(beside["dispatch"]["median"] / ours["dispatch"]["median"], 4)
    return told


def without_waiting(phases: dict[str, Any]) -> dict[str, Any]:
    """Times of kernels that do not wait, marked as what they are."""
    told: dict[str, Any] = {"incorrect": True}
    told |= {f"{phase}_us": timing.summary(phases[phase]) for phase in ("pair", "dispatch", "combine")}
    return told
