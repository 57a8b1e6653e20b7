"""The benchmark between hosts: it verifies, it notices, and what it writes can be read."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokenway.bench import baselines, hosts, hosts_floor, namespaces, report, runner
from tokenway.bench.case import Case
from tokenway.bench.hosts_options import Hosts
from tokenway.bench.profiles import Profile
from tokenway.bench.settings import Settings
from tokenway.bench.verify import Mismatch, check_output
from tokenway.cli import main

TINY = Profile("tiny", hidden=160, experts=8, top_k=3, inner=8, gating="softmax_topk")
OVER_GLOO = Settings(ranks=4, tokens=(1, 6), iterations=4, rounds=2, warmup=1, hosts=Hosts(("torch",)))


@pytest.mark.parametrize("tokens", [0, 5])
def test_rows_between_hosts(tokens) -> None:
    """Counted as a reader would: by token, rank and host."""
    case = Case(TINY, "uniform", tokens, 5, "bfloat16", "rank_major", "none")
    of = [0, 0, 1, 2, 2]
    to_ranks = to_hosts = 0
    for source in range(5):
        for row in case.exchange.routing[source].goes:
            there = {rank for rank in range(5) if row[rank] and of[rank] != of[source]}
            to_ranks += len(there)
            to_hosts += len({of[rank] for rank in there})
    assert hosts.rows_between(case, of) == {"to_ranks": to_ranks, "to_hosts": to_hosts}
    assert tokens == 0 or 0 < to_hosts < to_ranks


def test_which_rank_is_where() -> None:
    assert hosts.hosts_of(["b", "b", "a", "b", "c"], None) == [0, 0, 1, 0, 2]
    assert hosts.hosts_of(["b"] * 5, 2) == [0, 0, 1, 1, 2]
    assert [hosts.alike(of) for of in ([0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 1])] == [2, 3, 2]
    assert [hosts.alike(of) for of in ([0, 0], [0, 1], [0, 1, 0, 1], [0, 0, 1, 1, 1])] == [0] * 4


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("of", [[0, 0, 1, 1], [0, 0, 1, 2, 2], [0, 1, 1, 0, 1]])
def test_bytes_of_the_floor(tokens, of) -> None:
    """Counted as a reader would: a row once to each host, by its rail peer; a partial of each rank back, by its own."""
    case = Case(TINY, "uniform", tokens, len(of), "bfloat16", "rank_major", "none")
    mates = {host: [rank for rank, its in enumerate(of) if its == host] for host in of}
    rail = [mates[host].index(rank) for rank, host in enumerate(of)]
    n = len(of)
    out, flat, folded = (np.zeros((n, n), int) for _ in range(3))
    for source in range(n):
        for row in case.exchange.routing[source].goes:
            there = [rank for rank in range(n) if row[rank] and of[rank] != of[source]]
            for rank in there:
                home = mates[of[source]]
                flat[rank, home[rail[rank] % len(home)]] += 320
            for host in {of[rank] for rank in there}:
                peer = mates[host][rail[source] % len(mates[host])]
                out[source, peer] += 320
                folded[peer, source] += 320
    for folds, back in ((False, flat), (True, folded)):
        found = hosts_floor.traffic(case, of, folds)
        assert np.array_equal(found[0], out) and np.array_equal(found[1], back)
    assert folded.sum() == out.sum() == 320 * hosts.rows_between(case, of)["to_hosts"]
    assert flat.sum() == 320 * hosts.rows_between(case, of)["to_ranks"]


class Wires:
    """Links whose other ends bring what they should, or all but the last byte."""

    rank = 1

    def __init__(self, short: int = 0):
        self.short = short
        self.moved: list[list[int]] = []

    def exchange(self, send, receive) -> None:
        """Notes the lengths, and fills what comes."""
        self.moved.append([len(view) for view in (*send, *receive)])
        assert all(bytes(view) == b"\x02" * len(view) for view in send)
        for rank, view in enumerate(receive):
            view[: len(view) - self.short] = bytes([rank + 1]) * (len(view) - self.short)


def test_the_floor_moves_all_routings_by_turns() -> None:
    cases = [Case(TINY, "uniform", tokens, 4, "bfloat16", "rank_major", "none") for tokens in (5, 2)]
    of = [0, 0, 1, 1]
    wires = Wires()
    floor = hosts_floor.Floor(hosts_floor.FLOOR, wires, cases, of)
    for _ in range(3):
        assert floor.once(None)[0] > 0
        floor.check(1)  # what had its turn
    halves = [half for case in cases for half in hosts_floor.traffic(case, of, False)]
    lengths = [[*half[1], *half[:, 1]] for half in halves]
    assert wires.moved == [*lengths, *lengths[:2]] and lengths[0] != lengths[2]
    assert floor.bytes == halves[0].sum() + halves[1].sum()
    short = hosts_floor.Floor(hosts_floor.FLOOR, Wires(1), cases, of)
    for _ in cases:
        short.once(None)
    with pytest.raises(Mismatch, match="bytes of rank"):
        short.check(1)


def test_links_whose_other_end_is_gone() -> None:
    here, there = socket.socketpair()
    links = baselines.Links(0)
    links.add(1, here)
    there.close()
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        links.exchange([memoryview(b""), memoryview(b"")], [memoryview(bytearray()), memoryview(bytearray(3))])
    links.close()


@pytest.mark.parametrize(("words", "sizes"), [("2x3", (3, 3)), ("1,2,3", (1, 2, 3)), ("4", (4,)), ("1x1", (1,))])
def test_sizes(words, sizes) -> None:
    assert namespaces.sizes_of(words) == sizes


@pytest.mark.parametrize("words", ["", "2x", "x", "0x2", "2x0", "1,,2", "1,-1", "a", "300x1"])
def test_no_sizes(words, capsys) -> None:
    with pytest.raises(ValueError):
        namespaces.sizes_of(words)
    assert namespaces.main([words, "--", "true"]) == 2
    assert "2x2 --" in capsys.readouterr().err


@pytest.mark.processes
def test_over_gloo_alone(torch) -> None:
    """What needs no fabric: ranks that meet, steps that are verified, times."""
    run = runner.on_ranks(OVER_GLOO, hosts.measure_rank)
    assert run is not None and run["hosts"] == [2, 2] and run["why"]["torch"]
    for row, tokens in zip(run["rows"], (1, 6), strict=True):
        times = row["pairs"]["torch"]
        assert row["tokens"] == tokens and np.shape(times["all"]) == (2, 2)
        assert 0 < times["p10"] <= times["median"] <= times["p99"] <= np.max(times["all"])
        assert list(row["floor"]) == ["floor"] and np.shape(row["floor"]["floor"]["all"]) == (2, 2)
        rows = row["rows_between_hosts"]
        row_bytes = 2 * row["hidden"]
        assert row["floor"]["floor"]["bytes"] == row_bytes * (rows["to_hosts"] + rows["to_ranks"]) > 0


def spoiled(settings: Settings) -> Any:
    """A rank that expects something else of its third routing."""
    honest = hosts.verify.expected_output

    def expected(case: Case, rank: int) -> np.ndarray:
        want = honest(case, rank)
        if rank == 2 and case.seed == 2:
            want[0, 0] += 1
        return want

    hosts.verify.expected_output = expected
    return hosts.measure_rank(settings)


@pytest.mark.processes
def test_a_wrong_sum_is_found(torch, capfd) -> None:
    assert runner.on_ranks(replace(OVER_GLOO, tokens=(3,)), spoiled) is None
    assert "rank 2: deepseek-v3, uniform, 3 tokens: combined tokens on rank 2 differ" in capfd.readouterr().err


def test_a_step_that_is_not_right_any_more() -> None:
    case = Case(TINY, "uniform", 1, 1, "bfloat16", "rank_major", "none")
    want = np.ones((1, 160), np.float32)
    step = hosts.Step(case, (want, None), ({}, want, want.copy()), want)
    step.check(0)
    step.made[2][0, 7] = 2
    with pytest.raises(Mismatch):
        step.check(0)
    assert check_output(case, 0, want, want) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend", "torch", "--beside", "none"], "--beside"),
        (["--backend", "cpu", "--ranks-per-host", "2"], "--ranks-per-host"),
        (["--backend", "fabric", "--backward"], "--backward: not with --backend fabric"),
        (["--backend", "fabric", "--layout", "flat"], "--layout: rank_major"),
        (["--backend", "fabric", "--ranks-per-host", "0"], "--ranks-per-host"),
    ],
)
def test_what_does_not_go_together(words, told, torch, capsys) -> None:
    try:
        code = main(["bench", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert told in capsys.readouterr().err


def made_run() -> dict[str, Any]:
    """What a run of two hosts writes."""
    pair = {"median": 250.0, "p10": 200.0, "p90": 300.0, "p99": 400.5, "rounds": [250.0], "all": [[250.0]]}
    slow = pair | {"median": 1000.0, "p99": 2500.0}
    row = {
        "profile": "tiny",
        "top_k": 3,
        "tokens": 8,
        "rows_between_hosts": {"to_ranks": 1234, "to_hosts": 600},
        "pairs": {"fabric": pair, "torch": slow, "fabric by domain": pair | {"median": 125.0}},
        "floor": {"floor": pair | {"median": 100.0}, "floor by domain": pair | {"median": 50.0}},
    }
    settings = {
        "ranks": 4,
        "dtype": "bfloat16",
        "layout": "rank_major",
        "weighting": "none",
        "verify_only": False,
        "iterations": 200,
        "rounds": 10,
        "hosts": {"backends": ["fabric", "torch"], "ranks_per_host": None},
    }
    return {"backend": "fabric", "settings": settings, "hosts": [2, 2], "why": {"fabric": "so"}, "rows": [row]}


def test_the_table() -> None:
    run = made_run()
    kind = report.kind_of(run)
    (table,) = kind.tables(run)
    assert table.what.startswith("4 ranks on hosts of 2 and 2, bfloat16, rank_major") and "200 iterations" in table.what
    assert dict(zip(table.heads, table.cells[0], strict=True)) == {
        "profile": "tiny",
        "top-k": "3",
        "tokens": "8",
        "rows to ranks of other hosts": "1,234",
        "to other hosts": "600",
        "fabric us": "250",
        "fabric p99": "400",
        "torch us": "1,000",
        "torch p99": "2,500",
        "fabric by domain us": "125",
        "fabric by domain p99": "400",
        "torch / fabric": "4.00x",
        "torch / fabric by domain": "8.00x",
        "floor us": "100 (2.50x)",
        "floor by domain us": "50.0 (2.50x)",
    }
    del run["rows"][0]["pairs"]["fabric"]
    assert kind.tables(run)[0].cells[0][-2:] == ["100", "50.0 (2.50x)"]
    assert "new routing" in kind.notes(run)[0] and "plain sockets" in kind.notes(run)[1]
    run["settings"]["verify_only"], run["rows"][0]["pairs"], run["rows"][0]["floor"] = True, {}, {}
    assert kind.tables(run)[0].heads[-1] == "to other hosts"
    assert not kind.notes(run)


def test_many_hosts_in_a_line() -> None:
    run = made_run() | {"hosts": [2] * 8 + [1]}
    assert "on hosts of 8 times 2 and 1 times 1," in report.kind_of(run).tables(run)[0].what


@pytest.mark.processes
def test_results(tmp_path, torch) -> None:
    path = tmp_path / "hosts.json"
    words = ["--backend", "fabric", "--ranks", "4", "--tokens", "1", "5", "--quick", "--json", str(path)]
    assert main(["bench", *words]) == 0
    run = json.loads(path.read_text())
    assert run["backend"] == "fabric" and run["hosts"] == [2, 2] and run["settings"]["hosts"]["backends"][1] == "torch"
    assert [set(row["pairs"]) for row in run["rows"]] == [{"fabric", "torch", "fabric by domain"}] * 2
    assert [set(row["floor"]) for row in run["rows"]] == [{"floor", "floor by domain"}] * 2
    assert "torch / fabric" in report.markdown(run)
