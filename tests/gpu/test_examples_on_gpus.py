"""Examples on GPUs, each rank a process with one: a model trained, and a timeline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--layers", "3", "--hidden", "64", "--heads", "4", "--inner", "32", "--length", "32", "--batch", "6"]


def test_repeated_runs_have_the_same_bits(two_devices, tmp_path) -> None:
    """50 steps, of which another run on as many GPUs has every loss bit for bit, and one GPU those losses but for
    rounding; shares of the batch are even, those of the experts are not."""
    rng = np.random.default_rng(3)
    words = ["".join(rng.choice(list("abc"), 5)) for _ in range(4)]
    (tmp_path / "text.txt").write_text(" ".join(words) * 1000)
    options = ["--text", str(tmp_path / "text.txt"), *SMALL, "--experts", "5", "--check-ranks", "--device", "cuda"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLES / "04_train_moe_lm.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"(2|4) ranks twice, the same bits: yes", done.stdout), done.stdout
    assert re.search(r"Losses of 1(,| and) 2 (and 4 )?ranks within 0.0001: yes", done.stdout), done.stdout


def test_timeline(two_devices, tmp_path) -> None:
    """examples/08_timeline.py: parts noted by events on their streams, which overlap where two channels allow it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    kept = tmp_path / "times.json"
    command = [sys.executable, str(EXAMPLES / "08_timeline.py"), "--device", "cuda", "--json", str(kept)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "The same bits in both orders." in done.stdout
    told = json.loads(kept.read_text())
    assert told["summary"]["in turn"]["experts_while_rows_travel_us"] == 0
    assert told["summary"]["overlapped"]["experts_while_rows_travel_us"] > 0
    assert all(0 <= i["begin"] < i["end"] for i in told["intervals"])
