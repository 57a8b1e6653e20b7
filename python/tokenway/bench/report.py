"""A benchmark's JSON for people: on a terminal, as Markdown, and in a page.

python -m tokenway.bench.report FILE.json ...               prints the tables
python -m tokenway.bench.report --update PAGE.md ... DIR    puts those of DIR into pages, each between
                                                            <!-- table: FILE.json --> and <!-- end of table -->;
                                                            of several files, one table of all their rows

A folder among the pages stands for all pages in it, and in folders of it, that have tables. A page without tables is an
error, as is a folder in which no page has any; then no page is written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenway.bench import peers
from tokenway.bench.tables import (
    auxiliary,
    balancing,
    collectives,
    cpu,
    frameworks,
    hosts,
    layer,
    modes,
    moving,
    nvlink,
    overhead,
    placement,
    planning,
    portable,
    returns,
)
from tokenway.bench.tables.table import Run, Table, medians, where
from tokenway.tables import show_columns


def _nothing(_: Run) -> list[str]:
    return []


@dataclass(frozen=True)
class Kind:
    """How runs of a kind are shown: their tables, and what stands below them."""

    tables: Callable[[Run], list[Table]]
    notes: Callable[[Run], list[str]] = _nothing
    as_they_stand: bool = False  # in Markdown: lines that are aligned, not a list


# By the part of a run that only this kind has, else by its backend.
PARTS = {
    "overhead": Kind(overhead.tables, overhead.notes),
    "auxiliary": Kind(auxiliary.tables),
    "placement": Kind(placement.tables),
    "balancing": Kind(balancing.tables),
    "collectives": Kind(collectives.tables),
    "modes": Kind(modes.tables, modes.notes),
    "returns": Kind(returns.tables),
    "layers": Kind(layer.tables, layer.notes),
    "frameworks": Kind(frameworks.tables, frameworks.notes),
    "moving": Kind(moving.tables, moving.notes),
}
BACKENDS = {
    "cpu": Kind(cpu.tables),
    "nvlink": Kind(nvlink.tables, nvlink.notes, as_they_stand=True),
    "torch": Kind(portable.tables, portable.notes),
    "fabric": Kind(hosts.tables, hosts.notes),
}


def kind_of(run: Run) -> Kind:
    """How a run is shown."""
    parts = [kind for part, kind in PARTS.items() if part in run]
    return parts[0] if parts else BACKENDS[run.get("backend", "cpu")]


def _skipped(run: Run) -> Sequence[str]:
    return run["settings"].get("skipped", ())


def title(run: Run) -> str:
    """Of a picture: a line that says what was measured, and one that says where."""
    return f"tokenway {run['versions']['tokenway']}: {kind_of(run).tables(run)[0].what}\n{where(run)}"


def show(run: Run) -> None:
    """Prints a run."""
    kind = kind_of(run)
    print(f"tokenway {run['versions']['tokenway']}; {where(run)}")
    for table in kind.tables(run):
        print()
        show_columns(table.what, table.heads, table.cells, table.texts)
    notes = [*(f"not measured: {reason}" for reason in _skipped(run)), *kind.notes(run)]
    if notes:
        print("\n".join(["", *notes]))


def markdown(run: Run) -> str:
    """The tables of a run with a line above that says where they come from."""
    if "peers" in run:
        return peers.markdown(run)
    if planning.KINDS & run.keys():
        return planning.markdown(run)
    kind = kind_of(run)
    software = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [f"{where(run)}; {software}; commit {run['commit'] or 'unknown'}; {run['date']}.", ""]
    for table in kind.tables(run):
        lines += [f"{table.what}.", "", *table.markdown(), ""]
    if reasons := _skipped(run):
        lines += [*(f"Not measured: {reason}." for reason in reasons), ""]
    notes = kind.notes(run)
    if notes and kind.as_they_stand:
        lines += ["```text", *notes, "```"]
    else:
        lines += [f"* {note}" for note in notes]
    return "\n".join(lines).rstrip()


def together(runs: Sequence[Run]) -> str:
    """One table of runs on GPUs that differ in how many SMs or ranks there were, and perhaps in the GPUs."""
    apart = {
        "SMs": [str(run["settings"]["nvlink"]["sm_limit"] or "all") for run in runs],
        "ranks": [str(run["settings"]["ranks"]) for run in runs],
        "GPUs": [run["gpu"]["gpu"] for run in runs],
    }
    apart = {name: values for name, values in apart.items() if len(set(values)) > 1}
    found = [nvlink.columns(run) for run in runs]
    heads = found[0][0]
    if any(other != heads for other, _ in found):
        raise ValueError(f"tables of different columns: {' | '.join(heads)}, and others")
    cells = [[*(values[i] for values in apart.values()), *line] for i, (_, lines) in enumerate(found) for line in lines]
    settings = runs[0]["settings"]
    what = medians(f"{settings['dtype']}, {settings['layout']}", settings)
    table = Table(what, [*apart, *heads], cells, texts=range(len(apart), len(apart) + 2))
    dates = sorted(run["date"] for run in runs)
    commits = ", ".join(dict.fromkeys(run["commit"] or "unknown" for run in runs))
    places = "; ".join(dict.fromkeys(where(run) for run in runs))
    lines = [f"{places}; commit {commits}; {dates[0]} to {dates[-1]}.", "", f"{table.what}.", "", *table.markdown()]
    return "\n".join(lines)


BEGIN, END = "<!-- table: ", "<!-- end of table -->"
BLOCK = re.compile(rf"^({BEGIN}(\S+(?: \S+)*) -->\n).*?^({END})$", re.DOTALL | re.MULTILINE)


def read(*paths: Path) -> str:
    """The markdown of one file, or of several together."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return markdown(runs[0]) if len(runs) == 1 else together(runs)


def update(page: str, folder: Path) -> str:
    """A page with its tables made anew from the files of a folder."""
    return BLOCK.sub(lambda m: f"{m[1]}{read(*(folder / name for name in m[2].split()))}\n{m[3]}", page)


def tables_of(page: Path) -> list[str]:
    """The files that each table of a page is made of."""
    text = page.read_text("utf-8")
    begun, ended = (len(re.findall(rf"^{mark}", text, re.MULTILINE)) for mark in (BEGIN, END))
    found = [match[2] for match in BLOCK.finditer(text)]
    if not len(found) == begun == ended:
        raise ValueError(f"{page}: {begun} times {BEGIN}... --> and {ended} times {END}: each table needs both")
    return found


def renewed(page: Path, folder: Path) -> str:
    """The text of a page with its tables made anew; an error names the page."""
    try:
        return update(page.read_text("utf-8"), folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{page}: {type(error).__name__}: {error}") from error


def pages_of(places: Sequence[Path]) -> list[Path]:
    """Pages, and of folders all pages that have tables."""
    pages = []
    for place in places:
        found = [page for page in (sorted(place.rglob("*.md")) if place.is_dir() else [place]) if tables_of(page)]
        if not found:
            kind = "no page in it has a table" if place.is_dir() else "the page has no table"
            raise ValueError(f"{place}: {kind} ({BEGIN}FILE.json --> and {END})")
        pages += found
    return list(dict.fromkeys(pages))


def main(argv: Sequence[str]) -> int:
    """Prints the tables of files, or updates pages."""
    if not argv or (argv[0] == "--update" and len(argv) < 3):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        if argv[0] == "--update":
            *places, folder = map(Path, argv[1:])
            made = {page: renewed(page, folder) for page in pages_of(places)}
            for page, text in made.items():
                page.write_text(text, "utf-8")
        else:
            print("\n\n".join(read(Path(name)) for name in argv))
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        print(f"tokenway.bench.report: {' '.join(argv)}: {told}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
