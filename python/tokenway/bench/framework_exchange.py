"""`tokenway bench --frameworks exchange`: dispatch and combine through integrations, beside the frameworks' own ways.

A pair is what a framework calls around its experts, which answer what is there already: prepare and finalize of vLLM, a
token dispatcher's calls of Megatron, dispatch and combine of deep_ep's Buffer. Each call has another routing. Where the
host waits in none of two ways, they are compared as CUDA graphs, else eagerly. Needs PyTorch.

What an integration adds to the host is told beside: what its pair takes the host, less what the same operations take
it that are called on the group directly, in the same run. Where the host waits for the device within a pair, both are
timed as a whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tokenway.bench import framework_deep_ep, framework_megatron, framework_vllm
from tokenway.bench.framework_place import Place, Times, apart, steps
from tokenway.bench.framework_ways import Ones, Shape, Step, Way, Weighing, steps_of
from tokenway.bench.profiles import PROFILES

FRAMEWORKS = {"vllm": framework_vllm, "megatron": framework_megatron, "deep_ep": framework_deep_ep}
NEAR = 0.02  # how far a row may be, of its norm: bfloat16 sums in another order
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
        row |= {"host_added_us": {way.name: _added(times, way) for way in ways if way.has_direct}}
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
        subjects += place.subjects(way.name, partial(call, way.pair), graph=not way.waits, waits=way.waits)
        if way.has_direct:
            direct = partial(call, way.direct)
            subjects += place.subjects(DIRECT + way.name, direct, graph=False, waits=way.waits)
    return place.times(subjects)


def _added(times: Times, way: Way) -> float:
    """us of the host, from medians: of the whole where it waits in it, and on the CPU."""
    ours, direct = times[way.name], times[DIRECT + way.name]
    kind = "eager" if way.waits or "host" not in ours else "host"
    return round(ours[kind]["median"] - direct[kind]["median"], 2)


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
    for step in batches:
        before = steps()
        weighed, wanted = way.pair(step, weighing).clone(), weighing.wanted(step)
        answered, answers = way.pair(step, ones), way.answers(step)[:, None].expand(step.x.shape)
        made = steps() - before
        if made != 2 * way.steps:
            problems.append(f"{way.name}: made {made} steps of Tokenway's groups in two pairs, not {2 * way.steps}")
        found = {"weighed": (weighed, wanted), "answered": (answered, answers)}
        if way.has_direct:
            found["called directly"] = way.direct(step, ones), answers
        for what, (got, want) in found.items():
            if not (far := apart(got, want)) <= NEAR:
                problems.append(f"{way.name}, {what}: a row is apart by {far:.3g} of its norm, allowed is {NEAR}")
    return problems[0] if problems else None
