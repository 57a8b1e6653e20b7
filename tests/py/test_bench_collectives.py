"""`tokenway bench --collective`: it verifies, it notices, and what it writes can be read; on GPUs as far as none is
needed."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext

import numpy as np
import pytest
from test_bench import bench
from test_bench_nvlink import PretendReplay, PretendStream

import tokenway as tw
from tokenway.bench import collective_baselines, collectives, floor, report
from tokenway.bench.collective_row import Row
from tokenway.bench.control import Control
from tokenway.bench.nvlink_options import Nvlink
from tokenway.bench.settings import Settings
from tokenway.bench.tables import collectives as shown
from tokenway.bench.verify import Mismatch
from tokenway.cli import main


def test_rows() -> None:
    uneven = Row("all_gatherv", 10, False, 4, 8, "bfloat16")
    assert uneven.sizes == [10, 7, 5, 2] and uneven.row_bytes == 16
    assert uneven.remote_rows == max(10 * 3, 24 - 2)
    assert Row("reduce_scatterv", 1, False, 2, 8, "float32").sizes == [1, 0]
    assert Row("reduce_scatterv", 3, True, 2, 8, "float32").sizes == [3, 3]
    first, second = (uneven.inputs(rank) for rank in (0, 1))
    rows = {row.tobytes() for row in (*first, *second)}
    assert len(rows) == 17, "every row of every rank is another"


@pytest.mark.long
@pytest.mark.processes
def test_results(tmp_path, torch) -> None:
    """Uneven and equal sizes beside gloo, verified; the JSON makes the table that was printed."""
    path = tmp_path / "run.json"
    told = bench("--collective", "all", "--ranks", "2", "--tokens", "1", "6", "--quick", "--json", str(path))
    run = json.loads(path.read_text())
    assert [row["sizes"] for row in run["collectives"][:4]] == [[1, 0], [6, 3], [1, 1], [6, 6]]
    assert {row["collective"] for row in run["collectives"]} == {"all_gatherv", "reduce_scatterv"}
    for row in run["collectives"]:
        assert row["us"]["median"] > 0 and "gloo-padded" in row["baselines"]
        assert ("gloo-allreduce" in row["baselines"]) == (row["collective"] == "reduce_scatterv")
    heads, cells = shown.columns(run["collectives"])
    lines = [line.split() for line in told.splitlines()]
    assert all(" ".join(line).split() in lines for line in (heads, *cells))
    assert report.markdown(run).count("\n| reduce_scatterv |") == 4


@pytest.mark.processes
def test_verify_only() -> None:
    told = bench(
        "--collective", "reduce_scatterv", "--ranks", "3", "--tokens", "5", "--verify-only", "--dtype", "float32"
    )
    assert told.count("yes") == 2


@pytest.mark.parametrize("option", ["--backward", "--overhead", "--dtype=fp8"])
def test_options_refused(option, capsys) -> None:
    assert main(["bench", "--collective", "all", option]) == 2
    assert "not with --collective" in capsys.readouterr().err


def test_a_name_refused(capsys) -> None:
    assert main(["bench", "--collective", "all_to_all"]) == 2
    assert "all_gatherv" in capsys.readouterr().err


def test_wrong_results_are_noticed() -> None:
    row = Row("reduce_scatterv", 3, True, 2, 8, "bfloat16")
    want = row.wanted(0)
    assert collectives._problem(row, 0, "x", want.copy(), want) is None
    wrong = want.copy()
    wrong.view(np.uint16)[1, 2] ^= 1
    assert "other bits" in str(collectives._problem(row, 0, "x", wrong, want))
    assert collectives._problem(row, 0, "x", wrong, want, exact=False) is None
    assert "other sums" in str(collectives._problem(row, 0, "x", want * 0 + 9, want, exact=False))


@pytest.mark.parametrize("collective", ["all_gatherv", "reduce_scatterv"])
def test_on_pretended_gpus(collective, torch, monkeypatch) -> None:
    """All but what only a device does: graphs, the floor's ratios, the table."""
    monkeypatch.setattr(collectives, "Replay", PretendReplay)
    for name, stand_in in {"Stream": PretendStream, "stream": lambda stream: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(collectives.OnGpus, "tensor", staticmethod(collectives.tensors.to_torch))
    monkeypatch.setattr(
        collectives.OnGpus, "array", staticmethod(lambda x: x.view(torch.uint8).numpy().view("bfloat16"))
    )
    settings = Settings(ranks=1, tokens=(4,), iterations=3, rounds=1, collective=collective, nvlink=Nvlink())
    entry = {"tokens": 4, "row_bytes": 14336, "kind": "lines", "median_us": 2.0}
    document = {"sms": 132, "exchanges": [entry], "ceilings": []}
    (comm,), (other,) = tw.local_comms(1), tw.local_comms(1)
    with ExitStack() as stack:
        for one in (comm, other):
            stack.callback(one.close)
        control = Control(other)
        stack.callback(control.close)
        made = collectives.OnGpus(settings, control, floor.Floor(document))
        row = collectives.rows_of(settings)[0]
        with tw.Group(comm, hidden=row.hidden, max_tokens=4) as group:
            measured = collectives._row(row, made, group)
            assert measured["us"]["median"] > 0
            with pytest.raises(Mismatch, match="other bits"):
                monkeypatch.setattr(Row, "wanted", lambda self, rank: self.inputs(rank)[::-1])
                collectives._row(row, made, group)
        told = made.floor.compare(4.0, 4, 14336)
        assert told["times_floor"] == 2.0
    heads, cells = shown.columns([measured | told])
    assert "times floor" in heads and len(heads) == len(cells[0])


def test_every_baseline_has_a_name() -> None:
    assert tuple(collective_baselines.GLOO) == collective_baselines.NAMES["gloo"]
    assert tuple(collective_baselines.NCCL) == collective_baselines.NAMES["nccl"]
