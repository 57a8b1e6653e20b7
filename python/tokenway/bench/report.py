"""A benchmark's JSON as markdown.

python -m tokenway.bench.report FILE.json ...           prints the tables
python -m tokenway.bench.report --update PAGE.md DIR    puts those of DIR into a page, each between
                                                        <!-- table: FILE.json --> and <!-- end of table -->;
                                                        of several files, one table of all their rows
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenway.bench import auxiliary, collectives, nvlink_table, peers, placement, portable_table, table
from tokenway.bench.table import markdown_row
from tokenway.tables import mebibytes


def markdown(run: dict[str, Any]) -> str:
    """The table of a run with a line above that says where it comes from."""
    if "peers" in run:
        return peers.markdown(run)
    settings, versions = run["settings"], run["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"{_where(run)}; {software}; commit {run['commit'] or 'unknown'}; {run['date']}.", ""]
    if "overhead" in run:
        return "\n".join([*lines, *_overhead(run["overhead"])])
    if "auxiliary" in run:
        return "\n".join([*lines, *_auxiliary(run["auxiliary"])])
    if "placement" in run:
        return "\n".join([*lines, *_placement(run)]).rstrip()
    what = f"{settings['ranks']} ranks, {settings['dtype']}, {settings['layout']}"
    if "collectives" in run:
        what = collectives.title(run)
    elif table.on_gpus(run):
        what = nvlink_table.what(run)
    if not settings["verify_only"]:
        count = f"{settings['iterations']} iterations in {settings['rounds']} rounds"
        if table.on_torch(run):
            count = portable_table.iterations(run)
        what += f"; medians of {count}, all subjects in turns"
    heads, cells = table.columns(run)
    align = ["---"] * 2 + ["---:"] * (len(heads) - 2)
    lines += [
        f"{what}.",
        "",
        markdown_row(heads),
        markdown_row(align),
        *(markdown_row(row) for row in cells),
    ]
    lines += ["", *(f"Not measured: {reason}." for reason in settings["skipped"])]
    if table.on_gpus(run) and "collectives" not in run:
        lines += ["", "```text", *nvlink_table.notes(run), "```"]
    if table.on_torch(run):
        lines += ["", *(f"* {note}" for note in portable_table.notes(run))]
    return "\n".join(lines).rstrip()


def together(runs: Sequence[dict[str, Any]]) -> str:
    """One table of runs on GPUs that differ in how many SMs or ranks there were, and perhaps in the GPUs."""
    apart = {
        "SMs": [str(run["settings"]["nvlink"]["sm_limit"] or "all") for run in runs],
        "ranks": [str(run["settings"]["ranks"]) for run in runs],
        "GPUs": [run["gpu"]["gpu"] for run in runs],
    }
    apart = {name: values for name, values in apart.items() if len(set(values)) > 1}
    tables = [table.columns(run) for run in runs]
    heads = tables[0][0]
    if any(other != heads for other, _ in tables):
        raise ValueError(f"tables of different columns: {' | '.join(heads)}, and others")
    rows = [
        [*(values[i] for values in apart.values()), *cells] for i, (_, lines) in enumerate(tables) for cells in lines
    ]
    dates = sorted(run["date"] for run in runs)
    commits = ", ".join(dict.fromkeys(run["commit"] or "unknown" for run in runs))
    places = "; ".join(dict.fromkeys(_where(run) for run in runs))
    settings = runs[0]["settings"]
    align = ["---:"] * len(apart) + ["---"] * 2 + ["---:"] * (len(heads) - 2)
    lines = [
        f"{places}; commit {commits}; {dates[0]} to {dates[-1]}.",
        "",
        f"{settings['dtype']}, {settings['layout']}; medians of {settings['iterations']} iterations in "
        f"{settings['rounds']} rounds.",
        "",
        markdown_row([*apart, *heads]),
        markdown_row(align),
        *(markdown_row(row) for row in rows),
    ]
    return "\n".join(lines)


def _where(run: dict[str, Any]) -> str:
    """The machine in a line."""
    if table.on_gpus(run):
        return nvlink_table.where(run)
    machine = run["machine"]
    cache = mebibytes(machine["last_level_cache_bytes"])
    gib = machine["memory_bytes"] / (1 << 30)
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores"
        + (" of a virtual machine" if machine["virtual"] else "")
        + f", {cache} MiB last-level cache, {gib:.0f} GiB memory, kernel {machine['kernel']}"
    )


def _overhead(measured: dict[str, Any]) -> list[str]:
    """The table of `--overhead`."""
    rows = [markdown_row([name, f"{path['us']:.2f}", _added(name, path)]) for name, path in measured["paths"].items()]
    return [
        f"1 rank, 1 token of {measured['profile']}: us per dispatch and combine.",
        "",
        markdown_row(["path", "us", "added to C"]),
        markdown_row(["---", "---:", "---:"]),
        *rows,
    ]


def _auxiliary(measured: dict[str, Any]) -> list[str]:
    """The table of `--aux`."""
    heads, cells = auxiliary.columns(measured)
    lines = [heads, ["---:"] * len(heads), *cells]
    return [f"{auxiliary.what(measured)}.", "", *(markdown_row(line) for line in lines)]


def _placement(run: dict[str, Any]) -> list[str]:
    """The tables of plans."""
    lines: list[str] = []
    for title, heads, cells in placement.tables(run):
        align = ["---"] + ["---:"] * (len(heads) - 1)
        lines += [
            f"{title}.",
            "",
            markdown_row(heads),
            markdown_row(align),
            *(markdown_row(row) for row in cells),
            "",
        ]
    return lines


def _added(name: str, path: dict[str, Any]) -> str:
    return "" if name == "C" or path["added_us"] is None else f"{path['added_us']:.2f}"


BLOCK = re.compile(r"(<!-- table: (\S+(?: \S+)*) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read(*paths: Path) -> str:
    """The markdown of one file, or of several together."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return markdown(runs[0]) if len(runs) == 1 else together(runs)


def update(page: str, folder: Path) -> str:
    """A page with its tables made anew from the files of a folder."""
    return BLOCK.sub(lambda m: f"{m[1]}{read(*(folder / name for name in m[2].split()))}\n{m[3]}", page)


def main(argv: Sequence[str]) -> int:
    """Prints the tables of files, or updates a page."""
    if not argv or (argv[0] == "--update" and len(argv) != 3):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        if argv[0] == "--update":
            page = Path(argv[1])
            page.write_text(update(page.read_text("utf-8"), Path(argv[2])), "utf-8")
        else:
            print("\n\n".join(read(Path(name)) for name in argv))
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        print(f"tokenway.bench.report: {' '.join(argv)}: {told}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
