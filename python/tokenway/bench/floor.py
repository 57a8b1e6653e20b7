"""The floor of a run: what `tokenway-floor` (bench/floor/) measures on the same GPUs, moments before."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenway import _native
from tokenway.bench import gpu_machine
from tokenway.bench.case import Case

PATH = "TOKENWAY_FLOOR"
LIMIT = 90.0  # seconds; less than the other ranks wait for this one
REPEAT = 20
MOST = 16  # GPUs of the program
_HEADER = 8  # bytes of a row's header; beside it travel K ids and K weights of 4 bytes


def program() -> Path:
    """TOKENWAY_FLOOR, else what the build puts beside the library."""
    override = os.environ.get(PATH)
    return Path(override) if override else _native.library_path().parent / "tokenway-floor"


def wire_row(case: Case) -> int:
    """Bytes of a dispatched row with all that travels beside it."""
    return case.dispatch_row + _HEADER + 8 * case.profile.top_k


def moved_row(case: Case) -> int:
    """Those of them that a dispatch alone moves, which is one handle's again and again: of high throughput the
    payloads, as all that travels beside them does so once."""
    return case.dispatch_row if case.exact else wire_row(case)


def remote_rows(case: Case, hosts: Sequence[int] | None = None) -> tuple[int, int]:
    """(rows that leave the busiest rank in dispatch, in combine). hosts: those alone that go to ranks of other hosts,
    of each rank the number of its host."""
    of = np.arange(case.ranks) if hosts is None else np.asarray(hosts)
    counts = np.stack([routing.counts for routing in case.exchange.routing]) * (of[:, None] != of[None])
    return int(counts.sum(axis=1).max()), int(counts.sum(axis=0).max())


def gpus(ranks: int) -> int:
    """Between how many GPUs so many ranks exchange: the floor is measured between as many."""
    found = gpu_machine.device_count()
    return max(2, min(ranks, found if isinstance(found, int) else 2, MOST))


def padded(row_bytes: int) -> int:
    """Rows of the floor program are whole vectors of 16 bytes."""
    return -(-row_bytes // 16) * 16


def sizes(cases: Iterable[Case]) -> tuple[set[int], set[int]]:
    """(rows, bytes of a row) of the exchanges that these cases make."""
    tokens, row_bytes = set(), set()
    for case in cases:
        tokens.update(remote_rows(case))
        row_bytes.update((wire_row(case), moved_row(case), case.combine_row))
    return tokens, row_bytes


def arguments(rows: Iterable[int], row_bytes: Iterable[int], gpus: int = 2) -> list[str]:
    """Of the program, so that it measures exchanges of so many rows of so many bytes, between so many GPUs at once."""
    of_both = {max(n, 1) for n in rows}, {padded(n) for n in row_bytes}
    listed = [",".join(str(n) for n in sorted(numbers)) for numbers in of_both]
    mesh = ["--gpus", str(gpus)] if gpus > 2 else []
    return ["--tokens", listed[0], "--row-bytes", listed[1], "--repeat", str(REPEAT), *mesh]


def measure(cases: Iterable[Case], gpus: int = 2) -> dict[str, Any]:
    """The program's document for the exchanges of these cases between so many GPUs, or two if there are fewer."""
    return measure_exchanges(*sizes(cases), gpus)


def measure_exchanges(rows: Iterable[int], row_bytes: Iterable[int], gpus: int = 2) -> dict[str, Any]:
    """The program's document, or {"missing": why there is none}. Nothing else may use the GPUs meanwhile."""
    path = program()
    if not path.is_file():
        return {"missing": f"no floor program at {path.name} beside the library (build it, or set {PATH})"}
    try:
        command = [str(path), *arguments(rows, row_bytes, gpus)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode == 0:
            return json.loads(done.stdout)
        why = done.stderr.strip().splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
    except subprocess.TimeoutExpired:
        why = [f"it did not end within {LIMIT:.0f} s"]
    except (OSError, ValueError) as error:
        why = [str(error)]
    return {"missing": f"no floor: {why[0].removeprefix('tokenway-floor: ')}"}


@dataclass(frozen=True)
class Floor:
    """Look-ups in the program's document; None where it has no answer."""

    document: dict[str, Any]

    def exchange(self, rows: int, row_bytes: int) -> tuple[str, float] | None:
        """(which way, us) of the fastest exchange of that many rows in this run, by its median."""
        size = padded(row_bytes)
        found = [
            (entry["median_us"], entry["kind"])
            for entry in self.document.get("exchanges", ())
            if entry["tokens"] == max(rows, 1) and entry["row_bytes"] == size
        ]
        return (min(found)[1], min(found)[0]) if found else None

    def put_gb_s(self) -> float | None:
        """The put ceiling with all SMs while all GPUs of the document send, GB/s per direction."""
        ways = self.document.get("gpus", 2)
        found = [
            entry["median_gb_s"]
            for entry in self.document.get("ceilings", ())
            if entry["kind"] == "put" and entry["ways"] == ways and entry["sms"] == self.document["sms"]
        ]
        return max(found) if found else None

    def compare(self, us: float, rows: int, row_bytes: int) -> dict[str, Any]:
        """A measured time beside the floor: remote bytes, their rate, and the ratios."""
        told: dict[str, Any] = {"remote_rows": rows, "remote_bytes": rows * row_bytes}
        told["remote_gb_s"] = round(rows * row_bytes / us / 1e3, 2)
        exchange, ceiling = self.exchange(rows, row_bytes), self.put_gb_s()
        if exchange is not None and rows:
            told |= {"floor": exchange[0], "floor_us": exchange[1], "times_floor": round(us / exchange[1], 3)}
        if ceiling:
            told["percent_of_put"] = round(100 * told["remote_gb_s"] / ceiling, 1)
        return told
