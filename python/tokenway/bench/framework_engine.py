"""`tokenway bench --frameworks engine`: a small engine with a decoder of random weights, by the ways of mixings.py.

Prompts are run eagerly, all at once; then each step continues every sequence by one token, which the host reads: on
GPUs in a CUDA graph. Told are the time to the first token, between tokens, and tokens per second of all ranks, prompts
not counted. Once all ranks have equally many sequences, and once different numbers, as data-parallel attention has.
Ways take turns. Before and behind, each way's layer is compared with the last one's on the same rows, in a graph too
where steps are in graphs; and the logits of a captured step with those of the same step, called eagerly. Needs PyTorch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

import tokenway as tw
from tokenway.bench.collective_row import Row
from tokenway.bench.control import Control
from tokenway.bench.decoder import VOCABULARY, Cache, Decoder, Sequences
from tokenway.bench.framework_place import NEAR, Place, apart, differs, steps
from tokenway.bench.graphs import captured
from tokenway.bench.layer_case import Layer
from tokenway.bench.mixings import MIXINGS, Mixing
from tokenway.bench.profiles import PROFILES
from tokenway.integrations import groups

ALIKE = 0.75  # of a step's logits: where two experts are chosen almost equally, a rounding decides between them
PHASES = ("first", "between", "rest")


class Engine:
    """A rank's sequences, by one way. Collective in all that it does."""

    phases = PHASES

    def __init__(
        self, name: str, place: Place, decoder: Decoder, mixing: Mixing, batches: list[int], lengths: Sequences
    ):
        """batches: sequences of each rank; lengths: of these."""
        self.name, self._decoder, self.mixing, self._batches = f"{name}|engine", decoder, mixing, batches
        mine = Sequences(batches[place.rank], lengths.prompt, lengths.generate)
        self._sequences = mine
        drawn = torch.Generator().manual_seed(place.settings.seed * 31 + place.rank)
        self._prompts = torch.randint(VOCABULARY, (mine.batch, mine.prompt), generator=drawn).to(place.device)
        self._cache = Cache(decoder, mine, place.device, place.dtype)
        self._tokens = torch.zeros(mine.batch, dtype=torch.int64, device=place.device)
        self._graph: Any = None
        self._captured: Any = None  # logits of the graph's step
        self.text: list[list[int]] = []  # by step, of each sequence

    @torch.no_grad()
    def prefill(self) -> None:
        """The first token of each sequence."""
        self.mixing.sizes = [batch * self._sequences.prompt for batch in self._batches]
        logits = self._decoder.logits(self._prompts, self._cache, self.mixing, first=True)
        self._tokens.copy_(logits.argmax(-1))
        self._cache.at.fill_(self._sequences.prompt)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """One more token of each: its logits [B, vocabulary]."""
        self.mixing.sizes = self._batches
        logits = self._decoder.logits(self._tokens[:, None], self._cache, self.mixing, first=False)
        self._tokens.copy_(logits.argmax(-1))
        self._cache.at.add_(1)
        return logits

    def capture(self) -> None:
        """A step, once both have run: from here on it is replayed."""

        def kept() -> None:
            self._captured = self.step()

        self._graph = captured(kept, torch.cuda.current_stream())

    def problem(self) -> str | None:
        """What is wrong with the captured step, the first behind the prompts, beside the same one called eagerly."""
        if self._graph is None:
            return None
        self.prefill()
        tokens, at = self._tokens.clone(), self._cache.at.clone()
        eager = self.step()
        self._tokens.copy_(tokens)
        self._cache.at.copy_(at)
        if self._captured is not None:
            self._captured.fill_(float("nan"))
        self._graph.replay()
        # Behind several layers, whose differences add up: 0.00802 of the norm in bfloat16, on 2x H200.
        far, near = apart(self._captured, eager, ALIKE), 2 * NEAR[eager.dtype]
        if far <= near:
            return None
        name = self.name.removesuffix("|engine")
        return f"{name}: logits of the captured step are apart by {far:.3g} of their norm, allowed is {near}"

    def serve(self, start: int) -> tuple[int, int, int]:
        """Everything once, from an instant: ns to the first tokens, between tokens, from the first to the last."""
        self.prefill()
        self.text = [self._tokens.tolist()]
        first = last = time.perf_counter_ns()
        spent = []
        for _ in range(self._sequences.generate - 1):
            self.step() if self._graph is None else self._graph.replay()
            self.text.append(self._tokens.tolist())
            now = time.perf_counter_ns()
            spent.append(now - last)
            last = now
        return first - start, sorted(spent)[len(spent) // 2] if spent else 0, last - first

    def once(self, control: Control) -> tuple[int, int, int]:
        """A turn."""
        return self.serve(control.gate())

    def close(self) -> None:
        """Frees the graph."""
        if self._graph is not None:
            self._graph.reset()


def measure(place: Place) -> dict[str, Any]:
    """Both numbers of sequences. Collective."""
    told = place.settings.frameworks
    assert told is not None
    profile = PROFILES[place.settings.profiles[0]]
    lengths = Sequences(told.batch, told.prompt, told.generate)
    place.progress.doing("engine: making the decoder")
    peers = groups.of(None, device=place.device)
    shared = peers.shared(experts=profile.experts, top_k=profile.top_k, mode="auto", low_latency_tokens=told.batch)
    group = shared.with_room(tw.RowType(profile.hidden, place.dtype), told.batch * told.prompt)
    seed = place.settings.seed
    layers = [Layer(group, profile, None, seed + 1000 * number) for number in range(told.layers)]  # type: ignore[arg-type]
    decoder = Decoder(profile, told.layers, place.device, place.dtype, seed)
    rows = []
    for kind, even in (("equal", True), ("uneven", False)):
        gathered = Row("all_gatherv", told.batch, even, place.ranks, profile.hidden, place.settings.dtype)
        batches = [max(1, size) for size in gathered.sizes]  # rows of a step
        place.progress.doing(f"engine: {kind} numbers of sequences")
        mixings = {name: made(layers, place.rank) for name, made in MIXINGS.items()}
        engines = {name: Engine(name, place, decoder, mixing, batches, lengths) for name, mixing in mixings.items()}
        rows.append({"kind": kind, "batches": batches} | _row(place, engines, mixings, batches, lengths))
    place.close()
    what = {"profile": profile.name, "hidden": profile.hidden, "experts": profile.experts, "top_k": profile.top_k}
    what |= {"layers": told.layers, "prompt": told.prompt, "generate": told.generate, "vocabulary": VOCABULARY}
    return what | {"graphs": place.on_gpus, "rows": rows}


def _row(
    place: Place, engines: dict[str, Engine], mixings: dict[str, Mixing], batches: list[int], lengths: Sequences
) -> dict[str, Any]:
    """A line: verified, timed, verified again."""
    _verify(place, mixings, batches, lengths)
    found: dict[str, Any] = {"steps": {name: _served(place, name, engine) for name, engine in engines.items()}}
    times: dict[str, Any] = {}
    if not place.settings.verify_only:
        for name, engine in engines.items():
            if place.on_gpus:
                place.progress.at(f"capturing {name}")
                engine.capture()
            place.settle()
        times = place.times(engines.values())
        _verify(place, mixings, batches, lengths)
    last = [*engines.values()][-1]
    found["same_text"] = {name: _share(place, engine.text, last.text) for name, engine in engines.items()}
    tokens = sum(batches) * (lengths.generate - 1)
    for name, phases in times.items():
        phases["tokens_per_s"] = round(tokens / max(phases["rest"]["median"], 1e-3) * 1e6, 1)
        found.setdefault("us", {})[name] = phases
    return found


def _served(place: Place, name: str, engine: Engine) -> int:
    """Serves once, eagerly: how many steps of Tokenway's groups that took. Collective."""
    place.progress.at(f"first calls of {name}")
    before = steps()
    engine.serve(time.perf_counter_ns())
    made = steps() - before
    want = engine.mixing.steps * len(engine.mixing.layers) * len(engine.text)
    place.settle()
    place.agree(None if made == want else f"{name}: made {made} steps of Tokenway's groups, not {want}")
    return made


@torch.no_grad()
def _verify(place: Place, mixings: dict[str, Mixing], batches: list[int], lengths: Sequences) -> None:
    """Compares what each way makes of the same rows with the last way's, in steps and of prompts; the former in graphs
    too. Collective."""
    for each in (1, lengths.prompt):
        sizes = [batch * each for batch in batches]
        layer = mixings["routed"].layers[0]
        drawn = torch.Generator().manual_seed(place.rank + 1)
        shape = 2, sizes[place.rank], layer.group.hidden
        rows, shared = torch.randn(shape, generator=drawn).to(place.device, place.dtype)
        results: dict[str, torch.Tensor] = {}
        for name, mixing in mixings.items():
            place.progress.at(f"checking {name}")
            mixing.sizes = sizes
            results[name] = mixing(0, rows, shared).clone()
            place.settle()
        want = [*results.values()][-1]
        if place.on_gpus and each == 1:
            for name, mixing in mixings.items():
                results[f"{name} in a graph"] = place.in_graph(partial(mixing, 0, rows, shared))
        for name, got in results.items():
            told = differs(got, want, place.dtype)
            place.agree(told and f"{name}, {max(sizes)} rows: {told}")


def _share(place: Place, text: list[list[int]], other: list[list[int]]) -> float:
    """Of tokens of all ranks that are the same, before any differs in a sequence. Collective."""
    same = count = 0
    for ours, theirs in zip(zip(*text, strict=True), zip(*other, strict=True), strict=True):
        count += len(ours)
        same += next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    all_of_it = place.control.allgather((same, count))
    return round(sum(one for one, _ in all_of_it) / sum(two for _, two in all_of_it), 4)
