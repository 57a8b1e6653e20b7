"""`tokenway bench --returns`: ways back beside each other, its whole course with PyTorch's CUDA calls on the CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pretended_gpus import run_on_pretended_gpus

from tokenway import cli
from tokenway.bench import report, verify
from tokenway.bench.nvlink_options import Nvlink
from tokenway.bench.settings import Settings

GIVEN = {"profiles": ("gpt-oss-120b",), "tokens": (1, 5), "iterations": 2, "rounds": 1, "returns": True}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_ways_back(ranks, torch, monkeypatch, capsys) -> None:
    """Three ranks are no sets of two."""
    run = run_on_pretended_gpus(monkeypatch, torch, Settings(ranks=ranks, nvlink=Nvlink(), **GIVEN))
    for row in run["returns"]:
        assert set(row["ways"]) == {"sums", "fp8", "per expert"} | ({"shares"} if ranks == 4 else set())
        for phases in row["ways"].values():
            assert all(phases[phase]["median"] > 0 for phase in ("pair", "dispatch", "combine"))
        size = row["link_bytes"]
        assert size["fp8"] < size["sums"] <= size["per expert"]
        if "shares" in size and row["tokens"] > 1:
            assert size["shares"] < size["sums"]
    report.show(run)
    shown = capsys.readouterr().out
    assert ("shares pair us" in shown) == (ranks == 4) and "fp8 back pair us" in shown and "x)" in shown
    assert report.markdown(json.loads(json.dumps(run))).count("\n| ") == 4
    only = run_on_pretended_gpus(
        monkeypatch, torch, Settings(ranks=ranks, nvlink=Nvlink(), **GIVEN | {"verify_only": True})
    )
    assert "exchanges verified" in report.markdown(json.loads(json.dumps(only)))


@pytest.mark.parametrize("way", ["Sums", "Fp8", "PerExpert", "Shares"])
def test_wrong_results_are_told(way, torch, monkeypatch) -> None:
    """Each way's result is compared."""
    from tokenway.bench import returns

    kind = getattr(returns, way)
    terms = kind._terms

    def others(self):
        for at, term in terms(self):
            yield at, term * np.float32(1 if type(self) is not kind else 1.02)

    monkeypatch.setattr(kind, "_terms", others)
    settings = Settings(ranks=4, nvlink=Nvlink(), **GIVEN | {"tokens": (5,), "verify_only": True})
    with pytest.raises(verify.Mismatch, match="combined tokens on rank 0 differ from the oracle"):
        run_on_pretended_gpus(monkeypatch, torch, settings)


@pytest.mark.parametrize("other", ["--layer", "--aux", "--mode auto", "--plot x.png", "--backward", "--layout flat"])
def test_a_run_of_its_own(other, capsys) -> None:
    """What does not go with it is named."""
    assert cli.main(["bench", "--returns", "--backend", "nvlink", "--ranks", "2", *other.split()]) == 2
    told = capsys.readouterr().err
    assert "--returns" in told or other.split()[0] in told
    assert cli.main(["bench", "--returns"]) == 2 and "--backend nvlink" in capsys.readouterr().err
