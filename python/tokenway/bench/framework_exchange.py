"""`tokenway bench --frameworks exchange`: dispatch and combine through integrations, beside the frameworks' own ways.

A pair is what a framework calls around its experts, which answer what is there already: prepare and finalize of vLLM, a
token dispatcher's calls of Megatron, dispatch and combine of deep_ep's Buffer. Each call has another routing. Where the
host waits in none of two ways, they are compared as CUDA graphs, else eagerly. Beside stand the same operations, called
on the group directly, in the same run. Needs PyTorch.

What an integration adds to the host is told too: what its pair takes the host, less what the operations take it. Where
the host waits for the device within a pair, both are timed as a whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from tokenway.bench import framework_deep_ep, framework_megatron, framework_vllm
from tokenway.bench.framework_place import Place, Times, differs, steps
from tokenway.bench.framework_ways import Ones, Shape, Step, Way, Weighing, steps_of
from tokenway.bench.profiles import PROFILES

FRAMEWORKS = {"vllm": framework_vllm, "megatron": framework_megatron, "deep_ep": framework_deep_ep}
DIRECT = "direct: "  # before the name of a way: the group's own operations


def measure(place: Place) -> dict[str, Any]:
    """All points. Collective."""
    missing = {name: why for name, module in FRAMEWORKS.items() if (why := module.missing()) is not None}
    for name, module in FRAMEWORKS.items():
        if name not in place.begun | missing.keys():
            place.progress.doing(f"importing {name}")
            module.begin(place)
            place.begun.add(name)
    kinds = [kind for name, module in FRAMEWORKS.items() if name not in missing for kind in module.WAYS]
    rows = []
    settings = place.settings
    for profile in settings.profiles:
        for routing in settings.routings:
            for tokens in settings.tokens:
                shape = Shape(PROFILES[profile], tokens, place.rank, place.ranks)
                place.progress.doing(f"exchange: {profile}, {routing}, {tokens} tokens")
                rows.append(_row(place, shape, routing, kinds))
        place.close()  # experts of the next need windows of their own
    return {"rows": rows, "missing": missing, "notes": list(dict.fromkeys(kind.note for kind in kinds if kind.note))}


def _row(place: Place, shape: Shape, routing: str, kinds: list[type[Way]]) -> dict[str, Any]:
    """A point: verified, timed, verified again."""
    refused = {kind.name: why for kind in kinds if (why := kind.refuses(place, shape)) is not None}
    batches = steps_of(place, shape, routing)
    ways = []
    for kind in kinds:
        if kind.name not in refused:
            place.progress.at(f"making {kind.name}")
            ways.append(kind(place, shape))
            place.settle()
    _verify(place, shape, ways, batches)
    p = shape.profile
    row: dict[str, Any] = {"profile": p.name, "routing": routing, "tokens": shape.tokens, "hidden": p.hidden}
    row |= {"experts": p.experts, "top_k": p.top_k, "ranks": shape.ranks, "dtype": place.settings.dtype}
    row |= {"refused": refused, "steps": {way.name: way.steps for way in ways}}
    row |= {"rivals": {way.name: [own.name for own in ways if _is_rival(way, own)] for way in ways if way.rivals}}
    if not place.settings.verify_only:
        times = _times(place, ways, batches)
        _verify(place, shape, ways, batches)
        row |= {"us": times, "waits": {way.name: way.waits for way in ways}}
        timed = {way.name: _host(times, way) for way in ways if way.has_direct}
        row |= {"host_timed": timed, "host_added_us": {name: _added(times, name, kind) for name, kind in timed.items()}}
    for way in ways:
        way.close()
    return row


def _is_rival(way: Way, own: Way) -> bool:
    return not own.rivals and own.framework in way.rivals


def _times(place: Place, ways: list[Way], batches: list[Step]) -> Times:
    """us of all ways and of the operations that they are made of, in turns."""
    subjects, ones = [], Ones(place)

    def call(made: Any, number: int) -> Any:
        return made(batches[number], ones)

    for way in ways:
        place.progress.at(f"first calls of {way.name}")
        right = None if way.waits else partial(_stray, way, batches)
        subjects += place.subjects(way.name, partial(call, way.pair), right=right, waits=way.waits)
        if way.has_direct:
            direct = partial(call, way.direct)
            subjects += place.subjects(DIRECT + way.name, direct, right=right, waits=way.waits)
    return place.times(subjects)


def _stray(way: Way, batches: list[Step], number: int, got: Tensor) -> str | None:
    """What is wrong with what a timed graph leaves of a batch."""
    told = differs(got, _answers(way, batches[number]), way.place.dtype)
    return told and f"{way.name}, in the graph that is timed: {told}"


def _answers(way: Way, step: Step) -> Tensor:
    return way.answers(step)[:, None].expand(step.x.shape)


def _host(times: Times, way: Way) -> str:
    """Which times tell what is added to the host: the whole where it waits within a pair, and on the CPU."""
    return "eager" if way.waits or "host" not in times[way.name] else "host"


def _added(times: Times, name: str, kind: str) -> float:
    """us, from medians."""
    return round(times[name][kind]["median"] - times[DIRECT + name][kind]["median"], 2)


def _verify(place: Place, shape: Shape, ways: list[Way], batches: list[Step]) -> None:
    """Compares each way with what must come back, with experts that weigh and with those that are timed. Collective."""
    weighing, ones = Weighing(place, shape), Ones(place)
    for way in ways:
        place.progress.at(f"checking {way.name}")
        place.agree(_problem(way, batches[:2], weighing, ones))
        place.settle()


def _problem(way: Way, batches: list[Step], weighing: Weighing, ones: Ones) -> str | None:
    """The first thing that is wrong, after all calls: peers are in them too."""
    problems = []
    place = way.place
    for step in batches:
        before = steps()
        found = {"weighed": way.pair(step, weighing).clone(), "answered": way.pair(step, ones).clone()}
        made = steps() - before
        if made != 2 * way.steps:
            problems.append(f"{way.name}: made {made} steps of Tokenway's groups in two pairs, not {2 * way.steps}")
        calls = {"": way.pair}
        if way.has_direct:
            calls = {"": way.pair, "called directly, ": way.direct}
            found["called directly, weighed"] = way.direct(step, weighing).clone()
            found["called directly, answered"] = way.direct(step, ones).clone()
        if place.on_gpus and not way.waits:
            for how, call in calls.items():
                found[f"{how}weighed in a graph"] = place.in_graph(partial(call, step, weighing))
        for what, got in found.items():
            want = _answers(way, step) if what.endswith("answered") else weighing.wanted(step)
            if told := differs(got, want, place.dtype):
                problems.append(f"{way.name}, {what}: {told}")
    return problems[0] if problems else None
