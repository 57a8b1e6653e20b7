"""Tables of what was predicted: by `tokenway plan`, and of constants beside what was measured and published."""

from __future__ import annotations

from tokenway.bench.tables.table import Row, Run, Table, microseconds
from tokenway.tables import mebibytes

KINDS = {"predictions", "held_out", "published"}  # of which each run has one part
HEADS = [
    *("GPUs", "tokens", "fastest", "dispatch us", "combine us", "pair us", "NVLink MiB", "NIC MiB", "window MiB"),
    *("beside MiB", "gathered", "high throughput", "by_domain", "direct"),
]


def words(choice: dict[str, str], domains: int) -> str:
    """A choice in few words: LL is low latency, HT high throughput."""
    if choice["route"] == "gathered":
        parts = ["gathered"]
    else:
        parts = ["LL" if choice["mode"] == "low_latency" else "HT"]
    if domains > 1:
        parts += [choice["way"], choice["sums"]]
    return " ".join(parts)


def cells(found: Run) -> list[list[str]]:
    """The table's rows."""
    made = []
    for row in found["predictions"]:
        best, held = row["best"], row["memory"]
        links = best["links"].values()
        beside = held["beside"][best["choice"]["sums"]]
        window = "" if held["window"] is None else mebibytes(held["window"] + held["packets"])
        ratios = ["" if value is None else f"{value:.2f}x" for value in row["against"].values()]
        times = [microseconds(best[name]) for name in ("dispatch_us", "combine_us", "pair_us")]
        moved = [mebibytes(sum(step[name] for step in links)) for name in ("nvlink", "nic")]
        told = words(best["choice"], row["domains"])
        made.append([str(row["gpus"]), f"{row['tokens']}", told, *times, *moved, window, mebibytes(beside), *ratios])
    return made


def tables(run: Run) -> list[Table]:
    """Of predictions, of constants beside held-out measurements, or of published figures."""
    if "held_out" in run:
        return [_constants(run), _held_out(run)]
    if "published" in run:
        return [_published(run)]
    settings = run["settings"]
    what = ", ".join(settings[name] for name in ("profile", "dtype", "routing"))
    made = [Table(f"{run['machine']}, domains of {run['domain']}: {what}: predicted", HEADS, cells(run), range(2, 3))]
    if any("tails" in row for row in run["predictions"]):
        heads = ["GPUs", "tokens", "pair p50 us", "p99 us"]
        tails = [
            [str(row["gpus"]), str(row["tokens"]), *(microseconds(row["tails"][name]) for name in ("p50", "p99"))]
            for row in run["predictions"]
        ]
        late = f"ranks late by {settings['late_us']:g} us with chance {settings['late_share']:g}"
        made.append(Table(f"{settings['simulate']} simulated pairs of LL pull flat, {late}", heads, tails, range(0)))
    heads = ["constant", "value", "unit", "kind", "from"]
    lines = [[name, f"{c['value']:g}", c["unit"], c["kind"], c["source"]] for name, c in run["constants"].items()]
    made.append(Table(f"Constants beside those of {run['card']}", heads, lines, range(5)))
    return made


def notes(run: Run) -> list[str]:
    """Below them."""
    if "predictions" not in run:
        return []
    told = [
        "NVLink, NIC: bytes of a pair that leave a rank in the mean, and as many come",
        "gathered, high throughput, by_domain, direct: the fastest pair of that kind over the fastest of the other "
        "(routed, low latency, flat, pull)",
        "by_domain has other bits than flat; between domains nothing of this was measured on GPUs",
    ]
    if any(row["memory"]["window"] is None for row in run["predictions"]):
        told.append("no window where there are more than the 1024 ranks that the library allows")
    return told


def markdown(run: Run) -> str:
    """All of it in a page."""
    lines: list[str] = []
    for table in tables(run):
        lines += [f"{table.what}.", "", *table.markdown(), ""]
    return "\n".join([*lines, *(f"* {note}" for note in notes(run))]).rstrip()


def percent(value: float) -> str:
    """A deviation: 0.05 is +5.0 %."""
    return f"{100 * value:+.1f} %"


def _constants(run: Run) -> Table:
    cells = []
    for card, found in run["cards"].items():
        for key, rate in sorted(found["rates"].items()):
            files = ", ".join(rate["files"])
            cells.append([card, key, *(f"{rate[name]:.4g}" for name in ("start", "row", "gb_s")), files])
    heads = ["card", "step", "start us", "us a row", "GB/s", "fitted from"]
    return Table("Constants within a domain, fitted on 2 GPUs", heads, cells, range(2))


def _held_out(run: Run) -> Table:
    def line(row: Row) -> list[str]:
        far = " **" if abs(row["deviation"]) > run["within"] else ""
        us = [microseconds(row[name]) for name in ("measured_us", "predicted_us")]
        return [row["card"], row["file"], row["step"], str(row["tokens"]), *us, percent(row["deviation"]) + far]

    cells = [line(row) for row in run["held_out"]]
    beyond = sum(abs(row["deviation"]) > run["within"] for row in run["held_out"])
    what = f"Held out: 4 GPUs; {beyond} of {len(cells)} beyond {100 * run['within']:.0f} % (**)"
    return Table(what, ["card", "file", "step", "tokens", "measured us", "predicted us", "deviation"], cells, range(3))


def _published(run: Run) -> Table:
    cells = []
    for row in run["published"]:
        line = [row["library"], row["machine"], str(row["gpus"]), str(row["tokens"])]
        for step in ("dispatch", "combine", "combine by_domain"):
            us, ours = row["us"].get(step.split(" ")[0]), row["predicted_us"][step]
            line += ["" if ours is None else microseconds(ours)]
            if step != "combine by_domain":
                line.insert(-1, microseconds(us))
            line += ["" if ours is None else percent(ours / us - 1)]
        cells.append([*line, row["source"]])
    heads = ["published by", "machine", "GPUs", "tokens", "dispatch us", "predicted", "deviation"]
    heads += ["combine us", "flat predicted", "deviation", "by_domain predicted", "deviation", "where"]
    return Table("Others' figures beside predictions for fp8 rows out and bfloat16 back", heads, cells, range(2))
