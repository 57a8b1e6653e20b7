#!/usr/bin/env python3
"""Times what GPUs do for rows to other hosts where the network has no limit: at which rate they could feed a NIC.

    NCCL_RMA_PLUGIN=.../tokenway_gin_plugin.so python tests/gin/rates.py [--json FILE] [--tokens T ...] [--ranks N]

For a machine with as many GPUs as ranks (2). Each rank is a host of its own, and the plugin counts puts of more than 4
KiB without moving them, so a dispatch and a combine are their kernels, NCCL's queue and thread, and the plugin's
sockets for words and notes. Rows do not come, so results are wrong and nothing is compared; a step that ends in an
error ends the run. Words and notes go through memory of the host, which a NIC would not do: what a step of one token
takes is mostly that, and is in every other step too.

Dispatch, combine and both, in CUDA graphs and eager, in both modes, with sm_limit 0 (as the library chooses) and 8:
GB/s are the bytes that go from the busiest rank to other hosts by the time of a step. What tokenway bench measures,
and how, is in its files and in what --json writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenway.bench import command, options, runner
from tokenway.bench.runner import Results
from tokenway.bench.settings import Settings
from tokenway.tables import show_columns
from tokenway.usage import UsageError

MODES = ("low_latency", "high_throughput")
SM_LIMITS = (0, 8)
STEPS = ("dispatch", "combine")
NIC = 50.0  # GB/s of a GPU's NIC, which a step keeps up with or does not
LIMIT = 570.0  # seconds of a run
PLUGIN = "NCCL_RMA_PLUGIN"
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "NCCL_LSA_TEAM_SIZE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}


def measure_rank(settings: Settings) -> Results:
    """A run of tokenway bench as one of the ranks, whose results are not compared."""
    from tokenway.bench import nvlink
    from tokenway.bench.gpu_case import DeviceCase

    DeviceCase.check_again = lambda self, before: self._problem(lambda: None)  # type: ignore[method-assign]
    return nvlink.measure_rank(settings)


def settings_of(words: Sequence[str]) -> Settings:
    """Those of tokenway bench."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.from_arguments(parser.parse_args(list(words)))


def rows_of(run: dict[str, Any], mode: str, sm_limit: int) -> list[dict[str, Any]]:
    """A row for each number of tokens and step: us and GB/s in a graph and eager."""
    made = []
    for row in run["rows"]:
        sent = {step: row["floor"][step]["remote_bytes"] for step in STEPS}
        times = {step: (row[f"{step}_us"], row["host"][step]["eager_us"]) for step in STEPS}
        times["pair"], sent["pair"] = (row["pair_us"], row["host"]["direct"]["eager_us"]), sum(sent.values())
        for step, (graph, eager) in times.items():
            us = {"graph": graph["median"], "eager": eager["median"]}
            rates = {f"{way}_gb_s": round(sent[step] / spent / 1e3, 2) for way, spent in us.items()}
            found = {"mode": mode, "tokens": row["tokens"], "sm_limit": sm_limit, "step": step, "bytes": sent[step]}
            found |= {f"{way}_us": spent for way, spent in us.items()} | rates
            made.append(found | {"keeps_up": rates["graph_gb_s"] >= NIC})
    return made


def measure(
    words: Sequence[str], rank: Callable[[Settings], Results] = measure_rank, ways: Sequence[tuple[str, int]] = ()
) -> dict[str, Any] | None:
    """What is written; None: a run has failed. words: further options of tokenway bench. ways: (mode, sm_limit), or
    all."""
    os.environ["TOKENWAY_GIN_COUNT_ONLY"] = "1"
    document: dict[str, Any] = {}
    for mode, sm_limit in ways or [(mode, sm_limit) for mode in MODES for sm_limit in SM_LIMITS]:
        print(f"{mode}, sm_limit {sm_limit}", file=sys.stderr, flush=True)
        told = ["--backend", "gin", "--ranks-per-host", "1", "--mode", mode, "--baselines", "none", *words]
        settings = settings_of(told + ["--sm-limit", str(sm_limit)] * (sm_limit > 0))
        results = runner.on_ranks(settings, rank, LIMIT)
        if results is None:
            return None
        run = command.record(settings, results)
        if not document:
            apart = {"rows", "settings", "floor", "window_of_a_large_group"}
            document = {name: run[name] for name in run if name not in apart}
            document |= {"counted_alone": True, "nic_gb_s": NIC, "rates": []}
        document["rates"] += rows_of(run, mode, sm_limit)
    return document


def show(document: dict[str, Any]) -> None:
    """Prints it."""
    heads = ["mode", "tokens", "sm_limit", "step", "bytes", "graph us", "GB/s", "eager us", "GB/s", f">= {NIC:.0f}"]
    names = ("mode", "tokens", "sm_limit", "step", "bytes", "graph_us", "graph_gb_s", "eager_us", "eager_gb_s")
    cells = [[*(str(row[name]) for name in names), "yes" if row["keeps_up"] else "NO"] for row in document["rates"]]
    show_columns("rows to other hosts, counted and not moved: results are wrong", heads, cells, range(1))


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--tokens", nargs="+", default=["1", "128", "1024", "4096"])
    parser.add_argument("--iterations", default="15")
    given = parser.parse_args(argv)
    if not Path(os.environ.get(PLUGIN, "")).is_file():
        print(f"rates.py: {PLUGIN} must name tests/gin's plugin", file=sys.stderr)
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        words = ["--ranks", given.ranks, "--iterations", given.iterations, "--tokens", *given.tokens]
        document = measure(words)
    except UsageError as error:
        print(f"rates.py: {error}", file=sys.stderr)
        return 2
    if document is None:
        return 1
    show(document)
    if given.json:
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
