"""Constants out of measured files: fitted on two GPUs, and held against four.

    python -m tokenway.planning.fitting bench/results         prints both
    python -m tokenway.planning.fitting bench/results FILE    and writes the constants as tokenway/planning/fitted.py

One fit sees files of one card alone, and never a file of four GPUs. A step's time between GPUs of a domain is

    start + rows * row + bytes / rate

with the rows and bytes that come to the busiest rank: `start` in us is what it takes without rows, `row` in us what a
row takes beside its bytes, `rate` in GB/s what links reach. Where all rows go as packets (the library's packet bound)
the bytes are those of packets, and the constants are others, since other kernels run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenway.planning import rows as row_counts
from tokenway.planning.rows import Layer

META = 72  # bytes that go with a dispatched row, of top-8: a header, ids and weights
PACKET, PACKET_DATA = 128, 120  # bytes of an LL128 packet, and how many of them are data
# Of two, four, ... ranks: tokens up to which all rows of a call go as packets (`tokenway info --plan`: packet bound).
PACKET_BOUND = {2: 1024, 4: 512}
DEEPSEEK = (256, 8, 14336, 7392)  # experts, top-k, bytes of a bfloat16 row, of an fp8 row with its scales
SHORT = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}


@dataclass(frozen=True)
class Point:
    """A measured time: of which step, at so many tokens a rank on so many GPUs, and in which file."""

    step: str
    gpus: int
    tokens: int
    row_bytes: int
    us: float
    file: str

    @property
    def packets(self) -> bool:
        """Whether all its rows go as packets."""
        exact = self.step.startswith("exact")
        bound = PACKET_BOUND[2] if self.step in ("gather", "reduce") else PACKET_BOUND[self.gpus]
        return not exact and self.tokens <= bound

    def traffic(self) -> tuple[float, float]:
        """(rows, bytes) that come to the busiest rank."""
        if self.step in ("gather", "reduce"):
            rows = float(self.tokens * (self.gpus - 1))
        else:
            layer = Layer(*DEEPSEEK[:2], ranks=self.gpus, domain=self.gpus)
            rows = row_counts.routed(layer, self.tokens).busiest_near
        return rows, rows * wire_row(self.step, self.row_bytes, self.packets)


def wire_row(step: str, row_bytes: int, packets: bool, meta: int = META) -> int:
    """Bytes of a row on a link of a domain: a dispatch's has metadata, but not in high throughput again."""
    whole = row_bytes + (meta if step == "dispatch" else 0)
    return -(-whole // PACKET_DATA) * PACKET if packets else whole


@dataclass(frozen=True)
class Rate:
    """start: us. row: us a row. gb_s: GB/s, 1e9 bytes a second."""

    start: float
    gb_s: float
    row: float = 0.0

    def us(self, rows: float, wire_bytes: float) -> float:
        """What so many rows take, of so many bytes together."""
        return self.start + rows * self.row + wire_bytes / (self.gb_s * 1e3)


@dataclass(frozen=True)
class Card:
    """Constants of one card: by step and kind of kernel.

    joined: us that calls behind each other in a graph save of what they take alone, by mode. counts: (us, us a token)
    of an exchange of counts. From the floor of a run: put_gb_s is what plain stores reach in one direction,
    get_gb_s loads while both sides load, copy_gb_s a copy within a GPU, and flag_us is a word that is stored behind
    what it tells of, and seen by the peer.
    """

    name: str
    rates: dict[str, Rate]
    joined: dict[str, float]
    counts: tuple[float, float] | None
    put_gb_s: float
    get_gb_s: float
    copy_gb_s: float
    flag_us: float

    def rate(self, step: str, packets: bool) -> Rate:
        """Of a step. Where single rows in low latency were measured at one size, those of high throughput, whose rows
        travel alike."""
        key = f"{step}, {'packets' if packets else 'rows'}"
        return self.rates[key if key in self.rates else f"exact {key}"]


def read(folder: Path) -> dict[str, Any]:
    """All files of results by name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def _card(run: dict[str, Any]) -> str:
    gpu = run.get("gpu") or run["machine"]
    return SHORT[gpu["gpu"]]


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else np.median(value))


def _bench_rows(file: str, run: dict[str, Any], gpus: int, exact: bool) -> Iterator[Point]:
    """Points of a run of pairs: dispatches of bfloat16 and fp8, combines, pairs."""
    _, _, bf16, fp8 = DEEPSEEK
    kind = "exact " if exact else ""
    for row in run["rows"]:
        for step in ("dispatch", "combine", "pair"):
            yield Point(kind + step, gpus, row["tokens"], bf16, _median(row[f"{step}_us"]), file)
        if exact:
            yield Point("counts", gpus, row["tokens"], bf16, _median(row["counts_us"]), file)
        compared = row.get("compare", {})
        if "dispatch_us" in compared:
            yield Point(kind + "dispatch", gpus, row["tokens"], fp8, _median(compared["dispatch_us"]), file)


def _ways(file: str, run: dict[str, Any], gpus: int) -> Iterator[Point]:
    for row in run["returns"]:
        for step, us in row["ways"]["sums"].items():
            if step in ("dispatch", "combine", "pair"):
                yield Point(step, gpus, row["tokens"], DEEPSEEK[2], _median(us), file)


def _by_subject(file: str, found: dict[str, Any], gpus: int, kind: str) -> Iterator[Point]:
    """Points of {"dispatch_us@128": [...]}."""
    for subject, us in found.items():
        step, tokens = subject.split("_us@")
        name = step if step == "counts" else kind + step
        yield Point(name, gpus, int(tokens), DEEPSEEK[2], _median(us), file)


def fitted_points(runs: dict[str, Any], card: str) -> list[Point]:
    """What constants of a card are fitted from: two GPUs."""
    if card == "H100":
        return list(_bench_rows("nvlink-2-gpus.json", runs["nvlink-2-gpus.json"], 2, exact=False))
    points = list(_ways("returns-2-gpus.json", runs["returns-2-gpus.json"], 2))
    points += _bench_rows("nvlink-flat.json", runs["nvlink-flat.json"], 2, exact=True)
    file = "nvlink-collectives.json"
    for found in runs[file]["collectives"]:
        if len(set(found["sizes"])) == 1:  # as many tokens on both ranks
            step = {"all_gatherv": "gather", "reduce_scatterv": "reduce"}[found["collective"]]
            points.append(Point(step, 2, found["tokens"], DEEPSEEK[2], _median(found["us"]), file))
    return points


def held_out_points(runs: dict[str, Any], card: str) -> list[Point]:
    """What they are held against: four GPUs, which no fit has seen."""
    if card == "H100":
        points = list(_bench_rows("nvlink-4-gpus.json", runs["nvlink-4-gpus.json"], 4, exact=False))
        file = "high-throughput-4-gpus.json"
        return points + list(_by_subject(file, runs[file]["runs"]["new"], 4, "exact "))
    points = list(_ways("returns-4-gpus.json", runs["returns-4-gpus.json"], 4))
    run = runs["peers-4-gpus.json"]
    (ours,) = (row for row in run["peers"] if row["name"] == "Tokenway")
    pairs = zip(run["settings"]["tokens"], ours["us"], strict=True)
    return points + [Point("pair", 4, tokens, DEEPSEEK[2], us, "peers-4-gpus.json") for tokens, us in pairs]


def fit_rate(points: Sequence[Point], ceiling: float) -> Rate:
    """Least squares of relative deviations. `row` only where packets of two row sizes were measured, which alone tell
    it from the bytes. No rate is above `ceiling`: what would be is that, and the others are fitted with it."""
    rows, sent = np.array([point.traffic() for point in points]).T
    us = np.array([point.us for point in points])
    with_row = points[0].packets and len({point.row_bytes for point in points}) > 1
    columns = [np.ones(len(us)), *([rows] if with_row else []), sent / 1e3]

    def least(columns: list[np.ndarray], us_left: np.ndarray) -> list[float]:
        found, *_ = np.linalg.lstsq(np.stack(columns, axis=1) / us[:, None], us_left / us, rcond=None)
        return [float(value) for value in found]

    *others, inverse = least(columns, us)
    if inverse * ceiling < 1:
        inverse = 1 / ceiling
        others = least(columns[:-1], us - columns[-1] * inverse)
    return Rate(others[0], 1 / inverse, others[1] if with_row else 0.0)


def fit(runs: dict[str, Any], card: str) -> Card:
    """All constants of a card from its files of two GPUs. Raises ValueError where a file is of another card."""
    points = fitted_points(runs, card)
    for file in {point.file for point in points}:
        if _card(runs[file]) != card:
            raise ValueError(f"{file}: of {_card(runs[file])}; a fit of {card} may not see it")
    groups: dict[str, list[Point]] = {}
    for point in points:
        if "pair" not in point.step and point.step != "counts":
            groups.setdefault(key_of(point), []).append(point)
    sizes = {key: {point.tokens for point in group} for key, group in groups.items()}
    # One size tells no start from a rate.
    floor = _floor(runs, card)
    rates = {key: fit_rate(group, floor["put_gb_s"]) for key, group in groups.items() if len(sizes[key]) > 1}
    counted = [point for point in points if point.step == "counts"]
    counts = None
    if counted:
        line = np.polyfit([p.tokens for p in counted], [p.us for p in counted], 1)
        counts = float(line[1]), float(line[0])
    return Card(card, rates, _joined(points), counts, **floor)


FLOORS = {"H100": "nvlink-2-gpus.json", "H200": "nvlink-flat.json"}


def _floor(runs: dict[str, Any], card: str) -> dict[str, float]:
    """What links and memories do by the floor of a run on two GPUs of this card, with all SMs."""
    floor = runs[FLOORS[card]]["floor"]
    speeds = {(c["kind"], c["ways"]): c["median_gb_s"] for c in floor["ceilings"] if c["sms"] == floor["sms"]}
    return {
        "put_gb_s": speeds["put", 1],
        "get_gb_s": speeds["get", 2],
        "copy_gb_s": speeds["local_copy", 1],
        "flag_us": floor["flag_release_acquire_us"]["median"],
    }


def key_of(point: Point) -> str:
    """Of the rate that says what a point takes."""
    return f"{point.step}, {'packets' if point.packets else 'rows'}"


def _joined(points: Sequence[Point]) -> dict[str, float]:
    """By how much a pair is shorter than its calls alone: the median over sizes."""
    saved: dict[str, list[float]] = {}
    us = {(point.step, point.tokens): point.us for point in points if point.row_bytes == DEEPSEEK[2]}
    for (step, tokens), pair in us.items():
        if step.endswith("pair"):
            kind = step.removesuffix("pair")
            alone = [us[kind + name, tokens] for name in ("dispatch", "combine")]
            alone += [us["counts", tokens]] if kind else []
            saved.setdefault(kind.strip() or "bounded", []).append(sum(alone) - pair)
    return {kind: float(np.median(values)) for kind, values in saved.items()}


def predicted(card: Card, point: Point) -> float:
    """What the constants say of a point, whichever GPUs it is of."""
    if point.step == "counts":
        assert card.counts is not None
        return card.counts[0] + card.counts[1] * point.tokens
    if point.step.endswith("pair"):
        kind = point.step.removesuffix("pair")
        parts = [Point(kind + step, *_rest(point)) for step in ("dispatch", "combine")]
        parts += [Point("counts", *_rest(point))] if kind else []
        return sum(predicted(card, part) for part in parts) - card.joined[kind.strip() or "bounded"]
    return card.rate(point.step, point.packets).us(*point.traffic())


def _rest(point: Point) -> tuple[int, int, int, float, str]:
    return point.gpus, point.tokens, point.row_bytes, point.us, point.file


def cards(folder: Path) -> dict[str, Card]:
    """All cards that were measured, each with its own constants alone."""
    runs = read(folder)
    return {name: fit(runs, name) for name in ("H100", "H200")}


def lend(own: dict[str, Card]) -> dict[str, Card]:
    """What H100 has no file of two GPUs for is borrowed from H200, which has the same links: high throughput, gathers
    and reduces."""
    lent, h100 = own["H200"], own["H100"]
    counts = h100.counts or lent.counts
    rates, joined = dict(sorted((lent.rates | h100.rates).items())), lent.joined | h100.joined
    return own | {"H100": replace(h100, rates=rates, joined=joined, counts=counts)}


def held_out(folder: Path, made: dict[str, Card]) -> list[dict[str, Any]]:
    """Each point of four GPUs beside what was predicted."""
    runs = read(folder)
    found = []
    for name, card in made.items():
        for point in held_out_points(runs, name):
            us = predicted(card, point)
            deviation = us / point.us - 1
            told = {"card": name, "file": point.file, "step": point.step, "tokens": point.tokens}
            found.append(told | {"measured_us": point.us, "predicted_us": us, "deviation": deviation})
    return found


DIGITS = 4  # of constants, which is more than two runs agree in


def rounded(value: Any, digits: int) -> Any:
    """All numbers in plain data to so many digits; lists become tuples."""
    if isinstance(value, dict):
        return {name: rounded(inner, digits) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(rounded(inner, digits) for inner in value)
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def source(made: dict[str, Card]) -> str:
    """The module that holds constants."""
    lines = ['"""Constants of cards, by `python -m tokenway.planning.fitting bench/results FILE`."""', ""]
    lines += ["from tokenway.planning.fitting import Card, Rate, lend", "", "CARDS = lend({"]
    for name, card in made.items():
        rates = ", ".join(f'"{key}": Rate{rounded(astuple(rate), DIGITS)}' for key, rate in sorted(card.rates.items()))
        others = {key: rounded(value, DIGITS) for key, value in asdict(card).items() if key not in ("name", "rates")}
        told = ", ".join(
            f"{key}={json.dumps(value) if isinstance(value, dict) else value}" for key, value in others.items()
        )
        lines.append(f'    "{name}": Card("{name}", {{{rates}}}, {told}),')
    return "\n".join([*lines, "})", ""])


def main(argv: Sequence[str]) -> int:
    """Prints the constants and the deviations, and writes the constants."""
    folder = Path(argv[0])
    made = cards(folder)
    for row in held_out(folder, lend(made)):
        us = f"{row['measured_us']:9.2f} {row['predicted_us']:9.2f} {row['deviation']:+7.1%}"
        print(f"{row['card']} {row['step']:16} {row['tokens']:6} {us} {row['file']}")
    print(source(made))
    if len(argv) > 1:
        Path(argv[1]).write_text(source(made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
