"""Tokenway beside other libraries: the table and the pictures of README.md.

python -m tokenway.bench.peers bench/results docs/pictures      draws latency-light.svg and latency-dark.svg

Both show the same two files of a folder of results: `nvlink-2-gpus.json`, a run of `tokenway bench`, and
`peers-4-gpus.json`, which holds figures of other libraries too. A file of the second kind has:

    gpu, settings, date, commit   as a run of the bench has them; commit is Tokenway's
    what, method                  what the figures are, and how they were taken
    peers                         rows: name; role ("ours", "peer" or "floor"); layout, how rows arrive; what, how the
                                  library was called; us, a figure or null for each of settings.tokens; repeatable_with,
                                  the command of this repository that measures the row anew, or null

`tokenway.bench.report` makes tables of them, so that a figure stands in the file alone. Drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenway.bench.plot import NONE
from tokenway.bench.tables.table import markdown_row, microseconds

Run = dict[str, Any]
Line = tuple[str, str, list[int], list[float]]  # name, role, tokens, microseconds

TWO, FOUR = "nvlink-2-gpus.json", "peers-4-gpus.json"
BASELINES = {
    "nccl-allgather": "NCCL all-gather + reduce-scatter",
    "nccl-alltoall": "NCCL all-to-all",
    "flashinfer": "FlashInfer one-sided",
    "deepep": "DeepEP",
    "nccl-ep": "NCCL EP",
}
OURS, FLOOR = "Tokenway", "floor of a pair"  # of the first file, as the second names them

# ---- the table -----------------------------------------------------------------------------------------------------


def markdown(run: Run) -> str:
    """The table of a file, with a line above that says where it comes from and notes below."""
    rows: list[dict[str, Any]] = run["peers"]
    tokens = run["settings"]["tokens"]
    layouts = any(row["layout"] for row in rows)
    heads = [run["what"], *["rows arrive"] * layouts, *map(str, tokens)]
    lines = [f"{where(run)}.", "", markdown_row(heads), markdown_row(["---"] * (1 + layouts) + ["---:"] * len(tokens))]
    some = any(row["repeatable_with"] for row in rows)
    for row in rows:
        star = " *" if some and not row["repeatable_with"] else ""
        cells = ["" if value is None else microseconds(value) for value in row["us"]]
        lines.append(markdown_row([row["name"] + star, *[row["layout"]] * layouts, *cells]))
    for name, values in _ratios(rows).items():
        lines.append(markdown_row([name, *[""] * layouts, *(f"{value:.2f}x" for value in values)]))
    commands = dict.fromkeys(row["repeatable_with"] for row in rows if row["repeatable_with"])
    if not some:
        return "\n".join([*lines, "", "No command of this repository repeats these rows yet."])
    lines += ["", "Rows without a star are measured anew by:", ""]
    lines += [f"    {command}" for command in commands]
    lines += ["", "\\* No command of this repository repeats this row yet."]
    return "\n".join(lines)


def where(run: Run) -> str:
    """The machine, the shape and the commit in a line."""
    gpu, shape = run["gpu"], run["settings"]
    return (
        f"{gpu['used']}x {gpu['gpu']}, {gpu['link']}, driver {gpu['driver']}; {shape['dtype']}, hidden "
        f"{shape['hidden']}, {shape['experts']} experts, top-{shape['top_k']}; columns are tokens per rank; Tokenway "
        f"at commit {run['commit']}, {run['date']}"
    )


def _ratios(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of a file with a floor: each row of ours beside the fastest of the others, and the first beside the floor."""
    ours, peers, floors = ([row for row in rows if row["role"] == role] for role in ("ours", "peer", "floor"))
    if not floors:
        return {}
    columns = zip(*(row["us"] for row in peers), strict=True)
    fastest = [min(value for value in column if value is not None) for column in columns]
    found = {f"fastest of the others / {row['name']}": _over(fastest, row["us"]) for row in ours}
    return found | {f"{ours[0]['name']} / floor": _over(ours[0]["us"], floors[0]["us"])}


def _over(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


# ---- the pictures --------------------------------------------------------------------------------------------------

# Colours that readers with any colour vision tell apart, lighter on a dark page.
THEMES = {
    "light": {"text": "#1f2328", "grid": "#8c959f", "ours": "#0550ae", "floor": "#59636e"},
    "dark": {"text": "#e6edf3", "grid": "#7d8590", "ours": "#58a6ff", "floor": "#9198a1"},
}
OTHERS = {
    "light": ["#bc4c00", "#116329", "#8250df", "#9a6700", "#a40e6d", "#57606a", "#0a7ea4"],
    "dark": ["#f0883e", "#56d364", "#bc8cff", "#e3b341", "#ff7bc9", "#b1bac4", "#39c5cf"],
}
MARKS = "sDv^P<X"


def lines_of(run: Run) -> list[Line]:
    """What a picture shows of a file: its pairs, those of its baselines, and the floor."""
    tokens = run["settings"]["tokens"]
    if "peers" in run:
        return [_known(row["name"], row["role"], tokens, row["us"]) for row in run["peers"]]
    rows = run["rows"]
    tokens = [row["tokens"] for row in rows]
    found = [_known(OURS, "ours", tokens, [row["pair_us"]["median"] for row in rows])]
    for key, name in BASELINES.items():
        values = [row["baselines"].get(key, NONE)["pair_us"]["median"] for row in rows]
        if any(value is not None for value in values):
            found.append(_known(name, "peer", tokens, values))
    return [*found, _known(FLOOR, "floor", tokens, [row["floor"]["pair"]["floor_us"] for row in rows])]


def _known(name: str, role: str, tokens: list[int], values: Sequence[float | None]) -> Line:
    known = [(t, value) for t, value in zip(tokens, values, strict=True) if value is not None]
    return name, role, [t for t, _ in known], [value for _, value in known]


def digest(folder: Path) -> str:
    """Of all that the pictures show: it stands in them, so that a test sees whether they are up to date."""
    shown = [lines_of(json.loads((folder / name).read_text(encoding="utf-8"))) for name in (TWO, FOUR)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def draw(folder: Path, to: Path) -> list[Path]:
    """Writes a picture for each theme."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads((folder / name).read_text(encoding="utf-8")) for name in (TWO, FOUR)]
    made = []
    for theme, colours in THEMES.items():
        style = {name: colours["text"] for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
        style |= {"axes.edgecolor": colours["grid"], "font.size": 10, "svg.hashsalt": "tokenway"}
        with matplotlib.rc_context(style):
            figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), sharex=True, sharey=True, layout="constrained")
            styles = _styles(runs, theme)
            drawn = {}
            for panel, run in zip(axes, runs, strict=True):
                drawn |= _panel(panel, run, styles, colours["grid"])
            axes[0].set_ylabel("us per routing + dispatch + combine")
            shown = {name: drawn[name] for name in styles}
            figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
            path = to / f"latency-{theme}.svg"
            about = {"Date": None, "Creator": None, "Title": "Latency against tokens", "Description": digest(folder)}
            figure.savefig(path, transparent=True, metadata=about)
            plt.close(figure)
        made.append(path)
    return made


def _panel(axes: Any, run: Run, styles: dict[str, Any], grid: str) -> dict[str, Any]:
    """A file's lines, by name."""
    drawn = {}
    for name, _, tokens, values in lines_of(run):
        (drawn[name],) = axes.plot(tokens, values, **styles[name])
    gpu = run["gpu"]
    axes.set_title(f"{gpu['used']}x {gpu['gpu']}, {gpu['link']}", fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks := [1, 8, 32, 128, 512, 1024, 4096], [str(count) for count in ticks])
    axes.set_yticks(heights := [5, 10, 20, 50, 100, 200, 500, 1000], [str(us) for us in heights])
    axes.minorticks_off()
    axes.set_xlabel("tokens per rank")
    axes.grid(True, alpha=0.3, color=grid)
    return drawn


def _styles(runs: Sequence[Run], theme: str) -> dict[str, Any]:
    """How each line looks, by its name, so that it looks alike in both panels; in the order of the legend."""
    roles = {name: role for run in reversed(runs) for name, role, *_ in lines_of(run)}
    colours = THEMES[theme]
    styles: dict[str, Any] = {}
    others = iter(zip(OTHERS[theme], MARKS, strict=True))
    for name, role in roles.items():
        if role == "floor":
            styles[name] = {"color": colours["floor"], "linestyle": (0, (2, 2)), "linewidth": 1.6}
        elif role == "ours":
            own = {"linewidth": 2.8} if name == OURS else {"linewidth": 1.6, "linestyle": "--"}
            styles[name] = {"color": colours["ours"], "marker": "o", "markersize": 4.5} | own
        else:
            colour, mark = next(others)
            styles[name] = {"color": colour, "marker": mark, "markersize": 4, "linewidth": 1.3}
    return styles


def main(argv: Sequence[str]) -> int:
    """Draws the pictures of a folder of results into another folder."""
    if len(argv) != 2 or not all(Path(folder).is_dir() for folder in argv):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    for path in draw(Path(argv[0]), Path(argv[1])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
