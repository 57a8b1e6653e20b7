"""A run as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenway.tables import mebibytes, show_columns

Row = dict[str, Any]


def microseconds(value: float) -> str:
    """Three digits or so."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def columns(run: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells) of the table that shows a run."""
    if "collectives" in run:
        from tokenway.bench import collectives

        return collectives.columns(run)
    if on_gpus(run):
        from tokenway.bench import nvlink_table

        return nvlink_table.columns(run)
    if on_torch(run):
        from tokenway.bench import portable_table

        return portable_table.columns(run)
    rows: list[Row] = run["rows"]
    timed = any("pair_us" in row for row in rows)
    names = list(rows[0].get("baselines", {})) if rows else []
    heads = ["profile", "routing", "tokens"]
    if timed:
        counted = any("counts_us" in row for row in rows)  # of high throughput
        heads += ["route us", *["counts us"] * counted, "dispatch us", "combine us", "pair us", "p10", "p90"]
        heads += ["backward us", "both us"] * any("both_us" in row for row in rows)
        heads += ["formula GB/s", "moved GB/s"]
        heads += [_head(name) for name in names]
    else:
        heads += ["exchanges verified", "rows moved"]
    heads += ["window MiB", "2*E*B MiB"]
    return heads, [_cells(row, names, timed) for row in rows]


def on_gpus(run: dict[str, Any]) -> bool:
    """Whether it is a run of `--backend nvlink`."""
    return run.get("backend") == "nvlink"


def on_torch(run: dict[str, Any]) -> bool:
    """Whether it is a run of `--backend torch`."""
    return run.get("backend") == "torch"


def _head(name: str) -> str:
    return "of memcpy" if name == "memcpy" else f"{name} us"


def _cells(row: Row, names: Sequence[str], timed: bool) -> list[str]:
    cells = [row["profile"], row["routing"], str(row["tokens"])]
    if timed:
        phases = ("route", *["counts"] * ("counts_us" in row), "dispatch", "combine", "pair")
        medians = [row[f"{p}_us"]["median"] for p in phases]
        cells += [microseconds(m) for m in medians]
        cells += [microseconds(row["pair_us"][p]) for p in ("p10", "p90")]
        cells += [microseconds(row[f"{p}_us"]["median"]) for p in ("backward", "both") if f"{p}_us" in row]
        cells += [f"{row['formula_gb_s']['pair']:.2f}", f"{row['moved_gb_s']['pair']:.2f}"]
        for name in names:
            base = row["baselines"][name]
            if name == "memcpy":
                cells.append(f"{100 * base['times_ours']:.0f} %")
            else:
                took = microseconds(base["pair_us"]["median"])
                cells.append(f"{took} ({base['times_ours']:.1f}x)")
    else:
        cells += [str(row["verified_exchanges"]), str(row["rows_moved"])]
    return [*cells, mebibytes(row["window_bytes"]), mebibytes(row["expert_buffers_bytes"])]


def short(routing: str) -> str:
    """A routing's name; of a file the last part."""
    return routing.rsplit("/", 1)[-1]


def title(run: dict[str, Any]) -> str:
    """One line that says what was measured and where."""
    if "collectives" in run:
        from tokenway.bench import collectives

        return f"tokenway {run['versions']['tokenway']}: {collectives.title(run)}"
    if on_gpus(run):
        from tokenway.bench import nvlink_table

        return f"tokenway {run['versions']['tokenway']}: {nvlink_table.what(run)}; {nvlink_table.where(run)}"
    s, m = run["settings"], run["machine"]
    what = f"{s['ranks']} ranks, {s['dtype']}, {s['layout']}, weighting {s['weighting']}"
    where = f"{m['cpu']}, {m['usable_cores']} cores, kernel {m['kernel']}"
    return f"tokenway {run['versions']['tokenway']}: {what}; {where}"


def show(run: dict[str, Any]) -> None:
    """Prints a run to stdout."""
    if "overhead" in run:
        from tokenway.bench import overhead

        print(overhead.text(run["overhead"]))
        return
    if "auxiliary" in run:
        from tokenway.bench import auxiliary

        print(auxiliary.text(run["auxiliary"]))
        return
    heads, cells = columns(run)
    show_columns(title(run), heads, cells)
    for reason in run["settings"]["skipped"]:
        print(f"not measured: {reason}")
    if on_gpus(run) and "collectives" not in run:
        from tokenway.bench import nvlink_table

        print("\n".join(nvlink_table.notes(run)))
    if on_torch(run):
        from tokenway.bench import portable_table

        print("\n".join(portable_table.notes(run)))
